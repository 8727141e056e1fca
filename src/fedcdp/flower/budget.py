"""What a client has spent, and what it still grants: by its own ledger, and without trust in the server.

Guarantees: what a client releases is (ε, δ)-differentially private for the adversary and unit of its policy, over all tasks
that it ever takes part in, whatever the server asks.

- A task costs what its number of participations costs, each at the least noise that its plan has in any round. That the
  server chooses clients at random is not counted on: it is the server that chooses. That nobody sees which records a step
  draws is: the client draws them.
- Tasks add up by basic composition, which holds also if a server chooses the next task by what it saw of the last. The
  k-th task that a client releases something for is accounted at δ/2^k, so that all of them together stay below δ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedcdp.accounting.population import Population
from fedcdp.flower.task import Task


@dataclass(frozen=True)
class Participation:
    """How often a client took part in a task: the `place`-th that it released something for, with so many records."""

    task: Task
    records: int
    place: int
    times: int


@dataclass(frozen=True)
class Grant:
    """The most that a client gives away: to whom, of which unit, and with which δ in all."""

    epsilon: float
    delta: float
    adversary: str = "server"
    unit: str = "record"

    def cost(self, taken: Participation) -> float:
        """The ε of taking part in a task so often. A plan without the wanted row is refused in a sentence (`PlanError`)."""
        from fedcdp.accounting import tight
        from fedcdp.accounting.adversaries import noise_multipliers
        from fedcdp.accounting.calibrate import Target
        from fedcdp.accounting.releases import repeated

        plan = taken.task.plan
        view = Target(1.0, self.adversary, self.unit).view(plan, _population(taken))
        weakest = min(noise_multipliers(plan))
        return tight.epsilon(repeated((view.participation or view.taken)(weakest), taken.times), self.delta / 2**taken.place)

    def left(self, spent: Iterable[Participation]) -> float:
        """What is left of ε after everything that was spent."""
        return self.epsilon - sum(self.cost(each) for each in spent)


def why_unprotected(grant: Grant, taken: Participation) -> str:
    """Why a plan has no finite ε for the policy's adversary and unit."""
    from fedcdp.accounting.calibrate import Target

    return Target(1.0, grant.adversary, grant.unit).view(taken.task.plan, _population(taken)).assumption


def _population(taken: Participation) -> Population:
    """As if there were no clients but those of a round: what a client knows for sure."""
    plan = taken.task.plan
    groups = {name.rpartition(".")[0] for name in taken.task.tensors} if plan.clip_mode == "layer" else {""}
    return Population(plan.per_round, taken.records, 1, len(groups))
