"""The messages between server and clients, and the strict parsing on each side.

| message | content | reply |
| --- | --- | --- |
| `query.subscribe` | the task, and the versions that the server speaks | whether the client accepts, the reason, N_i, a random name that identifies the client, what it is called if it says so |
| `query.moments` | the task's digest, attempt | noised moments of the client's inputs, with task and attempt; or a refusal |
| `train` | the weights, the task's digest, round, attempt, a clip bound that follows a quantile, and what inputs are standardised by | the update (and its count), with task, round and attempt; or a refusal |
| `query.ended` | the task's digest, if the network has frozen layers in front or the noise is on the sum | nothing; the client deletes features of frozen layers, and its run key |

A task with noise on the sum has more of them:

| message | content | reply |
| --- | --- | --- |
| `query.subscribe` | as above | as above, the client's signed run key (`sum_keys`), and the rotations of its node key (`key_rotation`) |
| `query.keys` | the task's digest, the signed run keys of all clients, rotations of node keys | whose keys the client keeps; or a refusal |
| `train` | as above, and the roster: its members' node keys. The clip bound is the task's | the client's share of the sum under its masks, 8 bytes a weight, with task, round and attempt; or a refusal |

A reply to `train` contains nothing but what the method releases.
"""  # noqa: E501

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from fedcdp.deploy.protocol import versions, wire
from fedcdp.deploy.protocol.key_rotation import MOST_ROTATIONS, KeyRotation
from fedcdp.deploy.protocol.known_nodes import NODE_KEY_BYTES
from fedcdp.deploy.protocol.local_round import Round
from fedcdp.deploy.protocol.masks import Words
from fedcdp.deploy.protocol.policy import Answer
from fedcdp.deploy.protocol.sum_keys import SignedKey
from fedcdp.deploy.protocol.task import Task
from fedcdp.errors import RefusedError, WireError
from fedcdp.files.tree import Layout, Tree
from fedcdp.files.untrusted import printable

SUBSCRIBE, MOMENTS, TRAIN = "query.subscribe", "query.moments", "train"
KEYS, ENDED = "query.keys", "query.ended"
MOST_RECORDS = 2**31
MOST_MEMBERS = 10_000
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
    key: SignedKey | None = None
    """Its signed run key, if the noise is on the sum."""
    rotations: tuple[KeyRotation, ...] = ()
    """The planned rotations of its node key, if the noise is on the sum."""


@dataclass(frozen=True)
class Kept:
    """What a client answers to the run keys of the others."""

    count: int
    nodes: frozenset[bytes] | None
    """The nodes whose keys it keeps; None: it does not say, as version 0.1.0."""


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
    """A task, for clients to decide on, and the versions that the server speaks."""
    return RecordDict({"task": ConfigRecord({"task": task.to_json()}), "versions": ConfigRecord(versions.spoken())})


def read_task(content: RecordDict) -> Task:
    """The task in a message of a server that this client understands."""
    if (reason := versions.misunderstanding(content.config_records.get("versions"), "server")) is not None:
        raise RefusedError(reason, kind="version")
    return Task.from_json(_text(_config(content, "task"), "task"))


def answer(
    answer_: Answer,
    member: str = "",
    number: int = -1,
    client: str = "",
    key: SignedKey | None = None,
    rotations: Sequence[KeyRotation] = (),
) -> RecordDict:
    """A client's answer to a task, and the versions that it speaks."""
    about: dict[str, Any] = {"accepts": answer_.accepts, "reason": answer_.reason, "records": answer_.records}
    if client:
        about["client"] = client
    if key is not None:
        about["key"] = key.to_bytes()
    if rotations:
        about["rotations"] = [each.to_bytes() for each in rotations]
    return RecordDict(
        {
            "answer": ConfigRecord({**about, "member": member, "number": number}),
            "versions": ConfigRecord(versions.spoken()),
        }
    )


def read_answer(message: Message) -> Subscription:
    """Parse a client's answer to a task; in a decline, all other fields are ignored."""
    content = _content(message)
    if (reason := versions.misunderstanding(content.config_records.get("versions"), "node")) is not None:
        return Subscription(False, reason, 0, "", -1)
    found = _config(content, "answer")
    if found.get("accepts") is not True:
        return Subscription(False, _reason(found), 0, "", -1)
    records, member, number = _whole(found, "records"), _text(found, "member"), _whole(found, "number")
    if not 1 <= records < MOST_RECORDS or not is_name(member) or not -1 <= number < MOST_RECORDS:
        raise WireError("its answer has an invalid number of records, name or client number")
    called = found.get("client", "")
    key = SignedKey.from_bytes(found["key"]) if "key" in found else None
    rotations = tuple(_rotations(found, MOST_ROTATIONS))
    name = str(called) if is_called(called) else ""
    return Subscription(True, "accepted", records, member, number, name, key, rotations)


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
    _check_belongs(about, task, asked)
    count: Any = about.get("count")
    if (count is not None) != counted or (counted and not (type(count) is float and math.isfinite(count))):
        raise WireError("its count is not a finite number, is missing, or is not expected")
    update = wire.decode(_arrays(content, "update"), layout, may_be_sparse=True)
    return Update(update, count if counted else None)


