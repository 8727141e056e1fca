"""The privacy statement: ε against every adversary, with what it rests on, for people and for programs.

Only computing an ε needs dp-accounting; it is imported there.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fedcdp.accounting.adversaries import View, noise_multipliers
from fedcdp.accounting.mechanisms import Release
from fedcdp.accounting.population import Population
from fedcdp.accounting.views import views
from fedcdp.config.plan import Plan
from fedcdp.errors import PlanError

Mode = Literal["tight", "rdp", "paper"]

VACUOUS = 50.0
"""An ε from here on guarantees nothing in practice, and whoever prints one says so."""


def format_epsilon(epsilon: float, digits: int = 4, large: Literal["power", "whole", "grouped"] = "power") -> str:
    """An ε with so many significant digits; an infinite one is ∞.

    Args:
        epsilon: The ε.
        digits: Significant digits.
        large: How large numbers are written. `power` keeps to `digits`. `whole` and `grouped` write all digits before the
            point from 1000 on, and two digits with a power of ten from a million on.

    | ε | power | whole | grouped |
    | --- | --- | --- | --- |
    | 1.23456 | 1.235 | 1.235 | 1.235 |
    | 12345.6 | 1.235e+04 | 12346 | 12,346 |
    | 2000000 | 2e+06 | 2e+06 | 2.0e+06 |
    """
    if epsilon == math.inf:
        return "∞"
    if large == "power" or epsilon < 1000:
        return f"{epsilon:.{digits}g}"
    if epsilon < 1e6:
        return f"{epsilon:,.0f}" if large == "grouped" else f"{epsilon:.0f}"
    return f"{epsilon:.1e}" if large == "grouped" else f"{epsilon:.2g}"


@dataclass(frozen=True)
class Usage:
    """What a ledger has counted so far."""

    rounds: tuple[int, ...]
    """Every round that was released; one that was released twice stands here twice."""
    participations: tuple[int, ...]
    """How often the most-used clients took part, descending."""


@dataclass(frozen=True)
class Row:
    """One ε, with its adversary, its unit, its neighbouring relation and the assumption that it rests on."""

    adversary: str
    """Who reads: `server`, `update`, `model` or `example`."""
    unit: str
    """What is protected: a `record`, a `client`, or a record at several clients (`unique`)."""
    relation: str
    """How neighbouring datasets differ: `zero-out` or `replace-one`."""
    epsilon: float
    """Before it is known who takes part in which round."""
    epsilon_used: float | None
    """Of the most-used client so far."""
    epsilon_worst: float
    """Of a client that takes part in every round."""
    assumption: str
    """What the ε rests on."""

    def as_json(self) -> dict[str, Any]:
        """The row for programs: an infinite ε is written as a word, since JSON has no number for it."""
        return {name: "inf" if value == math.inf else value for name, value in vars(self).items()}


@dataclass(frozen=True)
class Privacy:
    """What a plan guarantees against whom: one row for each adversary, unit and relation, all at the same δ.

    Prints as a table, with what each row rests on.
    """

    delta: float
    """The δ of every row."""
    mode: Mode
    """How ε was computed."""
    rows: tuple[Row, ...]
    """One for each adversary, unit and relation."""
    notes: tuple[str, ...] = ()
    """Remarks that concern several rows."""

    def row(self, adversary: str, unit: str = "record", relation: str = "zero-out") -> Row:
        """The row of an adversary, a unit and a relation; a `PlanError` names those that there are."""
        for row in self.rows:
            if (row.adversary, row.unit, row.relation) == (adversary, unit, relation):
                return row
        known = ", ".join(f"{row.adversary}/{row.unit}/{row.relation}" for row in self.rows)
        raise PlanError(f"there is no row {adversary}/{unit}/{relation}; there are {known}")

    def as_json(self) -> dict[str, Any]:
        """The statement for programs (a contract: these keys stay)."""
        return {"delta": self.delta, "mode": self.mode, "rows": [row.as_json() for row in self.rows]}

    def cells(self) -> list[tuple[str, ...]]:
        """The table's cells, as texts."""
        cells = []
        for row in self.rows:
            epsilons = (row.epsilon, row.epsilon_used, row.epsilon_worst)
            shown = ("-" if each is None else format_epsilon(each, large="whole") for each in epsilons)
            cells.append((row.adversary, row.unit, row.relation, *shown, row.assumption))
        return cells

    HEADINGS = ("adversary", "unit", "relation", "ε", "ε used", "ε worst", "it rests on")

    def __str__(self) -> str:
        lines = [self.HEADINGS, *self.cells()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.HEADINGS) - 1)]
        table = ["  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]]) for line in lines]
        return "\n".join([f"ε at δ = {self.delta:g} ({self.mode})", *table, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in self.HEADINGS)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in line) + "</tr>" for line in self.cells())
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<p>ε at δ = {self.delta:g} ({self.mode})</p><table><tr>{head}</tr>{body}</table>{notes}"


