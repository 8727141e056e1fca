"""`fedcdp.report`: one HTML file about runs and attacks, from memory or from disk.

On disk these are run directories, output directories of `fedcdp attack --out`, and folders of either. In memory they are
the results of `simulate` and `attack`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedcdp.accounting.budget import accounting_is_installed, over_releases
from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.population import Population
from fedcdp.attacks.api import Found
from fedcdp.attacks.leaks import Leaks, finite
from fedcdp.checks.findings import Check
from fedcdp.config.arguments import checked
from fedcdp.config.plan import Plan
from fedcdp.config.presets import BENCHMARKS
from fedcdp.data.array_files import checked_member
from fedcdp.errors import FedcdpError, RunError
from fedcdp.files.disk import write_atomically
from fedcdp.files.tree import Layout
from fedcdp.files.untrusted import MOST_JSON, most_unpacked, parse_json, read_bounded
from fedcdp.report.facts import METHOD_NAMES, Array, LeakFacts, RunFacts, is_number, leak_facts
from fedcdp.training.export import settings_in
from fedcdp.training.ledger_check import check_ledger
from fedcdp.training.run import Run
from fedcdp.training.rundir import RunDirectory

_NAMED = ("method", "leak", "attack")
_FIGURES = ("recognisable_rate", "success_rate", "examples", "steps")
NO_ACCOUNTING = "dp-accounting is not installed here; fedcdp report computes ε from the ledger where it is"


def read(path: Path) -> tuple[list[RunFacts], list[LeakFacts]]:
    """Read a directory: a run with its attacks, an attack, or a folder of either, with its runs in the order of methods.

    Any other directory is refused.
    """
    if not path.is_dir():
        raise RunError(f"{path} is not a directory" if path.exists() else f"{path} does not exist")
    found = _read_one(path)
    if found is not None:
        return found
    inside = [each for each in (_read_one(child) for child in sorted(path.iterdir()) if child.is_dir()) if each is not None]
    if not inside:
        raise RunError(f"{path} is neither a run directory (no config.toml) nor an attack's (no summary.json)")
    known = list(METHOD_NAMES)
    inside.sort(key=lambda each: known.index(each[0][0].plan.method) if each[0] else len(known))
    return [run for runs, _ in inside for run in runs], [leak for _, leaks in inside for leak in leaks]


def _read_one(path: Path) -> tuple[list[RunFacts], list[LeakFacts]] | None:
    if (path / "config.toml").is_file():
        run = read_run(path)
        folder = path / "attacks"
        attacks = sorted(each for each in folder.iterdir() if (each / "summary.json").is_file()) if folder.is_dir() else []
        return [run], [read_leak(each, run.name) for each in attacks]
    if (path / "summary.json").is_file():
        return [], [read_leak(path)]
    return None


def read_run(path: Path) -> RunFacts:
    """Read a run directory. The run may be unfinished."""
    directory = RunDirectory(path)
    settings = _settings(directory)
    ledger = Ledger.open(directory.ledger) if directory.ledger.exists() else None
    if ledger is not None:
        check_ledger(directory, ledger)
    try:
        plan = Plan(**(ledger.plan if ledger else settings.get("plan", {})))
        population = Population.read(ledger.population) if ledger else None
    except (TypeError, FedcdpError) as error:
        raise RunError(f"{path} holds a plan or population that this program does not know: {error}") from error
    spending, missing = [], ""
    if ledger is None or population is None or not ledger.charges:
        missing = "nothing has been released yet, so nothing has been spent"
    elif not accounting_is_installed():
        missing = NO_ACCOUNTING
    else:
        spending = over_releases(plan, population, ledger.charges)
    privacy = spending[-1][1] if spending else None
    metrics = directory.read_metrics()
    scores, client_scores = directory.read_scores(metrics[-1]["round"] if metrics else 0)
    return RunFacts(
        path.resolve().name, plan, settings, metrics, privacy, missing, spending, directory.model.exists(), scores,
        client_scores,
    )  # fmt: skip


def _settings(directory: RunDirectory) -> dict[str, dict[str, Any]]:
    written = settings_in(directory)
    if "python" in written:  # a run from Python describes its network and data in one sentence
        told = written.pop("python")
        written["data"] = {"federation": told.get("federation") if isinstance(told, dict) else told}
    return {section: values for section, values in written.items() if isinstance(values, dict)}


def read_leak(path: Path, run: str | None = None) -> LeakFacts:
    """Read an output directory of `fedcdp attack`."""
    summary_file, arrays_file = path / "summary.json", path / "reconstructions.npz"
    try:
        summary = parse_json(read_bounded(summary_file, MOST_JSON))
    except OSError as error:
        raise RunError(f"{summary_file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RunError(f"{summary_file} is damaged: {error}") from None
    if not _is_summary(summary):
        raise RunError(f"{summary_file} is not what fedcdp attack writes")
    try:
        return leak_facts(summary, _arrays(arrays_file) if arrays_file.exists() else {}, run)
    except Exception as error:  # np.load passes on any error of zipfile and zlib, and arrays may have any shape
        raise RunError(f"{arrays_file} is damaged, or not what fedcdp attack writes: {error}") from None


def _is_summary(summary: object) -> bool:
    """Whether a summary names an attack, and its figures can be shown."""
    return (
        isinstance(summary, dict)
        and all(isinstance(summary.get(name), str) for name in _NAMED)
        and isinstance(summary.get("dataset"), str | None)
        and all(summary.get(name) is None or (is_number(summary[name]) and 0 <= summary[name] < 2**31) for name in _FIGURES)
    )


def _arrays(path: Path) -> dict[str, Array]:
    """The arrays of a reconstructions file, unpacked within bounds."""
    with np.load(path, allow_pickle=False) as stored:
        arrays = {name: checked_member(stored, name, most_unpacked(path.stat().st_size)) for name in stored.files}
    if not all(array.dtype.kind in "fiub" for array in arrays.values()):
        raise ValueError("an array does not hold numbers")
    return arrays


GENERATOR = '<meta name="generator" content="fedcdp'
Item = Run | Found | Path | str


@checked
def report(items: Item | Check | Iterable[Item], path: Path | str, *, title: str | None = None) -> Path:
    """Write one self-contained HTML page about runs and attacks, or about one check.

    The page contains the originals of attacked examples where they are known, and says so. Unless they are from a public
    benchmark, it contains private records.

    Args:
        items: Runs that `simulate` returned, results of `attack`, and directories of either: one item, or several. Or a
            result of `check`, which has a page of its own.
        path: The file to write. A file that is not such a page is not overwritten.
        title: The title of the page.

    Returns:
        The path of the file.

    Raises:
        RunError: An item is not a run, a result or a directory of either, there is nothing to show, or the file cannot be
            written.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, fedcdp.Plan(rounds=3, per_round=10, local_steps=2))
        >>> fedcdp.report(run, "report.html", title="First try")
        PosixPath('report.html')
    """
    if isinstance(items, Check):
        return write_check(items, Path(path))
    runs, leaks = gather([items] if isinstance(items, Run | Found | Path | str) else items)
    return write(runs, leaks, Path(path), title)


def gather(items: Iterable[Item]) -> tuple[list[RunFacts], list[LeakFacts]]:
    """Read all items. Refuse if there is nothing to show."""
    runs: list[RunFacts] = []
    leaks: list[LeakFacts] = []
    latest = ""
    for item in items:
        if isinstance(item, Run):
            runs.append(facts_of_run(item))
            latest = item.plan.method
        elif isinstance(item, Found):
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
    """Whether a page would show training examples that do not come from a public benchmark."""
    datasets = {run.name: run.settings.get("data", {}).get("dataset") for run in runs}
    return any(
        leak.has_originals and (leak.summary.get("dataset") or datasets.get(leak.run or "")) not in BENCHMARKS
        for leak in leaks
    )


def write(runs: list[RunFacts], leaks: list[LeakFacts], path: Path, title: str | None = None) -> Path:
    """Write the page about runs and attacks."""
    from fedcdp.report.page import render

    return _write(path, lambda: render(runs, leaks, title, private_records(runs, leaks)))


def write_check(check: Check, path: Path) -> Path:
    """Write the page about a check."""
    from fedcdp.report.check_page import render_check

    return _write(path, lambda: render_check(check))


def _write(path: Path, render: Callable[[], str]) -> Path:
    """Write a page atomically. It replaces a page of this program and no other file."""
    try:
        require_replaceable(path)
        write_atomically(path, render().encode(errors="replace"))
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error
    return path


def require_replaceable(path: Path) -> None:
    """Raise unless a page can be written to this path."""
    if path.is_dir():
        raise RunError(f"{path} is a directory; name the file to write")
    if path.exists() and GENERATOR not in path.read_bytes()[:2000].decode(errors="replace"):
        raise RunError(f"{path} already exists and is not a page of this program; nothing was overwritten")
    if not path.absolute().parent.is_dir():
        raise RunError(f"{path} cannot be written: there is no directory {path.parent}")


def facts_of_run(run: Run) -> RunFacts:
    """The facts about a run in memory."""
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
    # A run that a budget ended early is finished, too: its model is the requested one.
    return RunFacts(
        name, run.plan, settings, run.metrics, privacy, missing, spending, True, run.scores, run.client_scores
    )  # fmt: skip


def facts_of_leak(found: Found, method: str) -> LeakFacts:
    """The facts about an attack in memory. `method` is the attacked one, for attacks that do not name it."""
    summary = {"method": method} | finite(found.summary())
    return leak_facts(summary, found.arrays() if isinstance(found, Leaks) else {})
