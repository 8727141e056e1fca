"""Reconstruction: run a recipe against many victims at once, in lockstep, until each is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedcdp.attacks.candidate_pool import LEAST_NOISE, CandidatePool
from fedcdp.attacks.labels import infer_labels, known_targets
from fedcdp.attacks.objectives import predicted, total_variation
from fedcdp.attacks.observations import Observation, among
from fedcdp.attacks.observe import Captured
from fedcdp.attacks.optimisers import LBFGS
from fedcdp.attacks.recipe import Recipe
from fedcdp.attacks.spaces import ClassComponents, Pixels, Space, Subspace
from fedcdp.attacks.targets import FreeTarget, has_classes
from fedcdp.data.dataset import Dataset
from fedcdp.engine.cuda_graphs import Graphed, record
from fedcdp.engine.runtime import deferred_interrupts, stop_if_asked
from fedcdp.errors import DataError
from fedcdp.mechanism.randomness import stream_key
from fedcdp.training.shared_work import share, workers

_FITS = 1e-12  # of the loss of a zero prediction: nothing is left to gain
_GAIN = 1e-3  # of the loss: a smaller improvement does not renew the patience of a search
_LEAST = 1e-30  # squared norm of what was seen
_LOST = 1e6  # size of a coordinate, in units of the input range, beyond which a search has diverged
_WORTH_KEEPING = 0.6  # share of a recording's victims that must be live to keep the recording
_MEMORY = {"cpu": 2 * 2**30, "cuda": 32 * 2**30}  # bytes for one chunk of victims

Progress = Callable[[int, int], None]
Watch = Callable[[int, Tensor, Tensor], None]
"""Called after an iteration with the live victims and their current examples [those, examples, ...]."""


@runtime_checkable
class SharedWatch(Protocol):
    """A watch that can follow the victims of one portion in another process."""

    def __call__(self, iteration: int, who: Tensor, examples: Tensor) -> None:
        """See `Watch`."""

    def of(self, who: Tensor) -> SharedWatch:
        """A watch for these victims alone."""

    @property
    def notes(self) -> Any:
        """What it has noted."""

    def add(self, notes: Any) -> None:
        """Add what another one has noted."""


@dataclass
class Reconstruction:
    """The result of an attack on N victims."""

    examples: Tensor
    """[victims, dummies, ...]: the best fit by the adversary's own measure."""
    last: Tensor
    """The state at the end of the search."""
    seeds: Tensor
    labels: Tensor
    """[victims, dummies, ...]: labels, or the values of other targets."""
    loss: Tensor
    """[victims]: the objective at `examples`."""
    iterations: Tensor
    """[victims]: total number of iterations taken."""
    outcome: Tensor
    """[victims]: 0 out of iterations, 1 nothing left to gain, 2 diverged."""
    evaluations: int = field(default=0, repr=False)
    misfit: Tensor | None = field(default=None, repr=False)
    """[victims]: the squared distance of what the examples show to what was seen, over the squared norm of the latter."""
    features: Tensor | None = field(default=None, repr=False)
    """[victims, dummies, D]: features of the examples before a linear head, if the attack reads them."""

    CONVERGED = 1
    DIVERGED = 2

    def updated(self, who: Tensor, other: Reconstruction) -> Reconstruction:
        """The same with the rows of these victims from another attack, whose evaluations count."""
        rows = {name: getattr(self, name).index_copy(0, who, getattr(other, name)) for name in _BY_VICTIM}
        return Reconstruction(**rows, evaluations=other.evaluations)


_BY_VICTIM = ("examples", "last", "seeds", "labels", "loss", "iterations", "outcome", "misfit")


