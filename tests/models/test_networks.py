from __future__ import annotations

import copy
import inspect
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.data.partition import partition
from fedcdp.errors import ModelError
from fedcdp.files.tree import Layout
from fedcdp.models.networks import build, prepare
from fedcdp.training.simulate import simulate

PRIVATE = ["fed-sdp", "fed-cdp", "fed-cdp-decay"]


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def kinds(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules()}


# The paper's networks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "shape", "classes", "parameters", "layers"),
    [
        ("cnn", (1, 28, 28), 10, 34_720, 3),
        ("cnn", (3, 32, 32), 10, 3 * 32 * 9 + 32 * 64 * 9 + 64 * 36 * 10, 3),
        ("mlp", (30,), 2, 31 * 64 + 65 * 32 + 33 * 2, 3),
        ("mlp", (2, 3, 5), 4, 31 * 64 + 65 * 32 + 33 * 4, 3),
        ("cpl", (1, 28, 28), 10, 26 * 12 + 3 * (12 * 25 + 1) * 12 + (12 * 49 + 1) * 10, 5),
        ("cpl", (3, 33, 17), 5, (75 + 1) * 12 + 3 * (12 * 25 + 1) * 12 + (12 * 9 * 5 + 1) * 5, 5),
    ],
)
def test_a_network_has_the_papers_weights_and_layers_and_answers_for_every_class(
    network, shape, classes, parameters, layers
):
    model = build(network, shape, classes)
    assert count(model) == parameters
    assert len(Layout.of(model).layers) == layers
    assert model(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize(("shape", "network"), [((1, 12, 12), "cnn"), ((7,), "mlp")])
def test_auto_takes_a_cnn_for_images_and_an_mlp_for_vectors(shape, network):
    assert str(build("auto", shape, 3)) == str(build(network, shape, 3))


@pytest.mark.parametrize("network", ["cnn", "mlp", "cpl"])
@pytest.mark.parametrize(("name", "kind"), [("relu", nn.ReLU), ("tanh", nn.Tanh), ("sigmoid", nn.Sigmoid)])
def test_the_activation_can_be_chosen(network, name, kind):
    found = kinds(build(network, (1, 12, 12), 3, name))
    assert found & {nn.ReLU, nn.Tanh, nn.Sigmoid} == {kind}


@pytest.mark.parametrize(("network", "kind"), [("cnn", nn.ReLU), ("mlp", nn.ReLU), ("cpl", nn.Sigmoid)])
def test_each_network_has_an_activation_of_its_own(network, kind):
    assert kinds(build(network, (1, 12, 12), 3)) & {nn.ReLU, nn.Tanh, nn.Sigmoid} == {kind}


def test_the_attacked_networks_weights_and_biases_fill_the_range_of_a_half():
    for parameter in build("cpl", (3, 32, 32), 10).parameters():
        assert parameter.abs().max() <= 0.5
        if parameter.numel() > 100:
            assert abs(float(parameter.detach().var()) - 1 / 12) < 5 * (1 / 180 / parameter.numel()) ** 0.5


@pytest.mark.parametrize(
    ("network", "shape", "activation"),
    [
        ("resnet", (1, 28, 28), None),
        ("cnn", (30,), None),
        ("cpl", (30,), None),
        ("cnn", (1, 9, 28), None),
        ("mlp", (3,), "gelu"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_sentence(network, shape, activation):
    with pytest.raises(ModelError) as refused:
        build(network, shape, 10, activation)
    assert "\n" not in str(refused.value)


def test_the_smallest_image_that_the_cnn_takes():
    assert build("cnn", (1, 10, 10), 2)(torch.zeros(1, 1, 10, 10)).shape == (1, 2)


# Initialisation ------------------------------------------------------------------------------------------------------


def same_weights(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("network", ["cnn", "mlp", "cpl"])
def test_initial_weights_are_determined_by_the_seed_alone(network):
    first = build(network, (1, 12, 12), 3, seed=4)
    torch.rand(7)
    assert same_weights(build(network, (1, 12, 12), 3, seed=4), first)
    assert not same_weights(build(network, (1, 12, 12), 3, seed=5), first)


def test_building_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    build("cnn", (1, 12, 12), 3, seed=4)
    assert torch.equal(torch.get_rng_state(), before)


# A factory of the user's own -----------------------------------------------------------------------------------------

_numbers = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a module into the working directory and say its name, which no other test has used."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> str:
        name = f"own_network_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def test_a_factory_gets_the_keywords_that_it_takes(module):
    name = module(
        "from torch import nn\n"
        "def narrow(classes, input_shape, activation):\n"
        "    assert activation == 'tanh'\n"
        "    return nn.Linear(input_shape[0], classes)\n"
        "def plain(classes=2): return nn.Linear(6, classes)\n"
        "def nothing(): return nn.Linear(6, 5)\n"
    )
    assert build(f"{name}:narrow", (6,), 4, "tanh").weight.shape == (4, 6)
    assert build(f"{name}:plain", (6,), 4).weight.shape == (4, 6)
    assert build(f"{name}:nothing", (6,), 4).weight.shape == (5, 6)


def test_a_factory_is_initialised_from_the_seed_and_leaves_the_global_generator_alone(module):
    name = module("from torch import nn\ndef make(): return nn.Linear(6, 5)\n")
    before = torch.get_rng_state()
    first, again, other = (build(f"{name}:make", (6,), 5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert same_weights(first, again)
    assert not same_weights(first, other)


def test_a_class_of_network_is_a_factory_too(module):
    name = module(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, input_shape, classes):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(*input_shape, classes)\n"
        "    def forward(self, x): return self.layer(x)\n"
    )
    assert build(f"{name}:Net", (6,), 4)(torch.zeros(1, 6)).shape == (1, 4)


BROKEN = {
    "no such function": "x = 1\n",
    "an import that fails": "import no_such_package_anywhere\ndef make(): ...\n",
    "a syntax error": "def make(:\n",
    "a module that raises": "raise RuntimeError('out of order')\n",
    "not callable": "make = 3\n",
    "not a network": "def make(): return 3\n",
    "an argument that nobody gives": "def make(width): ...\n",
    "a factory that raises": "def make(): raise RuntimeError('out of order')\n",
}


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN.keys())
def test_a_bad_factory_is_refused_in_one_sentence_that_names_it(module, source):
    path = f"{module(source)}:make"
    with pytest.raises(ModelError) as refused:
        build(path, (6,), 4)
    assert path in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", ["no_such_package_anywhere:make", ":make", "torch:", "torch.nn:NoSuchLayer"])
def test_a_path_that_leads_nowhere_is_refused(path):
    with pytest.raises(ModelError, match=path):
        build(path, (6,), 4)


# Preparing -----------------------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)


class ForeignBatchNorm(nn.BatchNorm2d.__bases__[0]):  # type: ignore[misc]
    """As other libraries write theirs: on what torch's batch norms have in common, and on none of them."""


@pytest.mark.parametrize("method", PRIVATE)
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.SyncBatchNorm(4), nn.LazyBatchNorm2d(), ForeignBatchNorm(4)])
def test_batch_norm_is_refused_under_a_private_method_naming_the_layer_and_the_remedy(method, norm):
    with pytest.raises(ModelError) as refused:
        prepare(Mixing(norm), Plan(method=method, record_sampling="fixed"), "cpu")
    message = str(refused.value)
    assert "layer body.1 " in message
    assert type(norm).__name__ in message
    assert "GroupNorm" in message
    assert "\n" not in message


def test_a_network_that_is_itself_a_batch_norm_is_refused_too():
    with pytest.raises(ModelError, match="BatchNorm1d"):
        prepare(nn.BatchNorm1d(4), Plan(), "cpu")


@pytest.mark.parametrize("method", PRIVATE)
@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.LayerNorm([4, 4, 4]), nn.InstanceNorm2d(4)])
def test_norms_that_do_not_mix_examples_are_allowed(method, norm):
    prepared = prepare(Mixing(norm), Plan(method=method), "cpu")
    inputs = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(prepared(inputs)[:1], prepared(inputs[:1]))


def test_batch_norm_is_refused_where_empty_slots_would_count_in_its_statistics():
    with pytest.raises(ModelError, match=r"body\.1 .*poisson|body\.1 .*Poisson"):
        prepare(Mixing(nn.BatchNorm2d(4)), Plan(method="nonprivate", record_sampling="poisson"), "cpu")


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 1, 6, 6, generator=generator), torch.randint(3, (count,), generator=generator)


