"""A whole training, on one device or on one for each rank, from a prepared experiment to a `Run`.

Three steps: choose an engine, open the run, and run the rounds.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fedcdp.accounting.budget import Allows, Releases, accounting_is_installed
from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.ledger import Noise as NoiseKind
from fedcdp.config import consent
from fedcdp.config.experiment import EngineName, Experiment
from fedcdp.data.dataset import Splits
from fedcdp.engine import Engine, Loss, engines_for
from fedcdp.engine.frozen import split
from fedcdp.engine.independence import check_independent
from fedcdp.engine.reachability import check_all_used, named_briefly
from fedcdp.engine.runtime import deferred_interrupts, products, usable_device, wait
from fedcdp.errors import ModelError, PlanError, RunError
from fedcdp.files.tensors import size_of
from fedcdp.files.tree import Tree, each_tensor
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.methods.server_optimizers import OptimizerState
from fedcdp.training.autotune import choose_engine
from fedcdp.training.evaluation import score, try_own_metrics
from fedcdp.training.export import without_secrets
from fedcdp.training.local_engines import LocalEngine
from fedcdp.training.loss_contract import check_loss, check_outputs, loss_for
from fedcdp.training.memory import Memory
from fedcdp.training.metrics import Figures, OwnMetrics, check_own_metrics
from fedcdp.training.prepared import Prepared, prepare_experiment
from fedcdp.training.progress import Audience, Reports
from fedcdp.training.python_origin import written_origin
from fedcdp.training.rank_facts import facts_of
from fedcdp.training.ranks import Ranks
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.run import Run, hides_time
from fedcdp.training.rundir import RunDirectory, State
from fedcdp.training.scaling import copy_scaling, set_scaling, set_standardisation, standardised_by

_LOG = logging.getLogger("fedcdp")


def train(
    prepared: Prepared,
    *,
    adversary: str = "server",
    unit: str = "record",
    loss: Loss | None = None,
    metrics: OwnMetrics | None = None,
    device: str | torch.device = "cpu",
    engine: EngineName = "auto",
    chunk: int | None = None,
    tf32: bool = False,
    evaluate_every: int = 1,
    out: Path | str | None = None,
    config: str | None = None,
    resume: bool = False,
    memory: Memory | None = None,
    most_rounds: int | None = None,
    most_releases: int | None = None,
    budget: Allows | None = None,
    progress: Reports = None,
    ranks: Ranks | None = None,
) -> Run:
    """Train a prepared experiment; other arguments as for `simulate`. The prepared objects are not changed.

    A run without a directory goes on from its `memory`, if one is given. It ends after `most_rounds` more rounds. All
    `ranks` call this with the same arguments and get the same result. Only the leader uses `out`, `memory`, `budget` and
    `progress`.
    """
    for name, value in (("chunk", chunk), ("evaluate_every", evaluate_every), ("rounds", most_rounds)):
        check_count(name, value)
    ranks = ranks or Ranks()
    device = usable_device(ranks.device(device))
    directory = None if out is None else RunDirectory(out)
    memory = memory or Memory(Releases(prepared.federation.clients))
    if directory is None and memory.followed and ranks.leads:
        raise RunError("resume: only rank 0 can go on alone with a run in memory, because it alone has counted all releases")
    memory.followed = not ranks.leads
    if resume and directory and ranks.leads:
        engine, chunk = _kept_engine(directory, device, engine, chunk)
    audience = Audience(progress)
    own_loss, own = loss, metrics or {}
    loss = loss_for(prepared.federation.train, loss)
    check_own_metrics(own, prepared.federation.validation)
    allows = budget if most_releases is None else _at_most(most_releases, budget)
    with ranks.joined(), deferred_interrupts(), products(tf32):
        ranks.check_device(device)
        network = copy.deepcopy(prepared.network).to(device)
        simulator, fresh = begin(prepared, network, device=device, loss=loss, engine=engine, chunk=chunk, ranks=ranks)
        if ranks.several:
            ranks.agree(facts_of(prepared, simulator))
        if prepared.plan.private and not resume:  # the first release began runs with unused tensors, which may go on
            check_all_used(simulator.engine, simulator.data.first_batch())
        if simulator.data.validation is not None:
            try_own_metrics(own, simulator.engine, fresh.weights, simulator.data.validation, device)
        if directory and not resume and config is None:
            config = written_origin(prepared.network, prepared.federation, prepared.plan, own_loss is not None)
        computed: EngineName = simulator.local_engine.name  # type: ignore[assignment]
        again = partial(
            train, prepared, adversary=adversary, unit=unit, loss=own_loss, metrics=metrics, device=device,
            engine=computed, chunk=simulator.chunk, tf32=tf32, evaluate_every=evaluate_every, out=out,
            resume=directory is not None, memory=memory, budget=budget, progress=audience.listeners,
        )  # fmt: skip
        if not ranks.leads:
            return _followed(prepared, simulator, network, loss=loss, again=again)
        opened = _opened(prepared, simulator, fresh, directory=directory, memory=memory, config=config, resume=resume)
        told = audience.training(_settings(prepared), prepared.plan.rounds, hides_time(prepared.plan, prepared.federation))
        if directory and not resume:
            directory.require_creatable()  # before a logger opens its own run
        with told, opened as (state, releases):
            if prepared.plan.scaling_noise is not None:
                where, plan = prepared.federation, prepared.plan
                if not set_scaling(network, where, plan, releases, store=directory or memory, budget=allows):
                    allows = _at_most(0, None)
                ranks.tell([value.cpu() for value in standardised_by(network) or ()])
                simulator = _begun_again(prepared, simulator, network, loss)
            run = _rounds(
                prepared,
                simulator,
                network,
                state,
                directory=directory,
                memory=memory,
                releases=releases,
                budget=allows,
                most_rounds=most_rounds,
                every=evaluate_every,
                own=own,
                audience=audience,
                against=(adversary, unit),
                again=again,
            )
            ranks.tell(SharedResult.of(run))
            return run


def check_count(name: str, value: object) -> None:
    """Refuse anything but None and a whole number of at least 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
        raise PlanError(f"{name}: {str(value)[:100]} is not allowed; it must be a whole number of at least 1")


