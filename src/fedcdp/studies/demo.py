"""The demo: four methods train on real digits, and three adversaries attack each of them. All results go to one directory.

Each method has one plan, which two networks use:

- Training uses a linear layer on fixed features, `oriented-gradients`. Accuracy and the ledger are those of this run.
- The attacks use `small`, a network that learns its own features, at the beginning of the first round.

Plans clip the whole gradient at once, so ε does not depend on the network: the ledger's ε holds for both.

Every stage stores its result and is skipped if the result exists, so a stopped or killed demo resumes. Runs are ordinary run
directories, with the attacks in their `attacks/`.
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
from fedcdp.report.facts import mechanism_of
from fedcdp.report.subjects import Subject, subjects_of
from fedcdp.training.prepared import deal_out, load_splits, network_of, stored
from fedcdp.training.progress import Progress as Rounds
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.trainer import train_experiment

# How the methods differ from the preset `demo`. The private ones have ε = 3 for the unit that they protect: Fed-CDP a record
# against the server, Fed-SDP a client against anyone who sees the model. Fed-SDP needs many clients to hide one of them, so
# it deals the same digits to 100 clients instead of 10. `benchmarks/demo_settings.py` is the search behind these settings.
METHODS: dict[str, Settings] = {
    "nonprivate": {"plan": {"learning_rate": 4.0, "ema": 0.0}},
    "fed-sdp": {
        "data": {"clients": 100, "records": 40},
        "plan": {
            "per_round": 100,
            "rounds": 10,
            "local_steps": 40,
            "clip": 8.0,
            "noise_multiplier": 4.3977,
            "learning_rate": 10.0,
            "ema": 0.0,
        },
    },
    "fed-cdp": {},
    "fed-cdp-decay": {"plan": {"clip": "linear(0.375, 0.125)"}},
}
_ATTACKED_NETWORK = "small"
# The optimiser moves five times an iteration, a quarter of the paper's number: the page shows the search in small steps.
_WATCHABLE = LBFGS(inner=5)


@dataclass(frozen=True)
class Attack:
    """One adversary: what it reads, which attack it runs, for how long, and on how many victims."""

    leak: Leak
    name: str
    victims: int
    iterations: int
    noised_only: bool = False
    """Whether to run it only on noised releases. Without noise it cannot reconstruct more than the other attacks."""

    @property
    def recipe(self) -> Recipe:
        """The attack's recipe."""
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
    """How the demo reports progress."""

    training: Callable[[Experiment, int], AbstractContextManager[Rounds | None]]
    attacking: Callable[[str], AbstractContextManager[Steps | None]]


