"""Partition one dataset among many clients: by their owners, by shards, at random, in full, by Dirichlet draws, by lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcdp.config.arguments import checked
from fedcdp.data.columns import as_values
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.dealing import Deal, DealingRule, Dirichlet, Shards
from fedcdp.data.federation import Federation, natural
from fedcdp.data.holdings import Dealt, Holdings, Listed
from fedcdp.data.readers import is_pair
from fedcdp.data.sources import as_dataset
from fedcdp.data.unequal import UNEQUAL, check_alpha, deal_classes, deal_sizes, unequal_sizes
from fedcdp.errors import DataError, PlanError

__all__ = ["SCHEMES", "Federation", "partition"]

SCHEMES = ("shards", "iid", "full", "dirichlet", *UNEQUAL, "natural", "custom")


@checked
def partition(
    data: Any,
    clients: int | None = None,
    scheme: str | None = None,
    *,
    records: int | None = None,
    classes_per_client: int = 2,
    alpha: float = 0.5,
    smallest: int = 1,
    size_ratio: float | None = None,
    seed: int = 0,
    indices: Sequence[npt.ArrayLike] | Mapping[str, npt.ArrayLike] | None = None,
    validation: Any = None,
) -> Federation:
    """Distribute a dataset to clients.

    | scheme              | a client holds                                                                          |
    |---------------------|-----------------------------------------------------------------------------------------|
    | `shards`            | `records` of `classes_per_client` classes, about evenly (the default)                   |
    | `iid`               | `records` at random                                                                     |
    | `full`              | every record                                                                            |
    | `dirichlet`         | `records` in class proportions ~ Dirichlet(`alpha` · the data's own) (Hsu et al. 2019)  |
    | `linear`            | records at random; client number i holds a share ∝ i, counted from 1                    |
    | `square`            | the same, ∝ i²                                                                          |
    | `exponential`       | the same, ∝ eⁱ                                                                          |
    | `dirichlet-sizes`   | records at random; the clients' shares ~ Dirichlet(`alpha`)                             |
    | `dirichlet-classes` | of each class a share ~ Dirichlet(`alpha`), so both sizes and classes differ            |
    | `natural`           | the records that came from it (`Splits.owners`; the default where these are known)      |
    | `custom`            | the records of its list in `indices`, shuffled                                          |

    Most schemes are known from flwr-datasets:

    | scheme              | in flwr-datasets            | what differs here                                        |
    |---------------------|-----------------------------|----------------------------------------------------------|
    | `natural`           | `NaturalIdPartitioner`      | nothing                                                  |
    | `iid`               | `IidPartitioner`            | sizes are equal: a remainder is left out                 |
    | `linear`            | `LinearPartitioner`         | nothing                                                  |
    | `square`            | `SquarePartitioner`         | nothing                                                  |
    | `exponential`       | `ExponentialPartitioner`    | nothing                                                  |
    | `dirichlet-classes` | `DirichletPartitioner`      | no `self_balancing`; `min_partition_size` is `smallest`  |
    | `dirichlet`         | `InnerDirichletPartitioner` | sizes are equal; `alpha` is times the data's own shares  |
    | `shards`            | `ShardPartitioner`          | a shard has one class, so shards may differ in size      |
    | `dirichlet-sizes`   | none                        |                                                          |
    | `custom`, `full`    | none                        |                                                          |

    Records are shuffled before they are dealt, and draws come from `seed`, so the clients hold other records than there.

    Guarantees: under `shards`, `iid`, `full` and `dirichlet` each client holds exactly `records` records. No two clients
    hold the same record as long as clients · records ≤ len(data). Beyond that the data are dealt again, afresh, for every
    further len(data) // records clients, so a record is stored at up to `Federation.copies` clients. Under `shards` a client
    holds at most `classes_per_client` classes, or, where a copy has too few clients for its classes,
    1 + ⌈(classes − 1) / (clients of a copy)⌉. Under the schemes of unequal sizes each record has exactly one client.

    The call takes time and memory for the dataset, not for the clients: where sizes are equal, a client's records are dealt
    when first asked for.

    Args:
        data: Splits (of which the training split is distributed), a pair of arrays (inputs, used as float32, and labels),
            or any other source that `fedcdp.as_dataset` reads.
        clients: Number of clients. Leave it out with `indices` and `natural`.
        scheme: See the table. Default: `custom` with `indices`, `natural` if the splits say whose the records are, else
            `shards`.
        records: Records at a client. Default: len(data) // clients. Not for schemes of unequal sizes.
        classes_per_client: Classes at a client, for `shards`.
        alpha: Concentration, for the Dirichlet schemes: the smaller, the more the clients differ.
        smallest: The fewest records of a client, for the schemes of unequal sizes. Under `dirichlet-sizes` each client gets
            these first; under `dirichlet-classes` the draw is repeated until each client has them.
        size_ratio: How many times as many records the largest client may hold as the smallest, up to rounding, for
            `dirichlet-sizes`. Smaller clients are enlarged. Default: no limit.
        seed: Fixes who holds what.
        indices: For each client, the numbers of its records; as a dictionary, by the client's name.
        validation: Examples that stay with the server, of any kind that `as_dataset` reads. No ε protects them. Default: the
            validation split of `data`.

    Returns:
        The clients and what each holds. No data are copied.

    Raises:
        PlanError: An argument is not allowed, or contradicts another.
        DataError: The data cannot be read, or the labels are not one whole number for each example.

    Examples:
        >>> import fedcdp
        >>> splits = fedcdp.load("cancer")
        >>> fedcdp.partition(splits, clients=10, scheme="iid")
        <Federation: 10 clients × 42 records, dealt at random, each record stored at one client at most>
        >>> fedcdp.partition(splits, clients=10, scheme="dirichlet-sizes", alpha=1, size_ratio=20)
        <Federation: 10 clients × 16 to 123 records, sizes ~ Dirichlet(1), each record stored at one client at most>
        >>> two = fedcdp.partition(splits, indices={"charite": range(300), "jena": range(300, 426)})
        >>> two
        <Federation: 2 clients × 126 to 300 records, as listed, each record stored at one client at most>
        >>> two.names
        ('charite', 'jena')
    """
    train = _training_set(data)
    splits = data if isinstance(data, Splits) else None
    owners = None if splits is None else splits.owners
    scheme = scheme or ("custom" if indices is not None else "shards" if owners is None else "natural")
    test = None if splits is None else splits.test
    validation_owners = None
    if validation is not None:
        validation = as_dataset(validation, task=train.task, classes=train.classes)
    elif splits is not None:
        validation, validation_owners = splits.validation, splits.validation_owners
    if scheme not in SCHEMES:
        raise PlanError(f"scheme is {scheme!r}: it must be one of {', '.join(SCHEMES)}")
    if (indices is not None) != (scheme == "custom"):
        raise PlanError(f"scheme is {scheme!r}: indices must be given with scheme 'custom' and with no other")
    if scheme == "natural":
        if splits is None or owners is None:
            raise PlanError("scheme is 'natural': the data do not say which client a record belongs to")
        found = natural(
            train,
            owners,
            splits.owner_names,
            seed=seed,
            validation=validation,
            validation_owners=validation_owners,
            test=test,
        )
        if records is not None or clients not in (None, found.clients):
            raise PlanError(f"scheme is 'natural': the data alone set {found.clients} clients and their records")
        return found
    holdings: Holdings
    names, sentence = None, "as listed"
    if indices is not None:
        if records is not None or clients not in (None, len(indices)):
            raise PlanError(f"indices has {len(indices)} lists, which alone set clients and records; leave those two out")
        names = tuple(indices) if isinstance(indices, Mapping) else None
        holdings = _listed(indices, len(train), seed)
    elif scheme == "dirichlet-classes":
        clients = _whole("clients", clients)
        _leave_out(scheme, records=records, size_ratio=size_ratio)
        _require_classes(train, scheme)
        holdings = deal_classes(_labels(train), clients, alpha=alpha, smallest=smallest, seed=seed)
        sentence = f"each class divided ~ Dirichlet({alpha:g})"
    elif scheme in UNEQUAL:
        clients = _whole("clients", clients)
        _leave_out(scheme, records=records)
        sizes = unequal_sizes(scheme, len(train), clients, alpha=alpha, smallest=smallest, size_ratio=size_ratio, seed=seed)
        holdings = deal_sizes(sizes, seed)
        sentence = f"sizes ~ Dirichlet({alpha:g})" if scheme == "dirichlet-sizes" else f"{scheme} sizes"
    else:
        clients = _whole("clients", clients)
        records = _records_each(len(train), clients, scheme, records)
        rule, sentence = _rule(train, scheme, records, classes_per_client, alpha)
        per_copy = len(train) // records
        holdings = Dealt(Deal(_labels(train), per_copy, records, rule, int(seed)), clients, records, per_copy)
    return Federation(train, validation, test, scheme, sentence=sentence, holdings=holdings, names=names)


def _training_set(data: Any) -> Dataset:
    if isinstance(data, Splits):
        return data.train
    if not is_pair(data) or isinstance(data[0], Mapping):
        return as_dataset(data)
    inputs, targets = data
    given = as_values(targets, "the labels array")
    with np.errstate(invalid="ignore"):  # NaN is refused below
        labels = given.astype(np.int64) if given.dtype.kind in "fiub" else given
    if given.ndim != 1 or given.dtype.kind not in "fiub" or not np.array_equal(labels, given):
        raise DataError(f"labels are {given.dtype} of shape {given.shape}: each example needs one whole number")
    numbers = inputs if isinstance(inputs, Tensor) else as_values(inputs, "the inputs array", 0)
    if isinstance(numbers, np.ndarray) and numbers.dtype.kind not in "fiub":
        raise DataError(f"inputs are {numbers.dtype}: they must be numbers")
    classes = int(labels.max(initial=-1)) + 1
    return Dataset(torch.as_tensor(numbers, dtype=torch.float32), torch.from_numpy(labels), classes)


def _leave_out(scheme: str, **given: float | None) -> None:
    for name, value in given.items():
        if value is not None:
            raise PlanError(f"{name} is {value!r}: it has no meaning under scheme {scheme!r}, so leave it out")


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
    if scheme in ("shards", "dirichlet"):
        _require_classes(train, scheme)
    if scheme == "shards":
        present = int(np.count_nonzero(counts))
        classes = _whole("classes_per_client", classes_per_client, present, "the classes in the training data")
        return Shards(records, classes), f"shards of {classes} class{'es' if classes > 1 else ''}"
    if scheme == "dirichlet":
        check_alpha(alpha)
        return Dirichlet(records, alpha * counts / len(train)), f"classes ~ Dirichlet({alpha:g} · prior)"
    return None, "the whole dataset each" if scheme == "full" else "dealt at random"


def _require_classes(train: Dataset, scheme: str) -> None:
    if not train.classes:
        raise PlanError(f"scheme is {scheme!r}: it deals by class, and task {train.task} has no classes; use 'iid'")


def _listed(indices: Sequence[npt.ArrayLike] | Mapping[str, npt.ArrayLike], total: int, seed: int) -> Listed:
    """The user's lists, checked and shuffled."""
    if not len(indices):
        raise PlanError("indices is empty: it must have one list of record numbers for each client")
    named = indices if isinstance(indices, Mapping) else dict(enumerate(indices))
    lists = [np.asarray(one) for one in named.values()]
    for client, one in zip(named, lists, strict=True):
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
        raise PlanError(f"indices[{client!r}] is {wrong}: it must be distinct whole numbers from 0 to {total - 1}")
    return Listed.shuffled(np.concatenate(lists), np.array([len(one) for one in lists]), seed)
