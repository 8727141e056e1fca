"""Running cells: several at a time in processes of their own, each kept as soon as it is done.

A stop (Ctrl-C, SIGTERM, the time limit) loses nothing that is finished; after kill -9 the workers end by themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for_end
from types import FrameType
from typing import Any

from fedcdp.errors import FedcdpError, StoppedError
from fedcdp.studies.reproduce.catalogue import Cell
from fedcdp.studies.reproduce.cells import measure
from fedcdp.studies.reproduce.place import Place

Keep = Callable[[Cell, dict[str, Any]], None]


@dataclass
class CellOutcome:
    """How a run of cells ended."""

    left: list[Cell] = field(default_factory=list)
    """Not begun when the time was up."""
    failed: dict[str, str] = field(default_factory=dict)


def run(table: str, cells: list[Cell], place: Place, keep: Keep, workers: int, seconds: float) -> CellOutcome:
    """Measure cells in this order; none is begun once so many `seconds` have passed, and those that are begun are ended.

    A cell that fails does not hold up the others.
    """
    deadline = time.monotonic() + seconds
    with _stopped_by_sigterm():
        if workers == 1 or len(cells) <= 1:
            return _one_by_one(table, cells, place, keep, deadline)
        return _side_by_side(table, cells, place, keep, min(workers, len(cells)), deadline)


def _one_by_one(table: str, cells: list[Cell], place: Place, keep: Keep, deadline: float) -> CellOutcome:
    outcome = CellOutcome()
    for number, cell in enumerate(cells):
        if time.monotonic() >= deadline:
            outcome.left = cells[number:]
            break
        try:
            row = measure(table, cell, place)
        except StoppedError:
            raise
        except Exception as error:
            outcome.failed[cell.name] = _in_words(error)
        else:
            keep(cell, row)
    return outcome


def _side_by_side(table: str, cells: list[Cell], place: Place, keep: Keep, workers: int, deadline: float) -> CellOutcome:
    outcome, waiting = CellOutcome(), list(cells)
    running: dict[Future[dict[str, Any]], Cell] = {}
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker)
    try:
        while waiting or running:
            while waiting and len(running) < workers and time.monotonic() < deadline:
                cell = waiting.pop(0)
                running[pool.submit(measure, table, cell, place)] = cell
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(done)
                try:
                    row = done.result()
                except BrokenProcessPool:
                    raise StoppedError("a worker process was ended from outside; the same command goes on") from None
                except Exception as error:
                    outcome.failed[cell.name] = _in_words(error)
                else:
                    keep(cell, row)
    finally:
        pool.shutdown(wait=not running, cancel_futures=True)
        if running:  # stopped: what they were at is lost, but for the rounds that a training has on disk
            for process in multiprocessing.active_children():
                process.terminate()
    outcome.left = waiting
    return outcome


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, FedcdpError) else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _begin_worker() -> None:
    """Ctrl-C is the parent's to deal with; if the parent is killed, nobody is left to work for."""
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
