"""The program `fedcdp`: its commands, its exit status, and one line for every failure."""

from __future__ import annotations

import re
import sys
import time
from typing import Annotated, Any, NoReturn

import typer

from fedcdp._version import __version__
from fedcdp.cli import usage
from fedcdp.cli.late_commands import LateGroup
from fedcdp.config.job import job_rank, job_size, local_rank
from fedcdp.errors import ClaimError, DefectError, FedcdpError, LostRankError, RankError, StoppedError, StorageError
from fedcdp.files.disk import is_fault_of_the_machine
from fedcdp.files.untrusted import printable

app = typer.Typer(
    cls=LateGroup,
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


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedcdp {__version__}")
        raise typer.Exit


_ON_RANKS = ("train", "attack")  # commands that several ranks of a job share


@app.callback()
def _global_options(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Gradient-leakage resilient federated learning for PyTorch."""
    command = context.invoked_subcommand
    if command not in _ON_RANKS and (ranks := job_size()) > 1:
        raise RankError(
            f"{command}: it does not use several ranks, and would do everything {ranks} times; run it without torchrun"
        )


_INTERRUPTED = 130  # typer's status for Ctrl-C
# The base of typer's errors for a bad command line. It is not always click's class: newer versions contain a copy of click.
_UsageError: type[Any] = typer.BadParameter.__base__ or Exception


def main() -> None:
    """Run a command: exit 0 done, 2 bad input (one line says what), 1 failure."""
    try:
        status = app(standalone_mode=False)
        if status == _INTERRUPTED:
            _fail("stopped", 1)
        sys.exit(status if isinstance(status, int) else 0)
    except (StoppedError, ClaimError, DefectError, StorageError, LostRankError) as error:
        _fail(str(error), 1, lost=isinstance(error, LostRankError))
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


_TIME_TO_SPEAK = 1.0  # seconds; when one rank has ended, torchrun ends the others


def _fail(message: str, status: int, *, lost: bool = False) -> NoReturn:
    if _speaks(lost):
        one_line = printable(" ".join(message.split()))
        typer.echo(f"fedcdp: {one_line}", err=True)
    else:
        time.sleep(_TIME_TO_SPEAK)
    sys.exit(status)


def _speaks(lost: bool) -> bool:
    """Whether this process prints the line: of the ranks of a job, the first on each machine, since they fail together.

    If rank 0 was lost it cannot say so, and rank 1 does.
    """
    try:
        return local_rank() == 0 or (lost and job_rank() == 1 and "the connection to rank 0" in str(sys.exception()))
    except RankError:  # the environment is not torchrun's
        return True


if __name__ == "__main__":
    main()
