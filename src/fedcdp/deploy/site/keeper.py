"""The process that keeps a node or a server: it runs Flower's program, writes its log, and answers who watches it.

`fedcdp deploy keep` checks everything that can be checked before the start (`preflight`) and becomes this process, which
then lives as long as the node. It therefore imports the standard library and a few small modules, and neither torch nor
Flower: `become` starts it without the package's `__init__`.

- Flower's program ends with this process, also if it is killed (on Linux, by `PR_SET_PDEATHSIG`), and this process with
  Flower's program, with its exit status. A signal is passed on once.
- After a crash Flower's server counts a node as connected for up to a minute, and refuses it (error 2004). It is then
  started again every ten seconds, for up to `PATIENCE` seconds.
- When Flower's program ends with an error, the last line of the log says why, as far as Flower told.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fedcdp.deploy.site.exporter import Endpoint, Watched
from fedcdp.deploy.site.flower_log import FlowerLog
from fedcdp.deploy.site.guard import is_hangup_ignored

PATIENCE = 90.0
"""Seconds for which a refused node is started again: the server needs a minute to notice that it was gone."""
_PAUSE = 10.0
_REMEMBERED = 60  # lines in which a reason is looked for
_DIES_WITH_PARENT = (
    "import ctypes, os, signal, sys\n"
    "if sys.platform.startswith('linux'): ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"  # PR_SET_PDEATHSIG
    "if os.getppid() == int(sys.argv[1]): os.execvp(sys.argv[2], sys.argv[2:])\n"
)
_BARE = (
    "import sys, types\n"
    "package = types.ModuleType('fedcdp')\n"
    "package.__path__ = [sys.argv[1]]\n"
    "sys.modules['fedcdp'] = package\n"
    "from fedcdp.deploy.site.keeper import main\n"
    "main(sys.argv[2])\n"
)
REFUSED = "[code: 2004]"
_NO_REASON = (
    "the node ended by itself, which Flower does without a reason when the server no longer accepts its signature: compare "
    "the clocks of both machines first, then ask whether the node's key was unregistered"
)
REASONS: dict[str, str] = {
    REFUSED: "the server refuses this node: its key is not registered (./run.sh --register-only at the server), or another "
    "process of the same node is connected",
    "401 Unauthorized": "the server does not accept this node's signature: the clock of one machine is off, or the key in "
    "node.key is not the registered one; compare both clocks first",
    "Invalid SuperNode authentication": "the server does not accept this node's signature: the clock of one machine is off, "
    "or the key in node.key is not the registered one; compare both clocks first",
    "Exit Code: 606": "Flower's versions differ too much: install the same release of Flower on this machine and the server",
    "RUNTIME_VERSION_INCOMPATIBLE": "Flower's versions differ too much: install the same release of Flower on both sides",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not signed by ca.pem, has expired, or names another host",
    "Exit Code: 105": "the server's database was made by another release of Flower; the run is in run/, so server/state.db "
    "may be deleted and the keys registered again",
    "Exit Code: 302": "node.key is not a usable key",
    "Exit Code: 605": "the server's certificate or key cannot be used",
    "Address already in use": "the port is in use; is something still running?",
    "Exit Code: 305": "the server cannot be reached, or has closed the connection",
}
"""What Flower's words mean; the first that occurs in the last lines is told."""


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """What to keep, and how to show it."""

    role: str
    name: str
    command: Sequence[str]
    version: str
    figures: str
    listen: str = ""
    """host:port, or empty: nothing listens."""
    expiries: Mapping[str, float] = field(default_factory=dict)
    log_format: str = "text"
    log_file: str = ""
    log_bytes: int = 0
    log_files: int = 0
    patience: float = PATIENCE


def become(keeping: Keeping) -> NoReturn:
    """Replace this process by one that keeps a program."""
    package = str(Path(__file__).parents[2])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-c", _BARE, package, json.dumps(asdict(keeping))])  # noqa: S606  # nosec B606


def main(settings: str) -> None:
    """Keep the program until it ends, and end with its status."""
    sys.exit(keep(Keeping(**json.loads(settings))))


