"""The demonstration: real digits trained by four methods, each attacked by three readers, into one directory.

Every stage leaves its result on the disk and is passed over when it is there, so that a demo that was stopped or killed
goes on where it was. Runs are ordinary run directories, attacks lie in their `attacks/`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fedcdp._version import __version__
from fedcdp.attacks import RECIPES, Leaks, attack
from fedcdp.attacks.observe import Captured, Leak, Look
from fedcdp.attacks.optimisers import LBFGS
from fedcdp.attacks.recipe import Recipe
from fedcdp.attacks.reconstruct import Progress as Steps
from fedcdp.attacks.scene import simulated
from fedcdp.config.experiment import Experiment, assemble
from fedcdp.config.presets import Settings, preset
from fedcdp.data.dataset import Splits
from fedcdp.engine.runtime import one_thread
from fedcdp.errors import DefectError, RunError
from fedcdp.files.disk import PARTIAL, write_atomically
from fedcdp.report.api import gather
from fedcdp.report.subjects import Subject, subjects_of
from fedcdp.training.prepared import deal_out, load_splits, network_of, stored
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.simulate import Progress as Rounds
from fedcdp.training.simulate import train_experiment

# What differs from the preset. Fed-SDP adds its noise once a round to the sum of whole updates, so that it needs less of it
# to learn; with so few clients no noise gives a whole client a small ε and lets the model learn, and the table says so.
_METHODS: dict[str, Settings] = {
    "nonprivate": {},
    "fed-sdp": {"plan": {"noise_multiplier": 0.2}},
    "fed-cdp": {},
    "fed-cdp-decay": {"plan": {"clip": "linear(1.5, 0.5)"}},
}
# An iteration is five moves of the optimiser, a quarter of the paper's, so that there is something to watch. A reader of
# single gradients knows how the method clips; of an update, how many examples are behind it.
_WATCHABLE = LBFGS(inner=5)


@dataclass(frozen=True)
class Attack:
    """One reader: who, by which preset, how long, and on how many victims."""

    leak: Leak
    name: str
    victims: int
    iterations: int
    noised_only: bool = False
    """Whether it is for what carries noise; elsewhere it could not get more than the others."""

    @property
    def recipe(self) -> Recipe:
        """How it looks for examples."""
        return RECIPES[self.name].but(optimiser=_WATCHABLE, iterations=self.iterations, restarts=1)


ATTACKS = (
    Attack("type2", "clip-aware", victims=5, iterations=60),
    Attack("type1", "batch", victims=2, iterations=120),
    Attack("type0", "batch", victims=2, iterations=120),
    Attack("type2", "averaging", victims=5, iterations=60, noised_only=True),
    Attack("type1", "averaging", victims=2, iterations=60, noised_only=True),
    Attack("type0", "averaging", victims=2, iterations=60, noised_only=True),
)


@dataclass(frozen=True)
class Show:
    """What the demo tells while it works; by default nothing."""

    training: Callable[[Experiment, int], AbstractContextManager[Rounds | None]]
    attacking: Callable[[str], AbstractContextManager[Steps | None]]


@dataclass(frozen=True)
class Demo:
    """The demonstration in a directory; `changes` make it smaller, for tests."""

    out: Path
    changes: Settings = field(default_factory=dict)
    attacks: tuple[Attack, ...] = ATTACKS

    def run(self, show: Show) -> list[Subject]:
        """All stages that are not there yet, then the table of them all; also written to `demo.json`."""
        self._begin()
        with one_thread():  # the network is too small to be shared: two threads would only wait for each other
            self._stages(show)
        subjects = subjects_of(*gather([self.out / method for method in _METHODS]))
        self._write(finished=True, table=[row_of(subject) for subject in subjects])
        return subjects

    def _stages(self, show: Show) -> None:
        splits = functools.cache(
            lambda: load_splits(self.experiment("nonprivate"), quiet=True)
        )  # only if there is work to do
        for method in _METHODS:
            experiment = self.experiment(method)
            self._train(experiment, splits, show)
            self._attack(experiment, splits, show)

    def experiment(self, method: str) -> Experiment:
        """What is trained under a method."""
        # The engine is named, so that no time goes into measuring which is fastest.
        fixed: Settings = {"plan": {"method": method}, "run": {"engine": "batched", "evaluate_every": 2}}
        return assemble(preset("demo"), fixed, _METHODS[method], self.changes)

    # Stages ----------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Take the directory, unless it holds anything but a demo of ours."""
        try:
            if self.out.exists() and not self.out.is_dir():
                raise RunError(f"--out: {self.out} is a file; choose another name for the directory")
            taken = self.out.is_dir() and any(not each.name.endswith(PARTIAL) for each in self.out.iterdir())
            if taken and not self._marker.is_file():
                raise RunError(f"--out: {self.out} holds something else than a demo; choose another directory")
            if not taken:
                self._write(finished=False)
        except OSError as error:
            raise RunError(f"--out: {self.out} cannot be written: {error.strerror}") from error

    @property
    def finished(self) -> bool:
        """Whether the directory holds a whole demo."""
        try:
            return bool(json.loads(self._marker.read_text(encoding="utf-8")).get("finished"))
        except (OSError, ValueError, AttributeError):
            return False

    @property
    def _marker(self) -> Path:
        return self.out / "demo.json"

    def _write(self, **content: Any) -> None:
        told = {"command": "fedcdp demo", "version": __version__} | content
        write_atomically(self._marker, (json.dumps(told, indent=1, ensure_ascii=False) + "\n").encode())

    def _train(self, experiment: Experiment, splits: Callable[[], Splits], show: Show) -> None:
        directory = RunDirectory(self.out / experiment.plan.method)
        begun = directory.config.is_file()
        if begun:
            kept = stored(directory.path)
            if (kept.data, kept.model, kept.plan) != (experiment.data, experiment.model, experiment.plan):
                raise RunError(f"--out: {self.out} holds a demo of other settings; choose another directory")
            if directory.model.exists():
                return
        state = directory.load_state() if begun else None
        with show.training(experiment, state.round if state else 0) as progress:
            train_experiment(experiment, directory.path, resume=begun, splits=splits(), progress=progress)

    def _attack(self, experiment: Experiment, splits: Callable[[], Splits], show: Show) -> None:
        """Every reader, at the beginning of the first round: of the examples and clients that this very run trains on."""
        method = experiment.plan.method
        before: Leaks | None = None
        for each in self.attacks:
            place = self.out / method / "attacks" / f"{each.leak}-{each.name}"
            if (place / "summary.json").is_file():
                continue
            model, federation = network_of(experiment, splits()), deal_out(experiment, splits())
            scene = simulated(
                experiment.plan, model, federation, each.leak, None, 0, 1, torch.device("cpu"), F.cross_entropy, None
            )
            seen = scene.captured(Look(each.leak), each.victims)
            if each.noised_only and not seen.deviation:
                continue
            if before is not None and before.attack == each.name and _same(before.captured, seen):
                found = replace(before, captured=seen)  # the same attack on the same numbers
            else:
                with show.attacking(f"{method}, {each.leak}") as progress:
                    got = attack(
                        experiment.plan, leak=each.leak, attack=each.recipe, victims=each.victims, model=model,
                        federation=federation, progress=progress,
                    )  # fmt: skip
                if not isinstance(got, Leaks):
                    raise DefectError(f"the attack {each.name} did not reconstruct anything")
                found = replace(got, attack=each.name)
            found.save(place, dataset=experiment.data.dataset, network=experiment.model.network)
            before = found


def _same(one: Captured, other: Captured) -> bool:
    """Whether two readers see the same numbers, to the bit, of the same examples."""
    return (
        one.seen.keys() == other.seen.keys()
        and all(torch.equal(one.seen[name], other.seen[name]) for name in one.seen)
        and torch.equal(one.inputs, other.inputs)
    )


def row_of(subject: Subject) -> dict[str, Any]:
    """A line of the table, for programs."""
    row: dict[str, Any] = {"method": subject.method, "accuracy": None if subject.run is None else subject.run.accuracy}
    for cell in subject.cells:
        row[cell.leak] = {"leaked": cell.verdict.got, "of": cell.verdict.of, "epsilon": _for_json(cell.epsilon)}
    return row | {"model": {"epsilon": _for_json(subject.model_epsilon)}}


def _for_json(epsilon: float | None) -> float | str | None:
    return "inf" if epsilon == math.inf else epsilon
