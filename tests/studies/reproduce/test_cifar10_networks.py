"""The networks between the paper's and one that is accurate on CIFAR-10."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedcdp.config import consent
from fedcdp.engine.batched import BatchedEngine
from fedcdp.errors import ModelError
from fedcdp.models.networks import build
from fedcdp.studies.reproduce import cifar10_networks as networks

SHAPE = (3, 32, 32)
NAMES = ("standardised", "with_biases", "padded", "twice_as_wide")


def made(name: str) -> torch.nn.Module:
    return build(f"{networks.__name__}:{name}", SHAPE, 10)


@pytest.mark.parametrize(("name", "weights"), [
    ("standardised", 27 * 32 + 288 * 64 + 64 * 36 * 10),
    ("with_biases", 27 * 32 + 288 * 64 + 64 * 36 * 10 + 106),
    ("padded", 27 * 32 + 288 * 64 + 64 * 64 * 10 + 106),
    ("twice_as_wide", 27 * 64 + 576 * 128 + 128 * 64 * 10 + 202),
])  # fmt: skip
def test_each_network_has_one_change_more(name: str, weights: int) -> None:
    network = made(name)
    assert sum(p.numel() for p in network.parameters() if p.requires_grad) == weights
    assert network(torch.rand(2, *SHAPE)).shape == (2, 10)
    BatchedEngine(network, F.cross_entropy)  # raises for a layer without a rule


def test_the_first_layer_standardises_each_colour() -> None:
    scaled = made("standardised")[0](torch.tensor(networks._MEANS)[:, None, None].expand(1, *SHAPE))
    assert float(scaled.abs().max()) < 1e-6
    assert float(made("standardised")[0](torch.ones(1, *SHAPE))[0, 2, 0, 0]) == pytest.approx((1 - 0.4465) / 0.2616)


def test_other_inputs_are_refused() -> None:
    with pytest.raises(ModelError, match="colour images"):
        build(f"{networks.__name__}:padded", (1, 28, 28), 10)


@pytest.mark.parametrize("name", ["os:system", "fedcdp.studies.reproduce.cells:command", "my_networks:padded"])
def test_only_this_module_is_trusted_without_a_word(name: str) -> None:
    consent.require(f"{networks.__name__}:padded", "a table")
    with pytest.raises(ModelError, match="have not named"):
        consent.require(name, "a table")
