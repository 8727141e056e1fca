"""Networks made to mislead the recorded engine: each is computed right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedcdp.engine import engines_for
from fedcdp.engine.recorded import RecordedEngine
from fedcdp.errors import ModelError
from tests.engine.test_recorded import TOKENS, WIDTH, Around, batch_of, compare

pytestmark = pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning")


class Tricky(nn.Module):
    """A layer of tokens: a function of itself and the tokens, with trained tensors of these shapes."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.way = forward

    def forward(self, tokens: Tensor) -> Tensor:
        return self.way(self, tokens)


def doubled(layer: Any, tokens: Tensor) -> Tensor:
    return F.linear(input=tokens, weight=layer.w) + torch.mul(input=tokens, other=layer.b)


def unwatched(layer: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        still = tokens @ layer.w
    return tokens @ layer.w + still


def frames(layer: Any, tokens: Tensor) -> Tensor:
    return tokens + F.conv1d(tokens.reshape(-1, 1, WIDTH), layer.w, layer.b, padding=1).mean(1).view(tokens.shape)


def overwritten_result(layer: Any, tokens: Tensor) -> Tensor:
    hidden = tokens @ layer.w
    hidden += tokens
    hidden[:, 0] = 0.5
    return hidden.mul_(2)


RIGHT = {
    "arguments by name": lambda: Tricky(doubled, w=(WIDTH, WIDTH), b=(WIDTH,)),
    "partly without gradients": lambda: Tricky(unwatched, w=(WIDTH, WIDTH)),
    "a convolution of each token": lambda: Tricky(frames, w=(2, 1, 3), b=(2,)),
    "results overwritten": lambda: Tricky(overwritten_result, w=(WIDTH, WIDTH)),
    "in double precision": lambda: Tricky(lambda layer, tokens: (tokens.double() * layer.b).float(), b=(WIDTH,)),
    "positions of the same shape": lambda: Tricky(lambda layer, tokens: tokens + layer.p, p=(1, TOKENS, WIDTH)),
    "a trained mask of attention": lambda: Tricky(
        lambda layer, tokens: (tokens @ tokens.mT + layer.p).softmax(-1) @ tokens, p=(TOKENS, TOKENS)
    ),
}


def hooked(layer: Any, tokens: Tensor) -> Tensor:
    return layer.inner(tokens)


class Hooked(Tricky):
    """A layer whose input and output hooks change."""

    def __init__(self) -> None:
        super().__init__(hooked)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.register_forward_pre_hook(lambda _, given: (torch.sin(given[0]),))
        self.inner.register_forward_hook(lambda _, __, found: found * 2)


def across(layer: Any, tokens: Tensor) -> Tensor:
    """Attention over the first axis: across the examples of a batch, were they not computed one by one."""
    return (tokens.transpose(0, 1) @ layer.w @ tokens.permute(1, 2, 0)).softmax(-1).mT @ tokens.transpose(0, 1)


RIGHT |= {
    "hooks that change values": Hooked,
    "a gradient turned off and on": lambda: Tricky(
        lambda layer, tokens: torch.where(tokens > 0, tokens @ layer.w, (tokens @ layer.w).detach()), w=(WIDTH, WIDTH)
    ),
    "a layer in a loop": lambda: Tricky(
        lambda layer, tokens: torch.tanh(torch.tanh(torch.tanh(tokens @ layer.w) @ layer.w) @ layer.w.T), w=(WIDTH, WIDTH)
    ),
    "products in bfloat16": lambda: Tricky(
        lambda layer, tokens: tokens + (1e-4 * (tokens.bfloat16() @ layer.w.to(torch.bfloat16))).float(), w=(WIDTH, WIDTH)
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_unusual_uses_give_what_the_reference_gives(name: str) -> None:
    torch.manual_seed(3)
    compare(Around(RIGHT[name]()), batch_of())


class Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tokens: Tensor, weight: Tensor) -> Tensor:
        return tokens @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        tokens, weight = ctx.saved_tensors
        return slope @ weight.T, (tokens.mT @ slope).sum(0)


def compiled() -> nn.Module:
    def product(tokens: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(tokens @ weight)

    script = torch.jit.script(product)
    return Tricky(lambda layer, tokens: script(tokens, layer.w), w=(WIDTH, WIDTH))


def overwritten_input(layer: Any, tokens: Tensor) -> Tensor:
    hidden = torch.sin(tokens)
    result = hidden @ layer.w
    return result + hidden.mul_(3)


def in_vmap(layer: Any, tokens: Tensor) -> Tensor:
    return torch.func.vmap(lambda weight, token: token @ weight, in_dims=(0, 1), out_dims=1)(layer.w, tokens)


class Padded(nn.Module):
    """A second embedding of what the tokens say."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table((tokens[..., 0] > 0).long())


def autocast(layer: Any, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.einsum("bti,io->bto", tokens, layer.w).float()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "normalised itself": (
        lambda: Tricky(lambda layer, tokens: tokens * F.layer_norm(layer.p, (WIDTH,)), p=(TOKENS, WIDTH)),
        "no rule for layer_norm",
    ),
    "transposed as a scale": (
        lambda: Tricky(lambda layer, tokens: F.layer_norm(tokens, (TOKENS, WIDTH), layer.p.T), p=(WIDTH, TOKENS)),
        "no rule for layer_norm",
    ),
    "one bias for all outputs": (
        lambda: Tricky(lambda layer, tokens: F.linear(tokens, layer.w, layer.b), w=(WIDTH, WIDTH), b=(1,)),
        "no rule for linear",
    ),
    "a bias for each token": (
        lambda: Tricky(lambda layer, tokens: F.linear(tokens, layer.w, layer.b), w=(WIDTH, WIDTH), b=(TOKENS, WIDTH)),
        "no rule for linear",
    ),
    "a vector as a matrix": (
        lambda: Tricky(lambda layer, tokens: tokens * F.linear(tokens, layer.b)[..., None], b=(WIDTH,)),
        "no rule for linear",
    ),
    "weights by weights": (lambda: Tricky(lambda layer, tokens: tokens @ (layer.w @ layer.w), w=(WIDTH, WIDTH)), "no rule"),
    "overwritten": (lambda: Tricky(lambda layer, tokens: tokens * layer.b.mul_(2), b=(WIDTH,)), "leaf"),
    "overwritten in place of a view": (
        lambda: Tricky(lambda layer, tokens: tokens @ layer.w.view(-1).mul_(2).view(WIDTH, WIDTH), w=(WIDTH, WIDTH)),
        "leaf|view",
    ),
    "its data alone": (lambda: Tricky(lambda layer, tokens: tokens * layer.b.data, b=(WIDTH,)), "no rule for"),
    "in TorchScript": (compiled, "differs from"),
    "with its own backward pass": (
        lambda: Tricky(lambda layer, tokens: Product.apply(tokens, layer.w), w=(WIDTH, WIDTH)), "no rule for custom_function"
    ),
    "inside vmap": (lambda: Tricky(in_vmap, w=(TOKENS, WIDTH, WIDTH)), "differs from"),
    "an input overwritten later": (lambda: Tricky(overwritten_input, w=(WIDTH, WIDTH)), "modified by an inplace operation"),
    "a gradient scaled by frequency": (lambda: Padded(scale_grad_by_freq=True), "no rule for embedding"),
    "rows kept short": (lambda: Padded(max_norm=0.5), "no rule for embedding"),
    "sparse rows": (lambda: Padded(sparse=True), "no rule for embedding"),
    "used and held fixed": (
        lambda: Tricky(lambda layer, tokens: tokens @ layer.w + tokens @ layer.w.detach(), w=(WIDTH, WIDTH)),
        "no rule for detach",
    ),
    "recomputed in the backward pass": (
        lambda: Tricky(
            lambda layer, tokens: checkpoint(lambda values: torch.tanh(values @ layer.w), tokens, use_reentrant=False),
            w=(WIDTH, WIDTH),
        ),
        "saved tensor hooks",
    ),
    "a branch on values": (
        lambda: Tricky(lambda layer, tokens: tokens @ layer.w if (tokens > 0.5).any() else tokens, w=(WIDTH, WIDTH)),
        "data-dependent control flow",
    ),
    "batch norm": (lambda: nn.BatchNorm1d(TOKENS), "no rule for batch_norm"),
    "einsum under autocast": (lambda: Tricky(autocast, w=(WIDTH, WIDTH)), "no rule for einsum"),
    "a weight made of a weight": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), "no rule for"
    ),
    "an operator by its address": (
        lambda: Tricky(lambda layer, tokens: torch.ops.aten.mm(tokens[0], layer.w)[None], w=(WIDTH, WIDTH)), "no rule for mm"
    ),
    "rows by an array": (
        lambda: Tricky(lambda layer, tokens: tokens * layer.p[np.arange(TOKENS)], p=(9, WIDTH)), "no rule for __getitem__"
    ),
    "the first axis mixed": (
        lambda: Tricky(lambda layer, tokens: tokens - (tokens * layer.b).mean(0, keepdim=True), b=(WIDTH,)),
        "mixes the examples",
    ),
    "attention across the batch": (
        lambda: Tricky(lambda layer, tokens: across(layer, tokens).transpose(0, 1), w=(WIDTH, WIDTH)), "mixes the examples"
    ),
    "an lstm with dropout": (lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True), "no rule for lstm"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_use_that_would_be_missed_is_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    layer, reason = REFUSED[name]
    model, example = Around(layer()), batch_of().inputs[0, :1]  # type: ignore[index]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises((ModelError, RuntimeError), match=reason):
        RecordedEngine(model, F.cross_entropy, example)
    with caplog.at_level("INFO", logger="fedcdp"):
        assert list(engines_for(model, F.cross_entropy, "auto", example)) == ["functional"]
    said = [each.getMessage() for each in caplog.records if "the recorded engine cannot be used" in each.getMessage()]
    assert len(said) == 1
    for each, value in model.state_dict().items():
        assert torch.equal(value, before[each])


def test_the_comparison_changes_neither_buffers_nor_random_numbers() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, tokens: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(tokens)

    model = Around(Counting())
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    with pytest.raises(RuntimeError, match="would mutate a captured Tensor"):  # as under the reference
        RecordedEngine(model, F.cross_entropy, batch_of().inputs[0, :1])  # type: ignore[index]
    assert torch.equal(torch.rand(3), wanted)
    assert float(model.layer.calls) == 0  # type: ignore[union-attr]
