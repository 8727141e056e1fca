"""A few of the crashes of `make crashes`, and what else can happen to a run directory while a training writes to it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedcdp
from fedcdp.accounting.ledger import Ledger
from fedcdp.cli.program import main
from fedcdp.config.experiment import assemble
from fedcdp.errors import RunError, StorageError
from fedcdp.files.tensors import load_tensors
from fedcdp.training.rundir import RunDirectory, State
from fedcdp.training.trainer import train_experiment
from tools.crash.checks import CrashError, examine

SMALL = {"data": {"dataset": "cancer", "clients": 8}, "plan": {"per_round": 4, "rounds": 4, "local_steps": 1}}
STATE = State(1, {"weight": torch.zeros(2)}, None)


@pytest.mark.slow
def test_trainings_killed_or_out_of_space_lose_nothing(tmp_path: Path) -> None:
    """In a process of its own, since it forks; its status says that every check held."""
    paths = [str(Path(fedcdp.__file__).parents[1]), str(Path(__file__).parents[2])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "tools.crash",
        "--short",
        "--scenarios",
        "fed-cdp",
        "fed-cdp, secure noise",
        "--out",
        "r.json",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    totals = json.loads((tmp_path / "r.json").read_text())["totals"]
    assert totals["killed at a call, resumed"] >= 12
    assert totals["full disks, resumed"] >= 6


@pytest.mark.slow
def test_a_training_that_lost_a_rank_goes_on_with_another_number(tmp_path: Path) -> None:
    """In a process of its own, since it forks; its status says that every check held."""
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": f"{Path(fedcdp.__file__).parents[1]}{os.pathsep}{root}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tools.crash.lost_ranks", "--kills", "1", "--scenarios", "fed-cdp, secure noise"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'kills': " in done.stdout


def test_the_checks_find_a_release_that_is_charged_too_late(tmp_path: Path) -> None:
    """A harness that cannot fail shows nothing: the ledger loses a line, and a round begins that was not charged."""
    train_experiment(assemble(SMALL), tmp_path / "run", quiet=True, most_releases=2)
    witness = tmp_path / "witness"
    witness.write_text("0\n1\n")
    examine(tmp_path / "run", witness, False)
    witness.write_text("0\n1\n2\n")
    with pytest.raises(CrashError, match="round 2 began 1 times and is charged 0"):
        examine(tmp_path / "run", witness, False)
    witness.write_text("0\n1\n1\n")
    with pytest.raises(CrashError, match="round 1 began 2 times"):
        examine(tmp_path / "run", witness, True)
    ledger = tmp_path / "run/ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(CrashError, match="the checkpoint has 2 rounds"):
        examine(tmp_path / "run", tmp_path / "nobody", False)


def training(run: Path, disturb: Callable[[int], None]) -> None:
    """A training that something happens to after each round."""
    train_experiment(assemble(SMALL), run, quiet=True, progress=lambda row: disturb(row["round"]))


def test_a_directory_that_is_deleted_ends_the_training_and_is_not_made_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(StorageError, match=r"run.* cannot be written: No such file"):
        training(run, lambda _: shutil.rmtree(run))
    assert not run.exists()


@pytest.mark.parametrize("write", [lambda d: d.save_state(STATE, "p"), lambda d: d.append_metrics({"round": 1}),
                                   lambda d: d.save_model({"weight": torch.zeros(1)}, 1)])  # fmt: skip
def test_a_run_does_not_write_into_one_that_took_its_place(tmp_path: Path, write: Callable[[RunDirectory], None]) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create("# the first\n")
    with directory.locked():
        shutil.rmtree(directory.path)
        other = RunDirectory(directory.path)
        other.create("# another\n")
        before = sorted(path.name for path in other.path.iterdir())
        with pytest.raises(StorageError, match="replaced by others"):
            write(directory)
        assert sorted(path.name for path in other.path.iterdir()) == before


def test_of_two_that_start_in_one_directory_at_once_one_is_told_so(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    first.path.mkdir()
    with first.locked(), pytest.raises(RunError, match="in use by another process"):
        second.create("# the second\n")
    assert not second.config.exists()
    second.create("# the second\n")  # the lock that is left behind is nothing
    with pytest.raises(RunError, match="already exists"):
        first.create("# the first\n")
    assert second.config.read_text() == "# the second\n"


def test_a_file_that_may_not_grow_ends_the_training_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the operating system: no file of this process may be larger than 2,000 bytes, as long as the limit holds."""
    monkeypatch.chdir(tmp_path)
    options = ["--dataset", "cancer", "--clients", "8", "--per-round", "4", "--local-steps", "1", "--rounds", "2"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(sys, "argv", ["fedcdp", "train", *options, "--quiet", "--out", "run"])
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = capsys.readouterr().err
    assert ended.value.code == 1
    assert told.startswith("fedcdp: run cannot be written: File too large; after fixing that, fedcdp train --resume")
    assert told.count("\n") == 1
    assert Ledger.open("run/ledger.jsonl").rounds_charged == 1
    monkeypatch.setattr(sys, "argv", ["fedcdp", "train", "--resume", "--quiet", "--out", "run"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert load_tensors(Path("run/model.safetensors"), "model-1")[1]["round"] == 2


def test_a_resumed_run_computes_as_before_whatever_the_cache_says(tmp_path: Path) -> None:
    """Chunks are measured, and round differently: a run that goes on must not be measured anew."""
    federation = fedcdp.partition(fedcdp.load("cancer"), clients=8, scheme="iid")
    plan = fedcdp.Plan(rounds=2, per_round=8, local_steps=2)

    def simulate(**how: Any) -> fedcdp.Run:
        return fedcdp.simulate(nn.Linear(30, 2), federation, plan, out=tmp_path / "run", **how)

    first = simulate(engine="functional", chunk=3, most_releases=1)
    assert RunDirectory(tmp_path / "run").load_engine("cpu") == ("functional", 3) == (first.engine, first.chunk)
    then = simulate(resume=True)
    assert (then.engine, then.chunk) == ("functional", 3)
    chosen = simulate(resume=True, engine="batched", chunk=2)
    assert (chosen.engine, chosen.chunk) == ("batched", 2)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"device": "cpu", "engine": "nosuch", "chunk": 3}',
                                     b'{"device": "cpu", "engine": "batched", "chunk": 0}',
                                     b'{"device": "cuda", "engine": "kernel", "chunk": 3}'])  # fmt: skip
def test_a_damaged_word_on_the_engine_is_passed_over(tmp_path: Path, content: bytes) -> None:
    run = tmp_path / "run"
    train_experiment(assemble(SMALL), run, quiet=True, most_releases=1)
    (run / "engine.json").write_bytes(content)
    assert train_experiment(assemble(SMALL), run, quiet=True, resume=True).rounds == 4
