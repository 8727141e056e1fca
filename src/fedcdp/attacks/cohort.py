"""What a server reads under secure aggregation: the sum over the clients of a round, and no single update.

A `Cohort` stands for one victim that holds the records of all these clients. After one local step its observation is the
mean gradient of all records, if every record weighs the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedcdp.attacks.gradient_units import divisors, promised_deviation
from fedcdp.config.plan import Plan
from fedcdp.engine.batched import engines_for
from fedcdp.engine.frozen import split
from fedcdp.errors import ModelError
from fedcdp.files.tree import Tree
from fedcdp.mechanism.noise import Noise
from fedcdp.mechanism.sampling import Draw
from fedcdp.mechanism.secure_sum import from_integers
from fedcdp.methods import METHODS, Moment, take_part
from fedcdp.methods.aggregation import Aggregate
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.rundir import State

MOST_RECORDS = 1000
"""The most records of a sum from which they are reconstructed."""
_SAME = 1e-6


def reads_sum(plan: Plan, leak: str) -> bool:
    """Whether an adversary reads only the sum of a round: the server, under secure aggregation."""
    return leak == "type0" and plan.secure_aggregation


def in_fast_rounds(simulator: Simulator) -> Simulator:
    """The same rounds, computed as a training computes them: fixed layers once, the rest by the fastest engine.

    An attack reads gradients by inputs through the whole network; whoever adds up whole rounds needs only their sums.
    """
    data, engine = simulator.data, simulator.engine
    front, trained = split(engine.model, data.federation.train.inputs, data.device)
    engines = engines_for(trained, engine.loss)
    return Simulator.stepwise(ClientData(data.federation, data.plan, data.device, front), next(iter(engines.values())))


@dataclass(frozen=True)
class Cohort:
    """The clients of a round whose updates are added up before anyone reads them."""

    simulator: Simulator
    state: State
    clients: Tensor

    @cached_property
    def parts(self) -> list[tuple[Moment, Draw]]:
        """The clients in chunks, with the records that they draw."""
        found = []
        for some in self.clients.split(self.simulator.chunk):
            table, sizes = self.simulator.data.records_of(some)
            at = self.simulator.moment(self.state, some.to(self.simulator.data.device), sizes)
            found.append((at, self.simulator.data.draw(at, table, sizes)))
        return found

    @property
    def records(self) -> float:
        """Σ min(B, N_i): how many records the sum is divided by."""
        return sum(float(at.expected_batch.sum()) for at, _ in self.parts)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise that the method promises on a coordinate of `observed`."""
        plan = self.simulator.plan
        squares = sum(
            float((promised_deviation(at, "type1") * divisors(at).double()).square().sum()) for at, _ in self.parts
        )
        return 0.0 if plan.method == "fed-sdp" and plan.noise_at == "server" else float(squares**0.5 / abs(self.divisor))

    def observed(self, noise: Noise, without: int | None = None) -> Tree:
        """The sum that the server reads, in units of a gradient, if client `without` lacks its first record of the round."""
        plan, method = self.simulator.plan, METHODS[self.simulator.plan.method]
        received = Aggregate(self.state.weights, plan)
        for at, draw in self.parts:
            present = draw.present
            if without is not None:
                present = present & ~(self._first_records(draw) & (at.clients == without)[:, None])
            now = replace(at, noise=noise)
            batches = (self.simulator.data.examples.batch(*each) for each in zip(draw.positions, present, strict=True))
            received.add(method.admit(take_part(method, self.state.weights, batches, now).update, now))
        total = received.total_update()
        if plan.sums:
            total = from_integers(total, self.parts[0][0].clip_bound)
        return {name: value / self.divisor for name, value in total.items()}

    def why_not_inverted(self, unequal: bool = False) -> str | None:
        """Why records cannot be reconstructed from the sum, also by an attack for which they may weigh differently
        (`unequal`); None if they can be tried."""
        plan = self.simulator.plan
        if plan.local_steps > 1:
            return "it adds up updates of several local steps, and each client took its own way"
        if self.records > MOST_RECORDS:
            return f"it holds {self.records:.0f} records of {len(self.clients)} clients, more than {MOST_RECORDS}"
        if unequal:
            return None
        if METHODS[plan.method].shared_fraction(plan) < 1:
            return "it adds up updates that each client pruned"
        if plan.method == "fed-sdp":
            return "it adds up updates that were clipped one by one"
        shares = torch.cat([divisors(at).double() / at.expected_batch for at, _ in self.parts])
        if not plan.sums and float(shares.max() - shares.min()) > _SAME * float(shares.abs().max()):
            return "its records do not weigh the same"
        return None

    def require_inverted(self, unequal: bool = False) -> None:
        """Raise unless records can be reconstructed from the sum."""
        if (reason := self.why_not_inverted(unequal)) is not None:
            raise ModelError(
                f"attack: under secure aggregation type0 reads only the sum of a round, from which records are not "
                f"reconstructed here: {reason}; presence tests the sum for single records, and type1 reads one client"
            )

    @property
    def divisor(self) -> float:
        """What the sum is divided by to be in units of a gradient."""
        return sum(float(divisors(at).double().sum()) for at, _ in self.parts)

    def _first_records(self, draw: Draw) -> Tensor:
        """[steps, clients, slots]: where a client uses the first of the records that it drew."""
        first = torch.where(draw.present, draw.positions, 2**62).amin((0, 2))
        return draw.present & (draw.positions == first[None, :, None])
