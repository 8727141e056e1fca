"""Observations: what each type of adversary sees of its victims, produced by the methods' own code.

| leak | the adversary | sees |
| --- | --- | --- |
| `type2` | is on the client during local training | one example's gradient, as the method releases it |
| `type1` | is on the client after local training | the client's update, as it leaves the client |
| `type0` | is the server | the client's update, as received; under secure aggregation, the sum over a round's clients |

`capture` taps a training and returns `Captured`: the releases, the adversary's other knowledge, and the ground truth that
scores the attack. Observations are in units of a gradient (`gradient_units`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedcdp.attacks.cohort import Cohort, reads_sum
from fedcdp.attacks.gradient_units import as_gradient, promised_deviation, step_weights, weights_of
from fedcdp.config.plan import Plan
from fedcdp.data.tasks import TaskName
from fedcdp.engine.base import Batch, Engine
from fedcdp.errors import DataError, PlanError
from fedcdp.files.tree import Inputs, Tree, each_tensor, tensors_in
from fedcdp.mechanism.noise import Noise, SeededNoise, Silence, noise_of
from fedcdp.mechanism.randomness import numpy_generator, stream_key
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.methods import METHODS, Moment, take_part
from fedcdp.training.evaluation import is_binary
from fedcdp.training.rounds import Simulator
from fedcdp.training.rundir import State

Leak = Literal["type0", "type1", "type2"]
LEAKS: tuple[Leak, ...] = get_args(Leak)

_BY_VICTIM = ("targets", "present", "expected_batch", "client_weight", "deviation", "slot", "client")


@dataclass(frozen=True)
class Captured:
    """Observations of N victims, the adversary's other knowledge, and the true examples for scoring."""

    leak: Leak
    plan: Plan
    """The plan as run: `local_steps` is the number of steps in the captured update."""
    engine: Engine
    round: int
    seen: Tree
    """[victims, ...] in units of a gradient; the mean over releases if there are several."""
    weights: Tree
    """[victims, ...]: the weights at which the gradient was taken, or local training started."""
    weights_shared: bool
    """Whether the weights are the same for all victims."""
    inputs: Inputs
    """[victims, examples, ...]: the distinct examples behind the observation."""
    targets: Tensor
    """[victims, examples, ...]."""
    present: Tensor
    """[victims, examples]: which slots hold an example; victims may have different numbers of examples."""
    uses: Tensor
    """[steps, victims, slots]: which of its examples a victim used in each step."""
    used: Tensor
    """[steps, victims, slots]: whether the slot was filled."""
    expected_batch: Tensor
    """[victims]: divisor of the sum over a step (1 for a single example)."""
    client_weight: Tensor
    """[victims]: the weight of the victim's update, N_i over its mean; 1 if all are equal, and for a single example."""
    deviation: Tensor
    """[victims]: standard deviation of the noise that the method promises on each coordinate of `seen`; 0: none."""
    releases: int
    current_clip: float | None
    slot: Tensor
    """[victims]: for `type2`, the position of the example in its client's batch."""
    client: Tensor
    """[victims]: the number of the victim's client; −1 if it is not known."""
    task: TaskName = "classification"
    """What the network predicts; `binary` wherever two classes share one output."""
    summed_clients: int = 0
    """How many clients' updates were added up before anyone read them; 0: each was read alone."""

    def __len__(self) -> int:
        return len(self.present)

    @property
    def tensor(self) -> Tensor:
        """The inputs, where they are one tensor."""
        if isinstance(self.inputs, dict):
            raise DataError(f"inputs are {', '.join(self.inputs)}: this attack needs inputs in a single tensor")
        return self.inputs

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input, where inputs are one tensor."""
        return tuple(self.tensor.shape[2:])

    @property
    def most(self) -> int:
        """The largest number of examples behind an observation."""
        return self.present.shape[1]

    @property
    def steps(self) -> int:
        """Number of local steps behind the observation."""
        return len(self.uses)

    @property
    def means(self) -> Tensor:
        """[victims]: number of mean gradients summed over a victim's examples; the step count if every batch was full.

        With momentum or a proximal term, a step counts by its weight in the update (`step_weights`).
        """
        weights = torch.tensor(step_weights(self.plan, self.round, self.steps), device=self.device)
        return (self.used.sum(2) * weights[:, None]).sum(0) / self.expected_batch

    @property
    def noisy(self) -> bool:
        """Whether the method promises noise."""
        return bool((self.deviation > 0).any())

    @property
    def noise_level(self) -> float:
        """The root mean square of the victims' noise deviations."""
        return float(self.deviation.square().mean().sqrt())

    @property
    def device(self) -> torch.device:
        """The device that holds the tensors."""
        return self.present.device

    def take(self, who: Tensor) -> Captured:
        """The observations of some victims, in the given order."""
        taken: dict[str, Any] = {name: getattr(self, name)[who] for name in _BY_VICTIM}
        taken["inputs"] = each_tensor(self.inputs, lambda value: value[who])
        seen = {name: value[who] for name, value in self.seen.items()}
        if self.weights_shared:
            weights = {name: value[:1].expand(len(who), *value.shape[1:]) for name, value in self.weights.items()}
        else:
            weights = {name: value[who] for name, value in self.weights.items()}
        return replace(self, seen=seen, weights=weights, uses=self.uses[:, who], used=self.used[:, who], **taken)

    def clip_bound(self) -> float:
        """The clip bound C in the captured round."""
        return self.plan.clip_at(self.round, self.current_clip)


