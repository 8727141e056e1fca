"""Products are rounded only where it is allowed, and a clipped gradient never."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcdp.engine import Batch, BatchedEngine, FunctionalEngine
from fedcdp.engine.runtime import products
from fedcdp.files.tree import repeat
from fedcdp.models.networks import build


@pytest.mark.parametrize("tf32", [True, False])
def test_the_setting_holds_inside_and_is_put_back_after(tf32: bool) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with products(tf32):
        assert (torch.get_float32_matmul_precision() == "high") == tf32
        assert torch.backends.cudnn.allow_tf32 == tf32
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@pytest.mark.parametrize("network", ["cnn", "mlp", "cpl"])
def test_clipped_sums_are_those_of_the_reference_either_way(network: str, monkeypatch) -> None:
    model = build(network, (1, 12, 12), 4)
    engine, reference = BatchedEngine(model, F.cross_entropy), FunctionalEngine(model, F.cross_entropy)
    weights = repeat({name: p.detach() for name, p in model.named_parameters()}, 2)
    batch = Batch(torch.randn(2, 3, 1, 12, 12), torch.randint(4, (2, 3)), torch.tensor([[True] * 3, [True, False, True]]))
    groups, multiplied = engine.layout.groups("layer"), Counter[bool]()
    expected = reference.clipped_sum(weights, batch, groups, 0.1)
    exact = torch.Tensor.__matmul__
    for tf32 in (False, True):

        def counted(left: Tensor, right: Tensor, tf32: bool = tf32) -> Tensor:
            multiplied[tf32] += 1
            return exact(left, right)

        monkeypatch.setattr(torch.Tensor, "__matmul__", counted)
        with products(tf32):
            found = engine.clipped_sum(weights, batch, groups, 0.1)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert multiplied[True] < multiplied[False]  # the sums come by another way


def test_no_product_of_matrices_touches_a_clipped_gradient_where_products_may_be_rounded(monkeypatch) -> None:
    """One that rounds would make it longer than the bound: here every one doubles its result."""
    model = build("mlp", (1, 12, 12), 4)
    engine = BatchedEngine(model, F.cross_entropy)
    weights = repeat({name: p.detach() for name, p in model.named_parameters()}, 1)
    batch = Batch(5 * torch.randn(1, 1, 1, 12, 12), torch.tensor([[1]]), torch.ones(1, 1, dtype=torch.bool))
    exact = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda left, right: 2 * exact(left, right))
    with products(tf32=True):
        clipped = engine.clipped_sum(weights, batch, engine.layout.groups("layer"), 0.1)
    for group in engine.layout.groups("layer"):
        norm = torch.cat([clipped[name].flatten() for name in group]).norm()
        assert norm <= 0.1 * (1 + 1e-6)