def train(model: nn.Module, data: tuple[Tensor, Tensor], sizes: list[int], chunk: int | None = None) -> nn.Module:
    starts = [sum(sizes[:client]) for client in range(len(sizes))]
    lists = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    plan = Plan(
        method="nonprivate", record_sampling="partition", rounds=1, per_round=len(sizes), local_steps=2, batch_size=4,
        learning_rate=0.1,
    )  # fmt: skip
    return simulate(model, partition(data, indices=lists), plan, chunk=chunk).model


def test_batch_norm_without_privacy_trains_as_torch_does_in_training_mode():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Mixing(nn.BatchNorm2d(4))
    inputs, targets = images(8)
    order = partition((inputs, targets), indices=[list(range(8))]).indices(0).tolist()
    reference = copy.deepcopy(model).train()
    optimiser = torch.optim.SGD(reference.parameters(), lr=0.1)
    for batch in (order[:4], order[4:]):
        optimiser.zero_grad()
        nn.functional.cross_entropy(reference(inputs[batch]), targets[batch]).backward()
        optimiser.step()
    trained = dict(train(model, (inputs, targets), [8]).named_parameters())
    for name, value in reference.named_parameters():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-5)


def test_batch_norm_over_vectors_can_be_trained_without_privacy():
    """One example has no variance, so a check by single examples must not be what decides here."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    trained = dict(train(model, images(8), [8]).named_parameters())
    assert not torch.equal(trained["1.weight"], model[1].weight)


def test_batch_norm_is_refused_where_a_small_client_would_leave_slots_empty():
    with pytest.raises(ModelError, match=r"mixes examples.*3 records"):
        train(Mixing(nn.BatchNorm2d(4)), images(11), [8, 3])


SEQUENCE = torch.rand(4, 6, 8)  # of a batch of 4, or, to a layer that takes the batch second, of one of 6
RANDOM = {
    "Dropout": (nn.Dropout(0.9), SEQUENCE),
    "Dropout1d": (nn.Dropout1d(0.9), SEQUENCE),
    "Dropout2d": (nn.Dropout2d(0.5), SEQUENCE[..., None]),
    "Dropout3d": (nn.Dropout3d(0.5), SEQUENCE[..., None, None]),
    "AlphaDropout": (nn.AlphaDropout(0.9), SEQUENCE),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout(0.9), SEQUENCE),
    "RReLU": (nn.RReLU(), SEQUENCE - 0.5),
    "MultiheadAttention": (nn.MultiheadAttention(8, 2, dropout=0.9), (SEQUENCE,) * 3),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer(8, 2, 16), SEQUENCE),
    "TransformerDecoderLayer": (nn.TransformerDecoderLayer(8, 2, 16), (SEQUENCE,) * 2),
    "Transformer": (nn.Transformer(8, 2, 2, 2, 16), (SEQUENCE,) * 2),
    "RNN": (nn.RNN(8, 5, 2, dropout=0.9), SEQUENCE),
    "RNNBase": (nn.LSTM(8, 5, 3, dropout=0.9, batch_first=True), SEQUENCE),
    "LSTM": (nn.LSTM(8, 5, 2, dropout=0.9, bidirectional=True), SEQUENCE),
    "GRU": (nn.GRU(8, 5, 2, dropout=0.9), SEQUENCE),
}


class Inside(nn.Module):
    """A layer somewhere inside a network, whose answer is a tensor or starts with one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.body, self.weight = nn.ModuleDict({"layer": layer}), nn.Parameter(torch.ones(()))

    def forward(self, *inputs: Tensor) -> Tensor:
        answer = self.body["layer"](*inputs)
        return self.weight * (answer if isinstance(answer, Tensor) else answer[0])


