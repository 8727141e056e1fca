"""A client of a secure sum: it refuses what it could not check, and charges an attempt before it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import RecordDict

from fedcdp.deploy.protocol import messages, sum_member, wire
from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.local_round import Round
from fedcdp.deploy.protocol.masks import sum_of
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.deploy.protocol.strategy import Job, deployed
from fedcdp.deploy.protocol.task import Task
from fedcdp.training.prepared import build_network
from tests.support.local_grid import OPEN, Node
from tests.support.one_client import send
from tests.support.sum_nodes import MEMBERS, SumFolder, listed, node_key, sum_experiment, sum_nodes

NETWORK = build_network(sum_experiment(), (30,), 2)
WEIGHTS = {name: p.detach() for name, p in NETWORK.named_parameters()}
SIZE = sum(value.numel() for value in WEIGHTS.values())
KEYS = [node_key(number) for number in range(MEMBERS)]
POLICY = replace(OPEN, colluders=1)


def published(*, reproducible: bool = False, **plan: Any) -> Task:
    job = Job(plan=deployed(sum_experiment(**plan).plan, reproducible), network=NETWORK, network_name="mlp", shape=(30,),
              classes=2, clients=MEMBERS, smallest_cohort=3, reproducible=reproducible)  # fmt: skip
    return job.task()


class Federation:
    """Five clients that accepted a task and have each other's keys."""

    def __init__(self, base: Path, task: Task, policy: ClientPolicy = POLICY) -> None:
        self.base, self.task, self.digest = base, task, task.digest()
        self.nodes = list(sum_nodes(base, policy).values())
        self.answers = [send(node, messages.publish(task), messages.SUBSCRIBE) for node in self.nodes]
        self.keys = [messages.SignedKey.from_bytes(each.config_records["answer"]["key"]) for each in self.answers]
        for node in self.nodes:
            assert send(node, messages.pass_on_keys(self.digest, self.keys), messages.KEYS)["kept"]["keys"] == MEMBERS

    def ask(self, client: int, round_: int = 0, attempt: int = 0, roster: Any = KEYS, **weights: torch.Tensor) -> RecordDict:
        asked = messages.ask_share(self.digest, Round(round_, attempt, None), wire.dense(WEIGHTS | weights), roster)
        return send(self.nodes[client], asked, messages.TRAIN)

    def reason(self, *args: Any, **named: Any) -> str:
        return str(self.ask(*args, **named).config_records["refused"]["reason"])

    def releases(self, client: int) -> list[tuple[int, int]]:
        with ClientLedger.held(self.base / f"client-{client}" / "state") as ledger:
            return ledger.tasks[self.digest].releases


@pytest.fixture
def five(tmp_path: Path) -> Federation:
    return Federation(tmp_path, published())


def words(reply: RecordDict) -> np.ndarray[Any, Any]:
    return wire.decode_words(reply.array_records["share"], SIZE)


def test_shares_add_up_to_a_small_sum_and_alone_fill_the_ring(five: Federation) -> None:
    replies = [five.ask(client) for client in range(MEMBERS)]
    assert [set(reply) for reply in replies] == [{"share", "about"}] * MEMBERS
    assert len({wire.bytes_of(reply.array_records["share"]) for reply in replies}) == 1
    total = sum_of([words(reply) for reply in replies], SIZE)
    assert abs(total).max() < 2**40
    assert abs(words(replies[0]).view(np.int64)).max() > 2**60
    with ClientLedger.held(five.base / "client-0" / "state") as ledger:
        checked = ledger.tasks[five.digest].sums
    assert [each.members for each in checked] == [MEMBERS]


@pytest.mark.parametrize("changed", ["weights", "roster", "attempt", "round"])
def test_a_server_that_shows_one_client_something_else_gets_no_sum(changed: str, five: Federation) -> None:
    shown: dict[str, Any] = {
        "weights": {next(iter(WEIGHTS)): next(iter(WEIGHTS.values())) + 1e-6},
        "roster": {"roster": KEYS[:4]},
        "attempt": {"attempt": 1},
        "round": {"round_": 1},
    }[changed]
    replies = [five.ask(client, **shown if client == 0 else {}) for client in range(MEMBERS)]
    assert abs(sum_of([words(reply) for reply in replies], SIZE)).max() > 2**60


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"roster": KEYS[1:]}, "the roster does not have this node"),
        ({"roster": [*KEYS[:3], KEYS[1]]}, "the roster has a node twice"),
        ({"roster": [*KEYS[:4], node_key(77)]}, "is not on the list of known nodes"),
        ({"roster": [*KEYS, node_key(77)]}, "the roster has 6 members; the task has 5 in a round"),
        ({"roster": KEYS[:2]}, "the roster has 2 members; the task promises 3 or more"),
        ({"roster": [b"short", *KEYS]}, "is not a node key of 49 bytes"),
        ({"attempt": 2}, "attempt 3 of round 1 exceeds the task's 2"),
        ({"round_": 3}, "round 3 is not one of the task's 3 rounds"),
    ],
)
def test_refusals_say_why_and_cost_nothing(asked: dict[str, Any], sentence: str, five: Federation) -> None:
    assert sentence in five.reason(0, **asked)
    assert five.releases(0) == []


