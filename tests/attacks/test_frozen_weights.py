"""Frozen weights: every release shows the same gradient, and a reader gains with every round."""

from __future__ import annotations

import pytest
import torch

from fedcdp.attacks.frozen_weights import FROZEN, FrozenCourse
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.errors import ModelError
from tests.support.active import leaks_of, plan_of, small_federation, stage_of


@pytest.fixture(scope="module")
def federation(digits: Dataset) -> Federation:
    return small_federation(digits)


def test_the_same_weights_are_sent_in_every_round(federation: Federation) -> None:
    course = stage_of(federation, plan_of(), "linear").scene.course
    assert course is not None
    frozen = FrozenCourse(course.network, course.federation, course.plan, course.device, course.loss)
    states = [state for state, _ in frozen.states(*frozen.begin())]
    assert [state.round for state in states] == [0, 1, 2]
    for state in states[1:]:
        assert all(torch.equal(value, states[0].weights[name]) for name, value in state.weights.items())


def test_identification_grows_with_the_rounds(federation: Federation) -> None:
    """Fresh noise in each round, the same gradient: a type-2 reader averages."""
    private = {"method": "fed-cdp", "clip": 0.5, "noise_multiplier": 0.8}
    shares = []
    for rounds in (1, 30):
        told = leaks_of("frozen-weights", federation, plan_of(rounds=rounds, **private), "linear", "type2").summary()
        assert (told["source"], told["releases_mean"]) == (FROZEN, rounds)
        shares.append(told["identified_rate"])
    assert shares[0] < 0.2
    assert shares[1] > shares[0] + 0.3


@pytest.mark.parametrize("trust", ["updates", "sum"])
def test_the_server_reads_all_rounds(trust: str, federation: Federation) -> None:
    plan = plan_of(method="fed-cdp", secure_aggregation=trust == "sum")
    told = leaks_of("frozen-weights", federation, plan, "linear").summary()
    assert told["releases_mean"] == told["presence_releases"] == 3
    assert told["recognisable_rate"] < 0.2
    assert told["auc_interval_99"][0] <= told["auc_predicted"] <= told["auc_interval_99"][1]


def test_other_networks_and_single_rounds_are_refused(federation: Federation) -> None:
    with pytest.raises(
        ModelError, match="frozen-weights reads networks that train only their last dense layer; use releases"
    ):
        leaks_of("frozen-weights", federation, plan_of())
    with pytest.raises(ModelError, match="frozen-weights needs all rounds of a training"):
        leaks_of("frozen-weights", federation, plan_of(), "linear", at_round=1)
    with pytest.raises(ModelError, match="frozen-weights needs unpruned updates"):
        leaks_of("frozen-weights", federation, plan_of(method="dssgd"), "linear")
    with pytest.raises(
        ModelError, match="frozen-weights cannot read the sum of a round: it adds up updates that were clipped"
    ):
        leaks_of("frozen-weights", federation, plan_of(method="fed-sdp", secure_aggregation=True), "linear")
