"""Clients of unequal size: sizes by a formula or a Dirichlet draw, or each class divided by a Dirichlet draw.

`linear`, `square` and `exponential` give the sizes of flwr-datasets' LinearPartitioner, SquarePartitioner and
ExponentialPartitioner. `dirichlet-classes` follows its DirichletPartitioner (Yurochkin et al., "Bayesian nonparametric
federated learning of neural networks", ICML 2019). Which records a client gets is drawn from the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedcdp.config.presets import UNEQUAL
from fedcdp.data.holdings import Indices, Listed
from fedcdp.errors import PlanError
from fedcdp.mechanism.randomness import numpy_generator

__all__ = ["UNEQUAL", "check_alpha", "class_cuts", "deal_classes", "deal_sizes", "growing_sizes", "unequal_sizes"]

_GROWTH: dict[str, Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]] = {
    "linear": lambda number: number,
    "square": np.square,
    "exponential": np.exp,
}
_TRIES = 100


def unequal_sizes(
    scheme: str, total: int, clients: int, *, alpha: float, smallest: int, size_ratio: float | None, seed: int
) -> Indices:
    """The records of each client under a scheme whose sizes do not depend on the data; all `total` records are dealt."""
    _check_smallest(total, clients, smallest)
    if size_ratio is not None and (scheme != "dirichlet-sizes" or not 1 <= size_ratio < math.inf):
        raise PlanError(f"size_ratio is {size_ratio!r}: it must be 1 or more, and is for scheme 'dirichlet-sizes' only")
    if scheme == "dirichlet-sizes":
        shares = _dirichlet(clients, alpha, numpy_generator(int(seed), "sizes"))
        if size_ratio is not None:
            shares = np.maximum(shares, shares.max() / size_ratio)
        return _apportion(total - clients * smallest, shares) + np.int64(smallest)
    sizes = growing_sizes(scheme, total, clients)
    if sizes.min() < smallest:
        raise PlanError(
            f"clients is {clients}: under scheme {scheme!r} the smallest client would hold {sizes.min()} of {total} records "
            f"instead of at least {smallest}; use fewer clients"
        )
    return sizes


def growing_sizes(scheme: str, total: int, clients: int) -> Indices:
    """Sizes that grow with the client's number 1 to K, rounded down; the last client gets the remainder."""
    with np.errstate(over="ignore", invalid="ignore"):  # e^710 is no float64: no records are left for the others
        units = _GROWTH[scheme](np.linspace(start=1, stop=clients, num=clients))
        sizes: Indices = np.nan_to_num(units / units.sum() * total).astype(np.int64)
    sizes[-1] += total - sizes.sum()
    return sizes


def class_cuts(counts: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Indices:
    """How many of the `counts` records of each class every client gets [classes, clients]: Dirichlet(alpha) shares."""
    ends = [(np.cumsum(_dirichlet(clients, alpha, rng)) * count).astype(np.int64) for count in counts]
    for end, count in zip(ends, counts, strict=True):
        end[-1] = count
    return np.diff(np.stack(ends), axis=1, prepend=0)


def deal_sizes(sizes: Indices, seed: int) -> Listed:
    """Records dealt at random to clients of these sizes."""
    order = numpy_generator(int(seed), "partition", 0).permutation(int(sizes.sum()))
    return Listed(order.astype(np.int64), np.concatenate([[0], np.cumsum(sizes)]))


def deal_classes(labels: npt.NDArray[np.unsignedinteger], clients: int, *, alpha: float, smallest: int, seed: int) -> Listed:
    """Each class divided by a Dirichlet draw of its own, all drawn again until each client holds `smallest` records."""
    _check_smallest(len(labels), clients, smallest)
    rng = numpy_generator(int(seed), "partition", 0)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    counts = np.bincount(labels)
    counts = counts[counts > 0].astype(np.int64)
    for _ in range(_TRIES):
        takes = class_cuts(counts, clients, alpha, rng)
        if takes.sum(axis=0).min() >= smallest:
            break
    else:
        raise PlanError(
            f"alpha is {alpha!r}: in {_TRIES} draws a client always got fewer than {smallest} of {len(labels)} records; "
            "use a larger alpha, fewer clients or a smaller value of smallest"
        )
    owners = np.repeat(np.tile(np.arange(clients), len(counts)), takes.ravel())
    return Listed.shuffled(order[np.argsort(owners, kind="stable")], takes.sum(axis=0), seed)


def check_alpha(alpha: float) -> None:
    """Refuse a concentration that is not a number above 0."""
    if not 0 < alpha < math.inf:
        raise PlanError(f"alpha is {alpha!r}: it must be a number above 0")


def _dirichlet(clients: int, alpha: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    check_alpha(alpha)
    shares = rng.dirichlet(np.full(clients, float(alpha)))
    if not math.isclose(shares.sum(), 1, rel_tol=1e-6):  # under- or overflow; NaN, too
        raise PlanError(f"alpha is {alpha!r}: Dirichlet shares cannot be computed for a number that extreme")
    return shares


def _check_smallest(total: int, clients: int, smallest: int) -> None:
    if not isinstance(smallest, int | np.integer) or not 1 <= smallest <= total:
        raise PlanError(f"smallest is {smallest!r}: it must be a whole number, 1 to {total}, the size of the training data")
    if clients * smallest > total:
        raise PlanError(
            f"clients is {clients}: at most {total // smallest} clients can have {smallest} records of their own"
        )


def _apportion(total: int, shares: npt.NDArray[np.float64]) -> Indices:
    """Whole numbers in proportion to `shares` that add up to `total`, by largest remainder."""
    exact = shares / shares.sum() * total
    sizes: Indices = exact.astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: total - sizes.sum()]] += 1
    return sizes