def keep(keeping: Keeping) -> int:
    """Keep the program until it ends; return its exit status, or 2 if it was not started."""
    path = Path(keeping.log_file) if keeping.log_file else None
    try:
        log = FlowerLog(keeping.name, keeping.log_format, path, keeping.log_bytes, keeping.log_files)
    except OSError as error:
        print(f"fedcdp: log-file: {path} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    kept = _Kept(keeping, log)
    watched = Watched(keeping.role, keeping.version, Path(keeping.figures), dict(keeping.expiries), kept.running)
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            if not is_hangup_ignored(number):
                signal.signal(number, kept.pass_on)
        if keeping.listen:
            host, _, port = keeping.listen.rpartition(":")
            try:
                stack.enter_context(Endpoint(host.strip("[]"), int(port), watched))
                log.say("INFO", f"http://{keeping.listen}/metrics and /healthz")
            except OSError as error:
                log.say("WARNING", f"nothing listens at {keeping.listen} for those who watch: {error.strerror or error}")
        return kept.to_the_end(watched)


class _Kept:
    """Flower's program, from its first start to its last end."""

    def __init__(self, keeping: Keeping, log: FlowerLog) -> None:
        self._keeping, self._log = keeping, log
        self._child: subprocess.Popen[str] | None = None
        self._ending = False
        self._passed_on = itertools.count()  # `next` of it is one step, also for a signal that comes during another one
        self._last: deque[str] = deque(maxlen=_REMEMBERED)

    def running(self) -> bool:
        """Whether Flower's program runs."""
        child = self._child  # the main thread may forget it at any moment
        return child is not None and child.poll() is None

    def pass_on(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """A signal ends the program in order; a second one would end it without."""
        self._ending = True
        if self._child is not None and next(self._passed_on) == 0:
            self._child.send_signal(number)

    def _is_ending(self) -> bool:
        return self._ending

    def to_the_end(self, watched: Watched) -> int:
        """Run the program, again where the server only needs time; return the status of the last run."""
        until = time.monotonic() + self._keeping.patience
        while True:
            status = self._once()
            if self._is_ending():
                return max(status, 0)
            if status == 0 and self._keeping.role == "node":
                self._log.say("ERROR", _NO_REASON)
                return 1
            refused = any(REFUSED in line for line in self._last)
            if not (refused and time.monotonic() < until):
                break
            self._log.say("WARNING", "the server still counts this node as connected, after a crash, or does not know its "
                          f"key: starting it again in {_PAUSE:g} s (Flower's error 2004)")  # fmt: skip
            self._wait(_PAUSE)
            if self._is_ending():
                return 0
            watched.restarts += 1
        if status < 0:
            self._log.say("ERROR", f"{self._keeping.name} was killed: {reason_of_signal(-status)}")
        elif status:
            self._log.say("ERROR", f"{self._keeping.name} ended with status {status}: {reason(self._last)}")
        return status if status >= 0 else 128 - status

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._is_ending() and time.monotonic() < until:
            time.sleep(0.1)

    def _once(self) -> int:
        self._last.clear()
        started = [sys.executable, "-I", "-c", _DIES_WITH_PARENT, str(os.getpid()), *self._keeping.command]
        self._child = subprocess.Popen(
            started, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,  # a terminal's Ctrl-C comes to this process only, which passes it on once
        )  # fmt: skip
        if self._is_ending() and next(self._passed_on) == 0:  # a signal came before there was a child
            self._child.terminate()
        reader = threading.Thread(target=self._read, args=(self._child,), daemon=True)
        reader.start()
        status = self._child.wait()
        self._child = None
        reader.join(2.0)  # what Flower's program started may hold the pipe a little longer
        return status

    def _read(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self._last.append(line)
            self._log.line(line)


def reason_of_signal(number: int) -> str:
    """Why a signal ended Flower's program, which was not passed on by this process."""
    name = signal.strsignal(number) or "unknown"
    if number == signal.SIGKILL:
        return f"signal {number} ({name}); unless somebody did it, the machine has run out of memory (see the kernel's log)"
    return f"signal {number} ({name})"


def reason(lines: Sequence[str] | deque[str]) -> str:
    """Why Flower's program ended, from its last lines."""
    text = "".join(lines)
    return next((meaning for sign, meaning in REASONS.items() if sign in text), "the lines above say why")
