"""Victims to attack: real digits, and the network that the paper's authors attack."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedcdp.data.dataset import Dataset
from fedcdp.data.load import load
from fedcdp.models.networks import build


@pytest.fixture(scope="session")
def digits() -> Dataset:
    """1,000 digits of MNIST, as many of each class."""
    return load("mnist5k").validation


@pytest.fixture(scope="session")
def cpl() -> nn.Module:
    """The network that the paper attacks, as initialised."""
    return build("cpl", (1, 28, 28), 10)


@pytest.fixture
def few_digits(digits: Dataset) -> Dataset:
    """Twelve digits of different classes."""
    generator = torch.Generator().manual_seed(1)
    return digits.take(torch.randperm(len(digits), generator=generator)[:12])
