"""What a deployment shows to those who watch it: counts and ε from the ledger, and nothing that the plan hides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedcdp.accounting.budget import Budget
from fedcdp.deploy.protocol import messages
from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.monitor_file import FILE, METRICS, PUBLIC, MonitorFile, Tally, read_figures
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.deploy.protocol.server import _Server, serve
from fedcdp.errors import DefectError
from fedcdp.training.ledger_check import spent
from tests.deploy.protocol.test_sum_server import silent_in
from tests.support.local_grid import OPEN, LocalGrid, Node, experiment, make_nodes, settings
from tests.support.one_client import ask, job, send
from tests.support.sum_nodes import sum_experiment, sum_nodes

HIDDEN = {"method": "fed-sdp", "noise_at": "server", "noise_multiplier": 1.0}


def client(base: Path, policy: ClientPolicy) -> Node:
    config = {"dataset": "cancer", "num-partitions": 4, "partition-id": 0, "records": 20, "state-dir": str(base / "state")}
    return Node(client_app(policy=policy), config)


def figures_of(base: Path) -> dict[str, dict[str, float]]:
    return read_figures(base / FILE)


def test_a_client_shows_its_ledger_and_why_it_refuses(tmp_path: Path) -> None:
    policy = ClientPolicy(epsilon=1.0, participations=3)
    node, task = client(tmp_path, policy), job(rounds=50).task()
    send(node, messages.publish(task), messages.SUBSCRIBE)
    for round_ in (0, 1, 1, 2, 3):
        send(node, ask(task, round_), messages.TRAIN)
    send(node, messages.publish(job(method="nonprivate").task()), messages.SUBSCRIBE)
    found = figures_of(tmp_path / "state")
    assert found["fedcdp_node_messages_total"] == {"subscribe": 2, "train": 5}
    assert found["fedcdp_node_refusals_total"] == {"repeated": 1, "budget": 1, "policy": 1}
    assert found["fedcdp_node_releases"] == {"": 3}
    assert found["fedcdp_node_tasks"] == {"": 1}
    with ClientLedger.held(tmp_path / "state") as ledger:
        reserved = sum(policy.grants[0].costs(ledger.reservations()))
    assert found["fedcdp_node_epsilon_reserved"] == {"server|record": pytest.approx(reserved)}
    assert found["fedcdp_node_epsilon_left"] == {"server|record": pytest.approx(1.0 - reserved)}
    sizes = found["fedcdp_node_bytes_total"]
    assert 0 < sizes["sent"] < sizes["received"], "three updates, five times the weights"
    assert (tmp_path / "state" / FILE).stat().st_mode & 0o777 == 0o600


def test_a_client_whose_task_hides_who_takes_part_shows_nothing_that_moves(tmp_path: Path) -> None:
    node, task = client(tmp_path, ClientPolicy(epsilon=50.0, unit="client", adversary="model")), job(**HIDDEN).task()
    send(node, messages.publish(task), messages.SUBSCRIBE)
    before = (tmp_path / "state" / FILE).read_bytes()
    for round_ in (0, 1, 1):
        send(node, ask(task, round_), messages.TRAIN)
    send(node, messages.publish(job(method="nonprivate").task()), messages.SUBSCRIBE)  # refused before the ledger is read
    assert (tmp_path / "state" / FILE).read_bytes() == before
    assert figures_of(tmp_path / "state").keys() <= PUBLIC


def test_a_server_shows_its_rounds_and_whom_it_left_out(tmp_path: Path) -> None:
    wanted = experiment(per_round=4)
    wanted = replace(wanted, run=replace(wanted.run, max_epsilon=1e6))
    grid = LocalGrid(make_nodes(tmp_path, client1=lambda *_: None, client2=silent_in((1, 0))))
    assert serve(grid, wanted, tmp_path / "run", settings(reproducible=True)).ended == "done"
    found = figures_of(tmp_path / "run")
    assert found["fedcdp_rounds"] == found["fedcdp_rounds_planned"] == found["fedcdp_releases"] == {"": 3}
    assert found["fedcdp_clients"] == {"": 4}
    assert found["fedcdp_answers_total"] == {"": 3 + 2 + 3}
    assert found["fedcdp_left_out_total"] == {"late": 4}
    assert found["fedcdp_run_ended"] == {"done": 1}
    assert found["fedcdp_last_round_seconds"][""] > 0
    reached, left = found["fedcdp_epsilon_spent"]["server|record"], found["fedcdp_epsilon_left"]["server|record"]
    assert reached + left == pytest.approx(1e6)
    assert reached > 0
    assert found["fedcdp_bytes_total"].keys() == {"sent", "received"}


def test_a_server_never_shows_an_epsilon_of_earlier_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ε takes long to compute, it is left out for a while: one of fewer rounds would be too small."""
    checked, shown = iter([True, False, False]), list[float | None]()
    monkeypatch.setattr(Budget, "_is_cheap", lambda _: next(checked))
    show = _Server._show

    def seen(*given: Any) -> None:
        show(*given)
        shown.append(figures_of(tmp_path / "run").get("fedcdp_epsilon_spent", {}).get("server|record"))

    monkeypatch.setattr(_Server, "_show", seen)
    wanted = experiment()
    serve(LocalGrid(make_nodes(tmp_path)), wanted, tmp_path / "run", settings(reproducible=True))
    assert shown[0] is not None
    assert shown[1:] == [None, None]
    ended = figures_of(tmp_path / "run")["fedcdp_epsilon_spent"]["server|record"]
    told = next(row for row in spent(tmp_path / "run")[1].rows if (row.adversary, row.unit) == ("server", "record"))
    assert ended == pytest.approx(told.epsilon)
    assert ended > shown[0]


