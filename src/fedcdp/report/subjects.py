"""What is compared: every run with the attacks on it, and every method that was attacked without a run."""

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
    """What one adversary reconstructed of one subject, and the row of the privacy statement that bounds it."""

    leak: str
    verdict: Verdict
    row: Row | None

    @property
    def epsilon(self) -> float | None:
        """ε spent against this adversary."""
        return spent(self.row)


@dataclass(frozen=True, eq=False)
class Subject:
    """A row of every table and a line of every chart."""

    name: str
    method: str
    run: RunFacts | None
    leaks: list[LeakFacts]
    style: str = ""
    """Its colour and dashes on the page. Runs of the same method share a colour."""
    mark: int = 0
    """The number of its mark in charts."""

    @property
    def cells(self) -> list[TableCell]:
        """One for each adversary."""
        return [
            TableCell(leak, verdict([each for each in self.leaks if each.leak == leak]), self.row(ADVERSARY_OF[leak]))
            for leak in READER_TYPES
        ]

    @property
    def result(self) -> tuple[str, float] | None:
        """The main metric of the run, and its value."""
        return None if self.run is None else self.run.result

    @property
    def model_epsilon(self) -> float | None:
        """ε spent on a record against anyone who sees only the model."""
        return spent(self.row("model"))

    @property
    def client_epsilon(self) -> float | None:
        """ε spent on a whole client against anyone who sees only the model; None where the statement has no such row."""
        return spent(self.row("model", "client"))

    def row(self, adversary: str, unit: str = "record") -> Row | None:
        """The statement's row for an adversary and a unit, where there is one."""
        rows = () if self.run is None or self.run.privacy is None else self.run.privacy.rows
        wanted = (adversary, unit, "zero-out")
        return next((row for row in rows if (row.adversary, row.unit, row.relation) == wanted), None)

    @property
    def network(self) -> str | None:
        """The network that the run trained, where its configuration names it."""
        return None if self.run is None else self.run.network

    @property
    def attacked_networks(self) -> tuple[str, ...]:
        """The networks that the attacks are on, as far as they are named."""
        return tuple(dict.fromkeys(leak.network for leak in self.leaks if leak.network))

    @property
    def elsewhere(self) -> list[LeakFacts]:
        """The attacks on another network than the one that the run trained."""
        return [leak for leak in self.leaks if self.network and leak.network and leak.network != self.network]


def subjects_of(runs: Sequence[RunFacts], leaks: Sequence[LeakFacts]) -> list[Subject]:
    """Runs in the given order, then methods without a run. An attack without a run belongs to the only run of its method."""
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
    """ε of the most-used client by the ledger; the plan's ε if the ledger has counted nothing yet."""
    if row is None:
        return None
    return row.epsilon if row.epsilon_used is None else row.epsilon_used


def _styled(subjects: Sequence[Subject]) -> list[Subject]:
    styled, seen = [], dict[str, int]()
    for number, subject in enumerate(subjects):
        colour = subject.method if subject.method in _COLOURED else "other"
        styled.append(replace(subject, style=f"m-{colour} d{seen.get(colour, 0) % _DASHES}", mark=number))
        seen[colour] = seen.get(colour, 0) + 1
    return styled
