"""ε while training: whether a budget allows one more release, and what has been spent so far.

Training does not need dp-accounting; where it is missing, ε is not shown, and a budget is refused.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.population import Population
from fedcdp.errors import PlanError
from fedcdp.experiment import Experiment
from fedcdp.simulation import Run

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Privacy

_SHARE_OF_TIME = 0.05  # of a training that may go into showing ε


def accounting_is_installed() -> bool:
    """Whether ε can be computed on this machine."""
    return importlib.util.find_spec("dp_accounting") is not None


def statement(run: Run) -> Privacy | None:
    """The privacy statement of a run, where it can be computed."""
    return run.privacy() if accounting_is_installed() else None


class Budget:
    """What the plan may spend against the chosen adversary, and how it goes on being spent."""

    def __init__(self, experiment: Experiment, population: Population, ledger: Path | None = None) -> None:
        """With a `ledger`, ε is shown for what it has charged, repeated rounds included."""
        self._experiment, self._population, self._ledger = experiment, population, ledger
        self._latest = ""
        self._started, self._computing = time.perf_counter(), 0.0
        self._most_rounds: int | None = None
        if not accounting_is_installed():
            if experiment.run.max_epsilon is not None:
                raise PlanError("max_epsilon: needs dp-accounting; install it with pip install dp-accounting")
            return
        from fedcdp.accounting.calibrate import Target, rounds_within

        limit, plan = experiment.run.max_epsilon, experiment.plan
        self._target = Target(1.0 if limit is None else limit, experiment.run.adversary, experiment.run.unit)
        if limit is not None:
            self._most_rounds = rounds_within(plan, population, self._target)
            if self._most_rounds == 0:
                raise PlanError(f"max_epsilon: {limit:g} is exceeded by the very first round; take more noise")

    def allows(self, rounds: tuple[int, ...]) -> bool:
        """Whether releases of these rounds, repeats included, keep within the limit, where there is one."""
        if self._most_rounds is None:
            return True
        plan = self._experiment.plan
        planned = rounds == tuple(range(len(rounds)))
        if planned or plan.noise_follows_clip:  # none is a repeat, or each costs the same
            if len(rounds) <= self._most_rounds:
                return True
            if self._most_rounds < plan.rounds:
                return False
        return self._target.reached(plan, self._population, rounds) <= self._target.epsilon

    def shown_after(self, rounds: int) -> str:
        """ε so far, for people; computed only as often as it costs little beside the training."""
        if not (accounting_is_installed() and self._experiment.plan.private):
            return ""
        started = time.perf_counter()
        if self._computing <= _SHARE_OF_TIME * (started - self._started) or rounds == self._experiment.plan.rounds:
            released = Ledger.open(self._ledger).rounds if self._ledger and self._ledger.exists() else rounds
            epsilon = self._target.reached(self._experiment.plan, self._population, released)
            self._latest = f"ε {epsilon:.3g} ({self._target.adversary}, round {rounds})"
            self._computing += time.perf_counter() - started
        return self._latest
