"""A client's policy: what it grants and to whom, whatever a server publishes.

```toml
epsilon = 2.0            # in total, over all tasks that this client ever takes part in; inf: no limit
delta = 1e-5
adversary = "server"
methods = ["fed-cdp", "fed-cdp-decay"]
participations = 20      # at most, in one task
smallest_noise_multiplier = 0.5
smallest_cohort = 5
colluders = 1            # a secure sum: nodes that may collude with the server; no default
ledger_mark = "/mnt/other/client.mark"   # detects a ledger that was restored from a backup
```
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from fedcdp.accounting.adversaries import Adversary
from fedcdp.accounting.statement import format_epsilon
from fedcdp.config.plan import MethodName, Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.table_schema import TableSchema
from fedcdp.data.tasks import TaskName
from fedcdp.deploy.protocol.client_ledger import Accepted, ClientLedger
from fedcdp.deploy.protocol.grant import (
    Grant,
    Reservation,
    least_noise_multiplier,
    most_participations,
    wanted_participations,
    why_unprotected,
)
from fedcdp.deploy.protocol.task import Task, hides_participation
from fedcdp.errors import PlanError, PolicyError, RefusedError
from fedcdp.files.untrusted import MOST_SETTINGS, parse_toml, read_bounded

_UNITS = ("record", "client")
_PRIVATE = ("fed-cdp", "fed-cdp-decay", "fed-sdp")


@dataclass(frozen=True)
class Facts:
    """What a client knows about its own data and network before it looks at a task's plan; see `ClientPolicy`."""

    records: int
    """The number of its records."""
    shape: tuple[int, ...]
    """The shape of one input."""
    classes: int
    """Outputs that a network needs for the data; of class numbers, at least one more than the largest; 0: any number."""
    tensors: dict[str, tuple[int, ...]]
    """Names and shapes of the trainable tensors of the network that this client would train for the task."""
    constants: str
    """A digest of the parts of that network that are not trained."""
    learning_task: TaskName = "classification"
    """What the labels are."""
    table: TableSchema | None = None
    """What the columns of its table mean; None if the records do not come from a table."""


@dataclass(frozen=True)
class Answer:
    """A client's answer to a task."""

    accepts: bool
    reason: str
    records: int = 0
    """N_i, which is public, if the client accepts."""
    kind: str = "refused"
    """The reason for a decline in one word, for figures."""


