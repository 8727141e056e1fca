"""The simulator: a whole training on one device, from a network and data to a `Run`.

Four steps: prepare the network and the data, choose an engine, open the run, and run the rounds.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedcdp.accounting.budget import Allows, Releases
from fedcdp.accounting.ledger import Charge, Ledger
from fedcdp.accounting.ledger import Noise as NoiseKind
from fedcdp.accounting.population import Population
from fedcdp.config import consent
from fedcdp.config.experiment import EngineName, Experiment
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Splits
from fedcdp.data.partition import Federation
from fedcdp.engine import Loss, engines_for
from fedcdp.engine.frozen import split
from fedcdp.engine.runtime import deferred_interrupts, products, usable_device, wait
from fedcdp.errors import ModelError, PlanError, RunError
from fedcdp.files.tensors import check_tensors, size_of
from fedcdp.files.tree import Tree, each_tensor
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.training.autotune import choose_engine
from fedcdp.training.evaluation import no_better_than_guessing, score, try_own_metrics
from fedcdp.training.loss_contract import check_loss, check_outputs, loss_for
from fedcdp.training.metrics import Figures, OwnMetrics, check_own_metrics
from fedcdp.training.planning import recommended_plan
from fedcdp.training.prepared import Prepared, prepare_experiment
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.rundir import Row, RunDirectory, State
from fedcdp.training.scaling import set_scaling

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Mode, Privacy

Progress = Callable[[Row], None]

_LOG = logging.getLogger("fedcdp")


@dataclass(kw_only=True)
class Run:
    """A finished or stopped training, as `fedcdp.simulate` returns it.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, fedcdp.Plan(rounds=3, per_round=10, local_steps=2))
        >>> run.rounds, run.releases
        (3, 3)
        >>> sorted(run.metrics[-1])
        ['accuracy', 'clients', 'clip', 'learning_rate', 'loss', 'round', 'seconds']
        >>> answers = run.model(federation.validation.inputs).argmax(1)
    """

    plan: Plan
    """The plan that was carried out."""
    federation: Federation
    """The clients and their data."""
    model: nn.Module
    """The trained network: the moving average where the plan asks for one."""
    population: Population = field(repr=False)
    """The facts about the federation and the network that the accountant needs."""
    metrics: list[Row] = field(repr=False)
    """One dictionary for each round: its number, and where it was evaluated the task's main metric and the loss."""
    seconds: float
    """Time spent in this process."""
    client_steps: int
    """Local iterations of single clients computed in this process; where the cohort is hidden, the planned number."""
    charges: tuple[Charge, ...] = field(repr=False)
    """Every release so far. Under secure noise, a round that was repeated after a crash is listed again."""
    participations: NDArray[np.int64] = field(repr=False)
    """The number of releases that each client took part in."""
    directory: Path | None = None
    """The run directory, if the run has one."""
    engine: str = "functional"
    """The engine that computed the gradients in this process."""
    chunk: int = 1
    """How many clients it trained at once."""
    scores: Figures = field(default_factory=dict)
    """All metrics of the final model on the validation split, by name: those of the task, the loss, and your own."""
    client_scores: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """The same for each client on its own validation records, where it is known which they are: its name (`client`), their
    number (`examples`), and the metrics."""

    @property
    def releases(self) -> int:
        """The number of releases. Under secure noise, a round that was repeated after a crash counts again."""
        return len(self.charges)

    @property
    def rounds(self) -> int:
        """The number of finished rounds."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the final model on the validation split; None without one, and for a task without classes."""
        if "accuracy" in self.scores:
            return self.scores["accuracy"]
        measured = [row["accuracy"] for row in self.metrics if row.get("accuracy") is not None]
        return measured[-1] if measured else None

    @property
    def warning(self) -> str | None:
        """What is wrong with the result: a constant answer is as good. None: nothing that validation shows."""
        return no_better_than_guessing({"accuracy": self.accuracy} | self.scores, self.federation.validation)

    def privacy(self, mode: Mode = "tight") -> Privacy:
        """State ε against every adversary for the releases of this run.

        Args:
            mode: `tight` (privacy loss distributions), `rdp`, or `paper` (as the paper computes it, which is no guarantee).

        Returns:
            One row for each adversary, unit and relation. `epsilon_used` is what the most-used client has spent.

        Raises:
            PlanError: The mode is unknown.
        """
        from fedcdp.accounting.statement import Usage, state

        most_used = np.sort(self.participations)[::-1][: self.population.copies]
        released = tuple(charge.round for charge in self.charges)
        usage = Usage(released, tuple(int(count) for count in most_used), tuple(self.participations.tolist()))
        return state(self.plan, self.population, mode=mode, rounds=released, usage=usage)

    @property
    def us_per_client_step(self) -> float | None:
        """Microseconds for a local iteration of one client, everything included."""
        return self.seconds / self.client_steps * 1e6 if self.client_steps else None


