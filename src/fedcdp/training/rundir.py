"""Run directories: the files of a training run, written such that a crash at any point loses at most one round.

```
RUN/config.toml              the settings: enough to run it again
RUN/metrics.jsonl            one line per round
RUN/checkpoint.safetensors   the latest round's state
RUN/model.safetensors        the trained model, once the run is done
RUN/scores.json              its metrics on the validation split, also of each client where they are known
RUN/ledger.jsonl             releases and participants: written before a release is used
RUN/scaling.safetensors      what inputs are standardised by, if the plan releases that privately
RUN/engine.json              the engine: a resumed run keeps it, because another one rounds differently
RUN/lock                     held by the running process
```

Only the owner can read the directory and its files: with the seed in `config.toml`, noise can be subtracted.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fedcdp.config.plan import Plan
from fedcdp.errors import RunError, StorageError
from fedcdp.files.disk import PARTIAL, PRIVATE, not_written, open_unlinked, sync_directory, write_atomically
from fedcdp.files.tensors import MOST_TENSORS, check_tensors, load_tensors, read_about, save_tensors
from fedcdp.files.tree import Tree
from fedcdp.files.untrusted import MOST_JSON, MOST_LINES, parse_json, read_bounded
from fedcdp.methods.server_optimizers import OptimizerState, first_optimizer_state

Row = dict[str, Any]
_MOST_ENGINE = 1000
_NAME = re.compile("[a-z][a-z0-9_]{0,63}")


@dataclass(frozen=True)
class State:
    """All that a run needs to continue: other randomness is derived from the plan's seed and the round, or drawn anew."""

    round: int
    """Number of finished rounds."""
    weights: Tree
    average: Tree | None
    """The moving average of the global model, if the plan has one."""
    clip: float | None = None
    """The clip bound of the next round, if it follows a quantile."""
    optimizer: OptimizerState | None = None
    """The state of the server's optimiser, if it has one: a function of released sums only."""

    @staticmethod
    def first(plan: Plan, weights: Tree) -> State:
        """The state before the first round of a training that starts at these weights."""
        average, clip = dict(weights) if plan.ema else None, plan.quantile.start if plan.quantile else None
        return State(0, weights, average, clip, first_optimizer_state(plan, weights))

    def trees(self) -> dict[str, Tree]:
        """All tensors, by the names under which a checkpoint stores them."""
        average = {} if self.average is None else {"average": self.average}
        return {"weights": self.weights} | average | ({} if self.optimizer is None else self.optimizer.parts())


