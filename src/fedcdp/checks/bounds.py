"""The numbers that settings may have: a wrong one is refused in a sentence."""

from __future__ import annotations

import math

from fedcdp.errors import PlanError


def require_number(name: str, value: object, *, low: float, high: float = math.inf, above: bool = False) -> None:
    """Raise unless a value is a number from `low` to `high`; with `above`, larger than `low`."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if math.isfinite(number) and low <= number <= high and not (above and number == low):
        return
    least = f"above {low:g}" if above else f"at least {low:g}"
    most = "" if high == math.inf else f" and at most {high:g}"
    raise PlanError(f"{name}: {str(value)[:40]} is not allowed; it must be a number {least}{most}")


def require_noise(value: object) -> None:
    """Raise unless a value is a noise multiplier: 0, or a number that ε can be computed for."""
    if value != 0 or isinstance(value, bool):
        require_number("noise_multiplier", value, low=1e-3, high=1e6)


def require_delta(value: object) -> None:
    """Raise unless a value is a δ."""
    require_number("delta", value, low=1e-30, high=0.99)


def require_count(name: str, value: object, most: int = 10**9) -> None:
    """Raise unless a value is a whole number of at least 1, small enough to be computed with."""
    if type(value) is not int or not 1 <= value <= most:
        raise PlanError(f"{name}: {str(value)[:40]} is not allowed; it must be a whole number from 1 to {most:,}")
