"""The commands of the program by name, each imported when it is used: `fedcdp --help` imports none of them, and no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer

from fedcdp import _startup
from fedcdp.cli import usage


class LateCommand:
    """A command, or a group of commands, that is not imported yet."""

    def __init__(self, module: str, help_: str, *examples: str) -> None:
        """`help_` is the first sentence of the command's own help. A group names its own examples."""
        self.module, self.help, self.examples = module, help_, examples

    def imported(self, name: str) -> Any:
        """The command of this name, as typer makes it."""
        module = import_module(f"fedcdp.cli.{self.module}")
        _startup.over()
        if not self.examples:
            return typer.main.get_command(module.app)
        alone = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings=usage.SETTINGS)
        usage.add_to(alone, *self.examples)(getattr(module, name))
        return typer.main.get_command(alone)


class LateCommands(Mapping[str, Any]):
    """Commands by name, imported when they are looked up."""

    def __init__(self) -> None:
        self._imported: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._imported:
            self._imported[name] = COMMANDS[name].imported(name)
        return self._imported[name]

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class LateGroup(usage.PlainGroup):
    """The program's group. Its help does not import the commands."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands = LateCommands()  # type: ignore[assignment]

    def short_helps(self) -> list[tuple[str, str]]:
        """See `PlainGroup`."""
        return [(name, command.help) for name, command in COMMANDS.items()]


COMMANDS = {
    "demo": LateCommand(
        "report",
        "Train, attack and account four methods, in about two minutes.",
        "fedcdp demo",
        "fedcdp demo --out runs/another-demo",
    ),
    "train": LateCommand(
        "train",
        "Train a model over many clients.",
        "fedcdp train --preset cancer-eps8 --out run",
        "fedcdp train --data patients.csv --client-column hospital --out run",
        "fedcdp train --resume --out run",
    ),
    "evaluate": LateCommand(
        "train",
        "Compute the metrics of a run's model on a data split.",
        "fedcdp evaluate run",
        "fedcdp evaluate run --split train --per-client",
    ),
    "export": LateCommand(
        "train",
        "Write a run's model or its metrics in another format.",
        "fedcdp export run --to model.safetensors",
        "fedcdp export run --format onnx --to model.onnx",
        "fedcdp export run --format csv --to metrics.csv",
    ),
    "account": LateCommand(
        "privacy",
        "Compute ε against every adversary, for a plan or for a run.",
        "fedcdp account --preset mnist",
        "fedcdp account --dataset mnist --rounds 20 --noise-multiplier 4",
        "fedcdp account --run run --json",
    ),
    "calibrate": LateCommand(
        "privacy",
        "Find the noise multiplier for a target ε.",
        "fedcdp calibrate --target-epsilon 4",
        "fedcdp calibrate --target-epsilon 2 --preset mnist --adversary example",
        "fedcdp calibrate --target-epsilon 8 --data records.csv --clients 20",
    ),
    "audit": LateCommand(
        "privacy",
        "Measure a lower bound on ε by attacking the mechanism.",
        "fedcdp audit",
        "fedcdp audit --preset cancer --adversary example --trials 20000",
        "fedcdp audit --preset demo --one-run --canaries 500",
    ),
    "attack": LateCommand(
        "attack",
        "Reconstruct or detect real examples from gradients or updates.",
        "fedcdp attack --method nonprivate --victims 10",
        "fedcdp attack --dataset cancer --leak type0",
        "fedcdp attack --run run --leak type1 --victims 10",
        "fedcdp attack --run run --attack lira --shadows 64 --json",
    ),
    "report": LateCommand(
        "report",
        "Write an HTML page about runs and the attacks on them.",
        "fedcdp report run",
        "fedcdp report run-one run-two --out compared.html",
    ),
    "reproduce": LateCommand(
        "reproduce",
        "Reproduce the paper's tables and figures.",
        "fedcdp reproduce --list",
        "fedcdp reproduce accuracy --cells 'cancer/*'",
        "fedcdp reproduce --table-only",
    ),
    "bench": LateCommand(
        "bench",
        "Measure the speed of client steps on this machine.",
        "fedcdp bench --quick",
        "fedcdp bench --section engines --device cuda --out speed.json",
    ),
    "check": LateCommand(
        "check", "Check somebody else's training: ε for each adversary, the attacks that apply, a one-page report."
    ),
    "deploy": LateCommand("operate", "Run a plan on Flower, across processes and machines."),
}
