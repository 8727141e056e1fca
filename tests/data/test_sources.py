"""Every kind of source that becomes a dataset, and the sentence for each that cannot be read."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fedcdp.data.dataset import Dataset
from fedcdp.data.sources import as_dataset
from fedcdp.errors import DataError, PlanError

X = np.random.default_rng(0).normal(size=(6, 3))
Y = np.array([0, 1, 2, 0, 1, 2])
IDS = np.arange(24).reshape(6, 4)
PRIVATE = "Mustermann"


class Rows(torch.utils.data.Dataset):
    """A map-style dataset of one's own."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]


class Unsized(torch.utils.data.Dataset):
    def __getitem__(self, number: int) -> Any:
        return X[number], Y[number]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


class HuggingFace:
    """What fedcdp uses of `datasets.Dataset`; the real one is tested in tests/integration."""

    def __init__(self, columns: dict[str, Any], transform: Any = None) -> None:
        self.columns, self.transform, self.asked = columns, transform, []  # type: ignore[var-annotated]

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    @property
    def format(self) -> dict[str, Any]:
        return {"type": "custom" if self.transform else None}

    def with_format(self, kind: str, columns: list[str]) -> HuggingFace:
        assert kind == "numpy"
        return HuggingFace({name: self.columns[name] for name in columns})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows: Any) -> dict[str, Any]:
        found = {name: values[rows] for name, values in self.columns.items()}
        if isinstance(rows, slice):
            for name, values in found.items():
                if isinstance(values, list):  # of different lengths, which the real one gives as objects
                    found[name] = np.empty(len(values), dtype=object)
                    found[name][:] = values
        return self.transform(found) if self.transform else found


def pairs() -> list[tuple[Any, Any]]:
    return list(zip(X.tolist(), Y.tolist(), strict=True))


FRAME = pd.DataFrame(X, columns=["age", "weight", "height"]).assign(label=Y)
SOURCES: dict[str, Any] = {
    "pair of arrays": (X, Y),
    "pair of tensors": (torch.tensor(X), torch.tensor(Y)),
    "pair of lists": (X.tolist(), Y.tolist()),
    "list of two arrays": [X, Y],
    "fedcdp": Dataset(torch.tensor(X, dtype=torch.float32), torch.tensor(Y)),
    "tensor dataset": TensorDataset(torch.tensor(X), torch.tensor(Y)),
    "rows": pairs(),
    "rows of arrays": list(zip(X, Y, strict=True)),
    "dataset of one's own": Rows(pairs()),
    "subset": Subset(Rows([*pairs(), (X[0], 9)]), range(6)),
    "concatenated": ConcatDataset([Rows(pairs()[:2]), Rows(pairs()[2:])]),
    "loader": DataLoader(Rows(pairs()), batch_size=4),
    "shuffling loader": DataLoader(
        TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=4, shuffle=True, drop_last=True
    ),
    "columns": {"x": X, "label": Y},
    "frame": FRAME,
    "dictionaries": [{"x": x, "y": y} for x, y in pairs()],
    "dictionaries of numbers": FRAME.to_dict("records"),
    "hugging face": HuggingFace({"x": X, "target": Y}),
    "hugging face table": HuggingFace({**{name: FRAME[name].to_numpy() for name in FRAME}}),
    "hugging face transform": HuggingFace({"raw": X, "label": Y}, lambda row: {"x": row["raw"], "label": row["label"]}),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_dataset(kind: str) -> None:
    data = as_dataset(SOURCES[kind])
    assert torch.equal(data.tensor, torch.tensor(X, dtype=torch.float32))
    assert torch.equal(data.targets, torch.tensor(Y))
    assert (data.task, data.classes) == ("classification", 3)


TOKENS: dict[str, Any] = {
    "pair": ({"ids": IDS, "mask": IDS > 3}, Y),
    "columns": {"ids": IDS, "mask": IDS > 3, "label": Y},
    "rows": [({"ids": ids, "mask": ids > 3}, y) for ids, y in zip(IDS, Y, strict=True)],
    "dictionaries": [{"ids": ids.tolist(), "mask": ids > 3, "label": y} for ids, y in zip(IDS, Y, strict=True)],
    "hugging face": HuggingFace({"ids": IDS, "mask": IDS > 3, "label": Y}),
}


@pytest.mark.parametrize("kind", TOKENS)
def test_token_ids_stay_integers_and_inputs_keep_names(kind: str) -> None:
    data = as_dataset(TOKENS[kind])
    assert isinstance(data.inputs, dict)
    assert torch.equal(data.inputs["ids"], torch.tensor(IDS))
    assert torch.equal(data.inputs["mask"], torch.tensor(IDS > 3))


def test_columns_are_chosen_by_name() -> None:
    columns = {"text": np.array([PRIVATE] * 6), "ids": IDS, "mask": IDS, "length": Y, "kind": Y, "label": 1 - Y}
    assert torch.equal(as_dataset(columns, inputs="ids", label="kind").tensor, torch.tensor(IDS))
    assert list(as_dataset(columns, inputs=["ids"], label="kind").inputs) == ["ids"]
    assert list(as_dataset(columns, inputs=["mask", "ids"], label="kind").inputs) == ["mask", "ids"]
    assert as_dataset(columns, inputs="length", label="kind").shape == (1,)
    both = as_dataset(columns, inputs="ids", label=["length", "kind"], task="regression")
    assert both.targets.shape == (6, 2)
    named = TensorDataset(torch.tensor(IDS), torch.tensor(IDS), torch.tensor(Y))
    assert list(as_dataset(named, inputs=["ids", "mask"]).inputs) == ["ids", "mask"]


def test_a_table_of_whole_numbers_is_floats_and_tokens_are_not() -> None:
    assert as_dataset(pd.DataFrame({"age": Y, "beds": Y, "y": Y})).tensor.dtype == torch.float32
    assert as_dataset((IDS, Y)).tensor.dtype == torch.int64
    mixed = as_dataset([([1, 2], 0), ([1.5, 2], 1)])
    assert mixed.tensor.tolist() == [[1.0, 2.0], [1.5, 2.0]]
    assert as_dataset((torch.tensor(X).bfloat16(), Y)).tensor.dtype == torch.float32


def test_images_of_bytes_are_scaled_with_channels_first() -> None:
    grey = np.random.default_rng(1).integers(0, 256, (6, 8, 9), dtype=np.uint8)
    colour = np.random.default_rng(2).integers(0, 256, (6, 8, 9, 3), dtype=np.uint8)
    assert as_dataset((grey, Y)).shape == (1, 8, 9)
    rows = as_dataset(list(zip(colour, Y, strict=True)))
    assert rows.shape == (3, 8, 9)
    assert np.array_equal(rows.tensor.numpy(), colour.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255))
    assert as_dataset((colour.transpose(0, 3, 1, 2), Y)).shape == (3, 8, 9)


