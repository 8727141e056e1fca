"""The versions that both sides say when a client subscribes: one side may be upgraded before the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message

from fedcdp.deploy.protocol import messages, versions
from fedcdp.deploy.protocol.server import serve
from fedcdp.deploy.protocol.versions import misunderstanding
from tests.support.local_grid import LocalGrid, Node, experiment, make_nodes, settings
from tests.support.one_client import job, send


def said(newest: Any, oldest: Any, program: Any = "9.0") -> ConfigRecord:
    return ConfigRecord({"protocol": newest, "oldest": oldest, "program": program})


@pytest.mark.parametrize(
    ("other", "upgrade"),
    [
        (None, None),
        (said(versions.PROTOCOL, versions.OLDEST), None),
        (said(versions.PROTOCOL + 3, versions.PROTOCOL), None),
        (said(versions.PROTOCOL + 3, versions.PROTOCOL + 1), "upgrade the node"),
    ],
)
def test_ranges_that_meet_are_understood(other: ConfigRecord | None, upgrade: str | None) -> None:
    reason = misunderstanding(other, "server")
    assert (reason is None) == (upgrade is None)
    assert upgrade is None or (upgrade in str(reason) and "fedcdp 9.0" in str(reason))


def test_a_side_that_is_too_old_is_to_be_upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "OLDEST", 2)
    assert "runs fedcdp 0.1.0 and speaks versions 1 to 1" in str(misunderstanding(None, "node"))
    assert "upgrade the node" in str(misunderstanding(None, "node"))
    assert "upgrade the server" in str(misunderstanding(None, "server"))


@pytest.mark.parametrize("other", [said("2", 1), said(1, 2), said(0, 0), said(2, 1, 3)])
def test_nonsense_is_not_understood(other: ConfigRecord) -> None:
    assert misunderstanding(other, "server") == "the server states no valid version"


def old(message: Message) -> Message:
    """A message as version 0.1.0 sends it."""
    message.content.config_records.pop("versions", None)
    return message


@pytest.mark.parametrize("side", ["server", "nodes"])
def test_one_side_may_be_of_version_0_1_0(side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages are those of today without versions: a run with such a side ends as any other."""
    if side == "server":
        publish = messages.publish
        monkeypatch.setattr(messages, "publish", lambda task: _without_versions(publish(task)))
    nodes = make_nodes(tmp_path)
    if side == "nodes":
        for node in nodes.values():
            handle = node.handle
            monkeypatch.setattr(node, "handle", lambda message, at, handle=handle: old(handle(message, at)))
    assert serve(LocalGrid(nodes), experiment(), tmp_path / "run", settings()).ended == "done"


def _without_versions(content: Any) -> Any:
    content.config_records.pop("versions")
    return content


def test_a_node_declines_a_server_that_it_does_not_understand(tmp_path: Path) -> None:
    (node, *_) = make_nodes(tmp_path).values()
    content = messages.publish(job().task())
    content.config_records["versions"]["oldest"] = versions.PROTOCOL + 1
    content.config_records["versions"]["protocol"] = versions.PROTOCOL + 1
    answer = send(node, content, messages.SUBSCRIBE).config_records["answer"]
    assert answer["accepts"] is False
    assert "upgrade the node" in str(answer["reason"])


def test_a_server_leaves_out_a_node_that_it_does_not_understand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = make_nodes(tmp_path)
    newer: Node = nodes[101]
    handle = newer.handle

    def from_the_future(message: Message, at: int) -> Message | None:
        reply = handle(message, at)
        if reply is not None and "versions" in reply.content.config_records:
            reply.content.config_records["versions"] = said(7, 7, "3.0")
        return reply

    newer.handle = from_the_future  # type: ignore[method-assign]
    outcome = serve(LocalGrid(nodes), experiment(), tmp_path / "run", settings(min_clients=3))
    assert outcome.ended == "done"
    assert "node 101 declines: the node runs fedcdp 3.0" in caplog.text
    assert "upgrade the server" in caplog.text
