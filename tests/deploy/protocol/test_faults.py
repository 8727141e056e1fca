"""A client that fails, or means harm, changes nothing but the log; the round goes on with the rest."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.local_grid import LocalGrid, Twist, experiment, make_nodes, settings
from tests.support.pairs import sample_first

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from fedcdp.accounting.ledger import Ledger
from fedcdp.deploy.protocol.server import serve
from fedcdp.files.tensors import load_tensors
from fedcdp.files.tree import Tree

EVERYBODY = {"per_round": 4, "rounds": 2}


def changed(reply: Message, **about: object) -> RecordDict:
    """A reply with other words beside the same update."""
    config = ConfigRecord(dict(reply.content.config_records["about"]) | about)  # type: ignore[arg-type]
    return RecordDict({"update": reply.content.array_records["update"], "about": config})


def scaled(factor: float) -> Twist:
    def twist(message: Message, reply: Message) -> Message:
        arrays = reply.content.array_records["update"]
        values = {name: array.numpy() for name, array in arrays.items()}
        new = ArrayRecord({n: Array((v * v.dtype.type(factor)) if v.dtype == "float32" else v) for n, v in values.items()})
        about = reply.content.config_records["about"]
        return Message(RecordDict({"update": new, "about": about}), reply_to=message)

    return twist


def wrong_shape(message: Message, reply: Message) -> Message:
    arrays = reply.content.array_records["update"]
    new = ArrayRecord({name: Array(array.numpy()[None]) for name, array in arrays.items()})
    return Message(RecordDict({"update": new, "about": reply.content.config_records["about"]}), reply_to=message)


def replay() -> Twist:
    kept: list[RecordDict] = []

    def twist(message: Message, reply: Message) -> Message:
        kept.append(reply.content)
        return Message(kept[0], reply_to=message) if len(kept) > 1 else _nothing(message, reply)

    return twist


def _nothing(message: Message, reply: Message) -> Message:  # noqa: ARG001
    return Message(RecordDict(), reply_to=message)


def said(**about: object) -> Twist:
    return lambda message, reply: Message(changed(reply, **about), reply_to=message)


FAULTS: dict[str, tuple[Callable[[], Twist], str]] = {
    "dead": (lambda: lambda message, reply: None, "did not answer in time"),  # noqa: ARG005
    "crashed": (lambda: lambda message, reply: Message(Error(3, "boom\nat line"), reply_to=message), "error 3: boom"),  # noqa: ARG005
    "nothing in it": (lambda: _nothing, "there is no record about"),
    "NaN": (lambda: scaled(float("nan")), "not finite"),
    "infinite": (lambda: scaled(float("inf")), "not finite"),
    "huge": (lambda: scaled(1e4), "its update is too large"),
    "as huge as can be": (lambda: scaled(1e30), "its update is too large|not finite"),
    "wrong shape": (lambda: wrong_shape, "has the shape"),
    "an old round again": (replay, "its update is stale: round 1|no record about"),
    "a round to come": (lambda: said(round=7), "its update is stale"),
    "another attempt": (lambda: said(attempt=3), "its update is stale"),
    "another task": (lambda: said(task="0" * 32), "its update is stale"),
    "round as a text": (lambda: said(round="0"), "round is not a whole number"),
    "an unasked count": (lambda: said(count=1e9), "its count"),
}


@pytest.fixture(scope="module")
def with_three(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tree]:
    """The model that three honest clients of four make, by method."""
    models: dict[str, Tree] = {}

    def model(method: str) -> Tree:
        if method not in models:
            path = tmp_path_factory.mktemp("honest")
            nodes = make_nodes(path, client3=lambda message, reply: None)  # noqa: ARG005
            serve(LocalGrid(nodes), experiment(method=method, **EVERYBODY), path / "run", settings(reproducible=True))
            models[method] = load_tensors(path / "run" / "model.safetensors", "model-1")[0]
        return models[method]

    return model


@pytest.mark.parametrize("method", sample_first(["fed-cdp", "nonprivate"]))
@pytest.mark.parametrize(("fault", "line"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_leaves_one_client_out_with_a_line_in_the_log(
    fault: Callable[[], Twist],
    line: str,
    method: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    with_three: Callable[[str], Tree],
) -> None:
    expected = with_three(method)
    caplog.clear()
    grid = LocalGrid(make_nodes(tmp_path, client3=fault()))
    with caplog.at_level(logging.INFO, "flwr.fedcdp"):
        outcome = serve(grid, experiment(method=method, **EVERYBODY), tmp_path / "run", settings(reproducible=True))
    assert outcome.ended == "done"
    model, _ = load_tensors(tmp_path / "run" / "model.safetensors", "model-1")
    for name, value in expected.items():
        torch.testing.assert_close(model[name], value, rtol=0, atol=0)
    pattern = re.compile(rf"client 3 \(node 103\) is left out: .*({line})")
    lines = [record.getMessage() for record in caplog.records]
    assert sum(bool(pattern.search(each)) for each in lines) == 2, lines
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows] == [3, 3]
    # It was asked, so it is charged: what it released may be on its way.
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").participations().tolist() == [2, 2, 2, 2]


def test_the_reply_of_one_client_in_anothers_name_does_not_count(tmp_path: Path) -> None:
    """A reply belongs to the message that it answers: answering twice adds nothing."""
    nodes = make_nodes(tmp_path)
    grid = LocalGrid(nodes)
    real = grid.pull_messages
    grid.pull_messages = lambda ids: [each for reply in real(ids) for each in (reply, reply)]  # type: ignore[method-assign]
    serve(grid, experiment(**EVERYBODY), tmp_path / "run", settings(reproducible=True))
    serve(LocalGrid(make_nodes(tmp_path / "b")), experiment(**EVERYBODY), tmp_path / "once", settings(reproducible=True))
    ours, theirs = (load_tensors(tmp_path / name / "model.safetensors", "model-1")[0] for name in ("run", "once"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_reply_that_cannot_be_read_at_all_costs_no_other(tmp_path: Path) -> None:
    grid = LocalGrid(make_nodes(tmp_path))
    real = grid.pull_messages

    def pull(ids: object) -> object:
        replies = list(real(ids))  # type: ignore[arg-type]
        if any(reply.metadata.src_node_id == 103 and reply.metadata.message_type == "train" for reply in replies):
            for reply in replies:
                if reply.metadata.src_node_id != 103:
                    grid._replies[reply.metadata.reply_to_message_id] = reply
            raise ValueError("unexpected set of children")
        return replies

    grid.pull_messages = pull  # type: ignore[method-assign, assignment]
    assert serve(grid, experiment(**EVERYBODY), tmp_path / "run", settings()).ended == "done"
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows] == [3, 3]


def test_clients_that_are_not_connected_are_left_out_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = LocalGrid(make_nodes(tmp_path))
    real = grid.push_messages

    def push(messages: object) -> object:
        grid.offline = {101}
        return real(messages)  # type: ignore[arg-type]

    grid.push_messages = push  # type: ignore[method-assign, assignment]
    with caplog.at_level(logging.INFO, "flwr.fedcdp"):
        serve(grid, experiment(**EVERYBODY), tmp_path / "run", settings())
    assert "client 1 (node 101) is left out: it is not connected" in caplog.text
    assert all(message.metadata.dst_node_id != 101 for message in grid.sent if message.metadata.message_type == "train")


def test_too_small_a_cohort_leaves_the_model_as_it_is_and_in_the_end_ends_the_run(tmp_path: Path) -> None:
    silent: Twist = lambda message, reply: None  # noqa: ARG005, E731
    grid = LocalGrid(make_nodes(tmp_path, client0=silent, client1=silent))
    wanted = experiment(per_round=4, rounds=9)
    outcome = serve(grid, wanted, tmp_path / "run", settings(min_cohort=3, most_failed_rounds=2, round_timeout=0.05))
    assert (outcome.ended, outcome.rounds) == ("too-few-clients", 2)
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["ended"] == "too-few-clients"
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").rounds_charged == 2
    model, _ = load_tensors(tmp_path / "run" / "model.safetensors", "model-1")
    first = load_tensors(tmp_path / "run" / "checkpoint.safetensors", "checkpoint-1")[0]
    assert all(torch.equal(model[name], first[f"weights/{name}"]) for name in model)


@pytest.mark.parametrize("there", [0, 2])
def test_with_too_few_subscribers_nothing_is_trained(there: int, tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path)
    grid = LocalGrid({node: nodes[node] for node in list(nodes)[:there]})
    outcome = serve(grid, experiment(), tmp_path / "run", settings(subscribe_timeout=0.1))
    assert (outcome.ended, outcome.rounds) == ("too-few-clients", 0)
    assert not any(message.metadata.message_type == "train" for message in grid.sent)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    assert serve(LocalGrid(nodes), experiment(), tmp_path / "run", settings()).ended == "done"


def test_a_run_starts_with_the_fewest_clients_that_it_may(tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path)
    grid = LocalGrid({node: nodes[node] for node in list(nodes)[:3]})
    outcome = serve(grid, experiment(), tmp_path / "run", settings(subscribe_timeout=0.1, min_clients=3))
    assert outcome.ended == "done"
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").population["clients"] == 3


def test_two_nodes_with_one_ledger_are_one_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = make_nodes(tmp_path)
    nodes[103].config["state-dir"] = nodes[102].config["state-dir"]
    outcome = serve(LocalGrid(nodes), experiment(), tmp_path / "run", settings(min_clients=3, subscribe_timeout=0.3))
    assert outcome.ended == "done"
    assert "it shares a ledger with node 102" in caplog.text
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").population["clients"] == 3
