"""A warm node: each message in a fork of its own, which shares code with the next one and nothing else."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcdp.deploy.site import supernode, warm_node
from fedcdp.deploy.site.flower_commands import free_ports, listens
from fedcdp.errors import DeploymentError
from fedcdp.files.tree import Layout
from fedcdp.mechanism.noise import SecureNoise
from tests.support.flower_site import HAS_FLOWER, source_path, wait_until

needs_flower = pytest.mark.skipif(not HAS_FLOWER, reason="Flower is not installed")


def drawn() -> str:
    """One draw of everything random that a message may use, but torch's generators, which start alike in every process."""
    layout, client = Layout.of(torch.nn.Linear(3, 2)), torch.tensor([0])
    noises = [SecureNoise(layout), SecureNoise(layout, "chacha20")]
    trees = [noise.for_update(0, client, 1.0) for noise in noises] + [noises[0].for_sum(0, client, 0, 2**24)]
    values = [f"{float(tree['weight'][0, 0, 0])}" for tree in trees]  # the last one by OpenDP
    return " ".join([*values, secrets.token_hex(8), f"{random.random()} {np.random.random()}", os.urandom(8).hex()])  # noqa: NPY002


@needs_flower
def test_no_two_messages_share_randomness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*, token: str, **_: Any) -> None:
        (tmp_path / token).write_text(f"{drawn()} {torch.rand(1).item()}")

    monkeypatch.setattr("flwr.supernode.runtime.run_clientapp.run_clientapp", draw)
    importlib.import_module("opendp.prelude")  # before the fork, as the warm process does
    for name in "ab":
        os.waitpid(warm_node._fork("127.0.0.1:1", name), 0)
    one, other = ((tmp_path / name).read_text().split() for name in "ab")
    assert len(one) == len(other) == 8
    assert not set(one[:-1]) & set(other[:-1])
    assert one[-1] == other[-1]  # as in two new processes: torch seeds itself by a constant


@needs_flower
@pytest.mark.parametrize(("ending", "status"), [(None, 0), (SystemExit(1), 1), (SystemExit(), 0), (ValueError("x"), 1)])
def test_a_child_ends_as_its_message_does(
    monkeypatch: pytest.MonkeyPatch, ending: BaseException | None, status: int
) -> None:
    def end(**_: Any) -> None:
        if ending is not None:
            raise ending

    monkeypatch.setattr("flwr.supernode.runtime.run_clientapp.run_clientapp", end)
    assert os.waitstatus_to_exitcode(os.waitpid(warm_node._fork("127.0.0.1:1", "token"), 0)[1]) == status


IMPORTS = """
import os, sys, threading
import numpy as np, torch
from fedcdp.deploy.site import warm_node
before = np.random.get_state()[1].tolist()
warm_node._import_code()
assert "fedcdp.deploy.protocol.client" in sys.modules and "dp_accounting" in sys.modules
assert not torch.cuda.is_initialized()
assert np.random.get_state()[1].tolist() == before
print(threading.active_count(), len(os.listdir("/proc/self/task")))
"""


