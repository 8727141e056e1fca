"""Runs and attacks as `simulate` and `attack` return them."""

from __future__ import annotations

from typing import Any

from fedcdp.accounting.population import Population
from fedcdp.attacks.api import Found
from fedcdp.attacks.leaks import Leaks, finite
from fedcdp.reports.facts import METHOD_NAMES, LeakFacts, RunFacts, leak_facts
from fedcdp.reports.from_disk import NO_ACCOUNTING
from fedcdp.reports.spending import over_releases
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
        spending = over_releases(run.plan, population, run.charges)
    privacy = spending[-1][1] if spending else None
    missing = "" if privacy else "nothing was released" if accounting_is_installed() else NO_ACCOUNTING
    # A run that a budget ended early is finished, too: its model is the one that was asked for.
    return RunFacts(name, run.plan, settings, run.metrics, privacy, missing, spending, True)


def facts_of_leak(found: Found, method: str) -> LeakFacts:
    """What an attack found; `method` is the one attacked, where the attack itself does not say it."""
    summary = {"method": method} | finite(found.summary())
    return leak_facts(summary, found.arrays() if isinstance(found, Leaks) else {})
