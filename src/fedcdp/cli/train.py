"""The commands `train`, `evaluate` and `export`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcdp.accounting.budget import Budget, accounting_is_installed
from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import format_epsilon
from fedcdp.cli import terminal
from fedcdp.cli.options import takes_settings
from fedcdp.cli.privacy import calibrated
from fedcdp.config.experiment import Experiment, assemble
from fedcdp.config.plan import Plan
from fedcdp.config.presets import Settings
from fedcdp.errors import PlanError, StoppedError, StorageError
from fedcdp.training.prepared import Prepared, prepare_experiment, stored
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.saved_run import Trained
from fedcdp.training.simulate import Run, train_experiment

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Privacy


DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", envvar="FEDCDP_DATA", help="Where dataset files lie.", rich_help_panel="Data"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON line for programs.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no table.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]


@takes_settings
def train(
    *,
    given: list[Settings],
    out: Annotated[Path, typer.Option("--out", help="The run directory: a new one, or with --resume an existing one.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out as it was started.")] = False,
    target_epsilon: Annotated[
        float | None, typer.Option("--target-epsilon", help="Choose the noise for this ε against --adversary.")
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a model over many clients, into a run directory that can be resumed, compared and trusted."""
    if resume:
        if target_epsilon is not None:
            raise PlanError("--target-epsilon: a run that is resumed keeps its noise; leave it out")
        experiment = stored(out, given)
        prepared = prepare_experiment(experiment, data_dir, quiet=quiet)
    elif target_epsilon is not None:
        experiment, prepared, reached = _calibrated(given, target_epsilon, data_dir, quiet)
        if not quiet:
            terminal.note(f"noise multiplier {experiment.plan.noise_multiplier:.6g} for ε = {format_epsilon(reached)}")
    else:
        experiment = assemble(*given)
        prepared = prepare_experiment(experiment, data_dir, quiet=quiet)
    run = _train(experiment, prepared, out, resume, quiet)
    privacy = run.privacy() if accounting_is_installed() else None
    if not quiet:
        _say_whether_noise_is_secret(run.plan)
    if as_json:
        typer.echo(json.dumps(_summary(run, privacy)))
    elif not quiet:
        _show_run(run, privacy)


def evaluate(
    run: RunPath,
    split: Annotated[str, typer.Option("--split", help="train, validation or test.")] = "validation",
    per_client: Annotated[bool, typer.Option("--per-client", help="Also how accuracy spreads over clients.")] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """The accuracy of a run's model on any split, also client by client."""
    trained = Trained.load(run, data_dir)
    result = trained.evaluate(split, per_client)
    # A client's own figure, on any split, is weighted by which classes it holds.
    if (split == "train" or per_client) and trained.experiment.plan.private:
        terminal.note("computed from training data, so no privacy guarantee covers this figure")
    if as_json:
        typer.echo(json.dumps(result))
        return
    clients = {f"client {name}": f"{value:.4f}" for name, value in result.get("per_client", {}).items()}
    terminal.table(f"{split}, {result['examples']} examples", {"accuracy": f"{result['accuracy']:.4f}"} | clients)


def export(
    run: RunPath,
    to: Annotated[Path, typer.Option("--to", help="The file to write (tensorboard: a directory).")],
    form: Annotated[
        str, typer.Option("--format", help="The model: safetensors, torchscript, onnx. Its metrics: csv, tensorboard.")
    ] = "safetensors",
    data_dir: DataDir = None,
) -> None:
    """A run's model, or the metrics of its training, in another format."""
    typer.echo(Trained.load(run, data_dir).export(form, to))


def _calibrated(
    given: list[Settings], epsilon: float, data_dir: Path | None, quiet: bool
) -> tuple[Experiment, Prepared, float]:
    """The experiment with the noise that a target needs, what it trains, and the ε that it then has."""
    made: list[Prepared] = []

    def population_of(experiment: Experiment) -> Population:
        made.append(prepare_experiment(experiment, data_dir, quiet=quiet))
        return made[0].population

    experiment, reached = calibrated(given, epsilon, "tight", population_of)
    return experiment, replace(made[0], plan=experiment.plan), reached


def _train(experiment: Experiment, prepared: Prepared, out: Path, resume: bool, quiet: bool) -> Run:
    done = RunDirectory(out).rounds_done() if resume else 0
    budget = Budget(experiment, prepared.population, RunDirectory(out).ledger)
    try:
        with terminal.training_progress(experiment.plan, quiet, done, budget.shown_after) as progress:
            return train_experiment(
                experiment, out, resume=resume, prepared=prepared, budget=budget.allows, progress=progress
            )
    except KeyboardInterrupt:
        raise StoppedError(f"stopped; fedcdp train --resume --out {out} goes on from the last whole round") from None
    except StorageError as error:
        if not RunDirectory(out).config.is_file():
            raise
        raise StorageError(f"{error}; once that is mended, fedcdp train --resume --out {out} goes on") from error


def _say_whether_noise_is_secret(plan: Plan) -> None:
    if plan.private and not plan.secure_noise:
        terminal.note(
            "reproducible research: whoever has the seed can subtract the noise (--secure-noise draws it in secret)"
        )


def _summary(run: Run, privacy: Privacy | None) -> dict[str, object]:
    speed = None if run.plan.hides_cohort else run.us_per_client_step  # how long it took tells how many took part
    return {
        "accuracy": run.accuracy,
        "rounds": run.rounds,
        "seconds": None if run.plan.hides_cohort else round(run.seconds, 3),
        "us_per_client_step": None if speed is None else round(speed, 2),
        "epsilon": None if privacy is None else privacy.as_json()["rows"],
    }


def _show_run(run: Run, privacy: Privacy | None) -> None:
    speed = "" if run.us_per_client_step is None else f", {run.us_per_client_step:.0f} µs a client step"
    ended = "" if run.rounds == run.plan.rounds else f" of {run.plan.rounds}: one more would exceed the largest ε"
    rows = {
        "federation": run.federation.describe(),
        "method": run.plan.method,
        "rounds": f"{run.rounds}{ended}",
        "validation accuracy": "-" if run.accuracy is None else f"{run.accuracy:.4f}",
        "time": "not shown: it would tell how many took part" if run.plan.hides_cohort else f"{run.seconds:.1f} s{speed}",
        "run directory": str(run.directory),
    }
    terminal.table("Trained", rows)
    if privacy is None:
        terminal.note("dp-accounting is not installed; fedcdp account --run computes ε from the ledger where it is")
    else:
        terminal.privacy_table(privacy)
