"""Soak test: watch `fedcdp train` for hours from outside. Its memory must stay flat and its rounds equally long.

    python -m tools.soak --hours 1 --out results/reliability/soak.json
    python -m tools.soak --hours 1 --allocator returning --out results/reliability/soak-returning.json

The training is the command that a user runs, in its own process. Its memory and CPU time are read from /proc once a second,
its rounds from the metrics that it writes. It is stopped with Ctrl-C, and must then continue with --resume.

Failures (exit 1); the first tenth of the time is ignored as start-up:

- memory: a line is fitted to the resident memory over the rounds. A round may leave `KB_A_ROUND` behind: its row of the
  metrics and its line of the ledger, which a run keeps, and with the default allocator what the allocator keeps for itself:
  glibc holds on to freed blocks of up to 32 MB, in steps. With `--allocator returning` it returns every block above 1 MB
  (which costs time), and the rest is the program's own. One leaked copy of the model would be 17 to 35 times the limit.
- time: the median CPU time of a round in the last quarter may exceed that of the first quarter by `SLOWER`. CPU time,
  because wall-clock time also measures other load on the machine (it is reported as well).
- the end: Ctrl-C is answered by one line and exit 1, every round is in the ledger and the metrics, and the run resumes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcdp.accounting.ledger import Ledger
from fedcdp.files.disk import write_atomically
from fedcdp.studies.bench.result_file import describe, load_average
from fedcdp.training.rundir import RunDirectory

KB_A_ROUND = {"usual": 8.0, "returning": 4.0}
RETURNING = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
SLOWER = 0.25
FEWEST_ROUNDS = 1000  # with fewer rounds, a single allocator step of a few MB would look like a slope
ROUNDS = 1_000_000  # more than any soak reaches
TRAINING = [
    "--dataset", "mnist5k", "--method", "fed-cdp", "--clients", "100", "--per-round", "4", "--local-steps", "1",
    "--batch-size", "4", "--ema", "0.9", "--clip", "quantile(0.5, 4)", "--set", "evaluate_every=10",
]  # fmt: skip
_CLOCK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """The operating system's figures for the training at one moment."""

    seconds: float
    rounds: int
    resident: int
    processor: float


