"""Frozen backbones inside modules of any structure: their features are computed once, and the training is the same."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation, partition
from fedcdp.engine import engines_for, frozen
from fedcdp.engine.frozen import split, through
from fedcdp.files.tree import Inputs, Layout, first_tensor
from fedcdp.models.features import Standardised
from fedcdp.models.networks import outputs_of, prepare
from fedcdp.training import trainer
from tests.methods.test_against_naive_loop import small_plan
from tests.support.own_models import CLASSES, Backbone, FrozenCnn, Recurrent, Transformer, images, texts

CPU = torch.device("cpu")


class Skipping(FrozenCnn):
    """The head sees features, the image itself, and weights of the network's own; the input is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((CLASSES,), 0.5))

    def forward(self, images: Tensor) -> Tensor:
        rows = images.size(0)
        return self.head(self.backbone(images).view(rows, -1)) + images.mean((1, 2, 3))[:, None] * self.scale


class Chained(nn.Module):
    """A head of known layers behind the backbone, in an order other than that of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.act, self.hidden = nn.Linear(6, CLASSES), nn.Tanh(), nn.Linear(128, 6)
        self.backbone, self.flatten = Backbone().eval().requires_grad_(False), nn.Flatten()

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.act(self.hidden(self.flatten(self.backbone(images)))))


class Pooling(nn.Module):
    """A frozen embedding and encoder on token ids with a mask that the trained head uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.reader = nn.Linear(8, CLASSES), Transformer().eval().requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is not None:
            raise ValueError("no labels are given")
        values = self.reader.encoder(self.reader.words(input_ids), src_key_padding_mask=attention_mask == 0)
        kept = attention_mask[..., None].to(values.dtype)
        return self.head((values * kept).sum(1) / kept.sum(1).clamp(min=1))


def recurrent() -> nn.Module:
    model = Recurrent()
    model.words.requires_grad_(False)
    model.layer.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "backbone and head": FrozenCnn,
    "features and inputs": Skipping,
    "a head of layers": Chained,
    "named inputs": Pooling,
    "a frozen LSTM": recurrent,
    "behind a sequence": lambda: nn.Sequential(Standardised((1, 8, 8)), FrozenCnn()),
    "nested sequences": lambda: nn.Sequential(
        OrderedDict(body=nn.Sequential(Backbone().eval().requires_grad_(False), nn.Flatten(), nn.Linear(128, 3)))
    ),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return made(MODELS[request.param])


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return prepare(make(), Plan(), "cpu")


def data_for(model: nn.Module, count: int) -> Dataset:
    ids, mask, targets = texts(count)
    if isinstance(model, Pooling):
        return Dataset({"input_ids": ids, "attention_mask": mask}, targets, CLASSES)
    return Dataset(ids, targets, CLASSES) if isinstance(model, Recurrent) else Dataset(*images(count), CLASSES)


def federation_for(model: nn.Module) -> Federation:
    return partition(data_for(model, 24), clients=4, scheme="iid", validation=data_for(model, 9))


def test_both_parts_compute_what_the_network_computes(model: nn.Module) -> None:
    inputs = data_for(model, 10).inputs
    front, rest = split(model, inputs, CPU)
    assert front is not None
    features = through(front, inputs, CPU)
    with torch.no_grad():
        torch.testing.assert_close(outputs_of(rest, features), outputs_of(model, inputs), rtol=1e-5, atol=1e-5)
        copied = outputs_of(copy.deepcopy(rest), features)
    torch.testing.assert_close(copied, outputs_of(rest, features).detach())


def test_trained_tensors_keep_names_and_order(model: nn.Module) -> None:
    _, rest = split(model, data_for(model, 10).inputs, CPU)
    assert list(Layout.of(rest).shapes) == list(Layout.of(model).shapes)
    assert Layout.of(rest).layers == Layout.of(model).layers
    shared = dict(rest.named_parameters())
    assert all(shared[name] is p for name, p in model.named_parameters() if p.requires_grad)
    assert not any(isinstance(layer, nn.Conv2d | nn.LSTM | nn.MultiheadAttention) for layer in rest.modules())


