"""The generator of `randomness` as GPU kernels: the same words, and the same normal values except for rounding.

In tensor operations, ten rounds of Philox take a hundred passes over memory; these kernels take one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SIZE = 512  # blocks of four words for each program


def words(source: Tensor, rows: Tensor, first: Tensor, length: int) -> Tensor:
    """`length` 32-bit words (in int64) for each row, from `source` [4] (key low, key high, unused, second) and `first`
    [rows]."""
    blocks = -(-length // 4)
    drawn = torch.empty(len(rows), 4 * blocks, dtype=torch.int64, device=rows.device)
    _words[(triton.cdiv(blocks, _SIZE), len(rows))](drawn, source, rows, first, blocks, _SIZE)
    return drawn[:, :length]


def gaussians(sources: Tensor, rows: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """`length` normal values for each row: the sum over `sources` [terms, 4] of (key low, key high, first, second)."""
    blocks = -(-length // 4)
    drawn = torch.empty(len(rows), 4 * blocks, dtype=dtype, device=rows.device)
    _gaussians[(triton.cdiv(blocks, _SIZE), len(rows))](
        drawn, sources, rows, blocks, len(sources), dtype == torch.float64, _SIZE
    )
    return drawn[:, :length]


@triton.jit
def _philox(source, block, first, row):
    low, high = tl.load(source), tl.load(source + 1)
    second = tl.load(source + 3).to(tl.uint32)
    nothing = tl.zeros_like(block)
    return tl.philox(
        (high << 32) | low, block, nothing + first.to(tl.uint32), nothing + second, nothing + row.to(tl.uint32), n_rounds=10
    )


@triton.jit
def _interleaved(a, b, c, d):
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0] * 4])


@triton.jit
def _place(SIZE: tl.constexpr):
    """The indices of a program's blocks, and the positions of its words within the row."""
    first = tl.program_id(0) * SIZE
    return (first + tl.arange(0, SIZE)).to(tl.uint32), 4 * first + tl.arange(0, 4 * SIZE)


@triton.jit
def _words(out, source, rows, first, blocks, SIZE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    block, place = _place(SIZE)
    a, b, c, d = _philox(source, block, tl.load(first + row), tl.load(rows + row))
    tl.store(out + row * 4 * blocks + place, _interleaved(a, b, c, d).to(tl.int64), mask=place < 4 * blocks)


@triton.jit
def _pair(radius_word, angle_word, DOUBLE: tl.constexpr):
    """The Box–Muller transform, as in `randomness`."""
    kind: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    radius = tl.sqrt(-2.0 * tl.log((radius_word.to(kind) + 0.5) * 2.0**-32))
    angle = angle_word.to(kind) * (2.0**-32 * 6.283185307179586)
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _gaussians(out, sources, rows, blocks, TERMS: tl.constexpr, DOUBLE: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    block, place = _place(SIZE)
    number = tl.load(rows + row)
    total = tl.zeros([4 * SIZE], dtype=tl.float64 if DOUBLE else tl.float32)
    for term in tl.static_range(TERMS):
        source = sources + 4 * term
        a, b, c, d = _philox(source, block, tl.load(source + 2), number)
        first, second = _pair(a, b, DOUBLE)
        third, fourth = _pair(c, d, DOUBLE)
        total += _interleaved(first, second, third, fourth)
    tl.store(out + row * 4 * blocks + place, total, mask=place < 4 * blocks)
