"""Queues of cells: in one process, or between the ranks of a job, each of which takes the next cell when it is free.

Ranks share a queue through the store of their process group. Rank 0 keeps the rows, each as soon as it is measured. Cells
are measured in worker processes, so every rank can tell the others again and again that it is there. A rank that has been
silent for a minute is lost, even if its machine vanished.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedcdp.errors import LostRankError
from fedcdp.studies.reproduce.catalogue import Cell
from fedcdp.training.ranks import Ranks, store_of_job

Keep = Callable[[Cell, dict[str, Any]], None]
SILENCE = 60.0
"""Seconds after which a silent rank is lost."""
_PAUSE = 0.2  # seconds


@dataclass
class CellOutcome:
    """How a run of cells ended."""

    left: list[Cell] = field(default_factory=list)
    """Cells not started when the time was up."""
    failed: dict[str, str] = field(default_factory=dict)


class Queue(Protocol):
    """Cells to measure, and where their rows go."""

    pause: float | None
    """After how many seconds without a row `tend` is called again; None: never."""

    def take(self) -> Cell | None:
        """The next cell; None if no further one is to be started."""

    def done(self, cell: Cell, row: dict[str, Any]) -> None:
        """Keep the row of a cell."""

    def failed(self, cell: Cell, reason: str) -> None:
        """Note why a cell has no row."""

    def tend(self) -> None:
        """Look after the other ranks."""

    def finish(self) -> CellOutcome:
        """Wait until all cells that were started have ended, anywhere."""


class OwnQueue:
    """The cells of a single process; none is started after the deadline."""

    pause: float | None = None

    def __init__(self, cells: list[Cell], keep: Keep, deadline: float) -> None:
        self._cells, self._keep, self._deadline = list(cells), keep, deadline
        self._failed: dict[str, str] = {}

    def take(self) -> Cell | None:
        """See `Queue`."""
        return self._cells.pop(0) if self._cells and time.monotonic() < self._deadline else None

    def done(self, cell: Cell, row: dict[str, Any]) -> None:
        """See `Queue`."""
        self._keep(cell, row)

    def failed(self, cell: Cell, reason: str) -> None:
        """See `Queue`."""
        self._failed[cell.name] = reason

    def tend(self) -> None:
        """See `Queue`."""

    def finish(self) -> CellOutcome:
        """See `Queue`."""
        return CellOutcome(self._cells, self._failed)


class RanksQueue:
    """The cells that ranks share, which all of them list in the same order. Rank 0 keeps every row."""

    pause: float | None = _PAUSE

    def __init__(self, ranks: Ranks, cells: list[Cell], keep: Keep, deadline: float) -> None:
        self._ranks, self._cells, self._keep, self._deadline = ranks, cells, keep, deadline
        self._store = store_of_job()
        self._waiting = set(range(len(cells)))
        self._failed: dict[str, str] = {}
        watched = range(1, ranks.size) if ranks.leads else range(1)
        self._heard = {rank: (0, time.monotonic()) for rank in watched}

    def take(self) -> Cell | None:
        """See `Queue`."""
        if time.monotonic() >= self._deadline:
            return None
        with _connected():
            number = self._store.add("cells/next", 1) - 1
            return self._cells[number] if number < len(self._cells) else None

    def done(self, cell: Cell, row: dict[str, Any]) -> None:
        """See `Queue`."""
        self._tell(cell, {"row": row})

    def failed(self, cell: Cell, reason: str) -> None:
        """See `Queue`."""
        self._tell(cell, {"failed": reason})

    def tend(self) -> None:
        """Say that this rank is there, and hear the others; rank 0 keeps the rows that have come."""
        with _connected():
            self._ranks.heed()
            self._store.add(f"cells/alive/{self._ranks.rank}", 1)
            for rank, (last, when) in self._heard.items():
                if (count := self._store.add(f"cells/alive/{rank}", 0)) != last:
                    self._heard[rank] = count, time.monotonic()
                elif time.monotonic() - when > SILENCE:
                    raise LostRankError(f"rank {rank} has been silent for {SILENCE:.0f} seconds, so this job ends")
            ended = [number for number in self._waiting if self._ranks.leads and self._store.check([f"cells/{number}"])]
            told = {number: json.loads(self._store.get(f"cells/{number}")) for number in ended}
        for number, outcome in told.items():
            self._waiting.remove(number)
            if "row" in outcome:
                self._keep(self._cells[number], outcome["row"])
            else:
                self._failed[self._cells[number].name] = outcome["failed"]

    def finish(self) -> CellOutcome:
        """See `Queue`. The other ranks wait for rank 0, which has all rows."""
        with _connected():
            finished = self._store.add("cells/finished", 1)
        while finished < self._ranks.size:
            time.sleep(_PAUSE)
            self.tend()
            with _connected():
                finished = self._store.add("cells/finished", 0)
        self.tend()
        return CellOutcome([self._cells[number] for number in sorted(self._waiting)], self._failed)

    def _tell(self, cell: Cell, outcome: dict[str, Any]) -> None:
        with _connected():
            self._store.set(f"cells/{self._cells.index(cell)}", json.dumps(outcome))


@contextmanager
def _connected() -> Iterator[None]:
    """Say in a sentence that the store is gone, which ends with the process that serves it."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError("the connection to rank 0 was lost, so this job ends") from error
