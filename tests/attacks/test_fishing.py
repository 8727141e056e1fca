"""Fishing: one record of a large batch comes out alone, by its class or by a feature."""

from __future__ import annotations

import pytest

from fedcdp.data.dataset import Dataset
from fedcdp.data.load import load
from fedcdp.data.partition import Federation
from fedcdp.errors import ModelError
from tests.support.active import LEAKING, METHODS, NOISED, leaks_of, plan_of, small_federation


@pytest.fixture(scope="module")
def federation(digits: Dataset) -> Federation:
    return small_federation(digits, records=100)


@pytest.fixture(scope="module")
def few(digits: Dataset) -> Federation:
    return small_federation(digits, records=8)


@pytest.mark.parametrize("method", LEAKING)
def test_one_of_a_hundred_is_singled_out_by_a_feature(method: str, federation: Federation) -> None:
    told = leaks_of("fishing", federation, plan_of(100, **METHODS[method])).summary()
    assert (told["examples"], told["records"], told["read_by"]) == (4, 100, "first layer")
    assert told["by_class"] == 0
    assert told["success_rate"] >= 0.75
    assert told["singled_out"] >= 0.75 or method != "no privacy"  # clipped updates show no counts


def test_a_record_that_is_alone_in_its_class_is_singled_out(few: Federation) -> None:
    told = leaks_of("fishing", few, plan_of()).summary()
    assert told["by_class"] > 0
    assert told["success_rate"] == 1


def test_one_record_of_a_secure_sum_is_singled_out(few: Federation) -> None:
    told = leaks_of("fishing", few, plan_of(secure_aggregation=True)).summary()
    assert (told["victims"], told["records"], told["success_rate"]) == (1, 32, 1)


def test_features_of_a_fixed_network_lead_to_the_image(federation: Federation) -> None:
    told = leaks_of("fishing", federation, plan_of(100, learning_rate=10.0), "linear").summary()
    assert told["read_by"] == "features"
    assert told["singled_out"] >= 0.75
    assert told["recognisable_rate"] >= 0.75


@pytest.mark.slow
def test_a_convolutional_network_is_searched(digits: Dataset) -> None:
    told = leaks_of("fishing", small_federation(digits, 40), plan_of(40), "cpl", victims=2).summary()
    assert told["read_by"] == "search"
    assert told["recognisable_rate"] == 1


@pytest.mark.parametrize("method", NOISED)
def test_noise_leaves_nothing(method: str, few: Federation) -> None:
    told = leaks_of("fishing", few, plan_of(**METHODS[method])).summary()
    assert told["success_rate"] == told["recognisable_rate"] == 0
    assert told["distance_mean"] > told["knowing_nothing"]["dataset_mean"]["mse"]
    assert told["auc_interval_99"][0] <= told["auc_predicted"] <= told["auc_interval_99"][1]


def test_tasks_without_classes_are_refused(federation: Federation) -> None:
    with pytest.raises(ModelError, match="fishing needs updates of one local step"):
        leaks_of("fishing", federation, plan_of(10, local_steps=2), steps=2)
    with pytest.raises(ModelError, match="fishing is an attack by the server"):
        leaks_of("fishing", federation, plan_of(10), leak="type2")


@pytest.mark.slow
def test_one_of_four_hundred_is_singled_out() -> None:
    """Full images, as in the benchmark."""
    import fedcdp
    from fedcdp.models.networks import build

    federation = fedcdp.partition(load("mnist5k"), clients=10, scheme="iid", records=400)
    plan = plan_of(400, per_round=10)
    found = fedcdp.attack(
        plan, model=build("mlp", (1, 28, 28), 10), federation=federation, leak="type0", attack="fishing", victims=5
    )
    assert found.summary()["success_rate"] >= 0.8
