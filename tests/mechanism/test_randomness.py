"""Philox against its authors' known answers, and the draws that are made of it by their distribution.

Statistical bounds are five standard errors around the exact value: with the fixed seeds used here a test either always
passes or always fails, and a correct generator would fail one such comparison in about two million.
"""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy import stats

from fedcdp.mechanism import randomness
from fedcdp.mechanism.cpu_randomness import Drawing
from fedcdp.mechanism.randomness import _philox_on_device, gaussians, normals, numpy_generator, philox, stream_key, words

ONES = 0xFFFFFFFF
word = st.integers(0, ONES)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, answer):
    assert tuple(int(each) for each in philox(key[0] | key[1] << 32, counter)) == answer


def philox_in_python(key: int, counter: tuple[int, ...]) -> tuple[int, ...]:
    """Philox 4x32-10 as its authors define it, in unbounded integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key % 2**32, key // 2**32
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@settings(deadline=None, derandomize=True)
@given(key=st.integers(0, 2**64 - 1), counter=st.tuples(word, word, word, word))
def test_philox_in_tensors_is_philox_in_integers(key, counter):
    assert tuple(int(each) for each in philox(key, counter)) == philox_in_python(key, counter)


def test_philox_broadcasts_its_counters():
    rows, blocks = torch.tensor([[5], [ONES]]), torch.tensor([[0, 1, 2]])
    drawn = philox(123456789 << 20, (blocks, 7, 8, rows))
    for row in range(2):
        for block in range(3):
            expected = philox_in_python(123456789 << 20, (block, 7, 8, int(rows[row, 0])))
            assert tuple(int(each[row, block]) for each in drawn) == expected


@settings(deadline=None, derandomize=True)
@given(key=st.integers(0, 2**64 - 1), first=word, second=word, rows=st.lists(word, min_size=1, max_size=4))
def test_a_device_draws_the_words_that_a_cpu_draws(key, first, second, rows):
    counter = (torch.arange(5)[None], torch.tensor(first), torch.tensor(second), torch.tensor(rows)[:, None])
    for ours, theirs in zip(philox(key, counter), _philox_on_device(key, *counter), strict=True):
        assert torch.equal(ours, theirs)


# Streams -------------------------------------------------------------------------------------------------------------


def test_keys_differ_for_every_seed_purpose_and_place():
    places = [(0,), (1,), (12,), (1, 2), (2, 1), (1, 23), (12, 3), ()]
    keys = {
        stream_key(seed, purpose, *place)
        for seed in (0, 1, 11)
        for purpose in ("noise", "records", "clients")
        for place in places
    }
    assert len(keys) == 3 * 3 * len(places)
    assert all(0 <= key < 2**64 for key in keys)


def test_keys_are_the_same_on_every_machine():
    """A stored seed must mean the same run tomorrow: the value of one key is pinned."""
    assert stream_key(0, "records", 3) == 0xAD69162BAA79806B


def test_numpy_generators_repeat_and_do_not_share_a_state():
    first = numpy_generator(3, "clients", 5)
    again = numpy_generator(3, "clients", 5)
    expected = first.random(4)
    numpy_generator(3, "clients", 6).random(100)
    assert np.array_equal(again.random(4), expected)
    assert not np.array_equal(numpy_generator(3, "clients", 6).random(4), expected)
    assert not np.array_equal(numpy_generator(4, "clients", 5).random(4), expected)


# Words and normals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [words, normals])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 17])
def test_a_value_depends_on_its_own_place_only(draw, length):
    rows = torch.tensor([3, 0, 4_000_000_000])
    drawn = draw(42, rows, 6, 7, length)
    longer = draw(42, rows.flip(0), 6, 7, 40).flip(0)
    assert drawn.shape == (3, length)
    assert torch.equal(drawn, longer[:, :length])
    for row in range(3):
        assert torch.equal(draw(42, rows[row : row + 1], 6, 7, length)[0], drawn[row])


@pytest.mark.parametrize("draw", [words, normals])
def test_every_argument_changes_the_draw(draw):
    row = torch.tensor([3])
    base = draw(42, row, 6, 7, 8)
    others = [draw(43, row, 6, 7, 8), draw(42, row + 1, 6, 7, 8), draw(42, row, 7, 7, 8), draw(42, row, 6, 8, 8)]
    assert all(not torch.isin(other, base).any() for other in others)


def test_the_draw_does_not_touch_the_global_generators():
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    words(1, torch.arange(3), 0, 0, 10)
    normals(1, torch.arange(3), 0, 0, 10)
    numpy_generator(1, "clients", 0).random(10)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)  # noqa: NPY002


def test_words_are_uniform_over_32_bits():
    drawn = words(stream_key(1, "test"), torch.arange(50), 0, 0, 2000).flatten()
    assert drawn.min() >= 0
    assert drawn.max() < 2**32
    assert stats.kstest(drawn.numpy() / 2**32, "uniform").pvalue > 1e-4
    for bit in range(32):
        ones = int((drawn >> bit & 1).sum())
        assert abs(ones - 50_000) < 5 * math.sqrt(100_000 / 4)


def test_normals_are_standard_normal():
    drawn = normals(stream_key(2, "test"), torch.arange(50), 1, 2, 20_000).flatten().double().numpy()
    n = len(drawn)
    assert abs(drawn.mean()) < 5 / math.sqrt(n)
    assert abs(drawn.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((drawn**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((drawn**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert stats.kstest(drawn, "norm").pvalue > 1e-4
    for threshold in (3.0, 4.0):
        chance = 2 * stats.norm.sf(threshold)
        assert abs((np.abs(drawn) > threshold).sum() - n * chance) < 5 * math.sqrt(n * chance)


@pytest.mark.parametrize("position", range(4))
def test_each_of_a_blocks_four_values_is_standard_normal(position):
    """Box and Muller make two values of two words: a slip in one of them hides in the mixture of the four."""
    drawn = normals(stream_key(3, "test"), torch.arange(20), 0, 0, 8000)[:, position::4].flatten().double().numpy()
    assert stats.kstest(drawn, "norm").pvalue > 1e-4


def test_the_smallest_word_gives_the_largest_normal_not_infinity():
    """The place was found by running Philox backwards from an output whose first word is 0."""
    key, block, first, second, row = 7, 2704, 594373248, 21166754, torch.tensor([2051736219])
    radius_word, angle_word = words(key, row, first, second, 4 * block + 4)[0, 4 * block : 4 * block + 2].tolist()
    assert radius_word == 0
    drawn = normals(key, row, first, second, 4 * block + 2)[0, 4 * block :].tolist()
    radius, angle = math.sqrt(2 * 33 * math.log(2)), 2 * math.pi * angle_word / 2**32
    assert drawn == pytest.approx([radius * math.cos(angle), radius * math.sin(angle)], rel=1e-5)


def test_normals_are_float32_and_always_finite():
    drawn = normals(0, torch.arange(1000), 0, 0, 2000)
    assert drawn.dtype == torch.float32
    assert torch.isfinite(drawn).all()
    assert drawn.abs().max() < 7


@pytest.mark.parametrize(("rows", "length"), [(1, 1000), (7, 100), (3, 403), (40, 3)])
def test_a_draw_in_pieces_is_the_draw_at_once(rows, length, monkeypatch):
    clients = torch.arange(rows) * 1000
    monkeypatch.setattr(randomness, "_drawing", Drawing(randomness._NumpyGenerator()))
    at_once = normals(5, clients, 1, 2, length)
    monkeypatch.setattr(randomness, "_PIECE", 64)
    assert torch.equal(normals(5, clients, 1, 2, length), at_once)


def test_a_device_makes_the_normals_of_a_cpu_but_for_rounding():
    key, rows = 11 << 40 | 12, torch.arange(20)
    on_device = gaussians(torch.tensor([[12, 11 << 8, 1, 2]]), rows, 2000, torch.float32)
    torch.testing.assert_close(normals(key, rows, 1, 2, 2000), on_device, rtol=1e-5, atol=2e-6)
