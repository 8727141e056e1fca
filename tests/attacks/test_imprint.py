"""Imprint: bins recover a batch exactly without privacy, and nothing under Fed-CDP's noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcdp.attacks.imprint import Imprint, quantiles
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.methods import METHODS as FEDERATED
from tests.support.active import LEAKING, METHODS, NOISED, leaks_of, network_of, plan_of, small_federation, stage_of
from tests.support.sabotage import sabotaged, silenced


@pytest.fixture(scope="module")
def federation(digits: Dataset) -> Federation:
    return small_federation(digits)


@pytest.mark.parametrize("trust", ["updates", "sum"])
@pytest.mark.parametrize("method", [*LEAKING, "DSSGD"])
def test_a_layer_in_front_recovers_whole_batches(method: str, trust: str, federation: Federation) -> None:
    plan = plan_of(**METHODS[method], secure_aggregation=trust == "sum")
    found = leaks_of("imprint", federation, plan, "small")
    told = found.summary()
    assert told["changed_network"]
    assert "a fedcdp deployment refuses it" in told["assumption"]
    assert told["bins"] == 10 * 8 * (4 if trust == "sum" else 1)
    assert told["success_rate"] > 0.8


@pytest.mark.parametrize("method", LEAKING)
def test_the_first_layer_of_a_dense_network_serves_as_bins(method: str, federation: Federation) -> None:
    told = leaks_of("imprint", federation, plan_of(**METHODS[method])).summary()
    assert (told["changed_network"], told["bins"]) == (False, 64)
    assert told["success_rate"] > 0.6  # as many bins as units: some inputs share one


@pytest.mark.parametrize("network", ["mlp", "small"])
@pytest.mark.parametrize("method", NOISED)
def test_noise_leaves_no_more_than_the_public_mean(method: str, network: str, federation: Federation) -> None:
    told = leaks_of("imprint", federation, plan_of(**METHODS[method]), network).summary()
    assert told["success_rate"] == told["recognisable_rate"] == 0
    assert told["distance_mean"] > 0.9 * told["knowing_nothing"]["dataset_mean"]["mse"]
    low, high = told["auc_interval_99"]
    assert low <= told["auc_predicted"] <= high


def test_a_layer_without_noise_is_seen(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack does not believe that there is noise because the plan says so."""
    plan, names = plan_of(method="fed-cdp", noise="batch"), ("1.weight", "1.bias")
    assert leaks_of("imprint", federation, plan).success_rate == 0
    monkeypatch.setitem(FEDERATED, "fed-cdp", sabotaged(FEDERATED["fed-cdp"], silenced(*names)))
    assert leaks_of("imprint", federation, plan).success_rate > 0.6  # type: ignore[operator]


def test_a_weight_without_noise_is_seen_up_to_its_length(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(method="fed-cdp", noise="batch")
    monkeypatch.setitem(FEDERATED, "fed-cdp", sabotaged(FEDERATED["fed-cdp"], silenced("1.weight")))
    told = leaks_of("imprint", federation, plan).summary()
    assert told["recognisable_rate"] > 0.6


def test_a_zero_head_on_fixed_features_is_no_obstacle(federation: Federation) -> None:
    """At a zero last layer no gradient reaches the inputs; an active server sends another one."""
    assert not any(bool(p.any()) for p in network_of("linear").parameters())
    assert leaks_of("imprint", federation, plan_of(), "linear").success_rate > 0.8  # type: ignore[operator]


def test_the_number_of_bins_can_be_chosen(federation: Federation) -> None:
    few, many = (Imprint(bins=bins).run(stage_of(federation, plan_of(), "small")).summary() for bins in (4, 200))
    assert (few["bins"], many["bins"]) == (4, 200)
    assert few["success_rate"] < 0.5 < many["success_rate"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=40), st.integers(1, 100))
def test_bins_are_in_order_and_hold_every_value(values: list[float], bins: int) -> None:
    given_ = torch.tensor(values, dtype=torch.float64)
    edges = quantiles(given_, bins)
    assert edges.shape == (bins,)
    assert bool((edges[1:] > edges[:-1]).all())
    assert float(edges[0]) < float(given_.min())


def test_an_attack_by_the_server_needs_updates(federation: Federation) -> None:
    with pytest.raises(Exception, match="imprint is an attack by the server, which reads updates: use leak type0 or type1"):
        leaks_of("imprint", federation, plan_of(), leak="type2")


def test_several_local_steps_still_leak(federation: Federation) -> None:
    plan = plan_of(local_steps=2, batch_size=4, learning_rate=1e-3)
    more: dict[str, Any] = {"steps": 2}
    assert leaks_of("imprint", federation, plan, "small", **more).summary()["recognisable_rate"] > 0.5
