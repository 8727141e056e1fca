"""Attacks by name, and the strongest of them for a plan.

`Attempts` runs one attack on a scene, with the steps that all attacks share, from capturing to scoring.

`strongest` runs several attacks. A failed attack says little, and a weak attack that fails says nothing. So `best` tries
every kind of attack that can succeed against the observation, cheap ones first. It stops when one has recovered everything,
and reports the result of each. The ground truth decides which attack is best, because an auditor wants the worst case.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from fedcdp.attacks.accumulated_attack import attack_accumulated
from fedcdp.attacks.accumulation import observe_throughout, why_not_accumulated, work
from fedcdp.attacks.active import Stage
from fedcdp.attacks.active_servers import ACTIVE
from fedcdp.attacks.analytic import first_dense, invert
from fedcdp.attacks.cohort import reads_sum
from fedcdp.attacks.head_attack import attack_head
from fedcdp.attacks.inferred import Inferred, attack_labels, attack_tokens
from fedcdp.attacks.judging import Observer, told
from fedcdp.attacks.leaks import FITS, Leaks
from fedcdp.attacks.linear_head import LinearHead, without_victims
from fedcdp.attacks.membership import Membership
from fedcdp.attacks.objectives import Objective, check_reproduces, predicted, prunes
from fedcdp.attacks.observe import Captured, Look, cohort_of
from fedcdp.attacks.optimisers import LBFGS
from fedcdp.attacks.per_layer import LayerLeaks, layer_by_layer
from fedcdp.attacks.presence import Presence, matched_filter
from fedcdp.attacks.recipe import ONE_TENSOR, RECIPES, Recipe
from fedcdp.attacks.reconstruct import Progress, reconstruct
from fedcdp.attacks.scene import Scene
from fedcdp.attacks.scores import Criteria
from fedcdp.attacks.sightings import Sightings, sighted_once, sighted_throughout
from fedcdp.attacks.tableak import TabLeak, attack_table
from fedcdp.data.dataset import Dataset
from fedcdp.errors import DataError, FedcdpError, ModelError, PlanError

ONCE = "a single look"
FINE = 1000  # progress steps per part


@dataclass(frozen=True)
class Attempts:
    """Attacks on the same victims of the same scene."""

    scene: Scene
    look: Look
    victims: int | None
    criteria: Criteria
    seed: int
    chunk: int | None = None
    """How many victims are searched for at once; None: as many as fit."""
    throughout: bool = True
    """Whether a linear head is observed in all rounds of its training, if these can be observed."""

    @cached_property
    def captured(self) -> Captured:
        """The adversary's observation of a single round."""
        seen = self.scene.captured(self.look, self.victims)
        if self.scene.scored:
            check_reproduces(seen)
        return seen

    @cached_property
    def visible(self) -> Tensor:
        """Mask of the compared coordinates."""
        return self.scene.visible()

    def run(
        self, name: str, recipe: Recipe | TabLeak | None = None, progress: Progress | None = None, *,
        earlier: Leaks | None = None,
    ) -> Leaks | Presence | LayerLeaks | Inferred:  # fmt: skip
        """Run one attack, by its name, or by a custom recipe or settings. A search of one round leaves out the victims that
        an `earlier` search has recovered exactly, and keeps their results."""
        scene = self.scene
        if name in ACTIVE:
            return ACTIVE[name].run(self.stage, progress)
        if name != "matched-filter":
            self.check_sum()
        if name == "labels":
            return attack_labels(
                self.captured, scene.classes, scene.public, names=scene.names(self.captured), seed=self.seed,
                scored=scene.scored, progress=progress,
            )  # fmt: skip
        if name == "tokens":
            return attack_tokens(
                self.captured, scene.network, scene.classes, scene.public, names=scene.names(self.captured), seed=self.seed,
                scored=scene.scored, progress=progress,
            )  # fmt: skip
        if scene.not_real and name != "matched-filter":
            raise DataError(
                f"attack: reconstruction needs real-valued inputs in one tensor; these are {scene.not_real}: use tokens, "
                "presence, labels or membership"
            )
        if name in ("matched-filter", "per-layer"):
            return self._known_noise(name, progress)
        if name == "linear-head":
            return self._linear_head(progress)
        if name in ("tableak", "tableak-search"):
            given = recipe if isinstance(recipe, TabLeak) else TabLeak(exact=name == "tableak")
            return self._table(name, given, progress)
        assert not isinstance(recipe, TabLeak)
        recipe = recipe or RECIPES.get(name)
        if recipe is not None and recipe.rounds == "all":
            return self._accumulated(name, recipe, progress)
        return self._reconstruct(name, recipe, progress, earlier)

    @property
    def stage(self) -> Stage:
        """The target as an active server sees it (`active_servers.fitting` tells which of its attacks fit)."""
        return Stage(self.scene, self.look, self.victims, self.criteria, self.seed)

    def check_sum(self) -> None:
        """Raise if the adversary reads only the sum of a round, and records cannot be reconstructed from it."""
        scene = self.scene
        if scene.simulator is not None and scene.state is not None and reads_sum(scene.plan, self.look.leak):
            cohort_of(scene.simulator, scene.state).require_inverted()

    def _reconstruct(self, name: str, recipe: Recipe | None, progress: Progress | None, earlier: Leaks | None) -> Leaks:
        scene, captured = self.scene, self.captured
        observer = Observer(captured, self.criteria, self.visible, scene.value_range)
        started = time.perf_counter()
        if recipe is None:
            found = invert(
                captured, scene.network, scene.classes, seed=self.seed, public=scene.public, progress=progress
            )  # fmt: skip
            return told(scene, name, captured, found, observer, time.perf_counter() - started, watched=False)
        left = None if earlier is None else self._left(earlier, recipe)
        if earlier is not None and left is not None:
            observer.resume(earlier, left)
        found = reconstruct(
            captured, recipe, scene.classes, seed=self.seed, value_range=scene.value_range,
            public=self._others(captured) if recipe.seed.kind == "posterior" else scene.public, who=left,
            chunk=self.chunk, watch=observer, progress=progress,
        )  # fmt: skip
        if earlier is not None and left is not None:
            found = earlier.found.updated(left, found)
        leaks = told(scene, name, captured, found, observer, time.perf_counter() - started, watched=True)
        return leaks if left is None else replace(leaks, about=leaks.about | {"spared": len(captured) - len(left)})

    def _left(self, earlier: Leaks, recipe: Recipe) -> Tensor | None:
        """The victims that an earlier search has not recovered exactly; None if its results cannot be kept."""
        scores, captured = earlier.scores, self.captured
        dummies = captured.most if recipe.dummies == "all" else 1
        alike = earlier.captured is captured and earlier.found.examples.shape[1] == captured.most == dummies
        if scores is None or earlier.found.misfit is None or not alike:
            return None
        recovered = (scores.exact | ~scores.present).all(1)
        return (~recovered).nonzero()[:, 0] if bool(recovered.any()) else None

    def _accumulated(self, name: str, recipe: Recipe, progress: Progress | None) -> Leaks:
        scene, started = self.scene, time.perf_counter()
        if scene.course is None or not self.throughout:
            raise PlanError(
                "attack: accumulated reads all rounds of a training: give the untrained model, and no round, step, steps or "
                "releases"
            )
        seen = observe_throughout(
            scene.course, scene.engine, self.look.leak, self.victims, self.captured.task, part_of(progress, 0, 2)
        )
        observer = Observer(seen.captured, self.criteria, self.visible, scene.value_range)
        got = attack_accumulated(
            seen, recipe, self._others(seen.captured), scene.classes, candidates=self.criteria.candidates,
            value_range=scene.value_range, seed=self.seed, chunk=self.chunk, watch=observer,
            progress=part_of(progress, 1, 2),
        )  # fmt: skip
        seconds = time.perf_counter() - started
        return got.figures(told(scene, name, seen.captured, got.found, observer, seconds, watched=True), seen)

    def _others(self, captured: Captured) -> Dataset | None:
        """Public examples without the victims' own: a federation without public data only has its own."""
        public = self.scene.public
        if public is None or not self.scene.scored:
            return public
        return without_victims(public, captured.tensor[captured.present].cpu())

    def _table(self, name: str, settings: TabLeak, progress: Progress | None) -> Leaks:
        scene, captured = self.scene, self.captured
        started = time.perf_counter()
        found = attack_table(scene, captured, settings, seed=self.seed, progress=progress)
        observer = Observer(captured, self.criteria, self.visible, scene.value_range)
        leaks = told(scene, name, captured, found, observer, time.perf_counter() - started, watched=False)
        return replace(leaks, about=leaks.about | found.figures(captured.present, settings.members, leaks.cells))

    def _linear_head(self, progress: Progress | None) -> Leaks:
        scene, head = self.scene, self.scene.head
        if head is None:
            raise ModelError(
                "attack: linear-head needs a network that trains only its last dense layer, by the (binary) cross-entropy "
                "or the squared error"
            )
        started = time.perf_counter()
        sightings = self._sightings(head, part_of(progress, 0, 2))
        captured = sightings.captured
        got = attack_head(
            sightings, head, scene.public, candidates=self.criteria.candidates, seed=self.seed, scored=scene.scored,
            progress=part_of(progress, 1, 2),
        )  # fmt: skip
        observer = Observer(captured, self.criteria, self.visible, scene.value_range)
        leaks = told(scene, "linear-head", captured, got.found, observer, time.perf_counter() - started, watched=False)
        return got.figures(leaks, sightings)

    def _sightings(self, head: LinearHead, progress: Progress | None) -> Sightings:
        course, leak = self.scene.course, self.look.leak
        # Without classes, the examples of several rounds cannot be told apart; a single one is better seen alone.
        alone = leak != "type2" and head.classes == 1 and self.captured.most == 1
        if course is None or not self.throughout or course.rounds < 1 or alone:
            if prunes(self.captured):
                raise ModelError("attack: linear-head needs unpruned updates; these are pruned")
            return sighted_once(self.captured, head, ONCE)
        if leak != "type2" and (course.plan.compression or course.plan.method == "dssgd"):
            raise ModelError("attack: linear-head needs unpruned updates; these are pruned")
        return sighted_throughout(course, head, leak, self.victims, progress)

    def _known_noise(self, name: str, progress: Progress | None) -> Presence | LayerLeaks:
        scene, look = self.scene, self.look
        if scene.simulator is None or scene.state is None:
            raise PlanError(f"attack: {name} needs a run or a plan to know the noise; these are raw gradients")
        if name == "matched-filter":
            return matched_filter(
                scene.simulator, scene.state, look.leak, self.victims, step=look.step, releases=look.releases,
                public=scene.public_examples(), candidates=self.criteria.candidates, progress=progress,
            )  # fmt: skip
        return layer_by_layer(
            scene.simulator, scene.state, look, self.victims, ONE_TENSOR, scene.classes, visible=self.visible,
            value_range=scene.value_range, exact_mse=self.criteria.exact_mse, seed=self.seed, progress=progress,
        )  # fmt: skip


