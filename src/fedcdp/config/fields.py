"""Settings: fields of frozen dataclasses that carry their own help text and check their own types.

The command line and the configuration file are both generated from them, so a name, its type and its help are written
once.
"""

from __future__ import annotations

import math
import sys
import types
from dataclasses import field, fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from fedcdp.errors import PlanError

_LONGEST = 200  # characters of a value that an error message shows
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def option(default: Any, help_: str) -> Any:
    """A dataclass field that the command line offers as an option with this help text."""
    return field(default=default, metadata={"help": help_})


@cache
def types_of(kind: Any) -> dict[str, Any]:
    """The type of each field; for `X | None`, the X."""
    return {name: _without_none(hint) for name, hint in get_type_hints(kind).items()}


def check_types(settings: Any) -> None:
    """Refuse a value of the wrong type in one sentence. An int given for a float field becomes a float."""
    kind: Any = type(settings)
    for setting in fields(settings):
        name, value, wanted = setting.name, getattr(settings, setting.name), types_of(kind)[setting.name]
        if isinstance(value, np.generic):
            value = value.item()
            object.__setattr__(settings, name, value)
        if value is None and setting.default is None:
            continue
        if get_origin(wanted) is Literal:
            if not isinstance(value, str) or value not in get_args(wanted):
                raise PlanError(f"{name}: {shown(value)} is not one of {', '.join(get_args(wanted))}")
        elif wanted is float and type(value) is int and abs(value) <= sys.float_info.max:
            object.__setattr__(settings, name, float(value))
        elif wanted in _WORDS and type(value) is not wanted:
            raise PlanError(f"{name}: {shown(value)} is not {_WORDS[wanted]}")
        elif wanted is float and not math.isfinite(value):
            raise PlanError(f"{name}: {value} is not a finite number")


def shown(value: object) -> str:
    """A value as an error message shows it, in one line.

    One from a file may be arbitrarily long, or nested too deeply for `repr`.
    """
    try:
        text = " ".join(repr(value).split())
    except (RecursionError, ValueError):
        return "the given value"
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return next(part for part in get_args(hint) if part is not type(None))
    return hint
