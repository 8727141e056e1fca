"""`fedcdp.report`: runs and attacks, from memory or from disk, as one HTML file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fedcdp.attacks.api import Found
from fedcdp.attacks.layers import LayerLeaks
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.membership import Membership
from fedcdp.attacks.presence import Presence
from fedcdp.errors import RunError
from fedcdp.files import write_atomically
from fedcdp.presets import BENCHMARKS
from fedcdp.reports.facts import LeakFacts, RunFacts
from fedcdp.simulation import Run

GENERATOR = '<meta name="generator" content="fedcdp'
Item = Run | Found | Path | str


def report(items: Item | Iterable[Item], path: Path | str, *, title: str | None = None) -> Path:
    """Write one self-contained HTML page about runs and attacks; returns its path.

    `items` are runs that `simulate` returned, results of `attack`, and directories of either. The page holds the originals
    of attacked examples where they are known, and says so: unless they are a public benchmark's, it holds private records.
    A file that is not such a page is not overwritten.
    """
    runs, leaks = gather([items] if isinstance(items, Run | Found | Path | str) else items)
    return write(runs, leaks, Path(path), title)


def gather(items: Iterable[Item]) -> tuple[list[RunFacts], list[LeakFacts]]:
    """What is known of the items; refuses when that is nothing."""
    from fedcdp.reports.from_disk import read
    from fedcdp.reports.from_memory import facts_of_leak, facts_of_run

    runs: list[RunFacts] = []
    leaks: list[LeakFacts] = []
    latest = ""
    for item in items:
        if isinstance(item, Run):
            runs.append(facts_of_run(item))
            latest = item.plan.method
        elif isinstance(item, Leaks | Presence | LayerLeaks | Membership):
            leaks.append(facts_of_leak(item, latest))
        elif isinstance(item, Path | str):
            more_runs, more_leaks = read(Path(item))
            runs, leaks = runs + more_runs, leaks + more_leaks
        else:
            raise RunError(f"report: {type(item).__name__} is neither a run, nor a result of attack, nor a directory")
    if not runs and not leaks:
        raise RunError("report: there is nothing to show; give a run, a result of attack, or a directory of either")
    if not leaks and all(run.rounds == 0 for run in runs):
        raise RunError(f"{runs[0].name} has nothing to show yet: not one round is done")
    return runs, leaks


def private_records(runs: Iterable[RunFacts], leaks: Iterable[LeakFacts]) -> bool:
    """Whether a page would show training examples that are not those of a public benchmark."""
    datasets = {run.name: run.settings.get("data", {}).get("dataset") for run in runs}
    return any(
        leak.has_originals and (leak.summary.get("dataset") or datasets.get(leak.run or "")) not in BENCHMARKS
        for leak in leaks
    )


def write(runs: list[RunFacts], leaks: list[LeakFacts], path: Path, title: str | None = None) -> Path:
    """The page as a file, whole or not at all; replaces a page of ours and nothing else."""
    from fedcdp.reports.page import render

    try:
        if path.is_dir():
            raise RunError(f"{path} is a directory; name the file to write")
        if path.exists() and GENERATOR not in path.read_bytes()[:2000].decode(errors="replace"):
            raise RunError(f"{path} already exists and is not a page of this program; nothing was overwritten")
        if not path.absolute().parent.is_dir():
            raise RunError(f"{path} cannot be written: there is no directory {path.parent}")
        write_atomically(path, render(runs, leaks, title, private_records(runs, leaks)).encode(errors="replace"))
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error
    return path
