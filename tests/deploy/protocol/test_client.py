"""A client by itself: it trusts nobody, and pays before it gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.local_grid import OPEN, LocalGrid, Node, experiment, make_nodes, settings
from tests.support.one_client import NETWORK, ask, job, send

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, RecordDict

from fedcdp.accounting.ledger import Ledger
from fedcdp.deploy.protocol import client, messages, wire
from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.grant import Grant, Reservation
from fedcdp.deploy.protocol.local_round import Round, _file
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.deploy.protocol.roster import Member, subscribe
from fedcdp.deploy.protocol.server import serve
from fedcdp.deploy.protocol.strategy import Job, PlanStrategy, deployed
from fedcdp.errors import DataError
from fedcdp.files.tree import Layout


def spent(tmp_path: Path) -> int:
    with ClientLedger.held(tmp_path / "client-0") as ledger:
        return sum(len(each.releases) for each in ledger.tasks.values())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return make_nodes(tmp_path)[100]


def test_nothing_is_trained_for_a_task_that_was_not_accepted(node: Node, tmp_path: Path) -> None:
    answer = send(node, ask(job().task(), 0), "train")
    assert "was not accepted here" in str(answer.config_records["refused"]["reason"])
    assert not answer.array_records
    assert spent(tmp_path) == 0


def test_a_release_is_charged_before_it_is_computed(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = job().task()
    send(node, messages.publish(task), "query.subscribe")
    seen = []
    real = client.LocalTraining.take_part
    monkeypatch.setattr(client.LocalTraining, "take_part", lambda *a, **k: (seen.append(spent(tmp_path)), real(*a, **k))[1])
    assert "update" in send(node, ask(task, 0), "train").array_records
    assert seen == [1]


def test_a_client_that_dies_while_training_has_paid(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = job().task()
    send(node, messages.publish(task), "query.subscribe")

    def die(*args: object, **kwargs: object) -> None:
        raise SystemExit(f"{len(args)}, {len(kwargs)}")

    with monkeypatch.context() as patch:
        patch.setattr(client.LocalTraining, "take_part", die)
        with pytest.raises(SystemExit):
            send(node, ask(task, 0), "train")
    assert spent(tmp_path) == 1


def test_what_leaves_a_client_is_the_update_and_its_place_and_nothing_else(node: Node) -> None:
    task = job().task()
    answer = send(node, messages.publish(task), "query.subscribe").config_records["answer"]
    assert set(answer) == {"accepts", "reason", "records", "member", "number"}
    assert answer["records"] == 20
    reply = send(node, ask(task, 0), "train")
    assert set(reply) == {"update", "about"}
    assert dict(reply.config_records["about"]) == {"task": task.digest(), "round": 0, "attempt": 0}


def test_two_attempts_have_different_noise_and_both_are_charged(node: Node, tmp_path: Path) -> None:
    task, layout = job().task(), Layout.of(NETWORK)
    send(node, messages.publish(task), "query.subscribe")
    first, second = (send(node, ask(task, 0, attempt), "train").array_records["update"] for attempt in (0, 1))
    assert not torch.equal(*(layout.flatten(wire.decode(each, layout, may_be_sparse=True), 0) for each in (first, second)))
    assert spent(tmp_path) == 2


def test_a_replayed_message_is_refused(node: Node, tmp_path: Path) -> None:
    task = job().task()
    send(node, messages.publish(task), "query.subscribe")
    for _ in range(2):
        answer = send(node, ask(task, 1), "train")
    assert "is stale" in str(answer.config_records["refused"]["reason"])
    assert "is stale" in str(send(node, ask(task, 0), "train").config_records["refused"]["reason"])
    assert spent(tmp_path) == 1


@pytest.mark.parametrize(
    "content",
    [
        lambda task: ask(task, 0, **{"1.bias": torch.full((64,), float("nan"))}),
        lambda task: ask(task, 0, **{"1.bias": torch.zeros(3)}),
        lambda task: ask(task, 99),
        lambda task: ask(task, -1),
        lambda task: messages.ask(task.digest(), Round(0, 0, 3.0), wire.dense(dict(NETWORK.named_parameters()))),
        lambda task: RecordDict({"round": ConfigRecord({"task": task.digest()})}),
        lambda task: RecordDict(),  # noqa: ARG005
    ],
)
def test_a_message_that_is_not_sound_is_refused_and_costs_nothing(content: Any, node: Node, tmp_path: Path) -> None:
    task = job().task()
    send(node, messages.publish(task), "query.subscribe")
    answer = send(node, content(task), "train")
    assert set(answer) == {"refused"}
    assert answer.config_records["refused"]["final"] is False
    assert spent(tmp_path) == 0


def test_a_damaged_ledger_ends_all_training(node: Node, tmp_path: Path) -> None:
    task = job().task()
    send(node, messages.publish(task), "query.subscribe")
    path = tmp_path / "client-0" / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b"accepted", b"rejected"))
    assert set(send(node, ask(task, 0), "train")) == {"refused"}
    answer = send(node, messages.publish(job().task()), "query.subscribe").config_records["answer"]
    assert answer["accepts"] is False
    assert str(tmp_path) not in str(answer["reason"])


def test_a_policy_that_became_stricter_holds_at_once(node: Node, tmp_path: Path) -> None:
    task = job().task()
    send(node, messages.publish(task), "query.subscribe")
    strict = make_nodes(tmp_path, ClientPolicy(epsilon=1e-3))[100]
    answer = send(strict, ask(task, 0), "train").config_records["refused"]
    assert answer["final"] is True
    assert "allows no further" in str(answer["reason"])


def test_data_that_changed_are_not_used(node: Node) -> None:
    task = job().task()
    send(node, messages.publish(task), "query.subscribe")
    node.config["records"] = 19
    assert "the data have changed" in str(send(node, ask(task, 0), "train").config_records["refused"]["reason"])


@pytest.mark.slow
def test_a_client_at_its_budget_declines_and_the_run_ends_cleanly(tmp_path: Path) -> None:
    wanted = experiment(per_round=4, rounds=9, noise_multiplier=2.0)
    task = Job(
        plan=deployed(wanted.plan, False), network=NETWORK, network_name="mlp", shape=(30,), classes=2, clients=4
    ).task()
    limit = Grant(1.0, 1e-5).cost(Reservation(task, 20, 1, 4)) * 1.001
    nodes = make_nodes(tmp_path, OPEN)
    nodes[102] = make_nodes(tmp_path, ClientPolicy(epsilon=limit))[102]
    outcome = serve(LocalGrid(nodes), wanted, tmp_path / "run", settings())
    assert (outcome.ended, outcome.rounds) == ("too-few-clients", 5)
    assert [json.loads(row)["clients"] for row in (tmp_path / "run" / "metrics.jsonl").open()] == [4, 4, 4, 4, 3]
    with ClientLedger.held(tmp_path / "client-2") as ledger:
        assert [len(each.releases) for each in ledger.tasks.values()] == [4]
    # Another run of the same federation finds one client too few.
    assert serve(LocalGrid(nodes), wanted, tmp_path / "again", settings(subscribe_timeout=0.2)).rounds == 0
    assert serve(LocalGrid(nodes), wanted.__class__(data=wanted.data, plan=wanted.plan.but(per_round=3, rounds=1)),
                 tmp_path / "three", settings(min_clients=3, subscribe_timeout=0.2)).ended == "done"  # fmt: skip


def test_parts_of_ones_own(tmp_path: Path) -> None:
    """Their own data and network, in a loop that is Flower's own."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    apps = {}
    for number in range(2):
        rng = np.random.default_rng(number)
        records = rng.normal(size=(30, 3)), rng.integers(0, 2, 30)
        app = client_app(
            data=lambda context, records=records: records,  # type: ignore[misc]  # noqa: ARG005
            network=lambda task: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),  # noqa: ARG005
            policy=ClientPolicy(epsilon=50.0),
        )
        apps[number] = Node(app, {"state-dir": str(tmp_path / str(number))})
    grid = LocalGrid(apps)
    plan = deployed(experiment(per_round=2, noise_multiplier=1.0).plan, False)
    own = Job(plan=plan, network=network, network_name="our network", shape=(3,), classes=2, clients=2)
    strategy = PlanStrategy(own, subscribe(grid, own.task(), 2, 1.0))
    result = strategy.start(grid, strategy.arrays(), num_rounds=3, timeout=1.0)
    assert strategy.state.round == 3
    assert wire.decode(result.arrays, strategy.engine.layout).keys() == strategy.state.weights.keys()
    assert [result.train_metrics_clientapp[n]["clients"] for n in (1, 2, 3)] == [2, 2, 2]


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_round_that_a_restart_repeats_draws_its_clients_afresh(reproducible: bool) -> None:
    """The ledger charges a repeated round as another draw; the same clients under fresh noise would cost more than that."""
    plan = deployed(experiment(per_round=10, noise_multiplier=1.0).plan, reproducible)
    job = Job(plan=plan, network=nn.Linear(3, 2), network_name="ours", shape=(3,), classes=2, clients=40,
              reproducible=reproducible)  # fmt: skip
    roster = tuple(Member(number, number, 30, f"{number:032x}") for number in range(40))
    asked = []
    for _ in range(2):
        strategy = PlanStrategy(job, roster)
        list(strategy.configure_train(1, strategy.arrays(), ConfigRecord(), LocalGrid({})))
        asked.append(strategy.releases.charges[-1].clients.tolist())
    assert (asked[0] == asked[1]) is reproducible


