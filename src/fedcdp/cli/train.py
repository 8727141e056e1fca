"""The commands `train`, `evaluate` and `export`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcdp.accounting.budget import Budget, accounting_is_installed
from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import format_epsilon
from fedcdp.cli import terminal
from fedcdp.cli.options import DATA, takes_settings
from fedcdp.cli.privacy import TargetEpsilon
from fedcdp.cli.remarks import describe_setting, remarks
from fedcdp.config.experiment import Experiment
from fedcdp.config.plan import Plan
from fedcdp.config.presets import Settings
from fedcdp.errors import LostRankError, PlanError, StoppedError, StorageError
from fedcdp.training.export import SUFFIXES, export_model, settings_in, without_secrets
from fedcdp.training.metrics import Figures, main_figure, metric_title
from fedcdp.training.planning import Planned, plan_experiment
from fedcdp.training.prepared import Prepared, prepare_experiment, stored
from fedcdp.training.python_origin import require_task_loss
from fedcdp.training.ranks import Ranks, ranks_of_job
from fedcdp.training.run import Run
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.saved_run import open_model
from fedcdp.training.split_evaluation import evaluate_split, reads_training_records
from fedcdp.training.trainer import train_experiment

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Privacy


DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", envvar="FEDCDP_DATA", help="Directory of dataset files.", rich_help_panel=DATA),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON line instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress and no table.")]
_SHOWN_CLIENTS = 50
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)]


@takes_settings
def train(
    *,
    given: list[Settings],
    out: Annotated[Path, typer.Option("--out", help="Run directory: a new one, or with --resume an existing one.")],
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out, with its own settings.")] = False,
    target_epsilon: TargetEpsilon = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a model over many clients.

    The run directory holds the settings, metrics, ledger, checkpoint and model. A run can be resumed.
    """
    with ranks_of_job() as ranks:
        quiet = quiet or not ranks.leads
        ranks.agree({"options": hashlib.sha256(repr((given, resume, target_epsilon)).encode()).digest()})
        begun: _Begun | None = None
        if ranks.leads:
            begin = _resumed if resume else _begun
            begun = begin(given, out, target_epsilon=target_epsilon, data_dir=data_dir, quiet=quiet)
            ranks.tell(begun.experiment)
        experiment: Experiment = begun.experiment if begun else ranks.heard()
        run = _train(experiment, begun, out, resume=resume, data_dir=data_dir, quiet=quiet, ranks=ranks)
    if not ranks.leads:
        return
    privacy = run.privacy() if accounting_is_installed() else None
    if not quiet:
        _say_whether_noise_is_secret(run.plan)
        if run.warning is not None:
            terminal.note(run.warning)
    if as_json:
        typer.echo(json.dumps(_summary(run, privacy)))
    elif not quiet:
        _show_run(run, privacy)


