"""Sightings: all observations of victims over a whole training, for a network with a linear head."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedcdp.attacks.cohort import Cohort, reads_sum
from fedcdp.attacks.gradient_units import promised_deviation, step_weights, weights_of
from fedcdp.attacks.linear_head import LinearHead, Link
from fedcdp.attacks.observe import Captured, Leak
from fedcdp.attacks.releases import Release, Spy, choose_victims, keys_of
from fedcdp.attacks.replay import Course
from fedcdp.config.plan import Plan
from fedcdp.errors import PlanError
from fedcdp.files.tree import Tree
from fedcdp.methods import Moment
from fedcdp.training.rounds import Simulator
from fedcdp.training.rundir import State

_MOST_VALUES = 2**30  # of all victims' gradients in all rounds, four gigabytes; more victims only if they are asked for
_MOST_WITHOUT_NOISE = 2**25  # of one victim's gradients: without noise a few releases tell as much as all


@dataclass(frozen=True)
class Sighting:
    """The observations of one victim, release by release."""

    seen: Tensor
    """[releases, classes, D], or D + 1 if the bias is trained, in units of a gradient."""
    weights: Tensor
    """[releases, classes, D]: the weights at which the gradient was taken."""
    biases: Tensor
    """[releases, classes]."""
    deviation: Tensor
    """[releases]: standard deviation of the noise on a coordinate."""
    bound: Tensor
    """[releases]: the clip bound of a single example's gradient; ∞ if it is not clipped."""
    shares: Tensor
    """[releases, examples]: multiplicity of an example's gradient in the observation."""
    has_bias: bool
    link: Link = "softmax"

    @property
    def classes(self) -> int:
        """The number of classes of an example; 0 if its target is several labels, or values."""
        rows = self.weights.shape[1]
        return rows if self.link == "softmax" else 2 if self.link == "sigmoid" and rows == 1 else 0

    def first(self) -> Sighting:
        """The first release alone."""
        names = ("seen", "weights", "biases", "deviation", "bound", "shares")
        return replace(self, **{name: getattr(self, name)[:1] for name in names})

    @cached_property
    def energies(self) -> Tensor:
        """[releases]: the squared norm of each release."""
        return self.seen.square().sum((1, 2))

    def in_float64(self, device: torch.device | str = "cpu") -> Sighting:
        """The same on a device, in float64 for computing; storing float32 takes half the memory."""
        names = ("seen", "weights", "biases", "deviation", "bound", "shares")
        return replace(self, **{name: getattr(self, name).to(device).double() for name in names})


@dataclass(frozen=True)
class Sightings:
    """The observations of all victims; `captured` holds their examples, and the first observation of each."""

    captured: Captured
    victims: list[Sighting]
    source: str
    """Description of the observed training."""


def sighted_once(captured: Captured, head: LinearHead, source: str) -> Sightings:
    """A single observation, or the mean of several at the same weights, as a sighting of one release."""
    seen, (weights, biases) = head.gradient(captured.seen), head.weights(captured.weights)
    counts = (captured.present.sum(1) * (captured.steps == 1)).tolist()
    bounds = [
        _bound(captured.plan, captured.leak, captured.round, captured.current_clip, count, weight)
        for count, weight in zip(counts, captured.client_weight.tolist(), strict=True)
    ]
    deviations = captured.deviation.tolist()
    shares = _shares(captured)
    one = torch.ones(1, dtype=torch.float64)
    found = [
        Sighting(
            seen[v : v + 1], weights[v : v + 1], biases[v : v + 1], one * deviations[v], one * bounds[v],
            shares[v : v + 1, captured.present[v].cpu()], head.bias is not None, head.link,
        )
        for v in range(len(captured))
    ]  # fmt: skip
    return Sightings(captured, found, source)


def _bound(plan: Plan, leak: Leak, round_: int, current: float | None, examples: int, weight: float) -> float:
    """The clip bound of an example's gradient; for a clipped update of one example, in units of a gradient."""
    if plan.per_example:
        return plan.clip_at(round_, current)
    if plan.method == "fed-sdp" and plan.noise_at == "client" and leak != "type2" and examples == 1:
        return plan.clip_at(round_, current) / plan.learning_rate_at(round_) / weight
    return math.inf


def _shares(captured: Captured) -> Tensor:
    """[victims, examples]: multiplicity of each example in the observation, over the divisor of a step's sum."""
    counts = torch.zeros(captured.present.shape, dtype=torch.float64, device=captured.device)
    weights = step_weights(captured.plan, captured.round, captured.steps)
    for uses, used, weight in zip(captured.uses, captured.used, weights, strict=True):
        counts.scatter_add_(1, uses, weight * used.double())
    return (counts / captured.expected_batch[:, None]).cpu()


