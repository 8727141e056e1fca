"""Nothing goes over the wire of a deployment, nor into a file or a log of its server or clients, but what is accounted.

One client's record is replaced (under Fed-SDP, all that it holds); entropy, sampling and the accounted release are held
fixed: every message in both directions, and all that is kept on both sides, is then the same to the byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.run_output import Seen, differences

pytest.importorskip("flwr")

from flwr.app import Message

from fedcdp.data import load
from fedcdp.data.partition import partition
from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.deploy.protocol.server import serve
from tests.support.local_grid import ALL, CLIENTS, OPEN, LocalGrid, Node, experiment, settings

RunTwice = Callable[..., list[Seen]]
Data = tuple[Tensor, Tensor]

PLANS: dict[str, dict[str, Any]] = {
    "fed-cdp": {},
    "fed-cdp, batch noise, fixed size, momentum, average": {
        "noise": "batch", "record_sampling": "fixed", "momentum": 0.5, "ema": 0.9,
    },
    "fed-cdp-decay, cohort noise, fixed order, pruned": {
        "method": "fed-cdp-decay", "noise": "cohort", "record_sampling": "partition", "compression": 0.7,
    },
    "fed-cdp, quantile": {"clip": "quantile(0.5, 1)"},
    "fed-sdp at the client": {"method": "fed-sdp", "noise_at": "client"},
    "fed-sdp at the client, quantile, Poisson clients, pruned": {
        "method": "fed-sdp", "noise_at": "client", "clip": "quantile(0.5, 1)", "client_sampling": "poisson",
        "compression": 0.7,
    },
    "fed-sdp at the server": {"method": "fed-sdp"},
    "fed-sdp at the server, quantile, Poisson clients": {
        "method": "fed-sdp", "clip": "quantile(0.5, 1)", "client_sampling": "poisson",
    },
}  # fmt: skip


def holdings() -> list[Data]:
    federation = partition(load("cancer", quiet=True), clients=CLIENTS, scheme="iid", records=20, seed=5)
    parts = [federation.train.take(torch.from_numpy(federation.indices(client))) for client in range(CLIENTS)]
    return [(part.inputs, part.targets) for part in parts]


def neighbours(records: slice) -> list[list[Data]]:
    """The clients' data; the same with others at the first client; and with some there that overflow as gradients."""
    worlds = [holdings() for _ in range(3)]
    for world, scale in zip(worlds[1:], (3.0, 3e38), strict=True):
        inputs, labels = (part.clone() for part in world[0])
        inputs[records], labels[records] = -scale * inputs[records].sign(), 1 - labels[records]
        world[0] = (inputs, labels)
    return worlds


def sent_raw(plan: dict[str, Any]) -> bool:
    """Whether a client's update has no noise yet as it leaves, so that it cannot be compared."""
    return plan.get("method") == "fed-sdp" and plan.get("noise_at", "server") == "server"


def deployed(plan: dict[str, Any], policy: ClientPolicy = OPEN, reproducible: bool = False) -> Callable[[list[Data]], None]:
    """A whole deployment in this process; what went over the wire is left in a file."""

    def action(held: list[Data]) -> None:
        nodes = {
            100 + number: Node(
                client_app(data=lambda _, data=data: data, policy=policy),
                {"partition-id": number, "state-dir": f"client-{number}"},
            )
            for number, data in enumerate(held)
        }
        grid = LocalGrid(nodes)
        outcome = serve(grid, experiment(**plan), "run", settings(reproducible=reproducible))
        print(outcome)
        answers = [
            content(reply, without="update" if sent_raw(plan) else "") for node in nodes.values() for reply in node.answered
        ]
        Path("to clients").write_text("\n".join(content(message) for message in grid.sent))
        Path("to server").write_text("\n".join(answers))

    return action


def content(message: Message, without: str = "") -> str:
    """A message, in full."""
    if not message.has_content():
        return f"error {message.error}"
    records = message.content
    parts = [f"{name}: {dict(record)}" for name, record in records.config_records.items()]
    parts += [f"{name}: {dict(record)}" for name, record in records.metric_records.items()]
    for name, arrays in records.array_records.items():
        if name != without:
            parts += [f"{name} {key}: {a.dtype} {a.shape} {a.stype} {a.data.hex()}" for key, a in arrays.items()]
    return " | ".join(parts)


_OF_THE_MODEL = ("model.safetensors", "checkpoint.safetensors", "metrics.jsonl", "scores.json", "outcome.json")


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_with_the_release_held_every_message_and_every_file_is_equal(run_twice: RunTwice, plan: dict[str, Any]) -> None:
    changed = slice(None) if plan.get("method") == "fed-sdp" else slice(1)
    worlds = neighbours(changed)
    first, *others = run_twice(deployed(plan), worlds if not plan else worlds[::2])
    assert (first.failed, first.written, first.connected) == (None, set(), [])
    assert {"run/ledger.jsonl", "run/clients.json", "client-0/ledger.jsonl", "to server"} <= set(first.files)
    assert (b"update " in first.files["to server"]) != sent_raw(plan)
    assert any("round 3 of 3" in line for line in first.log)
    for other in others:
        assert differences(first, other) == {}


@pytest.mark.parametrize("plan", [PLANS["fed-cdp"], PLANS["fed-sdp at the client"]], ids=["cdp", "sdp"])
def test_without_holding_it_the_update_differs_and_no_file_of_a_client_does(
    run_twice: RunTwice, plan: dict[str, Any]
) -> None:
    one, other = run_twice(deployed(plan), neighbours(slice(None))[:2], hold=False)
    found = set(differences(one, other))
    assert {"file to server", "file to clients", "file run/model.safetensors"} <= found
    kept = (f"file run/{name}" for name in _OF_THE_MODEL)
    assert found <= {"file to server", "file to clients", "console", "log", *kept}
    ended = [json.loads(seen.files["run/outcome.json"]) | {"warning": None} for seen in (one, other)]
    assert ended[0] == ended[1]  # but for a warning that the accuracy on public data is poor
    told = [[line for line in seen.log if "accuracy" not in line] for seen in (one, other)]
    assert told[0] == told[1]


def test_a_client_whose_own_records_fail_says_so_without_quoting_them(run_twice: RunTwice) -> None:
    """What its log tells stays with it."""
    bad = holdings()
    bad[0] = (bad[0][0].clone(), bad[0][1])
    bad[0][0][0, 0] = float("nan")
    (seen,) = run_twice(deployed({}), [bad])
    assert b"the node has an internal error" in seen.files["to server"]
    assert b"not finite" not in seen.files["to server"]


def test_a_careful_client_refuses_what_it_cannot_grant_whatever_its_data(run_twice: RunTwice) -> None:
    strict = ClientPolicy(epsilon=1e-3, methods=ALL)
    first, *others = run_twice(deployed({}, strict), neighbours(slice(None))[1:])
    assert b"budget" in first.files["to server"]
    for other in others:
        assert differences(first, other) == {}
