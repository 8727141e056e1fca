"""The ledger: every release of a run, one line each, on disk before the release is used.

```
{"ledger":1,"plan":{…},"population":{"clients":K,…},"noise":"seeded","previous":"","digest":"…"}
{"round":0,"attempt":0,"clients":[3,17,42],"bound":4.0,"previous":"…","digest":"…"}
```

A plan that scales inputs privately has a release before its first round: round −1.

A client that joins a deployment between rounds has a line of its own, with its number and the next round:
`{"joined":5,"round":7,…}`. ε stays that of the population at the start. With more clients, each is drawn less often than
that population says, and one that joined was not drawn in the rounds before, so the statement holds for all of them. It does
not hold for a client that has two numbers, so one that lost its own ledger does not join (`deploy.protocol.roster`).

Guarantees:
- A release whose `charge` has returned is in the ledger after any crash. A release that was charged but never made stays in
  it: a crash may over-count, never under-count.
- Lines are chained, and repaired after a crash, as in every `journal`. Lines missing at the end are detected only by
  comparison with the checkpoint (`check`).
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcdp.accounting.journal import Journal, LineError
from fedcdp.accounting.population import Population
from fedcdp.config.plan import SCALING, Plan
from fedcdp.errors import RunError

Noise = Literal["seeded", "secure"]

MOST_COUNTED = 2**25
"""The most clients whose participations are counted individually, in a table of 256 MiB."""
MOST_LISTED = 2**20
"""The most counts that are listed; clients beyond them took part in nothing."""
_VERSION = 1
_HEADER_KEYS = ("ledger", "plan", "population", "noise")
_CHARGE_KEYS = ("round", "attempt", "clients", "bound")
_JOINED_KEYS = ("joined", "round")
_ADDED: dict[str, set[str]] = {"plan": set(), "population": {"sizes", "held", "names"}, "noise": set()}
"""Keys that ledgers of the first release lack. Such a ledger is continued without them."""


@dataclass(frozen=True, eq=False)
class Charge:
    """One release: the global round (from 0), how often it was released before, the clients, and the clip bound."""

    round: int
    attempt: int
    clients: NDArray[np.int64]
    """Ascending, each once."""
    bound: float


class Ledger(Journal):
    """An append-only record of releases in one file, for one writer at a time (the run's lock ensures that)."""

    BEGINNINGS = ('{"round":', '{"joined":')

    def __init__(self, path: Path, content: bytes) -> None:
        self._charges: list[Charge] = []
        self._joined = 0
        super().__init__(path, content)

    @staticmethod
    def create(path: Path | str, plan: Mapping[str, Any], population: Mapping[str, Any], noise: Noise) -> Ledger:
        """Start a ledger, atomically even if killed in here. Refuses a file that exists."""
        header = {"ledger": _VERSION, "plan": dict(plan), "population": dict(population), "noise": noise}
        return Ledger._begin(path, header)

    @staticmethod
    def open_or_create(path: Path | str, plan: Mapping[str, Any], population: Mapping[str, Any], noise: Noise) -> Ledger:
        """The ledger of a run that may have been killed before it had one; another run's ledger is refused.

        A lost ledger is not replaced silently: a new one begins at round 0 and refuses any other first round.
        """
        if not os.path.lexists(path):
            return Ledger.create(path, plan, population, noise)
        ledger = Ledger.open(path)
        ledger.check(plan, population, noise)
        return ledger

    @staticmethod
    def of_run(path: Path | str, plan: Plan, population: Population, noise: Noise, rounds_done: int) -> Ledger:
        """The ledger of a run whose checkpoint has `rounds_done` rounds.

        It holds no seed: a ledger may be given to an accountant, who must not learn which clients and records were or will
        be drawn.
        """
        written = {key: value for key, value in plan.written().items() if key != "seed"}
        ledger = Ledger.open_or_create(path, written, population.written(), noise)
        ledger.check(written, population.written(), noise, rounds_done)
        return ledger

    def check(
        self, plan: Mapping[str, Any], population: Mapping[str, Any], noise: Noise, rounds_done: int | None = None
    ) -> None:
        """Refuse another plan, population or noise, or a checkpoint that this ledger does not cover.

        A checkpoint of `rounds_done` rounds needs as many charged rounds, or one more if a crash came in between.
        """
        mine: dict[str, Any] = {"plan": self.plan, "population": self.population, "noise": {"noise": self.noise}}
        for part, given in (("plan", plan), ("population", population), ("noise", {"noise": noise})):
            now = json.loads(json.dumps(dict(given)))  # in the form in which it would have been written
            for key in sorted((mine[part].keys() | now.keys()) - (_ADDED[part] - mine[part].keys())):
                if mine[part].get(key) != now.get(key):
                    differs = f"{key} = {mine[part].get(key)!s:.60}, not {now.get(key)!s:.60}"
                    raise RunError(f"{self.path} belongs to another run: its {part} has {differs}")
        begun = rounds_done == 0 and not self._charges  # before the release that precedes the first round
        if rounds_done is not None and not begun and self._next_round not in (rounds_done, rounds_done + 1):
            raise RunError(f"{self.path} has {self._next_round} rounds and the checkpoint {rounds_done}: they do not match")

    # Charging --------------------------------------------------------------------------------------------------------

    def charge(self, round: int, clients: ArrayLike, bound: float) -> None:
        """Record a release, which may be used only after this has returned.

        | round | seeded noise | secure noise |
        | --- | --- | --- |
        | the one after the last | charged | charged |
        | the last one again, after a crash | the same release: not charged again; refused if it differs | charged again |
        | the last one again with other clients, noise on the sum | charged again | charged again |
        | any other | refused | refused |
        """
        ids = np.asarray(clients)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise RunError(f"{self.path} cannot be written: the clients of a release must be whole numbers")
        round, before = operator.index(round), self._latest_of(round)
        new = Charge(round, before.attempt + 1 if before else 0, np.sort(ids.astype(np.int64)), float(bound))
        same = before is not None and np.array_equal(new.clients, before.clients)
        if before and self.noise == "seeded" and (same or not self._tries_again):
            if not same or new.bound != before.bound:
                raise RunError(f"{self.path} has round {round} with other clients or another bound under the same seed")
            self._make_sure()
            return
        if wrong := self._objection(new):
            raise RunError(f"{self.path} cannot be written: round {round} {wrong}")
        content = {"round": new.round, "attempt": new.attempt, "clients": new.clients.tolist(), "bound": new.bound}
        self._write_line(content)
        self._accept(new)

    def join(self) -> int:
        """Record that a client joins before the next round; return its number."""
        number = self.members
        self._write_line({"joined": number, "round": self._next_round})
        self._joined += 1
        return number

    # What was charged ------------------------------------------------------------------------------------------------

    @property
    def members(self) -> int:
        """The number of clients that may be charged: the population, and those that have joined since."""
        return int(self.population["clients"]) + self._joined

    @property
    def charges(self) -> tuple[Charge, ...]:
        """Every release so far, in order."""
        return tuple(self._charges)

    @property
    def rounds(self) -> tuple[int, ...]:
        """The round of every release, in order; a round that was released twice is listed twice."""
        return tuple(charge.round for charge in self._charges)

    @property
    def rounds_charged(self) -> int:
        """The number of charged releases; a round that was released twice counts twice."""
        return len(self._charges)

    def participations(self) -> NDArray[np.int64]:
        """For each client of the population, the number of charged rounds that it took part in."""
        if self.members > MOST_COUNTED:
            raise RunError(f"{self.path} has {self.members} clients; at most {MOST_COUNTED} can be counted individually")
        return np.bincount(self._takers(), minlength=self.members)

    def most_used(self) -> int:
        """The number of releases that the most-used client took part in."""
        return int(self.busiest(1)[0])

    def busiest(self, count: int) -> NDArray[np.int64]:
        """The `count` largest numbers of releases of single clients (all, if there are fewer), largest first.

        Their sum bounds how often a record stored at any `count` clients was used.
        """
        clients = self.members
        _, counts = np.unique(self._takers(), return_counts=True)
        used = np.sort(counts)[::-1][: max(count, 0)]
        return np.pad(used, (0, max(0, min(count, clients, MOST_LISTED) - len(used))))

    def _takers(self) -> NDArray[np.int64]:
        """The clients of all rounds, one after the other. In the release before the first round everybody takes part."""
        rounds = (charge.clients for charge in self._charges if charge.round != SCALING)
        return np.concatenate([np.empty(0, np.int64), *rounds])

    # Reading lines ---------------------------------------------------------------------------------------------------

    def _latest_of(self, round_: int) -> Charge | None:
        """The last release, if it was of this round."""
        return next((charge for charge in self._charges[-1:] if charge.round == round_), None)

    @property
    def _next_round(self) -> int:
        return self._charges[-1].round + 1 if self._charges else self._first_round

    @property
    def _tries_again(self) -> bool:
        """Whether a round may be tried again with fewer clients: noise on the sum."""
        return bool(self.plan.get("noise") == "sum")

    @property
    def _first_round(self) -> int:
        return 0 if self.plan.get("scaling_noise") is None else SCALING

    def _read_first(self, line: bytes) -> None:
        version = re.match(rb'\{"ledger":([^,]*),', line)
        if version and version[1] != b"%d" % _VERSION:
            raise LineError(f"has version {version[1].decode(errors='replace')}; this program reads version {_VERSION}")
        header = self._verified(line, _HEADER_KEYS)
        self.plan, self.population, self.noise = header["plan"], header["population"], header["noise"]
        for part, key in (("plan", "rounds"), ("population", "clients")):
            value = header[part].get(key) if isinstance(header[part], dict) else None
            if type(value) is not int or not 1 <= value < 2**31:
                raise LineError(f"has a {part} without a number of {key} from 1 to 2^31")
        if self.noise not in get_args(Noise):
            raise LineError(f"has noise {self.noise!r}, which is neither seeded nor secure")

    def _read_next(self, line: bytes) -> None:
        found = self._verified(line, _CHARGE_KEYS, _JOINED_KEYS)
        if "joined" in found:
            if type(found["joined"]) is not int or (found["joined"], found["round"]) != (self.members, self._next_round):
                raise LineError("is impossible: this client cannot join here")
            self._joined += 1
            return
        ids = found["clients"]
        if type(found["round"]) is not int or type(found["attempt"]) is not int or type(found["bound"]) is not float:
            raise LineError("has a round, an attempt or a bound that is not a number of its kind")
        if type(ids) is not list or not all(type(each) is int and abs(each) < 2**63 for each in ids):
            raise LineError("has clients that are not whole numbers")
        new = Charge(found["round"], found["attempt"], np.array(ids, np.int64), found["bound"])
        if wrong := self._objection(new):
            raise LineError(f"is impossible: round {new.round} {wrong}")
        self._accept(new)

    def _objection(self, new: Charge) -> str | None:
        """Why a release cannot come next, or None: the same check for a release that is read and one that is charged."""
        before = self._latest_of(new.round)
        if before is None and new.round != self._next_round:
            return f"is out of order: round {self._next_round} is next, and only the last round may be repeated"
        if new.round >= self.plan["rounds"]:
            return f"is beyond the plan, which has {self.plan['rounds']} rounds"
        if before and self.noise == "seeded" and not self._tries_again:
            return "occurs twice, but under seeded noise it is one release"
        if new.attempt != (before.attempt + 1 if before else 0):
            return f"has a wrong attempt number, {new.attempt}"
        if not (math.isfinite(new.bound) and new.bound >= 0):
            return f"has the bound {new.bound}, which is not a finite number of 0 or more"
        if (new.clients[1:] <= new.clients[:-1]).any():
            return "has clients that are repeated or out of order"
        if new.clients.size and not (new.clients[0] >= 0 and new.clients[-1] < self.members):
            return f"has a client outside the population of {self.members}"
        return None

    def _accept(self, new: Charge) -> None:
        new.clients.setflags(write=False)
        self._charges.append(new)
