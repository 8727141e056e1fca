"""A demo that takes seconds: fewer clients, rounds, victims and iterations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fedcdp.studies.demo import Attack, Show

SMALLER: dict[str, dict[str, Any]] = {
    "data": {"clients": 4, "records": 40},
    "plan": {"rounds": 3, "per_round": 4, "local_steps": 2},
    "run": {"evaluate_every": 1},
}
FEWER = (
    Attack("type2", "clip-aware", victims=2, iterations=12),
    Attack("type1", "batch", victims=1, iterations=3),
    Attack("type0", "batch", victims=1, iterations=3),
)


def _silence(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


SILENT = Show(_silence, _silence)