@dataclass(frozen=True)
class Demo:
    """The demo in a directory. Tests make it smaller with `changes`."""

    out: Path
    changes: Settings = field(default_factory=dict)
    attacks: tuple[Attack, ...] = ATTACKS

    def run(self, show: Show) -> list[Subject]:
        """Run the stages that are missing. Return the rows of the table, which also go to `demo.json`."""
        self.check()
        if not self._marker.is_file():
            self._write(finished=False)
        with one_thread():  # the networks are too small for two threads: they would only wait for each other
            self._stages(show)
        subjects = subjects_of(*gather([self.out / method for method in METHODS]))
        self._write(finished=True, table=[row_of(subject) for subject in subjects])
        return subjects

    def _stages(self, show: Show) -> None:
        splits = functools.cache(lambda: load_splits(self.experiment("nonprivate"), quiet=True))  # loaded only if needed
        for method in METHODS:
            self._train(self.experiment(method), splits, show)
            self._attack(self.attacked(method), splits, show)

    def experiment(self, method: str) -> Experiment:
        """What is trained under a method."""
        # The engine is named, so the run does not measure which one is fastest.
        fixed: Settings = {"plan": {"method": method}, "run": {"engine": "batched", "evaluate_every": 2}}
        return assemble(preset("demo"), fixed, METHODS[method], self.changes)

    def attacked(self, method: str) -> Experiment:
        """What is attacked: the method's plan on a network that learns its own features.

        All methods are attacked at the clients of the preset, so the attacked examples are the same. For Fed-SDP the number
        of clients makes no difference: the adversaries read what a client computes before the server adds the noise.
        """
        usual = preset("demo")
        same: Settings = {
            "data": usual["data"],
            "model": {"network": _ATTACKED_NETWORK},
            "plan": {"method": method, "per_round": usual["plan"]["per_round"]},
        }
        return assemble(usual, METHODS[method], same, self.changes)

    # Stages ----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a directory that holds something other than a demo, or a demo with other settings."""
        try:
            if self.out.exists() and not self.out.is_dir():
                raise RunError(f"--out: {self.out} is a file; choose another name for the directory")
            taken = self.out.is_dir() and any(not each.name.endswith(PARTIAL) for each in self.out.iterdir())
        except OSError as error:
            raise RunError(f"--out: {self.out} cannot be read: {error.strerror}") from error
        if taken and not self._marker.is_file():
            raise RunError(f"--out: {self.out} holds something other than a demo; choose another directory")
        for method in METHODS:
            directory, experiment = RunDirectory(self.out / method), self.experiment(method)
            if directory.config.is_file():
                kept = stored(directory.path)
                if (kept.data, kept.model, kept.plan) != (experiment.data, experiment.model, experiment.plan):
                    raise RunError(f"--out: {self.out} holds a demo with other settings; choose another directory")

    @property
    def finished(self) -> bool:
        """Whether the directory holds a finished demo."""
        try:
            return bool(json.loads(self._marker.read_text(encoding="utf-8")).get("finished"))
        except (OSError, ValueError, AttributeError):
            return False

    @property
    def _marker(self) -> Path:
        return self.out / "demo.json"

    def _write(self, **content: Any) -> None:
        written = {"command": "fedcdp demo", "version": __version__} | content
        try:
            write_atomically(self._marker, (json.dumps(written, indent=1, ensure_ascii=False) + "\n").encode())
        except OSError as error:
            raise RunError(f"--out: {self.out} cannot be written: {error.strerror}") from error

    def _train(self, experiment: Experiment, splits: Callable[[], Splits], show: Show) -> None:
        directory = RunDirectory(self.out / experiment.plan.method)
        begun = directory.config.is_file()
        if begun and directory.model.exists():
            return
        state = directory.load_state() if begun else None
        with show.training(experiment, state.round if state else 0) as progress:
            train_experiment(experiment, directory.path, resume=begun, splits=splits(), progress=progress)

    def _attack(self, experiment: Experiment, splits: Callable[[], Splits], show: Show) -> None:
        """Run every attack on the untrained network, at the beginning of the first round."""
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
            if each.noised_only and not seen.noisy:
                continue
            if before is not None and before.attack == each.name and _same(before.captured, seen):
                found = replace(before, captured=seen)  # the same attack on the same values
            else:
                with show.attacking(f"{method}, {each.leak}") as progress:
                    got = attack(
                        experiment.plan, leak=each.leak, attack=each.recipe, victims=each.victims, model=model,
                        federation=federation, progress=progress,
                    )  # fmt: skip
                if not isinstance(got, Leaks):
                    raise DefectError(f"the attack {each.name} did not return reconstructions")
                found = replace(got, attack=each.name)
            found.save(
                place, dataset=experiment.data.dataset, network=experiment.model.network, plan=mechanism_of(experiment.plan)
            )
            before = found


def _same(one: Captured, other: Captured) -> bool:
    """Whether two adversaries see the same values, bit for bit, from the same examples."""
    return (
        one.seen.keys() == other.seen.keys()
        and all(torch.equal(one.seen[name], other.seen[name]) for name in one.seen)
        and torch.equal(one.tensor, other.tensor)
    )


def row_of(subject: Subject) -> dict[str, Any]:
    """A row of the table, for programs."""
    run = subject.run
    row: dict[str, Any] = {"method": subject.method, "accuracy": None if run is None else run.accuracy}
    row |= {"network": subject.network, "attacked_network": ", ".join(subject.attacked_networks)}
    row |= {"clients": None if run is None else run.clients}
    for cell in subject.cells:
        row[cell.leak] = {"leaked": cell.verdict.got, "of": cell.verdict.of, "epsilon": _for_json(cell.epsilon)}
    model = {"epsilon": _for_json(subject.model_epsilon), "epsilon_client": _for_json(subject.client_epsilon)}
    return row | {"model": model}


def _for_json(epsilon: float | None) -> float | str | None:
    return "inf" if epsilon == math.inf else epsilon
