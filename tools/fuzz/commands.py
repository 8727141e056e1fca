"""Targets: the command line, single settings, and the tables of `reproduce`."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import typer

from fedcdp.cli import program
from fedcdp.config.experiment import assemble, read_assignment
from fedcdp.errors import StoppedError
from fedcdp.studies.reproduce.catalogue import Place, Table, read
from fedcdp.studies.reproduce.layouts import sections
from fedcdp.studies.reproduce.markdown import page
from fedcdp.studies.reproduce.runner import TableResults
from tools.fuzz.mutations import HOSTILE_NUMBERS, HOSTILE_TEXTS, as_json, as_toml, mutate_bytes, mutate_value
from tools.fuzz.runs import SMALL, finished_run

Attempt = Callable[[Random, Path], None]
_WORDS = (
    "nonprivate", "fed-sdp", "fed-cdp", "fed-cdp-decay", "dssgd", "mnist5k", "cancer", "iid", "shards", "dirichlet",
    "exponential", "dirichlet-sizes", "dirichlet-classes", "natural",
    "full", "poisson", "fixed", "partition", "auto", "cpu", "cuda", "layer", "flat", "example", "batch", "cohort",
    "server", "client", "record", "unique", "model", "update", "type0", "type1", "type2", "tight", "rdp", "paper",
    "relu", "mlp", "cnn", "demo", "linear(6, 2)", "quantile(0.5, 4)", "csv", "onnx", "test", "train", "accuracy",
    "nosuch", "3", "0.5", "1e-5", "100",
)  # fmt: skip


_NEEDED = {
    "train": {"--out": "outs/run"}, "audit": {"--trials": "3"}, "calibrate": {"--target-epsilon": "3"},
    "export": {"--to": "outs/model"},
}  # fmt: skip


def assignment(_place: Path) -> Attempt:
    """`--set key=value`."""
    names = [
        f"{section}.{name}"
        for section, kind in (("data", "clients"), ("plan", "clip"), ("run", "chunk"))
        for name in (kind,)
    ]
    names += ["rounds", "clip", "delta", "seed", "network", "file", "device", "learning_rate", "noise_multiplier", "slots"]
    names += ["server_learning_rate", "server_optimizer", "server_epsilon", "proximal"]

    def attempt(case: Random, _where: Path) -> None:
        name = case.choice((*names, *HOSTILE_TEXTS[:20]))
        value = case.choice(
            (*HOSTILE_TEXTS, *map(_digits, HOSTILE_NUMBERS), *_WORDS, "[" * 2000, "{a=" * 500, "1\nvalue=2", '"""', "1#")
        )
        assemble(SMALL, read_assignment(f"{name}{case.choice(('=', '=', '=', ' = ', ''))}{value}")).to_toml()

    return attempt


def _digits(number: Any) -> str:
    return hex(number) if isinstance(number, int) and number > 10**300 else str(number)


def command_line(place: Path) -> Attempt:
    """Every command with options of every kind of value; long computations stop where they would begin."""
    run = finished_run(place)
    root = typer.main.get_command(program.app)
    commands = list(_commands(root, []))
    outs = place / "outs"

    def attempt(case: Random, where: Path) -> None:
        words, command = case.choice(commands)
        given: list[str] = [*words]
        options = [each for each in command.params if getattr(each, "opts", None)]
        for each in case.sample(options, min(len(options), case.choice((0, 1, 1, 2, 3, 6)))):
            given += _given(case, each, run)
        given = [
            text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape") for text in map(_argument, given)
        ]
        if words[0] in ("train", "audit", "account", "calibrate", "attack") and "--dataset" not in given:
            given += ["--dataset", "cancer"]
        for name, value in _NEEDED.get(words[0], {}).items():
            if name not in given and case.random() < 0.9:
                given += [name, value]
        if words[0] in ("evaluate", "export") and case.random() < 0.7:
            given.append(str(run))
        shutil.rmtree(outs, ignore_errors=True)
        outs.mkdir()
        # Building the commands is slow, and gives the same result in every case.
        cached = mock.patch("typer.main.get_command", return_value=root)
        with _stopping(), cached, contextlib.chdir(where):
            called(*given)

    return attempt


def called(*arguments: str) -> None:
    """Run a command in this process: it must end with 0, 1 or 2, and print one line unless the status is 0."""
    from io import StringIO

    out, err = StringIO(), StringIO()
    with mock.patch.object(sys, "argv", ["fedcdp", *arguments]):
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                program.main()
        except SystemExit as ended:
            status = ended.code or 0
    print(out.getvalue(), err.getvalue())  # to be checked for control characters
    if status not in (0, 1, 2):
        raise AssertionError(f"{arguments}: ended with {status}")
    told = [line for line in err.getvalue().splitlines() if line.startswith("fedcdp: ")]
    if status and len(told) != 1 and not out.getvalue().lstrip().startswith("Usage"):
        raise AssertionError(f"{arguments}: ended with {status} and said {err.getvalue()[-300:]!r}")


