"""The program `fedcdp`: its commands, its exit status, and one line for every failure."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, NoReturn

import typer

from fedcdp import _startup
from fedcdp._version import __version__
from fedcdp.cli import attack, bench, check, operate, privacy, report, reproduce, train, usage
from fedcdp.errors import ClaimError, DefectError, FedcdpError, StoppedError, StorageError
from fedcdp.files.disk import is_fault_of_the_machine
from fedcdp.files.untrusted import printable

app = typer.Typer(
    cls=usage.PlainGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=usage.SETTINGS,
    epilog=usage.epilog(
        "fedcdp demo",
        "fedcdp train --preset cancer-eps8 --out run",
        "fedcdp account --run run",
    ),
)

usage.add_to(
    app,
    "fedcdp demo",
    "fedcdp demo --out runs/another-demo",
)(report.demo)
usage.add_to(
    app,
    "fedcdp train --preset cancer-eps8 --out run",
    "fedcdp train --data patients.csv --client-column hospital --out run",
    "fedcdp train --resume --out run",
)(train.train)
usage.add_to(
    app,
    "fedcdp evaluate run",
    "fedcdp evaluate run --split train --per-client",
)(train.evaluate)
usage.add_to(
    app,
    "fedcdp export run --to model.safetensors",
    "fedcdp export run --format onnx --to model.onnx",
    "fedcdp export run --format csv --to metrics.csv",
)(train.export)
usage.add_to(
    app,
    "fedcdp account --preset mnist",
    "fedcdp account --dataset mnist --rounds 20 --noise-multiplier 4",
    "fedcdp account --run run --json",
)(privacy.account)
usage.add_to(
    app,
    "fedcdp calibrate --target-epsilon 4",
    "fedcdp calibrate --target-epsilon 2 --preset mnist --adversary example",
    "fedcdp calibrate --target-epsilon 8 --data records.csv --clients 20",
)(privacy.calibrate)
usage.add_to(
    app,
    "fedcdp audit",
    "fedcdp audit --preset cancer --adversary example --trials 20000",
    "fedcdp audit --preset demo --one-run --canaries 500",
)(privacy.audit)
usage.add_to(
    app,
    "fedcdp attack --method nonprivate --victims 10",
    "fedcdp attack --dataset cancer --leak type0",
    "fedcdp attack --run run --leak type1 --victims 10",
    "fedcdp attack --run run --attack lira --shadows 64 --json",
)(attack.attack)
usage.add_to(
    app,
    "fedcdp report run",
    "fedcdp report run-one run-two --out compared.html",
)(report.report)
usage.add_to(
    app,
    "fedcdp reproduce --list",
    "fedcdp reproduce accuracy --cells 'cancer/*'",
    "fedcdp reproduce --table-only",
)(reproduce.reproduce)
usage.add_to(
    app,
    "fedcdp bench --quick",
    "fedcdp bench --section engines --device cuda --out speed.json",
)(bench.bench)
app.add_typer(check.app, name="check")
app.add_typer(operate.app, name="deploy")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedcdp {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Gradient-leakage resilient federated learning for PyTorch."""


_INTERRUPTED = 130  # typer's status for Ctrl-C
# The base of typer's errors for a bad command line. It is not always click's class: newer versions contain a copy of click.
_UsageError: type[Any] = typer.BadParameter.__base__ or Exception


def main() -> None:
    """Run a command: exit 0 done, 2 bad input (one line says what), 1 failure."""
    try:
        _startup.over()
        status = app(standalone_mode=False)
        if status == _INTERRUPTED:
            _fail("stopped", 1)
        sys.exit(status if isinstance(status, int) else 0)
    except (StoppedError, ClaimError, DefectError, StorageError) as error:
        _fail(str(error), 1)
    except FedcdpError as error:
        _fail(str(error), 1 if is_fault_of_the_machine(error.__cause__) else 2)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message())
            sys.exit(2)
        _fail(_explained(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("stopped", 1)
    except MemoryError:
        _fail("not enough memory; fewer clients, records, steps or rounds need less", 1)
    except ModuleNotFoundError as error:
        if error.name != "dp_accounting":
            raise
        _fail("this command needs dp-accounting; install it with pip install 'dp-accounting>=0.6,<0.7'", 2)


# Other names that people try for an option.
_MEANT = {
    "--epsilon": "--target-epsilon",
    "--eps": "--target-epsilon",
    "--sigma": "--noise-multiplier",
    "--learning-rate": "--lr",
    "--server-learning-rate": "--server-lr",
    "--network": "--model",
    "--file": "--data",
    "--output": "--out",
}


def _explained(error: Any) -> str:
    """The message of a bad command line, with the option that was meant."""
    message: str = error.format_message()
    tried = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and tried in _MEANT and error.ctx is not None:
        offered = [name for each in error.ctx.command.params for name in each.opts]
        if _MEANT[tried] in offered:
            return f"No such option '{tried}'. Did you mean '{_MEANT[tried]}'?"
        if _MEANT[tried] == "--target-epsilon":
            return f"No such option '{tried}'. To choose the noise for an ε, use: fedcdp calibrate --target-epsilon"
    return re.sub(r"( Did you mean .*\?)\1", r"\1", message)  # typer and click may both suggest a command


def _fail(message: str, status: int) -> NoReturn:
    one_line = printable(" ".join(message.split()))
    typer.echo(f"fedcdp: {one_line}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
