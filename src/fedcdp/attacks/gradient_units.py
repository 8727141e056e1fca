"""Observations in units of a gradient: how updates are scaled, and how much noise they carry in these units.

An update is divided by −η and by the client's weight, both of which are public. After one local step it is the mean gradient
of the batch, after L steps the sum of L such means, weighted by `step_weights` where the plan has momentum or a proximal
term. With noise on the sum, a client's whole numbers are decoded first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedcdp.config.plan import Plan
from fedcdp.files.tree import Tree
from fedcdp.mechanism.secure_sum import from_integers, grid
from fedcdp.methods import Moment


def weights_of(at: Moment) -> Tensor:
    """The weight of each client's update [clients]; 1 if all are equal."""
    return torch.ones(len(at.clients), device=at.clients.device) if at.client_weights is None else at.client_weights


def divisors(at: Moment) -> Tensor:
    """What a client's decoded message is divided by to be in units of a gradient [clients]."""
    if at.plan.sums and at.plan.per_example:  # it is a sum of gradients, undivided
        return at.expected_batch.double()
    return -at.learning_rate * weights_of(at)


def as_gradient(update: Tree, at: Moment) -> Tree:
    """What clients sent [clients, ...], in units of a gradient."""
    if at.plan.sums:
        update = from_integers(update, at.clip_bound)
    scale = divisors(at)
    scaled = {name: value / scale.view(-1, *(1,) * (value.dim() - 1)) for name, value in update.items()}
    return {name: value.float() for name, value in scaled.items()} if at.plan.sums else scaled


def promised_deviation(at: Moment, leak: str) -> Tensor:
    """Standard deviation of the noise that a method adds to the observation of each client [clients], as it is scaled.

    For an update of several steps, this ignores how noise in one step changes the gradients of later steps.
    """
    plan, one = at.plan, torch.ones(len(at.clients), dtype=torch.float64, device=at.clients.device)
    if leak == "type2":
        if not plan.per_example or plan.noise != "example":
            return one * 0
        return at.noise_scale * (one if at.slot_noise is None else at.slot_noise[:, 0].double())
    if plan.sums:
        return at.share_deviation * grid(at.clip_bound) / divisors(at).double().abs()
    if plan.per_example:  # the weight of an update multiplies gradients and noise alike
        accumulated = math.hypot(*step_weights(plan, at.round, plan.local_steps))
        return at.step_deviation * accumulated / at.expected_batch.double()
    if plan.method == "fed-sdp" and plan.noise_at == "client":
        return at.noise_scale / at.learning_rate / weights_of(at).double()
    return one * 0


def step_weights(plan: Plan, round_: int, steps: int) -> list[float]:
    """How often the mean gradient of each local step is in the update of a round, from the first step to the last.

    The last step moves the weights once. An earlier step moves them again through momentum, and a proximal term takes a part
    ημ of the way back in every step that follows.
    """
    pull = plan.learning_rate_at(round_) * plan.proximal
    weights, velocity, moved = [], 1.0, 1.0
    for _ in range(steps):
        weights.append(moved)
        velocity = plan.momentum * velocity - pull * moved
        moved += velocity
    return weights[::-1]
