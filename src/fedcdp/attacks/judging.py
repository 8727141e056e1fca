"""Judging: follow a search with the ground truth at hand, and score what it found."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcdp.attacks.leaks import SHOWN_VICTIMS, Leaks, compared_truth
from fedcdp.attacks.observe import Captured
from fedcdp.attacks.reconstruct import Reconstruction
from fedcdp.attacks.scene import Scene
from fedcdp.attacks.scores import Criteria, Judge, Scores, cleaned, match, rearrange
from fedcdp.attacks.table_scores import score_cells
from fedcdp.attacks.targets import has_classes
from fedcdp.data.dataset import Dataset

_SHOWN_ITERATIONS = (1, 2, 3, 5, 7, 10, 20, 50, 100, 200, 300)


@dataclass
class Observer:
    """Follows a search: when each victim's examples became exact, and snapshots of the first victims.

    The observer has the ground truth; the search does not.
    """

    captured: Captured
    criteria: Criteria
    visible: Tensor
    value_range: tuple[float, float]
    numbers: Tensor | None = None
    """The numbers of the victims, if they are only some of all."""

    def __post_init__(self) -> None:
        device = self.captured.device
        self.first_exact = torch.full((len(self.captured),), math.inf, dtype=torch.float64, device=device)
        self._ways: dict[int, dict[int, Tensor]] = {}
        self._latest: dict[int, Tensor] = {}

    @property
    def snapshots(self) -> dict[int, Tensor]:
        """The examples of the first victims after some iterations [those, dummies, ...]; a search that is over stands."""
        reached = sorted({iteration for way in self._ways.values() for iteration in way})
        ways = [(self._ways[victim], self._latest[victim]) for victim in sorted(self._ways)]
        return {each: torch.stack([way.get(each, latest) for way, latest in ways]) for each in reached}

    def of(self, who: Tensor) -> Observer:
        """See `SharedWatch`."""
        return Observer(self.captured.take(who), self.criteria, self.visible, self.value_range, who)

    @property
    def notes(self) -> _ObserverNotes:
        """See `SharedWatch`."""
        return _ObserverNotes(self.numbers, self.first_exact, self._ways, self._latest)

    def add(self, notes: _ObserverNotes) -> None:
        """See `SharedWatch`."""
        assert notes.numbers is not None
        self.first_exact[notes.numbers] = notes.first_exact
        self._ways |= notes.ways
        self._latest |= notes.latest

    def resume(self, earlier: Leaks, left: Tensor) -> None:
        """Take over what an earlier attack on the same victims showed, except of those that are left to attack."""
        self.first_exact = earlier.first_exact.index_fill(0, left, math.inf)
        self._latest = dict(enumerate(earlier.found.examples[:SHOWN_VICTIMS]))
        self._ways = {victim: {} for victim in self._latest}

    def __call__(self, iteration: int, who: Tensor, examples: Tensor) -> None:
        """Receive the state of the search (`reconstruct.Watch`)."""
        self._keep(iteration, who, examples)
        who = who if self.numbers is None else torch.searchsorted(self.numbers, who)
        pending = ~self.first_exact[who].isfinite()
        if not bool(pending.any()) or examples.shape[1] != self.captured.most:
            return
        who, examples = who[pending], examples[pending]
        truth, present = self.captured.tensor[who][..., self.visible], self.captured.present[who]
        guesses = cleaned(examples, *self.value_range)[..., self.visible]
        guesses = rearrange(guesses, match(guesses, truth, present)) if guesses.shape[1] > 1 else guesses
        mse = (guesses - truth).square().mean(-1).masked_fill(~present, 0.0)
        exact = (mse < self.criteria.exact_mse).all(1)
        self.first_exact[who[exact]] = iteration

    def _keep(self, iteration: int, who: Tensor, examples: Tensor) -> None:
        shown = who < SHOWN_VICTIMS
        for victim, example in zip(who[shown].tolist(), examples[shown], strict=True):
            self._latest[victim] = example
            way = self._ways.setdefault(victim, {})
            if iteration in _SHOWN_ITERATIONS:
                way[iteration] = example


@dataclass(frozen=True)
class _ObserverNotes:
    """What an observer has noted of some victims."""

    numbers: Tensor | None
    first_exact: Tensor
    ways: dict[int, dict[int, Tensor]]
    latest: dict[int, Tensor]


def judged(
    attack: str,
    captured: Captured,
    found: Reconstruction,
    observer: Observer,
    public: Dataset,
    classes: int,
    seconds: float,
) -> Leaks:
    """Score the result of an attack."""
    judge, scores = _score(found.examples, captured, observer, public)
    _, last = _score(found.last, captured, observer, public)
    return Leaks(
        attack, captured, found, scores, last, judge.baselines(), classes, observer.value_range, observer.first_exact,
        observer.snapshots, seconds,
    )  # fmt: skip


def told(
    scene: Scene,
    attack: str,
    captured: Captured,
    found: Reconstruction,
    observer: Observer,
    seconds: float,
    *,
    watched: bool,
) -> Leaks:
    """The result of an attack on a scene, scored if the truth is known; `watched`: the observer followed a search."""
    if not scene.scored:
        return unjudged(attack, captured, found, observer, scene.classes, seconds)
    if not watched:
        observer(1, torch.arange(len(captured), device=scene.device), found.examples)
    leaks = judged(attack, captured, found, observer, scene.public_examples(), scene.classes, seconds)
    cells = None
    if scene.columns is not None and scene.public is not None:
        shown = found.examples.expand_as(captured.tensor)  # one dummy may stand for a batch
        cells = score_cells(shown, captured.tensor, captured.present, scene.columns, scene.public.tensor)
    return replace(leaks, public=scene.public, names=scene.names(captured), cells=cells)


def unjudged(
    attack: str, captured: Captured, found: Reconstruction, observer: Observer, classes: int, seconds: float
) -> Leaks:
    """The result of an attack when the ground truth is unknown."""
    never = torch.full_like(observer.first_exact, math.inf)
    return Leaks(
        attack, captured, found, None, None, None, classes, observer.value_range, never, observer.snapshots, seconds
    )


def _score(guesses: Tensor, captured: Captured, observer: Observer, public: Dataset) -> tuple[Judge, Scores]:
    truth, labels, present = compared_truth(captured, guesses, observer.value_range)
    low, high = observer.value_range
    if not has_classes(captured.task):  # all examples are of one class
        public = replace(public, targets=torch.zeros(len(public), dtype=torch.int64), classes=1, task="classification")
        labels = torch.zeros_like(present, dtype=torch.int64)
    judge = Judge(truth, labels, public, present, observer.visible, low, high, observer.criteria)
    return judge, judge.score(guesses)
