"""Output for people: progress, notes and short tables on standard error, answers on standard output."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedcdp.config.plan import Plan
from fedcdp.engine.runtime import listening
from fedcdp.training.metrics import main_figure, metric_text, metric_title
from fedcdp.training.rundir import Row

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Privacy
    from fedcdp.training.planning import Planned


Report = Callable[[Row], None]
console = Console(stderr=True)
stdout = Console()
_SECONDS_BETWEEN_LINES = 10.0  # of progress, without a terminal
_SECONDS_WITHOUT_BAR = 2.0  # work that ends sooner shows none


@contextmanager
def training_progress(
    plan: Plan, quiet: bool, done: int = 0, epsilon_after: Callable[[int], str] = lambda _: ""
) -> Iterator[Report | None]:
    """A bar with the round, the task's main metric, ε so far and the time left; without a terminal, a line per round."""
    if quiet:
        yield None
        return
    if not console.is_terminal:
        yield lambda row: console.print(" ".join(_round_facts(row, plan, epsilon_after)))
        return
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TextColumn("round {task.completed}/{task.total}"),
        TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=console,
    )
    task = bar.add_task(plan.method, total=plan.rounds, completed=done, facts="")

    def report(row: Row) -> None:
        bar.start()
        bar.update(task, completed=row["round"], facts="  ".join(_round_facts(row, plan, epsilon_after)[1:]))

    try:
        yield report
    finally:
        bar.stop()


def _round_facts(row: Row, plan: Plan, epsilon_after: Callable[[int], str]) -> list[str]:
    main = main_figure(row)
    parts = [f"round {row['round']}/{plan.rounds}", "" if main is None else f"{metric_title(main[0])} {figure(main[1])}"]
    return [part for part in (*parts, epsilon_after(row["round"])) if part]


@contextmanager
def preparation(quiet: bool) -> Iterator[None]:
    """Progress of work before the first round that lasts longer than a few seconds, such as the features of all examples."""
    bar = Progress(TextColumn("[bold]{task.description}"), BarColumn(), TimeRemainingColumn(), console=console)
    began, show = 0.0, _lines_of_progress("")

    def in_lines(name: str, done: int, total: int) -> None:
        nonlocal show
        show = show if done else _lines_of_progress(name)
        show(done, total)

    def in_a_bar(name: str, done: int, total: int) -> None:
        nonlocal began, show
        began = began if done else time.monotonic()
        late = time.monotonic() - began > _SECONDS_WITHOUT_BAR
        if done < total and late:
            if not bar.live.is_started:
                bar.start()
                show = _bar_of_progress(name, bar)
            show(done, total)
        elif done >= total and bar.live.is_started:
            show(done, total)
            bar.stop()

    with listening(None if quiet else in_a_bar if console.is_terminal else in_lines):
        try:
            yield
        finally:
            if bar.live.is_started:  # stopping one that never began prints an empty line
                bar.stop()


