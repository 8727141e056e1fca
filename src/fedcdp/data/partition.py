"""Partition one dataset among many clients: by shards, at random, in full, by Dirichlet draws, or by the user's lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.federation import Dealt, Federation, Indices, Listed, Rows, natural
from fedcdp.errors import DataError, PlanError
from fedcdp.mechanism.randomness import numpy_generator

__all__ = ["SCHEMES", "Federation", "partition"]

SCHEMES = ("shards", "iid", "full", "dirichlet", "natural", "custom")


def partition(
    data: Splits | Dataset | tuple[npt.ArrayLike | Tensor, npt.ArrayLike | Tensor],
    clients: int | None = None,
    scheme: str | None = None,
    *,
    records: int | None = None,
    classes_per_client: int = 2,
    alpha: float = 0.5,
    seed: int = 0,
    indices: Sequence[npt.ArrayLike] | None = None,
    validation: Dataset | None = None,
) -> Federation:
    """Distribute a dataset to clients.

    | scheme      | a client holds                                                                                 |
    |-------------|------------------------------------------------------------------------------------------------|
    | `shards`    | `records` of `classes_per_client` classes, about evenly (the default)                          |
    | `iid`       | `records` at random                                                                            |
    | `full`      | every record                                                                                   |
    | `dirichlet` | `records` in class proportions ~ Dirichlet(`alpha` · the data's own) (Hsu et al. 2019)         |
    | `natural`   | the records that the data name it for (`load_file(..., client=...)`), shuffled                 |
    | `custom`    | the records of its list in `indices`, shuffled                                                 |

    Guarantees: under every scheme but `natural` and `custom` each client holds exactly `records` records. No two clients
    hold the same record as long as clients · records ≤ len(data). Beyond that the data are dealt again, afresh, for every
    further len(data) // records clients, so a record is stored at up to `Federation.copies` clients. Under `shards` a client
    holds at most `classes_per_client` classes, or, where a copy has too few clients for its classes,
    1 + ⌈(classes − 1) / (clients of a copy)⌉.

    The call takes time and memory for the dataset, not for the clients: a client's records are dealt when first asked for.

    Args:
        data: A dataset, splits (of which the training split is distributed), or a pair of arrays: inputs and labels.
        clients: Number of clients. Leave it out with `indices`.
        scheme: See the table. Default: `custom` with `indices`, `natural` where the data name their clients, else `shards`.
        records: Records at a client. Default: len(data) // clients.
        classes_per_client: Classes at a client, for `shards`.
        alpha: Concentration, for `dirichlet`: the smaller, the more the clients differ.
        seed: Fixes who holds what.
        indices: For each client, the numbers of its records.
        validation: Examples that stay with the server. No ε protects them. Default: the validation split of `data`.

    Returns:
        The clients and what each holds. No data are copied.

    Raises:
        PlanError: An argument is not allowed, or contradicts another.
        DataError: The labels are not one whole number for each example.

    Examples:
        >>> import fedcdp
        >>> splits = fedcdp.load("cancer")
        >>> fedcdp.partition(splits, clients=10, scheme="iid")
        <Federation: 10 clients × 42 records, dealt at random, each record stored at one client at most>
        >>> fedcdp.partition(splits, indices=[range(300), range(300, 426)])
        <Federation: 2 clients × 126 to 300 records, as listed, each record stored at one client at most>
    """
    train = _training_set(data)
    splits = data if isinstance(data, Splits) else None
    owners = None if splits is None else splits.owners
    scheme = scheme or ("custom" if indices is not None else "shards" if owners is None else "natural")
    holdings: Dealt | Listed
    if scheme not in SCHEMES:
        raise PlanError(f"scheme is {scheme!r}: it must be one of {', '.join(SCHEMES)}")
    if (indices is not None) != (scheme == "custom"):
        raise PlanError(f"scheme is {scheme!r}: indices must be given with scheme 'custom' and with no other")
    if scheme == "natural":
        if records is not None or clients is not None:
            raise PlanError("scheme is 'natural': the data say which clients there are; leave clients and records out")
        if splits is None or owners is None:
            raise PlanError("scheme is 'natural': the data do not name their clients; load them with a client column")
        return natural(
            train,
            owners,
            splits.owner_names,
            seed=seed,
            validation=validation or splits.validation,
            validation_owners=None if validation else splits.validation_owners,
            test=splits.test,
        )
    if indices is not None:
        if records is not None or clients not in (None, len(indices)):
            raise PlanError(f"indices has {len(indices)} lists, which alone set clients and records; leave those two out")
        holdings, sentence = _listed(indices, len(train), seed), "as listed"
    else:
        clients = _whole("clients", clients)
        records = _records_each(len(train), clients, scheme, records)
        rule, sentence = _rule(train, scheme, records, classes_per_client, alpha)
        per_copy = len(train) // records
        labels = _labels(train)
        holdings = Dealt(Deal(labels, per_copy, records, rule, int(seed)), clients, records, per_copy)
    return Federation(
        train,
        validation if splits is None or validation is not None else splits.validation,
        None if splits is None else splits.test,
        scheme,
        sentence=sentence,
        holdings=holdings,
    )


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


def _training_set(data: Splits | Dataset | tuple[npt.ArrayLike | Tensor, npt.ArrayLike | Tensor]) -> Dataset:
    if isinstance(data, Splits):
        return data.train
    if isinstance(data, Dataset):
        return data
    inputs, targets = data
    given = np.asarray(targets.cpu() if isinstance(targets, Tensor) else targets)
    with np.errstate(invalid="ignore"):  # NaN is refused below
        labels = given.astype(np.int64)
    if given.ndim != 1 or not np.array_equal(labels, given):
        raise DataError(f"labels are {given.dtype} of shape {given.shape}: each example needs one whole number")
    classes = int(labels.max(initial=-1)) + 1
    return Dataset(torch.as_tensor(inputs, dtype=torch.float32), torch.from_numpy(labels), classes)


def _whole(name: str, value: int | None, most: int | None = None, what: str = "") -> int:
    """`value` if it is a whole number from 1 to `most`; the error message calls `most` `what`."""
    fits = isinstance(value, int | np.integer) and value >= 1 and (most is None or value <= most)
    if not fits or value is None:
        allowed = "1 or more" if most is None else f"1 to {most}, {what}"
        raise PlanError(f"{name} is {value!r}: it must be a whole number, {allowed}")
    return int(value)


def _records_each(total: int, clients: int, scheme: str, records: int | None) -> int:
    if scheme == "full":
        if records not in (None, total):
            raise PlanError(f"records is {records!r}: under scheme 'full' a client holds all {total}, so leave records out")
        return total
    if records is not None:
        return _whole("records", records, total, "the size of the training data")
    if clients > total:
        raise PlanError(
            f"clients is {clients}: at most {total} clients can have a record of their own; "
            "pass records= to store each record at several clients"
        )
    return total // clients


def _labels(train: Dataset) -> npt.NDArray[np.unsignedinteger]:
    """The class of each record, in a small type; 0 where there are no classes."""
    if not train.classes:
        return np.zeros(len(train), dtype=np.uint8)
    return train.targets.cpu().numpy().astype(np.min_scalar_type(train.classes - 1))


def _rule(
    train: Dataset, scheme: str, records: int, classes_per_client: int, alpha: float
) -> tuple[DealingRule | None, str]:
    """The rule of a dealt scheme, and its description."""
    counts = np.bincount(_labels(train))
    if scheme in ("shards", "dirichlet") and not train.classes:
        raise PlanError(f"scheme is {scheme!r}: it deals by class, and task {train.task} has no classes; use 'iid'")
    if scheme == "shards":
        present = int(np.count_nonzero(counts))
        classes = _whole("classes_per_client", classes_per_client, present, "the classes in the training data")
        return Shards(records, classes), f"shards of {classes} class{'es' if classes > 1 else ''}"
    if scheme == "dirichlet":
        if not 0 < alpha < math.inf:
            raise PlanError(f"alpha is {alpha!r}: it must be a number above 0")
        return Dirichlet(records, alpha * counts / len(train)), f"classes ~ Dirichlet({alpha:g} · prior)"
    return None, "the whole dataset each" if scheme == "full" else "dealt at random"


def _listed(indices: Sequence[npt.ArrayLike], total: int, seed: int) -> Listed:
    """The user's lists, checked and shuffled."""
    if not len(indices):
        raise PlanError("indices is empty: it must have one list of record numbers for each client")
    lists = [np.asarray(one) for one in indices]
    for client, one in enumerate(lists):
        if not one.size:
            wrong = "empty"
        elif one.ndim != 1 or one.dtype.kind not in "iu":
            wrong = f"{one.dtype} of shape {one.shape}"
        elif one.min() < 0 or one.max() >= total:
            wrong = f"from {one.min()} to {one.max()}"
        elif len(np.unique(one)) < len(one):
            wrong = "a list with a repeated record"
        else:
            continue
        raise PlanError(f"indices[{client}] is {wrong}: it must be distinct whole numbers from 0 to {total - 1}")
    return Listed.shuffled(np.concatenate(lists), np.array([len(one) for one in lists]), seed)
