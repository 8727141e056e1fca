"""What people see in a terminal: progress and short tables on standard error, answers on standard output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedcdp.plan import Plan
from fedcdp.rundir import Row
from fedcdp.simulation import Progress as Report

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Privacy

console = Console(stderr=True)
stdout = Console()


@contextmanager
def training_progress(
    plan: Plan, quiet: bool, done: int = 0, epsilon_after: Callable[[int], str] = lambda _: ""
) -> Iterator[Report | None]:
    """A bar with the round, the accuracy, ε so far and the time left; without a terminal, a line a round."""
    if quiet:
        yield None
        return
    if not console.is_terminal:
        yield lambda row: console.print(" ".join(_told(row, plan, epsilon_after)))
        return
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TextColumn("round {task.completed}/{task.total}"),
        TextColumn("{task.fields[told]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=console,
    )
    task = bar.add_task(plan.method, total=plan.rounds, completed=done, told="")

    def report(row: Row) -> None:
        bar.start()
        bar.update(task, completed=row["round"], told="  ".join(_told(row, plan, epsilon_after)[1:]))

    try:
        yield report
    finally:
        bar.stop()


def _told(row: Row, plan: Plan, epsilon_after: Callable[[int], str]) -> list[str]:
    accuracy = row.get("accuracy")
    parts = [f"round {row['round']}/{plan.rounds}", "" if accuracy is None else f"accuracy {accuracy:.4f}"]
    return [part for part in (*parts, epsilon_after(row["round"])) if part]


@contextmanager
def steps(name: str, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar for work that tells how much of how much is done."""
    if quiet or not console.is_terminal:
        yield None
        return
    with Progress(TextColumn("[bold]{task.description}"), BarColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def note(sentence: str) -> None:
    """One line that a reader should not miss."""
    console.print(f"note: {sentence}", style="yellow")


def table(title: str, rows: dict[str, str]) -> None:
    """A small table of names and values."""
    shown = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    for name, value in rows.items():
        shown.add_row(name, value)
    console.print(shown)


_TOLD = {
    "dataset": "data",
    "network": "network",
    "victims": "victims",
    "examples": "their examples",
    "success_rate": "reconstructed or picked out",
    "recognisable_rate": "recognisable",
    "identified_rate": "identified",
    "candidates": "  among",
    "distance_median": "MSE, median",
    "distance_mean": "MSE, mean",
    "rmse_mean": "RMSE, mean",
    "psnr_mean": "PSNR, mean (dB)",
    "ssim_mean": "SSIM, mean",
    "label_accuracy": "labels inferred",
    "label_chance_99": "  by chance (99 %)",
    "visible_coordinates": "coordinates compared",
    "iterations_median": "iterations, median",
    "diverged": "diverged",
    "auc": "AUC: present or not",
    "auc_interval_99": "  interval (99 %)",
    "auc_predicted": "  by the formula",
    "advantage": "advantage over guessing",
    "tpr_at_1_percent": "found at 1 % false alarms",
    "most_telling": "most telling tensor",
    "unsanitised": "tensors without the promised noise",
    "steps": "local steps read",
    "releases": "releases averaged",
    "noise_deviation": "noise on what was read",
    "seconds": "seconds",
}


def leak_table(summary: dict[str, Any]) -> None:
    """What an attack got, figure by figure; below it, what knowing nothing scores."""
    shown = Table(title=_title_of(summary), show_header=False, title_justify="left", title_style="bold")
    for name, words in _TOLD.items():
        if (value := summary.get(name)) is not None:
            shown.add_row(words, _readable(value))
    stdout.print(shown)
    if nothing := summary.get("knowing_nothing"):
        _rows("What knowing nothing scores", [{"guess": name.replace("_", " ")} | row for name, row in nothing.items()])
    if summary.get("layers"):
        _rows("Each tensor alone", summary["layers"])


def _title_of(summary: dict[str, Any]) -> str:
    return " · ".join(str(summary[name]) for name in ("method", "leak", "attack") if summary.get(name))


def _rows(title: str, rows: list[dict[str, Any]]) -> None:
    shown = Table(title=title, title_justify="left", title_style="bold")
    for name in rows[0]:
        shown.add_column(name.replace("_", " "), justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        shown.add_row(*(_readable(value) for value in row.values()))
    stdout.print(shown)


def _readable(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return (" to " if all(isinstance(each, float) for each in value) else ", ").join(map(_readable, value))
    return str(value)


def privacy_table(privacy: Privacy, to_stdout: bool = False) -> None:
    """The privacy statement: each ε with its adversary, unit and relation, and below the assumption that it rests on."""
    shown = Table(title=f"ε at δ = {privacy.delta:g} ({privacy.mode})", title_justify="left", title_style="bold")
    for heading in privacy.HEADINGS[:-1]:
        shown.add_column(heading, justify="right" if heading.startswith("ε") else "left")
    shown.add_column("see", justify="center")
    assumptions = list(dict.fromkeys(row.assumption for row in privacy.rows))
    for row, cells in zip(privacy.rows, privacy.cells(), strict=True):
        shown.add_row(*cells[:-1], str(1 + assumptions.index(row.assumption)))
    target = stdout if to_stdout else console
    target.print(shown)
    for number, assumption in enumerate(assumptions, start=1):
        target.print(f"{number}. {escape(assumption)}")
    for sentence in privacy.notes:
        target.print(f"note: {escape(sentence)}", style="yellow")
