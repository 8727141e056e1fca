"""The job that this process is a rank of, as torchrun describes it in environment variables."""

from __future__ import annotations

import os

from fedcdp.errors import RankError


def job_size() -> int:
    """The number of processes that torchrun started; 1 without it."""
    return _number("WORLD_SIZE", 1, least=1)


def job_rank() -> int:
    """The number of this process among them."""
    return _number("RANK", 0, least=0)


def local_rank(otherwise: int = 0) -> int:
    """The number of this process among those on its machine."""
    return _number("LOCAL_RANK", otherwise, least=0)


def _number(name: str, otherwise: int, *, least: int) -> int:
    written = os.environ.get(name, str(otherwise))
    if not (written.isascii() and written.isdecimal() and len(written) < 10 and int(written) >= least):
        raise RankError(f"{name}: {written[:100]!r} is not allowed; torchrun sets it to a whole number of at least {least}")
    return int(written)