@needs_flower
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="there is no /proc, which lists a process's threads")
def test_the_warm_process_has_one_thread_and_no_gpu() -> None:
    environment = os.environ | {"PYTHONPATH": source_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["1", "1"]


class _Nobody(BaseHTTPRequestHandler):
    """A SuperNode that has no task."""

    asked = 0

    def do_POST(self) -> None:
        type(self).asked += 1
        self.send_response(200)
        self.send_header("content-length", "0")
        self.send_header("content-type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), _Nobody)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@needs_flower
@pytest.mark.parametrize("status", [0, 3])
def test_a_node_ends_as_its_supernode_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int, status: int) -> None:
    program = tmp_path / "supernode.py"
    program.write_text(f"import sys, time\ntime.sleep(0.3)\nsys.exit({status})\n")
    monkeypatch.setattr(warm_node.supernode, "__file__", str(program))
    monkeypatch.setattr(warm_node, "_import_code", lambda: None)
    before = _Nobody.asked
    assert warm_node.run_node(port, 0.5, []) == status
    assert _Nobody.asked > before


@needs_flower
@pytest.mark.slow
def test_a_supernode_gives_tasks_to_its_own_warm_process_only(tmp_path: Path) -> None:
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType

    (tmp_path / "secret").write_bytes(b"own")
    (own_port,) = free_ports(1)
    about = ["--isolation", "process", "--port", str(own_port), "--superexec-auth-secret-file", str(tmp_path / "secret")]
    program = [sys.executable, "-P", supernode.__file__, str(os.getpid()), "0.5"]
    environment = os.environ | {"FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    node = subprocess.Popen(
        [*program, "--insecure", "--superlink", "127.0.0.1:9", *about], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: listens(own_port), "the SuperNode to listen", 60)
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        answer = warm_node.runtime_client(f"127.0.0.1:{own_port}", b"own").AcquireTask(request)
        assert not answer.HasField("task")
        with pytest.raises(httpx.HTTPError, match=r"401|403"):
            warm_node.runtime_client(f"127.0.0.1:{own_port}", b"another").AcquireTask(request)
    finally:
        node.terminate()
        assert node.wait(30) == 0  # by Flower's own farewell


@needs_flower
def test_the_secret_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """A node that is killed cannot delete what it has written."""
    program = tmp_path / "supernode.py"
    told = tmp_path / "told"
    program.write_text(
        "import sys, time\nfrom pathlib import Path\n"
        "place = sys.argv[sys.argv.index('--superexec-auth-secret-file') + 1]\n"
        f"Path({str(told)!r}).write_bytes(place.encode() + b' ' + Path(place).read_bytes())\ntime.sleep(0.5)\n"
    )
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    monkeypatch.setattr(warm_node.supernode, "__file__", str(program))
    monkeypatch.setattr(warm_node, "_import_code", lambda: None)
    seen: list[bytes] = []
    serve = warm_node._serve

    def see(address: str, node: Any, children: set[int], secret: bytes) -> None:
        seen.append(secret)
        serve(address, node, children, secret)
        assert not list((tmp_path / "temp").iterdir())

    monkeypatch.setattr(warm_node, "_serve", see)
    assert warm_node.run_node(port, 0.5, []) == 0
    place, _, secret = told.read_bytes().partition(b" ")
    assert place.startswith(b"/dev/fd/")
    assert [secret] == seen
    assert len(secret) == 32


@needs_flower
def test_a_signal_ends_the_supernode_and_the_message_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    program = tmp_path / "supernode.py"
    program.write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr(warm_node.supernode, "__file__", str(program))
    monkeypatch.setattr(warm_node, "_import_code", lambda: None)
    monkeypatch.setattr("flwr.supernode.runtime.run_clientapp.run_clientapp", lambda **_: time.sleep(60))
    started: list[int] = []
    serve = warm_node._serve

    def serve_one(address: str, node: Any, children: set[int], secret: bytes) -> None:
        started.extend([node.pid, warm_node._fork(address, "token")])
        children.add(started[1])
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        serve(address, node, children, secret)

    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        monkeypatch.setattr(warm_node, "_serve", serve_one)
        assert warm_node.run_node(port, 0.5, []) == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGALRM, before)
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("port", "poll", "said"),
    [
        (0, 0.5, "port: 0 is not allowed; it must be above 0 and below 65536"),
        (9101, math.nan, "poll: nan is not allowed; it must be above 0 and at most 60 seconds"),
        (9101, 61.0, "poll: 61 is not allowed; it must be above 0 and at most 60 seconds"),
    ],
)
def test_a_bad_option_is_refused(port: int, poll: float, said: str) -> None:
    with pytest.raises(DeploymentError, match=f"^{said}$"):
        warm_node.run_node(port, poll, [])


@needs_flower
def test_a_supernode_looks_for_messages_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supernode import start_client_internal as loop

    def looks() -> None:
        handlers.extend(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))
        pauses.append(loop.time)

    handlers: list[Any] = []
    pauses: list[Any] = []
    slept: list[float] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(loop, "time", loop.time)  # restored afterwards
    monkeypatch.setattr(sys, "argv", sys.argv)
    command = importlib.import_module("flwr.supernode.cli.flower_supernode")
    monkeypatch.setattr(command, "flower_supernode", looks)
    monkeypatch.setattr("flwr.supercore.app_utils.start_parent_process_monitor", lambda _: None)
    monkeypatch.setattr(supernode.time, "sleep", slept.append)
    try:
        supernode.main(os.getpid(), 0.25, ["--insecure"])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert sys.argv == ["flower-supernode", "--insecure"]
    assert handlers == [signal.SIG_IGN, signal.SIG_IGN]
    for seconds in (3, 0.1):
        pauses[0].sleep(seconds)
    assert slept == [0.25, 0.1]
    # What is replaced: Flower's loop pauses by this name, and uses the module for nothing else.
    source = inspect.getsource(loop)
    assert "time.sleep(3)" in source
    assert set(re.findall(r"(?<![.\w])time\.(\w+)", source)) == {"sleep"}