def reconstruct(
    captured: Captured,
    recipe: Recipe,
    classes: int,
    *,
    seed: int = 0,
    value_range: tuple[float, float] = (0.0, 1.0),
    public: Dataset | None = None,
    observations: Sequence[Observation] = (),
    pool: CandidatePool | None = None,
    who: Tensor | None = None,
    chunk: int | None = None,
    watch: Watch | None = None,
    progress: Progress | None = None,
) -> Reconstruction:
    """Search for the examples behind an observation, or behind several `observations` of the same victims.

    `public` are examples like the victims' that anyone can have; the recipe may need them for principal components, and for
    the `pool` of candidates, unless that is given. Of the victims' own examples, only their number is used. With `who`, only
    these victims are attacked; each result is the same as among all.

    `chunk` victims are searched for in lockstep: by default as many as memory allows, and fewer if ranks share them. A
    victim's result depends on the others in its chunk up to rounding.
    """
    observations = observations or [Observation.alone(captured)]
    space = _space(captured, recipe, classes, value_range, public)
    pool = pool or _pool(captured, observations, recipe, seed, public)
    free = None
    if recipe.labels == "joint" or (recipe.labels != "known" and not has_classes(captured.task)):
        free = FreeTarget.of(captured, classes, public)
    everyone = torch.arange(len(captured), device=captured.device) if who is None else who
    if not len(everyone):
        raise DataError("victims: there are no victims to attack")
    at_once = chunk or min(_victims_at_once(captured, recipe), -(-len(everyone) // workers()))
    chunks = everyone.split(at_once)
    search = _SearchSettings(recipe, space, classes, seed, free, portions=-(-len(chunks) // workers()))
    portions = (_Portion.of(some, captured, observations, pool, watch) for some in chunks)
    if workers() == 1 or len(chunks) == 1:
        parts = _attack_portions(search, portions, captured.device, progress)
    else:
        parts = share(_attack_portions, search, list(portions), captured.device, progress)
    if isinstance(watch, SharedWatch):
        for part in parts:
            watch.add(part.notes)
    if progress is not None:
        total = search.portions * recipe.restarts * search.longest
        progress(total, total)
    return _join([part.found for part in parts])


@dataclass(frozen=True)
class _SearchSettings:
    """What the searches for all victims have in common."""

    recipe: Recipe
    space: Space
    classes: int
    seed: int
    free: FreeTarget | None
    portions: int
    """How many portions one process has, for the progress."""

    @property
    def longest(self) -> int:
        """Most iterations of one search."""
        return self.recipe.iterations + (self.recipe.sharpening or 0)


@dataclass(frozen=True)
class _Portion:
    """Some victims, whose searches run in lockstep, and all that was seen of them."""

    who: Tensor
    captured: Captured
    observations: list[Observation]
    pool: CandidatePool | None
    watch: Watch | None

    @staticmethod
    def of(
        who: Tensor, captured: Captured, observations: Sequence[Observation], pool: CandidatePool | None, watch: Watch | None
    ) -> _Portion:
        """These victims among all."""
        mine = watch.of(who) if isinstance(watch, SharedWatch) else watch
        some = None if pool is None else pool.take(who)
        return _Portion(who, captured.take(who), among(observations, who), some, mine)


@dataclass(frozen=True)
class _Found:
    """The result for a portion, and what was noted on the way."""

    found: Reconstruction
    notes: Any


def _attack_portions(
    search: _SearchSettings,
    portions: Iterable[_Portion],
    device: torch.device,  # noqa: ARG001
    progress: Progress | None,
) -> list[_Found]:
    """The best of all restarts for each portion."""
    found = []
    restarts, longest = search.recipe.restarts, search.longest
    for number, portion in enumerate(portions):
        best: Reconstruction | None = None
        for restart in range(restarts):
            stop_if_asked()
            before = (number * restarts + restart) * longest

            def tell(done: int, before: int = before) -> None:
                if progress is not None:
                    progress(before + done, search.portions * restarts * longest)

            with deferred_interrupts():
                got = _attack(search, portion, restart, tell)
            best = got if best is None else _better(best, got)
        assert best is not None
        found.append(_Found(best, portion.watch.notes if isinstance(portion.watch, SharedWatch) else None))
    return found


def _attack(search: _SearchSettings, portion: _Portion, restart: int, tell: Callable[[int], None]) -> Reconstruction:
    """One portion of victims, from one seed each."""
    recipe, seed, free = search.recipe, search.seed, search.free
    who, part, pool, watch, observations = portion.who, portion.captured, portion.pool, portion.watch, portion.observations
    dummies = part.most if recipe.dummies == "all" else 1
    seeds = recipe.seed.draw(who, dummies, part.shape, seed, restart)
    shape = free.shape if free is not None and free.shape else (1,)
    values = recipe.seed.draw(who, dummies, shape, stream_key(seed, "labels"), restart)
    targets = None if free is not None else _targets(part, observations, recipe, pool, search.classes, seeds)
    if pool is not None and recipe.seed.kind == "posterior":
        seeds = pool.start(targets, who, dummies, seed, restart)
    problem = Problem(part, recipe, search.space, seeds, targets, values, free, observations)
    start = problem.start
    found = _search(problem, recipe, recipe.iterations, who, 0, watch, tell)
    if recipe.sharpening is not None:
        problem.sharpen(found.best)
        first = found.iterations
        found = _search(problem, recipe, recipe.sharpening, who, int(first.max()), watch, tell)
        found = replace(found, iterations=first + found.iterations)
    problem.focus(torch.arange(len(who), device=who.device))
    return Reconstruction(
        problem.examples(found.best).detach(),
        problem.examples(found.last).detach(),
        problem.examples(start).detach(),
        problem.labels(found.best),
        found.loss,
        found.iterations,
        found.outcome,
        problem.evaluations,
        misfit=problem.misfit(found.best),
    )


@dataclass(frozen=True)
class _Path:
    """Where a search led: its best and its last points, the loss at the best, and how it ended."""

    best: Tensor
    last: Tensor
    loss: Tensor
    iterations: Tensor
    outcome: Tensor


def _search(
    problem: Problem,
    recipe: Recipe,
    most: int,
    who: Tensor,
    earlier: int,
    watch: Watch | None,
    note: Callable[[int], None],
) -> _Path:
    """Search from the start of a problem for `most` iterations, which are counted from `earlier`."""
    state = recipe.optimiser.begin(problem.start)
    count = len(who)
    best, best_loss = problem.start.clone(), torch.full_like(state.loss, torch.inf)
    last = problem.start.clone()
    patience = Patience(recipe.patience, best_loss)
    iterations = torch.full((count,), most, device=who.device)
    outcome = torch.zeros(count, dtype=torch.int64, device=who.device)
    active = torch.arange(count, device=who.device)
    for iteration in range(1, most + 1):
        problem.focus(active)
        before = state.point
        loss, moved = state.step(problem.evaluate)
        improved = loss < best_loss[active]
        best[active[improved]], best_loss[active[improved]] = before[improved], loss[improved]
        state.point = problem.project(state.point)
        last[active] = state.point
        if watch is not None:
            watch(earlier + iteration, who[active], problem.examples(state.point).detach())
        lost = ~torch.isfinite(loss) | ~(state.point.abs().amax(1) < _LOST)
        fitted = loss <= _FITS * problem.scale[active]
        done = lost | fitted | ~moved | patience.is_over(active, loss, iteration)
        if bool(done.any()):
            outcome[active[done]] = torch.where(lost[done], Reconstruction.DIVERGED, Reconstruction.CONVERGED)
            iterations[active[done]] = iteration
            active = active[~done]
            state.keep((~done).nonzero()[:, 0])
        note(earlier + iteration)
        if len(active) == 0:
            break
    if len(active):
        problem.focus(active)
        loss, _ = problem.evaluate(last[active], torch.arange(len(active), device=who.device))
        improved = loss < best_loss[active]
        best[active[improved]], best_loss[active[improved]] = last[active[improved]], loss[improved]
    return _Path(best, last, best_loss, iterations, outcome)


class Patience:
    """Tells which victims have not improved for too long."""

    def __init__(self, most: int | None, losses: Tensor) -> None:
        self._most = most
        self._marks, self._since = losses.clone(), torch.zeros_like(losses, dtype=torch.int64)

    def is_over(self, who: Tensor, losses: Tensor, iteration: int) -> Tensor:
        """Whether each of these victims has gone `most` iterations without a gain."""
        if self._most is None:
            return torch.zeros_like(losses, dtype=torch.bool)
        marks = self._marks[who]
        gained = losses < torch.where(marks.isfinite(), marks - _GAIN * marks.abs(), marks)
        self._marks[who[gained]], self._since[who[gained]] = losses[gained], iteration
        return iteration - self._since[who] >= self._most


class Problem:
    """The objective of every victim of a chunk, as a function of points."""

    def __init__(
        self, captured: Captured, recipe: Recipe, space: Space, seeds: Tensor, targets: Tensor | None, values: Tensor,
        free: FreeTarget | None, observations: Sequence[Observation] = (),
    ) -> None:  # fmt: skip
        """With `free`, targets start at `values` and are optimised with the examples. By default `captured` is all."""
        self._recipe, self._free, self._targets = recipe, free, targets
        self._all = list(observations) or [Observation.alone(captured)]
        self._present = captured.present if recipe.dummies == "all" else captured.present[:, :1]
        self._space = space
        self._labels = torch.zeros_like(self._present, dtype=torch.int64) if targets is None else targets
        self.start = space.within(self._labels).points(seeds)
        self._size = self.start.shape[1]
        if free is not None:
            self.start = torch.cat([self.start, values.flatten(1)], dim=1)
        nothing = {name: torch.zeros_like(value) for name, value in captured.seen.items()}
        self.scale = recipe.objective.between(nothing, captured.seen)
        if space.has_prior:  # its minimum is not known
            self.scale = torch.full_like(self.scale, -torch.inf)
        self.evaluations = 0
        self._graph: Graphed | None = None
        self._can_record = seeds.device.type == "cuda"
        self._recorded = torch.arange(0)
        self.focus(torch.arange(len(seeds), device=seeds.device))

    def sharpen(self, points: Tensor) -> None:
        """Start again at these points of all victims, without the preference for smooth images."""
        objective = replace(self._recipe.objective, total_variation=0.0)
        self._recipe, self.start, self._graph = self._recipe.but(objective=objective), points, None
        self.focus(torch.arange(len(points), device=points.device))

    def focus(self, who: Tensor) -> None:
        """Continue with these victims of the chunk."""
        self._who = who
        if self._graph is not None and len(who) > _WORTH_KEEPING * len(self._recorded):
            return  # a new recording would cost more than computing a few finished victims
        self._parts = among(self._all, who)
        self._recorded, self._graph = who, None
        if self._can_record:
            self._graph = record(lambda points: self._evaluate(points, self._parts, who), self.start[who])
            self._can_record = self._graph is not None

    def examples(self, points: Tensor) -> Tensor:
        """The examples that points of the victims in focus stand for."""
        return self._examples(points, self._who)

    def _examples(self, points: Tensor, names: Tensor) -> Tensor:
        return self._space.within(self._labels[names]).examples(points[:, : self._size])

    def labels(self, points: Tensor) -> Tensor:
        """The targets of the dummies [victims, dummies, ...]."""
        if self._free is not None:
            return self._free.settled(self._values(points))
        assert self._targets is not None
        return self._targets

    def misfit(self, points: Tensor) -> Tensor:
        """[victims]: share of what each victim in focus showed that its point does not explain; NaN for all rounds."""
        if len(self._all) > 1:
            return torch.full_like(points[:, 0], torch.nan)
        part, names = self._all[0].captured, self._who
        targets = self._free.soft(self._values(points)) if self._free is not None else self.labels(points)[names]
        shown = predicted(part, self._recipe.knows, self._examples(points, names), targets, self._present[names])
        plain = replace(self._recipe.objective, distance="squared")
        nothing = {name: torch.zeros_like(value) for name, value in part.seen.items()}
        return (plain.between(shown, part.seen) / plain.between(nothing, part.seen).clamp(min=_LEAST)).detach()

    def project(self, points: Tensor) -> Tensor:
        """The nearest points that the recipe allows."""
        return torch.cat([self._space.project(points[:, : self._size]), points[:, self._size :]], dim=1)

    def evaluate(self, points: Tensor, who: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and gradients at points of those victims (indices among the victims in focus)."""
        stop_if_asked()
        self.evaluations += len(who)
        names = self._who[who]
        if self._graph is not None:
            return self._graph(points, torch.searchsorted(self._recorded, names))
        everyone = len(names) == len(self._recorded)
        return self._evaluate(points, self._parts if everyone else among(self._all, names), names)

    def _evaluate(self, points: Tensor, parts: list[Observation], names: Tensor) -> tuple[Tensor, Tensor]:
        points = points.detach().requires_grad_()
        examples = self._examples(points, names)
        targets = self._free.soft(self._values(points)) if self._free is not None else self.labels(points)[names]
        losses: list[Tensor] = []
        gradients: list[Tensor] = []
        for number, seen in enumerate(parts):  # one at a time: each holds the memory of a whole backward pass
            loss = self._misfit(seen, examples, targets, self._present[names])
            if number == 0 and self._space.has_prior:  # −log of the posterior density, up to a constant
                loss = loss + self._space.penalty(points[:, : self._size])
            if number == 0 and self._recipe.objective.total_variation:
                loss = loss + self._recipe.objective.total_variation * total_variation(examples)
            losses.append(loss.detach())
            gradients += torch.autograd.grad(loss.sum(), points, retain_graph=number + 1 < len(parts))
        return sum(losses[1:], start=losses[0]), sum(gradients[1:], start=gradients[0])

    def _misfit(self, seen: Observation, examples: Tensor, targets: Tensor, present: Tensor) -> Tensor:
        """[victims]: how far the prediction for the examples is from what was seen; 0 for those not seen."""
        part, count = seen.captured, len(examples)
        everyone = len(seen.who) == count
        if not everyone:
            examples, targets, present = (each.index_select(0, seen.who) for each in (examples, targets, present))
        shown = predicted(part, self._recipe.knows, examples, targets, present)
        if self._space.has_prior:
            misfit = self._recipe.objective.misfit(shown, part.seen)
            loss = misfit / (2 * part.deviation.to(misfit).clamp(min=LEAST_NOISE).square())
        else:
            loss = self._recipe.objective.between(shown, part.seen)
        return loss if everyone else loss.new_zeros(count).index_add(0, seen.who, loss)

    def _values(self, points: Tensor) -> Tensor:
        """The free values of the targets [victims, dummies, ...]."""
        assert self._free is not None
        dummies = self._present.shape[1]
        return points[:, self._size :].reshape(len(points), dummies, *self._free.shape)


def _targets(
    captured: Captured, observations: list[Observation], recipe: Recipe, pool: CandidatePool | None, classes: int,
    seeds: Tensor,
) -> Tensor:  # fmt: skip
    """The targets of the dummies [victims, dummies, ...], inferred before the search."""
    if recipe.labels == "known":
        return known_targets(captured, seeds.shape[1])
    if recipe.labels != "posterior":
        return infer_labels(captured, recipe.labels, classes, seeds, recipe.knows)
    if pool is not None and seeds.shape[1] == 1:
        return pool.labels(classes)
    return infer_labels(captured, "counts", classes, seeds, recipe.knows, observations)


def _space(
    captured: Captured, recipe: Recipe, classes: int, value_range: tuple[float, float], public: Dataset | None
) -> Space:
    if recipe.space in ("free", "box"):
        return Pixels(captured.shape, value_range if recipe.space == "box" else None)
    if public is None:
        raise DataError("public: this attack needs public examples for its principal components, and there are none")
    if recipe.space == "components":
        return Subspace.of(public, recipe.components, captured.device)
    grouped = has_classes(captured.task) and recipe.labels != "joint"
    return ClassComponents.of(public, recipe.components, classes if grouped else 1, captured.device)


def _pool(
    captured: Captured, observations: Sequence[Observation], recipe: Recipe, seed: int, public: Dataset | None
) -> CandidatePool | None:
    if recipe.seed.kind != "posterior" and recipe.labels != "posterior":
        return None
    if public is None:
        raise DataError("public: this attack needs public examples as candidates, and there are none")
    single = captured.most == 1
    return CandidatePool.of(public, observations, len(captured), seed, single=single)


def _victims_at_once(captured: Captured, recipe: Recipe) -> int:
    dummies = captured.most if recipe.dummies == "all" else 1
    size = dummies * captured.tensor[0, 0].numel()
    history = recipe.optimiser.history if isinstance(recipe.optimiser, LBFGS) else 2
    prior = 3 * recipe.components * size if recipe.space == "class-components" else 0
    a_victim = 4 * (2 * history * size + prior + 16 * dummies * captured.steps * captured.engine.layout.size)
    return max(1, min(512, _MEMORY.get(captured.device.type, 2**30) // a_victim))


def _join(parts: list[Reconstruction]) -> Reconstruction:
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in _BY_VICTIM}
    return Reconstruction(**joined, evaluations=sum(part.evaluations for part in parts))


def _better(one: Reconstruction, other: Reconstruction) -> Reconstruction:
    """For each victim the better fit; iterations are summed."""
    wins = other.loss < one.loss
    chosen = {
        name: torch.where(wins.view(-1, *(1,) * (getattr(one, name).dim() - 1)), getattr(other, name), getattr(one, name))
        for name in _BY_VICTIM
    }
    return Reconstruction(**chosen, evaluations=one.evaluations + other.evaluations)
