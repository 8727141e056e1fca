"""A small made-up table with numbers and categories, for attacks on rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.data.input_columns import InputColumns, named_columns

COLUMNS: InputColumns = named_columns(
    ["age", "hours"], {name: [f"{name}{n}" for n in range(6)] for name in ("job", "town", "school", "home")},
    may_be_empty=True,
)  # fmt: skip


def rows(count: int, seed: int = 0) -> Tensor:
    """Rows with two numbers and four categories, some of them missing."""
    draws = np.random.default_rng(seed)
    shares = np.array([0.3, 0.25, 0.15, 0.1, 0.1, 0.05, 0.05])
    blocks = [np.eye(7)[draws.choice(7, size=count, p=shares)][:, :6] for _ in range(4)]
    return torch.from_numpy(np.concatenate([draws.normal(size=(count, 2)), *blocks], axis=1)).float()


def table(count: int = 400, *, named: bool = True) -> fedcdp.Federation:
    """A federation of ten clients, with public rows."""
    inputs = rows(count + 300)
    labels = (inputs[:, 0] + inputs[:, 2] > 0.3).long()
    data = fedcdp.Dataset(inputs, labels, 2, columns=COLUMNS if named else None)
    own, public = data.take(torch.arange(count)), data.take(torch.arange(count, count + 300))
    return fedcdp.partition(own, clients=10, scheme="iid", validation=public)


def network(units: int = 32) -> nn.Module:
    """A small network with a dense first layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(26, units), nn.ReLU(), nn.Linear(units, 16), nn.ReLU(), nn.Linear(16, 2))
