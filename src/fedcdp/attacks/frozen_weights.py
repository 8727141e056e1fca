"""Frozen weights: the server sends the same weights in every round, so every release shows the same gradients again.

In an honest training the gradient of a record shrinks as the network learns the record. At frozen weights it stays as large
as at the first round, and a reader averages its releases. Attacks on networks with a linear head read all rounds
(`sightings`). For other networks the observation is that of `releases`, with any attack.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedcdp.attacks.active import CHANGED_WEIGHTS, ActiveAttack, Stage
from fedcdp.attacks.head_attack import attack_head
from fedcdp.attacks.judging import told
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.observe import Leak
from fedcdp.attacks.reconstruct import Progress
from fedcdp.attacks.replay import Course
from fedcdp.attacks.sightings import sighted_throughout
from fedcdp.engine.runtime import stop_if_asked
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.training.rounds import Simulator
from fedcdp.training.rundir import State

_TESTED_RELEASES = 5  # of the presence test, which computes them one by one
FROZEN = "a training in which the server sends the same weights in every round"


@dataclass(frozen=True)
class FrozenCourse(Course):
    """A training whose weights never change."""

    @property
    def source(self) -> str:
        """See `Course`."""
        return FROZEN

    def states(self, simulator: Simulator, state: State) -> Iterator[tuple[State, Tensor]]:
        """See `Course`."""
        for _ in range(self.rounds):
            stop_if_asked()
            yield state, torch.from_numpy(choose_clients(simulator.data.draws, self.federation.clients, state.round))
            state = replace(state, round=state.round + 1)


class FrozenWeights(ActiveAttack):
    """The attack `frozen-weights`."""

    name: ClassVar[str] = "frozen-weights"
    leaks: ClassVar[tuple[Leak, ...]] = ("type0", "type1", "type2")
    unequal: ClassVar[bool] = False

    def why_not(self, stage: Stage) -> str | None:
        """It needs a linear head, and all rounds of its training."""
        scene, leak = stage.scene, stage.look.leak
        if scene.head is None:
            return "reads networks that train only their last dense layer; use releases with any attack on other networks"
        if scene.course is None:
            return "needs all rounds of a training: give the untrained model, and no round"
        if leak != "type2" and (stage.plan.compression or stage.plan.method == "dssgd"):
            return "needs unpruned updates; these are pruned"
        return None

    def run(self, stage: Stage, progress: Progress | None = None) -> Leaks:
        """See `ActiveAttack`."""
        self.require_fit(stage)
        scene, started = stage.scene, time.perf_counter()
        course, head = scene.course, scene.head
        assert course is not None
        assert head is not None
        frozen = FrozenCourse(course.network, course.federation, course.plan, course.device, course.loss)
        sightings = sighted_throughout(frozen, head, stage.look.leak, stage.victims, progress)
        captured = sightings.captured
        got = attack_head(sightings, head, scene.public, candidates=stage.criteria.candidates, seed=stage.seed)
        observer = stage.observer(captured, scene.visible())
        leaks = told(scene, self.name, captured, got.found, observer, time.perf_counter() - started, watched=False)
        leaks = got.figures(leaks, sightings)
        about: dict[str, Any] = {"changed_network": False, "assumption": CHANGED_WEIGHTS}
        if captured.noisy and stage.look.leak != "type2":
            rounds = leaks.about["releases_mean"]
            about |= stage.presence(releases=max(1, min(_TESTED_RELEASES, round(rounds))))
            if about.get("distance_between_worlds") is not None:  # the same gradient in all rounds
                distance = about["distance_between_worlds"] * math.sqrt(rounds) / float(captured.deviation.mean())
                about["auc_predicted_all_rounds"] = float(torch.special.ndtr(torch.tensor(distance / math.sqrt(2))))
        return replace(leaks, about=leaks.about | about)
