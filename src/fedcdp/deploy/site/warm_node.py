"""A node that is always warm: Flower's SuperNode, and a process that forks itself for every message.

Flower starts a Python process for every message, which imports torch for seconds to train for a fraction of one. Here one
process imports everything once. It asks the SuperNode for tasks, as Flower's launcher (`flower-superexec`) does. For each
task it forks, and the child does what `flwr-clientapp` does: it handles one message and ends.

The SuperNode gives tasks only to the process that knows a secret, made anew at each start. So no other process of the
machine gets this node's messages, and this one gets no other node's if both are told the same port.

Children inherit imported code and nothing else. The warm process never reads the node's data, policy, ledger or keys, never
sees a message, and keeps no random state, so nothing of one message can reach the next.

| state that a fork could copy | why no two children share it |
| --- | --- |
| noise and sampling | both come from the operating system, in the child. OpenDP and OpenSSL are not used before the fork |
| NumPy's global generator | seeded anew in each child |
| Python's `random` | Python seeds it anew after each fork |
| torch's generators | they start from torch's constant seed, as in a new process |
| threads and CUDA | the warm process computes nothing, so it starts neither |
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from fedcdp.deploy.site import supernode
from fedcdp.deploy.site.flower_commands import require_flower
from fedcdp.deploy.site.processes import ended_by_signals
from fedcdp.errors import DeploymentError

_LOG = logging.getLogger("flwr.fedcdp")
_TASK_SECONDS = 0.05  # between two questions for a task, on the loopback
_GRACE_SECONDS = 10.0
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_CODE = (
    "flwr.supernode.runtime.run_clientapp",
    "fedcdp.deploy.protocol.client",
    # What a child needs later on: to read tables, to count ε, and for noise on the sum.
    "dp_accounting.pld.privacy_loss_distribution",
    "fedcdp.data.table_records",
    "opendp.measurements",
)


def run_node(port: int, pause: float, arguments: Sequence[str]) -> int:
    """Run a node until its SuperNode ends or a signal ends it; returns the exit status.

    Args:
        port: The port of this machine at which the SuperNode serves this process.
        pause: The longest pause between two looks for messages, in seconds.
        arguments: More arguments of `flower-supernode`, such as the server's address.
    """
    if not 0 < port < 2**16:
        raise DeploymentError(f"port: {port} is not allowed; it must be above 0 and below 65536")
    if not 0 < pause <= 60:
        raise DeploymentError(f"poll: {pause:g} is not allowed; it must be above 0 and at most 60 seconds")
    require_flower()
    return _run(port, pause, arguments)


def _run(port: int, pause: float, arguments: Sequence[str]) -> int:
    command = [sys.executable, "-P", supernode.__file__, str(os.getpid()), str(pause)]
    secret = secrets.token_bytes(32)
    with _readable(secret) as pipe:
        about = ["--isolation", "process", "--port", str(port), "--superexec-auth-secret-file", f"/dev/fd/{pipe}"]
        # Its own session: a terminal's Ctrl-C reaches this process only, which ends the SuperNode once.
        node = subprocess.Popen([*command, *arguments, *about], start_new_session=True, pass_fds=[pipe])
    children = set[int]()
    try:
        with ended_by_signals():
            _import_code()
            _serve(f"127.0.0.1:{port}", node, children, secret)
    except KeyboardInterrupt:
        _LOG.info("the node is told to end")
    finally:
        _end(node, children)
    return node.returncode


@contextlib.contextmanager
def _readable(secret: bytes) -> Iterator[int]:
    """A pipe from which another process reads a secret once: no file holds it, also after a crash."""
    reading, writing = os.pipe()
    try:
        os.write(writing, secret)
        os.close(writing)
        yield reading
    finally:
        os.close(reading)


def _import_code() -> None:
    for name in _CODE:
        with contextlib.suppress(ImportError):  # a package that is not installed is missed where it is needed
            importlib.import_module(name)


def runtime_client(address: str, secret: bytes) -> Any:
    """A client of the SuperNode at this address, which shares the secret."""
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,  # the loopback, as between Flower's own processes
        root_certificates=None,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={_ACQUIRE}),
        ],
    )


def _serve(address: str, node: subprocess.Popen[bytes], children: set[int], secret: bytes) -> None:
    """Fork for each task of the SuperNode, while it runs."""
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType

    client = runtime_client(address, secret)
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    while node.poll() is None:
        _reap(children)
        try:
            answer = client.AcquireTask(request)
        except httpx.HTTPError:  # it does not listen yet, has just ended, or is another node's
            time.sleep(_TASK_SECONDS)
            continue
        if answer.HasField("task") and answer.token:
            children.add(_fork(address, answer.token))
        time.sleep(_TASK_SECONDS)


def _fork(address: str, token: str) -> int:
    """Handle one task in a child process; returns its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    warm = os.getpid()
    child = os.fork()
    if child == 0:
        _handle(address, token, warm)
    return child


def _handle(address: str, token: str, warm: int) -> NoReturn:
    """What `flwr-clientapp` does, in this process, which ends with it or with the warm process."""
    status: int | str | None = 1
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        np.random.seed()  # noqa: NPY002 (a user's own functions may use the global generator)
        from flwr.supernode.runtime.run_clientapp import run_clientapp

        run_clientapp(runtime_api_address=address, token=token, insecure=True, parent_pid=warm)
        status = 0
    except SystemExit as ending:
        status = ending.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 0 if status is None else 1)


def _reap(children: set[int]) -> None:
    """Forget the children that have ended."""
    for child in list(children):
        if os.waitpid(child, os.WNOHANG)[0]:
            children.remove(child)


def _end(node: subprocess.Popen[bytes], children: set[int]) -> None:
    """End the SuperNode, which tells its server, and then children that still work."""
    if node.poll() is None:
        node.terminate()
        try:
            node.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