@dataclass(frozen=True, kw_only=True)
class ClientPolicy:
    """What a client grants to any server. The default is careful: private methods only, ε = 1 against the server, per
    record.

    Raises:
        PolicyError: A value has the wrong type or is out of range.

    Examples:
        A client compares a task with its policy and its ledger before it takes part:

        >>> import fedcdp
        >>> from fedcdp.flower import ClientLedger, ClientPolicy, Facts, Job
        >>> from torch import nn
        >>> plan = fedcdp.Plan(rounds=3, per_round=2, secure_noise=True)
        >>> task = Job(plan=plan, network=nn.Linear(30, 2), network_name="linear", shape=(30,), classes=2, clients=2).task()
        >>> mine = Facts(records=200, shape=(30,), classes=2, tensors=dict(task.tensors), constants=task.constants)
        >>> with ClientLedger.held("state") as ledger:
        ...     ClientPolicy(epsilon=2.0).decide(task, mine, ledger).accepts
        ...     ClientPolicy(methods=("fed-sdp",)).decide(task, mine, ledger).accepts
        True
        False
    """

    epsilon: float = 1.0
    """The largest ε over all tasks together; infinite: no limit, and no guarantee."""
    delta: float = 1e-5
    """The δ over all tasks together."""
    adversary: str = "server"
    """The adversary of this ε: server, update, example; or model, if the server is trusted with what it reads."""
    unit: str = "record"
    """The protected unit: a record, or all records of this client."""
    participations: int | None = None
    """Maximum number of participations in one task; None: as many as the task may need and the budget allows."""
    smallest_noise_multiplier: float = 0.0
    """The least noise, in clip bounds, on any draw and any released sum in any round (`effective_noise`)."""
    methods: tuple[str, ...] = _PRIVATE
    """The methods that this client takes part in."""
    smallest_cohort: int = 1
    """Fewest updates that the server may put into a model. A server that adds the noise can only promise 1."""
    allow_reproducible: bool = False
    """Whether to take part in a test whose noise anyone can subtract."""
    allow_custom_network: bool = False
    """Whether to import a network (package.module:factory) that the server names."""
    colluders: int | None = None
    """A secure sum: how many other nodes may collude with the server. A task that expects fewer is refused; so is every
    secure sum if this is None."""
    smallest_honest: int = 2
    """A secure sum: the fewest members of a roster, less the task's colluders."""
    epsilon_alone: float | None = None
    """The largest ε over all tasks together if all other nodes collude with the server (its `update` row); None: any."""
    trust_operator_keys: bool = False
    """Whether to take part in a secure sum with keys that the operator made and may have kept: for tests."""
    accept_rotated_keys: bool = False
    """Whether a node on the list may replace its key by one that its old key signed. After a compromise, the owners compare
    fingerprints again instead."""
    ledger_mark: str | None = None
    """A file on another disk, relative to the node's folder, that says how long the ledger was: an older ledger is refused
    (`ledger_mark`). None: there is no such file."""

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta", "smallest_noise_multiplier"):
            value = getattr(self, name)
            self._require(name, _is_number(value), "a number")
            object.__setattr__(self, name, float(value))
        self._require("epsilon", self.epsilon > 0, "above 0, or inf for no limit")
        self._require("delta", 0 < self.delta < 1, "above 0 and below 1")
        self._require("smallest_noise_multiplier", 0 <= self.smallest_noise_multiplier < math.inf, "0 or more")
        self._require("adversary", self.adversary in get_args(Adversary), f"one of {', '.join(get_args(Adversary))}")
        self._require("unit", self.unit in _UNITS, f"one of {', '.join(_UNITS)}")
        self._require("methods", isinstance(self.methods, list | tuple), "a list")
        object.__setattr__(self, "methods", tuple(self.methods))
        self._require(
            "methods",
            all(each in get_args(MethodName) for each in self.methods),
            f"some of {', '.join(get_args(MethodName))}",
        )
        self._require("smallest_cohort", type(self.smallest_cohort) is int and self.smallest_cohort >= 1, "1 or more")
        most = self.participations
        self._require("participations", most is None or (type(most) is int and most >= 1), "1 or more")
        for name in ("allow_reproducible", "allow_custom_network", "trust_operator_keys", "accept_rotated_keys"):
            self._require(name, type(getattr(self, name)) is bool, "true or false")
        known = self.colluders
        self._require("colluders", known is None or (type(known) is int and known >= 0), "0 or more")
        self._require("smallest_honest", type(self.smallest_honest) is int and self.smallest_honest >= 1, "1 or more")
        mark = self.ledger_mark
        self._require("ledger_mark", mark is None or (isinstance(mark, str) and bool(mark)), "the path of a file")
        if self.epsilon_alone is not None:
            self._require("epsilon_alone", _is_number(self.epsilon_alone) and self.epsilon_alone > 0, "a number above 0")
            object.__setattr__(self, "epsilon_alone", float(self.epsilon_alone))

    @staticmethod
    def read(path: Path | str) -> ClientPolicy:
        """Read a policy from a TOML file.

        Args:
            path: The file.

        Returns:
            The policy.

        Raises:
            PolicyError: The file cannot be read, or holds an unknown key or a value that is not allowed.
        """
        try:
            written: dict[str, Any] = parse_toml(read_bounded(path, MOST_SETTINGS))
        except OSError as error:
            raise PolicyError(f"{path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise PolicyError(f"{path} is not a TOML file: {error}") from None
        known = [each.name for each in fields(ClientPolicy)]
        for name in written.keys() - set(known):
            raise PolicyError(f"{path}: {name} is not one of {', '.join(known)}")
        try:
            return ClientPolicy(**written)
        except PolicyError as error:
            raise PolicyError(f"{path}: {error}") from None

    def mark_below(self, folder: Path) -> Path | None:
        """The file of the ledger's mark, if the owner wants one; a relative path counts from the node's folder."""
        return None if self.ledger_mark is None else folder / self.ledger_mark

    @cached_property
    def grants(self) -> tuple[Grant, ...]:
        """The budgets, all of which hold; none if there is no limit."""
        limits = ((self.epsilon, self.adversary), (self.epsilon_alone, "update"))
        return tuple(
            Grant(most, self.delta, adversary, self.unit) for most, adversary in limits if most not in (None, math.inf)
        )

    def decide(self, task: Task, facts: Facts, ledger: ClientLedger) -> Answer:
        """Accept or decline a task.

        Args:
            task: The task that a server published.
            facts: What this client knows about its own data and network.
            ledger: The tasks and releases of this client so far.

        Returns:
            Whether the client accepts, and the reason if not.
        """
        if (reason := self.objection(task)) is not None:
            return Answer(False, reason, kind="policy")
        if (reason := _misfit(task, facts)) is not None:
            return Answer(False, reason, kind="data")
        if (reason := self._cost(task, facts, ledger)) is not None:
            return Answer(False, reason, kind="budget")
        return Answer(True, "accepted", facts.records)

    def objection(self, task: Task) -> str | None:
        """The reason to decline a task whatever the data are; None if there is none."""
        plan = task.plan
        if plan.method not in self.methods:
            return f"the method {plan.method} is not allowed here; allowed are: {', '.join(self.methods) or 'none'}"
        if task.reproducible and not self.allow_reproducible:
            return "the task is reproducible: anyone with its seed can subtract the noise"
        if plan.private and (noise := effective_noise(plan)) < self.smallest_noise_multiplier:
            return f"the least noise multiplier of a round, {noise:g}, is below {self.smallest_noise_multiplier:g}"
        if self.adversary == "example" and not (plan.per_example and plan.noise == "example"):
            return f"{plan.method} with {plan.noise} noise has no ε against example: single gradients are only clipped"
        if task.smallest_cohort < self.smallest_cohort:
            return f"a cohort may be as small as {task.smallest_cohort}; at least {self.smallest_cohort} is required here"
        if hides_participation(plan) and self.smallest_cohort > 1:
            return "a server that adds the noise uses a round whatever arrives, so no smallest cohort can be promised"
        if plan.sums and self.colluders is None:
            return "this client's policy does not say how many nodes may collude with the server; set colluders"
        if plan.sums and self.colluders is not None and plan.colluders < self.colluders:
            return f"the task expects {plan.colluders} colluders; at least {self.colluders} are expected here"
        if plan.sums and plan.honest < self.smallest_honest:
            return self.too_few_honest(plan.per_round, plan.colluders)
        if ":" in task.network and not self.allow_custom_network:
            return f"importing the network {task.network} by name is not allowed here"
        return None

    def too_few_honest(self, members: int, colluders: int) -> str:
        """The reason to refuse a roster of this size."""
        return (
            f"a roster of {members} with {colluders} colluders has {members - colluders} honest members; at least "
            f"{self.smallest_honest} are required here"
        )

    # The budget (see `grant` for the guarantee) --------------------------------------------------------------------------

    def _cost(self, task: Task, facts: Facts, ledger: ClientLedger) -> str | None:
        """Why not even one participation can be granted, or None."""
        known = ledger.tasks.get(task.digest(), Accepted(task, facts.records))
        if known.records != facts.records:
            return f"this task was accepted with {known.records} records, but there are {facts.records} now"
        return self._all_taken(known) or (self._exceeded(ledger) if known.left else self._affordable(known, ledger, 0, 1)[1])

    def reserve(self, digest: str, ledger: ClientLedger, round_: int) -> None:
        """Make sure that a participation in the task, from this round on, is reserved; else raise `RefusedError`."""
        accepted = ledger.tasks[digest]
        if (reason := self._all_taken(accepted) or (self._exceeded(ledger) if accepted.left else None)) is not None:
            raise RefusedError(reason, final=True, kind="budget")
        if accepted.left:
            return
        wanted, reason = self._affordable(accepted, ledger, round_)
        if wanted is None:
            raise RefusedError(str(reason), final=True, kind="budget")
        ledger.reserve(digest, wanted.place, wanted.participations)

    def _all_taken(self, accepted: Accepted) -> str | None:
        """Why a task gets no further participation whatever remains of the budget, or None."""
        if self.participations is None or accepted.participations < self.participations:
            return None
        return f"at most {self.participations} participations in one task are allowed here"

    def _exceeded(self, ledger: ClientLedger) -> str | None:
        """Why nothing more is granted: the reservations exceed a policy that has since become stricter; otherwise None."""
        try:
            exceeded = (each for each in self.grants if not each.covers(each.costs(ledger.reservations())))
            return next((_no_more(each) for each in exceeded), None)
        except PlanError as error:
            return str(error)

    def _affordable(
        self, accepted: Accepted, ledger: ClientLedger, round_: int, limit: float = math.inf
    ) -> tuple[Reservation | None, str | None]:
        """The reservation to make for a task from a round on, of at most `limit`, or the reason why there is none."""
        plan, made = accepted.task.plan, accepted.participations
        most = math.inf if self.participations is None else self.participations
        wanted = int(min(wanted_participations(plan, round_), most - made, limit))
        moments = accepted.covers_moments(len(accepted.blocks))
        new = Reservation(accepted.task, accepted.records, ledger.next_place, wanted, moments)
        try:
            for grant in self.grants:
                if grant.cost(replace(new, participations=1)) == math.inf:
                    return None, f"there is no finite ε against {grant.adversary}: {why_unprotected(grant, new)}"
            if (open_ := accepted.unreserved) is not None and (whole := min(wanted_participations(plan), most)) > made:
                widened = replace(new, place=open_.place, participations=open_.participations + int(whole) - made)
                others = ledger.reservations(but=open_.place)
                if self.grants and all(each.covers(each.costs([*others, widened])) for each in self.grants):
                    return widened, None
            found = wanted
            for grant in self.grants:
                found = _most_within(grant, grant.costs(ledger.reservations()), new, found)
                if not found:
                    return None, _no_more(grant)
        except PlanError as error:
            return None, str(error)
        return replace(new, participations=found), None

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise PolicyError(f"{name}: {getattr(self, name)!r} is not allowed; it must be {allowed}")


def _most_within(grant: Grant, spent: list[float], new: Reservation, wanted: int) -> int:
    """How many of the wanted participations a grant covers, after what is spent."""
    return most_participations(lambda times: grant.covers([*spent, grant.cost(replace(new, participations=times))]), wanted)


def _no_more(grant: Grant) -> str:
    granted = format_epsilon(grant.epsilon, digits=6)
    return f"the budget of ε = {granted} against {grant.adversary} ({grant.unit}) allows no further participation"


def effective_noise(plan: Plan) -> float:
    """The least noise of a private plan, in clip bounds of its round, over all rounds, draws and released sums.

    | case | counts as |
    | --- | --- |
    | constant noise while the bound moves | σ·C_0/C_t of the round with the largest bound |
    | `example` noise | σ, for one draw; the sum of a step has √S times as much |
    | `batch` noise; Fed-SDP | σ, for the sum or the update |
    | `cohort` noise | σ/K_t, the noise on the sum of a step |
    | `sum` noise | σ, for the sum of all clients; nothing else is released (`sum_member`) |
    | a bound that follows a quantile | σ, since the noise follows, or 2·σ_b, the noise on a count that moves by ½, if less |
    | private scaling | its noise on a client's sums, over what a record moves them by, if less |
    """
    least = least_noise_multiplier(plan)
    if plan.quantile is not None:
        least = min(least, 2 * plan.quantile_noise)
    least *= min(1.0, plan.noise_on_sum) if plan.per_example and not plan.sums else 1.0
    return least if plan.scaling_noise is None else min(least, plan.scaling_noise)


def _is_number(value: object) -> bool:
    return (type(value) is int and abs(value) < 2**1000) or (type(value) is float and not math.isnan(value))


def _misfit(task: Task, facts: Facts) -> str | None:
    """How the task differs from this client's data and network, or None."""
    if (reason := _data_misfit(task, facts.shape, facts.classes, facts.learning_task, facts.table)) is not None:
        return reason
    if facts.constants != task.constants:
        return f"the frozen parameters of the network {task.network} differ from the server's"
    if list(facts.tensors.items()) != list(task.tensors.items()):
        return f"the network {task.network} has other tensors here than in the task, or in another order"
    return None


def still_fits(task: Task, data: Dataset, table: TableSchema | None) -> bool:
    """Whether data fit a task that was accepted before."""
    return _data_misfit(task, data.shape, data.outputs or 0, data.task, table) is None


def _data_misfit(
    task: Task, shape: tuple[int, ...], outputs: int, learning_task: TaskName, table: TableSchema | None
) -> str | None:
    """How the task differs from a client's data. The reason is sent to the server: it names columns of the task only."""
    if learning_task != task.learning_task:
        return f"labels here are for {learning_task}, not for {task.learning_task}"
    if table is not None and task.table is not None and (where := task.table.difference(table)) is not None:
        return f"the table here differs from the task's in {where}"
    if shape != task.shape:
        return f"inputs here have the shape {list(shape)}, not {list(task.shape)}"
    if learning_task == "classification" and outputs > task.classes:
        return f"some label here is not one of the task's {task.classes} classes"
    if learning_task != "classification" and outputs not in (0, task.classes):
        return f"records here have {outputs} labels, not {task.classes}"
    return None
