"""What a run directory tells while a server writes to it: rounds as they are done, and ε so far."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.population import Population
from fedcdp.errors import RunError
from fedcdp.experiment import Experiment
from fedcdp.rundir import Row, RunDirectory
from fedcdp.spending import Budget
from fedcdp.untrusted import MOST_SETTINGS, parse_json, printable, read_bounded


class Follower:
    """Reads a run directory that another process writes to; what is half written is read the next time."""

    def __init__(self, directory: Path, experiment: Experiment) -> None:
        self._run = RunDirectory(directory)
        self._experiment = experiment
        self._told = self.rounds_done()
        self._budget: Budget | None = None

    def rounds_done(self) -> int:
        """Rounds that would not be repeated if the server ended now."""
        return self._run.rounds_done()

    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self._run.model.exists() and self.rounds_done() >= self._experiment.plan.rounds

    def ended(self) -> tuple[str, str] | None:
        """How the server says that the run ended, in a word and in a sentence; None while it has not."""
        try:
            told = parse_json(read_bounded(self._run.path / "outcome.json", MOST_SETTINGS))
            return printable(str(told["ended"])[:100]), printable(str(told["sentence"])[:1000])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def forget_outcome(self) -> None:
        """Before the server goes on: what it said of an earlier end is not said of this one."""
        (self._run.path / "outcome.json").unlink(missing_ok=True)

    def rows(self) -> list[Row]:
        """All rounds so far."""
        try:
            return self._run.read_metrics()
        except RunError:  # replaced at this moment
            return []

    def new_rows(self) -> Iterator[Row]:
        """The rounds that were done since the last time."""
        for row in self.rows():
            if row["round"] > self._told:
                self._told = row["round"]
                yield row

    def epsilon_after(self, rounds: int) -> str:
        """ε so far, for people; nothing until the server has opened its ledger."""
        if self._budget is None:
            try:
                population = Population.read(Ledger.open(self._run.ledger).population)
            except (RunError, TypeError):
                return ""
            self._budget = Budget(self._experiment, population, self._run.ledger)
        return self._budget.shown_after(rounds)
