"""Networks that a deployment refuses: trainable tensors that no output depends on, and values kept between batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

pytest.importorskip("flwr")

from fedcdp.deploy.protocol import messages
from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.server import serve
from fedcdp.deploy.protocol.strategy import Job, deployed
from fedcdp.deploy.protocol.task import Task
from fedcdp.errors import ModelError
from tests.support.local_grid import OPEN, LocalGrid, Node, experiment, settings
from tests.support.one_client import send

SAID = "spare.weight, spare.bias are trainable, but no output depends on them"


class Spare(nn.Module):
    """A network with a layer that it does not use."""

    def __init__(self, inputs: int = 30) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(inputs, 2), nn.Linear(inputs, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


class Keeping(nn.Module):
    """A network that keeps what it computed for the next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.before = nn.Linear(30, 2), None

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.used(inputs)
        before, self.before = self.before, outputs.detach()
        return outputs if before is None else outputs * before


def node_with(network: nn.Module, state: Path) -> Node:
    rng = np.random.default_rng(1)
    records = rng.normal(size=(20, 30)), rng.integers(0, 2, 20)
    app = client_app(data=lambda context: records, network=lambda task: network, policy=OPEN)  # noqa: ARG005
    return Node(app, {"state-dir": str(state)})


def task_of(network: nn.Module, method: str = "fed-cdp") -> Task:
    plan = deployed(experiment(per_round=1, method=method).plan, False)
    return Job(plan=plan, network=network, network_name="ours", shape=(30,), classes=2, clients=1).task()


def answer_of(node: Node, task: Task) -> dict[str, Any]:
    return dict(send(node, messages.publish(task), "query.subscribe").config_records["answer"])


@pytest.mark.parametrize("method", ["fed-cdp", "fed-sdp"])
def test_a_client_declines_them_by_name(method: str, tmp_path: Path) -> None:
    network = Spare()
    answer = answer_of(node_with(network, tmp_path), task_of(network, method))
    assert not answer["accepts"]
    assert SAID in answer["reason"]
    with ClientLedger.held(tmp_path) as ledger:
        assert not ledger.tasks


def test_a_client_declines_a_network_that_keeps_values_between_batches(tmp_path: Path) -> None:
    answer = answer_of(node_with(Keeping(), tmp_path), task_of(Keeping()))
    assert not answer["accepts"]
    assert "depends on other examples, or on earlier calls of forward" in answer["reason"]


def test_they_are_allowed_frozen_or_without_privacy(tmp_path: Path) -> None:
    frozen = Spare()
    frozen.spare.requires_grad_(False)
    assert answer_of(node_with(frozen, tmp_path / "frozen"), task_of(frozen))["accepts"]
    network = Spare()
    assert answer_of(node_with(network, tmp_path / "plain"), task_of(network, "nonprivate"))["accepts"]


def test_a_task_that_an_earlier_version_accepted_goes_on(tmp_path: Path) -> None:
    network = Spare()
    task = task_of(network)
    with ClientLedger.held(tmp_path) as ledger:
        ledger.accept(task, 20)
    assert answer_of(node_with(network, tmp_path), task)["accepts"]


def spare_network(input_shape: tuple[int, ...]) -> nn.Module:
    return Spare(*input_shape)


def test_a_server_refuses_them_before_it_asks_anybody(tmp_path: Path) -> None:
    wanted = experiment()
    wanted = replace(wanted, model=replace(wanted.model, network=f"{__name__}:spare_network"))
    grid = LocalGrid({})
    with pytest.raises(ModelError, match=SAID):
        serve(grid, wanted, tmp_path / "run", settings())
    with pytest.raises(ModelError, match=SAID):
        serve(grid, wanted, tmp_path / "run", settings())
    assert not grid.sent
