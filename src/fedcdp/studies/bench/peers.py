"""The section `peers`: fedcdp and other libraries on the same task, one process each, taking turns on one thread.

The drivers, one file per contestant, are in `benchmarks/peers` of a checkout. They are not part of the installed package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcdp.config.presets import BENCHMARKS
from fedcdp.errors import DefectError, RunError
from fedcdp.studies.bench.measurement import Report, ratio, shape_of, spread
from fedcdp.studies.bench.result_file import Rows, load_average
from fedcdp.studies.bench.sections import Bench

DRIVERS = Path(__file__).resolve().parents[4] / "benchmarks" / "peers"
_MICRO = 1e6
_PATIENCE = 30  # seconds for a process to end by itself; one with child processes takes a few
# Every library's setting for a single thread. XLA reads NPROC for the size of its pool.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"), "1")
_ONE_THREAD["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

Task = dict[str, Any]
"""The task of all contestants, in plain values, as the drivers read it (`benchmarks/peers/turns.py`)."""

# Enough clients to fill a chunk; on a GPU, as many as in the other sections. A quick bench takes the first, which is cheap.
_TASKS = (("adult", "mlp", 256), ("mnist", "cnn", 32))


@dataclass(frozen=True)
class Contestant:
    """A library that trains a task, and its mechanism."""

    who: str
    module: str
    mechanism: str
    engine: str = ""
    """For fedcdp: the engine; by default, that of the settings."""
    way: str = ""
    """For a peer with several implementations: which one; the fastest by default."""
    peer: str | None = None
    """Whose interpreter it needs; None means this one."""

    @property
    def ours(self) -> bool:
        """Whether it is fedcdp."""
        return self.module == "fedcdp_simulator"


_OURS = (
    Contestant("fedcdp", "fedcdp_simulator", "fed-cdp"),
    Contestant("fedcdp, functional engine", "fedcdp_simulator", "fed-cdp", engine="functional"),
    Contestant("fedcdp, non-private", "fedcdp_simulator", "nonprivate"),
    Contestant("fedcdp, Fed-SDP", "fedcdp_simulator", "fed-sdp"),
)
_OTHERS = (
    Contestant("PyTorch loop, non-private", "torch_client", "nonprivate"),
    Contestant("Opacus", "opacus_client", "fed-cdp", peer="opacus", way="hooks"),
    Contestant("Opacus, its fastest way", "opacus_client", "fed-cdp", peer="opacus"),
    Contestant("Flower with Opacus clients", "flower_simulation", "fed-cdp", peer="flower"),
    Contestant("JAX, vmap over clients", "jax_vmap", "fed-cdp", peer="jax"),
    Contestant("FedJAX", "fedjax_clients", "fed-cdp", peer="fedjax"),
    Contestant("pfl-research, Fed-SDP", "pfl_simulation", "fed-sdp", peer="pfl"),
)
PEERS = tuple(dict.fromkeys(each.peer for each in _OTHERS if each.peer is not None))


def drivers() -> Path:
    """The folder of drivers; raises an error outside a checkout."""
    if not (DRIVERS / "worker.py").is_file():
        raise RunError("--section: peers needs the drivers in benchmarks/peers, which are only in a source checkout")
    return DRIVERS


def peers(bench: Bench, report: Report, interpreters: dict[str, str]) -> Iterator[Rows]:
    """A client step of fedcdp and of every peer that is available, here or in its interpreter."""
    for dataset, network, clients in bench.some(_TASKS, 1):
        shape, classes = shape_of(dataset)
        setting = BENCHMARKS[dataset]
        on_gpu = bench.machine.device.startswith("cuda")
        task = {
            "name": f"{dataset}, {network}, B = {setting.batch_size}, L = {setting.local_steps}",
            "dataset": dataset,
            "network": network,
            "shape": shape,
            "classes": classes,
            "batch_size": setting.batch_size,
            "local_steps": setting.local_steps,
            "per_round": bench.per_round if on_gpu else clients,
            "device": bench.machine.device,
            "machine": vars(bench.machine),
        }
        yield contest(task, (*_OURS, *_OTHERS), interpreters, bench.repeat, report)


def contest(
    task: Task, contestants: Sequence[Contestant], interpreters: dict[str, str], repeat: int, report: Report
) -> Rows:
    """The figures of all contestants, measured in turns; unavailable ones are listed with the reason."""
    with ExitStack() as stack:

        def prepared(each: Contestant) -> _Worker:
            report(f"{each.who}: preparing {task['dataset']}")
            machine = task.get("machine", {}) | ({"engine": each.engine} if each.engine else {})
            own_task = task | {"mechanism": each.mechanism, "way": each.way, "machine": machine}
            return stack.enter_context(_Worker(each, own_task, interpreters.get(each.peer or "", sys.executable)))

        others = [prepared(each) for each in contestants if not each.ours]
        comparable = {"fed-cdp", *(worker.contestant.mechanism for worker in others if worker.missing is None)}
        ours = [prepared(each) for each in contestants if each.ours and each.mechanism in comparable]
        for turn in range(repeat):
            for worker in (*ours, *others):
                if worker.missing is None:
                    report(f"{worker.contestant.who}, {task['dataset']} ({turn + 1} of {repeat})")
                    worker.take_turn()
        for worker in ours:
            if worker.missing is not None:
                raise DefectError(f"{worker.contestant.who} could not be measured: {worker.missing}")
        by_mechanism = {each.contestant.mechanism: each for each in reversed(ours)}
        return [_row(task, worker, by_mechanism) for worker in (*ours, *others)]


class _Worker:
    """The process of a contestant; it waits between its turns, and ends with the block."""

    def __init__(self, contestant: Contestant, task: Task, python: str) -> None:
        self.contestant = contestant
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.missing: str | None = None
        self.version = self.note = ""
        self._process = subprocess.Popen(
            [python, str(drivers() / "worker.py"), contestant.module, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | _ONE_THREAD,
        )

    def __enter__(self) -> _Worker:
        try:
            answer = self._answer()
        except BaseException:
            self._process.terminate()
            raise
        self.missing = answer.get("missing")
        self.version, self.note = answer.get("version", ""), answer.get("note", "")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # no more turns: the process ends
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()

    def take_turn(self) -> None:
        """Let it train, and wait for its result; a contestant that fails is out, with the reason."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("turn\n")
            self._process.stdin.flush()
        answer = self._answer()
        self.missing = answer.get("missing")
        if self.missing is None:
            self.seconds.append(answer["seconds"])
            if answer["cpu"] is not None:
                self.processor.append(answer["cpu"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return {"missing": f"its process ended with status {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer


def _row(task: Task, worker: _Worker, ours: dict[str, _Worker]) -> dict[str, Any]:
    about = {"task": task["name"], "who": worker.contestant.who, "mechanism": worker.contestant.mechanism}
    if worker.missing is not None:
        return about | {"missing": worker.missing}
    same = ours[worker.contestant.mechanism]
    figures = {
        "version": worker.version,
        "note": worker.note,
        "us_per_client_step": spread([_MICRO * each for each in worker.seconds]),
        "times_fedcdp": ratio(worker.seconds, same.seconds),
        "load_average": load_average(),
    }
    if worker.processor:  # unknown for a contestant that works in other processes
        figures["cpu_us_per_client_step"] = spread([_MICRO * each for each in worker.processor])
        figures["cpu_times_fedcdp"] = ratio(worker.processor, same.processor)
    return about | figures
