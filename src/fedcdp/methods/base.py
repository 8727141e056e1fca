"""What every method has in common: federated SGD, in which a method decides what is computed, released and admitted.

All functions are pure and work on many clients at once (a leading axis [clients, ...]); a deployed client is an axis of
length one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fedcdp.config.plan import Plan
from fedcdp.engine.base import Batch, Engine
from fedcdp.files.tree import Tree, combine
from fedcdp.mechanism.noise import Noise, deviation_of_step_sum
from fedcdp.mechanism.pruning import keep_largest

Tap = Callable[[str, "Moment", Tree], None]


@dataclass(frozen=True)
class Moment:
    """Where in the training a function is called: all that it may depend on besides its tensors."""

    plan: Plan
    engine: Engine
    noise: Noise
    round: int
    clients: Tensor
    """The numbers of the clients on the leading axis."""
    expected_batch: Tensor
    """min(B, N_i) for each of them: what a sum over a step's records is divided by, however many were drawn."""
    step: int = 0
    tap: Tap | None = None
    """Told what a reader of "type2", "type1" or "type0" sees; None: nobody reads. What goes with it to let the clip bound
    follow a quantile is told as "type2-count", "type1-count", "type0-count". Whoever reads on the client also knows the
    weights that a local step starts from: told as "local-weights", before the step."""
    current_clip: float | None = None
    """The bound to which the rounds before this one moved it, where it follows a quantile."""

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
        """Standard deviation of the noise on the sum of a local step, where steps are noised."""
        return deviation_of_step_sum(self.plan, self.round, self.current_clip)

    @property
    def learning_rate(self) -> float:
        """η of this round."""
        return self.plan.learning_rate_at(self.round)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of tensors that are clipped together."""
        return self.engine.layout.groups(self.plan.clip_mode)

    def show(self, reader: str, seen: Tree) -> None:
        """Let a reader see what the method releases here."""
        if self.tap is not None:
            self.tap(reader, self, seen)


@dataclass(frozen=True)
class Local:
    """Where clients are in their local training [clients, ...]."""

    weights: Tree
    velocity: Tree | None = None
    """The running sum of gradients, where there is momentum."""
    count: Tensor | None = None
    """What they will tell the server of the norms within the clip bound, where it follows a quantile."""


@dataclass(frozen=True)
class Sent:
    """What leaves clients in a round [clients, ...]."""

    update: Tree
    count: Tensor | None = None
    """The sum of their indicators, where the clip bound follows a quantile and they are the ones to count."""


@dataclass(frozen=True)
class GradientSum:
    """The sum of the gradients of one local step [clients, ...]."""

    total: Tree
    count: Tensor | None = None
    """The noised sum of the indicators [clients], where the clip bound follows a quantile and this step counts."""


class Method(ABC):
    """A federated training method. Subclasses override what they do differently."""

    @abstractmethod
    def gradient_sum(self, weights: Tree, batch: Batch, at: Moment) -> GradientSum:
        """The sum of a step's gradients as the method lets local training use them."""

    def local_step(self, local: Local, batch: Batch, at: Moment) -> Local:
        """One local iteration: W ← W − η·v, with v the batch mean, or its running sum under momentum."""
        summed = self.gradient_sum(local.weights, batch, at)
        mean = {name: value / _column(at.expected_batch, value) for name, value in summed.total.items()}
        velocity = mean if local.velocity is None else combine(mean, local.velocity, at.plan.momentum)
        weights = combine(local.weights, velocity, -at.learning_rate)
        count = local.count if summed.count is None else summed.count
        return Local(weights, velocity if at.plan.momentum else None, count)

    def release(self, before: Tree, after: Tree, at: Moment) -> Tree:
        """The update that leaves a client, ΔW_i(t) = W_i(t)_L − W(t): sanitised first, then pruned, never the reverse."""
        update = self.sanitise_update(combine(after, before, -1.0), at)
        update = keep_largest(update, at.engine.layout, self.shared_fraction(at.plan))
        at.show("type1", update)
        return update

    def sanitise_update(self, update: Tree, at: Moment) -> Tree:  # noqa: ARG002
        """What a client does to its update before it leaves."""
        return update

    def shared_fraction(self, plan: Plan) -> float:
        """The share of an update's entries that is sent."""
        return 1 - plan.compression

    def admit(self, update: Tree, at: Moment) -> Tree:  # noqa: ARG002
        """What the server does to each update before it adds them up."""
        return update

    def sanitise_sum(self, total: Tree, at: Moment) -> Tree:  # noqa: ARG002
        """What the server does to the sum of the updates before it uses it."""
        return total


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).view(-1, *(1,) * (like.dim() - 1))
