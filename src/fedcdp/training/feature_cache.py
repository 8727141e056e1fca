"""Fixed features of public benchmarks, kept between runs: an encoder takes minutes to compute them on a CPU.

Only datasets that `fedcdp.load` reads by name are kept, because anyone may have them. The features of your own data are
computed in each run, and are never written to disk.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from fedcdp.data.dataset import Dataset
from fedcdp.engine.frozen import through
from fedcdp.errors import RunError
from fedcdp.files.disk import user_cache
from fedcdp.files.tensors import load_tensors, save_tensors
from fedcdp.files.tree import Inputs

WORTH_KEEPING = 20.0  # seconds of computation
_FORM = "features"


def features_of(front: nn.Module | None, data: Dataset, device: torch.device) -> Inputs:
    """The inputs of the examples after the frozen layers `front`, on the device; from the cache, if they are there."""
    if front is None or data.benchmark is None or not isinstance(data.inputs, Tensor):
        return through(front, data.inputs, device)
    path = user_cache() / data.benchmark / f"features-{key_of(front, data.inputs, device)}.safetensors"
    with suppress(RunError):  # not there, or damaged
        return load_tensors(path, _FORM)[0][_FORM].to(device)
    started = time.monotonic()
    found = through(front, data.inputs, device)
    if time.monotonic() - started > WORTH_KEEPING and isinstance(found, Tensor):
        _keep(path, found)
    return found


def _keep(path: Path, features: Tensor) -> None:
    """Write the features; a full disk or a cache that cannot be written is no reason to stop a training."""
    with suppress(OSError, RunError):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, {_FORM: features}, {"format": _FORM}, mode=0o600)


def key_of(front: nn.Module, inputs: Tensor, device: torch.device) -> str:
    """A digest of the layers, the inputs, and what else decides the last digits: the kind of device and torch's version."""
    digest = hashlib.sha256(f"{front} {device.type} {torch.__version__} {tuple(inputs.shape)}".encode())
    for name, value in sorted(front.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().data)
    digest.update(inputs.cpu().contiguous().numpy().data)
    return digest.hexdigest()[:32]
