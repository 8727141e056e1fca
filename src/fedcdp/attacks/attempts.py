"""One attack by name on a scene: what every attack has in common, from the capture to the score."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedcdp.attacks.capture import Look
from fedcdp.attacks.captured import Captured
from fedcdp.attacks.closed_form import invert
from fedcdp.attacks.forward import check_reproduces, prunes
from fedcdp.attacks.head_attack import HeadFound, attack_head
from fedcdp.attacks.layers import LayerLeaks, layer_by_layer
from fedcdp.attacks.leaks import Leaks, Observer, judged, unjudged
from fedcdp.attacks.linear_head import LinearHead
from fedcdp.attacks.metrics import Criteria
from fedcdp.attacks.presence import Presence, matched_filter
from fedcdp.attacks.recipe import ONE_TENSOR, RECIPES, Recipe
from fedcdp.attacks.reconstruct import Progress, Reconstruction, reconstruct
from fedcdp.attacks.scene import Scene
from fedcdp.attacks.sightings import Sightings, sighted_once, sighted_throughout
from fedcdp.errors import ModelError, PlanError

ONCE = "a single look"
FINE = 1000  # steps of progress in one of several parts


@dataclass(frozen=True)
class Attempts:
    """Attacks on the same victims of the same scene."""

    scene: Scene
    look: Look
    victims: int | None
    criteria: Criteria
    seed: int
    throughout: bool = True
    """Whether a linear head is read in all rounds of its training, where these can be read."""

    @cached_property
    def captured(self) -> Captured:
        """What the reader sees in one look."""
        seen = self.scene.captured(self.look, self.victims)
        if self.scene.scored:
            check_reproduces(seen)
        return seen

    @cached_property
    def visible(self) -> Tensor:
        """Which coordinates are compared."""
        return self.scene.visible()

    def run(
        self, name: str, recipe: Recipe | None = None, progress: Progress | None = None
    ) -> Leaks | Presence | LayerLeaks:
        """One attack, by its name or by a recipe of the caller's own."""
        if name in ("matched-filter", "per-layer"):
            return self._known_noise(name, progress)
        if name == "linear-head":
            return self._linear_head(progress)
        return self._reconstruct(name, recipe or RECIPES.get(name), progress)

    def _reconstruct(self, name: str, recipe: Recipe | None, progress: Progress | None) -> Leaks:
        scene, captured = self.scene, self.captured
        observer = Observer(captured, self.criteria, self.visible, scene.value_range)
        started = time.perf_counter()
        if recipe is None:
            found = invert(
                captured, scene.network, scene.classes, seed=self.seed, public=scene.public, progress=progress
            )  # fmt: skip
        else:
            found = reconstruct(
                captured, recipe, scene.classes, seed=self.seed, value_range=scene.value_range, public=scene.public,
                watch=observer, progress=progress,
            )  # fmt: skip
        return self._told(name, captured, found, observer, time.perf_counter() - started, watched=recipe is not None)

    def _told(
        self, name: str, captured: Captured, found: Reconstruction, observer: Observer, seconds: float, *, watched: bool
    ) -> Leaks:
        scene = self.scene
        if not scene.scored:
            return unjudged(name, captured, found, observer, scene.classes, seconds)
        if not watched:
            observer(1, torch.arange(len(captured), device=scene.device), found.examples)
        return judged(name, captured, found, observer, scene.public_examples(), scene.classes, seconds)

    def _linear_head(self, progress: Progress | None) -> Leaks:
        scene, head = self.scene, self.scene.head
        if head is None:
            raise ModelError("attack: linear-head needs a network whose last dense layer alone is trained, by cross-entropy")
        started = time.perf_counter()
        sightings = self._sightings(head, part_of(progress, 0, 2))
        captured = sightings.captured
        got = attack_head(
            sightings, head, scene.public, candidates=self.criteria.candidates, seed=self.seed, scored=scene.scored,
            progress=part_of(progress, 1, 2),
        )  # fmt: skip
        observer = Observer(captured, self.criteria, self.visible, scene.value_range)
        leaks = self._told("linear-head", captured, got.found, observer, time.perf_counter() - started, watched=False)
        return _with_figures(leaks, sightings, got)

    def _sightings(self, head: LinearHead, progress: Progress | None) -> Sightings:
        course, leak = self.scene.course, self.look.leak
        if course is None or not self.throughout or course.rounds < 1:
            if prunes(self.captured):
                raise ModelError("attack: linear-head reads whole updates; these are pruned")
            return sighted_once(self.captured, head, ONCE)
        if leak != "type2" and (course.plan.compression or course.plan.method == "dssgd"):
            raise ModelError("attack: linear-head reads whole updates; these are pruned")
        return sighted_throughout(course, head, leak, self.victims, progress)

    def _known_noise(self, name: str, progress: Progress | None) -> Presence | LayerLeaks:
        scene, look = self.scene, self.look
        if scene.simulator is None or scene.state is None:
            raise PlanError(f"attack: {name} needs a run or a plan, whose noise it can know; these are raw gradients")
        if name == "matched-filter":
            return matched_filter(
                scene.simulator, scene.state, look.leak, self.victims, step=look.step, releases=look.releases,
                public=scene.public_examples(), candidates=self.criteria.candidates, progress=progress,
            )  # fmt: skip
        return layer_by_layer(
            scene.simulator, scene.state, look, self.victims, ONE_TENSOR, scene.classes, visible=self.visible,
            value_range=scene.value_range, exact_mse=self.criteria.exact_mse, seed=self.seed, progress=progress,
        )  # fmt: skip


def _with_figures(leaks: Leaks, sightings: Sightings, got: HeadFound) -> Leaks:
    """Also: how many releases of which training were read, the error of the features, and the likeliest candidate."""
    counts = torch.tensor([float(len(each.seen)) for each in sightings.victims])
    about = {"source": sightings.source, "releases_mean": float(counts.mean())}
    if leaks.scores is None:
        return replace(leaks, about=about)
    scores = replace(leaks.scores, identified=got.identified & leaks.scores.present, candidates=got.candidates)
    about |= {"feature_error_median": float(got.feature_errors.nanmedian()), "identified_by_likelihood": True}
    return replace(leaks, scores=scores, about=about)


def part_of(progress: Progress | None, number: int, parts: int) -> Progress | None:
    """Progress of one of several equal parts."""
    if progress is None:
        return None
    return lambda done, total: progress(number * FINE + done * FINE // max(total, 1), parts * FINE)
