"""Products are rounded only where it is allowed, and a clipped gradient never."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.engine import Batch, BatchedEngine, FunctionalEngine
from fedcdp.engine.recorded import RecordedEngine
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


# A network that computes in bfloat16 itself ----------------------------------------------------------------------------


class SharedScale(torch.autograd.Function):
    """Rounds by one scale for a whole batch, as recipes for float8 do: an example moves the rounding of the others."""

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        step = values.abs().mean() / 40
        return (values / step).round() * step

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # noqa: ARG004
        return slope

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], values: Tensor) -> tuple[Tensor, int]:  # noqa: ARG004
        return SharedScale.apply(values), in_dims[0]


class Coarse(nn.Module):
    """Attention and dense layers whose products are rounded, in one of two ways."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        self.words, self.norm = nn.Embedding(30, 32), nn.LayerNorm(32)
        self.queries, self.wide, self.head = nn.Linear(32, 96), nn.Linear(32, 64), nn.Linear(64, 3)

    def rounded(self, values: Tensor) -> Tensor:
        return SharedScale.apply(values) if self.shared else values.to(torch.bfloat16)

    def product(self, layer: nn.Linear, values: Tensor) -> Tensor:
        return F.linear(self.rounded(values), layer.weight.to(self.rounded(values).dtype)).float() + layer.bias

    def forward(self, numbers: Tensor) -> Tensor:
        tokens = self.words(numbers)
        queries, keys, values = (self.rounded(each) for each in self.product(self.queries, self.norm(tokens)).chunk(3, -1))
        tokens = tokens + ((queries @ keys.mT).softmax(-1) @ values).float()
        return self.head(F.gelu(self.product(self.wide, tokens)).mean(1))


def moves_others(kind: type, shared: bool) -> bool:
    """Whether another example, or its absence, moves a bit of what the others add to the sum."""
    torch.manual_seed(1)
    model = Coarse(shared)
    numbers, present = torch.randint(30, (2, 6, 7)), torch.ones(2, 6, dtype=torch.bool)
    others = present.clone()
    others[0, 2] = False
    engine = kind(model, F.cross_entropy, numbers[0, :1]) if kind is RecordedEngine else kind(model, F.cross_entropy)
    weights, targets = (
        repeat({name: p.detach() for name, p in model.named_parameters()}, 2),
        torch.zeros(2, 6, dtype=torch.int64),
    )
    found = []
    for values in (numbers[0, 2], torch.zeros(7, dtype=torch.int64), torch.randint(30, (7,)), torch.full((7,), 29)):
        inputs = numbers.clone()
        inputs[0, 2] = values
        each = engine.per_example_gradients(weights, Batch(inputs, targets, present))
        summed = engine.clipped_sum(weights, Batch(inputs, targets, others), engine.layout.groups("flat"), 0.1)
        found.append([value[others] for value in each.values()] + list(summed.values()))
        assert all(value.dtype == torch.float32 for value in found[-1])
    return any(not torch.equal(one, other) for again in found for one, other in zip(again, found[0], strict=True))


@pytest.mark.parametrize("kind", [FunctionalEngine, RecordedEngine])
def test_bfloat16_products_do_not_carry_one_example_into_another(kind: type) -> None:
    assert not moves_others(kind, shared=False)


def test_rounding_by_a_scale_of_the_whole_batch_is_caught() -> None:
    assert moves_others(FunctionalEngine, shared=True)