def train_experiment(
    experiment: Experiment,
    out: Path | str | None,
    *,
    resume: bool = False,
    data_dir: Path | str | None = None,
    quiet: bool = False,
    most_releases: int | None = None,
    budget: Allows | None = None,
    progress: Reports = None,
    splits: Splits | None = None,
    prepared: Prepared | None = None,
    ranks: Ranks | None = None,
) -> Run:
    """Run an experiment into a directory (None: in memory only); `splits` or `prepared` are used if given."""
    consent.remember(experiment.model.network)
    machine = experiment.run
    return train(
        prepared or prepare_experiment(experiment, data_dir, quiet=quiet, splits=splits),
        adversary=machine.adversary,
        unit=machine.unit,
        device=machine.device,
        engine=machine.engine,
        chunk=machine.chunk,
        tf32=machine.tf32,
        evaluate_every=machine.evaluate_every,
        out=out,
        config=None if out is None or resume else experiment.to_toml(),
        resume=resume,
        most_releases=most_releases,
        budget=budget,
        progress=progress,
        ranks=ranks,
    )


def begin(
    prepared: Prepared,
    network: nn.Module,
    *,
    device: torch.device,
    loss: Loss,
    engine: EngineName = "auto",
    chunk: int | None = None,
    per_example: bool | None = None,
    ranks: Ranks | None = None,
) -> tuple[Simulator, State]:
    """The simulator with the fastest engine that `engine` and `chunk` allow, and the state before the first round.

    The leader of the `ranks` chooses for all of them. Under secure noise they also get its secret draws.

    Raises for a network that cannot be trained, or differentiated per example (`per_example`, by default as the plan needs).
    """
    ranks = ranks or Ranks()
    data, engines, state = ready(prepared, network, device=device, loss=loss, engine=engine, per_example=per_example)
    data.draws = ranks.once(lambda: data.draws)

    def chosen(name: EngineName, among: dict[str, Engine], chunk: int | None) -> tuple[LocalEngine, int]:
        return choose_engine(
            prepared.plan,
            among,
            name,
            data.examples,
            chunk=chunk,
            most=data.most_clients(next(iter(among.values())).model),
            seconds=lambda local_engine, clients: Simulator(data, local_engine, clients).seconds_a_client_step(state),
            ranks=ranks.size,
        )

    if ranks.leads:
        local_engine, at_once = chosen(engine, engines, chunk)
        ranks.tell((local_engine.name, at_once))
    else:
        name, at_once = ranks.heard()
        only = name if name in engines else next(iter(engines))  # a compiled engine is built on the first one
        local_engine, at_once = chosen(name, {only: engines[only]}, at_once)
    return Simulator(data, local_engine, at_once, ranks=ranks), state


