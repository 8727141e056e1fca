"""What `fedcdp check` prints: the verdict, the findings and the tables, or JSON; and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedcdp.cli import terminal
from fedcdp.errors import ClaimError

if TYPE_CHECKING:
    from fedcdp.checks import Check
    from fedcdp.checks.findings import TensorProbe


def show_check(found: Check, out: Path | None, as_json: bool) -> None:
    """Print a check, write its page, and fail if a claim does not hold."""
    from fedcdp.report.api import write_check

    page = None if out is None else write_check(found, out)
    if as_json:
        typer.echo(json.dumps(found.summary()))
    else:
        _print(found)
        if page is not None:
            terminal.stdout.print(f"Report: {page}", soft_wrap=True, markup=False)
    if found.fails:
        raise ClaimError(f"the check failed: {next(each.text for each in found.findings if each.level == 'leak')}")


_STYLES = {"leak": "bold red", "warning": "yellow", "note": "default"}


def _print(found: Check) -> None:
    terminal.stdout.print(f"{found.target}: {found.verdict}", style="bold", markup=False, highlight=False)
    for finding in found.findings:
        terminal.stdout.print(
            f"{finding.level}: {finding.text}", style=_STYLES[finding.level], markup=False, highlight=False
        )
    facts = Table(show_header=False, box=box.SIMPLE, pad_edge=False)
    for name, value in found.facts:
        facts.add_row(name, escape(value))
    terminal.stdout.print(facts)
    if found.privacy is not None:
        terminal.privacy_table(found.privacy, to_stdout=True)
    scopes = Table(title="Attacks that apply", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("adversary", "reads", "attacks", "right guesses, at most"):
        scopes.add_column(heading)
    for scope in found.scopes:
        limit = "-" if scope.accuracy is None else f"{100 * scope.accuracy:.4g} %"
        scopes.add_row(scope.adversary, scope.reads, ", ".join(scope.attacks), limit)
    terminal.stdout.print(scopes)
    if found.tensors:
        scales = list(found.tensors[0].moved)
        ends = list(dict.fromkeys((scales[0], scales[-1])))
        headings = ["tensor", "noise", *(f"moved ×{scale:g}" for scale in ends), "clipped"]
        terminal.figures_table("What leaves the client", headings, [_cells(tensor, ends) for tensor in found.tensors])
    for summary in found.attacks:
        terminal.stdout.print(_attack(summary), markup=False, highlight=False)


def _cells(tensor: TensorProbe, scales: list[float]) -> list[str]:
    moved = [f"{tensor.moved[scale]:.3g}" if tensor.moved[scale] else "hidden" for scale in scales]
    clipped = {True: "yes", False: "no", None: "not tested"}[tensor.bounded]
    return [tensor.name, f"{tensor.noise:.3g}" if tensor.noise else "none", *moved, clipped]


def _attack(summary: dict[str, Any]) -> str:
    if summary.get("auc") is not None:
        low, high = summary["auc_interval_99"]
        return f"{summary['attack']}: presence of a record, AUC {summary['auc']:.3f} (99 %: {low:.3f} to {high:.3f})"
    rate = summary.get("success_rate")
    return f"{summary['attack']}: {'not scored' if rate is None else f'{100 * rate:.3g} % of records reconstructed exactly'}"
