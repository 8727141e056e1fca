"""Everything that a run lets out, as one value that can be compared: files, console, log, warnings, and what it connects to.

Two runs on neighbouring data, with equal noise, equal sampling and the accounted release held fixed, must let out the same:
whatever differs is a function of the data that no ε covers. Time is taken from a clock that counts how often it is asked,
so that the figures of time are compared as well, and with them how much was measured.
"""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcdp.files.tree import Tree
from fedcdp.methods import fedcdp, fedsdp, quantile

_HARMLESS = re.compile(r"/dev/|/proc/|\.pyc(\.\d+)?$|__pycache__|torchinductor|/\.triton/")
_NEW_NAME = re.compile(r"events\.out\.tfevents\.\S+")
_active: list[Seen] = []


@dataclass
class Seen:
    """What came out of a run."""

    place: Path
    files: dict[str, bytes] = field(default_factory=dict)
    console: str = ""
    log: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    """Files that were opened for writing, wherever they lie."""
    connected: list[str] = field(default_factory=list)
    failed: str | None = None

    def let_out(self) -> dict[str, object]:
        """All of it, by where it came out."""
        files: dict[str, object] = {f"file {name}": content for name, content in self.files.items()}
        return files | {"console": self.console, "log": self.log, "warnings": self.warned, "connections": self.connected,
                        "files elsewhere": sorted(self.written), "failure": self.failed}  # fmt: skip


def differences(one: Seen, other: Seen) -> dict[str, tuple[object, object]]:
    """Where two runs differ in what they let out."""
    left, right = one.let_out(), other.let_out()
    return {key: (left.get(key), right.get(key)) for key in left | right if left.get(key) != right.get(key)}


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active:
        return
    seen = _active[-1]
    if event == "open" and isinstance(arguments[0], str | os.PathLike):
        path, mode, flags = os.fspath(arguments[0]), arguments[1] or "", arguments[2] or 0
        if set(str(mode)) & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR):
            full = str(Path(os.fsdecode(path)).absolute())
            if not full.startswith(str(seen.place)) and not _HARMLESS.search(full):
                seen.written.add(full)
    elif event in ("socket.connect", "socket.sendto", "subprocess.Popen", "os.system"):
        seen.connected.append(f"{event} {arguments[1:]}")


sys.addaudithook(_listen)


class Lines(logging.Handler):
    """Keeps every log line, down to the finest, with what it was made of."""

    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.DEBUG)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(f"{record.name} {record.levelname} {record.getMessage()} {record.exc_text or ''}")


@contextmanager
def watched(place: Path, capture: Callable[[], Any]) -> Iterator[Seen]:
    """Watch what happens inside; `place` is the only directory that may be written to. A failure is kept, not raised."""
    seen = Seen(place)
    handler, root = Lines(seen.log), logging.getLogger()
    loggers = [root, *(logging.getLogger(name) for name in ("fedcdp", "flwr", "torch", "asyncio"))]
    levels = [each.level for each in loggers]
    capture()
    root.addHandler(handler)
    logging.getLogger("flwr").addHandler(handler)  # which does not pass its lines on
    for each in loggers[:3]:
        each.setLevel(logging.DEBUG)
    _active.append(seen)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield seen
            except Exception as error:
                seen.failed = f"{type(error).__name__}: {error}"
    finally:
        _active.pop()
        root.removeHandler(handler)
        logging.getLogger("flwr").removeHandler(handler)
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
    seen.warned = [f"{each.category.__name__} {each.message}" for each in caught]
    out, err = capture()
    seen.console = out + err
    for path in sorted(place.rglob("*")):
        if path.is_file():
            seen.files[_NEW_NAME.sub("events", str(path.relative_to(place)))] = path.read_bytes()


def stop_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks that count how often they are asked, sleep that takes no time, and entropy that is the same in every run."""
    now, chance = [0.0], random.Random(3)

    def passes(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    for name in ("perf_counter", "monotonic", "time"):
        monkeypatch.setattr(time, name, lambda: passes(1e-3))
    monkeypatch.setattr(time, "sleep", passes)
    monkeypatch.setattr(os, "urandom", chance.randbytes)
    monkeypatch.setattr("secrets.randbits", chance.getrandbits)
    monkeypatch.setattr("secrets.token_hex", lambda size=32: chance.randbytes(size).hex())


def hold_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every gradient be computed, clipped and counted, and then release the noise alone: what is accounted is equal."""

    def still(tree: Tree) -> Tree:
        return {name: torch.zeros_like(value) for name, value in tree.items()}

    def held(module: Any, name: str, still_of: Callable[[Any], Any]) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: still_of(real(*given)))

    real_noised = fedcdp.noised
    monkeypatch.setattr(fedcdp, "noised", lambda values, noise: real_noised(still(values), noise))
    held(fedsdp, "_clip_clients", still)

    def no_indicator(counts: Tensor) -> Tensor:
        return torch.zeros_like(counts)

    held(quantile, "indicators", no_indicator)
