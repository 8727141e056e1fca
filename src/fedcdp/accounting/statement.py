"""The privacy statement: ε against every adversary, with its assumptions, for people and for programs.

Only computing an ε needs dp-accounting, which is imported there.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fedcdp.accounting.adversaries import View, multipliers_by_attempts, noise_multipliers, scaling_releases
from fedcdp.accounting.mechanisms import Release, repeated, sequence
from fedcdp.accounting.population import Population
from fedcdp.accounting.views import view_of_client, views
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
    by_client: tuple[int, ...] = ()
    """How often each client took part, in their order; empty: not listed."""


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
        return _without_infinity(vars(self))


def _without_infinity(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: "inf" if value == math.inf else value for name, value in values.items()}


@dataclass(frozen=True)
class ClientRow:
    """ε of the records of one client, against the server under zero-out, where clients hold different numbers of records."""

    client: str
    """Its name."""
    records: int
    """N_i."""
    epsilon: float
    """ε before it is known who takes part in which round."""
    epsilon_used: float | None
    """ε spent so far by this client."""
    epsilon_worst: float
    """ε if it takes part in every round."""

    def as_json(self) -> dict[str, Any]:
        """The row for programs; see `Row.as_json`."""
        return _without_infinity(vars(self))


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
    clients: tuple[ClientRow, ...] = ()
    """Where clients hold different numbers of records: ε of each, the largest first."""

    def row(self, adversary: str, unit: str = "record", relation: str = "zero-out") -> Row:
        """The row for an adversary, unit and relation; if there is none, a `PlanError` lists the rows that exist."""
        for row in self.rows:
            if (row.adversary, row.unit, row.relation) == (adversary, unit, relation):
                return row
        known = ", ".join(f"{row.adversary}/{row.unit}/{row.relation}" for row in self.rows)
        raise PlanError(f"there is no row {adversary}/{unit}/{relation}; there are {known}")

    def as_json(self) -> dict[str, Any]:
        """The statement for programs (a contract: these keys stay); `clients` only where clients differ."""
        stated = {"delta": self.delta, "mode": self.mode, "rows": [row.as_json() for row in self.rows]}
        return stated | ({"clients": [row.as_json() for row in self.clients]} if self.clients else {})

    def cells(self) -> list[tuple[str, ...]]:
        """The table's cells, as strings."""
        cells = []
        for row in self.rows:
            epsilons = (row.epsilon, row.epsilon_used, row.epsilon_worst)
            shown = ("-" if each is None else format_epsilon(each, large="whole") for each in epsilons)
            cells.append((row.adversary, row.unit, row.relation, *shown, row.assumption))
        return cells

    def client_cells(self) -> list[tuple[str, ...]]:
        """The cells of the table of clients, as strings; empty where all clients have the same ε."""
        if len({round(row.epsilon, 6) for row in self.clients}) < 2 and len({row.epsilon_used for row in self.clients}) < 2:
            return []
        return [
            (row.client, f"{row.records:,}", *("-" if each is None else format_epsilon(each, large="whole") for each in (
                row.epsilon, row.epsilon_used, row.epsilon_worst)))
            for row in self.clients
        ]  # fmt: skip

    HEADINGS = ("adversary", "unit", "relation", "ε", "ε used", "ε worst", "assumption")
    CLIENT_HEADINGS = ("client", "records", "ε", "ε used", "ε worst")

    def assumptions(self) -> list[str]:
        """The assumptions of all rows, each once; the table refers to them by number."""
        return list(dict.fromkeys(row.assumption for row in self.rows))

    def __str__(self) -> str:
        numbers = {assumption: str(number) for number, assumption in enumerate(self.assumptions(), start=1)}
        lines = [(*self.HEADINGS[:-1], "see"), *((*cells, numbers[assumption]) for *cells, assumption in self.cells())]
        below = [f"{number}. {assumption}" for assumption, number in numbers.items()]
        below += [f"note: {note}" for note in self.notes]
        printed = [f"ε at δ = {self.delta:g} ({self.mode})", *_aligned(lines), *(textwrap.fill(line, 100) for line in below)]
        if clients := self.client_cells():
            printed += ["ε of each client's records against the server", *_aligned([self.CLIENT_HEADINGS, *clients])]
        return "\n".join(printed)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in self.HEADINGS)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in line) + "</tr>" for line in self.cells())
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        shown = f"<p>ε at δ = {self.delta:g} ({self.mode})</p><table><tr>{head}</tr>{body}</table>{notes}"
        if not (clients := self.client_cells()):
            return shown
        head = "".join(f"<th>{name}</th>" for name in self.CLIENT_HEADINGS)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in line) + "</tr>" for line in clients)
        return f"{shown}<p>ε of each client's records against the server</p><table><tr>{head}</tr>{body}</table>"


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table, its columns aligned on the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def state(
    plan: Plan,
    population: Population,
    *,
    mode: Mode = "tight",
    rounds: int | Sequence[int] | None = None,
    usage: Usage | None = None,
    by_client: bool = True,
) -> Privacy:
    """The privacy statement of a plan: for all its rounds, the first `rounds`, or the listed rounds.

    With a ledger's `usage`, it includes what the most-used client has spent so far. With `by_client`, it includes ε of each
    client, where they hold different numbers of records.
    """
    if mode not in get_args(Mode):
        raise PlanError(f"mode: {mode!r} is not one of {', '.join(get_args(Mode))}")
    if mode == "paper":
        return _as_printed(plan)
    rows = tuple(_row(view, plan, population, mode, rounds, usage) for view in views(plan, population))
    clients = _client_rows(plan, population, mode, rounds, usage) if by_client and plan.private else ()
    return Privacy(plan.delta, mode, rows, _notes(plan, population, rows, clients), clients)


