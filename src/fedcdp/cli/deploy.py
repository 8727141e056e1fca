"""The commands for deployments: write one, run it on this machine, show its progress."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedcdp.accounting.budget import accounting_is_installed
from fedcdp.cli import terminal, usage
from fedcdp.cli.options import takes_settings
from fedcdp.cli.privacy import TargetEpsilon
from fedcdp.cli.remarks import remarks
from fedcdp.config.presets import Settings
from fedcdp.errors import StoppedError
from fedcdp.training.metrics import main_figure, metric_text, metric_title

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Privacy
    from fedcdp.deploy.site.local_deployment import Deployment, LocalOutcome


app = typer.Typer(
    cls=usage.PlainGroup,
    help="Run a plan on Flower, across processes and machines.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=usage.epilog(
        "fedcdp deploy init site --nodes 3 --dataset cancer",
        "fedcdp deploy up site",
        "fedcdp deploy status site",
    ),
)

_PLANNED = (
    "The old key has signed it (node.rotation). Nodes whose policy has accept_rotated_keys = true need no step 2 for it.\n"
)
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Deployment directory.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON line instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress and no table.")]


@usage.add_to(
    app,
    "fedcdp deploy init site --nodes 3 --dataset cancer",
    "fedcdp deploy init site --nodes 5 --host fl.example.org --port 9443",
    "fedcdp deploy init site --data patients.csv --client-column hospital",
    "fedcdp deploy init site --host fl.example.org --for systemd --for kubernetes",
)
@takes_settings
def init(
    *,
    given: list[Settings],
    directory: Directory,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", help="Number of SuperNodes. Each is one client. Default: 2, or as a client column names."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Name or address where the nodes reach the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port of the server. 0: any free port, for one machine.")] = 0,
    ways: Annotated[
        list[str] | None,
        typer.Option(
            "--for",
            metavar="WAY",
            help="Also write service files, with a proxy: compose, systemd or kubernetes. Can be given several times.",
        ),
    ] = None,
    proxy: Annotated[
        str | None,
        typer.Option("--proxy", metavar="nginx", help="Put the server behind a proxy that only lets nodes' calls through."),
    ] = None,
    control_port: Annotated[
        int | None,
        typer.Option(
            "--control-port",
            help="Port of the loopback where the server listens behind the proxy. Default: 9442.",
            show_default=False,
        ),
    ] = None,
    target_epsilon: TargetEpsilon = None,
    client_epsilon: Annotated[
        float | None, typer.Option("--client-epsilon", help="Total ε that each client grants. Default: the ε of the plan.")
    ] = None,
) -> None:
    """Write a complete, working deployment.

    It has certificates, keys, policies and scripts. Its README.md lists what to replace for production.
    """
    from fedcdp.deploy.site.directory import SiteSettings
    from fedcdp.deploy.site.service_files import control_port_for
    from fedcdp.deploy.site.writer import plan_for, write

    settings = SiteSettings(  # refuses a bad value before a calibration
        nodes=1 if nodes is None else nodes,
        host=host,
        port=port,
        control_port=control_port_for(proxy, ways or (), control_port),
    )
    planned = plan_for(nodes, given, target_epsilon)
    settings = replace(settings, nodes=planned.experiment.data.clients)
    site = write(directory, settings, planned.experiment, client_epsilon=client_epsilon, ways=ways or ())
    terminal.say_recipe(planned)
    terminal.notes(remarks(planned.experiment, given, calibrated=planned.epsilon is not None))
    terminal.console.print(
        f"{site.path}: a server and {settings.nodes} nodes. README.md lists what to replace before production.\n"
        f"Run it on this machine: fedcdp deploy up {directory}",
        soft_wrap=True,
        highlight=False,
    )


@usage.add_to(
    app,
    "fedcdp deploy up site",
    "fedcdp deploy up site --resume --json",
)
def up(
    directory: Directory,
    resume: Annotated[bool, typer.Option("--resume", help="Only resume a run; do not start a new one.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    monitor: Annotated[
        bool, typer.Option("--monitor", help="Serve /metrics and /healthz of each process, where its operate.toml says.")
    ] = False,
) -> None:
    """Start the server and all nodes on this machine and run the job.

    A job that was stopped is resumed.
    """
    from fedcdp.deploy.site.local_deployment import Deployment
    from fedcdp.errors import DeploymentError

    deployment = Deployment(directory)
    if resume and not (deployment.site.run.exists() and any(deployment.site.run.iterdir())):
        raise DeploymentError(f"{deployment.site.run} is empty or does not exist: there is no run to resume")
    done = deployment.follower.rounds_done()
    plan = deployment.experiment.plan
    try:
        with terminal.training_progress(plan, quiet, done, deployment.follower.epsilon_after) as progress:
            outcome = deployment.up(progress, terminal.note if not quiet else lambda _: None, monitor=monitor)
    except KeyboardInterrupt:
        raise StoppedError(f"stopped; fedcdp deploy up {directory} resumes after the last complete round") from None
    _show(deployment, outcome, as_json, quiet)


@usage.add_to(
    app,
    "fedcdp deploy node --port 9101 -- --superlink fl.example.org:9443",
    "fedcdp deploy node --poll 1 -- --superlink fl.example.org:9443",
)
def node(
    flower: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- FLOWER OPTIONS]", help="Options of flower-supernode.", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option("--port", help="Port that the node's own processes use, on this machine.")] = 9101,
    poll: Annotated[float, typer.Option("--poll", help="Most seconds between two looks for messages.")] = 0.5,
) -> None:
    """Run a node: Flower's SuperNode, with a process that is always ready to train.

    The start scripts of fedcdp deploy init run it. flower-supernode does the
    same, but takes seconds longer for every message.
    """
    from fedcdp.deploy.site.warm_node import run_node

    if status := run_node(port, poll, flower or []):
        raise typer.Exit(status)


@usage.add_to(
    app,
    "fedcdp deploy status site",
    "fedcdp deploy status site --json",
    "fedcdp deploy status site --watch",
)
def status(
    directory: Directory,
    as_json: AsJson = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show every change until the run ends. Without a terminal: a line per change.")
    ] = False,
) -> None:
    """Show the progress of a deployment and the ε it has spent."""
    from fedcdp.deploy.site.local_deployment import Deployment

    deployment = Deployment(directory)
    if watch:
        from fedcdp.cli.watch import watch as show_changes

        try:
            show_changes(deployment, as_json=as_json)
        except KeyboardInterrupt:
            raise typer.Exit from None
        return
    _show(deployment, deployment.outcome(0.0), as_json, quiet=False)


@usage.add_to(
    app,
    "fedcdp deploy rekey site/node-1",
    "fedcdp deploy rekey site/node-1 --planned",
)
def rekey(
    directory: Annotated[Path, typer.Argument(metavar="NODE_DIR", help="Directory of the node.", show_default=False)],
    planned: Annotated[
        bool, typer.Option("--planned", help="Sign the new key with the old one. Not after the old key was compromised.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replace a node's key on the node itself.

    A secure sum needs keys that nobody but the node's owner has seen.
    """
    from fedcdp.deploy.site import node_keys

    new = node_keys.rekey(directory, planned=planned)
    if as_json:
        typer.echo(json.dumps(vars(new)))
        return
    terminal.stdout.print(
        f"New key of {directory}: {new.fingerprint}\n{new.public}\n"
        "1. Register node.pub at the server, and unregister the old key (flwr supernode register, unregister).\n"
        + (_PLANNED if planned else "")
        + "2. Give the public key to the owners of the other nodes. Compare the fingerprint with them by telephone or face "
        'to face, not through the server. Each of them replaces this node\'s entry in roster.toml, with made_by = "owner".\n'
        "3. Restart the node. A run that is under way goes on with it in a later round.",
        soft_wrap=True,
        highlight=False,
    )


