"""Rounds of many virtual clients, on one device or on one for each rank.

A round is four steps: choose the clients, train them locally (in chunks, to bound memory), add up their updates, move the
global model. Only the weights, the state of a server optimiser, and a clip bound that follows a quantile carry over from
round to round. All randomness is derived from the seed and the round, so a stopped run continues exactly where it stopped
(under secure noise: with fresh randomness).

Ranks share the chunks of a round. The leader adds up their sums in the order of the chunks and alone makes the server's
step, so on a CPU several ranks compute what one process does, to the bit.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.engine.base import Batch, Engine
from fedcdp.engine.batched import BatchedEngine
from fedcdp.engine.microbatches import MicrobatchEngine
from fedcdp.engine.runtime import clients_within_budget, examples_within_budget, wait
from fedcdp.files.tree import each_tensor, repeat
from fedcdp.mechanism.noise import noise_of
from fedcdp.mechanism.sampling import Draw, choose_records, choose_records_of_steps, zero_out
from fedcdp.methods import METHODS, Method, Moment
from fedcdp.methods.aggregation import Aggregate, Portion, moving_average, next_clip, server_update
from fedcdp.methods.base import Tap
from fedcdp.methods.quantile import clip_rule
from fedcdp.training.evaluation import evaluate
from fedcdp.training.feature_cache import features_of
from fedcdp.training.local_engines import Examples, LocalEngine, StepwiseEngine, usual_chunk
from fedcdp.training.ranks import Ranks
from fedcdp.training.rundir import Row, State

_TIMED_STEPS = 2  # after the same number of warm-up steps


class ClientData:
    """The federation's data, kept on the device, and the clients' draws from them. Only indices move."""

    def __init__(
        self,
        federation: Federation,
        plan: Plan,
        device: torch.device,
        front: nn.Module | None = None,
        kept: Tensor | None = None,
    ) -> None:
        """With `front`, the data are the outputs of those layers. Records that are not `kept` [records] are zeroed out."""
        self.federation, self.plan, self.device = federation, plan, device
        self.kept = None if kept is None else kept.to(device)
        self.examples = Examples(features_of(front, federation.train, device), federation.train.targets.to(device))
        self.validation = federation.validation
        if front is not None and self.validation is not None:
            self.validation = replace(self.validation, inputs=features_of(front, self.validation, device))
        # The draws are as secret as the noise: nobody has their seed, not even a resumed run, which draws afresh. Releasing
        # the same records twice under fresh noise would reveal more than two releases of random records.
        self.draws = plan.but(seed=secrets.randbits(62)) if plan.secure_noise and plan.private else plan

    @cached_property
    def mean_records(self) -> float:
        """The mean number of records at a client: the plan's, or the federation's.

        With noise on the sum of Fed-CDP: of those that it uses in a step, min(B, N_i).
        """
        if self.plan.mean_records is not None:
            return self.plan.mean_records
        sizes = self.federation.sizes(np.arange(self.federation.clients))
        if self.plan.sums and self.plan.per_example:
            sizes = np.minimum(sizes, self.plan.batch_size)
        return float(sizes.mean())

    def records_of(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        """The records [clients, most], as indices into the training data, and the number of records of each client."""
        table, sizes = self.federation.table(clients.numpy())
        return torch.from_numpy(table).to(self.device), torch.from_numpy(sizes).to(self.device)

    def draw(self, at: Moment, table: Tensor, sizes: Tensor) -> Draw:
        """The records of all local steps [steps, clients, slots], as indices into the training data."""
        drawn = choose_records_of_steps(self.draws, at.clients, sizes, at.round)
        return self.filled(Draw(table.expand(len(drawn.positions), -1, -1).gather(2, drawn.positions), drawn.present))

    def filled(self, draw: Draw) -> Draw:
        """The draw, whose positions are records, without those that are zeroed out."""
        return draw if self.kept is None else zero_out(draw, self.kept[draw.positions])

    def first_batch(self) -> Batch:
        """The batch of the first client's first step."""
        table, sizes = self.records_of(torch.zeros(1, dtype=torch.int64))
        width = min(self.plan.batch_size, int(sizes[0]))
        everything = torch.ones(1, width, dtype=torch.bool, device=self.device)
        return self.examples.batch(table[:, :width], everything)

    def most_clients(self, model: nn.Module) -> int:
        """Number of clients of this network that can be trained at once within the memory budget."""
        example = each_tensor(self.examples.inputs, lambda value: value[0])
        exact = self.plan.sums and self.plan.per_example
        return clients_within_budget(model, example, self.plan.slots, self.plan.per_example, exact)

    def within_memory(self, engine: Engine) -> Engine:
        """The engine, in parts of a batch where the batch of a single client exceeds the memory budget."""
        if isinstance(engine, BatchedEngine):  # it may be compiled or packed, and holds little for each example
            return engine
        example = each_tensor(self.examples.inputs, lambda value: value[0])
        exact = self.plan.sums and self.plan.per_example
        most = examples_within_budget(engine.model, example, self.plan.per_example, exact)
        return engine if most >= self.plan.slots else MicrobatchEngine(engine, most)


