"""Command-line options made from the settings themselves, the same for every command that takes a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import typer

from fedcdp.errors import PlanError
from fedcdp.experiment import SECTIONS, read_assignment, read_toml
from fedcdp.presets import Settings, preset
from fedcdp.settings import types_of

# Shorter or customary names for some settings; the others are called as they are.
_FLAGS = {
    "learning_rate": "--lr",
    "server_learning_rate": "--server-lr",
    "file": "--data",
    "network": "--model",
}
_PANELS = {"data": "Data", "model": "Network", "plan": "Plan", "run": "Machine"}

Command = TypeVar("Command", bound=Callable[..., None])


def takes_settings(command: Command) -> Command:
    """Give a command all settings as options. It receives what was given as its keyword `given`: layers, the later winning.

    The command's own parameters stay. Settings that were not given are in no layer, so that defaults and files count.
    """
    own = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name != "given"]
    offered = _shared_parameters() + [
        _parameter(
            f"{section}__{each.name}", _FLAGS.get(each.name), types_of(kind)[each.name], each.metadata["help"], section
        )
        for section, kind in SECTIONS.items()
        for each in fields(kind)
    ]

    def wrapper(**values: Any) -> None:
        chosen = {p.name: values.pop(p.name) for p in offered}
        command(given=_layers(chosen), **values)

    parameters = own + offered
    wrapper.__doc__ = command.__doc__
    wrapper.__name__ = command.__name__
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper  # type: ignore[return-value]


def _shared_parameters() -> list[inspect.Parameter]:
    panel = "Where settings come from"
    return [
        _parameter("preset", "--preset", str, "The paper's setting for a dataset; single options override it.", panel),
        _parameter("config", "--config", str, "A TOML file with [data], [model], [plan], [run].", panel),
        _parameter("assignments", "--set", list[str], "One setting as key=value; may be repeated.", panel),
        _parameter("clip_end", "--clip-end", float, "The clip bound of the last round: linear decay from --clip.", "plan"),
    ]


def _parameter(name: str, flag: str | None, kind: Any, help_: str, panel: str) -> inspect.Parameter:
    dashed = "--" + name.rpartition("__")[2].replace("_", "-")
    flag = flag or dashed
    if kind is bool:
        flag = f"{dashed}/--no-{dashed[2:]}"
    # A choice or a schedule is read as text here and checked where it is used, with the same sentence as from Python.
    shown = kind if kind in (int, float, bool, list[str]) else str
    annotation: Any = Annotated[shown | None, typer.Option(flag, help=help_, rich_help_panel=_PANELS.get(panel, panel))]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _layers(chosen: dict[str, Any]) -> list[Settings]:
    layers: list[Settings] = []
    if chosen["preset"] is not None:
        layers.append(preset(chosen["preset"]))
    if chosen["config"] is not None:
        layers.append(read_toml(chosen["config"]))
    layers += [read_assignment(written) for written in chosen["assignments"] or []]
    single: Settings = {}
    for name, value in chosen.items():
        section, separator, key = name.partition("__")
        if separator and value is not None:
            single.setdefault(section, {})[key] = value
    if chosen["clip_end"] is not None:
        start = single.get("plan", {}).get("clip")
        if start is None:
            raise PlanError("--clip-end: say with --clip where the decay starts")
        single["plan"]["clip"] = f"linear({start}, {chosen['clip_end']})"
    return [*layers, single]
