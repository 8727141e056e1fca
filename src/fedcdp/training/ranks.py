"""Ranks: the processes that train together, on one machine or on several, numbered by torchrun or by your process group.

Rank 0 leads. It alone decides, charges the ledger, makes the server's step, writes and prints. The other ranks follow:
they train chunks of the clients that rank 0 names, and send back sums. `Ranks()` is one process, which leads and has no
followers.

| who must agree or know | how |
| --- | --- |
| all ranks have the same plan, data, network and versions | `agree`, before the first release |
| what only one rank may decide, draw or read from the run directory | `once`: rank 0 does it and tells the others |
| the weights of a round | `spread` |
| the sums of the chunks | `send` and `receive`, in the order of the chunks |
| a rank failed | it leaves its error in the store of the process group and closes its connections |

Guarantee: no rank waits for a lost one. A closed connection ends every rank with one sentence: the error that the failed
rank left, or `LostRankError`. A machine that vanishes without closing its connections is missed after 30 minutes.

Ranks are one party: every one holds all data, and sums from before the server's noise pass between them, unencrypted.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fedcdp import errors
from fedcdp.config.job import job_size, local_rank
from fedcdp.engine.runtime import stop_if_asked
from fedcdp.errors import FedcdpError, LostRankError, RankError
from fedcdp.files.tree import Tree

T = TypeVar("T")
_PATIENCE = timedelta(minutes=30)
_NOTICED, _LOST, _PAUSE = 5.0, 1.0, 0.02  # seconds


@dataclass
class Ranks:
    """This process among those that train together. By default it is alone."""

    rank: int = 0
    size: int = 1
    _group: Any = field(default=None, repr=False)
    """The connections while a training joins the ranks."""
    _key: str = field(default="", repr=False)
    """Under which a failed rank leaves its error in the store."""

    @staticmethod
    def present() -> Ranks:
        """The ranks of the process group that this process has initialised; one process if there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks()
        return Ranks(dist.get_rank(), dist.get_world_size())

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self.size > 1

    def device(self, device: str | torch.device) -> str | torch.device:
        """The device of this rank: of several GPUs that `cuda` may mean, the one with the rank's number on its machine."""
        if not self.several or str(device) != "cuda" or not torch.cuda.is_available():
            return device
        own = torch.device("cuda", local_rank(otherwise=self.rank) % torch.cuda.device_count())
        torch.cuda.set_device(own)
        return own

    def check_device(self, device: torch.device) -> None:
        """Raise a `RankError` on every rank if two of them have the same GPU, which NCCL does not support."""
        if not self.several or device.type != "cuda":
            return
        found = self.gathered(str(torch.cuda.get_device_properties(device).uuid))
        for rank, gpu in enumerate(found):
            if (other := found.index(gpu)) < rank:
                raise RankError(f"device: ranks {other} and {rank} have the same GPU; start at most one rank for each GPU")
        self.once(lambda: None)

    @contextmanager
    def joined(self, patience: timedelta = _PATIENCE) -> Iterator[None]:
        """Connect the ranks for the enclosed work. If it fails on one rank, it fails on all; nested calls do nothing."""
        if not self.several or self._group is not None:
            yield
            return
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        with self._talking():
            self._group = dist.new_group(timeout=patience, backend=backend)
            self._key = f"fedcdp/failed/{self._group.group_name}"
        try:
            yield
            with self._talking():
                dist.barrier(group=self._group)
        except BaseException as error:
            self._leave_word(error)
            self._close()
            self._wait_for_readers(_LOST if isinstance(error, LostRankError) else _NOTICED)
            raise
        finally:
            self._close()

    def once(self, make: Callable[[], T]) -> T:
        """The result of a function that rank 0 alone calls."""
        if not self.several:
            return make()
        if not self.leads:
            heard: T = self.heard()
            return heard
        made = make()
        self.tell(made)
        return made

    def tell(self, value: object) -> None:
        """Tell the followers a value; nothing if there are none."""
        if self.several:
            with self._talking():
                dist.broadcast_object_list([value], src=0, group=self._group, device=torch.device("cpu"))

    def heard(self) -> Any:
        """What rank 0 tells next."""
        told: list[Any] = [None]
        with self._talking():
            dist.broadcast_object_list(told, src=0, group=self._group, device=torch.device("cpu"))
        return told[0]

    def agree(self, facts: Mapping[str, str | bytes]) -> None:
        """Raise a `RankError` on every rank unless all have the same facts. Digests, as bytes, are never shown."""
        if not self.several:
            return
        for rank, theirs in enumerate(self.gathered(dict(facts))):
            for name, ours in facts.items():
                if (other := theirs.get(name)) != ours:
                    shown = "" if isinstance(ours, bytes) else f" ({str(other)[:100]}, and {ours[:100]} at rank 0)"
                    raise RankError(f"{name}: rank {rank} does not have that of rank 0{shown}; all ranks need the same")
        self.once(lambda: None)  # nobody goes on before rank 0 has compared

    def deal(self, hands: list[Any] | None = None) -> Any:
        """This rank's hand: rank 0 deals one to each rank, and the others give none."""
        dealt: list[Any] = [None]
        with self._talking():
            dist.scatter_object_list(dealt, hands, src=0, group=self._group)
        return dealt[0]

    def gathered(self, value: object) -> list[Any]:
        """The value of every rank, at rank 0; nothing elsewhere."""
        found: list[Any] | None = [None] * self.size if self.leads else None
        with self._talking():
            dist.gather_object(value, found, dst=0, group=self._group)
        return found or []

    def spread(self, tree: Tree) -> Tree:
        """Rank 0's tensors on all ranks; `tree` has their names and shapes."""
        found = dict(tree)
        with self._talking():
            for name in sorted(tree):  # a checkpoint has them in another order
                value = tree[name]
                sent = value.contiguous() if self.leads else torch.empty(value.shape, dtype=value.dtype, device=value.device)
                dist.broadcast(sent, src=0, group=self._group)
                if not self.leads:
                    found[name] = torch.empty_like(value).copy_(sent)  # strides decide how sums round
        return found

    def send(self, value: Tensor) -> Callable[[], None]:
        """Begin to send a tensor to rank 0. The result waits until it was sent; until then the tensor must not change."""
        with self._talking():
            work = dist.isend(value, 0, group=self._group)

        def wait() -> None:
            with self._talking():
                if work is not None:
                    work.wait()

        return wait

    def receive(self, into: Tensor, rank: int) -> Tensor:
        """Receive a tensor from a follower, in the place of `into`."""
        with self._talking(f"rank {rank}"):
            dist.recv(into, rank, group=self._group)
        return into

    # Failures ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _talking(self, other: str = "another rank") -> Iterator[None]:
        """Say in a sentence that a connection was lost: what the failed rank said, or the leader about it, if they could."""
        try:
            yield
        except RuntimeError as error:
            stop_if_asked()  # Ctrl-C reaches all ranks, and another one may have stopped first
            if not self.leads:
                self._close()  # the leader may wait for this rank, and notices now
            lost = LostRankError(f"the connection to {other if self.leads else 'rank 0'} was lost, so this job ends")
            raise self._word_left() or lost from error

    def _leave_word(self, error: BaseException) -> None:
        """Leave an error for the other ranks. A lost connection is not left: all of them see it themselves."""
        if isinstance(error, LostRankError) and not self.leads:
            return
        said = str(error) if isinstance(error, FedcdpError) else ""
        about = {"rank": self.rank, "kind": type(error).__name__, "message": said}
        with suppress(RuntimeError):
            if not (store := _store()).check([self._key]):
                store.set(self._key, json.dumps(about))

    def _wait_for_readers(self, seconds: float) -> None:
        """Say that this rank ends. The leader waits for that of the others, because its process may serve the store."""
        until = time.monotonic() + seconds
        with suppress(RuntimeError, KeyboardInterrupt):  # torchrun may end this rank meanwhile, which is ending
            if not self.leads:
                _store().set(f"{self._key}/{self.rank}", "")
                return
            ending = [f"{self._key}/{rank}" for rank in range(1, self.size)]
            while not _store().check(ending) and time.monotonic() < until:
                time.sleep(_PAUSE)

    def _word_left(self) -> BaseException | None:
        """The error that another rank has left, or soon leaves: the leader may not have noticed yet."""
        until = time.monotonic() + (0 if self.leads else _NOTICED)
        with suppress(RuntimeError):  # the store ended with the process that served it
            while self._key:
                if (store := _store()).check([self._key]):
                    return _error(**json.loads(store.get(self._key)))
                if time.monotonic() > until:
                    break
                with suppress(KeyboardInterrupt):  # torchrun ends this rank, which is ending
                    time.sleep(_PAUSE)
        return None

    def _close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


