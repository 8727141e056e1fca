"""Seconds of a deployed round of three nodes, before and after nodes kept a warm process; real Flower processes with TLS.

    python -m benchmarks.round_time --out results/round_time.json

Deployments of an earlier commit and of this tree run in turn, with the same plan, messages and evaluations. Each is written
and started as a user would: `fedcdp deploy init`, `fedcdp deploy up`. The seconds are those of `run/metrics.jsonl`. Other
work on the machine disturbs some rounds, so ratios of medians say more than seconds; all seconds are stored.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.clean_tree import clean_commit
from fedcdp.studies.bench.result_file import load_average

_ROOT = Path(__file__).resolve().parents[1]
BEFORE = "75a1b32"  # the last commit whose nodes started a process for every message
NODES = 3
SETTINGS: dict[str, tuple[str, ...]] = {
    "cancer, two layers": ("--dataset", "cancer", "--model", "mlp"),
    "mnist5k, convolutions": ("--dataset", "mnist5k", "--model", "cnn"),
    "mnist5k, frozen encoder": ("--dataset", "mnist5k", "--model", "scattering"),
}
_PLAN = ("--local-steps", "5", "--nodes", str(NODES), "--seed", "3")


def source_of(commit: str, place: Path) -> Path:
    """The package of an earlier commit, unpacked."""
    packed = subprocess.run(["git", "archive", commit, "src"], check=True, capture_output=True, cwd=_ROOT)  # noqa: S607  # nosec B607
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(place, filter="data")
    return place / "src"


def measure(source: Path, options: tuple[str, ...], rounds: int, place: Path) -> dict[str, Any]:
    """Run a deployment of this package from start to end."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "fedcdp", "deploy"]
    subprocess.run([*program, "init", str(place), *options, *_PLAN, "--rounds", str(rounds)], check=True, env=environment,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    done = subprocess.run(
        [*program, "up", str(place), "--json", "--quiet"], check=True, env=environment, capture_output=True
    )
    rows = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["clients"] == NODES for row in rows), "a round without all nodes would be shorter or longer"
    return {
        "seconds_a_round": [row["seconds"] for row in rows],
        "seconds_in_all": json.loads(done.stdout)["seconds"],
        "load_average": load_average(),
    }


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", default=BEFORE, help="The earlier commit.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    kept = {"commit": clean_commit()} if given.out else {}
    found: dict[str, Any] = {"command": "python -m benchmarks.round_time", **kept, "before": given.before, "nodes": NODES,
                             "cores": os.cpu_count(), "settings": {}}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        sources = {"before": source_of(given.before, place), "after": _ROOT / "src"}
        for name, options in SETTINGS.items():
            runs: dict[str, list[dict[str, Any]]] = {when: [] for when in sources}
            for number in range(given.repeats):
                for when, source in sources.items():
                    site = place / f"{when}-{len(found['settings'])}-{number}"
                    runs[when].append(measure(source, options, given.rounds, site))
            median = {
                when: statistics.median(s for each in done for s in each["seconds_a_round"]) for when, done in runs.items()
            }
            found["settings"][name] = {
                "median_seconds_a_round": {when: round(seconds, 2) for when, seconds in median.items()},
                "ratio": round(median["after"] / median["before"], 3),
                "runs": runs,
            }
            print(json.dumps({name: found["settings"][name]}, indent=1), flush=True)
            if given.out:
                given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