def join(parts: list[Captured]) -> Captured:
    """The victims of all parts, in order."""
    most, slots = max(part.most for part in parts), max(part.uses.shape[2] for part in parts)

    def cat(values: list[Tensor]) -> Tensor:
        return torch.cat([widen(value, 1, most) for value in values])

    columns = [cat(list(each)) for each in zip(*(tensors_in(part.inputs) for part in parts), strict=True)]
    first = parts[0].inputs
    inputs: Inputs = dict(zip(first, columns, strict=True)) if isinstance(first, dict) else columns[0]
    return replace(
        parts[0],
        inputs=inputs,
        targets=cat([part.targets for part in parts]),
        present=cat([part.present for part in parts]),
        seen={name: torch.cat([part.seen[name] for part in parts]) for name in parts[0].seen},
        weights={name: torch.cat([part.weights[name] for part in parts]) for name in parts[0].weights},
        weights_shared=all(part.weights_shared for part in parts),
        uses=torch.cat([widen(part.uses, 2, slots) for part in parts], dim=1),
        used=torch.cat([widen(part.used, 2, slots) for part in parts], dim=1),
        expected_batch=torch.cat([part.expected_batch for part in parts]),
        client_weight=torch.cat([part.client_weight for part in parts]),
        deviation=torch.cat([part.deviation for part in parts]),
        slot=torch.cat([part.slot for part in parts]),
        client=torch.cat([part.client for part in parts]),
    )


def widen(value: Tensor, axis: int, length: int) -> Tensor:
    """Pad an axis with zeros at its end to this length."""
    missing = length - value.shape[axis]
    if not missing:
        return value
    shape = list(value.shape)
    shape[axis] = missing
    return torch.cat([value, value.new_zeros(shape)], dim=axis)


_USUAL = 100  # default number of victims, if there are that many
_MEMORY = {"cpu": 2**28, "cuda": 2**32}  # bytes for the releases of one chunk of clients


def state_at(simulator: Simulator, state: State, round_: int) -> State:
    """The state at the beginning of a round, computed by running the rounds before it."""
    while state.round < round_:
        chosen = choose_clients(simulator.plan, simulator.data.federation.clients, state.round)
        state = simulator.round(state, torch.from_numpy(chosen))
    return state


