"""kill -9 at every call of a client that changes a file: no attempt at a secure sum is answered twice, none is free."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedcdp.deploy.protocol import messages, sum_member
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from tests.deploy.protocol.test_sum_client import MEMBERS, Federation, published
from tests.support.one_client import send
from tools.crash.faults import Faults, How, Strike

pytestmark = pytest.mark.slow
_ROUNDS = 40


def in_fork(work: Callable[[], object], state: Path, strike: Strike | None, aside: Path) -> tuple[int, list[str]]:
    """Do the work in a process with a fault below the state directory: its end, and its calls that change files."""
    seen = aside / "calls"
    child = os.fork()
    if child == 0:
        try:
            Faults(state, strike, seen).install()
            work()
        finally:
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, seen.read_text().splitlines()


def witnessed(five: Federation, aside: Path, round_: int) -> bool:
    """Ask for a share; whether it was computed, which an independent file records before that."""
    real, computed = sum_member.share_of, aside / f"computed-{round_}"

    def look(*args: object) -> object:
        with computed.open("a") as file:
            file.write("x")
        return real(*args)  # type: ignore[arg-type]

    sum_member.share_of = look  # type: ignore[assignment]
    try:
        return "share" in five.ask(0, round_).array_records
    finally:
        sum_member.share_of = real


@pytest.mark.parametrize("how", ["kill", "tear"])
def test_no_attempt_is_answered_twice_after_kill_9(how: How, tmp_path: Path) -> None:
    five = Federation(tmp_path / "five", published(rounds=_ROUNDS))
    aside, state = tmp_path / "aside", five.base / "client-0" / "state"
    aside.mkdir()
    witnessed(five, aside, 0)  # reserves; later rounds only charge
    _, calls = in_fork(lambda: witnessed(five, aside, 1), state, None, aside)
    assert 2 <= len(calls) < _ROUNDS - 3
    for place in range(len(calls)):
        round_ = 2 + place
        status, _ = in_fork(lambda: witnessed(five, aside, round_), state, Strike(how, place), aside)  # noqa: B023
        assert status == -9
        witnessed(five, aside, round_)
        witnessed(five, aside, round_)
        shares = (aside / f"computed-{round_}").read_text() if (aside / f"computed-{round_}").exists() else ""
        with ClientLedger.held(state) as ledger:
            charged = ledger.tasks[five.digest].releases.count((round_, 0))
        assert len(shares) <= charged == 1


@pytest.mark.parametrize("kind", [messages.SUBSCRIBE, messages.KEYS, messages.ENDED])
def test_other_messages_can_be_repeated_after_kill_9(kind: str, tmp_path: Path) -> None:
    five = Federation(tmp_path / "five", published(rounds=_ROUNDS))
    state, node = five.base / "client-0" / "state", five.nodes[0]
    content = {
        messages.SUBSCRIBE: messages.publish(published(rounds=_ROUNDS, noise_multiplier=5.0)),
        messages.KEYS: messages.pass_on_keys(five.digest, five.keys),
        messages.ENDED: messages.say_ended(five.digest),
    }[kind]
    for place in range(_ROUNDS):
        status, _ = in_fork(lambda: send(node, content, kind), state, Strike("kill", place), tmp_path)
        if status == 0:
            break
        reply = send(node, content, kind)
        assert "refused" not in reply.config_records
    assert place > 0
    if kind == messages.KEYS:
        assert send(node, content, kind)["kept"]["keys"] == MEMBERS
        assert "share" in five.ask(0).array_records
