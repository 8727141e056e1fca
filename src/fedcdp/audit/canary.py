"""The canary: a network in which a record can have any gradient, and trials that observe what is released about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedcdp.audit.intervals import Numbers
from fedcdp.config.plan import Plan
from fedcdp.engine import Batch, FunctionalEngine
from fedcdp.files.tree import Tree
from fedcdp.mechanism.noise import SeededNoise, noise_of
from fedcdp.mechanism.randomness import stream_key
from fedcdp.mechanism.sampling import choose_clients, choose_records
from fedcdp.mechanism.secure_sum import from_integers
from fedcdp.methods import Method, Moment, train_locally
from fedcdp.methods.aggregation import Aggregate, server_update

_FEWEST_TRIALS, _MOST_TRIALS = 5_000, 4_000_000
_BUDGET = 7e6  # approximate microseconds for the default number of trials in one world
_VALUES_AT_ONCE = 2**20
_MOST_FITTED = 256  # coordinates; with more, no discriminant is fitted


class LinearCanaries(nn.Module):
    """A network that is linear in its weights, all zero: an example's input equals the gradient of its loss, to the bit."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 1) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ torch.cat([parameter.flatten() for parameter in self.parameters()])


@dataclass
class Laboratory:
    """Independent trials of a plan: each has its own client, or, for `model` and a secure sum, its own cohort.

    Under secure aggregation the server reads the sum of a cohort. Colluders tell it their updates, so the clients of a trial
    are the honest ones.
    """

    plan: Plan
    method: Method
    adversary: str
    unit: str
    layers: int
    records: int
    participations: int
    relation: str = "zero-out"
    clients: int | None = None
    """The number of clients from which a round is drawn; None: the canary's client takes part in every round."""
    copies: int = 1
    """The number of clients of the cohort that hold the canary."""
    others: int | None = None
    """Records at each of the cohort's other clients; None: as many as at the canary's client."""
    width: int = 3
    """The number of inputs of each layer."""
    exposures: int = 0

    def __post_init__(self) -> None:
        plan, network = self.plan, LinearCanaries(self.layers, self.width)
        self.engine = FunctionalEngine(network, loss=lambda outputs, _: outputs.mean())
        self.layout = self.engine.layout
        self.weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
        self.cohort = {"model": plan.per_round}.get(self.adversary, self.copies)
        if self.adversary == "server" and plan.secure_aggregation:
            self.cohort = plan.honest
        by_chance = plan.record_sampling != "partition" and plan.batch_size < self.records
        counts_vary = plan.record_sampling == "poisson" and plan.method != "fed-sdp"
        drawn = self.clients is not None and self.clients > plan.per_round
        self.is_mixture = drawn or (by_chance and (self.unit == "record" or counts_vary))
        # A direction of norm 1 in every group, with no two coordinates alike, so noise shared by several coordinates can be
        # distinguished from it; and a length far beyond the clip bound, even for the resulting update.
        # If updates are pruned, one coordinate in every group: a large entry survives pruning, other clients' noise does
        # not.
        uneven = self.layout.unflatten(torch.tensor([(-1.0) ** k * (k + 1) for k in range(self.layout.size)]))
        if plan.compression:
            firsts = {group[0] for group in self.layout.groups(plan.clip_mode)}
            uneven = {name: _first_alone(value) * (name in firsts) for name, value in uneven.items()}
        groups = [torch.cat([uneven[name].flatten() for name in g]) for g in self.layout.groups(plan.clip_mode)]
        self.direction = torch.cat([group / group.norm() for group in groups])
        self.length = beyond_clip(plan, self.participations)

    def affordable_trials(self) -> int:
        """The number of trials that fit the time budget, by a rough estimate of their cost."""
        a_step = 1 + 0.4 * self.plan.slots + (0.05 * self.records if self.plan.record_sampling != "partition" else 0.0)
        a_trial = self.cohort * self.plan.local_steps * a_step + (1000 if self.adversary == "model" else 0)
        return int(min(_MOST_TRIALS, max(_FEWEST_TRIALS, _BUDGET / (self.participations * a_trial))))

    def observations(self, world: bool, trials: int, seed: int) -> Iterator[Tensor]:
        """What the adversary sees in `trials` trials, in chunks [trials, coordinates].

        This is the sum over the rounds, each weighted by its clip bound over its variance, as in the likelihood ratio of
        Gaussian releases.
        """
        plan = self.plan.but(seed=seed)
        a_trial = self.cohort * max(plan.slots * self.layout.size, self.records)
        for numbers in torch.arange(trials).split(max(1, _VALUES_AT_ONCE // a_trial)):
            total, exposures = torch.zeros(()), torch.zeros(())
            for t in range(self.participations):
                released, exposed = self._release(plan, numbers, t, world)
                total = total + released.double() * plan.clip_at(t) / (plan.noise_scale_at(t) ** 2 or 1.0)
                exposures = exposures + exposed
            self.exposures = max(self.exposures, int(exposures.max()))
            yield total

    def _release(self, plan: Plan, numbers: Tensor, round_: int, world: bool) -> tuple[Tensor, Tensor]:
        """What a round reveals about each trial, as a sum of gradients, and how many releases contained the canary."""
        clients = (numbers[:, None] * self.cohort + torch.arange(self.cohort)).flatten()
        at_canary = clients % self.cohort < self.copies
        sizes = torch.where(at_canary, self.records, self.others or self.records)
        expected, noise = sizes.clamp(max=plan.batch_size), noise_of(plan, self.layout)
        counted = expected if plan.sums and plan.per_example else sizes
        mean = plan.mean_records or float(counted.double().mean())
        at = Moment(plan, self.engine, noise, round_, clients, expected, records=sizes, mean_records=mean)
        takes_part = self._takes_part(plan, numbers, round_)
        at_canary &= takes_part.repeat_interleave(self.cohort)
        canary, others = self._gradients(world)
        carriers: list[Tensor] = []

        def batches() -> Iterator[Batch]:
            for step in range(plan.local_steps):
                draw = choose_records(plan, clients, sizes, round_, step)
                there = draw.present & at_canary[:, None]
                carriers.append(there & (draw.positions == 0) if self.unit == "record" else there)
                inputs = torch.where(carriers[-1][..., None], canary, others * there[..., None])
                yield Batch(inputs, torch.zeros(there.shape), draw.present)

        if self.adversary == "example":
            return self._examples(batches(), carriers, at)
        read = {"update": self._tapped_update, "server": self._update, "model": self._models}[self.adversary]
        scale = -plan.batch_size / (plan.learning_rate_at(round_) or 1.0)
        seen = (scale * read(batches(), at)).unflatten(0, (len(numbers), -1)).sum(1)
        if self.clients is not None and self.adversary != "model":  # who took part is known, but favours neither world
            middle = self.direction * (at.clip_bound * self._usual_uses() * (0.5 if self.relation == "zero-out" else 0.0))
            seen = torch.where(takes_part[:, None], seen - middle, 0.0)
        return seen, takes_part.double()

    def _takes_part(self, plan: Plan, numbers: Tensor, round_: int) -> Tensor:
        """The trials in which the round draws the canary's client, by the plan's own sampling."""
        if self.clients is None:
            return torch.ones(len(numbers), dtype=torch.bool)
        rounds = (number * self.participations + round_ for number in numbers.tolist())  # distinct for each trial
        drawn = (choose_clients(plan, self.clients, each) for each in rounds)
        return torch.tensor([bool(len(chosen)) and int(chosen[0]) == 0 for chosen in drawn])

    def _gradients(self, world: bool) -> tuple[Tensor, Tensor]:
        """The gradient of the canary, and that of its client's other records.

        A zeroed-out canary has no gradient; a replaced one has the opposite gradient. If a client's whole update is clipped,
        one record can reverse it: there, the other records pull the other way, and the canary is stronger.
        """
        towards = self.direction * self.length
        if self.plan.method == "fed-sdp" and self.unit == "record":
            stronger = 4.0 * self.plan.local_steps * self.plan.slots
            return towards * (stronger if world else 0.0), -towards
        return towards * (1.0 if world else {"zero-out": 0.0, "replace-one": -1.0}[self.relation]), 0 * towards

    def _usual_uses(self) -> float:
        """The average number of canary gradients in a round; used only to centre the attack's statistic."""
        if self.plan.method == "fed-sdp":
            return 1.0
        steps = self.plan.local_steps * (1.0 if self.unit == "record" else self.plan.batch_size)
        return steps * min(1.0, self.plan.batch_size / self.records)

    def _examples(self, batches: Iterator[Batch], carriers: list[Tensor], at: Moment) -> tuple[Tensor, Tensor]:
        """The canary's gradients, and the gradients in the other slots of the same steps, in case they share its noise.

        Half of the canary's value at the clip bound is subtracted, so a canary that was not drawn favours neither world.
        """
        half = self.direction * (at.clip_bound / 2 if self.relation == "zero-out" else 0.0)
        seen = torch.zeros(len(at.clients), 2 * self.layout.size)

        def tap(reader: str, at: Moment, shown: Tree) -> None:
            if reader == "type2":
                carrying = carriers[at.step][..., None]
                gradients = self.layout.flatten(shown, lead=2)
                others = torch.where(carrying.any(1, keepdim=True) & ~carrying, gradients, 0.0)
                seen.add_(torch.cat([torch.where(carrying, gradients - half, 0.0), others], dim=-1).sum(1))

        train_locally(self.method, self.weights, batches, replace(at, tap=tap))
        return seen, torch.stack(carriers).sum((0, 2))

    def _tapped_update(self, batches: Iterator[Batch], at: Moment) -> Tensor:
        shown: list[Tree] = []
        tapped = replace(at, tap=lambda reader, _, update: shown.append(update) if reader == "type1" else None)
        train_locally(self.method, self.weights, batches, tapped)
        return as_updates(shown[0], at, lead=1)

    def _update(self, batches: Iterator[Batch], at: Moment) -> Tensor:
        return as_updates(train_locally(self.method, self.weights, batches, at), at, lead=1)

    def _models(self, batches: Iterator[Batch], at: Moment) -> Tensor:
        """How far each cohort moved the model, times K_t. A server draws noise once a round, so each trial has a seed.

        An adversary may know the server's optimiser and its state, and undo it. The trials therefore grant it the mean
        update, by which `sgd` moves the model.
        """
        admitted = self.method.admit(train_locally(self.method, self.weights, batches, at), at)
        nobody = torch.zeros(0, dtype=torch.int64)
        moved = []
        for first in range(0, len(at.clients), self.cohort):
            received = Aggregate(self.weights, at.plan)
            received.add({name: value[first : first + self.cohort] for name, value in admitted.items()})
            seed = stream_key(at.plan.seed, "audit-server", int(at.clients[first])) >> 1
            noise = SeededNoise(seed, self.layout) if isinstance(at.noise, SeededNoise) else at.noise
            plain = at.plan.but(server_optimizer="sgd")
            there = replace(at, plan=plain, noise=noise, clients=nobody, expected_batch=nobody, records=nobody)
            after, _ = server_update(self.method, self.weights, received, there)
            moved.append(self.layout.flatten(after, lead=0))
        return torch.stack(moved) * (at.plan.per_round / at.plan.server_learning_rate_at(at.round))

    def attacks(self, absent: Numbers, present: Numbers) -> tuple[list[str], Tensor]:
        """Directions [coordinates, attacks] on which observations are projected, and their names.

        There is one for all tensors, the likelihood ratio of a sound release; one for each tensor alone, to find a tensor
        without noise; and, for a small network, Fisher's linear discriminant, fitted here, to find noise that is uneven or
        can be subtracted.
        """
        alone = [{each: torch.full_like(w, each == name) for each, w in self.weights.items()} for name in self.weights]
        parts = [self.direction, *(self.direction * self.layout.flatten(tree, lead=0) for tree in alone)]
        size = absent.shape[1]
        padded = [nn.functional.pad(part.double(), (0, size - len(part))) for part in parts]
        if size > _MOST_FITTED:
            return ["all", *self.weights], torch.stack(padded, dim=1)
        covariance = (np.cov(absent.T) + np.cov(present.T)) / 2
        ridge = (1e-9 * covariance.trace() / len(covariance) or 1.0) * np.eye(len(covariance))
        fitted = torch.from_numpy(np.linalg.solve(covariance + ridge, present.mean(0) - absent.mean(0)))
        return ["all", *self.weights, "fitted"], torch.stack([*padded, fitted], dim=1)


def _first_alone(value: Tensor) -> Tensor:
    """Keep the first entry and set all others to zero."""
    return torch.where(torch.arange(value.numel()).view_as(value) == 0, value, 0.0)


def beyond_clip(plan: Plan, rounds: int) -> float:
    """A gradient norm that is clipped in each of the first rounds, even as a part of the resulting update."""
    smallest_step = min(plan.learning_rate_at(t) for t in range(rounds)) / plan.batch_size
    largest_bound = max(plan.clip_at(t) for t in range(rounds))
    return 1e4 * largest_bound / min(1.0, max(smallest_step, 1e-6))


def as_updates(sent: Tree, at: Moment, lead: int) -> Tensor:
    """What clients sent, or its sum, as updates [..., coordinates]; with noise on the sum, decoded."""
    layout = at.engine.layout
    if not at.plan.sums:
        return layout.flatten(sent, lead=lead)
    decoded = layout.flatten(from_integers(sent, at.clip_bound), lead=lead)
    return decoded * (-at.learning_rate / at.plan.batch_size) if at.plan.per_example else decoded
