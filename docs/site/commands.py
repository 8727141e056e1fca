"""The page of commands, made from the command line itself: all options, also those that only --help-all shows."""

from __future__ import annotations

from typing import Any

import typer.main

from fedcdp.cli.program import app
from fedcdp.cli.usage import help_of, names_of

# Settings that every command with a plan takes: written once.
_SHARED = ("Settings", "Data and network", "Plan", "Privacy", "Machine")
_SETTINGS = "train"  # a command that takes all of them


def page() -> str:
    """Every command with its arguments, options and examples, then the settings that they share, as Markdown."""
    commands = list(_commands(typer.main.get_command(app), "fedcdp"))
    lines = [line for name, command in commands for line in _described(name, command)]
    [settings] = [command for name, command in commands if name == f"fedcdp {_SETTINGS}"]
    lines += ["## Settings", "", "For the commands that take them; also the keys of a TOML file and of `--set`.", ""]
    lines += [line for panel in _SHARED for line in _table(panel, _panels(settings)[panel])]
    return "\n".join(lines)


def _commands(command: Any, name: str) -> list[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        return [(name, command)]
    return [found for key, each in inner.items() for found in _commands(each, f"{name} {key}")]


def _described(name: str, command: Any) -> list[str]:
    panels = _panels(command)
    own = [line for panel, rows in panels.items() if panel not in _SHARED for line in _table(panel, rows)]
    shared = ["Takes all [settings](#settings).", ""] if set(_SHARED) <= set(panels) else []
    examples = ["```sh", command.epilog, "```", ""] if command.epilog else []
    return [f"## {name}", "", command.help or "", "", *examples, *own, *shared]


def _panels(command: Any) -> dict[str, list[Any]]:
    panels: dict[str, list[Any]] = {}
    for parameter in command.params:
        if parameter.name not in ("help", "help_all"):
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(parameter)
    return panels


def _table(panel: str, parameters: list[Any]) -> list[str]:
    return [f"| {panel} | |", "| --- | --- |", *map(_row, parameters), ""]


def _row(parameter: Any) -> str:
    escaped = help_of(parameter).replace("|", "\\|")
    return f"| `{names_of(parameter)}` | {escaped} |"
