"""What all ranks of a training must have in common: versions, plan, data, network, and how they compute.

Digests are compared between the ranks and never shown, logged or stored: that of the data would say who holds them.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from fedcdp._version import __version__
from fedcdp.files.tree import Inputs, tensors_in
from fedcdp.training.prepared import Prepared
from fedcdp.training.rounds import Simulator


def facts_of(prepared: Prepared, simulator: Simulator) -> dict[str, str | bytes]:
    """The facts of this rank by name, for `Ranks.agree`; those that are digests are bytes."""
    federation, data, loss = prepared.federation, hashlib.blake2b(digest_size=16), simulator.engine.loss
    _add(data, federation.train.inputs)
    _add(data, federation.train.targets)
    for client in range(federation.clients):
        data.update(np.ascontiguousarray(federation.indices(client)).data)
        data.update(b"/")
    network = hashlib.blake2b(str(prepared.network).encode(), digest_size=16)
    for name, value in prepared.network.state_dict().items():
        network.update(name.encode())
        _add(network, value)
    return {
        "fedcdp": __version__,
        "torch": torch.__version__,
        "plan": prepared.plan.digest().encode(),
        "data": data.digest(),
        "network": network.digest(),
        "loss": getattr(loss, "__qualname__", type(loss).__qualname__),
        "device": simulator.data.device.type,
        "engine": simulator.local_engine.name,
        "chunk": str(simulator.chunk),
        "precision of products": torch.get_float32_matmul_precision(),
    }


def _add(digest: hashlib.blake2b, values: Inputs) -> None:
    """Add tensors with their shapes and types."""
    for value in tensors_in(values):
        digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
