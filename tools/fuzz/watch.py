"""Watches the program while it reads hostile input, for things that no input may cause.

Each of these is a finding: an error of a type other than the program's own, a hang, excessive memory, a file written
elsewhere, a process, a connection, an import of a name in the input, and control characters on the console.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from fedcdp.errors import FedcdpError

SECONDS = 10.0
"""Seconds that one case may take."""
MEBIBYTES = 400
"""MiB that one case may add to the memory in use, whatever it reads: the stated 256 and what is needed to pass them on."""

_ADDRESS_SPACE = 4 * 2**30  # bytes that one case may reserve, to keep the machine usable
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_RUNS = frozenset({
    "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn", "os.startfile",
    "webbrowser.open", "socket.connect", "socket.bind", "os.kill", "sys.addaudithook", "code.__new__",
})  # fmt: skip
_CHANGES = frozenset({
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "shutil.rmtree", "shutil.move", "shutil.copyfile",
})  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class TooSlowError(BaseException):
    """Raised in a case that takes too long; not an `Exception`, so no handler swallows it."""


class Watch:
    """Runs cases in a directory, the only place where they may write."""

    def __init__(self, place: Path) -> None:
        self.place = place.resolve()
        self._findings: list[str] = []
        self._on = False
        sys.addaudithook(self._heard)

    def run(self, attempt: Callable[[Random, Path], None], case: Random) -> str | None:
        """Describe forbidden behaviour of a case in a few lines; None if there was none."""
        self._findings = []
        console = io.StringIO()
        before = _resident()
        _forget_peak()
        try:
            with contextlib.redirect_stdout(console), contextlib.redirect_stderr(console), self._limits():
                attempt(case, self.place)
        except FedcdpError as error:
            if _has_memory_error(error):
                self._findings.append(f"memory ran out: {error}"[:300])
            if not str(error).strip():
                self._findings.append(f"{type(error).__name__} says nothing")
        except TooSlowError as error:
            self._findings.append(f"took more than {SECONDS:g} s\n{_where(error)}")
        except BaseException as error:
            self._findings.append(f"{type(error).__name__}: {str(error)[:200]}\n{_where(error)}")
        grown = (_peak() - before) / 2**20
        if grown > MEBIBYTES:
            self._findings.append(f"took {grown:.0f} MiB")
        if found := _CONTROL.search(console.getvalue()):
            at = found.start()
            self._findings.append(f"control characters on the console: {console.getvalue()[max(0, at - 60) : at + 20]!r}")
        return "\n".join(self._findings) or None

    @contextlib.contextmanager
    def _limits(self) -> Iterator[None]:
        def slow(_signal: int, _frame: FrameType | None) -> None:
            raise TooSlowError

        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        signal.signal(signal.SIGALRM, slow)
        resource.setrlimit(resource.RLIMIT_AS, (_virtual() + _ADDRESS_SPACE, hard))
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        self._on = True
        try:
            yield
        finally:
            self._on = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event == "open":
            path, mode, flags = arguments
            if not isinstance(path, int) and (flags & _WRITES or set(mode or "") & set("wax+")):
                self._check_place("writes", path)
        elif event in _CHANGES:
            folders = [f"/proc/self/fd/{each}" for each in arguments[-1:] if isinstance(each, int) and each > 2]
            for path in arguments[:2]:
                if isinstance(path, str | bytes | os.PathLike):  # relative to an open directory, if one is given
                    self._check_place(event, os.path.join(*folders[:1], os.fsdecode(path)))  # noqa: PTH118
        elif event in _RUNS:
            self._findings.append(f"runs {event} {arguments!s:.200}")
        elif event == "import" and str(arguments[0]).startswith(("tools.fuzz.canary", "antigravity")):
            self._findings.append(f"imports {arguments[0]}")

    def _check_place(self, what: str, path: str | bytes | os.PathLike[str]) -> None:
        self._on = False
        try:
            where = Path(os.path.realpath(os.fsdecode(path)))
            if not (where.is_relative_to(os.devnull) or where.is_relative_to(self.place)):
                self._findings.append(f"{what} {where}, outside its place")
        except ValueError:  # a NUL: the system rejects it
            pass
        finally:
            self._on = True


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return "\n".join(f"  {Path(f.filename).name}:{f.lineno} {f.name}: {f.line}" for f in frames[-5:])


def _has_memory_error(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _peak() -> int:
    return _status("VmHWM")


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
