"""The client's own ledger: every accepted task, its reservations, and every release.

```
{"client":1,"member":"…","previous":"","digest":"…"}
{"accepted":"…digest of the task…","task":{…},"records":500,…}
{"reserved":"…digest of the task…","place":1,"participations":12,…}
{"released":"…digest of the task…","round":0,"attempt":0,"bound":4.0,…}
{"summed":"…digest of the task…","round":0,"attempt":0,"bound":4.0,"members":5,"context":"…",…}
```

A reservation is on disk before the first release that it covers, and a release before any of its data leave the client
(`accounting.journal`). A damaged ledger is refused, and then the client does not train. The random `member` determines the
names that identify this client to the server of each task. Noised moments of the inputs (`first_release`) are the release of
round −1. They need a reservation, and count as no participation: the task's first reservation covers them.

A policy may name a mark, a file on another disk that says how long the ledger was (`ledger_mark`). An older copy of the
ledger, which would forget what was spent, is then refused.

A task with noise on the sum has lines of the last kind: the size of the roster, and the context that the client checked
(`sum_context`). Without a context no share leaves the client, since alone it costs far more than in the sum.

Version 0.1.0 wrote no reservations. Releases without one count as a reservation of as many participations, at their original
place. It may be widened to all participations that the task can need (`grant.wanted_participations`), if the budget allows:
this number is fixed by the plan, and so was known before the first release. Everything else is a new reservation, at a place
of its own. Version 0.1.0 also accepted tasks in several written forms; each form counts separately, in full.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcdp.accounting.journal import Journal, LineError
from fedcdp.config.plan import SCALING
from fedcdp.deploy.protocol.grant import Reservation
from fedcdp.deploy.protocol.ledger_mark import LedgerMark
from fedcdp.deploy.protocol.task import Task, digest_of
from fedcdp.errors import RefusedError, RunError, TaskError
from fedcdp.files.disk import open_unlinked

_VERSION = 1
_FIRST_KEYS = ("client", "member")
_ACCEPTED_KEYS = ("accepted", "task", "records")
_RESERVED_KEYS = ("reserved", "place", "participations")
_RELEASED_KEYS = ("released", "round", "attempt", "bound")
_SUMMED_KEYS = ("summed", "round", "attempt", "bound", "members", "context")
_MEMBER = re.compile("[0-9a-f]{32}")
_CONTEXT = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Block:
    """Participations in one task that are counted together."""

    place: int
    """Place among all blocks of the ledger, counted from 1."""
    participations: int
    reserved: bool
    """Whether a line of the ledger records the reservation, or only the releases imply it."""


@dataclass(frozen=True)
class Summed:
    """What a client checked before it sent its share of a sum."""

    members: int
    """Size of the roster, n."""
    context: str
    """The context of the attempt, in hexadecimal digits."""


@dataclass
class Accepted:
    """A task, the number of records at its acceptance, and the releases made for it: rounds and attempts."""

    task: Task
    records: int
    releases: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    sums: list[Summed] = field(default_factory=list)
    """The rosters and contexts of the releases, if the noise is on the sum."""

    @property
    def participations(self) -> int:
        """Number of rounds taken part in, repeated attempts included."""
        return sum(round_ != SCALING for round_, _ in self.releases)

    @property
    def left(self) -> int:
        """Number of participations reserved but not yet used."""
        return sum(block.participations for block in self.blocks) - self.participations

    @property
    def gave_moments(self) -> bool:
        """Whether the noised moments of the inputs have been released."""
        return any(round_ == SCALING for round_, _ in self.releases)

    @property
    def unreserved(self) -> Block | None:
        """The block of releases without a reservation, if the latest releases had none."""
        return next((block for block in self.blocks[-1:] if not block.reserved), None)

    def covers_moments(self, block: int) -> bool:
        """Whether this block, counted from 0, covers the release of noised moments: the first one of a task that has it."""
        return block == 0 and self.task.plan.scaling_noise is not None

    def is_the_last_again(self, round_: int, attempt: int, summed: Summed | None = None) -> bool:
        """Whether this repeats the last release: under a published seed, with the same values."""
        same = self.releases[-1:] == [(round_, attempt)] and (summed is None or self.sums[-1:] == [summed])
        return self.task.reproducible and same


class ClientLedger(Journal):
    """The tasks that one client accepted, its reservations, and its releases. Open it with `held`, for one process at a
    time.

    Examples:
        >>> from fedcdp.flower import ClientLedger
        >>> with ClientLedger.held("state") as ledger:
        ...     len(ledger.tasks)
        0
    """

    BEGINNINGS = ('{"accepted":', '{"reserved":', '{"released":', '{"summed":')

    def __init__(self, path: Path, content: bytes) -> None:
        self.tasks: dict[str, Accepted] = {}
        self._mark: LedgerMark | None = None
        super().__init__(path, content)

    @staticmethod
    @contextmanager
    def held(directory: Path | str, mark: Path | str | None = None) -> Iterator[ClientLedger]:
        """Open the ledger in a client's own directory, or begin one. No other process can open it meanwhile.

        Args:
            directory: The directory, which is made if it is missing.
            mark: The file that says how long the ledger was, on another disk (`ledger_mark`). None: no such file.

        Yields:
            The ledger.

        Raises:
            RunError: The directory cannot be written, or the ledger is damaged, or older than its mark.
        """
        directory = Path(directory)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = open_unlinked(directory / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise RunError(f"{directory} cannot be written: {error.strerror or error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = directory / "ledger.jsonl"
            kept = None if mark is None else LedgerMark(Path(mark))
            if os.path.lexists(path):
                ledger = ClientLedger.open(path)
                if kept is not None:
                    kept.check(path, ledger.member, ledger.digests)
            else:
                if kept is not None:
                    kept.check(path, "", [])
                ledger = ClientLedger._begin(path, {"client": _VERSION, "member": secrets.token_hex(16)})
            if kept is not None:
                kept.keep(ledger.member, ledger.digests)
            ledger._mark = kept
            yield ledger
        finally:
            os.close(lock)

    @staticmethod
    def check_start(directory: Path, mark: Path | None) -> None:
        """Raise `RunError` if a client could not use its ledger. Writes nothing, and makes no ledger."""
        path = directory / "ledger.jsonl"
        ledger = ClientLedger.open(path) if os.path.lexists(path) else None
        if mark is not None:
            LedgerMark(mark).check(path, ledger.member if ledger else "", ledger.digests if ledger else [])

    def _write_line(self, content: Mapping[str, Any]) -> None:
        """Append a line, and only then move the mark: after a crash in between, the ledger is ahead of its mark."""
        super()._write_line(content)
        if self._mark is not None:
            self._mark.keep(self.member, self.digests)

    def accept(self, task: Task, records: int) -> Accepted:
        """Record that a task is accepted. A task that was accepted before is returned as it was."""
        if (known := self.tasks.get(task.digest())) is not None:
            return known
        self._write_line({"accepted": task.digest(), "task": json.loads(task.to_json()), "records": records})
        return self._take_in(task.digest(), task, records)

    def reserve(self, digest: str, place: int, participations: int) -> None:
        """Record how many participations a task may have: in a new block, or in the block of its unreserved releases."""
        accepted = self.tasks[digest]
        if wrong := self._misplaced(accepted, place, participations):
            raise RefusedError(wrong)
        self._write_line({"reserved": digest, "place": place, "participations": participations})
        self._set_apart(accepted, place, participations)

    def check(self, digest: str, round_: int, attempt: int, summed: Summed | None = None) -> None:
        """Raise `RefusedError` for a release that cannot come next; see the table of `charge`."""
        accepted = self.tasks[digest]
        if accepted.is_the_last_again(round_, attempt, summed):
            return
        if wrong := _objection(accepted, round_, attempt) or _unchecked(accepted, round_, summed):
            raise RefusedError(wrong, kind="repeated")

    def charge(self, digest: str, round_: int, attempt: int, bound: float, summed: Summed | None = None) -> None:
        """Record a release. Nothing of it may leave the client before this method has returned.

        | round, attempt | |
        | --- | --- |
        | a later round, or a later attempt of the last one | charged, if a participation is reserved |
        | the last release again, reproducible (and with the same context) | the same release: not charged again |
        | the last release again, not reproducible; anything earlier | refused |
        """
        accepted = self.tasks[digest]
        self.check(digest, round_, attempt, summed)
        if accepted.is_the_last_again(round_, attempt, summed):
            self._make_sure()
            return
        if not accepted.blocks or (round_ != SCALING and accepted.left < 1):
            raise RefusedError("no participation is reserved", kind="budget")
        about = {"round": round_, "attempt": attempt, "bound": bound}
        self._write_line({"released": digest} | about if summed is None else {"summed": digest} | about | vars(summed))
        self._count(accepted, round_, attempt, summed)

    def name_in(self, task: Task) -> str:
        """The name by which the server of a task recognises this client. Other servers see other names."""
        return hashlib.blake2b(f"{self.member}/{task.digest()}".encode(), digest_size=16).hexdigest()

    @property
    def next_place(self) -> int:
        """The place of the next new block."""
        return 1 + max((block.place for each in self.tasks.values() for block in each.blocks), default=0)

    def reservations(self, but: int | None = None) -> list[Reservation]:
        """Everything that counts: all blocks of all tasks, except the one at a place."""
        return [
            Reservation(each.task, each.records, block.place, block.participations, each.covers_moments(number))
            for each in self.tasks.values()
            for number, block in enumerate(each.blocks)
            if block.place != but
        ]

    def _count(self, accepted: Accepted, round_: int, attempt: int, summed: Summed | None) -> None:
        if accepted.left < 1 and round_ != SCALING:  # as version 0.1.0 wrote it
            if (open_ := accepted.unreserved) is not None:
                accepted.blocks[-1] = Block(open_.place, open_.participations + 1, reserved=False)
            else:
                accepted.blocks.append(Block(self.next_place, 1, reserved=False))
        accepted.releases.append((round_, attempt))
        accepted.sums += [] if summed is None else [summed]

    def _misplaced(self, accepted: Accepted, place: int, participations: int) -> str | None:
        """Why a reservation cannot come next, or None."""
        open_ = accepted.unreserved
        if open_ is not None and place == open_.place:
            return None if participations > open_.participations else "a reservation must exceed the number of releases"
        if place != self.next_place or participations < 1 or accepted.left > 0:
            return "a reservation must have the next place, at least one participation, and come after the last is used up"
        return None

    def _set_apart(self, accepted: Accepted, place: int, participations: int) -> None:
        if accepted.unreserved is not None and accepted.unreserved.place == place:
            accepted.blocks.pop()
        accepted.blocks.append(Block(place, participations, reserved=True))

    def _take_in(self, digest: str, task: Task, records: int) -> Accepted:
        accepted = Accepted(task, records)
        self.tasks[digest] = accepted
        return accepted

    def _read_first(self, line: bytes) -> None:
        found = self._verified(line, _FIRST_KEYS)
        if found["client"] != _VERSION:
            raise LineError(f"has version {found['client']!s:.20}; this program supports version {_VERSION}")
        if not (isinstance(found["member"], str) and _MEMBER.fullmatch(found["member"])):
            raise LineError("has no member name")
        self.member = found["member"]

    def _read_next(self, line: bytes) -> None:
        found = self._verified(line, _ACCEPTED_KEYS, _RESERVED_KEYS, _RELEASED_KEYS, _SUMMED_KEYS)
        if "accepted" in found:
            self._read_accepted(found)
        elif "reserved" in found:
            accepted, place, participations = self.tasks.get(str(found["reserved"])), found["place"], found["participations"]
            numbers = type(place) is int and type(participations) is int
            if accepted is None or not numbers or self._misplaced(accepted, place, participations):
                raise LineError("is impossible: this reservation cannot come here")
            self._set_apart(accepted, place, participations)
        else:
            self._read_release(found)

    def _read_release(self, found: dict[str, Any]) -> None:
        accepted = self.tasks.get(str(found.get("released", found.get("summed"))))
        round_, attempt, bound = found["round"], found["attempt"], found["bound"]
        numbers = type(round_) is int and type(attempt) is int and type(bound) is float and math.isfinite(bound)
        if accepted is None or not numbers or _objection(accepted, round_, attempt):
            raise LineError("is impossible: this release cannot come here")
        summed = _summed(found) if "summed" in found else None
        if _unchecked(accepted, round_, summed):
            raise LineError("is impossible: only shares of a sum have a context, and all of them do")
        if (accepted.task.plan.scaling_noise is not None or summed is not None) and not accepted.blocks:
            raise LineError("is impossible: this release has no reservation")
        self._count(accepted, round_, attempt, summed)

    def _read_accepted(self, found: dict[str, Any]) -> None:
        try:
            text = json.dumps(found["task"])
            task = Task.from_ledger(text)
        except TaskError as error:
            raise LineError(f"has an invalid task: {error}") from None
        if digest_of(text) != found["accepted"] or found["accepted"] in self.tasks:
            raise LineError("has a task with a wrong digest, or twice")
        if type(found["records"]) is not int or found["records"] < 1:
            raise LineError("has a number of records below 1")
        self._take_in(found["accepted"], task, found["records"])


def _objection(accepted: Accepted, round_: int, attempt: int) -> str | None:
    """Why a release cannot come next, or None."""
    plan = accepted.task.plan
    first = 0 if plan.scaling_noise is None else SCALING
    if not first <= round_ < plan.rounds or attempt < 0:
        return f"round {round_} is not one of the task's {plan.rounds} rounds"
    if plan.sums and round_ != SCALING and attempt >= plan.attempts:
        return f"attempt {attempt + 1} of round {round_ + 1} exceeds the task's {plan.attempts}"
    if round_ == SCALING and accepted.gave_moments:
        return "the moments of this task have been released"
    last = accepted.releases[-1] if accepted.releases else (first - 1, 0)
    if (round_, attempt) <= last:
        return f"round {round_}, attempt {attempt}, is stale: round {last[0]}, attempt {last[1]}, has been released"
    return None


def _unchecked(accepted: Accepted, round_: int, summed: Summed | None) -> str | None:
    """Why a release lacks what a client must have checked, or None."""
    if (summed is not None) == (accepted.task.plan.sums and round_ != SCALING):
        return None
    return "a share of a sum needs a checked context" if summed is None else "only a share of a sum has a context"


def _summed(found: dict[str, Any]) -> Summed:
    """The roster and the context in a line."""
    members, context = found["members"], found["context"]
    if type(members) is not int or members < 2 or not (isinstance(context, str) and _CONTEXT.fullmatch(context)):
        raise LineError("has an invalid roster or context")
    return Summed(members, context)
