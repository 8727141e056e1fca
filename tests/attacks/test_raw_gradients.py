"""Raw gradients, as a training loop of the user's own has them: taken in any form, or refused in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks import RECIPES, Leaks
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.errors import DataError, FedcdpError, ModelError, PlanError

Named = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def gradient(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss = F.cross_entropy) -> Named:
    """The mean gradient of a batch, by plain PyTorch."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss(model(inputs), targets), list(trained.values())), strict=True))


def one_by_one(model: nn.Module, inputs: Tensor, targets: Tensor) -> Named:
    """The gradient of every example [examples, ...]."""
    each = [gradient(model, x[None], y[None]) for x, y in zip(inputs, targets, strict=True)]
    return {name: torch.stack([one[name] for one in each]) for name in each[0]}


def leaks(*args: Any, **kwargs: Any) -> Leaks:
    found = fedcdp.attack(*args, **kwargs)
    assert isinstance(found, Leaks)
    return found


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))


@pytest.fixture
def inputs() -> Tensor:
    return torch.rand(4, 6, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def targets() -> Tensor:
    return torch.tensor([0, 2, 1, 2])


# What is taken --------------------------------------------------------------------------------------------------------


FORMS: dict[str, Callable[[Named], Any]] = {
    "by name": lambda named: named,
    "by name, in another order": lambda named: dict(reversed(named.items())),
    "in a list": lambda named: list(named.values()),
    "in a tuple": lambda named: tuple(named.values()),
    "of numpy": lambda named: {name: value.numpy() for name, value in named.items()},
    "of double precision": lambda named: {name: value.double() for name, value in named.items()},
    "of one victim": lambda named: {name: value[None] for name, value in named.items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_is_taken_in_any_form(model: nn.Module, inputs: Tensor, targets: Tensor, form: str) -> None:
    given = FORMS[form](gradient(model, inputs[:1], targets[:1]))
    found = leaks(given, model=model, truth=(inputs[:1], targets[:1]))
    assert (found.success_rate, found.label_accuracy(), found.attack) == (1, 1, "analytic")
    torch.testing.assert_close(found.found.examples[0], inputs[:1])


def test_what_pytorch_leaves_in_the_parameters_of_a_frozen_network_is_taken_as_it_is(
    model: nn.Module, inputs: Tensor, targets: Tensor
) -> None:
    model[2].bias.requires_grad_(False)  # type: ignore[index]
    F.cross_entropy(model(inputs[:1]), targets[:1]).backward()
    assert list(model.parameters())[-1].grad is None
    for given in ([p.grad for p in model.parameters()], {name: p.grad for name, p in model.named_parameters()}):
        assert leaks(given, model=model, truth=(inputs[:1], targets[:1])).success_rate == 1


def test_several_victims_are_attacked_at_once(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    found = leaks(one_by_one(model, inputs, targets), model=model, truth=(inputs, targets))
    assert found.summary()["victims"] == 4
    assert found.success_rate == 1
    torch.testing.assert_close(found.found.examples[:, 0], inputs)
    pairs = leaks(one_by_one(model, inputs, targets), model=model, truth=(inputs[:, None], targets[:, None]))
    assert torch.equal(pairs.found.examples, found.found.examples)


def test_a_batch_of_one_victim_is_several_examples(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    found = leaks(gradient(model, inputs[:2], targets[:2]), model=model, truth=(inputs[:2], targets[:2]))
    row = found.summary()
    assert (row["victims"], row["examples"], row["leak"]) == (1, 2, "type1")
    assert found.found.examples.shape == (1, 2, 6)
    assert found.success_rate == 1


def test_batches_of_several_victims(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    both = [gradient(model, inputs[i : i + 2], targets[i : i + 2]) for i in (0, 2)]
    given = {name: torch.stack([one[name] for one in both]) for name in both[0]}
    found = leaks(given, model=model, truth=(inputs.view(2, 2, 6), targets.view(2, 2)))
    assert found.summary()["examples"] == 4
    assert found.success_rate is not None
    assert found.success_rate >= 0.5


def test_without_the_truth_examples_are_found_and_nothing_is_claimed(
    model: nn.Module, inputs: Tensor, targets: Tensor
) -> None:
    found = leaks(one_by_one(model, inputs, targets), model=model, input_shape=(6,))
    torch.testing.assert_close(found.found.examples[:, 0], inputs)
    assert found.found.labels[:, 0].tolist() == targets.tolist()
    row = found.summary()
    assert (row["victims"], row["success_rate"], row["distance_mean"], row["psnr_mean"]) == (4, None, None, None)
    assert (found.success_rate, found.label_accuracy(), found.scores, found.baselines) == (None, None, None, None)
    assert not found.first_exact.isfinite().any()


def test_without_the_truth_the_number_of_examples_is_what_is_said(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    found = leaks(gradient(model, inputs[:2], targets[:2]), model=model, input_shape=(6,), examples=2)
    order = torch.cdist(inputs[:2], found.found.examples[0]).argmin(1)
    torch.testing.assert_close(found.found.examples[0][order], inputs[:2], rtol=1e-3, atol=1e-4)


def test_the_default_attack_fits_what_the_gradient_is_of(inputs: Tensor, targets: Tensor) -> None:
    images, network = inputs.view(4, 1, 2, 3), nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    single = leaks(gradient(network, images[:1], targets[:1]), model=network, truth=(images[:1], targets[:1]))
    batch = leaks(gradient(network, images[:2], targets[:2]), model=network, truth=(images[:2], targets[:2]))
    assert single.attack == "linear-head"
    assert (batch.attack, batch.success_rate) == ("linear-head", 1)
    assert batch.found.examples.shape[1] == 2


def test_a_loss_of_ones_own_and_a_recipe_of_ones_own(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    def smoothed(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, label_smoothing=0.1)

    model = nn.Sequential(nn.Linear(6, 20), nn.Sigmoid(), nn.Linear(20, 3))
    given = gradient(model, inputs[:1], targets[:1], smoothed)
    recipe = RECIPES["clip-aware"].but(iterations=100)
    found = leaks(given, model=model, truth=(inputs[:1], targets[:1]), loss=smoothed, attack=recipe)
    assert (found.attack, found.success_rate) == ("recipe", 1)
    with pytest.raises(ModelError, match="true examples do not give this gradient"):
        fedcdp.attack(given, model=model, truth=(inputs[:1], targets[:1]))


def test_inputs_outside_0_to_1_are_scored_in_their_own_range(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    wide = inputs * 20 - 5
    found = leaks(one_by_one(model, wide, targets), model=model, truth=(wide, targets))
    assert found.success_rate == 1
    assert found.value_range == (float(wide.min()), float(wide.max()))


def test_knowing_nothing_is_the_middle_of_the_range_where_nothing_is_public(inputs: Tensor, targets: Tensor) -> None:
    """Not the victims themselves, beside whom no reconstruction would look good."""
    images, network = inputs.view(4, 1, 2, 3), nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    found = leaks(one_by_one(network, images, targets), model=network, truth=(images, targets), attack="analytic").summary()
    assert (found["success_rate"], found["recognisable_rate"], found["identified_rate"]) == (1, 1, 1)
    nothing = found["knowing_nothing"]
    assert nothing["class_mean"]["mse"] == pytest.approx(float((images - 0.5).square().mean()), rel=1e-5)
    assert found["candidates"] == 2


def test_public_examples_can_be_given_and_then_averaging_works(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    generator = torch.Generator().manual_seed(8)
    public = Dataset(torch.rand(90, 6, generator=generator), torch.randint(3, (90,), generator=generator), 3)
    given = one_by_one(model, inputs, targets)
    found = leaks(
        given, model=model, truth=(inputs, targets), public=public,
        attack=RECIPES["averaging"].but(iterations=20, restarts=1, components=6),
    )  # fmt: skip
    assert found.summary()["candidates"] == 91
    with pytest.raises(DataError, match="public: "):
        fedcdp.attack(given, model=model, truth=(inputs, targets), attack="averaging")


def test_a_gradient_that_was_captured_gives_what_its_capture_gave(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    federation = fedcdp.partition((inputs, targets), clients=4, scheme="iid")
    plan = Plan(method="nonprivate", local_steps=1, batch_size=1, record_sampling="partition", rounds=1, per_round=4)
    recipe = RECIPES["cpl"].but(iterations=3)
    tapped = leaks(plan, model=model, federation=federation, victims=4, attack=recipe)
    captured = tapped.captured
    raw = leaks(captured.seen, model=model, truth=(captured.inputs, captured.targets), attack=recipe)
    torch.testing.assert_close(raw.found.examples, tapped.found.examples)
    torch.testing.assert_close(raw.found.loss, tapped.found.loss)


@pytest.mark.parametrize("size", [1e-4, 1e-7])
def test_a_small_gradient_of_a_batch_is_recognised_as_its_examples(inputs: Tensor, targets: Tensor, size: float) -> None:
    """That of a network that is nearly done; added to its weights, it would be rounded away."""
    network = nn.Linear(6, 3)

    def tiny(outputs: Tensor, labels: Tensor) -> Tensor:
        return size * F.cross_entropy(outputs, labels)

    given = gradient(network, inputs, targets, tiny)
    found = leaks(given, model=network, truth=(inputs, targets), loss=tiny, attack=RECIPES["batch"].but(iterations=1))
    assert found.summary()["examples"] == 4


# What is refused ------------------------------------------------------------------------------------------------------


class Scene:
    """A gradient, its network and its truth, and what is wrong with one of them."""

    def __init__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        self.model, self.x, self.y = model, inputs, targets
        self.named = gradient(model, inputs[:1], targets[:1])
        self.several = one_by_one(model, inputs, targets)
        self.truth = (inputs[:1], targets[:1])

    def refused(self, target: Any = None, **given: Any) -> tuple[Any, dict[str, Any]]:
        options = {"model": self.model} | given
        if "input_shape" not in given:
            options = {"truth": self.truth} | options
        return self.named if target is None else target, options


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))


def _spoilt(layer: nn.Module) -> None:
    nn.init.constant_(layer.weight, math.inf)  # type: ignore[arg-type]


def unvectorisable(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels) if labels.max().item() < 9 else outputs.sum()


REFUSED: dict[str, tuple[Callable[[Scene], tuple[Any, dict[str, Any]]], type[FedcdpError], str]] = {
    "a missing name": (
        lambda s: s.refused({name: value for name, value in s.named.items() if name != "2.bias"}),
        ModelError, "gradients: they do not match this network: 2.bias is missing",
    ),
    "a foreign name": (lambda s: s.refused(s.named | {"3.bias": s.x}), ModelError, "3.bias is not one of its trained"),
    "another shape": (
        lambda s: s.refused(s.named | {"0.bias": torch.zeros(21)}),
        ModelError, "gradients: 0.bias has shape [21], but the network's parameter has [20]",
    ),
    "too few": (lambda s: s.refused(list(s.named.values())[:3]), ModelError, "gradients: 3 tensors do not match"),
    "too many": (lambda s: s.refused([*s.named.values(), s.x]), ModelError, "gradients: 5 tensors do not match"),
    "none at all": (lambda s: s.refused([]), ModelError, "gradients: 0 tensors"),
    "NaN": (
        lambda s: s.refused(s.named | {"2.bias": torch.full((3,), math.nan)}),
        ModelError, "gradients: 2.bias contains values that are not finite",
    ),
    "words": (lambda s: s.refused(s.named | {"2.bias": "abc"}), PlanError, "gradients: 2.bias is str, not a tensor"),
    "several numbers of victims": (
        lambda s: s.refused(s.several | {"2.bias": s.named["2.bias"]}), PlanError, "victims: the gradients are of [1, 4]",
    ),
    "no victims": (
        lambda s: s.refused({name: value[:0] for name, value in s.several.items()}), PlanError, "victims: ",
    ),
    "a path": (lambda s: s.refused("runs/mine"), PlanError, "target: 'runs/mine' is not a Run or a Plan"),
    "a network for a target": (lambda s: s.refused(s.model), PlanError, "target: an object of type Sequential is not a Run"),
    "a generator": (lambda s: s.refused(v for v in s.named.values()), PlanError, "target: an object of type generator"),
    "no network": (lambda s: s.refused(model=None), PlanError, "model: an attack on gradients needs the network"),
    "another network": (lambda s: s.refused(model=nn.Linear(6, 3)), ModelError, "gradients: "),
    "a network without finite weights": (
        lambda s: s.refused(model=nn.Sequential(*s.model[:2], nn.Linear(20, 3).apply(_spoilt))),  # type: ignore[index]
        ModelError, "model: its outputs are not finite",
    ),
    "another network of the same shapes": (
        lambda s: s.refused(model=nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))),
        ModelError, "the true examples do not give this gradient",
    ),
    "data normalised otherwise": (
        lambda s: s.refused(truth=((s.x[:1] - 0.13) / 0.3, s.y[:1])),
        ModelError, "were the data normalised differently?",
    ),
    "another label": (lambda s: s.refused(truth=(s.x[:1], s.y[:1] + 1)), ModelError, "the true examples do not give"),
    "a label that is no class": (
        lambda s: s.refused(truth=(s.x[:1], torch.tensor([7]))), DataError, "truth: labels run from 7 to 7",
    ),
    "truth of another number": (
        lambda s: s.refused(s.several, truth=(s.x[:3], s.y[:3])),
        PlanError, "truth: inputs [3, 6] and labels [3] do not match 4 victims",
    ),
    "truth of another shape": (
        lambda s: s.refused(truth=(torch.rand(1, 7), s.y[:1])), ModelError, "input_shape: the network does not take",
    ),
    "truth of no example": (lambda s: s.refused(truth=(s.x[:0], s.y[:0])), PlanError, "truth: inputs [0, 6]"),
    "truth that is no batch": (lambda s: s.refused(truth=(s.x[0], s.y[0])), PlanError, "truth: inputs [6] and labels []"),
    "half the truth": (lambda s: s.refused(truth=(s.x[:1],)), PlanError, "truth: give a pair"),
    "truth without labels": (lambda s: s.refused(truth=(s.x[:1], None)), PlanError, "truth: labels is NoneType"),
    "neither truth nor shape": (lambda s: s.refused(truth=None), PlanError, "input_shape: give the shape"),
    "a shape of nothing here": (lambda s: s.refused(input_shape=(7,)), ModelError, "input_shape: "),
    "no examples": (lambda s: s.refused(input_shape=(6,), examples=0), PlanError, "examples: 0"),
    "the closed form of a convolution": (
        lambda s: (
            gradient(c := convolution(), torch.ones(1, 1, 4, 4), s.y[:1]),
            {"model": c, "input_shape": (1, 4, 4), "attack": "analytic"},
        ),
        ModelError, "analytic needs a network whose first layer is dense; this one starts with Conv2d",
    ),
    "a matched filter": (lambda s: s.refused(attack="matched-filter"), PlanError, "attack: matched-filter needs a run"),
    "layer by layer": (lambda s: s.refused(attack="per-layer"), PlanError, "attack: per-layer needs a run or a plan"),
    "membership": (lambda s: s.refused(attack="membership"), PlanError, "attack: membership needs a trained"),
    "an unknown attack": (lambda s: s.refused(attack="nosuch"), PlanError, "attack: 'nosuch' is not one of"),
    "an unknown leak": (lambda s: s.refused(leak="type3"), PlanError, "leak: 'type3'"),
    "what is for plans": (lambda s: s.refused(at_round=1, releases=2), PlanError, "at_round, releases: only for"),
    "a loss that cannot be vectorised": (
        lambda s: s.refused(loss=unvectorisable), ModelError, "cannot be differentiated by torch.func",
    ),
    "public examples of another shape": (
        lambda s: s.refused(public=Dataset(torch.zeros(9, 7), torch.zeros(9, dtype=torch.int64), 3)),
        DataError, "public: inputs of shape [7]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_gradient_that_does_not_belong_is_refused_in_a_sentence(
    model: nn.Module, inputs: Tensor, targets: Tensor, name: str
) -> None:
    make, kind, sentence = REFUSED[name]
    target, options = make(Scene(model, inputs, targets))
    with pytest.raises(kind) as refused:
        fedcdp.attack(target, **options)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
