"""Ctrl-C while the command line starts: one line instead of a traceback.

Importing the package takes seconds, because it imports torch. The package imports this module first. In a process that was
started as `fedcdp` or `python -m fedcdp` it answers Ctrl-C until the command runs (`over`). In any other process, a program
that imports fedcdp as a library for instance, it does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import PurePath
from types import FrameType


def over() -> None:
    """The command runs: Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command_line() -> bool:
    """Whether this process was started as the script `fedcdp` or as the module. A worker process that it starts was not."""
    started_as = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    return bool(started_as) and PurePath(started_as[-1]).stem in ("fedcdp", "-mfedcdp")


def _stop(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    os.write(2, b"fedcdp: stopped\n")
    os._exit(1)  # an exception could be swallowed by the import that it interrupts


if _is_command_line() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _stop)
