"""The simulator: rounds of many virtual clients on one device.

A round is four steps: choose the clients, train them locally (in chunks, so that memory is bounded), add up what they
send, move the global model. Nothing carries over from round to round but the weights and a clip bound that follows a
quantile: all randomness is derived from the seed and the round, so that a stopped run continues exactly where it was
(under secure noise: as it might have).
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcdp.accounting.charged import Allows, Releases
from fedcdp.accounting.ledger import Charge, Ledger
from fedcdp.accounting.ledger import Noise as NoiseKind
from fedcdp.accounting.population import Population
from fedcdp.data.partition import Federation
from fedcdp.devices import usable_device, wait
from fedcdp.engine import Batch, Engine, EngineName, Loss, engines_for
from fedcdp.engine.memory import clients_within_budget
from fedcdp.errors import ModelError, PlanError, RunError
from fedcdp.evaluation import evaluate, is_binary
from fedcdp.files import check_tensors, size_of
from fedcdp.frozen import split, through
from fedcdp.interrupts import deferred_interrupts
from fedcdp.methods import METHODS, Moment
from fedcdp.models import mixing_layers, prepare
from fedcdp.noise import noise_of
from fedcdp.plan import Plan
from fedcdp.precision import products
from fedcdp.rundir import Row, RunDirectory, State
from fedcdp.sampling import Draw, choose_clients, choose_records, choose_records_of_steps
from fedcdp.server import Aggregate, moving_average, next_clip, server_update
from fedcdp.trainers import Examples, Stepwise, Trainer
from fedcdp.tree import Layout, Tree, repeat
from fedcdp.tuning import tuned

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Mode, Privacy

_USUAL_CHUNK = {"cpu": 64, "cuda": 1024}  # where nothing is measured; on a CPU, larger ones fall out of its caches

Progress = Callable[[Row], None]


@dataclass
class Run:
    """A finished (or stopped) training run."""

    plan: Plan
    federation: Federation
    model: nn.Module
    """The trained network: the moving average where the plan asks for one."""
    metrics: list[Row] = field(repr=False)
    seconds: float
    """Time spent in this process."""
    client_steps: int
    """Local iterations of single clients computed in this process; where the cohort is hidden, those that were planned."""
    charges: tuple[Charge, ...] = field(repr=False)
    """Every release so far; under secure noise, a round that was repeated after a crash is there again."""
    participations: NDArray[np.int64] = field(repr=False)
    """In how many of them each client took part."""
    directory: Path | None = None
    engine: str = "functional"
    """What computed the gradients in this process."""
    chunk: int = 1
    """How many clients it trained at once."""

    @property
    def releases(self) -> int:
        """How many releases there were; under secure noise, a round that was repeated after a crash counts again."""
        return len(self.charges)

    @property
    def rounds(self) -> int:
        """Rounds that are done."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the validation split after the last evaluated round."""
        measured = [row["accuracy"] for row in self.metrics if row.get("accuracy") is not None]
        return measured[-1] if measured else None

    def privacy(self, mode: Mode = "tight") -> Privacy:
        """ε against every adversary for what was released, and what the most-used client has spent of it."""
        from fedcdp.accounting.statement import Usage, state

        population = Population.of(self.federation, Layout.of(self.model), self.plan)
        most_used = np.sort(self.participations)[::-1][: population.copies]
        released = tuple(charge.round for charge in self.charges)
        usage = Usage(released, tuple(int(count) for count in most_used))
        return state(self.plan, population, mode=mode, rounds=released, usage=usage)

    @property
    def us_per_client_step(self) -> float | None:
        """Microseconds per local iteration of one client, all included."""
        return self.seconds / self.client_steps * 1e6 if self.client_steps else None