def test_a_request_without_a_roster_or_with_a_clip_bound_is_refused(five: Federation) -> None:
    plain = messages.ask(five.digest, Round(0, 0, None), wire.dense(WEIGHTS))
    assert "no record roster" in send(five.nodes[0], plain, messages.TRAIN)["refused"]["reason"]
    bound = messages.ask_share(five.digest, Round(0, 0, 4.0), wire.dense(WEIGHTS), KEYS)
    assert "must have a clip bound if, and only if" in send(five.nodes[0], bound, messages.TRAIN)["refused"]["reason"]


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_repeated_or_earlier_attempt_is_refused(reproducible: bool, tmp_path: Path) -> None:
    five = Federation(tmp_path, published(reproducible=reproducible))
    first = five.ask(0, 1, 0)
    again = five.ask(0, 1, 0)
    if reproducible:  # the same values, bit by bit
        assert (words(again) == words(first)).all()
    else:
        assert "is stale" in again.config_records["refused"]["reason"]
    assert "is stale" in five.reason(0, 1, 0, roster=KEYS[:4])
    assert "is stale" in five.reason(0, 0, 1)
    assert five.releases(0) == [(1, 0)]


@pytest.mark.parametrize("place", ["before the charge", "after the charge", "before the answer"])
def test_a_crash_never_lets_an_attempt_be_answered_twice(
    place: str, five: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(BaseException): ...

    def crash(*_: Any, **__: Any) -> None:
        raise Crash

    target = {
        "before the charge": "fedcdp.deploy.protocol.client_ledger.ClientLedger.charge",
        "after the charge": "fedcdp.deploy.protocol.sum_member.share_of",
        "before the answer": "fedcdp.deploy.protocol.messages.reply_share",
    }[place]
    with monkeypatch.context() as patch:
        patch.setattr(target, crash)
        with pytest.raises(Crash):
            five.ask(0)
    charged = place != "before the charge"
    assert five.releases(0) == ([(0, 0)] if charged else [])
    answer = five.ask(0)
    assert ("share" in answer.array_records) == (not charged)
    assert five.releases(0) == [(0, 0)]


def test_the_charge_is_on_disk_before_anything_is_computed(five: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], sum_member.share_of

    def look(*args: Any) -> Any:
        seen.append((five.base / "client-0" / "state" / "ledger.jsonl").read_text().count('"summed"'))
        return real(*args)

    monkeypatch.setattr(sum_member, "share_of", look)
    five.ask(0)
    assert seen == [1]


def _unmasked(five: Federation, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray[Any, Any]]:
    """The shares of one client in two attempts at the same round, before their masks."""
    shares, real = [], sum_member.share_of

    def look(*args: Any) -> Any:
        shares.append(real(*args))
        return shares[-1]

    monkeypatch.setattr(sum_member, "share_of", look)
    five.ask(0, 0, 0)
    five.ask(0, 0, 1)
    return shares


@pytest.fixture
def noisy(tmp_path: Path) -> Federation:
    """Five clients whose noise is far larger than the gradients of the records that an attempt draws."""
    return Federation(tmp_path, published(noise_multiplier=100.0))


def reuses_noise(shares: list[np.ndarray[Any, Any]]) -> bool:
    """Whether the difference of two attempts is smaller than fresh noise makes it."""
    one, other = shares
    return bool(np.median(abs(one - other)) < 0.1 * np.median(abs(one)))


def test_each_attempt_has_fresh_noise(noisy: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reuses_noise(_unmasked(noisy, monkeypatch))


def test_noise_reused_between_attempts_is_caught(noisy: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcdp.mechanism.noise import SecureNoise

    real, drawn = SecureNoise.for_sum, list[Any]()

    def reuse(*args: Any) -> Any:
        drawn.append(drawn[0] if drawn else real(*args))
        return drawn[-1]

    monkeypatch.setattr(SecureNoise, "for_sum", reuse)
    assert reuses_noise(_unmasked(noisy, monkeypatch))


# Subscribing ---------------------------------------------------------------------------------------------------------


def declined(base: Path, policy: ClientPolicy = POLICY, task: Task | None = None, **changes: Any) -> str:
    """Why a client with these files declines."""
    folder = SumFolder.write(base, 0)
    dealt = {"dataset": "cancer", "num-partitions": MEMBERS, "partition": "iid", "records": 20, "partition-id": 0}
    config = {name: value for name, value in (dealt | folder.config | changes).items() if value is not None}
    answer = send(Node(client_app(policy=policy), config), messages.publish(task or published()), messages.SUBSCRIBE)
    found = answer.config_records["answer"]
    return "" if found["accepts"] else str(found["reason"])


@pytest.mark.parametrize(
    ("policy", "plan", "sentence"),
    [
        ({"colluders": None}, {}, "does not say how many nodes may collude with the server; set colluders"),
        ({"colluders": 2}, {}, "the task expects 1 colluders; at least 2 are expected here"),
        ({"smallest_honest": 5}, {}, "a roster of 5 with 1 colluders has 4 honest members; at least 5 are required here"),
        ({"epsilon": 1.0}, {}, "the budget of ε = 1 against server (record) allows no further participation"),
        ({"epsilon_alone": 1.0}, {}, "the budget of ε = 1 against update (record) allows no further participation"),
        ({"adversary": "example", "epsilon": 1.0}, {}, "has no ε against example"),
    ],
)
def test_a_policy_declines(policy: dict[str, Any], plan: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    assert sentence in declined(tmp_path, replace(POLICY, **policy), published(**plan))


def test_the_caps_of_a_policy_hold_together(tmp_path: Path) -> None:
    strong = published(noise_multiplier=8.0)
    assert declined(tmp_path / "a", replace(POLICY, epsilon=2.0), strong) == ""
    assert declined(tmp_path / "b", replace(POLICY, epsilon=2.0, epsilon_alone=10.0), strong) == ""
    assert "against update" in declined(tmp_path / "c", replace(POLICY, epsilon=2.0, epsilon_alone=0.05), strong)


def test_a_client_without_identity_or_list_declines(tmp_path: Path) -> None:
    assert "identity is missing" in declined(tmp_path / "a", identity=None)
    assert "roster is missing" in declined(tmp_path / "b", roster=None)
    assert "internal error" in declined(tmp_path / "c", identity=str(tmp_path / "nothing"))


def test_keys_made_by_the_operator_need_trust(tmp_path: Path) -> None:
    path = tmp_path / "roster.toml"
    path.write_text(listed(range(MEMBERS), made_by="operator"))
    assert "was made by the operator" in declined(tmp_path / "a", roster=str(path))
    assert declined(tmp_path / "b", replace(POLICY, trust_operator_keys=True), roster=str(path)) == ""


def test_a_client_that_is_not_on_its_own_list_declines(tmp_path: Path) -> None:
    path = tmp_path / "roster.toml"
    path.write_text(listed([1, 2]))
    assert "this node is not on the list" in declined(tmp_path / "a", roster=str(path))


# Keys ----------------------------------------------------------------------------------------------------------------


def test_keys_of_unknown_nodes_and_other_runs_are_not_kept(five: Federation, tmp_path: Path) -> None:
    other = Federation(tmp_path / "other", published(noise_multiplier=9.0))
    mixed = [five.keys[0], five.keys[1], *other.keys[2:]]
    assert send(five.nodes[0], messages.pass_on_keys(five.digest, mixed), messages.KEYS)["kept"]["keys"] == 2
    assert "there is no signed run key of the member" in five.reason(0)
    assert five.releases(0) == []


def test_a_run_that_ended_has_no_key_and_gets_a_new_one(five: Federation) -> None:
    state = five.base / "client-0" / "state"
    old = list(state.glob("sum-*"))
    assert len(old) == 2
    send(five.nodes[0], messages.say_ended(five.digest), messages.ENDED)
    assert not list(state.glob("sum-*"))
    assert "has no run key for the task any more" in five.reason(0)
    answer = send(five.nodes[0], messages.publish(five.task), messages.SUBSCRIBE)
    new = messages.SignedKey.from_bytes(answer["answer"]["key"])
    assert new.holds(five.task)
    assert new.member != five.keys[0].member


@pytest.mark.parametrize(
    ("content", "kind"),
    [(lambda: messages.pass_on_keys("0" * 32, []), messages.KEYS), (lambda: messages.say_ended("0" * 32), messages.ENDED)],
)
def test_messages_about_unknown_tasks_are_refused(content: Callable[[], RecordDict], kind: str, five: Federation) -> None:
    assert "not accepted here" in send(five.nodes[0], content(), kind)["refused"]["reason"]
    assert list((five.base / "client-0" / "state").glob("sum-*"))
