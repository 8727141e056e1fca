"""Where the server adds the noise, nothing that others see of a round shows how many took part in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.local_grid import CLIENTS, LocalGrid, experiment, make_nodes, settings

pytest.importorskip("flwr")

from flwr.app import Message

from fedcdp.accounting.ledger import Ledger
from fedcdp.deploy.protocol import roster as roster_module
from fedcdp.deploy.protocol.roster import exchange
from fedcdp.deploy.protocol.server import serve
from fedcdp.files.tensors import load_tensors
from fedcdp.files.tree import Tree
from fedcdp.methods.fedsdp import FedSDP
from tests.support.pairs import sample_first

SDP = {"method": "fed-sdp", "rounds": 2, "per_round": 2, "noise_multiplier": 0.5}


def unanswered(message: Message, reply: Message) -> None:  # noqa: ARG001
    return None


def trained(base: Path, silent: int, **plan: Any) -> tuple[LocalGrid, list[dict[str, Any]], Tree]:
    """A run in which so many of the four clients never answer."""
    grid = LocalGrid(make_nodes(base, **{f"client{number}": unanswered for number in range(silent)}))
    wanted = experiment(**SDP | plan)
    outcome = serve(grid, wanted, base / "run", settings(min_cohort=2, reproducible=True))
    assert (outcome.ended, outcome.rounds) == ("done", 2)
    rows = [json.loads(line) for line in (base / "run" / "metrics.jsonl").open()]
    return grid, rows, load_tensors(base / "run" / "model.safetensors", "model-1")[0]


@pytest.mark.parametrize("sampling", sample_first(["poisson", "fixed"]))
def test_a_round_is_used_whatever_arrives_and_its_row_does_not_tell(sampling: str, tmp_path: Path) -> None:
    seen = [trained(tmp_path / str(silent), silent, client_sampling=sampling) for silent in (0, 2, CLIENTS)]
    assert len({json.dumps([sorted(row) for row in rows]) for _, rows, _ in seen}) == 1
    for _, rows, _ in seen:
        assert not {"clients", "seconds"} & set(rows[0])
    models = [model for _, _, model in seen]
    for name in models[0]:
        assert not torch.equal(models[0][name], models[2][name])
    ledgers = [Ledger.open(tmp_path / str(silent) / "run" / "ledger.jsonl").charges for silent in (0, 2, CLIENTS)]
    assert len({json.dumps([each.clients.tolist() for each in charges]) for charges in ledgers}) == 1


def test_a_round_of_nobody_moves_the_model_by_the_noise_of_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise is the same, and is divided by the planned number, whoever came."""
    scales: list[float] = []
    real = FedSDP.sanitise_sum

    def noted(self: FedSDP, total: Tree, at: Any) -> Tree:
        noised = real(self, total, at)
        difference = torch.cat([(noised[name] - total[name]).flatten() for name in total])
        scales.append(float(difference.norm()))
        return noised

    monkeypatch.setattr(FedSDP, "sanitise_sum", noted)
    trained(tmp_path / "all", 0)
    trained(tmp_path / "nobody", CLIENTS)
    assert len(scales) == 4
    assert scales[:2] == pytest.approx(scales[2:], rel=1e-6)


@pytest.mark.parametrize("plan", [{}, {"method": "fed-sdp", "noise_at": "client"}, {"method": "nonprivate"}])
def test_elsewhere_too_few_updates_leave_the_model_as_it_is(plan: dict[str, Any], tmp_path: Path) -> None:
    grid = LocalGrid(make_nodes(tmp_path, **{f"client{number}": unanswered for number in range(CLIENTS)}))
    wanted = experiment(**{"rounds": 2, "per_round": 2} | plan)
    assert serve(grid, wanted, tmp_path / "run", settings(min_cohort=2, most_failed_rounds=9)).ended == "done"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [row["clients"] for row in rows] == [0, 0]
    assert all("seconds" in row for row in rows)


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("in_full", [True, False])
def test_a_hidden_round_takes_equally_long_however_many_are_asked(
    in_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = set()
    for asked, silent in ((0, 0), (1, 0), (4, 0), (4, 2), (2, 2)):
        clock = Clock()
        monkeypatch.setattr(roster_module, "time", clock)
        grid = LocalGrid(make_nodes(tmp_path / f"{asked}-{silent}"))
        grid.nodes = {node: _Deaf(answers=number >= silent) for number, node in enumerate(grid.nodes)}  # type: ignore[misc]
        messages = [Message(_content(), node, "train") for node in list(grid.nodes)[:asked]]
        replies = list(exchange(grid, messages, 50.0, in_full=in_full))
        assert len(replies) == max(0, asked - silent)
        ends.add(round(clock.now, 6))
    assert (ends == {50.0}) == in_full


class _Deaf:
    def __init__(self, answers: bool) -> None:
        self.answers = answers

    def handle(self, message: Message, node_id: int) -> Message | None:  # noqa: ARG002
        return Message(_content(), reply_to=message) if self.answers else None


def _content() -> Any:
    from flwr.app import RecordDict

    return RecordDict()


def test_the_server_waits_in_full_exactly_where_participation_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedcdp.deploy.protocol import server

    waited: list[bool] = []
    real = exchange

    def noted(grid: Any, outgoing: Any, timeout: float, *, in_full: bool, tally: Any) -> Any:
        waited.append(in_full)
        return real(grid, outgoing, timeout, in_full=in_full, tally=tally)

    monkeypatch.setattr(server, "exchange", noted)
    for name, plan in {"hidden": {}, "client": {"noise_at": "client"}, "cdp": {"method": "fed-cdp"}}.items():
        serve(LocalGrid(make_nodes(tmp_path / name)), experiment(**SDP | {"rounds": 1} | plan), tmp_path / name / "run",
              settings())  # fmt: skip
    assert waited == [True, False, False]
