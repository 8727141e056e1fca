"""Federations in lockstep compute what simulations of the same seeds and records compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedcdp
from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.errors import PlanError
from fedcdp.files.tree import Tree
from fedcdp.mechanism.sampling import Draw, choose_clients, zero_out
from fedcdp.training.parallel_federations import ParallelFederations
from fedcdp.training.prepared import Prepared
from fedcdp.training.rounds import Simulator
from fedcdp.training.trainer import ready

SEEDS = (3, 17, 4)
CPU = torch.device("cpu")
PLANS: dict[str, dict[str, Any]] = {
    "plain": {"method": "nonprivate"},
    "Poisson records, momentum": {"momentum": 0.5, "clip_mode": "flat"},
    "fixed order, batch noise, server momentum, average": {
        "record_sampling": "partition", "noise": "batch", "server_optimizer": "momentum", "ema": 0.5,
    },
    "fixed-size batches, pruned, weighted": {"record_sampling": "fixed", "compression": 0.3, "weighting": "records"},
    "Poisson clients, noise at the server": {"method": "fed-sdp", "client_sampling": "poisson"},
    "noise at the client, decaying rate": {"method": "fed-sdp", "noise_at": "client", "learning_rate": "linear(0.1, 0.01)"},
    "noise on the sum": {"noise": "sum", "secure_aggregation": True, "local_steps": 1},
    "secure noise is simulated from seeds": {"secure_noise": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def tables() -> Federation:
    return fedcdp.partition(fedcdp.load("cancer"), clients=7, scheme="linear")


def plan(**changes: Any) -> Plan:
    usual: dict[str, Any] = {"rounds": 3, "per_round": 3, "local_steps": 2, "batch_size": 4, "noise_multiplier": 0.5}
    return Plan(**usual | changes)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 5), nn.Tanh(), nn.Linear(5, 2))


def halves(federation: Federation, count: int) -> torch.Tensor:
    return torch.rand(count, len(federation.train), generator=torch.Generator().manual_seed(1)) < 0.5


def trained(plan: Plan, federation: Federation, kept: torch.Tensor, chunk: int | None = None) -> list[Tree]:
    prepared = Prepared.of(network(), federation, plan)
    return ParallelFederations(prepared, SEEDS, kept, device=CPU, loss=F.cross_entropy, chunk=chunk).train()


def reference(plan: Plan, federation: Federation, kept: torch.Tensor) -> Tree:
    prepared = Prepared.of(network(), federation, plan)
    data, engines, state = ready(prepared, prepared.network, device=CPU, loss=F.cross_entropy, kept=kept)
    simulator = Simulator.stepwise(data, engines["functional"])
    for round_ in range(plan.rounds):
        state = simulator.round(state, torch.from_numpy(choose_clients(plan, federation.clients, round_)))
    return state.average or state.weights


def assert_close(one: Tree, other: Tree) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PLANS)
def test_each_federation_computes_its_own_simulation(name: str, tables: Federation) -> None:
    chosen, kept = plan(**PLANS[name]), halves(tables, len(SEEDS))
    found = trained(chosen, tables, kept, chunk=4)
    for seed, mine, model in zip(SEEDS, kept, found, strict=True):
        assert_close(model, reference(chosen.but(seed=seed, secure_noise=False), tables, mine))
    assert not torch.allclose(found[0]["0.weight"], found[1]["0.weight"])


def test_with_all_records_it_is_what_simulate_trains(tables: Federation) -> None:
    chosen = plan()
    found = trained(chosen, tables, torch.ones(3, len(tables.train), dtype=torch.bool))
    for seed, model in zip(SEEDS, found, strict=True):
        run = fedcdp.simulate(network(), tables, chosen.but(seed=seed))
        assert_close(model, {name: value.detach() for name, value in run.model.named_parameters()})


def test_a_record_that_is_kept_changes_its_own_federation_only(tables: Federation) -> None:
    chosen, kept = plan(per_round=7, record_sampling="partition", batch_size=60), halves(tables, 3)
    other = kept.clone()
    record = int(tables.indices(0)[0])
    other[1, record] = ~other[1, record]
    before, after = trained(chosen, tables, kept), trained(chosen, tables, other)
    same = [torch.equal(one["0.weight"], two["0.weight"]) for one, two in zip(before, after, strict=True)]
    assert same == [True, False, True]


def test_a_zeroed_out_record_leaves_its_slot_and_nothing_else() -> None:
    draw = Draw(torch.tensor([[5, 6, 7, 0]]), torch.tensor([[True, True, True, False]]))
    found = zero_out(draw, torch.tensor([[False, True, True, True]]))
    assert found.positions.tolist() == [[6, 7, 5, 0]]
    assert found.present.tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"clip": "quantile(0.5, 4)"}, "clip: quantile"), ({"scaling_noise": 1.0}, "scaling_noise: private scaling differs")],
)
def test_a_bound_that_each_federation_releases_is_refused(changes: dict[str, Any], sentence: str) -> None:
    federation = fedcdp.partition(fedcdp.load("cancer", scaling="public"), clients=7, scheme="iid")
    with pytest.raises(PlanError, match=sentence):
        trained(plan(**changes), federation, halves(federation, 3))