@takes_settings
def evaluate(
    run: RunPath,
    *,
    given: list[Settings],
    split: Annotated[str, typer.Option("--split", help="Data split: train, validation or test.")] = "validation",
    per_client: Annotated[bool, typer.Option("--per-client", help="Also show how clients differ, by name.")] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Compute the metrics of a run's model on a data split.

    A run from Python also needs its network (--model) and its data.
    """
    experiment, model, data = open_model(run, given, clients=per_client, data_dir=data_dir)
    result = evaluate_split(model, data, split, per_client=per_client)
    if reads_training_records(data, split, per_client) and experiment.plan.private:
        terminal.note("computed from training data, so no privacy guarantee covers this figure")
    if as_json:
        typer.echo(json.dumps(result))
        return
    found = {"accuracy": result["accuracy"]} | result["metrics"]
    clients = {f"client {name}": terminal.figure(value) for name, value in result.get("per_client", {}).items()}
    terminal.table(f"{split}, {result['examples']} examples", _shown_figures(found) | clients)
    if named := result.get("clients"):
        headings = [metric_title(name) for name in named[0]]
        rows = [[terminal.figure(value) if isinstance(value, float | None) else str(value) for value in row.values()]
                for row in named[:_SHOWN_CLIENTS]]  # fmt: skip
        terminal.figures_table("Each client", headings, rows)
        if len(named) > _SHOWN_CLIENTS:
            terminal.note(f"the table shows {_SHOWN_CLIENTS} of {len(named)} clients; --json prints all")


@takes_settings
def export(
    run: RunPath,
    *,
    given: list[Settings],
    to: Annotated[Path, typer.Option("--to", help="File to write (tensorboard: directory).")],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Model: safetensors, torchscript or onnx. Metrics: csv or tensorboard. Default: by the suffix of --to, or "
            "safetensors.",
        ),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Write a run's model or its metrics in another format.

    A run from Python also needs its network (--model) and its data.
    """
    experiment, model, data = open_model(run, given, data_dir=data_dir)
    directory = RunDirectory(run)
    written = export_model(
        form or SUFFIXES.get(to.suffix, "safetensors"),
        to,
        model=model,
        inputs=data.train.inputs,
        metrics=directory.read_metrics(),
        settings=without_secrets(settings_in(directory), experiment.plan),
    )
    typer.echo(written)


@dataclass(frozen=True)
class _Begun:
    """What is to be trained, and the limit on ε."""

    experiment: Experiment
    prepared: Prepared
    budget: Budget


def _resumed(
    given: list[Settings], out: Path, *, target_epsilon: float | None, data_dir: Path | None, quiet: bool
) -> _Begun:
    """A run to go on with."""
    if target_epsilon is not None:
        raise PlanError("--target-epsilon: a resumed run keeps its noise; leave the option out")
    require_task_loss(RunDirectory(out))
    experiment = stored(out, given)
    prepared = prepare_experiment(experiment, data_dir, quiet=quiet)
    prepared.check_origin(RunDirectory(out))
    return _Begun(experiment, prepared, Budget(experiment, prepared.population, RunDirectory(out).ledger))


def _begun(given: list[Settings], out: Path, *, target_epsilon: float | None, data_dir: Path | None, quiet: bool) -> _Begun:
    """A new run."""
    RunDirectory(out).require_creatable()  # before a calibration that may take minutes
    planned, prepared = _planned(given, target_epsilon, data_dir, quiet)
    experiment = planned.experiment
    budget = Budget(experiment, prepared.population, RunDirectory(out).ledger)
    if not quiet:
        _say_how_it_was_planned(planned)
        records, calibrated = prepared.federation.largest, planned.epsilon is not None
        terminal.notes(remarks(experiment, given, records=records, calibrated=calibrated))
    return _Begun(experiment, prepared, budget)


def _planned(given: list[Settings], epsilon: float | None, data_dir: Path | None, quiet: bool) -> tuple[Planned, Prepared]:
    """The experiment, with the noise that a target needs, and what it trains: data are loaded once."""
    made: list[Prepared] = []

    def population_of(experiment: Experiment) -> Population:
        made.append(prepare_experiment(experiment, data_dir, quiet=quiet))
        return made[0].population

    planned = plan_experiment(given, population_of, target_epsilon=epsilon)
    if not made:
        return planned, prepare_experiment(planned.experiment, data_dir, quiet=quiet)
    return planned, replace(made[0], plan=planned.experiment.plan)


def _say_how_it_was_planned(planned: Planned) -> None:
    if planned.recipe is not None:
        terminal.say_recipe(planned)
        return
    terminal.setting(describe_setting(planned.experiment))
    if planned.epsilon is not None:
        sigma = planned.experiment.plan.noise_multiplier
        terminal.note(f"noise multiplier {sigma:.6g} gives ε = {format_epsilon(planned.epsilon)}")


def _train(
    experiment: Experiment,
    begun: _Begun | None,
    out: Path,
    *,
    resume: bool,
    data_dir: Path | None,
    quiet: bool,
    ranks: Ranks,
) -> Run:
    """Train as the leader has `begun`; a follower prepares the same experiment."""
    try:
        if begun is None:
            prepared = prepare_experiment(experiment, data_dir, quiet=True)
            return train_experiment(experiment, out, resume=resume, prepared=prepared, ranks=ranks)
        done = RunDirectory(out).rounds_done() if resume else 0
        training = terminal.training_progress(experiment.plan, quiet, done, begun.budget.shown_after)
        with terminal.preparation(quiet), training as progress:
            return train_experiment(
                experiment,
                out,
                resume=resume,
                prepared=begun.prepared,
                budget=begun.budget.allows,
                progress=progress,
                ranks=ranks,
            )
    except KeyboardInterrupt:
        if begun is None:
            raise StoppedError("stopped with the other ranks") from None
        if not RunDirectory(out).config.is_file():
            raise StoppedError(f"stopped before the first round; {out} was not created") from None
        raise StoppedError(f"stopped; {_how_to_resume(out)}") from None
    except LostRankError as error:
        if not RunDirectory(out).config.is_file():
            raise
        raise LostRankError(f"{error}; {_how_to_resume(out)}, with any number of ranks") from error
    except StorageError as error:
        if not RunDirectory(out).config.is_file():
            raise
        raise StorageError(f"{error}; after fixing that, fedcdp train --resume --out {out} resumes the run") from error


def _how_to_resume(out: Path) -> str:
    return f"fedcdp train --resume --out {out} resumes after the last complete round"


def _say_whether_noise_is_secret(plan: Plan) -> None:
    if plan.private and not plan.secure_noise:
        terminal.note(
            "the noise is reproducible: anyone who knows the seed can subtract it (--secure-noise draws it in secret)"
        )


def _summary(run: Run, privacy: Privacy | None) -> dict[str, object]:
    speed = None if run.hides_time else run.us_per_client_step  # it would reveal who took part
    stated = {} if privacy is None else privacy.as_json()
    summary = {
        "accuracy": run.accuracy,
        "rounds": run.rounds,
        "seconds": None if run.hides_time else round(run.seconds, 3),
        "us_per_client_step": None if speed is None else round(speed, 2),
        "metrics": {name: value for name, value in run.scores.items() if name != "accuracy"},
        "epsilon": stated.get("rows"),
    }
    return summary | ({"clients": stated["clients"]} if "clients" in stated else {})


def _shown_figures(found: Figures) -> dict[str, str]:
    """Metrics by their names for people, the task's main one first; those that are undefined are left out."""
    main = main_figure(found)
    order = sorted((name for name in found if found[name] is not None), key=lambda name: main is None or name != main[0])
    return {metric_title(name): terminal.figure(found[name]) for name in order}


def _show_run(run: Run, privacy: Privacy | None) -> None:
    speed = "" if run.us_per_client_step is None else f", {run.us_per_client_step:.0f} µs per client step"
    ended = "" if run.rounds == run.plan.rounds else f" of {run.plan.rounds}: another round would exceed the maximum ε"
    (main, value), *others = _shown_figures(run.scores).items() or [("accuracy", "-")]
    rows = {
        "federation": run.federation.describe(),
        "method": run.plan.method,
        "rounds": f"{run.rounds}{ended}",
        f"validation {main}": value,
        **({"other metrics": ", ".join(f"{name} {figure}" for name, figure in others)} if others else {}),
        "time": "not shown: it would reveal who took part" if run.hides_time else f"{run.seconds:.1f} s{speed}",
        "run directory": str(run.directory),
    }
    terminal.table("Trained", rows)
    if privacy is None:
        terminal.note("dp-accounting is not installed; where it is, fedcdp account --run computes ε from the ledger")
    else:
        terminal.privacy_table(privacy)
