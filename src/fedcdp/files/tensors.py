"""Tensor files: safetensors with a checksum, never pickle."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcdp.errors import RunError
from fedcdp.files.disk import write_atomically
from fedcdp.files.tree import Tree
from fedcdp.files.untrusted import read_bounded

MOST_TENSORS = 2**34
_MOST_HEADER = 2**26
_ABOUT = "fedcdp"  # a single metadata key, because safetensors does not fix the order of several


def save_tensors(path: Path, tensors: Tree, about: Mapping[str, Any], mode: int = 0o666) -> None:
    """Write tensors atomically, with the metadata `about` and a digest of both."""
    from safetensors.torch import save

    # Copies, because tied weights share memory, which the format does not allow.
    owned = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    written = json.dumps({**about, "sha256": _digest(owned, about)}, sort_keys=True)
    write_atomically(path, save(owned, {_ABOUT: written}), mode)


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """An upper bound on the size of a checkpoint of these tensors: twice with a moving average, and two more values in
    float64 for each, the state of a server optimiser."""
    return sum(value.numel() * (2 * value.element_size() + 16) for value in tensors.values()) + _MOST_HEADER


def load_tensors(path: Path, form: str, most: int = MOST_TENSORS) -> tuple[Tree, dict[str, Any]]:
    """Read tensors that `save_tensors` wrote with `about["format"] == form`; any defect is a `RunError`.

    A file larger than `most` bytes is refused: the caller knows the size of its network (`size_of`).
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
        raise RunError(f"{path} is damaged, truncated, or not a fedcdp file") from None
    if known != form:
        raise RunError(f"{path} is not a fedcdp {form} file")
    if checksum != _digest(tensors, about):
        raise RunError(f"{path} is damaged: its content does not match its checksum")
    return tensors, about


def read_about(path: Path, form: str) -> dict[str, Any]:
    """Read the metadata of a tensor file from its header alone. Unlike `load_tensors`, this verifies no checksum."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            about = json.loads(json.loads(file.read(min(length, _MOST_HEADER)))["__metadata__"][_ABOUT])
        if about["format"] != form:
            raise RunError(f"{path} is not a fedcdp {form} file")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, struct.error, KeyError, TypeError, RecursionError):
        raise RunError(f"{path} is damaged, truncated, or not a fedcdp file") from None
    return dict(about)


def check_tensors(path: Path, found: Tree, wanted: Mapping[str, Tensor]) -> None:
    """Refuse tensors whose names, shapes or types differ from the network's."""
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
