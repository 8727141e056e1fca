"""`breaching`'s own attacks and fedcdp's on the same gradients, scored by the same code.

    python -m benchmarks.breaching_peer --device cuda --workers 16 --seconds 520    # results/breaching.json
    python -m benchmarks.breaching_peer --table > results/breaching.md

`make breaching` builds build/breaching_site first, a folder of pure Python that any interpreter can use. Every attack of
`breaching` runs all iterations of its configuration, on one victim after the other, since it cannot batch them. Finished
victims are kept in build/breaching.pt: the same command goes on where the last one stopped, also with more victims. `--list`
names the cells, in their order. Many processes share a GPU well only under CUDA's multi-process service
(`nvidia-cuda-mps-control -d`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.clean_tree import clean_commit
from benchmarks.peers.breaching_attacks import PEERS, attack_gradient
from fedcdp.attacks.judging import Observer, told
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.observe import Look
from fedcdp.attacks.portfolio import Attempts, strongest
from fedcdp.attacks.recipe import RECIPES
from fedcdp.attacks.reconstruct import Reconstruction
from fedcdp.attacks.scene import simulated
from fedcdp.attacks.scores import Criteria
from fedcdp.config.experiment import assemble
from fedcdp.config.presets import preset
from fedcdp.models.networks import build
from fedcdp.training.prepared import deal_out, load_splits, network_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "breaching.json"
STORE = ROOT / "build" / "breaching.pt"
VICTIMS = 50
WHOSE = ("fedcdp", "breaching")
FIGURES = (
    "attack", "victims", "examples", "success_rate", "recognisable_rate", "identified_rate", "distance_median",
    "distance_mean", "psnr_mean", "label_accuracy", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What both read: LFW faces, 3×32×32 pixels."""

    name: str
    title: str
    plan: dict[str, Any]
    leak: str = "type2"
    network: str = "cpl"
    tells_labels: bool = False
    """Whether `breaching` is told the labels: it infers them from the gradient of a last bias, without noise."""
    peers: tuple[str, ...] = tuple(PEERS)[:4]


