"""The start of a node or a server: checks first, and then the process that keeps it (`keeper`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedcdp._version import __version__
from fedcdp.deploy.site.client_files import state_of
from fedcdp.deploy.site.directory import NodePlace, Site
from fedcdp.deploy.site.keeper import Keeping
from fedcdp.deploy.site.operate_file import OperateSettings
from fedcdp.deploy.site.preflight import Checked, check_node, check_server
from fedcdp.errors import DeploymentError

Say = Callable[[str], None]


def node_to_keep(directory: Path, server: str, command: Sequence[str], say: Say) -> Keeping:
    """A node that can be started; raises with the reason if it cannot."""
    node = NodePlace(0, directory.absolute())
    settings = OperateSettings.read(node.path)
    _require_address(server)
    checked = check_node(node, server)
    return _keeping("node", node.path, settings, checked, state_of(node), command, say)


def server_to_keep(directory: Path, command: Sequence[str], say: Say) -> Keeping:
    """A server that can be started; raises with the reason if it cannot."""
    site = Site(directory)
    settings = OperateSettings.read(site.server)
    return _keeping("server", site.server, settings, check_server(site), site.run, command, say)


def _keeping(
    role: str, folder: Path, settings: OperateSettings, checked: Checked, figures: Path, command: Sequence[str], say: Say
) -> Keeping:
    from fedcdp.deploy.protocol.monitor_file import FILE

    for warning in checked.warnings:
        say(warning)
    return Keeping(
        role=role,
        name=folder.name,
        command=tuple(command),
        version=__version__,
        figures=str(figures / FILE),
        listen=settings.listen,
        expiries=checked.expiries,
        log_format=settings.log_format,
        log_file=str(folder / settings.log_file) if settings.log_file else "",
        log_bytes=settings.log_bytes,
        log_files=settings.log_files,
    )


def _require_address(server: str) -> None:
    host, _, port = server.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise DeploymentError(f"server: {server!r} is not allowed; it must be host:port")
