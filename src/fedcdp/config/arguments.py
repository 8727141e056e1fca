"""Arguments of public functions: one of the wrong type is refused in a sentence, before anything is computed."""

from __future__ import annotations

import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from fedcdp.config.fields import shown
from fedcdp.errors import FedcdpError, ModelError, PlanError

_WORDS = {
    int: "a whole number", float: "a number", bool: "True or False", str: "a string", type(None): "None",
    Mapping: "a dictionary", Sequence: "a list", Iterable: "a list", Callable: "a function", tuple: "a tuple",
    dict: "a dictionary", list: "a list",
}  # fmt: skip
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def checked(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Refuse arguments whose types the annotations exclude; NumPy's numbers become Python's.

    Only the outermost type is compared. Elements of a list, the names in a `Literal` and numbers that are not finite are
    left to the function, which has a message of its own for them.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def wrapper(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        given = signature.bind(*args, **kwargs)
        kinds = _kinds(function)
        for name, value in given.arguments.items():
            if name in kinds:
                given.arguments[name] = _plain(name, value, kinds[name])
        return function(*given.args, **given.kwargs)

    return wrapper


@cache
def _kinds(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """The types that each parameter allows; a parameter that allows anything is left out."""
    found = {}
    for name, hint in get_type_hints(function).items():
        kinds = tuple(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if name != "return" and Any not in kinds:
            found[name] = tuple(part for kind in kinds for part in _flat(kind))
    return found


def _flat(kind: Any) -> Iterable[Any]:
    """The classes that a type means to `isinstance`, of its parts if it is a union."""
    kind = type(None) if kind is None else kind
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return [part for each in get_args(kind) for part in _flat(each)]
    return [str] if origin is Literal else [origin or kind]


def _plain(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    seed = name.endswith("seed") and type(value) is int  # of any size
    if any(_fits(value, kind) for kind in kinds) or (seed and int in kinds):
        return list(value) if isinstance(value, np.ndarray) and value.ndim else value
    module = any(getattr(kind, "__name__", "") == "Module" for kind in kinds)
    error: type[FedcdpError] = ModelError if module else PlanError
    wanted = " or ".join(dict.fromkeys(_WORDS.get(kind, _called(kind)) for kind in kinds))
    told = shown(value) if isinstance(value, str | int | float | None) else f"an object of type {type(value).__name__}"
    raise error(f"{name}: {told} is not {wanted}")  # a container may hold records, so its content is not quoted


def _called(kind: Any) -> str:
    return "a path" if isinstance(kind, type) and issubclass(kind, os.PathLike) else f"a {kind.__name__}"


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is int:
        return isinstance(value, Integral) and -(2**64) < int(value) < 2**64
    if kind is float:
        return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
    if kind is str or (isinstance(kind, type) and issubclass(kind, os.PathLike)):
        return isinstance(value, kind) and "\0" not in str(value)
    if kind is Callable:
        return callable(value)
    if kind in (Sequence, tuple):
        return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
    if kind is Iterable:
        return isinstance(value, Iterable) and not isinstance(value, str | bytes)
    return isinstance(value, kind)
