"""Crash test: kill trainings, or fill their disk, at every call that changes a file and at random moments.

    python -m tools.crash --out results/reliability/crashes.json          # make crashes
    python -m tools.crash --short                                         # a few of each, as in CI
        python -m tools.crash --device cuda --points 3 --again 1 --workers 10  # a GPU starts slowly

| part | what is done |
| --- | --- |
| moments | the command as a user starts it, killed with SIGKILL at random times from its start to its end |
| calls | killed before each call that changes a file, and in the middle of each write |
| again | killed at random calls again and again, also while it repairs the effects of the previous kill |
| full | no space left on the device, from each call on |
| others | `attack`, `bench`, `reproduce` and `export`, killed and out of space at each call |

After every kill, the files are checked as they are: the ledger verifies and counts at least every round whose training had
begun (which an independent witness recorded). The checkpoint is complete, and neither it nor the metrics hold a round that
was not charged. Then the run is resumed to its end. Under seeded noise, model, metrics and ledger must equal those of an
undisturbed run, to the bit. Under secure noise every release must be counted, repeated ones twice. A full disk must be
reported in one line, with exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcdp.config.experiment import assemble
from fedcdp.files.disk import write_atomically
from fedcdp.studies.bench.result_file import describe, load_average
from fedcdp.training.trainer import train_experiment
from tools.crash.checks import CrashError, examine, require, same, told_in_one_line, whole_files
from tools.crash.faults import Strike
from tools.crash.processes import Ended, command, forked, run_fork

SMALL = ["--dataset", "cancer", "--clients", "12", "--per-round", "6", "--local-steps", "2", "--rounds", "2"]
SCENARIOS: dict[str, list[str]] = {
    "nonprivate": ["--method", "nonprivate", "--momentum", "0.5"],
    "dssgd": ["--method", "dssgd", "--record-sampling", "fixed"],
    "fed-sdp at the server": ["--method", "fed-sdp", "--record-sampling", "partition"],
    "fed-sdp at the client": ["--method", "fed-sdp", "--noise-at", "client", "--client-sampling", "poisson"],
    "fed-cdp": ["--method", "fed-cdp", "--ema", "0.7"],
    "fed-cdp, fixed order": ["--method", "fed-cdp", "--record-sampling", "partition", "--noise", "batch"],
    "fed-cdp, quantile clip": ["--method", "fed-cdp", "--clip", "quantile(0.5, 4)", "--aggregation", "fedaveraging"],
    "fed-cdp-decay": ["--method", "fed-cdp-decay", "--record-sampling", "fixed", "--compression", "0.3"],
    "fed-cdp, secure noise": ["--method", "fed-cdp", "--secure-noise", "--ema", "0.7"],
    "fed-sdp, secure noise": ["--method", "fed-sdp", "--secure-noise", "--clip", "quantile(0.5, 4)"],
}
PATIENCE = 120.0


# Trainings -----------------------------------------------------------------------------------------------------------


class Trainings:
    """One scenario, and the ways to disturb it."""

    def __init__(self, name: str, place: Path, device: str) -> None:
        self.name, self.secure = name, "--secure-noise" in SCENARIOS[name]
        self._place, self._aside = place, place / "aside"
        self._aside.mkdir(parents=True)
        self._options = [*SMALL, *SCENARIOS[name], "--device", device, "--quiet"]
        self._whole = place / "whole"
        self.rounds = int(SMALL[-1])
        ended = self._train(self._whole, None)
        require(ended.status == 0, ended.stderr)
        self.calls = ended.calls

    def killed_at(self, strike: Strike) -> str:
        """Kill it once, then resume; returns the call."""
        run = self._fresh()
        ended = self._train(run, strike)
        require(ended.status == -signal.SIGKILL, f"it was not killed, but ended with {ended.status}: {ended.stderr}")
        examine(run, self._aside / "witness", self.secure)
        self._finish(run)
        return ended.calls[-1]

    def killed_again(self, chance: random.Random, most: int) -> int:
        """Kill it at random calls until it ends by itself, or `most` times; returns the number of kills."""
        run, kills = self._fresh(), 0
        while kills < most:
            how = chance.choice(["kill", "tear"])
            ended = self._train(run, Strike(how, chance.randrange(len(self.calls) // 2)))
            require(ended.status in (0, -signal.SIGKILL), f"it ended with {ended.status}: {ended.stderr}")
            examine(run, self._aside / "witness", self.secure)
            if ended.status == 0:
                break
            kills += 1
        self._finish(run)
        return kills

    def out_of_space(self, at: int) -> None:
        """No space left from a call on: one line, status 1, nothing damaged, and resumed once there is space."""
        run = self._fresh()
        ended = self._train(run, Strike("full", at))
        told_in_one_line(ended)
        examine(run, self._aside / "witness", self.secure)
        self._finish(run)

    def _fresh(self) -> Path:
        run = self._place / "run"
        shutil.rmtree(run, ignore_errors=True)
        (self._aside / "witness").unlink(missing_ok=True)
        return run

    def _train(self, run: Path, strike: Strike | None) -> Ended:
        """Start the run, or continue it, as a user would."""
        begun = (run / "config.toml").exists()
        arguments = ["train", "--out", str(run), *(["--resume", "--quiet"] if begun else self._options)]
        return run_fork(arguments, run, strike, self._aside)

    def _finish(self, run: Path) -> None:
        ended = self._train(run, None)
        require(ended.status == 0, f"it does not continue: {ended.stderr}")
        examine(run, self._aside / "witness", self.secure)
        same(run, self._whole, self.secure, self.rounds)


# Random moments of the real command ----------------------------------------------------------------------------------


def moments(name: str, place: Path, device: str, kills: int, chance: random.Random) -> int:
    """Kill a training at random times over its whole life; returns how often it was still alive to be killed.

    The first is the command itself, from the start of its interpreter; the others are forks, which start at once.
    """
    secure = "--secure-noise" in SCENARIOS[name]
    place.mkdir(parents=True)
    longer = ["train", *SMALL[:-1], "40", *SCENARIOS[name], "--device", device, "--quiet"]
    whole, run, landed = place / "whole", place / "run", 0
    lives = {}
    for start in (command, forked):
        shutil.rmtree(whole, ignore_errors=True)
        started = time.monotonic()
        require(start(*longer, "--out", str(whole)).wait(PATIENCE) == 0, "the undisturbed run fails")
        lives[start] = time.monotonic() - started
    for _ in range(4 * kills):  # a run that ended before its kill, on a busy machine, does not count
        if landed == kills:
            break
        shutil.rmtree(run, ignore_errors=True)
        start = forked if landed else command
        process = start(*longer, "--out", str(run))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0, lives[start]))
        process.kill()
        landed += process.wait(PATIENCE) == -signal.SIGKILL
        if run.exists():
            examine(run, place / "nobody", secure)
        options = ["train", "--resume", "--quiet"] if (run / "config.toml").exists() else longer
        require(forked(*options, "--out", str(run)).wait(PATIENCE) == 0, "it does not continue")
        same(run, whole, secure, 40)
    require(landed == kills, f"only {landed} of {kills} kills came before its end")
    return landed


# Other commands ------------------------------------------------------------------------------------------------------


def others(place: Path, trained: Path) -> dict[str, list[str]]:
    """Commands that write files, by name; their output goes below `place / "out"`."""
    out = place / "out"
    leak = ["--dataset", "mnist5k", "--method", "nonprivate", "--leak", "type2", "--attack", "dlg"]
    return {
        "attack": ["attack", *leak, "--victims", "1", "--iterations", "2", "--quiet", "--out", str(out)],
        "bench": [
            "bench",
            "--quick",
            "--no-peers",
            "--repeat",
            "1",
            "--per-round",
            "2",
            "--quiet",
            "--out",
            str(out / "b.json"),
        ],
        "reproduce": [
            "reproduce",
            "epsilon",
            "--cells",
            "fed-cdp/cifar10/L100",
            "--workers",
            "1",
            "--quiet",
            "--out",
            str(out),
        ],
        "export": ["export", str(trained), "--to", str(out / "model.safetensors")],
    }


def disturb_command(arguments: list[str], place: Path, most: int) -> dict[str, int]:
    """Kill a command at each of its calls, and fill its disk from each on: files stay valid, and it can be run again."""
    out, aside = place / "out", place / "aside"
    aside.mkdir(parents=True, exist_ok=True)

    def run(strike: Strike | None) -> Ended:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        return run_fork(arguments, out, strike, aside)

    calls = run(None)
    require(calls.status == 0, calls.stderr)
    done: Counter[str] = Counter()
    for at in _spread(len(calls.calls), most):
        for how in ("kill", "tear", "full"):
            if how == "tear" and not calls.calls[at].startswith("write"):
                continue
            ended = run(Strike(how, at))
            require(how == "full" or ended.status == -signal.SIGKILL, f"{how}: it ended with {ended.status}: {ended.stderr}")
            if how == "full":
                last = ended.stderr.strip().splitlines()[-1]
                require(ended.status == 1 and "No space left" in last and "Traceback" not in ended.stderr, ended.stderr)
            whole_files(out)
            done[how] += 1
    require(run(None).status == 0, "it cannot be run again")
    return dict(done)


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread, including the first and the last."""
    return sorted({round(each) for each in np.linspace(0, count - 1, min(most, count))})


