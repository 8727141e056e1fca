"""The command `reproduce`: the paper's tables and figures, printed and measured side by side."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcdp.accounting.budget import accounting_is_installed
from fedcdp.cli import terminal
from fedcdp.config.experiment import read_assignment
from fedcdp.engine.runtime import usable_device
from fedcdp.errors import PlanError, RunError, StoppedError
from fedcdp.files.disk import write_atomically
from fedcdp.files.installation import install_command

if TYPE_CHECKING:
    from fedcdp.studies.reproduce.catalogue import Cell, Place, Table
    from fedcdp.studies.reproduce.runner import TableResults


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TABLE]...", help="Names of tables, or your own TOML files.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All tables, in one go: cheap cells first.")] = False,
    listing: Annotated[
        bool, typer.Option("--list", help="List the tables, or the cells of each TABLE, and which are done on this code.")
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
            help="Cells to run at a time, each in a process. Default: number of cores, at most 8.",
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
    from fedcdp.studies.reproduce.catalogue import chosen as choose
    from fedcdp.studies.reproduce.catalogue import table as find
    from fedcdp.studies.reproduce.runner import TableResults

    if every and names:
        raise PlanError("reproduce: name tables, or use --all, but not both")
    if not (names or every):
        if listing:
            _print_lines([(t.name, *_progress(TableResults(t, out)), t.title) for t in tables()])
        elif table_only:
            typer.echo(str(_write_all(tables(), Place(out))))
        else:
            raise PlanError("reproduce: name a table, or use --all; --list lists them")
        return
    found = tables() if every else [find(name) for name in dict.fromkeys(names or [])]
    chosen = choose(found, [each.strip() for each in cells.split(",") if each.strip()])
    for name, value in (("workers", workers), ("time-limit", time_limit)):
        if value is not None and (value < 0 or math.isnan(value)):
            raise PlanError(f"--{name}: {value:g} is not allowed; it must not be negative")
    place = Place(out, data_dir, _machine_settings(device, assignments or []), commit)
    tasks = [(TableResults(table, out), some) for table, some in chosen]
    for results, _ in tasks:
        if results.stale:
            example = f"{results.table.name}: {next(iter(results.stale))}"
            terminal.note(f"{len(results.stale)} cells were measured with other settings and are ignored, such as {example}")
    if listing:
        _print_lines([line for results, some in tasks for line in _lines(results, some, several=len(tasks) > 1)])
        return
    if not table_only:
        usable_device(place.device)
    try:
        if not table_only:
            _run(tasks, place, workers, time_limit, quiet, again)
    finally:
        pages = [_write_all(found, place)] if every else [_write_page(place, results) for results, _ in tasks]
    for page in pages:
        typer.echo(str(page))


def _run(
    chosen: list[tuple[TableResults, list[Cell]]],
    place: Place,
    workers: int,
    time_limit: float | None,
    quiet: bool,
    again: bool,
) -> None:
    from fedcdp.studies.reproduce.catalogue import tables
    from fedcdp.studies.reproduce.runner import Campaign, CellTask, TableResults, Trainings, cost

    asked = {results.table.name: results for results, _ in chosen}
    known = asked | {table.name: TableResults(table, place.out) for table in tables() if table.name not in asked}
    tasks = [CellTask(results, cell) for results, some in chosen for cell in results.missing(some, again)]
    if not accounting_is_installed() and (epsilons := [task for task in tasks if task.cell.kind == "epsilon"]):
        tasks = [task for task in tasks if task not in epsilons]
        terminal.note(f"{len(epsilons)} cells consist of ε alone and are left out: they need dp-accounting, but no training")
    tasks.sort(key=lambda task: cost(task.cell))  # cheap ones first: most of every table soon
    waiting = {(task.results.table.name, task.cell.name) for task in tasks}
    for results, _ in chosen:
        for name in results.cells:  # killed between storing a cell and clearing up
            if (results.table.name, name) not in waiting:
                place.forget(results.table.name, results.table.cells[name])
        results.write()  # fails before anything is measured if the file cannot be written
    done = 0

    def tell(task: CellTask, ended: dict[str, Any] | str) -> None:
        nonlocal done
        done += 1
        name = task.cell.name if len(chosen) == 1 else task.name
        if isinstance(ended, str):
            terminal.note(f"{name} failed: {ended}")
            return
        task.results.keep(task.cell, ended)
        place.forget(task.results.table.name, task.cell)
        if not quiet:
            figures = ((key, ended.get(key)) for key in ("accuracy", "success_rate"))
            shown = "".join(f", {key} {value:.4g}" for key, value in figures if value is not None)
            how = f"as in {ended['taken_from']}" if "taken_from" in ended else f"{ended['seconds']:.1f} s"
            terminal.console.print(f"{done}/{len(tasks)} {name}{shown}, {how}", highlight=False)

    campaign = Campaign(tasks, place, Trainings(known.values(), again), tell)
    limit = math.inf if time_limit is None else time_limit
    try:
        campaign.run(workers or min(8, os.cpu_count() or 1), limit)
    except KeyboardInterrupt:
        raise StoppedError(_kept(chosen, "stopped")) from None
    except StoppedError as stopped:
        raise StoppedError(_kept(chosen, str(stopped))) from None
    if campaign.failed:
        name, reason = next(iter(campaign.failed.items()))
        raise RunError(f"{len(campaign.failed)} of {len(tasks)} cells failed; {name}: {reason}")
    if campaign.left:
        terminal.note(f"time limit reached: {len(campaign.left)} cells are left; the same command resumes")


def _kept(chosen: list[tuple[TableResults, list[Cell]]], why: str) -> str:
    cells = sum(len(results.cells) for results, _ in chosen)
    where = str(chosen[0][0].path) if len(chosen) == 1 else str(chosen[0][0].path.parent)
    return f"{why}; {cells} cells are in {where}; the same command resumes"


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


def _write_page(place: Place, results: TableResults) -> Path:
    _write(results.table, place, results)
    return results.path.with_suffix(".md")


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


def _lines(results: TableResults, cells: list[Cell], *, several: bool) -> Iterator[tuple[str, str]]:
    """Each cell of a table, and whether it is done, and on which code."""
    older = results.on_older_code
    for cell in cells:
        name, row = f"{results.table.name}: {cell.name}" if several else cell.name, results.cells.get(cell.name)
        if row is None:
            yield name, "not run"
        else:
            told = f"done in {row['seconds']:.0f} s on {row['machine']}"
            yield name, told + (", on older code" if cell.name in older else "")


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
