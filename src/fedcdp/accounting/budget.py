"""The privacy budget of a run: what it has released, whether it may release more, and how ε grows.

`Releases` charges each round to the ledger before its release is used. `Budget` says whether one more release stays
within a limit, and how much has been spent so far. `over_releases` gives the privacy statement round by round, for the
report. Training does not need dp-accounting; without it, ε is not shown, and a limit is refused.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedcdp.accounting.ledger import Charge, Ledger
from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import Mode, Privacy, Usage, format_epsilon, state
from fedcdp.config.arguments import checked
from fedcdp.config.experiment import Experiment
from fedcdp.config.plan import SCALING, Plan
from fedcdp.data.federation import Federation
from fedcdp.errors import PlanError
from fedcdp.files.tree import Layout
from fedcdp.models.networks import build

Allows = Callable[[tuple[int, ...]], bool]
"""Whether a budget has room for releases of these rounds, repeats included."""


class Releases:
    """The releases so far, recorded in the run's ledger, if there is one, before a release is used."""

    def __init__(self, clients: int, ledger: Ledger | None = None) -> None:
        self.charges: list[Charge] = list(ledger.charges) if ledger else []
        self.participations = ledger.participations() if ledger else np.zeros(clients, dtype=np.int64)
        self._ledger = ledger

    def charge(self, round_: int, chosen: NDArray[np.int64], bound: float) -> None:
        """Record a round's release; only then may it be used."""
        if self._ledger:
            self._ledger.charge(round_, chosen, bound)
            if self._ledger.rounds_charged == len(self.charges):  # the same release again, after a crash
                return
        new = Charge(round_, self.next_attempt(round_, chosen), chosen, bound)
        self.charges.append(self._ledger.charges[-1] if self._ledger else new)
        if round_ != SCALING:
            self.participations[chosen] += 1

    def join(self) -> None:
        """Record that one more client may be charged from the next round on."""
        if self._ledger and self._ledger.members == len(self.participations):
            self._ledger.join()
        self.participations = np.append(self.participations, 0)

    @property
    def rounds(self) -> tuple[int, ...]:
        """The round of every release so far; a round that was released twice is listed twice."""
        return tuple(charge.round for charge in self.charges)

    @property
    def attempt(self) -> int:
        """How often the last charged round had been released before."""
        return self.charges[-1].attempt if self.charges else 0

    def attempts_of(self, round_: int) -> int:
        """How often this round has been charged."""
        return sum(charge.round == round_ for charge in self.charges)

    def next_attempt(self, round_: int, chosen: NDArray[np.int64]) -> int:
        """The attempt that a charge of this round with these clients would be, counted from 0."""
        if not self.charges or (last := self.charges[-1]).round != round_:
            return 0
        again = self._seeded and np.array_equal(last.clients, np.sort(chosen))
        return last.attempt if again else last.attempt + 1

    @property
    def _seeded(self) -> bool:
        """Whether the same release again costs nothing."""
        return self._ledger is not None and self._ledger.noise == "seeded"

    def may_go_on(self, round_: int, allows: Allows | None) -> bool:
        """Whether a budget allows the releases so far plus this round; an already charged round costs nothing more."""
        charged = self._seeded and round_ in self.rounds
        return allows is None or charged or allows((*self.rounds, round_))


_SHARE_OF_TIME = 0.05  # of the training time that may be spent on computing ε for display


def accounting_is_installed() -> bool:
    """Whether ε can be computed on this machine."""
    return importlib.util.find_spec("dp_accounting") is not None


@checked
def privacy_of_plan(
    plan: Plan,
    federation: Federation,
    *,
    rounds: int | None = None,
    per_round: int | None = None,
    model: nn.Module | None = None,
    mode: Mode = "tight",
) -> Privacy:
    """State ε against every adversary, before a single gradient is computed. Call it as `plan.privacy(federation)`.

    Args:
        plan: The plan.
        federation: The clients and their data, of which only sizes are read.
        rounds: Overrides the plan's number of rounds.
        per_round: Overrides the plan's number of clients in a round.
        model: The network. Each layer that is clipped separately adds to ε. Default: the paper's network for such data, and
            a note that says so, since a network with more layers has a larger ε.
        mode: `tight` (privacy loss distributions), `rdp`, or `paper` (as the paper computes it, which is no guarantee).

    Returns:
        One row for each adversary, unit and relation, all at the plan's δ.

    Raises:
        PlanError: The plan does not fit the federation, or the mode is unknown.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> plan = fedcdp.Plan(rounds=20, per_round=10, local_steps=1, clip_mode="flat", noise_multiplier=0.6)
        >>> privacy = plan.privacy(federation, model=nn.Linear(30, 2))
        >>> [row.adversary for row in privacy.rows]
        ['server', 'update', 'model', 'example', 'example', 'server', 'model']
        >>> privacy.row("server").epsilon < privacy.row("example").epsilon
        True
    """
    given = {"rounds": rounds, "per_round": per_round}
    plan = plan.but(**{name: value for name, value in given.items() if value is not None})
    network = model or build("auto", federation.train.shape, federation.train.classes)
    population = Population.of(federation, Layout.of(network), plan)
    privacy = state(plan, population, mode=mode)
    if model is None and plan.private and plan.clip_mode == "layer" and mode != "paper":
        assumed = f"computed for the M = {population.layers} layers of the paper's network; pass model= for your own"
        return replace(privacy, notes=(*privacy.notes, assumed))
    return privacy