def main() -> int:
    """Run the test, check the result, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--allocator", choices=KB_A_ROUND, default="usual")
    parser.add_argument("--out", type=Path, default=None, help="Write the result to this JSON file.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = soak(Path(place) / "run", given.hours, given.device, given.allocator)
    written = json.dumps(result, indent=2) + "\n"
    print(written)
    if given.out:
        write_atomically(given.out, written.encode())
    return 0 if result["holds"] else 1


def soak(run: Path, hours: float, device: str, allocator: str) -> dict[str, Any]:
    """Train for some hours, and return the result."""
    options = [*TRAINING, "--rounds", str(ROUNDS), "--device", device]
    # Not --quiet: the progress display, with its ε, is part of what must run for hours.
    command = [sys.executable, "-m", "fedcdp", "train", *options, "--out", str(run)]
    log = run.parent / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (RETURNING if allocator == "returning" else {}),
            preexec_fn=_hears_ctrl_c,
        )
        samples = watch(process, run / "metrics.jsonl", hours * 3600)
        process.send_signal(signal.SIGINT)
        status = _end(process)
    last_line = log.read_text(errors="replace").strip().splitlines()[-1]
    rows, charged = RunDirectory(run).read_metrics(), Ledger.open(run / "ledger.jsonl").rounds_charged
    state = RunDirectory(run).load_state()
    resumes = goes_on(run, len(rows))
    memory, times = growth(samples), drift(samples)
    holds = {
        "enough rounds to judge": len(rows) >= FEWEST_ROUNDS,
        "memory": memory["kb_a_round"] <= KB_A_ROUND[allocator],
        "round time": times["slower"] <= SLOWER,
        "stopped in order": status == 1 and "--resume" in last_line,
        "ledger": state is not None and charged >= state.round >= len(rows) - 1,
        "resumes": resumes,
    }
    wall = np.array([row["seconds"] for row in rows])
    return {
        "command": f"python -m tools.soak --hours {hours:g} --device {device} --allocator {allocator}",
        "trained": "fedcdp train " + " ".join(options),
        "hours": round(samples[-1].seconds / 3600, 3),
        "rounds": len(rows),
        "allowed": {"kb_a_round": KB_A_ROUND[allocator], "slower": SLOWER},
        "memory": memory,
        "processor_seconds_a_round": times,
        "wall_seconds_a_round": {"median": float(np.median(wall)), "p99": round(float(np.quantile(wall, 0.99)), 4)},
        "checks": holds,
        "holds": all(holds.values()),
        "machine": describe(torch.device(device)) | {"load_average": load_average()},
        "samples": [f"{s.seconds:.0f} {s.rounds} {s.resident / 2**20:.2f}" for s in samples[:: max(1, len(samples) // 60)]],
        "samples_are": "seconds, rounds, resident MB",
    }


def _hears_ctrl_c() -> None:
    """A background process of a shell ignores Ctrl-C, and so would the training."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit status; None if it has to be killed."""
    try:
        return process.wait(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def watch(process: subprocess.Popen[bytes], metrics: Path, seconds: float) -> list[Sample]:
    """Sample once a second, until the time is over or the training ends (which it should not)."""
    started, samples = time.monotonic(), []
    counted, place = 0, 0
    while (elapsed := time.monotonic() - started) < seconds:
        time.sleep(1)
        if process.poll() is not None:
            raise SystemExit(f"the training ended by itself after {elapsed:.0f} s, with status {process.returncode}")
        if metrics.exists():
            with metrics.open("rb") as file:
                file.seek(place)
                fresh = file.read()
            counted, place = counted + fresh.count(b"\n"), place + len(fresh)
        resident = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * _PAGE
        times = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        samples.append(Sample(elapsed, counted, resident, (int(times[11]) + int(times[12])) / _CLOCK))
    return samples


def _after_start_up(samples: list[Sample]) -> list[Sample]:
    return samples[len(samples) // 10 :]


def growth(samples: list[Sample]) -> dict[str, float]:
    """A line fitted to resident memory over rounds, after the start-up."""
    kept = _after_start_up(samples)
    rounds = np.array([each.rounds for each in kept], dtype=float)
    resident = np.array([each.resident for each in kept], dtype=float)
    slope, _ = np.polyfit(rounds, resident, 1)
    return {
        "kb_a_round": round(float(slope) / 1024, 4),
        "begin_mb": round(float(resident[: len(resident) // 10].mean()) / 2**20, 1),
        "end_mb": round(float(resident[-len(resident) // 10 :].mean()) / 2**20, 1),
        "peak_mb": round(max(each.resident for each in samples) / 2**20, 1),
    }


def drift(samples: list[Sample]) -> dict[str, float]:
    """CPU time per round in the first and the last quarter, after the start-up."""
    kept = _after_start_up(samples)
    quarter = len(kept) // 4
    first, last = _seconds_a_round(kept[:quarter]), _seconds_a_round(kept[-quarter:])
    begin, end = float(np.median(first)), float(np.median(last))
    return {"first_quarter": round(begin, 4), "last_quarter": round(end, 4), "slower": round(end / begin - 1, 3)}


def _seconds_a_round(samples: list[Sample]) -> NDArray[np.float64]:
    """CPU seconds per round over windows of ten seconds, long enough to hold many rounds."""
    ends = samples[::10]
    pairs = itertools.pairwise(ends)
    return np.array([(b.processor - a.processor) / (b.rounds - a.rounds) for a, b in pairs if b.rounds > a.rounds])


def goes_on(run: Path, rounds: int) -> bool:
    """Whether the stopped run resumes: it writes a further round."""
    command = [sys.executable, "-m", "fedcdp", "train", "--resume", "--quiet", "--out", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None and len(RunDirectory(run).read_metrics()) <= rounds:
        time.sleep(0.2)
    process.kill()
    process.wait()
    return len(RunDirectory(run).read_metrics()) > rounds


if __name__ == "__main__":
    sys.exit(main())
