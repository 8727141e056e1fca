"""What people see in a terminal: the progress of long work, and tables. Everything here goes to standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedcdp.plan import Plan
from fedcdp.rundir import Row
from fedcdp.simulation import Progress as Report

console = Console(stderr=True)


@contextmanager
def training_progress(plan: Plan, quiet: bool, done: int = 0) -> Iterator[Report | None]:
    """A bar with the round, the accuracy and the time left, from the first round on; without a terminal, a line a round."""
    if quiet:
        yield None
        return
    if not console.is_terminal:
        yield lambda row: console.print(f"round {row['round']}/{plan.rounds} {_accuracy(row)}".rstrip())
        return
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TextColumn("round {task.completed}/{task.total}"),
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=console,
    )
    task = bar.add_task(plan.method, total=plan.rounds, completed=done, accuracy="")

    def report(row: Row) -> None:
        bar.start()
        bar.update(task, completed=row["round"])
        if _accuracy(row):
            bar.update(task, accuracy=_accuracy(row))

    try:
        yield report
    finally:
        bar.stop()


def _accuracy(row: Row) -> str:
    accuracy = row.get("accuracy")
    return "" if accuracy is None else f"accuracy {accuracy:.4f}"


def note(sentence: str) -> None:
    """One line that a reader should not miss."""
    console.print(f"note: {sentence}", style="yellow")


def table(title: str, rows: dict[str, str]) -> None:
    """A small table of names and values."""
    shown = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    for name, value in rows.items():
        shown.add_row(name, value)
    console.print(shown)
