"""Measure a client step: the time of whole rounds of the simulator itself, and peak memory.

A case is trained for a warm-up round and then for one measured round (on a GPU, three). The cases of a comparison take
turns, so other load on the machine affects all of them alike. A figure is the median of its rounds, with minimum and
maximum. The inputs are a benchmark if its files are available, else random values of its size and shape: speed does not
depend on the values, and every result says which was used.

Memory is measured in a separate process, because a process cannot reset its peak:

    python -m fedcdp.studies.bench.measurement < case.json
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from fedcdp.config.experiment import Experiment, MachineSettings, assemble
from fedcdp.config.presets import BENCHMARKS, preset
from fedcdp.data import load
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.engine.runtime import wait
from fedcdp.errors import DataError, DefectError
from fedcdp.training.rundir import Row
from fedcdp.training.trainer import train_experiment

DataKind = Literal["real", "synthetic"]

# Input shape and classes of the paper's benchmarks (Table "Benchmark datasets and parameters").
_SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "lfw": ((3, 32, 32), 62),
    "adult": ((105,), 2),
    "cancer": ((30,), 2),
}


@dataclass(frozen=True)
class BenchData:
    """A dataset to train on, and whether it is the real one."""

    name: str
    splits: Splits
    data: DataKind


def subject(name: str, data_dir: Path | str | None = None) -> BenchData:
    """The benchmark `name` if its files are available (nothing is downloaded), else a synthetic one of its shape."""
    try:
        return BenchData(name, load(name, data_dir, download=False, quiet=True), "real")
    except (DataError, ImportError):
        return synthetic(name)


def synthetic(name: str) -> BenchData:
    """As many random inputs as the benchmark `name` has, with its shape and number of classes."""
    shape, classes = _SHAPES[name]
    examples = BENCHMARKS[name].train
    inputs = torch.rand(examples, *shape, generator=torch.Generator().manual_seed(0))
    train = Dataset(inputs, torch.arange(examples) % classes, classes)
    validation = train.take(torch.arange(classes))
    return BenchData(name, Splits(name, train, validation, None, "random values from 0 to 1"), "synthetic")


def shape_of(name: str) -> tuple[tuple[int, ...], int]:
    """The shape of an input and the number of classes of a benchmark."""
    return _SHAPES[name]


Report = Callable[[str], None]

# A training this long chooses its engine and chunk by measurement, as a real one does; only its first rounds are run.
_ROUNDS_OF_A_LONG_TRAINING = 10_000
_ROUNDS_A_VISIT = {"cuda": 3}  # rounds are short there, compared with the start-up
_MICRO = 1e6


@dataclass(frozen=True)
class Case:
    """One configuration to time: a benchmark in the paper's setting, with some changes."""

    name: str
    subject: BenchData
    machine: MachineSettings
    plan: dict[str, Any] = field(default_factory=dict)
    clients: int = 1000
    """Total number of clients, K."""

    def experiment(self, local_steps: int) -> Experiment:
        """The long training whose first rounds are timed, without evaluation."""
        return assemble(
            preset(self.subject.name),
            {
                "data": {"clients": self.clients},
                "plan": self.plan | {"local_steps": local_steps, "rounds": _ROUNDS_OF_A_LONG_TRAINING},
                "run": vars(self.machine) | {"evaluate_every": _ROUNDS_OF_A_LONG_TRAINING},
            },
        )

    @property
    def longest(self) -> int:
        """The number of local steps of a round in the paper's setting, L."""
        return int(preset(self.subject.name)["plan"]["local_steps"])


@dataclass(frozen=True)
class Visit:
    """One visit to a case: a warm-up round, and measured rounds."""

    start_up: float
    """Seconds from the settings to the end of the first round, minus an ordinary round."""
    rounds: list[float]
    """Seconds of each measured round."""
    processor: list[float]
    """CPU seconds of each measured round: its duration on an otherwise idle machine."""
    peak_bytes: int | None
    """Peak GPU memory; None on a CPU, where only a separate process can measure it."""
    trained_by: dict[str, Any]
    """The engine used, and its chunk size."""


def visit(case: Case, local_steps: int, rounds: int = 1) -> Visit:
    """Train a case for a warm-up round and `rounds` more, including all overhead."""
    device = torch.device(case.machine.device)
    ends: list[float] = []
    processor: list[float] = []

    def note_end(_: Row) -> None:
        wait(device)
        ends.append(time.perf_counter())
        processor.append(time.process_time())

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    experiment = case.experiment(local_steps)
    run = train_experiment(experiment, None, splits=case.subject.splits, most_releases=1 + rounds, progress=note_end)
    seconds, busy = ([after - before for before, after in pairwise(times)] for times in (ends, processor))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Visit(
        max(0.0, ends[0] - started - statistics.median(seconds)),
        seconds,
        busy,
        peak,
        {"trained_by": run.engine, "chunk": run.chunk},
    )


