"""What a clip bound that follows a quantile learns from (Andrew et al., "Differentially private learning with adaptive
clipping", NeurIPS 2021).

The paper suggests the median norm as the bound. Computed as it is, it depends on the data, and no finite ε holds. Here an
example (Fed-CDP, in the first local step of a round) or a client (Fed-SDP) says only whether it lay within the bound, and
under noise; `server.next_clip` moves the bound by the noised sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedcdp.files.tree import Tree, masked
from fedcdp.mechanism.clipping import group_norms
from fedcdp.mechanism.noise import deviation_of_count
from fedcdp.methods.base import Moment


def indicators(values: Tree, present: Tensor, at: Moment) -> Tensor:
    """For each entry, the share of its groups with norm ≤ C, less ½; zero for one that clipping would leave out.

    Guarantees: a number in [−½, ½]. Zeroing out one record changes the sum over a step by at most ½; zeroing out a client,
    by at most S/2 (of its step's sum) or ½ (of its update).
    """
    norms = torch.stack(group_norms(values, at.groups, present.dim()))
    usable = present & torch.isfinite(norms).all(0)
    return masked((norms <= at.clip_bound).double().mean(0) - 0.5, usable)


def count_examples(gradients: Tree, present: Tensor, at: Moment) -> Tensor:
    """The noised sum of a step's indicators [clients], by the convention that noises its gradients."""
    raw = indicators(gradients, present, at)
    if at.plan.noise == "example" and at.tap is not None:
        released = at.noise.for_indicators(at.round, at.clients, at.plan.slots, at.plan.quantile_noise)
        released[:, : raw.shape[1]] += raw
        at.show("type2-count", {"within": released})
        return released.sum(1)
    at.show("type2-count", {"within": raw})
    return raw.sum(1) + at.noise.for_count(at.round, at.clients, deviation_of_count(at.plan))


def count_clients(update: Tree, at: Moment) -> Tensor:
    """The indicator of each client's update [clients], not noised."""
    return indicators(update, torch.ones_like(at.clients, dtype=torch.bool), at)
