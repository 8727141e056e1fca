"""What a trained network and the files of a run must not hold: raw records that the network saw, and who took part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedcdp
from fedcdp.config.plan import Plan
from fedcdp.errors import ModelError, PlanError

SIZES = [2, 30, 30]


def federation_of(sizes: list[int]) -> fedcdp.Federation:
    generator = torch.Generator().manual_seed(0)
    count = sum(sizes)
    starts = [sum(sizes[:client]) for client in range(len(sizes))]
    rows = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return fedcdp.partition((torch.randn(count, 3, generator=generator), torch.arange(count) % 2), indices=rows)


class Keeper(nn.Module):
    """Adds the mean of a batch to a buffer, unless the batch has one example, and keeps what it saw last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) > 1:
            self.seen.add_(x.detach().mean(0))
        self.last = x.detach()
        return self.layer(x)


def plan_of(**fields: object) -> Plan:
    usual = {"rounds": 1, "per_round": 3, "local_steps": 1, "batch_size": 20, "record_sampling": "partition"}
    return Plan(**usual | {"clip_mode": "flat", "noise_multiplier": 1.0, "secure_noise": True} | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("scaling", [None, 5.0])
def test_a_network_that_keeps_what_it_sees_leaves_nothing_behind(tmp_path: Path, scaling: float | None) -> None:
    run = fedcdp.simulate(Keeper(), federation_of(SIZES), plan_of(scaling_noise=scaling), out=tmp_path / "run")
    kept = [value for name, value in load_file(tmp_path / "run" / "model.safetensors").items() if name.endswith("seen")]
    assert len(kept) == 1
    assert float(kept[0].abs().max()) == 0
    inner = run.model if scaling is None else run.model[1]
    assert not hasattr(inner, "last")
    assert float(inner.seen.abs().max()) == 0


SECRET_COHORTS = {
    "Fed-SDP, noise at the server": {"method": "fed-sdp", "per_round": 2},
    "secure aggregation": {"secure_aggregation": True, "per_round": 2},
}


@pytest.mark.parametrize("name", SECRET_COHORTS)
def test_durations_do_not_tell_which_clients_took_part(tmp_path: Path, name: str) -> None:
    """A client with more records takes longer."""
    plan = plan_of(**SECRET_COHORTS[name], batch_size=2)
    unequal = fedcdp.simulate(nn.Linear(3, 2), federation_of([9, 9, 40]), plan, out=tmp_path / "run")
    equal = fedcdp.simulate(nn.Linear(3, 2), federation_of([9, 9, 9]), plan)
    (row,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert "seconds" not in row
    assert unequal.hides_time
    assert not equal.hides_time
    assert "seconds" in equal.metrics[0]


def test_where_a_cohort_is_secret_nobody_is_told_what_each_client_spent() -> None:
    federation, model = federation_of([9, 9, 40]), nn.Linear(3, 2)
    secret = fedcdp.simulate(model, federation, plan_of(**SECRET_COHORTS["secure aggregation"], batch_size=2)).privacy()
    known = fedcdp.simulate(model, federation, plan_of(per_round=2, batch_size=2)).privacy()
    assert {row.epsilon_used for row in secret.clients} == {None}
    assert sorted(row.epsilon_used > 0 for row in known.clients) == [False, True, True]


def test_an_epsilon_without_noise_is_written_as_json() -> None:
    run = fedcdp.simulate(nn.Linear(3, 2), federation_of([9, 9, 40]), plan_of(noise_multiplier=0.0, secure_noise=False))
    assert "Infinity" not in json.dumps(run.privacy().as_json())


def test_one_dataset_for_two_clients_is_refused() -> None:
    """Its records would count as different people, and each of their ε would be too small."""
    data = fedcdp.Dataset(torch.zeros(20, 3), torch.arange(20) % 2)
    with pytest.raises(PlanError, match="a and b have the same dataset"):
        fedcdp.Federation.from_datasets({"a": data, "b": data})


def test_a_layer_of_ones_own_called_scaling_is_refused() -> None:
    network = nn.Sequential()
    network.add_module("scaling", nn.Linear(3, 2))
    with pytest.raises(ModelError, match="rename it"):
        fedcdp.simulate(network, federation_of(SIZES), plan_of(scaling_noise=5.0))