def sighted_throughout(
    course: Course, head: LinearHead, leak: Leak, victims: int | None, progress: Callable[[int, int], None] | None = None
) -> Sightings:
    """All observations of the victims in the rounds in which they take part.

    The weights are those of the training itself. A type-2 adversary sees an example's gradient in every local step that
    draws it, released by the method's own code. A type-1 or type-0 adversary sees every update of a client; under
    secure aggregation a type-0 adversary sees the sum of every round, whose one victim is all clients together. Noise on
    single examples is drawn from the plan's own stream.
    """
    simulator, state = course.begin()
    if reads_sum(course.plan, leak):
        return _sums_throughout(course, simulator, state, head, victims, progress)
    values = course.plan.local_steps * head.rows * head.layer.in_features
    looked_at = _rounds_to_look_at(course, simulator, state, leak, values)
    wanted = choose_victims(course, simulator, leak, victims, most=max(2, _MOST_VALUES // (values * len(looked_at))))
    spy, notes = Spy(simulator, leak, wanted), _Notes(simulator, head, leak, wanted)
    for at, (now, chosen) in enumerate(course.states(simulator, state)):
        for release in spy.look(now, chosen) if at in looked_at else ():
            notes.add(release)
        if progress is not None:
            progress(at + 1, course.rounds)
    return notes.told(course.source, victims)


def _rounds_to_look_at(course: Course, simulator: Simulator, state: State, leak: Leak, values: int) -> set[int]:
    """All rounds. If releases have no noise and every client is in every round: some, evenly spaced, that fit in memory."""
    client = torch.zeros(1, dtype=torch.int64)
    _, sizes = simulator.data.records_of(client)
    at = simulator.moment(state, client.to(simulator.data.device), sizes)
    most = max(2, _MOST_WITHOUT_NOISE // values)
    noisy = bool((promised_deviation(at, leak) > 0).any())
    if noisy or course.plan.per_round < course.federation.clients or course.rounds <= most:
        return set(range(course.rounds))
    return {round(number * (course.rounds - 1) / (most - 1)) for number in range(most)}


def _sums_throughout(
    course: Course,
    simulator: Simulator,
    state: State,
    head: LinearHead,
    victims: int | None,
    progress: Callable[[int, int], None] | None,
) -> Sightings:
    """The sum of every round, as seen by a server under secure aggregation: one victim, all clients together."""
    if victims not in (None, 1):
        raise PlanError(f"victims: {victims} is not allowed; under secure aggregation type0 reads one sum a round")
    table, sizes = simulator.data.records_of(torch.arange(course.federation.clients))
    everything = torch.cat([row[:size] for row, size in zip(table, sizes.tolist(), strict=True)]).unique()
    notes = _Notes(simulator, head, "type0", [(-1, everything.tolist())])
    for at, (now, chosen) in enumerate(course.states(simulator, state)):
        cohort = Cohort(simulator, now, chosen)
        cohort.require_inverted()
        notes.add_sum(cohort, everything)
        if progress is not None:
            progress(at + 1, course.rounds)
    return notes.told(course.source, victims)


class _Notes:
    """What is kept of the victims' releases: the gradient of the head, and the weights at which it was taken."""

    def __init__(self, simulator: Simulator, head: LinearHead, leak: Leak, victims: list[tuple[int, list[int]]]) -> None:
        self._simulator, self._head, self._leak = simulator, head, leak
        self._records = dict(victims)
        self._releases: dict[tuple[int, int], list[dict[str, Tensor | float]]] = {key: [] for key in keys_of(leak, victims)}
        self._sent: tuple[int, Tensor, Tensor] | None = None  # the last round, and what the server sent in it
        self._stacked: dict[tuple[int, ...], Tensor] = {}

    def add(self, release: Release) -> None:
        """Keep a release."""
        seen, weights = self._head.gradient(release.seen), self._weights(release)
        for victim, (key, place) in enumerate(zip(release.keys, release.places, strict=True)):
            shares = torch.ones(1, dtype=torch.float64)
            if self._leak != "type2":
                steps = torch.tensor(
                    step_weights(release.at.plan, release.at.round, len(release.records)), dtype=torch.float64
                )
                records, used = release.records[:, victim].cpu(), release.used[:, victim].cpu()
                counts = [((records == record) & used).sum(1).double() @ steps for record in self._records[key[0]]]
                shares = torch.stack(counts) / int(release.at.expected_batch[place])
            self._keep(key, release.at, place, seen[victim], *weights[victim], shares)

    def _weights(self, release: Release) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias for each victim of a release. Those that all victims of a round share are kept once."""
        if not release.shared:
            weights, biases = self._head.weights(release.weights)
            return list(zip(weights, biases, strict=True))
        if self._sent is None or self._sent[0] != release.at.round:
            weights, biases = self._head.weights({name: value[0] for name, value in release.weights.items()})
            self._sent = release.at.round, weights.float(), biases
        return [self._sent[1:]] * len(release.keys)

    def add_sum(self, cohort: Cohort, everything: Tensor) -> None:
        """Keep the sum of one round; `everything` lists the records of all clients, in ascending order."""
        seen = self._head.gradient(cohort.observed(self._simulator.noise))
        weights, biases = self._head.weights(cohort.state.weights)
        counts = torch.zeros(len(everything), dtype=torch.float64)
        for _, draw in cohort.parts:
            used = torch.searchsorted(everything, draw.positions[draw.present]).cpu()
            counts += torch.bincount(used, minlength=len(everything))
        bound = cohort.parts[0][0].clip_bound if cohort.simulator.plan.per_example else math.inf
        self._releases[-1, -1].append({
            "seen": seen.float(), "weights": weights.float(), "biases": biases, "shares": counts / cohort.records,
            "deviation": cohort.deviation, "weight": 1.0, "bound": bound,
        })  # fmt: skip

    def _keep(
        self, key: tuple[int, int], at: Moment, place: int, seen: Tensor, weights: Tensor, biases: Tensor, shares: Tensor
    ) -> None:
        """Keep what was seen of the client at this place."""
        weight = 1.0 if self._leak == "type2" else float(weights_of(at)[place])
        self._releases[key].append({
            "seen": seen.float(), "weights": weights.float(), "biases": biases, "shares": shares,
            "deviation": float(promised_deviation(at, self._leak)[place]), "weight": weight,
            "bound": _bound(at.plan, self._leak, at.round, at.current_clip, len(shares), weight),
        })  # fmt: skip

    def told(self, source: str, wanted: int | None) -> Sightings:
        """All observations, without victims that were never observed."""
        seen = {key: releases for key, releases in self._releases.items() if releases}
        if not seen or (wanted is not None and len(seen) < wanted):
            raise PlanError(
                f"victims: {wanted or 1} is not allowed; {self._leak} has at most {len(seen)} here, of those taking part"
            )
        keys, found, own = list(seen), [], []
        del seen
        for key in keys:
            releases = self._releases.pop(key)  # each is freed once it has been copied
            own.append(float(releases[0]["weight"]))
            found.append(self._sighting(releases))
        records = [[r] if r >= 0 else self._records[c] for c, r in keys]
        return Sightings(self._captured(found, records, [client for client, _ in keys], own), found, source)

    def _sighting(self, releases: list[dict[str, Tensor | float]]) -> Sighting:
        def stacked(name: str) -> Tensor:
            return torch.stack([torch.as_tensor(each[name]) for each in releases])

        same = tuple(id(each["weights"]) for each in releases)
        if same not in self._stacked:
            self._stacked[same] = stacked("weights")
        return Sighting(
            stacked("seen"), self._stacked[same], stacked("biases"), stacked("deviation").double(),
            stacked("bound").double(), stacked("shares"), self._head.bias is not None, self._head.link,
        )  # fmt: skip

    def _captured(
        self, found: list[Sighting], records: list[list[int]], clients: list[int], client_weights: list[float]
    ) -> Captured:
        """The victims with their examples; the observation is that of the first release."""
        simulator, most = self._simulator, max(map(len, records))
        train = simulator.data.federation.train
        padded = torch.tensor([each + each[:1] * (most - len(each)) for each in records])
        present = torch.arange(most) < torch.tensor([[len(each)] for each in records])
        device, layout = simulator.data.device, simulator.engine.layout
        first = torch.stack([each.seen[0] for each in found]).float().to(device)
        weights = torch.stack([each.weights[0] for each in found]).float().to(device)
        rows = layout.shapes[self._head.weight][1]
        trees: list[Tree] = [{self._head.weight: first[..., :rows]}, {self._head.weight: weights}]
        if self._head.bias is not None:
            trees[0][self._head.bias] = first[..., rows]
            trees[1][self._head.bias] = torch.stack([each.biases[0] for each in found]).float().to(device)
        slots = torch.arange(most, device=device).expand(1, len(found), most)
        return Captured(
            leak=self._leak, plan=simulator.plan, engine=simulator.engine, round=0, seen=trees[0], weights=trees[1],
            weights_shared=False, inputs=train.tensor[padded].to(device), targets=train.targets[padded].to(device),
            present=present.to(device), uses=slots, used=present[None].to(device),
            expected_batch=torch.tensor([len(each) for each in records], device=device),
            client_weight=torch.tensor(client_weights, device=device),
            deviation=torch.stack([each.deviation[0] for each in found]).to(device),
            releases=max(len(each.seen) for each in found), current_clip=None,
            slot=torch.zeros(len(found), dtype=torch.int64, device=device), client=torch.tensor(clients, device=device),
            task="binary" if found[0].link == "sigmoid" and found[0].classes else train.task,
            summed_clients=simulator.plan.per_round if reads_sum(simulator.plan, self._leak) else 0,
        )  # fmt: skip
