"""The recorded engine against the reference: layers of sequences, any form of network, and what has no rule."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedcdp.engine import Batch, FunctionalEngine, engines_for
from fedcdp.engine.gradients import Formed
from fedcdp.engine.recorded import RecordedEngine
from fedcdp.engine.token_gradients import DistinctRows, TokenProducts, TokenRows
from fedcdp.errors import ModelError
from fedcdp.files.tree import Tree

CLASSES, WORDS, TOKENS, WIDTH = 3, 11, 5, 8
CLIENTS, EXAMPLES = 2, 4


class Around(nn.Module):
    """An embedding, some layer on tokens with a way around it, and a classifier of the mean token."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(WORDS, WIDTH, padding_idx=0), layer, nn.Linear(WIDTH, CLASSES)

    def forward(self, numbers: Tensor) -> Tensor:
        tokens = self.words(numbers)
        found = self.layer(tokens)
        return self.head((tokens + (found[0] if isinstance(found, tuple) else found)).mean(1))


class SelfAttention(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, **options)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        if self.attention.batch_first:
            return self.attention(tokens, tokens, tokens, attn_mask=causal, need_weights=False)[0]
        turned = tokens.transpose(0, 1)
        return self.attention(turned, torch.tanh(turned), torch.tanh(turned))[0].transpose(0, 1)


class Adapted(nn.Module):
    """A frozen dense layer with trained factors of low rank beside it (LoRA), written as products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.base(tokens) + tokens @ self.down.T @ self.up.t()


class Gated(nn.Module):
    """A gated unit with a scale of its own, a position table as a parameter, and a product by `addmm`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.scale, self.places = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.places
        hidden = self.scale * (F.silu(self.gate(tokens)) * self.up(tokens))
        return torch.addmm(self.bias, hidden.reshape(-1, WIDTH), self.weight).view(tokens.shape)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.shared(tokens)))


