"""What a client has granted, and what it still grants: computed from its own ledger, without trust in the server.

Guarantee: everything that a client ever releases, over all tasks together, is (ε, δ)-differentially private for the adversary
and unit of its policy. This holds whatever servers request, in any order, even if they choose the next task, the next round
and the time of either adaptively from everything they have seen, in this task or in any concurrent one.

**The rule.** Before the first release of a task, the client reserves a number of participations m for it, in its ledger. The
k-th reservation of a client costs ε_k: the ε of m participations in the task at δ_k = δ/2^k. The first reservation of a task
that standardises inputs (`first_release`) also covers its one release of noised moments. A reservation is made only if
ε_1 + … + ε_k ≤ ε. A client takes part at most m times, repeated attempts included. A reservation is never refunded. A task
whose reservation is used up may get another one, which is the k'-th: another mechanism, with a cost of its own.

**Why it holds.** It is the basic-composition filter for concurrent interactive mechanisms with adaptively chosen parameters
(Haney, Shoemate, Tian, Vadhan, Vyrros, Xu and Zhang, "Concurrent composition for interactive differential privacy with adaptive
privacy-loss parameters", CCS 2023; for mechanisms that are not interactive: Rogers, Roth, Ullman and Vadhan, "Privacy odometers
and filters", NeurIPS 2016): if every mechanism M_k is (ε_k, δ_k)-DP as an interactive mechanism, if (ε_k, δ_k) is fixed when
M_k starts, and if M_k starts only while Σ ε_k ≤ ε and Σ δ_k ≤ δ, then an adversary that interacts with all of them concurrently
has an (ε, δ)-DP view. Its conditions hold:

| condition | why |
| --- | --- |
| (ε_k, δ_k) is fixed when M_k starts | the reservation, with m, is on disk before the first release that it covers; task and number of records are on disk before that |
| M_k is (ε_k, δ_k)-DP for a server that adapts within the task | it is an adaptive composition of m releases, each dominated by one fixed pair of distributions, so their composed privacy loss distributions bound it (Zhu, Dong and Wang, AISTATS 2022). Every release counts with the least noise of any round, so the order of rounds, repeats and left-out rounds do not matter; fewer than m releases show less. The noised moments of a task are released once; later requests get the same values |
| a release of a secure sum costs the sum's row, not that of one share | the client checked all that its masks depend on, and wrote it down, before it answered (`sum_member`); nothing else is answered |
| Σ ε_k ≤ ε | checked under the ledger's lock, which one process at a time holds |
| Σ δ_k ≤ δ | ½ + ¼ + … < 1 |

Not assumed: that a server chooses clients at random. Assumed: that nobody sees which records a step draws; the client draws
them. `client_ledger` describes how releases count that version 0.1.0 charged without a reservation. That version had no
filter: its releases count with the ε and δ that it assigned, and a widened block of them may cost its δ_k twice.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fedcdp.accounting.population import Population
from fedcdp.config.plan import Plan
from fedcdp.deploy.protocol.task import Task

# Rounds that may be repeated after crashes: each repetition is another release, and must be paid for.
_REPEATED_ROUNDS, _SHARE_REPEATED = 2, 0.1


@dataclass(frozen=True)
class Reservation:
    """A number of participations in a task with a number of records: the client's `place`-th reservation, counted from 1."""

    task: Task
    records: int
    place: int
    participations: int
    moments: bool = False
    """Whether it also covers the noised moments of the inputs, which the task releases before its first round."""


@dataclass(frozen=True)
class Grant:
    """The most that a client grants: against which adversary, for which unit, and with which δ in total."""

    epsilon: float
    delta: float
    adversary: str = "server"
    unit: str = "record"
    _known: dict[tuple[object, ...], float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Costs that were computed before: a client asks for the same ones several times in a message."""

    def cost(self, reserved: Reservation) -> float:
        """The ε of a reservation. Raises `PlanError` if the plan has no row for this adversary and unit."""
        counted = reserved.records, reserved.place, reserved.participations, reserved.moments
        key = (reserved.task.digest(), *counted)
        if key not in self._known:
            self._known[key] = self._computed(reserved)
        return self._known[key]

    def _computed(self, reserved: Reservation) -> float:
        from fedcdp.accounting import pld
        from fedcdp.accounting.calibrate import Target
        from fedcdp.accounting.mechanisms import repeated, sequence

        plan = reserved.task.plan
        view = Target(1.0, self.adversary, self.unit).view(plan, _population(reserved))
        once = (view.participation or view.taken)(least_noise_multiplier(plan))
        released = repeated(once, reserved.participations)
        if reserved.moments:
            released = sequence([released, view.scaling])
        return pld.epsilon(released, math.ldexp(self.delta, -reserved.place))

    def costs(self, reserved: Iterable[Reservation]) -> list[float]:
        """The ε of each of several reservations."""
        return [self.cost(each) for each in reserved]

    def covers(self, costs: Iterable[float]) -> bool:
        """Whether the grant covers these costs together. The sum is rounded once, so it does not depend on the order."""
        return math.fsum(costs) <= self.epsilon


def most_participations(affordable: Callable[[int], bool], wanted: int) -> int:
    """The largest affordable number of participations from 0 to `wanted`, assuming that fewer always cost less."""
    if wanted > 0 and affordable(wanted):
        return wanted
    low, high = 0, max(wanted, 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if affordable(middle) else (low, middle)
    return low


def wanted_participations(plan: Plan, from_round: int = 0) -> int:
    """How often a client may be needed from this round on: once per attempt, and in some rounds that a crash repeats."""
    rounds = (plan.rounds - from_round) * plan.attempts
    return rounds + max(_REPEATED_ROUNDS, math.ceil(_SHARE_REPEATED * rounds))


def least_noise_multiplier(plan: Plan) -> float:
    """The least σ_t, noise over clip bound, of any round: they differ if the bound moves while the noise stays."""
    if plan.noise_follows_clip:
        return plan.noise_multiplier
    return min(plan.noise_scale_at(t) / plan.clip_at(t) for t in range(plan.rounds))


def why_unprotected(grant: Grant, reserved: Reservation) -> str:
    """Why a plan has no finite ε for the policy's adversary and unit."""
    from fedcdp.accounting.calibrate import Target

    return Target(1.0, grant.adversary, grant.unit).view(reserved.task.plan, _population(reserved)).assumption


def _population(reserved: Reservation) -> Population:
    """A population of only a round's clients: all that a client knows for sure."""
    plan = reserved.task.plan
    groups = {name.rpartition(".")[0] for name in reserved.task.tensors} if plan.clip_mode == "layer" else {""}
    return Population(plan.per_round, reserved.records, 1, len(groups))