def simulate(
    model: nn.Module,
    federation: Federation,
    plan: Plan,
    *,
    rounds: int | None = None,
    per_round: int | None = None,
    loss: Loss = F.cross_entropy,
    device: str | torch.device = "cpu",
    engine: EngineName = "auto",
    chunk: int | None = None,
    tf32: bool = False,
    evaluate_every: int = 1,
    out: Path | str | None = None,
    config: str | None = None,
    resume: bool = False,
    most_releases: int | None = None,
    budget: Allows | None = None,
    progress: Progress | None = None,
) -> Run:
    """Train `model` over `federation` by `plan`; `rounds` and `per_round` override the plan's.

    The given model is left as it is; the trained one is in the result. With `out`, the run is kept in that directory after
    every round, and `resume` continues it. `engine` is how gradients are computed, and `chunk` how many clients are trained
    at once; neither changes the result beyond rounding. By default a long training measures which is fastest, within a
    bounded amount of memory, and a resumed one keeps to what it had. `tf32` lets a GPU round the factors of products to 10
    bits, which is faster; norms, clipping and noise stay as they are. Training ends, with the model so
    far, before there are more than `most_releases`, and before a round that `budget` does not allow after those released.
    """
    if most_releases is not None:
        budget = _at_most(most_releases, budget)
    changes = {name: value for name, value in (("rounds", rounds), ("per_round", per_round)) if value is not None}
    plan = plan.but(**changes) if changes else plan
    plan.check_clients(federation.clients)
    if chunk is not None and chunk < 1:
        raise PlanError(f"chunk: {chunk} is not allowed; it must be at least 1")
    if evaluate_every < 1:
        raise PlanError(f"evaluate_every: {evaluate_every} is not allowed; it must be at least 1")
    device = usable_device(device)
    network = prepare(model, plan, device)
    if mixing_layers(model) and federation.smallest < plan.batch_size:
        raise ModelError(
            f"layer {mixing_layers(model)[0][0]} mixes examples, and a client with {federation.smallest} records leaves "
            f"slots of a batch of {plan.batch_size} empty, which it would count; use GroupNorm or a smaller batch"
        )
    directory = None if out is None else RunDirectory(out)
    if resume and directory:
        engine, chunk = _kept_engine(directory, device, engine, chunk)
    with deferred_interrupts(), products(tf32):
        front, trained = split(network, federation.train.inputs, device)
        engines = engines_for(trained, loss, engine)
        simulator = Simulator(next(iter(engines.values())), federation, plan, device, chunk, front)
        weights = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
        for name, value in weights.items():
            if not torch.isfinite(value).all():
                raise ModelError(f"{name} holds a weight that is not finite; nothing can be trained from there")
        simulator.engine.check(weights, simulator.batch_of_first_client(), per_example=plan.per_example)
        _check_outputs(simulator, weights, loss)
        fresh = State(0, weights, dict(weights) if plan.ema else None, plan.quantile.start if plan.quantile else None)
        simulator.trainer, simulator.chunk = tuned(simulator, engines, fresh, chunk, engine)
        if directory is None:
            return simulator.run(network, fresh, None, Releases(federation.clients), budget, evaluate_every, progress)
        if resume:
            directory.require()
        else:
            directory.create(_config_of_python(plan, federation) if config is None else config)
        with directory.locked():
            if resume and (stored := directory.load_state(plan.digest(), size_of(weights))) is not None:
                for tree in (stored.weights, stored.average or stored.weights):
                    check_tensors(directory.checkpoint, tree, weights)
                if stored.round > plan.rounds or _missing(stored) != _missing(fresh):
                    raise RunError(f"{directory.checkpoint} is not of the plan that config.toml describes")
                fresh = stored
            releases = Releases(federation.clients, _ledger_of(directory, simulator, fresh.round))
            computing = (simulator.trainer.name, simulator.chunk)
            if directory.load_engine(device.type) != computing:
                directory.save_engine(device.type, *computing)
            return simulator.run(network, fresh, directory, releases, budget, evaluate_every, progress)


def _at_most(releases: int, budget: Allows | None) -> Allows:
    return lambda rounds: len(rounds) <= releases and (budget is None or budget(rounds))


def _check_outputs(simulator: Simulator, weights: Tree, loss: Loss) -> None:
    """Refuse a network that cannot name some class: the first client, which is tried, need not hold it."""
    tried = simulator.batch_of_first_client().inputs[0]  # not a single example, which BatchNorm does not take
    outputs, classes = simulator.engine.outputs(weights, tried), simulator.federation.train.classes
    if is_binary(outputs) and classes == 2 and loss is not F.cross_entropy:
        return
    if outputs.dim() != 2 or outputs.shape[-1] < classes:
        found = "x".join(map(str, outputs.shape[1:])) or "1"
        needed = "it needs one for each" + (", or a single one and a binary loss" if classes == 2 else "")
        raise ModelError(f"the network has {found} outputs for the {classes} classes of the data; {needed}")


