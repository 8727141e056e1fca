"""The messages between server and clients, and how each side reads the other's: strictly.

| message | content | reply |
| --- | --- | --- |
| `query.subscribe` | the task | accepts or declines, the reason, N_i, a name to be known by |
| `train` | the weights, the task's digest, round, attempt, and a clip bound that follows a quantile | the update (and its count), with task, round and attempt; or a refusal |

A reply to `train` has nothing in it but what the method releases.
"""  # noqa: E501

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedcdp.deploy.protocol import wire
from fedcdp.deploy.protocol.local_round import Round
from fedcdp.deploy.protocol.policy import Answer
from fedcdp.deploy.protocol.task import Task
from fedcdp.errors import RefusedError, WireError
from fedcdp.files.tree import Layout, Tree
from fedcdp.files.untrusted import printable

SUBSCRIBE, TRAIN = "query.subscribe", "train"
MOST_RECORDS = 2**31
_LONGEST_REASON = 500
_NAME = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class Subscription:
    """A client's answer to a task, as the server reads it."""

    accepts: bool
    reason: str
    records: int
    member: str
    """A name by which this client is known again, also under another node."""
    number: int
    """Which client of the simulator it is, if the task is reproducible; otherwise −1."""


@dataclass(frozen=True)
class Update:
    """What a client sent in a round."""

    update: Tree
    count: float | None


def is_name(text: object) -> bool:
    """Whether this can be a name by which a client is known again."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


# Publish and subscribe -----------------------------------------------------------------------------------------------


def publish(task: Task) -> RecordDict:
    """A task, for clients to judge."""
    return RecordDict({"task": ConfigRecord({"task": task.to_json()})})


def read_task(content: RecordDict) -> Task:
    """The task in a message."""
    return Task.from_json(_text(_config(content, "task"), "task"))


def answer(answer_: Answer, member: str = "", number: int = -1) -> RecordDict:
    """A client's answer to a task."""
    about: dict[str, Any] = {"accepts": answer_.accepts, "reason": answer_.reason, "records": answer_.records}
    return RecordDict({"answer": ConfigRecord({**about, "member": member, "number": number})})


def read_answer(message: Message) -> Subscription:
    """What a client says to a task; a decline has no other fields that count."""
    found = _config(_content(message), "answer")
    if found.get("accepts") is not True:
        return Subscription(False, _reason(found), 0, "", -1)
    records, member, number = _whole(found, "records"), _text(found, "member"), _whole(found, "number")
    if not 1 <= records < MOST_RECORDS or not is_name(member) or not -1 <= number < MOST_RECORDS:
        raise WireError("its answer has an impossible number of records, name or number")
    return Subscription(True, "accepted", records, member, number)


# A round -------------------------------------------------------------------------------------------------------------


def ask(task: str, asked: Round, weights: ArrayRecord) -> RecordDict:
    """What a server sends to a client of a round; `task` is the digest."""
    about: dict[str, Any] = {"task": task, "round": asked.number, "attempt": asked.attempt}
    if asked.clip is not None:
        about["clip"] = asked.clip
    return RecordDict({"weights": weights, "round": ConfigRecord(about)})


def read_ask(content: RecordDict) -> tuple[str, Round, ArrayRecord]:
    """The task's digest, the round and the weights (not yet decoded) that a server sent."""
    about = _config(content, "round")
    clip = about.get("clip")
    if clip is not None and not (type(clip) is float and 0 < clip < math.inf):
        raise WireError("the clip bound is not a positive number")
    asked = Round(_whole(about, "round"), _whole(about, "attempt"), clip)
    return _text(about, "task"), asked, _arrays(content, "weights")


def reply(task: str, asked: Round, sent: Update, layout: Layout) -> RecordDict:
    """What leaves a client after a round."""
    about: dict[str, Any] = {"task": task, "round": asked.number, "attempt": asked.attempt}
    if sent.count is not None:
        about["count"] = sent.count
    return RecordDict({"update": wire.sparse(sent.update, layout), "about": ConfigRecord(about)})


def refuse(reason: str, final: bool) -> RecordDict:
    """A client's refusal to train; a `final` one holds for the rest of the task."""
    return RecordDict({"refused": ConfigRecord({"reason": reason, "final": final})})


def read_reply(message: Message, task: str, asked: Round, layout: Layout, counted: bool) -> Update:
    """The update in a reply to this round of this task; raises `WireError`, or `RefusedError` where the client refuses."""
    content = _content(message)
    if "refused" in content.config_records:
        found = content.config_records["refused"]
        raise RefusedError(_reason(found), final=found.get("final") is True)
    about = _config(content, "about")
    came = _text(about, "task"), _whole(about, "round"), _whole(about, "attempt")
    if came != (task, asked.number, asked.attempt):
        raise WireError(f"its update is stale: of round {came[1] + 1}, attempt {came[2]}, of task {printable(came[0][:32])}")
    count: Any = about.get("count")
    if (count is not None) != counted or (counted and not (type(count) is float and math.isfinite(count))):
        raise WireError("its count is not a finite number where one is due, or there is one where none is")
    update = wire.decode(_arrays(content, "update"), layout, may_be_sparse=True)
    return Update(update, count if counted else None)


# Parts ---------------------------------------------------------------------------------------------------------------


def _content(message: Message) -> RecordDict:
    if message.has_error():
        raise WireError(f"it failed with Flower's error {message.error.code}: {_first_line(message.error.reason)}")
    return message.content


def _config(content: RecordDict, name: str) -> ConfigRecord:
    if name not in content.config_records:
        raise WireError(f"there is no record {name} in the message")
    return content.config_records[name]


def _arrays(content: RecordDict, name: str) -> ArrayRecord:
    if name not in content.array_records:
        raise WireError(f"there are no arrays {name} in the message")
    return content.array_records[name]


def _text(record: ConfigRecord, name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise WireError(f"{name} is not a text")
    return value


def _reason(record: ConfigRecord) -> str:
    """What the other side says, fit for a log: short, and without what a terminal would obey."""
    return printable(_text(record, "reason").strip()[:_LONGEST_REASON]) or "no reason given"


def _whole(record: ConfigRecord, name: str) -> int:
    value = record.get(name)
    if type(value) is not int:
        raise WireError(f"{name} is not a whole number")
    return value


def _first_line(reason: str | None) -> str:
    lines = (reason or "no reason given").strip().splitlines()
    return printable(lines[0][:200]) if lines else "no reason given"
