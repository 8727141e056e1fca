"""No process is left behind: not a child, not one that left its group and session, not when the starter is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcdp.deploy.site.processes import Supervisor, ended_by_signals

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's process tree")

# A parent that ignores requests to end, with a child in a session of its own, whose parent then goes away.
_STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);" \\
       "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
middle = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]], start_new_session=True)"
subprocess.run([sys.executable, "-c", middle, code, sys.argv[1]])
time.sleep(600)
"""


def _wait(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _written(path: Path) -> bool:
    return path.exists() and bool(path.read_text())


def test_leaving_ends_children_and_orphans_that_do_not_want_to(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with Supervisor(grace=0.5) as supervisor:
        process = supervisor.start(
            "one", [sys.executable, "-c", _STUBBORN, str(note)], os.environ, tmp_path / "logs" / "one.log"
        )
        assert _wait(lambda: _written(note))
        orphan = int(note.read_text())
        assert {process.pid, orphan} <= set(supervisor.alive())
    assert not _runs(process.pid)
    assert not _runs(orphan)


def test_what_this_process_started_elsewhere_is_left_alone(tmp_path: Path) -> None:
    mine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with Supervisor(grace=0.5) as supervisor:
            supervisor.start("one", ["sleep", "600"], os.environ, tmp_path / "one.log")
        assert mine.poll() is None
    finally:
        mine.kill()
        mine.wait()


@pytest.mark.slow
def test_all_end_when_their_starter_is_killed_also_those_that_do_not_want_to(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    starter = (
        "import os, sys, time\nfrom pathlib import Path\nfrom fedcdp.deploy.site.processes import Supervisor\n"
        "with Supervisor() as supervisor:\n"
        f"    command = [sys.executable, '-c', {_STUBBORN!r}, {str(note)!r}]\n"
        f"    child = supervisor.start('one', command, os.environ, Path({str(tmp_path / 'one.log')!r}))\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    source = str(Path(__file__).parents[3] / "src")
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert _wait(lambda: _written(note))
    orphan = int(note.read_text())
    time.sleep(1)  # the guard looks four times a second
    assert _runs(child)
    assert _runs(orphan)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert _wait(lambda: not _runs(child) and not _runs(orphan))


def test_under_nohup_a_hangup_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt), ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_output_is_appended_to_the_log(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        for word in ("first", "second"):
            process = supervisor.start("one", ["sh", "-c", f"echo {word}; exit 3"], os.environ, tmp_path / "one.log")
            assert _wait(lambda process=process: process.status is not None)  # type: ignore[misc]
            assert process.status == 3
    assert (tmp_path / "one.log").read_text() == "first\nsecond\n"
