"""The messages between server and clients, and the strict parsing on each side.

| message | content | reply |
| --- | --- | --- |
| `query.subscribe` | the task | whether the client accepts, the reason, N_i, a random name that identifies the client, what it is called if it says so |
| `query.moments` | the task's digest, attempt | noised moments of the client's inputs, with task and attempt; or a refusal |
| `train` | the weights, the task's digest, round, attempt, a clip bound that follows a quantile, and what inputs are standardised by | the update (and its count), with task, round and attempt; or a refusal |

A reply to `train` contains nothing but what the method releases.
"""  # noqa: E501

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from fedcdp.deploy.protocol import wire
from fedcdp.deploy.protocol.local_round import Round
from fedcdp.deploy.protocol.policy import Answer
from fedcdp.deploy.protocol.task import Task
from fedcdp.errors import RefusedError, WireError
from fedcdp.files.tree import Layout, Tree
from fedcdp.files.untrusted import printable

SUBSCRIBE, MOMENTS, TRAIN = "query.subscribe", "query.moments", "train"
MOST_RECORDS = 2**31
_LONGEST_REASON = 500
_LONGEST_CALLED = 100
_NAME = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class Subscription:
    """A client's answer to a task, as parsed by the server."""

    accepts: bool
    reason: str
    records: int
    member: str
    """A name that identifies this client, also under another node."""
    number: int
    """The number of the simulator's client, if the task is reproducible; otherwise −1."""
    client: str = ""
    """What the client calls itself, for logs."""


@dataclass(frozen=True)
class Update:
    """A client's update in a round."""

    update: Tree
    count: float | None


def is_name(text: object) -> bool:
    """Whether this is a valid client name."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def is_called(text: object) -> bool:
    """Whether a client may be called this; empty: it says nothing."""
    return isinstance(text, str) and len(text) <= _LONGEST_CALLED and text.isprintable()


# Publish and subscribe -----------------------------------------------------------------------------------------------


def publish(task: Task) -> RecordDict:
    """A task, for clients to decide on."""
    return RecordDict({"task": ConfigRecord({"task": task.to_json()})})


def read_task(content: RecordDict) -> Task:
    """The task in a message."""
    return Task.from_json(_text(_config(content, "task"), "task"))


def answer(answer_: Answer, member: str = "", number: int = -1, client: str = "") -> RecordDict:
    """A client's answer to a task."""
    about: dict[str, Any] = {"accepts": answer_.accepts, "reason": answer_.reason, "records": answer_.records}
    if client:
        about["client"] = client
    return RecordDict({"answer": ConfigRecord({**about, "member": member, "number": number})})


def read_answer(message: Message) -> Subscription:
    """Parse a client's answer to a task; in a decline, all other fields are ignored."""
    found = _config(_content(message), "answer")
    if found.get("accepts") is not True:
        return Subscription(False, _reason(found), 0, "", -1)
    records, member, number = _whole(found, "records"), _text(found, "member"), _whole(found, "number")
    if not 1 <= records < MOST_RECORDS or not is_name(member) or not -1 <= number < MOST_RECORDS:
        raise WireError("its answer has an invalid number of records, name or client number")
    called = found.get("client", "")
    return Subscription(True, "accepted", records, member, number, str(called) if is_called(called) else "")


# Noised moments ------------------------------------------------------------------------------------------------------


def ask_moments(task: str, asked: Round) -> RecordDict:
    """A server's request for the noised moments of a client's inputs; `task` is the digest."""
    return RecordDict({"moments": ConfigRecord({"task": task, "attempt": asked.attempt})})


def read_moments_request(content: RecordDict) -> tuple[str, int]:
    """Parse a server's request for moments: the task's digest and the attempt."""
    about = _config(content, "moments")
    return _text(about, "task"), _whole(about, "attempt")


def reply_moments(task: str, attempt: int, sums: Tensor) -> RecordDict:
    """The noised moments that a client sends."""
    return RecordDict({"moments": wire.doubles(sums), "about": ConfigRecord({"task": task, "attempt": attempt})})


def read_moments(message: Message, task: str, asked: Round, length: int) -> Tensor:
    """Parse the noised moments in a reply; raises `WireError`, or `RefusedError` on a refusal."""
    content = _not_refused(message)
    about = _config(content, "about")
    if (_text(about, "task"), _whole(about, "attempt")) != (task, asked.attempt):
        raise WireError("its moments belong to another request")
    return wire.decode_doubles(_arrays(content, "moments"), length)


