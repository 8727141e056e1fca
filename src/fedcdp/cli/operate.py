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
    "fedcdp deploy keep node-1 --server fl.example.org:9443 -- flower-supernode",
    "fedcdp deploy keep site -- flower-superlink",
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


@usage.add_to(
    app,
    "fedcdp deploy renew site",
    "fedcdp deploy renew site --authority",
)
def renew(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Deployment directory.", show_default=False)],
    authority: Annotated[
        bool, typer.Option("--authority", help="Make a new authority, whose root stands beside the old one in every ca.pem.")
    ] = False,
) -> None:
    """Renew the server's certificate, or its authority.

    Both need authority/ca.key. The start scripts warn a month before a certificate expires.
    """
    from fedcdp.deploy.site.directory import Site
    from fedcdp.deploy.site.renewal import renew_authority, renew_server

    site = Site(directory)
    site.require()
    renewed = renew_authority(site) if authority else renew_server(site)
    terminal.stdout.print(
        "\n".join(f"renewed until {renewed.until:%Y-%m-%d}: {path}" for path in renewed.paths),
        soft_wrap=True,
        highlight=False,
    )
    terminal.stdout.print(
        "Copy authority/ca.pem to every node as ca.pem, and restart the nodes. Then run fedcdp deploy renew without "
        "--authority."
        if authority
        else "Restart the server. Nodes need no change.",
        soft_wrap=True,
    )


@usage.add_to(
    app,
    "fedcdp deploy mark site/node-1",
    "fedcdp deploy mark site/node-1 --forget",
)
def mark(
    directory: NodeDirectory,
    forget: Annotated[
        bool, typer.Option("--forget", help="Also for a ledger older than its mark: what it lacks is forgotten.")
    ] = False,
) -> None:
    """Make the mark that detects a client's ledger restored from a backup.

    The policy names its place, on another disk than the ledger: ledger_mark. Use --forget only after you have lowered
    epsilon in the policy by what the lost part of the ledger may have spent.
    """
    from fedcdp.deploy.site.client_files import make_mark

    terminal.stdout.print(f"marked: {make_mark(directory, forget=forget)}", soft_wrap=True, highlight=False)


@usage.add_to(app, "fedcdp deploy leave site/node-1", "fedcdp deploy leave node-3-riverside")
def leave(directory: NodeDirectory) -> None:
    """Let a client leave the federation: it refuses every task and every round from now on.

    What it has released stays in its ledger. The run goes on with the other clients.
    """
    from fedcdp.deploy.protocol.departure import leave as leave_it
    from fedcdp.deploy.site.client_files import ClientFiles
    from fedcdp.deploy.site.directory import NodePlace

    leave_it(ClientFiles.of(NodePlace(0, directory.absolute())).state)
    terminal.stdout.print(
        f"{directory} has left. Stop the node when you like; fedcdp deploy join brings it back.", soft_wrap=True
    )


@usage.add_to(app, "fedcdp deploy join site/node-1", "fedcdp deploy join node-3-riverside")
def join(directory: NodeDirectory) -> None:
    """Bring a client back that has left. A run under way takes it in again when the server's job is resumed."""
    from fedcdp.deploy.protocol.departure import come_back
    from fedcdp.deploy.site.client_files import ClientFiles
    from fedcdp.deploy.site.directory import NodePlace

    come_back(ClientFiles.of(NodePlace(0, directory.absolute())).state)
    terminal.stdout.print(f"{directory} takes part again.", soft_wrap=True)


@usage.add_to(
    app,
    "fedcdp deploy add site",
    "fedcdp deploy add site --client riverside",
)
def add(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Deployment directory.", show_default=False)],
    client: Annotated[str, typer.Option("--client", help="Name of the client, which the server sees.")] = "",
    client_epsilon: Annotated[
        float | None, typer.Option("--client-epsilon", help="Total ε that the client grants. Default: the ε of the plan.")
    ] = None,
) -> None:
    """Write the folder and the start script of one more node, for a client that joins the run."""
    from fedcdp.deploy.site.directory import Site
    from fedcdp.deploy.site.new_node import add_node

    node = add_node(Site(directory), client, client_epsilon)
    terminal.stdout.print(
        f"{node.path}: one more node.\n"
        f"1. Set joining = true in app/pyproject.toml, and start the job again: ./run.sh --run-only\n"
        "2. Register the key: ./run.sh --register-only\n"
        f"3. Name the records in {node.name}/node.toml, and start the node on its machine: ./start-{node.name}.sh\n"
        "4. Under a secure sum, every owner lists the node in roster.toml. Only then it takes effect.",
        soft_wrap=True,
        highlight=False,
    )
