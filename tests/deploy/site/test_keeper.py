"""A kept process: its log, its end with a reason, another start after a crash, and nothing left behind."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedcdp.deploy.site import keeper
from fedcdp.deploy.site.flower_commands import free_ports
from fedcdp.deploy.site.flower_log import FlowerLog
from fedcdp.deploy.site.keeper import Keeping, reason
from fedcdp.deploy.site.operate_file import OperateSettings
from fedcdp.errors import DeploymentError


def keeping(base: Path, program: str, **changes: Any) -> Keeping:
    command = [sys.executable, "-I", "-c", program]
    return Keeping(
        **{"role": "node", "name": "node-1", "command": command, "version": "1", "figures": str(base / "f")} | changes
    )


def start(given: Keeping) -> subprocess.Popen[str]:
    package = str(Path(keeper.__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-P", "-c", keeper._BARE, package, json.dumps(asdict(given))], stdout=subprocess.PIPE, text=True
    )


def test_the_kept_process_imports_no_torch_and_ends_with_its_programs_reason(tmp_path: Path) -> None:
    program = "print('ERROR :     Exit Code: 606'); print('last words'); raise SystemExit(3)"
    process = start(keeping(tmp_path, program))
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "last words" in said
    assert "node-1 ended with status 3: Flower's versions differ too much" in said
    bare = keeper._BARE.replace("main(sys.argv[2])", "print(*sorted(sys.modules))")
    loaded = subprocess.run(
        [sys.executable, "-c", bare, str(Path(keeper.__file__).parents[2])], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "numpy", "flwr"} & set(loaded)


def test_a_node_that_ends_by_itself_failed(tmp_path: Path) -> None:
    """Flower ends so, with status 0, when the server refuses a heartbeat's signature."""
    process = start(keeping(tmp_path, "print('SuperNode terminated gracefully.')"))
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "compare the clocks of both machines first" in said


