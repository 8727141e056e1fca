"""Federations of named clients: from datasets of their own, from owners of records, and from lists by name."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedcdp
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.federation import Federation
from fedcdp.data.partition import partition
from fedcdp.errors import DataError, PlanError

SITES = {"charite": 120, "jena": 50, "kleine klinik": 5}


def site(records: int, first: int = 0, classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Records that are recognised by their number, which is their input."""
    numbers = np.arange(first, first + records)
    return numbers[:, None].astype(np.float32), numbers % classes


def sites(classes: int = 2) -> dict[str, Any]:
    return {name: site(count, 1000 * number, classes) for number, (name, count) in enumerate(SITES.items())}


def held(federation: Federation, client: int) -> list[int]:
    rows = federation.train.tensor[torch.from_numpy(federation.indices(client)), 0]
    return [int(value) for value in rows]


def test_clients_keep_their_names_sizes_and_records() -> None:
    federation = Federation.from_datasets(sites(), validation_fraction=0)
    assert federation.names == tuple(SITES)
    assert (federation.scheme, federation.copies, federation.validation) == ("natural", 1, None)
    assert federation.sizes(range(3)).tolist() == [120, 50, 5]
    for client, records in enumerate(SITES.values()):
        assert sorted(held(federation, client)) == list(range(1000 * client, 1000 * client + records))
        assert federation.name(client) == list(SITES)[client]
    assert held(federation, 0) != sorted(held(federation, 0))


