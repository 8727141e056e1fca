"""Schemes of unequal sizes: flwr-datasets' formulas, Dirichlet draws, and what all of them promise."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcdp.config.experiment import assemble
from fedcdp.data.dataset import Dataset
from fedcdp.data.federation import Federation
from fedcdp.data.partition import partition
from fedcdp.data.unequal import UNEQUAL, class_cuts, growing_sizes
from fedcdp.errors import PlanError
from fedcdp.training.prepared import deal_out, load_splits, population_of

FORMULAS: dict[str, Any] = {"linear": lambda x: x, "square": np.square, "exponential": np.exp}


def dataset(records: int, classes: int = 10) -> Dataset:
    return Dataset(torch.zeros(records, 1), torch.arange(records) % classes, classes)


def sizes(federation: Federation) -> np.ndarray:
    return federation.sizes(np.arange(federation.clients))


def every_record(federation: Federation) -> np.ndarray:
    return np.concatenate([federation.indices(client) for client in range(federation.clients)])


@given(
    st.sampled_from(UNEQUAL),
    st.integers(1, 400),
    st.integers(1, 12),
    st.sampled_from([0.05, 1.0, 100.0]),
    st.integers(1, 5),
    st.integers(0, 2**70),
)
@settings(deadline=None)
def test_each_record_has_one_client_and_no_client_is_too_small(scheme, records, clients, alpha, smallest, seed):
    arguments = {"clients": clients, "scheme": scheme, "alpha": alpha, "smallest": smallest, "seed": seed}
    try:
        federation = partition(dataset(records), **arguments)
    except PlanError:
        assert scheme != "dirichlet-sizes" or clients * smallest > records or smallest > records
        return
    assert np.array_equal(np.sort(every_record(federation)), np.arange(records))
    assert (federation.clients, federation.copies) == (clients, 1)
    assert federation.smallest >= smallest
    again = partition(dataset(records), **arguments)
    assert np.array_equal(every_record(again), every_record(federation))


@pytest.mark.parametrize("scheme", UNEQUAL)
def test_another_seed_is_another_deal_and_records_are_mixed(scheme):
    first, other = (partition(dataset(1000), 5, scheme, alpha=5.0, seed=seed) for seed in (0, 1))
    assert not np.array_equal(every_record(first), every_record(other))
    assert not np.array_equal(first.indices(4), np.sort(first.indices(4)))
    assert np.array_equal(every_record(pickle.loads(pickle.dumps(first))), every_record(first))


@given(st.sampled_from(sorted(FORMULAS)), st.integers(1, 100_000), st.integers(1, 300))
@settings(deadline=None, max_examples=300)
def test_growing_sizes_follow_the_formulas_of_flwr_datasets(scheme, total, clients):
    # IdToSizeFncPartitioner: shares of the units, cut to whole numbers; the last partition gets the remainder.
    units = FORMULAS[scheme](np.linspace(start=1, stop=clients, num=clients))
    expected = np.array(units / units.sum() * total, dtype=np.int64)
    expected[-1] += total - expected.sum()
    assert growing_sizes(scheme, total, clients).tolist() == expected.tolist()


def test_growing_sizes_are_those_that_flwr_datasets_computed():
    assert growing_sizes("linear", 426, 5).tolist() == [28, 56, 85, 113, 144]
    assert growing_sizes("square", 426, 5).tolist() == [7, 30, 69, 123, 197]
    assert growing_sizes("exponential", 426, 5).tolist() == [4, 13, 36, 99, 274]


def test_classes_are_cut_as_flwr_datasets_cuts_them():
    # DirichletPartitioner: for each class in turn, Dirichlet shares of its records, cut at whole numbers.
    counts, rng = np.array([30, 500, 7]), np.random.default_rng(42)
    expected = []
    for count in counts:
        cuts = (np.cumsum(rng.dirichlet([0.5] * 4)) * count).astype(int)[:-1]
        expected.append([len(part) for part in np.split(np.arange(count), cuts)])
    assert class_cuts(counts, 4, 0.5, np.random.default_rng(42)).tolist() == expected


def test_classes_differ_between_clients_the_more_the_smaller_alpha_is():
    def distance(alpha: float) -> float:
        federation = partition(dataset(5000), 10, "dirichlet-classes", alpha=alpha, smallest=5)
        labels = federation.train.targets.numpy()
        shares = [np.bincount(labels[federation.indices(c)], minlength=10) / federation.sizes([c]) for c in range(10)]
        return float(np.abs(np.array(shares) - 0.1).sum(axis=1).mean() / 2)

    assert distance(0.1) > 0.6 > distance(2.0) > 0.15 > 0.05 > distance(1e5)


def test_absent_classes_do_not_hinder_a_division_by_class():
    data = Dataset(torch.zeros(40, 1), torch.arange(40) % 2 * 7, classes=10)
    assert len(every_record(partition(data, 4, "dirichlet-classes", alpha=5.0))) == 40


@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_sizes_keep_to_a_ratio_and_reach_it(seed):
    federation = partition(dataset(50_000), 100, "dirichlet-sizes", alpha=1, size_ratio=20, seed=seed)
    assert federation.largest / federation.smallest == pytest.approx(20, rel=0.01)
    unbounded = partition(dataset(50_000), 100, "dirichlet-sizes", alpha=1, seed=seed)
    assert unbounded.largest / unbounded.smallest > 50
    equal = partition(dataset(50_000), 100, "dirichlet-sizes", size_ratio=1, seed=seed)
    assert (equal.smallest, equal.largest) == (500, 500)


def test_dirichlet_sizes_have_the_spread_of_their_distribution():
    drawn = sizes(partition(dataset(100_000), 1000, "dirichlet-sizes", alpha=4.0))
    # A share ~ Beta(α, (K − 1)α) has a standard deviation of about its mean over √α.
    assert drawn.std() / drawn.mean() == pytest.approx(0.5, abs=0.05)


def test_clients_of_unequal_size_describe_themselves():
    assert partition(dataset(60), 3, "linear").describe() == (
        "3 clients × 10 to 30 records, linear sizes, each record stored at one client at most"
    )
    assert "sizes ~ Dirichlet(0.5)" in partition(dataset(60), 3, "dirichlet-sizes").describe()
    assert "each class divided ~ Dirichlet(9)" in partition(dataset(60), 3, "dirichlet-classes", alpha=9).describe()


def test_a_regression_is_dealt_by_size_but_not_by_class():
    ages = Dataset(torch.zeros(50, 1), torch.rand(50), task="regression")
    assert partition(ages, 4, "dirichlet-sizes").clients == 4
    with pytest.raises(PlanError, match="'dirichlet-classes': it deals by class, and task regression has no classes"):
        partition(ages, 4, "dirichlet-classes")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"clients": None, "scheme": "linear"}, "clients is None"),
        ({"clients": 31, "scheme": "dirichlet-sizes"}, "clients is 31: at most 30 clients"),
        ({"clients": 10, "scheme": "dirichlet-sizes", "smallest": 4}, "at most 7 clients can have 4 records"),
        ({"clients": 10, "scheme": "linear"}, "under scheme 'linear' the smallest client would hold 0 of 30"),
        ({"clients": 5, "scheme": "exponential"}, "the smallest client would hold 0 of 30 .* use fewer clients"),
        ({"clients": 3, "scheme": "linear", "smallest": 9}, "would hold 5 of 30 records instead of at least 9"),
        ({"clients": 3, "scheme": "linear", "smallest": 0}, "smallest is 0: .* 1 to 30"),
        ({"clients": 3, "scheme": "linear", "smallest": 1.5}, "smallest: 1.5 is not a whole number"),
        ({"clients": 3, "scheme": "linear", "records": 5}, "records is 5: it has no meaning under scheme 'linear'"),
        ({"clients": 3, "scheme": "linear", "size_ratio": 5}, "size_ratio is 5: .* for scheme 'dirichlet-sizes' only"),
        ({"clients": 3, "scheme": "dirichlet-classes", "size_ratio": 5}, "size_ratio is 5: it has no meaning"),
        ({"clients": 3, "scheme": "dirichlet-sizes", "size_ratio": 0.5}, "size_ratio is 0.5: it must be 1 or more"),
        ({"clients": 3, "scheme": "dirichlet-sizes", "size_ratio": float("nan")}, "size_ratio is nan"),
        ({"clients": 3, "scheme": "dirichlet-sizes", "alpha": 0}, "alpha is 0: .* above 0"),
        ({"clients": 3, "scheme": "dirichlet-sizes", "alpha": 1e308}, "alpha is 1e\\+308: .* that extreme"),
        ({"clients": 3, "scheme": "dirichlet-classes", "alpha": -1}, "alpha is -1"),
        ({"clients": 6, "scheme": "dirichlet-classes", "alpha": 1e-3, "smallest": 5}, "in 100 draws .* fewer than 5 of 30"),
    ],
)
def test_unequal_clients_that_cannot_be_made_are_refused(arguments, sentence):
    with pytest.raises(PlanError, match=sentence):
        partition(dataset(30), **arguments)


# Settings


@pytest.mark.parametrize("scheme", UNEQUAL)
def test_the_accountant_knows_the_sizes_that_training_deals(scheme):
    clients = 6 if scheme == "exponential" else 15
    experiment = assemble({"data": {"dataset": "mnist5k", "partition": scheme, "clients": clients, "smallest": 2}})
    federation = deal_out(experiment, load_splits(experiment))
    population = population_of(experiment)
    assert population.sizes == tuple(np.unique(sizes(federation)))
    assert (population.records, population.clients, population.copies) == (federation.smallest, clients, 1)


def test_a_datasets_default_of_records_gives_way_to_unequal_sizes():
    assert assemble({"data": {"dataset": "mnist"}}).data.records == 500
    assert assemble({"data": {"dataset": "mnist", "partition": "linear"}}).data.records is None