@dataclass(frozen=True)
class Timing:
    """The measured rounds of a case."""

    local_steps: int
    client_steps: int
    """Local iterations in one round, over all its clients."""
    seconds: list[float]
    processor: list[float]
    start_up: float
    peak_bytes: int | None
    trained_by: dict[str, Any]

    def figures(self) -> dict[str, Any]:
        """Microseconds per client step, the same in CPU time, and the measured rounds."""
        return {
            "us_per_client_step": spread([_MICRO * each / self.client_steps for each in self.seconds]),
            "cpu_us_per_client_step": spread([_MICRO * each / self.client_steps for each in self.processor]),
            "local_steps": self.local_steps,
            "seconds_a_round": statistics.median(self.seconds),
        } | self.trained_by


def compare(cases: Sequence[Case], repeat: int, seconds: float, report: Report, fewest: int = 1) -> list[Timing]:
    """Time cases in turn, `repeat` times each; all with the same number of local steps per round.

    That number makes a round of the last case, the most expensive, take about `seconds`; it is at least `fewest` and at most
    the paper's. A GPU is not shared meanwhile, and compiling a program for it takes longer than timing it: on a GPU, a case
    runs all its rounds in one visit, with the paper's number of local steps.
    """
    if torch.device(cases[0].machine.device).type == "cuda":
        return [_on_gpu(case, repeat, report) for case in cases]
    local_steps = max(fewest, _steps_that_take(seconds, cases[-1], report))
    visits: list[list[Visit]] = [[] for _ in cases]
    for turn in range(repeat):
        for case, seen in zip(cases, visits, strict=True):
            report(f"{case.name} ({turn + 1} of {repeat})")
            seen.append(visit(case, local_steps, _ROUNDS_A_VISIT.get(torch.device(case.machine.device).type, 1)))
    return [_timing(case, local_steps, seen) for case, seen in zip(cases, visits, strict=True)]


def _on_gpu(case: Case, repeat: int, report: Report) -> Timing:
    report(case.name)
    return _timing(case, case.longest, [visit(case, case.longest, rounds=repeat)])


def _steps_that_take(seconds: float, case: Case, report: Report) -> int:
    """The number of local steps that make a round take about `seconds`, at least one and at most the paper's."""
    report(f"{case.name}: estimating the time of a step")
    steps = 1
    while True:
        # The fixed cost of a round weighs less with more steps, so an estimate from a few steps gives too few.
        afforded = max(1, min(case.longest, round(seconds / min(visit(case, steps).rounds) * steps)))
        if afforded <= 2 * steps:
            return afforded
        steps = afforded


def _timing(case: Case, local_steps: int, visits: list[Visit]) -> Timing:
    peaks = [each.peak_bytes for each in visits if each.peak_bytes is not None]
    return Timing(
        local_steps,
        case.experiment(local_steps).plan.per_round * local_steps,
        [seconds for each in visits for seconds in each.rounds],
        [seconds for each in visits for seconds in each.processor],
        min(each.start_up for each in visits),
        max(peaks) if peaks else None,
        visits[-1].trained_by,
    )


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """The median of some samples with minimum and maximum, and the samples."""
    rounded = [float(f"{each:.5g}") for each in samples]
    return {"median": statistics.median(rounded), "least": min(rounded), "most": max(rounded), "samples": rounded}


def ratio(samples: Sequence[float], of: Sequence[float]) -> dict[str, Any]:
    """How many times as long: over the pairs that were measured one after the other."""
    return spread([a / b for a, b in zip(samples, of, strict=True)])


_MIB = 2**20
_UNIT = 1 if sys.platform == "darwin" else 2**10  # unit of ru_maxrss


def peak_mib(case: Case, local_steps: int) -> dict[str, float]:
    """Peak memory of a process in MiB, and before training: with only the libraries and the (synthetic) data."""
    asked = {
        "dataset": case.subject.name,
        "machine": vars(case.machine),
        "plan": case.plan,
        "clients": case.clients,
        "local_steps": local_steps,
    }
    done = subprocess.run(
        [sys.executable, "-m", "fedcdp.studies.bench.measurement"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        raise DefectError(f"the memory of {case.name} could not be measured: {done.stderr.strip().rpartition(chr(10))[2]}")
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def _own_peak() -> float:
    # Linux includes the parent's memory in a child's ru_maxrss, but not in this value.
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) / 2**10, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT / _MIB, 1)


def _answer(asked: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(1)
    subject, machine = synthetic(asked["dataset"]), MachineSettings(**asked["machine"])
    before = _own_peak()
    visit(Case("memory", subject, machine, asked["plan"], asked["clients"]), asked["local_steps"])
    return {"before_mib": before, "peak_mib": _own_peak()}


if __name__ == "__main__":
    print(json.dumps(_answer(json.load(sys.stdin))))
