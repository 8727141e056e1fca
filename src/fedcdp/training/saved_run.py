"""Open a run directory: the trained model, its data, its metrics and its ledger, as a `Run`.

A run of the command line says in `config.toml` how its network and data are made. A run from Python needs both again. The
command line takes them from options (`--model package:factory --data FILE`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedcdp.accounting.budget import Allows, Budget, Releases
from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.population import Population
from fedcdp.config.arguments import checked
from fedcdp.config.experiment import Experiment
from fedcdp.config.plan import Plan
from fedcdp.config.presets import Settings
from fedcdp.data.dataset import Splits
from fedcdp.data.partition import Federation
from fedcdp.engine import Loss
from fedcdp.errors import FedcdpError, RunError
from fedcdp.files.tensors import check_tensors, load_tensors, read_about, size_of
from fedcdp.models.networks import prepare
from fedcdp.training.ledger_check import check_ledger
from fedcdp.training.metrics import OwnMetrics
from fedcdp.training.prepared import Prepared, deal_out, load_splits, network_of, prepare_experiment, stored
from fedcdp.training.python_origin import check_federation, read_origin
from fedcdp.training.run import Run
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.scaling import restore_scaling
from fedcdp.training.trainer import train


@checked
def open_run(
    path: Path | str,
    model: nn.Module | None = None,
    federation: Federation | None = None,
    *,
    loss: Loss | None = None,
    metrics: OwnMetrics | None = None,
    device: str | torch.device = "cpu",
    data_dir: Path | str | None = None,
) -> Run:
    """Read a run directory: to evaluate, attack, export, report or resume the run.

    An unfinished run has the model of its last finished round.

    The model and federation of a run from Python are compared with what the directory holds: the tensors, the task and the
    shapes of inputs and targets, and the number, sizes and names of clients. Not compared are the records themselves, of
    which the directory holds no trace, and the code of the network and the loss: give those of the run.

    Args:
        path: The run directory.
        model: The network, for a run from Python; its trained weights are read from the directory. A run of the command line
            builds its own. If that is your own code, name it first (`FEDCDP_TRUST`).
        federation: The clients and their data, for a run from Python.
        loss: The loss, for a run from Python that had its own.
        metrics: Metrics of your own, for a run from Python.
        device: The device of `resume`, for a run from Python.
        data_dir: The directory of dataset files, for a run of the command line.

    Returns:
        The run. Its `seconds` and `client_steps` are 0.

    Raises:
        RunError: It is not a run directory, no round is finished, a file is damaged, or the model or federation is not that
            of the run.
        ModelError: The network is code that you have not named yet, or cannot be trained under the plan.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> plan = fedcdp.Plan(rounds=5, per_round=10, local_steps=2)
        >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, plan, out="run", most_releases=2)
        >>> run = fedcdp.open_run("run", nn.Linear(30, 2), federation)  # perhaps in another process
        >>> run.rounds, run.resume().rounds
        (2, 5)
    """
    directory = RunDirectory(path)
    origin = read_origin(directory)
    if origin is None:
        if any(each is not None for each in (model, federation, loss, metrics)):
            raise RunError(f"model, federation, loss, metrics: the run in {path} has its own; leave them out")
        return open_experiment(path, data_dir=data_dir)[1]
    if model is None or federation is None:
        raise RunError(f"model, federation: those of the run in {path} came from Python; give them again")
    about, plan = origin
    if about.get("loss") == "own" and loss is None:
        raise RunError(f"loss: the run in {path} was trained with a loss of its own; give it again")
    check_federation(directory, about, federation)
    prepared = Prepared.of(model, federation, plan)
    prepared.check_origin(directory)
    return _as_run(directory, prepared, {"loss": loss, "metrics": metrics, "device": device})


def open_experiment(
    path: Path | str, given: Iterable[Settings] = (), *, data_dir: Path | str | None = None, quiet: bool = True
) -> tuple[Experiment, Run]:
    """Read a run directory as the command line does: its settings, which those in `given` must agree with, and the run.

    For a run from Python, `given` names the network and the data (`prepared.stored`).
    """
    experiment, directory = stored(path, given), RunDirectory(path)
    prepared = prepare_experiment(experiment, data_dir, quiet=quiet)
    machine = experiment.run
    how: dict[str, Any] = {
        "adversary": machine.adversary, "unit": machine.unit, "device": machine.device, "engine": machine.engine,
        "chunk": machine.chunk, "tf32": machine.tf32, "evaluate_every": machine.evaluate_every,
    }  # fmt: skip
    prepared.check_origin(directory)
    return experiment, _as_run(directory, prepared, how, budget=_within(experiment, prepared, directory))


def open_model(
    path: Path | str,
    given: Iterable[Settings] = (),
    *,
    clients: bool = False,
    data_dir: Path | str | None = None,
    quiet: bool = True,
) -> tuple[Experiment, nn.Module, Splits | Federation]:
    """The settings of a run, its trained model and its data, with `clients` dealt out: enough to evaluate and to export.

    Unlike `open_experiment` this needs no ledger, and the data of a deployment's server need not be those of its clients.
    """
    directory = RunDirectory(path)
    if read_origin(directory) is not None:
        experiment, run = open_experiment(path, given, data_dir=data_dir, quiet=quiet)
        return experiment, run.model, run.federation
    experiment = stored(path, given)
    splits = load_splits(experiment, data_dir, quiet)
    network = prepare(network_of(experiment, splits), experiment.plan, "cpu")
    return experiment, _trained(directory, network, experiment.plan), deal_out(experiment, splits) if clients else splits


def _within(experiment: Experiment, prepared: Prepared, directory: RunDirectory) -> Allows | None:
    """The limit on ε in the settings of a run; it is computed only once the run is resumed."""
    if experiment.run.max_epsilon is None:
        return None
    made: list[Budget] = []

    def allows(rounds: tuple[int, ...]) -> bool:
        if not made:
            made.append(Budget(experiment, prepared.population, directory.ledger))
        return made[0].allows(rounds)

    return allows


def _as_run(directory: RunDirectory, prepared: Prepared, how: dict[str, Any], *, budget: Allows | None = None) -> Run:
    """The run as training returned it, except for the time it took; `how` it is resumed.

    Its ε is that of the ledger: the population is read from there, and the ledger must belong to the run and have all of its
    rounds. The data of a deployment's server are not its clients', and a file may have changed since.
    """
    model = _trained(directory, prepared.network, prepared.plan)
    if not directory.ledger.exists():
        raise RunError(f"{directory.path} has no ledger, so nobody knows what the run has released")
    ledger, clients = Ledger.open(directory.ledger), prepared.federation.clients
    if ledger.population["clients"] != clients:
        raise RunError(f"{directory.ledger} has {ledger.population['clients']} clients, not {clients}")
    check_ledger(directory, ledger)
    try:
        population = Population.read(ledger.population)
    except (TypeError, FedcdpError) as error:
        raise RunError(f"{directory.ledger} holds a population that this program does not know: {error}") from error
    metrics, released = directory.read_metrics(), Releases(clients, ledger)
    scores, client_scores = directory.read_scores(metrics[-1]["round"] if metrics else 0)
    return Run(
        plan=prepared.plan,
        federation=prepared.federation,
        model=model,
        population=population,
        metrics=metrics,
        seconds=0.0,
        client_steps=0,
        charges=tuple(released.charges),
        participations=released.participations,
        directory=directory.path,
        tf32=how.get("tf32", False),
        scores=scores,
        client_scores=client_scores,
        loss=how.get("loss"),
        own_metrics=how.get("metrics") or {},
        again=partial(train, prepared, **how, budget=budget, out=directory.path, resume=True),
    )


def _trained(directory: RunDirectory, network: nn.Module, plan: Plan) -> nn.Module:
    """A copy of the network with the trained weights; for an unfinished run, those of the latest checkpoint."""
    model = copy.deepcopy(network).eval()
    if directory.model.exists() and not _is_behind(directory):
        expected = dict(model.state_dict())
        weights, source = load_tensors(directory.model, "model-1", size_of(expected))[0], directory.model
    elif (state := directory.load_state(most=size_of(model.state_dict()))) is not None:
        weights, source = state.average or state.weights, directory.checkpoint
        if plan.scaling_noise is not None:
            restore_scaling(model, directory)
        expected = {name: p for name, p in model.named_parameters() if p.requires_grad}
    else:
        raise RunError(f"{directory.path} has no model yet: not one round is done")
    check_tensors(source, weights, expected)
    model.load_state_dict(weights, strict=False)
    return model


def _is_behind(directory: RunDirectory) -> bool:
    """Whether the model is older than the checkpoint: the run was stopped, resumed, and killed."""
    rounds = read_about(directory.model, "model-1").get("round")
    return type(rounds) is int and rounds < directory.rounds_done()
