"""Adult (UCI census income): does a person earn more than $50,000 a year?

105 features, in this order: the 6 numeric columns as in the file (age, fnlwgt, education-num, capital-gain,
capital-loss, hours-per-week), then the 8 text columns as in the file, each one-hot over its values in alphabetical
order as listed in `CATEGORIES`. A missing value (`?`) is all zeros. This equals the result of pandas' `get_dummies` with
`?` read as missing; the lists are fixed here, so the order never depends on the rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedcdp.config.experiment import Scaling
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.fetch import Remote, Storage, read_unpacked
from fedcdp.data.input_columns import named_columns
from fedcdp.data.prepare import Indices, random_split, standardise
from fedcdp.errors import DataError

SITE = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
SHA256 = {
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
}
ROWS = {"adult.data": 32_561, "adult.test": 16_281}
VALIDATION_RECORDS = 12_211
MOST_BYTES = 2**23  # twice the larger file
CLASSES = 2

NUMERIC = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_VALUES = {
    "workclass": "Federal-gov Local-gov Never-worked Private Self-emp-inc Self-emp-not-inc State-gov Without-pay",
    "education": "10th 11th 12th 1st-4th 5th-6th 7th-8th 9th Assoc-acdm Assoc-voc Bachelors Doctorate HS-grad Masters "
    "Preschool Prof-school Some-college",
    "marital-status": "Divorced Married-AF-spouse Married-civ-spouse Married-spouse-absent Never-married Separated Widowed",
    "occupation": "Adm-clerical Armed-Forces Craft-repair Exec-managerial Farming-fishing Handlers-cleaners "
    "Machine-op-inspct Other-service Priv-house-serv Prof-specialty Protective-serv Sales Tech-support "
    "Transport-moving",
    "relationship": "Husband Not-in-family Other-relative Own-child Unmarried Wife",
    "race": "Amer-Indian-Eskimo Asian-Pac-Islander Black Other White",
    "sex": "Female Male",
    "native-country": "Cambodia Canada China Columbia Cuba Dominican-Republic Ecuador El-Salvador England France "
    "Germany Greece Guatemala Haiti Holand-Netherlands Honduras Hong Hungary India Iran Ireland Italy Jamaica Japan "
    "Laos Mexico Nicaragua Outlying-US(Guam-USVI-etc) Peru Philippines Poland Portugal Puerto-Rico Scotland South "
    "Taiwan Thailand Trinadad&Tobago United-States Vietnam Yugoslavia",
}
CATEGORIES = {column: values.split() for column, values in _VALUES.items()}
FEATURES = [*NUMERIC, *(f"{column}={value}" for column, values in CATEGORIES.items() for value in values)]
COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
)
INCOMES = ("<=50K", ">50K")


def load_adult(storage: Storage, split_seed: int, scaling: Scaling = "training") -> Splits:
    """36,631 training and 12,211 validation records from both files together; 1 is an income over 50K; no test set."""
    parts = []
    for name, rows in ROWS.items():
        remote = Remote(name, (SITE + name,), "sha256", SHA256[name])
        path = storage.obtain("adult", name, f"{name}.gz", remote=remote)
        features, labels = parse_adult(read_unpacked(path, MOST_BYTES), str(path))
        if len(labels) != rows:
            raise DataError(f"{path} holds {len(labels)} records: {name} has {rows}")
        parts.append((features, labels))
    features = np.concatenate([part[0] for part in parts])
    labels = np.concatenate([part[1] for part in parts])
    train, validation = random_split(len(labels), VALIDATION_RECORDS, split_seed)
    scaled = _by_constants if scaling == "public" else _standardised
    return scaled(features, labels, train, validation)


def parse_adult(content: bytes, source: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Raw features [N, 105] and labels [N] of one file; a `DataError` names `source` and the line of a defect."""
    try:
        lines = content.decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{source} is not a text file of the Adult dataset ({error})") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line and not line.startswith("|")]
    features = np.zeros((len(numbered), len(FEATURES)), dtype=np.float32)
    labels = np.empty(len(numbered), dtype=np.int64)
    position = {feature: index for index, feature in enumerate(FEATURES)}
    for row, (number, line) in enumerate(numbered):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(COLUMNS):
            raise DataError(f"{source}, line {number}: {len(cells)} values instead of {len(COLUMNS)}")
        for column, cell in zip(COLUMNS[:-1], cells, strict=False):
            if column in NUMERIC and cell.isdecimal() and len(cell) < 10:
                features[row, position[column]] = int(cell)
            elif f"{column}={cell}" in position:
                features[row, position[f"{column}={cell}"]] = 1.0
            elif column in NUMERIC or cell != "?":
                raise DataError(f"{source}, line {number}: {cell[:100]!r} is not a value of {column}")
        income = cells[-1].removesuffix(".")
        if income not in INCOMES:
            raise DataError(f"{source}, line {number}: {cells[-1][:100]!r} is not a value of income")
        labels[row] = INCOMES.index(income)
    return features, labels


def _standardised(features: NDArray[np.float32], labels: NDArray[np.int64], train: Indices, validation: Indices) -> Splits:
    numeric = len(NUMERIC)
    train_inputs, validation_inputs = features[train], features[validation]
    train_inputs[:, :numeric], validation_inputs[:, :numeric] = standardise(
        train_inputs[:, :numeric], validation_inputs[:, :numeric]
    )
    normalisation = (
        "the 6 numeric columns standardised by the mean and deviation of the pooled training split, "
        "statistics that are not covered by any ε; the 99 one-hot columns left at 0 or 1"
    )
    return _splits(train_inputs, labels[train], validation_inputs, labels[validation], normalisation)


def _by_constants(features: NDArray[np.float32], labels: NDArray[np.int64], train: Indices, validation: Indices) -> Splits:
    """Scale by round numbers that suit the meaning of each column: a lifespan, a working week, orders of magnitude."""
    age, weight, education, gain, loss, hours = features[:, : len(NUMERIC)].T
    scaled = features.copy()
    scaled[:, : len(NUMERIC)] = np.stack(
        [
            (age - 40) / 20,
            (weight - 200_000) / 200_000,
            (education - 10) / 4,
            np.log1p(gain) / np.log(100_000) * 2,
            np.log1p(loss) / np.log(5_000) * 2,
            (hours - 40) / 20,
        ],
        axis=1,
    )
    normalisation = "the 6 numeric columns scaled by fixed round numbers; the 99 one-hot columns left at 0 or 1"
    return _splits(scaled[train], labels[train], scaled[validation], labels[validation], normalisation)


def _splits(
    train: NDArray[np.float32],
    train_labels: NDArray[np.int64],
    validation: NDArray[np.float32],
    validation_labels: NDArray[np.int64],
    normalisation: str,
) -> Splits:
    columns = named_columns(NUMERIC, CATEGORIES, may_be_empty=True)
    return Splits(
        name="adult",
        train=Dataset(torch.from_numpy(train), torch.from_numpy(train_labels), CLASSES, columns=columns),
        validation=Dataset(torch.from_numpy(validation), torch.from_numpy(validation_labels), CLASSES, columns=columns),
        test=None,
        normalisation=normalisation,
    )
