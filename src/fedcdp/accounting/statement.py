"""The privacy statement: ε against every adversary, with its assumptions, for people and for programs.

Only computing an ε needs dp-accounting, which is imported there.
"""

from __future__ import annotations

import html
import math
import textwrap
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
"""An ε of this size or more guarantees nothing in practice; every output that prints one says so."""


def format_epsilon(epsilon: float, digits: int = 4, large: Literal["power", "whole", "grouped"] = "power") -> str:
    """An ε with `digits` significant digits; an infinite ε is ∞.

    Args:
        epsilon: The ε.
        digits: Significant digits.
        large: How large numbers are written. `power` uses `digits` throughout. `whole` and `grouped` write all digits before
            the point from 1000 on, and two digits with a power of ten from a million on.

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
    """The releases that a ledger has counted so far."""

    rounds: tuple[int, ...]
    """Every round that was released; a round that was released twice is listed twice."""
    participations: tuple[int, ...]
    """How often the most-used clients took part, descending."""


@dataclass(frozen=True)
class Row:
    """One ε, with its adversary, unit, neighbouring relation and assumption."""

    adversary: str
    """Who reads: `server`, `update`, `model` or `example`."""
    unit: str
    """What is protected: a `record`, a `client`, or a record at several clients (`unique`)."""
    relation: str
    """How neighbouring datasets differ: `zero-out` or `replace-one`."""
    epsilon: float
    """ε before it is known who takes part in which round."""
    epsilon_used: float | None
    """ε spent so far by the most-used client."""
    epsilon_worst: float
    """ε of a client that takes part in every round."""
    assumption: str
    """What the ε rests on."""

    def as_json(self) -> dict[str, Any]:
        """The row for programs: an infinite ε is written as "inf", since JSON has no number for it."""
        return {name: "inf" if value == math.inf else value for name, value in vars(self).items()}


@dataclass(frozen=True)
class Privacy:
    """What a plan guarantees: one row for each adversary, unit and relation, all at the same δ.

    Prints as a table with the assumption of each row.
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
        """The row for an adversary, unit and relation; if there is none, a `PlanError` lists the rows that exist."""
        for row in self.rows:
            if (row.adversary, row.unit, row.relation) == (adversary, unit, relation):
                return row
        known = ", ".join(f"{row.adversary}/{row.unit}/{row.relation}" for row in self.rows)
        raise PlanError(f"there is no row {adversary}/{unit}/{relation}; there are {known}")

    def as_json(self) -> dict[str, Any]:
        """The statement for programs (a contract: these keys stay)."""
        return {"delta": self.delta, "mode": self.mode, "rows": [row.as_json() for row in self.rows]}

    def cells(self) -> list[tuple[str, ...]]:
        """The table's cells, as strings."""
        cells = []
        for row in self.rows:
            epsilons = (row.epsilon, row.epsilon_used, row.epsilon_worst)
            shown = ("-" if each is None else format_epsilon(each, large="whole") for each in epsilons)
            cells.append((row.adversary, row.unit, row.relation, *shown, row.assumption))
        return cells

    HEADINGS = ("adversary", "unit", "relation", "ε", "ε used", "ε worst", "assumption")

    def assumptions(self) -> list[str]:
        """The assumptions of all rows, each once; the table refers to them by number."""
        return list(dict.fromkeys(row.assumption for row in self.rows))

    def __str__(self) -> str:
        numbers = {assumption: str(number) for number, assumption in enumerate(self.assumptions(), start=1)}
        lines = [(*self.HEADINGS[:-1], "see"), *((*cells, numbers[assumption]) for *cells, assumption in self.cells())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
        below = [f"{number}. {assumption}" for assumption, number in numbers.items()]
        below += [f"note: {note}" for note in self.notes]
        return "\n".join([f"ε at δ = {self.delta:g} ({self.mode})", *table, *(textwrap.fill(line, 100) for line in below)])

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
    """The privacy statement of a plan: for all its rounds, the first `rounds`, or the listed rounds.

    With a ledger's `usage`, it includes what the most-used client has spent so far.
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
    """The ε of a row: the smallest that holds for each client size, and the largest of these over all sizes."""
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
    # Taking part in every round is the worst case, so its ε holds for all other cases.
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
        notes.append(
            f"each of {population.layers} layers is clipped at C: together, one example moves them by C·√{population.layers}"
        )
    if population.copies > 1:
        notes.append(
            f"a record may be stored at {population.copies} clients: the row `unique` covers the person it belongs to"
        )
    records = population.clients * population.records // population.copies
    if plan.private and plan.delta * records >= 1:
        notes.append(
            f"δ = {plan.delta:g} is not below 1 / the number of records ({records:,}): a method that publishes a record "
            "outright could satisfy it"
        )
    if any(VACUOUS <= row.epsilon < math.inf for row in rows):
        notes.append(f"an ε above {VACUOUS:g} guarantees nothing in practice")
    if any(row.epsilon_used is not None and row.epsilon_used > 1.001 * row.epsilon for row in rows):
        notes.append(
            "ε used can be larger than ε: ε holds over the random selection of clients, and ε used is what the client that "
            "was selected most often has spent, with repeated rounds counted again"
        )
    if plan.private and plan.compression:
        notes.append("pruning comes after the noise, so it costs no ε; with pruning, other clients' noise is not credited")
    return tuple(notes)
