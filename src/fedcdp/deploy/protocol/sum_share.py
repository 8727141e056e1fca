"""A client's share of the sum as integers, and the sum as an update: the only place that knows their scale.

A stand-in until the exact mechanism is there: the method's float update on the grid γ = C·2^-24, rounded.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedcdp.config.plan import Plan
from fedcdp.deploy.protocol.local_round import LocalTraining, Round
from fedcdp.files.tree import Layout, Tree

_STEPS = 2.0**24  # grid steps in a clip bound


def share_of(training: LocalTraining, weights: Tree, asked: Round, members: int, client: int) -> NDArray[np.int64]:
    """The integers [D] that a client brings to the sum of a roster of so many members, its share of the noise included."""
    sent = training.take_part(weights, asked, client, members)
    flat = training.engine.layout.flatten({name: value[0] for name, value in sent.update.items()}, lead=0).cpu()
    return torch.round(flat.double() / _grid(training.plan, asked.number)).to(torch.int64).numpy()


def update_of(total: NDArray[np.int64], layout: Layout, plan: Plan, round_: int) -> Tree:
    """The sum [D] of all members as the update of a cohort, without leading axes."""
    return layout.unflatten(torch.from_numpy(total.copy()).double() * _grid(plan, round_))


def _grid(plan: Plan, round_: int) -> float:
    return plan.clip_at(round_) / _STEPS