_CLEAN, _CDP = {"method": "nonprivate"}, {"method": "fed-cdp", "clip": 4.0, "noise_multiplier": 6.0}
_LESS_SMOOTH = tuple(PEERS)[:5]
CASES = {
    case.name: case
    for case in (
        Case("single", "one example, undefended (type-2)", _CLEAN, peers=tuple(PEERS)),
        Case("clipped", "one example, clipped, without noise (type-2)", _CDP | {"noise_multiplier": 0.0}),
        Case("batch", "update of three examples, undefended (type-0 and type-1)", _CLEAN, "type1", peers=_LESS_SMOOTH),
        Case("cnn", "one example, undefended, the paper's CNN (type-2)", _CLEAN, network="cnn", tells_labels=True,
             peers=_LESS_SMOOTH),
        Case("fed-cdp", "one example, Fed-CDP σ = 6, C = 4 (type-2)", _CDP, tells_labels=True),
    )
}  # fmt: skip
# Most telling first: the attack of `breaching` that can do most in each case; then the rest.
_FIRST = (
    "single/wei, as published", "clipped/invertinggradients", "batch/wei, as published", "cnn/wei, as published",
    "fed-cdp/wei, as published", "cnn/invertinggradients", "batch/invertinggradients", "single/invertinggradients",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One attack on one victim by `breaching`, or fedcdp's `best` on all victims (`victim` is None)."""

    case: str
    attack: str
    victim: int | None
    victims: int
    device: str
    iterations: int | None

    @property
    def cell(self) -> str:
        return f"{self.case}/{self.attack}"


def cells() -> list[str]:
    """All cells of `breaching`, in the order in which they run."""
    every = [f"{case.name}/{peer}" for peer in PEERS for case in CASES.values() if peer in case.peers]
    return [*_FIRST, *(name for name in every if name not in _FIRST)]


# Attacking -----------------------------------------------------------------------------------------------------------


@cache
def attempts_on(name: str, victims: int, device: str) -> Attempts:
    """The victims of a case, as fedcdp's attacks see them."""
    case = CASES[name]
    changes = {"plan": case.plan, "model": {"network": case.network}, "run": {"device": device}}
    experiment = assemble(preset("lfw"), changes)
    splits = load_splits(experiment, quiet=True)
    scene = simulated(
        experiment.plan, network_of(experiment, splits), deal_out(experiment, splits), case.leak, None, 0, 1,
        torch.device(device), None, None,
    )  # fmt: skip
    criteria = Criteria().within(*scene.value_range)
    return Attempts(scene, Look(case.leak, 0, 1), victims, criteria, scene.plan.seed)


def do(task: Task) -> dict[str, Any]:
    """Run one task in a worker."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    attempts = attempts_on(task.case, task.victims, task.device)
    if task.victim is None:
        if task.iterations is not None:  # a test of this program
            found = attempts.run("recipe", RECIPES["cpl"].but(iterations=task.iterations))
        else:
            found = strongest(attempts)
        assert isinstance(found, Leaks)
        return {"summary": found.summary()}
    case, captured, number = CASES[task.case], attempts.captured, task.victim
    network = build(case.network, attempts.scene.shape, attempts.scene.classes)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(captured.weights[name][number])
    examples = int(captured.present[number].sum())
    answer = attack_gradient(
        PEERS[task.attack], network, [captured.seen[name][number] for name, _ in network.named_parameters()],
        attempts.scene.shape, attempts.scene.classes, examples,
        captured.targets[number][captured.present[number]] if case.tells_labels else None,
        device=torch.device(task.device), seed=number, iterations=task.iterations,
    )  # fmt: skip
    return vars(answer)


def scored(case: str, attack: str, answers: dict[int, dict[str, Any]], device: str = "cpu") -> dict[str, Any]:
    """The figures of `breaching`'s answers, by the code that scores fedcdp's attacks."""
    attempts = attempts_on(case, VICTIMS if max(answers) < VICTIMS else max(answers) + 1, device)
    who = torch.tensor(sorted(answers))
    captured = attempts.captured.take(who)
    examples, labels = captured.tensor.clone(), captured.targets.clone()
    for row, victim in enumerate(who.tolist()):
        slots = captured.present[row].nonzero()[:, 0][: len(answers[victim]["examples"])]
        examples[row, slots] = answers[victim]["examples"]
        labels[row, slots] = answers[victim]["labels"]
    ended = torch.tensor([answers[victim]["iterations"] for victim in who.tolist()])
    found = Reconstruction(
        examples, examples, torch.zeros_like(examples), labels, torch.zeros(len(who)), ended,
        torch.zeros(len(who), dtype=torch.int64),
    )  # fmt: skip
    observer = Observer(captured, attempts.criteria, attempts.visible, attempts.scene.value_range)
    seconds = sum(answers[victim]["seconds"] for victim in who.tolist())
    leaks = told(attempts.scene, attack, captured, found, observer, seconds, watched=False)
    about = {
        name: sum(answers[victim][name] for victim in who.tolist()) / len(who) for name in ("iterations", "evaluations")
    }
    return leaks.summary() | {f"{name}_of_breaching": each for name, each in about.items()}


# Running -------------------------------------------------------------------------------------------------------------


def tasks(
    stored: dict[str, Any], wanted: list[str], victims: int, device: str, iterations: int | None,
    whose: tuple[str, ...] = WHOSE,
) -> Iterator[Task]:  # fmt: skip
    """What is left to do: fedcdp's best on the wanted cases, then `breaching`'s cells in their order."""
    for case in dict.fromkeys(name.partition("/")[0] for name in wanted):
        ours = stored["ours"].get(case)
        if (ours is None or ours["summary"]["victims"] < victims) and "fedcdp" in whose:
            yield Task(case, "best", None, victims, device, iterations)
    for cell in wanted if "breaching" in whose else ():
        case, _, attack = cell.partition("/")
        for victim in range(victims):
            if victim not in stored["answers"].get(cell, {}):
                yield Task(case, attack, victim, victims, device, iterations)


def run(given: argparse.Namespace) -> int:
    """Do what is left until the time is over; the number of tasks that failed."""
    origin = {"commit": given.commit or clean_commit(), "machine": _machine(given.device)}
    given.store.parent.mkdir(parents=True, exist_ok=True)
    stored = torch.load(given.store, weights_only=True) if given.store.exists() else {"ours": {}, "answers": {}}
    wanted = [name for name in cells() if name.startswith(tuple(given.only))]
    todo = list(tasks(stored, wanted, given.victims, given.device, given.iterations, tuple(given.whose)))
    print(f"{len(todo)} tasks", flush=True)
    started, failed, saved = time.perf_counter(), 0, time.perf_counter()
    with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
        waiting: dict[Future[dict[str, Any]], Task] = {}
        while todo or waiting:
            while todo and len(waiting) < given.workers and time.perf_counter() - started < given.seconds:
                task = todo.pop(0)
                waiting[pool.submit(do, task)] = task
            if not waiting:
                break
            for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                task = waiting.pop(done)
                try:
                    keep(stored, task, done.result(), origin)
                except Exception as error:
                    failed += 1
                    print(f"{task.cell}, victim {task.victim}: {type(error).__name__}: {error}", flush=True)
                    continue
                after = time.perf_counter() - started
                if task.victim in (None, 0, given.victims - 1):
                    who = "all victims" if task.victim is None else f"victim {task.victim}"
                    print(f"{after:5.0f} s  {task.cell}  {who}", flush=True)
                if task.victim is None or time.perf_counter() - saved > 20:
                    torch.save(stored, given.store)
                    saved = time.perf_counter()
    torch.save(stored, given.store)
    print(f"{time.perf_counter() - started:.0f} s; {len(todo)} tasks are left", flush=True)
    command = f"python -m benchmarks.breaching_peer --device {given.device} --victims {given.victims}"
    given.out.write_text(
        json.dumps({"command": command} | report(stored), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return failed


def keep(stored: dict[str, Any], task: Task, got: dict[str, Any], origin: dict[str, str]) -> None:
    """Store the result of a task."""
    if task.victim is None:
        stored["ours"][task.case] = origin | got
    else:
        stored["answers"].setdefault(task.cell, {})[task.victim] = got | origin


def report(stored: dict[str, Any]) -> dict[str, Any]:
    """All figures, for the result file."""
    cases: dict[str, Any] = {}
    for name, case in CASES.items():
        row = stored["ours"].get(name)
        best = None if row is None else _short(row["summary"], row) | {"tried": row["summary"]["tried"]}
        theirs = {}
        for peer in PEERS:
            if answers := stored["answers"].get(f"{name}/{peer}"):
                summary = scored(name, peer, answers)
                theirs[peer] = _short(summary, answers[min(answers)])
                theirs[peer] |= {key: round(summary[f"{key}_of_breaching"], 1) for key in ("iterations", "evaluations")}
                theirs[peer]["changes"] = list(PEERS[peer].changes)
                theirs[peer]["recorded"] = sum(bool(each["recorded"]) for each in answers.values())
        if best or theirs:
            told_labels = "labels told" if case.tells_labels else "labels inferred"
            cases[name] = {"title": case.title, "network": case.network, "breaching_labels": told_labels, "best": best,
                           "breaching": theirs, "verdict": verdict(best, theirs)}  # fmt: skip
    return {
        "breaching": "0.1.2",
        "cases": cases,
    }


def verdict(best: dict[str, Any] | None, theirs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Whether fedcdp's best is at least as good as every finished attack of `breaching`: as many exact and recognisable."""
    complete = _on_all_victims(best, theirs)
    if best is None or not complete:
        return {"at_least_as_good": None, "stronger": []}
    stronger = [
        name
        for name, row in complete.items()
        if row["success_rate"] > best["success_rate"] or row["recognisable_rate"] > best["recognisable_rate"]
    ]
    return {"at_least_as_good": not stronger, "stronger": stronger}


def _on_all_victims(best: dict[str, Any] | None, theirs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The attacks of `breaching` that have finished all victims of fedcdp's best."""
    return {name: row for name, row in theirs.items() if best is not None and row["victims"] == best["victims"]}


def _short(summary: dict[str, Any], origin: dict[str, Any]) -> dict[str, Any]:
    return {name: summary.get(name) for name in FIGURES} | {name: origin[name] for name in ("commit", "machine")}


def _machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU, one thread"
    return f"{name}, Python {platform.python_version()}, torch {torch.__version__}"


# Showing -------------------------------------------------------------------------------------------------------------

HEADINGS = ("attack", "victims", "exact", "recognisable", "identified", "MSE median", "PSNR mean", "seconds a victim")


def markdown(found: dict[str, Any]) -> str:
    """All cases as tables."""
    lines = [
        "# `breaching` and fedcdp on the same gradients",
        "",
        "`make breaching` measures and writes this page; breaching.json has the commit and the machine of each row.",
        "LFW faces, 3×32×32 pixels, 62 people. All iterations of each configuration; one code scores all.",
        "*Exact*: MSE < 1e-3; *recognisable*: PSNR of 15 dB or more and closer than the class mean; *identified*: nearest",
        "of 1000. fedcdp attacks all victims at once, `breaching` one after the other: seconds a victim are those of one",
        "process of many on a machine.",
    ]
    for case in found["cases"].values():
        lines += ["", f"## {case['title']}, network `{case['network']}`, `breaching`: {case['breaching_labels']}", ""]
        lines += [_row(HEADINGS), _row(["---"] * len(HEADINGS))]
        best = case["best"]
        lines += [] if best is None else [_row([f"fedcdp `best`: `{best['attack']}`", *_figures(best)])]
        lines += [_row([f"breaching `{name}`", *_figures(row)]) for name, row in case["breaching"].items()]
        lines += ["", sentence(case["verdict"]), "", *([] if best is None else [tried(best)])]
    return "\n".join(lines)


def tried(best: dict[str, Any]) -> str:
    """The attacks that fedcdp's best tried, with the share of exact and of recognisable examples."""
    told = [f"`{each['attack']}` {_both(each)}" for each in best["tried"] if each.get("recognisable_rate") is not None]
    return f"fedcdp's `best` tried, exact / recognisable: {', '.join(told)}."


def compared(found: dict[str, Any]) -> str:
    """One row for each case: fedcdp's best, the strongest attack of `breaching`, and the verdict."""
    headings = ["what both read", "victims", "fedcdp `best`: exact / recognisable", "`breaching`: exact / recognisable",
                "by", "fedcdp at least as good"]  # fmt: skip
    lines = [_row(headings), _row(["---"] * len(headings))]
    for case in found["cases"].values():
        best = case["best"]
        theirs = _on_all_victims(best, case["breaching"])
        if best is None or not theirs:
            continue
        strongest_name = max(theirs, key=lambda name: (theirs[name]["success_rate"], theirs[name]["recognisable_rate"],
                                                       -theirs[name]["distance_median"]))  # fmt: skip
        other, as_good = theirs[strongest_name], case["verdict"]["at_least_as_good"]
        lines.append(_row([case["title"], str(other["victims"]), _both(best), _both(other), f"`{strongest_name}`",
                           "yes" if as_good else "no"]))  # fmt: skip
    return "\n".join(lines)


def _both(row: dict[str, Any]) -> str:
    return f"{100 * row['success_rate']:.3g} % / {100 * row['recognisable_rate']:.3g} %"


def sentence(decided: dict[str, Any]) -> str:
    """The verdict in words."""
    if decided["at_least_as_good"] is None:
        return "Not measured yet."
    if decided["at_least_as_good"]:
        return "fedcdp's best is at least as good as every attack of `breaching` here."
    return f"Stronger than fedcdp's best here: {', '.join(f'`{name}`' for name in decided['stronger'])}."


def _figures(row: dict[str, Any]) -> list[str]:
    shares = [f"{100 * row[name]:.3g} %" for name in ("success_rate", "recognisable_rate", "identified_rate")]
    psnr = "–" if row["psnr_mean"] is None else f"{row['psnr_mean']:.1f}"
    return [str(row["victims"]), *shares, f"{row['distance_median']:.2g}", psnr, f"{row['seconds'] / row['victims']:.1f}"]


def _row(cells_of_row: Any) -> str:
    return "| " + " | ".join(cells_of_row) + " |"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--victims", type=int, default=VICTIMS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no task starts after this many seconds")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="only cells whose names start so")
    parser.add_argument("--whose", nargs="+", default=WHOSE, choices=WHOSE, help="whose attacks; L-BFGS likes a CPU better")
    parser.add_argument("--iterations", type=int, help="fewer iterations, for a test of this program")
    parser.add_argument("--commit", help="the commit that is measured, where this is a copy without its repository")
    parser.add_argument("--store", type=Path, default=STORE, help="reconstructions of finished victims")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="name the cells")
    parser.add_argument("--table", action="store_true", help="print the stored figures as Markdown")
    given = parser.parse_args()
    if given.list:
        print("\n".join(cells()))
    elif given.table:
        print(markdown(json.loads(given.out.read_text(encoding="utf-8"))))
    elif run(given):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
