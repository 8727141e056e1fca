"""`fedcdp` in processes that may be killed: as a user starts it, and in forks, which start instantly."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcdp.cli import train
from fedcdp.cli.program import main as fedcdp_main
from fedcdp.training import rounds
from fedcdp.training.rundir import State
from tools.crash.faults import Faults, Strike


@dataclass(frozen=True)
class Ended:
    """How a command ended: with a status, or by a signal (negative)."""

    status: int
    stderr: str
    calls: tuple[str, ...]


def run_fork(arguments: Sequence[str], place: Path, strike: Strike | None, aside: Path) -> Ended:
    """Run `fedcdp` with faults in everything below `place`; the witness of started rounds is stored in `aside`."""
    seen, errors, witness = aside / "calls", aside / "stderr", aside / "witness"
    child = os.fork()
    if child == 0:
        status = 70
        try:
            output = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            _bear_witness(os.open(witness, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
            # computing ε takes longer than everything else, and nothing is written after this
            train.accounting_is_installed = lambda: False
            Faults(place, strike, seen).install()
            sys.argv = ["fedcdp", *arguments]
            fedcdp_main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 0
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    calls = seen.read_text().splitlines() if seen.exists() else []
    return Ended(os.waitstatus_to_exitcode(status), errors.read_text(errors="replace"), tuple(calls))


def _bear_witness(file: int) -> None:
    """Record every round as its training begins, independently of the ledger."""
    real, write = rounds.Simulator.round, os.write

    def witnessed(self: Any, state: State, chosen: Any) -> State:
        write(file, f"{state.round}\n".encode())
        return real(self, state, chosen)

    rounds.Simulator.round = witnessed  # type: ignore[method-assign]


def command(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "fedcdp", *arguments], stdout=subprocess.DEVNULL)


def forked(*arguments: str) -> Fork:
    """The same in a fork, which has already imported everything."""
    process = multiprocessing.get_context("fork").Process(target=_main, args=(arguments,))
    process.start()
    return Fork(process)


@dataclass(frozen=True)
class Fork:
    """The part of a process interface that is needed here."""

    process: multiprocessing.process.BaseProcess

    def wait(self, seconds: float) -> int:
        self.process.join(seconds)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", seconds)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def _main(arguments: tuple[str, ...]) -> None:
    train.accounting_is_installed = lambda: False
    sys.argv = ["fedcdp", *arguments]
    fedcdp_main()