@usage.add_to(
    app,
    "fedcdp deploy traffic",
    "fedcdp deploy traffic --json",
)
def traffic(as_json: AsJson = False) -> None:
    """Show the bytes that a client sends and receives in a round.

    The networks are those of the paper, with and without pruning.
    """
    from fedcdp.deploy.site.flower_commands import require_flower

    require_flower()
    from fedcdp.deploy.protocol.wire import PRUNED, SHAPES, weigh_benchmark

    weighed = {dataset: weigh_benchmark(dataset) for dataset in SHAPES}
    if as_json:
        typer.echo(json.dumps({name: vars(each) for name, each in weighed.items()}))
        return
    table = Table(title="Bytes per client and round", title_justify="left", title_style="bold")
    for heading in (
        "network of",
        "weights",
        "down",
        *("up" if not share else f"up, {share:.0%} pruned" for share in PRUNED),
    ):
        table.add_column(heading, justify="left" if heading == "network of" else "right")
    for name, each in weighed.items():
        table.add_row(name, f"{each.weights:,}", f"{each.down:,}", *(f"{each.up[share]:,}" for share in PRUNED))
    terminal.stdout.print(table)


def _show(deployment: Deployment, outcome: LocalOutcome, as_json: bool, quiet: bool) -> None:
    privacy = _privacy(deployment)
    if outcome.warning is not None:
        terminal.note(outcome.warning)
    if as_json:
        answer = {
            "accuracy": outcome.accuracy,
            "rounds": outcome.rounds,
            "seconds": round(outcome.seconds, 3),
            "us_per_client_step": None,
            "metrics": {name: value for name, value in outcome.scores.items() if name != "accuracy"},
            "ended": outcome.ended,
            "epsilon": None if privacy is None else privacy.as_json()["rows"],
        }
        if deployment.experiment.plan.sums:
            answer["attempts"] = [
                {"round": each.round + 1, "attempt": each.attempt + 1, "members": each.clients.tolist()}
                for each in deployment.follower.charges()
            ]
        typer.echo(json.dumps(answer))
        return
    if quiet:
        return
    planned = deployment.experiment.plan.rounds
    name, value = main_figure(outcome.scores) or ("accuracy", None)
    rows = {
        "method": deployment.experiment.plan.method,
        "nodes": str(deployment.settings.nodes),
        "rounds": f"{outcome.rounds}" + ("" if outcome.rounds == planned else f" of {planned}: {outcome.sentence}"),
        f"validation {metric_title(name)}": "-" if value is None else metric_text(value),
        "run directory": str(deployment.site.run),
    }
    if deployment.experiment.plan.sums:
        rows |= _attempts(deployment)
    if outcome.seconds:
        rows["time"] = f"{outcome.seconds:.1f} s"
    terminal.table("Deployed", rows)
    if privacy is not None:
        terminal.privacy_table(privacy)


def _attempts(deployment: Deployment) -> dict[str, str]:
    """The attempts at secure sums, and the last roster, as the server's ledger has them."""
    charges = [each for each in deployment.follower.charges() if each.round >= 0]
    if not charges:
        return {"attempts": "none yet"}
    sizes = sorted({each.clients.size for each in charges})
    members = ", ".join(f"{number + 1}" for number in charges[-1].clients)
    return {
        "attempts": f"{len(charges)} in {len({each.round for each in charges})} rounds",
        "rosters": f"{sizes[0]} to {sizes[-1]} clients" if len(sizes) > 1 else f"{sizes[0]} clients",
        "last roster": f"clients {members or 'none'}",
    }


def _privacy(deployment: Deployment) -> Privacy | None:
    """The ε from the server's ledger, if there is one and dp-accounting is installed."""
    if not (accounting_is_installed() and (deployment.site.run / "ledger.jsonl").exists()):
        return None
    from fedcdp.training.ledger_check import spent

    return spent(deployment.site.run)[1]
