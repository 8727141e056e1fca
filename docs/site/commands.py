"""The page of commands, made from the command line itself."""

from __future__ import annotations

import re
from typing import Any

import typer.main

from fedcdp.cli import app


def page() -> str:
    """Every command with its arguments and options, as Markdown."""
    return "\n".join(_described(typer.main.get_command(app), "fedcdp"))


def _described(command: Any, name: str) -> list[str]:
    inner = getattr(command, "commands", {})
    if inner:
        return [line for key, each in inner.items() for line in _described(each, f"{name} {key}")]
    lines = [f"## {name}", "", command.help or "", ""]
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        if parameter.name != "help":
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(_row(parameter))
    for panel, rows in panels.items():
        lines += [f"| {panel} | |", "| --- | --- |", *rows, ""]
    return lines


def _row(parameter: Any) -> str:
    flags = ", ".join([*parameter.opts, *parameter.secondary_opts])
    is_argument = not flags.startswith("-")
    kind = "" if getattr(parameter, "is_flag", False) or is_argument else f" {_kind(parameter)}"
    shown = f"{parameter.metavar or parameter.name}" if is_argument else f"{flags}{kind}"
    help_ = (getattr(parameter, "help", None) or "").replace("|", "\\|")
    default = parameter.default
    if getattr(parameter, "show_default", False) and default not in (None, False, "") and not callable(default):
        help_ += f" Default: {default}."
    if parameter.required and not is_argument:
        help_ += " Required."
    return f"| `{_escaped(shown)}` | {help_} |"


def _kind(parameter: Any) -> str:
    return str(parameter.metavar or parameter.type.name.upper())


def _escaped(text: str) -> str:
    return re.sub(r"\|", "\\|", text)