def _kept_engine(
    directory: RunDirectory, device: torch.device, engine: EngineName, chunk: int | None
) -> tuple[EngineName, int | None]:
    """What a run computed with before it was stopped, where nothing else is asked for: other chunks round otherwise."""
    kept = directory.load_engine(device.type)
    names = {name: name for name in get_args(EngineName)}
    if kept is None or kept[0] not in names or engine not in ("auto", kept[0]):
        return engine, chunk
    return names[kept[0]], chunk or kept[1]


def _ledger_of(directory: RunDirectory, simulator: Simulator, rounds_done: int) -> Ledger:
    plan = simulator.plan
    noise: NoiseKind = "secure" if plan.secure_noise else "seeded"
    population = Population.of(simulator.federation, simulator.engine.layout, plan).written()
    # Not the seed: a ledger may be handed to an accountant, and knowing which records were drawn undoes what sampling hides.
    written = {key: value for key, value in plan.written().items() if key != "seed"}
    ledger = Ledger.open_or_create(directory.ledger, written, population, noise)
    ledger.check(written, population, noise, rounds_done)
    return ledger


def _config_of_python(plan: Plan, federation: Federation) -> str:
    """What is written of a run whose network and data came from Python: no command can build them again."""
    lines = ["# network and data came from Python", f'python = "{federation.describe()}"', "", "[plan]"]
    return "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in plan.written().items())]) + "\n"