@pytest.mark.parametrize("method", ["fed-cdp", "nonprivate"])
def test_training_is_the_same(model: nn.Module, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, plan = federation_for(model), small_plan(method=method, rounds=2, noise_multiplier=0.5)
    once = fedcdp.simulate(model, federation, plan)
    monkeypatch.setattr(trainer, "split", lambda network, *_: (None, network))
    every_time = fedcdp.simulate(model, federation, plan, engine="functional")
    assert once.metrics[-1]["loss"] == pytest.approx(every_time.metrics[-1]["loss"], rel=1e-4)
    before = dict(model.named_parameters())
    for name, value in every_time.model.named_parameters():
        torch.testing.assert_close(dict(once.model.named_parameters())[name], value, rtol=1e-4, atol=1e-5)
        assert torch.equal(value, before[name]) is not value.requires_grad


def test_a_head_of_known_layers_takes_the_fast_engine() -> None:
    model = made(Chained)
    _, rest = split(model, images(10)[0], CPU)
    assert list(engines_for(rest, nn.functional.cross_entropy)) == ["batched", "functional"]
    assert fedcdp.simulate(model, federation_for(model), small_plan(), engine="batched").engine == "batched"


def test_an_examples_features_depend_on_that_example_alone() -> None:
    model, (inputs, _) = made(Skipping), images(10)
    front, _ = split(model, inputs, CPU)
    changed = inputs.clone()
    changed[1:] = torch.nan
    alone, together = through(front, changed, CPU), through(front, inputs, CPU)
    assert isinstance(alone, dict)
    assert isinstance(together, dict)
    assert all(torch.equal(alone[name][0], together[name][0]) for name in together)


class Branching(FrozenCnn):
    def forward(self, images: Tensor) -> Tensor:
        features = self.backbone(images).flatten(1)
        return self.head(features if features.sum() > 0 else -features)


class Centred(FrozenCnn):
    def forward(self, images: Tensor) -> Tensor:
        features = self.backbone(images).flatten(1)
        return self.head(features - features.mean(0))


class Random(FrozenCnn):
    def forward(self, images: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(self.backbone(images).flatten(1)))


class Variable(FrozenCnn):
    def forward(self, *images: Tensor) -> Tensor:
        return self.head(self.backbone(images[0]).flatten(1))


class Overwriting(FrozenCnn):
    """The trained layer reads features that a frozen operation overwrites later."""

    def forward(self, images: Tensor) -> Tensor:
        features = self.backbone(images).flatten(1)
        first = self.head(features)
        return first + features.mul_(2)[:, :CLASSES]


def hooked() -> nn.Module:
    model = FrozenCnn()
    model.register_forward_pre_hook(lambda _, inputs: inputs[0] + 1)
    return model


@pytest.mark.parametrize("make", [Branching, Centred, Random, Variable, Overwriting, hooked])
def test_a_network_that_cannot_be_cut_safely_stays_whole(make: Callable[[], nn.Module]) -> None:
    model = made(make)
    assert split(model, images(10)[0], CPU) == (None, model)


class Flattening(nn.Module):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.flatten, self.head = nn.Flatten(), nn.Linear(64, 3)
        self.spare = nn.Linear(64, 3).requires_grad_(trained)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.flatten(inputs)) + self.spare.bias


@pytest.mark.parametrize("trained", [False, True])
def test_a_front_that_costs_nothing_is_not_split_off(trained: bool) -> None:
    model = Flattening(trained)
    assert split(model, images(10)[0], CPU) == (None, model)


def test_features_that_do_not_fit_in_memory_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = made(FrozenCnn), images(10)[0]
    monkeypatch.setattr(frozen, "_room", lambda _: 10 * 128 * 4)
    assert split(model, inputs, CPU)[0] is not None
    monkeypatch.setattr(frozen, "_room", lambda _: 10 * 128 * 4 - 1)
    assert split(model, inputs, CPU) == (None, model)


def test_whether_a_network_is_cut_does_not_depend_on_records() -> None:
    seen: list[Inputs] = []

    class Watching(Backbone):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images)
            return super().forward(images)

    model = made(FrozenCnn)
    model.backbone.__class__ = Watching
    inputs, _ = images(10)
    assert split(model, 1000 + inputs, CPU)[0] is not None
    found = []
    for value in seen:
        with contextlib.suppress(RuntimeError):  # inside `vmap` a tensor has no single value
            found.append(float(first_tensor(value).max()))
    assert found
    assert max(found) < 1000