def test_data_of_a_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    np.savez(tmp_path / "own.npz", x=rng.normal(size=(25, 30)).astype("float32"), y=rng.integers(0, 2, 25))
    node = Node(client_app(policy=OPEN), {"data": str(tmp_path / "own.npz"), "state-dir": str(tmp_path / "state")})
    answer = send(node, messages.publish(job().task()), "query.subscribe").config_records["answer"]
    assert (answer["accepts"], answer["records"]) == (True, 25)


@pytest.mark.parametrize("config", [{}, {"state-dir": "x"}, {"state-dir": "x", "data": "none.npz"},
                                    {"state-dir": "x", "data": "a.npz", "dataset": "cancer"}])  # fmt: skip
def test_a_node_that_is_not_set_up_declines(config: dict[str, Any]) -> None:
    answer = send(Node(client_app(policy=OPEN), config), messages.publish(job().task()), "query.subscribe")
    assert answer.config_records["answer"]["accepts"] is False


def test_pruned_updates_are_smaller_on_the_wire(tmp_path: Path) -> None:
    sizes = []
    for compression in (0.0, 0.9):
        task = job(compression=compression).task()
        node = make_nodes(tmp_path / str(compression))[100]
        send(node, messages.publish(task), "query.subscribe")
        sizes.append(wire.bytes_of(send(node, ask(task, 0), "train").array_records["update"]))
    assert sizes[1] < 0.2 * sizes[0]