def simulate(
    model: nn.Module,
    federation: Federation,
    plan: Plan | None = None,
    *,
    target_epsilon: float | None = None,
    adversary: str = "server",
    rounds: int | None = None,
    per_round: int | None = None,
    scale_inputs: bool = False,
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
    """Train a network over a federation on one device, according to a plan or to the recommended recipe.

    The given network stays unchanged. The trained one is `run.model`.

    Args:
        model: The network. The data's task says how many outputs it needs (`Dataset`): for classification, one for each
            class, or a single output and a binary `loss` for two classes.
        federation: The clients and their data.
        plan: Method, clip bound, noise, sampling and schedules. Without a plan, the recommended recipe is used, with noise
            calibrated to `target_epsilon`; the logger `fedcdp` names its settings.
        target_epsilon: The ε per record to calibrate the noise to where no plan is given. Default: 8.
        adversary: The adversary that this ε is for.
        rounds: Overrides the plan's number of rounds.
        per_round: Overrides the plan's number of clients in a round.
        scale_inputs: Where no plan is given: standardise inputs, which must lie in [-1, 1], by means and variances from a
            noised release that takes a tenth of the budget. With a plan, set its `scaling_noise`.
        loss: A function of outputs and targets that returns one number: the mean, over a batch of any size, of a loss that
            each example has for itself, as in `torch.nn.functional`. fedcdp trains with one example at a time, outputs
            [1, ...] and targets [1, ...], and refuses a loss that breaks this contract. Default: that of the data's task,
            such as cross-entropy for classification.
        metrics: Metrics of your own, by name: functions of all outputs and all targets of the validation split that return
            one number. They are computed for the final model, with those of the task, into `run.scores`. For a regression
            they get outputs in the shape of the targets, and both in the targets' original unit.
        device: `cpu`, `cuda`, `cuda:1`, and so on.
        engine: How gradients are computed. `auto` measures in a long training which engine is fastest, within a bounded
            amount of memory. A resumed run keeps its engine. The choice does not change the result beyond rounding.
        chunk: How many clients are trained at once. Chosen and kept like the engine by default.
        tf32: Let a GPU round the factors of products to 10 bits, which is faster. Norms, clipping and noise stay exact.
        evaluate_every: Rounds between evaluations on the validation split.
        out: The run directory, which is written after every round. Default: keep the run in memory only.
        config: The text of `config.toml` in the run directory. Default: the plan, and a note that the rest came from Python.
        resume: Continue the run in `out` after its last finished round.
        most_releases: End the training, with the model so far, before there are more releases than this.
        budget: Called before a round with the rounds released so far and this one. If it returns False, the training ends
            with the model so far.
        progress: Called after each round with its metrics.

    Returns:
        The trained network, its metrics (`run.scores`), those of each round, and all releases, for `run.privacy()`.

    Raises:
        PlanError: The plan does not fit the federation, or an argument is not allowed.
        ModelError: The network cannot be trained under this method, has too few outputs, or its loss breaks the contract.
        RunError: The run directory exists already, or cannot be resumed or written.

    Examples:
        Train to an ε with the recommended recipe:

        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer", scaling="public"), clients=10, scheme="iid")
        >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, target_epsilon=8)
        >>> run.privacy().row("server").epsilon <= 8
        True

        Choose everything yourself:

        >>> plan = fedcdp.Plan(
        ...     rounds=20, per_round=10, local_steps=1, batch_size=42, record_sampling="partition",
        ...     clip=0.25, clip_mode="flat", noise_multiplier=1.4, learning_rate=16, ema=0.5,
        ... )
        >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, plan)
        >>> run.accuracy > 0.8
        True
        >>> round(run.privacy().row("server").epsilon, 1)
        2.0

        A regression, with a loss and a metric of your own:

        >>> import torch
        >>> inputs = torch.linspace(-1, 1, 120).reshape(60, 2)
        >>> data = fedcdp.Dataset(inputs, inputs.sum(1), task="regression")
        >>> federation = fedcdp.partition(data, clients=4, scheme="iid", validation=data)
        >>> plan = fedcdp.Plan(method="nonprivate", rounds=20, per_round=4, local_steps=3, learning_rate=0.2)
        >>> def distance(outputs, targets):
        ...     return (outputs.squeeze(1) - targets).abs().mean()
        >>> def within_a_tenth(outputs, targets):
        ...     return ((outputs - targets).abs() < 0.1).float().mean()
        >>> run = fedcdp.simulate(nn.Linear(2, 1), federation, plan, loss=distance, metrics={"near": within_a_tenth})
        >>> run.accuracy is None, sorted(run.scores), run.scores["r2"] > 0.9
        (True, ['loss', 'mae', 'near', 'r2', 'rmse'], True)
    """
    if plan is None:
        if out is not None and not resume:
            RunDirectory(out).require_creatable()  # before a calibration that may take minutes
        plan, said = recommended_plan(
            model,
            federation,
            target_epsilon=target_epsilon,
            adversary=adversary,
            rounds=rounds,
            per_round=per_round,
            scale_inputs=scale_inputs,
        )
        _LOG.info("%s", said)
    else:
        if target_epsilon is not None or adversary != "server" or scale_inputs:
            raise PlanError(
                "target_epsilon, adversary and scale_inputs choose the noise where no plan is given; calibrate the plan's "
                "noise and set its scaling_noise, or leave the plan out"
            )
        changes = {name: value for name, value in (("rounds", rounds), ("per_round", per_round)) if value is not None}
        plan = plan.but(**changes) if changes else plan
    run = train(
        Prepared.of(model, federation, plan),
        loss=loss,
        metrics=metrics,
        device=device,
        engine=engine,
        chunk=chunk,
        tf32=tf32,
        evaluate_every=evaluate_every,
        out=out,
        config=config,
        resume=resume,
        most_releases=most_releases,
        budget=budget,
        progress=progress,
    )
    if run.warning is not None:
        _LOG.warning("%s", run.warning)
    return run


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
    tried = each_tensor(data.first_batch().inputs, lambda value: value[0])
    outputs = first.outputs(weights, tried)
    check_outputs(outputs, federation.train, loss)
    check_loss(first.loss, outputs, federation.train)
    state = State(0, weights, dict(weights) if plan.ema else None, plan.quantile.start if plan.quantile else None)
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
        if resume and (stored := directory.load_state(plan.digest(), size_of(fresh.weights))) is not None:
            for tree in (stored.weights, stored.average or stored.weights):
                check_tensors(directory.checkpoint, tree, fresh.weights)
            if stored.round > plan.rounds or _missing(stored) != _missing(fresh):
                raise RunError(f"{directory.checkpoint} does not belong to the plan in config.toml")
            fresh = stored
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
        if not plan.hides_cohort:  # the duration of a round reveals how many clients it had
            row["seconds"] = round(time.perf_counter() - round_started, 4)
        metrics.append(row)
        if directory:
            directory.append_metrics(row)
            directory.save_state(state, plan.digest())
        if progress:
            progress(row)
    final, seconds = state.average or state.weights, time.perf_counter() - started
    network.load_state_dict(final, strict=False)
    scores, client_scores = Figures(), list[dict[str, Any]]()
    if data.validation is not None and state.round:
        scores, client_scores = score(simulator.engine, final, data.federation, data.validation, data.device, own)
    if directory:
        directory.save_scores(state.round, scores, client_scores)
        directory.save_model(network.state_dict(), state.round)
    return Run(
        plan=plan,
        federation=prepared.federation,
        model=network,
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


def _missing(state: State) -> list[bool]:
    return [part is None for part in (state.average, state.clip)]


def _to(state: State, device: torch.device) -> State:
    def moved(tree: Tree) -> Tree:
        return {name: value.to(device) for name, value in tree.items()}

    average = None if state.average is None else moved(state.average)
    return replace(state, weights=moved(state.weights), average=average)
