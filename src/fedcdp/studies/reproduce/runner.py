"""Run cells of any number of tables: several at a time in separate processes, each saved to disk as soon as it is done.

A stop (Ctrl-C, SIGTERM, the time limit) loses no finished cell; after kill -9 the workers end by themselves. The result file
of a table is complete after every cell. Trainings that several cells share are run once (`Trainings`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import wait as wait_for_end
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fedcdp._version import __version__
from fedcdp.errors import FedcdpError, PlanError, RunError, StoppedError
from fedcdp.files.disk import write_atomically
from fedcdp.files.untrusted import MOST_JSON, parse_json, read_bounded
from fedcdp.studies.reproduce import authors_release, tradeoff
from fedcdp.studies.reproduce.catalogue import Cell, Place, Table
from fedcdp.studies.reproduce.cells import (
    Rate,
    cost_of_attack,
    cost_of_training,
    measure_attack,
    measure_epsilons,
    measure_time,
    measure_training,
    rates_of,
    tuning_share,
)
from fedcdp.studies.reproduce.provenance import digest, provenance

FORMAT = "fedcdp-reproduction-1"


class TableResults:
    """The known results of a table.

    A cell measured under settings other than the table's current ones is not counted. It stays in the file, separately, and
    counts again if the table's settings change back.
    """

    def __init__(self, table: Table, out: Path) -> None:
        self.table = table
        self.path = out / f"{table.name}.json"
        stored = _read(self.path, table.name) if os.path.lexists(self.path) else {}
        self.cells = {name: row for name, row in stored.items() if self._fits(name, row)}
        self.stale = {name: row for name, row in stored.items() if name not in self.cells}

    def missing(self, cells: Iterable[Cell], again: bool = False) -> list[Cell]:
        """The cells that are still to be measured; with `again`, also those measured on older code."""
        older = self.on_older_code if again else ()
        return [cell for cell in cells if cell.name not in self.cells or cell.name in older]

    @property
    def on_older_code(self) -> list[str]:
        """The measured cells whose source files have changed since."""
        measured = [cell for cell in self.table.cells.values() if cell.name in self.cells]
        return [cell.name for cell in measured if self.cells[cell.name].get("code") != digest(cell.kind)]

    def keep(self, cell: Cell, row: dict[str, Any]) -> None:
        """Add a cell; it is on disk when this returns."""
        self.cells[cell.name] = row
        self.stale.pop(cell.name, None)
        self.write()

    def write(self, sections: list[dict[str, Any]] | None = None) -> None:
        """Write the file: the cells in the table's order, and their sections, if given."""
        ordered = {name: self.cells[name] for name in self.table.cells if name in self.cells}
        content: dict[str, Any] = {"format": FORMAT, "table": self.table.name, "title": self.table.title}
        if sections is not None:
            content["sections"] = sections
        content["cells"] = ordered
        if self.stale:
            content["other_settings"] = self.stale
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        self.write_beside(".json", text.encode() + b"\n")

    def write_beside(self, suffix: str, content: bytes) -> Path:
        """Write a file with the table's name and another suffix."""
        path = self.path.with_suffix(suffix)
        try:
            write_atomically(path, content)
        except OSError as error:
            raise RunError(f"--out: {path} cannot be written: {error.strerror}") from error
        return path

    def _fits(self, name: str, row: dict[str, Any]) -> bool:
        cell = self.table.cells.get(name)
        return cell is not None and row.get("settings") == json.loads(json.dumps(cell.settings))


def _read(path: Path, table: str) -> dict[str, dict[str, Any]]:
    try:
        content = parse_json(read_bounded(path, MOST_JSON))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("table") != table:
        raise RunError(f"{path} is not a result file of fedcdp reproduce {table}")
    parts = [content.get("other_settings", {}), content.get("cells")]
    if not all(_is_plain(part) and all(isinstance(row, dict) for row in part.values()) for part in parts):
        raise RunError(f"{path} is damaged: its cells are not valid measurements")
    return {**parts[0], **parts[1]}


