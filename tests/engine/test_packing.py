"""Packed batches give the sums of unpacked ones, whatever the clients drew."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedcdp.engine import Batch, BatchedEngine
from fedcdp.engine.packing import PackedEngine, rows_needed
from fedcdp.files.tree import repeat
from fedcdp.models.networks import build

SLOTS = 7


def filled(counts: list[int]) -> Tensor:
    return torch.arange(SLOTS) < torch.tensor(counts)[:, None]


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, SLOTS), min_size=1, max_size=6),
    width=st.integers(1, SLOTS),
    spare=st.integers(0, 4),
)
def test_packed_sums_are_the_sums(counts: list[int], width: int, spare: int) -> None:
    model = build("mlp", (5,), 3)
    engine = BatchedEngine(model, F.cross_entropy)
    generator = torch.Generator().manual_seed(1)
    weights = repeat({name: p.detach() for name, p in model.named_parameters()}, len(counts))
    weights = {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}
    present = filled(counts)
    inputs = torch.randn(*present.shape, 5, generator=generator)
    inputs[~present] = torch.nan  # nothing is read there
    batch = Batch(inputs, torch.randint(3, present.shape, generator=generator), present)
    packed = PackedEngine(engine, max(1, int(rows_needed(present, width)) + spare), width)
    groups = engine.layout.groups("layer")
    pairs = [
        (packed.clipped_sum(weights, batch, groups, 0.3), engine.clipped_sum(weights, batch, groups, 0.3)),
        (packed.summed_gradients(weights, batch), engine.summed_gradients(weights, batch)),
    ]
    for ours, plain in pairs:
        assert list(ours) == list(plain)
        for name in plain:
            torch.testing.assert_close(ours[name], plain[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("width", "rows"), [(1, 10), (2, 6), (3, 5), (7, 3)])
def test_rows_are_counted_client_by_client(width: int, rows: int) -> None:
    assert int(rows_needed(filled([5, 0, 4, 1]), width)) == rows
