"""An ε as people read it."""

from __future__ import annotations

import math

import pytest

from fedcdp.accounting.statement import format_epsilon
from fedcdp.report.wording import epsilon

TABLE = {
    0.0: ("0", "0", "0"),
    0.000123456: ("0.0001235", "0.0001235", "0.0001235"),
    1.23456: ("1.235", "1.235", "1.235"),
    999.96: ("1000", "1000", "1000"),
    12345.6: ("1.235e+04", "12346", "12,346"),
    999999.0: ("1e+06", "999999", "999,999"),
    2e6: ("2e+06", "2e+06", "2.0e+06"),
    1.26e7: ("1.26e+07", "1.3e+07", "1.3e+07"),
    math.inf: ("∞", "∞", "∞"),
}


@pytest.mark.parametrize("value", TABLE)
def test_large_numbers_are_written_as_asked(value: float) -> None:
    assert tuple(format_epsilon(value, large=large) for large in ("power", "whole", "grouped")) == TABLE[value]


@pytest.mark.parametrize(("digits", "expected"), [(3, "0.123"), (6, "0.123457")])
def test_as_many_digits_as_asked(digits: int, expected: str) -> None:
    assert format_epsilon(0.1234567, digits) == expected


@pytest.mark.parametrize(("value", "expected"), [(None, "–"), (0.12345, "0.123"), (1234.5, "1,234"), (math.inf, "∞")])
def test_on_the_page_with_three_digits(value: float | None, expected: str) -> None:
    assert epsilon(value) == expected
