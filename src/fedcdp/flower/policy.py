"""A client's policy: what it grants to whom, whatever a server publishes.

```toml
epsilon = 2.0            # in all, over every task that this client ever takes part in; inf: no limit
delta = 1e-5
adversary = "server"
methods = ["fed-cdp", "fed-cdp-decay"]
smallest_noise_multiplier = 0.5
smallest_cohort = 5
```
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from fedcdp.accounting.adversaries import Adversary
from fedcdp.errors import PlanError
from fedcdp.flower.budget import Grant, Participation, why_unprotected
from fedcdp.flower.errors import PolicyError
from fedcdp.flower.ledger import ClientLedger
from fedcdp.flower.task import Task
from fedcdp.plan import MethodName
from fedcdp.untrusted import MOST_SETTINGS, parse_toml, read_bounded

_UNITS = ("record", "client")
_PRIVATE = ("fed-cdp", "fed-cdp-decay", "fed-sdp")


@dataclass(frozen=True)
class Facts:
    """What a client knows of its own data and network, before it looks at a task's plan."""

    records: int
    shape: tuple[int, ...]
    classes: int
    """One more than the largest label: a network needs at least as many outputs."""
    tensors: dict[str, tuple[int, ...]]
    """Of the network that this client would train for the task."""
    constants: str
    """A digest of what in that network is not trained."""


@dataclass(frozen=True)
class Answer:
    """What a client says to a task."""

    accepts: bool
    reason: str
    records: int = 0
    """N_i, which is public, if it accepts."""


@dataclass(frozen=True, kw_only=True)
class ClientPolicy:
    """What a client grants. The default is careful: private methods only, ε = 1 against the server, record by record."""

    epsilon: float = 1.0
    """The largest ε over all tasks together; infinite: no limit, and nothing is promised."""
    delta: float = 1e-5
    """The δ of all tasks together."""
    adversary: str = "server"
    """Against whom: server, update, example; or model, if the server is trusted with what it reads."""
    unit: str = "record"
    """What is protected: a record, or all that this client holds."""
    smallest_noise_multiplier: float = 0.0
    methods: tuple[str, ...] = _PRIVATE
    smallest_cohort: int = 1
    """Fewest updates that the server may put into a model."""
    allow_reproducible: bool = False
    """Whether to take part in a test whose noise anyone can subtract."""
    allow_custom_network: bool = False
    """Whether to import a network (package.module:factory) that the server names."""

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
        for name in ("allow_reproducible", "allow_custom_network"):
            self._require(name, type(getattr(self, name)) is bool, "true or false")

    @staticmethod
    def read(path: Path | str) -> ClientPolicy:
        """The policy in a TOML file."""
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

    @property
    def grant(self) -> Grant | None:
        """The budget; None where there is no limit."""
        return None if self.epsilon == math.inf else Grant(self.epsilon, self.delta, self.adversary, self.unit)

    def decide(self, task: Task, facts: Facts, ledger: ClientLedger) -> Answer:
        """Accept or decline a task, in a sentence."""
        reason = self.objection(task) or _misfit(task, facts) or self._cost(task, facts, ledger)
        return Answer(False, reason) if reason else Answer(True, "accepted", facts.records)

    def objection(self, task: Task) -> str | None:
        """Why a task is declined whatever the data are, if it is."""
        plan = task.plan
        if plan.method not in self.methods:
            return f"the method {plan.method} is not one of those allowed here: {', '.join(self.methods) or 'none'}"
        if task.reproducible and not self.allow_reproducible:
            return "the task is reproducible: whoever has its seed can subtract the noise"
        if plan.private and plan.noise_multiplier < self.smallest_noise_multiplier:
            return f"the noise multiplier {plan.noise_multiplier:g} is below {self.smallest_noise_multiplier:g}"
        if task.smallest_cohort < self.smallest_cohort:
            return f"a cohort may be as small as {task.smallest_cohort}; at least {self.smallest_cohort} is asked for here"
        if ":" in task.network and not self.allow_custom_network:
            return f"the network {task.network} would have to be imported by name, which is not allowed here"
        return None

    def _cost(self, task: Task, facts: Facts, ledger: ClientLedger) -> str | None:
        """Why not even one participation can be granted, if so."""
        known = ledger.tasks.get(task.digest())
        if known is not None and known.records != facts.records:
            return f"this task was accepted with {known.records} records, and now there are {facts.records}"
        return self.unaffordable(ledger.once_more(task, facts.records), ledger)

    def unaffordable(self, wanted: Participation, ledger: ClientLedger) -> str | None:
        """Why taking part in a task so often exceeds the budget, beside everything else that was spent, if it does."""
        if (grant := self.grant) is None:
            return None
        try:
            cost = grant.cost(wanted)
            if cost == math.inf:
                return f"no finite ε against {self.adversary} holds: {why_unprotected(grant, wanted)}"
            left = grant.left(ledger.spent(without=wanted.task))
        except PlanError as error:
            return str(error)
        if cost <= left:
            return None
        return f"the budget of ε = {self.epsilon:g} against {self.adversary} ({self.unit}) allows no further participation"

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise PolicyError(f"{name}: {getattr(self, name)!r} is not allowed; it must be {allowed}")


def _is_number(value: object) -> bool:
    return (type(value) is int and abs(value) < 2**1000) or (type(value) is float and not math.isnan(value))


def _misfit(task: Task, facts: Facts) -> str | None:
    """How the task differs from what this client has, if it does."""
    if facts.shape != task.shape:
        return f"inputs here have the shape {list(facts.shape)}, not {list(task.shape)}"
    if facts.classes > task.classes:
        return f"some label here is not one of the task's {task.classes} classes"
    if facts.constants != task.constants:
        return f"what is frozen in the network {task.network} differs from the server's"
    if facts.tensors != dict(task.tensors):
        return f"the network {task.network} has other tensors here than in the task"
    return None
