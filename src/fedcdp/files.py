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

PARTIAL = ".partial"
_FAULTS_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)
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


@contextmanager
def atomic_write(target: Path) -> Iterator[BinaryIO]:
    """A file to write to, which becomes `target` once the block ends well and vanishes if it raises.

    Guarantees: a reader of `target` sees the old file or the whole new one, also after a crash. The folder is made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because a rename is atomic only within one file system.
    part = target.with_name(f".{target.name}{PARTIAL}")
    try:
        with part.open("wb") as file:
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


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with atomic_write(path) as file:
        file.write(content)


def save_tensors(path: Path, tensors: Tree, about: Mapping[str, Any]) -> None:
    """Write tensors, with a digest of them and what is to be known `about` them, atomically."""
    from safetensors.torch import save

    # Copies, because tied weights share their memory and the format does not allow that.
    owned = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    written = json.dumps({**about, "sha256": _digest(owned, about)}, sort_keys=True)
    write_atomically(path, save(owned, {_ABOUT: written}))


def load_tensors(path: Path, form: str) -> tuple[Tree, dict[str, Any]]:
    """Read tensors that `save_tensors` wrote with `about["format"] == form`, or say in a sentence what is wrong."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        tensors = load(content)
        about = json.loads(header["__metadata__"][_ABOUT])
        checksum, known = about.pop("sha256"), about["format"]
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (SafetensorError, ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError):
        raise RunError(f"{path} is damaged or truncated, or not a file of this program") from None
    if known != form:
        raise RunError(f"{path} is not a {form} file of this program")
    if checksum != _digest(tensors, about):
        raise RunError(f"{path} is damaged: its content does not match its checksum")
    return tensors, about


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