# All of it -----------------------------------------------------------------------------------------------------------


def disturb_training(name: str, given: argparse.Namespace, place: Path) -> dict[str, Any]:
    """One scenario, struck at its calls."""
    chance = random.Random(f"{given.seed}, calls, {name}")
    most = 3 if given.short else given.points or 10**6
    trainings = Trainings(name, place / "calls" / name.replace(" ", "-"), given.device)
    points = [Strike("kill", at) for at in _spread(len(trainings.calls), most)]
    torn = [at for at, call in enumerate(trainings.calls) if call.startswith("write")]
    points += [Strike("tear", torn[each]) for each in _spread(len(torn), most)]
    struck = Counter(trainings.killed_at(point) for point in points)
    again = [trainings.killed_again(chance, 12) for _ in range(1 if given.short else given.again)]
    full = _spread(len(trainings.calls), most)
    for at in full:
        trainings.out_of_space(at)
    return {"kills": sum(struck.values()), "kills_again": sum(again), "full_disks": len(full), "calls": dict(struck)}


def kill_at_moments(name: str, given: argparse.Namespace, place: Path) -> dict[str, Any]:
    """One scenario, killed at its share of the random moments."""
    names = given.scenarios
    share = len(range(names.index(name), given.moments, len(names)))
    chance = random.Random(f"{given.seed}, moments, {name}")
    where = place / "moments" / name.replace(" ", "-")
    return {"kills": share, "landed": moments(name, where, given.device, share, chance)}