@dataclass(frozen=True)
class RoundCall:
    """A round that rank 0 begins, for its followers."""

    round: int
    clip: float | None
    chosen: Tensor


class Simulator:
    """Rounds of virtual clients, `chunk` of which are trained at once by each of the `ranks`.

    An audit may watch them by a `tap`, and may run a method other than the plan's.
    """

    def __init__(
        self,
        data: ClientData,
        local_engine: LocalEngine,
        chunk: int,
        *,
        method: Method | None = None,
        tap: Tap | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.data, self.local_engine, self.chunk = data, local_engine, chunk
        self.ranks = ranks or Ranks()
        self.plan, self.tap = data.plan, tap
        self.method = method or METHODS[self.plan.method]
        self.noise = noise_of(self.plan, self.engine.layout)

    @staticmethod
    def stepwise(
        data: ClientData, engine: Engine, chunk: int | None = None, *, method: Method | None = None, tap: Tap | None = None
    ) -> Simulator:
        """A simulator that takes one step at a time, as the methods are written: the reference, open to every tap."""
        local_engine = StepwiseEngine(method or METHODS[data.plan.method], engine, data.examples)
        chunk = chunk or usual_chunk(data.device, data.most_clients(engine.model))
        return Simulator(data, local_engine, chunk, method=method, tap=tap)

    @property
    def engine(self) -> Engine:
        """The engine that computes the gradients."""
        return self.local_engine.gradients

    def round(self, state: State, chosen: Tensor) -> State:
        """Run one global round with the chosen clients; return the state after it. Only the leader calls this."""
        method, plan = self.method, self.plan
        received = Aggregate(state.weights, plan)
        for portion in self._portions(state, chosen, received):
            received.take(portion)
        nobody = torch.zeros(0, dtype=torch.int64, device=self.data.device)
        at = self.moment(state, nobody, nobody)
        weights, optimizer = server_update(method, state.weights, received, at, state.optimizer)
        average = None if state.average is None else moving_average(state.average, weights, plan.ema)
        return State(state.round + 1, weights, average, next_clip(received, at), optimizer)

    def _portions(self, state: State, chosen: Tensor, received: Aggregate) -> Iterator[Portion]:
        """The sums of all chunks, in order. Rank r trains chunks r, r + N, and so on; few sums exist at the same time."""
        chunks, ranks = self._chunks(chosen), self.ranks
        if ranks.several and chunks:
            ranks.tell(RoundCall(state.round, state.clip, chosen))
            ranks.spread(state.weights)
        for number, clients in enumerate(chunks):
            if (rank := number % ranks.size) == 0:
                yield self._portion(state, clients, received)
            else:
                portion = received.empty_portion(len(clients))
                portion.fill(ranks.receive(portion.flat(), rank))
                yield portion

    def follow(self, fresh: State) -> Any:
        """A follower's part: its chunks of each round that the leader begins. Returns what the leader says at the end."""
        while isinstance(call := self.ranks.heard(), RoundCall):
            state = replace(fresh, round=call.round, clip=call.clip, weights=self.ranks.spread(fresh.weights))
            received, sent = Aggregate(state.weights, self.plan), None
            for clients in self._chunks(call.chosen)[self.ranks.rank :: self.ranks.size]:
                portion = self._portion(state, clients, received).flat()
                if sent is not None:
                    sent()
                sent = self.ranks.send(portion)
            if sent is not None:
                sent()
        return call

    def _chunks(self, chosen: Tensor) -> Sequence[Tensor]:
        return chosen.split(self.chunk) if len(chosen) else ()

    def _portion(self, state: State, clients: Tensor, received: Aggregate) -> Portion:
        """What a chunk of clients sends, as the server admits it, added up."""
        table, sizes = self.data.records_of(clients)
        at = self.moment(state, clients.to(self.data.device), sizes)
        sent = self.local_engine(state.weights, self.data.draw(at, table, sizes), at)
        return received.portion(self.method.admit(sent.update, at), clip_rule(self.plan).admitted(sent, at))

    def moment(self, state: State, clients: Tensor, sizes: Tensor) -> Moment:
        """The moment at the start of a round for clients with `sizes` records."""
        expected = sizes.clamp(max=self.plan.batch_size)
        return Moment(
            self.plan,
            self.engine,
            self.noise,
            state.round,
            clients,
            expected,
            tap=self.tap,
            current_clip=state.clip,
            records=sizes,
            mean_records=self.data.mean_records,
        )

    def measure(self, before: State, state: State, chosen: Tensor, every: int) -> Row:
        """The metrics row of a round. In a private run, nothing in it is taken from before the noise is added."""
        row: Row = {"round": state.round}
        if not self.plan.hides_cohort:
            row["clients"] = len(chosen)
        row["learning_rate"] = self.plan.learning_rate_at(before.round)
        if self.plan.private:
            row["clip"] = self.plan.clip_at(before.round, before.clip)
        if state.round % every and state.round != self.plan.rounds:
            return row
        if self.data.validation is not None:
            row |= evaluate(self.engine, state.average or state.weights, self.data.validation, self.data.device)
        if not self.plan.private:
            row["gradient_norm"] = self.gradient_norm(before, chosen)
        return row

    def gradient_norm(self, state: State, chosen: Tensor) -> float | None:
        """The mean over the chosen clients of ‖∇‖₂ at the global model, ∇ the mean gradient of a client's first batch.

        This reads raw gradients: show it only if a run claims no privacy. None if nobody was chosen, or if it is not finite.
        """
        norms = []
        # A local engine may hold more clients than there is memory for their gradients.
        at_once = min(self.chunk, self.data.most_clients(self.engine.model))
        for clients in chosen.split(at_once) if len(chosen) else ():
            table, sizes = self.data.records_of(clients)
            at = self.moment(state, clients.to(self.data.device), sizes)
            drawn = choose_records(self.data.draws, at.clients, sizes, state.round, 0)
            drawn = self.data.filled(Draw(table.gather(1, drawn.positions), drawn.present))
            batch = self.data.examples.batch(drawn.positions, drawn.present)
            total = self.engine.summed_gradients(repeat(state.weights, len(clients)), batch)
            squares = sum(value.double().reshape(len(value), -1).square().sum(1) for value in total.values())
            norms.append(torch.as_tensor(squares).sqrt() / at.expected_batch)
        mean = float(torch.cat(norms).mean()) if norms else math.inf
        return mean if math.isfinite(mean) else None

    def seconds_a_client_step(self, state: State) -> float:
        """Seconds per local step of one client when training a chunk: gradients, clip, noise and update."""
        clients = torch.arange(self.chunk) % self.data.federation.clients
        table, sizes = self.data.records_of(clients)
        at = self.moment(state, clients.to(self.data.device), sizes)
        draw = self.data.draw(at, table, sizes)
        steps = min(_TIMED_STEPS, len(draw.positions))
        some = Draw(draw.positions[:steps], draw.present[:steps])
        self.local_engine(state.weights, some, at)
        wait(self.data.device)
        started = time.perf_counter()
        self.local_engine(state.weights, some, at)
        wait(self.data.device)
        return (time.perf_counter() - started) / steps / self.chunk
