"""The program `fedcdp`: its commands, its exit status, and one line for every failure."""

from __future__ import annotations

import sys
from typing import Annotated, Any, NoReturn

import typer

from fedcdp._version import __version__
from fedcdp.cli import attack, bench, deploy, privacy, report, reproduce, train
from fedcdp.errors import DefectError, FedcdpError, StoppedError, StorageError
from fedcdp.files.disk import is_fault_of_the_machine
from fedcdp.files.untrusted import printable

app = typer.Typer(
    help="Gradient-leakage resilient federated learning for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(privacy.account)
app.command()(privacy.calibrate)
app.command()(privacy.audit)
app.command()(attack.attack)
app.command()(bench.bench)
app.command()(reproduce.reproduce)
app.command()(report.demo)
app.command()(report.report)
app.command()(train.train)
app.command()(train.evaluate)
app.command()(train.export)
app.add_typer(deploy.app, name="deploy")


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
