"""What a run has spent, by its ledger alone: also on another machine than the one that trained."""

from __future__ import annotations

from pathlib import Path

from fedcdp.accounting.belonging import check_ledger
from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import Mode, Privacy, Usage, state
from fedcdp.errors import FedcdpError, RunError
from fedcdp.plan import Plan
from fedcdp.rundir import RunDirectory


def spent(directory: Path | str, mode: Mode = "tight") -> tuple[Plan, Privacy]:
    """The plan of a run, and its privacy statement for the rounds released so far. Refuses the ledger of another run."""
    run = RunDirectory(directory)
    run.require()
    ledger = Ledger.open(run.ledger)
    check_ledger(run, ledger)
    try:
        plan, population = Plan(**ledger.plan), Population.read(ledger.population)
    except (TypeError, FedcdpError) as error:
        raise RunError(f"{run.ledger} holds a plan or population that this program does not know: {error}") from error
    return plan, state(plan, population, mode=mode, rounds=ledger.rounds, usage=usage_of(ledger, population))


def usage_of(ledger: Ledger, population: Population) -> Usage:
    """How often the most-used clients took part: one, or as many as may hold copies of a record."""
    counts = ledger.busiest(population.copies)
    return Usage(ledger.rounds, tuple(int(count) for count in counts))
