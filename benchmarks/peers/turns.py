"""Taking turns: contestants run one at a time, in processes that wait for each other. Needs nothing but Python."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

LEAST_SECONDS = 2.0
"""Approximate duration of a turn, for contestants that train one client at a time."""


@dataclass(frozen=True)
class Task:
    """The task of all contestants: clients of a federation, with random inputs and a mechanism and sizes of the paper."""

    name: str
    dataset: str
    network: str
    """`cnn` or `mlp`, as in `fedcdp.models.networks`."""
    shape: tuple[int, ...]
    classes: int
    batch_size: int
    local_steps: int
    per_round: int
    """Clients per round, for contestants that train several at once."""
    clip: float = 4.0
    noise_multiplier: float = 6.0
    learning_rate: float = 1e-3
    device: str = "cpu"
    mechanism: str = "fed-cdp"
    """`fed-cdp`, `nonprivate`, or `fed-sdp` with its noise at the client; for contestants that support several."""
    way: str = ""
    """For a peer with several implementations: which one; the fastest by default."""
    machine: dict[str, Any] = field(default_factory=dict)
    """For fedcdp alone: its settings of the section `run`."""

    @property
    def records(self) -> int:
        """Number of records of a client: those of a round's steps, each used once."""
        return self.batch_size * self.local_steps

    @staticmethod
    def read(written: str) -> Task:
        """The task in JSON, as `fedcdp bench` writes it."""
        content: dict[str, Any] = json.loads(written)
        return Task(**content | {"shape": tuple(content["shape"])})


class NotPossibleError(Exception):
    """A contestant cannot run the task here; the text says why."""


class Turns:
    """A contestant's connection to its caller: one line of JSON each way per turn."""

    def __init__(self, told: TextIO, asked: TextIO) -> None:
        self._told, self._asked = told, asked

    def ready(self, version: str, note: str = "") -> None:
        """Report that everything is warm; `note` is shown with the result."""
        self._say({"ready": True, "version": version, "note": note})

    def wait(self) -> None:
        """Wait for this contestant's turn. When there are no more turns, the process ends."""
        if not self._asked.readline():
            sys.exit(0)

    def done(self, seconds: float, processor: float | None, steps: int) -> None:
        """Answer a turn: the time that `steps` client steps took, and their CPU time."""
        self._say({"seconds": seconds / steps, "cpu": None if processor is None else processor / steps})

    def serve(self, round_: Callable[[], int], elsewhere: bool = False) -> None:
        """Answer every turn with a call of `round_`, which returns the number of its client steps.

        `elsewhere` means that other processes do the work, so the CPU time is unknown.
        """
        while True:
            self.wait()
            wall, processor = time.perf_counter(), time.process_time()
            steps = round_()
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            self.done(wall, None if elsewhere else processor, steps)

    def after_every_round(self, steps: int, version: str, note: str = "") -> Callable[[], None]:
        """The callback for a library that calls back after every round of `steps` client steps; the first round warms up."""
        begun: list[tuple[float, float]] = []

        def tell_and_wait() -> None:
            if begun:
                wall, processor = time.perf_counter() - begun[-1][0], time.process_time() - begun[-1][1]
                self.done(wall, processor, steps)
            else:
                self.ready(version, note)
            self.wait()
            begun.append((time.perf_counter(), time.process_time()))

        return tell_and_wait

    def missing(self, why: str) -> None:
        """Report that there will be no answer."""
        self._say({"missing": why})

    def _say(self, what: dict[str, Any]) -> None:
        print(json.dumps(what), file=self._told, flush=True)


def clients_a_turn(task: Task, seconds_a_step: float) -> int:
    """The number of clients, one at a time, that make a turn long enough to be timed."""
    return max(1, round(LEAST_SECONDS / (seconds_a_step * task.local_steps)))


def seconds_of(call: Callable[[], object], times: int = 1) -> float:
    """The minimum time of a call."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return min(taken)
