"""Fishing: weights of the last layer that let few records of a large batch contribute, and then a single one.

Wen, Geiping, Fowl, Goldblum, Goldstein: "Fishing for User Data in Large-Batch Federated Learning via Gradient
Magnification", ICML 2022. All rows of the last layer are zero except that of one class c.

- By class: logit c is so low that p_c = 0 for every input. Row c of the gradient is then the sum over the records of class
  c, and the layers before the last one get a gradient from these records alone.
- By feature: logit c falls steeply where a feature f exceeds a threshold, so p_c is 1 below and 0 above. A record whose
  feature lies between two thresholds is the only change between two answers. Their difference is the gradient of this
  record alone, as if its class were c.

The server fishes by class if batches are small, one query for each class. Then it fishes by feature, with thresholds
between which it expects less than one record of the batch. It needs a client that answers every query for the same batch:
all records that the client holds.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedcdp.attacks.active import CHANGED_WEIGHTS, ActiveAttack, Stage
from fedcdp.attacks.analytic import first_dense, invert_dense
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.linear_head import FeaturePrior, LinearHead, find_last, link_of
from fedcdp.attacks.objectives import Objective
from fedcdp.attacks.observe import Captured
from fedcdp.attacks.recipe import RECIPES
from fedcdp.attacks.reconstruct import Progress, reconstruct
from fedcdp.attacks.scores import rearrange
from fedcdp.errors import ModelError
from fedcdp.files.tree import Tree

_SAME_BATCH = f"{CHANGED_WEIGHTS}; the client answers every query for the same batch"
_STEEP = 300.0  # slope of logit c, in units of the feature's standard deviation; a client rounds to the size of weights
_FAR = 300.0  # a logit so low that its probability is zero
_FEW = 3  # records of a class: with more on average, no class is likely to have a single one
_THRESHOLDS = 20
_RECORDS_BETWEEN = 0.4  # expected number of records between two thresholds
_EMPTY = 1e-4  # of one record: a difference below shows nobody
_ALMOST_ONE = 0.1
_FIELDS = ("features", "label", "slope", "count", "by_class", "deviation", "aim")
_CLASS = 0  # the class c of queries by feature


@dataclass(frozen=True)
class Query:
    """Weights of the last layer. Before it, the gradient of a caught record is that of `slope` times the direction."""

    slope: float
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Hook:
    """The last layer, and how public features lie in front of it."""

    last: LinearHead
    direction: Tensor
    """[D]: the feature f is the product with it, of standard deviation 1 among public inputs."""
    one: Tensor
    """[D]: its product with features is about 1; it stands for a bias where there is none."""
    public: Tensor
    """[n]: the feature of public inputs."""

    @staticmethod
    def of(last: LinearHead, inputs: Tensor) -> Hook:
        """The direction in which features vary most, which needs the smallest weights, and the best constant."""
        features = last.features(inputs)
        gram = features.T @ features
        ridge = 1e-6 * float(gram.trace()) * torch.eye(len(gram), dtype=torch.float64)
        one = torch.linalg.solve(gram + ridge, features.sum(0))
        widest = torch.linalg.eigh(torch.cov(features.T)).eigenvectors[:, -1]
        direction = widest / float((features @ widest).std().clamp(min=1e-12))
        hook = Hook(last, direction, one, features[:0, 0])
        return replace(hook, public=hook.measure(inputs))

    def measure(self, inputs: Tensor) -> Tensor:
        """[n]: the feature of inputs [n, ...]."""
        features = self.last.features(inputs)
        measured = features @ self.direction
        return measured if self.last.bias is not None else measured / (features @ self.one).clamp(min=1e-6)

    def by_class(self, label: int) -> Query:
        """The query for the records of a class."""
        return self._query(label, self.direction, 1.0, _FAR)

    def above(self, threshold: float) -> Query:
        """The query for the records whose feature exceeds a threshold."""
        along = self.direction if self.last.bias is not None else self.direction - threshold * self.one
        return self._query(_CLASS, along, -_STEEP, -_STEEP * threshold)

    def _query(self, label: int, along: Tensor, slope: float, low: float) -> Query:
        rows = self.last.rows
        weight = torch.zeros(rows, len(along), dtype=torch.float64)
        weight[label] = -abs(slope) * along
        if self.last.bias is None:
            if low > 0:
                weight[label] -= low * self.one
            return Query(slope, weight, None)
        bias = torch.zeros(rows, dtype=torch.float64)
        bias[label] = -low
        return Query(slope, weight, bias)


class Fishing(ActiveAttack):
    """The attack `fishing`."""

    name: ClassVar[str] = "fishing"

    def why_not(self, stage: Stage) -> str | None:
        """It needs classes, and a last dense layer that is trained."""
        if len(stage.public) < 2:
            return "needs public examples to place its thresholds"
        if link_of(stage.scene.loss) != "softmax" or stage.scene.classes < 2:
            return "needs classes, trained by the cross-entropy"
        if stage.plan.local_steps > 1:
            return "needs updates of one local step"
        last = find_last(stage.scene.network, stage.scene.shape)
        if last is None or last.rows != stage.scene.classes:
            return "needs a last dense layer that is trained, with one row for each class"
        return None

    def run(self, stage: Stage, progress: Progress | None = None) -> Leaks:
        """See `ActiveAttack`."""
        self.require_fit(stage)
        started = time.perf_counter()
        last = find_last(stage.scene.network, stage.scene.shape)
        assert last is not None
        hook = Hook.of(last, stage.public.tensor)
        caught = _Caught.first(stage, hook)
        if stage.examples <= _FEW * last.rows:
            for label in range(last.rows):
                caught.by_class(label)
        caught.by_feature()
        captured, catch = caught.captured, caught.best()
        about: dict[str, Any] = {
            "queries": caught.queries,
            "singled_out": float(catch.single.double().mean()),
            "by_class": float((catch.single & catch.by_class).double().mean()),
            "records": float(captured.present.sum(1).double().mean()),
            "changed_network": False,
            "assumption": _SAME_BATCH,
        }
        if captured.noisy:
            about |= caught.stage_at(hook.by_class(_CLASS)).presence()
        examples, how = _read(stage, captured, catch, hook, progress)
        one = catch.aim[:, None]
        aimed = replace(
            captured, inputs=rearrange(captured.tensor, one), targets=rearrange(captured.targets, one),
            present=torch.ones_like(one, dtype=torch.bool),
        )  # fmt: skip
        about["read_by"] = how
        return stage.result(
            self.name, aimed, examples, started, about, solved=catch.single, visible=stage.scene.visible()
        )  # fmt: skip


@dataclass
class Catch:
    """For each victim, the gradient of one record (or of the fewest that were caught), as if its class were c."""

    seen: Tree
    """[victims, ...]."""
    features: Tensor
    """[victims, D]: the record's features."""
    label: Tensor
    """[victims]: the class c of the query."""
    slope: Tensor
    """[victims]: the factor of the gradient before the last layer."""
    count: Tensor
    """[victims]: about how many records it is the sum of."""
    by_class: Tensor
    deviation: Tensor
    """[victims]: of the noise on the features."""
    aim: Tensor
    """[victims]: the true record that the catch is meant to hold, for scoring alone."""

    @property
    def single(self) -> Tensor:
        """[victims]: whether it is one record."""
        return (self.count - 1).abs() < _ALMOST_ONE


