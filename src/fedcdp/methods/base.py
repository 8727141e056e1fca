"""The base of every method: federated SGD, in which a method decides what is computed, released and admitted.

All functions are pure and work on many clients at once (a leading axis [clients, ...]); for a deployed client that axis
has length one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.config.plan import Plan
from fedcdp.engine.base import Batch, Engine
from fedcdp.files.tree import Tree, combine
from fedcdp.mechanism.noise import Noise, deviation_of_step_sum
from fedcdp.mechanism.pruning import keep_largest
from fedcdp.mechanism.secure_sum import add, share_deviation, to_integers

Tap = Callable[[str, "Moment", Tree], None]


@dataclass(frozen=True)
class Moment:
    """The point in training at which a function is called: everything it may depend on besides its tensors."""

    plan: Plan
    engine: Engine
    noise: Noise
    round: int
    clients: Tensor
    """The numbers of the clients on the leading axis."""
    expected_batch: Tensor
    """min(B, N_i) for each of them: the divisor of a sum over a step's records, however many were drawn."""
    step: int = 0
    tap: Tap | None = None
    """Called with what an adversary of "type2", "type1" or "type0" sees; None if there is no observer. The counts released
    for a clip bound that follows a quantile are passed as "type2-count", "type1-count", "type0-count". An adversary on the
    client also knows the weights that a local step starts from: they are passed as "local-weights", before the step."""
    current_clip: float | None = None
    """The present value of a clip bound that follows a quantile, as moved by the rounds before this one."""
    records: Tensor | None = None
    """N_i for each of the clients; None: nothing that the plan asks for depends on it."""
    mean_records: float | None = None
    """The public mean of N_i over all clients of the federation, for weighting by records; with noise on the sum of Fed-CDP,
    the public mean number of records that a client uses in a step."""
    roster: int | None = None
    """The clients whose shares of the noise are added up, with noise on the sum; None: the planned K_t."""
    attempt: int = 0
    """The attempt at this round, with noise on the sum: each has fresh noise."""

    @property
    def clip_bound(self) -> float:
        """C of this round."""
        return self.plan.clip_at(self.round, self.current_clip)

    @property
    def noise_scale(self) -> float:
        """σC of this round."""
        return self.plan.noise_scale_at(self.round, self.current_clip)

    @property
    def step_deviation(self) -> float:
        """Standard deviation of the noise on the sum of a local step, for methods that noise steps."""
        return deviation_of_step_sum(self.plan, self.round, self.current_clip)

    @property
    def share_deviation(self) -> int:
        """τ, the standard deviation in grid steps of a client's share of the noise on the sum (`secure_sum`)."""
        size = self.engine.layout.size
        return share_deviation(self.plan, self.round, groups=len(self.groups), size=size, roster=self.roster)

    @property
    def learning_rate(self) -> float:
        """η of this round."""
        return self.plan.learning_rate_at(self.round)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of tensors that are clipped together."""
        return self.engine.layout.groups(self.plan.clip_mode)

    @property
    def client_weights(self) -> Tensor | None:
        """The weight of each client's update, N_i over its mean; None: all are equal."""
        if self.plan.weighting == "equal" or (self.plan.sums and self.plan.per_example):  # sums: a record weighs the same
            return None
        assert self.records is not None
        assert self.mean_records is not None
        return self.records / self.mean_records

    @property
    def slot_noise(self) -> Tensor | None:
        """Example noise in each slot [clients, slots], in units of σC; None: 1 in all of them.

        A client with N_i < S records fills at most N_i slots. With `noise_slots = held` these alone carry noise, √(S/N_i)
        each, so the sum over the slots carries √S, like that of every other client.
        """
        if self.plan.noise_slots == "all":
            return None
        assert self.records is not None
        held = self.records.clamp(max=self.plan.slots)[:, None]
        slots = torch.arange(self.plan.slots, device=held.device)
        return torch.where(slots < held, (self.plan.slots / held).sqrt(), 0.0)

    def show(self, reader: str, seen: Tree) -> None:
        """Show the tap what the method releases at this point."""
        if self.tap is not None:
            self.tap(reader, self, seen)


