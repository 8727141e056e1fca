from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedcdp.data.formats import parse_idx
from fedcdp.errors import DataError

LABELS = struct.pack(">II", 2049, 3) + bytes([7, 2, 1])


def test_labels_and_images_are_read_row_major() -> None:
    assert parse_idx(LABELS, 1, "labels").tolist() == [7, 2, 1]
    images = parse_idx(struct.pack(">IIII", 2051, 2, 2, 3) + bytes(range(12)), 3, "images")
    np.testing.assert_array_equal(images, np.arange(12).reshape(2, 2, 3))


@pytest.mark.parametrize("content", [b"", LABELS[:6], LABELS[:-1], LABELS + b"\0", struct.pack(">II", 2049, 0)])
def test_a_file_longer_or_shorter_than_its_header_promises_is_refused_by_name(content: bytes) -> None:
    with pytest.raises(DataError, match="labels-file"):
        parse_idx(content, 1, "labels-file")


def test_images_are_not_taken_for_labels() -> None:
    with pytest.raises(DataError, match="starts with 00000801 instead of 00000803"):
        parse_idx(LABELS, 3, "images-file")


@given(content=st.binary(max_size=64) | st.binary(max_size=32).map(lambda tail: LABELS[:4] + tail))
@example(struct.pack(">II", 2049, 2**32 - 1))
def test_random_bytes_give_an_array_or_a_data_error(content: bytes) -> None:
    for dimensions in (1, 3):
        try:
            array = parse_idx(content, dimensions, "noise")
        except DataError:
            continue
        assert array.ndim == dimensions
