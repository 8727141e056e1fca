"""Deals of equal size: which records, of which classes, each client of one copy of the dataset receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedcdp.data.holdings import Indices, Rows
from fedcdp.mechanism.randomness import numpy_generator


class DealingRule(Protocol):
    """How many records of each class the next client takes: its exact share in total, never more than are left."""

    def __call__(self, left: Indices, clients: int, rng: np.random.Generator) -> Indices:
        """Deal from `left` [classes], which is exactly enough for `clients` more clients."""
        ...


@dataclass(frozen=True, eq=False)
class Deal:
    """A fresh deal of the dataset, determined by the copy's number alone: disjoint rows, each in random order.

    The len(labels) − clients · records records that cannot be dealt are left out at random, so all records are equally
    likely to be used. Without a rule, records are dealt regardless of their class.
    """

    labels: npt.NDArray[np.unsignedinteger]
    clients: int
    records: int
    rule: DealingRule | None
    seed: int

    def __call__(self, copy: int) -> Rows:
        rng = numpy_generator(self.seed, "partition", copy)
        pool = rng.permutation(len(self.labels))[: self.clients * self.records].astype(np.int32)
        if self.rule is None:
            return pool.reshape(self.clients, self.records)
        pool = pool[np.argsort(self.labels[pool], kind="stable")]
        left = np.bincount(self.labels[pool], minlength=int(self.labels.max()) + 1)
        heads = np.cumsum(left) - left  # the position of each class's next record in the pool
        steps = np.arange(self.records)
        rows = np.empty((self.clients, self.records), dtype=np.int32)
        for served, row in enumerate(rows):
            take = self.rule(left, self.clients - served, rng)
            row[:] = pool[np.repeat(heads - np.cumsum(take) + take, take) + steps]
            heads += take
            left -= take
        return rng.permuted(rows, axis=1)


@dataclass(frozen=True)
class Shards:
    """About `records` / `classes` of each of `classes` classes, drawn in proportion to the records left in each class.

    m clients can be given at most k classes each, whatever the class sizes, as long as the n classes left satisfy
    n − 1 ≤ m(k − 1): `_close` serves one client and preserves this condition for the rest (for k = 2 it is Walker's alias
    construction). A random pick is accepted only if it also preserves the condition, so k holds to the last client.
    """

    records: int
    classes: int
    tries: int = 4

    def __call__(self, left: Indices, clients: int, rng: np.random.Generator) -> Indices:
        present = int(np.count_nonzero(left))
        most = max(self.classes, 1 - (1 - present) // clients)
        for _ in range(self.tries):
            take = self._pick(left, clients, rng)
            still = int(np.count_nonzero(left != take))
            if take.sum() == self.records and still - 1 <= (clients - 1) * (most - 1):
                return take
        return self._close(left, most)

    def _pick(self, left: Indices, clients: int, rng: np.random.Generator) -> Indices:
        """Shards of equal size; a class too large to be used up that way goes to all clients, in larger shards."""
        average = left / clients
        large = average * self.classes > self.records
        # The first arrivals of exponential clocks are a draw without replacement in proportion to their rates.
        arrival = np.where(left > 0, rng.standard_exponential(len(left)) / np.maximum(left, 1), np.inf)
        arrival[large] = 0
        picked = np.argsort(arrival, kind="stable")[: min(self.classes, np.count_nonzero(left))]
        rest = (self.records - average[large].sum()) / max(1, np.count_nonzero(~large[picked]))
        return _fill(left, picked, np.where(large[picked], average[picked], rest), self.records)

    def _close(self, left: Indices, most: int) -> Indices:
        """At most `most` classes, all but the last of them completely: the first run, by size, that holds enough.

        The run before it does not hold enough, so its members fit completely; and the largest `most` classes do hold
        enough, because an average class holds clients · records / n. So `most` − 1 classes are used up, or, if the very
        first run is chosen, as many of the smallest as fit, which also suffices for the bound.
        """
        order = np.argsort(left, kind="stable")[-np.count_nonzero(left) :]
        width = min(most, len(order))
        through = np.concatenate([[0], np.cumsum(left[order])])
        first = int(np.argmax(through[width:] - through[:-width] >= self.records))
        run = order[first : first + width]
        needed = self.records - (through[first : first + width] - through[first])
        take = np.zeros_like(left)
        take[run] = np.clip(needed, 0, left[run])
        return take


@dataclass(frozen=True, eq=False)
class Dirichlet:
    """Class counts ~ Multinomial(`records`, q) with q ~ Dirichlet(`concentration`), drawn afresh for each client.

    A class that runs out is left out of q, and the missing records are drawn again from the others.
    """

    records: int
    concentration: npt.NDArray[np.float64]

    def __call__(self, left: Indices, clients: int, rng: np.random.Generator) -> Indices:  # noqa: ARG002
        positive = self.concentration > 0
        proportions = np.zeros(len(left))
        proportions[positive] = rng.dirichlet(self.concentration[positive])
        take = np.zeros_like(left)
        while short := self.records - int(take.sum()):
            room = left - take
            weights = np.where(room > 0, proportions, 0.0)
            if not weights.sum() > 0:  # all classes in q have run out: draw by what is left
                weights = room.astype(np.float64)
            take += np.minimum(room, rng.multinomial(short, weights / weights.sum()))
        return take


def _fill(left: Indices, picked: Indices, weights: npt.NDArray[np.float64], records: int) -> Indices:
    """Spread `records` over the `picked` classes by weight; larger classes make up for what a small class lacks."""
    take = np.zeros_like(left)
    order = np.argsort(left[picked], kind="stable")
    weight = float(weights.sum())
    for label, share in zip(picked[order].tolist(), weights[order].tolist(), strict=True):
        wanted = round(records * share / weight) if weight > share else records
        take[label] = min(wanted, left[label])
        records -= int(take[label])
        weight -= share
    return take
