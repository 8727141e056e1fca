"""Whole commands in their own processes, on run directories and data with one hostile file."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np

import fedcdp
from tools.fuzz.mutations import mutate_bytes
from tools.fuzz.runs import finished_run

SECONDS = 120
_FILES = ("config.toml", "ledger.jsonl", "metrics.jsonl", "scores.json", "checkpoint.safetensors", "model.safetensors")
_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")


def attempt(case: Random, place: Path) -> str | None:
    """Describe forbidden behaviour of a process, or None."""
    run, own = place / "process-run", place / "own.npz"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(finished_run(place), run)
    name = case.choice(_FILES)
    (run / name).write_bytes(mutate_bytes(case, (run / name).read_bytes()))
    np.savez(own, x=np.arange(48.0).reshape(12, 4), y=np.arange(12) % 3)
    own.write_bytes(mutate_bytes(case, own.read_bytes()))
    (place / "exported").unlink(missing_ok=True)
    shutil.rmtree(place / "process-new", ignore_errors=True)
    command = case.choice((
        ["evaluate", run, "--per-client"],
        ["account", "--run", run, "--mode", "rdp"],
        ["train", "--resume", "--quiet", "--out", run],
        ["export", run, "--to", place / "exported", "--format", case.choice(("safetensors", "csv"))],
        ["train", "--quiet", "--data", own, "--rounds", 1, "--clients", 2, "--per-round", 2, "--local-steps", 1, "--out",
         place / "process-new"],
        ["train", "--quiet", "--config", run / name, "--rounds", 1, "--out", place / "process-new"],
    ))  # fmt: skip
    return _fault([str(each) for each in command], place)


def _fault(command: list[str], place: Path) -> str | None:
    source = str(Path(fedcdp.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "fedcdp", *command], cwd=place, env=environment, capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"{command}: took more than {SECONDS} s"
    lines = [line for line in ended.stderr.splitlines() if line.startswith(b"fedcdp: ")]
    if ended.returncode not in (0, 1, 2) or b"Traceback" in ended.stderr or (ended.returncode and len(lines) != 1):
        return f"{command}: ended with {ended.returncode}: {ended.stderr[-500:]!r}"
    if _CONTROL.search(ended.stderr + ended.stdout):
        return f"{command}: control characters on the console"
    return None