@pytest.mark.parametrize(
    ("task", "targets", "dtype", "outputs"),
    [
        ("binary", [0, 1, 1, 0, 1, 0], torch.int64, 1),
        ("binary", [True, False, True, False, True, False], torch.int64, 1),
        ("classification", [0.0, 1.0, 2.0, 3.0, 0.0, 0.0], torch.int64, 4),
        ("classification", [[0], [1], [2], [0], [0], [0]], torch.int64, 3),
        ("multilabel", [[1, 0]] * 6, torch.float32, 2),
        ("regression", [1, 2, 3, 4, 5, 6], torch.float32, 1),
        ("custom", [[[1, 2], [3, 4]]] * 6, torch.int64, None),
        ("custom", [1.5, float("nan"), 1, 1, 1, 1], torch.float32, None),
    ],
)
@pytest.mark.parametrize("rows", [False, True])
def test_targets_get_the_type_of_their_task(
    task: Any, targets: list[Any], dtype: torch.dtype, outputs: Any, rows: bool
) -> None:
    source: Any = list(zip(X, targets, strict=True)) if rows else (X, targets)
    data = as_dataset(source, task=task)
    assert (data.targets.dtype, data.outputs, data.task) == (dtype, outputs, task)


def test_labels_that_are_text_are_numbered_by_the_named_classes() -> None:
    words = ["no", "yes", "yes", "no", "no", "no"]
    for source in (
        (X, words),
        list(zip(X, words, strict=True)),
        HuggingFace({"x": X, "label": np.array(words, dtype=object)}),
    ):
        data = as_dataset(source, classes=["no", "yes", "unknown"])
        assert (data.targets.tolist(), data.classes) == ([0, 1, 1, 0, 0, 0], 3)
    assert as_dataset((X, words), task="binary", classes=["no", "yes"]).targets.sum() == 2


