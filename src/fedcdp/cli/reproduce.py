"""The command `reproduce`: the paper's tables and figures, printed and measured side by side."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcdp.accounting.budget import accounting_is_installed
from fedcdp.cli import terminal
from fedcdp.config.experiment import read_assignment
from fedcdp.config.job import job_size
from fedcdp.engine.runtime import usable_device
from fedcdp.errors import LostRankError, PlanError, RankError, RunError, StoppedError
from fedcdp.files.disk import write_atomically
from fedcdp.files.installation import install_command
from fedcdp.training.ranks import Ranks, ranks_of_job
from fedcdp.training.shared_work import PATIENCE, agree_on_command

if TYPE_CHECKING:
    from fedcdp.studies.reproduce.catalogue import Cell, Place, Table
    from fedcdp.studies.reproduce.runner import TableResults


def reproduce(
    table: Annotated[
        str | None, typer.Argument(metavar="[TABLE]", help="Name of a table, or your own TOML file.", show_default=False)
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="List the tables, or the cells of TABLE, and which are done on this code.")
    ] = False,
    cells: Annotated[
        str,
        typer.Option("--cells", help="Only these cells: names, prefixes or patterns (mnist/*/cohort), separated by commas."),
    ] = "",
    again: Annotated[
        bool, typer.Option("--again", help="Measure cells again whose source files have changed since they were measured.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Directory of result files. Existing files are completed.")] = Path(
        "results/reproduction"
    ),
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            help="Cells to run at a time, each in a process. Default: number of cores, at most 8; under torchrun, 1.",
            show_default=False,
        ),
    ] = 0,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", metavar="SECONDS", help="Start no further cell after this time.")
    ] = None,
    table_only: Annotated[
        bool,
        typer.Option(
            "--table-only",
            help="Run nothing. Compute ε and write the table of measured cells; without TABLE, all tables.",
        ),
    ] = False,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, or one of several GPUs, such as cuda:1.")] = "cpu",
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="One setting of the section run, as key=value. Repeatable.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", envvar="FEDCDP_DATA", help="Directory of dataset files.")
    ] = None,
    commit: Annotated[
        str | None,
        typer.Option("--commit", help="Commit to store with each cell, for a copy of the source without its repository."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
) -> None:
    """Reproduce the paper's tables and figures.

    The paper's figures and the measured ones are written side by side, as Markdown and JSON. Cells that are in the result
    file are not run again, except with `--again`, and a killed run is resumed. ε is added if dp-accounting is installed.
    """
    from fedcdp.studies.reproduce.catalogue import Place, tables
    from fedcdp.studies.reproduce.catalogue import table as find
    from fedcdp.studies.reproduce.runner import TableResults

    if (listing or table_only) and job_size() > 1:
        raise RankError("reproduce: --list and --table-only run nothing that ranks could share; run it without torchrun")
    if table is None:
        if listing:
            _print_lines([(t.name, *_progress(TableResults(t, out)), t.title) for t in tables()])
        elif table_only:
            typer.echo(str(_write_all(tables(), Place(out))))
        else:
            raise PlanError("reproduce: name a table; --list lists them")
        return
    found = find(table)
    chosen = found.chosen([each.strip() for each in cells.split(",") if each.strip()])
    for name, value in (("workers", workers), ("time-limit", time_limit)):
        if value is not None and (value < 0 or math.isnan(value)):
            raise PlanError(f"--{name}: {value:g} is not allowed; it must not be negative")
    place = Place(out, data_dir, _machine_settings(device, assignments or []), commit)
    with ranks_of_job(PATIENCE) as ranks:
        if ranks.several:
            place = _agreed(ranks, found, chosen, place, (workers, time_limit, again))
        if not ranks.leads:
            _follow(ranks, found, place, workers, time_limit)
            return
        results = TableResults(found, out)
        if results.stale:
            example = next(iter(results.stale))
            terminal.note(f"{len(results.stale)} cells were measured with other settings and are ignored, such as {example}")
        if listing:
            older = results.on_older_code
            _print_lines([_line(cell, results, cell.name in older) for cell in chosen])
            return
        if not table_only:
            usable_device(place.device)
        try:
            if not table_only:
                _run(found, chosen, place, results, workers, time_limit, quiet, again, ranks)
        finally:
            _write(found, place, results)
        typer.echo(str(results.path.with_suffix(".md")))


def _agreed(ranks: Ranks, table: Table, chosen: list[Cell], place: Place, options: tuple[object, ...]) -> Place:
    """Refuse ranks that would measure other cells, or with other code; the place with this rank's own GPU."""
    from fedcdp.studies.reproduce.provenance import digest

    if table.content.get("alone"):
        raise RankError(f"reproduce {table.name}: its cells are timed, one at a time; run it without torchrun")
    cells = [(cell.name, cell.settings) for cell in chosen]
    code = sorted({(cell.kind, digest(cell.kind)) for cell in chosen})
    agree_on_command(ranks, {"options": options, "run": place.run, "cells": cells, "code": code})
    return replace(place, run=place.run | {"device": str(ranks.device(place.device))})


