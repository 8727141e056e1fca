"""Work that rank 0 shares with the other ranks of a job: an attack's victims, or the shadow federations of `lira`.

Rank 0 runs the command alone, in `helped`, and the others `help_out`. Wherever the work falls into pieces, rank 0 deals them
to all ranks with all that they need, so the others read no files and decide nothing.

| rank 0 | the others |
| --- | --- |
| tells the work and what its pieces have in common | wait for it, or for the end |
| deals the pieces in turn, does its own, and gathers the results | do their pieces and send the results |

A `FedcdpError` in any piece is raised at rank 0 after all results were sent, so it may catch it and go on. Any other error
ends the job on all ranks (`Ranks.joined`).

Pieces are pickled, and tensors of a GPU arrive on that of the receiver. Ranks are one party and trust each other.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from pickle import PicklingError  # nosec B403: what ranks of one job tell each other
from typing import Any

import torch

from fedcdp._version import __version__
from fedcdp.engine.runtime import products, usable_device
from fedcdp.errors import FedcdpError, RankError
from fedcdp.training.ranks import Ranks

PATIENCE = timedelta(days=7)
"""How long ranks wait for each other: pieces may differ in length by hours."""

Tell = Callable[[int, int], None]
Work = Callable[[Any, list[Any], torch.device, Tell | None], list[Any]]
"""From what all pieces have in common, some pieces, the device and the progress: the result of each of these pieces.

It is told by its name, so it is a function of a module."""


@dataclass(frozen=True)
class _Told:
    """The device of the work, such as `cuda`, and the work with what its pieces have in common."""

    device: str
    packed: bytes


_helped: ContextVar[Ranks | None] = ContextVar("helped", default=None)


def agree_on_command(ranks: Ranks, options: Mapping[str, object]) -> None:
    """Raise a `RankError` on every rank unless all have the same options, versions and precision of products."""
    ranks.agree({
        "options": hashlib.sha256(repr(sorted(options.items())).encode()).digest(),
        "fedcdp": __version__,
        "torch": torch.__version__,
        "precision of products": torch.get_float32_matmul_precision(),
    })  # fmt: skip


@contextmanager
def helped(ranks: Ranks) -> Iterator[None]:
    """At rank 0: the other ranks, which `help_out`, share the enclosed work."""
    token = _helped.set(ranks)
    try:
        yield
        ranks.tell(None)
    finally:
        _helped.reset(token)


def help_out(ranks: Ranks) -> None:
    """On the other ranks: do pieces of work until rank 0 is done."""
    while (told := ranks.heard()) is not None:
        device = usable_device(ranks.device(told.device))
        work, common, tf32 = _unpacked(told.packed, device)
        pieces = _unpacked(ranks.deal(), device)
        with products(tf32):
            ranks.gathered(_packed(_tried(work, common, pieces, device, None)))


def workers() -> int:
    """How many ranks share work here; 1 outside of `helped`."""
    ranks = _helped.get()
    return 1 if ranks is None else ranks.size


def share(work: Work, common: Any, pieces: Sequence[Any], device: torch.device, progress: Tell | None = None) -> list[Any]:
    """The results of all pieces, in their order. `progress` is told of the pieces of this process."""
    ranks = _helped.get()
    if ranks is None or not ranks.several or len(pieces) < 2:
        return work(common, list(pieces), device, progress)
    hands = [list(pieces[rank :: ranks.size]) for rank in range(ranks.size)]
    tf32 = torch.get_float32_matmul_precision() != "highest"
    packed = _packed((work, common, tf32)), [_packed(hand) for hand in hands]  # fails before the others wait for it
    ranks.tell(_Told(device.type, packed[0]))
    ranks.deal(packed[1])
    own = _tried(work, common, hands[0], device, progress)
    outcomes = [own, *(_unpacked(each, device) for each in ranks.gathered(None)[1:])]
    results: list[Any] = [None] * len(pieces)
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, FedcdpError):
            raise outcome
        results[rank :: ranks.size] = outcome
    return results


def _tried(
    work: Work, common: Any, pieces: list[Any], device: torch.device, progress: Tell | None
) -> list[Any] | FedcdpError:
    """The results of some pieces, or the error that they share."""
    try:
        return work(common, pieces, device, progress) if pieces else []
    except FedcdpError as error:
        return error


def _packed(value: object) -> bytes:
    written = io.BytesIO()
    try:
        torch.save(value, written)
    except (PicklingError, AttributeError, TypeError) as error:
        raise RankError(
            f"this work cannot be sent to other ranks ({error}); give a network and a loss of a module, or run it without "
            "torchrun"
        ) from error
    return written.getvalue()


def _unpacked(value: bytes, device: torch.device) -> Any:
    """What another rank of the job packed; tensors of its GPU are on that of this one."""

    def placed(storage: Any, place: str) -> Any:
        return storage if place == "cpu" else storage.cuda(device.index)

    return torch.load(io.BytesIO(value), map_location=placed, weights_only=False)  # nosec B614