class Swish(nn.Module):
    """A gated unit behind a norm, as in Llama, and attention by the fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.queries = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*ends, bias=False) for ends in ((WIDTH, 12), (WIDTH, 12), (12, WIDTH)))

    def forward(self, tokens: Tensor) -> Tensor:
        parts = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.queries(self.norm(tokens)).chunk(3, -1))
        read = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        return self.down(F.silu(self.gate(read)) * self.up(read))


class OtherWidths(nn.Module):
    """Learned queries that attend to keys and values of another width each."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, kdim=4, vdim=6, batch_first=True)
        self.queries = nn.Parameter(torch.randn(1, TOKENS, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attention(self.queries.expand(len(tokens), -1, -1), tokens[..., :4], tokens[..., :6])[0]


class Views(nn.Module):
    """A class token, a slice of a position table, and weights used in another shape or by row number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.places = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 9, WIDTH))
        self.flat, self.table = nn.Parameter(torch.randn(WIDTH * WIDTH)), nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        longer = torch.cat([self.first.expand(len(tokens), -1, -1), tokens], 1) + self.places[:, : TOKENS + 1]
        rows = self.table[torch.tensor([0, -1, 2, 2, 1])]
        return (longer @ self.flat.view(WIDTH, WIDTH))[:, 1:] * rows


LAYERS = {
    "dense layers": lambda: nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "layer norm without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "self-attention": lambda: SelfAttention(batch_first=True),
    "attention to others": lambda: SelfAttention(),
    "attention without bias": lambda: SelfAttention(bias=False, batch_first=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    "encoder layer, norm first": lambda: nn.TransformerEncoderLayer(
        WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=True
    ),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "lstm both ways": lambda: nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "rnn": lambda: nn.RNN(WIDTH, WIDTH, batch_first=True),
    "adapters": Adapted,
    "gated unit": Gated,
    "a layer used twice, and one never": Twice,
    "causal attention and SwiGLU": Swish,
    "learned queries, other widths": OtherWidths,
    "views": Views,
    "lstm with projection": lambda: nn.LSTM(WIDTH, 12, proj_size=WIDTH, batch_first=True),
}


class Pictures(nn.Module):
    """Convolutions with a way around, as in a residual network; `flat` for one dimension."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        kind = nn.Conv1d if flat else nn.Conv2d
        self.first, self.norm = kind(2, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4)
        self.second, self.head = kind(4, 4, 3, padding=2, dilation=2, bias=False), nn.Linear(4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.first(images)))
        return self.head((hidden + self.second(hidden)).flatten(2).mean(2))


class Tied(nn.Module):
    """An embedding whose table is also the matrix of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.words.weight

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.words(numbers % CLASSES)))).mean(1)


def own_weights(model: nn.Module) -> Tree:
    generator = torch.Generator().manual_seed(1)
    return {
        name: p.detach() + 0.1 * torch.randn(CLIENTS, *p.shape, generator=generator)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def batch_of(shape: tuple[int, ...] | None = None) -> Batch:
    generator = torch.Generator().manual_seed(2)
    lead = (CLIENTS, EXAMPLES)
    numbers = torch.randint(WORDS, (*lead, TOKENS), generator=generator)
    inputs = numbers if shape is None else torch.randn(*lead, *shape, generator=generator)
    present = torch.rand(lead, generator=generator) < 0.8
    return Batch(inputs, torch.randint(CLASSES, lead, generator=generator), present)


def compare(model: nn.Module, batch: Batch) -> RecordedEngine:
    """Everything that an engine computes, by both engines."""
    torch.manual_seed(0)
    engine, reference = RecordedEngine(model, F.cross_entropy, batch.inputs[0, :1]), FunctionalEngine(model, F.cross_entropy)
    weights = own_weights(model)
    raw = reference.per_example_gradients(weights, batch)
    same(engine.per_example_gradients(weights, batch), raw, batch.present)
    for each in engine.gradients(weights, batch):
        true, present = raw[each.name].double().flatten(2).square().sum(2)[batch.present], batch.present
        assert bool((each.squared_norms()[present] >= true * (1 - 1e-4) - 1e-10).all()), each.name
    same(engine.summed_gradients(weights, batch), reference.summed_gradients(weights, batch))
    for mode in ("layer", "flat"):
        for exact in (False, True):
            groups = reference.layout.groups(mode)
            wanted = reference.clipped_sum(weights, batch, groups, 0.3, exact=exact)
            same(engine.clipped_sum(weights, batch, groups, 0.3, exact=exact), wanted)
    first = Batch(batch.inputs[:1], batch.targets[:1], batch.present[:1])  # type: ignore[index]
    engine.check({name: value[0] for name, value in weights.items()}, first, per_example=True)
    return engine


def same(found: Tree, wanted: Tree, real: Tensor | None = None) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        one, other = (found[name], value) if real is None else (found[name][real], value[real])
        assert one.dtype == other.dtype
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * scale, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_of_tokens_gives_what_the_reference_gives(name: str) -> None:
    torch.manual_seed(3)
    compare(Around(LAYERS[name]()), batch_of())


@pytest.mark.parametrize("flat", [True, False])
def test_convolutions_give_what_the_reference_gives(flat: bool) -> None:
    compare(Pictures(flat), batch_of((2, 9) if flat else (2, 9, 8)))


def test_a_table_that_is_also_a_matrix_has_both_gradients() -> None:
    compare(Tied(), batch_of())


def test_several_inputs_by_name() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
            self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, numbers: Tensor, mask: Tensor) -> Tensor:
            tokens = self.encoder(self.words(numbers), src_key_padding_mask=mask == 0)
            return self.head((tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

    model, batch = Masked(), batch_of()
    inputs = {"numbers": batch.inputs, "mask": (torch.arange(TOKENS) < 3).float().expand(CLIENTS, EXAMPLES, TOKENS)}
    batch = Batch(inputs, batch.targets, batch.present)  # type: ignore[dict-item]
    one = {name: value[0, :1] for name, value in inputs.items()}
    weights = own_weights(model)
    wanted = FunctionalEngine(model, F.cross_entropy).per_example_gradients(weights, batch)
    same(RecordedEngine(model, F.cross_entropy, one).per_example_gradients(weights, batch), wanted, batch.present)


@pytest.mark.parametrize("need_weights", [False, True])
def test_tokens_that_may_read_nothing_are_those_of_the_reference(need_weights: bool) -> None:
    class LeftPadded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, numbers: Tensor, mask: Tensor) -> Tensor:
            tokens, later = self.words(numbers), torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
            options = {"attn_mask": later, "key_padding_mask": mask == 0, "need_weights": need_weights}
            read = self.attention(tokens, tokens, tokens, **options)[0]
            return self.head(torch.where(mask[..., None] > 0, read, 0.0).sum(1))

    model, batch = LeftPadded(), batch_of()
    mask = torch.ones(CLIENTS, EXAMPLES, TOKENS, dtype=torch.int64)
    mask[:, :2, :2] = 0  # with padding first, the first token may read none
    inputs = {"numbers": batch.inputs, "mask": mask}
    batch, weights = Batch(inputs, batch.targets, batch.present), own_weights(model)  # type: ignore[arg-type]
    engine = RecordedEngine(model, F.cross_entropy, {name: value[0, :1] for name, value in inputs.items()})  # type: ignore[index]
    found = engine.per_example_gradients(weights, batch)
    wanted = FunctionalEngine(model, F.cross_entropy).per_example_gradients(weights, batch)
    for name, value in wanted.items():
        assert need_weights or bool(value.isfinite().all())
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3), st.integers(0, 1000))
def test_random_networks_give_what_the_reference_gives(names: list[str], seed: int) -> None:
    class Chained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(LAYERS[name]() for name in names)

        def forward(self, tokens: Tensor) -> Tensor:
            for layer in self.layers:
                found = layer(tokens)
                tokens = tokens + torch.tanh(found[0] if isinstance(found, tuple) else found)
            return tokens

    torch.manual_seed(seed)
    compare(Around(Chained()), batch_of())


# Norms ----------------------------------------------------------------------------------------------------------------


def products(tokens: int, outputs: int, inputs: int, opposite: bool = False) -> TokenProducts:
    """Gradients of a dense layer; with `opposite`, every token but the first nearly cancels another."""
    generator = torch.Generator().manual_seed(4)
    left, right = (torch.randn(1, 1, 3, tokens, width, generator=generator) for width in (outputs, inputs))
    if opposite:
        left[..., 2::2, :], right[..., 2::2, :] = -left[..., 1::2, :] * 1e3, right[..., 1::2, :] * 1e-3
        left, right = (value + 1e-7 * torch.randn(value.shape, generator=generator) for value in (left, right))
    return TokenProducts("w", left, right, lambda value: value.squeeze(-3))


@pytest.mark.parametrize("opposite", [False, True])
def test_norms_from_tokens_never_fall_short(opposite: bool) -> None:
    each = products(tokens=5, outputs=64, inputs=64, opposite=opposite)
    assert each.ready_to_clip() is each  # nothing was formed
    exact = (each.left.double().mT @ each.right.double()).square().sum((1, 3, 4))
    found = each.squared_norms().double()
    assert bool((found >= exact * (1 - 2**-22)).all())
    assert bool((found <= exact * (1 + 1e-5) + 1e-8).all())


def test_a_long_sequence_of_narrow_tokens_is_formed() -> None:
    each = products(tokens=64, outputs=8, inputs=8)
    assert type(each.ready_to_clip()).__name__ == "Formed"


def test_tokens_of_one_word_add_up_before_the_norm() -> None:
    numbers, values = torch.tensor([[[1, 1, 2]]]), torch.tensor([[[[3.0], [1.0], [-2.0]]]])
    rows = TokenRows("w", numbers, values, rows=4)
    assert float(rows.squared_norms()) == pytest.approx(4**2 + 2**2)
    assert rows.formed()[0, 0, :, 0].tolist() == [0, 4, -2, 0]


def cancelling(size: float) -> tuple[TokenProducts, TokenRows]:
    """Three examples; two tokens of the second are as long as `size`, and add up to zero."""
    each, generator = products(tokens=2, outputs=64, inputs=64), torch.Generator().manual_seed(7)
    values, numbers = torch.randn(1, 3, 2, 64, generator=generator), torch.ones(1, 3, 2, dtype=torch.int64)
    for tokens in (each.left[:, 0], values):
        tokens[:, 1] = torch.tensor([size, -size])[:, None] / 8
    each.right[:, :, 1] = each.right[:, :, 1, :1].clone()
    return each, TokenRows("w", numbers, values, rows=3)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [1e4, 1e10, 1e18])
def test_long_tokens_that_cancel_do_not_round_other_examples_away(size: float, exact: bool) -> None:
    for each in cancelling(size):
        ready = each.ready_to_clip().in_float64(slice(0, 1)) if exact else each.ready_to_clip()
        factors = 1 / ready.squared_norms().sqrt().clamp(min=1)
        everyone, others = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[True, False, True]])
        change = ready.weighted_sum(factors, everyone) - ready.weighted_sum(factors, others)
        assert float(change.norm()) < 1e-5  # it was up to .07 with sums in float32


def test_sums_of_long_tokens_in_float32_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, rows = cancelling(1e10)
    factors = 1 / dense.squared_norms().sqrt().clamp(min=1)
    monkeypatch.setattr(Tensor, "double", Tensor.float)
    found = []
    for kept in (torch.ones(1, 3), torch.tensor([[1.0, 0.0, 1.0]])):
        each = (factors * kept)[..., None, None]
        as_they_come = TokenRows("w", rows.numbers, rows.values * each, 3)  # tokens of one word are not added up first
        found.append((dense.weighted_sum(factors * kept, kept > 0), as_they_come.summed()))
    for with_it, without in zip(*found, strict=True):
        assert float((with_it - without).norm()) > 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_example_that_is_not_finite_adds_nothing(bad: float) -> None:
    each = products(tokens=3, outputs=64, inputs=64)
    each.left[0, 0, 1, 2, 0] = bad
    assert not bool(each.squared_norms()[0, 1].isfinite())
    usable = torch.tensor([[True, False, True]])
    wanted = each.formed()[:, [0, 2]].sum(1)
    torch.testing.assert_close(each.weighted_sum(torch.ones(1, 3), usable), wanted)


def longest(engine: RecordedEngine, weights: Tree, batch: Batch, bound: float) -> float:
    """The norm of the longest clipped gradient of a single example, over the bound."""
    groups, found = engine.layout.groups("flat"), []
    for place in range(EXAMPLES):
        alone = Batch(batch.inputs, batch.targets, torch.arange(EXAMPLES).expand(CLIENTS, EXAMPLES) == place)
        summed = engine.clipped_sum(weights, alone, groups, bound)
        found.append(sum(value.double().flatten(1).square().sum(1) for value in summed.values()))
    return float(torch.stack(found).max()) ** 0.5 / bound  # type: ignore[arg-type]


def test_no_example_adds_more_than_the_bound_and_coarse_norms_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(6)
    batch, found = batch_of(), {}
    for name in ("dense layers", "encoder layer", "causal attention and SwiGLU", "adapters", "views", "gru"):
        model = Around(LAYERS[name]())
        engine, weights = RecordedEngine(model, F.cross_entropy, batch.inputs[0, :1]), own_weights(model)  # type: ignore[index]
        assert 1 - 1e-4 < longest(engine, weights, batch, 1e-3) <= 1 + 1e-6, name
        found[name] = (engine, weights)
    for kind in (Formed, TokenProducts, DistinctRows):
        ordinary = kind.squared_norms
        monkeypatch.setattr(kind, "squared_norms", lambda self, ordinary=ordinary: ordinary(self).bfloat16().float())
    assert max(longest(*each, batch, 1e-3) for each in found.values()) > 1 + 1e-4


# What has no rule -----------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A trained tensor in an operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, numbers: Tensor) -> Tensor:
        tokens = F.one_hot(numbers % WIDTH, WIDTH).float().mean(1)
        return self.head(F.linear(tokens, torch.tanh(self.inner.weight)))


def test_an_operation_without_a_rule_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    example = batch_of().inputs[0, :1]  # type: ignore[index]
    with pytest.raises(ModelError, match="no rule for tanh of a trained tensor"):
        RecordedEngine(Odd(), F.cross_entropy, example)
    with caplog.at_level("WARNING", logger="fedcdp"):
        assert list(engines_for(Odd(), F.cross_entropy, "recorded", example)) == ["functional"]
    assert "the recorded engine cannot be used: there is no rule for tanh of a trained tensor" in caplog.text
    assert list(engines_for(Odd(), F.cross_entropy, "auto", example)) == ["functional"]


def test_a_network_of_any_form_may_be_recorded() -> None:
    example = batch_of().inputs[0, :1]  # type: ignore[index]
    assert list(engines_for(Tied(), F.cross_entropy, "auto", example)) == ["functional", "recorded"]
    assert list(engines_for(Tied(), F.cross_entropy, "recorded", example)) == ["recorded"]
    assert list(engines_for(Tied(), F.cross_entropy)) == ["functional"]


@pytest.mark.parametrize("change", ["more often", "another layer", "another view"])
def test_a_network_that_changes_with_its_inputs_is_refused(change: str) -> None:
    class Moody(nn.Module):
        mood = ""

        def __init__(self) -> None:
            super().__init__()
            self.head, self.other = nn.Linear(TOKENS, CLASSES), nn.Linear(TOKENS, CLASSES)
            self.table = nn.Parameter(torch.randn(2, CLASSES))

        def forward(self, numbers: Tensor) -> Tensor:
            first, second = (self.other, self.head) if self.mood == "another layer" else (self.head, self.other)
            once = first(numbers.float()) + torch.tanh(second(numbers.float()))
            once = once + self.table[1 if self.mood == "another view" else 0]
            return once + self.head(numbers.float()) if self.mood == "more often" else once

    batch, model = batch_of(), Moody()
    engine = RecordedEngine(model, F.cross_entropy, batch.inputs[0, :1])  # type: ignore[index]
    model.mood = change
    with pytest.raises(ModelError, match="differently for different inputs"):
        engine.plain_sum(own_weights(model), batch)


def test_a_training_with_it_equals_one_with_the_reference() -> None:
    import fedcdp

    generator = torch.Generator().manual_seed(5)
    numbers = torch.randint(1, WORDS, (40, TOKENS), generator=generator)
    data = fedcdp.Dataset(numbers, numbers[:, 0] % CLASSES, CLASSES)
    federation = fedcdp.partition(data, clients=4, scheme="iid")
    plan = fedcdp.Plan(per_round=4, rounds=2, local_steps=2, batch_size=3, noise_multiplier=0.5, learning_rate=0.1)
    model = Around(SelfAttention(batch_first=True))
    one, other = (fedcdp.simulate(model, federation, plan, engine=name) for name in ("recorded", "functional"))
    assert (one.engine, other.engine) == ("recorded", "functional")
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
