"""The command line: parses, calls the library, prints. No logic."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import fedcdp
from fedcdp import cli_attack, cli_bench, cli_deploy, cli_privacy, cli_report, cli_reproduce, output, spending
from fedcdp.errors import DefectError, FedcdpError, PlanError, StoppedError, StorageError
from fedcdp.experiment import Experiment, assemble, stored
from fedcdp.files import is_fault_of_the_machine
from fedcdp.options import takes_settings
from fedcdp.plan import Plan
from fedcdp.presets import Settings
from fedcdp.rundir import RunDirectory
from fedcdp.simulation import Run
from fedcdp.trained import Trained
from fedcdp.untrusted import printable

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Privacy

app = typer.Typer(
    help="Gradient-leakage resilient federated learning for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(cli_privacy.account)
app.command()(cli_privacy.calibrate)
app.command()(cli_privacy.audit)
app.command()(cli_attack.attack)
app.command()(cli_bench.bench)
app.command()(cli_reproduce.reproduce)
app.command()(cli_report.demo)
app.command()(cli_report.report)
app.add_typer(cli_deploy.app, name="deploy")

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", envvar="FEDCDP_DATA", help="Where dataset files lie.", rich_help_panel="Data"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON line for programs.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no table.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedcdp {fedcdp.__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Gradient-leakage resilient federated learning for PyTorch."""


@app.command()
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
    elif target_epsilon is not None:
        experiment, reached = cli_privacy.calibrated(
            given, target_epsilon, "tight", lambda each: each.population(each.splits(data_dir, quiet))
        )
        if not quiet:
            output.note(f"noise multiplier {experiment.plan.noise_multiplier:.6g} for ε = {reached:.4g}")
    else:
        experiment = assemble(*given)
    run = _train(experiment, out, resume, data_dir, quiet)
    privacy = spending.statement(run)
    if not quiet:
        _say_whether_noise_is_secret(run.plan)
    if as_json:
        typer.echo(json.dumps(_summary(run, privacy)))
    elif not quiet:
        _show_run(run, privacy)


@app.command()
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
        output.note("computed from training data, so no privacy guarantee covers this figure")
    if as_json:
        typer.echo(json.dumps(result))
        return
    clients = {f"client {name}": f"{value:.4f}" for name, value in result.get("per_client", {}).items()}
    output.table(f"{split}, {result['examples']} examples", {"accuracy": f"{result['accuracy']:.4f}"} | clients)


@app.command()
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


def _train(experiment: Experiment, out: Path, resume: bool, data_dir: Path | None, quiet: bool) -> Run:
    done = RunDirectory(out).rounds_done() if resume else 0
    splits = experiment.splits(data_dir, quiet)
    budget = spending.Budget(experiment, experiment.population(splits), RunDirectory(out).ledger)
    try:
        with output.training_progress(experiment.plan, quiet, done, budget.shown_after) as progress:
            return experiment.train(out, resume=resume, splits=splits, budget=budget.allows, progress=progress)
    except KeyboardInterrupt:
        raise StoppedError(f"stopped; fedcdp train --resume --out {out} goes on from the last whole round") from None
    except StorageError as error:
        if not RunDirectory(out).config.is_file():
            raise
        raise StorageError(f"{error}; once that is mended, fedcdp train --resume --out {out} goes on") from error


def _say_whether_noise_is_secret(plan: Plan) -> None:
    if plan.private and not plan.secure_noise:
        output.note("reproducible research: whoever has the seed can subtract the noise (--secure-noise draws it in secret)")


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
    output.table("Trained", rows)
    if privacy is None:
        output.note("dp-accounting is not installed; fedcdp account --run computes ε from the ledger where it is")
    else:
        output.privacy_table(privacy)


_INTERRUPTED = 130  # what typer makes of Ctrl-C
# What typer raises for a bad command line; not click's class, since newer versions carry a copy of click of their own.
_UsageError: type[Any] = typer.BadParameter.__base__ or Exception


def main() -> None:
    """Run a command: exit 0 done, 2 bad input (one line says what), 1 failure."""
    try:
        status = app(standalone_mode=False)
        if status == _INTERRUPTED:
            _fail("stopped", 1)
        sys.exit(status if isinstance(status, int) else 0)
    except (StoppedError, DefectError, StorageError) as error:
        _fail(str(error), 1)
    except FedcdpError as error:
        _fail(str(error), 1 if is_fault_of_the_machine(error.__cause__) else 2)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message())
            sys.exit(2)
        _fail(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("stopped", 1)
    except MemoryError:
        _fail("there is not enough memory for this; fewer clients, records, steps or rounds need less", 1)
    except ModuleNotFoundError as error:
        if error.name != "dp_accounting":
            raise
        _fail("this command needs dp-accounting; install it with pip install dp-accounting", 2)


def _fail(message: str, status: int) -> NoReturn:
    one_line = printable(" ".join(message.split()))
    typer.echo(f"fedcdp: {one_line}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
