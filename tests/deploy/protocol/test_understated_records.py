"""A client that lies about how many records it has: it gets no larger update admitted, and moves nobody's ε."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_grid import CLIENTS, Killed, LocalGrid, Node, experiment, make_nodes, settings

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict

from fedcdp.accounting.ledger import Ledger
from fedcdp.deploy.protocol import admission, server
from fedcdp.deploy.protocol.server import serve
from fedcdp.errors import PlanError
from fedcdp.training.ledger_check import spent

EVERYBODY = {"per_round": 3, "rounds": 1}


class Liar(Node):
    """A node whose client says another number of records than it has."""

    def __init__(self, honest: Node, records: int) -> None:
        super().__init__(honest.app, honest.config)
        self.records = records

    def handle(self, message: Message, node_id: int) -> Message | None:
        reply = super().handle(message, node_id)
        if reply is None or "answer" not in reply.content.config_records:
            return reply
        said = dict(reply.content.config_records["answer"]) | {"records": self.records}
        return Message(RecordDict({"answer": ConfigRecord(said)}), reply_to=message)


def stated(path: Path) -> list[float]:
    return [row.epsilon for row in spent(path)[1].rows]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    base = tmp_path_factory.mktemp("honest")
    serve(LocalGrid(make_nodes(base)), experiment(**EVERYBODY), base / "run", settings())
    return stated(base / "run")


@pytest.mark.parametrize("records", [1, 3, 19])
def test_who_says_fewer_than_the_fewest_is_not_taken_on(
    records: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = make_nodes(tmp_path)
    nodes[101] = Liar(nodes[101], records)
    outcome = serve(LocalGrid(nodes), experiment(**EVERYBODY), tmp_path / "run", settings(min_clients=3))
    assert outcome.ended == "done"
    assert f"node 101 is left out: it has {records} records, and smallest-records is 20" in caplog.text
    ledger = Ledger.open(tmp_path / "run" / "ledger.jsonl")
    assert (ledger.population["clients"], ledger.population["records"]) == (CLIENTS - 1, 20)


@pytest.mark.parametrize(("said", "fewest"), [(20, None), (10_000, None), (7, 7), (20, 7), (10_000, 7)])
def test_whatever_a_client_says_epsilon_is_that_of_the_fewest_records(
    said: int, fewest: int | None, tmp_path: Path, honest: list[float]
) -> None:
    figures = []
    for name in ("honest", "lying"):
        nodes = make_nodes(tmp_path / name)
        if name == "lying":
            nodes[101] = Liar(nodes[101], said)
        serve(LocalGrid(nodes), experiment(**EVERYBODY), tmp_path / name / "run", settings(smallest_records=fewest))
        figures.append(stated(tmp_path / name / "run"))
    assert figures[0] == figures[1]
    if fewest is None:
        assert figures[0] == honest


@pytest.mark.parametrize("said", [20, 10_000])
def test_whatever_a_client_says_the_admitted_norm_is_the_same(
    said: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    real = admission.largest_norm

    def recorded(*given: Any, part: str | None = None) -> float:
        asked.append(real(*given, part=part))
        return asked[-1]

    monkeypatch.setattr(admission, "largest_norm", recorded)
    nodes = make_nodes(tmp_path)
    nodes[101] = Liar(nodes[101], said)
    serve(LocalGrid(nodes), experiment(per_round=4, rounds=1), tmp_path / "run", settings())
    each = len(asked) // CLIENTS  # one bound for the whole update, and one for each of its tensors
    assert each == 7
    assert asked == asked[:each] * CLIENTS


@pytest.mark.parametrize(("changes", "most"), [({}, 20), ({"most_records": 500}, 80)])
@pytest.mark.parametrize("plan", [{"weighting": "records", "mean_records": 20.0}, {"scaling_noise": 30.0}])
def test_who_says_more_than_the_server_expects_is_not_taken_on_where_records_count(
    plan: dict[str, Any], changes: dict[str, int], most: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By a larger claim, a client would get a larger update admitted, or its sums of inputs would outweigh all others'.

    By default, the most is that of the server's own partition; weights add up to at most those of all clients.
    """
    if "scaling_noise" in plan:
        most = changes.get("most_records", most)
    wanted = experiment(**EVERYBODY, **plan)
    if "scaling_noise" in plan:
        wanted = replace(wanted, data=replace(wanted.data, scaling="private"))
    for said, taken in ((most, 4), (most + 1, 3)):
        nodes = make_nodes(tmp_path / str(said))
        nodes[101] = Liar(nodes[101], said)
        serve(LocalGrid(nodes), wanted, tmp_path / str(said) / "run", settings(min_clients=3, **changes))
        assert Ledger.open(tmp_path / str(said) / "run" / "ledger.jsonl").population["clients"] == taken
    assert f"node 101 is left out: it has {most + 1} records, and most-records is {most}" in caplog.text


def test_what_counts_a_clients_records_needs_to_know_how_many_it_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_dealt", lambda *_: None)
    wanted = experiment(weighting="records", mean_records=20.0, **EVERYBODY)
    with pytest.raises(PlanError, match="most_records: the server's own data do not tell"):
        serve(LocalGrid(make_nodes(tmp_path)), wanted, tmp_path / "run", settings())


def test_a_run_that_is_resumed_keeps_the_number_it_began_with(tmp_path: Path) -> None:
    wanted = experiment(per_round=3, rounds=2)

    with pytest.raises(Killed):
        serve(
            LocalGrid(make_nodes(tmp_path), fail_at=(CLIENTS + 3, "before")),
            wanted,
            tmp_path / "run",
            settings(smallest_records=9),
        )
    assert serve(LocalGrid(make_nodes(tmp_path)), wanted, tmp_path / "run", settings()).ended == "done"
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").population["records"] == 9
