"""The commands that keep a deployment alive: starts, certificates, ledgers, and nodes that join and leave."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcdp.cli import terminal, usage
from fedcdp.cli.deploy import app
from fedcdp.errors import DeploymentError

Place = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Directory of a node, or for the server of the deployment.", show_default=False),
]
__all__ = ["app"]

NodeDirectory = Annotated[Path, typer.Argument(metavar="NODE_DIR", help="Directory of the node.", show_default=False)]


@usage.add_to(
    app,
    "fedcdp deploy keep site/node-1 --server fl.example.org:9443 -- flower-supernode …",
    "fedcdp deploy keep site -- flower-superlink …",
)
def keep(
    directory: Place,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="Flower's command.", show_default=False)],
    server: Annotated[
        str | None, typer.Option("--server", help="For a node: host:port of the server, for the check of the clock.")
    ] = None,
) -> None:
    """Check a node or the server, and run Flower's command for it. The start scripts call this.

    It writes the log, serves /metrics and /healthz, and starts a node again that the server refuses after a crash.
    """
    from fedcdp.deploy.site.keeper import become
    from fedcdp.deploy.site.starting import node_to_keep, server_to_keep

    say = terminal.note
    if (directory / "node.toml").is_file():
        if server is None:
            raise DeploymentError("server: a node needs the address of the server; give --server host:port")
        become(node_to_keep(directory, server, command, say))
    become(server_to_keep(directory, command, say))