@pytest.mark.parametrize("name", RANDOM)
def test_dropout_is_switched_off(name):
    layer, inputs = RANDOM[name]
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    model = Inside(layer).train()
    assert not torch.equal(model(*inputs), model(*inputs))  # it is random, so that the next lines can fail
    prepared = prepare(model, Plan(), "cpu")
    answers = prepared(*inputs)
    assert torch.equal(answers, prepared(*inputs))
    torch.testing.assert_close(answers, copy.deepcopy(model).eval()(*inputs))
    assert not torch.equal(model(*inputs), model(*inputs))  # the given one is left as it is


def test_every_layer_of_torch_with_dropout_is_among_those_tested():
    layers = {name: kind for name, kind in vars(nn).items() if isinstance(kind, type) and issubclass(kind, nn.Module)}
    dropping = {
        name for name, kind in layers.items()
        if "dropout" in inspect.signature(kind.__init__).parameters or "dropout" in (inspect.getdoc(kind) or "").lower()
    }  # fmt: skip
    assert dropping - {"TransformerEncoder", "TransformerDecoder"} <= RANDOM.keys()  # those are made of the layers above
    assert len(dropping) > 10


def test_attention_at_its_defaults_can_be_trained():
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.layer(inputs.flatten(1).unflatten(1, (-1, 8))).mean(1))

    data = (SEQUENCE.repeat(2, 1, 1), torch.arange(8) % 2)
    plan = Plan(rounds=1, per_round=2, local_steps=2, batch_size=2)
    federation, model = partition(data, clients=2, scheme="iid"), Attending()
    first, again = (simulate(model, federation, plan).model for _ in range(2))
    assert same_weights(first, again)
    assert not same_weights(first, model)


def frozen_network() -> nn.Module:
    return nn.Linear(3, 2).requires_grad_(False)


@pytest.mark.parametrize("model", [nn.Flatten(), frozen_network()], ids=["no weights", "all frozen"])
def test_a_network_without_trainable_weights_is_refused(model):
    with pytest.raises(ModelError, match="no trainable parameter"):
        prepare(model, Plan(), "cpu")


def test_the_given_model_is_left_as_it_is():
    model = Mixing(nn.Dropout(0.5)).eval()
    before = copy.deepcopy(model.state_dict())
    trained = train(model, images(8), [4, 4])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not same_weights(trained, model)
    assert not any(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_the_given_batch_norms_statistics_are_left_as_they_are():
    model = Mixing(nn.BatchNorm2d(4))
    train(model, images(8), [4, 4])
    assert model.body[1].running_mean.tolist() == [0] * 4
    assert int(model.body[1].num_batches_tracked) == 0
    assert model.body[1].track_running_stats
