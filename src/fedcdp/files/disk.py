"""Files that are either whole or not there, whatever crashes."""

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
"""For what lies in a run directory: it may tell what the noise hides."""


def is_fault_of_the_machine(error: BaseException | None) -> bool:
    """Whether a disk failed, rather than that somebody named a place that cannot be written to."""
    return isinstance(error, OSError) and error.errno in _FAULTS_OF_THE_MACHINE


def not_written(path: Path, error: OSError) -> RunError:
    """The sentence for a file that could not be written, of the type that fits the reason."""
    kind = StorageError if is_fault_of_the_machine(error) else RunError
    return kind(f"{path} cannot be written: {error.strerror or error}")


def user_cache() -> Path:
    """Where this user keeps what can be had again: FEDCDP_CACHE, else XDG_CACHE_HOME/fedcdp, else ~/.cache/fedcdp."""
    if chosen := os.environ.get("FEDCDP_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedcdp"


def open_unlinked(path: Path, flags: int, mode: int = PRIVATE) -> int:
    """Open a file of ours for writing, made with `mode` where it is missing; a symbolic link, which may lead to anything,
    is refused (`OSError`)."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


@contextmanager
def atomic_write(target: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write to, which becomes `target` once the block ends well and vanishes if it raises.

    Guarantees: a reader of `target` sees the old file or the whole new one, also after a crash. The folder is made. A link
    that lies in the way is replaced, not followed. The file has `mode`, less what the process's mask takes away.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because a rename is atomic only within one file system.
    part = target.with_name(f".{target.name}{PARTIAL}")
    try:
        part.unlink(missing_ok=True)
        with os.fdopen(open_unlinked(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        with suppress(OSError):  # what went wrong first is what is to be told
            part.unlink(missing_ok=True)
        raise
    sync_directory(target.parent)


def sync_directory(folder: Path) -> None:
    """See that the names in a folder are on the disk."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file whole or not at all."""
    with atomic_write(path, mode) as file:
        file.write(content)
