"""Clients that join, leave and come back between rounds, and node keys that are rotated in a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Message

from fedcdp.accounting.budget import over_releases
from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.population import Population
from fedcdp.deploy.protocol.departure import leave
from fedcdp.deploy.protocol.roster import load_roster
from fedcdp.deploy.protocol.server import ServerSettings, serve
from fedcdp.deploy.site import node_keys
from fedcdp.errors import RunError
from fedcdp.training.ledger_check import spent
from tests.support.local_grid import OPEN, Killed, LocalGrid, Node, experiment, make_nodes, settings
from tests.support.sum_nodes import MEMBERS, listed, node_pair, sum_experiment, sum_nodes

Twist = Callable[[Message, Message], Message | None]


def at_round(number: int, do: Callable[[], object]) -> Twist:
    """Do something while the reply of a round is on its way."""
    done: list[object] = []

    def twist(asked: Message, reply: Message) -> Message:
        if asked.content.config_records["round"]["round"] == number and not done:
            done.append(do())
        return reply

    return twist


def charged(base: Path) -> list[list[int]]:
    return [each.clients.tolist() for each in Ledger.open(base / "run" / "ledger.jsonl").charges]


def three_of_four(rounds: int = 4) -> Any:
    wanted = experiment(per_round=3, rounds=rounds)
    return replace(wanted, data=replace(wanted.data, clients=3))


def grid_of(nodes: dict[int, Node], *away: int) -> LocalGrid:
    grid = LocalGrid(nodes)
    grid.offline = set(away)
    return grid


JOINING = {"joining": True, "smallest_records": 4}


# Joining -------------------------------------------------------------------------------------------------------------


def test_a_node_joins_between_rounds_and_is_accounted(tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path)
    grid = grid_of(nodes, 103)
    nodes[100].twist = at_round(0, lambda: grid.offline.clear())
    outcome = serve(grid, three_of_four(rounds=8), tmp_path / "run", settings(**JOINING))
    assert outcome.ended == "done"
    ledger = Ledger.open(tmp_path / "run" / "ledger.jsonl")
    assert (ledger.population["clients"], ledger.members) == (3, 4)
    clients = charged(tmp_path)
    assert clients[0] == [0, 1, 2]
    assert any(3 in each for each in clients[1:]), "drawn with the others: missed with probability 4^-7"
    assert all(len(each) == 3 for each in clients)
    assert len(ledger.participations()) == 4
    assert [member.number for member in load_roster(tmp_path / "run" / "clients.json")] == [0, 1, 2, 3]
    plan, privacy = spent(tmp_path / "run")
    row = privacy.row("server")
    assert row.epsilon_used is not None
    assert row.epsilon == row.epsilon_worst, "as for three clients, all in every round: more clients are never counted"
    assert over_releases(plan, Population.read(ledger.population), ledger.charges)


@pytest.mark.parametrize("given", [{"joining": False}, {"joining": True, "smallest_records": 20}])
def test_nobody_joins_that_the_settings_do_not_admit(
    given: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in general, nor with fewer records than ε is stated for."""
    nodes = make_nodes(tmp_path)
    grid = grid_of(nodes, 103)
    nodes[100].twist = at_round(0, lambda: grid.offline.clear())
    nodes[103].config["records"] = 10
    assert serve(grid, three_of_four(), tmp_path / "run", settings(**given)).ended == "done"
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").members == 3
    assert "node 103 is left out" in caplog.text


@pytest.mark.parametrize("plan", [{"method": "fed-sdp", "noise_at": "server", "noise_multiplier": 1.0}, {}])
def test_nobody_joins_a_hidden_or_a_reproducible_run(plan: dict[str, Any], tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path)
    grid = grid_of(nodes, 103)
    nodes[100].twist = at_round(0, lambda: grid.offline.clear())
    wanted = three_of_four()
    wanted = replace(wanted, plan=wanted.plan.but(**plan))
    assert serve(grid, wanted, tmp_path / "run", settings(reproducible=not plan, **JOINING)).ended == "done"
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").members == 3


def _lose_ledger(grid: LocalGrid, node: int) -> None:
    """A client has lost its ledger, and Flower knows it as another node now."""
    (Path(str(grid.nodes[node].config["state-dir"])) / "ledger.jsonl").unlink()
    _move(grid, node)