def test_figures_of_a_policy_that_has_changed_do_not_stay(tmp_path: Path) -> None:
    task = job(rounds=50).task()
    send(client(tmp_path, ClientPolicy(epsilon=1.0)), messages.publish(task), messages.SUBSCRIBE)
    assert figures_of(tmp_path / "state")["fedcdp_node_epsilon_left"].keys() == {"server|record"}
    send(client(tmp_path, ClientPolicy(epsilon=float("inf"))), ask(task, 0), messages.TRAIN)
    found = figures_of(tmp_path / "state")
    assert found["fedcdp_node_releases"] == {"": 1}
    assert not found["fedcdp_node_epsilon_granted"]
    assert not found["fedcdp_node_epsilon_left"]


@pytest.mark.slow
def test_a_server_of_sums_shows_attempts_and_no_duration(tmp_path: Path) -> None:
    """The simulator hides durations of such a plan where sizes differ, and a server does not know whether they do."""
    grid = LocalGrid(sum_nodes(tmp_path, client2=silent_in((1, 0))))
    assert serve(grid, sum_experiment(), tmp_path / "run", settings(min_cohort=3, min_clients=3)).ended == "done"
    found = figures_of(tmp_path / "run")
    assert found["fedcdp_releases"] == {"": 4}
    assert found["fedcdp_answers_total"] == {"": 5 + 4 + 5}
    assert found["fedcdp_left_out_total"] == {"late": 1}
    assert "fedcdp_last_round_seconds" not in found
    for number in range(5):
        shown = figures_of(tmp_path / f"client-{number}" / "state")
        assert shown.keys() <= PUBLIC, "a client of a sum does not know whether all are in every round"
        assert shown["fedcdp_node_tasks"] == {"": 1}


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_a_server_shows_nothing_that_its_plan_hides(sampling: str, tmp_path: Path) -> None:
    grid = LocalGrid(make_nodes(tmp_path, client1=lambda *_: None))
    wanted = experiment(**HIDDEN, client_sampling=sampling)
    serve(grid, wanted, tmp_path / "run", settings(reproducible=True))
    found = figures_of(tmp_path / "run")
    assert {"fedcdp_rounds", "fedcdp_clients", "fedcdp_releases", "fedcdp_run_ended"} <= found.keys() <= PUBLIC


def test_figures_that_are_not_on_the_list_cannot_be_written() -> None:
    tally = Tally()
    for wrong in (
        ("fedcdp_gradient_norm",),
        ("fedcdp_rounds",),
        ("fedcdp_left_out_total", "the text of an error"),
        ("fedcdp_left_out_total",),
    ):
        with pytest.raises(DefectError):
            tally.count(*wrong)
    with pytest.raises(DefectError):
        tally.set("fedcdp_answers_total", 1)
    assert METRICS.keys() >= PUBLIC


@pytest.mark.parametrize(
    "content", ["", "[]", '{"figures": 3}', '{"hidden": false, "figures": {"fedcdp_rounds": {"": "x"}}}']
)
def test_a_damaged_file_has_no_figures_and_hides(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    assert read_figures(tmp_path / FILE) == {}


def test_a_damaged_file_stays_hidden(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("damaged")
    tally = Tally()
    tally.count("fedcdp_answers_total")
    tally.set("fedcdp_rounds", 2)
    MonitorFile(tmp_path).add(tally)
    assert figures_of(tmp_path) == {"fedcdp_rounds": {"": 2}}


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally()
    tally.set("fedcdp_rounds", 2)
    MonitorFile(tmp_path / "missing").add(tally)
    assert "cannot be written" in caplog.text


def test_nothing_in_the_file_is_a_text_of_others(tmp_path: Path) -> None:
    """Labels come from closed lists and from the owner's policy: no name, path or reason of another machine."""
    node = client(tmp_path, replace(OPEN, methods=("fed-cdp",)))
    task = job().task()
    send(node, messages.publish(task), messages.SUBSCRIBE)
    hostile: Any = ask(task, 0)
    hostile.config_records["round"]["task"] = "</script>evil"
    send(node, hostile, messages.TRAIN)
    written = (tmp_path / "state" / FILE).read_text()
    assert "evil" not in written
    assert json.loads(written)["figures"]["fedcdp_node_refusals_total"] == {"protocol": 1}
