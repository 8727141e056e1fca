"""Processes that end with the one that started them, whatever they start themselves and however any of them is killed.

Flower's processes start others: a SuperLink starts a launcher in its own session, which starts the ServerApp. A process
group is therefore not enough. On Linux this process adopts every orphan among its descendants
(`PR_SET_CHILD_SUBREAPER`), so walking down from it finds them all. A separate guard process (`guard.py`) ends them if this
one is killed. On other systems the groups are ended, and Flower's own watching of parents does the rest.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fedcdp.deploy.site import guard
from fedcdp.deploy.site.guard import LINUX, descendants, is_hangup_ignored, processes, signal_group
from fedcdp.files.disk import open_unlinked

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_GRACE_SECONDS = 10.0


class Process:
    """One started program, with its output appended to a log."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self.log = name, log
        self._popen = popen

    @property
    def pid(self) -> int:
        """Its process id, which is also its group id."""
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._popen.poll()


class Supervisor:
    """Starts processes and, on exit, ends all of them and all of their descendants."""

    def __init__(self, grace: float = _GRACE_SECONDS) -> None:
        self._grace = grace
        self._started: list[Process] = []
        self._others: set[int] = set()
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Supervisor:
        self._others = set(descendants(os.getpid()))  # neither these nor their children are ours to end
        _adopt_orphans(True)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, str(os.getpid()), *map(str, self._others)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._others.add(self._guard.pid)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with _not_interrupted():  # a second Ctrl-C must not leave some behind; this takes seconds at most
                self.stop()
                self._tell_guard("done\n")
        finally:
            _adopt_orphans(False)
            if self._guard and self._guard.stdin:
                with contextlib.suppress(OSError):
                    self._guard.stdin.close()
                self._guard.wait()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        """Start a program in its own group."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_unlinked(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as output:
            popen = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,  # only we receive the terminal's Ctrl-C; we end them in order
            )
        self._tell_guard(f"{popen.pid}\n")
        process = Process(name, popen, log)
        self._started.append(process)
        return process

    def reap(self) -> None:
        """Reap adopted orphans that have ended: a zombie would look alive to the processes that watch it."""
        known = {process.pid for process in self._started}
        for pid, parent, state, _ in processes():
            if parent == os.getpid() and state == "Z" and pid not in known and pid not in self._others:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def stop(self) -> None:
        """End everything: terminate first, then kill. The process started last goes first."""
        for process in reversed(self._started):
            if process.status is None:
                signal_group(process.pid, signal.SIGTERM)
        self._wait_until_gone(self._grace)
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for process in () if LINUX else self._started:  # descendants cannot be listed
            signal_group(process.pid, signal.SIGKILL)
        self._wait_until_gone(self._grace)

    def alive(self) -> list[int]:
        """All processes that still run, started directly or indirectly."""
        for process in self._started:
            _ = process.status  # reaps it
        self.reap()
        running = {process.pid for process in self._started if process.status is None}
        return sorted(running | set(descendants(os.getpid(), self._others)))

    def _tell_guard(self, line: str) -> None:
        if self._guard and self._guard.stdin:
            with contextlib.suppress(OSError):  # it may have been killed; we still run, so nothing is lost yet
                os.write(self._guard.stdin.fileno(), line.encode())

    def _wait_until_gone(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.alive() and time.monotonic() < until:
            time.sleep(0.05)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the enclosed work in order, as Ctrl-C does. Under `nohup`, SIGHUP stays ignored."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    with _handled(stop, *(each for each in (signal.SIGTERM, signal.SIGHUP) if not is_hangup_ignored(each))):
        yield


@contextmanager
def _not_interrupted() -> Iterator[None]:
    with _handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None] | signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    """Temporarily replace signal handlers; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _adopt_orphans(adopt: bool) -> None:
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)
