"""Products are rounded only where it is allowed, and a clipped gradient never."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedcdp.engine import Batch, BatchedEngine
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
def test_clipped_sums_do_not_depend_on_it_where_products_are_exact(network: str) -> None:
    model = build(network, (1, 12, 12), 4)
    engine = BatchedEngine(model, F.cross_entropy)
    weights = repeat({name: p.detach() for name, p in model.named_parameters()}, 2)
    batch = Batch(torch.randn(2, 3, 1, 12, 12), torch.randint(4, (2, 3)), torch.tensor([[True] * 3, [True, False, True]]))
    sums = []
    for tf32 in (False, True):
        with products(tf32):
            sums.append(engine.clipped_sum(weights, batch, engine.layout.groups("layer"), 0.1))
    for name, value in sums[0].items():
        torch.testing.assert_close(sums[1][name], value, rtol=1e-5, atol=1e-7)


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