def ready(
    prepared: Prepared,
    network: nn.Module,
    *,
    device: torch.device,
    loss: Loss,
    engine: EngineName = "auto",
    per_example: bool | None = None,
    kept: Tensor | None = None,
) -> tuple[ClientData, dict[str, Engine], State]:
    """The data on the device, the engines that `engine` allows, and the state before the first round; checked as by `begin`.

    Records that are not `kept` are zeroed out (`ClientData`).
    """
    plan, federation = prepared.plan, prepared.federation
    weights = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    for name, value in weights.items():
        if not torch.isfinite(value).all():
            raise ModelError(f"{name} holds a weight that is not finite; training cannot start from it")
    front, trained = split(network, federation.train.inputs, device)
    data = ClientData(federation, plan, device, front, kept)
    known = engines_for(trained, loss, engine, each_tensor(data.first_batch().inputs, lambda value: value[0, :1]))
    engines = {name: data.within_memory(each) for name, each in known.items()}
    first = next(iter(engines.values()))
    first.check(weights, data.first_batch(), per_example=plan.per_example if per_example is None else per_example)
    if plan.private:
        check_independent(first, data.first_batch())
    # Not a single example, which BatchNorm rejects; the first client is tried, although it need not hold every class.
    # Zeros, not records: outside `torch.func` a network may keep what it sees in a buffer, and only the shape matters.
    tried = each_tensor(data.first_batch().inputs, lambda value: torch.zeros_like(value[0]))
    outputs = first.outputs(weights, tried)
    check_outputs(outputs, federation.train, loss)
    check_loss(first.loss, outputs, federation.train)
    return data, engines, State.first(plan, weights)


@dataclass(frozen=True)
class SharedResult:
    """What the leader tells its followers about the finished run."""

    figures: dict[str, Any]
    weights: Tree

    @staticmethod
    def of(run: Run) -> SharedResult:
        """The outcome of a run, with tensors on the CPU."""
        names = ("metrics", "seconds", "client_steps", "charges", "participations", "scores", "client_scores")
        weights = {name: value.cpu() for name, value in run.model.state_dict().items()}
        return SharedResult({name: getattr(run, name) for name in names}, weights)


