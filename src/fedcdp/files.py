"""Files that are either whole or not there, and tensors in them (safetensors, never pickle)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fedcdp.errors import RunError, StorageError
from fedcdp.tree import Tree
from fedcdp.untrusted import read_bounded

PARTIAL = ".partial"
_FAULTS_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)
PRIVATE = 0o600
"""For what lies in a run directory: it may tell what the noise hides."""
MOST_TENSORS = 2**34
_MOST_HEADER = 2**26
_ABOUT = "fedcdp"  # the one metadata key: with several, their order in the file would be left to chance


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


def save_tensors(path: Path, tensors: Tree, about: Mapping[str, Any], mode: int = 0o666) -> None:
    """Write tensors, with a digest of them and what is to be known `about` them, atomically."""
    from safetensors.torch import save

    # Copies, because tied weights share their memory and the format does not allow that.
    owned = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    written = json.dumps({**about, "sha256": _digest(owned, about)}, sort_keys=True)
    write_atomically(path, save(owned, {_ABOUT: written}), mode)


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """How large a file of `save_tensors` can be that holds these tensors twice, as a checkpoint with an average does."""
    return 2 * sum(value.numel() * value.element_size() for value in tensors.values()) + _MOST_HEADER


def load_tensors(path: Path, form: str, most: int = MOST_TENSORS) -> tuple[Tree, dict[str, Any]]:
    """Read tensors that `save_tensors` wrote with `about["format"] == form`, or say in a sentence what is wrong.

    A file of more than `most` bytes is not read: the caller knows its network (`size_of`).
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        content = read_bounded(path, most)
        header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        tensors = load(content)
        about = json.loads(header["__metadata__"][_ABOUT])
        checksum, known = about.pop("sha256"), about["format"]
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (SafetensorError, ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError,
            RuntimeError):  # fmt: skip
        raise RunError(f"{path} is damaged or truncated, or not a file of this program") from None
    if known != form:
        raise RunError(f"{path} is not a {form} file of this program")
    if checksum != _digest(tensors, about):
        raise RunError(f"{path} is damaged: its content does not match its checksum")
    return tensors, about


def read_about(path: Path, form: str) -> dict[str, Any]:
    """What is said about the tensors in a file. Only its header is read, and nothing is verified, as by `load_tensors`."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            about = json.loads(json.loads(file.read(min(length, _MOST_HEADER)))["__metadata__"][_ABOUT])
        if about["format"] != form:
            raise RunError(f"{path} is not a {form} file of this program")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, struct.error, KeyError, TypeError, RecursionError):
        raise RunError(f"{path} is damaged or truncated, or not a file of this program") from None
    return dict(about)


def check_tensors(path: Path, found: Tree, wanted: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not those of the network."""
    if {name: (value.shape, value.dtype) for name, value in found.items()} != {
        name: (value.shape, value.dtype) for name, value in wanted.items()
    }:
        raise RunError(f"{path} holds other tensors than the network that config.toml describes")


def _digest(tensors: Tree, about: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