class RunDirectory:
    """One training run on disk. Every failure to read or write raises an error with one sentence.

    A `RunError` means that the directory cannot be used as asked; a `StorageError`, that it could no longer be written.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.model = self.path / "model.safetensors"
        self.scores = self.path / "scores.json"
        self.ledger = self.path / "ledger.jsonl"
        self.engine = self.path / "engine.json"
        self.scaling = self.path / "scaling.safetensors"
        self._lock: IO[str] | None = None

    def create(self, config: str) -> None:
        """Start a new run; refuses a directory that holds anything except the remains of a killed start."""
        self.require_creatable()
        with _said_in_a_sentence(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.locked():
                self._require_nothing()  # another process may have started a run here at the same time
                write_atomically(self.config, config.encode(), PRIVATE)
                sync_directory(self.path.absolute().parent)

    def require_creatable(self) -> None:
        """Raise unless a new run can start here. Nothing is written, so this can be checked before long computations."""
        with _said_in_a_sentence(self.path):
            if self.path.exists() and not self.path.is_dir():
                raise RunError(f"{self.path} is a file; choose another name for the run directory")
            self._require_nothing()
            place = next(each for each in (self.path, *self.path.absolute().parents) if each.exists())
            if not place.is_dir():
                raise RunError(f"{self.path} cannot be written: {place} is a file")
            if not os.access(place, os.W_OK | os.X_OK):
                raise RunError(f"{self.path} cannot be written: no permission to write to {place}")

    def _require_nothing(self) -> None:
        if self.path.is_dir() and any(not _left_by_a_killed_start(each) for each in self.path.iterdir()):
            raise RunError(f"{self.path} already exists; resume it with --resume, or choose another directory")

    def require(self) -> None:
        """Raise unless this is a run directory."""
        try:
            if not self.config.is_file():
                raise RunError(f"{self.path} is not a run directory: it has no config.toml")
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for one process; the lock is released when the process ends, however it ends."""
        with _said_in_a_sentence(self.path):
            lock = os.fdopen(open_unlinked(self.path / "lock", os.O_RDWR | os.O_CREAT), "r+")
        with lock:
            with _said_in_a_sentence(self.path):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise RunError(f"{self.path} is in use by another process") from None
            self._lock = lock
            try:
                yield
            finally:
                self._lock = None

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Write during a run: an obstacle that was not there at the start is not the fault of the input."""
        try:
            if self._lock and not os.path.samestat(os.fstat(self._lock.fileno()), (self.path / "lock").stat()):
                raise StorageError(f"{self.path} was replaced by others during this run")
            yield
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written: {error.strerror or error}") from error

    # The state -------------------------------------------------------------------------------------------------------

    def save_state(self, state: State, plan: str) -> None:
        """Replace the checkpoint by a newer one; `plan` is the digest of its plan."""
        tensors = {f"{part}/{name}": value for part, tree in state.trees().items() for name, value in tree.items()}
        about = {"format": "checkpoint-1", "round": state.round, "plan": plan}
        if state.clip is not None:
            about["clip"] = state.clip  # JSON keeps every digit
        with self._at_work():
            save_tensors(self.checkpoint, tensors, about, PRIVATE)

    def save_model(self, model: Tree, rounds: int) -> None:
        """Write the trained model."""
        with self._at_work():
            save_tensors(self.model, model, {"format": "model-1", "round": rounds}, PRIVATE)

    def save_scaling(self, mean: Tensor, scale: Tensor) -> None:
        """Write what inputs are standardised by; the ledger has charged its release."""
        with self._at_work():
            save_tensors(self.scaling, {"mean": mean, "scale": scale}, {"format": "scaling-1"}, PRIVATE)

    def load_scaling(self) -> tuple[Tensor, Tensor] | None:
        """What inputs are standardised by: mean and scale; None if nothing was released yet."""
        if not self.scaling.exists():
            return None
        tensors, _ = load_tensors(self.scaling, "scaling-1")
        if set(tensors) != {"mean", "scale"} or not all(bool(torch.isfinite(each).all()) for each in tensors.values()):
            raise RunError(f"{self.scaling} does not hold a finite mean and scale")
        return tensors["mean"], tensors["scale"]

    def rounds_done(self) -> int:
        """Number of rounds in the latest state; its tensors are not read."""
        if not self.checkpoint.exists():
            return 0
        return self._round_in(read_about(self.checkpoint, "checkpoint-1"))

    def load_state(self, plan: str | None = None, most: int = MOST_TENSORS) -> State | None:
        """The latest state, or None if no round was finished; raises if it belongs to another plan.

        A checkpoint of more than `most` bytes is not read.
        """
        if not self.checkpoint.exists():
            return None
        tensors, about = load_tensors(self.checkpoint, "checkpoint-1", most)
        if plan is not None and about.get("plan") != plan:
            raise RunError(f"{self.checkpoint} belongs to another plan; resume a run with the plan that started it")
        round_ = self._round_in(about)
        if "clip" in about and not (type(about["clip"]) is float and 0 < about["clip"] < math.inf):
            raise RunError(f"{self.checkpoint} holds a clip bound that is not a positive number")
        parts: dict[str, Tree] = {"weights": {}, "average": {}, "momentum": {}, "variance": {}}
        for name, value in tensors.items():
            part, _, parameter = name.partition("/")
            parts.setdefault(part, {})[parameter] = value
        if parts["variance"] and not parts["momentum"]:
            raise RunError(f"{self.checkpoint} holds only half of the state of the server's optimiser")
        optimizer = OptimizerState(parts["momentum"], parts["variance"] or None) if parts["momentum"] else None
        return State(round_, parts["weights"], parts["average"] or None, about.get("clip"), optimizer)

    def resumed_state(self, fresh: State, plan: Plan, most: int = MOST_TENSORS) -> State | None:
        """The latest state of a run of this plan, or None if no round was finished.

        Args:
            fresh: The state before the first round: the stored one has to have its parts, with the same tensors.
            plan: The plan of the run.
            most: The size of the largest checkpoint that is read, in bytes.

        Raises:
            RunError: The checkpoint is damaged, or it does not belong to the plan or to the network.
        """
        stored = self.load_state(plan.digest(), most)
        if stored is None:
            return None
        found, wanted = stored.trees(), fresh.trees()
        check_tensors(self.checkpoint, stored.weights, fresh.weights)
        if (found.keys() ^ wanted.keys()) & {"momentum", "variance"}:
            raise RunError(f"{self.checkpoint} does not hold the state of the server optimiser {plan.server_optimizer}")
        if stored.round > plan.rounds or found.keys() != wanted.keys() or (stored.clip is None) != (fresh.clip is None):
            raise RunError(f"{self.checkpoint} does not belong to the plan in config.toml")
        for part, tree in found.items():
            check_tensors(self.checkpoint, tree, wanted[part])
        if any(bool((value < 0).any()) for value in found.get("variance", {}).values()):
            raise RunError(f"{self.checkpoint} holds a negative mean square for the server optimiser")
        return stored

    def _round_in(self, about: Mapping[str, Any]) -> int:
        round_ = about.get("round")
        if type(round_) is not int or not 0 <= round_ < 2**31:
            raise RunError(f"{self.checkpoint} does not say how many rounds it has")
        return round_

    # What computes ---------------------------------------------------------------------------------------------------

    def save_engine(self, device: str, engine: str, chunk: int) -> None:
        """Store the engine and chunk size used on a kind of device."""
        with self._at_work():
            kept = {"device": device, "engine": engine, "chunk": chunk}
            write_atomically(self.engine, json.dumps(kept).encode() + b"\n", PRIVATE)

    def load_engine(self, device: str) -> tuple[str, int] | None:
        """The engine and chunk size of the run on this kind of device, if known: a preference, not part of its state."""
        try:
            kept = parse_json(read_bounded(self.engine, _MOST_ENGINE))
            engine, chunk = kept["engine"], kept["chunk"]
            known = kept["device"] == device and type(engine) is str and type(chunk) is int and chunk > 0
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return (engine, chunk) if known else None

    # The metrics -----------------------------------------------------------------------------------------------------

    def append_metrics(self, row: Row) -> None:
        """Append one round's line; it is on disk before the round's checkpoint."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with self._at_work(), os.fdopen(open_unlinked(self.metrics, flags), "a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[Row]:
        """All complete lines; a torn last line, left by a crash, is skipped."""
        try:
            lines = read_bounded(self.metrics, MOST_LINES).split(b"\n") if self.metrics.exists() else []
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}") from error
        rows: list[Row] = []
        for number, line in enumerate(lines, start=1):
            try:
                if line:
                    rows.append(_as_row(line))
            except ValueError:
                if number != len(lines):
                    raise RunError(f"{self.metrics}, line {number}, is damaged") from None
        return rows

    def save_scores(self, rounds: int, metrics: Row, clients: list[Row]) -> None:
        """Write all metrics of the model after `rounds` rounds; nothing if there are none."""
        if metrics:
            written = json.dumps({"round": rounds, "metrics": metrics, "clients": clients}, allow_nan=False)
            with self._at_work():
                write_atomically(self.scores, written.encode() + b"\n", PRIVATE)

    def read_scores(self, rounds: int) -> tuple[Row, list[Row]]:
        """The metrics of the model after `rounds` rounds, and those of each client; empty where none are stored."""
        if not self.scores.exists():
            return {}, []
        try:
            stored = parse_json(read_bounded(self.scores, MOST_JSON))
            metrics, clients = stored["metrics"], stored["clients"]
            named = [{**row, "client": None} for row in clients if type(row["client"]) is str]
            if type(clients) is not list or len(named) != len(clients) or not all(map(_is_figures, [metrics, *named])):
                raise ValueError
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError):
            raise RunError(f"{self.scores} is damaged") from None
        return (metrics, clients) if stored.get("round") == rounds else ({}, [])

    def forget_metrics_after(self, rounds: int) -> list[Row]:
        """Drop the lines of rounds that the checkpoint does not have, to avoid duplicates."""
        rows = [row for row in self.read_metrics() if row["round"] <= rounds]
        if [row["round"] for row in rows] != list(range(1, rounds + 1)):
            raise RunError(f"{self.metrics} does not have one line for each of the {rounds} rounds in the checkpoint")
        with self._at_work():
            write_atomically(self.metrics, "".join(json.dumps(row) + "\n" for row in rows).encode(), PRIVATE)
        return rows


def _as_row(line: bytes) -> Row:
    row = parse_json(line)
    if not isinstance(row, dict) or type(row.get("round")) is not int or not 0 <= row["round"] < 2**31:
        raise ValueError
    if not _is_figures(row):
        raise ValueError
    return row


def _is_figures(row: object) -> bool:
    return isinstance(row, dict) and all(_NAME.fullmatch(name) and _is_figure(value) for name, value in row.items())


def _left_by_a_killed_start(path: Path) -> bool:
    return path.name == "lock" or path.name.endswith(PARTIAL)


def _is_figure(value: object) -> bool:
    """Whether this is a number as this program writes it, or None."""
    return value is None or (type(value) is int and abs(value) < 2**63) or (type(value) is float and math.isfinite(value))


@contextmanager
def _said_in_a_sentence(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise not_written(path, error) from error
    except UnicodeEncodeError:
        raise RunError(f"{path} cannot be written: a setting holds text that is not UTF-8") from None