class _Caught:
    """All answers of the victims to the server's queries."""

    def __init__(self, stage: Stage, hook: Hook, captured: Captured) -> None:
        self.stage, self.hook, self.captured = stage, hook, captured
        self.queries = 0
        self._catches: list[Catch] = []

    @staticmethod
    def first(stage: Stage, hook: Hook) -> _Caught:
        """Before the first query: the victims."""
        return _Caught(stage, hook, stage.captured())

    def stage_at(self, query: Query) -> Stage:
        """The stage after the server has sent these weights."""
        state, last = self.stage.state, self.hook.last
        changed = {last.weight: query.weight.to(state.weights[last.weight])}
        if last.bias is not None and query.bias is not None:
            changed[last.bias] = query.bias.to(state.weights[last.bias])
        scene = replace(self.stage.scene, state=replace(state, weights=state.weights | changed))
        return replace(self.stage, scene=scene)

    def _answer(self, query: Query) -> Tree:
        """Every victim's answer, times the number of its records: a sum over them."""
        self.queries += 1
        captured = self.stage_at(query).captured(first=self.queries)
        size = captured.expected_batch.double()
        return {name: value.double() * size.view(-1, *(1,) * (value.dim() - 1)) for name, value in captured.seen.items()}

    def by_class(self, label: int) -> None:
        """Fish for the records of a class."""
        query = self.hook.by_class(label)
        away = (self.captured.targets != label).double()
        seen = {name: -value if name in self._last else value for name, value in self._answer(query).items()}
        self._keep(seen, query, label, away, by_class=True)

    def by_feature(self) -> None:
        """Fish for records between neighbouring thresholds, in the upper tail of the feature, where records lie far apart.

        The tail is that of a normal distribution with the mean and deviation of public features.
        """
        above = _RECORDS_BETWEEN * (0.5 + torch.arange(_THRESHOLDS, dtype=torch.float64))
        share = (above / max(self.stage.examples, 2 * float(above[-1]))).flip(0)
        usual, spread = self.hook.public.mean(), self.hook.public.std()
        thresholds = usual + spread * torch.special.ndtri(1 - share)
        measured = torch.stack([self.hook.measure(inputs) for inputs in self.captured.tensor])
        before: Tree | None = None
        low = -math.inf
        for threshold in thresholds.tolist():
            query = self.hook.above(threshold)
            answer = self._answer(query)
            if before is not None:  # whoever lies between passed before, and does not pass now
                away = (low - measured).clamp(min=0) + (measured - threshold).clamp(min=0)
                between = {name: answer[name] - before[name] for name in answer}
                self._keep(between, query, _CLASS, away.to(self.captured.device), by_class=False)
            before, low = answer, threshold

    @property
    def _last(self) -> tuple[str, ...]:
        last = self.hook.last
        return (last.weight,) if last.bias is None else (last.weight, last.bias)

    def _keep(self, seen: Tree, query: Query, label: int, away: Tensor, *, by_class: bool) -> None:
        """Keep a catch; `away` [victims, examples] tells which true record it is meant to hold: the nearest."""
        last, captured = self.hook.last, self.captured
        features = seen[last.weight][:, label]
        count = seen[last.bias][:, label] if last.bias is not None else features @ self.hook.one.to(features)
        everyone = torch.ones_like(count)
        noise = captured.deviation * captured.expected_batch * (1.0 if by_class else 2**0.5)
        which = torch.full_like(count, by_class, dtype=torch.bool)
        aim = away.masked_fill(~captured.present, math.inf).argmin(1)
        self._catches.append(
            Catch(seen, features, (everyone * label).long(), everyone * query.slope, count, which, noise, aim)
        )

    def best(self) -> Catch:
        """For each victim the catch that is closest to one record, and not empty."""
        counts = torch.stack([each.count for each in self._catches])
        away = torch.where(counts > _EMPTY, (counts.clamp(min=1e-6).log()).abs(), torch.inf)
        away = torch.where(away.isfinite(), away, 1e9)
        chosen = away.argmin(0).tolist()

        def picked(name: str) -> Tensor:
            return torch.stack([getattr(self._catches[at], name)[victim] for victim, at in enumerate(chosen)])

        seen = {
            name: torch.stack([self._catches[at].seen[name][victim] for victim, at in enumerate(chosen)])
            for name in self._catches[0].seen
        }
        return Catch(seen, *(picked(name) for name in _FIELDS))


