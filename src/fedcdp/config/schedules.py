"""Schedules: one value per round, for the clip bound and the learning rates of clients and server.

A schedule is a frozen value with a written form, so configuration files, the command line and Python use the same
notation: `4`, `linear(6, 2)`, `exponential(6, 2)`, `cosine(6, 2)`, `proportional(4)`. A clip bound may also be a
`quantile(0.5, 4)`, whose values are not known before training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypeVar

from fedcdp.config.fields import shown
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
    """A positive value for each round, from `start` in the first round to `end` in the last.

    A `proportional` schedule follows another schedule (a clip bound follows the learning rate): it is `start` times the
    value of the other over the first value of the other.

    `str(schedule)` is the written form that configuration files and the command line use.

    Raises:
        PlanError: A value is not a positive number from 1e-30 to 1e30.

    Examples:
        >>> import fedcdp
        >>> clip = fedcdp.linear(6, 2)
        >>> [clip.value(round_, rounds=5) for round_ in range(5)]
        [6.0, 5.0, 4.0, 3.0, 2.0]
        >>> str(clip)
        'linear(6, 2)'
    """

    kind: Kind
    """The shape of the curve."""
    start: float
    """The value in the first round."""
    end: float
    """The value in the last round."""

    def __post_init__(self) -> None:
        for value in (self.start, self.end):
            _check_number(value)
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"schedule {self}: {_number(value)} is not a positive finite number")
            if not _LEAST <= value <= _MOST:
                raise PlanError(f"schedule {self}: {_number(value)} is not a number from {_LEAST:g} to {_MOST:g}")

    def value(self, round_: int, rounds: int, leader: Schedule | None = None) -> float:
        """The value in one round.

        Args:
            round_: The round, counted from 0.
            rounds: How many rounds there are.
            leader: The schedule that a `proportional` one follows.

        Returns:
            The value.

        Raises:
            PlanError: The schedule is proportional and `leader` is missing, or proportional itself.
        """
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

    The bound begins at `start`. Every round measures, under noise, which share of the norms lay within the bound. The bound
    grows where that share is below `target` and shrinks where it is above. `fedcdp.quantile` makes one.

    Raises:
        PlanError: `target` is not above 0 and below 1, or `start` is not from 1e-30 to 1e30.
    """

    target: float
    """The quantile to follow, above 0 and below 1."""
    start: float
    """The bound in the first round."""

    def __post_init__(self) -> None:
        for value in (self.target, self.start):
            _check_number(value)
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
    """The same value in every round.

    Args:
        value: The value.

    Returns:
        The schedule.

    Raises:
        PlanError: The value is not a positive number from 1e-30 to 1e30.

    Examples:
        >>> import fedcdp
        >>> fedcdp.Plan(clip=fedcdp.constant(3)) == fedcdp.Plan(clip=3)
        True
    """
    return Schedule("constant", value, value)


def linear(start: float, end: float) -> Schedule:
    """A straight line from `start` to `end`. The paper's decay of the clip bound is `linear(6, 2)`.

    Args:
        start: The value in the first round.
        end: The value in the last round.

    Returns:
        The schedule.

    Raises:
        PlanError: A value is not a positive number from 1e-30 to 1e30.

    Examples:
        >>> import fedcdp
        >>> plan = fedcdp.Plan(clip=fedcdp.linear(6, 2), rounds=5)
        >>> [plan.clip_at(round_) for round_ in range(5)]
        [6.0, 5.0, 4.0, 3.0, 2.0]
    """
    return Schedule("linear", start, end)


def exponential(start: float, end: float) -> Schedule:
    """The same factor from each round to the next, from `start` to `end`.

    Args:
        start: The value in the first round.
        end: The value in the last round.

    Returns:
        The schedule.

    Raises:
        PlanError: A value is not a positive number from 1e-30 to 1e30.

    Examples:
        >>> import fedcdp
        >>> plan = fedcdp.Plan(clip=fedcdp.exponential(8, 2), rounds=3)
        >>> [plan.clip_at(round_) for round_ in range(3)]
        [8.0, 4.0, 2.0]
    """
    return Schedule("exponential", start, end)


def cosine(start: float, end: float) -> Schedule:
    """Half a cosine wave from `start` to `end`.

    Args:
        start: The value in the first round.
        end: The value in the last round.

    Returns:
        The schedule.

    Raises:
        PlanError: A value is not a positive number from 1e-30 to 1e30.

    Examples:
        >>> import fedcdp
        >>> plan = fedcdp.Plan(learning_rate=fedcdp.cosine(0.4, 0.1), rounds=5)
        >>> [round(plan.learning_rate_at(round_), 3) for round_ in range(5)]
        [0.4, 0.356, 0.25, 0.144, 0.1]
    """
    return Schedule("cosine", start, end)


def proportional(start: float) -> Schedule:
    """A clip bound that starts at `start` and stays proportional to the learning rate.

    Args:
        start: The bound in the first round.

    Returns:
        The schedule.

    Raises:
        PlanError: The value is not a positive number from 1e-30 to 1e30.

    Examples:
        >>> import fedcdp
        >>> plan = fedcdp.Plan(clip=fedcdp.proportional(4), learning_rate=fedcdp.linear(0.2, 0.1), rounds=3)
        >>> [round(plan.clip_at(round_), 3) for round_ in range(3)]
        [4.0, 3.0, 2.0]
    """
    return Schedule("proportional", start, start)


def quantile(target: float, start: float) -> Quantile:
    """A clip bound that follows a quantile of the norms privately.

    The noise with which the quantile is followed (`quantile_noise`) is accounted.

    Args:
        target: The quantile to follow: 0.5 is the median.
        start: The bound in the first round.

    Returns:
        The bound, for `Plan(clip=...)`. Its values are not known before the training.

    Raises:
        PlanError: `target` is not above 0 and below 1, or `start` is not from 1e-30 to 1e30.

    Examples:
        >>> import fedcdp
        >>> plan = fedcdp.Plan(clip=fedcdp.quantile(0.5, 4))
        >>> plan.clip_at(0)
        4
    """
    return Quantile(target, start)


def _check_number(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise PlanError(f"schedule: {shown(value)} is not a number")


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
        raise PlanError(f"{field}: {shown(value)} is neither a positive number nor one of {forms}") from None
