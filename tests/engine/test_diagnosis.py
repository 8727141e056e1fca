"""The reason for which a network is refused: a mistake in the network or the loss, or a limit of `torch.func`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.engine import Batch, FunctionalEngine
from fedcdp.errors import ModelError

BY_TORCH_FUNC = "cannot be differentiated by torch.func"


class Net(nn.Module):
    """One layer from 4 features to 3 classes, with something done around it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 3), how
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Any:
        outputs = self.layer(inputs)
        match self.how:
            case "item":
                return outputs * outputs.mean().item()
            case "branch":
                return outputs if outputs.sum() > 0 else -outputs
            case "numpy":
                return outputs + torch.from_numpy(outputs.detach().numpy())
            case "buffer in place":
                self.seen.add_(outputs.detach().mean(0))
                return outputs
            case "random":
                return F.dropout(outputs, 0.5, self.training)
            case "tuple":
                return outputs, inputs
            case "squeeze":
                return outputs.squeeze()
            case "one row":
                return outputs.mean(0)
            case "in place on a leaf":
                self.layer.weight.mul_(2)
                return outputs
        return outputs


def vector(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def number(outputs: Tensor, targets: Tensor) -> Any:
    return float(F.cross_entropy(outputs, targets).detach())


def constant(outputs: Tensor, _: Tensor) -> Tensor:
    return F.mse_loss(outputs.detach(), torch.zeros_like(outputs))


def misspelt(outputs: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(outputs, target.long())  # type: ignore[name-defined]  # noqa: F821


def two_outputs(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - F.one_hot(targets.clamp(max=1), 2)).square().mean()


def other_dtype(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(outputs.log_softmax(1), targets.float())


MISTAKES: dict[str, tuple[nn.Module, Any, str]] = {
    "inputs of another size": (nn.Linear(5, 3), F.cross_entropy, "the network fails on .*shape .4. each: mat1 and mat2"),
    "inputs of another dtype": (nn.Embedding(5, 3), F.cross_entropy, "the network fails on .*: Expected tensor"),
    "inputs of another rank": (nn.Conv2d(1, 3, 1), F.cross_entropy, "the network fails on .*: Expected 3D"),
    "several outputs": (Net("tuple"), F.cross_entropy, "the network returns tuple, not a tensor"),
    "no row for each example": (Net("one row"), F.cross_entropy, r"the network returns shape \[3\] for a batch of 5"),
    "a batch of one": (Net("squeeze"), F.cross_entropy, r"the network returns shape \[3\] for a single example"),
    "an error in the loss": (nn.Linear(4, 3), misspelt, "the loss fails on .*: name 'target' is not defined"),
    "labels of another dtype": (nn.Linear(4, 3), other_dtype, "the loss fails on .*: expected .*Long"),
    "a loss without a mean": (nn.Linear(4, 3), vector, r"the loss returns shape \[5\], not one number"),
    "a loss that is no tensor": (nn.Linear(4, 3), number, "the loss returns float, not a tensor"),
    "a loss of nothing": (nn.Linear(4, 3), lambda *_: None, "the loss returns NoneType, not a tensor"),
    "another number of outputs": (nn.Linear(4, 3), two_outputs, "the loss fails on .*: The size of tensor a"),
    "weights changed in forward": (Net("in place on a leaf"), F.cross_entropy, "the network fails on .*: a leaf Variable"),
}
LIMITS = {"item": BY_TORCH_FUNC, "branch": BY_TORCH_FUNC, "numpy": BY_TORCH_FUNC, "buffer in place": BY_TORCH_FUNC,
          "random": "the network draws random numbers in its forward pass"}  # fmt: skip


def batch(labels: list[int] | None = None) -> Batch:
    targets = torch.tensor(labels or [0, 1, 2, 0, 1])
    return Batch(torch.rand(1, 5, 4, generator=torch.Generator().manual_seed(0)), targets[None], torch.ones(1, 5).bool())


def refused(model: nn.Module, loss: Any, tried: Batch, per_example: bool) -> str:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(ModelError) as found:
        FunctionalEngine(model, loss).check(weights, tried, per_example)
    return str(found.value)


@pytest.mark.parametrize("per_example", [True, False])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_not_blamed_on_torch_func(name: str, per_example: bool):
    model, loss, reason = MISTAKES[name]
    sentence = refused(model, loss, batch(), per_example or name == "a batch of one")  # batches of five work there
    assert BY_TORCH_FUNC not in sentence
    assert "\n" not in sentence
    assert re.search(reason, sentence), sentence


@pytest.mark.parametrize("per_example", [True, False])
@pytest.mark.parametrize("how", LIMITS)
def test_a_limit_of_torch_func_is_named_as_such(how: str, per_example: bool):
    model = Net(how)
    sentence = refused(model, F.cross_entropy, batch(), per_example)
    assert LIMITS[how] in sentence
    assert "\n" not in sentence
    assert not model.seen.any()  # the search for the reason leaves the network as it was


@pytest.mark.parametrize("per_example", [True, False])
def test_a_label_beyond_the_outputs_is_the_losss_error_and_no_record_is_quoted(per_example: bool):
    sentence = refused(nn.Linear(4, 3), F.cross_entropy, batch([0, 1, 7, 0, 1]), per_example)
    assert sentence.startswith("the loss fails on a label beyond the network's 3 outputs")
    assert "7" not in sentence


class Picky(nn.Module):
    """Refuses inputs above a half, and says which."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        if float(inputs.detach().max()) > 0.5:
            raise ValueError(f"{inputs.max()} is out of range")
        return self.layer(inputs)


def test_an_input_out_of_range_is_the_networks_error_and_no_record_is_quoted():
    model = Picky()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    engine = FunctionalEngine(model, F.cross_entropy)
    engine.per_example_gradients = lambda _, tried: model(tried.inputs[0])  # type: ignore[method-assign, assignment]
    with pytest.raises(ModelError) as found:
        engine.check(weights, batch(), per_example=True)
    assert "the network fails on a batch of 5" in str(found.value)
    assert "(ValueError)" in str(found.value)
    assert "out of range" not in str(found.value)
    assert found.value.__cause__ is None
