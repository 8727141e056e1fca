"""Features of frozen layers that a client keeps for the length of a task, since every message has a process of its own.

The layers in front of the first trained one give the same features in every round. A client computes them once and keeps
them in its state directory, readable by its owner only. They are as confidential as its records: nothing sends them, and
they are deleted when the run ends, when the client leaves, when another task's are kept, or when their layers or records
change.

A file is named by a digest of the task, the layers with all their values, and the inputs. It can therefore never stand in
for other features: what a client releases is the same with and without it.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedcdp.engine.frozen import split, through
from fedcdp.errors import RunError
from fedcdp.files.tensors import load_tensors, save_tensors
from fedcdp.files.tree import Inputs, Layout
from fedcdp.training.feature_cache import key_of

_LOG = logging.getLogger("flwr.fedcdp")
_FORM = "features"
_WORTH_KEEPING = 0.5  # seconds of computation


@dataclass(frozen=True)
class KeptFeatures:
    """Where a client keeps the features of a task, by its digest."""

    state: Path
    task: str

    def of(self, front: nn.Module, inputs: Tensor, device: torch.device) -> Inputs:
        """What the frozen layers make of the inputs; from the file, if it is there."""
        path = self.state / f"features-{self.task}-{key_of(front, inputs, device)}.safetensors"
        with suppress(RunError):  # not there, or damaged
            return load_tensors(path, _FORM)[0][_FORM].to(device)
        started = time.monotonic()
        features = through(front, inputs, device)
        if time.monotonic() - started > _WORTH_KEEPING and isinstance(features, Tensor):
            self._keep(path, features)
        return features

    def _keep(self, path: Path, features: Tensor) -> None:
        """Write the features in the place of all others; a full disk is no reason to leave a round."""
        try:
            forget_features(self.state)
            save_tensors(path, {_FORM: features}, {"format": _FORM}, mode=0o600)
        except (OSError, RunError) as error:
            _LOG.warning("features of frozen layers are not kept: %s", error)


def without_front(
    network: nn.Module, inputs: Inputs, device: torch.device, kept: KeptFeatures | None
) -> tuple[nn.Module, Inputs]:
    """The network without its frozen front, and the inputs of the rest, as in a simulation (`engine.frozen.split`)."""
    front, rest = split(network, inputs, device)
    if front is None or list(Layout.of(rest).shapes) != list(Layout.of(network).shapes):
        return network, through(None, inputs, device)
    if kept is None or not isinstance(inputs, Tensor):
        return rest, through(front, inputs, device)
    return rest, kept.of(front, inputs, device)


def forget_features(state: Path, task: str = "") -> None:
    """Delete the features of a task, or of all tasks."""
    for path in state.glob(f"features-{task}*"):
        path.unlink(missing_ok=True)
