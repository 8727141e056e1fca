"""`fedcdp deploy status --watch`: the progress of a deployment until its run ends."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.table import Table

from fedcdp.cli import terminal
from fedcdp.training.metrics import main_figure, metric_text, metric_title

if TYPE_CHECKING:
    from fedcdp.deploy.site.local_deployment import Deployment

_SECONDS = 2.0


def watch(deployment: Deployment, *, as_json: bool, seconds: float = _SECONDS) -> None:
    """Show every change until the run has ended: a table that is refreshed, or without a terminal a line per change."""
    if terminal.stdout.is_terminal and not as_json:
        with Live(console=terminal.stdout, auto_refresh=False) as live:
            for facts in _changes(deployment, seconds):
                live.update(_table(facts), refresh=True)
        return
    for facts in _changes(deployment, seconds):
        line = json.dumps(facts) if as_json else "  ".join(f"{name} {value}" for name, value in facts.items())
        terminal.stdout.print(line, markup=False, highlight=False, soft_wrap=True)


def _changes(deployment: Deployment, seconds: float) -> Iterator[dict[str, Any]]:
    """What is to be shown, each time it has changed. The last one is of the end."""
    before: dict[str, Any] | None = None
    while True:
        ended = deployment.follower.ended()  # before the rounds, to include the last one
        facts = _facts(deployment) | {"state": "running or stopped" if ended is None else f"{ended[0]}: {ended[1]}"}
        if facts != before:
            yield facts
        if ended is not None:
            return
        before = facts
        time.sleep(seconds)


def _facts(deployment: Deployment) -> dict[str, Any]:
    outcome, plan = deployment.outcome(0.0), deployment.experiment.plan
    facts: dict[str, Any] = {"round": f"{outcome.rounds}/{plan.rounds}"}
    if (main := main_figure(outcome.scores)) is not None:
        facts[f"validation {metric_title(main[0])}"] = metric_text(main[1])
    charges = deployment.follower.charges()
    facts["releases"] = len(charges)
    if (epsilon := deployment.follower.epsilon_after(outcome.rounds)) and charges:
        facts["spent"] = epsilon
    return facts


def _table(facts: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(f"[bold]{name}[/bold]", str(value))
    table.caption = "Ctrl-C ends this view, not the run"
    return table