def epsilon_after(view: View, plan: Plan, rounds: int | Sequence[int], mode: Mode = "tight") -> float:
    """The ε of a row after these rounds, before it is known who takes part in them."""
    tried = multipliers_by_attempts(plan, rounds)

    def before(row: View) -> Release:
        return sequence([row.before(multipliers, attempts) for attempts, multipliers in tried.items()])

    return _epsilon(view, before, scaling_releases(plan, rounds), plan.delta, mode)


def _epsilon(view: View, release: Callable[[View], Release], scalings: int, delta: float, mode: Mode) -> float:
    """The ε of a row: the smallest that holds for each client size, and the largest of these over all sizes.

    `scalings` counts the releases of noised means and variances, which come on top of those of the rounds.
    """
    from fedcdp.accounting import pld, rdp

    epsilon = pld.epsilon if mode == "tight" else rdp.epsilon
    of_sizes = []
    for row in (view, *view.others):
        rows = [row] if row.fallback is None else [row, row.fallback]
        made = [sequence([release(each), repeated(each.scaling, scalings)]) for each in rows]
        of_sizes.append(min(epsilon(each, delta) for each in made))
    return max(of_sizes)


def _row(
    view: View,
    plan: Plan,
    population: Population,
    mode: Mode,
    rounds: int | Sequence[int] | None,
    usage: Usage | None,
) -> Row:
    multipliers, scalings = noise_multipliers(plan, rounds), scaling_releases(plan, rounds)
    # Listed rounds list every attempt; rounds that are still to come may each be tried several times.
    attempts = plan.attempts if rounds is None or isinstance(rounds, int) else 1
    worst = _epsilon(view, lambda row: row.worst(multipliers * attempts), scalings, plan.delta, mode)
    used = None
    if usage is not None:
        charged, often = noise_multipliers(plan, usage.rounds), scaling_releases(plan, usage.rounds)
        participations = sum(usage.participations[: population.copies if view.unit == "unique" else 1])
        most = _epsilon(view, lambda row: row.worst(charged), often, plan.delta, mode)
        used = min(most, _epsilon(view, lambda row: row.used(charged, participations), often, plan.delta, mode))
    # Taking part in every round is the worst case, so its ε holds for all other cases.
    before = epsilon_after(view, plan, plan.rounds if rounds is None else rounds, mode)
    return Row(view.adversary, view.unit, view.relation, min(worst, before), used, worst, view.assumption)


