"""Schedules: one value per round, for the clip bound and the learning rate.

A schedule is a frozen value with a written form, so that a configuration file, the command line and Python say the same
thing: `4`, `linear(6, 2)`, `exponential(6, 2)`, `cosine(6, 2)`, `proportional(4)`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fedcdp.errors import PlanError

Kind = Literal["constant", "linear", "exponential", "cosine", "proportional"]

# How far the value has travelled from start to end after a fraction `x` of the rounds.
_SHAPES: dict[str, Callable[[float, float, float], float]] = {
    "constant": lambda start, end, x: start,  # noqa: ARG005
    "linear": lambda start, end, x: (1 - x) * start + x * end,
    "exponential": lambda start, end, x: start * (end / start) ** x,
    "cosine": lambda start, end, x: end + (start - end) * (1 + math.cos(math.pi * x)) / 2,
}


@dataclass(frozen=True)
class Schedule:
    """A positive value that moves from `start` in the first round to `end` in the last.

    A `proportional` schedule follows another one (a clip bound follows the learning rate): `start` times that one's
    value over its first value.
    """

    kind: Kind
    start: float
    end: float

    def __post_init__(self) -> None:
        for value in (self.start, self.end):
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"schedule {self}: {_number(value)} is not a positive finite number")

    def value(self, round_: int, rounds: int, leader: Schedule | None = None) -> float:
        """The value in round `round_` (counted from 0) of `rounds`."""
        if self.kind == "proportional":
            if leader is None or leader.kind == "proportional":
                raise PlanError(f"schedule {self}: only a clip bound can be proportional, to the learning rate")
            return self.start * leader.value(round_, rounds) / leader.start
        progress = round_ / (rounds - 1) if rounds > 1 else 0.0
        return _SHAPES[self.kind](self.start, self.end, progress)

    def __str__(self) -> str:
        start, end = _number(self.start), _number(self.end)
        if self.kind == "constant":
            return start
        return f"proportional({start})" if self.kind == "proportional" else f"{self.kind}({start}, {end})"


def _number(value: float) -> str:
    # Every digit counts: a configuration file must give the same schedule back.
    return repr(value).removesuffix(".0")


def constant(value: float) -> Schedule:
    """The same value in every round."""
    return Schedule("constant", value, value)


def linear(start: float, end: float) -> Schedule:
    """A straight line from `start` to `end` over the run (the paper's decay of the clip bound is `linear(6, 2)`)."""
    return Schedule("linear", start, end)


def exponential(start: float, end: float) -> Schedule:
    """The same factor in every round, from `start` to `end`."""
    return Schedule("exponential", start, end)


def cosine(start: float, end: float) -> Schedule:
    """Half a cosine wave from `start` to `end`."""
    return Schedule("cosine", start, end)


def proportional(start: float) -> Schedule:
    """A clip bound that starts at `start` and shrinks as the learning rate does."""
    return Schedule("proportional", start, start)


_MAKERS: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "linear": linear,
    "exponential": exponential,
    "cosine": cosine,
    "proportional": proportional,
}
_WRITTEN = re.compile(r"\s*([a-z]+)\s*\(([^()]*)\)\s*")


def as_schedule(value: Schedule | float | str, field: str) -> Schedule:
    """Read a schedule from a number or its written form; `field` is named if that fails."""
    if isinstance(value, Schedule):
        return value
    try:
        if isinstance(value, str) and (written := _WRITTEN.fullmatch(value)):
            return _MAKERS[written[1]](*(float(part) for part in written[2].split(",")))
        if isinstance(value, bool):
            raise TypeError
        return constant(float(value))
    except PlanError as error:
        raise PlanError(f"{field}: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError):
        raise PlanError(
            f"{field}: {value!r} is neither a positive number nor one of "
            "linear(start, end), exponential(start, end), cosine(start, end), proportional(start)"
        ) from None
