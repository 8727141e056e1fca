"""Coverage-guided fuzzing (atheris) of byte parsers: inputs that reach new code are kept and mutated further.

    pip install '.[fuzz]'
    python -m tools.fuzz.guided --seconds 120 --out results/reliability/fuzz-guided.json
        python -m tools.fuzz.guided --target pickle CRASH-FILE                               # repeat one input

Each target runs in its own process, starting from the valid files of the other campaign. A finding is any error other than
the program's own, an input that takes more than ten seconds, or one that takes 2 GiB.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["fedcdp", "pickletools", "tomllib"]):
    from fedcdp.accounting.ledger import Ledger
    from fedcdp.config.experiment import assemble
    from fedcdp.data.datasets.adult import parse_adult
    from fedcdp.data.formats import parse_idx, read_pickle
    from fedcdp.data.table_files import read_csv
    from fedcdp.data.table_rules import ColumnRules
    from fedcdp.deploy.protocol.task import Task
    from fedcdp.errors import FedcdpError
    from fedcdp.files.tensors import load_tensors
    from fedcdp.training.prepared import stored

import numpy as np
import torch

from tools.fuzz.runs import SMALL, finished_run

Reader = Callable[[bytes], object]


def _of_file(place: Path, read: Callable[[Path], object]) -> Reader:
    path = place / "input"

    def reader(content: bytes) -> object:
        path.write_bytes(content)
        return read(path)

    return reader


def targets(place: Path) -> dict[str, tuple[Reader, list[bytes]]]:
    """The byte parsers, by name, and valid inputs to start from."""
    run = finished_run(place)
    images = struct.pack(">HBBIII", 0, 8, 3, 5, 4, 4) + bytes(range(80))
    batch = {b"data": np.arange(24, dtype=np.uint8).reshape(2, 12), b"labels": [3, 7], b"filenames": [b"a", b"b"]}
    adult = (
        b"39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Cuba, "
        b"<=50K\n"
    )
    return {
        "pickle": (lambda content: read_pickle(content, "batch"), [pickle.dumps(batch, protocol=p) for p in (2, 3, 4)]),
        "idx": (lambda content: parse_idx(content, 3, "images"), [images]),
        "adult": (lambda content: parse_adult(content, "adult.data"), [adult * 2]),
        "csv": (_of_file(place, lambda path: read_csv(path, ColumnRules())), [b"a,b,label\n1,2,x\n3,4.5,y\n"]),
        "ledger": (_of_file(place, Ledger.open), [(run / "ledger.jsonl").read_bytes()]),
        "tensors": (
            _of_file(place, lambda path: load_tensors(path, "checkpoint-1")),
            [(run / "checkpoint.safetensors").read_bytes()],
        ),
        "configuration": (
            lambda content: ((run / "config.toml").write_bytes(content), stored(run)),
            [assemble(SMALL).to_toml().encode()],
        ),
        "task": (lambda content: Task.from_json(content.decode("utf-8", "replace")), [_task().encode()]),
    }


def _task() -> str:
    from tools.fuzz.deployment import TASK

    return TASK.to_json()


def guided(target: str, options: list[str]) -> None:
    """Fuzz one target in this process, which ends afterwards."""
    torch.set_num_threads(1)
    place = Path(tempfile.mkdtemp())
    reader, seeds = targets(place)[target]
    corpus = place / "corpus"
    corpus.mkdir()
    for number, content in enumerate(seeds):
        (corpus / str(number)).write_bytes(content)

    def attempt(content: bytes) -> None:
        try:
            reader(content)
        except FedcdpError as error:
            if not str(error).strip():
                raise AssertionError("an error that says nothing") from error

    inputs = [str(corpus)] if all(each.startswith("-") for each in options) else []
    atheris.Setup([sys.argv[0], *options, *inputs], attempt)
    atheris.Fuzz()


def campaign(target: str, seconds: int, place: Path) -> dict[str, Any]:
    """Fuzz one target in another process; returns its final statistics."""
    limits = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048", "-max_len=4096", "-print_final_stats=1"]
    command = [sys.executable, "-m", "tools.fuzz.guided", "--target", target, *limits, f"-artifact_prefix={place}/{target}-"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    executed = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+) ft: (\d+)", done.stderr)
    if executed is None or done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:])
    return {
        "inputs": int(executed[1]) if executed else 0,
        "branches_first": int(covered[0][0]) if covered else None,
        "branches_last": int(covered[-1][0]) if covered else None,
        "findings": int(done.returncode != 0),
    }


def main() -> None:
    """All targets, one after the other; or, with --target, one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--seconds", type=int, default=120, help="Time per target.")
    parser.add_argument("--out", type=Path)
    given, others = parser.parse_known_args()
    if given.target:
        guided(given.target, others)
        return
    with tempfile.TemporaryDirectory() as scratch:
        names = list(targets(Path(scratch)))
    findings = Path(tempfile.mkdtemp(prefix="findings-"))
    found = {}
    for name in names:
        found[name] = campaign(name, given.seconds, findings)
        print(f"{name}: {found[name]}", flush=True)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        written = {"command": f"python -m tools.fuzz.guided --seconds {given.seconds}", "targets": found}
        given.out.write_text(json.dumps(written, indent=1) + "\n")
    sys.exit(any(each["findings"] for each in found.values()))


if __name__ == "__main__":
    main()
