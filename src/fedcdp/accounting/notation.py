"""How an ε is written for people. Needs no `dp-accounting`."""

from __future__ import annotations

import math
from typing import Literal

VACUOUS = 50.0
"""An ε from here on guarantees nothing in practice, and whoever prints one says so."""


def format_epsilon(epsilon: float, digits: int = 4, large: Literal["power", "whole", "grouped"] = "power") -> str:
    """An ε with so many significant digits; an infinite one is ∞.

    Args:
        epsilon: The ε.
        digits: Significant digits.
        large: How large numbers are written. `power` keeps to `digits`. `whole` and `grouped` write all digits before the
            point from 1000 on, and two digits with a power of ten from a million on.

    | ε | power | whole | grouped |
    | --- | --- | --- | --- |
    | 1.23456 | 1.235 | 1.235 | 1.235 |
    | 12345.6 | 1.235e+04 | 12346 | 12,346 |
    | 2000000 | 2e+06 | 2e+06 | 2.0e+06 |
    """
    if epsilon == math.inf:
        return "∞"
    if large == "power" or epsilon < 1000:
        return f"{epsilon:.{digits}g}"
    if epsilon < 1e6:
        return f"{epsilon:,.0f}" if large == "grouped" else f"{epsilon:.0f}"
    return f"{epsilon:.1e}" if large == "grouped" else f"{epsilon:.2g}"
