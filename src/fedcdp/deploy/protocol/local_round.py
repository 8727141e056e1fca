"""The client's part of a round: its records and its local training.

The records come from a user's function, from a file, or are one partition of a benchmark (for tests and demonstrations).
A file is read as in a simulation, with the same options (`_FILE_OPTIONS`), so a client sees the inputs of the simulator's.
The training uses the methods' own functions on an axis of length one.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.data import load
from fedcdp.data.dataset import Dataset
from fedcdp.data.own_files import read_client
from fedcdp.data.partition import partition
from fedcdp.data.table_rules import column_rules
from fedcdp.data.table_schema import TableSchema
from fedcdp.data.tasks import TaskName, task_called
from fedcdp.deploy.protocol.kept_features import KeptFeatures, without_front
from fedcdp.deploy.protocol.task import Task
from fedcdp.engine import Batch, Engine, Loss
from fedcdp.engine.batched import engines_for
from fedcdp.engine.independence import check_independent
from fedcdp.engine.reachability import check_all_used
from fedcdp.errors import DataError, ModelError, RefusedError, WireError
from fedcdp.files.tree import Layout, Tree, each_tensor
from fedcdp.mechanism.noise import noise_of
from fedcdp.mechanism.sampling import choose_records_of_steps
from fedcdp.methods import METHODS, Moment, NoisedExamples, Sent
from fedcdp.models.batch_norm import mixing_layers
from fedcdp.models.networks import build, prepare, with_scaling
from fedcdp.training.local_engines import Examples, StepwiseEngine

Inputs = Tensor | ArrayLike
DataFunction = Callable[[Any], tuple[Inputs, Inputs] | Dataset]
NodeConfig = Mapping[str, Any]

_SOURCES = ("data-function", "data", "dataset")
# The arguments of `column_rules`, and the settings of a node configuration that they come from.
_FILE_OPTIONS = {
    "client": "client-column", "label": "label-column", "task": "task", "drop": "drop-columns",
    "categories": "categories", "columns": "columns", "classes": "classes", "missing": "missing",
    "delimiter": "delimiter",
}  # fmt: skip


def records_of(data: DataFunction | None, context: Any, task: Task) -> tuple[Dataset, TableSchema | None]:
    """The records of this client, from the function or as named in its node configuration, and what their columns mean."""
    config: NodeConfig = context.node_config
    given = [name for name in _SOURCES if name in config]
    if data is None and len(given) != 1:
        raise DataError(f"node configuration: give one of {', '.join(_SOURCES)}, not {' and '.join(given) or 'none'}")
    if data is None and given == ["dataset"]:
        return _part(config), None
    if data is None and given == ["data"]:
        return _file(Path(str(config["data"])), config, task)
    found = (data or imported(str(config["data-function"])))(context)
    if isinstance(found, Dataset):
        return found, None
    inputs, labels = found
    return _checked(inputs, labels, task_called(_text(config, "task") or "classification").name), None


def imported(path: str) -> Any:
    """The object that `package.module:name` refers to."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything
        raise DataError(f"{path} cannot be imported: {error}") from error


def _part(config: NodeConfig) -> Dataset:
    for name in ("partition-id", "num-partitions"):
        if type(config.get(name)) is not int:
            raise DataError(f"node configuration: {name} must be a whole number if dataset is given")
    chosen = {"split_seed": int(config.get("split-seed", 0)), "scaling": config.get("scaling", "training")}
    splits = load(str(config["dataset"]), quiet=True, **chosen)
    federation = partition(
        splits,
        clients=config["num-partitions"],
        scheme=str(config.get("partition", "iid")),
        records=config.get("records"),
        classes_per_client=int(config.get("classes-per-client", 2)),
        alpha=float(config.get("alpha", 0.5)),
        seed=int(config.get("partition-seed", 0)),
    )
    return federation.train.take(torch.from_numpy(federation.indices(config["partition-id"])))


def _file(path: Path, config: NodeConfig, task: Task) -> tuple[Dataset, TableSchema | None]:
    """A file, under the options of the node configuration. Classes that it does not list are those of the task's table."""
    given: dict[str, Any] = {name: text for name, key in _FILE_OPTIONS.items() if (text := _text(config, key)) is not None}
    if _text(config, "scaling") not in (None, "public"):
        raise DataError("node configuration: scaling must be public for a file; a deployed client computes no statistics")
    rules = column_rules(**given)
    if rules.classes is None and task.table is not None and task.table.classes and rules.task == task.learning_task:
        rules = replace(rules, classes=task.table.classes)
    return read_client(path, rules, _text(config, "client"))


def name_of_client(context: Any) -> str:
    """What this client is called in logs, if its node configuration says so."""
    return _text(context.node_config, "client") or ""


def _text(config: NodeConfig, name: str) -> str | None:
    """A setting that is a text; None if it is not given."""
    if not isinstance(value := config.get(name), str | None):
        raise DataError(f"node configuration: {name} must be a text in quotes")
    return value


def _checked(inputs: Inputs, labels: Inputs, task: TaskName) -> Dataset:
    """Check the records that a function returned. Labels are not renumbered: they must mean the same at every client."""
    values = torch.as_tensor(inputs if isinstance(inputs, Tensor) else np.asarray(inputs), dtype=torch.float32)
    if not bool(torch.isfinite(values).all()):
        raise DataError("inputs contain a value that is not finite")
    given = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    if task not in ("classification", "binary"):
        return Dataset(
            values, torch.as_tensor(given, dtype=None if task in ("custom", "language") else torch.float32), task=task
        )
    if given.ndim != 1 or given.dtype.kind not in "iuf" or not np.array_equal(given, given.astype(np.int64)):
        raise DataError(f"labels are {given.dtype} of shape {given.shape}: one whole number per record is needed")
    return Dataset(values, torch.from_numpy(given.astype(np.int64)), task=task)