class Simulator:
    """Rounds of virtual clients: the data stay on the device, and only indices move."""

    def __init__(
        self,
        engine: Engine,
        federation: Federation,
        plan: Plan,
        device: torch.device,
        chunk: int | None,
        front: nn.Module | None = None,
    ) -> None:
        """With `front`, the engine's network takes what those layers make of the data."""
        self.federation = federation
        self.plan = plan
        self.device = device
        self.examples = Examples(through(front, federation.train.inputs, device), federation.train.targets.to(device))
        self.validation = federation.validation
        if front is not None and self.validation is not None:
            self.validation = replace(self.validation, inputs=through(front, self.validation.inputs, device))
        self.noise = noise_of(plan, engine.layout)
        # What is drawn is as secret as the noise: nobody has the seed, not even a resumed run, which draws afresh. Twice the
        # same records under fresh noise would be more than two releases of random ones.
        self.draws = plan.but(seed=secrets.randbits(62)) if plan.secure_noise and plan.private else plan
        self.trainer: Trainer = Stepwise(METHODS[plan.method], engine, self.examples)
        self.chunk = chunk or min(_USUAL_CHUNK.get(device.type, 64), self.most_clients())

    @property
    def engine(self) -> Engine:
        """What computes the gradients."""
        return self.trainer.engine

    @deferred_interrupts()
    def run(
        self,
        network: nn.Module,
        state: State,
        directory: RunDirectory | None,
        releases: Releases,
        budget: Allows | None,
        every: int,
        progress: Progress | None,
    ) -> Run:
        """All rounds that are left, each charged before it begins and kept on disk before the next one does.

        Ctrl-C ends them between two local steps.
        """
        started, steps = time.perf_counter(), 0
        metrics = directory.forget_metrics_after(state.round) if directory else []
        state = _to(state, self.device)
        while state.round < self.plan.rounds and releases.may_go_on(state.round, budget):
            round_started = time.perf_counter()
            before = state
            chosen = choose_clients(self.draws, self.federation.clients, state.round)
            releases.charge(state.round, chosen, self.plan.clip_at(state.round, state.clip) if self.plan.private else 0.0)
            state = self.round(state, torch.from_numpy(chosen))
            steps += (self.plan.per_round if self.plan.hides_cohort else len(chosen)) * self.plan.local_steps
            row = self._measure(before, state, torch.from_numpy(chosen), every)
            wait(self.device)
            if not self.plan.hides_cohort:  # how long a round took tells how many clients it had
                row["seconds"] = round(time.perf_counter() - round_started, 4)
            metrics.append(row)
            if directory:
                directory.append_metrics(row)
                directory.save_state(state, self.plan.digest())
            if progress:
                progress(row)
        released = state.average or state.weights
        network.load_state_dict(released, strict=False)
        if directory:
            directory.save_model(network.state_dict(), state.round)
        seconds = time.perf_counter() - started
        kept = directory.path if directory else None
        return Run(
            self.plan,
            self.federation,
            network,
            metrics,
            seconds,
            steps,
            tuple(releases.charges),
            releases.participations,
            kept,
            self.trainer.name,
            self.chunk,
        )

    def round(self, state: State, chosen: Tensor) -> State:
        """One global round with the chosen clients: the state after it."""
        method, plan, round_ = METHODS[self.plan.method], self.plan, state.round
        received = Aggregate(state.weights, plan)
        for clients in chosen.split(self.chunk) if len(chosen) else ():
            table, sizes = self.records_of(clients)
            at = self.moment(state, clients.to(self.device), sizes)
            sent = self.trainer(state.weights, self.draw(at, table, sizes), at)
            received.add(method.admit(sent.update, at), method.admit_count(sent, at))
        nobody = torch.zeros(0, dtype=torch.int64, device=self.device)
        at = self.moment(state, nobody, nobody)
        weights = server_update(method, state.weights, received, at)
        average = None if state.average is None else moving_average(state.average, weights, plan.ema)
        return State(round_ + 1, weights, average, next_clip(method, received, at))

    def batch_of_first_client(self) -> Batch:
        """What the first client would train on in its first step."""
        clients = torch.zeros(1, dtype=torch.int64)
        table, sizes = self.records_of(clients)
        width = min(self.plan.batch_size, int(sizes[0]))
        everything = torch.ones(1, width, dtype=torch.bool, device=self.device)
        return self.examples.batch(table[:, :width], everything)

    def moment(self, state: State, clients: Tensor, sizes: Tensor) -> Moment:
        """Where clients with so many records each are at the start of a round."""
        expected = sizes.clamp(max=self.plan.batch_size)
        return Moment(self.plan, self.engine, self.noise, state.round, clients, expected, current_clip=state.clip)

    def records_of(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        """The records [clients, most], as places in the training data, and how many each has."""
        table, sizes = self.federation.table(clients.numpy())
        return torch.from_numpy(table).to(self.device), torch.from_numpy(sizes).to(self.device)

    def draw(self, at: Moment, table: Tensor, sizes: Tensor) -> Draw:
        """The records of all local steps [steps, clients, slots], as places in the training data."""
        drawn = choose_records_of_steps(self.draws, at.clients, sizes, at.round)
        return Draw(table.expand(len(drawn.positions), -1, -1).gather(2, drawn.positions), drawn.present)

    def _measure(self, before: State, state: State, chosen: Tensor, every: int) -> Row:
        """What is written of a round. In a private run nothing here comes from before the noise."""
        row: Row = {"round": state.round}
        if not self.plan.hides_cohort:
            row["clients"] = len(chosen)
        row["learning_rate"] = self.plan.learning_rate_at(before.round)
        if self.plan.private:
            row["clip"] = self.plan.clip_at(before.round, before.clip)
        if state.round % every and state.round != self.plan.rounds:
            return row
        if self.validation is not None:
            row |= evaluate(self.engine, state.average or state.weights, self.validation, self.device)
        if not self.plan.private:
            row["gradient_norm"] = self.gradient_norm(before, chosen)
        return row

    def gradient_norm(self, state: State, chosen: Tensor) -> float | None:
        """The mean over the chosen clients of ‖∇‖₂ at the global model, ∇ the mean gradient of a client's first batch.

        Raw gradients: to be shown only where a run claims no privacy. None where nobody was chosen, or where it is not
        finite.
        """
        norms = []
        at_once = min(self.chunk, self.most_clients())  # a trainer may hold more clients than their gradients leave room for
        for clients in chosen.split(at_once) if len(chosen) else ():
            table, sizes = self.records_of(clients)
            at = self.moment(state, clients.to(self.device), sizes)
            drawn = choose_records(self.draws, at.clients, sizes, state.round, 0)
            batch = self.examples.batch(table.gather(1, drawn.positions), drawn.present)
            total = self.engine.summed_gradients(repeat(state.weights, len(clients)), batch)
            squares = sum(value.double().reshape(len(value), -1).square().sum(1) for value in total.values())
            norms.append(torch.as_tensor(squares).sqrt() / at.expected_batch)
        mean = float(torch.cat(norms).mean()) if norms else math.inf
        return mean if math.isfinite(mean) else None

    def most_clients(self) -> int:
        """How many clients may be trained at once within the budget of memory."""
        return clients_within_budget(self.engine.model, self.examples.inputs[0], self.plan.slots, self.plan.per_example)


def _missing(state: State) -> list[bool]:
    return [part is None for part in (state.average, state.clip)]


def _to(state: State, device: torch.device) -> State:
    def moved(tree: Tree) -> Tree:
        return {name: value.to(device) for name, value in tree.items()}

    average = None if state.average is None else moved(state.average)
    return replace(state, weights=moved(state.weights), average=average)
