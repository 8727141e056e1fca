"""Autotuning: choose the fastest engine and number of clients at once for a training on this machine.

A measurement is stored in the user's cache, under everything that it may depend on. An unreadable entry is ignored and
measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import get_args

import torch

from fedcdp.config.experiment import EngineName
from fedcdp.config.plan import Plan
from fedcdp.engine.base import Engine
from fedcdp.engine.batched import BatchedEngine
from fedcdp.files.disk import user_cache, write_atomically
from fedcdp.files.tree import tensors_in
from fedcdp.files.untrusted import MOST_SETTINGS, parse_json, read_bounded
from fedcdp.methods import METHODS
from fedcdp.training.local_engines import (
    CompiledEngine,
    Examples,
    KernelEngine,
    LocalEngine,
    StepwiseEngine,
    most_clients,
    refusal,
    usual_chunk,
)

_LOG = logging.getLogger("fedcdp")
_LONG = 20_000  # client steps; a shorter training ends before a measurement pays off
_WORTH_COMPILING = 60.0  # seconds of training; compiling a program takes about twenty
_GAIN_OF_COMPILING = 0.55  # approximate share of the time; compiling only to measure could take longer than it saves
_WORTH_A_KERNEL = 20.0  # seconds of training; compiling a kernel takes up to ten
_CHUNKS = {"cpu": (16, 8, 4, 64, 256), "cuda": (512, 128, 2048, 8192)}  # a search starts at the first
_RULES = 3  # increment when a change invalidates old measurements
_WORSE = 1.1  # the search in one direction ends at a chunk slower than the previous one by this factor


Seconds = Callable[[LocalEngine, int], float]
"""Seconds per local step of one client with this engine and chunk size."""


def choose_engine(
    plan: Plan,
    engines: Mapping[str, Engine],
    name: EngineName,
    examples: Examples,
    *,
    chunk: int | None,
    most: int,
    seconds: Seconds,
    ranks: int = 1,
) -> tuple[LocalEngine, int]:
    """The fastest engine that `name` allows and, unless `chunk` is given, the fastest chunk of at most `most` clients.

    With several ranks, a chunk is at most the share of a round that each of them trains.
    """
    share = math.ceil(plan.per_round / ranks)
    if ranks > 1:
        most = min(most, share)

    def stepwise(engine: str) -> LocalEngine:
        return StepwiseEngine(METHODS[plan.method], engines[engine], examples)

    choice = _measured(plan, engines, examples, chunk, most, lambda engine, clients: seconds(stepwise(engine), clients))
    engine = engines[choice.engine]
    whole = choice.seconds * plan.rounds * share * plan.local_steps
    predicted = whole if examples.targets.is_cuda and math.isfinite(whole) else 0.0
    if isinstance(engine, BatchedEngine):
        if name == "kernel" or (name == "auto" and predicted > _WORTH_A_KERNEL):
            local_engine = _kernel(plan, engine, examples, asked=name == "kernel")
            equal = _equal_chunks(plan.per_round, chunk or min(most_clients(engine), share))
            if local_engine and (name == "kernel" or seconds(local_engine, equal) <= choice.seconds * _GAIN_OF_COMPILING):
                return local_engine, equal
        if plan.sums and plan.per_example:  # the compiled step sums in float32, and noise on the sum needs float64
            if name == "compiled":
                _LOG.warning("using the batched engine: noise on the sum needs sums in float64")
        elif name == "compiled" or (name == "auto" and predicted > _WORTH_COMPILING):
            equal = _equal_chunks(plan.per_round, choice.chunk)
            return CompiledEngine(METHODS[plan.method], plan, engine, examples, equal), equal
    return stepwise(choice.engine), choice.chunk


def _kernel(plan: Plan, engine: Engine, examples: Examples, *, asked: bool) -> KernelEngine | None:
    """The kernel, if it supports the training; a refusal is logged as a warning if the kernel was requested."""
    reason = refusal(plan, engine, examples)
    if reason:
        _LOG.log(logging.WARNING if asked else logging.DEBUG, "using the batched engine, not the kernel: %s", reason)
        return None
    return KernelEngine(METHODS[plan.method], plan, engine, examples)


def _equal_chunks(clients: int, most: int) -> int:
    """A chunk size that leaves little of the last chunk empty, because empty places are computed as well."""
    return math.ceil(clients / math.ceil(clients / most))


def _measured(
    plan: Plan,
    engines: Mapping[str, Engine],
    examples: Examples,
    chunk: int | None,
    most: int,
    seconds: Callable[[str, int], float],
) -> Choice:
    """The fastest engine and chunk, from the cache if possible; a short training uses the defaults."""
    device, engine = examples.targets.device, next(iter(engines))
    usual = Choice(engine, chunk or usual_chunk(device, most))
    chunks = [chunk] if chunk else chunks_up_to(min(most, plan.per_round), device)
    if plan.rounds * plan.per_round * plan.local_steps < _LONG or len(engines) * len(chunks) == 1:
        return usual
    what = machine(device) | {
        "network": str(engines[engine].model),
        "example": [[list(value.shape[1:]), str(value.dtype)] for value in tensors_in(examples.inputs)],
        "step": [plan.method, plan.batch_size, plan.slots, plan.clip_mode, plan.noise, plan.secure_noise, plan.momentum],
        "precision": torch.get_float32_matmul_precision(),
        "engines": list(engines),
        "chunks": chunks,
    }
    found = remembered(what, lambda: fastest(engines, chunks, seconds))
    return found if found.engine in engines and found.chunk in chunks else usual  # the cache may have been edited


@dataclass(frozen=True)
class Choice:
    """An engine, its chunk size, and the seconds per local step of one client."""

    engine: str
    chunk: int
    seconds: float = field(default=math.inf, compare=False)


def fastest(engines: Iterable[str], chunks: Sequence[int], seconds: Callable[[str, int], float]) -> Choice:
    """The choice with the least `seconds(engine, chunk)` per client.

    Engines are compared at the first chunk. For the fastest engine, larger and then smaller chunks are tried as long as they
    do not get slower.
    """
    first, *others = chunks
    times = {Choice(engine, first): seconds(engine, first) for engine in engines}
    start = min(times, key=lambda choice: times[choice])
    larger, smaller = sorted(c for c in others if c > first), sorted((c for c in others if c < first), reverse=True)
    for direction in (larger, smaller):
        last = times[start]
        for chunk in direction:
            choice = Choice(start.engine, chunk)
            times[choice] = seconds(choice.engine, chunk)
            if times[choice] > last * _WORSE:
                break
            last = times[choice]
    best = min(times, key=lambda choice: times[choice])
    return replace(best, seconds=times[best])


def chunks_up_to(most: int, device: torch.device) -> list[int]:
    """The chunk sizes worth trying, none above `most`; the one to start with comes first."""
    return list(dict.fromkeys(min(chunk, most) for chunk in _CHUNKS.get(device.type, _CHUNKS["cuda"])))


def remembered(what: Mapping[str, object], measure: Callable[[], Choice]) -> Choice:
    """The choice measured earlier for `what` on this machine, or a new measurement."""
    path = user_cache() / "engines" / f"{_digest(what)}.json"
    choice = _read(path)
    if choice is None:
        choice = measure()
        with suppress(OSError):
            write_atomically(path, json.dumps(asdict(choice) | {"measured_for": what}, indent=1).encode())
    return choice


def machine(device: torch.device) -> dict[str, object]:
    """What a measurement depends on besides the training: the device and the library."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {"rules": _RULES, "device": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def _read(path: Path) -> Choice | None:
    try:
        written = parse_json(read_bounded(path, MOST_SETTINGS))
        choice = Choice(written["engine"], written["chunk"], float(written["seconds"]))
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None
    known = choice.engine in get_args(EngineName) and type(choice.chunk) is int and choice.chunk > 0 and choice.seconds > 0
    return choice if known else None


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _digest(what: Mapping[str, object]) -> str:
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=16).hexdigest()
