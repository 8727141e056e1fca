"""What every method has in common: federated SGD, in which a method decides what is computed, released and admitted.

All functions are pure and work on many clients at once (a leading axis [clients, ...]); a deployed client is an axis of
length one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from fedcdp.compression import keep_largest
from fedcdp.engine.base import Batch, Engine
from fedcdp.noise import SeededNoise
from fedcdp.plan import Plan
from fedcdp.tree import Tree, combine, repeat

Tap = Callable[[str, "Moment", Tree], None]


@dataclass(frozen=True)
class Moment:
    """Where in the training a function is called: all that it may depend on besides its tensors."""

    plan: Plan
    engine: Engine
    noise: SeededNoise
    round: int
    clients: Tensor
    """The numbers of the clients on the leading axis."""
    expected_batch: Tensor
    """min(B, N_i) for each of them: what a sum over a step's records is divided by, however many were drawn."""
    step: int = 0
    tap: Tap | None = None
    """Told what a reader of "type2", "type1" or "type0" sees; None: nobody reads."""

    @property
    def clip_bound(self) -> float:
        """C of this round."""
        return self.plan.clip_at(self.round)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of tensors that are clipped together."""
        return self.engine.layout.groups(self.plan.clip_mode)

    def show(self, reader: str, seen: Tree) -> None:
        """Let a reader see what the method releases here."""
        if self.tap is not None:
            self.tap(reader, self, seen)


class Method(ABC):
    """A federated training method. Subclasses override what they do differently."""

    @abstractmethod
    def gradient_sum(self, weights: Tree, batch: Batch, at: Moment) -> Tree:
        """The sum of a step's gradients as the method lets local training use them."""

    def local_step(self, weights: Tree, velocity: Tree | None, batch: Batch, at: Moment) -> tuple[Tree, Tree]:
        """One local iteration: W ← W − η·v, with v the batch mean, or its running sum under momentum."""
        total = self.gradient_sum(weights, batch, at)
        mean = {name: value / _column(at.expected_batch, value) for name, value in total.items()}
        velocity = mean if velocity is None else combine(mean, velocity, at.plan.momentum)
        return combine(weights, velocity, -at.plan.learning_rate_at(at.round)), velocity

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


def train_locally(method: Method, weights: Tree, batches: Iterable[Batch], at: Moment) -> Tree:
    """L local iterations of every client from the global weights W(t); the updates that leave them [clients, ...]."""
    before = repeat(weights, len(at.clients))
    after, velocity = before, None
    for step, batch in enumerate(batches):
        after, velocity = method.local_step(after, velocity, batch, replace(at, step=step))
    update = method.release(before, after, at)
    at.show("type0", update)
    return update


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).view(-1, *(1,) * (like.dim() - 1))