def _is_plain(value: object) -> bool:
    """Whether this is a table of plain values that can be written back."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


@dataclass(frozen=True)
class CellTask:
    """A cell that is to be measured for its table."""

    results: TableResults
    cell: Cell

    @property
    def name(self) -> str:
        """The names of the table and the cell."""
        return f"{self.results.table.name}: {self.cell.name}"

    @property
    def alone(self) -> bool:
        """Whether nothing else may run at the same time."""
        return bool(self.results.table.content.get("alone"))

    @cached_property
    def training(self) -> str | None:
        """What is trained, if nothing but its accuracy is asked for."""
        plain = self.cell.kind == "training" and "curves" not in self.cell.settings
        return _key(self.cell, rates_of(self.cell)) if plain else None

    @cached_property
    def clients(self) -> int:
        """The clients that it trains at a time."""
        return self.cell.experiment().plan.per_round if self.cell.kind in _TRAINED else 0


class Trainings:
    """Rows of finished trainings: a training that several cells ask for is run once.

    The same means: data, network, plan, learning rate and how it was chosen, and splits; with `again`, also the code.
    """

    def __init__(self, known: Iterable[TableResults], again: bool = False) -> None:
        self._rows: dict[str, tuple[str, dict[str, Any]]] = {}
        for results in known:
            older = results.on_older_code if again else ()
            for name, row in results.cells.items():
                if name not in older:
                    self.add(CellTask(results, results.table.cells[name]), row)

    def add(self, task: CellTask, row: dict[str, Any]) -> None:
        """Note what a row may stand for: the choice among its rates, and the training at the chosen rate."""
        if task.cell.kind == "training":
            plain = {key: value for key, value in row.items() if key != "curves"}
            for rates in (rates_of(task.cell), [row["rate"]]):
                self._rows.setdefault(_key(task.cell, rates), (task.name, plain))

    def row_of(self, task: CellTask) -> dict[str, Any] | None:
        """The row of the same training, which names its origin; None if there is none."""
        if task.training not in self._rows:
            return None
        origin, row = self._rows[task.training]
        return {"taken_from": origin} | row | {"settings": task.cell.settings}


def _key(cell: Cell, rates: list[Rate]) -> str:
    experiment = cell.experiment({"plan": {"learning_rate": rates[0]}})
    told = {
        "data": vars(experiment.data),
        "model": vars(experiment.model),
        "plan": experiment.plan.written() | {"learning_rate": [str(rate) for rate in rates]},
        "splits": cell.settings.get("splits", 1),
        "tuning": tuning_share(cell) if len(rates) > 1 else None,
    }
    return json.dumps(told, sort_keys=True)


@dataclass
class Campaign:
    """Tasks to be run in this order, and how they end."""

    tasks: list[CellTask]
    place: Place
    trainings: Trainings
    tell: Callable[[CellTask, dict[str, Any] | str], None]
    """Called for every cell that ends, with its row, or with the reason why it failed."""
    left: list[CellTask] = field(default_factory=list)
    """Tasks not started when the time was up."""
    failed: dict[str, str] = field(default_factory=dict)

    def run(self, workers: int, seconds: float) -> None:
        """Measure; no cell is started after `seconds`, and those that were started are finished.

        A cell that fails does not stop the others. Cells that may not share the machine are measured first.
        """
        deadline = time.monotonic() + seconds
        self.left = self._without_known(sorted(self.tasks, key=lambda task: not task.alone))
        with _stopped_by_sigterm():
            while self.left and (workers == 1 or self.left[0].alone) and time.monotonic() < deadline:
                self._measure_here(self.left.pop(0))
            if self.left and time.monotonic() < deadline:
                self._side_by_side(min(workers, len(self.left)), deadline)

    def _measure_here(self, task: CellTask) -> None:
        try:
            row = measure(task.results.table.name, task.cell, self.place)
        except StoppedError:
            raise
        except Exception as error:
            self._fail(task, error)
        else:
            self._keep(task, row)

    def _side_by_side(self, workers: int, deadline: float) -> None:
        running: dict[Future[dict[str, Any]], CellTask] = {}
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker)
        try:
            while True:
                while len(running) < workers and time.monotonic() < deadline:
                    task = next((each for each in self.left if self._may_join(each, running.values())), None)
                    if task is None:
                        break
                    self.left.remove(task)
                    running[pool.submit(measure, task.results.table.name, task.cell, self.place)] = task
                if not running:
                    break
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    task = running.pop(done)
                    try:
                        row = done.result()
                    except BrokenProcessPool:
                        raise StoppedError("a worker process was killed; run the same command to continue") from None
                    except Exception as error:
                        self._fail(task, error)
                    else:
                        self._keep(task, row)
        finally:
            pool.shutdown(wait=not running, cancel_futures=True)
            if running:  # stopped: unfinished work is lost, except for rounds that a training has on disk
                for process in multiprocessing.active_children():
                    process.terminate()

    def _may_join(self, task: CellTask, running: Collection[CellTask]) -> bool:
        """Not while the same training is under way, nor if a GPU is full: its cells would only slow each other down."""
        if task.training is not None and any(task.training == each.training for each in running):
            return False
        full = torch.device(self.place.device).type == "cuda" and sum(each.clients for each in running) >= _FULL
        return not (full and task.clients)

    def _without_known(self, tasks: list[CellTask]) -> list[CellTask]:
        """The tasks that are left once those whose training is known have its row."""
        left = []
        for task in tasks:
            if (row := self.trainings.row_of(task)) is None:
                left.append(task)
            else:
                self.tell(task, row)
        return left

    def _keep(self, task: CellTask, row: dict[str, Any]) -> None:
        self.tell(task, row)
        self.trainings.add(task, row)
        self.left = self._without_known(self.left)

    def _fail(self, task: CellTask, error: Exception) -> None:
        self.failed[task.name] = _in_words(error)
        self.tell(task, self.failed[task.name])


_FULL = 3_000  # clients in training at the same time; a GPU takes as long for twice as many one after the other
_TRAINED = ("training", "release", "tradeoff")


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, FedcdpError) else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _begin_worker() -> None:
    """The parent handles Ctrl-C; if the parent is killed, the worker ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=lambda: (wait_for_end([sentinel]), os._exit(1)), daemon=True).start()


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise StoppedError("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# How a cell is measured, by its kind

Measure = Callable[[str, Cell, Place], dict[str, Any]]


def measure(table: str, cell: Cell, place: Place) -> dict[str, Any]:
    """A cell's row of the result file: the result, its command, the machine, and the duration."""
    check_kind(cell)
    torch.set_num_threads(1)
    started = time.perf_counter()
    found = KINDS[cell.kind](table, cell, place)
    about = {"machine": place.machine(), "fedcdp": __version__, "run": place.run, "settings": cell.settings}
    seconds = {"seconds": round(time.perf_counter() - started, 2)}
    return found | seconds | about | provenance(cell.kind, place.commit)


def cost(cell: Cell) -> float:
    """A cell's work relative to others of its table; determines the order in which they are run."""
    check_kind(cell)
    return _COST[cell.kind](cell) if cell.kind in _COST else 0.0


def check_kind(cell: Cell) -> None:
    """Raise for a cell of an unknown kind."""
    if cell.kind not in KINDS:
        raise PlanError(f"{cell.name}: kind: {cell.kind!r} is not one of {', '.join(KINDS)}")


KINDS: dict[str, Measure] = {
    "training": measure_training,
    "attack": measure_attack,
    "epsilon": measure_epsilons,
    "time": measure_time,
    "tradeoff": tradeoff.measure,
    "release": authors_release.measure,
}
"""The measuring function of each kind."""

_COST: dict[str, Callable[[Cell], float]] = {
    "training": cost_of_training,
    "attack": cost_of_attack,
    "tradeoff": cost_of_training,
    "release": cost_of_training,
}
