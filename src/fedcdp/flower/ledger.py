"""The client's own ledger: every task that it accepted, every release that it made, across runs and restarts.

```
{"client":1,"member":"…","previous":"","digest":"…"}
{"accepted":"…digest of the task…","task":{…},"records":500,…}
{"released":"…digest of the task…","round":0,"attempt":0,"bound":4.0,…}
```

A release is on the disk before anything of it leaves the client (`accounting.journal`). A damaged ledger is refused, and
with it all training. From `member`, which is random, come the names by which each task's server knows this client again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fedcdp.accounting.journal import Journal, LineError
from fedcdp.errors import RunError
from fedcdp.files import open_unlinked
from fedcdp.flower.budget import Participation
from fedcdp.flower.errors import RefusedError, TaskError
from fedcdp.flower.task import Task

_VERSION = 1
_FIRST_KEYS = ("client", "member")
_ACCEPTED_KEYS = ("accepted", "task", "records")
_RELEASED_KEYS = ("released", "round", "attempt", "bound")
_MEMBER = re.compile("[0-9a-f]{32}")


@dataclass
class Accepted:
    """A task, the number of records that it was accepted with, and the releases made for it: rounds and attempts."""

    task: Task
    records: int
    releases: list[tuple[int, int]] = field(default_factory=list)
    place: int = 0
    """Among the tasks with a release, counted from 1; 0: it has none yet."""

    def is_the_last_again(self, round_: int, attempt: int) -> bool:
        """Whether this is the last release once more: under a published seed, the same values."""
        return self.task.reproducible and self.releases[-1:] == [(round_, attempt)]


class ClientLedger(Journal):
    """What one client has released. Open it through `held`, which lets one process at a time have it."""

    BEGINNINGS = ('{"accepted":', '{"released":')

    def __init__(self, path: Path, content: bytes) -> None:
        self.tasks: dict[str, Accepted] = {}
        super().__init__(path, content)

    @staticmethod
    @contextmanager
    def held(directory: Path | str) -> Iterator[ClientLedger]:
        """The ledger in a client's own directory, begun if there is none, for this process alone while in use."""
        directory = Path(directory)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = open_unlinked(directory / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise RunError(f"{directory} cannot be written: {error.strerror or error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = directory / "ledger.jsonl"
            if os.path.lexists(path):
                yield ClientLedger.open(path)
            else:
                yield ClientLedger._begin(path, {"client": _VERSION, "member": secrets.token_hex(16)})
        finally:
            os.close(lock)

    def accept(self, task: Task, records: int) -> Accepted:
        """Note that a task is accepted; one that was accepted before is given back as it was."""
        if (known := self.tasks.get(task.digest())) is not None:
            return known
        self._write_line({"accepted": task.digest(), "task": json.loads(task.to_json()), "records": records})
        return self._take_in(task, records)

    def charge(self, digest: str, round_: int, attempt: int, bound: float) -> None:
        """Record a release; only once this has returned may anything of it leave the client.

        | round, attempt | |
        | --- | --- |
        | a later round, or a later attempt of the last one | charged |
        | the last release again, reproducible | the same release: not charged again |
        | the last release again, else; anything earlier | refused |
        """
        accepted = self.tasks[digest]
        if accepted.is_the_last_again(round_, attempt):
            self._make_sure()
            return
        if wrong := _objection(accepted, round_, attempt):
            raise RefusedError(wrong)
        self._write_line({"released": digest, "round": round_, "attempt": attempt, "bound": bound})
        self._count(accepted, round_, attempt)

    def name_in(self, task: Task) -> str:
        """The name by which the server of a task knows this client again; of no use to any other server."""
        return hashlib.blake2b(f"{self.member}/{task.digest()}".encode(), digest_size=16).hexdigest()

    def spent(self, without: Task | None = None) -> list[Participation]:
        """All participations so far, but for those in one task."""
        others = (each for each in self.tasks.values() if without is None or each.task != without)
        return [Participation(each.task, each.records, each.place, len(each.releases)) for each in others if each.releases]

    def once_more(self, task: Task, records: int) -> Participation:
        """What has been taken of a task, and one participation more."""
        known = self.tasks.get(task.digest(), Accepted(task, records))
        place = known.place or 1 + max((each.place for each in self.tasks.values()), default=0)
        return Participation(task, records, place, len(known.releases) + 1)

    def _count(self, accepted: Accepted, round_: int, attempt: int) -> None:
        accepted.place = self.once_more(accepted.task, accepted.records).place
        accepted.releases.append((round_, attempt))

    def _take_in(self, task: Task, records: int) -> Accepted:
        accepted = Accepted(task, records)
        self.tasks[task.digest()] = accepted
        return accepted

    def _read_first(self, line: bytes) -> None:
        found = self._verified(line, _FIRST_KEYS)
        if found["client"] != _VERSION:
            raise LineError(f"is of version {found['client']!s:.20}; this program knows version {_VERSION}")
        if not (isinstance(found["member"], str) and _MEMBER.fullmatch(found["member"])):
            raise LineError("has no member name")
        self.member = found["member"]

    def _read_next(self, line: bytes) -> None:
        found = self._verified(line, _ACCEPTED_KEYS, _RELEASED_KEYS)
        if "accepted" in found:
            try:
                task = Task.from_json(json.dumps(found["task"]))
            except TaskError as error:
                raise LineError(f"has a task that is none: {error}") from None
            if task.digest() != found["accepted"] or task.digest() in self.tasks:
                raise LineError("has a task under another's name, or twice")
            if type(found["records"]) is not int or found["records"] < 1:
                raise LineError("has a number of records below 1")
            self._take_in(task, found["records"])
            return
        accepted = self.tasks.get(str(found["released"]))
        round_, attempt, bound = found["round"], found["attempt"], found["bound"]
        numbers = type(round_) is int and type(attempt) is int and type(bound) is float and math.isfinite(bound)
        if accepted is None or not numbers or _objection(accepted, round_, attempt):
            raise LineError("is impossible: no such release can come here")
        self._count(accepted, round_, attempt)


def _objection(accepted: Accepted, round_: int, attempt: int) -> str | None:
    """Why a release cannot come next, if it cannot."""
    if not 0 <= round_ < accepted.task.plan.rounds or attempt < 0:
        return f"round {round_} is not one of the {accepted.task.plan.rounds} of the task"
    last = accepted.releases[-1] if accepted.releases else (-1, 0)
    if (round_, attempt) <= last:
        return f"round {round_}, attempt {attempt}, is stale: round {last[0]}, attempt {last[1]}, has been released"
    return None
