"""Counter-based randomness: every draw is a pure function of (seed, purpose, round, client, step, ...).

No generator object is ever advanced, so a value does not depend on the engine, on how clients are grouped into chunks, or
on the machine. The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
the one that NumPy, cuRAND and Triton use. It is written in tensor operations, so a GPU draws for all clients at once, and
in NumPy operations for a CPU. A CPU that draws much goes on with the same values from a compiled program
(`cpu_randomness`).

A stream is named by its purpose ("noise", "records", ...). Streams have unrelated keys and hence never share a value.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcdp.mechanism.cpu_randomness import TURN, Drawing, Normals, Words

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_HALF, _LOWER = np.uint64(32), np.uint64(_MASK)
_PIECE = 2**14  # blocks that a CPU draws at once, few enough to stay in its cache
_TRITON = find_spec("triton") is not None


def stream_key(seed: int, purpose: str, *where: int) -> int:
    """A 64-bit key for one purpose and position, e.g. `stream_key(seed, "noise", round)`."""
    written = "/".join(["fedcdp", str(seed), purpose, *map(str, where)])
    return int.from_bytes(hashlib.blake2b(written.encode(), digest_size=8).digest(), "little")


def numpy_generator(seed: int, purpose: str, *where: int) -> np.random.Generator:
    """A separate NumPy generator for one purpose and position, for values that are drawn once on the host."""
    return np.random.Generator(np.random.Philox(key=stream_key(seed, purpose, *where)))


def philox(key: int, counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]) -> list[Tensor]:
    """Philox 4x32-10 of broadcastable 32-bit counters: four tensors of 32-bit words, held in int64."""
    counters = [torch.as_tensor(c, dtype=torch.int64) for c in counter]
    if any(c.device.type != "cpu" for c in counters):
        return _philox_on_device(key, *counters)
    places = math.prod(torch.broadcast_shapes(*(c.shape for c in counters)))
    return [torch.from_numpy(word) for word in _drawing.of(places).words(key, *(c.numpy() for c in counters))]


def _philox_on_device(key: int | tuple[Tensor, Tensor], c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> list[Tensor]:
    """Philox in tensor operations.

    A 32×32-bit product needs 64 bits; int64 arithmetic wraps to the right bit pattern, and masking after the shift
    discards the extended sign bits.
    """
    for k0, k1 in _round_keys(key):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1 ^ k0) & _MASK
        c2 = ((p0 >> 32) ^ c3 ^ k1) & _MASK
        c1, c3 = p1 & _MASK, p0 & _MASK
    return [c0, c1, c2, c3]


def _philox_by_numpy(key: int, *counter: Words | int) -> list[Words]:
    """The same words in half the time, on a CPU: both halves of a round are computed at once and in place."""
    shape = np.broadcast_shapes(*(np.shape(c) for c in counter))
    even, odd, product = (np.empty((2, *shape), np.uint64) for _ in range(3))
    even[0], odd[0], even[1], odd[1] = counter
    column = (2, *(1,) * len(shape))
    multipliers = np.array(_MULTIPLIERS[::-1], np.uint64).reshape(column)
    for round_key in np.array(_round_keys(key), np.uint64):
        np.multiply(even[::-1], multipliers, out=product)
        np.right_shift(product, _HALF, out=even)
        even ^= odd
        even ^= round_key.reshape(column)
        even &= _LOWER  # also drops the upper half of the previous product, still in `odd`
        odd, product = product, odd
    odd &= _LOWER
    return [word.view(np.int64) for word in (even[0, ...], odd[0, ...], even[1, ...], odd[1, ...])]


def _round_keys(key: int | tuple[Tensor, Tensor]) -> list[tuple[Any, Any]]:
    first, second = (key & _MASK, key >> 32) if isinstance(key, int) else key
    return [((first + n * _WEYL[0]) & _MASK, (second + n * _WEYL[1]) & _MASK) for n in range(_ROUNDS)]


def words(key: int, rows: Tensor, first: int | Tensor, second: int, length: int) -> Tensor:
    """`length` random 32-bit words (in int64) for each row; row r, word j depend on (key, rows[r], first, second, j).

    `rows` are the clients. `first` (one value for all rows, or one for each) and `second` position the draw within a
    client, for example by step and slot.
    """
    first = torch.as_tensor(first, device=rows.device).expand(len(rows))
    if rows.is_cuda and _TRITON:
        from fedcdp.mechanism import gpu_randomness

        return gpu_randomness.words(_source(key, 0, second, rows.device), rows, first.contiguous(), length)
    blocks = torch.arange(-(-length // 4), device=rows.device)
    drawn = philox(key, (blocks[None, :], first[:, None], second, rows[:, None]))
    return torch.stack(drawn, dim=-1).flatten(1)[:, :length]


def normals(key: int, rows: Tensor, first: int, second: int, length: int) -> Tensor:
    """`length` standard normal values (float32) for each row: the Box–Muller transform of the same words."""
    if rows.device.type != "cpu":
        return gaussians(_source(key, first, second, rows.device)[None], rows, length, torch.float32)
    count = -(-length // 4)
    drawn = np.empty((len(rows), count, 4), np.float32)
    _drawing.of(len(rows) * count).normals(key, np.arange(count), first, second, rows.numpy()[:, None], into=drawn)
    return torch.from_numpy(drawn).flatten(1)[:, :length]


def gaussians(sources: Tensor, rows: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Sums of `normals` on a device, one term for each of the `sources` [terms, 4] (key low, key high, first, second).

    The sources are a tensor, so a program compiled once can draw with any key at any step.
    """
    if rows.is_cuda and _TRITON:
        from fedcdp.mechanism import gpu_randomness

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
    """Four standard normal values from four 32-bit words: tensors [rows, blocks] give values [rows, 4 · blocks]."""
    if drawn[0].device.type != "cpu":
        return torch.stack(_normal_pairs(drawn, dtype), dim=-1).flatten(1)
    into = torch.empty(*drawn[0].shape, 4, dtype=dtype)
    _box_muller_by_numpy([word.numpy() for word in drawn], into.numpy())
    return into.flatten(1)