@contextmanager
def steps(
    name: str, quiet: bool, announce: Callable[[], None] = lambda: None
) -> Iterator[Callable[[int, int], None] | None]:
    """Progress of work that reports (done, total): a bar; without a terminal, a line every ten seconds and at the end.

    `announce` is called once, before the first progress is shown: by then the work has accepted its input.
    """
    if quiet:
        yield None
        return
    waiting = [announce]

    def begin() -> None:
        while waiting:
            waiting.pop()()

    def report(done: int, total: int) -> None:
        begin()
        show(done, total)

    if not console.is_terminal:
        show = _lines_of_progress(name)
        yield report
    else:
        columns = (TextColumn("[bold]{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            show = _bar_of_progress(name, bar)
            yield report
    begin()


def _bar_of_progress(name: str, bar: Progress) -> Callable[[int, int], None]:
    task = bar.add_task(name, total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)


def _lines_of_progress(name: str) -> Callable[[int, int], None]:
    """Work that ends within the first ten seconds prints no line."""
    started = printed = time.monotonic()
    ended = False

    def report(done: int, total: int) -> None:
        nonlocal printed, ended
        now, at_end = time.monotonic(), done >= total
        due = now - printed >= _SECONDS_BETWEEN_LINES or (at_end and printed > started)
        if due and not ended:
            percent = 100 * done // max(total, 1)
            console.print(f"{name}: {percent} % done after {now - started:.0f} s", highlight=False, markup=False)
            printed, ended = now, at_end

    return report


def setting(description: str) -> None:
    """The setting that the answer is about."""
    console.print(f"setting: {description}", highlight=False, markup=False, soft_wrap=not console.is_terminal)


def notes(sentences: Iterable[str]) -> None:
    """Several notes."""
    for sentence in sentences:
        note(sentence)


def note(sentence: str) -> None:
    """A line that a reader should not miss."""
    console.print(f"note: {sentence}", style="yellow", markup=False, soft_wrap=not console.is_terminal)


def say_recipe(planned: Planned) -> None:
    """Say in one line, where nobody chose a plan, which one is used."""
    if planned.recipe is not None:
        console.print(planned.recipe, markup=False, highlight=False, soft_wrap=True)


def figure(value: float | None) -> str:
    """A metric: four decimals, or four digits of a large one; a dash if it is undefined."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 10 else metric_text(value)


def table(title: str, rows: dict[str, str]) -> None:
    """A small table of names and values."""
    shown = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    for name, value in rows.items():
        shown.add_row(name, value)
    console.print(shown)


def leak_table(summary: dict[str, Any]) -> None:
    """The results of an attack, with baselines that see no gradient; or of each tensor, if attacked one by one."""
    title = " · ".join(summary[name] for name in ("method", "leak", "attack"))
    shown = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    for words, figures in _facts(summary):
        shown.add_row(words, escape(figures))
    stdout.print(shown)
    if nothing := summary.get("knowing_nothing"):
        stdout.print(_baselines(summary, nothing))
    if layers := summary.get("layers"):
        stdout.print(_each_tensor(layers))


def _facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    examples, others = found.get("examples"), found.get("others")
    of = f", {examples} examples" if examples not in (None, found["victims"]) else f", {others} others" if others else ""
    yield "data, network", f"{found['dataset']}, {found['network']}"
    together = found.get("summed_clients")
    yield "victims", f"{found['victims']}{of}" + (f"; the sum of {together} clients' updates was read" if together else "")
    if found.get("noise_deviation") is not None:
        noise = f"noise of deviation {found['noise_deviation']:.4g}" if found["noise_deviation"] else "no noise"
        yield "observed", f"{_counted(found['steps'], 'local step')}, {_counted(found['releases'], 'release')}, {noise}"
    if found.get("assumption") is not None:
        yield "active server", found["assumption"]
    if found.get("bins") is not None:
        yield "crafted layer", f"{found['bins']} rows, of which {found['clear_rows_mean']:.3g} show an input on average"
    if found.get("singled_out") is not None:
        alone = f"one of {found['records']:.3g} records is alone for {_percent(found['singled_out'])} of the victims"
        yield "singled out", f"{alone}, after {_counted(found['queries'], 'round')}"
    if found.get("source") is not None:
        rounds = found.get("rounds_observed")
        some = rounds is not None and rounds < found["rounds_of_training"]
        among = f" in {rounds} of {found['rounds_of_training']} rounds" if some else ""
        yield "observed in", f"{found['source']}: {found['releases_mean']:.3g} releases per victim on average{among}"
    if found.get("quiet_observations"):
        yield (
            "missing noise",
            f"{found['quiet_observations']} observations carry clearly less noise than the method promises",
        )
    if found.get("feature_error_median") is not None:
        yield "features", f"recovered with an error of {found['feature_error_median']:.2g} of their norm (median)"
    if found.get("label_accuracy") is not None:
        yield "labels inferred", f"{_percent(found['label_accuracy'])}{_label_baselines(found)}"
    if found.get("target_rmse") is not None:
        mean = found.get("target_rmse_of_mean")
        beside = "" if mean is None else f" (the public mean: {mean:.3g})"
        yield "targets inferred", f"root mean square error {found['target_rmse']:.3g}{beside}"
    if found.get("visible_coordinates") is not None:
        yield (
            "compared",
            f"{found['visible_coordinates']} of {found['coordinates']} coordinates: those that the network sees",
        )
        which = "likeliest" if found.get("identified_by_likelihood") else "nearest"
        yield (
            "identified",
            f"{which} of {found['candidates']} candidates; by chance {_percent(1 / max(found['candidates'], 1))}",
        )
    if found.get("cells_right") is not None:
        yield "cells right", f"{_percent(found['cells_right'])} ({_guesses(found)})"
        yield "rows right", _percent(found["rows_right"]) + _solved(found)
    if found.get("token_recall") is not None:
        guess = found["token_baseline"]
        yield (
            "tokens found",
            f"{_percent(found['token_recall'])}, {_percent(found['token_precision'])} of the guesses right (the most "
            f"frequent public tokens: {_percent(guess['recall'])}, {_percent(guess['precision'])})",
        )
        if found.get("sequences_exact") is not None:
            yield "sequences", f"{_percent(found['sequences_exact'])} recovered with every token at its place"
    if found.get("membership_auc") is not None:
        yield "membership", f"AUC {_estimate(found, 'membership_auc')}"
    if found.get("auc") is not None:
        expected = "" if found.get("auc_predicted") is None else f"; predicted by the formula {found['auc_predicted']:.3f}"
        yield "membership" if found["leak"] == "model" else "presence", f"AUC {_estimate(found, 'auc')}{expected}"
        picked = found.get("success_rate") if found.get("identified_rate") is None else found["identified_rate"]
        if picked is not None:
            yield "identified", f"{_percent(picked)}, among {found['candidates']} candidates"
    for name, words in _RATES.items():
        if found.get(name) is not None:
            yield words, _estimate(found, name)
    if found.get("shadows") is not None:
        yield from _shadows(found)
    if found.get("unsanitised") is not None:
        yield "tensors without noise", ", ".join(found["unsanitised"]) or "none"
    if found.get("iterations_median") is not None:
        median = _counted(found["iterations_median"], "iteration")
        ended = f"{found['converged']} converged, {found['diverged']} diverged"
        ended += f", {found['out_of_iterations']} ran out of iterations"
        solved = f"solved for {found['converged']} of {found['victims']}"
        closed = found["attack"] in ("analytic", "linear-head") or found.get("assumption") is not None
        yield "search", solved if closed else f"{median} (median); {ended}"
    if found.get("clients"):
        yield "clients", "\n".join(_client(each) for each in found["clients"])
    if found.get("tried"):
        yield "tried", "\n".join(_tried(each) for each in found["tried"])
    if found.get("seconds") is not None:
        yield "time", f"{found['seconds']:.1f} s"


_RATES = {
    "advantage": "advantage over guessing",
    "tpr_at_1_percent": "detected at 1 % false positives",
    "tpr_at_01_percent": "detected at 0.1 %",
}


def _shadows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is special about an attack with shadow federations."""
    yield "shadow federations", f"{found['shadows']}, each without a random half of the records; each is the target once"
    for name, words in (("offline_auc", "shadows without the record only"), ("threshold_auc", "one threshold, no shadows")):
        yield words, f"AUC {_estimate(found, name)}"
    if found.get("epsilon") is not None:
        allowed = "∞" if found["epsilon"] == "inf" else f"{found['epsilon']:.3g}"
        yield "ε of the final model", f"{allowed} per {found['epsilon_unit']}; these rates need {found['epsilon_shown']:.3g}"


def _guesses(found: dict[str, Any]) -> str:
    """The share of cells that guesses without any observation get right."""
    named = {"mode": "modes", "marginals": "marginals", "public_rows": "public rows"}
    told = found["cell_baselines"].items()
    return ", ".join(f"{named.get(name, name)} {_percent(each['cells_right'])}" for name, each in told)


def _solved(found: dict[str, Any]) -> str:
    """How the rows of a table were recovered."""
    if found.get("rows_solved") is None:
        return ""
    searched = f"; the others were searched for by an ensemble of {found['members']}" if found["rows_solved"] < 1 else ""
    return f"; {_percent(found['rows_solved'])} were solved for exactly{searched}"


def _client(each: dict[str, Any]) -> str:
    """A named client, and what of it was recovered."""
    count = each.get("examples", each.get("victims"))
    rate = each.get("success_rate")
    return f"{each['client']}: {count}" + ("" if rate is None else f", {_percent(rate)} exact")


def _label_baselines(found: dict[str, Any]) -> str:
    """How well labels are guessed without any observation."""
    told = []
    if found.get("label_chance_99") is not None:
        told.append(f"by chance {' to '.join(map(_percent, found['label_chance_99']))}")
    if found.get("label_baseline") is not None:
        told.append(f"public labels alone {_percent(found['label_baseline'])}")
    return f" ({'; '.join(told)})" if told else ""


def _tried(each: dict[str, Any]) -> str:
    """An attack and its result."""
    if each.get("refused"):
        return f"{each['attack']}: does not apply ({each['refused']})"
    if each.get("auc") is not None:
        picked = "" if each["success_rate"] is None else f", {_percent(each['success_rate'])} identified"
        return f"{each['attack']}: AUC {each['auc']:.3f}{picked}"
    words = {"success_rate": "exact", "recognisable_rate": "recognisable", "identified_rate": "identified",
             "label_accuracy": "labels"}  # fmt: skip
    scores = [f"{_percent(each[name])} {word}" for name, word in words.items() if each.get(name) is not None]
    return f"{each['attack']}: {', '.join(scores) or 'not scored'}"


def _baselines(found: dict[str, Any], nothing: dict[str, dict[str, float]]) -> Table:
    names = {"exact": "success_rate", "recognisable": "recognisable_rate", "identified": "identified_rate",
             "mse": "distance_mean", "median_mse": "distance_median", "psnr": "psnr_mean"}  # fmt: skip
    rows = {"the attack": {name: found[key] for name, key in names.items()}}
    rows |= {name.replace("_", " "): row for name, row in nothing.items()}
    images = found["recognisable_rate"] is not None  # None for a table
    headings = ["", "exact", *(["recognisable"] if images else []), "identified", "MSE", "median", "PSNR"]
    shown = _with_header("The attack, and baselines that see no gradient", *headings)
    for guess, row in rows.items():
        shares = [
            _percent(row[name]) for name in ("exact", "recognisable", "identified") if images or name != "recognisable"
        ]
        shown.add_row(guess, *shares, *(f"{row[name]:.3g}" for name in ("mse", "median_mse", "psnr")))
    return shown


def _each_tensor(layers: list[dict[str, Any]]) -> Table:
    shown = _with_header("Each tensor attacked alone", "tensor", "noise", "median MSE", "exact")
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


def _estimate(found: dict[str, Any], name: str) -> str:
    low, high = found[f"{name}_interval_99"]
    return f"{found[name]:.3f} (99 %: {low:.3f} to {high:.3f})"


def privacy_table(privacy: Privacy, to_stdout: bool = False) -> None:
    """The privacy statement: each ε with its adversary, unit and relation; below, the assumption of each."""
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
    if clients := privacy.client_cells():
        title = "ε of each client's records against the server"
        shown = Table(title=title, title_justify="left", title_style="bold")
        for heading in privacy.CLIENT_HEADINGS:
            shown.add_column(heading, justify="left" if heading == "client" else "right")
        for cells in clients:
            shown.add_row(*map(escape, cells))
        target.print(shown)


def figures_table(title: str, headings: list[str], rows: list[list[str]]) -> None:
    """A table of figures as the answer of a command."""
    shown = _with_header(title, *headings)
    for cells in rows:
        shown.add_row(*map(escape, cells))
    stdout.print(shown)