_MOST_SIZES = 12  # different numbers of records for which ε is computed one by one


def _others(clients: tuple[ClientRow, ...]) -> str:
    worst = max(clients, key=lambda row: row.epsilon)
    rest = max((row for row in clients if row.records != worst.records), key=lambda row: row.epsilon)
    return f"the next, {rest.client}, has {format_epsilon(rest.epsilon)}"


def _client_rows(
    plan: Plan, population: Population, mode: Mode, rounds: int | Sequence[int] | None, usage: Usage | None
) -> tuple[ClientRow, ...]:
    """ε of each client, the largest first; of some clients where too many sizes occur: those at the quantiles of N_i.

    A client's own ε depends on its number of records and on how often it took part. How often is not shown where a row
    assumes that nobody knows who took part.
    """
    if not plan.per_example or not population.held:
        return ()
    by_size = sorted(range(population.clients), key=lambda client: population.held[client])
    if len(population.sizes or ()) > _MOST_SIZES:
        last = len(by_size) - 1
        by_size = [by_size[round(place * last / (_MOST_SIZES - 1))] for place in range(_MOST_SIZES)]
    found: dict[tuple[int, int | None], Row] = {}
    stated = []
    for client in by_size:
        listed = usage is not None and usage.by_client and not (plan.hides_members and plan.per_round < population.clients)
        times = usage.by_client[client] if usage is not None and listed else None
        case = population.held[client], times
        if case not in found:
            view = view_of_client(plan, population, case[0])
            spent = None if usage is None or times is None else Usage(usage.rounds, (times,))
            found[case] = _row(view, plan, population, mode, rounds, spent)
        row = found[case]
        stated.append(ClientRow(population.name(client), case[0], row.epsilon, row.epsilon_used, row.epsilon_worst))
    return tuple(sorted(stated, key=lambda row: (-(row.epsilon_used or 0.0), -row.epsilon, row.records)))


def _as_printed(plan: Plan) -> Privacy:
    units = {"fed-sdp": ["client"], "fed-cdp": ["record", "client"], "fed-cdp-decay": ["record", "client"]}.get(
        plan.method, []
    )
    from fedcdp.accounting import paper

    epsilon = paper.printed_epsilon(plan) if units else math.inf
    rows = [Row("model", unit, "zero-out", epsilon, None, epsilon, paper.BANNER) for unit in units]
    if not units:
        rows = [Row("model", "record", "zero-out", math.inf, None, math.inf, "the paper prints no ε for this method")]
    broken = paper.broken_condition(plan) if units else None
    return Privacy(plan.delta, "paper", tuple(rows), (paper.BANNER, *([] if broken is None else [broken])))


def _notes(plan: Plan, population: Population, rows: tuple[Row, ...], clients: tuple[ClientRow, ...]) -> tuple[str, ...]:
    notes = []
    if clients and len({round(row.epsilon, 6) for row in clients}) == 1:
        held = [row.records for row in clients]
        notes.append(f"every client has this ε, whether it holds {min(held):,} or {max(held):,} records")
    elif clients:
        worst = max(clients, key=lambda row: row.epsilon)
        notes.append(f"{worst.client}, with {worst.records:,} records, sets the ε against the server: {_others(clients)}")
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
    if plan.scaling_noise is not None:
        notes.append(
            f"every ε includes the release of noised means and variances of the inputs (noise over sensitivity "
            f"{plan.scaling_noise:g})"
        )
    if plan.private and plan.compression:
        notes.append("pruning comes after the noise, so it costs no ε; with pruning, other clients' noise is not credited")
    return tuple(notes)