@dataclass(frozen=True)
class Local:
    """The state of clients in their local training [clients, ...]."""

    weights: Tree
    velocity: Tree | None = None
    """The running sum of gradients, with momentum."""
    start: Tree | None = None
    """The global weights W(t), which a proximal term pulls towards; None: there is no such term."""
    count: Tensor | None = None
    """The count of norms within the clip bound that clients will send, if the bound follows a quantile."""
    total: Tree | None = None
    """The undivided sum of clipped gradients in float64 that clients will send, with noise on the sum of Fed-CDP."""


@dataclass(frozen=True)
class Sent:
    """What clients send in a round [clients, ...]."""

    update: Tree
    """Updates; with noise on the sum, whole numbers of grid steps modulo 2^64 (int64, `secure_sum`)."""
    count: Tensor | None = None
    """The sum of their indicators, if the clip bound follows a quantile and the clients count."""


@dataclass(frozen=True)
class GradientSum:
    """The sum of the gradients of one local step [clients, ...]."""

    total: Tree
    count: Tensor | None = None
    """The noised sum of the indicators [clients], if the clip bound follows a quantile and this step counts."""


class Method(ABC):
    """A federated training method. Subclasses override what they do differently."""

    @abstractmethod
    def gradient_sum(self, weights: Tree, batch: Batch, at: Moment) -> GradientSum:
        """The sum of a step's gradients, in the form that local training may use."""

    def local_step(self, local: Local, batch: Batch, at: Moment) -> Local:
        """One local iteration: W ← W − η·v, where v is the batch mean, or its running sum with momentum.

        FedProx (Li et al., MLSys 2020) adds μ·(W − W(t)) to the mean. The term is outside of clipping and noise: under
        Fed-CDP it is a function of the global model and of steps that were noised before.
        """
        summed = self.gradient_sum(local.weights, batch, at)
        mean = {name: value / _column(at.expected_batch, value) for name, value in summed.total.items()}
        if at.plan.proximal:
            assert local.start is not None
            mean = combine(mean, combine(local.weights, local.start, -1.0), at.plan.proximal)
        velocity = mean if local.velocity is None else combine(mean, local.velocity, at.plan.momentum)
        weights = combine(local.weights, velocity, -at.learning_rate)
        count = local.count if summed.count is None else summed.count
        return Local(weights, velocity if at.plan.momentum else None, local.start, count)

    def release(self, before: Tree, local: Local, at: Moment) -> Tree:
        """The update that a client sends, ΔW_i(t) = W_i(t)_L − W(t), weighted: sanitised, then pruned, never the reverse."""
        update = self.sanitise_update(raw_update(before, local.weights, at), at)
        update = keep_largest(update, at.engine.layout, self.shared_fraction(at.plan))
        at.show("type1", update)
        return update

    def sanitise_update(self, update: Tree, at: Moment) -> Tree:  # noqa: ARG002
        """Sanitise a client's update before it is sent."""
        return update

    def shared_fraction(self, plan: Plan) -> float:
        """The share of an update's entries that is sent."""
        return 1 - plan.compression

    def admit(self, update: Tree, at: Moment) -> Tree:  # noqa: ARG002
        """Process each update at the server before it is added up."""
        return update

    def sanitise_sum(self, total: Tree, at: Moment) -> Tree:  # noqa: ARG002
        """Decode and sanitise the sum of what clients sent at the server: the sum of their updates, as it is used."""
        return total


def noised_share(values: Tree, at: Moment) -> Tree:
    """What a client sends with noise on the sum: its values as whole numbers of grid steps, and its share of the noise."""
    noise = at.noise.for_sum(at.round, at.clients, at.attempt, at.share_deviation)
    return add(to_integers(values, at.clip_bound), noise)


def raw_update(before: Tree, after: Tree, at: Moment) -> Tree:
    """What the local steps changed, times the client's weight, before anything is sanitised."""
    update, weights = combine(after, before, -1.0), at.client_weights
    return update if weights is None else {name: value * _column(weights, value) for name, value in update.items()}


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).view(-1, *(1,) * (like.dim() - 1))
