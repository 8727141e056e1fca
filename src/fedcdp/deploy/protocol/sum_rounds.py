"""The server's part of a secure sum: a roster for each attempt, and the sum if all of its members answered.

An attempt is charged before anything is sent. Its sum is usable only if every member's share arrived: masks of a missing
member stay in it. Otherwise the members that answered try again, with fresh masks and fresh noise, which both sides charge
again, up to the plan's number of attempts. A round with fewer members than the task's smallest cohort is skipped. So is one
without an attempt left, for example because a server was killed in it.

A skipped round leaves the model as it is. It stays charged; one that nobody was asked for is charged without clients.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedcdp.accounting.budget import Allows
from fedcdp.deploy.protocol import messages
from fedcdp.deploy.protocol.failures import Failures
from fedcdp.deploy.protocol.local_round import Round
from fedcdp.deploy.protocol.masks import Words, sum_of
from fedcdp.deploy.protocol.messages import Update
from fedcdp.deploy.protocol.roster import Member, Roster, exchange
from fedcdp.deploy.protocol.strategy import Job, PlanStrategy
from fedcdp.errors import RefusedError, WireError
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.mechanism.secure_sum import check_capacity
from fedcdp.training.scaling import standardised_by

_LOG = logging.getLogger("flwr.fedcdp")


class SumStrategy(PlanStrategy):
    """A strategy whose rounds are attempts at a secure sum. `run_round` runs one; Flower's own loop cannot.

    Args:
        job: What is trained.
        roster: The clients that subscribed.
        failures: How often clients have failed so far. Default: never, in memory.
        named: The other arguments of `PlanStrategy`.
    """

    supports_sums = True

    def __init__(self, job: Job, roster: Roster, *, failures: Failures | None = None, **named: Any) -> None:
        super().__init__(job, roster, **named)
        self._failures = failures or Failures()
        self.gone |= self._failures.too_many()
        self._kept: dict[int, frozenset[bytes] | None] = {}  # whose run keys a client keeps, as far as it has said
        self._informed: set[int] = set()
        self._floor = max(job.smallest_cohort, 2, job.plan.colluders + 1)
        self._use_records()

    def _use_records(self) -> None:
        layout, plan, records = self.engine.layout, self.job.plan, [member.records for member in self.roster]
        check_capacity(plan, groups=len(layout.groups(plan.clip_mode)), size=layout.size, most_records=max(records))
        if plan.mean_records is None:  # as in a simulation: of the records that a client uses in a step
            self._mean_records = sum(min(plan.batch_size, each) for each in records) / len(records)

    def take_in(self, roster: Roster) -> None:
        """As for any run; then everybody gets all run keys again, since some are new."""
        super().take_in(roster)
        self._use_records()
        self._informed.clear()
        self._kept.clear()

    def run_round(self, grid: Grid, timeout: float, allows: Allows | None = None) -> bool:
        """Run one round, in up to the plan's number of attempts; returns whether it moved the model.

        `timeout` is for each attempt. A further attempt is made only if the budget `allows` it.
        """
        round_ = self.state.round
        members, self.admitted = self._first_roster(grid, timeout), []
        while (reason := self._obstacle(members, allows)) is None:
            shares = self._attempt(grid, members, timeout)
            if len(shares) == len(members):
                total = sum_of(shares.values(), self.engine.layout.size)
                self.admitted = sorted(shares)
                update = self.engine.layout.unflatten(torch.from_numpy(total))
                self.state = self._moved({members[0].number: Update(update, None)})
                return True
            _LOG.warning("round %d, attempt %d: %d of %d shares came, so there is no sum", round_ + 1,
                         self._asked.attempt + 1, len(shares), len(members))  # fmt: skip
            members = [member for member in members if member.number in shares]
        _LOG.warning("round %d is skipped: %s", round_ + 1, reason)
        if not self.releases.attempts_of(round_):
            self._charge([])
        self.state = replace(self.state, round=round_ + 1)
        return False

    def _first_roster(self, grid: Grid, timeout: float) -> list[Member]:
        """Those of the drawn clients that are connected and have everybody's run key."""
        connected, members = set(grid.get_node_ids()), list[Member]()
        for member in (self.roster[number] for number in choose_clients(self._draws, len(self.roster), self.state.round)):
            if member.number in self.gone:
                self._leave_out(member, "it does not take part any more", "left")
            elif member.node not in connected:
                self._leave_out(member, "it is not connected", "missing")
            else:
                members.append(member)
        self._pass_on_keys(grid, [member for member in members if member.number not in self._informed], timeout)
        return self._acquainted([member for member in members if member.number in self._kept])

    def _pass_on_keys(self, grid: Grid, members: list[Member], timeout: float) -> None:
        """Send the run keys of all clients to those that do not have them: one message to each client of a run.

        A client that does not keep all of them is asked again in its next round: its owner may have listed more nodes.
        """
        keys = [each.key for each in self.roster if each.key is not None]
        rotations = [rotation for each in self.roster for rotation in each.rotations]
        content = messages.pass_on_keys(self.task, keys, rotations)
        for member, reply in self._exchange(grid, members, content, messages.KEYS, timeout):
            try:
                kept = messages.read_kept(reply)
                self._kept[member.number] = kept.nodes
                if kept.count < len(keys):
                    _LOG.warning("%s keeps %d of %d run keys: it knows no other nodes", member.title, kept.count, len(keys))
                if kept.count == len(keys) or kept.nodes is None:
                    self._informed.add(member.number)
            except (RefusedError, WireError) as error:
                self._fail(member, str(error), "refused" if isinstance(error, RefusedError) else "protocol")

    def _acquainted(self, members: list[Member]) -> list[Member]:
        """Those of these clients that know each other: a roster with a node that one of them does not know is refused.

        A client that joined, or has a new key, so takes effect when every other owner has listed it. Whoever lacks most
        acquaintances is left out first, and of several the one that came last.
        """
        members = list(members)
        while strangers := [pair for one in members for other in members if not self._knows(*(pair := (one, other)))]:
            missing = Counter(member.number for pair in strangers for member in pair)
            out = max(members, key=lambda member: (missing[member.number], member.number))
            members.remove(out)
            self._leave_out(out, "not all members of the roster know each other's node keys yet", "roster")
        return members

    def _knows(self, one: Member, other: Member) -> bool:
        kept = self._kept[one.number]
        return kept is None or one is other or other.key is None or other.key.member.node in kept

    def _obstacle(self, members: list[Member], allows: Allows | None) -> str | None:
        """Why these clients cannot try this round (again), or None."""
        plan, round_ = self.job.plan, self.state.round
        if len(members) < self._floor:
            return f"{len(members)} clients are too few: {self._floor} are needed"
        if self.releases.next_attempt(round_, _numbers(members)) >= plan.attempts:
            return f"it has been tried {plan.attempts} times"
        if self.releases.attempts_of(round_) and not self.releases.may_go_on(round_, allows):
            return "one more attempt would exceed max_epsilon"
        return None

    def _attempt(self, grid: Grid, members: list[Member], timeout: float) -> dict[int, Words]:
        """Ask for all shares of a roster, after the charge; return those that came, by client."""
        self._charge(members)
        self._asked = Round(self.state.round, self.releases.attempt, None)
        nodes = [member.key.member.node for member in members if member.key is not None]
        content = messages.ask_share(self.task, self._asked, self.arrays(), nodes, standardised_by(self.job.network))
        shares = dict[int, Words]()
        for member, reply in self._exchange(grid, members, content, messages.TRAIN, timeout):
            try:
                shares[member.number] = messages.read_share(reply, self.task, self._asked, self.engine.layout.size)
            except RefusedError as error:
                self._fail(member, f"it refuses: {error}", "refused", final=error.final)
            except WireError as error:
                self._fail(member, str(error), "protocol")
        return shares

    def _exchange(
        self, grid: Grid, members: list[Member], content: RecordDict, kind: str, timeout: float
    ) -> Iterator[tuple[Member, Message]]:
        """Send a message to each of these clients, and yield the answers; a client without one has failed."""
        if not members:
            return
        group = str(self.state.round + 1)
        out = [Message(content, member.node, kind, ttl=self._lifetime, group_id=group) for member in members]
        replies = exchange(grid, out, timeout, tally=self.tally)
        waiting = {message.metadata.message_id: member for message, member in zip(out, members, strict=True)}
        for reply in replies:
            if (member := waiting.pop(reply.metadata.reply_to_message_id, None)) is not None:
                yield member, reply
        for member in waiting.values():
            self._fail(member, "it did not answer in time", "late")

    def _charge(self, members: list[Member]) -> None:
        plan, round_ = self.job.plan, self.state.round
        self.releases.charge(round_, _numbers(members), plan.clip_at(round_))

    def _fail(self, member: Member, reason: str, kind: str, *, final: bool = False) -> None:
        """Count a failure of a client: nobody may stop every round by dropping out of each."""
        self._failures.add(member.number)
        if final or member.number in self._failures.too_many():
            self.gone.add(member.number)
            reason += "; it is left out from now on"
        self._leave_out(member, reason, kind)


def _numbers(members: list[Member]) -> NDArray[np.int64]:
    return np.array(sorted(member.number for member in members), np.int64)
