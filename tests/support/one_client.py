"""One client of a deployment, and the messages that a server sends to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Message, RecordDict

from fedcdp.deploy.protocol import messages, wire
from fedcdp.deploy.protocol.local_round import Round
from fedcdp.deploy.protocol.strategy import Job, deployed
from fedcdp.deploy.protocol.task import Task
from fedcdp.training.prepared import build_network
from tests.support.local_grid import Node, experiment

NETWORK = build_network(experiment(), (30,), 2)


def job(**plan: Any) -> Job:
    """One client's share of a training."""
    wanted = experiment(**{"per_round": 1, "noise_multiplier": 2.0} | plan)
    return Job(plan=deployed(wanted.plan, False), network=NETWORK, network_name="mlp", shape=(30,), classes=2, clients=1)


def send(node: Node, content: RecordDict, kind: str) -> RecordDict:
    """What a node answers to a message."""
    message = Message(content, 100, kind)
    message.metadata.__dict__["_message_id"] = "message"
    reply = node.handle(message, 100)
    assert reply is not None
    return reply.content


def ask(task: Task, round_: int, attempt: int = 0, **weights: torch.Tensor) -> RecordDict:
    """A server's ask for a round of a task."""
    now = {name: p.detach() for name, p in NETWORK.named_parameters()} | weights
    return messages.ask(task.digest(), Round(round_, attempt, None), wire.dense(now))
