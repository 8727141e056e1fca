"""Robust means: what a few poisoned updates can move, and that nothing else changes."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fedcdp.config.plan import Plan
from fedcdp.data import load
from fedcdp.data.partition import partition
from fedcdp.errors import PlanError
from fedcdp.methods.aggregation import Aggregate
from fedcdp.methods.robust_means import median_of_means, robust_sum, trimmed_mean
from fedcdp.models.networks import build
from fedcdp.training.simulate import simulate

UPDATES = torch.randn(10, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
ROBUST: dict[str, dict[str, Any]] = {
    "trimmed-mean": {"aggregator": "trimmed-mean", "trim": 0.3},
    "median-of-means": {"aggregator": "median-of-means", "median_groups": 7},
}


@pytest.mark.parametrize(("clients", "trim", "cut"), [(10, 0.1, 1), (9, 0.1, 1), (30, 0.1, 3), (10, 0.45, 4), (2, 0.3, 0)])
def test_a_trimmed_mean_leaves_out_the_share_at_each_end_rounded_up(clients: int, trim: float, cut: int) -> None:
    values = UPDATES.repeat(3, 1)[:clients] + torch.arange(clients)[:, None]
    expected = np.sort(values.numpy(), axis=0)[cut : clients - cut].mean(0)
    np.testing.assert_allclose(trimmed_mean(values, trim).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 3, 4, 10, 20])
def test_a_median_of_means_is_the_median_of_the_groups_means(groups: int) -> None:
    count = min(groups, 10)
    means = [UPDATES.numpy()[[client for client in range(10) if client % count == group]].mean(0) for group in range(count)]
    np.testing.assert_allclose(median_of_means(UPDATES, groups).numpy(), np.median(means, axis=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("robust", ROBUST.values(), ids=ROBUST.keys())
def test_the_sum_is_that_of_equal_updates(robust: dict[str, Any]) -> None:
    equal = {"a": torch.ones(10, 2, 3), "b": torch.full((10, 4), -2.0)}
    found = robust_sum(equal, Plan(per_round=10, **robust))
    assert {name: value.tolist() for name, value in found.items()} == {
        "a": [[10.0] * 3] * 2,
        "b": [-20.0] * 4,
    }


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sets(st.integers(0, 9), min_size=1, max_size=3), st.floats(-1e30, 1e30), st.sampled_from(sorted(ROBUST)))
def test_three_of_ten_leave_every_coordinate_among_the_honest_values(rogues: set[int], size: float, name: str) -> None:
    poisoned = UPDATES.clone()
    poisoned[list(rogues)] = size
    honest = UPDATES[[client for client in range(10) if client not in rogues]]
    found = robust_sum({"a": poisoned}, Plan(per_round=10, **ROBUST[name]))["a"] / 10
    assert bool((found >= honest.amin(0) - 1e-9).all())
    assert bool((found <= honest.amax(0) + 1e-9).all())


def test_one_of_ten_moves_the_mean_as_far_as_it_likes() -> None:
    poisoned = UPDATES.clone()
    poisoned[4] = 1e6
    received = Aggregate({"a": torch.zeros(7)}, Plan(per_round=10))
    received.add({"a": poisoned})
    assert float(received.total_update()["a"].min()) > 9e5


@pytest.mark.parametrize("aggregation", ["fedsgd", "fedaveraging"])
@pytest.mark.parametrize("robust", ROBUST.values(), ids=ROBUST.keys())
def test_the_grouping_of_clients_into_calls_does_not_matter(robust: dict[str, Any], aggregation: Any) -> None:
    plan = Plan(per_round=10, aggregation=aggregation, **robust)
    sums = []
    for width in (1, 3, 10):
        received = Aggregate({"a": torch.ones(7)}, plan)
        for part in UPDATES.split(width):
            received.add({"a": part})
        sums.append(received.total_update()["a"])
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    assert torch.equal(sums[0], robust_sum({"a": UPDATES}, plan)["a"])


@pytest.mark.parametrize("robust", ROBUST.values(), ids=ROBUST.keys())
def test_a_round_without_clients_leaves_the_sum_at_zero(robust: dict[str, Any]) -> None:
    assert Aggregate({"a": torch.ones(7)}, Plan(per_round=10, **robust)).total_update()["a"].tolist() == [0.0] * 7


@pytest.mark.parametrize("robust", ROBUST.values(), ids=ROBUST.keys())
def test_a_training_with_a_robust_mean_learns_and_does_not_depend_on_chunks(robust: dict[str, Any]) -> None:
    federation = partition(load("cancer", quiet=True), clients=10, scheme="iid", seed=1)
    plan = Plan(
        rounds=4, per_round=10, local_steps=10, batch_size=8, noise_multiplier=0.3, learning_rate=0.1, seed=2, **robust
    )
    runs = [simulate(build("mlp", (30,), 2), federation, plan, chunk=chunk) for chunk in (3, 10)]
    for name, value in runs[0].model.state_dict().items():
        torch.testing.assert_close(value, runs[1].model.state_dict()[name], rtol=0, atol=1e-6)
    assert runs[0].metrics[-1]["accuracy"] > 0.85


@pytest.mark.parametrize("robust", ROBUST.values(), ids=ROBUST.keys())
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"secure_aggregation": True}, "with secure aggregation, where the server reads no single update"),
        ({"secure_aggregation": True, "noise": "sum", "local_steps": 1}, "with secure aggregation"),
        ({"method": "fed-sdp"}, "with noise at the server, which is made for the sum of all updates; set noise_at client"),
        ({"weighting": "records"}, "with weighting by records; updates of other weights do not compare"),
        ({"compression": 0.9}, "with pruned updates, most of whose entries are 0"),
        ({"method": "dssgd"}, "with pruned updates, most of whose entries are 0"),
    ],
)
def test_where_it_would_not_hold_it_is_refused_in_one_line(
    robust: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(PlanError, match=f"^aggregator: {robust['aggregator']} is not allowed {why}") as raised:
        Plan(per_round=10, **robust, **changes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trim": 0.5}, "trim: 0.5 is not allowed; it must be above 0 and below 0.5"),
        ({"trim": math.nan}, "trim: nan is not a finite number"),
        ({"trim": 0.0}, "trim: 0.0 is not allowed; it must be"),
        ({"median_groups": 0}, "median_groups: 0 is not allowed; it must be from 1 to"),
        (
            {"aggregator": "median-of-means", "median_groups": 11},
            "median_groups: 11 is not allowed; it must be at most the clients per round, 10",
        ),
        ({"aggregator": "krum"}, "aggregator: "),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=f"^{said}"):
        Plan(per_round=10, **changes)


def test_a_plan_that_keeps_the_mean_keeps_its_digest() -> None:
    assert not {"aggregator", "trim", "median_groups"} & Plan().written().keys()
    assert Plan(aggregator="trimmed-mean").digest() != Plan().digest()
    assert Plan(**Plan(aggregator="trimmed-mean", trim=0.1).written()) == Plan(aggregator="trimmed-mean", trim=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("robust", ROBUST.values(), ids=ROBUST.keys())
@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"noise": "batch"},
        {"noise": "cohort"},
        {"local_steps": 1},
        {"local_steps": 1, "record_sampling": "partition"},
        {"client_sampling": "poisson"},
        {"clip": "quantile(0.5, 4)"},
        {"scaling_noise": 5.0},
        {"method": "fed-sdp", "noise_at": "client"},
        {"method": "fed-sdp", "noise_at": "client", "client_sampling": "poisson"},
        {"method": "nonprivate"},
    ],
)
def test_every_row_is_that_of_the_mean_and_none_counts_other_clients_noise(
    robust: dict[str, Any], plan: dict[str, Any]
) -> None:
    """The accounted release is each client's own update, so the server may do with the updates what it likes."""
    federation = partition(load("cancer", quiet=True), clients=20, scheme="iid", seed=1)
    usual = {"rounds": 3, "per_round": 10, "local_steps": 2, "noise_multiplier": 2.0} | plan
    mean, found = Plan(**usual).privacy(federation), Plan(**usual, **robust).privacy(federation)
    assert found.rows == mean.rows
    rows = {(row.adversary, row.unit): row.epsilon for row in found.rows}
    for unit in {unit for adversary, unit in rows if adversary == "model"}:
        assert rows["model", unit] == rows["server", unit]  # no credit for noise that is only in the mean