NetworkFunction = Callable[[Task], nn.Module]


def network_for(task: Task, own: NetworkFunction | None = None) -> nn.Module:
    """The network that a task names, or that the client's own function builds for it. Its weights come from the server."""
    network = build(task.network, task.shape, task.classes, task.activation) if own is None else own(task)
    return _standardising(network, task)


def check_described(task: Task) -> None:
    """Refuse a task whose network is another one here, before its values are allocated.

    A server may claim that a small network has a billion classes. Networks of the client's own code are not described: they
    may compute anything. Some take a second, so a client describes the network of a new task only.
    """
    if ":" in task.network:
        return
    with torch.device("meta"):
        described = network_for(task)
    if not task.fits(Layout.of(described)):
        raise RefusedError(f"the network {task.network} has other tensors here than in the task, or in another order")


def check_network(task: Task, network: nn.Module, data: Dataset, loss: Loss) -> None:
    """Refuse trainable tensors that no output depends on, and gradients that depend on other examples or earlier batches.

    Of the data, only shapes and types are read.
    """
    if not task.plan.private:
        return
    engine = next(iter(engines_for(prepare(network, task.plan, "cpu"), loss).values()))
    try:
        check_all_used(engine, first_batch(data, task.plan))
        check_independent(engine, first_batch(data, task.plan))
    except ModelError as error:
        raise RefusedError(str(error)) from None


def first_batch(data: Dataset, plan: Plan) -> Batch:
    """The first records, as a batch of one client."""
    width = min(plan.batch_size, len(data))
    inputs = each_tensor(data.inputs, lambda value: value[None, :width])
    return Batch(inputs, data.targets[None, :width], torch.ones(1, width, dtype=torch.bool))


def _standardising(network: nn.Module, task: Task) -> nn.Module:
    """The network behind the layer that standardises its inputs, if the task has one."""
    return network if task.plan.scaling_noise is None else with_scaling(network, task.shape)


@dataclass(frozen=True)
class Round:
    """A server's request to a client."""

    number: int
    """Counted from 0."""
    attempt: int
    clip: float | None
    """The clip bound after the previous rounds, if it follows a quantile."""

    def check(self, plan: Plan) -> None:
        """Raise `WireError` for a clip bound that the plan cannot have reached.

        Norms are float32. Under a bound of 1e-45, which has one bit there, gradients keep norms of up to twice the bound.
        """
        if (self.clip is not None) != (plan.quantile is not None):
            raise WireError("a round must have a clip bound if, and only if, the bound follows a quantile")
        if self.clip is None or plan.quantile is None:
            return
        least, most = plan.quantile.start * 1e-6, plan.quantile.start * 1e6
        if not least <= self.clip <= most:  # also false for NaN
            raise WireError(f"the clip bound {self.clip:g} is not from {least:g} to {most:g}, a millionth to a million "
                            "times the task's start")  # fmt: skip


class LocalTraining:
    """A client that can train for a task: its network and its records on a device.

    With `one_by_one`, for a policy against adversaries on the client itself (`example`), every example's gradient is noised
    before any other processing. That takes S draws per step instead of one, and as many times the memory.

    Frozen layers in front are applied once. Their outputs are `kept` for the next round, if it is said where.
    """

    def __init__(
        self,
        task: Task,
        network: nn.Module,
        data: Dataset,
        loss: Loss,
        device: torch.device,
        *,
        one_by_one: bool = False,
        kept: KeptFeatures | None = None,
    ) -> None:
        self._task, self._device, self._one_by_one = task, device, one_by_one
        if mixing_layers(network) and len(data) < task.plan.batch_size:
            raise ModelError(f"layer {mixing_layers(network)[0][0]} mixes examples, and there are fewer than a batch")
        trained, inputs = without_front(prepare(network, task.plan, device), data.inputs, device, kept)
        self.engine: Engine = next(iter(engines_for(trained, loss).values()))
        self._examples = Examples(inputs, data.targets.to(device))

    def take_part(self, weights: Tree, asked: Round, client: int = 0, members: int | None = None) -> Sent:
        """What leaves the client in a round; under noise on the sum, its share in a roster of so many `members`.

        Noise comes from the operating system. The records of a step are drawn with a seed from the operating system as
        well, used for this release alone. Neither can be recovered from anything that is stored or that a server knows. In
        a reproducible task both come from the published seed, and from the number of the `client`.
        """
        task, device = self._task, self._device
        plan = task.plan if task.reproducible else task.plan.but(seed=secrets.randbits(63))
        clients = torch.tensor([client], device=device)
        sizes = torch.tensor([len(self._examples.targets)], device=device)
        noise = noise_of(plan, self.engine.layout)
        expected = sizes.clamp(max=plan.batch_size)
        engine = NoisedExamples(self.engine) if self._one_by_one else self.engine
        at = Moment(
            plan,
            engine,
            noise,
            asked.number,
            clients,
            expected,
            current_clip=asked.clip,
            records=sizes,
            mean_records=plan.mean_records,
            roster=members,
            attempt=asked.attempt if plan.sums else 0,
        )
        draw = choose_records_of_steps(plan, clients, sizes, asked.number)
        local = {name: value.to(device) for name, value in weights.items()}
        return StepwiseEngine(METHODS[plan.method], self.engine, self._examples)(local, draw, at)
