"""How exactly matrices are multiplied on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Let products of matrices and convolutions round their factors to 10 bits (tf32), or forbid it.

    By torch's own default, convolutions round and other products do not. Norms, clipping and noise never do.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