def state(
    plan: Plan,
    population: Population,
    *,
    mode: Mode = "tight",
    rounds: int | Sequence[int] | None = None,
    usage: Usage | None = None,
) -> Privacy:
    """The privacy statement of a plan: for all its rounds, the first `rounds`, or the rounds that are listed.

    With a ledger's `usage`, also what the most-used client has spent so far.
    """
    if mode not in get_args(Mode):
        raise PlanError(f"mode: {mode!r} is not one of {', '.join(get_args(Mode))}")
    if mode == "paper":
        return _as_printed(plan)
    rows = tuple(_row(view, plan, population, mode, rounds, usage) for view in views(plan, population))
    return Privacy(plan.delta, mode, rows, _notes(plan, population, rows))


def epsilon_after(view: View, plan: Plan, rounds: int | Sequence[int], mode: Mode = "tight") -> float:
    """The ε of a row after these rounds, before it is known who takes part in them."""
    multipliers = noise_multipliers(plan, rounds)
    return _epsilon(view, lambda row: row.before(multipliers), plan.delta, mode)


def _epsilon(view: View, release: Callable[[View], Release], delta: float, mode: Mode) -> float:
    """The ε of a row: for each client size the smallest that holds, and of all sizes the largest."""
    from fedcdp.accounting import pld, rdp

    epsilon = pld.epsilon if mode == "tight" else rdp.epsilon
    of_sizes = []
    for row in (view, *view.others):
        rows = [row] if row.fallback is None else [row, row.fallback]
        of_sizes.append(min(epsilon(release(each), delta) for each in rows))
    return max(of_sizes)


def _row(
    view: View,
    plan: Plan,
    population: Population,
    mode: Mode,
    rounds: int | Sequence[int] | None,
    usage: Usage | None,
) -> Row:
    multipliers = noise_multipliers(plan, rounds)
    worst = _epsilon(view, lambda row: row.worst(multipliers), plan.delta, mode)
    used = None
    if usage is not None:
        charged = noise_multipliers(plan, usage.rounds)
        participations = sum(usage.participations[: population.copies if view.unit == "unique" else 1])
        most = _epsilon(view, lambda row: row.worst(charged), plan.delta, mode)
        used = min(most, _epsilon(view, lambda row: row.used(charged, participations), plan.delta, mode))
    # To take part in every round is the worst that can happen, so its ε holds for anything else, too.
    before = _epsilon(view, lambda row: row.before(multipliers), plan.delta, mode)
    return Row(view.adversary, view.unit, view.relation, min(worst, before), used, worst, view.assumption)


def _as_printed(plan: Plan) -> Privacy:
    units = {"fed-sdp": ["client"], "fed-cdp": ["record", "client"], "fed-cdp-decay": ["record", "client"]}.get(
        plan.method, []
    )
    from fedcdp.accounting import paper

    epsilon = paper.printed_epsilon(plan) if units else math.inf
    rows = [Row("model", unit, "zero-out", epsilon, None, epsilon, paper.BANNER) for unit in units]
    if not units:
        rows = [Row("model", "record", "zero-out", math.inf, None, math.inf, "the paper prints no ε for this method")]
    return Privacy(plan.delta, "paper", tuple(rows), (paper.BANNER,))


def _notes(plan: Plan, population: Population, rows: tuple[Row, ...]) -> tuple[str, ...]:
    notes = []
    if population.layers > 1 and plan.private:
        notes.append(f"{population.layers} layers clipped at C each move together by C·√{population.layers}")
    if population.copies > 1:
        notes.append(f"a record may lie at {population.copies} clients: the row `unique` is that of the person behind it")
    records = population.clients * population.records // population.copies
    if plan.private and plan.delta * records >= 1:
        notes.append(
            f"δ = {plan.delta:g} is not below one in the number of records ({records:,}): a method that publishes a record "
            "outright could keep such a promise"
        )
    if any(VACUOUS <= row.epsilon < math.inf for row in rows):
        notes.append(f"an ε above {VACUOUS:g} is no protection at all")
    if plan.private and plan.compression:
        notes.append("pruning comes after the noise and costs nothing; other clients' noise is not credited beside it")
    return tuple(notes)