def test_a_loader_with_a_collate_function_pads_all_rows_alike() -> None:
    def pad(rows: list[Any]) -> dict[str, torch.Tensor]:
        texts = [torch.tensor(ids) for ids, _ in rows]
        return {
            "input_ids": torch.nn.utils.rnn.pad_sequence(texts, batch_first=True),
            "labels": torch.tensor([label for _, label in rows]),
        }

    rows = Rows([([5, 6, 7], 0), ([8], 1), ([9, 9], 1)])
    data = as_dataset(DataLoader(rows, batch_size=2, collate_fn=pad))
    assert data.tensor.tolist() == [[5, 6, 7], [8, 0, 0], [9, 9, 0]]
    pair = as_dataset(DataLoader(rows, collate_fn=lambda rows: (pad(rows)["input_ids"], pad(rows)["labels"])))
    assert torch.equal(pair.tensor, data.tensor)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no rows": ([], {}, "the data: there are no records"),
    "a number": (7, {}, "int is not a dataset with numbered rows"),
    "text": (PRIVATE, {}, "str is not a dataset"),
    "inputs alone": (X, {}, "ndarray is not a dataset .* nor a pair"),
    "a generator": ((x for x in pairs()), {}, "generator is not a dataset"),
    "a stream": (Stream(), {}, "Stream is not a dataset with numbered rows"),
    "no length": (Unsized(), {}, "Unsized has no length"),
    "no targets": ([1.0, 2.0], {}, "row 0 is neither a pair"),
    "three parts": ([(X[0], 0, PRIVATE)], {}, "row 0 is neither a pair"),
    "a row that fails": (Rows([*pairs(), None]), {}, "row 6 is neither a pair"),
    "an error in a row": (Subset(Rows(pairs()), [0, 9]), {}, r"row 1 cannot be read \(IndexError\)"),
    "uneven texts": ([([1, 2], 0), ([1, 2, 3], 1)], {}, r"row 1: the input has shape \(3,\), but \(2,\) .* pad texts"),
    "uneven arrays": (([[1], [2], [3, 4]], [0, 1, 1]), {}, "the inputs array differs in shape at row 2: pad texts"),
    "uneven within a row": ([([[1], [2, 3]], 0)], {}, "row 0: the input is uneven"),
    "uneven column": (HuggingFace({"ids": [[1], [2, 3]], "y": np.array([0, 1])}), {}, "'ids' differs in shape at row 1"),
    "text as input": ([(PRIVATE, 0)], {}, "row 0: the input is text; turn it into numbers"),
    "objects": ([(X[0], 0), (object(), 0)], {}, "row 1: the input is not numbers only"),
    "a column of objects": (FRAME.assign(age=[1, 2, None, 4, 5, 6]).astype(object), {}, "row 2: the input has a missing"),
    "nullable numbers": (
        FRAME.assign(age=[1, 2, None, 4, 5, 6]).astype({"age": "Int64"}),
        {},
        "not a number at row 2|row 2: the",
    ),
    "a mixed column": (FRAME.assign(age=[1, 2, PRIVATE, 4, 5, 6]), {}, "'age' has something that is not a number at row 2"),
    "complex": (([1j], [0]), {}, "the inputs array is complex128"),
    "a missing value": ([(X[0], 0), ([1.0, np.nan, 1.0], 0)], {}, "row 1: the input has a missing value"),
    "beyond float32": ((np.array([[1.0], [1e300]]), [0, 1]), {}, "row 1: the input has a missing value, an infinity or"),
    "a missing cell": (FRAME.assign(age=[1, 2, None, 4, 5, 6]), {}, "row 2: the input has a missing value"),
    "a column of text": (FRAME.assign(name=PRIVATE), {}, "row 0: the input 'name' is text"),
    "a missing label": (FRAME.assign(label=[0, 1, None, 0, 1, 0]), {}, "row 2: the target has a missing value"),
    "no label column": ([{"x": 1.0, "z": 0}], {}, "row 0: no column is named label, .* name it with label="),
    "another label": ({"x": X, "y": Y}, {"label": "z"}, "there is no column 'z'; the columns are x, y"),
    "another input": ({"x": X, "y": Y}, {"inputs": ["a"]}, "there is no column 'a'"),
    "a label alone": ({"y": Y}, {}, "no column besides the label"),
    "unequal columns": ({"x": X, "y": Y[:3]}, {}, "the columns x, y differ in their number of rows"),
    "unequal pair": ((X, Y[:3]), {}, "the data: 6 inputs but 3 targets"),
    "a single target": ((X, 1), {}, "the targets array is a single value"),
    "half a class": ((X, [0, 1, 0.5, 0, 0, 0]), {}, "row 2: the target is not a whole number of at least 0"),
    "a class too many": ((X, Y), {"classes": 2}, "row 2: the target is not a whole number from 0 to 1"),
    "not binary": ((X, Y), {"task": "binary"}, "row 2: the target is not a whole number from 0 to 1, which task binary"),
    "not zeros and ones": ((X, [[0, 1], [0, 2]] * 3), {"task": "multilabel"}, "row 1: the target is not a row of zeros"),
    "a row as class": ((X, [[0, 1]] * 6), {}, r"labels are int64 of shape \(6, 2\): each example needs one whole number"),
    "words": ((X, [PRIVATE] * 6), {}, "row 0: the label is text; name the classes"),
    "an unknown word": ((X, [*"ababa", PRIVATE]), {"classes": ["a", "b"]}, "row 5: the label is none of the 2 classes"),
    "another task": (SOURCES["fedcdp"], {"task": "binary"}, "a dataset for task classification, not binary"),
    "splits": (HuggingFace({}), {}, "it has the splits train, test"),
    "other names": (
        [({"a": [1]}, 0), ({"b": [1]}, 0)],
        {},
        "row 1 has inputs named b, but the first row has inputs named a",
    ),
    "one without": ([({"a": [1]}, 0), ([1], 0)], {}, "row 1 has an input without a name"),
    "three tensors": (TensorDataset(*[torch.tensor(Y)] * 3), {}, "a TensorDataset of 3 tensors; .* inputs= must name"),
    "one tensor": (TensorDataset(torch.tensor(X)), {}, "a TensorDataset of 1 tensors"),
    "a stream's loader": (DataLoader(Stream()), {}, "a DataLoader of an IterableDataset"),
    "a subset's loader": (DataLoader(Rows(pairs()), sampler=SubsetRandomSampler([0])), {}, "SubsetRandomSampler selects or"),
    "a weighted loader": (
        DataLoader(Rows(pairs()), sampler=WeightedRandomSampler([1] * 6, 6)),
        {},
        "use a torch.utils.data.Su",
    ),
    "own batches": (DataLoader(Rows(pairs()), batch_sampler=[[0], [1]]), {}, "the DataLoader's list selects"),
    "own collate": (
        DataLoader(Rows(pairs()), collate_fn=lambda rows: len(rows) / 0),
        {},
        r"collate_fn fails .* \(ZeroDivisionError\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_in_a_sentence(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, options, sentence = REFUSED[case]
    if case == "splits":
        monkeypatch.setattr(HuggingFace, "column_names", {"train": [], "test": []})
    with pytest.raises(DataError, match=sentence) as refusal:
        as_dataset(source, **options)
    assert PRIVATE not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(PlanError, match="task: 'ranking' is not one of"):
        as_dataset((X, Y), task="ranking")  # type: ignore[arg-type]


def test_arrays_of_the_right_type_are_not_copied_and_others_once() -> None:
    inputs, targets = np.zeros((200_000, 10), dtype=np.float32), np.zeros(200_000, dtype=np.int64)
    tracemalloc.start()
    assert as_dataset((inputs, targets)).tensor.data_ptr() == inputs.ctypes.data
    assert tracemalloc.get_traced_memory()[1] < 4e6
    as_dataset((inputs.astype(np.float64), targets))  # 16 MB here and 8 MB in the dataset
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6


def test_arrays_that_cannot_be_written_are_read() -> None:
    locked = X.astype(np.float32)
    locked.flags.writeable = False
    data = as_dataset((locked, Y))
    data.tensor[0] = 7
    assert locked[0, 0] != 7


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3) | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.sampled_from("xy"), inner),
    max_leaves=8,
)


@given(junk, st.sampled_from(["classification", "binary", "multilabel", "regression", "custom"]))
@settings(deadline=None, max_examples=300)
def test_junk_is_read_or_refused_but_never_crashes(source: Any, task: Any) -> None:
    try:
        data = as_dataset(source, task=task)
    except (DataError, PlanError):
        return
    assert len(data) > 0