def disturb_others(place: Path) -> dict[str, dict[str, int]]:
    """The other commands, one after another."""
    trained, aside = place / "trained", place / "aside"
    aside.mkdir()
    made = run_fork(["train", *SMALL, "--quiet", "--out", str(trained)], trained, None, aside)
    require(made.status == 0, made.stderr)
    commands = others(place / "others", trained)
    return {name: disturb_command(arguments, place / "others", 8) for name, arguments in commands.items()}


def experiments(given: argparse.Namespace, place: Path) -> dict[tuple[str, str], Callable[[], dict[str, Any]]]:
    """The function for each part of each scenario."""
    chosen: dict[tuple[str, str], Callable[[], dict[str, Any]]] = {
        ("calls", name): partial(disturb_training, name, given, place) for name in given.scenarios
    }
    if not given.short:
        chosen |= {("moments", name): partial(kill_at_moments, name, given, place) for name in given.scenarios}
    if not given.short and given.device == "cpu":  # the device does not change what they write
        chosen["others", "all"] = partial(disturb_others, place)
    return chosen


def attempted(experiment: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of an experiment, or the failure."""
    try:
        return experiment()
    except CrashError as error:
        return {"failed": str(error)}


def main() -> int:
    """Run, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="A few of each, for selected scenarios.")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--points", type=int, default=None, help="Number of calls of a training to strike. Default: all.")
    parser.add_argument("--again", type=int, default=3, help="Trainings per scenario that are killed again and again.")
    parser.add_argument("--moments", type=int, default=50, help="Kills of the command itself, at random times.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="Scenarios to run at the same time.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="Write the result to this JSON file.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that has used the driver cannot be forked,
    if given.device == "cpu":  # and any training on a machine with a GPU does; loading here saves loading in every fork
        train_experiment(
            assemble({"data": {"dataset": "cancer"}, "plan": {"rounds": 1, "local_steps": 1, "per_round": 2}}),
            None,
            quiet=True,
        )
    found: dict[str, dict[str, Any]] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["FEDCDP_CACHE"] = str(Path(temporary) / "cache")
        todo = experiments(given, Path(temporary))
        with ProcessPoolExecutor(given.workers, multiprocessing.get_context("fork")) as pool:
            begun = {pool.submit(attempted, experiment): about for about, experiment in todo.items()}
            for done in as_completed(begun):
                part, name = begun[done]
                found.setdefault(part, {})[name] = done.result()
                print(f"{part}, {name}: {done.result()}", flush=True)
    failures = [
        f"{part}, {name}: {each['failed']}".replace(temporary, "TMP")
        for part, those in found.items()
        for name, each in those.items()
        if "failed" in each
    ]
    result = {
        "command": shlex.join(["python", "-m", "tools.crash", *_not_to_the_result(sys.argv[1:])]),
        "seed": given.seed,
        "totals": _totals(found),
        "failures": failures,
        "seconds": round(time.monotonic() - started),
        "machine": describe(torch.device(given.device)) | {"load_average": load_average()},
        "parts": {part: dict(sorted(those.items())) for part, those in sorted(found.items())},
    }
    print(json.dumps(result["totals"]))
    if given.out:
        write_atomically(given.out, (json.dumps(result, indent=1) + "\n").encode())
    return 1 if failures else 0


def _not_to_the_result(arguments: list[str]) -> list[str]:
    at = arguments.index("--out") if "--out" in arguments else len(arguments)
    return arguments[:at] + arguments[at + 2 :]


def _totals(found: dict[str, dict[str, Any]]) -> dict[str, int]:
    calls, timed = (found.get(part, {}).values() for part in ("calls", "moments"))
    other = [counts for each in found.get("others", {}).values() for counts in each.values() if isinstance(counts, dict)]
    return {
        "killed at a call, resumed": sum(each.get("kills", 0) for each in calls),
        "killed again and again": sum(each.get("kills_again", 0) for each in calls),
        "full disks, resumed": sum(each.get("full_disks", 0) for each in calls),
        "killed at a random moment, resumed": sum(each.get("landed", 0) for each in timed),
        "other commands disturbed": sum(each.get(how, 0) for each in other for how in ("kill", "tear", "full")),
    }
