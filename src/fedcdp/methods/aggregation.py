"""The server: adds up what clients send and updates the global model.

Clients weight their updates themselves, where the plan asks for it. The sum is divided by the *planned* number of clients
K_t, even when fewer or more took part (Poisson sampling, dropped clients): the server must not reveal the real number, and
the accounting relies on a fixed divisor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.config.plan import Plan
from fedcdp.files.tree import Tree, combine
from fedcdp.methods.base import Method, Moment
from fedcdp.methods.quantile import clip_rule
from fedcdp.methods.robust_means import robust_sum
from fedcdp.methods.server_optimizers import OptimizerState, move_model


@dataclass(frozen=True)
class Portion:
    """What some clients of a round sent, added up; for a robust aggregator, each of their updates [clients, ...]."""

    total: Tree
    clients: int
    counts: Tensor | None = None
    """The counts of each of the clients [clients], if there are any."""

    def flat(self) -> Tensor:
        """Everything in one tensor, to send it to another process, whose trees may have another order."""
        return torch.cat([part.reshape(-1) for part in self._parts()])

    def fill(self, flat: Tensor) -> None:
        """Take the values of `flat`, which comes from a portion of this shape."""
        parts = self._parts()
        for part, values in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(values.view(part.shape))

    def _parts(self) -> list[Tensor]:
        return [self.total[name] for name in sorted(self.total)] + ([] if self.counts is None else [self.counts])


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
        self._robust = plan.aggregator != "mean"
        self._kept: list[Tree] = []

    def add(self, updates: Tree, counts: Tensor | None = None) -> None:
        """Add the admitted updates [clients, ...] of some clients, and their counts [clients] if there are any."""
        self.take(self.portion(updates, counts))

    def portion(self, updates: Tree, counts: Tensor | None = None) -> Portion:
        """The sum of what some clients sent, which `take` adds: other processes may compute it."""
        clients = len(next(iter(updates.values())))
        if self._robust:
            return Portion({name: update.double() for name, update in updates.items()}, clients, counts)
        total = {}
        for name, update in updates.items():
            sent = update if self._plan.sums else update.double()
            if self._plan.aggregation == "fedaveraging":
                sent = self._weights[name] + sent
            total[name] = sent.sum(0)
        return Portion(total, clients, counts)

    def empty_portion(self, clients: int) -> Portion:
        """A portion of so many clients, whose values do not matter."""
        counts = None if self._plan.quantile is None else next(iter(self._total.values())).new_empty(clients)
        several = (clients,) if self._robust else ()
        empty = {name: value.new_empty(*several, *value.shape) for name, value in self._total.items()}
        return Portion(empty, clients, counts)

    def take(self, portion: Portion) -> None:
        """Add a portion. The order decides how sums round: take portions in the order of their clients."""
        if portion.counts is not None:
            self._counts.append(portion.counts)
        if self._robust:
            self._kept.append(portion.total)
        else:
            for name, value in portion.total.items():
                self._total[name] += value
        self._clients += portion.clients

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
