"""Noise: where the Gaussian is added, with what scale, and from which stream.

The noise of a simulation is a pure function of (seed, round, client, step, slot, coordinate), drawn from streams that
nothing else uses. Whoever has the seed can subtract it: a seeded run is reproducible research, not protection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.plan import Plan
from fedcdp.randomness import normals, stream_key
from fedcdp.tree import Layout, Tree

_WHOLE_SUM = 0  # the slot number of a draw that stands for all of a step; single examples count from 1


def deviation_of_step_sum(plan: Plan, round_: int) -> float:
    """Standard deviation of the noise on the *sum* of a client's clipped gradients in one local step of Fed-CDP.

    | convention | the noise is added to | on the sum |
    | --- | --- | --- |
    | `example` (the paper's Algorithm 2) | each of the S slots, empty or not | σC·√S |
    | `batch` (the authors' released code) | the sum | σC |
    | `cohort` (what fits the paper's printed accuracy) | the sum, 1/K_t of it | σC / K_t |

    It never depends on how many records a step drew: noise whose energy shows the batch size would void the
    amplification by sampling.
    """
    scale = plan.noise_scale_at(round_)
    factor = {"example": math.sqrt(plan.slots), "batch": 1.0, "cohort": 1.0 / plan.per_round}
    return scale * factor[plan.noise]


@dataclass(frozen=True)
class SeededNoise:
    """Gaussian noise by counters: the same for any engine, chunking or machine that asks with the same arguments."""

    seed: int
    layout: Layout

    def for_step(self, round_: int, clients: Tensor, step: int, deviation: float) -> Tree:
        """One draw a client [clients, ...] for the whole of a local step."""
        return self._draw("step-noise", round_, clients, step, _WHOLE_SUM, deviation)

    def for_examples(self, round_: int, clients: Tensor, step: int, slots: int, deviation: float) -> Tree:
        """One draw for each slot of a local step [clients, slots, ...]: what a type-2 reader sees is noised one by one."""
        draws = [self._draw("step-noise", round_, clients, step, 1 + slot, deviation) for slot in range(slots)]
        return {name: torch.stack([draw[name] for draw in draws], dim=1) for name in self.layout.shapes}

    def for_update(self, round_: int, clients: Tensor, deviation: float) -> Tree:
        """One draw a client [clients, ...] for the update that it sends."""
        return self._draw("update-noise", round_, clients, 0, 0, deviation)

    def for_server(self, round_: int, device: torch.device, deviation: float) -> Tree:
        """One draw for the server's sum."""
        draw = self._draw("server-noise", round_, torch.zeros(1, dtype=torch.int64, device=device), 0, 0, deviation)
        return {name: value[0] for name, value in draw.items()}

    def _draw(self, purpose: str, round_: int, clients: Tensor, step: int, slot: int, deviation: float) -> Tree:
        key = stream_key(self.seed, purpose, round_)
        return self.layout.unflatten(normals(key, clients, step, slot, self.layout.size).mul_(deviation))
