"""Releases: what was released of the victims in every round of a training, by the method's own code.

A type-2 adversary sees an example's gradient in every local step that draws it. A type-1 or type-0 adversary sees every
update of a client. The adversary knows the weights of each round, and on the client those of each local step. It also knows
which records a step used, because an adversary that reads single gradients knows the index of each (`docs/guarantees.md`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcdp.attacks.gradient_units import as_gradient
from fedcdp.attacks.observe import Leak
from fedcdp.attacks.replay import Course
from fedcdp.engine.base import Batch
from fedcdp.files.tree import Tree, repeat
from fedcdp.mechanism.randomness import numpy_generator
from fedcdp.mechanism.sampling import Draw, choose_clients, choose_records_of_steps
from fedcdp.methods import METHODS, Local, Moment, take_part
from fedcdp.methods.base import Tap
from fedcdp.training.rounds import Simulator
from fedcdp.training.rundir import State

_USUAL, _USUAL_EXAMPLES = 100, 1000  # default victims; for updates, at most so many examples in total, but two victims

Key = tuple[int, int]
"""A victim: its client, and the index of its record; −1 if the victim is the client's update."""


@dataclass(frozen=True)
class Release:
    """What was released of some victims in one round; of single examples, in one local step."""

    keys: list[Key]
    at: Moment
    places: list[int]
    """The place of each victim's client in `at`."""
    seen: Tree
    """[victims, ...], in units of a gradient."""
    weights: Tree
    """[victims, ...]: the weights at which the gradient was taken, or local training started."""
    shared: bool
    """Whether these weights are the same for all victims."""
    records: Tensor
    """[steps, victims, slots]: the records that were used."""
    used: Tensor
    """[steps, victims, slots]: whether the slot was filled."""


