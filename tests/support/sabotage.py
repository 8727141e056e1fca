"""Mechanisms that are broken on purpose: an audit is worth something only if it catches these.

A sabotaged method runs the real one's code in all but the moment (plan and noise) that it believes in; the ε that is
claimed for it is that of the sound one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fedcdp.config.plan import Plan
from fedcdp.engine.base import Batch
from fedcdp.files.tree import Tree
from fedcdp.methods import Local, Method, Moment

Change = Callable[[Tree], Tree]
Fault = Callable[[Moment], Moment]
"""What the method is made to believe."""


class Tampered:
    """Noise of which each draw is changed before it is added."""

    def __init__(self, noise: Any, change: Change) -> None:
        self._noise, self._change = noise, change

    def __getattr__(self, name: str) -> Callable[..., Tree]:
        return lambda *where, **more: self._change(getattr(self._noise, name)(*where, **more))


def sabotaged(method: Method, fault: Fault) -> Method:
    """A method that is right in all but the moment that it believes in."""

    class Sabotaged(type(method)):  # type: ignore[misc]
        def local_step(self, local: Local, batch: Batch, at: Moment) -> Local:
            after: Local = super().local_step(local, batch, fault(at))
            return after

        def release(self, before: Tree, local: Local, at: Moment) -> Tree:
            here = at.plan.sums and at.plan.per_example  # elsewhere noise is added by the functions above and below
            sent: Tree = super().release(before, local, fault(at) if here else at)
            return sent

        def sanitise_update(self, update: Tree, at: Moment) -> Tree:
            sent: Tree = super().sanitise_update(update, fault(at))
            return sent

        def admit(self, update: Tree, at: Moment) -> Tree:
            admitted: Tree = super().admit(update, fault(at))
            return admitted

        def sanitise_sum(self, total: Tree, at: Moment) -> Tree:
            noised: Tree = super().sanitise_sum(total, fault(at))
            return noised

    return Sabotaged()


def with_noise(change: Change) -> Fault:
    """Noise that is changed."""
    return lambda at: replace(at, noise=Tampered(at.noise, change))  # type: ignore[arg-type]


def scaled(factor: float) -> Fault:
    """Noise of another deviation."""
    return with_noise(lambda noise: {name: value * factor for name, value in noise.items()})


def silenced(*names: str) -> Fault:
    """No noise on some tensors."""
    return with_noise(lambda noise: {name: value * (name not in names) for name, value in noise.items()})


def clipped_at(factor: float) -> Fault:
    """A clip bound that is larger by a factor while the noise stays what it was."""
    return lambda at: replace(at, plan=_with_larger_bound(at.plan, factor))


@functools.cache
def _with_larger_bound(plan: Plan, factor: float) -> Plan:
    bound = plan.clip_at(0) * factor
    return plan.but(clip=bound, noise_multiplier=plan.noise_scale_at(0) / bound)


def same_in_two_layers(noise: Tree) -> Tree:
    """The first layer's noise once more on the third."""
    return noise | {f"layers.2.{part}": noise[f"layers.0.{part}"] for part in ("weight", "bias")}


def same_in_every_slot(noise: Tree) -> Tree:
    """One draw for all examples of a step."""
    return {name: value[:, :1].expand_as(value) for name, value in noise.items()}


FAULTS: dict[str, Fault] = {
    "noise halved": scaled(0.5),
    "noise forgotten on a layer": silenced("layers.1.weight", "layers.1.bias"),
    "noise forgotten on a bias": silenced("layers.2.bias"),
    "noise shared by two layers": with_noise(same_in_two_layers),
    "clipping skipped": clipped_at(250.0),
    "each of three layers clipped at √3 C": clipped_at(math.sqrt(3)),
}
