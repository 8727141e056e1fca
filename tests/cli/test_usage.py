"""The help of every command: short, complete under --help-all, no name cut, and examples that work."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from fedcdp.cli.program import app
from fedcdp.cli.usage import PlainCommand, PlainGroup, names_of

ROOT = Path(__file__).parents[2]
Cli = Callable[..., Any]


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group, by the words that call it."""
    yield words, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*words, name))


COMMANDS = dict(commands(typer.main.get_command(app)))
NAMES = [pytest.param(words, id=" ".join(words) or "fedcdp") for words in COMMANDS]


def test_every_command_has_this_help() -> None:
    assert {len(words) for words in COMMANDS} == {0, 1, 2}
    assert all(isinstance(each, PlainCommand | PlainGroup) for each in COMMANDS.values())


@pytest.mark.parametrize("words", NAMES)
def test_help_fits_on_a_screen(cli: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    outcome = cli(*words, "--help")
    assert (outcome.status, outcome.stderr) == (0, "")
    lines = outcome.stdout.splitlines()
    assert len(lines) <= 60
    assert all(len(line) <= 100 for line in lines)
    assert outcome.stdout == cli(*words, "-h").stdout


@pytest.mark.parametrize("columns", ["80", "100"])
@pytest.mark.parametrize("words", NAMES)
def test_all_options_are_shown_whole(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    outcome = cli(*words, "--help-all")
    assert (outcome.status, outcome.stderr) == (0, "")
    lines = outcome.stdout.splitlines()
    for each in COMMANDS[words].params:
        assert any(line.strip().startswith(names_of(each)) for line in lines), names_of(each)
    short = cli(*words, "--help").stdout
    for shown in (outcome.stdout, short):
        assert "…" not in shown
        assert "..." not in re.sub(r"\bRUN\.\.\.|\[(ARGS|TABLE)\]\.\.\.", "", shown)
        assert not re.search(r"-$", shown, re.MULTILINE), "a name is broken at a hyphen"
    whole = ("-h, --help", *map(names_of, COMMANDS[words].params))
    for line in short.splitlines():
        assert not line.startswith("  -") or line.strip().startswith(whole), line


def test_rare_options_are_left_to_help_all(cli: Cli) -> None:
    short, everything = cli("train", "--help").stdout, cli("train", "--help-all").stdout
    assert "--noise-generator" not in short
    assert "--noise-generator philox|chacha20" in everything
    assert re.search(r"^\d+ more options: \S+.* train --help-all$", short, re.MULTILINE)
    assert "more options" not in everything


def test_options_that_help_leaves_out_work(cli: Cli) -> None:
    outcome = cli("account", "--dataset", "cancer", "--quantile-noise", 5, "--json")
    assert outcome.status == 0, outcome.stderr


@pytest.mark.parametrize("words", NAMES)
def test_examples_are_commands_that_parse(words: tuple[str, ...]) -> None:
    examples = COMMANDS[words].epilog.splitlines()
    assert 2 <= len(examples) <= 4
    for example in examples:
        assert len(example) <= 78, example
        first, *arguments = shlex.split(example)
        assert first == "fedcdp"
        called, command = max((each for each in COMMANDS.items() if tuple(arguments[: len(each[0])]) == each[0]), key=len_of)
        assert called[: len(words)] == words
        with command.make_context(" ".join(called), arguments[len(called) :]) as context:  # raises for an unknown option
            assert not context.args


def len_of(found: tuple[tuple[str, ...], Any]) -> int:
    return len(found[0])


@pytest.mark.parametrize("words", NAMES)
def test_examples_end_the_help(cli: Cli, words: tuple[str, ...]) -> None:
    for option in ("--help", "--help-all"):
        lines = cli(*words, option).stdout.splitlines()
        examples = COMMANDS[words].epilog.splitlines()
        assert lines[-len(examples) - 1 :] == ["Examples:", *(f"  {each}" for each in examples)]


def test_arguments_have_help(cli: Cli) -> None:
    assert "RUN  Run directory." in cli("evaluate", "--help").stdout
    assert "DIR  Deployment directory." in cli("deploy", "init", "--help").stdout


def test_the_site_lists_every_option() -> None:
    spec = importlib.util.spec_from_file_location("commands", ROOT / "docs" / "site" / "commands.py")
    assert spec is not None
    assert spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    page = site.page()
    for words, command in COMMANDS.items():
        for each in command.params:
            if words and each.name != "help_all" and not hasattr(command, "commands"):
                assert f"`{names_of(each)}`" in page, names_of(each)


# Options by other names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["train", "--epsilon", 3, "--out", "new"], "No such option '--epsilon'. Did you mean '--target-epsilon'?"),
        (["calibrate", "--epsilon", 3], "No such option '--epsilon'. Did you mean '--target-epsilon'?"),
        (["calibrate", "--eps", 3], "No such option '--eps'. Did you mean '--target-epsilon'?"),
        (["attack", "--epsilon", 3], "--target-epsilon"),
        (["train", "--learning-rate", 3, "--out", "new"], "Did you mean '--lr'?"),
        (["account", "--sigma", 3], "Did you mean '--noise-multiplier'?"),
        (["train", "--bach-size", 3, "--out", "new"], "Did you mean '--batch-size'?"),
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
    ],
    ids=str,
)
def test_another_name_gets_a_suggestion(cli: Cli, arguments: list[object], suggestion: str) -> None:
    outcome = cli(*arguments)
    assert outcome.status == 2
    assert outcome.stderr.count("\n") == 1
    assert suggestion in outcome.stderr
    assert outcome.stderr.count("Did you mean") <= 1
