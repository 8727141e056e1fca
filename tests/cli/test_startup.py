"""Ctrl-C while the command line starts prints one line and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedcdp
from fedcdp import _startup
from fedcdp.cli.late_commands import COMMANDS, LateCommands

SCRIPT = "import sys\nfrom fedcdp.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"  # as pip writes it


def wait_for_torch(process: Any) -> None:
    """Wait until the process imports torch: the package is being imported."""
    deadline = time.monotonic() + 60
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no /proc, which shows what a process has loaded")
@pytest.mark.parametrize("delay", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("command", [["-m", "fedcdp"], ["fedcdp"]], ids=["module", "script"])
def test_ctrl_c_during_start_up_gives_one_line(start: Callable[..., Any], command: list[str], delay: float) -> None:
    Path("fedcdp").write_text(SCRIPT)
    process = start(*command, "account", "--preset", "mnist")
    wait_for_torch(process)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (1, "", "fedcdp: stopped\n")


@pytest.mark.parametrize(
    ("started", "arguments", "ours"),
    [
        (["python", "-m", "fedcdp", "train", "--out", "run"], ["-m", "train", "--out", "run"], True),
        (["python", "-X", "dev", "-m", "fedcdp"], ["-m"], True),
        (["python", "-mfedcdp", "train"], ["-m", "train"], True),
        (["python", "/usr/bin/fedcdp", "account"], ["/usr/bin/fedcdp", "account"], True),
        (["python", "-m", "pytest", "fedcdp"], ["/lib/pytest/__main__.py", "fedcdp"], False),
        (["python", "mine.py", "fedcdp"], ["mine.py", "fedcdp"], False),
        (["python", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"],
         ["/usr/bin/fedcdp", "reproduce", "accuracy"], False),
        (["python"], [""], False),
    ],
)  # fmt: skip
def test_only_the_command_line_answers_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, started: list[str], arguments: list[str], ours: bool
) -> None:
    monkeypatch.setattr(sys, "orig_argv", started)
    monkeypatch.setattr(sys, "argv", arguments)
    assert _startup._is_command_line() is ours


def test_importing_the_package_leaves_ctrl_c_alone() -> None:
    assert signal.getsignal(signal.SIGINT) is not _startup._stop


def test_a_running_command_is_interrupted_as_usual() -> None:
    before = signal.signal(signal.SIGINT, _startup._stop)
    try:
        _startup.over()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # set by somebody else
        _startup.over()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def modules_of(*command: str) -> set[str]:
    """The modules that are loaded when a command has ended."""
    shown = "import atexit, sys; atexit.register(lambda: print(*sys.modules, sep='\\n', file=sys.stderr)); "
    started = [sys.executable, "-c", shown + "from fedcdp.cli import main; main()", *command]
    environment = os.environ | {"PYTHONPATH": str(Path(fedcdp.__file__).parents[1])}
    done = subprocess.run(started, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout
    return set(done.stderr.split())


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_help_of_the_program_imports_no_torch(option: str) -> None:
    loaded = modules_of(option)
    assert "fedcdp.cli.program" in loaded
    assert not loaded & {"torch", "scipy", "sklearn", "dp_accounting", "matplotlib"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_their_own_help(name: str) -> None:
    assert LateCommands()[name].get_short_help_str(500) == COMMANDS[name].help


def test_a_public_name_is_not_hidden_by_a_package_of_its_name() -> None:
    import fedcdp.report.api

    assert callable(fedcdp.report)
    assert set(fedcdp.__all__) <= set(dir(fedcdp))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fedcdp.nothing  # noqa: B018