def test_held_out_records_come_from_every_client_in_proportion() -> None:
    federation = Federation.from_datasets(sites(), validation_fraction=0.2)
    assert federation.validation is not None
    assert federation.validation_clients is not None
    public = [int(value) for value in federation.validation.tensor[:, 0]]
    assert [value // 1000 for value in public] == federation.validation_clients.tolist()
    assert np.bincount(federation.validation_clients).tolist() == pytest.approx([24, 10, 1], abs=1)
    both = sorted(public + [value for client in range(3) for value in held(federation, client)])
    assert both == sorted(1000 * client + i for client, count in enumerate(SITES.values()) for i in range(count))
    for data in (federation.validation, federation.train):
        assert torch.equal(data.targets, data.tensor[:, 0].long() % 2)
    assert len(federation.train) == 140


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=5),
    st.floats(0.05, 0.5),
    st.integers(1, 4),
    st.integers(0, 10),
)
@settings(deadline=None, max_examples=60)
def test_no_record_is_lost_repeated_or_moved_to_another_client(
    counts: list[int], fraction: float, classes: int, seed: int
) -> None:
    given = {f"site {n}": site(count, 1000 * n, classes) for n, count in enumerate(counts)}
    federation = Federation.from_datasets(given, validation_fraction=fraction, split_seed=seed)
    assert federation.validation is not None
    public = [int(value) for value in federation.validation.tensor[:, 0]]
    private = [held(federation, client) for client in range(len(counts))]
    assert all(value // 1000 == client for client, rows in enumerate(private) for value in rows)
    assert sorted([*public, *(value for rows in private for value in rows)]) == [
        1000 * n + i for n, count in enumerate(counts) for i in range(count)
    ]


def test_seeds_fix_the_split_and_the_order() -> None:
    def of(**seeds: int) -> tuple[list[int], list[int]]:
        federation = Federation.from_datasets(sites(), **seeds)  # type: ignore[arg-type]
        assert federation.validation is not None
        return federation.validation.tensor[:, 0].tolist(), held(federation, 0)

    assert of() == of()
    assert of(split_seed=1)[0] != of()[0]
    assert of(seed=1)[0] == of()[0]
    assert of(seed=1)[1] != of()[1]


def test_clients_may_bring_different_kinds_of_datasets() -> None:
    inputs, labels = site(8)
    tensors = TensorDataset(torch.tensor(inputs), torch.tensor(labels))
    federation = Federation.from_datasets(
        {
            "tensors": tensors,
            "loader": DataLoader(tensors, batch_size=3, shuffle=True),
            "rows": list(zip(inputs, labels, strict=True)),
            "own": Dataset(torch.tensor(inputs), torch.tensor(labels), classes=5),
        },
        validation_fraction=0,
    )
    assert [sorted(held(federation, client)) for client in range(4)] == [list(range(8))] * 4
    assert federation.train.classes == 5


def test_a_clients_own_arrays_are_never_changed() -> None:
    inputs, labels = site(50)
    before = inputs.copy()
    Federation.from_datasets({"one": (inputs, labels)}, validation_fraction=0.5)
    assert np.array_equal(inputs, before)


def test_the_task_and_the_names_of_classes_hold_for_all_clients() -> None:
    inputs, _ = site(4)
    named = Federation.from_datasets(
        {"a": (inputs, ["no"] * 4), "b": (inputs, ["yes"] * 4)}, task="binary", classes=["no", "yes"], validation_fraction=0
    )
    assert (named.train.task, named.train.targets.tolist()) == ("binary", [0] * 4 + [1] * 4)
    ages = Dataset(torch.tensor(inputs), torch.rand(4), task="regression")
    assert Federation.from_datasets({"a": ages, "b": (inputs, [1, 2, 3, 4])}).train.task == "regression"
    texts = {"ids": np.zeros((4, 7), dtype=np.int64), "mask": np.ones((4, 7), dtype=np.int64), "label": [0, 1, 0, 1]}
    assert isinstance(Federation.from_datasets({"a": texts, "b": dict(texts)}).train.inputs, dict)


def test_targets_of_any_shape_are_held_out_by_client_alone() -> None:
    inputs, _ = site(20)
    sources = {name: (inputs, np.zeros((20, 2, 3))) for name in "ab"}
    federation = Federation.from_datasets(sources, task="custom", classes=3, validation_fraction=0.25)
    assert federation.validation_clients is not None
    assert np.bincount(federation.validation_clients).tolist() == [5, 5]


def test_validation_examples_can_be_given_for_all_or_by_client() -> None:
    shared = Federation.from_datasets(sites(), validation=site(9))
    assert shared.validation is not None
    assert (len(shared.validation), shared.validation_clients, len(shared.train)) == (9, None, 175)
    own = Federation.from_datasets(sites(), validation={"jena": site(4), "charite": site(3)})
    assert own.validation_clients is not None
    assert own.validation_clients.tolist() == [1] * 4 + [0] * 3


@pytest.mark.parametrize(
    ("datasets", "options", "sentence"),
    [
        ({}, {}, "datasets: it must be a dictionary"),
        ([site(4)], {}, "datasets: an object of type list is not a dictionary"),
        ({"": site(4)}, {}, "names: '' cannot be a client's name"),
        ({7: site(4)}, {}, "names: '7' cannot be a client's name"),
        ({"a\nb": site(4)}, {}, "cannot be a client's name"),
        ({"a" * 101: site(4)}, {}, "1 to 100 printable characters"),
        ({"a": site(4), "b": site(0)}, {}, "client 'b': there are no records"),
        ({"a": site(4), "b": 3}, {}, "client 'b': int is not a dataset"),
        ({"a": site(4), "b": (np.ones((2, 3)), [0, 1])}, {}, r"client 'b', row 0: the input has shape \(3,\), but \(1,\)"),
        ({"a": site(4), "b": [([1.0], 0), ([np.nan], 0)]}, {}, "client 'b', row 1: the input has a missing value"),
        ({"a": site(4), "b": ([[1.0]], [-1])}, {}, "client 'b', row 0: the target is not a whole number of at least 0"),
        ({"a": site(4), "b": (np.ones((2, 1)), [0, 9])}, {"classes": 2}, "client 'b', row 1: the target is not"),
        ({"a": site(4), "b": ([["x"]], [0])}, {}, "client 'b', row 0: the input is text"),
        ({"a": site(4), "b": ({"ids": [[1]]}, [0])}, {}, "client 'b', row 0 has inputs named ids, but the first row has an"),
        (
            {"a": site(1), "b": site(1)},
            {"validation_fraction": 0.5},
            "each client has a single record: none can be held out",
        ),
        ({"a": site(4)}, {"validation_fraction": 1}, "validation_fraction is 1: .* below 1"),
        ({"a": site(4)}, {"validation_fraction": -0.1}, "validation_fraction is -0.1"),
        ({"a": site(4)}, {"validation": (np.ones((2, 3)), [0, 1])}, r"validation: inputs of shape \(3,\)"),
        ({"a": site(4)}, {"validation": {}}, "the data: no column is named label"),
        ({"a": site(4)}, {"task": "ranking"}, "task: 'ranking' is not one of"),
        (
            {
                "a": Dataset(torch.ones(2, 1), torch.ones(2), task="regression"),
                "b": Dataset(torch.ones(2, 1), torch.tensor([0, 1])),
            },
            {},
            "client 'b' is a dataset for task classification, not regression",
        ),
    ],
)
def test_clients_that_cannot_be_joined_are_refused(datasets: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((DataError, PlanError), match=sentence) as refusal:
        Federation.from_datasets(datasets, **options)
    assert "\n" not in str(refusal.value)


def test_named_clients_are_trained_and_sent_to_other_processes() -> None:
    federation = Federation.from_datasets(sites())
    again = pickle.loads(pickle.dumps(federation))
    assert again.names == federation.names
    assert np.array_equal(again.indices(1), federation.indices(1))
    plan = fedcdp.Plan(method="nonprivate", rounds=2, per_round=3, local_steps=2, batch_size=4)
    assert fedcdp.simulate(nn.Linear(1, 2), federation, plan).rounds == 2


# Lists by name


def test_lists_by_name_keep_the_names_and_the_records_of_plain_lists() -> None:
    lists = {"charite": [0, 3, 5], "jena": np.array([1, 2])}
    named = partition(site(6), indices=lists)
    plain = partition(site(6), indices=list(lists.values()))
    assert (named.names, plain.names) == (("charite", "jena"), None)
    assert [named.name(1), plain.name(1)] == ["jena", "client 1"]
    for client in range(2):
        assert np.array_equal(named.indices(client), plain.indices(client))


@pytest.mark.parametrize(
    ("indices", "sentence"),
    [
        ({}, "indices is empty"),
        ({"jena": []}, r"indices\['jena'\] is empty"),
        ({"jena": [0, 6]}, r"indices\['jena'\] is from 0 to 6"),
        ({3: [0]}, "names: '3' cannot be a client's name"),
    ],
)
def test_lists_by_name_that_cannot_be_held_are_refused(indices: Any, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        partition(site(6), indices=indices)


# Owners


def owned(owners: list[int], names: tuple[str, ...] | None = ("charite", "jena"), **options: Any) -> Splits:
    inputs, labels = site(len(owners))
    train = Dataset(torch.tensor(inputs), torch.tensor(labels), 2)
    return Splits("own", train, train, None, "", owners=np.array(owners), owner_names=names, **options)


def test_records_stay_with_the_owners_that_splits_name() -> None:
    splits = owned([1, 0, 1, 1, 0], validation_owners=np.array([0, 0, 1, 1, 1]))
    federation = partition(splits)
    assert (federation.scheme, federation.names) == ("natural", ("charite", "jena"))
    assert [sorted(federation.indices(client)) for client in range(2)] == [[1, 4], [0, 2, 3]]
    assert federation.validation_clients is splits.validation_owners
    explicit = partition(splits, clients=2, scheme="natural", seed=0)
    assert np.array_equal(explicit.indices(1), federation.indices(1))


def test_owners_without_names_are_numbered() -> None:
    assert partition(owned([2, 0, 1], names=None)).name(2) == "client 2"


def test_another_scheme_ignores_the_owners_and_other_validation_has_none() -> None:
    splits = owned([1, 0, 1, 1], validation_owners=np.array([0, 0, 1, 1]))
    dealt = partition(splits, clients=2, scheme="iid")
    assert (dealt.names, dealt.validation_clients) == (None, None)
    assert partition(splits, validation=splits.train).validation_clients is None


@pytest.mark.parametrize(
    ("owners", "names", "arguments", "sentence"),
    [
        ([0, 0], ("charite", "jena"), {}, "client 'jena' has no training record"),
        ([0, 2], None, {}, "client 1 has no training record"),
        ([0, 2], ("charite", "jena"), {}, "owners is from 0 to 2: clients are numbered 0 to 1"),
        ([-1, 0], None, {}, "owners is from -1 to 0"),
        ([0, 1], ("jena", "jena"), {}, "each client needs a name of its own"),
        ([0, 1], ("charite", "jena"), {"clients": 3}, "the data alone set 2 clients"),
        ([0, 1], ("charite", "jena"), {"records": 1}, "the data alone set 2 clients"),
    ],
)
def test_owners_that_make_no_federation_are_refused(owners: Any, names: Any, arguments: Any, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        partition(owned(owners, names), **arguments)


def test_natural_clients_need_owners_one_for_each_record() -> None:
    with pytest.raises(PlanError, match="'natural': the data do not say which client"):
        partition(site(4), scheme="natural")
    with pytest.raises(DataError, match=r"owners has shape \(1,\) for 4 records"):
        owned([0, 0, 0, 0], validation_owners=np.array([0]))