def _follow(ranks: Ranks, table: Table, place: Place, workers: int, time_limit: float | None) -> None:
    """Measure cells that rank 0 lists, and leave their rows to rank 0."""
    from fedcdp.studies.reproduce.runner import run

    cells = [table.cells[name] for name in ranks.heard()]
    usable_device(place.device)
    try:
        run(
            table.name, cells, place, lambda *_: None, workers or 1, math.inf if time_limit is None else time_limit,
            ranks=ranks,
        )  # fmt: skip
    except KeyboardInterrupt:
        raise StoppedError("stopped with the other ranks") from None
    for cell in cells:
        place.forget(table.name, cell)


def _run(
    table: Table,
    chosen: list[Cell],
    place: Place,
    results: TableResults,
    workers: int,
    time_limit: float | None,
    quiet: bool,
    again: bool,
    ranks: Ranks,
) -> None:
    """Measure the cells that are missing, in several processes or on several ranks."""
    from fedcdp.studies.reproduce.catalogue import tables
    from fedcdp.studies.reproduce.runner import cost, run, shared

    for cell, row in list(shared(results.missing(chosen, again), tables(), place.out, again)):
        results.keep(cell, row)
    waiting = sorted(results.missing(chosen, again), key=cost)  # cheap ones first: most of a table soon
    for name in results.cells.keys() - {cell.name for cell in waiting}:  # killed between storing a cell and clearing up
        place.forget(table.name, table.cells[name])
    total = len(waiting)
    done = 0

    def keep(cell: Cell, row: dict[str, Any]) -> None:
        nonlocal done
        results.keep(cell, row)
        place.forget(table.name, cell)
        done += 1
        if not quiet:
            figure = next(
                (f", {key} {row[key]:.4g}" for key in ("accuracy", "success_rate") if row.get(key) is not None), ""
            )
            terminal.console.print(f"{done}/{total} {cell.name}{figure}, {row['seconds']:.1f} s", highlight=False)

    results.write()  # fails before anything is measured if the file cannot be written
    usual = 1 if ranks.several else min(8, os.cpu_count() or 1)
    several = 1 if table.content.get("alone") else workers or usual
    ranks.tell([cell.name for cell in waiting])
    try:
        outcome = run(table.name, waiting, place, keep, several, math.inf if time_limit is None else time_limit, ranks=ranks)
    except KeyboardInterrupt:
        raise StoppedError(_kept(results, "stopped")) from None
    except StoppedError as stopped:
        raise StoppedError(_kept(results, str(stopped))) from None
    except LostRankError as lost:
        raise LostRankError(_kept(results, str(lost))) from lost
    if outcome.failed:
        name, reason = next(iter(outcome.failed.items()))
        raise RunError(f"{len(outcome.failed)} of {total} cells failed; {name}: {reason}")
    if outcome.left:
        terminal.note(f"time limit reached: {len(outcome.left)} cells are left; the same command resumes")


def _kept(results: TableResults, why: str) -> str:
    return f"{why}; {len(results.cells)} cells are in {results.path}; the same command resumes"


def _write_all(known: list[Table], place: Place) -> Path:
    """Write every table with measured cells, and a page about all tables."""
    from fedcdp.studies.reproduce.markdown import overview
    from fedcdp.studies.reproduce.runner import TableResults

    measured = []
    for table in known:
        results = TableResults(table, place.out)
        made = _write(table, place, results) if results.cells else []
        measured.append((table, results.cells, made))
    page = place.out / "README.md"
    write_atomically(page, overview(measured).encode())
    return page


def _write(table: Table, place: Place, results: TableResults) -> list[dict[str, Any]]:
    """Write ε where it can be computed, the rows (which are returned), the Markdown and the pictures."""
    from fedcdp.studies.reproduce.cells import epsilons
    from fedcdp.studies.reproduce.figures import draw
    from fedcdp.studies.reproduce.layouts import sections
    from fedcdp.studies.reproduce.markdown import page

    if accounting_is_installed():
        for name, row in results.cells.items():
            if table.cells[name].kind == "training" and "epsilon" not in row:
                row["epsilon"] = epsilons(table.cells[name])
    made = sections(table, results.cells)
    results.write(made)
    try:
        pictures = draw(table, results.cells, place)
    except ImportError:
        pictures = []
        hint = install_command("report")
        terminal.note(f"{table.name}.png was not drawn: this needs matplotlib; install it with {hint}")
    results.write_beside(".md", page(table, results.cells, made, pictures).encode())
    return made


def _progress(results: TableResults) -> tuple[str, str]:
    """How many cells a table has, and how many of them are done, on which code."""
    done, older = len(results.cells), len(results.on_older_code)
    return f"{len(results.table.cells)} cells", f"{done} done" + (f", {older} of them on older code" if older else "")


def _line(cell: Cell, results: TableResults, older: bool) -> tuple[str, str]:
    row = results.cells.get(cell.name)
    if row is None:
        return cell.name, "not run"
    return cell.name, f"done in {row['seconds']:.0f} s on {row['machine']}" + (", on older code" if older else "")


def _print_lines(lines: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(each.ljust(width) for each, width in zip(line, widths, strict=True)).rstrip())


def _machine_settings(device: str, assignments: list[str]) -> dict[str, Any]:
    given: dict[str, Any] = {"device": device}
    for written in assignments:
        ((section, setting),) = read_assignment(written).items()
        if section != "run":
            raise PlanError(f"--set {written}: the table fixes what is trained; only settings of [run] can be changed")
        given |= setting
    return given