def _store() -> Any:
    """The store that all ranks of the process group can read and write."""
    return dist.distributed_c10d._get_default_store()


def _error(rank: int, kind: str, message: str) -> BaseException:
    """The error of another rank; that of rank 0 in its own words."""
    if kind == KeyboardInterrupt.__name__:
        return KeyboardInterrupt()
    known = getattr(errors, kind, None)
    if not message or known is None:
        return LostRankError(f"rank {rank} failed ({kind}), so this job ends; its own output says why")
    said: FedcdpError = known(message if rank == 0 else f"rank {rank}: {message}")
    return said


@contextmanager
def ranks_of_job(patience: timedelta = _PATIENCE) -> Iterator[Ranks]:
    """The ranks that torchrun started, connected for the enclosed work; one process if it was not torchrun.

    A rank that is silent for longer than `patience`, with its connections open, is lost.
    """
    if job_size() == 1 or dist.is_initialized():
        yield Ranks.present()
        return
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise LostRankError(f"the ranks of this job did not find each other: {reason}") from error
    try:
        ranks = Ranks.present()
        with _ended_in_order(), ranks.joined(patience):  # also while a failed rank waits for the others
            yield ranks
    finally:
        dist.destroy_process_group()


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM, by which torchrun ends the other ranks of a failed job, stop the enclosed work as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
