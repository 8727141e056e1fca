"""The compiled generator of a CPU draws NumPy's values to the bit, and NumPy draws wherever it cannot."""

from __future__ import annotations

import logging
import shutil

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fedcdp.mechanism import cpu_randomness, randomness
from fedcdp.mechanism.cpu_randomness import Drawing, Generator, compiled

NUMPY = randomness._NumpyGenerator()
COMPILER = "cc"
word = st.integers(0, 2**32 - 1)

needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def program() -> Generator:
    found = compiled(NUMPY, COMPILER)
    assert found is not None
    return found


def normals(generator: Generator, key: int, *counter: np.ndarray | int, shape: tuple[int, ...]) -> np.ndarray:
    into = np.full((*shape, 4), np.nan, np.float32)
    generator.normals(key, *counter, into=into)
    return into


@needs_compiler
@settings(max_examples=30, deadline=None)
@given(
    key=st.integers(0, 2**64 - 1),
    first=st.one_of(word, st.just(None)),
    second=word,
    start=st.integers(0, 2**32 - 2000),
    rows=st.lists(word, min_size=1, max_size=5),
    count=st.integers(1, 1500),
)
def test_the_program_draws_numpys_values_to_the_bit(program, key, first, second, start, rows, count):
    column = np.array(rows)[:, None]
    counter = start + np.arange(count), column[::-1] if first is None else first, second, column
    assert np.array_equal(program.words(key, *counter), NUMPY.words(key, *counter))
    shape = len(rows), count
    assert np.array_equal(normals(program, key, *counter, shape=shape), normals(NUMPY, key, *counter, shape=shape))


@needs_compiler
@pytest.mark.parametrize("shape", [(), (0,), (7,), (0, 3), (2, 3, 5)])
def test_the_program_takes_counters_of_any_shape(program, shape):
    blocks = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    ours, theirs = (each.words(5, blocks, 6, 7, 8) for each in (program, NUMPY))
    assert [each.shape for each in ours] == [shape] * 4
    assert np.array_equal(ours, theirs)


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 1000), (7, 100), (3, 403), (40, 3)])
def test_a_draw_in_pieces_is_the_draw_at_once(program, shape, monkeypatch):
    counter = np.arange(shape[1]), 1, 2, np.arange(shape[0])[:, None]
    at_once = normals(program, 5, *counter, shape=shape)
    monkeypatch.setattr(cpu_randomness, "_PIECE", 64)
    assert np.array_equal(normals(program, 5, *counter, shape=shape), at_once)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_numpy_draws(compiler, caplog):
    with caplog.at_level(logging.WARNING, "fedcdp"):
        assert compiled(NUMPY, compiler) is None
    assert not caplog.records


class OtherNormals:
    """A generator whose normal values differ from those of the program in the last bit of one of them."""

    words = staticmethod(NUMPY.words)

    def normals(self, key: int, *counter: np.ndarray | int, into: np.ndarray) -> None:
        NUMPY.normals(key, *counter, into=into)
        into[-1, -1, -1] = np.nextafter(into[-1, -1, -1], np.float32(9))


class OtherWords(OtherNormals):
    """A generator whose words differ from those of the program."""

    @staticmethod
    def words(key: int, *counter: np.ndarray | int) -> list[np.ndarray]:
        return NUMPY.words(key + 1, *counter)


@needs_compiler
@pytest.mark.parametrize("reference", [OtherNormals(), OtherWords()])
def test_a_program_with_other_values_is_not_used(reference, caplog):
    with caplog.at_level(logging.WARNING, "fedcdp"):
        assert compiled(reference, COMPILER) is None
    assert "gives others" in caplog.text


@needs_compiler
def test_the_program_is_compiled_once_it_pays(monkeypatch):
    drawing = Drawing(NUMPY, pays=3 * 100)
    assert [drawing.of(100) is NUMPY for _ in range(3)] == [True] * 3
    program = drawing.of(100)
    assert program is not NUMPY
    assert drawing.of(100) is program
    rows = torch.arange(3)
    before = randomness.normals(1, rows, 2, 3, 101), randomness.words(1, rows, 2, 3, 101)
    monkeypatch.setattr(randomness, "_drawing", drawing)
    after = randomness.normals(1, rows, 2, 3, 101), randomness.words(1, rows, 2, 3, 101)
    assert all(torch.equal(*each) for each in zip(before, after, strict=True))


def test_a_compiler_that_fails_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(cpu_randomness, "compiled", asked.append)
    drawing = Drawing(NUMPY, pays=100)
    assert all(drawing.of(80) is NUMPY for _ in range(5))
    assert asked == [NUMPY]