def _commands(command: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
    inner = getattr(command, "commands", None)
    if not inner:
        yield words, command
        return
    for name, each in inner.items():
        yield from _commands(each, [*words, name])


def _given(case: Random, option: Any, run: Path) -> list[str]:
    if option.param_type_name == "argument":
        return [
            case.choice(
                (str(run), "nosuch", *HOSTILE_TEXTS[4:7], *HOSTILE_TEXTS[12:15], "accuracy", "/dev/zero", "/dev/null", ".")
            )
        ]
    flag = case.choice(option.opts)
    if option.is_flag:
        return [flag]
    if flag == "--config":
        return [
            flag,
            case.choice(("/dev/zero", "/dev/null", ".", str(run / "config.toml"), str(run / "model.safetensors"), "nosuch")),
        ]
    if flag in ("--run", "--data", "--data-dir"):
        return [
            flag,
            case.choice(
                (str(run), "/dev/zero", "nosuch.csv", "x.npz", ".", str(run / "metrics.jsonl"), *HOSTILE_TEXTS[4:7])
            ),
        ]
    if flag in ("--out", "--to", "--plot"):
        return [flag, case.choice(("outs/x", "outs/x.png", "outs", str(run), "/dev/null/x", "outs/" + "n" * 300))]
    numbers = map(_digits, HOSTILE_NUMBERS)
    return [flag, case.choice((*HOSTILE_TEXTS, *numbers, *_WORDS, *_WORDS, "1", "2", "10"))]


def _argument(text: str) -> str:
    """The text as a system can pass it: no NUL, and limited in length."""
    return text.replace("\0", "").replace("\ud800", "\udcff")[:50_000]


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    """Stop where minutes of computing would begin, as a user might."""

    def stop(*_arguments: Any, **_settings: Any) -> Any:
        raise StoppedError("stopped where it would compute")

    with contextlib.ExitStack() as patched:
        for place in (
            "fedcdp.training.trainer.train",
            "fedcdp.attacks.attack",
            "fedcdp.audit.audit",
            "fedcdp.checks.function_check.FunctionCheck.run",
            "fedcdp.deploy.site.local_deployment.Deployment.up",
            "fedcdp.deploy.site.keeper.become",
            "fedcdp.deploy.site.warm_node._run",
            "fedcdp.cli.bench._measure",
            "fedcdp.studies.reproduce.runner.Campaign.run",
            "fedcdp.cli.reproduce._write",
            "fedcdp.cli.reproduce._write_all",
            "fedcdp.data.fetch.open_https",
            "fedcdp.deploy.protocol.wire.weigh_benchmark",
        ):
            patched.enter_context(mock.patch(place, stop))
        yield


def reproduce_table(_place: Path) -> Attempt:
    """A user's own table: its cells, its settings, its rows."""
    known = files("fedcdp.studies.reproduce") / "experiments"
    texts = [each.read_bytes() for each in known.iterdir() if each.name.endswith(".toml")]
    trees = [tomllib.loads(text.decode()) for text in texts]
    small: dict[str, Any] = {
        "title": "t", "layout": "accuracy", "every": {"preset": "demo", "plan": {"rounds": 2}},
        "axes": {
            "data": {"mnist": {"data": {"dataset": "mnist5k"}}}, "method": {"a": {}, "b": {"plan": {"method": "fed-sdp"}}},
        },
        "variants": {"v": {"rows": ["*"]}}, "printed": {"*": [0.5, 0.6]},
    }  # fmt: skip

    def attempt(case: Random, place: Path) -> None:
        path = place / "own.toml"
        if case.random() < 0.3:
            path.write_bytes(mutate_bytes(case, case.choice(texts)))
        else:
            path.write_bytes(as_toml_deep(mutate_value(case, small if case.random() < 0.7 else case.choice(trees))))
        table = read("own", path)
        used(table, {}, place, case)

    return attempt


def as_toml_deep(value: Any) -> bytes:
    """Top-level tables as inline ones below the first level."""
    return as_toml(value)


def used(table: Table, cells: dict[str, Any], place: Path, case: Random) -> None:
    """Everything a command does with a table, except measuring."""
    chosen = list(table.cells.values())
    for cell in chosen[:20]:
        cell.experiment()
        where = Place(place / "out").scratch(table.name, cell)
        if not where.resolve().is_relative_to((place / "out" / "running").resolve()) or len(where.name.encode()) > 255:
            raise AssertionError(f"a cell's folder is {where}")
        if where.parent.resolve() == where.resolve() or where.name in ("", ".", ".."):
            raise AssertionError(f"a cell's folder is {where}")
    if case.random() < 0.5:
        made = sections(table, cells)
        page(table, cells, made, [])


def reproduce_results(place: Path) -> Attempt:
    """The result file of a table."""
    table = read("epsilon", files("fedcdp.studies.reproduce") / "experiments" / "epsilon.toml")
    stored = Path(__file__).parents[2] / "results" / "reproduction" / "epsilon.json"
    sound = stored.read_bytes()
    tree = json.loads(sound)
    out = place / "results"
    out.mkdir(exist_ok=True)

    def attempt(case: Random, _where: Path) -> None:
        hostile = mutate_bytes(case, sound) if case.random() < 0.4 else as_json(mutate_value(case, tree))
        (out / "epsilon.json").write_bytes(hostile)
        results = TableResults(table, out)
        results.missing(table.cells.values())
        results.write(sections(table, results.cells))

    return attempt


TARGETS: dict[str, Callable[[Path], Attempt]] = {
    "--set key=value": assignment,
    "command line": command_line,
    "reproduce table": reproduce_table,
    "reproduce results": reproduce_results,
}
