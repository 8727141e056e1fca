"""A guard: a small process that ends the processes that another one started, if that one is killed first.

It reads from its standard input what was started: one process group id per line, and `done` at the end. If the input ends
without `done`, the writer is dead. The guard then terminates the groups, and finally kills them, including processes that
left their group and that it has seen below the watched process. (Flower's own processes also watch their parents. But a
ServerApp that is asked to end first reports to its server, and waits for that forever if the server is dead.)

It runs on its own, with only Python's standard library: `python -I guard.py PID [others…]`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Set
from pathlib import Path

LINUX = sys.platform.startswith("linux")
_LOOK_SECONDS = 0.25
_GRACE_SECONDS = 10.0

Known = dict[int, str]
"""Processes by id, with their start time: a reused id is not the same process."""


def processes() -> Iterator[tuple[int, int, str, str]]:
    """Id, parent, state, start. Only available on Linux; a process that ends meanwhile is skipped."""
    for entry in Path("/proc").glob("[0-9]*/stat") if LINUX else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            rest = entry.read_text().rpartition(")")[2].split()  # the name in parentheses may contain anything
            yield int(entry.parent.name), int(rest[1]), rest[0], rest[19]


def descendants(root: int, but: Set[int] = frozenset()) -> Known:
    """All processes below `root`, except those in `but` and their descendants; empty if the system does not list them."""
    children: dict[int, list[tuple[int, str]]] = {}
    for pid, parent, _, started in processes():
        children.setdefault(parent, []).append((pid, started))
    found: Known = {}
    left = [root]
    while left:
        below = [each for each in children.get(left.pop(), []) if each[0] not in but and each[0] not in found]
        found |= dict(below)
        left += [pid for pid, _ in below]
    return found


def is_hangup_ignored(number: int) -> bool:
    """Whether this is SIGHUP, and `nohup` or a service manager has told this process to ignore it."""
    return number == signal.SIGHUP and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group, if it exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _alive(known: Known) -> Known:
    """The processes that still run, and those they have started since."""
    running = {pid: started for pid, _, state, started in processes() if state != "Z" and known.get(pid) == started}
    for pid in list(running):
        running |= descendants(pid)
    return running


def _end(groups: list[int], known: Known) -> None:
    # The id of a group without a leader may have been reused; where processes cannot be listed, this is a risk.
    groups = [group for group in groups if group in _alive(known) or not LINUX]
    for group in groups:
        signal_group(group, signal.SIGTERM)
    until = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < until:
        running = _alive(known)
        if LINUX and not running:
            return
        known |= running
        time.sleep(_LOOK_SECONDS)
    for group in () if LINUX else groups:
        signal_group(group, signal.SIGKILL)
    while running := _alive(known):
        for pid in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


def main() -> None:
    """Watch until `done` is received, or until the input ends."""
    watched, others = int(sys.argv[1]), {int(each) for each in sys.argv[2:]} | {os.getpid()}
    known: Known = {}
    groups: list[int] = []
    told = b""
    while True:
        known |= descendants(watched, others)
        if select.select([0], [], [], _LOOK_SECONDS)[0]:
            if not (more := os.read(0, 2**12)):
                break
            told += more
            *lines, told = told.split(b"\n")
            if b"done" in lines:
                return
            groups += [int(line) for line in lines]
    _end(groups, known)


if __name__ == "__main__":
    main()
