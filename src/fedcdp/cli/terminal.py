"""What people see in a terminal: progress and short tables on standard error, answers on standard output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedcdp.config.plan import Plan
from fedcdp.training.rundir import Row
from fedcdp.training.simulate import Progress as Report

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
    console.print(f"note: {sentence}", style="yellow", markup=False)


def table(title: str, rows: dict[str, str]) -> None:
    """A small table of names and values."""
    shown = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    for name, value in rows.items():
        shown.add_row(name, value)
    console.print(shown)


def leak_table(summary: dict[str, Any]) -> None:
    """What an attack got, and beside it what knowing nothing scores; or each tensor, where they were attacked one by one."""
    title = " · ".join(summary[name] for name in ("method", "leak", "attack"))
    shown = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    for words, figures in _facts(summary):
        shown.add_row(words, escape(figures))
    stdout.print(shown)
    if nothing := summary.get("knowing_nothing"):
        stdout.print(_beside_nothing(summary, nothing))
    if layers := summary.get("layers"):
        stdout.print(_each_tensor(layers))


def _facts(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    examples, others = told.get("examples"), told.get("others")
    of = f", {examples} examples" if examples not in (None, told["victims"]) else f", {others} others" if others else ""
    yield "data, network", f"{told['dataset']}, {told['network']}"
    yield "victims", f"{told['victims']}{of}"
    if told.get("noise_deviation") is not None:
        noise = f"noise of deviation {told['noise_deviation']:.4g}" if told["noise_deviation"] else "no noise"
        yield "what is read", f"{_counted(told['steps'], 'local step')}, {_counted(told['releases'], 'release')}, {noise}"
    if told.get("source") is not None:
        yield "read in", f"{told['source']}: {told['releases_mean']:.3g} releases of a victim on average"
    if told.get("feature_error_median") is not None:
        yield "features", f"recovered to {told['feature_error_median']:.2g} of their norm (median)"
    if told.get("label_accuracy") is not None:
        by_chance = " to ".join(map(_percent, told["label_chance_99"]))
        yield "labels inferred", f"{_percent(told['label_accuracy'])} (by chance {by_chance})"
    if told.get("visible_coordinates") is not None:
        yield "compared", f"{told['visible_coordinates']} of {told['coordinates']} coordinates, those that the network sees"
        which = "likeliest" if told.get("identified_by_likelihood") else "nearest"
        yield "identified", f"the {which} of {told['candidates']}; by chance {_percent(1 / max(told['candidates'], 1))}"
    if told.get("auc") is not None:
        expected = "" if told.get("auc_predicted") is None else f"; by the formula {told['auc_predicted']:.3f}"
        yield "there or not", f"AUC {_estimate(told, 'auc')}{expected}"
        if told.get("success_rate") is not None:
            yield "picked out", f"{_percent(told['success_rate'])}, among {told['candidates']} candidates"
    for name, words in (("advantage", "advantage over guessing"), ("tpr_at_1_percent", "found at 1 % false alarms")):
        if told.get(name) is not None:
            yield words, _estimate(told, name)
    if told.get("unsanitised") is not None:
        yield "without its noise", ", ".join(told["unsanitised"]) or "no tensor"
    if told.get("iterations_median") is not None:
        median = _counted(told["iterations_median"], "iteration")
        ended = f"{told['converged']} converged, {told['diverged']} diverged, {told['out_of_iterations']} ran out"
        solved = f"solved for {told['converged']} of {told['victims']}"
        yield "search", solved if told["attack"] in ("analytic", "linear-head") else f"{median} (median); {ended}"
    if told.get("tried"):
        yield "tried", "\n".join(_tried(each) for each in told["tried"])
    if told.get("seconds") is not None:
        yield "time", f"{told['seconds']:.1f} s"


def _tried(each: dict[str, Any]) -> str:
    """An attack and what it came to."""
    if each.get("refused"):
        return f"{each['attack']}: does not apply ({each['refused']})"
    if each["attack"] == "matched-filter":
        picked = "" if each["success_rate"] is None else f", picked out {_percent(each['success_rate'])}"
        return f"{each['attack']}: AUC {each['auc']:.3f}{picked}"
    words = {"success_rate": "exact", "recognisable_rate": "recognisable", "identified_rate": "identified",
             "label_accuracy": "labels"}  # fmt: skip
    told = [f"{_percent(each[name])} {word}" for name, word in words.items() if each.get(name) is not None]
    return f"{each['attack']}: {', '.join(told) or 'not scored'}"


def _beside_nothing(told: dict[str, Any], nothing: dict[str, dict[str, float]]) -> Table:
    names = {"exact": "success_rate", "recognisable": "recognisable_rate", "identified": "identified_rate",
             "mse": "distance_mean", "median_mse": "distance_median", "psnr": "psnr_mean"}  # fmt: skip
    rows = {"the attack": {name: told[key] for name, key in names.items()}}
    rows |= {name.replace("_", " "): row for name, row in nothing.items()}
    images = told["recognisable_rate"] is not None  # of a table nothing is recognised
    headings = ["", "exact", *(["recognisable"] if images else []), "identified", "MSE", "median", "PSNR"]
    shown = _with_header("Beside what knowing nothing scores", *headings)
    for guess, row in rows.items():
        shares = [
            _percent(row[name]) for name in ("exact", "recognisable", "identified") if images or name != "recognisable"
        ]
        shown.add_row(guess, *shares, *(f"{row[name]:.3g}" for name in ("mse", "median_mse", "psnr")))
    return shown


def _each_tensor(layers: list[dict[str, Any]]) -> Table:
    shown = _with_header("Each tensor alone", "tensor", "noise on it", "median MSE", "exact")
    for each in layers:
        noise = f"{each['noise_deviation']:.3g}" + (" (!)" if each["unsanitised"] else "")
        shown.add_row(escape(each["tensor"]), noise, f"{each['distance_median']:.3g}", _percent(each["success_rate"]))
    return shown


def _with_header(title: str, first: str, *others: str) -> Table:
    """A table of figures, narrow enough for a terminal of 80 columns."""
    shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column(first, no_wrap=True)
    for heading in others:
        shown.add_column(heading, justify="right", no_wrap=True)
    return shown


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _counted(count: float, what: str) -> str:
    return f"{count:g} {what}" + ("" if count == 1 else "s")


def _estimate(told: dict[str, Any], name: str) -> str:
    low, high = told[f"{name}_interval_99"]
    return f"{told[name]:.3f} (99 %: {low:.3f} to {high:.3f})"


def privacy_table(privacy: Privacy, to_stdout: bool = False) -> None:
    """The privacy statement: each ε with its adversary, unit and relation, and below the assumption that it rests on."""
    shown = Table(title=f"ε at δ = {privacy.delta:g} ({privacy.mode})", title_justify="left", title_style="bold")
    for heading in privacy.HEADINGS[:-1]:
        shown.add_column(heading, justify="right" if heading.startswith("ε") else "left")
    shown.add_column("see", justify="center")
    assumptions = privacy.assumptions()
    for row, cells in zip(privacy.rows, privacy.cells(), strict=True):
        shown.add_row(*cells[:-1], str(1 + assumptions.index(row.assumption)))
    target = stdout if to_stdout else console
    target.print(shown)
    for number, assumption in enumerate(assumptions, start=1):
        target.print(f"{number}. {escape(assumption)}")
    for sentence in privacy.notes:
        target.print(f"note: {escape(sentence)}", style="yellow")


def figures_table(title: str, headings: list[str], rows: list[list[str]]) -> None:
    """A table of figures, the answer of a command."""
    shown = _with_header(title, *headings)
    for cells in rows:
        shown.add_row(*map(escape, cells))
    stdout.print(shown)
