"""Command-line options are the settings themselves: the same names, and layers in which the later wins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from fedcdp.cli.options import takes_settings
from fedcdp.cli.program import app
from fedcdp.config.experiment import SECTIONS, Experiment, assemble
from fedcdp.config.presets import Settings
from fedcdp.errors import PlanError

Parse = Callable[..., Experiment]


@pytest.fixture
def layers() -> Callable[..., list[Settings]]:
    """What a command receives of its arguments."""
    received: list[list[Settings]] = []
    small = typer.Typer(pretty_exceptions_enable=False)

    @small.command()
    @takes_settings
    def command(*, given: list[Settings]) -> None:
        received.append(given)

    def parse(*arguments: object) -> list[Settings]:
        result = CliRunner().invoke(small, [str(argument) for argument in arguments])
        if isinstance(result.exception, Exception):
            raise result.exception
        assert result.exit_code == 0, result.output
        return received[-1]

    return parse


@pytest.fixture
def experiment(layers: Callable[..., list[Settings]]) -> Parse:
    return lambda *arguments: assemble(*layers(*arguments))


def parameters() -> dict[str, click.Parameter]:
    train = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    return {flag: parameter for parameter in train.params for flag in parameter.opts}


def test_every_setting_is_an_option_of_train() -> None:
    short = {"learning_rate": "--lr", "server_learning_rate": "--server-lr", "file": "--data", "network": "--model"}
    offered = parameters()
    for kind in SECTIONS.values():
        for setting in fields(kind):
            flag = short.get(setting.name, "--" + setting.name.replace("_", "-"))
            assert flag in offered, flag
            assert offered[flag].help, flag  # type: ignore[attr-defined]


def test_what_is_not_given_is_in_no_layer(layers: Callable[..., list[Settings]]) -> None:
    assert layers() == [{}]
    assert layers("--rounds", 3) == [{"plan": {"rounds": 3}}]


def test_options_arrive_with_their_types(layers: Callable[..., list[Settings]]) -> None:
    given = layers("--rounds", 3, "--noise-multiplier", 2, "--standardise", "--no-noise-follows-clip", "--lr", "0.1")
    assert given == [
        {
            "data": {"standardise": True},
            "plan": {"rounds": 3, "noise_multiplier": 2.0, "noise_follows_clip": False, "learning_rate": "0.1"},
        }
    ]


def test_preset_then_file_then_set_then_single_options(tmp_path: Path, experiment: Parse) -> None:
    config = tmp_path / "my.toml"
    config.write_text("[plan]\nrounds = 20\nlocal_steps = 20\nbatch_size = 20\n")
    preset = ["--preset", "mnist"]
    file = ["--config", config]
    sets = ["--set", "local_steps=30", "--set", "batch_size=30"]
    single = ["--batch-size", 40]

    def lengths(*arguments: object) -> tuple[int, int, int, int]:
        plan = experiment(*arguments).plan
        return plan.per_round, plan.rounds, plan.local_steps, plan.batch_size

    assert lengths(*preset) == (100, 100, 100, 5)
    assert lengths(*preset, *file) == (100, 20, 20, 20)
    assert lengths(*preset, *file, *sets) == (100, 20, 30, 30)
    assert lengths(*preset, *file, *sets, *single) == (100, 20, 30, 40)
    assert lengths(*single, *sets, *file, *preset) == (100, 20, 30, 40)


@pytest.mark.parametrize("source", ["option", "assignment", "configuration"])
def test_a_relative_data_file_starts_at_the_current_directory(
    tmp_path: Path, experiment: Parse, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/my.toml").write_text('[data]\nfile = "own.npz"\n')
    monkeypatch.chdir(tmp_path)
    options = {
        "option": ["--data", "own.npz"],
        "assignment": ["--set", "file=own.npz"],
        "configuration": ["--config", "elsewhere/my.toml"],
    }
    assert experiment(*options[source]).data.file == str(tmp_path / "own.npz")


def test_a_data_file_that_is_no_text_is_refused(tmp_path: Path, experiment: Parse) -> None:
    (tmp_path / "my.toml").write_text("[data]\nfile = 3\n")
    with pytest.raises(PlanError, match="file: 3 is not a string"):
        experiment("--config", tmp_path / "my.toml")


def test_of_two_assignments_the_later_wins(experiment: Parse) -> None:
    assert experiment("--set", "rounds=3", "--set", "rounds=4").plan.rounds == 4


def test_clip_end_makes_a_line_from_clip(experiment: Parse) -> None:
    plan = experiment("--clip", 6, "--clip-end", 2, "--rounds", 3).plan
    assert [plan.clip_at(round_) for round_ in range(3)] == [6, 4, 2]


@pytest.mark.parametrize("arguments", [["--clip-end", 2], ["--clip", "linear(6, 2)", "--clip-end", 2]])
def test_clip_end_needs_a_bound_to_start_from(experiment: Parse, arguments: list[object]) -> None:
    with pytest.raises(PlanError, match="clip"):
        experiment(*arguments)


def _help() -> str:
    shown = CliRunner().invoke(app, ["train", "--help-all"])
    assert shown.exit_code == 0
    return " ".join(shown.output.split())


def test_the_help_shows_every_word_of_every_option() -> None:
    shown = _help()
    for flag, parameter in parameters().items():
        help_: Any = getattr(parameter, "help", None)
        if help_ and flag != "--help":
            assert " ".join(help_.split()) in shown, flag


@pytest.mark.parametrize("name", ["nonprivate", "fed-sdp", "fed-cdp-decay", "dssgd", "flat", "cohort", "fedaveraging"])
def test_the_help_names_what_may_be_chosen(name: str) -> None:
    assert name in _help()
