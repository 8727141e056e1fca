"""Schedules: one value per round, for the clip bound and the learning rate.

A schedule is a frozen value with a written form, so configuration files, the command line and Python use the same
notation: `4`, `linear(6, 2)`, `exponential(6, 2)`, `cosine(6, 2)`, `proportional(4)`. A clip bound may also be a
`quantile(0.5, 4)`, whose values are not known before training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from fedcdp.errors import PlanError

Kind = Literal["constant", "linear", "exponential", "cosine", "proportional"]
_Made = TypeVar("_Made")

_LEAST, _MOST = 1e-30, 1e30  # bounds and learning rates apply to float32 tensors

# The value between start and end after a fraction `x` of the rounds.
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
            if not _LEAST <= value <= _MOST:
                raise PlanError(f"schedule {self}: {_number(value)} is not a number from {_LEAST:g} to {_MOST:g}")

    def value(self, round_: int, rounds: int, leader: Schedule | None = None) -> float:
        """The value in round `round_` (counted from 0) of `rounds`."""
        if self.kind == "proportional":
            if leader is None or leader.kind == "proportional":
                raise PlanError(f"schedule {self}: only a clip bound can be proportional (to the learning rate)")
            return self.start * leader.value(round_, rounds) / leader.start
        progress = round_ / (rounds - 1) if rounds > 1 else 0.0
        return _SHAPES[self.kind](self.start, self.end, progress)

    def __str__(self) -> str:
        start, end = _number(self.start), _number(self.end)
        if self.kind == "constant":
            return start
        return f"proportional({start})" if self.kind == "proportional" else f"{self.kind}({start}, {end})"


@dataclass(frozen=True)
class Quantile:
    """A clip bound that follows a quantile of the norms that it clips (Andrew et al., NeurIPS 2021).

    The bound begins at `start`. Every round releases, under noise, the share of norms within the bound. The bound grows
    when that share is below `target` and shrinks when it is above.
    """

    target: float
    start: float

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise PlanError(f"{self}: {_number(self.target)} is not a quantile above 0 and below 1")
        if not _LEAST <= self.start <= _MOST:
            raise PlanError(f"{self}: {_number(self.start)} is not a bound from 1e-30 to 1e30")

    def moved(self, bound: float, within: float, rate: float) -> float:
        """The bound of the next round: C · exp(−rate · (within − target)), between 1e-6 and 1e6 times `start`."""
        exponent = min(max(-rate * (within - self.target), -100.0), 100.0)
        return min(max(bound * math.exp(exponent), self.start * 1e-6), self.start * 1e6)

    def __str__(self) -> str:
        return f"quantile({_number(self.target)}, {_number(self.start)})"


def _number(value: float) -> str:
    # All digits: reading a configuration file back must give the same schedule.
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


def quantile(target: float, start: float) -> Quantile:
    """A clip bound that starts at `start` and follows the `target` quantile of the norms, privately (0.5: the median)."""
    return Quantile(target, start)


_MAKERS: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "linear": linear,
    "exponential": exponential,
    "cosine": cosine,
    "proportional": proportional,
}
_FORMS = "linear(start, end), exponential(start, end), cosine(start, end), proportional(start)"
_WRITTEN = re.compile(r"\s*([a-z]+)\s*\(([^()]*)\)\s*")
_MEDIAN = re.compile(r"\s*median\s*(\(.*\))?\s*")


def as_bound(value: Schedule | Quantile | float | str, field: str) -> Schedule | Quantile:
    """Read a clip bound: a schedule or a quantile to follow."""
    if isinstance(value, Quantile):
        return value
    if isinstance(value, str) and _MEDIAN.fullmatch(value):
        raise PlanError(
            f"{field}: the median norm is computed from the data and leaks through the bound, so no finite ε holds; "
            "use quantile(0.5, 4), which starts at 4 and follows the median privately"
        )
    return _read(value, field, {**_MAKERS, "quantile": quantile}, f"{_FORMS}, quantile(target, start)")


def as_schedule(value: Schedule | float | str, field: str) -> Schedule:
    """Read a schedule from a number or its written form; the error names `field`."""
    return _read(value, field, _MAKERS, _FORMS)


def _read(
    value: Schedule | float | str, field: str, makers: Mapping[str, Callable[..., _Made]], forms: str
) -> _Made | Schedule:
    if isinstance(value, Schedule):
        return value
    try:
        if isinstance(value, str) and (written := _WRITTEN.fullmatch(value)):
            return makers[written[1]](*(float(part) for part in written[2].split(",")))
        if isinstance(value, bool):
            raise TypeError
        return constant(float(value))
    except PlanError as error:
        raise PlanError(f"{field}: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError):
        raise PlanError(f"{field}: {value!r} is neither a positive number nor one of {forms}") from None