def test_a_client_that_lost_its_ledger_does_not_join_as_new(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its records would be at two clients of the ledger, each of which counts half of what they cost."""
    nodes = make_nodes(tmp_path)
    for number, node in nodes.items():
        node.config["client"] = f"hospital {number}"
    grid = grid_of(nodes)
    nodes[100].twist = at_round(0, lambda: _lose_ledger(grid, 101))
    assert serve(grid, experiment(per_round=4), tmp_path / "run", settings(**JOINING, min_clients=3)).ended == "done"
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").members == 4
    assert "node 200 is left out: it has the name or the key of client" in caplog.text


def test_a_server_killed_while_a_client_joins_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the roster and the ledger: the roster is first, and no number is used that the ledger lacks."""
    nodes = make_nodes(tmp_path)
    grid = grid_of(nodes, 103)
    nodes[100].twist = at_round(0, lambda: grid.offline.clear())

    def killed(_: Ledger) -> int:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "join", killed)
        with pytest.raises(Killed):
            serve(grid, three_of_four(), tmp_path / "run", settings(**JOINING))
    assert len(load_roster(tmp_path / "run" / "clients.json")) == 4
    assert serve(LocalGrid(nodes), three_of_four(), tmp_path / "run", settings(**JOINING, min_clients=3)).ended == "done"
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").members == 4


def test_a_join_in_the_ledger_must_fit(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", {"rounds": 3}, {"clients": 2}, "secure")
    ledger.charge(0, [0, 1], 1.0)
    with pytest.raises(RunError, match="outside the population of 2"):
        ledger.charge(1, [2], 1.0)
    assert ledger.join() == 2
    ledger.charge(1, [0, 2], 1.0)
    again = Ledger.open(tmp_path / "ledger.jsonl")
    assert again.members == 3
    assert again.participations().tolist() == [2, 1, 1]
    again._write_line({"joined": 7, "round": 2})
    with pytest.raises(RunError, match="line 5, is impossible: this client cannot join here"):
        Ledger.open(tmp_path / "ledger.jsonl")


# Leaving and coming back ---------------------------------------------------------------------------------------------


def test_a_client_that_leaves_costs_nothing_more_and_the_run_goes_on(tmp_path: Path) -> None:
    nodes = make_nodes(tmp_path)
    nodes[103].twist = at_round(0, lambda: leave(tmp_path / "client-1"))  # the last one that is asked
    outcome = serve(LocalGrid(nodes), experiment(per_round=4, rounds=4), tmp_path / "run", settings(min_clients=3))
    assert outcome.ended == "done"
    releases = (tmp_path / "client-1" / "ledger.jsonl").read_text().count('"released"')
    assert releases == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows] == [4, 3, 3, 3]


def _move(grid: LocalGrid, node: int) -> None:
    """Flower knows a client as another node now."""
    grid.nodes[200] = Node(grid.nodes[node].app, grid.nodes[node].config)
    grid.offline.add(node)


def test_a_client_that_comes_back_under_another_node_is_known(tmp_path: Path) -> None:
    """As after a new key: Flower then knows it as another node, and its ledger names the client."""
    nodes = make_nodes(tmp_path)
    grid = LocalGrid(nodes)

    nodes[103].twist = at_round(1, lambda: _move(grid, 101))
    wanted = experiment(per_round=4, rounds=4)
    assert serve(grid, wanted, tmp_path / "run", settings(reproducible=True)).ended == "done"
    roster = load_roster(tmp_path / "run" / "clients.json")
    assert [member.node for member in roster] == [100, 200, 102, 103]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows[2:]] == [4, 4]


def test_a_copy_of_a_connected_node_does_not_take_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = make_nodes(tmp_path)
    grid = LocalGrid(nodes)

    def copy() -> None:
        nodes[200] = Node(nodes[101].app, nodes[101].config)

    nodes[100].twist = at_round(0, copy)
    assert serve(grid, experiment(per_round=4), tmp_path / "run", settings(reproducible=True)).ended == "done"
    assert load_roster(tmp_path / "run" / "clients.json")[1].node == 101
    assert "both have the same ledger" in caplog.text


# Secure sums ---------------------------------------------------------------------------------------------------------

SUMS = {"min_cohort": 3, "min_clients": 3, "smallest_records": 4}


def four_of_five(rounds: int = 5) -> Any:
    wanted = sum_experiment(per_round=4, rounds=rounds)
    return replace(wanted, data=replace(wanted.data, clients=4))


def list_all(base: Path, numbers: Any) -> None:
    for number in numbers:
        (base / f"client-{number}" / "roster.toml").write_text(listed(range(MEMBERS)))


