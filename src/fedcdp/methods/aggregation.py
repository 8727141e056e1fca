"""The server: adds up what clients send and updates the global model.

Clients weight their updates themselves, where the plan asks for it. The sum is divided by the *planned* number of clients
K_t, even when fewer or more took part (Poisson sampling, dropped clients): the server must not reveal the real number, and
the accounting relies on a fixed divisor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedcdp.config.plan import Plan
from fedcdp.files.tree import Tree, combine
from fedcdp.methods.base import Method, Moment
from fedcdp.methods.quantile import clip_rule
from fedcdp.methods.robust_means import robust_sum
from fedcdp.methods.server_optimizers import OptimizerState, move_model


class Aggregate:
    """A running sum of what the clients of a round sent, in float64, so the grouping of clients does not matter.

    With noise on the sum clients send whole numbers, which are added modulo 2^64; the method decodes their sum.
    A robust aggregator (`robust_means`) needs all updates at once, so these are kept.
    Under `fedsgd` clients send updates ΔW_k; under `fedaveraging` they send models W_k = W + ΔW_k. The results agree.
    """

    def __init__(self, weights: Tree, plan: Plan) -> None:
        self._weights = {name: value.double() for name, value in weights.items()}
        self._plan = plan
        self._clients = 0
        self._counts: list[Tensor] = []
        dtype = torch.int64 if plan.sums else torch.float64
        self._total = {name: torch.zeros_like(value, dtype=dtype) for name, value in weights.items()}
        self._kept: list[Tree] = []

    def add(self, updates: Tree, counts: Tensor | None = None) -> None:
        """Add the admitted updates [clients, ...] of some clients, and their counts [clients] if there are any."""
        if counts is not None:
            self._counts.append(counts)
        self._clients += len(next(iter(updates.values())))
        if self._plan.aggregator != "mean":
            self._kept.append(updates)
            return
        for name, update in updates.items():
            sent = update if self._plan.sums else update.double()
            if self._plan.aggregation == "fedaveraging":
                sent = self._weights[name] + sent
            self._total[name] += sent.sum(0)

    def total_update(self) -> Tree:
        """Σ ΔW_k over the clients that took part, as they sent it; or what a robust aggregator puts in its place."""
        if self._kept:
            return robust_sum({name: torch.cat([each[name] for each in self._kept]) for name in self._total}, self._plan)
        if self._plan.aggregation == "fedsgd":
            return self._total
        return combine(self._total, self._weights, -float(self._clients))

    def total_count(self) -> float:
        """The sum of the clients' counts, rounded once."""
        return math.fsum(count for counts in self._counts for count in counts.tolist())


def server_update(
    method: Method, weights: Tree, received: Aggregate, at: Moment, optimizer: OptimizerState | None = None
) -> tuple[Tree, OptimizerState | None]:
    """W(t+1) ← W(t) + s · (Σ ΔW_k, decoded and sanitised) / K_t, or as the plan's server optimiser moves it, and its state.

    The optimiser gets the sanitised sum and nothing else of the round.
    """
    total = received.total_update()
    if at.plan.secure_aggregation:
        at.show("type0", total)
    return move_model(weights, method.sanitise_sum(total, at), at.plan, at.round, optimizer)


def next_clip(received: Aggregate, at: Moment) -> float | None:
    """The next round's clip bound if it follows a quantile (`quantile`), else None."""
    return clip_rule(at.plan).next_bound(received.total_count(), at)


def moving_average(average: Tree, weights: Tree, kept: float) -> Tree:
    """The moving average of the global model after one more round. Post-processing: it costs no privacy."""
    return {name: torch.lerp(weights[name], average[name], kept) for name in weights}