class Budget:
    """What the plan may spend against the chosen adversary, and what it has spent."""

    def __init__(self, experiment: Experiment, population: Population, ledger: Path | None = None) -> None:
        """With a `ledger`, ε is shown for everything it has charged, including repeated rounds."""
        self._experiment, self._population, self._ledger = experiment, population, ledger
        self._latest = ""
        self._started, self._computing, self._warm = time.perf_counter(), 0.0, False
        self._most_rounds: int | None = None
        if not accounting_is_installed():
            if experiment.run.max_epsilon is not None:
                raise PlanError("max_epsilon: needs dp-accounting; install it with pip install 'dp-accounting>=0.6,<0.7'")
            return
        from fedcdp.accounting.calibrate import Target, rounds_within

        limit, plan = experiment.run.max_epsilon, experiment.plan
        self._target = Target(1.0 if limit is None else limit, experiment.run.adversary, experiment.run.unit)
        if limit is not None:
            self._most_rounds = rounds_within(plan, population, self._target)
            if self._most_rounds == 0:
                raise PlanError(f"max_epsilon: {limit:g} is exceeded by the very first round; use more noise")

    def allows(self, rounds: tuple[int, ...]) -> bool:
        """Whether releases of these rounds, including repeats, stay within the limit, if there is one."""
        if self._most_rounds is None:
            return True
        plan = self._experiment.plan
        taken = tuple(each for each in rounds if each != SCALING)
        planned = taken == tuple(range(len(taken)))
        once = len(rounds) - len(taken) <= 1
        if once and (planned or plan.noise_follows_clip):  # no round is repeated, or all cost the same
            if len(taken) <= self._most_rounds:
                return True
            if self._most_rounds < plan.rounds:
                return False
        return self._target.reached(plan, self._population, rounds) <= self._target.epsilon

    def shown_after(self, rounds: int) -> str:
        """ε so far, for display; recomputed only as often as it costs little compared with training."""
        if not (accounting_is_installed() and self._experiment.plan.private):
            return ""
        if self._is_cheap() or rounds == self._experiment.plan.rounds:
            released = Ledger.open(self._ledger).rounds if self._ledger and self._ledger.exists() else rounds
            shown = format_epsilon(self._timed(released), digits=3)
            self._latest = f"ε {shown} ({self._target.adversary}, round {rounds})"
        return self._latest

    def spent_by(self, released: tuple[int, ...], *, always: bool = False) -> float | None:
        """ε of releases of these rounds; None where there is none, or, unless `always`, where it takes long compared with
        training."""
        if not (accounting_is_installed() and self._experiment.plan.private and released and (always or self._is_cheap())):
            return None
        try:
            return self._timed(released)
        except PlanError:  # the plan has no row for this adversary and unit
            return None

    def _is_cheap(self) -> bool:
        return self._computing <= _SHARE_OF_TIME * (time.perf_counter() - self._started)

    def _timed(self, released: int | tuple[int, ...]) -> float:
        started = time.perf_counter()
        try:
            return self._target.reached(self._experiment.plan, self._population, released)
        finally:
            if self._warm:  # the first time imports the accountant, which says nothing of the next times
                self._computing += time.perf_counter() - started
            self._warm = True


_POINTS = 10


def over_releases(plan: Plan, population: Population, charges: Sequence[Charge]) -> list[tuple[int, Privacy]]:
    """The privacy statement at about ten points of a run, the last after all of its releases, which are `charges`.

    `epsilon_used` is what the most-used client had spent by that point. Without a release the list is empty.
    """
    if not charges:
        return []
    members = max([population.clients, *(int(charge.clients[-1]) + 1 for charge in charges if charge.clients.size)])
    counted = np.zeros((len(charges), members), dtype=np.int64)
    for number, charge in enumerate(charges):
        counted[number, charge.clients] = charge.round != SCALING
    stated = []
    for releases in _places(len(charges)):
        used = np.sort(counted[:releases].sum(0))[::-1][: population.copies]
        rounds = tuple(charge.round for charge in charges[:releases])
        usage = Usage(rounds, tuple(int(times) for times in used))
        done = sum(charge.round != SCALING for charge in charges[:releases])
        stated.append((done, state(plan, population, rounds=rounds, usage=usage, by_client=False)))
    return stated


def _places(releases: int) -> list[int]:
    """The numbers of releases at which ε is computed, closest at the beginning, where ε grows fastest."""
    return sorted({round(releases * (place / _POINTS) ** 1.5) or 1 for place in range(1, _POINTS + 1)})
