"""Encode weight trees as Flower ArrayRecords; decode and validate untrusted ones.

A dense tree is one float32 array per tensor; noised sums are one float64 array, masked shares one uint64 array. A partly
zero update (pruned, or shared in part) is sent as its non-zero values and their positions: indices, or one bit per
coordinate, whichever is smaller. Nothing is ever unpickled, and nothing is trusted: names, shapes, types, positions and
values are checked, and the first violation is reported in one sentence.

Message sizes are measured on the records that Flower sends, not computed.
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
_HEADER = 2**12  # maximum size of an array's header in bytes
_STYPE = "numpy.ndarray"

# The shapes and classes of the paper's benchmarks; measuring a network's messages needs no data.
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
    """Bytes sent by and to one client in one round."""

    weights: int
    """Number of trainable weights of the network."""
    down: int
    """From the server: the global weights."""
    up: dict[float, int]
    """To the server: the update, by the pruned share."""


def dense(tree: Tree) -> ArrayRecord:
    """All tensors of a tree without leading axes, unchanged."""
    return ArrayRecord({name: Array(_contiguous(value)) for name, value in tree.items()})


def sparse(tree: Tree, layout: Layout) -> ArrayRecord:
    """A tree in the fewest bytes: as positions and values if enough of it is zero, dense otherwise."""
    flat = layout.flatten(tree, lead=0).detach().cpu().float().numpy()
    places = np.flatnonzero(flat)
    wide, narrow = 4 * len(places), -(-len(flat) // 8)
    if 4 * len(places) + min(wide, narrow) >= 4 * len(flat):
        return dense(tree)
    where = {_PLACES: places.astype("<u4")} if wide < narrow else {_BITS: np.packbits(flat != 0, bitorder="little")}
    return ArrayRecord({name: Array(value) for name, value in (where | {_VALUES: flat[places]}).items()})


def decode(record: ArrayRecord, layout: Layout, *, may_be_sparse: bool = False) -> Tree:
    """The tree in a record, as float32 tensors in the layout's shapes; raises `WireError` unless it is valid and finite."""
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


def doubles(values: torch.Tensor) -> ArrayRecord:
    """One axis of float64 values."""
    return ArrayRecord({_VALUES: Array(values.detach().cpu().contiguous().numpy().astype("<f8"))})


def decode_doubles(record: ArrayRecord, length: int) -> torch.Tensor:
    """The values in a record of `doubles`; raises `WireError` unless there are `length` finite ones."""
    if list(record.keys()) != [_VALUES]:
        raise WireError(f"the arrays are {_shortly(list(record.keys()))}, not {_VALUES}")
    values = torch.from_numpy(_array(record[_VALUES], _VALUES, "<f8", (length,), most=length).copy())
    if not bool(torch.isfinite(values).all()):
        raise WireError("the sums hold a value that is not finite")
    return values


def words(values: NDArray[np.uint64]) -> ArrayRecord:
    """One axis of words mod 2^64."""
    return ArrayRecord({_VALUES: Array(np.ascontiguousarray(values, "<u8"))})


def decode_words(record: ArrayRecord, length: int) -> NDArray[np.uint64]:
    """The words in a record of `words`; raises `WireError` unless there are `length` of them."""
    if list(record.keys()) != [_VALUES]:
        raise WireError(f"the arrays are {_shortly(list(record.keys()))}, not {_VALUES}")
    return _array(record[_VALUES], _VALUES, "<u8", (length,), most=length)


def bytes_of(record: ArrayRecord) -> int:
    """The size of a record's arrays on the wire in bytes, including the arrays' names and headers."""
    return sum(len(name.encode()) + len(array.data) for name, array in record.items())


def weigh(network: nn.Module, shares: tuple[float, ...] = PRUNED) -> Traffic:
    """Measure the messages of a network, with updates of which these shares are pruned as a client prunes them."""
    layout, source = Layout.of(network), torch.Generator().manual_seed(0)
    update: Tree = {name: torch.randn(1, *shape, generator=source) for name, shape in layout.shapes.items()}
    up = {}
    for share in shares:
        kept = {name: value[0] for name, value in keep_largest(update, layout, 1 - share).items()}
        up[share] = bytes_of(sparse(kept, layout))
    return Traffic(layout.size, bytes_of(dense({name: value[0] for name, value in update.items()})), up)


def weigh_benchmark(dataset: str) -> Traffic:
    """Measure the messages of the paper's network for one of its datasets."""
    shape, classes = SHAPES[dataset]
    return weigh(build("auto", shape, classes))


def _spread(record: ArrayRecord, size: int) -> NDArray[np.float32]:
    names = set(record.keys())
    if names not in ({_PLACES, _VALUES}, {_BITS, _VALUES}):
        raise WireError(f"a sparse update must have values and either places or bits, not {_shortly(sorted(names))}")
    values = _array(record[_VALUES], _VALUES, "<f4", None, most=size)
    if _BITS in names:
        bits = _array(record[_BITS], _BITS, "|u1", (-(-size // 8),), most=size)
        marked = np.unpackbits(bits, bitorder="little")
        if marked[size:].any():
            raise WireError(f"a sparse update marks a place outside its {size} coordinates")
        places: NDArray[Any] = np.flatnonzero(marked[:size])
    else:
        places = _array(record[_PLACES], _PLACES, "<u4", None, most=size)
        if len(places) and int(places[-1]) >= size:
            raise WireError(f"a sparse update names place {int(places[-1])} of {size}")
        if (places[1:] <= places[:-1]).any():
            raise WireError("a sparse update names a place twice or out of order")
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
    if len(array.data) > most * wanted.itemsize + _HEADER:  # before reading anything
        raise WireError(f"array {name} has {len(array.data)} bytes, more than {most} values take")
    # Not by `np.load`, which allocates as many values as the header claims, and also opens archives.
    content = BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(content)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version](content)
    except Exception:  # it is not documented what the parser raises for a malformed header
        raise WireError(f"array {name} cannot be read") from None
    found, by_columns, dtype = header
    if dtype != wanted:
        raise WireError(f"array {name} is of type {printable(str(dtype)[:40])}, not {wanted}")
    if by_columns or (found != shape if shape is not None else len(found) != 1):
        raise WireError(f"array {name} has the shape {list(found)}, not {list(shape) if shape is not None else '[…]'}")
    if len(array.data) - content.tell() != math.prod(found) * wanted.itemsize:
        raise WireError(f"array {name} does not have as many values as its shape, {list(found)}")
    return np.frombuffer(array.data, wanted, offset=content.tell()).reshape(found)


def _contiguous(value: torch.Tensor) -> NDArray[np.float32]:
    return value.detach().cpu().float().contiguous().numpy()


def _shortly(names: list[str]) -> str:
    shown = ", ".join(printable(name[:40]) for name in names[:4])
    return f"{shown}, … ({len(names)} in total)" if len(names) > 4 else shown or "none"
