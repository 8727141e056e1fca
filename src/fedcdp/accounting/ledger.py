"""The ledger: what a run has released, one line a release, on the disk before the release is used.

```
{"ledger":1,"plan":{…},"population":{"clients":K,…},"noise":"seeded","previous":"","digest":"…"}
{"round":0,"attempt":0,"clients":[3,17,42],"bound":4.0,"previous":"…","digest":"…"}
```

Guarantees:
- A release whose `charge` has returned is in the ledger after any crash. A release that was charged and never made stays in
  it: a crash may over-count, never under-count.
- A line carries a digest of itself and the digest of the line before, so that lines altered, inserted, reordered or dropped
  in the middle are noticed. There is no secret in it: this is against accidents and naive tampering, not against someone
  who writes the whole file anew. Lines that are missing at the end show only beside the checkpoint (`check`).
- What a crash leaves behind the last newline: the beginning of a line was never used, and is passed over (and removed before
  the next line is written); a whole line counts. Anything else that does not verify is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcdp.errors import RunError
from fedcdp.files import write_atomically

Noise = Literal["seeded", "secure"]

_VERSION = 1
_HEADER_KEYS = ("ledger", "plan", "population", "noise", "previous", "digest")
_CHARGE_KEYS = ("round", "attempt", "clients", "bound", "previous", "digest")
_LINE = re.compile(rb'(\{.*),"digest":"([0-9a-f]{32})"\}', re.DOTALL)
_BEGINNING = '{"round":'


@dataclass(frozen=True, eq=False)
class Charge:
    """One release: the global round (from 0), how often it was released before, who took part, and the clip bound."""

    round: int
    attempt: int
    clients: NDArray[np.int64]
    """Ascending, each once."""
    bound: float


class Ledger:
    """An append-only record of releases in one file, for one writer at a time (the run's lock sees to that)."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self._charges: list[Charge] = []
        self._previous = ""
        *lines, tail = content.split(b"\n")
        whole = b"" if _is_beginning_of_line(tail) else tail
        if not lines and not _LINE.fullmatch(tail):
            raise RunError(f"{path} has no whole first line; no crash of this program leaves that, so it is damaged")
        for number, line in enumerate(lines + [whole] * bool(whole), start=1):
            try:
                (self._read_header if number == 1 else self._read_charge)(line)
            except _LineError as error:
                raise RunError(f"{path}, line {number}, {error}") from None
        self._size = len(content)  # what the disk has
        self._kept = len(content) - len(tail) + len(whole)  # what of it counts
        self._owed = b"\n" if whole else b""  # what is to be written before the next line

    @staticmethod
    def create(path: Path | str, plan: Mapping[str, Any], population: Mapping[str, Any], noise: Noise) -> Ledger:
        """Start a ledger: whole or not at all, also when killed in here. Refuses a file that exists."""
        path = Path(path)
        header = {"ledger": _VERSION, "plan": dict(plan), "population": dict(population), "noise": noise}
        try:
            if path.exists():
                raise RunError(f"{path} already exists; a ledger is added to, never begun anew")
            content = _line(header, "") + b"\n"
            ledger = Ledger(path, content)
            write_atomically(path, content)
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
        except (TypeError, ValueError) as error:
            raise RunError(f"{path} cannot be written: a plan and a population are plain values ({error})") from None
        return ledger

    @staticmethod
    def open(path: Path | str) -> Ledger:
        """Read a ledger and verify every line of it. Writes nothing; refuses what is damaged or impossible."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
        return Ledger(Path(path), content)

    @staticmethod
    def open_or_create(path: Path | str, plan: Mapping[str, Any], population: Mapping[str, Any], noise: Noise) -> Ledger:
        """The ledger of a run that may have been killed before it had one; refuses that of another run.

        A lost ledger is not replaced unnoticed: a new one begins at round 0 and refuses every other first round.
        """
        if not os.path.lexists(path):
            return Ledger.create(path, plan, population, noise)
        ledger = Ledger.open(path)
        ledger.check(plan, population, noise)
        return ledger

    def check(
        self, plan: Mapping[str, Any], population: Mapping[str, Any], noise: Noise, rounds_done: int | None = None
    ) -> None:
        """Refuse to go on with another plan, population or noise, or with a checkpoint that this ledger does not cover.

        A checkpoint of `rounds_done` rounds needs as many charged rounds, or one more where a crash came in between.
        """
        mine: dict[str, Any] = {"plan": self.plan, "population": self.population, "noise": {"noise": self.noise}}
        for part, given in (("plan", plan), ("population", population), ("noise", {"noise": noise})):
            now = json.loads(json.dumps(dict(given)))  # as it would have been written
            for key in sorted(mine[part].keys() | now.keys()):
                if mine[part].get(key) != now.get(key):
                    differs = f"{key} = {mine[part].get(key)!s:.60}, not {now.get(key)!s:.60}"
                    raise RunError(f"{self.path} belongs to another run: its {part} has {differs}")
        if rounds_done is not None and self._next_round not in (rounds_done, rounds_done + 1):
            raise RunError(f"{self.path} has {self._next_round} rounds and the checkpoint {rounds_done}: they do not fit")

    # Charging --------------------------------------------------------------------------------------------------------

    def charge(self, round: int, clients: ArrayLike, bound: float) -> None:
        """Record a release; only once this has returned may it be used.

        | round | seeded noise | secure noise |
        | --- | --- | --- |
        | the one after the last | charged | charged |
        | the last again, after a crash | the same release: not charged again; refused if it differs | charged again |
        | any other | refused | refused |
        """
        ids = np.asarray(clients)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise RunError(f"{self.path} cannot be written: the clients of a release are whole numbers")
        round, before = operator.index(round), self._latest_of(round)
        new = Charge(round, before.attempt + 1 if before else 0, np.sort(ids.astype(np.int64)), float(bound))
        if before and self.noise == "seeded":
            if not np.array_equal(new.clients, before.clients) or new.bound != before.bound:
                raise RunError(f"{self.path} has round {round} with other clients or another bound under the same seed")
            self._append(b"")  # it was found in the file, but may not have reached the disk before the crash
            return
        if wrong := self._objection(new):
            raise RunError(f"{self.path} cannot be written: round {round} {wrong}")
        content = {"round": new.round, "attempt": new.attempt, "clients": new.clients.tolist(), "bound": new.bound}
        line = _line(content, self._previous)
        self._append(line + b"\n")
        self._accept(new, line)

    # What was charged ------------------------------------------------------------------------------------------------

    @property
    def charges(self) -> tuple[Charge, ...]:
        """Every release so far, in order."""
        return tuple(self._charges)

    @property
    def rounds_charged(self) -> int:
        """How many releases were charged; a round that was released twice counts twice."""
        return len(self._charges)

    def participations(self) -> NDArray[np.int64]:
        """For each client of the population, the number of charged releases that it took part in."""
        everyone = [np.empty(0, np.int64), *(charge.clients for charge in self._charges)]
        return np.bincount(np.concatenate(everyone), minlength=self.population["clients"])

    def most_used(self) -> int:
        """The number of releases of the client that took part most often."""
        return int(self.participations().max())

    def busiest(self, count: int) -> NDArray[np.int64]:
        """The `count` largest numbers of releases of single clients (all, where there are fewer), largest first.

        Their sum bounds how often a record was used that is stored at `count` clients, whichever these are.
        """
        return np.sort(self.participations())[::-1][: max(count, 0)]

    # Reading and writing lines ---------------------------------------------------------------------------------------

    def _latest_of(self, round_: int) -> Charge | None:
        """The last release, if it was of this round."""
        return next((charge for charge in self._charges[-1:] if charge.round == round_), None)

    @property
    def _next_round(self) -> int:
        return self._charges[-1].round + 1 if self._charges else 0

    def _read_header(self, line: bytes) -> None:
        version = re.match(rb'\{"ledger":([^,]*),', line)
        if version and version[1] != b"%d" % _VERSION:
            raise _LineError(f"is of version {version[1].decode(errors='replace')}; this program knows version {_VERSION}")
        header = _verified(line, _HEADER_KEYS, "")
        self.plan, self.population, self.noise = header["plan"], header["population"], header["noise"]
        for part, key in (("plan", "rounds"), ("population", "clients")):
            value = header[part].get(key) if isinstance(header[part], dict) else None
            if type(value) is not int or not 1 <= value < 2**31:
                raise _LineError(f"has a {part} without a number of {key} from 1 to 2^31")
        if self.noise not in get_args(Noise):
            raise _LineError(f"has noise {self.noise!r}, which is neither seeded nor secure")
        self._previous = header["digest"]

    def _read_charge(self, line: bytes) -> None:
        found = _verified(line, _CHARGE_KEYS, self._previous)
        ids = found["clients"]
        if type(found["round"]) is not int or type(found["attempt"]) is not int or type(found["bound"]) is not float:
            raise _LineError("has a round, an attempt or a bound that is not a number of its kind")
        if type(ids) is not list or not all(type(each) is int and abs(each) < 2**63 for each in ids):
            raise _LineError("has clients that are not whole numbers")
        new = Charge(found["round"], found["attempt"], np.array(ids, np.int64), found["bound"])
        if wrong := self._objection(new):
            raise _LineError(f"is impossible: round {new.round} {wrong}")
        self._accept(new, line)

    def _objection(self, new: Charge) -> str | None:
        """Why a release cannot come next, if it cannot: the same for one that is read and for one that is charged."""
        before = self._latest_of(new.round)
        if before is None and new.round != self._next_round:
            return f"comes where round {self._next_round} is next, and only the last round may be repeated"
        if new.round >= self.plan["rounds"]:
            return f"is beyond the plan, which has {self.plan['rounds']} rounds"
        if before and self.noise == "seeded":
            return "is there twice, but under seeded noise it is one release"
        if new.attempt != (before.attempt + 1 if before else 0):
            return f"has a wrong attempt number, {new.attempt}"
        if not (math.isfinite(new.bound) and new.bound >= 0):
            return f"has the bound {new.bound}, which is not a finite number of 0 or more"
        if (new.clients[1:] <= new.clients[:-1]).any():
            return "has clients that are repeated or out of order"
        if new.clients.size and not (new.clients[0] >= 0 and new.clients[-1] < self.population["clients"]):
            return f"has a client outside the population of {self.population['clients']}"
        return None

    def _accept(self, new: Charge, line: bytes) -> None:
        new.clients.setflags(write=False)
        self._charges.append(new)
        self._previous = line[-34:-2].decode()

    def _append(self, line: bytes) -> None:
        """Add bytes, after mending what a crash left at the end: all on the disk on return, or as it was before."""
        content = self._owed + line
        try:
            _sync(self.path.parent)  # a start that was killed inside `create` may not have got that far
            file = os.open(self.path, os.O_RDWR | os.O_APPEND)
            try:
                if os.fstat(file).st_size != self._size:
                    raise RunError(f"{self.path} was changed by others since it was read")
                self._write(file, content)
            finally:
                os.close(file)
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror or error}") from error
        self._kept = self._size = self._kept + len(content)
        self._owed = b""

    def _write(self, file: int, content: bytes) -> None:
        try:
            if self._size > self._kept:
                os.ftruncate(file, self._kept)
                os.fsync(file)  # first, so that no crash can leave a mixture of the old end and the new
                self._size = self._kept
            while content:
                content = content[os.write(file, content) :]
            os.fsync(file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, self._kept)
            raise


class _LineError(Exception):
    """What is wrong with a line, to be said with its file and number."""


def _line(content: Mapping[str, Any], previous: str) -> bytes:
    """A line without its newline. The digest is over all that stands before it, the line before's digest included."""
    body = json.dumps({**content, "previous": previous}, separators=(",", ":"), allow_nan=False)[:-1].encode()
    return body + f',"digest":"{_digest(body)}"}}'.encode()


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _verified(line: bytes, keys: tuple[str, ...], previous: str) -> dict[str, Any]:
    """The content of a line that is what was written, has these keys and follows the line with this digest."""
    parts = _LINE.fullmatch(line)
    if not parts:
        raise _LineError("is damaged")
    if _digest(parts[1]) != parts[2].decode():
        raise _LineError("was altered: it does not match its digest")
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise _LineError("is not JSON") from None
    if tuple(found) != keys:
        raise _LineError(f"has other keys than {', '.join(keys)}")
    if found["previous"] != previous:
        raise _LineError("does not follow the line before it: lines were removed, added or moved")
    return found  # type: ignore[no-any-return]


def _is_beginning_of_line(tail: bytes) -> bool:
    """Whether bytes behind the last newline are a line cut short, rather than a whole or a damaged one."""
    text = tail.decode(errors="replace")
    if not tail.isascii() or not text.isprintable() or text[: len(_BEGINNING)] != _BEGINNING[: len(text)]:
        return False
    try:
        json.JSONDecoder().raw_decode(text)  # a whole line, perhaps with something behind it
        return False
    except (ValueError, RecursionError) as error:
        return isinstance(error, ValueError)


def _sync(folder: Path) -> None:
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
