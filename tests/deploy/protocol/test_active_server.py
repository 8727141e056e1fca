"""A server that crafts what it sends, against the real client code: what is refused, what is answered, and what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr")

from fedcdp.attacks.active import Prior, Stage
from fedcdp.attacks.active_servers import ACTIVE
from fedcdp.attacks.first_layer import Baited
from fedcdp.attacks.imprint import Imprint
from fedcdp.attacks.inconsistent_models import dead_weights
from fedcdp.attacks.trap_weights import TrapWeights
from fedcdp.config.plan import Plan
from fedcdp.data.load import load
from fedcdp.data.partition import Federation, partition
from fedcdp.deploy.protocol import messages, sum_member, wire
from fedcdp.deploy.protocol.masks import sum_of
from fedcdp.deploy.protocol.strategy import Job, deployed
from fedcdp.deploy.protocol.task import Task
from fedcdp.files.tree import Layout, Tree
from fedcdp.mechanism.secure_sum import from_integers
from fedcdp.models.networks import build
from tests.deploy.protocol.test_sum_client import SIZE, WEIGHTS, published, words
from tests.deploy.protocol.test_sum_client import Federation as SumFederation
from tests.support.active import stage_of
from tests.support.local_grid import Node, experiment, make_nodes
from tests.support.one_client import NETWORK, ask, send
from tests.support.sum_nodes import MEMBERS

RECORDS = 20


def federation_of(clients: int) -> Federation:
    """The records of the clients, as their node configurations deal them."""
    return partition(load("cancer", quiet=True), clients=clients, scheme="iid", records=RECORDS, seed=5)


def records_of(client: int, clients: int = 4) -> Tensor:
    federation = federation_of(clients)
    return federation.train.tensor[torch.from_numpy(federation.indices(client))]


def plan_of(**plan: Any) -> Plan:
    usual = {"per_round": 1, "local_steps": 1, "batch_size": 8, "rounds": 3, "record_sampling": "fixed"}
    return experiment(**usual | plan).plan


def knowing(plan: Plan, clients: int = 4, network: Any = NETWORK) -> Stage:
    """What the server knows: the task's network, and public records."""
    return stage_of(federation_of(clients), plan, network)


def task_of(plan: Plan, network: Any = NETWORK, name: str = "mlp") -> Task:
    job = Job(plan=deployed(plan, False), network=network, network_name=name, shape=(30,), classes=2, clients=1)
    return job.task()


def recovered(baited: Baited, gradient: Tree, stage: Stage, truth: Tensor, count: int = 8) -> int:
    """How many records of the truth are read from a gradient, to a hundredth of a standard deviation."""
    found, _ = baited.inputs(gradient, 0.0, count, Prior.of(stage))
    return int((torch.cdist(found, truth.double()).amin(0) < 0.01 * truth.shape[1] ** 0.5).sum())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return make_nodes(tmp_path)[100]


def test_a_task_with_a_changed_network_is_declined(node: Node) -> None:
    """The client builds the network that the task names, and compares all tensors with the task's."""
    linear = build("linear", (30,), 2)
    baited = Imprint().craft(knowing(plan_of(method="nonprivate"), network=linear))
    assert baited.changed_network
    for network, accepted in ((linear, True), (baited.network, False)):
        published_ = messages.publish(task_of(plan_of(method="nonprivate"), network, "linear"))
        answer = send(node, published_, messages.SUBSCRIBE).config_records["answer"]
        assert answer["accepts"] is accepted
    assert "has other tensors here than in the task" in str(answer["reason"])


def test_a_changed_network_after_the_task_is_refused(node: Node) -> None:
    """Weights of more layers than the accepted task has are not even decoded, and nothing is charged or trained."""
    linear = build("linear", (30,), 2)
    plan = plan_of(method="nonprivate")
    task = task_of(plan, linear, "linear")
    assert send(node, messages.publish(task), messages.SUBSCRIBE).config_records["answer"]["accepts"]
    crafted = Imprint().craft(knowing(plan, network=linear)).network
    weights = {name: p.detach() for name, p in crafted.named_parameters() if p.requires_grad}
    answer = send(node, messages.ask(task.digest(), messages.Round(0, 0, None), wire.dense(weights)), messages.TRAIN)
    assert not answer.array_records
    assert "refused" in answer.config_records


