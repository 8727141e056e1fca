"""A server of secure sums: attempts with the survivors, skipped rounds, and a run that goes on after a crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Message

from fedcdp.accounting.ledger import Ledger
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.server import serve
from fedcdp.deploy.protocol.strategy import PlanStrategy
from fedcdp.errors import PlanError
from fedcdp.files.tensors import load_tensors
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.trainer import train_experiment
from tests.deploy.protocol.test_sum_client import published
from tests.support.local_grid import Killed, LocalGrid, settings
from tests.support.sum_nodes import MEMBERS, sum_experiment, sum_nodes

Settings = dict[str, Any]
HOW = {"min_cohort": 3, "min_clients": 3}
QUICK = [(12, "after", False), (17, "before", True)]
MESSAGES = MEMBERS * (1 + 1 + 3)  # to subscribe, to pass on keys, and three rounds


def silent_in(*places: tuple[int, int]) -> Callable[[Message, Message], Message | None]:
    """A node whose share is lost in these rounds and attempts."""

    def twist(asked: Message, reply: Message) -> Message | None:
        about = asked.content.config_records["round"]
        return None if (about["round"], about["attempt"]) in places else reply

    return twist


def charges(base: Path) -> list[tuple[int, int, list[int]]]:
    return [(each.round, each.attempt, each.clients.tolist()) for each in Ledger.open(base / "run" / "ledger.jsonl").charges]


def releases(base: Path, client: int) -> list[tuple[int, int]]:
    with ClientLedger.held(base / f"client-{client}" / "state") as ledger:
        return next(iter(ledger.tasks.values())).releases


def clients_of(base: Path) -> list[int]:
    return [int(row["clients"]) for row in RunDirectory(base / "run").read_metrics()]


AVERAGED: Settings = {"server_optimizer": "momentum", "server_momentum": 0.9, "ema": 0.9}
SAME: list[tuple[Settings, int | None]] = [
    ({}, 1),
    ({"batch_size": 7, "clip_mode": "layer", "rounds": 10} | AVERAGED, 1),
    ({"batch_size": 20, "record_sampling": "partition", "clip": "0.1", "rounds": 30} | AVERAGED, None),
    ({"method": "fed-sdp", "noise_at": "client", "local_steps": 3}, 1),
]


@pytest.mark.parametrize(("plan", "chunk"), [SAME[0], *[pytest.param(*each, marks=pytest.mark.slow) for each in SAME[1:]]])
def test_a_reproducible_run_gives_the_simulators_model(plan: Settings, chunk: int | None, tmp_path: Path) -> None:
    """To the bit: the same functions on the same shapes. Without a chunk of one, if all clients fill as many slots."""
    wanted = sum_experiment(**plan)
    simulated = train_experiment(replace(wanted, run=replace(wanted.run, chunk=chunk)), None, quiet=True).model.state_dict()
    grid = LocalGrid(sum_nodes(tmp_path))
    assert serve(grid, wanted, tmp_path / "run", settings(reproducible=True, **HOW)).ended == "done"
    model = load_tensors(tmp_path / "run" / "model.safetensors", "model-1")[0]
    for name, value in simulated.items():
        torch.testing.assert_close(model[name], value, rtol=0, atol=0)
    kinds = [message.metadata.message_type for message in grid.sent]
    assert kinds.count("query.keys") == MEMBERS
    assert kinds.count("train") == wanted.plan.rounds * MEMBERS


@pytest.mark.parametrize("reproducible", [False, True])
def test_survivors_try_again_and_both_sides_charge_again(reproducible: bool, tmp_path: Path) -> None:
    grid = LocalGrid(sum_nodes(tmp_path, client2=silent_in((1, 0))))
    outcome = serve(grid, sum_experiment(), tmp_path / "run", settings(reproducible=reproducible, **HOW))
    assert outcome.ended == "done"
    everyone, others = [0, 1, 2, 3, 4], [0, 1, 3, 4]
    assert charges(tmp_path) == [(0, 0, everyone), (1, 0, everyone), (1, 1, others), (2, 0, everyone)]
    assert clients_of(tmp_path) == [5, 4, 5]
    assert releases(tmp_path, 0) == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert releases(tmp_path, 2) == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.slow
def test_a_node_that_failed_twice_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = LocalGrid(sum_nodes(tmp_path, client2=silent_in(*((round_, 0) for round_ in range(3)))))
    assert serve(grid, sum_experiment(), tmp_path / "run", settings(**HOW)).ended == "done"
    assert [len(members) for _, _, members in charges(tmp_path)] == [5, 4, 5, 4, 4]
    assert "it is left out from now on" in caplog.text


@pytest.mark.parametrize("place", [16, 25])
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_failures_count_after_the_server_was_killed(place: int, when: str, tmp_path: Path) -> None:
    """Killed in a second attempt, after the first failure of a client, and after the second."""
    twist = {"client2": silent_in(*((round_, 0) for round_ in range(3)))}
    killed = LocalGrid(sum_nodes(tmp_path, **twist), fail_at=(place, when))
    with pytest.raises(Killed):
        serve(killed, sum_experiment(), tmp_path / "run", settings(**HOW))
    grid = LocalGrid(sum_nodes(tmp_path, **twist))
    assert serve(grid, sum_experiment(), tmp_path / "run", settings(**HOW)).ended == "done"
    assert [(round_, attempt) for round_, attempt, members in charges(tmp_path) if 2 in members] == [(0, 0), (1, 0)]
    assert clients_of(tmp_path)[2] == 4


@pytest.mark.slow
def test_a_node_that_was_away_comes_back(tmp_path: Path) -> None:
    grid = LocalGrid(sum_nodes(tmp_path))
    with pytest.raises(Killed):
        serve(
            LocalGrid(sum_nodes(tmp_path), fail_at=(2 * MEMBERS, "before")),
            sum_experiment(),
            tmp_path / "run",
            settings(**HOW),
        )
    grid.offline = {103}
    assert serve(grid, sum_experiment(), tmp_path / "run", settings(**HOW)).ended == "done"
    assert clients_of(tmp_path) == [4, 4, 4]


def test_rounds_without_a_sum_are_skipped_and_the_run_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    always = {f"client{n}": silent_in(*((round_, n % 2) for round_ in range(3))) for n in range(2)}
    grid = LocalGrid(sum_nodes(tmp_path, **always))
    outcome = serve(grid, sum_experiment(), tmp_path / "run", settings(**HOW))
    assert outcome.ended == "done"
    assert "round 1 is skipped: it has been tried 2 times" in caplog.text
    assert clients_of(tmp_path)[0] == 0
    before = RunDirectory(tmp_path / "run").read_metrics()
    assert [row["round"] for row in before] == [1, 2, 3]


@pytest.mark.slow
def test_too_few_for_a_roster_charge_the_round_without_clients(tmp_path: Path) -> None:
    grid = LocalGrid(sum_nodes(tmp_path))
    real = grid.get_node_ids

    def leaving() -> list[int]:
        keys = sum(message.metadata.message_type == "query.keys" for message in grid.sent)
        return [node for node in real() if not keys or node in (100, 101)]

    grid.get_node_ids = leaving  # type: ignore[method-assign]
    outcome = serve(grid, sum_experiment(), tmp_path / "run", settings(**HOW | {"min_clients": 1}))
    assert outcome.ended == "done"
    assert [members for _, _, members in charges(tmp_path)] == [[0, 1, 2, 3, 4], [], []]
    assert clients_of(tmp_path) == [5, 0, 0]


@pytest.mark.parametrize(
    ("place", "when", "reproducible"),
    [
        *QUICK,
        *[
            pytest.param(*each, marks=pytest.mark.slow)
            for each in product(range(MESSAGES), ("before", "after"), (False, True))
            if each not in QUICK
        ],
    ],
)
def test_killed_at_any_message(place: int, when: str, reproducible: bool, tmp_path: Path) -> None:
    how = settings(reproducible=reproducible, **HOW)
    with pytest.raises(Killed):
        serve(LocalGrid(sum_nodes(tmp_path), fail_at=(place, when)), sum_experiment(), tmp_path / "run", how)
    resumed = LocalGrid(sum_nodes(tmp_path))
    assert serve(resumed, sum_experiment(), tmp_path / "run", how).ended == "done"
    charged = charges(tmp_path)
    assert [round_ for round_, attempt, _ in charged if not attempt] == [0, 1, 2]
    for client in range(MEMBERS):
        mine = [(round_, attempt) for round_, attempt, members in charged if client in members]
        assert set(releases(tmp_path, client)) <= set(mine)
        assert releases(tmp_path, client) == sorted(set(releases(tmp_path, client)))
    assert clients_of(tmp_path) == [MEMBERS] * 3


@pytest.mark.slow
def test_the_last_attempt_lost_in_a_crash_skips_the_round(tmp_path: Path) -> None:
    wanted = sum_experiment(attempts=1)
    with pytest.raises(Killed):
        serve(LocalGrid(sum_nodes(tmp_path), fail_at=(2 * MEMBERS + 2, "after")), wanted, tmp_path / "run", settings(**HOW))
    assert serve(LocalGrid(sum_nodes(tmp_path)), wanted, tmp_path / "run", settings(**HOW)).ended == "done"
    assert clients_of(tmp_path) == [0, 5, 5]


def test_a_share_of_another_size_is_a_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import numpy as np

    from fedcdp.deploy.protocol import wire

    def shorter(_: Message, reply: Message) -> Message:
        reply.content["share"] = wire.words(np.zeros(3, np.uint64))
        return reply

    grid = LocalGrid(sum_nodes(tmp_path, client1=shorter))
    assert serve(grid, sum_experiment(), tmp_path / "run", settings(**HOW)).ended == "done"
    assert clients_of(tmp_path) == [4, 4, 4]
    assert "has the shape [3]" in caplog.text


def test_flowers_own_loop_is_refused() -> None:
    from fedcdp.deploy.protocol.roster import Member

    task = published()
    roster = tuple(Member(n, n, 20, f"{n:032x}") for n in range(MEMBERS))
    from fedcdp.deploy.protocol.strategy import Job
    from tests.deploy.protocol.test_sum_client import NETWORK

    job = Job(plan=task.plan, network=NETWORK, network_name="mlp", shape=(30,), classes=2, clients=MEMBERS)
    with pytest.raises(PlanError, match="noise: sum needs several attempts"):
        PlanStrategy(job, roster)
