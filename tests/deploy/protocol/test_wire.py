"""Trees over the wire: exact, small where they are sparse, and never believed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord

from fedcdp.deploy.protocol import wire
from fedcdp.errors import WireError
from fedcdp.files.tree import Layout, Tree
from fedcdp.mechanism.pruning import keep_largest
from fedcdp.models.networks import build

LAYOUT = Layout({"a.weight": torch.Size([3, 5]), "a.bias": torch.Size([3]), "scale": torch.Size([])}, (("a.weight",),))


def tree(values: list[float]) -> Tree:
    return LAYOUT.unflatten(torch.tensor(values, dtype=torch.float32))


ZERO = [0.0] * LAYOUT.size


def but(**arrays: Array) -> ArrayRecord:
    """A sound record, but for some arrays."""
    return ArrayRecord(dict(wire.dense(tree(ZERO))) | {name.replace("_", "."): array for name, array in arrays.items()})


def npy(values: np.ndarray) -> Array:
    return Array(values)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.one_of(st.just(0.0), FLOATS), min_size=LAYOUT.size, max_size=LAYOUT.size))
def test_what_is_sent_arrives(values: list[float]) -> None:
    sent = tree(values)
    for record, sparse in ((wire.dense(sent), False), (wire.sparse(sent, LAYOUT), True)):
        came = wire.decode(record, LAYOUT, may_be_sparse=sparse)
        assert list(came) == list(sent)
        assert all(torch.equal(came[name], sent[name]) for name in sent)


@given(st.integers(0, LAYOUT.size))
def test_a_sparse_update_is_never_larger_than_a_dense_one(filled: int) -> None:
    sent = tree([1.0] * filled + [0.0] * (LAYOUT.size - filled))
    assert sum(array.numpy().nbytes for array in wire.sparse(sent, LAYOUT).values()) <= 4 * LAYOUT.size


@pytest.mark.parametrize(("kept", "most"), [(0.3, 0.35), (0.1, 0.14), (0.01, 0.023)])
def test_a_pruned_update_of_the_papers_network_is_smaller_by_what_was_pruned(kept: float, most: float) -> None:
    layout = Layout.of(build("cnn", (1, 28, 28), 10))
    update = {name: torch.randn(1, *shape) for name, shape in layout.shapes.items()}
    whole = wire.bytes_of(wire.sparse({name: value[0] for name, value in update.items()}, layout))
    pruned = keep_largest(update, layout, kept)
    assert whole > 4 * layout.size
    assert wire.bytes_of(wire.sparse({name: value[0] for name, value in pruned.items()}, layout)) < most * whole


@given(st.binary(max_size=200), st.sampled_from(["numpy.ndarray", "pickle"]))
def test_no_bytes_break_the_reader(data: bytes, stype: str) -> None:
    for name in (*LAYOUT.shapes, "fedcdp:values"):
        record = wire.dense(tree(ZERO))
        record[name] = Array("float32", (3,), stype, data)
        with pytest.raises(WireError):
            wire.decode(record, LAYOUT, may_be_sparse=True)


def _sparse(values: np.ndarray, places: np.ndarray | None = None, bits: np.ndarray | None = None) -> ArrayRecord:
    parts = {"fedcdp:values": values} | ({"fedcdp:places": places} if places is not None else {})
    parts |= {"fedcdp:bits": bits} if bits is not None else {}
    return ArrayRecord({name: npy(value) for name, value in parts.items()})


F4, U4, U1 = np.float32, np.uint32, np.uint8
BAD = {
    "a missing tensor": (ArrayRecord({"scale": npy(np.zeros((), F4))}), "the tensors are scale"),
    "another shape": (
        wire.dense({name: value[None] for name, value in tree(ZERO).items()}), r"has the shape \[1, 3, 5\]"
    ),
    "another type": (but(a_bias=npy(np.zeros(3))), "is of type float64"),
    "by columns": (but(a_weight=npy(np.asfortranarray(np.zeros((3, 5), F4)))), "shape"),
    "NaN": (wire.dense(tree([float("nan")] * LAYOUT.size)), "not finite"),
    "infinity": (wire.dense(tree([0.0] * (LAYOUT.size - 1) + [float("inf")])), "tensor scale holds a value that is not"),
    "place out of range": (_sparse(np.ones(1, F4), np.array([LAYOUT.size], U4)), "names place 19 of 19"),
    "places out of order": (_sparse(np.ones(2, F4), np.array([3, 1], U4)), "twice or out of order"),
    "a place twice": (_sparse(np.ones(2, F4), np.array([3, 3], U4)), "twice or out of order"),
    "fewer values than places": (_sparse(np.ones(1, F4), np.array([1, 3], U4)), "1 values for 2 places"),
    "negative places": (_sparse(np.ones(1, F4), np.array([-1])), "is of type int64"),
    "too many places": (_sparse(np.ones(2000, F4), np.arange(2000, dtype=U4)), "more than 19 values take"),
    "a bit beyond the end": (_sparse(np.ones(1, F4), bits=np.array([0, 0, 128], U1)), "marks a place outside"),
    "too few bits": (_sparse(np.ones(1, F4), bits=np.array([1], U1)), "has the shape"),
    "both": (_sparse(np.ones(1, F4), np.array([1], U4), np.array([2, 0, 0], U1)), "either places or bits"),
    "sparse NaN": (_sparse(np.array([np.nan], F4), np.array([1], U4)), "not finite"),
    "objects": (
        but(a_bias=Array("object", (3,), "numpy.ndarray", b"\x93NUMPY\x01\x00F\x00{'descr': '|O', 'fortran_order': False, "
            b"'shape': (3,), }" + b" " * 12 + b"\n")),
        "type object|cannot be read",
    ),
    "fewer values than its header claims": (
        but(a_bias=Array("float32", (3,), "numpy.ndarray", npy(np.zeros(3, F4)).data[:-4])), "not have as many values",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("record", "sentence"), BAD.values(), ids=BAD.keys())
def test_what_is_wrong_is_said_in_a_sentence(record: ArrayRecord, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        wire.decode(record, LAYOUT, may_be_sparse=True)


def test_weights_are_never_read_as_sparse() -> None:
    with pytest.raises(WireError, match="the tensors are fedcdp"):
        wire.decode(_sparse(np.ones(1, F4), np.array([1], U4)), LAYOUT)
