"""Processes that end with the one that started them, whatever they start themselves and however anyone is killed.

Flower's processes start others: a SuperLink starts a launcher in a session of its own, which starts the ServerApp. So a
process group is not enough. On Linux this process adopts every orphan among its descendants
(`PR_SET_CHILD_SUBREAPER`), so that walking down from it finds them all, and asks the kernel to end its children if it is
itself killed (`PR_SET_PDEATHSIG`). Elsewhere the groups are ended, and Flower's own watching of parents does the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_GRACE_SECONDS = 10.0
_LINUX = sys.platform.startswith("linux")


class Process:
    """One started program, its output appended to a log."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self.log = name, log
        self._popen = popen

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """How it ended; None while it runs."""
        return self._popen.poll()


class Supervisor:
    """Starts processes and, on leaving, has ended all of them and all that they started."""

    def __init__(self, grace: float = _GRACE_SECONDS) -> None:
        self._grace = grace
        self._started: list[Process] = []
        self._others: set[int] = set()

    def __enter__(self) -> Supervisor:
        self._others = set(descendants(os.getpid()))  # neither they nor what they start is ours to end
        _adopt_orphans(True)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with _not_interrupted():  # a second Ctrl-C must not leave half of them behind; it takes seconds at most
                self.stop()
        finally:
            _adopt_orphans(False)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        """Start a program in a group of its own."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            popen = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C in the terminal is for us; we end them in order
                preexec_fn=_end_with_parent(),
            )
        process = Process(name, popen, log)
        self._started.append(process)
        return process

    def reap(self) -> None:
        """Let adopted orphans that have ended go: a zombie would look alive to the processes that watch it."""
        known = {process.pid for process in self._started}
        for pid, parent, state in _processes():
            if parent == os.getpid() and state == "Z" and pid not in known and pid not in self._others:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def stop(self) -> None:
        """End everything: ask first, then insist. The last that was started goes first."""
        for process in reversed(self._started):
            if process.status is None:
                _signal_group(process.pid, signal.SIGTERM)
        self._wait_until_gone(self._grace)
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:  # where descendants cannot be listed
            _signal_group(process.pid, signal.SIGKILL)
        self._wait_until_gone(self._grace)

    def alive(self) -> list[int]:
        """What still runs of all that was started, directly or not."""
        for process in self._started:
            _ = process.status  # reaps it
        self.reap()
        running = {process.pid for process in self._started if process.status is None}
        return sorted(running | set(descendants(os.getpid(), self._others)))

    def _wait_until_gone(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.alive() and time.monotonic() < until:
            time.sleep(0.05)


def descendants(root: int, but: Set[int] = frozenset()) -> list[int]:
    """All processes below one, `but` some and those below them; empty where the system does not tell."""
    children: dict[int, list[int]] = {}
    for pid, parent, _ in _processes():
        children.setdefault(parent, []).append(pid)
    found, left = [], [root]
    while left:
        below = [pid for pid in children.get(left.pop(), []) if pid not in but]
        found += below
        left += below
    return found


def _processes() -> Iterator[tuple[int, int, str]]:
    """Process, parent, state. A process that ends meanwhile is passed over."""
    for entry in Path("/proc").glob("[0-9]*/stat") if _LINUX else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]  # the name in parentheses may hold anything
            yield int(entry.parent.name), int(parent), state


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the work within as Ctrl-C does: in order."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    with _handled(stop, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _not_interrupted() -> Iterator[None]:
    with _handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None] | signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    """Handle some signals in another way for a while; outside the main thread, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _adopt_orphans(adopt: bool) -> None:
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _end_with_parent() -> Callable[[], None] | None:
    """What a new process does first: ask to be ended when this one is, also by kill -9."""
    if not _LINUX:
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # looked up here: after the fork as little as possible is done

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it ended before it was asked
            os._exit(1)

    return ask