def _read(stage: Stage, captured: Captured, catch: Catch, hook: Hook, progress: Progress | None) -> tuple[Tensor, str]:
    """The input [victims, 1, ...] behind each catch, and what it was read from."""
    scene, last = stage.scene, hook.last
    if scene.head is not None:
        return _from_features(stage, captured, catch, last), "features"
    try:
        weight, bias = first_dense(scene.network, scene.shape)
    except ModelError:
        return _searched(stage, captured, catch, hook, progress), "search"
    found = [
        invert_dense(catch.seen[weight][victim], None if bias is None else catch.seen[bias][victim], 1).inputs[0]
        for victim in range(len(captured))
    ]
    return torch.stack(found).view(len(captured), 1, *scene.shape), "first layer"


def _from_features(stage: Stage, captured: Captured, catch: Catch, last: LinearHead) -> Tensor:
    """The most likely input for the features, under the noise and the prior of public features."""
    prior = FeaturePrior.of(last, stage.scene.public, stage.scene.shape, captured.tensor[captured.present].cpu())
    features = (catch.features / catch.count.clamp(min=_EMPTY)[:, None]).cpu()
    noise = (catch.deviation / catch.count.clamp(min=_EMPTY)).cpu()
    labels = torch.cdist(features, prior.means).argmin(1)
    means = prior.typical(labels)
    along = (features - means) @ prior.basis * (prior.variances / (prior.variances + noise.square()[:, None]))
    return prior.inputs(means + along @ prior.basis.T, labels)[:, None].to(captured.device)