def _normal_pairs(drawn: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """√(−2·ln u)·(cos, sin)(2π·v) for two pairs of uniform numbers (u, v), in tensor operations."""
    pairs = []
    for radius_word, angle_word in (drawn[:2], drawn[2:]):
        # +½ keeps the logarithm finite; small words keep full precision, so the tail reaches 6.7 standard deviations.
        radius = radius_word.to(dtype).add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = angle_word.to(dtype).mul_(TURN)
        pairs += [radius * angle.cos(), radius.mul_(angle.sin_())]
    return pairs


def _box_muller_by_numpy(drawn: Sequence[Words], into: NDArray[Any]) -> None:
    """The same on a CPU, where NumPy's float32 logarithm, sine and cosine take half the time."""
    for first, (radius_word, angle_word) in ((0, drawn[:2]), (2, drawn[2:])):
        radius, angle = radius_word.astype(into.dtype), angle_word.astype(into.dtype)
        radius += 0.5
        radius *= 2.0**-32
        np.sqrt(np.multiply(np.log(radius, out=radius), -2.0, out=radius), out=radius)
        angle *= TURN
        np.multiply(radius, np.cos(angle), out=into[..., first])
        np.multiply(radius, np.sin(angle, out=angle), out=into[..., first + 1])


class _NumpyGenerator:
    """The generator of a CPU without a compiler, and the reference for the compiled one."""

    words = staticmethod(_philox_by_numpy)

    def normals(self, key: int, *counter: Words | int, into: Normals) -> None:
        """See `cpu_randomness.Generator`. In pieces that stay in a CPU's cache."""
        spread = [np.broadcast_to(each, into.shape[:-1]) for each in counter]
        rows, count = into.shape[:-1]
        high = max(1, round(_PIECE / max(1, count)))
        for top in range(0, rows, high):
            for left in range(0, count, _PIECE):
                some = slice(top, top + high), slice(left, left + _PIECE)
                _box_muller_by_numpy(self.words(key, *(each[some] for each in spread)), into[some])


_drawing = Drawing(_NumpyGenerator())
