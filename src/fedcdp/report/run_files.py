"""Runs and attacks as they lie on a disk: run directories, what `fedcdp attack --out` wrote, folders of either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedcdp.accounting.budget import accounting_is_installed, over_releases
from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.population import Population
from fedcdp.config.plan import Plan
from fedcdp.data.own_files import checked_member
from fedcdp.errors import FedcdpError, RunError
from fedcdp.files.untrusted import MOST_JSON, MOST_SETTINGS, most_unpacked, parse_json, parse_toml, read_bounded
from fedcdp.report.facts import METHOD_NAMES, Array, LeakFacts, RunFacts, is_number, leak_facts
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.saved_run import check_ledger

_NAMED = ("method", "leak", "attack")
_FIGURES = ("recognisable_rate", "success_rate", "examples", "steps")
NO_ACCOUNTING = "dp-accounting is not installed here; fedcdp report computes ε from the ledger where it is"


def read(path: Path) -> tuple[list[RunFacts], list[LeakFacts]]:
    """What a directory holds: a run and the attacks on it, an attack, or a folder of such, its runs by method.

    What is neither is refused.
    """
    if not path.is_dir():
        raise RunError(f"{path} is not a directory" if path.exists() else f"{path} does not exist")
    found = _read(path)
    if found is not None:
        return found
    inside = [each for each in (_read(child) for child in sorted(path.iterdir()) if child.is_dir()) if each is not None]
    if not inside:
        raise RunError(f"{path} is neither a run directory (no config.toml) nor an attack's (no summary.json)")
    known = list(METHOD_NAMES)
    inside.sort(key=lambda each: known.index(each[0][0].plan.method) if each[0] else len(known))
    return [run for runs, _ in inside for run in runs], [leak for _, leaks in inside for leak in leaks]


def _read(path: Path) -> tuple[list[RunFacts], list[LeakFacts]] | None:
    if (path / "config.toml").is_file():
        run = read_run(path)
        folder = path / "attacks"
        attacks = sorted(each for each in folder.iterdir() if (each / "summary.json").is_file()) if folder.is_dir() else []
        return [run], [read_leak(each, run.name) for each in attacks]
    if (path / "summary.json").is_file():
        return [], [read_leak(path)]
    return None


def read_run(path: Path) -> RunFacts:
    """A run directory, also of a run that is not finished."""
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
        missing = "nothing has been released yet, so that nothing has been spent"
    elif not accounting_is_installed():
        missing = NO_ACCOUNTING
    else:
        spending = over_releases(plan, population, ledger.charges)
    privacy = spending[-1][1] if spending else None
    return RunFacts(
        path.resolve().name, plan, settings, directory.read_metrics(), privacy, missing, spending,
        directory.model.exists(),
    )  # fmt: skip


def _settings(directory: RunDirectory) -> dict[str, dict[str, Any]]:
    try:
        written = parse_toml(read_bounded(directory.config, MOST_SETTINGS))
    except OSError as error:
        raise RunError(f"{directory.config} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{directory.config} is not a TOML file: {error}") from error
    if "python" in written:  # network and data of a run from Python are told in one sentence
        written["data"] = {"federation": written.pop("python")}
    return {section: values for section, values in written.items() if isinstance(values, dict)}


def read_leak(path: Path, run: str | None = None) -> LeakFacts:
    """What `fedcdp attack` wrote."""
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
    except Exception as error:  # np.load passes on whatever zipfile and zlib raise, and arrays may be of any shape
        raise RunError(f"{arrays_file} is damaged, or not what fedcdp attack writes: {error}") from None


def _is_summary(summary: object) -> bool:
    """Whether it names an attack, and what a page shows of it can be shown."""
    return (
        isinstance(summary, dict)
        and all(isinstance(summary.get(name), str) for name in _NAMED)
        and isinstance(summary.get("dataset"), str | None)
        and all(summary.get(name) is None or (is_number(summary[name]) and 0 <= summary[name] < 2**31) for name in _FIGURES)
    )


def _arrays(path: Path) -> dict[str, Array]:
    """The numbers in a file of reconstructions, unpacked within bounds."""
    with np.load(path, allow_pickle=False) as stored:
        arrays = {name: checked_member(stored, name, most_unpacked(path.stat().st_size)) for name in stored.files}
    if not all(array.dtype.kind in "fiub" for array in arrays.values()):
        raise ValueError("an array does not hold numbers")
    return arrays
