"""The command line as a user meets it: in a directory of the test's own, with no data directory and no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pytest

import fedcdp
from fedcdp.cli.program import main
from fedcdp.config.experiment import assemble
from fedcdp.data import fetch
from fedcdp.training.trainer import train_experiment

SMALL = {
    "data": {"dataset": "cancer", "clients": 8},
    "plan": {"per_round": 4, "rounds": 3, "local_steps": 2},
}


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


Cli = Callable[..., Outcome]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of the command: empty, and all that it may write to."""

    def offline(url: str) -> IO[bytes]:
        raise OSError(f"the network is down for {url}")

    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.delenv("FEDCDP_DATA", raising=False)
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "open_https", offline)
    monkeypatch.setattr(sys, "path", list(sys.path))  # --model adds the current directory
    return place


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process; what is not caught by the program fails the test, as a traceback would a user."""

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["fedcdp", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), written.out, written.err)

    return call


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command as a process of its own; whatever still runs at the end of the test is killed."""
    running: list[subprocess.Popen[str]] = []
    source = str(Path(fedcdp.__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
    }

    def launch(*command: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        running.append(process)
        return process

    yield launch
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def wait_for_rounds() -> Callable[[Path, int], None]:
    """Wait until a run has written so many rounds."""

    def wait(run: Path, rounds: int) -> None:
        deadline = time.monotonic() + 300
        metrics = run / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= rounds):
            assert time.monotonic() < deadline, f"{run} did not reach round {rounds} in five minutes"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    train_experiment(assemble(SMALL), run, quiet=True)
    return run


@pytest.fixture
def run(_finished: Path, workplace: Path) -> Path:
    """A finished small run on the cancer data, of which the test may do what it likes."""
    return Path(shutil.copytree(_finished, workplace / "run"))


@pytest.fixture
def own_npz(workplace: Path) -> Path:
    """A user's own data: 3 classes of 40 records each, 4 features, far enough apart to be learned."""
    labels = np.arange(120) % 3
    features = np.random.default_rng(1).normal(size=(120, 4)) + 2.0 * labels[:, None]
    path = workplace / "own.npz"
    np.savez(path, x=features, y=labels)
    return path
