"""The mark of a client's ledger: an old copy of the ledger is refused, a crash is not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedcdp.deploy.protocol import ledger_mark
from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.ledger_mark import LedgerMark
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.errors import PolicyError, RunError
from tests.support.local_grid import Node
from tests.support.one_client import ask, job, send


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "state", tmp_path / "elsewhere" / "client.mark"


def lengthen(state: Path, mark: Path | None, tasks: int = 1) -> None:
    with ClientLedger.held(state, mark) as ledger:
        for _ in range(tasks):
            ledger.accept(job().task(), 20)


def test_an_old_copy_of_the_ledger_is_refused_with_what_to_do(place: tuple[Path, Path]) -> None:
    state, mark = place
    lengthen(state, mark)
    shutil.copytree(state, state.with_name("backup"))
    lengthen(state, mark)
    assert mark.stat().st_mode & 0o777 == 0o600
    shutil.rmtree(state)
    shutil.copytree(state.with_name("backup"), state)
    with pytest.raises(RunError, match=r"is older than its mark: it has 2 lines, and had 3 or more.*fedcdp deploy mark"):
        lengthen(state, mark)
    with pytest.raises(RunError, match="older than its mark"):
        ClientLedger.check_start(state, mark)


def test_a_missing_ledger_is_refused_if_its_mark_is_there(place: tuple[Path, Path]) -> None:
    state, mark = place
    lengthen(state, mark)
    shutil.rmtree(state)
    with pytest.raises(RunError, match="it has 0 lines"):
        lengthen(state, mark)
    assert not (state / "ledger.jsonl").exists(), "no new ledger begins"


def test_a_copy_that_went_on_by_itself_is_refused_though_it_is_longer(place: tuple[Path, Path]) -> None:
    state, mark = place
    lengthen(state, mark)
    shutil.copytree(state, state.with_name("backup"))
    lengthen(state, mark)
    lengthen(state.with_name("backup"), None, tasks=3)
    with pytest.raises(RunError, match="older than its mark"), ClientLedger.held(state.with_name("backup"), mark):
        pass


def test_a_ledger_without_its_mark_needs_one_and_other_marks_do_not_fit(place: tuple[Path, Path]) -> None:
    state, mark = place
    lengthen(state, None)
    with pytest.raises(RunError, match="has no mark"):
        lengthen(state, mark)
    with ClientLedger.held(state) as ledger:
        LedgerMark(mark).begin(ledger.path, ledger.member, ledger.digests, forget=False)
    lengthen(state, mark)
    lengthen(state.with_name("other"), None)
    with pytest.raises(RunError, match="another client's"), ClientLedger.held(state.with_name("other"), mark):
        pass


def test_a_crash_between_line_and_mark_is_accepted(place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    state, mark = place
    lengthen(state, mark)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ledger_mark, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            lengthen(state, mark)
    lengthen(state, mark, tasks=0)
    assert '"lines": 3' in mark.read_text()


@pytest.mark.parametrize("there", [True, False])
def test_a_mark_that_is_a_symbolic_link_is_refused(there: bool, place: tuple[Path, Path]) -> None:
    """A write would replace the link by a file beside it, on the disk of the ledger, without a word."""
    state, mark = place
    lengthen(state, mark)
    link = state.with_name("client.mark")
    link.symlink_to(mark if there else mark.with_name("not mounted"))
    with pytest.raises(RunError, match="symbolic link"):
        lengthen(state, link)
    with pytest.raises(RunError, match="symbolic link"), ClientLedger.held(state) as ledger:
        LedgerMark(link).begin(ledger.path, ledger.member, ledger.digests, forget=True)
    assert link.is_symlink()


@pytest.mark.parametrize("damage", ["", "{}", '{"member": "a", "lines": 0, "digest": "b"}', "[1"])
def test_a_damaged_mark_is_refused(damage: str, place: tuple[Path, Path]) -> None:
    state, mark = place
    lengthen(state, mark)
    mark.write_text(damage)
    with pytest.raises(RunError, match="damaged"):
        lengthen(state, mark)


def test_a_client_with_an_old_ledger_releases_nothing(place: tuple[Path, Path]) -> None:
    """Through the app, with the mark that its policy names; the server learns only that the node has a problem."""
    state, mark = place
    config = {"dataset": "cancer", "num-partitions": 4, "partition-id": 0, "records": 20, "state-dir": str(state)}
    node = Node(client_app(policy=ClientPolicy(epsilon=1e6, ledger_mark=str(mark))), config)
    task = job(rounds=5).task()
    from fedcdp.deploy.protocol import messages

    send(node, messages.publish(task), messages.SUBSCRIBE)
    shutil.copytree(state, state.with_name("backup"))
    assert "update" in send(node, ask(task, 0), messages.TRAIN)
    shutil.rmtree(state)
    shutil.copytree(state.with_name("backup"), state)
    refused = send(node, ask(task, 0), messages.TRAIN)
    assert str(refused.config_records["refused"]["reason"]) == "the node has an internal error; see its log"


@pytest.mark.parametrize("wrong", ["", 3, True])
def test_a_mark_must_be_a_path(wrong: Any) -> None:
    with pytest.raises(PolicyError, match="ledger_mark"):
        ClientPolicy(ledger_mark=wrong)