def _followed(prepared: Prepared, simulator: Simulator, network: nn.Module, *, loss: Loss, again: partial[Run]) -> Run:
    """The training of a follower, which opens nothing and charges nothing: rounds as the leader begins them, and its run."""
    if prepared.plan.scaling_noise is not None:
        set_standardisation(network, *simulator.ranks.heard())
        simulator = _begun_again(prepared, simulator, network, loss)
    weights = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    outcome: SharedResult = simulator.follow(State.first(prepared.plan, weights))
    model = copy.deepcopy(prepared.network).to(simulator.data.device)
    model.load_state_dict(outcome.weights)
    how = again.keywords
    return Run(
        plan=prepared.plan,
        federation=prepared.federation,
        model=model,
        population=prepared.population,
        directory=None if how["out"] is None else Path(how["out"]),
        engine=simulator.local_engine.name,
        chunk=simulator.chunk,
        tf32=how["tf32"],
        loss=how["loss"],
        own_metrics=how["metrics"] or {},
        again=again,
        **outcome.figures,
    )


def _begun_again(prepared: Prepared, simulator: Simulator, network: nn.Module, loss: Loss) -> Simulator:
    """The same simulator once the scaling of inputs is known: what was computed from unscaled inputs is outdated."""
    name: EngineName = simulator.local_engine.name  # type: ignore[assignment]
    device, ranks = simulator.data.device, simulator.ranks
    again, _ = begin(prepared, network, device=device, loss=loss, engine=name, chunk=simulator.chunk, ranks=ranks)
    return again


@contextmanager
def _opened(
    prepared: Prepared,
    simulator: Simulator,
    fresh: State,
    *,
    directory: RunDirectory | None,
    memory: Memory,
    config: str | None,
    resume: bool,
) -> Iterator[tuple[State, Releases]]:
    """The state to continue from and the releases so far: from the run directory, which stays locked, or from memory."""
    plan, clients = prepared.plan, prepared.federation.clients
    if directory is None:
        yield memory.state or fresh, memory.releases
        return
    if resume:
        directory.require()
    else:
        directory.create(config or "")
    with directory.locked():
        if resume:
            fresh = directory.resumed_state(fresh, plan, size_of(fresh.weights)) or fresh
        noise: NoiseKind = "secure" if plan.secure_noise else "seeded"
        ledger = Ledger.of_run(directory.ledger, plan, prepared.population, noise, fresh.round)
        computing = (simulator.local_engine.name, simulator.chunk)
        if directory.load_engine(simulator.data.device.type) != computing:
            directory.save_engine(simulator.data.device.type, *computing)
        yield fresh, Releases(clients, ledger)


@deferred_interrupts()
def _rounds(
    prepared: Prepared,
    simulator: Simulator,
    network: nn.Module,
    state: State,
    *,
    directory: RunDirectory | None,
    memory: Memory,
    releases: Releases,
    budget: Allows | None,
    most_rounds: int | None,
    every: int,
    own: OwnMetrics,
    audience: Audience,
    against: tuple[str, str],
    again: partial[Run],
) -> Run:
    """Run the remaining rounds; each is charged before it begins and saved before the next one begins.

    Ctrl-C ends them between two local steps.
    """
    started, steps = time.perf_counter(), 0
    plan, data = prepared.plan, simulator.data
    metrics = directory.forget_metrics_after(state.round) if directory else memory.metrics
    state = _to(state, data.device)
    last = plan.rounds if most_rounds is None else min(plan.rounds, state.round + most_rounds)
    while state.round < last and releases.may_go_on(state.round, budget):
        round_started = time.perf_counter()
        before = state
        chosen = choose_clients(data.draws, data.federation.clients, state.round)
        releases.charge(state.round, chosen, plan.clip_at(state.round, state.clip) if plan.private else 0.0)
        state = simulator.round(state, torch.from_numpy(chosen))
        steps += (plan.per_round if plan.hides_cohort else len(chosen)) * plan.local_steps
        row = simulator.measure(before, state, torch.from_numpy(chosen), every)
        wait(data.device)
        if not hides_time(plan, data.federation):
            row["seconds"] = round(time.perf_counter() - round_started, 4)
        metrics.append(row)
        if directory:
            directory.append_metrics(row)
            directory.save_state(state, plan.digest())
        else:
            memory.state = state
        audience.tell(row, partial(_epsilon, prepared, *against, releases.rounds))
    final, seconds = state.average or state.weights, time.perf_counter() - started
    trained = _released_model(prepared.network, network, final)
    if state.round and (still := _unmoved(prepared.network, final)):
        _LOG.warning(
            "%s did not change in %d rounds: is the learning rate too small, or its gradient zero at the starting weights?",
            named_briefly(still),
            state.round,
        )
    scores, client_scores = Figures(), list[dict[str, Any]]()
    if data.validation is not None and state.round:
        scores, client_scores = score(simulator.engine, final, data.federation, data.validation, data.device, own)
    if directory:
        directory.save_scores(state.round, scores, client_scores)
        directory.save_model(trained.state_dict(), state.round)
    audience.finish(scores)
    return Run(
        plan=plan,
        federation=prepared.federation,
        model=trained,
        population=prepared.population,
        metrics=list(metrics),
        seconds=seconds,
        client_steps=steps,
        charges=tuple(releases.charges),
        participations=releases.participations.copy(),
        directory=directory.path if directory else None,
        engine=simulator.local_engine.name,
        chunk=simulator.chunk,
        tf32=again.keywords["tf32"],
        scores=scores,
        client_scores=client_scores,
        loss=again.keywords["loss"],
        own_metrics=own,
        again=again,
    )


