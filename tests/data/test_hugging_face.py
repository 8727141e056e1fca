"""Hugging Face datasets from local files, and the schemes of flwr-datasets: with these packages (`make integrations`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedcdp
from fedcdp.data.sources import as_dataset
from fedcdp.data.unequal import class_cuts, growing_sizes
from fedcdp.errors import DataError, PlanError

datasets = pytest.importorskip("datasets")
partitioners = pytest.importorskip("flwr_datasets.partitioner")

TABLE = {"age": [30, 41, 52, 63] * 500, "weight": [50.5, 60.5, 70.5, 80.5] * 500, "label": [0, 1, 1, 0] * 500}


@pytest.fixture(params=["csv", "parquet", "arrow"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The same table, loaded from a local file of each kind."""
    made = datasets.Dataset.from_dict(TABLE)
    if request.param == "arrow":
        made.save_to_disk(tmp_path / "table")
        return datasets.load_from_disk(tmp_path / "table")
    path = str(tmp_path / f"table.{request.param}")
    made.to_csv(path) if request.param == "csv" else made.to_parquet(path)
    return datasets.load_dataset(request.param, data_files=path, split="train", cache_dir=str(tmp_path / "cache"))


def test_a_table_from_a_local_file_is_read(table: Any) -> None:
    data = as_dataset(table)
    assert torch.equal(data.tensor, torch.tensor([TABLE["age"], TABLE["weight"]], dtype=torch.float32).T)
    assert data.targets.tolist() == TABLE["label"]
    assert fedcdp.partition(table, 10, "iid").largest == 200


def test_a_client_for_each_dataset_is_trained(table: Any) -> None:
    federation = fedcdp.Federation.from_datasets({"a": table.select(range(1200)), "b": table.select(range(1200, 2000))})
    plan = fedcdp.Plan(method="nonprivate", rounds=1, per_round=2, local_steps=2, batch_size=8)
    assert fedcdp.simulate(nn.Linear(2, 2), federation, plan).rounds == 1
    assert federation.sizes([0, 1]).tolist() == [960, 640]


def test_token_ids_masks_and_named_classes_are_read() -> None:
    rows = {"input_ids": [[1, 2, 3], [4, 5, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]], "labels": [0, 1]}
    features = datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "attention_mask": datasets.Sequence(datasets.Value("int8")),
            "labels": datasets.ClassLabel(names=["no", "yes"]),
        }
    )
    data = as_dataset(datasets.Dataset.from_dict(rows, features=features))
    assert isinstance(data.inputs, dict)
    assert {name: value.tolist() for name, value in data.inputs.items()} == {k: v for k, v in rows.items() if k != "labels"}
    assert {value.dtype for value in data.inputs.values()} == {torch.int64}
    words = datasets.Dataset.from_dict({"x": [[1.0], [2.0]], "label": ["no", "yes"]})
    assert as_dataset(words, classes=["no", "yes"]).targets.tolist() == [0, 1]


def test_a_transform_makes_the_rows() -> None:
    texts = datasets.Dataset.from_dict({"text": ["ab", "cd"], "label": [0, 1]})
    texts.set_transform(lambda rows: {"ids": [[ord(c) for c in text] for text in rows["text"]], "label": rows["label"]})
    assert as_dataset(texts).tensor.tolist() == [[97, 98], [99, 100]]


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"ids": [[1], [2, 3]], "label": [0, 1]}, "'ids' differs in shape at row 1: pad texts"),
        ({"text": ["Mustermann", "b"], "label": [0, 1]}, "row 0: the input is text"),
        ({"x": [1.0, None], "label": [0, 1]}, "row 1: the input has a missing value"),
        ({"x": [1.0, 2.0], "label": [0, None]}, "row 1: the target has a missing value"),
        ({"x": [], "label": []}, "there are no records"),
    ],
)
def test_columns_that_cannot_be_read_are_refused(columns: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as refusal:
        as_dataset(datasets.Dataset.from_dict(columns))
    assert "Mustermann" not in str(refusal.value)


def test_splits_and_streams_are_refused() -> None:
    table = datasets.Dataset.from_dict(TABLE)
    with pytest.raises(DataError, match="it has the splits train, test; choose one"):
        as_dataset(datasets.DatasetDict(train=table, test=table))
    with pytest.raises(DataError, match="IterableDataset has no length; load it without streaming"):
        as_dataset(table.to_iterable_dataset())


@pytest.mark.parametrize("total", [426, 36_631, 50_000])
@pytest.mark.parametrize("clients", [1, 2, 5, 8, 12])
@pytest.mark.parametrize("scheme", ["linear", "square", "exponential"])
def test_sizes_are_those_of_flwr_datasets(scheme: str, clients: int, total: int) -> None:
    theirs = getattr(partitioners, f"{scheme.capitalize()}Partitioner")(clients)
    theirs.dataset = datasets.Dataset.from_dict({"label": [0] * total})
    try:
        expected = [len(theirs.load_partition(client)) for client in range(clients)]
    except ValueError:
        with pytest.raises(PlanError, match="use fewer clients"):
            fedcdp.partition((np.zeros((total, 1)), np.zeros(total)), clients, scheme)
        return
    assert growing_sizes(scheme, total, clients).tolist() == expected


@pytest.mark.parametrize(("clients", "alpha"), [(5, 0.5), (20, 1.0), (10, 100.0)])
def test_classes_are_divided_as_flwr_datasets_divides_them(clients: int, alpha: float) -> None:
    labels = np.random.default_rng(7).integers(0, 10, 5000)
    theirs = partitioners.DirichletPartitioner(clients, partition_by="label", alpha=alpha, min_partition_size=0, seed=42)
    theirs.dataset = datasets.Dataset.from_dict({"label": labels})
    parts = [np.bincount(theirs.load_partition(client)["label"][:], minlength=10) for client in range(clients)]
    ours = class_cuts(np.bincount(labels), clients, alpha, np.random.default_rng(42))
    assert np.array_equal(ours.T, np.array(parts))
