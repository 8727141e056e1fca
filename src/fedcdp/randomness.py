"""Randomness by counters: every draw is a pure function of (seed, purpose, round, client, step, ...).

No generator object is ever advanced, so a value does not depend on the engine, on how clients are grouped into chunks, or
on the machine that asks for it. The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011), the one that NumPy, cuRAND and Triton use, written in tensor operations so that a GPU draws for all
clients at once.

A stream is named by its purpose ("noise", "records", ...). Streams have unrelated keys, hence never share a value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_PIECE = 2**16  # blocks
_TRITON = find_spec("triton") is not None


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


def _philox_on_device(key: int | tuple[Tensor, Tensor], c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> list[Tensor]:
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
    """The same words by NumPy, whose unsigned products and shifts take half the time."""
    c0, c1, c2, c3 = (np.atleast_1d(c.numpy()).view(np.uint64) for c in counter)
    mask, half = np.uint64(_MASK), np.uint64(32)
    for k0, k1 in _round_keys(key):
        p0, p1 = c0 * np.uint64(_MULTIPLIERS[0]), c2 * np.uint64(_MULTIPLIERS[1])
        c0 = (p1 >> half) ^ c1
        c2 = (p0 >> half) ^ c3
        for word, round_key in ((c0, k0), (c2, k1)):
            word ^= np.uint64(round_key)
            word &= mask
        c1, c3 = p1, p0  # their upper halves are dropped where they are used
    shape = torch.broadcast_shapes(*(c.shape for c in counter))
    return [torch.from_numpy(word.view(np.int64)).reshape(shape) for word in (c0, c1 & mask, c2, c3 & mask)]


def _round_keys(key: int | tuple[Tensor, Tensor]) -> list[tuple[Any, Any]]:
    first, second = (key & _MASK, key >> 32) if isinstance(key, int) else key
    return [((first + n * _WEYL[0]) & _MASK, (second + n * _WEYL[1]) & _MASK) for n in range(_ROUNDS)]


def words(key: int, rows: Tensor, first: int | Tensor, second: int, length: int) -> Tensor:
    """`length` random 32-bit words (in int64) for each row; row r, word j depend on (key, rows[r], first, second, j).

    `rows` are the clients; `first` (for all, or one for each row) and `second` place the draw within them (a step and a
    slot, say).
    """
    first = torch.as_tensor(first, device=rows.device).expand(len(rows))
    if rows.is_cuda and _TRITON:
        from fedcdp import gpu_randomness

        return gpu_randomness.words(_source(key, 0, second, rows.device), rows, first.contiguous(), length)
    blocks = torch.arange(-(-length // 4), device=rows.device)
    drawn = philox(key, (blocks[None, :], first[:, None], second, rows[:, None]))
    return torch.stack(drawn, dim=-1).flatten(1)[:, :length]


def normals(key: int, rows: Tensor, first: int, second: int, length: int) -> Tensor:
    """`length` standard normal values (float32) for each row, by Box and Muller's transform of the same words."""
    if rows.is_cuda:
        return gaussians(_source(key, first, second, rows.device)[None], rows, length, torch.float32)
    blocks = torch.arange(-(-length // 4), device=rows.device)
    piece = max(1, _PIECE // max(1, len(blocks)))  # a CPU is twice as fast on pieces that stay in its cache
    drawn = torch.empty(len(rows), len(blocks), 4, device=rows.device)
    for part, into in zip(rows.split(piece), drawn.split(piece), strict=True):
        _box_muller(philox(key, (blocks[None, :], first, second, part[:, None])), into)
    return drawn.flatten(1)[:, :length]


def gaussians(sources: Tensor, rows: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Sums of `normals`, one term for each of the `sources` [terms, 4] (key low, key high, first, second), on a device.

    The sources are a tensor so that a program compiled once can draw with any key at any step.
    """
    if rows.is_cuda and _TRITON:
        from fedcdp import gpu_randomness

        return gpu_randomness.gaussians(sources, rows, length, dtype)
    blocks = torch.arange(-(-length // 4), device=rows.device)
    total = torch.zeros(1, dtype=dtype, device=rows.device)
    for low, high, first, second in (source.unbind() for source in sources):
        drawn = _philox_on_device((low, high), blocks[None, :], first, second, rows[:, None])
        total = total + torch.stack(_normal_pairs(drawn, dtype), dim=-1).flatten(1)
    return total[:, :length]


def _source(key: int, first: int, second: int, device: torch.device) -> Tensor:
    return torch.tensor([key & _MASK, key >> 32, first, second], device=device)


def box_muller(drawn: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Four standard normal values of four 32-bit words: of tensors [rows, blocks], values [rows, 4 · blocks]."""
    return _box_muller(drawn, torch.empty(*drawn[0].shape, 4, dtype=dtype, device=drawn[0].device)).flatten(1)


def _normal_pairs(drawn: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    pairs = []
    for radius_word, angle_word in ((drawn[0], drawn[1]), (drawn[2], drawn[3])):
        # +½ keeps the logarithm finite; small words keep their full precision, so the tail reaches 6.7 deviations.
        radius = radius_word.to(dtype).add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = angle_word.to(dtype).mul_(2.0**-32 * 2 * torch.pi)
        pairs += [radius * angle.cos(), radius.mul_(angle.sin_())]
    return pairs


def _box_muller(drawn: Sequence[Tensor], into: Tensor) -> Tensor:
    pairs = _normal_pairs(drawn, into.dtype)
    if into.device.type == "cpu":  # the same by NumPy, several times as fast
        np.stack([each.numpy() for each in pairs], axis=-1, out=into.numpy())
        return into
    return torch.stack(pairs, dim=-1, out=into)