def _epsilon(prepared: Prepared, adversary: str, unit: str, rounds: tuple[int, ...]) -> float:
    """ε after the releases of these rounds."""
    if not prepared.plan.private:
        return math.inf
    if not accounting_is_installed():
        raise PlanError("epsilon: needs dp-accounting; install it with pip install 'dp-accounting>=0.6,<0.7'")
    from fedcdp.accounting.calibrate import Target

    return Target(1.0, adversary, unit).reached(prepared.plan, prepared.population, rounds)


def _settings(prepared: Prepared) -> dict[str, Any]:
    """What a logger may know about a run before it begins."""
    settings = {"federation": prepared.federation.describe(), "plan": prepared.plan.written()}
    return without_secrets(settings, prepared.plan)


def _released_model(untrained: nn.Module, computing: nn.Module, weights: Tree) -> nn.Module:
    """The trained network: a copy that never saw a record, with the released weights and what inputs are standardised by.

    The network that computed gradients saw raw records, and may have kept some in a buffer or an attribute.
    """
    model = copy.deepcopy(untrained).to(next(iter(weights.values())).device)
    model.load_state_dict(weights, strict=False)
    copy_scaling(computing, model)
    return model


def _unmoved(untrained: nn.Module, weights: Tree) -> list[str]:
    """The trained tensors that are released as they were at the start, such as an adapter without a gradient."""
    start = dict(untrained.named_parameters())
    return [name for name, value in weights.items() if torch.equal(value.cpu(), start[name].detach().cpu())]


def _at_most(releases: int, budget: Allows | None) -> Allows:
    return lambda rounds: len(rounds) <= releases and (budget is None or budget(rounds))


def _kept_engine(
    directory: RunDirectory, device: torch.device, engine: EngineName, chunk: int | None
) -> tuple[EngineName, int | None]:
    """The engine and chunk size before the run was stopped, unless others are requested: other chunks round differently."""
    kept = directory.load_engine(device.type)
    names = {name: name for name in get_args(EngineName)}
    if kept is None or kept[0] not in names or engine not in ("auto", kept[0]):
        return engine, chunk
    return names[kept[0]], chunk or kept[1]


def _to(state: State, device: torch.device) -> State:
    def moved(tree: Tree) -> Tree:
        return {name: value.to(device) for name, value in tree.items()}

    average = None if state.average is None else moved(state.average)
    optimizer = state.optimizer
    if optimizer is not None:
        optimizer = OptimizerState(**{part: moved(tree) for part, tree in optimizer.parts().items()})
    return replace(state, weights=moved(state.weights), average=average, optimizer=optimizer)