def test_a_budget_of_the_servers_own_ends_the_run(tmp_path: Path) -> None:
    wanted = experiment(per_round=4, rounds=9, noise_multiplier=0.7)
    run = wanted.run.__class__(max_epsilon=2.0)
    outcome = serve(LocalGrid(make_nodes(tmp_path)), type(wanted)(data=wanted.data, plan=wanted.plan, run=run),
                    tmp_path / "run", settings())  # fmt: skip
    assert outcome.ended == "budget"
    assert 0 < outcome.rounds == Ledger.open(tmp_path / "run" / "ledger.jsonl").rounds_charged < 9


@pytest.mark.parametrize(
    ("labels", "said"),
    [(np.array("a"), "each record needs one label"), (np.array(["a", "b"]), "list the classes in order"),
     (np.array([-1, 1]), "list the classes in order"), (np.array([[0, 1], [1, 0]]), "each record needs one label")],
)  # fmt: skip
def test_labels_that_do_not_mean_the_same_everywhere_are_refused(tmp_path: Path, labels: Any, said: str) -> None:
    np.savez(tmp_path / "own.npz", x=np.zeros((2, 3)), y=labels)
    with pytest.raises(DataError, match=said):
        _file(tmp_path / "own.npz", {}, job().task())


@pytest.mark.parametrize("clip", [1e-45, 1e-20, 4e-6 * (1 - 1e-9), 4e6 * (1 + 1e-9), 1e300, 5e-324])
def test_a_clip_bound_far_from_the_start_is_refused_and_costs_nothing(clip: float, node: Node, tmp_path: Path) -> None:
    """Under a bound that float32 has no digits for, clipped gradients keep norms of up to twice the bound."""
    task = job(clip="quantile(0.5, 4)").task()
    send(node, messages.publish(task), "query.subscribe")
    weights = wire.dense({name: p.detach() for name, p in NETWORK.named_parameters()})
    answer = send(node, messages.ask(task.digest(), Round(0, 0, clip), weights), "train")
    assert "a millionth to a million" in str(answer.config_records["refused"]["reason"])
    assert spent(tmp_path) == 0
    for round_, allowed in enumerate((4e-6, 4.0, 4e6)):
        reply = send(node, messages.ask(task.digest(), Round(round_, 0, allowed), weights), "train")
        assert "update" in reply.array_records
    assert spent(tmp_path) == 3


@pytest.mark.parametrize("clip", [float("nan"), float("inf"), -4.0, -0.0, 0.0, 4, True, "4"])
def test_a_clip_bound_is_a_positive_number(clip: Any, node: Node, tmp_path: Path) -> None:
    task = job(clip="quantile(0.5, 4)").task()
    send(node, messages.publish(task), "query.subscribe")
    content = ask(task, 0)
    content.config_records["round"]["clip"] = clip
    assert set(send(node, content, "train")) == {"refused"}
    assert spent(tmp_path) == 0
