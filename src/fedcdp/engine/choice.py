"""Which engine, and how many clients at once: measured on this machine, for the fastest differs from device to device.

A measurement is remembered in the user's cache, under everything that it may depend on. What cannot be read there is
ignored, and measured again.
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
from typing import Literal, get_args

import torch
from torch import nn

from fedcdp.engine.base import Engine, Loss
from fedcdp.engine.batched import BatchedEngine
from fedcdp.engine.functional import FunctionalEngine
from fedcdp.errors import ModelError, PlanError
from fedcdp.files import user_cache, write_atomically
from fedcdp.untrusted import MOST_SETTINGS, parse_json, read_bounded

EngineName = Literal["auto", "kernel", "compiled", "batched", "functional"]

_LOG = logging.getLogger("fedcdp")
_CHUNKS = {"cpu": (16, 8, 4, 64, 256), "cuda": (512, 128, 2048, 8192)}  # the first is where a search begins
_RULES = 2  # counted up with changes that make old measurements worthless
_WORSE = 1.1  # a chunk that is slower than the one before it by this factor ends the search in its direction


@dataclass(frozen=True)
class Choice:
    """An engine, how many clients it trains at once, and how long a local step of one of them then takes."""

    engine: str
    chunk: int
    seconds: float = field(default=math.inf, compare=False)


def engines_for(model: nn.Module, loss: Loss, name: EngineName = "auto") -> dict[str, Engine]:
    """The engines that may be used for a network, by name; the batched one first where it knows every layer.

    What is compiled is the batched one, and what serves a kernel as its reference.
    """
    if name not in get_args(EngineName):
        raise PlanError(f"engine: {name!r} is not one of {', '.join(get_args(EngineName))}")
    reference: dict[str, Engine] = {"functional": FunctionalEngine(model, loss)}
    if name == "functional":
        return reference
    try:
        batched: dict[str, Engine] = {"batched": BatchedEngine(model, loss)}
    except ModelError as reason:
        _LOG.log(logging.INFO if name == "auto" else logging.WARNING, "the functional engine is used: %s", reason)
        return reference
    return batched | reference if name == "auto" else batched


def fastest(engines: Iterable[str], chunks: Sequence[int], seconds: Callable[[str, int], float]) -> Choice:
    """The choice with the least `seconds(engine, chunk)` a client.

    Engines are compared at the first chunk; then, for the fastest engine, chunks from there up and from there down, for as
    long as they do not get slower.
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
    """The numbers of clients at once that are worth trying, none above `most`; the one to begin with first."""
    return list(dict.fromkeys(min(chunk, most) for chunk in _CHUNKS.get(device.type, _CHUNKS["cuda"])))


def remembered(what: Mapping[str, object], measure: Callable[[], Choice]) -> Choice:
    """The choice that was measured for `what` on this machine before, or one that is measured now."""
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
