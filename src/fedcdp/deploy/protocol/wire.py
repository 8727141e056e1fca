"""What goes over the wire: trees as Flower's array records, and back under suspicion.

A dense tree is one float32 array a tensor. An update of which a part is zero (pruned, or shared in part) goes as its other
values and where they are: numbers of places, or one bit a coordinate, whichever is smaller. Nothing is ever unpickled, and
nothing is believed: names, shapes, types, places and values are checked, and the first that is wrong is said in a sentence.

What a message weighs is measured on the records that Flower sends, not computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import nn

from fedcdp.errors import WireError
from fedcdp.files.tree import Layout, Tree
from fedcdp.files.untrusted import printable
from fedcdp.mechanism.pruning import keep_largest
from fedcdp.models.networks import build

_PLACES, _BITS, _VALUES = "fedcdp:places", "fedcdp:bits", "fedcdp:values"
_HEADER = 2**12  # bytes that the header of an array may take at most
_STYPE = "numpy.ndarray"

# The shapes and classes of the paper's benchmarks; no data are needed to weigh a network.
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "lfw": ((3, 32, 32), 62),
    "adult": ((105,), 2),
    "cancer": ((30,), 2),
}

PRUNED = (0.0, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one client in one round."""

    weights: int
    """Trainable weights of the network."""
    down: int
    """From the server: the global weights."""
    up: dict[float, int]
    """To the server: the update, by the share of it that is pruned."""


def dense(tree: Tree) -> ArrayRecord:
    """All tensors of a tree without leading axes, as they are."""
    return ArrayRecord({name: Array(_contiguous(value)) for name, value in tree.items()})


def sparse(tree: Tree, layout: Layout) -> ArrayRecord:
    """A tree in the fewest bytes: as places and values if enough of it is zero, dense otherwise."""
    flat = layout.flatten(tree, lead=0).detach().cpu().float().numpy()
    places = np.flatnonzero(flat)
    wide, narrow = 4 * len(places), -(-len(flat) // 8)
    if 4 * len(places) + min(wide, narrow) >= 4 * len(flat):
        return dense(tree)
    where = {_PLACES: places.astype("<u4")} if wide < narrow else {_BITS: np.packbits(flat != 0, bitorder="little")}
    return ArrayRecord({name: Array(value) for name, value in (where | {_VALUES: flat[places]}).items()})


def decode(record: ArrayRecord, layout: Layout, *, may_be_sparse: bool = False) -> Tree:
    """The tree in a record, as float32 tensors in the layout's shapes; raises `WireError` unless it is sound and finite."""
    names = list(record.keys())
    if may_be_sparse and _VALUES in names:
        tree = layout.unflatten(torch.from_numpy(_spread(record, layout.size)))
    else:
        if set(names) != set(layout.shapes):
            raise WireError(f"the tensors are {_shortly(names)}, not {_shortly(list(layout.shapes))}")
        tree = {name: _tensor(record[name], name, tuple(shape)) for name, shape in layout.shapes.items()}
    for name, value in tree.items():
        if not bool(torch.isfinite(value).all()):
            raise WireError(f"tensor {name} holds a value that is not finite")
    return tree


def bytes_of(record: ArrayRecord) -> int:
    """How many bytes a record's arrays take on the wire, names and headers of the arrays included."""
    return sum(len(name.encode()) + len(array.data) for name, array in record.items())


def weigh(network: nn.Module, shares: tuple[float, ...] = PRUNED) -> Traffic:
    """Weigh the messages of a network, with an update of which these shares are pruned as a client prunes it."""
    layout, source = Layout.of(network), torch.Generator().manual_seed(0)
    update: Tree = {name: torch.randn(1, *shape, generator=source) for name, shape in layout.shapes.items()}
    up = {}
    for share in shares:
        kept = {name: value[0] for name, value in keep_largest(update, layout, 1 - share).items()}
        up[share] = bytes_of(sparse(kept, layout))
    return Traffic(layout.size, bytes_of(dense({name: value[0] for name, value in update.items()})), up)


def weigh_benchmark(dataset: str) -> Traffic:
    """Weigh the paper's network for one of its datasets."""
    shape, classes = SHAPES[dataset]
    return weigh(build("auto", shape, classes))


def _spread(record: ArrayRecord, size: int) -> NDArray[np.float32]:
    names = set(record.keys())
    if names not in ({_PLACES, _VALUES}, {_BITS, _VALUES}):
        raise WireError(f"a sparse update has values and either places or bits, not {_shortly(sorted(names))}")
    values = _array(record[_VALUES], _VALUES, "<f4", None, most=size)
    if _BITS in names:
        bits = _array(record[_BITS], _BITS, "|u1", (-(-size // 8),), most=size)
        marked = np.unpackbits(bits, bitorder="little")
        if marked[size:].any():
            raise WireError(f"a sparse update marks a place outside the {size} there are")
        places: NDArray[Any] = np.flatnonzero(marked[:size])
    else:
        places = _array(record[_PLACES], _PLACES, "<u4", None, most=size)
        if len(places) and int(places[-1]) >= size:
            raise WireError(f"a sparse update names place {int(places[-1])} of {size}")
        if (places[1:] <= places[:-1]).any():
            raise WireError("a sparse update names places twice or out of order")
    if len(places) != len(values):
        raise WireError(f"a sparse update has {len(values)} values for {len(places)} places")
    flat = np.zeros(size, dtype=np.float32)
    flat[places] = values
    return flat


def _tensor(array: Array, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(_array(array, name, "<f4", shape, most=math.prod(shape)).copy())


def _array(array: Array, name: str, kind: str, shape: tuple[int, ...] | None, most: int) -> NDArray[Any]:
    """The values of an array, of a known type and shape (None: one axis, any length up to `most`)."""
    wanted = np.dtype(kind)
    if array.stype != _STYPE:
        raise WireError(f"array {name} is serialised as {printable(str(array.stype)[:40])}, not {_STYPE}")
    if len(array.data) > most * wanted.itemsize + _HEADER:  # before anything is read
        raise WireError(f"array {name} has {len(array.data)} bytes, more than {most} values take")
    # Not by `np.load`, which makes room for as many values as the header claims, and opens archives, too.
    content = BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(content)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version](content)
    except Exception:  # what its parser raises for a header of any form is not bounded by any documentation
        raise WireError(f"array {name} cannot be read") from None
    found, by_columns, dtype = header
    if dtype != wanted:
        raise WireError(f"array {name} is of type {printable(str(dtype)[:40])}, not {wanted}")
    if by_columns or (found != shape if shape is not None else len(found) != 1):
        raise WireError(f"array {name} has the shape {list(found)}, not {list(shape) if shape is not None else '[…]'}")
    if len(array.data) - content.tell() != math.prod(found) * wanted.itemsize:
        raise WireError(f"array {name} has not as many values as its shape, {list(found)}")
    return np.frombuffer(array.data, wanted, offset=content.tell()).reshape(found)


def _contiguous(value: torch.Tensor) -> NDArray[np.float32]:
    return value.detach().cpu().float().contiguous().numpy()


def _shortly(names: list[str]) -> str:
    shown = ", ".join(printable(name[:40]) for name in names[:4])
    return f"{shown}, … ({len(names)} in all)" if len(names) > 4 else shown or "none"
