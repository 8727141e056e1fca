"""Flower's commands as this deployment uses them: through the scripts, from this interpreter's environment."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from fedcdp.deploy.site.directory import CONNECTION, Site
from fedcdp.deploy.site.operate_file import OVERRIDE
from fedcdp.errors import DeploymentError
from fedcdp.files.installation import install_command

_STARTED = re.compile(r"Successfully started run (\d+)")
_COMMAND_SECONDS = 120.0  # limit for one `flwr` command, on a busy machine
_OFFLINE = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def require_flower() -> None:
    """Raise an error with the install command if Flower is missing."""
    if importlib.util.find_spec("flwr") is None or shutil.which("flower-superlink", path=_path()) is None:
        raise DeploymentError(f"deploying needs Flower; install it with {install_command('flower')}")


def environment(nodes: int) -> dict[str, str]:
    """For all processes: this interpreter's commands first, no telemetry, and a fair share of the processors.

    Nothing listens for those who watch, unless the environment says so: fixed ports of several deployments would clash.
    """
    share = max(1, (os.cpu_count() or 1) // max(1, nodes))
    usual = {"OMP_NUM_THREADS": str(share), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25", OVERRIDE: "off"}
    return usual | dict(os.environ) | _OFFLINE | {"PATH": _path(), "PYTHONUNBUFFERED": "1"}


def _path() -> str:
    # Flower starts its own programs by name: they must be this interpreter's, whatever the shell's path is.
    return os.pathsep.join([str(Path(sys.executable).parent), *filter(None, [os.environ.get("PATH")])])


def free_ports(count: int) -> list[int]:
    """Ports of this machine that are currently free."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def require_free(port: int) -> None:
    """Raise if a port is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise DeploymentError(f"port: {port} cannot be used: {error.strerror}; is something still running?") from None


def listens(port: int) -> bool:
    """Whether a process listens on a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def started_run(log: Path) -> str | None:
    """The id of the job's Flower run, once the job's log shows it."""
    found = _STARTED.findall(log.read_text(errors="replace")) if log.exists() else []
    return str(found[-1]) if found else None


def state_of(run: str, site: Site, environment: Mapping[str, str]) -> str:
    """The state of a run according to the running server, such as `running`, `finished:completed` or `finished:failed`."""
    try:
        done = subprocess.run(
            ["flwr", "ls", CONNECTION, "--run-id", run, "--format", "json"],  # noqa: S607  # nosec B607 (its environment's)
            env=dict(environment) | {"FLWR_HOME": str(site.flwr)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=True,
        )
        return next(str(each["status"]) for each in json.loads(done.stdout)["runs"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, StopIteration):
        return "unknown"
