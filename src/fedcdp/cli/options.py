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

DATA = "Data and network"

# Shorter or customary names for some settings; the others are called as they are.
_FLAGS = {
    "learning_rate": "--lr",
    "server_learning_rate": "--server-lr",
    "file": "--data",
    "network": "--model",
}
# Settings that each dataset has its own default for (`presets.population`).
_FROM_DATASET = {
    "partition", "clients", "classes_per_client", "rounds", "per_round", "local_steps", "batch_size", "learning_rate",
}  # fmt: skip
# Settings that the --help of a command shows; --help-all shows all of them.
_MECHANISM = {"dataset", "file", "method", "batch_size", "clip", "noise_multiplier"}
_TABLE = {"client_column", "label_column", "task"}
_COMMON = _MECHANISM | {"clients", "rounds", "per_round", "local_steps", "delta"}
_OF_A_RUN = {"file", "network", "client_column", "label_column"}  # needed for a run from Python
_COMMON_IN = {
    "account": _COMMON | {"partition", "records", "client_sampling", "record_sampling"},
    "attack": _MECHANISM | {"device"},
    "audit": _COMMON | {"adversary", "unit"},
    "calibrate": _COMMON | {"partition", "records", "adversary", "unit"},
    "evaluate": _OF_A_RUN,
    "export": _OF_A_RUN,
    "init": _COMMON - {"clients", "per_round"} | {"network", "learning_rate", "max_epsilon"},
    "train": _COMMON - {"delta"}
    | _TABLE
    | {"network", "learning_rate", "secure_noise", "max_epsilon", "adversary", "device"},
}
_PANELS = {"data": DATA, "model": DATA, "plan": "Plan", "run": "Machine"}
_PRIVACY = {"delta", "max_epsilon", "adversary", "unit"}  # in a panel of their own

Command = TypeVar("Command", bound=Callable[..., None])


def takes_settings(command: Command) -> Command:
    """Give a command all settings as options. It receives them as its keyword `given`: layers, of which the later wins.

    The last layer holds the options that were given one by one. The command's own parameters stay. A setting that was not
    given is in no layer, so defaults and files count.
    """
    own = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name != "given"]
    common = _COMMON_IN.get(command.__name__, _COMMON)
    settings = [_from_setting(section, each, common) for section, kind in SECTIONS.items() for each in fields(kind)]
    offered = [*_sources(), *settings, _clip_end()]

    def wrapper(**values: Any) -> None:
        chosen = {p.name: values.pop(p.name) for p in offered}
        command(given=_layers(chosen), **values)

    parameters = own + offered
    wrapper.__doc__ = command.__doc__
    wrapper.__name__ = command.__name__
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper  # type: ignore[return-value]


def flag_of(setting: str) -> str:
    """The name of a setting's option."""
    return _FLAGS.get(setting, "--" + setting.replace("_", "-"))


def _sources() -> list[inspect.Parameter]:
    sources = {"rich_help_panel": "Settings"}
    return [
        _parameter(
            "preset",
            str,
            "--preset",
            help="Settings of the paper (mnist, cifar10, lfw, adult, cancer), recommended ones by ε (mnist-eps1, "
            "mnist-eps2, mnist-eps8 and so on), or demo. Options override it.",
            **sources,
        ),
        _parameter("config", str, "--config", help="TOML file with the sections data, model, plan and run.", **sources),
        _parameter("assignments", list[str], "--set", help="One setting, as key=value. Repeatable.", hidden=True, **sources),
    ]


def _clip_end() -> inspect.Parameter:
    look = {"help": "Clip bound of the last round: linear decay from --clip.", "hidden": True}
    return _parameter("clip_end", float, "--clip-end", **look, rich_help_panel=_PANELS["plan"])


def _from_setting(section: str, setting: Field[Any], common: set[str]) -> inspect.Parameter:
    kind, help_ = types_of(SECTIONS[section])[setting.name], setting.metadata["help"]
    flag = flag_of(setting.name)
    if setting.name in _FROM_DATASET:
        help_ += " Default: the dataset's."
    elif setting.default is not None and setting.default is not False:
        help_ += f" Default: {str(setting.default).lower()}."
    choices = "|".join(get_args(kind)) if get_origin(kind) is Literal else None
    if kind is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    # A choice or a schedule is read as text here and checked where it is used, with the same message as from Python.
    shown = kind if kind in (int, float, bool) and setting.name != "slots" else str
    choices = "INTEGER|auto" if setting.name == "slots" else choices
    name = f"{section}__{setting.name}"
    panel = "Privacy" if setting.name in _PRIVACY else _PANELS[section]
    look = {"help": help_, "metavar": choices, "hidden": setting.name not in common, "rich_help_panel": panel}
    return _parameter(name, shown, flag, **look)


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
            raise PlanError("--clip-end: also give the clip bound of the first round, as a number, with --clip") from None
    slots = single.get("plan", {}).get("slots")
    if slots not in (None, "auto"):
        single["plan"]["slots"] = _whole_number("--slots", slots)
    for layer in [*layers, single]:
        if "network" in layer.get("model", {}) and layer is not configured:
            consent.remember(str(layer["model"]["network"]))
    consent.require(configured.get("model", {}).get("network"), chosen["config"])
    for layer in [*layers, single]:
        _make_file_absolute(layer)
    return [*layers, single]


def _make_file_absolute(layer: Settings) -> None:
    """A run or deployment finds its data files again from any directory. A relative path starts at the current one."""
    for name in ("file", "columns"):
        given = layer.get("data", {}).get(name)
        if isinstance(given, str) and given:  # anything else is refused when the layers are assembled
            layer["data"][name] = str(Path(given).absolute())


def _whole_number(flag: str, written: str) -> int:
    try:
        return int(written)
    except ValueError:
        raise PlanError(f"{flag}: {written!r} is not a whole number, and auto works only with a target ε") from None
