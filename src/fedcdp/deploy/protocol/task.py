"""The task: published by a server before training, and checked by each client against its own policy.

It specifies the data, the network, and the whole plan: rounds, batch, learning rate, local steps, method and privacy
parameters. A client that accepts a task keeps it. Later requests name the task by its digest, so the plan cannot change
during training.

A task has one written form, and its digest is computed from that form: keys in alphabetical order, numbers of their field's
type, no negative zero, schedules as this program prints them, tensors in the order of the network's layout. Any other form
is refused. `learning_task` and `table` are new since version 0.1.0. They are left out where they say nothing, so older
tasks keep their digests.

Tasks are compared by their digests only: values that compare equal (0.0 and −0.0, two dictionaries in different orders) may
have different digests, and a ledger that mistook one task for another would count too little.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from fedcdp.config.plan import Plan
from fedcdp.data.table_schema import TableSchema
from fedcdp.data.tasks import TaskName
from fedcdp.errors import FedcdpError, PlanError, TaskError
from fedcdp.files.tree import Layout
from fedcdp.models.networks import SCALING_LAYER, scaling_of

FORMAT = "fedcdp-task-1"
_KEYS = ("format", "run", "modality", "shape", "classes", "network", "activation", "tensors", "constants", "plan",
         "smallest_cohort", "reproducible")  # fmt: skip
_OPTIONAL = {"learning_task", "table"}  # since version 0.1.0
_RUN = re.compile("[0-9a-f]{32}")
_MOST_WEIGHTS = 2**30
_MOST_STEPS = 10**6  # over all rounds: a client can account for these in seconds
_MOST_DRAWS = 2**26
_LONGEST = 2**20  # characters of a task: enough for a network of a few thousand tensors


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a server publishes: everything that a client must know to decide whether it takes part, and to take part.

    `Job.task` makes one. Different tasks have different digests, and tasks are compared by their digests only.

    Raises:
        PlanError: The plan cannot be deployed: it asks for secure aggregation without noise on the sum, for noise that does
            not match `reproducible`, or for a cohort larger than a round.

    Examples:
        >>> import fedcdp
        >>> from fedcdp.flower import Job, Task
        >>> from torch import nn
        >>> plan = fedcdp.Plan(per_round=2, secure_noise=True)
        >>> task = Job(plan=plan, network=nn.Linear(30, 2), network_name="linear", shape=(30,), classes=2, clients=2).task()
        >>> Task.from_json(task.to_json()).digest() == task.digest()
        True
    """

    run: str
    """The run's random name, which stays the same when the server resumes it."""
    shape: tuple[int, ...]
    """The shape of one input."""
    classes: int
    """How many outputs the network needs: one for each class, label or value."""
    network: str
    """As in a configuration file: cnn, mlp, …, or package.module:factory."""
    activation: str | None
    """relu, tanh or sigmoid; None: the network's own."""
    tensors: Mapping[str, tuple[int, ...]]
    """Names and shapes of the trainable tensors, in the order of the network's layout."""
    constants: str
    """A digest of frozen parameters and buffers, which are never sent: a client must have the same."""
    plan: Plan
    """The whole plan, without its seed unless the task is reproducible."""
    smallest_cohort: int
    """Minimum number of updates for the server to use a round, unless it adds the noise (`hides_participation`)."""
    reproducible: bool = False
    """Noise and sampling come from the published seed, so anyone can subtract the noise: for tests only."""
    learning_task: TaskName = "classification"
    """What is predicted, which decides the loss."""
    table: TableSchema | None = None
    """What the columns of tables mean. A client that reads a table must mean the same; None: clients see to that."""

    def __post_init__(self) -> None:
        if self.plan.secure_aggregation and not self.plan.sums:
            raise PlanError(
                f"secure_aggregation: a deployment masks updates only with noise sum, not {self.plan.noise}; the server "
                "would see every update"
            )
        if self.plan.secure_noise == self.reproducible:
            raise PlanError("secure_noise: a deployment takes its noise from the operating system unless it is reproducible")
        if self.plan.weighting == "records" and self.plan.mean_records is None:
            raise PlanError("mean_records: a deployment that weights by records needs it; clients do not know each other's")
        if not 1 <= self.smallest_cohort <= self.plan.per_round:
            raise PlanError(f"smallest_cohort: {self.smallest_cohort} is not from 1 to per_round, {self.plan.per_round}")

    @property
    def modality(self) -> str:
        """The kind of data that a client must have: image or table."""
        return "image" if len(self.shape) == 3 else "table"

    def to_json(self) -> str:
        """The task as it is published. The seed, which decides who is drawn, is in it only if the task is reproducible."""
        plan = {key: _unsigned(value) for key, value in self.plan.written().items() if key != "seed" or self.reproducible}
        written = {
            "format": FORMAT,
            "run": self.run,
            "modality": self.modality,
            "shape": list(self.shape),
            "classes": self.classes,
            "network": self.network,
            "activation": self.activation,
            "tensors": [[name, list(shape)] for name, shape in self.tensors.items()],
            "constants": self.constants,
            "plan": plan,
            "smallest_cohort": self.smallest_cohort,
            "reproducible": self.reproducible,
        }
        if self.learning_task != "classification":
            written["learning_task"] = self.learning_task
        if self.table is not None:
            written["table"] = self.table.written()
        return json.dumps(written, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Task:
        """Read a task that a server published.

        Args:
            text: The task as JSON.

        Returns:
            The task.

        Raises:
            TaskError: The text is not a complete and valid task in its only written form.
        """
        task = Task.from_ledger(text)
        if task.to_json() != text:
            raise TaskError("the task is not in its canonical form: sorted keys, 1.0 for a fraction, no -0.0, no spaces "
                            "that this program does not write")  # fmt: skip
        return task

    @staticmethod
    def from_ledger(text: str) -> Task:
        """Read a task that was accepted before, even in a form that is refused today: its cost still has to be counted."""
        if len(text) > _LONGEST:
            raise TaskError(f"the task is {len(text)} characters long; at most {_LONGEST} are read")
        try:
            written = json.loads(text)
        except (ValueError, RecursionError):
            raise TaskError("the task is not JSON") from None
        if not isinstance(written, dict) or written.get("format") != FORMAT:
            known = written.get("format") if isinstance(written, dict) else None
            raise TaskError(f"the task has the format {known!s:.40}; this program supports {FORMAT}")
        if set(written) - _OPTIONAL != set(_KEYS):
            raise TaskError(f"the task must have exactly the fields {', '.join(_KEYS)}")
        return _read(written)

    def digest(self) -> str:
        """The task's name: a hash that differs if anything in the task differs."""
        return digest_of(self.to_json())

    def fits(self, layout: Layout) -> bool:
        """Whether a network has the task's tensors: the same names and shapes, in the same order."""
        return list(self.tensors.items()) == list(tensors_of(layout).items())


def digest_of(text: str) -> str:
    """The digest of a task in this written form."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def hides_participation(plan: Plan) -> bool:
    """Whether the server adds the noise, so ε against the model requires that only the server knows who took part.

    Such a round is used whatever arrives and always takes equally long. Nothing written or sent about it reveals how many
    updates arrived.
    """
    return plan.method == "fed-sdp" and plan.noise_at == "server"


def tensors_of(layout: Layout) -> dict[str, tuple[int, ...]]:
    """A network's layout in the form of a task."""
    return {name: tuple(shape) for name, shape in layout.shapes.items()}


def constants_of(network: nn.Module) -> str:
    """A digest of a network's frozen parameters and buffers; empty if there are none.

    What inputs are standardised by is not among them: clients release it after the task is published (`first_release`).
    """
    released = {f"{SCALING_LAYER}.{name}" for name in ("mean", "scale")} if scaling_of(network) is not None else set()
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    constants = {name: value for name, value in network.state_dict().items() if name not in trained | released}
    digest = hashlib.sha256()
    for name, value in sorted(constants.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32] if constants else ""


def _unsigned(value: str | int | float | bool) -> str | int | float | bool:
    """Replace negative zero by zero; return anything else unchanged."""
    return value + 0.0 if type(value) is float else value


def _read(written: Mapping[str, Any]) -> Task:
    run, shape, tensors, plan = (written[name] for name in ("run", "shape", "tensors", "plan"))
    _require(isinstance(run, str) and _RUN.fullmatch(run) is not None, "run", "32 hexadecimal digits")
    _require(_is_shape(shape), "shape", "whole numbers above 0")
    for name in ("classes", "smallest_cohort"):
        _require(type(written[name]) is int and 1 <= written[name] < 2**31, name, "a whole number above 0 and below 2^31")
    for name in ("network", "constants"):
        _require(isinstance(written[name], str), name, "a string")
    _require(written["activation"] is None or isinstance(written["activation"], str), "activation", "a string or null")
    _require(isinstance(written["reproducible"], bool), "reproducible", "true or false")
    pairs = isinstance(tensors, list) and tensors and all(_is_tensor(each) for each in tensors)
    _require(bool(pairs) and len({name for name, _ in tensors}) == len(tensors), "tensors", "names, each once, with shapes")
    _require(isinstance(plan, dict) and all(isinstance(key, str) for key in plan), "plan", "the fields of a plan")
    _require(("seed" in plan) == written["reproducible"], "plan", "one with a seed if, and only if, it is reproducible")
    learning_task = written.get("learning_task", "classification")
    _require(learning_task in get_args(TaskName), "learning_task", f"one of {', '.join(get_args(TaskName))}")
    try:
        table = TableSchema.read(written["table"]) if "table" in written else None
    except ValueError as error:
        raise TaskError(f"the task's table is invalid: {error}") from None
    try:
        task = Task(
            run=run,
            shape=tuple(shape),
            classes=written["classes"],
            network=written["network"],
            activation=written["activation"],
            tensors={name: tuple(size) for name, size in tensors},
            constants=written["constants"],
            plan=Plan(**plan),
            smallest_cohort=written["smallest_cohort"],
            reproducible=written["reproducible"],
            learning_task=learning_task,
            table=table,
        )
    except (TypeError, FedcdpError) as error:
        raise TaskError(f"the task's plan is invalid: {error}") from None
    _check_size(task)
    _require(written["modality"] == task.modality, "modality", f"{task.modality} for inputs of shape {list(shape)}")
    return task


def _check_size(task: Task) -> None:
    """Refuse a task that would exhaust a client's memory or time before its policy decides: a server may send anything."""
    plan, weights = task.plan, sum(math.prod(shape) for shape in task.tensors.values())
    _require(weights <= _MOST_WEIGHTS, "tensors", f"of at most {_MOST_WEIGHTS} values in total")
    _require(math.prod(task.shape) <= _MOST_WEIGHTS, "shape", f"of at most {_MOST_WEIGHTS} values")
    _require(plan.rounds * plan.local_steps <= _MOST_STEPS, "plan", f"one with at most {_MOST_STEPS} local steps in total")
    _require(plan.local_steps * plan.slots <= _MOST_DRAWS, "plan", f"one with at most {_MOST_DRAWS} records a participation")


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int and 1 <= each < 2**31 for each in value)


def _is_tensor(value: object) -> bool:
    """A name and a shape; the shape of a scalar is empty."""
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)):
        return False
    return value[1] == [] or _is_shape(value[1])


def _require(holds: bool, name: str, allowed: str) -> None:
    if not holds:
        raise TaskError(f"the task's {name} must be {allowed}")