def test_a_signal_is_passed_on_once_and_the_endpoint_answers(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    program = (
        "import signal, time, sys\ncount = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: count.append(1))\nprint('ready', flush=True)\n"
        "while not count: time.sleep(0.05)\ntime.sleep(0.3)\nprint('signals', len(count), flush=True)\nsys.exit(0)"
    )
    process = start(keeping(tmp_path, program, listen=f"127.0.0.1:{port}"))
    assert process.stdout is not None
    while "ready" not in process.stdout.readline():
        pass
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
        assert json.load(answer) == {"running": True}
    process.terminate()
    process.terminate()
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "signals 1" in said


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a child that dies with its parent needs Linux")
def test_a_killed_keeper_takes_its_program_along(tmp_path: Path) -> None:
    process = start(keeping(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)"))
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    until = time.monotonic() + 10
    while time.monotonic() < until and Path(f"/proc/{child}").exists() and _state(child) != "Z":
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists() or _state(child) == "Z"


def test_a_signal_during_another_one_is_not_passed_on(tmp_path: Path) -> None:
    kept, sent = keeper._Kept(keeping(tmp_path, ""), FlowerLog("n", "text")), list[int]()

    class Child:
        def send_signal(self, number: int) -> None:
            sent.append(number)
            kept.pass_on(signal.SIGINT, None)  # it comes before the first one is handled

    kept._child = Child()  # type: ignore[assignment]
    kept.pass_on(signal.SIGTERM, None)
    kept.pass_on(signal.SIGTERM, None)
    assert sent == [signal.SIGTERM]


@pytest.mark.parametrize("starts", [1, 2])
def test_a_signal_while_the_program_starts_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: int) -> None:
    """Also while a refused node is started for the second time, and its first process has ended."""
    monkeypatch.setattr(keeper, "_PAUSE", 0.01)
    kept, started = (
        keeper._Kept(
            keeping(
                tmp_path, "print('[code: 2004]'); raise SystemExit(1)" if starts > 1 else "import time; time.sleep(600)"
            ),
            FlowerLog("n", "text"),
        ),
        list[int](),
    )
    popen = subprocess.Popen

    def interrupted(*given: Any, **named: Any) -> Any:
        started.append(1)
        if len(started) == starts:
            kept.pass_on(signal.SIGTERM, None)
            given = ([sys.executable, "-c", "import time; time.sleep(600)"],)
        return popen(*given, **named)

    monkeypatch.setattr(keeper.subprocess, "Popen", interrupted)
    began = time.monotonic()
    kept.to_the_end(keeper.Watched("node", "1", tmp_path / "f"))
    assert time.monotonic() - began < 60
    assert len(started) == starts


def test_under_nohup_a_hangup_ends_nothing(tmp_path: Path) -> None:
    program = "import time; print('ready', flush=True); time.sleep(600)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does, for the process that it starts
    try:
        process = start(keeping(tmp_path, program))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.terminate()
    process.communicate(timeout=30)


def test_a_hangup_is_passed_on_without_nohup(tmp_path: Path) -> None:
    process = start(keeping(tmp_path, "import time; print('ready', flush=True); time.sleep(600)"))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_killed_program_is_told_from_one_that_failed(tmp_path: Path) -> None:
    process = start(keeping(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL
    assert "node-1 was killed: signal 9 (Killed)" in said
    assert "out of memory" in said


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_refused_node_is_started_again_until_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keeper, "_PAUSE", 0.01)
    program = (
        f"import os, pathlib, sys\ncount = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "count.write_text(count.read_text() + 'x' if count.exists() else 'x')\n"
        "if len(count.read_text()) < 3: print('[code: 2004] Failed to activate SuperNode.'); sys.exit(1)\n"
        "print('connected'); sys.exit(5)"
    )
    kept = keeper._Kept(keeping(tmp_path, program), FlowerLog("node-1", "text"))
    watched = keeper.Watched("node", "1", tmp_path / "f")
    assert kept.to_the_end(watched) == 5
    assert watched.restarts == 2
    assert capsys.readouterr().out.count("starting it again") == 2
    never = keeper._Kept(
        keeping(tmp_path, "print('[code: 2004]'); raise SystemExit(1)", patience=0.0), FlowerLog("n", "text")
    )
    assert never.to_the_end(watched) == 1
    assert "its key is not registered" in capsys.readouterr().out


def test_reasons_are_found_in_the_words_of_flower() -> None:
    assert "clock" in reason(["…", "httpx.HTTPStatusError: Client error '401 Unauthorized' for url"])
    assert "not signed by ca.pem" in reason(["ssl.SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED] x"])
    assert reason(["something else"]) == "the lines above say why"


# The log -------------------------------------------------------------------------------------------------------------


def test_json_lines_rotate_and_stay_private(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "node.jsonl"
    log = FlowerLog("node-1", "json", path, most_bytes=10_000, files=2)
    log.line("\x1b[92mINFO \x1b[0m:      round 1 \x1b[1mdone\x1b[0m\x07\n")
    log.line("\x1b[93mWARNING \x1b[0m:   declines\n")
    log.line("    an indented line\n")
    log.line("plain\n")
    log.line("2026-01-02T03:04:05.678Z ERROR [uvicorn.error] no\n")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("INFO", "round 1 done\\x07"),
        ("WARNING", "declines"),
        ("WARNING", "an indented line"),
        ("INFO", "plain"),
        ("ERROR", "[uvicorn.error] no"),
    ]
    assert all(line["source"] == "node-1" and line["time"].endswith("+00:00") for line in lines)
    for number in range(400):
        log.line(f"INFO :      line {number} of 100 %s %d\n")
    kept = sorted(path.parent.iterdir())
    assert [each.name for each in kept] == ["node.jsonl", "node.jsonl.1", "node.jsonl.2"]
    for each in kept:
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
        assert each.stat().st_size <= 10_000
    assert json.loads(path.read_text().splitlines()[-1])["message"] == "line 399 of 100 %s %d"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full plays a full disk")
def test_a_full_disk_behind_standard_output_does_not_stop_a_node(tmp_path: Path) -> None:
    """It would stop at the first full pipe, without a word, if its lines were no longer read."""
    done = tmp_path / "done"
    program = (
        f"import pathlib\nfor _ in range(3000): print('x' * 100)\npathlib.Path({str(done)!r}).touch(); raise SystemExit(3)"
    )
    package = str(Path(keeper.__file__).parents[2])
    command = [sys.executable, "-P", "-c", keeper._BARE, package, json.dumps(asdict(keeping(tmp_path, program)))]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.DEVNULL, timeout=60, check=False)
    assert done.exists()
    assert ended.returncode in (3, 120)  # Python adds 120 if it cannot flush its standard output at the end


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    package = str(Path(keeper.__file__).parents[2])
    given = keeping(tmp_path, "", log_file=str(tmp_path / "log"), log_bytes=10_000, log_files=1)
    command = [sys.executable, "-P", "-c", keeper._BARE, package, json.dumps(asdict(given))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr == f"fedcdp: log-file: {tmp_path / 'log'} cannot be written: Is a directory\n"


def test_text_lines_are_as_flower_writes_them(capsys: pytest.CaptureFixture[str]) -> None:
    log = FlowerLog("server", "text")
    log.line("\x1b[92mINFO \x1b[0m:      round 1\n")
    log.say("WARNING", "ours")
    assert capsys.readouterr().out == "INFO :      round 1\nWARNING : ours\n"


# Settings ------------------------------------------------------------------------------------------------------------


def test_settings_come_from_the_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert OperateSettings.read(tmp_path) == OperateSettings(), "a deployment of an earlier version"
    (tmp_path / "operate.toml").write_text('listen = "127.0.0.1:9401"\nlog-format = "json"\n')
    assert OperateSettings.read(tmp_path) == OperateSettings(listen="127.0.0.1:9401", log_format="json")
    monkeypatch.setenv("FEDCDP_MONITOR", "[::1]:80")
    assert OperateSettings.read(tmp_path).listen == "[::1]:80"
    monkeypatch.setenv("FEDCDP_MONITOR", "off")
    assert OperateSettings.read(tmp_path).listen == ""


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('listen = "9401"', "listen: '9401' is not allowed; it must be host:port"),
        ('listen = "127.0.0.1:70000"', "listen"),
        ("listen = 3", "listen: 3 is not a string"),
        ('log-format = "xml"', "log-format: 'xml' is not allowed; it must be one of text, json"),
        ("log-bytes = 5", "log-bytes: 5 is not allowed"),
        ("log-files = 0", "log-files: 0 is not allowed"),
        ("log_files = 3", "there is no setting called 'log_files'"),
        ("log-files = ", "is not a TOML file"),
    ],
)
def test_bad_settings_are_named(written: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "operate.toml").write_text(written)
    with pytest.raises(DeploymentError) as raised:
        OperateSettings.read(tmp_path)
    assert said in str(raised.value)
    assert "operate.toml" in str(raised.value)