@pytest.mark.slow
def test_a_member_takes_effect_when_every_owner_has_listed_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = sum_nodes(tmp_path)
    for number in range(4):
        (tmp_path / f"client-{number}" / "roster.toml").write_text(listed(range(4)))
    grid = grid_of(nodes, 104)
    effects = {0: lambda: grid.offline.clear(), 2: lambda: list_all(tmp_path, (0, 1)), 5: lambda: list_all(tmp_path, (2, 3))}
    twists = [at_round(number, do) for number, do in effects.items()]

    def all_of_them(asked: Message, reply: Message) -> Message | None:
        for twist in twists:
            twist(asked, reply)
        return reply

    for number in range(4):
        nodes[100 + number].twist = all_of_them
    assert serve(grid, four_of_five(rounds=14), tmp_path / "run", settings(joining=True, **SUMS)).ended == "done"
    rosters = charged(tmp_path)
    first = next(place for place, clients in enumerate(rosters) if 4 in clients)
    assert first > 5, "two owners listed it after the sixth round"
    assert len(rosters) == 14, "no attempt failed over it"
    assert "not all members of the roster know each other's node keys yet" in caplog.text
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").members == 5


@pytest.mark.parametrize("planned", [None, True])
def test_a_member_of_a_sum_that_lost_its_ledger_does_not_join(planned: bool | None, tmp_path: Path) -> None:
    """It is known by its node key, or by the key that signed its new one."""
    nodes = sum_nodes(tmp_path)
    _as_node_folder(tmp_path, 2)
    grid = LocalGrid(nodes)

    def lose() -> None:
        if planned:
            node_keys.rekey(tmp_path / "client-2", planned=True)
        _lose_ledger(grid, 102)

    nodes[104].twist = at_round(0, lose)
    serve(grid, sum_experiment(rounds=3), tmp_path / "run", settings(joining=True, **SUMS))
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").members == MEMBERS


@pytest.mark.parametrize("accepts", [True, False])
def test_a_rotated_key_is_accepted_only_by_policies_that_allow_it(accepts: bool, tmp_path: Path) -> None:
    policy = replace(OPEN, colluders=1, accept_rotated_keys=accepts)
    nodes = sum_nodes(tmp_path, policy)
    for number in range(MEMBERS):
        _as_node_folder(tmp_path, number)
    grid = LocalGrid(nodes)

    def rotate() -> None:
        node_keys.rekey(tmp_path / "client-2", planned=True)
        _move(grid, 102)

    nodes[104].twist = at_round(1, rotate)
    assert serve(grid, sum_experiment(rounds=6), tmp_path / "run", settings(**SUMS)).ended == "done"
    everyone, others = [0, 1, 2, 3, 4], [0, 1, 3, 4]
    assert charged(tmp_path)[:2] == [everyone, everyone]
    assert charged(tmp_path)[-1] == (everyone if accepts else others)
    assert (tmp_path / "client-2" / "node.rotation").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "client-0" / "state" / "rotated-keys").exists() == accepts


@pytest.mark.slow
def test_after_a_rotation_the_server_may_be_started_again(tmp_path: Path) -> None:
    policy = replace(OPEN, colluders=1, accept_rotated_keys=True)
    nodes = sum_nodes(tmp_path, policy)
    for number in range(MEMBERS):
        _as_node_folder(tmp_path, number)
    for number in (2, 2, 3):
        node_keys.rekey(tmp_path / f"client-{number}", planned=True)
    killed = LocalGrid(nodes, fail_at=(MEMBERS * 3 + 2, "after"))
    with pytest.raises(Killed):
        serve(killed, sum_experiment(), tmp_path / "run", settings(**SUMS))
    roster = load_roster(tmp_path / "run" / "clients.json")
    assert [len(member.rotations) for member in sorted(roster, key=lambda each: each.node)] == [0, 0, 2, 1, 0]
    assert serve(LocalGrid(nodes), sum_experiment(), tmp_path / "run", settings(**SUMS)).ended == "done"
    assert charged(tmp_path)[-1] == [0, 1, 2, 3, 4]


def _as_node_folder(base: Path, number: int) -> None:
    (base / f"client-{number}" / "node.pub").write_bytes(node_pair(number).public)


def test_settings_of_a_run_configuration_let_nodes_join() -> None:
    assert ServerSettings.of({"joining": True}).joining
    assert not ServerSettings.of({}).joining
