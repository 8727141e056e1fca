"""Many trainings of one plan in lockstep: federations that differ in their seeds and in the records that take part.

The clients of all federations are trained as one large cohort: engines take weights, and methods take noise and records,
for each client of its own. So S federations of K_t clients run as one program over S·K_t clients, with the methods' own
code. Only the few operations of the server run federation by federation.

Federation s computes what a simulation with the seed `seeds[s]` computes in which the records outside of `kept[s]` are
zeroed out, up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcdp.engine import Loss
from fedcdp.engine.runtime import deferred_interrupts, products, stop_if_asked
from fedcdp.errors import PlanError
from fedcdp.files.tree import Layout, Tree, each_tensor
from fedcdp.mechanism.noise import Noise, SeededNoise
from fedcdp.mechanism.randomness import gaussians, normals, stream_key
from fedcdp.mechanism.sampling import Draw, choose_clients, choose_records_of_steps, zero_out
from fedcdp.methods import METHODS, Moment, take_part_from
from fedcdp.methods.aggregation import Aggregate, moving_average, server_update
from fedcdp.training.local_engines import StepwiseEngine, usual_chunk
from fedcdp.training.prepared import Prepared
from fedcdp.training.rundir import State
from fedcdp.training.trainer import ready

CHUNKS = {"cpu": 64, "cuda": 4096}
"""How many clients are trained at once, if memory allows."""


@dataclass(frozen=True)
class FederationsNoise(Noise):
    """The seeded noise of several federations, whose clients follow each other: `counts[s]` clients with `seeds[s]`."""

    layout: Layout
    seeds: tuple[int, ...]
    counts: tuple[int, ...]

    def _unit(self, purpose: str, round_: int, clients: Tensor, step: int, slot: int, length: int) -> Tensor:
        keys = [stream_key(seed, purpose, round_) for seed in self.seeds]
        parts = clients.split(self.counts)
        if not clients.is_cuda:
            return torch.cat([normals(key, some, step, slot, length) for key, some in zip(keys, parts, strict=True)])
        # One transfer for all of them, because the device waits for each transfer.
        sources = torch.tensor([(key & 0xFFFFFFFF, key >> 32, step, slot) for key in keys], device=clients.device)
        return torch.cat(
            [gaussians(source[None], some, length, torch.float32) for source, some in zip(sources, parts, strict=True)]
        )


class ParallelFederations:
    """Trainings of a plan, one for each seed; of the records, federation s keeps those in `kept[s]` [seeds, records]."""

    def __init__(
        self,
        prepared: Prepared,
        seeds: Sequence[int],
        kept: Tensor,
        *,
        device: torch.device,
        loss: Loss,
        chunk: int | None = None,
    ) -> None:
        """Check that the plan can be trained in lockstep, and move the data to the device.

        Raises:
            PlanError: The plan has a clip bound or a scaling of inputs that each federation would have to release itself.
        """
        plan = prepared.plan.but(secure_noise=False)  # the noise of a simulation: of the same distribution
        if plan.quantile is not None:
            raise PlanError(f"clip: {plan.clip} differs between federations, so they cannot be trained in lockstep")
        if plan.scaling_noise is not None:
            raise PlanError("scaling_noise: private scaling differs between federations; use public scaling")
        self.plan, self.seeds = plan, tuple(seeds)
        self._plans = [plan.but(seed=seed) for seed in self.seeds]
        network = copy.deepcopy(prepared.network).to(device)
        ours = replace(prepared, plan=plan)
        self.data, engines, state = ready(ours, network, device=device, loss=loss)
        self.engine = next(iter(engines.values()))
        self.states = [state] * len(self.seeds)
        self._kept = kept.to(device)
        self._method = METHODS[plan.method]
        self._local = StepwiseEngine(self._method, self.engine, self.data.examples)
        most = self.data.most_clients(self.engine.model)
        self._chunk = chunk or min(CHUNKS.get(device.type, usual_chunk(device, most)), most)

    def some(self, which: slice) -> ParallelFederations:
        """Some of the federations, to be trained apart from the others."""
        part = copy.copy(self)
        part.seeds, part.states = self.seeds[which], self.states[which]
        part._plans, part._kept = self._plans[which], self._kept[which]
        return part

    @deferred_interrupts()
    def train(self, progress: Callable[[int, int], None] | None = None) -> list[Tree]:
        """Run all rounds; return the released model of each federation. Ctrl-C ends them between two local steps."""
        with products(tf32=False):
            for round_ in range(self.plan.rounds):
                self._round(round_)
                if progress is not None:
                    progress(round_ + 1, self.plan.rounds)
        return [state.average or state.weights for state in self.states]

    def _round(self, round_: int) -> None:
        """One round of every federation: their clients in chunks, then each server."""
        data, plan = self.data, self.plan
        clients = [torch.from_numpy(choose_clients(each, data.federation.clients, round_)) for each in self._plans]
        whose = torch.cat([torch.full_like(some, number) for number, some in enumerate(clients)])
        models = {name: torch.stack([state.weights[name] for state in self.states]) for name in self.states[0].weights}
        received = [Aggregate(state.weights, plan) for state in self.states]
        for some, theirs in zip(torch.cat(clients).split(self._chunk), whose.split(self._chunk), strict=True):
            if len(some):
                self._clients(round_, some, theirs, models, received)
        nobody = torch.zeros(0, dtype=torch.int64, device=data.device)
        for number, (state, seed) in enumerate(zip(self.states, self.seeds, strict=True)):
            at = self._moment(round_, nobody, nobody, SeededNoise(seed, self.engine.layout))
            weights, optimizer = server_update(self._method, state.weights, received[number], at, state.optimizer)
            average = None if state.average is None else moving_average(state.average, weights, plan.ema)
            self.states[number] = State(round_ + 1, weights, average, None, optimizer)

    def _clients(self, round_: int, clients: Tensor, whose: Tensor, models: Tree, received: list[Aggregate]) -> None:
        """Train some clients, each from the model of the federation that it belongs to, and add up what they send."""
        stop_if_asked()
        numbers, counts = (each.tolist() for each in whose.unique_consecutive(return_counts=True))
        table, sizes = self.data.records_of(clients)
        here, owners = clients.to(self.data.device), whose.to(self.data.device)
        noise = FederationsNoise(self.engine.layout, tuple(self.seeds[each] for each in numbers), tuple(counts))
        at = self._moment(round_, here, sizes, noise)
        draw = self._drawn(round_, numbers, counts, here, table, sizes)
        draw = zero_out(draw, self._kept[owners[None, :, None], draw.positions])
        before = {name: value[owners] for name, value in models.items()}
        sent = take_part_from(self._method, before, self._local.batches(draw), at)
        for number, update in zip(numbers, _parts(self._method.admit(sent.update, at), counts), strict=True):
            received[number].add(update)

    def _drawn(
        self, round_: int, numbers: list[int], counts: list[int], clients: Tensor, table: Tensor, sizes: Tensor
    ) -> Draw:
        """The records of all local steps [steps, clients, slots], as each federation's own seed draws them."""
        draws = [
            choose_records_of_steps(self._plans[number], some, held, round_)
            for number, some, held in zip(numbers, clients.split(counts), sizes.split(counts), strict=True)
        ]
        positions, present = (
            torch.cat(each, dim=1) for each in zip(*((d.positions, d.present) for d in draws), strict=True)
        )
        return Draw(table.expand(len(positions), -1, -1).gather(2, positions), present)

    def _moment(self, round_: int, clients: Tensor, sizes: Tensor, noise: Noise) -> Moment:
        expected, mean = sizes.clamp(max=self.plan.batch_size), self.data.mean_records
        return Moment(self.plan, self.engine, noise, round_, clients, expected, records=sizes, mean_records=mean)

    def outputs(self, models: Sequence[Tree], records: Tensor, batch: int = 2000) -> Iterator[Tensor]:
        """The outputs of each model for these training records [records, ...], on the CPU."""
        for model in models:
            stop_if_asked()
            answers = []
            for some in records.to(self.data.device).split(batch):
                inputs = each_tensor(self.data.examples.inputs, lambda value: value[some])  # noqa: B023
                answers.append(self.engine.outputs(model, inputs).cpu())
            yield torch.cat(answers)


def _parts(tree: Tree, counts: list[int]) -> Iterator[Tree]:
    """The tree [clients, ...] cut into pieces of so many clients."""
    pieces = {name: value.split(counts) for name, value in tree.items()}
    for number in range(len(counts)):
        yield {name: piece[number] for name, piece in pieces.items()}
