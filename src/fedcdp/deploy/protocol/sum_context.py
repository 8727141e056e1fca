"""The context of an attempt at a secure sum: a hash of all that a client's share of the noise depends on.

Masks of two clients cancel only if both computed them for the same context. A server that shows one client other weights,
another clip bound, another roster, another run or another attempt therefore gets uniform bytes, and no sum.

Fields are joined with their lengths in front, so no two lists of fields have the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from fedcdp.deploy.protocol.task import Task
from fedcdp.files.tree import Layout, Tree

VERSION = b"fedcdp-sum-1"


@dataclass(frozen=True, order=True)
class SumMember:
    """A member of a roster: its node key (`known_nodes`) and its X25519 key for this run (`sum_keys`)."""

    node: bytes
    run_key: bytes


def joined(*fields: bytes) -> bytes:
    """Fields as one text: each is preceded by its length in 8 bytes."""
    return b"".join(len(each).to_bytes(8, "big") + each for each in fields)


def task_hash(task: Task) -> bytes:
    """The full SHA-256 of a task's written form. `Task.digest` has only half of it."""
    return hashlib.sha256(task.to_json().encode()).digest()


def weights_hash(weights: Tree, layout: Layout, standardised: tuple[Tensor, Tensor] | None = None) -> bytes:
    """SHA-256 of the weights' bytes, and of the mean and scale that standardise inputs, as little-endian float32.

    The tensors come in the layout's order. Their sizes are fixed by the task, so their bytes need no separation.
    """
    digest = hashlib.sha256()
    for value in (*(weights[name] for name in layout.shapes), *(standardised or ())):
        digest.update(value.detach().cpu().contiguous().numpy().astype("<f4").tobytes())
    return digest.digest()


def context_of(
    *, task: Task, round_: int, attempt: int, bound: float, weights: bytes, members: Iterable[SumMember]
) -> bytes:
    """The context (32 bytes) of an attempt: `weights` is their hash, `bound` the clip bound of the round."""
    fixed = (VERSION, task_hash(task), _number(round_), _number(attempt), _fraction(bound), weights)
    roster = (joined(each.node, each.run_key) for each in sorted(members))
    return hashlib.sha256(joined(*fixed, *roster)).digest()


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def _fraction(value: float) -> bytes:
    return struct.pack(">d", value)
