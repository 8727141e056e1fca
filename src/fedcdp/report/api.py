"""`fedcdp.report`: runs and attacks, from memory or from disk, as one HTML file.

Runs and attacks as `simulate` and `attack` return them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedcdp.accounting.budget import accounting_is_installed, over_releases
from fedcdp.accounting.population import Population
from fedcdp.attacks.api import Found
from fedcdp.attacks.leaks import Leaks, finite
from fedcdp.attacks.membership import Membership
from fedcdp.attacks.per_layer import LayerLeaks
from fedcdp.attacks.presence import Presence
from fedcdp.config.presets import BENCHMARKS
from fedcdp.errors import RunError
from fedcdp.files.disk import write_atomically
from fedcdp.files.tree import Layout
from fedcdp.report.facts import METHOD_NAMES, LeakFacts, RunFacts, leak_facts
from fedcdp.report.run_files import NO_ACCOUNTING
from fedcdp.training.simulate import Run

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
    from fedcdp.report.run_files import read

    pass  # MOVED

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
    from fedcdp.report.page import render

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


def facts_of_run(run: Run) -> RunFacts:
    """A run, as it is told to the page."""
    name = METHOD_NAMES[run.plan.method] if run.directory is None else run.directory.resolve().name
    settings: dict[str, dict[str, Any]] = {
        "data": {"federation": run.federation.describe()},
        "plan": {key: value for key, value in run.plan.written().items() if value is not None},
    }
    spending = []
    if accounting_is_installed():
        population = Population.of(run.federation, Layout.of(run.model), run.plan)
        spending = over_releases(run.plan, population, run.charges)
    privacy = spending[-1][1] if spending else None
    missing = "" if privacy else "nothing was released" if accounting_is_installed() else NO_ACCOUNTING
    # A run that a budget ended early is finished, too: its model is the one that was asked for.
    return RunFacts(name, run.plan, settings, run.metrics, privacy, missing, spending, True)


def facts_of_leak(found: Found, method: str) -> LeakFacts:
    """What an attack found; `method` is the one attacked, where the attack itself does not say it."""
    summary = {"method": method} | finite(found.summary())
    return leak_facts(summary, found.arrays() if isinstance(found, Leaks) else {})