@dataclass(frozen=True)
class Look:
    """Where and under which conditions an adversary observes a round."""

    leak: Leak
    step: int = 0
    """The local step, for `type2`."""
    releases: int = 1
    """How often the same round is run with fresh noise; the adversary averages. This is the adversary's best case, in which
    the weights do not change between participations."""
    first: int = 0
    """The number of the first release: releases with different numbers have independent noise (0: the plan's own)."""
    without_example: bool = False
    """The world without the victim's first example: zeroed out, as in the privacy statement's neighbouring relation."""
    silent: bool = False
    """Without the method's noise: the observation that an adversary who knows the examples expects."""
    unequal: bool = False
    """Also observe sums whose records do not weigh the same: for attacks that read each record by itself."""


def capture(simulator: Simulator, state: State, look: Look, victims: int | None = None) -> Captured:
    """Observe victims in the round that begins at `state`.

    Victims are clients, drawn from the plan's seed; for `type2`, one example per client (more if there are fewer clients
    than victims). Without a number, up to 100 victims are observed. A server under secure aggregation has one victim: the
    clients of the round together.
    """
    wanted = _USUAL if victims is None else victims
    _check(simulator.plan, look, wanted)
    if reads_sum(simulator.plan, look.leak):
        return replace(_of_cohort(simulator, state, look, victims), task=_task_of(simulator, state))
    parts, found = [], 0
    for clients in _victim_clients(simulator, wanted).split(min(wanted, _clients_at_once(simulator, look))):
        part = capture_clients(simulator, state, look, clients)
        if part is not None:
            parts.append(part)
            found += len(part) if look.leak != "type2" else int((part.slot == 0).sum())
        if found >= wanted:
            break
    seen = join(parts) if parts else None
    if seen is None or (victims is not None and len(seen) < victims):
        raise PlanError(
            f"victims: {wanted} is not allowed; {look.leak} has at most {0 if seen is None else len(seen)} here, in a "
            f"federation of {simulator.data.federation.clients} clients"
        )
    return replace(seen.take(seen.slot.argsort(stable=True)[:wanted]), task=_task_of(simulator, state))


def _task_of(simulator: Simulator, state: State) -> TaskName:
    """The task of the data; `binary` if a network with a single output tells two classes apart."""
    data = simulator.data.federation.train
    if data.task != "classification" or data.classes != 2:
        return data.task
    first = each_tensor(simulator.data.examples.inputs, lambda value: value[:1])
    return "binary" if is_binary(simulator.engine.outputs(state.weights, first)) else data.task


def _check(plan: Plan, look: Look, victims: int) -> None:
    if look.leak not in LEAKS:
        raise PlanError(f"leak: {look.leak!r} is not one of {', '.join(LEAKS)}")
    for name, value, least in (("victims", victims, 1), ("releases", look.releases, 1), ("step", look.step, 0)):
        if value < least:
            raise PlanError(f"{name}: {value} is not allowed; it must be at least {least}")
    if look.step >= plan.local_steps:
        raise PlanError(f"step: {look.step} is not allowed; a client takes {plan.local_steps} local steps, counted from 0")
    if look.leak != "type2" and look.step:
        raise PlanError(f"step: {look.step} is for type2; a {look.leak} adversary sees whole updates")


def _victim_clients(simulator: Simulator, victims: int) -> Tensor:
    """Clients in a random order that does not depend on `victims`; more than needed, because some may draw no record."""
    order = numpy_generator(simulator.plan.seed, "victims").permutation(simulator.data.federation.clients)
    return torch.from_numpy(order[: 4 * victims + 64])