# A secure sum --------------------------------------------------------------------------------------------------------


def pass_on_keys(task: str, keys: Sequence[SignedKey], rotations: Sequence[KeyRotation] = ()) -> RecordDict:
    """The signed run keys of all clients, and rotations of node keys, which a server passes on; `task` is the digest."""
    about: dict[str, Any] = {"task": task, "keys": [each.to_bytes() for each in keys]}
    if rotations:
        about["rotations"] = [each.to_bytes() for each in rotations]
    return RecordDict({"keys": ConfigRecord(about)})


def read_keys(content: RecordDict) -> tuple[str, list[SignedKey], list[KeyRotation]]:
    """Parse the keys and rotations that a server passes on, which are not verified yet."""
    about = _config(content, "keys")
    keys = [SignedKey.from_bytes(each) for each in _list(about, "keys")]
    return _text(about, "task"), keys, _rotations(about, 10 * MOST_ROTATIONS)


def keep_keys(nodes: Sequence[bytes]) -> RecordDict:
    """A client's reply to the keys: whose it keeps."""
    about: dict[str, Any] = {"keys": len(nodes)}
    if nodes:
        about["nodes"] = list(nodes)
    return RecordDict({"kept": ConfigRecord(about)})


def read_kept(message: Message) -> Kept:
    """Parse whose keys a client keeps; raises `WireError`, or `RefusedError` on a refusal."""
    about = _config(_not_refused(message), "kept")
    nodes = _list(about, "nodes") if "nodes" in about else None
    if nodes is not None and not all(isinstance(each, bytes) and len(each) == NODE_KEY_BYTES for each in nodes):
        raise WireError(f"it keeps a key of a node that is not one of {NODE_KEY_BYTES} bytes")
    count = _whole(about, "keys")
    return Kept(count, frozenset() if count == 0 else None if nodes is None else frozenset(nodes))


def ask_share(
    task: str,
    asked: Round,
    weights: ArrayRecord,
    members: Sequence[bytes],
    standardised: tuple[Tensor, Tensor] | None = None,
) -> RecordDict:
    """A server's request for a client's share of a sum: `ask`, with the node keys of all members of the roster."""
    content = ask(task, asked, weights, standardised)
    content["roster"] = ConfigRecord({"members": list(members)})
    return content


def read_members(content: RecordDict) -> list[bytes]:
    """Parse the roster in a request: node keys, each once."""
    members = _list(_config(content, "roster"), "members")
    if not all(isinstance(each, bytes) and len(each) == NODE_KEY_BYTES for each in members):
        raise WireError(f"a member of the roster is not a node key of {NODE_KEY_BYTES} bytes")
    if len(set(members)) != len(members):
        raise WireError("the roster has a node twice")
    return members


def reply_share(task: str, asked: Round, share: Words) -> RecordDict:
    """A client's masked share of a sum."""
    about = ConfigRecord({"task": task, "round": asked.number, "attempt": asked.attempt})
    return RecordDict({"share": wire.words(share), "about": about})


def read_share(message: Message, task: str, asked: Round, length: int) -> Words:
    """Parse the masked share in a reply to this attempt; raises `WireError`, or `RefusedError` on a refusal."""
    content = _not_refused(message)
    _check_belongs(_config(content, "about"), task, asked)
    return wire.decode_words(_arrays(content, "share"), length)


def say_ended(task: str) -> RecordDict:
    """A server's notice that a run has ended; `task` is the digest."""
    return RecordDict({"ended": ConfigRecord({"task": task})})


def read_ended(content: RecordDict) -> str:
    """Parse the notice that a run has ended: the task's digest."""
    return _text(_config(content, "ended"), "task")


def size_of(content: RecordDict) -> int:
    """The bytes of the arrays in a message."""
    return sum(wire.bytes_of(record) for record in content.array_records.values())


# Parts ---------------------------------------------------------------------------------------------------------------


def _check_belongs(about: ConfigRecord, task: str, asked: Round) -> None:
    came = _text(about, "task"), _whole(about, "round"), _whole(about, "attempt")
    if came != (task, asked.number, asked.attempt):
        raise WireError(f"its update is stale: round {came[1] + 1}, attempt {came[2]}, of task {printable(came[0][:32])}")


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


def _list(record: ConfigRecord, name: str) -> list[Any]:
    value = record.get(name)
    if not isinstance(value, list) or len(value) > MOST_MEMBERS:
        raise WireError(f"{name} is not a list of at most {MOST_MEMBERS} items")
    return value


def _rotations(record: ConfigRecord, most: int) -> list[KeyRotation]:
    """The rotations of node keys in a record, at most so many."""
    found = _list(record, "rotations") if "rotations" in record else []
    if len(found) > most:
        raise WireError(f"there are {len(found)} rotations of keys; at most {most} are read")
    return [KeyRotation.from_bytes(each) for each in found]


def _first_line(reason: str | None) -> str:
    lines = (reason or "no reason given").strip().splitlines()
    return printable(lines[0][:200]) if lines else "no reason given"
