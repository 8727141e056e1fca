"""A task for a small network, as a server publishes it."""

from __future__ import annotations

from typing import Any

from fedcdp.config.plan import Plan
from fedcdp.deploy.protocol.task import Task

TENSORS = {"0.weight": (4, 3), "0.bias": (4,), "2.weight": (2, 4)}


def task(*, run: str = "0" * 32, reproducible: bool = False, network: str = "mlp", cohort: int = 2, **plan: Any) -> Task:
    """A task for `TENSORS`; `plan` changes its plan."""
    usual = {"rounds": 10, "per_round": 4, "local_steps": 5, "batch_size": 5, "secure_noise": not reproducible}
    written = Plan(**usual | plan)
    return Task(run=run, shape=(3,), classes=2, network=network, activation=None, tensors=TENSORS, constants="",
                plan=written, smallest_cohort=cohort, reproducible=reproducible)  # fmt: skip
