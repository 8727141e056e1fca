"""A deployment in this process: a small federation as nodes whose client apps are called as messages are sent to them.

They may be made to misbehave, and the server to be killed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

pytest.importorskip("flwr")

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedcdp.config.experiment import Experiment, assemble
from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.deploy.protocol.server import ServerSettings

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1

Twist = Callable[[Message, Message], Message | None]
"""What becomes of a message's reply on its way; None: it never arrives."""


class Killed(BaseException):
    """The server was killed here."""


class Node:
    """A SuperNode: an app, its configuration, and what it does with its replies."""

    def __init__(self, app: ClientApp, config: dict[str, Any], twist: Twist | None = None) -> None:
        self.app, self.config, self.twist = app, config, twist
        self.answered: list[Message] = []

    def handle(self, message: Message, node_id: int) -> Message | None:
        context = Context(run_id=7, node_id=node_id, node_config=self.config, state=RecordDict(), run_config={})
        try:
            reply = self.app(message, context)
        except Exception as error:
            reply = Message(Error(code=1, reason=repr(error)), reply_to=message)
        self.answered.append(reply)
        return self.twist(message, reply) if self.twist and message.metadata.message_type == "train" else reply


class LocalGrid(Grid):
    """Nodes in this process. `fail_at` kills the server before (or after) the n-th message is handled by its node."""

    def __init__(self, nodes: dict[int, Node], fail_at: tuple[int, str] | None = None) -> None:
        self.nodes, self.fail_at = nodes, fail_at
        self.sent: list[Message] = []
        self.offline: set[int] = set()
        self._replies: dict[str, Message] = {}
        self._numbers = itertools.count()

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.nodes if node not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            name = f"message {next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = name
            ids.append(name)
            place = len(self.sent)
            self.sent.append(message)
            if self.fail_at == (place, "before"):
                raise Killed
            node = message.metadata.dst_node_id
            reply = self.nodes[node].handle(message, node)
            if self.fail_at == (place, "after"):
                raise Killed
            if reply is not None:
                self._replies[name] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(each) for each in message_ids if each in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:  # noqa: ARG002
        return self.pull_messages(list(self.push_messages(messages)))


CLIENTS = 4
ALL = ("nonprivate", "fed-sdp", "fed-cdp", "fed-cdp-decay", "dssgd")
OPEN = ClientPolicy(epsilon=float("inf"), methods=ALL, allow_reproducible=True)
SETTINGS = {"round_timeout": 0.2, "subscribe_timeout": 0.5}


def experiment(**plan: Any) -> Experiment:
    """Cancer, dealt to four clients, three of whom take part in a round."""
    usual = {"rounds": 3, "per_round": 3, "local_steps": 3, "batch_size": 4, "noise_multiplier": 0.3, "seed": 5}
    return assemble({"data": {"dataset": "cancer", "clients": CLIENTS, "partition": "iid", "records": 20},
                     "plan": usual | {"learning_rate": 0.05} | plan})  # fmt: skip


def settings(**changes: Any) -> ServerSettings:
    return ServerSettings(**SETTINGS | changes)


def make_nodes(
    base: Path,
    policy: ClientPolicy | None = OPEN,
    loss: Callable[..., Any] = F.cross_entropy,
    **twists: Twist,
) -> dict[int, Node]:
    """Nodes 100, 101, … with the simulator's clients 0, 1, …; the same node has the same state, whenever it is made."""
    dealt = {"dataset": "cancer", "num-partitions": CLIENTS, "partition": "iid", "records": 20, "partition-seed": 5}
    return {
        100 + number: Node(
            client_app(policy=policy, loss=loss),
            dealt | {"partition-id": number, "state-dir": str(base / f"client-{number}")},
            twists.get(f"client{number}"),
        )
        for number in range(CLIENTS)
    }
