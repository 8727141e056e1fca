"""Accumulation: all that was seen of the victims in a training, each time at other weights, for any network.

`observe_throughout` replays or trains the rounds and keeps what was seen in at most `MOST_ROUNDS` rounds, evenly spaced, and
in fewer where memory is short. A linear head needs less: it keeps the gradient of one layer (`sightings`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcdp.attacks.candidate_pool import POOL
from fedcdp.attacks.cohort import reads_sum
from fedcdp.attacks.gradient_units import promised_deviation, weights_of
from fedcdp.attacks.observations import Observation
from fedcdp.attacks.observe import Captured, Leak, join
from fedcdp.attacks.reconstruct import Progress
from fedcdp.attacks.releases import Key, Release, Spy, choose_victims, keys_of
from fedcdp.attacks.replay import Course
from fedcdp.data.tasks import TaskName
from fedcdp.engine import Engine
from fedcdp.errors import ModelError, PlanError
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.training.rounds import Simulator

MOST_ROUNDS = 100
"""The most rounds that are accumulated; of a longer training, this many are observed, evenly spaced."""
_MOST_STEPS = 10  # local steps of an update through which a search goes
_MOST_EXAMPLES = 16  # records of a client that its updates are searched for
_EVALUATIONS = 150  # of each victim, in a typical search
_MEMORY = {"cpu": 2**30, "cuda": 2**34}  # bytes for all that is seen


@dataclass(frozen=True)
class Accumulation:
    """What was seen of the victims in a training; `captured` holds their examples, and the first observation of each."""

    captured: Captured
    observations: list[Observation]
    source: str
    """Description of the observed training."""
    rounds: int
    """How many rounds were observed."""
    rounds_of: int
    """How many rounds the training has."""

    @property
    def releases(self) -> Tensor:
        """[victims]: how often each was observed."""
        return torch.bincount(torch.cat([each.who for each in self.observations]), minlength=len(self.captured))

    @property
    def deviation(self) -> Tensor:
        """[victims]: the noise of one observation that would tell as much; 0 if some observation has no noise."""
        total = torch.zeros(len(self.captured), dtype=torch.float64, device=self.captured.device)
        for each in self.observations:
            total.index_add_(0, each.who, each.captured.deviation.double() ** -2)
        return total**-0.5


def why_not_accumulated(course: Course | None, leak: Leak) -> str | None:
    """Why the rounds of a training are not accumulated; None if they are."""
    if course is None or course.rounds < 1:
        return "it needs all rounds of a training: give the untrained model, and no round"
    if reads_sum(course.plan, leak):
        return "under secure aggregation type0 reads only sums of many clients; type1 reads one client"
    if leak != "type2" and course.plan.local_steps > _MOST_STEPS:
        return f"it searches through at most {_MOST_STEPS} local steps of an update; this plan has {course.plan.local_steps}"
    return None


def work(course: Course, leak: Leak, victims: int) -> float:
    """About how many gradients of single examples an attack on all rounds computes: training, candidates and search."""
    plan, seen = course.plan, min(course.rounds, MOST_ROUNDS)
    trained = course.rounds * plan.per_round * plan.local_steps * plan.batch_size
    pools = victims if leak == "type2" and plan.local_steps > 1 else 1
    return trained + seen * (pools * POOL + victims * _EVALUATIONS * (1 if leak == "type2" else plan.batch_size))


def observe_throughout(
    course: Course, engine: Engine, leak: Leak, victims: int | None, task: TaskName, progress: Progress | None = None
) -> Accumulation:
    """All observations of the victims in a training; `engine` computes the gradients of the whole network."""
    if (reason := why_not_accumulated(course, leak)) is not None:
        raise ModelError(f"attack: accumulated does not apply: {reason}")
    simulator, state = course.begin()
    chosen_victims = choose_victims(course, simulator, leak, victims)
    spy = Spy(simulator, leak, chosen_victims)
    kept = _kept_rounds(course, simulator, leak, chosen_victims)
    rounds: list[list[Release]] = []
    for at, (now, chosen) in enumerate(course.states(simulator, state)):
        if at in kept:
            rounds.append(list(spy.look(now, chosen)))
        if progress is not None:
            progress(at + 1, course.rounds)
    records = _records(rounds)
    keys = [key for key in keys_of(leak, chosen_victims) if key in records]
    if not keys or (victims is not None and len(keys) < victims):
        raise PlanError(f"victims: {victims or 1} is not allowed; {leak} has at most {len(keys)} here, of those taking part")
    made = _Assembly(simulator, engine, leak, task, {key: records[key] for key in keys})
    observations = [each for releases in rounds for each in made.observations(releases)]
    return Accumulation(_first(observations, len(keys)), observations, course.source, len(rounds), course.rounds)


def _kept_rounds(course: Course, simulator: Simulator, leak: Leak, victims: list[tuple[int, list[int]]]) -> set[int]:
    """The rounds that are observed: those with a victim, evenly spaced, as many as are allowed and memory holds."""
    counts = {client: len(records) if leak == "type2" else 1 for client, records in victims}
    there = {}
    for number in range(course.rounds):
        chosen = choose_clients(simulator.data.draws, course.federation.clients, number).tolist()
        if here := sum(counts.get(client, 0) for client in chosen):
            there[number] = here
    bytes_each = 4 * simulator.engine.layout.size * (2 if leak == "type2" else 1)
    held = max(1, _MEMORY.get(simulator.data.device.type, 2**30) // (bytes_each * max(there.values(), default=1)))
    count = min(len(there), MOST_ROUNDS, held)
    numbers = list(there)
    return {numbers[at * len(numbers) // count] for at in range(count)}


def _records(rounds: list[list[Release]]) -> dict[Key, Tensor]:
    """The records behind the observations of each victim, in ascending order; without victims that used none."""
    used: dict[Key, list[Tensor]] = defaultdict(list)
    for release in (release for releases in rounds for release in releases):
        for victim, key in enumerate(release.keys):
            if bool(release.used[:, victim].any()):
                used[key].append(release.records[:, victim][release.used[:, victim]])
    found = {key: torch.cat(records).unique() for key, records in used.items()}
    most = max(map(len, found.values()), default=0)
    if most > _MOST_EXAMPLES:
        raise ModelError(
            f"attack: accumulated searches for at most {_MOST_EXAMPLES} records of a client; these updates hold {most}"
        )
    return found


class _Assembly:
    """Turns releases into observations of numbered victims."""

    def __init__(self, simulator: Simulator, engine: Engine, leak: Leak, task: TaskName, records: dict[Key, Tensor]) -> None:
        self._simulator, self._engine, self._leak, self._task = simulator, engine, leak, task
        self._numbers = {key: number for number, key in enumerate(records)}
        self._records = list(records.values())
        most, device = max(map(len, self._records)), self._records[0].device
        padded = torch.stack([torch.cat([each, each[:1].expand(most - len(each))]) for each in self._records])
        counts = torch.tensor([len(each) for each in self._records], device=device)
        self._present = torch.arange(most, device=device) < counts[:, None]
        self._clients = torch.tensor([client for client, _ in records], device=device)
        train = simulator.data.federation.train
        self._inputs = train.tensor[padded.cpu()].to(device)
        self._targets = train.targets[padded.cpu()].to(device)

    def observations(self, releases: list[Release]) -> list[Observation]:
        """All that was seen in one round: the first release of each victim, the second ones, and so on."""
        layers: dict[int, list[tuple[Tensor, Captured]]] = defaultdict(list)
        times: dict[int, int] = defaultdict(int)
        for release in releases:
            rows: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for row, key in enumerate(release.keys):
                number = self._numbers.get(key)
                if number is not None and bool(release.used[:, row].any()):
                    rows[times[number]].append((row, number))
                    times[number] += 1
            for time, mine in rows.items():
                row, number = torch.tensor(mine, device=self._present.device).T
                layers[time].append((number, self._captured(release, row, number)))
        return [_merged(parts) for parts in layers.values()]

    def _captured(self, release: Release, rows: Tensor, numbers: Tensor) -> Captured:
        """What was seen of the victims in these rows of a release, which have these numbers."""
        at, single = release.at, self._leak == "type2"
        places = torch.tensor(release.places, device=rows.device)[rows]
        records, used = release.records[:, rows], release.used[:, rows]
        own = [self._records[number] for number in numbers.tolist()]
        uses = [torch.searchsorted(mine, records[:, row].contiguous()) for row, mine in enumerate(own)]
        uses = [place.clamp(max=len(mine) - 1) for place, mine in zip(uses, own, strict=True)]  # a slot may be empty
        one = torch.ones_like(numbers)
        weights = {name: value[:1].expand(len(rows), *value.shape[1:]) if release.shared else value[rows]
                   for name, value in release.weights.items()}  # fmt: skip
        return Captured(
            leak=self._leak, plan=self._simulator.plan, engine=self._engine, round=at.round,
            seen={name: value[rows] for name, value in release.seen.items()}, weights=weights,
            weights_shared=release.shared, inputs=self._inputs[numbers], targets=self._targets[numbers],
            present=self._present[numbers], uses=torch.stack(uses, dim=1), used=used,
            expected_batch=one if single else at.expected_batch[places],
            client_weight=one.float() if single else weights_of(at)[places],
            deviation=promised_deviation(at, self._leak)[places], releases=1, current_clip=at.current_clip,
            slot=torch.zeros_like(numbers), client=self._clients[numbers], task=self._task,
        )  # fmt: skip


def _merged(parts: list[tuple[Tensor, Captured]]) -> Observation:
    """One observation of the victims of all parts, in ascending order."""
    who, captured = torch.cat([numbers for numbers, _ in parts]), join([part for _, part in parts])
    order = who.argsort()
    return Observation(who[order], captured.take(order))


def _first(observations: list[Observation], victims: int) -> Captured:
    """The first observation of every victim."""
    missing = torch.ones(victims, dtype=torch.bool, device=observations[0].who.device)
    parts = []
    for each in observations:
        new = missing[each.who]
        if bool(new.any()):
            parts.append((each.who[new], each.captured.take(new.nonzero()[:, 0])))
            missing[each.who] = False
    counts = torch.bincount(torch.cat([each.who for each in observations]))
    first = _merged(parts).captured
    return replace(first, releases=int(counts.max()), weights_shared=first.weights_shared and len(parts) == 1)
