"""A whole training on one device, from a prepared experiment to a `Run`.

Three steps: choose an engine, open the run, and run the rounds.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from fedcdp.accounting.budget import Allows, Releases
from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.ledger import Noise as NoiseKind
from fedcdp.config import consent
from fedcdp.config.experiment import EngineName, Experiment
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Splits
from fedcdp.data.partition import Federation
from fedcdp.engine import Loss, engines_for
from fedcdp.engine.frozen import split
from fedcdp.engine.runtime import deferred_interrupts, products, usable_device, wait
from fedcdp.errors import ModelError, PlanError
from fedcdp.files.tensors import size_of
from fedcdp.files.tree import Tree, each_tensor
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.methods.server_optimizers import OptimizerState
from fedcdp.training.autotune import choose_engine
from fedcdp.training.evaluation import score, try_own_metrics
from fedcdp.training.loss_contract import check_loss, check_outputs, loss_for
from fedcdp.training.metrics import Figures, OwnMetrics, check_own_metrics
from fedcdp.training.prepared import Prepared, prepare_experiment
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.run import Run, hides_time
from fedcdp.training.rundir import Row, RunDirectory, State
from fedcdp.training.scaling import copy_scaling, set_scaling

Progress = Callable[[Row], None]


def train(
    prepared: Prepared,
    *,
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
    most_releases: int | None = None,
    budget: Allows | None = None,
    progress: Progress | None = None,
) -> Run:
    """Train a prepared experiment; other arguments as for `simulate`. The prepared objects are not changed."""
    if chunk is not None and chunk < 1:
        raise PlanError(f"chunk: {chunk} is not allowed; it must be at least 1")
    if evaluate_every < 1:
        raise PlanError(f"evaluate_every: {evaluate_every} is not allowed; it must be at least 1")
    device = usable_device(device)
    directory = None if out is None else RunDirectory(out)
    if resume and directory:
        engine, chunk = _kept_engine(directory, device, engine, chunk)
    budget = budget if most_releases is None else _at_most(most_releases, budget)
    loss, own = loss_for(prepared.federation.train, loss), metrics or {}
    check_own_metrics(own, prepared.federation.validation)
    with deferred_interrupts(), products(tf32):
        network = copy.deepcopy(prepared.network).to(device)
        simulator, fresh = begin(prepared, network, device=device, loss=loss, engine=engine, chunk=chunk)
        if simulator.data.validation is not None:
            try_own_metrics(own, simulator.engine, fresh.weights, simulator.data.validation, device)
        with _opened(prepared, simulator, fresh, directory=directory, config=config, resume=resume) as (state, releases):
            if prepared.plan.scaling_noise is not None:
                where, plan = prepared.federation, prepared.plan
                if not set_scaling(network, where, plan, releases, directory=directory, budget=budget):
                    budget = _at_most(0, None)
                # Known only now: what was computed from unscaled inputs is outdated.
                computed: EngineName = simulator.local_engine.name  # type: ignore[assignment]
                simulator, _ = begin(prepared, network, device=device, loss=loss, engine=computed, chunk=simulator.chunk)
            return _rounds(
                prepared,
                simulator,
                network,
                state,
                directory=directory,
                releases=releases,
                budget=budget,
                every=evaluate_every,
                own=own,
                progress=progress,
            )


def train_experiment(
    experiment: Experiment,
    out: Path | str | None,
    *,
    resume: bool = False,
    data_dir: Path | str | None = None,
    quiet: bool = False,
    most_releases: int | None = None,
    budget: Allows | None = None,
    progress: Progress | None = None,
    splits: Splits | None = None,
    prepared: Prepared | None = None,
) -> Run:
    """Run an experiment into a directory (None: in memory only); `splits` or `prepared` are used if given."""
    consent.remember(experiment.model.network)
    machine = experiment.run
    return train(
        prepared or prepare_experiment(experiment, data_dir, quiet=quiet, splits=splits),
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
) -> tuple[Simulator, State]:
    """The simulator with the fastest engine that `engine` and `chunk` allow, and the state before the first round.

    Raises for a network that cannot be trained, or differentiated per example (`per_example`, by default as the plan needs).
    """
    plan, federation = prepared.plan, prepared.federation
    weights = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    for name, value in weights.items():
        if not torch.isfinite(value).all():
            raise ModelError(f"{name} holds a weight that is not finite; training cannot start from it")
    front, trained = split(network, federation.train.inputs, device)
    engines = engines_for(trained, loss, engine)
    data = ClientData(federation, plan, device, front)
    first = next(iter(engines.values()))
    first.check(weights, data.first_batch(), per_example=plan.per_example if per_example is None else per_example)
    # Not a single example, which BatchNorm rejects; the first client is tried, although it need not hold every class.
    # Zeros, not records: outside `torch.func` a network may keep what it sees in a buffer, and only the shape matters.
    tried = each_tensor(data.first_batch().inputs, lambda value: torch.zeros_like(value[0]))
    outputs = first.outputs(weights, tried)
    check_outputs(outputs, federation.train, loss)
    check_loss(first.loss, outputs, federation.train)
    state = State.first(plan, weights)
    local_engine, at_once = choose_engine(
        plan,
        engines,
        engine,
        data.examples,
        chunk=chunk,
        most=data.most_clients(first.model),
        seconds=lambda local_engine, clients: Simulator(data, local_engine, clients).seconds_a_client_step(state),
    )
    return Simulator(data, local_engine, at_once), state


@contextmanager
def _opened(
    prepared: Prepared,
    simulator: Simulator,
    fresh: State,
    *,
    directory: RunDirectory | None,
    config: str | None,
    resume: bool,
) -> Iterator[tuple[State, Releases]]:
    """The state to continue from and the releases so far: from the run directory, which stays locked, or fresh."""
    plan, clients = prepared.plan, prepared.federation.clients
    if directory is None:
        yield fresh, Releases(clients)
        return
    if resume:
        directory.require()
    else:
        directory.create(_config_of_python(plan, prepared.federation) if config is None else config)
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
    releases: Releases,
    budget: Allows | None,
    every: int,
    own: OwnMetrics,
    progress: Progress | None,
) -> Run:
    """Run the remaining rounds; each is charged before it begins and saved to disk before the next one begins.

    Ctrl-C ends them between two local steps.
    """
    started, steps = time.perf_counter(), 0
    plan, data = prepared.plan, simulator.data
    metrics = directory.forget_metrics_after(state.round) if directory else []
    state = _to(state, data.device)
    while state.round < plan.rounds and releases.may_go_on(state.round, budget):
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
        if progress:
            progress(row)
    final, seconds = state.average or state.weights, time.perf_counter() - started
    trained = _released_model(prepared.network, network, final)
    scores, client_scores = Figures(), list[dict[str, Any]]()
    if data.validation is not None and state.round:
        scores, client_scores = score(simulator.engine, final, data.federation, data.validation, data.device, own)
    if directory:
        directory.save_scores(state.round, scores, client_scores)
        directory.save_model(trained.state_dict(), state.round)
    return Run(
        plan=plan,
        federation=prepared.federation,
        model=trained,
        population=prepared.population,
        metrics=metrics,
        seconds=seconds,
        client_steps=steps,
        charges=tuple(releases.charges),
        participations=releases.participations,
        directory=directory.path if directory else None,
        engine=simulator.local_engine.name,
        chunk=simulator.chunk,
        scores=scores,
        client_scores=client_scores,
    )


def _released_model(untrained: nn.Module, computing: nn.Module, weights: Tree) -> nn.Module:
    """The trained network: a copy that never saw a record, with the released weights and what inputs are standardised by.

    The network that computed gradients saw raw records, and may have kept some in a buffer or an attribute.
    """
    model = copy.deepcopy(untrained).to(next(iter(weights.values())).device)
    model.load_state_dict(weights, strict=False)
    copy_scaling(computing, model)
    return model


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


def _config_of_python(plan: Plan, federation: Federation) -> str:
    """The config of a run whose network and data came from Python: no command can rebuild them."""
    import tomli_w

    written = tomli_w.dumps({"python": federation.describe(), "plan": plan.written()})
    return f"# network and data came from Python\n{written}"


def _to(state: State, device: torch.device) -> State:
    def moved(tree: Tree) -> Tree:
        return {name: value.to(device) for name, value in tree.items()}

    average = None if state.average is None else moved(state.average)
    optimizer = state.optimizer
    if optimizer is not None:
        optimizer = OptimizerState(**{part: moved(tree) for part, tree in optimizer.parts().items()})
    return replace(state, weights=moved(state.weights), average=average, optimizer=optimizer)
