"""Randomness by counters: every draw is a pure function of (seed, purpose, round, client, step, ...).

No generator object is ever advanced, so a value does not depend on the engine, on how clients are grouped into chunks, or
on the machine that asks for it. The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011), the one that NumPy, cuRAND and Triton use, written in tensor operations so that a GPU draws for all
clients at once.

A stream is named by its purpose ("noise", "records", ...). Streams have unrelated keys, hence never share a value.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_TURN = 2.0**-32 * 2 * math.pi
_HALF, _LOWER = np.uint64(32), np.uint64(_MASK)
_PIECE = 2**14  # blocks that a CPU draws at once: what they take stays in its cache


def stream_key(seed: int, purpose: str, *where: int) -> int:
    """A 64-bit key for one purpose at one place, e.g. `stream_key(seed, "noise", round)`."""
    written = "/".join(["fedcdp", str(seed), purpose, *map(str, where)])
    return int.from_bytes(hashlib.blake2b(written.encode(), digest_size=8).digest(), "little")


def numpy_generator(seed: int, purpose: str, *where: int) -> np.random.Generator:
    """A NumPy generator of its own for one purpose at one place: for what is drawn once on the host."""
    return np.random.Generator(np.random.Philox(key=stream_key(seed, purpose, *where)))


def philox(key: int, counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]) -> list[Tensor]:
    """Philox 4x32-10 of broadcastable 32-bit counters; four tensors of 32-bit words held in int64."""
    counters = [torch.as_tensor(c, dtype=torch.int64) for c in counter]
    on_cpu = all(c.device.type == "cpu" for c in counters)
    return _philox_on_cpu(key, *counters) if on_cpu else _philox_on_device(key, *counters)


def _philox_on_device(key: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> list[Tensor]:
    """In tensor operations.

    A 32×32-bit product needs 64 bits; int64 arithmetic wraps to the right bit pattern, and masking after the shift
    discards the copied sign.
    """
    for k0, k1 in _round_keys(key):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1 ^ k0) & _MASK
        c2 = ((p0 >> 32) ^ c3 ^ k1) & _MASK
        c1, c3 = p1 & _MASK, p0 & _MASK
    return [c0, c1, c2, c3]


def _philox_on_cpu(key: int, *counter: Tensor) -> list[Tensor]:
    """The same words by NumPy, in a third of the time: both halves of a round at once, and in place."""
    c0, c1, c2, c3 = (c.numpy().view(np.uint64) for c in torch.broadcast_tensors(*counter))
    even, odd = np.stack([c0, c2]), np.stack([c1, c3])
    column = (2, *(1,) * c0.ndim)
    multipliers, product = np.array(_MULTIPLIERS[::-1], np.uint64).reshape(column), np.empty_like(even)
    for round_key in _round_keys(key):
        np.multiply(even[::-1], multipliers, out=product)
        np.right_shift(product, _HALF, out=even)
        even ^= odd
        even ^= np.array(round_key, np.uint64).reshape(column)
        even &= _LOWER  # also drops the upper half of the product that is still in `odd`
        odd, product = product, odd
    odd &= _LOWER
    return [torch.from_numpy(word.view(np.int64)) for word in (even[0, ...], odd[0, ...], even[1, ...], odd[1, ...])]


def _round_keys(key: int) -> list[tuple[int, int]]:
    first, second = key & _MASK, key >> 32
    return [((first + n * _WEYL[0]) & _MASK, (second + n * _WEYL[1]) & _MASK) for n in range(_ROUNDS)]


def words(key: int, rows: Tensor, first: int, second: int, length: int) -> Tensor:
    """`length` random 32-bit words (in int64) for each row; row r, word j depend on (key, rows[r], first, second, j).

    `rows` are the clients; `first` and `second` place the draw within them (a step and a slot, say).
    """
    blocks = torch.arange(-(-length // 4), device=rows.device)
    drawn = philox(key, (blocks[None, :], first, second, rows[:, None]))
    return torch.stack(drawn, dim=-1).flatten(1)[:, :length]


def normals(key: int, rows: Tensor, first: int, second: int, length: int) -> Tensor:
    """`length` standard normal values (float32) for each row, by Box and Muller's transform of the same words."""
    blocks = torch.arange(-(-length // 4), device=rows.device)
    drawn = torch.empty(len(rows), len(blocks), 4, device=rows.device)
    for some_rows, some_blocks, into in _pieces(rows, blocks, drawn):
        _box_muller(philox(key, (some_blocks[None, :], first, second, some_rows[:, None])), into)
    return drawn.flatten(1)[:, :length]


def _pieces(rows: Tensor, blocks: Tensor, drawn: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Parts of a draw [rows, blocks, ...]: all at once, or on a CPU about `_PIECE` blocks of them."""
    if drawn.device.type != "cpu":
        yield rows, blocks, drawn
        return
    high = max(1, round(_PIECE / max(1, len(blocks))))
    for some_rows, band in zip(rows.split(high), drawn.split(high), strict=True):
        for some_blocks, into in zip(blocks.split(_PIECE), band.split(_PIECE, dim=1), strict=True):
            yield some_rows, some_blocks, into


def box_muller(drawn: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Four standard normal values of four 32-bit words: of tensors [rows, blocks], values [rows, 4 · blocks]."""
    return _box_muller(drawn, torch.empty(*drawn[0].shape, 4, dtype=dtype, device=drawn[0].device)).flatten(1)


def _box_muller(drawn: Sequence[Tensor], into: Tensor) -> Tensor:
    return (_box_muller_on_cpu if into.device.type == "cpu" else _box_muller_on_device)(drawn, into)


def _box_muller_on_device(drawn: Sequence[Tensor], into: Tensor) -> Tensor:
    """√(−2·ln u)·(cos, sin)(2π·v) for two pairs of uniform numbers (u, v)."""
    pairs = []
    for radius_word, angle_word in (drawn[:2], drawn[2:]):
        # +½ keeps the logarithm finite; small words keep their full precision, so the tail reaches 6.7 deviations.
        radius = radius_word.to(into.dtype).add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = angle_word.to(into.dtype).mul_(_TURN)
        pairs += [radius * angle.cos(), radius.mul_(angle.sin_())]
    return torch.stack(pairs, dim=-1, out=into)


def _box_muller_on_cpu(drawn: Sequence[Tensor], into: Tensor) -> Tensor:
    """The same by NumPy, whose logarithm, sine and cosine of float32 take half the time."""
    values: NDArray[Any] = into.numpy()
    for first, (radius_word, angle_word) in ((0, drawn[:2]), (2, drawn[2:])):
        radius, angle = radius_word.numpy().astype(values.dtype), angle_word.numpy().astype(values.dtype)
        radius += 0.5
        radius *= 2.0**-32
        np.sqrt(np.multiply(np.log(radius, out=radius), -2.0, out=radius), out=radius)
        angle *= _TURN
        np.multiply(radius, np.cos(angle), out=values[..., first])
        np.multiply(radius, np.sin(angle, out=angle), out=values[..., first + 1])
    return into
