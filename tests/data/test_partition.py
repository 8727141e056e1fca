"""What a partition promises, for every scheme and for the five datasets of the paper in outline."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.federation import Federation
from fedcdp.data.partition import partition
from fedcdp.errors import DataError, PlanError

MNIST = [4932, 5678, 4968, 5101, 4859, 4506, 4951, 5175, 4842, 4988]
DEALT = ["shards", "iid", "dirichlet"]


def dataset(counts: list[int]) -> Dataset:
    """`counts[c]` records of each class c, in a random but fixed order."""
    targets = np.random.default_rng(7).permutation(np.repeat(np.arange(len(counts)), counts))
    return Dataset(torch.zeros(len(targets), 1), torch.from_numpy(targets), len(counts))


def held(federation: Federation, clients: int | None = None) -> np.ndarray:
    return federation.table(np.arange(clients or federation.clients))[0]


def classes_held(federation: Federation) -> np.ndarray:
    """How many classes each client holds."""
    labels = federation.train.targets.numpy()
    return np.array([len(np.unique(labels[row])) for row in held(federation)])


@pytest.fixture(scope="module")
def mnist() -> Dataset:
    return dataset(MNIST)


class_counts = st.lists(st.integers(1, 60), min_size=2, max_size=12)


@st.composite
def arguments(draw: st.DrawFn) -> tuple[Dataset, dict[str, Any]]:
    data = dataset(draw(class_counts))
    return data, {
        "clients": draw(st.integers(1, 40)),
        "records": draw(st.integers(1, len(data))),
        "scheme": draw(st.sampled_from(DEALT)),
        "classes_per_client": draw(st.integers(1, data.classes)),
        "alpha": draw(st.sampled_from([1e-6, 0.1, 1.0, 1e6])),
        "seed": draw(st.integers(-3, 2**70)),
    }


# What holds for every dealt federation


@given(arguments())
@settings(deadline=None)
def test_clients_hold_exact_sizes_without_repeats_and_disjointly_within_a_copy(given):
    data, kwargs = given
    federation = partition(data, **kwargs)
    rows = held(federation)
    per_copy = len(data) // kwargs["records"]
    assert rows.shape == (kwargs["clients"], kwargs["records"])
    assert rows.min() >= 0
    assert rows.max() < len(data)
    for start in range(0, len(rows), per_copy):
        copy = rows[start : start + per_copy].ravel()
        assert len(np.unique(copy)) == len(copy)
    assert np.bincount(rows.ravel()).max() <= federation.copies == -(-kwargs["clients"] // per_copy)
    assert (federation.copies == 1) == (kwargs["clients"] * kwargs["records"] <= len(data))
    assert federation.smallest == federation.largest == kwargs["records"]
    assert (federation.sizes(np.arange(federation.clients)) == kwargs["records"]).all()


@given(arguments(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_holdings_do_not_depend_on_which_clients_are_asked_for_nor_when(given, random):
    data, kwargs = given
    rows = held(partition(data, **kwargs))
    other = partition(data, **kwargs)
    order = list(range(other.clients))
    random.shuffle(order)
    for client in order:
        assert np.array_equal(other.indices(client), rows[client])
    assert np.array_equal(other.table(order)[0], rows[order])


def test_holdings_survive_the_cache_forgetting_them(mnist, monkeypatch):
    whole = held(partition(mnist, 400, records=500))
    monkeypatch.setattr("fedcdp.data.holdings.CACHE_BYTES", 1)
    forgetful = partition(mnist, 400, records=500)
    for client in (0, 399, 100, 0, 250):
        assert np.array_equal(forgetful.indices(client), whole[client])


def test_more_clients_do_not_change_what_the_first_ones_hold(mnist):
    assert np.array_equal(held(partition(mnist, 30, records=500)), held(partition(mnist, 130, records=500), 30))


@pytest.mark.parametrize("scheme", [*DEALT, "full"])
def test_another_seed_is_another_deal_and_every_copy_is_dealt_afresh(scheme):
    data = dataset([60] * 5)
    records = None if scheme == "full" else 50
    rows = held(partition(data, 12, scheme, records=records))
    assert not np.array_equal(rows, held(partition(data, 12, scheme, records=records, seed=1)))
    assert not np.array_equal(rows[:6], rows[6:])


@pytest.mark.parametrize("scheme", DEALT)
def test_holdings_are_disjoint_and_equal_unless_records_asks_for_more(scheme):
    federation = partition(dataset([100, 107, 96]), 10, scheme)
    assert federation.copies == 1
    assert federation.largest == 30
    assert len(np.unique(held(federation))) == 300


def test_what_is_returned_can_be_written_to_without_harm(mnist):
    federation = partition(mnist, 100, records=500)
    before = federation.indices(3).copy()
    federation.indices(3)[:] = 0
    federation.table([3])[0][:] = 0
    assert np.array_equal(federation.indices(3), before)


@pytest.mark.parametrize("scheme", DEALT)
def test_a_federation_can_be_sent_to_another_process(mnist, scheme):
    federation = partition(mnist, 200, scheme, records=500)
    rows = held(federation)
    assert np.array_equal(held(pickle.loads(pickle.dumps(federation))), rows)


# Shards


@given(class_counts, st.integers(2, 12), st.data())
@settings(deadline=None, max_examples=200)
def test_shards_keep_to_their_classes_wherever_clients_and_classes_allow(counts, most, data):
    most = min(most, len(counts))
    records = data.draw(st.integers(1, sum(counts)))
    clients = sum(counts) // records
    federation = partition(dataset(counts), clients, records=records, classes_per_client=most)
    bound = max(most, 1 + -(-(len(counts) - 1) // clients))
    assert classes_held(federation).max() <= bound


@given(st.lists(st.integers(20, 1000), min_size=2, max_size=10), st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_a_hundred_clients_use_up_any_data_at_two_classes_each(weights, seed):
    counts = np.random.default_rng(seed).multinomial(5000 - len(weights), np.array(weights) / sum(weights)) + 1
    federation = partition(dataset(counts.tolist()), 100, records=50, seed=seed)
    assert np.array_equal(np.sort(held(federation).ravel()), np.arange(5000))
    assert classes_held(federation).max() <= 2


@pytest.mark.parametrize("counts", [MNIST, [5000] * 10])
@pytest.mark.parametrize("seed", range(5))
def test_mnist_clients_hold_500_of_two_classes_and_use_up_all_50000(counts, seed):
    federation = partition(dataset(counts), 100, records=500, seed=seed)
    assert np.array_equal(np.sort(held(federation).ravel()), np.arange(50_000))
    classes = classes_held(federation)
    assert classes.max() == 2
    assert (classes == 2).mean() >= 0.97


def test_two_shards_are_of_equal_size_for_most_clients(mnist):
    rows = held(partition(mnist, 100, records=500))
    largest_shard = np.array([np.bincount(mnist.targets.numpy()[row]).max() for row in rows])
    assert (largest_shard == 250).mean() > 0.8


@pytest.mark.parametrize("seed", range(3))
def test_lfw_clients_hold_300_of_about_15_classes(seed):
    weights = 1 / np.arange(1, 63) ** 1.2
    counts = 15 + np.random.default_rng(seed).multinomial(2267 - 62 * 15, weights / weights.sum())
    federation = partition(dataset(counts.tolist()), 100, records=300, classes_per_client=15, seed=seed)
    classes = classes_held(federation)
    assert 12 <= classes.mean() <= 15
    assert classes.max() == 15


@pytest.mark.parametrize("counts", [[27_880, 8_751], [8_000, 1_000, 1_000]], ids=["adult", "one of three"])
def test_every_client_holds_two_classes_though_one_has_most_of_the_data(counts):
    federation = partition(dataset(counts), sum(counts) // 300, records=300)
    assert (classes_held(federation) == 2).all()


def test_one_class_a_client_is_kept_for_all_but_the_remainders(mnist):
    classes = classes_held(partition(mnist, 100, records=500, classes_per_client=1))
    assert classes.max() == 2
    assert (classes == 1).mean() > 0.85


def test_a_client_with_everything_holds_more_classes_than_asked_rather_than_failing():
    data = dataset([1] * 9)
    assert np.array_equal(np.sort(partition(data, 3, records=9).indices(2)), np.arange(9))


def test_consecutive_batches_of_five_mix_the_classes_of_a_client(mnist):
    batches = mnist.targets.numpy()[held(partition(mnist, 100, records=500))].reshape(-1, 5)
    # A shuffled client of two even classes has 2 · (1/2)⁵ = 6 % batches of one class; an unshuffled one has all.
    assert (batches == batches[:, :1]).all(axis=1).mean() < 0.12


# The other schemes


def test_iid_clients_have_the_classes_of_the_data(mnist):
    labels = mnist.targets.numpy()[held(partition(mnist, 100, "iid"))]
    shares = np.array([np.bincount(row, minlength=10) / 500 for row in labels])
    assert np.abs(shares - np.array(MNIST) / 50_000).max() < 0.08


def test_full_gives_every_client_every_record():
    federation = partition(dataset([212, 357]), 50, "full")
    assert (np.sort(held(federation)) == np.arange(569)).all()
    assert federation.copies == 50
    assert partition(dataset([212, 357]), 50, "full", records=569).largest == 569


def test_dirichlet_goes_from_single_classes_to_the_prior_as_alpha_grows(mnist):
    def distance(alpha: float) -> float:
        labels = mnist.targets.numpy()[held(partition(mnist, 50, "dirichlet", records=500, alpha=alpha))]
        shares = np.array([np.bincount(row, minlength=10) / 500 for row in labels])
        return float(np.abs(shares - np.array(MNIST) / 50_000).sum(axis=1).mean() / 2)

    skewed, middle, even = distance(0.01), distance(5.0), distance(1e6)
    assert skewed > 0.8 > middle > 0.15 > even


def test_dirichlet_uses_up_all_data_when_asked_to(mnist):
    assert np.array_equal(np.sort(held(partition(mnist, 100, "dirichlet", alpha=0.1)).ravel()), np.arange(50_000))


# Users' own lists


@given(st.lists(st.sets(st.integers(0, 29), min_size=1), min_size=1, max_size=8))
def test_custom_clients_hold_what_is_listed_padded_by_their_own_first_record(lists):
    federation = partition(dataset([10, 10, 10]), indices=[list(one) for one in lists])
    table, sizes = federation.table(np.arange(len(lists)))
    assert federation.scheme == "custom"
    assert federation.clients == len(lists)
    assert (federation.smallest, federation.largest) == (min(map(len, lists)), max(map(len, lists)))
    assert federation.copies == max(sum(record in one for one in lists) for record in range(30))
    assert table.shape == (len(lists), federation.largest)
    assert np.array_equal(sizes, [len(one) for one in lists])
    for client, (one, row) in enumerate(zip(lists, table, strict=True)):
        assert set(row[: len(one)]) == one
        assert np.array_equal(federation.indices(client), row[: len(one)])
        assert (row[len(one) :] == row[0]).all()


def test_custom_lists_are_shuffled_the_same_way_every_time():
    first, again = (partition(dataset([50, 50]), indices=[np.arange(100)]).indices(0) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, np.arange(100))


@pytest.mark.parametrize(
    ("indices", "sentence"),
    [
        ([], "indices is empty"),
        ([[0], []], r"indices\[1\] is empty"),
        ([[0, 30]], r"indices\[0\] is from 0 to 30: .* from 0 to 29"),
        ([[-1, 3]], r"indices\[0\] is from -1 to 3"),
        ([[4, 4]], r"indices\[0\] is a list with a repeated record"),
        ([[0.5]], r"indices\[0\] is float64"),
        ([np.ones(30, dtype=bool)], r"indices\[0\] is bool"),
    ],
)
def test_lists_that_cannot_be_held_are_refused(indices, sentence):
    with pytest.raises(PlanError, match=sentence):
        partition(dataset([10, 10, 10]), indices=indices)


# Data and errors


def test_splits_bring_their_validation_and_test_sets():
    train, validation, test = dataset([20, 20]), dataset([5, 5]), dataset([3, 3])
    federation = partition(Splits("toy", train, validation, test, "as is"), 4)
    assert (federation.train, federation.validation, federation.test) == (train, validation, test)
    own = partition(train, 4, validation=validation)
    assert (own.train, own.validation, own.test) == (train, validation, None)
    assert partition(train, 4).validation is None


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor])
def test_a_pair_of_arrays_is_enough(convert):
    federation = partition((convert(np.ones((6, 2))), convert(np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8))), 3)
    assert (federation.train.inputs.dtype, federation.train.targets.dtype) == (torch.float32, torch.int64)
    assert federation.train.classes == 3
    assert len(np.unique(held(federation))) == 6


@pytest.mark.parametrize("targets", [[0.0, 0.5], [[1, 0], [0, 1]], [-1, 0]])
def test_labels_that_are_not_classes_are_refused(targets):
    with pytest.raises(DataError, match="label"):
        partition((np.ones((2, 1)), np.array(targets)), 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"clients": 0}, "clients is 0: .* 1 or more"),
        ({"clients": None}, "clients is None"),
        ({"clients": 2.5}, "clients: 2.5 is not a whole number"),
        ({"clients": 1, "records": 0}, "records is 0: .* 1 to 30"),
        ({"clients": 1, "records": 31}, "records is 31: .* 1 to 30"),
        ({"clients": 1_000_000}, "clients is 1000000: at most 30 .* pass records="),
        ({"clients": 3, "classes_per_client": 0}, "classes_per_client is 0: .* 1 to 2"),
        ({"clients": 3, "classes_per_client": 3}, "classes_per_client is 3: .* 1 to 2"),
        ({"clients": 3, "scheme": "dirichlet", "alpha": 0}, "alpha is 0: .* above 0"),
        ({"clients": 3, "scheme": "dirichlet", "alpha": float("nan")}, "alpha is nan"),
        ({"clients": 3, "scheme": "full", "records": 10}, "records is 10: .* all 30"),
        (
            {"clients": 3, "scheme": "random"},
            "scheme is 'random': .* shards, iid, full, dirichlet, linear, .* natural, custom",
        ),
        ({"clients": 3, "scheme": "custom"}, "scheme is 'custom': indices"),
        ({"scheme": "iid", "indices": [[0]]}, "scheme is 'iid': indices"),
        ({"clients": 3, "indices": [[0]]}, "indices has 1 lists"),
    ],
)
def test_a_partition_that_cannot_be_made_is_refused_in_a_sentence(arguments, sentence):
    data = dataset([15, 0, 15])  # two classes are present, whatever the dataset's number of classes
    with pytest.raises(PlanError, match=sentence):
        partition(data, **arguments)


@pytest.mark.parametrize("client", [-1, 3])
def test_clients_that_do_not_exist_are_refused(client):
    federation = partition(dataset([15, 15]), 3)
    with pytest.raises(PlanError, match=f"client {client} does not exist: .* 0 to 2"):
        federation.indices(client)
    with pytest.raises(PlanError, match="does not exist"):
        federation.sizes(np.array([0, client]))


def test_a_federation_describes_itself(mnist):
    replicated = partition(mnist, 1000, records=500)
    assert replicated.describe() == (
        "1000 clients × 500 records, shards of 2 classes, each record stored at up to 10 clients"
    )
    assert replicated.describe() in repr(replicated)
    assert partition(mnist, 100, "iid").describe().endswith("dealt at random, each record stored at one client at most")
    assert partition(mnist, indices=[[0], [1, 2]]).describe().startswith("2 clients × 1 to 2 records, as listed")


# Scale


def test_ten_thousand_clients_are_dealt_in_seconds_and_read_again_at_once(mnist):
    federation = partition(mnist, 10_000, records=500)
    start = time.perf_counter()
    held(federation)
    assert time.perf_counter() - start < 10
    clients = np.random.default_rng(0).choice(10_000, 500, replace=False)
    start = time.perf_counter()
    federation.table(clients)
    assert time.perf_counter() - start < 0.1


@pytest.mark.slow
def test_a_million_clients_cost_no_more_than_those_asked_for(mnist):
    tracemalloc.start()
    federation = partition(mnist, 1_000_000, records=500)
    federation.table(np.random.default_rng(0).choice(1_000_000, 100, replace=False))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert federation.copies == 10_000
    assert peak < 200e6
