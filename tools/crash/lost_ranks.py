"""Lost ranks: kill one rank of a training at random moments, and resume the run with another number of ranks.

    python -m tools.crash.lost_ranks --out results/reliability/lost_ranks.json      # make lost-ranks

The ranks are forks that run `fedcdp train` in the environment that torchrun sets. As torchrun does, the job sends SIGTERM
to the ranks that still run some seconds after the kill. After every kill, all ranks must end, with two lines at most. The
ledger must count every round that a rank had begun, which independent witnesses recorded. Then the run is resumed, with one
to three ranks, and some of these are killed as well. Under seeded noise the end must equal an undisturbed run of one
process, to the bit. Under secure noise every release must be counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks.clean_tree import clean_commit
from fedcdp.accounting.ledger import Ledger
from fedcdp.cli import train
from fedcdp.cli.program import main as fedcdp_main
from fedcdp.files.disk import write_atomically
from fedcdp.studies.bench.result_file import describe, load_average
from fedcdp.training import rounds
from tools.crash.checks import examine, require, same

ROUNDS = 12
SMALL = ["--dataset", "cancer", "--clients", "12", "--per-round", "6", "--local-steps", "6", "--rounds", str(ROUNDS)]
SCENARIOS: dict[str, list[str]] = {
    "fed-cdp": ["--method", "fed-cdp", "--server-optimizer", "adam", "--server-lr", "0.1"],
    "fed-cdp, secure noise": ["--method", "fed-cdp", "--secure-noise", "--ema", "0.7"],
    "fed-sdp, quantile clip": ["--method", "fed-sdp", "--clip", "quantile(0.5, 4)"],
    "fed-sdp, noise on the sum": ["--method", "fed-sdp", "--noise-at", "client", "--noise", "sum", "--secure-aggregation"],
}
_NOTICED = 5.0  # seconds until a job notices that a rank is lost; torchrun takes a tenth of one
_PATIENCE = 60.0


class Job:
    """`fedcdp train` on several ranks. Each of them records the rounds that it begins, and what it prints."""

    def __init__(self, size: int, arguments: list[str], aside: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._size, self._arguments, self._aside = size, arguments, aside
        fork = multiprocessing.get_context("fork")
        self.ranks: list[BaseProcess] = [fork.Process(target=self._main, args=(rank,)) for rank in range(size)]
        for rank in self.ranks:
            rank.start()

    def ended(self) -> list[int]:
        """The status of every rank, once all have ended by themselves."""
        for rank, process in enumerate(self.ranks):
            process.join(_PATIENCE)
            require(process.exitcode is not None, f"rank {rank} does not end")
        return [process.exitcode or 0 for process in self.ranks]

    def killed(self, victim: int, after: float) -> tuple[bool, list[int]]:
        """Kill a rank; whether it still ran, and how all of them ended."""
        self.ranks[victim].join(after)
        alive = self.ranks[victim].exitcode is None
        self.ranks[victim].kill()
        until = time.monotonic() + _NOTICED
        for process in self.ranks:
            process.join(max(0.0, until - time.monotonic()))
        for process in self.ranks:
            if process.exitcode is None:
                process.terminate()
        return alive, self.ended()

    def lines(self) -> list[str]:
        """What the ranks printed."""
        said = [(self._aside / f"said-{rank}").read_text() for rank in range(self._size)]
        return [line for each in said for line in each.splitlines() if line.startswith("fedcdp: ")]

    def _main(self, rank: int) -> None:
        output = os.open(self._aside / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if self._size > 1:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self._size),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port), "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
        witness = self._aside / ("witness" if rank == 0 else "follower")
        _bear_witness(os.open(witness, os.O_WRONLY | os.O_CREAT | os.O_APPEND), rank)
        train.accounting_is_installed = lambda: False
        sys.argv = ["fedcdp", *self._arguments]
        fedcdp_main()


def _bear_witness(file: int, rank: int) -> None:
    """Record every round as this rank begins it, independently of the ledger."""
    name = "round" if rank == 0 else "_portion"
    real, write = getattr(rounds.Simulator, name), os.write

    def witnessed(self: Any, state: Any, *rest: Any) -> Any:
        write(file, f"{state.round}\n".encode())
        return real(self, state, *rest)

    setattr(rounds.Simulator, name, witnessed)


def check(run: Path, aside: Path, secure: bool) -> None:
    """Check the files after a kill: nothing is damaged, and each round that a rank began is counted."""
    examine(run, aside / "witness", secure)
    follower = aside / "follower"
    begun = {int(line) for line in follower.read_text().split()} if follower.exists() else set()
    ledger = run / "ledger.jsonl"
    charged = set(Ledger.open(ledger).rounds) if ledger.exists() else set()
    require(begun <= charged, f"followers began {sorted(begun - charged)}, which the ledger does not have")


def disturbed(name: str, kills: int, chance: random.Random, place: Path) -> Counter[str]:
    """One scenario: runs killed until so many kills struck a rank that still ran; counts of what happened."""
    secure, options = "--secure-noise" in SCENARIOS[name], [*SMALL, *SCENARIOS[name], "--chunk", "1", "--quiet"]
    whole, run, aside, found = place / "whole", place / "run", place / "aside", Counter[str]()
    aside.mkdir(parents=True)
    require(Job(1, ["train", *options, "--out", str(whole)], aside).ended() == [0], "the undisturbed run fails")
    started = time.monotonic()
    require(Job(3, ["train", *options, "--out", str(place / "timed")], aside).ended() == [0, 0, 0], "three ranks fail")
    same(place / "timed", whole, secure, ROUNDS)
    life = time.monotonic() - started
    while found["kills"] < kills:
        for path in (run, aside):
            shutil.rmtree(path, ignore_errors=True)
        aside.mkdir()
        for _ in range(3):  # the run, and then its resumption, killed again
            size = chance.choice([2, 3])
            victim = chance.randrange(size)
            job = Job(size, _arguments(run, options), aside)
            alive, ended = job.killed(victim, chance.uniform(0.3, life))
            check(run, aside, secure) if run.exists() else None
            if not alive:
                break
            survivors = [status for rank, status in enumerate(ended) if rank != victim]
            require(
                set(survivors) <= {0, 1, -signal.SIGTERM}, f"after the loss of rank {victim}, ranks end with {survivors}"
            )
            require(len(job.lines()) <= 2, f"more than two lines: {job.lines()}")
            found["kills"] += 1
            found[f"rank {min(victim, 1)}{'+' if victim else ''} killed"] += 1
            found["ended by the lost connection, with a line"] += 1 in survivors and len(job.lines()) > 0
        size = chance.choice([1, 2, 3])
        require(set(Job(size, _arguments(run, options), aside).ended()) == {0}, f"{size} ranks do not continue")
        check(run, aside, secure)
        same(run, whole, secure, ROUNDS)
        found[f"finished by {size} rank{'s' if size > 1 else ''}"] += 1
    return found


def _arguments(run: Path, options: list[str]) -> list[str]:
    begun = (run / "config.toml").exists()
    return ["train", "--out", str(run), *(["--resume", "--quiet"] if begun else options)]


def _measured_before(path: Path, commit: str | None) -> dict[str, dict[str, int]]:
    """The scenarios that a result file has of this commit: they can be measured one by one."""
    before = json.loads(path.read_text()) if path.exists() else {}
    scenarios: dict[str, dict[str, int]] = before.get("scenarios", {}) if before.get("commit") == commit else {}
    return scenarios


def main() -> int:
    """Run, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="Kills of a rank that still ran, in each scenario.")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="Write the result to this JSON file, or add it.")
    given = parser.parse_args()
    commit = clean_commit(str(given.out)) if given.out else None
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["FEDCDP_CACHE"] = str(Path(temporary) / "cache")
        for number, name in enumerate(given.scenarios):
            counts = disturbed(name, given.kills, random.Random(f"{given.seed}, {name}"), Path(temporary) / str(number))
            found[name] = dict(sorted(counts.items()))
            print(f"{name}: {found[name]}", flush=True)
    if given.out:
        found = _measured_before(given.out, commit) | found
        result = {
            "command": shlex.join(
                ["python", "-m", "tools.crash.lost_ranks", "--kills", str(given.kills), "--seed", str(given.seed)]
            ),
            "commit": commit,
            "kills": sum(counts["kills"] for counts in found.values()),
            "scenarios": found,
            "machine": describe(torch.device("cpu")) | {"load_average": load_average()},
        }
        write_atomically(given.out, (json.dumps(result, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