@pytest.mark.parametrize("attack", [Imprint(), TrapWeights()], ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("method", "leaks"),
    [
        ({"method": "nonprivate"}, True),
        ({"method": "fed-sdp", "noise_at": "server", "noise_multiplier": 6.0}, True),
        ({"method": "fed-sdp", "noise_at": "client", "noise_multiplier": 6.0}, False),
        ({"method": "fed-cdp", "noise_multiplier": 6.0}, False),
    ],
    ids=["nonprivate", "fed-sdp server", "fed-sdp client", "fed-cdp"],
)
def test_crafted_weights_are_answered_and_noise_decides(
    attack: Imprint | TrapWeights, method: dict[str, Any], leaks: bool, node: Node
) -> None:
    """No client can tell crafted weights from trained ones: it answers. Only its own noise protects it."""
    plan = plan_of(**method)
    stage = knowing(plan)
    baited = attack.craft(stage)
    task = task_of(plan)
    assert send(node, messages.publish(task), messages.SUBSCRIBE).config_records["answer"]["accepts"]
    weights = {name: p.detach() for name, p in baited.network.named_parameters()}
    answer = send(node, ask(task, 0, **weights), messages.TRAIN)
    update = wire.decode(answer.array_records["update"], Layout.of(NETWORK), may_be_sparse=True)
    gradient = {name: value / -plan.learning_rate_at(0) for name, value in update.items()}
    found = recovered(baited, gradient, stage, records_of(0))
    assert found >= 1 if leaks else found == 0


def shown(weights: Tree) -> dict[str, Any]:
    return {name: value.detach() for name, value in weights.items()}


def inconsistent(five: SumFederation) -> tuple[Baited, Stage, np.ndarray[Any, Any]]:
    """One round in which client 0 gets the weights of imprint, and all others dead ones; the sum that the server gets."""
    stage = knowing(five.task.plan.but(secure_noise=False), MEMBERS, NETWORK)
    baited, dead = Imprint().craft(stage), dead_weights(stage)
    assert dead is not None
    crafted = shown(dict(baited.network.named_parameters()))
    replies = [five.ask(client, **crafted if client == 0 else shown(dead)) for client in range(MEMBERS)]
    return baited, stage, sum_of([words(reply) for reply in replies], SIZE)


def gradient_of(total: np.ndarray[Any, Any]) -> Tree:
    """A sum of whole numbers as a tree."""
    values = from_integers({"all": torch.from_numpy(total.copy())}, 1.0)["all"]
    parts = values.split([value.numel() for value in WEIGHTS.values()])
    return {name: part.view(WEIGHTS[name].shape) for name, part in zip(WEIGHTS, parts, strict=True)}


def test_inconsistent_models_give_the_server_uniform_bytes(tmp_path: Path) -> None:
    """The hash of the weights is in the context of the masks: they do not cancel."""
    from scipy.stats import chisquare

    five = SumFederation(tmp_path, published(noise_multiplier=1e-5))
    baited, stage, total = inconsistent(five)
    counts = np.bincount(total.view(np.uint8), minlength=256)
    assert chisquare(counts).pvalue > 1e-6
    assert abs(total).max() > 2**60
    assert recovered(baited, gradient_of(total), stage, records_of(0, MEMBERS)) == 0


@pytest.mark.parametrize(("noise", "leaks"), [(1e-5, True), (6.0, False)])
def test_a_sum_that_does_not_compare_weights_leaks(
    noise: float, leaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same clients without the hash of the weights in their masks: the sum is the victim's, and the noise decides."""
    real = sum_member.context_of
    monkeypatch.setattr(sum_member, "context_of", lambda **fields: real(**fields | {"weights": bytes(32)}))
    five = SumFederation(tmp_path, published(noise_multiplier=noise))
    baited, stage, total = inconsistent(five)
    assert abs(total).max() < 2**60
    found = recovered(baited, gradient_of(total), stage, records_of(0, MEMBERS))
    assert found >= 1 if leaks else found == 0


def test_the_same_crafted_model_for_all_is_summed_and_noise_decides(tmp_path: Path) -> None:
    """A consistent crafted model passes every check; the sum then shows single records unless it carries noise."""
    for noise, leaks in ((1e-5, True), (6.0, False)):
        five = SumFederation(tmp_path / str(noise), published(noise_multiplier=noise))
        stage = knowing(five.task.plan.but(secure_noise=False), MEMBERS, NETWORK)
        baited = TrapWeights().craft(stage)
        crafted = shown(dict(baited.network.named_parameters()))
        total = sum_of([words(five.ask(client, **crafted)) for client in range(MEMBERS)], SIZE)
        everything = torch.cat([records_of(client, MEMBERS) for client in range(MEMBERS)])
        found = recovered(baited, gradient_of(total), stage, everything, count=20)
        assert found >= 1 if leaks else found == 0


def test_every_attack_is_met_by_one_of_these_tests() -> None:
    """A new attack needs its own answer to "what does a deployment do?"."""
    assert set(ACTIVE) == {"imprint", "trap-weights", "fishing", "frozen-weights", "inconsistent-models"}
