"""The measured sections: one generator each, which yields the rows of a comparison as soon as it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch

from fedcdp.config.experiment import EngineName, MachineSettings
from fedcdp.errors import FedcdpError
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.studies.bench import measurement
from fedcdp.studies.bench.measurement import BenchData, Case, Report, Timing, compare, ratio, subject, visit
from fedcdp.studies.bench.result_file import Rows, load_average
from fedcdp.studies.bench.tables import DATASETS, METHODS, printed_ms
from fedcdp.training.prepared import deal_out

PER_ROUND = (100, 200, 500, 1000, 2000, 5000)
BATCH_SIZE = (1, 2, 5, 10, 20, 50)
CLIENTS = ((100, 100), (1000, 100), (10_000, 100), (100_000, 100), (1_000_000, 100), (1_000_000, 1000))
"""Total number of clients, and number per round."""

_USUAL_PER_ROUND = {"cpu": 100, "cuda": 500}  # the paper's, and enough to fill a GPU
_FEDERATION = 5000  # clients, if the number per round varies; few enough to get their records in the first rounds
_FEWEST_STEPS = 5  # per round, to keep its fixed cost from being attributed to the steps
_MIB = 2**20

Value = TypeVar("Value")


@dataclass(frozen=True)
class Bench:
    """Settings of a bench."""

    machine: MachineSettings
    data_dir: Path | None = None
    repeat: int = 3
    quick: bool = False
    seconds: float = 1.0
    """Approximate duration of a measured round."""
    clients_a_round: int | None = None

    @property
    def per_round(self) -> int:
        """Clients per round, in sections that do not vary it."""
        return self.clients_a_round or _USUAL_PER_ROUND.get(torch.device(self.machine.device).type, 100)

    def case(self, name: str, dataset: str, **plan: Any) -> Case:
        """The paper's setting for a dataset, with these changes and the bench's clients per round."""
        plan = {"per_round": self.per_round} | plan
        return Case(name, _loaded(dataset, self.data_dir), self.machine, plan, max(1000, plan["per_round"]))

    def compare(self, cases: Sequence[Case], report: Report, fewest_steps: int = _FEWEST_STEPS) -> list[Timing]:
        """Time cases in turn."""
        return compare(cases, self.repeat, self.seconds, report, fewest_steps)

    def some(self, values: Sequence[Value], few: int) -> Sequence[Value]:
        """All values; in a quick bench, the first few."""
        return values[:few] if self.quick else values


@lru_cache(maxsize=1)  # image datasets are large
def _loaded(name: str, data_dir: Path | None) -> BenchData:
    return subject(name, data_dir)


def steps(bench: Bench, report: Report) -> Iterator[Rows]:
    """A client step of the five datasets under the four methods, with the paper's figure and the cost of privacy."""
    for dataset in bench.some(DATASETS, 1):
        cases = [bench.case(f"{dataset}, {method}", dataset, method=method) for method in METHODS]
        rows = [_row(case, timing) for case, timing in zip(cases, bench.compare(cases, report), strict=True)]
        for row in rows:
            row["paper_us"] = 1000 * printed_ms(dataset, row["method"])
            row["times_nonprivate"] = _times(row, rows[0])
        yield rows


def engines(bench: Bench, report: Report) -> Iterator[Rows]:
    """Compare the engines: Fed-CDP on a convolutional and on a dense network."""
    for dataset in bench.some(("mnist", "adult"), 1):
        able: list[Case] = []
        for engine in (name for name in get_args(EngineName) if name != "auto"):
            case = bench.case(f"{dataset}, {engine} engine", dataset)
            case = replace(case, machine=replace(case.machine, engine=engine))
            report(f"{case.name}: a first step")
            try:
                used = visit(case, 1).trained_by["trained_by"]
            except FedcdpError as reason:
                yield [_about(case) | {"missing": str(reason)}]
                continue
            if used == engine:
                able.append(case)
            else:
                yield [_about(case) | {"missing": f"trained by {used}"}]
        rows = [_row(case, timing) for case, timing in zip(able, bench.compare(able, report), strict=True)]
        for row in rows:
            row["times_first"] = _times(row, rows[0])
        yield rows


def sampling(bench: Bench, report: Report) -> Iterator[Rows]:
    """Poisson batches, with three slots for every expected example, compared with batches of a fixed size."""
    cases = [bench.case(f"mnist, {kind}", "mnist", record_sampling=kind) for kind in ("partition", "poisson")]
    rows = [_row(case, timing) for case, timing in zip(cases, bench.compare(cases, report), strict=True)]
    for row in rows:
        row["times_partition"] = _times(row, rows[0])
    yield rows


def growth(bench: Bench, report: Report) -> Iterator[Rows]:
    """MNIST Fed-CDP with more clients per round, larger batches, and more clients in total."""
    counts = bench.some(PER_ROUND, 2)
    cases = [replace(bench.case(f"K_t = {each}", "mnist", per_round=each), clients=_FEDERATION) for each in counts]
    yield _grown(bench, "per_round", cases, report)
    sizes = bench.some(BATCH_SIZE, 3)
    yield _grown(bench, "batch_size", [bench.case(f"B = {each}", "mnist", batch_size=each) for each in sizes], report)
    # One at a time: federations grow here, and the other cases should not pay for a million clients.
    for clients, per_round in bench.some(CLIENTS, 2):
        case = replace(bench.case(f"K = {clients}, K_t = {per_round}", "mnist", per_round=per_round), clients=clients)
        yield [row | _dealing(case) for row in _grown(bench, "clients", [case], report)]


def _grown(bench: Bench, along: str, cases: Sequence[Case], report: Report) -> Rows:
    rows = []
    for case, timing in zip(cases, bench.compare(cases, report, fewest_steps=1), strict=True):
        report(f"{case.name}: memory")
        peak = (
            measurement.peak_mib(case, timing.local_steps)
            if timing.peak_bytes is None
            else {"peak_mib": round(timing.peak_bytes / _MIB, 1)}
        )
        rows.append({"along": along} | _row(case, timing) | {"start_up_seconds": round(timing.start_up, 3)} | peak)
    return rows


def _dealing(case: Case) -> dict[str, float]:
    """Seconds to assign records to a round's clients, for the clients that no earlier round has drawn."""
    experiment = case.experiment(1)
    federation = deal_out(experiment, case.subject.splits)
    started = time.perf_counter()
    federation.table(choose_clients(experiment.plan, federation.clients, 0))
    return {"dealing_seconds": round(time.perf_counter() - started, 4)}


def _about(case: Case) -> dict[str, Any]:
    plan = case.experiment(1).plan
    return {
        "dataset": case.subject.name,
        "data": case.subject.data,
        "method": plan.method,
        "engine": case.machine.engine,
        "clients": case.clients,
        "per_round": plan.per_round,
        "batch_size": plan.batch_size,
        "record_sampling": plan.record_sampling,
        "slots": plan.slots,
    }


def _row(case: Case, timing: Timing) -> dict[str, Any]:
    return _about(case) | timing.figures() | {"load_average": load_average()}


def _times(row: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return ratio(row["us_per_client_step"]["samples"], other["us_per_client_step"]["samples"])


SECTIONS: dict[str, Callable[[Bench, Report], Iterator[Rows]]] = {
    "steps": steps,
    "engines": engines,
    "sampling": sampling,
    "growth": growth,
}