# A round -------------------------------------------------------------------------------------------------------------


def ask(task: str, asked: Round, weights: ArrayRecord, standardised: tuple[Tensor, Tensor] | None = None) -> RecordDict:
    """A server's request to a client in a round; `task` is the digest, `standardised` the mean and scale of inputs."""
    about: dict[str, Any] = {"task": task, "round": asked.number, "attempt": asked.attempt}
    if asked.clip is not None:
        about["clip"] = asked.clip
    content = RecordDict({"weights": weights, "round": ConfigRecord(about)})
    if standardised is not None:
        content["standardised"] = wire.dense(dict(zip(("mean", "scale"), standardised, strict=True)))
    return content


def read_standardised(content: RecordDict, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Parse what a server says that inputs of this shape are standardised by: mean and scale."""
    found = wire.decode(
        _arrays(content, "standardised"), Layout({name: torch.Size(shape) for name in ("mean", "scale")}, ())
    )
    return found["mean"], found["scale"]


def read_ask(content: RecordDict) -> tuple[str, Round, ArrayRecord]:
    """Parse a server's request: the task's digest, the round and the weights (not yet decoded)."""
    about = _config(content, "round")
    clip = about.get("clip")
    if clip is not None and not (type(clip) is float and 0 < clip < math.inf):
        raise WireError("the clip bound is not a positive number")
    asked = Round(_whole(about, "round"), _whole(about, "attempt"), clip)
    return _text(about, "task"), asked, _arrays(content, "weights")


def reply(task: str, asked: Round, sent: Update, layout: Layout) -> RecordDict:
    """What a client sends after a round."""
    about: dict[str, Any] = {"task": task, "round": asked.number, "attempt": asked.attempt}
    if sent.count is not None:
        about["count"] = sent.count
    return RecordDict({"update": wire.sparse(sent.update, layout), "about": ConfigRecord(about)})


def refuse(reason: str, final: bool) -> RecordDict:
    """A client's refusal to train; a `final` one holds for the rest of the task."""
    return RecordDict({"refused": ConfigRecord({"reason": reason, "final": final})})


def read_reply(message: Message, task: str, asked: Round, layout: Layout, counted: bool) -> Update:
    """Parse the update in a reply to this round of this task; raises `WireError`, or `RefusedError` on a refusal."""
    content = _not_refused(message)
    about = _config(content, "about")
    came = _text(about, "task"), _whole(about, "round"), _whole(about, "attempt")
    if came != (task, asked.number, asked.attempt):
        raise WireError(f"its update is stale: round {came[1] + 1}, attempt {came[2]}, of task {printable(came[0][:32])}")
    count: Any = about.get("count")
    if (count is not None) != counted or (counted and not (type(count) is float and math.isfinite(count))):
        raise WireError("its count is not a finite number, is missing, or is not expected")
    update = wire.decode(_arrays(content, "update"), layout, may_be_sparse=True)
    return Update(update, count if counted else None)


# Parts ---------------------------------------------------------------------------------------------------------------


def _content(message: Message) -> RecordDict:
    if message.has_error():
        raise WireError(f"it failed with Flower's error {message.error.code}: {_first_line(message.error.reason)}")
    return message.content


def _not_refused(message: Message) -> RecordDict:
    """The content of a reply; raises `RefusedError` if it is a refusal."""
    content = _content(message)
    if "refused" in content.config_records:
        found = content.config_records["refused"]
        raise RefusedError(_reason(found), final=found.get("final") is True)
    return content


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
        raise WireError(f"{name} is not a string")
    return value


def _reason(record: ConfigRecord) -> str:
    """The other side's reason, safe for a log: short, and without terminal control characters."""
    return printable(_text(record, "reason").strip()[:_LONGEST_REASON]) or "no reason given"


def _whole(record: ConfigRecord, name: str) -> int:
    value = record.get(name)
    if type(value) is not int:
        raise WireError(f"{name} is not a whole number")
    return value


def _first_line(reason: str | None) -> str:
    lines = (reason or "no reason given").strip().splitlines()
    return printable(lines[0][:200]) if lines else "no reason given"
