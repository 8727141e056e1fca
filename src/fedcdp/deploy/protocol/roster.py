"""The roster: the clients that subscribed to a run, stored in the run directory.

```
RUN/task.json      the published task
RUN/clients.json   each client's number, node, number of records, the name that identifies it, what it calls itself, and
                   its signed run key if the noise is on the sum, and the rotations of its node key
```

A run's clients are those that accepted at its start, and those that joined later: the ledger counts by their numbers. When a
run is resumed, or a node connects between rounds, a client is known by its name, also under another node or with another
key.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

from fedcdp.deploy.protocol import messages
from fedcdp.deploy.protocol.key_rotation import KeyRotation
from fedcdp.deploy.protocol.messages import Subscription
from fedcdp.deploy.protocol.monitor_file import Tally
from fedcdp.deploy.protocol.sum_keys import SignedKey
from fedcdp.deploy.protocol.task import Task
from fedcdp.errors import RunError, WireError
from fedcdp.files.disk import write_atomically
from fedcdp.files.untrusted import MOST_JSON, parse_json, printable, read_bounded

_LOG = logging.getLogger("flwr.fedcdp")
_SOON, _LATE = 0.1, 0.5  # seconds between two polls for replies: at first, and later
_UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError, DecodeError)
_ASK_AGAIN = 30.0  # seconds until a node without a readable answer is asked again


@dataclass(frozen=True)
class Member:
    """A client of a run."""

    number: int
    node: int
    records: int
    name: str
    client: str = ""
    """What it calls itself; empty: nothing."""
    key: SignedKey | None = None
    """Its signed run key, if the noise is on the sum."""
    rotations: tuple[KeyRotation, ...] = ()
    """The planned rotations of its node key, which are passed on with its run key."""

    @property
    def title(self) -> str:
        """The client in a log line."""
        return f"client {self.number} ({self.client + ', ' if self.client else ''}node {self.node})"


Roster = tuple[Member, ...]
"""All clients of a run, by number."""


def save_roster(path: Path, roster: Roster) -> None:
    """Write the roster atomically."""
    write_atomically(path, json.dumps({"clients": [_written(each) for each in roster]}, indent=1).encode())


def _written(member: Member) -> dict[str, Any]:
    written = {name: value for name, value in vars(member).items() if name not in ("client", "key", "rotations")}
    written |= {"client": member.client} if member.client else {}
    written |= {"rotations": [each.to_bytes().hex() for each in member.rotations]} if member.rotations else {}
    return written if member.key is None else written | {"key": member.key.to_bytes().hex()}


def _member(written: Any) -> Member:
    key = SignedKey.from_bytes(bytes.fromhex(written["key"])) if "key" in written else None
    rotations = tuple(KeyRotation.from_bytes(bytes.fromhex(each)) for each in written.get("rotations", ()))
    member = Member(**written | {"key": key, "rotations": rotations})
    whole = all(type(each) is int and each >= 0 for each in (member.number, member.node, member.records))
    named = messages.is_name(member.name) and messages.is_called(member.client)
    if not (whole and 1 <= member.records < messages.MOST_RECORDS and named):
        raise ValueError
    return member


def load_roster(path: Path) -> Roster:
    """Read the roster."""
    try:
        roster = tuple(_member(each) for each in parse_json(read_bounded(path, MOST_JSON))["clients"])
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, WireError):
        raise RunError(f"{path} is damaged") from None
    if [member.number for member in roster] != list(range(len(roster))):
        raise RunError(f"{path} is damaged: clients must be numbered from 0")
    return roster


# Sending and receiving -----------------------------------------------------------------------------------------------


def exchange(
    grid: Grid, outgoing: list[Message], timeout: float, *, in_full: bool = False, tally: Tally | None = None
) -> Iterator[Message]:
    """Send messages, and yield each reply as it arrives, until all have arrived or the time is up; count their bytes.

    Unlike with `Grid.send_and_receive`, an unreadable reply does not affect other replies. With `in_full` the exchange
    always takes the whole time, however few clients are asked and however soon they answer.
    """
    end = time.monotonic() + timeout
    waiting = {each for each in grid.push_messages(outgoing) if each} if outgoing else set()
    replies = _replies(grid, waiting, end, in_full)  # all messages are sent before the first reply is requested
    return replies if tally is None else _counted(outgoing, replies, tally)


def _counted(outgoing: list[Message], replies: Iterator[Message], tally: Tally) -> Iterator[Message]:
    """The replies; the bytes of both directions are added to a tally."""
    for message in outgoing:
        tally.count("fedcdp_bytes_total", "sent", by=messages.size_of(message.content))
    for reply in replies:
        if reply.has_content():
            tally.count("fedcdp_bytes_total", "received", by=messages.size_of(reply.content))
        yield reply


def _replies(grid: Grid, waiting: set[str], end: float, in_full: bool) -> Iterator[Message]:
    pause = _SOON
    while waiting or in_full:
        for reply in _pull(grid, waiting) if waiting else ():
            if reply.metadata.reply_to_message_id in waiting:
                waiting.discard(reply.metadata.reply_to_message_id)
                yield reply
        if not (waiting or in_full) or time.monotonic() >= end:
            return
        time.sleep(min(pause, max(end - time.monotonic(), 0)))
        pause = min(1.5 * pause, _LATE)


def _pull(grid: Grid, waiting: set[str]) -> list[Message]:
    try:
        return list(grid.pull_messages(sorted(waiting)))
    except _UNREADABLE:
        replies = []
    for each in sorted(waiting):
        try:
            replies += list(grid.pull_messages([each]))
        except _UNREADABLE as error:
            waiting.discard(each)
            _LOG.warning("ignoring an unreadable reply: %s", printable(str(error)[:500]))
    return replies


# Subscribing ---------------------------------------------------------------------------------------------------------


class Subscribing:
    """Publishes a task to every connected node, and collects the answers."""

    def __init__(
        self,
        grid: Grid,
        task: Task,
        smallest_records: int = 1,
        most_records: float = math.inf,
        only: set[int] | None = None,
    ) -> None:
        """With `only`, no other nodes are asked."""
        self._grid, self._task, self._smallest_records, self._most_records = grid, task, smallest_records, most_records
        self._only = only
        self.accepted: dict[int, Subscription] = {}
        """By node."""
        self.declined: dict[int, str] = {}

    def gather(self, enough: Callable[[Mapping[int, Subscription]], bool], timeout: float) -> None:
        """Ask until there are enough answers, or the time is up; nodes that connect meanwhile are asked as well."""
        end, pause = time.monotonic() + timeout, _SOON
        asked, waiting = dict[int, float](), set[str]()
        while not enough(self.accepted) and time.monotonic() < end:
            now, answered = time.monotonic(), self.accepted.keys() | self.declined.keys()
            unheard = [node for node in self._grid.get_node_ids() if node not in answered]
            unheard = [node for node in unheard if self._only is None or node in self._only]
            due = [node for node in unheard if node not in asked or now - asked[node] > _ASK_AGAIN]
            content: RecordDict = messages.publish(self._task)
            out = [Message(content, node, messages.SUBSCRIBE, ttl=end - now + 60, group_id="subscribe") for node in due]
            waiting |= {each for each in self._grid.push_messages(out) if each} if out else set()
            asked |= dict.fromkeys(due, now)
            for reply in _pull(self._grid, waiting) if waiting else ():
                if reply.metadata.reply_to_message_id in waiting:
                    waiting.discard(reply.metadata.reply_to_message_id)
                    self._hear(reply)
            if not enough(self.accepted):
                time.sleep(min(pause, max(end - time.monotonic(), 0)))
                pause = min(1.5 * pause, _LATE)

    def _hear(self, reply: Message) -> None:
        node = reply.metadata.src_node_id
        try:
            answer = messages.read_answer(reply)
        except WireError as error:
            _LOG.warning("ignoring the answer of node %d: %s", node, error)
            return
        twin = next((other for other, known in self.accepted.items() if known.member == answer.member != ""), None)
        if answer.accepts and twin not in (None, node):
            self.declined[node] = "it shares a ledger"
            _LOG.warning(
                "node %d is left out: it shares a ledger with node %d; each needs a state-dir of its own", node, twin
            )
        elif answer.accepts and (wrong := self._wrong_key(node, answer)):
            self.declined[node] = wrong
            _LOG.warning("node %d is left out: %s", node, wrong)
        elif answer.accepts and answer.records < self._smallest_records:
            self.declined[node] = "it has too few records"
            _LOG.warning("node %d is left out: it has %d records, and smallest-records is %d", node, answer.records,
                         self._smallest_records)  # fmt: skip
        elif answer.accepts and answer.records > self._most_records:
            self.declined[node] = "it has too many records"
            _LOG.warning("node %d is left out: it has %d records, and most-records is %d", node, answer.records,
                         self._most_records)  # fmt: skip
        elif answer.accepts:
            self.accepted[node] = answer
            called = f" ({answer.client})" if answer.client else ""
            _LOG.info("node %d%s accepts, with %d records", node, called, answer.records)
        else:
            self.declined[node] = answer.reason
            _LOG.info("node %d declines: %s", node, answer.reason)

    def _wrong_key(self, node: int, answer: Subscription) -> str | None:
        """Why the answer has no usable run key, or None. Clients verify it themselves; here it saves a failed attempt."""
        if not self._task.plan.sums:
            return None
        if answer.key is None or not answer.key.holds(self._task):
            return "its answer has no signed run key"
        others = (known.key for other, known in self.accepted.items() if other != node)
        if any(key is not None and key.member.node == answer.key.member.node for key in others):
            return "another node has the same node key"
        return None


def subscribe(
    grid: Grid,
    task: Task,
    expected: int,
    timeout: float,
    smallest_records: int | None = None,
    most_records: int | None = None,
) -> Roster:
    """The clients of a new run: those that accept, until there are `expected` clients or the time is up.

    A client with fewer than `smallest_records` records (default: a batch) is left out. So is one with more than
    `most_records`, or, where updates are weighted by records, with more than the plan expects of all clients together.
    """
    fewest = task.plan.batch_size if smallest_records is None else smallest_records
    mean = task.plan.mean_records if task.plan.weighting == "records" else None
    most = min(most_records or math.inf, (mean or math.inf) * expected)
    subscribing = Subscribing(grid, task, fewest, most)
    subscribing.gather(lambda accepted: len(accepted) >= expected, timeout)
    accepted = list(subscribing.accepted.items())[:expected]
    if not task.reproducible:
        return tuple(_joining(n, node, each) for n, (node, each) in enumerate(accepted))
    members = (_joining(each.number, node, each) for node, each in accepted)
    roster = sorted(members, key=lambda member: member.number)
    if [member.number for member in roster] != list(range(len(roster))):
        numbers = ", ".join(str(member.number) for member in roster)
        raise RunError(f"the clients of a reproducible run have the partition-ids {numbers}; they must be 0, 1, 2, …")
    return tuple(roster)


def _joining(number: int, node: int, answer: Subscription) -> Member:
    return Member(number, node, answer.records, answer.member, answer.client, answer.key, answer.rotations)


def find_again(grid: Grid, task: Task, roster: Roster, timeout: float) -> tuple[Roster, int]:
    """The clients of a resumed run, each with its current node, and how many of them are connected."""
    names = {member.name: member for member in roster}
    subscribing = Subscribing(grid, task)
    subscribing.gather(lambda accepted: names.keys() <= {each.member for each in accepted.values()}, timeout)
    found: dict[str, tuple[int, Subscription]] = {}
    for node, answer in subscribing.accepted.items():
        if answer.member not in names:
            _LOG.warning("node %d is left out: it is not part of this run, or has lost its ledger", node)
        elif answer.records != names[answer.member].records:
            _LOG.warning("node %d is left out: its number of records has changed since the start", node)
        else:
            found[answer.member] = node, answer
    return tuple(_now_at(each, *found[each.name]) if each.name in found else each for each in roster), len(found)


def _now_at(member: Member, node: int, answer: Subscription) -> Member:
    """A known client under the node, and with the keys, that it has now."""
    return replace(member, node=node, key=answer.key, rotations=answer.rotations)


def take_in(
    grid: Grid,
    task: Task,
    roster: Roster,
    new: set[int],
    timeout: float,
    smallest_records: int | None,
    most_records: int | None = None,
) -> tuple[Roster, set[int]]:
    """The roster with clients at nodes that have connected since; and the nodes that were heard.

    A client of the run is known by its name, also under another node or with another key. Others join at the end of the
    roster if `smallest_records` is given, as many records as each must have; None: nobody joins. `most_records` is as for
    `subscribe`. A client that has lost its ledger does not join as a new one: its records would count as those of two.
    """
    mean = task.plan.mean_records if task.plan.weighting == "records" else None
    most = min(most_records or math.inf, (mean or math.inf) * len(roster))
    subscribing = Subscribing(grid, task, smallest_records or 1, most, only=new)
    subscribing.gather(lambda _: new <= subscribing.accepted.keys() | subscribing.declined.keys(), timeout)
    members, connected = list(roster), set(grid.get_node_ids())
    heard = subscribing.accepted.keys() | subscribing.declined.keys()
    for node, answer in subscribing.accepted.items():
        known = next((member for member in members if member.name == answer.member), None)
        if known is not None and known.node in connected:
            _LOG.warning("node %d is left out as long as node %d is connected: both have the same ledger", node, known.node)
            heard.remove(node)
        elif known is not None and known.records != answer.records:
            _LOG.warning("node %d is left out: its number of records has changed since the start", node)
        elif known is not None:
            members[known.number] = _now_at(known, node, answer)
            _LOG.info("%s is now at node %d", known.title, node)
        elif smallest_records is None:
            _LOG.warning("node %d is left out: the run has begun, and its settings let nobody join", node)
        elif (earlier := _earlier(members, answer)) is not None:
            _LOG.warning("node %d is left out: it has the name or the key of %s, but another ledger; ε would count its "
                         "records as those of two clients", node, earlier.title)  # fmt: skip
        else:
            members.append(_joining(len(members), node, answer))
            _LOG.info("%s joins", members[-1].title)
    return tuple(members), heard


def _earlier(members: Sequence[Member], answer: Subscription) -> Member | None:
    """The member that a newcomer seems to be: it calls itself the same, or has its node key or that key's successor."""
    keys = set() if answer.key is None else {answer.key.member.node, *(each.old for each in answer.rotations)}
    return next(
        (
            member
            for member in members
            if (member.client and member.client == answer.client)
            or (member.key is not None and member.key.member.node in keys)
        ),
        None,
    )
