"""Atomic file writes: after a crash, a file is either complete or absent."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedcdp.errors import RunError, StorageError

PARTIAL = ".partial"
_FAULTS_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)
PRIVATE = 0o600
"""Mode of the files in a run directory: they may reveal data that the noise hides."""


def is_fault_of_the_machine(error: BaseException | None) -> bool:
    """Whether the disk failed, as opposed to the user naming a path that cannot be written."""
    return isinstance(error, OSError) and error.errno in _FAULTS_OF_THE_MACHINE


def not_written(path: Path, error: OSError) -> RunError:
    """The error for a file that could not be written: `StorageError` if the disk failed, else `RunError`."""
    kind = StorageError if is_fault_of_the_machine(error) else RunError
    return kind(f"{path} cannot be written: {error.strerror or error}")


def user_cache() -> Path:
    """The user's cache directory: FEDCDP_CACHE, else XDG_CACHE_HOME/fedcdp, else ~/.cache/fedcdp."""
    if chosen := os.environ.get("FEDCDP_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedcdp"


def open_unlinked(path: Path, flags: int, mode: int = PRIVATE) -> int:
    """Open one of our own files for writing; with O_CREAT, a missing file is created with `mode`.

    A symbolic link raises `OSError`, because it may point anywhere.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


@contextmanager
def atomic_write(target: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a file that replaces `target` when the block succeeds and is deleted when it raises.

    Guarantees: a reader of `target` sees the old file or the complete new one, even after a crash. Missing parent
    directories are created. A symbolic link at `target` is replaced, not followed. The file has `mode`, less the process's
    umask.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the target's directory, because a rename is atomic only within one file system.
    part = target.with_name(f".{target.name}{PARTIAL}")
    try:
        part.unlink(missing_ok=True)
        with os.fdopen(open_unlinked(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        with suppress(OSError):  # report the original error, not one from the cleanup
            part.unlink(missing_ok=True)
        raise
    sync_directory(target.parent)


def sync_directory(folder: Path) -> None:
    """Flush a directory's entries to disk."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file completely or not at all."""
    with atomic_write(path, mode) as file:
        file.write(content)