def _clients_at_once(simulator: Simulator, look: Look) -> int:
    # Released gradients are held about eight times: raw, clipped, noised, summed, and as random words.
    single = look.leak == "type2" or simulator.plan.per_example
    values = simulator.engine.layout.size * (simulator.plan.slots if single else 2)
    return int(max(1, min(1024, _MEMORY.get(simulator.data.device.type, 2**28) // (8 * 4 * values))))


def capture_clients(simulator: Simulator, state: State, look: Look, clients: Tensor) -> Captured | None:
    """The observation of these clients; None if none of them drew a record."""
    table, sizes = simulator.data.records_of(clients)
    at = simulator.moment(state, clients.to(simulator.data.device), sizes)
    draw = simulator.data.draw(at, table, sizes)
    drawn = list(zip(draw.positions, draw.present, strict=True))[: look.step + 1 if look.leak == "type2" else None]
    if not any(bool(present.any()) for _, present in drawn):
        return None
    batches = [
        simulator.data.examples.batch(records, _in_world(records, present, drawn, look)) for records, present in drawn
    ]
    total: Tree = {}
    for number in range(look.first, look.first + look.releases):
        seen, weights = _release(simulator, state, look, batches, at, number)
        total = {name: value + seen[name] for name, value in total.items()} if total else seen
    mean = {name: value / look.releases for name, value in total.items()}
    deviation = promised_deviation(at, look.leak) * (0.0 if look.silent else 1 / math.sqrt(look.releases))
    known = _examples(simulator, drawn[-1]) if look.leak == "type2" else _updates(simulator, drawn, at)
    place = (known["client"], known["slot"]) if look.leak == "type2" else (known["client"],)
    known |= {"client": at.clients[place[0]], "deviation": deviation[place[0]]}
    return Captured(
        leak=look.leak,
        plan=simulator.plan,
        engine=simulator.engine,
        round=state.round,
        seen={name: value[place].float() for name, value in mean.items()},  # clipped for `sum` noise, it is float64
        weights={name: value[place[0]] for name, value in weights.items()},
        weights_shared=len(drawn) == 1 or look.leak != "type2",
        releases=look.releases,
        current_clip=state.clip,
        **known,
    )


def cohort_of(simulator: Simulator, state: State) -> Cohort:
    """The clients of the round that begins at `state`."""
    chosen = choose_clients(simulator.data.draws, simulator.data.federation.clients, state.round)
    return Cohort(simulator, state, torch.from_numpy(chosen))


def noise_of_release(simulator: Simulator, number: int, silent: bool = False) -> Noise:
    """The noise of a release; releases with different numbers have independent noise (0: the plan's own)."""
    plan, noise = simulator.plan, simulator.noise
    if silent:
        return Silence(simulator.engine.layout)
    if number and isinstance(noise, SeededNoise):
        return noise_of(plan.but(seed=stream_key(plan.seed, "release", number) >> 1), simulator.engine.layout)
    return noise


def _of_cohort(simulator: Simulator, state: State, look: Look, victims: int | None) -> Captured:
    """The observation of a whole round, as one victim that holds the records of all its clients."""
    if victims not in (None, 1):
        raise PlanError(f"victims: {victims} is not allowed; under secure aggregation type0 reads one sum a round")
    cohort = cohort_of(simulator, state)
    cohort.require_inverted(unequal=look.unequal)
    first = int(cohort.clients[0]) if look.without_example else None
    releases = [
        cohort.observed(noise_of_release(simulator, number, look.silent), first)
        for number in range(look.first, look.first + look.releases)
    ]
    mean = {name: torch.stack([each[name] for each in releases]).mean(0)[None].float() for name in releases[0]}
    records = torch.cat([draw.positions[draw.present] for _, draw in cohort.parts])
    used = torch.ones_like(records, dtype=torch.bool)
    slots = torch.arange(len(records), device=records.device)[None]
    one = torch.ones(1, device=records.device)
    deviation = cohort.deviation * (0.0 if look.silent else 1 / math.sqrt(look.releases))
    return Captured(
        leak=look.leak,
        plan=simulator.plan,
        engine=simulator.engine,
        round=state.round,
        seen=mean,
        weights={name: value[None] for name, value in state.weights.items()},
        weights_shared=True,
        inputs=each_tensor(simulator.data.examples.inputs, lambda value: value[records][None]),
        targets=simulator.data.examples.targets[records][None],
        present=used[None],
        uses=slots[None],
        used=used[None, None],
        expected_batch=(one * cohort.records).long(),
        client_weight=one,
        deviation=one.double() * deviation,
        releases=look.releases,
        current_clip=state.clip,
        slot=slots[0, :1],
        client=-torch.ones_like(slots[0, :1]),
        summed_clients=len(cohort.clients),
    )


def _in_world(records: Tensor, present: Tensor, drawn: list[tuple[Tensor, Tensor]], look: Look) -> Tensor:
    """Which slots are filled; the victim's example is removed if `without_example` is set.

    For `type2` every example of the step is a victim and is zeroed out; otherwise, only the client's first example.
    """
    if not look.without_example:
        return present
    if look.leak == "type2":
        return torch.zeros_like(present) if records is drawn[-1][0] else present
    first = torch.stack([torch.where(real, each, 2**62).amin(1) for each, real in drawn]).amin(0)
    return present & (records != first[:, None])


def _release(
    simulator: Simulator, state: State, look: Look, batches: list[Batch], at: Moment, number: int
) -> tuple[Tree, Tree]:
    """Run the round once: the adversary's observation, and the weights it knows."""
    told: dict[tuple[str, int], Tree] = {}

    def tap(reader: str, moment: Moment, tree: Tree) -> None:
        told[reader, moment.step] = tree

    tapped = replace(at, noise=noise_of_release(simulator, number, look.silent), tap=tap)
    take_part(METHODS[simulator.plan.method], state.weights, batches, tapped)
    if look.leak == "type2":
        return told["type2", look.step], told["local-weights", look.step]
    return as_gradient(told[look.leak, 0], at), told["local-weights", 0]


def _examples(simulator: Simulator, drawn: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Every example of the step as a separate victim."""
    records, present = drawn
    client, slot = present.nonzero(as_tuple=True)
    example = records[client, slot][:, None]
    one = torch.zeros(1, len(client), 1, dtype=torch.int64, device=records.device)
    return {
        "client": client,
        "slot": slot,
        "inputs": each_tensor(simulator.data.examples.inputs, lambda value: value[example]),
        "targets": simulator.data.examples.targets[example],
        "present": torch.ones_like(example, dtype=torch.bool),
        "uses": one,
        "used": torch.ones_like(one, dtype=torch.bool),
        "expected_batch": torch.ones_like(client),
        "client_weight": torch.ones(len(client), device=records.device),
    }


def _updates(simulator: Simulator, drawn: list[tuple[Tensor, Tensor]], at: Moment) -> dict[str, Any]:
    """Every client that drew a record as a victim, with the distinct examples used in its local steps."""
    slots = max(records.shape[1] for records, _ in drawn)
    records = torch.stack([widen(each, 1, slots) for each, _ in drawn])
    used = torch.stack([widen(present, 1, slots) for _, present in drawn])
    client = used.any(0).any(1).nonzero()[:, 0]
    distinct = [records[:, each][used[:, each]].unique() for each in client.tolist()]
    most = max(len(each) for each in distinct)
    counts = torch.tensor([len(each) for each in distinct], device=used.device)
    examples = torch.stack([torch.cat([each, each[:1].expand(most - len(each))]) for each in distinct])
    places = [
        torch.searchsorted(each, records[:, one].contiguous()).clamp(max=len(each) - 1)
        for each, one in zip(distinct, client.tolist(), strict=True)
    ]
    return {
        "client": client,
        "slot": torch.zeros_like(client),
        "inputs": each_tensor(simulator.data.examples.inputs, lambda value: value[examples]),
        "targets": simulator.data.examples.targets[examples],
        "present": torch.arange(most, device=used.device) < counts[:, None],
        "uses": torch.stack(places, dim=1),
        "used": used[:, client],
        "expected_batch": at.expected_batch[client],
        "client_weight": weights_of(at)[client],
    }
