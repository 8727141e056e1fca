"""Command-line options made from the settings themselves, the same for every command that takes a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from fedcdp.config import consent
from fedcdp.config.experiment import SECTIONS, read_assignment, read_toml
from fedcdp.config.fields import types_of
from fedcdp.config.presets import Settings, preset
from fedcdp.errors import PlanError

# Shorter or customary names for some settings; the others are called as they are.
_FLAGS = {
    "learning_rate": "--lr",
    "server_learning_rate": "--server-lr",
    "file": "--data",
    "network": "--model",
}
# What a dataset has a default of its own for (`presets.population`).
_FROM_DATASET = {"partition", "clients", "rounds", "per_round", "local_steps", "batch_size", "learning_rate"}
_PANELS = {"data": "Data", "model": "Network", "plan": "Plan", "run": "Machine"}

Command = TypeVar("Command", bound=Callable[..., None])


def takes_settings(command: Command) -> Command:
    """Give a command all settings as options. It receives what was given as its keyword `given`: layers, the later winning.

    The command's own parameters stay. Settings that were not given are in no layer, so that defaults and files count.
    """
    own = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name != "given"]
    offered = [
        *_other_parameters(),
        *(_from_setting(section, each) for section, kind in SECTIONS.items() for each in fields(kind)),
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


def _other_parameters() -> list[inspect.Parameter]:
    sources = {"rich_help_panel": "Where settings come from"}
    return [
        _parameter(
            "preset",
            str,
            "--preset",
            help="mnist, cifar10, lfw, adult, cancer: the paper's setting; mnist-eps1, …-eps2, …-eps8 and the like: what is "
            "recommended at that ε; demo. Single options override it.",
            **sources,
        ),
        _parameter("config", str, "--config", help="A TOML file with sections data, model, plan and run.", **sources),
        _parameter("assignments", list[str], "--set", help="One setting as key=value; may be repeated.", **sources),
        _parameter(
            "clip_end",
            float,
            "--clip-end",
            help="The clip bound of the last round: linear decay from --clip.",
            rich_help_panel=_PANELS["plan"],
        ),
    ]


def _from_setting(section: str, setting: Field[Any]) -> inspect.Parameter:
    kind, help_ = types_of(SECTIONS[section])[setting.name], setting.metadata["help"]
    flag = _FLAGS.get(setting.name, "--" + setting.name.replace("_", "-"))
    if setting.name in _FROM_DATASET:
        help_ += " Default: the dataset's."
    elif setting.default is not None:
        help_ += f" Default: {str(setting.default).lower()}."
    choices = "|".join(get_args(kind)) if get_origin(kind) is Literal else None
    if kind is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    # A choice or a schedule is read as text here and checked where it is used, with the same sentence as from Python.
    shown = kind if kind in (int, float, bool) and setting.name != "slots" else str
    choices = "INTEGER|auto" if setting.name == "slots" else choices
    name = f"{section}__{setting.name}"
    return _parameter(name, shown, flag, help=help_, metavar=choices, rich_help_panel=_PANELS[section])


def _parameter(name: str, kind: Any, flag: str, **look: Any) -> inspect.Parameter:
    annotation: Any = Annotated[kind | None, typer.Option(flag, show_default=False, **look)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _layers(chosen: dict[str, Any]) -> list[Settings]:
    layers: list[Settings] = []
    configured: Settings = {}
    if chosen["preset"] is not None:
        layers.append(preset(chosen["preset"]))
    if chosen["config"] is not None:
        configured = read_toml(chosen["config"], stream=True)
        layers.append(configured)
    layers += [read_assignment(written) for written in chosen["assignments"] or []]
    single: Settings = {}
    for name, value in chosen.items():
        section, separator, key = name.partition("__")
        if separator and value is not None:
            single.setdefault(section, {})[key] = value
    if chosen["clip_end"] is not None:
        start = single.get("plan", {}).get("clip", "")
        try:
            single["plan"]["clip"] = f"linear({float(start)!r}, {chosen['clip_end']!r})"
        except ValueError:
            raise PlanError("--clip-end: give the bound of the first round as a number with --clip") from None
    slots = single.get("plan", {}).get("slots")
    if slots not in (None, "auto"):
        single["plan"]["slots"] = _whole_number("--slots", slots)
    for layer in [*layers, single]:
        if "network" in layer.get("model", {}) and layer is not configured:
            consent.remember(str(layer["model"]["network"]))
    consent.require(configured.get("model", {}).get("network"), chosen["config"])
    if "file" in single.get("data", {}):  # the run directory must find it from anywhere
        single["data"]["file"] = str(Path(single["data"]["file"]).absolute())
    return [*layers, single]


def _whole_number(flag: str, written: str) -> int:
    try:
        return int(written)
    except ValueError:
        raise PlanError(f"{flag}: {written!r} is not a whole number, and auto is only for a target ε") from None
