"""The commands about deployments: write one, bring it up on this machine, see how far it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedcdp.accounting.budget import accounting_is_installed
from fedcdp.cli import terminal
from fedcdp.cli.options import takes_settings
from fedcdp.config.presets import Settings
from fedcdp.errors import StoppedError

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Privacy
    from fedcdp.deploy.site.local_deployment import Deployment, LocalOutcome


app = typer.Typer(help="The same plan on Flower, across real processes and machines.", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A deployment directory.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON line for programs.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no table.")]


@app.command()
@takes_settings
def init(
    *,
    given: list[Settings],
    directory: Directory,
    nodes: Annotated[int, typer.Option("--nodes", help="SuperNodes; each is one client.")] = 2,
    host: Annotated[str, typer.Option("--host", help="Name or address at which nodes reach the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="The server's port. 0: a free one, for one machine.")] = 0,
    client_epsilon: Annotated[
        float | None, typer.Option("--client-epsilon", help="What each client grants in all. Default: what the plan costs.")
    ] = None,
) -> None:
    """Write a complete, working deployment: certificates, keys, policies, scripts, and what to replace for production."""
    from fedcdp.deploy.site.directory import SiteSettings
    from fedcdp.deploy.site.writer import experiment_for, write

    settings = SiteSettings(nodes=nodes, host=host, port=port)
    site = write(directory, settings, experiment_for(settings.nodes, given), client_epsilon)
    terminal.console.print(
        f"{site.path}: a server and {nodes} nodes. README.md says what to replace before production.\n"
        f"On this machine: fedcdp deploy up {directory}",
        soft_wrap=True,
        highlight=False,
    )


@app.command()
def up(
    directory: Directory,
    resume: Annotated[bool, typer.Option("--resume", help="Refuse to begin: only go on with a run that began.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Start the server and all nodes on this machine and run the job; one that was stopped goes on where it was."""
    from fedcdp.deploy.site.local_deployment import Deployment
    from fedcdp.errors import DeploymentError

    deployment = Deployment(directory)
    if resume and not deployment.site.run.exists():
        raise DeploymentError(f"{deployment.site.run} does not exist: there is no run to resume")
    done = deployment.follower.rounds_done()
    plan = deployment.experiment.plan
    try:
        with terminal.training_progress(plan, quiet, done, deployment.follower.epsilon_after) as progress:
            outcome = deployment.up(progress, terminal.note if not quiet else lambda _: None)
    except KeyboardInterrupt:
        raise StoppedError(f"stopped; fedcdp deploy up {directory} goes on from the last whole round") from None
    _show(deployment, outcome, as_json, quiet)


@app.command()
def status(directory: Directory, as_json: AsJson = False) -> None:
    """How far a deployment's run is, and what it has spent."""
    from fedcdp.deploy.site.local_deployment import Deployment

    deployment = Deployment(directory)
    _show(deployment, deployment.outcome(0.0), as_json, quiet=False)


@app.command()
def traffic(as_json: AsJson = False) -> None:
    """What a client's part in a round weighs on the wire, for the paper's networks, with and without pruning."""
    from fedcdp.deploy.site.flower_commands import require_flower

    require_flower()
    from fedcdp.deploy.protocol.wire import PRUNED, SHAPES, weigh_benchmark

    weighed = {dataset: weigh_benchmark(dataset) for dataset in SHAPES}
    if as_json:
        typer.echo(json.dumps({name: vars(each) for name, each in weighed.items()}))
        return
    table = Table(title="Bytes of one client in one round", title_justify="left", title_style="bold")
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
    if as_json:
        answer = {
            "accuracy": outcome.accuracy,
            "rounds": outcome.rounds,
            "seconds": round(outcome.seconds, 3),
            "us_per_client_step": None,
            "ended": outcome.ended,
            "epsilon": None if privacy is None else privacy.as_json()["rows"],
        }
        typer.echo(json.dumps(answer))
        return
    if quiet:
        return
    planned = deployment.experiment.plan.rounds
    rows = {
        "method": deployment.experiment.plan.method,
        "nodes": str(deployment.settings.nodes),
        "rounds": f"{outcome.rounds}" + ("" if outcome.rounds == planned else f" of {planned}: {outcome.sentence}"),
        "validation accuracy": "-" if outcome.accuracy is None else f"{outcome.accuracy:.4f}",
        "run directory": str(deployment.site.run),
    }
    if outcome.seconds:
        rows["time"] = f"{outcome.seconds:.1f} s"
    terminal.table("Deployed", rows)
    if privacy is not None:
        terminal.privacy_table(privacy)


def _privacy(deployment: Deployment) -> Privacy | None:
    """By the server's ledger, where there is one and ε can be computed here."""
    if not (accounting_is_installed() and (deployment.site.run / "ledger.jsonl").exists()):
        return None
    from fedcdp.training.saved_run import spent

    return spent(deployment.site.run)[1]
