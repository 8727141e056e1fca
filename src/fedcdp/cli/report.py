"""The commands `demo` and `report`: a whole study in one command, and a page about any runs."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedcdp.accounting.statement import VACUOUS
from fedcdp.cli import terminal
from fedcdp.config.experiment import Experiment
from fedcdp.errors import StoppedError
from fedcdp.report import api
from fedcdp.report.comparison import which_networks
from fedcdp.report.facts import ADVERSARY_OF
from fedcdp.report.subjects import Subject, spent, subjects_of
from fedcdp.report.wording import epsilon, result_heading
from fedcdp.training.metrics import SHARES, metric_text, metric_title
from fedcdp.training.progress import Progress

_TITLE = "What leaks, what stops it, what it costs"


def demo(
    out: Annotated[Path, typer.Option("--out", help="Output directory. An unfinished demo there is resumed.")] = Path(
        "runs/demo"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress and no table.")] = False,
) -> None:
    """Train, attack and account four methods, in about two minutes.

    Four methods are trained on real digits. Each is attacked, and its ε is computed. The result is an HTML page.
    """
    from fedcdp.studies.demo import Demo, Show

    story = Demo(out)
    story.check()
    if story.finished and not quiet:
        terminal.console.print(f"{out} holds a finished demo, which is shown again. To run a new one, choose another --out.")
    elif not quiet:
        terminal.console.print(
            "Four methods train a model on 4,000 real digits. Then three adversaries attack each method. One sees the "
            "gradient of every example (type-2), one sees a client's update before it is sent (type-1), and one is the "
            "server (type-0)."
        )

    def training(experiment: Experiment, done: int) -> AbstractContextManager[Progress | None]:
        silent = quiet or not terminal.console.is_terminal  # without a terminal: a line per method rather than per round
        if silent and not quiet:
            terminal.console.print(f"{experiment.plan.method}: training, then the attacks")
        return terminal.training_progress(experiment.plan, silent, done)

    try:
        subjects = story.run(Show(training, lambda name: terminal.steps(f"attack: {name}", quiet)))
        page = api.write(*api.gather([out]), out / "report.html", "The demo: four methods on 4,000 real digits")
    except KeyboardInterrupt:
        raise StoppedError(f"stopped; fedcdp demo --out {out} resumes it") from None
    if not quiet:
        _show_table(subjects)
        terminal.stdout.print(f"Report: {page}", soft_wrap=True)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run directories, output directories of attack --out, or folders of them.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write. Default: report.html in the run directory; for several runs, here."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no table.")] = False,
) -> None:
    """Write an HTML page about runs and the attacks on them.

    It shows what leaks, what stops it, and what it costs.
    """
    told, leaks = api.gather(runs)
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    page = api.write(told, leaks, target)
    if not quiet:
        _show_table(subjects_of(told, leaks))
    for run in told:
        if not run.finished:
            terminal.note(f"{run.name} is not finished: the page shows {run.rounds} of {run.plan.rounds} rounds")
    if api.private_records(told, leaks):
        terminal.note("the page contains private records: training examples and their reconstructions; "
                      "store it with the data")  # fmt: skip
    typer.echo(page)


def _show_table(subjects: list[Subject]) -> None:
    """One row for each subject: main metric, what each adversary reconstructed, and ε. Below: what the figures refer to."""
    networks = which_networks(subjects)
    one, two = ("¹", "²") if networks else ("", "")
    shown = Table(title=_TITLE, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("method", no_wrap=True)
    metric = result_heading(each.result[0] for each in subjects if each.result)
    shown.add_column(f"{metric}{one}", justify="right", no_wrap=True)
    for heading in ("type-2", "type-1", "type-0"):
        shown.add_column(f"{heading}{two}", no_wrap=True)
    shown.add_column("model", no_wrap=True)
    for subject in subjects:
        main, value = subject.result or ("", None)
        reached = "-" if value is None else f"{value:.3f}" if main in SHARES else metric_text(value)
        reached = f"{metric_title(main)} {reached}" if main and metric == "result" else reached
        clients = None if subject.run is None else subject.run.clients
        name = escape(subject.name) if clients is None else f"{escape(subject.name)}\n[dim]{clients:,} clients[/]"
        cells = [name, reached]
        for cell in subject.cells:
            got = cell.verdict
            style = {"leaks": "bold red", "failed": "default", "unknown": "dim"}[got.kind]
            words = "-" if got.kind == "unknown" else f"{got.got}/{got.of}"
            if got.identified is not None and not got.got:
                words = f"{got.identified[0]}/{got.identified[1]} identified"
            cells.append(f"[{style}]{words}[/]\nε {epsilon(cell.epsilon)}")
        whole = "" if subject.client_epsilon is None else f"client ε {epsilon(subject.client_epsilon)}"
        shown.add_row(*cells, f"{whole}\nε {epsilon(subject.model_epsilon)}")
    terminal.stdout.print(shown)
    terminal.stdout.print(
        "type-2, type-1, type-0: how many of the attacked examples the adversary reconstructed recognisably (-: not "
        "attacked). model: an adversary who sees only the model. ε is for a record unless it says client. A failed attack "
        "is no proof."
    )
    if networks:
        terminal.stdout.print(escape(f"¹ {networks[0]} ² {networks[1]} {networks[2]}"))
    for subject in subjects:
        told = [f"{cell.leak.replace('type', 'type-')} {', '.join(cell.verdict.tried)}" for cell in subject.cells
                if cell.verdict.tried]  # fmt: skip
        if told:
            terminal.stdout.print(f"Attacks on {escape(subject.name)}: {escape('; '.join(told))}.")
    for reason, names in _reasons(subjects).items():
        terminal.stdout.print(f"ε = ∞ for {', '.join(names)}: {reason}.")
    if any(VACUOUS <= value < math.inf for subject in subjects for value in _epsilons(subject)):
        terminal.stdout.print(f"An ε above {VACUOUS:g} guarantees nothing in practice, even if the attacks fail.")


def _reasons(subjects: list[Subject]) -> dict[str, list[str]]:
    """Why an ε is infinite, and for which subjects."""
    reasons: dict[str, list[str]] = {}
    for subject in subjects:
        for adversary in (*ADVERSARY_OF.values(), "model"):
            row = subject.row(adversary)
            if row is not None and spent(row) == math.inf:
                names = reasons.setdefault(row.assumption, [])
                names += [] if subject.name in names else [subject.name]
    return reasons


def _epsilons(subject: Subject) -> list[float]:
    values = [cell.epsilon for cell in subject.cells] + [subject.model_epsilon, subject.client_epsilon]
    return [value for value in values if value is not None]