def _searched(stage: Stage, captured: Captured, catch: Catch, hook: Hook, progress: Progress | None) -> Tensor:
    """Search for the record whose gradient was caught, at weights of the last layer that give the same with slope 1."""
    last, rows = hook.last, torch.arange(len(captured), device=captured.device)
    count = catch.count.clamp(min=_EMPTY)
    weights = dict(captured.weights)
    weight = torch.zeros_like(weights[last.weight])
    weight[rows, catch.label] = -(hook.direction if last.bias is not None else _FAR * hook.one).to(weight)
    weights[last.weight] = weight
    scale = count * catch.slope
    seen = {name: value / scale.view(-1, *(1,) * (value.dim() - 1)) for name, value in catch.seen.items()}
    error = torch.full(weight.shape[:2], 1 / (last.rows - 1), dtype=torch.float64, device=captured.device)
    error[rows, catch.label] = -1.0  # p − y at these weights, if the record has the class of the query
    seen[last.weight] = error[..., None] * (catch.features / count[:, None])[:, None]
    if last.bias is not None:
        bias = torch.zeros_like(weights[last.bias])
        bias[rows, catch.label] = -_FAR
        weights[last.bias], seen[last.bias] = bias, error
    seen = {name: value.float() for name, value in seen.items()}
    one = torch.zeros(1, len(captured), 1, dtype=torch.int64, device=captured.device)
    alone = replace(
        captured, seen=seen, weights=weights, weights_shared=False, inputs=captured.tensor[:, :1],
        targets=catch.label[:, None], present=torch.ones_like(captured.present[:, :1]), uses=one,
        used=torch.ones_like(one, dtype=torch.bool), expected_batch=torch.ones_like(captured.expected_batch),
    )  # fmt: skip
    recipe = RECIPES["cpl"].but(labels="known")
    if last.bias is None:  # then the layers before the last one hold other records as well
        recipe = recipe.but(objective=Objective().only(last.weight))
    return reconstruct(
        alone, recipe, stage.scene.classes, seed=stage.seed, value_range=stage.scene.value_range, public=stage.public,
        progress=progress,
    ).examples  # fmt: skip
