"""Checks of the files left by a kill or a full disk, and of a run that was resumed to its end."""

from __future__ import annotations

import io
import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from fedcdp.accounting.ledger import Ledger
from fedcdp.files.tensors import load_tensors
from fedcdp.training.rundir import RunDirectory
from tools.crash.processes import Ended


class CrashError(AssertionError):
    """Data were lost, or releases counted too low."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise CrashError(what)


def examine(run: Path, witness: Path, secure: bool) -> None:
    """Check a run directory after a kill; raises if anything is damaged or counted too low."""
    directory = RunDirectory(run)
    begun = [int(line) for line in witness.read_text().split()] if witness.exists() else []
    charges = Ledger.open(directory.ledger).charges if directory.ledger.exists() else ()
    charged = Counter(charge.round for charge in charges)
    for round_, times in Counter(begun).items():
        needed = times if secure else 1
        require(charged[round_] >= needed, f"round {round_} began {times} times and is charged {charged[round_]} times")
    state = directory.load_state()
    done = state.round if state else 0
    require(set(range(done)) <= charged.keys(), f"the checkpoint has {done} rounds, the ledger {sorted(charged)}")
    require(len(charged) <= done + 1, f"the ledger has {sorted(charged)}, the checkpoint {done} rounds")
    rows = directory.read_metrics()
    require(len(rows) in (done, done + 1), f"the metrics have {len(rows)} rounds, the checkpoint {done}")
    require(len(rows) <= len(charged), f"the metrics have {len(rows)} rounds, the ledger {sorted(charged)}")
    if directory.model.exists():
        load_tensors(directory.model, "model-1")


def same(run: Path, whole: Path, secure: bool, rounds: int) -> None:
    """Compare a run that was resumed to its end with an undisturbed one."""
    charges = Ledger.open(run / "ledger.jsonl").charges
    require({charge.round for charge in charges} == set(range(rounds)), "the ledger does not have every round")
    require(_rounds(run) == list(range(1, rounds + 1)), f"the metrics have rounds {_rounds(run)}")
    left = {path.name for path in run.iterdir() if path.name.endswith(".partial")}
    require(left <= {".config.toml.partial"}, f"left behind: {left}")
    if secure:
        return
    require(len(charges) == rounds, f"{len(charges)} charges for {rounds} rounds")
    require((run / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes(), "the ledgers differ")
    require(_without_times(run) == _without_times(whole), "the metrics differ")
    mine, other = load_file(run / "model.safetensors"), load_file(whole / "model.safetensors")
    require(mine.keys() == other.keys(), "the models have different tensors")
    for name, value in mine.items():
        require(torch.equal(value, other[name]), f"{name} differs by {float((value - other[name]).abs().max()):.3g}")


def _rounds(run: Path) -> list[int]:
    return [row["round"] for row in RunDirectory(run).read_metrics()]


def _without_times(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in RunDirectory(run).read_metrics()]


def told_in_one_line(ended: Ended) -> None:
    require(ended.status == 1, f"a full disk ended it with {ended.status}: {ended.stderr}")
    require(ended.stderr.startswith("fedcdp: ") and ended.stderr.strip().count("\n") == 0, f"not one line: {ended.stderr}")
    require("No space left" in ended.stderr, f"the reason is missing: {ended.stderr}")


def whole_files(place: Path) -> None:
    """Check that every file below a place that is not marked as partial can be read."""
    for path in place.rglob("*"):
        if path.is_dir() or path.name.endswith(".partial"):
            continue
        content = path.read_bytes()
        if path.suffix == ".json":
            json.loads(content)
        elif path.suffix == ".jsonl":
            [json.loads(line) for line in content.splitlines()]
        elif path.suffix == ".npz":
            require(zipfile.ZipFile(io.BytesIO(content)).testzip() is None, f"{path.name} is damaged")
            dict(np.load(io.BytesIO(content)))
        elif path.suffix == ".png":
            from PIL import Image

            Image.open(io.BytesIO(content)).load()
        elif path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix == ".md":
            require(content.endswith(b"\n"), f"{path.name} is cut short")
