"""Run directories: what a training run leaves on disk, written so that a crash at any point loses at most one round.

```
RUN/config.toml              what was run: enough to run it again
RUN/metrics.jsonl            one line a round
RUN/checkpoint.safetensors   the latest round's state; never pickle
RUN/model.safetensors        the trained model, once the run is done
```
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcdp.errors import RunError
from fedcdp.tree import Tree

CHECKPOINT_FORMAT = "fedcdp-checkpoint-1"

Row = dict[str, Any]


@dataclass(frozen=True)
class State:
    """All that a run needs to go on: everything random is derived from the plan's seed and the round."""

    round: int
    """Rounds that are done."""
    weights: Tree
    average: Tree | None
    """The moving average of the global model, where the plan asks for one."""


class RunDirectory:
    """One training run on disk."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.model = self.path / "model.safetensors"

    def create(self, config: str) -> None:
        """Start a new run; refuses a directory that holds anything."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise RunError(f"{self.path} already exists; resume it with --resume, or choose another directory")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.config, config.encode())
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror}") from error

    def require(self) -> None:
        """Refuse a directory that is not a run's."""
        if not self.config.is_file():
            raise RunError(f"{self.path} is not a run directory: it has no config.toml")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for one process; the lock goes with the process, however it ends."""
        import fcntl

        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(f"{self.path} is in use by another process") from None
            yield

    # The state -------------------------------------------------------------------------------------------------------

    def save_state(self, state: State) -> None:
        """Replace the checkpoint by a newer one."""
        tensors = {f"weights/{name}": value for name, value in state.weights.items()}
        if state.average is not None:
            tensors |= {f"average/{name}": value for name, value in state.average.items()}
        save_tensors(self.checkpoint, tensors, {"format": CHECKPOINT_FORMAT, "round": str(state.round)})

    def load_state(self) -> State | None:
        """The latest state, or None where the run did not finish a round."""
        if not self.checkpoint.exists():
            return None
        tensors, metadata = load_tensors(self.checkpoint)
        if metadata.get("format") != CHECKPOINT_FORMAT or not metadata.get("round", "").isdecimal():
            raise RunError(f"{self.checkpoint} is not a checkpoint of this program")
        parts: dict[str, Tree] = {"weights": {}, "average": {}}
        for name, value in tensors.items():
            part, _, parameter = name.partition("/")
            parts.setdefault(part, {})[parameter] = value
        return State(int(metadata["round"]), parts["weights"], parts["average"] or None)

    # The metrics -----------------------------------------------------------------------------------------------------

    def append_metrics(self, row: Row) -> None:
        """Add one round's line."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def read_metrics(self) -> list[Row]:
        """All complete lines; a torn last line, left by a crash, is passed over."""
        if not self.metrics.exists():
            return []
        rows = []
        lines = self.metrics.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            try:
                if line:
                    rows.append(json.loads(line))
            except ValueError:
                if number != len(lines):
                    raise RunError(f"{self.metrics}, line {number}, is damaged") from None
        return rows

    def forget_metrics_after(self, rounds: int) -> list[Row]:
        """Drop the lines of rounds that the checkpoint does not have, so that they are not there twice."""
        rows = [row for row in self.read_metrics() if row["round"] <= rounds]
        write_atomically(self.metrics, "".join(json.dumps(row) + "\n" for row in rows).encode())
        return rows


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, also when the machine stops in between."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def save_tensors(path: Path, tensors: Tree, metadata: dict[str, str]) -> None:
    """Write tensors in the safetensors format, atomically."""
    from safetensors.torch import save

    write_atomically(path, save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, metadata))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file, or say in a sentence that it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        return load(content), header.get("__metadata__", {})
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (SafetensorError, ValueError, struct.error, AttributeError):
        raise RunError(f"{path} is damaged or truncated") from None


def check_tensors(path: Path, found: Tree, wanted: dict[str, torch.Size]) -> None:
    """Refuse tensors that are not those of the network."""
    if {name: value.shape for name, value in found.items()} != dict(wanted):
        raise RunError(f"{path} holds other tensors than the network that config.toml describes")
