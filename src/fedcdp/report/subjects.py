"""Who is compared: every run with the attacks on it, and every method that was attacked without a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedcdp.report.facts import ADVERSARY_OF, LeakFacts, RunFacts
from fedcdp.report.wording import Verdict, method_name, verdict

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Row


READER_TYPES = ("type2", "type1", "type0")
_COLOURED = ("nonprivate", "fed-sdp", "fed-cdp", "fed-cdp-decay")
_DASHES = 3


@dataclass(frozen=True)
class TableCell:
    """What one reader got of one subject, and the row of the privacy statement that bounds it."""

    leak: str
    verdict: Verdict
    row: Row | None

    @property
    def epsilon(self) -> float | None:
        """What was spent against this reader."""
        return spent(self.row)


@dataclass(frozen=True, eq=False)
class Subject:
    """A line of every table and chart."""

    name: str
    method: str
    run: RunFacts | None
    leaks: list[LeakFacts]
    style: str = ""
    """Its colour and dashes on the page: runs of the same method share a colour."""

    @property
    def cells(self) -> list[TableCell]:
        """One for each type of reader."""
        return [
            TableCell(leak, verdict([each for each in self.leaks if each.leak == leak]), self.row(ADVERSARY_OF[leak]))
            for leak in READER_TYPES
        ]

    @property
    def model_epsilon(self) -> float | None:
        """What was spent against whoever sees only the model."""
        return spent(self.row("model"))

    def row(self, adversary: str) -> Row | None:
        """The statement's row about a record, where there is a statement."""
        return None if self.run is None or self.run.privacy is None else self.run.privacy.row(adversary)


def subjects_of(runs: Sequence[RunFacts], leaks: Sequence[LeakFacts]) -> list[Subject]:
    """Runs in their order, then methods without a run. An attack without a run goes to the only run of its method."""
    names = [method_name(run.plan.method) for run in runs]
    subjects, told = [], set()
    for run, name in zip(runs, names, strict=True):
        alone = names.count(name) == 1
        mine = [
            leak for leak in leaks if leak.run == run.name or (alone and leak.run is None and leak.method == run.plan.method)
        ]
        told |= set(map(id, mine))
        subjects.append(Subject(name if alone else f"{name}, {run.name}", run.plan.method, run, mine))
    others = [leak for leak in leaks if id(leak) not in told]
    for method in dict.fromkeys(leak.method for leak in others):
        subjects.append(Subject(method_name(method), method, None, [leak for leak in others if leak.method == method]))
    return _styled(subjects)


def spent(row: Row | None) -> float | None:
    """ε of the most-used client, by the ledger; before that has counted anything, what it will be."""
    if row is None:
        return None
    return row.epsilon if row.epsilon_used is None else row.epsilon_used


def _styled(subjects: Sequence[Subject]) -> list[Subject]:
    styled, seen = [], dict[str, int]()
    for subject in subjects:
        colour = subject.method if subject.method in _COLOURED else "other"
        styled.append(replace(subject, style=f"m-{colour} d{seen.get(colour, 0) % _DASHES}"))
        seen[colour] = seen.get(colour, 0) + 1
    return styled
