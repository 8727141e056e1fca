from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcdp.data.formats import read_pickle
from fedcdp.errors import DataError

PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 6)
BATCH = {b"batch_label": b"made up", b"labels": [3, 7], b"data": PIXELS}


def short(text: bytes) -> bytes:
    """A Python 2 `str` of fewer than 256 bytes, as its pickler wrote it."""
    return b"U" + bytes([len(text)]) + text


def python2_batch(module: bytes = b"numpy.core.multiarray") -> bytes:
    """A batch, opcode by opcode as Python 2 and its NumPy pickled the original CIFAR-10 files (protocol 2)."""
    content = PIXELS.tobytes()
    empty_array = b"c" + module + b"\n_reconstruct\nq\x04cnumpy\nndarray\nq\x05K\x00\x85" + short(b"b") + b"\x87Rq\x06"
    byte_type = b"cnumpy\ndtype\nq\x07" + short(b"u1") + b"K\x00K\x01\x87R"
    byte_type_state = b"(K\x03" + short(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array_state = b"(K\x01K\x02K\x06\x86" + byte_type + byte_type_state + b"\x89T" + struct.pack("<I", len(content))
    data = short(b"data") + empty_array + array_state + content + b"tb"
    labels = short(b"labels") + b"]q\x02(K\x03K\x07e"
    return b"\x80\x02}q\x01(" + data + labels + b"u."


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_batches_pickled_by_python_3_are_read(protocol: int) -> None:
    batch = read_pickle(pickle.dumps(BATCH, protocol=protocol), "batch")
    assert batch[b"labels"] == [3, 7]
    np.testing.assert_array_equal(batch[b"data"], PIXELS)


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_batches_pickled_by_python_2_are_read(module: bytes) -> None:
    batch = read_pickle(python2_batch(module), "batch")
    assert batch[b"labels"] == [3, 7]
    assert batch[b"data"].dtype == np.uint8
    np.testing.assert_array_equal(batch[b"data"], PIXELS)


def test_the_python_2_batch_made_here_is_one_that_pickle_itself_reads() -> None:
    np.testing.assert_array_equal(pickle.loads(python2_batch(), encoding="bytes")[b"data"], PIXELS)


class Calls:
    """Pickles as a call of `function`, which an ordinary unpickler would make."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("function", [os.system, eval, exec])
def test_a_pickle_that_runs_code_is_refused_without_running_it(tmp_path: Path, function: Any, protocol: int) -> None:
    mark = tmp_path / "mark"
    code = f"touch {mark}" if function is os.system else f"open({str(mark)!r}, 'w')"
    malicious = pickle.dumps({b"data": Calls(function, code)}, protocol=protocol)
    with pytest.raises(DataError, match="batch is not a pickle of plain data"):
        read_pickle(malicious, "batch")
    assert not mark.exists()
    pickle.loads(malicious)
    assert mark.exists(), "the pickle was harmless, so its refusal proves nothing"


@pytest.mark.parametrize("kind", [object, np.int64, np.float32, "U3", [("a", "u1")]])
def test_arrays_of_anything_but_bytes_are_refused(kind: Any) -> None:
    with pytest.raises(DataError, match="is not a pickle of plain data"):
        read_pickle(pickle.dumps({b"data": np.zeros(3, dtype=kind)}, protocol=4), "batch")


def test_an_allowed_name_cannot_be_altered_by_the_pickle() -> None:
    alters = b"\x80\x02cnumpy\nndarray\nN}" + short(b"__init__") + b"K\x01s\x86b."
    with pytest.raises(DataError):
        read_pickle(alters, "batch")
    np.testing.assert_array_equal(read_pickle(python2_batch(), "batch")[b"data"], PIXELS)


def test_a_pickle_cannot_ask_for_gigabytes() -> None:
    with pytest.raises(DataError, match="memo index 4294967295 is larger than the file"):
        read_pickle(b"\x80\x02}r\xff\xff\xff\xff.", "batch")


def test_a_pickle_of_something_else_is_refused() -> None:
    with pytest.raises(DataError, match="pickled list where a dictionary is expected"):
        read_pickle(pickle.dumps([1, 2], protocol=4), "batch")


def test_every_truncation_is_refused() -> None:
    for content in (python2_batch(), pickle.dumps(BATCH, protocol=4)):
        for length in range(len(content)):
            with pytest.raises(DataError):
                read_pickle(content[:length], "batch")


def is_dictionary_or_one_line_error(content: bytes) -> bool:
    try:
        return isinstance(read_pickle(content, "noise"), dict)
    except DataError as error:
        return "\n" not in str(error)


@given(content=st.binary(max_size=64) | st.binary(max_size=32).map(lambda tail: b"\x80\x02}q\x01(" + tail))
def test_random_bytes_give_a_dictionary_or_a_data_error(content: bytes) -> None:
    assert is_dictionary_or_one_line_error(content)


@given(edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_batch_gives_a_dictionary_or_a_data_error(edits: list[tuple[int, int]]) -> None:
    for whole in (python2_batch(), pickle.dumps(BATCH, protocol=4)):
        content = bytearray(whole)
        for position, byte in edits:
            content[position % len(content)] = byte
        assert is_dictionary_or_one_line_error(bytes(content))