def infer_all(attempts: Attempts, membership: Callable[[], Membership], progress: Progress | None = None) -> Inferred:
    """Infer labels, presence and membership: all that can be attacked where inputs cannot be reconstructed."""
    started, captured = time.perf_counter(), attempts.captured
    found: dict[str, Any] = {}
    refused: dict[str, str] = {}
    ways: dict[str, Callable[[], Any]] = {
        "labels": lambda: attempts.run("labels", progress=part_of(progress, 0, 2)),
        "matched-filter": lambda: attempts.run("matched-filter", progress=part_of(progress, 1, 2)),
        "membership": membership,
    }
    for name, way in ways.items():
        try:
            found[name] = way()
        except FedcdpError as error:
            refused[name] = str(error)
    if not found:
        raise DataError(next(iter(refused.values())))
    labels: Inferred | None = found.get("labels")
    return Inferred(
        captured.plan.method, captured.leak, "inference", len(captured), captured.noise_level, captured.steps,
        captured.releases, labels=None if labels is None else labels.labels, presence=found.get("matched-filter"),
        membership=found.get("membership"), refused=refused, names=attempts.scene.names(captured),
        seconds=time.perf_counter() - started, summed_clients=captured.summed_clients,
    )  # fmt: skip


def part_of(progress: Progress | None, number: int, parts: int) -> Progress | None:
    """Progress of one of several equal parts."""
    if progress is None:
        return None
    return lambda done, total: progress(number * FINE + done * FINE // max(total, 1), parts * FINE)


_MOST_SEARCHED = 16  # largest batch to search, in examples
_PATIENCE = 20  # iterations; not for Adam, whose learning rate falls as planned
_SHARPENING = 100  # iterations
_MOST_WORK = {"cpu": 3e4, "cuda": 3e6}  # gradients of single examples: a minute or two
_MOST = 8  # maximum number of attacks, for the progress display
_FIGURES = ("success_rate", "recognisable_rate", "identified_rate", "label_accuracy", "auc", "spared")


def strongest(attempts: Attempts, progress: Progress | None = None) -> Leaks:
    """Try the attacks that suit the scene until one has recovered everything; return the best, with all results."""
    attempts.check_sum()
    results: list[Leaks] = []
    tried: list[dict[str, Any]] = []
    refusals: list[FedcdpError] = []

    def attempt(names: list[str]) -> None:
        for name in names:
            if results and _recovered_all(results[-1]):
                return
            if (reason := _too_long(attempts, name)) is not None:
                tried.append({"attack": name, "success_rate": None, "refused": reason})
                continue
            try:
                recipe = recipe_of(name, attempts.captured.noisy)
                earlier = max(results, key=_rank) if results else None
                found = attempts.run(name, recipe, part_of(progress, len(tried), _MOST), earlier=earlier)
            except (ModelError, DataError) as error:
                refusals.append(error)
                tried.append({"attack": name, "success_rate": None, "refused": str(error)})
                continue
            tried.append(trial(found.summary()))
            if isinstance(found, Leaks):
                results.append(found)

    attempt(closed_forms(attempts.scene))
    if not any(each.attack == "linear-head" and _needs_no_search(each) for each in results):
        table = len(attempts.scene.shape) < 3 and bool(results)
        attempt(filters(attempts) if table else [*searches(attempts), *filters(attempts)])
    if progress is not None:
        progress(_MOST * FINE, _MOST * FINE)
    if not results:
        raise refusals[0]
    return replace(max(results, key=_rank), tried=tuple(tried))


def _needs_no_search(found: Leaks) -> bool:
    """Whether a search is pointless: for one example of a linear head, the features hold all that the gradient reveals. A
    search might find more for a batch, but not for a large one."""
    examples = found.captured.most
    return examples == 1 or examples > _MOST_SEARCHED


def closed_forms(scene: Scene) -> list[str]:
    """The attacks with a closed form; they take seconds."""
    names = [] if scene.head is None else ["linear-head"]
    try:
        first_dense(scene.network, scene.shape)
    except ModelError:
        return names
    return [*names, "analytic"]


def searches(attempts: Attempts) -> list[str]:
    """The search attacks, most promising first: those that know the method, if it changes a gradient."""
    captured = attempts.captured
    single = captured.most == 1 and captured.steps == 1
    if captured.noisy:
        return ["clip-aware" if single else "batch", "class-prior", *accumulations(attempts), "averaging"]
    if captured.plan.per_example or prunes(captured) or captured.steps > 1:
        return ["clip-aware", "cpl", "inverting-gradients"] if single else ["unrolled", "clip-aware", "batch"]
    if captured.leak == "type2" or captured.plan.method == "nonprivate":  # nothing to know: no second search of the same
        return ["cpl", "inverting-gradients"] if single else ["batch"]
    return ["cpl", "clip-aware", "inverting-gradients"] if single else ["batch", "unrolled"]


def recipe_of(name: str, noisy: bool) -> Recipe | None:
    """The recipe of an attack, for a search that ends once it has stopped improving; None for an attack without a recipe.

    Without noise, the preference for smooth images only has to tell the images of a batch apart; then it is dropped.
    """
    recipe = RECIPES.get(name)
    if recipe is None or not isinstance(recipe.optimiser, LBFGS):
        return recipe
    smooth = recipe.objective.total_variation > 0 and not noisy
    return recipe.but(patience=_PATIENCE, sharpening=_SHARPENING if smooth else None)


def accumulations(attempts: Attempts) -> list[str]:
    """The attack on all rounds of a training, if there are several; a linear head is read in all rounds in closed form."""
    scene, leak = attempts.scene, attempts.look.leak
    if scene.course is None or scene.course.rounds < 2 or scene.head is not None or not attempts.throughout:
        return []
    return [] if why_not_accumulated(scene.course, leak) else ["accumulated"]


def _too_long(attempts: Attempts, name: str) -> str | None:
    """Why the default attack leaves out an attack that it could run; None if it runs it."""
    course = attempts.scene.course
    if name != "accumulated" or course is None:
        return None
    needed = work(course, attempts.look.leak, len(attempts.captured))
    most = _MOST_WORK.get(attempts.scene.device.type, _MOST_WORK["cpu"])
    if needed <= most:
        return None
    return f"all rounds take about {needed:.0e} gradients, more than best spends ({most:.0e}); ask for accumulated by name"


def filters(attempts: Attempts) -> list[str]:
    """Under noise: the test that shows what an adversary can tell at all."""
    scene = attempts.scene
    known = scene.simulator is not None and (len(attempts.captured) > 1 or reads_sum(scene.plan, attempts.look.leak))
    return ["matched-filter"] if known and attempts.captured.noisy else []


def trial(summary: dict[str, Any]) -> dict[str, Any]:
    """A few figures of an attack's result."""
    told = {"attack": summary["attack"], "success_rate": summary.get("success_rate")}
    return told | {name: summary[name] for name in _FIGURES if summary.get(name) is not None}


def _recovered_all(found: Leaks) -> bool:
    """Whether every example is exact or, without the ground truth, the observation is explained."""
    if found.scores is not None:
        return bool(found.scores.exact[found.scores.present].all())
    return _misfit(found) < FITS


def _rank(found: Leaks) -> tuple[float, ...]:
    """Exact ones first, then recognisable, identified, and the distance; without the ground truth, the misfit."""
    if found.scores is None:
        return (-_misfit(found),)
    row = found.scores.summary()
    return row["exact"], row["recognisable"], row["identified"], -row["median_mse"]


def _misfit(found: Leaks) -> float:
    """Share of the observation's squared norm that the examples do not explain; median over victims."""
    captured, objective = found.captured, Objective()
    present = captured.present[:, : found.found.examples.shape[1]]
    shown = predicted(captured, "gradient", found.found.examples, found.found.labels, present)
    nothing = {name: value * 0 for name, value in captured.seen.items()}
    share = objective.between(shown, captured.seen) / objective.between(nothing, captured.seen).clamp(min=1e-30)
    return float(share.nan_to_num(1e30).quantile(0.5))