def choose_victims(
    course: Course, simulator: Simulator, leak: Leak, wanted: int | None, *, most: int = _USUAL
) -> list[tuple[int, list[int]]]:
    """Participating clients in a random order, each with the records that are victims (for updates: all of them).

    `wanted` is the number of victims; without it, up to 100, but at most `most`.
    """
    clients = course.federation.clients
    took_part = {int(c) for r in range(course.rounds) for c in choose_clients(simulator.data.draws, clients, r)}
    order = [int(c) for c in numpy_generator(course.plan.seed, "victims").permutation(clients) if int(c) in took_part]
    table, sizes = simulator.data.records_of(torch.tensor(order))
    records = [row[:size].tolist() for row, size in zip(table, sizes.tolist(), strict=True)]
    usual = _USUAL if leak == "type2" else max(2, min(_USUAL, _USUAL_EXAMPLES // max(map(len, records))))
    count = min(usual, most) if wanted is None else wanted
    if leak != "type2":
        return list(zip(order, records, strict=True))[:count]
    if not _all_drawn(course, max(map(len, records))):
        drawn = _drawn(course, simulator, order[:count], count)
        order, records = list(drawn), list(drawn.values())
    places = [(client, number) for number in range(max(map(len, records))) for client in range(len(order))]
    places = [(client, number) for client, number in places if number < len(records[client])][:count]
    return [
        (order[client], [records[client][number] for one, number in places if one == client])
        for client in dict.fromkeys(client for client, _ in places)
    ]


def _all_drawn(course: Course, records: int) -> bool:
    """Whether a client uses all of its records in every round."""
    plan = course.plan
    return plan.record_sampling == "partition" and plan.batch_size * plan.local_steps >= records


def _drawn(course: Course, simulator: Simulator, clients: list[int], wanted: int) -> dict[int, list[int]]:
    """Records of these clients that some local step draws; stops once every client has one and `wanted` are known."""
    found: dict[int, dict[int, None]] = {client: {} for client in clients}
    for round_ in range(course.rounds):
        chosen = choose_clients(simulator.data.draws, course.federation.clients, round_).tolist()
        mine = torch.tensor([client for client in clients if client in set(chosen)], dtype=torch.int64)
        if len(mine):
            table, sizes = simulator.data.records_of(mine)
            drawn = choose_records_of_steps(simulator.data.draws, mine.to(simulator.data.device), sizes, round_)
            for at, client in enumerate(mine.tolist()):
                used = table[at][drawn.positions[:, at][drawn.present[:, at]]]
                found[client] |= dict.fromkeys(used.tolist())
        if all(found.values()) and sum(map(len, found.values())) >= wanted:
            break
    return {client: list(records) for client, records in found.items() if records}


@dataclass(frozen=True)
class _EachAlone(Moment):
    """A moment whose slots are victims of one client, each noised as in a slot of its client's own batch."""

    units: Tensor | None = None

    @property
    def slot_noise(self) -> Tensor | None:
        """See `Moment`."""
        return self.units


class Spy:
    """Observes the victims' clients, round by round."""

    def __init__(self, simulator: Simulator, leak: Leak, victims: list[tuple[int, list[int]]]) -> None:
        self._simulator, self._leak, self._records = simulator, leak, dict(victims)

    def look(self, state: State, chosen: Tensor) -> Iterator[Release]:
        """What is released of the victims in the round that begins at `state`."""
        mine = torch.tensor([c for c in chosen.tolist() if c in self._records], dtype=torch.int64)
        for clients in mine.split(self._simulator.chunk) if len(mine) else ():
            table, sizes = self._simulator.data.records_of(clients)
            at = self._simulator.moment(state, clients.to(self._simulator.data.device), sizes)
            draw = self._simulator.data.draw(at, table, sizes)
            if self._leak == "type2":
                yield from self._examples(state, at, draw)
            else:
                yield self._updates(state, at, draw)

    def _examples(self, state: State, at: Moment, draw: Draw) -> Iterator[Release]:
        plan, method = self._simulator.plan, METHODS[at.plan.method]
        names = at.clients.tolist()
        records = [self._records[client] for client in names]
        most = max(map(len, records))
        mine = torch.tensor([each + [-1] * (most - len(each)) for each in records], device=at.clients.device)
        before = repeat(state.weights, len(names))
        local = Local(before, start=before)
        units = None if at.slot_noise is None else at.slot_noise[:, :1].expand(-1, most)
        for step, (positions, filled) in enumerate(zip(draw.positions, draw.present, strict=True)):
            there = ((positions[:, :, None] == mine[:, None]) & filled[:, :, None]).any(1)
            if bool(there.any()):
                told: list[Tree] = []
                alone = _EachAlone(
                    plan.but(batch_size=most, slots=most), at.engine, at.noise, at.round, at.clients, at.expected_batch,
                    step=step, tap=_kept_in(told), current_clip=at.current_clip, units=units,
                )  # fmt: skip
                method.gradient_sum(local.weights, self._simulator.data.examples.batch(mine.clamp(min=0), there), alone)
                client, slot = there.nonzero(as_tuple=True)
                used = mine[client, slot]
                yield Release(
                    [(names[c], r) for c, r in zip(client.tolist(), used.tolist(), strict=True)], at, client.tolist(),
                    {name: value[client, slot] for name, value in told[0].items()},
                    _at_victims(state.weights, local.weights, client, step), step == 0,
                    used[None, :, None], torch.ones_like(used, dtype=torch.bool)[None, :, None],
                )  # fmt: skip
            if step + 1 < len(draw.positions):
                batch = self._simulator.data.examples.batch(positions, filled)
                local = method.local_step(local, batch, replace(at, step=step))

    def _updates(self, state: State, at: Moment, draw: Draw) -> Release:
        batches: list[Batch] = [
            self._simulator.data.examples.batch(*each) for each in zip(draw.positions, draw.present, strict=True)
        ]
        update = take_part(METHODS[at.plan.method], state.weights, batches, at).update
        clients = at.clients.tolist()
        return Release(
            [(client, -1) for client in clients], at, list(range(len(clients))), as_gradient(update, at),
            _at_victims(state.weights, state.weights, at.clients, 0), True, draw.positions, draw.present,
        )  # fmt: skip


def _at_victims(state: Tree, local: Tree, clients: Tensor, step: int) -> Tree:
    """The weights [victims, ...] at which local step `step` begins for the victims of these clients: first, those sent."""
    if step == 0:
        return {name: value.expand(len(clients), *value.shape) for name, value in state.items()}
    return {name: value[clients] for name, value in local.items()}


def keys_of(leak: Leak, victims: list[tuple[int, list[int]]]) -> list[Key]:
    """The victims one by one: single records, or clients."""
    return [(c, r) for c, records in victims for r in records] if leak == "type2" else [(c, -1) for c, _ in victims]


def _kept_in(told: list[Tree]) -> Tap:
    """A tap that keeps what a type-2 adversary sees."""
    return lambda reader, _, tree: told.append(tree) if reader == "type2" else None
