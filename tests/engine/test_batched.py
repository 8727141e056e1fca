"""The batched engine against the reference engine: every layer, random networks, and what both promise of bad examples."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedcdp.engine import Batch, BatchedEngine, FunctionalEngine, runtime
from fedcdp.errors import ModelError
from fedcdp.files.tree import Tree
from fedcdp.mechanism.clipping import clip

CLASSES = 3


def own_weights(model: nn.Module, clients: int, spread: float = 0.1) -> Tree:
    """Different weights for every client."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: p.detach() + spread * torch.randn(clients, *p.shape, generator=generator)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def batch_of(shape: tuple[int, ...], clients: int, examples: int, words: int | None = None) -> Batch:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(clients, examples, *shape, generator=generator)
    if words is not None:
        inputs = torch.randint(words, (clients, examples, *shape), generator=generator)
    targets = torch.randint(CLASSES, (clients, examples), generator=generator)
    present = torch.rand(clients, examples, generator=generator) < 0.8
    return Batch(inputs, targets, present)


def assert_same(found: Tree, expected: Tree, real: Tensor | None = None) -> None:
    """Equal to 1e-5 of the largest value, in the same order; of per-example gradients, those of real examples."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].shape == value.shape
        one, other = (found[name], value) if real is None else (found[name][real], value[real])
        scale = max(1.0, float(other.abs().max()) if other.numel() else 0.0)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * scale)


def compare(model: nn.Module, batch: Batch, loss=F.cross_entropy) -> None:
    """Everything that an engine computes, by both engines."""
    batched, reference = BatchedEngine(model, loss), FunctionalEngine(model, loss)
    assert batched.layout == reference.layout
    weights = own_weights(model, len(batch.inputs))
    raw = reference.per_example_gradients(weights, batch)
    assert_same(batched.per_example_gradients(weights, batch), raw, batch.present)
    assert_same(batched.summed_gradients(weights, batch), reference.summed_gradients(weights, batch))
    norms = torch.cat([value[batch.present].flatten(1).norm(dim=1) for value in raw.values()])
    middle = max(float(norms.median()) if len(norms) else 1.0, 1e-3)
    for mode in ("layer", "flat"):
        groups = reference.layout.groups(mode)
        expected = {name: value.sum(1) for name, value in clip(raw, groups, middle, batch.present).values.items()}
        assert_same(batched.clipped_sum(weights, batch, groups, middle), expected)
        assert_same(reference.clipped_sum(weights, batch, groups, middle), expected)
    globally = {name: value[0] for name, value in weights.items()}
    assert torch.equal(batched.outputs(globally, batch.inputs[0]), reference.outputs(globally, batch.inputs[0]))


def head(shape: tuple[int, ...], *layers: nn.Module) -> nn.Sequential:
    """The layers, and a dense one behind them that fits."""
    body = nn.Sequential(*layers)
    features = body(torch.zeros(2, *shape)).flatten(1).shape[1]
    return nn.Sequential(body, nn.Flatten(), nn.Linear(features, CLASSES))


# Layer by layer ------------------------------------------------------------------------------------------------------

IMAGE = (4, 9, 8)
BENT = nn.Tanh()

LAYERS: dict[str, tuple[tuple[int, ...], list[nn.Module]]] = {
    "linear": ((5,), [nn.Linear(5, 4)]),
    "linear without bias": ((5,), [nn.Linear(5, 4, bias=False)]),
    "linear on sequences": ((3, 5), [nn.Linear(5, 4)]),
    "linear on planes": ((2, 3, 5), [nn.Linear(5, 4)]),
    "convolution": (IMAGE, [nn.Conv2d(4, 6, 3)]),
    "convolution without bias": (IMAGE, [nn.Conv2d(4, 6, 3, bias=False)]),
    "convolution of one channel": ((1, 9, 8), [nn.Conv2d(1, 6, 3)]),
    "convolution with stride": (IMAGE, [nn.Conv2d(4, 6, 3, stride=(2, 3))]),
    "convolution with padding": (IMAGE, [nn.Conv2d(4, 6, (3, 2), padding=(2, 1))]),
    "convolution to the same size": (IMAGE, [nn.Conv2d(4, 6, (4, 3), padding="same")]),
    "convolution to the same size, dilated": (IMAGE, [nn.Conv2d(4, 6, (4, 2), padding="same", dilation=(1, 3))]),
    "convolution without padding": (IMAGE, [nn.Conv2d(4, 6, 3, padding="valid")]),
    "convolution with dilation": (IMAGE, [nn.Conv2d(4, 6, (2, 3), dilation=(3, 2), padding=1, stride=2)]),
    "convolution in groups": (IMAGE, [nn.Conv2d(4, 6, 3, groups=2, padding=1)]),
    "convolution channel by channel": (IMAGE, [nn.Conv2d(4, 8, 3, groups=4)]),
    "convolution of single pixels": (IMAGE, [nn.Conv2d(4, 6, 1)]),
    "convolution of the whole image": (IMAGE, [nn.Conv2d(4, 6, (9, 8))]),
    "largest of a window": (IMAGE, [nn.Conv2d(4, 6, 3), nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)]),
    "largest after relu": (IMAGE, [nn.Conv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d(2)]),
    "mean of a window": (IMAGE, [nn.Conv2d(4, 6, 3), nn.AvgPool2d((2, 3), padding=1, count_include_pad=False)]),
    "mean of the image": (IMAGE, [nn.Conv2d(4, 6, 3), nn.AdaptiveAvgPool2d(1)]),
    "group norm": (IMAGE, [nn.Conv2d(4, 6, 3), nn.GroupNorm(3, 6), nn.Tanh()]),
    "group norm without weights": (IMAGE, [nn.Conv2d(4, 6, 3), nn.GroupNorm(3, 6, affine=False)]),
    "group norm of vectors": ((6,), [nn.Linear(6, 6), nn.GroupNorm(2, 6)]),
    "layer norm": ((6,), [nn.Linear(6, 6), nn.LayerNorm(6)]),
    "layer norm without bias": ((6,), [nn.Linear(6, 6), nn.LayerNorm(6, bias=False)]),
    "layer norm of sequences": ((4, 6), [nn.Linear(6, 6), nn.LayerNorm(6)]),
    "layer norm of planes": ((2, 4, 6), [nn.LayerNorm((4, 6))]),
    "dropout that is off": ((5,), [nn.Linear(5, 4), nn.Dropout(0.5).eval(), nn.Linear(4, 4)]),
    "one activation in two places": ((5,), [nn.Linear(5, 4), BENT, nn.Linear(4, 4), BENT]),
    "zero padding of its own": (IMAGE, [nn.ZeroPad2d(1), nn.Conv2d(4, 6, 3)]),
    "identity and nested sequences": ((5,), [nn.Sequential(nn.Identity(), nn.Sequential(nn.Linear(5, 4), nn.Sequential()))]),
}
ACTIVATIONS = [
    nn.ReLU(), nn.ReLU(inplace=True), nn.Tanh(), nn.Sigmoid(), nn.ELU(), nn.GELU(), nn.LeakyReLU(), nn.SiLU(), nn.Softplus(),
    nn.Hardtanh(), nn.Mish(),
]  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_gives_what_the_reference_gives(name):
    shape, layers = LAYERS[name]
    compare(head(shape, *layers), batch_of(shape, clients=3, examples=4))


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_passes_gradients_on_to_the_one_before_it(name):
    shape, layers = LAYERS[name]
    first = nn.Linear(shape[-1], shape[-1])
    compare(head(shape, first, nn.Tanh(), *layers), batch_of(shape, clients=2, examples=3))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_every_activation_gives_what_the_reference_gives(activation):
    compare(head((5,), nn.Linear(5, 6), activation, nn.Linear(6, 6), activation), batch_of((5,), clients=3, examples=4))


@pytest.mark.parametrize("padding", [None, 2])
def test_an_embedding_gives_what_the_reference_gives(padding):
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=padding), nn.Tanh(), nn.Flatten(), nn.Linear(20, CLASSES))
    compare(model, batch_of((5,), clients=3, examples=4, words=7))


def test_a_number_that_is_not_in_the_table_does_not_read_another_clients_row():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, CLASSES))
    batch = batch_of((5,), clients=3, examples=4, words=7)
    batch.inputs[0, 0, 0] = 7
    with pytest.raises((IndexError, RuntimeError)):
        BatchedEngine(model, F.cross_entropy).per_example_gradients(own_weights(model, 3), batch)


def test_a_network_may_be_a_single_layer():
    compare(nn.Linear(5, CLASSES), batch_of((5,), clients=3, examples=4))


@pytest.mark.parametrize(
    "frozen", [["0"], ["0.weight"], ["0.bias"], ["2"], ["2.weight"], ["2.bias"], ["3.weight"], ["5.bias"], ["0", "2.weight"]]
)
def test_frozen_tensors_are_constants(frozen):
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, CLASSES)
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(each) for each in frozen))
    compare(model, batch_of((2, 6, 6), clients=3, examples=4))


def test_a_loss_of_the_users_own_is_differentiated():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.square().sum(-1).mean() + F.cross_entropy(outputs, targets, label_smoothing=0.2)

    compare(head((5,), nn.Linear(5, 4), nn.Tanh()), batch_of((5,), clients=3, examples=4), loss)


def test_a_regression_has_targets_that_are_no_classes():
    batch = batch_of((5,), clients=3, examples=4)
    batch = Batch(batch.inputs, torch.randn(3, 4, CLASSES), batch.present)
    compare(head((5,), nn.Linear(5, 4), nn.Tanh()), batch, F.mse_loss)


# Random networks -----------------------------------------------------------------------------------------------------


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """A random network of convolutions, activations, norms and poolings, and the shape of its inputs."""
    torch.manual_seed(draw(st.integers(0, 2**32)))  # its first weights
    channels = draw(st.integers(1, 4))
    shape = (channels, draw(st.integers(6, 11)), draw(st.integers(6, 11)))
    layers: list[nn.Module] = []
    size = torch.Size(shape)
    for _ in range(draw(st.integers(0, 3))):
        groups = draw(st.sampled_from([each for each in (1, 2, 3) if size[0] % each == 0]))
        layer = nn.Conv2d(
            size[0],
            groups * draw(st.integers(1, 4)),
            (draw(st.integers(1, 3)), draw(st.integers(1, 3))),
            stride=(draw(st.integers(1, 2)), draw(st.integers(1, 3))),
            padding=(draw(st.integers(0, 2)), draw(st.integers(0, 2))),
            dilation=draw(st.integers(1, 2)),
            groups=groups,
            bias=draw(st.booleans()),
        )
        after = draw(
            st.sampled_from([nn.ReLU(), nn.Tanh(), nn.Softplus(), nn.GroupNorm(1, layer.out_channels), nn.Identity()])
        )
        pool = draw(st.sampled_from([nn.MaxPool2d(2), nn.AvgPool2d(2, stride=1), nn.Identity()]))
        block = nn.Sequential(layer, after, pool)
        try:
            grown = block(torch.zeros(1, *size)).shape[1:]
        except (RuntimeError, ValueError):  # the image is too small by now
            break
        if draw(st.booleans()):
            layers.append(block)
        else:
            layers += [layer, after, pool]
        size = grown
    features = size.numel()
    layers.append(nn.Flatten())
    for _ in range(draw(st.integers(0, 2))):
        width = draw(st.integers(1, 6))
        layers += [
            nn.Linear(features, width, bias=draw(st.booleans())),
            draw(st.sampled_from([nn.Sigmoid(), nn.LayerNorm(width)])),
        ]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, CLASSES, bias=draw(st.booleans()))), shape


@settings(max_examples=40, deadline=None)
@given(network=networks(), clients=st.integers(1, 3), examples=st.integers(1, 4))
def test_random_networks_give_what_the_reference_gives(network, clients, examples):
    """In float64: some networks (LayerNorm of two values, say) make much of a rounding error, whoever computes them."""
    model, shape = network
    batch = batch_of(shape, clients, examples)
    compare(model.double(), Batch(batch.inputs.double(), batch.targets, batch.present))


# Bad examples and empty slots ----------------------------------------------------------------------------------------


def engines_of(model: nn.Module) -> tuple[BatchedEngine, FunctionalEngine]:
    return BatchedEngine(model, F.cross_entropy), FunctionalEngine(model, F.cross_entropy)


def networks_for_bad_examples() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    return {
        "dense": (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)), (4,)),
        "convolutional": (
            nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Conv2d(3, 3, 2), nn.Flatten(), nn.Linear(27, CLASSES)),
            (1, 6, 6),
        ),
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", networks_for_bad_examples())
@pytest.mark.parametrize("slot", ["real", "empty"])
def test_a_bad_example_contributes_what_it_does_by_the_reference(name, bad, slot):
    model, shape = networks_for_bad_examples()[name]
    batch = batch_of(shape, 2, 4)
    inputs, present = batch.inputs.clone(), torch.ones(2, 4, dtype=torch.bool)
    inputs[0, 1].view(-1)[2] = bad
    present[0, 1] = slot == "real"
    batch, weights = Batch(inputs, batch.targets, present), own_weights(model, 2)
    batched, reference = engines_of(model)
    for found, expected in [
        (batched.summed_gradients(weights, batch), reference.summed_gradients(weights, batch)),
        *(
            (batched.clipped_sum(weights, batch, groups, 0.5), reference.clipped_sum(weights, batch, groups, 0.5))
            for groups in (reference.layout.groups("layer"), reference.layout.groups("flat"))
        ),
    ]:
        assert all(torch.isfinite(value).all() for value in found.values())
        assert_same(found, expected)


def test_a_step_without_any_real_example_is_zero():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    batch = batch_of((4,), 2, 3)
    batch = Batch(batch.inputs, batch.targets, torch.zeros(2, 3, dtype=torch.bool))
    engine, weights = BatchedEngine(model, F.cross_entropy), own_weights(model, 2)
    for tree in (engine.summed_gradients(weights, batch), engine.clipped_sum(weights, batch, engine.layout.layers, 1.0)):
        assert all(not value.any() for value in tree.values())


@settings(max_examples=60, deadline=None)
@given(large=st.integers(-36, 18), small=st.integers(-36, 18), bound=st.sampled_from([1e-6, 0.01, 4.0]))
def test_no_example_contributes_more_than_the_bound_however_its_gradient_splits_into_factors(large, small, bound):
    """δ·x with |δ| tiny and |x| huge, or the reverse: a square that is lost in float32 must not let a gradient through."""
    model = nn.Linear(6, 2, bias=False)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * targets).sum(-1).mean()

    generator = torch.Generator().manual_seed(abs(large) + 100 * abs(small))
    inputs = torch.randn(1, 1, 6, generator=generator) * 10.0**large
    targets = torch.randn(1, 1, 2, generator=generator) * 10.0**small
    batch = Batch(inputs, targets, torch.ones(1, 1, dtype=torch.bool))
    engine = BatchedEngine(model, loss)
    found = engine.clipped_sum(own_weights(model, 1), batch, engine.layout.layers, bound)["weight"]
    true = inputs.double().norm() * targets.double().norm()
    assert float(found.double().norm()) <= bound * (1 + 1e-6)
    if 1e-15 < float(true) < 1e18:
        assert float(found.double().norm()) == pytest.approx(min(bound, float(true)), rel=1e-5)


@pytest.mark.parametrize("features", [10, 1_000_000])
def test_a_wide_layer_ends_within_the_bound(features):
    model = nn.Linear(features, 1, bias=False)
    engine = BatchedEngine(model, lambda outputs, targets: (outputs * targets[..., None]).sum(-1).mean())
    batch = Batch(torch.rand(1, 1, features), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))
    found = engine.clipped_sum({"weight": torch.zeros(1, 1, features)}, batch, engine.layout.layers, 1.0)["weight"]
    assert float(found.double().norm()) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.slow
def test_a_compiler_can_take_a_whole_clipped_sum_at_once():
    """No question about a value and no shape that depends on one: neither a compiler nor a recorded graph has to stop."""
    model = head(IMAGE, nn.Conv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 6), nn.GELU())
    engine = BatchedEngine(model, lambda outputs, targets: F.cross_entropy(outputs, targets, label_smoothing=0.1))
    weights, batch = own_weights(model, 2), batch_of(IMAGE, 2, 3)

    def clipped(weights: Tree, inputs: Tensor, targets: Tensor, present: Tensor) -> Tree:
        return engine.clipped_sum(weights, Batch(inputs, targets, present), engine.layout.layers, 0.5)

    whole = torch.compile(clipped, backend="eager", fullgraph=True)
    arguments = (weights, batch.inputs, batch.targets, batch.present)
    assert_same(whole(*arguments), clipped(*arguments))


# What it leaves alone, and what it leaves to the reference -----------------------------------------------------------


def test_the_model_the_weights_and_the_batch_are_left_alone():
    model = head(IMAGE, nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    before, weights, batch = copy.deepcopy(model.state_dict()), own_weights(model, 2), batch_of(IMAGE, 2, 3)
    kept = copy.deepcopy((weights, batch))
    engine = BatchedEngine(model, F.cross_entropy)
    engine.per_example_gradients(weights, batch)
    engine.summed_gradients(weights, batch)
    engine.clipped_sum(weights, batch, engine.layout.layers, 1.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, kept[0][name]) for name, value in weights.items())
    assert torch.equal(batch.inputs, kept[1].inputs)
    assert all(p.grad is None for p in model.parameters())


def test_global_weights_may_be_given_once_for_all_clients():
    model = head(IMAGE, nn.Conv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d(2))
    batched, reference = engines_of(model)
    weights = {name: p.detach().expand(3, *p.shape) for name, p in model.named_parameters()}
    batch = batch_of(IMAGE, 3, 2)
    assert_same(batched.summed_gradients(weights, batch), reference.summed_gradients(weights, batch))


class Tied(nn.Sequential):
    pass


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[1].register_forward_hook(lambda *seen: seen[-1] * 2)
    return model


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (tied(), "2.weight is shared by several layers"),
        (Tied(nn.Linear(4, 4)), "(the network itself) is Tied"),
        (nn.Sequential(nn.Linear(4, 4), nn.Bilinear(4, 4, 4)), "layer 1 is Bilinear"),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.PReLU())), "layer 0.1 is PReLU"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), "layer 1 is Dropout, which is switched on"),
        (nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)), "layer 1 is Flatten, which may mix examples"),
        (nn.Sequential(nn.Conv2d(1, 1, 3, padding_mode="reflect")), "layer 0 is Conv2d, which pads with reflect"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "layer 1 is BatchNorm1d"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "ParametrizedLinear"),
        (hooked(), "layer 1 is Tanh, which has hooks"),
    ],
)  # fmt: skip
def test_what_has_no_rule_is_named(model, named):
    with pytest.raises(ModelError) as refused:
        BatchedEngine(model, F.cross_entropy)
    assert named in str(refused.value)


@pytest.mark.parametrize("engine", [BatchedEngine, FunctionalEngine])
@pytest.mark.parametrize("bad", [False, True])
def test_sums_in_float64_do_not_depend_on_the_parts(
    engine: type[BatchedEngine | FunctionalEngine], bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Tanh(), nn.Linear(32, CLASSES))
    batch, weights = batch_of((1, 6, 6), clients=5, examples=7), own_weights(model, 5)
    if bad:
        assert isinstance(batch.inputs, Tensor)
        batch.inputs[2, 3] = math.nan
    made = engine(model, F.cross_entropy)
    groups = made.layout.groups("flat")
    reference = FunctionalEngine(model, F.cross_entropy).per_example_gradients(weights, batch)
    clipped = clip({name: value.double() for name, value in reference.items()}, groups, 0.5, batch.present).values
    for piece in (1, 2**18):
        monkeypatch.setattr(runtime, "_PIECE", piece)
        found = made.clipped_sum(weights, batch, groups, 0.5, exact=True)
        assert {value.dtype for value in found.values()} == {torch.float64}
        assert_same(found, {name: value.sum(1) for name, value in clipped.items()})
