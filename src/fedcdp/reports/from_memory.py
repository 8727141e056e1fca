"""Runs and attacks as `simulate` and `attack` return them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.population import Population
from fedcdp.attacks.api import Found
from fedcdp.attacks.leaks import Leaks, finite
from fedcdp.reports.facts import METHOD_NAMES, LeakFacts, RunFacts, leak_facts
from fedcdp.reports.from_disk import NO_ACCOUNTING
from fedcdp.reports.spending import over_releases
from fedcdp.rundir import RunDirectory
from fedcdp.sampling import choose_clients
from fedcdp.simulation import Run
from fedcdp.spending import accounting_is_installed
from fedcdp.tree import Layout


def facts_of_run(run: Run) -> RunFacts:
    """A run, as it is told to the page."""
    name = METHOD_NAMES[run.plan.method] if run.directory is None else run.directory.resolve().name
    settings: dict[str, dict[str, Any]] = {
        "data": {"federation": run.federation.describe()},
        "plan": {key: value for key, value in run.plan.written().items() if value is not None},
    }
    spending = []
    if accounting_is_installed():
        population = Population.of(run.federation, Layout.of(run.model), run.plan)
        spending = over_releases(run.plan, population, _cohorts(run))
    privacy = spending[-1][1] if spending else None
    missing = "" if privacy else "nothing was released" if accounting_is_installed() else NO_ACCOUNTING
    # A run that a budget ended early is finished, too: its model is the one that was asked for.
    return RunFacts(name, run.plan, settings, run.metrics, privacy, missing, spending, True)


def _cohorts(run: Run) -> list[NDArray[np.int64]]:
    """The clients of every release: by the ledger or, of a run in memory, drawn again from the plan."""
    if run.directory is not None:
        return [charge.clients for charge in Ledger.open(RunDirectory(run.directory).ledger).charges]
    return [choose_clients(run.plan, run.federation.clients, round_) for round_ in range(run.releases)]


def facts_of_leak(found: Found, method: str) -> LeakFacts:
    """What an attack found; `method` is the one attacked, where the attack itself does not say it."""
    summary = {"method": method} | finite(found.summary())
    return leak_facts(summary, found.arrays() if isinstance(found, Leaks) else {})
