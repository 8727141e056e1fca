"""Robust means: the mean of a round's updates, computed so that a few of them cannot move it far.

| aggregator | a coordinate of the result | tolerates |
| --- | --- | --- |
| mean | the mean | nobody: one client moves it as far as its update is admitted |
| trimmed-mean | the mean without the k largest and k smallest values, k = ⌈trim · n⌉ (Yin et al., ICML 2018) | k clients |
| median-of-means | the median of the means of G groups of clients (Chen, Su and Xu, 2017) | fewer than G/2 clients |

Guarantees: the result is a function of the updates that the server received. Each of them is noised by its own client, and
charged as what the server reads, so the result is post-processing and costs no privacy. Nothing else holds it up: noise
that is added to the *sum*, or whose credit rests on the server reading nothing but the sum, is refused (`Plan`).

The result stands for the sum of n updates: n times the robust mean, which the server divides by the planned number K_t.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedcdp.config.plan import Plan
from fedcdp.files.tree import Tree

_EXACT = 1e-9  # ⌈0.1 · 30⌉ is 3, although the product in float64 is above


def robust_sum(updates: Tree, plan: Plan) -> Tree:
    """n times the robust mean of the updates [n, ...] of a round's clients, in the order of their numbers."""
    robust = {}
    for name, values in updates.items():
        if plan.aggregator == "trimmed-mean":
            mean = trimmed_mean(values.double(), plan.trim)
        else:
            mean = median_of_means(values.double(), plan.median_groups)
        robust[name] = len(values) * mean
    return robust


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """The mean over the first axis without the share `trim` at each end, coordinate by coordinate; of few, their median."""
    clients = len(values)
    cut = min(math.ceil(trim * clients - _EXACT), (clients - 1) // 2)
    return values.sort(0).values[cut : clients - cut].mean(0)


def median_of_means(values: Tensor, groups: int) -> Tensor:
    """The median, coordinate by coordinate, of the means of `groups` groups of clients: client i is in group i mod G."""
    count = min(groups, len(values))
    means = torch.stack([values[group::count].mean(0) for group in range(count)]).sort(0).values
    return (means[(count - 1) // 2] + means[count // 2]) / 2
