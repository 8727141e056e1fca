"""Seeds of a test: the first one in the quick tests, the others in the slow ones."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(count: int) -> list[Any]:
    """The seeds 0, 1, …, of which all but the first are marked slow."""
    return [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, count))]
