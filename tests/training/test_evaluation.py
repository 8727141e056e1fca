"""Accuracy of networks with one output for each class, and of networks with a single output for two classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks.membership import infer_membership
from fedcdp.data.dataset import Dataset
from fedcdp.engine import FunctionalEngine
from fedcdp.errors import ModelError
from fedcdp.training.evaluation import evaluate, no_better_than_guessing, predictions, threshold_of
from tests.support.made_runs import made_run

FEATURES = 4


def two_classes(count: int, seed: int) -> Dataset:
    """Points that a hyperplane separates with a wide margin, a fifth of them in class 1."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(count) % 5 == 0).long()
    inputs = torch.randn(count, FEATURES, generator=generator)
    inputs[:, 0] = (2.0 * labels - 1) * (1 + inputs[:, 0].abs())
    return Dataset(inputs, labels, 2)


def logits(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs.reshape(-1), targets.float())


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs.reshape(-1), targets.float(), pos_weight=torch.tensor(4.0))


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    return (1 - (2 * targets - 1) * outputs.reshape(-1)).clamp(min=0).mean()


def signs(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.reshape(-1) - (2 * targets - 1)).square().mean()


def zero_or_one(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.reshape(-1) - targets).square().mean()


def likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
    p = outputs.reshape(-1)
    return -torch.where(targets == 1, p, 1 - p).log().mean()


LOSSES: dict[str, tuple[Any, float, list[nn.Module]]] = {
    "function on logits": (F.binary_cross_entropy_with_logits, 0.0, []),
    "module on logits": (nn.BCEWithLogitsLoss(), 0.0, []),
    "own function on logits": (logits, 0.0, []),
    "weighted logits": (weighted, 0.0, []),
    "hinge": (hinge, 0.0, []),
    "regression on -1 and 1": (signs, 0.0, []),
    "regression on 0 and 1": (zero_or_one, 0.5, []),
    "function on probabilities": (F.binary_cross_entropy, 0.5, [nn.Sigmoid()]),
    "module on probabilities": (nn.BCELoss(), 0.5, [nn.Sigmoid()]),
    "own function on probabilities": (likelihood, 0.5, [nn.Sigmoid()]),
}
SHAPES: dict[str, Callable[[], list[nn.Module]]] = {"[n, 1]": list, "[n]": lambda: [nn.Flatten(0)]}
each_loss = pytest.mark.parametrize(("loss", "threshold", "last"), LOSSES.values(), ids=LOSSES.keys())


@pytest.mark.parametrize("shape", SHAPES)
@each_loss
def test_a_single_output_is_trained_and_scored_end_to_end(loss: Any, threshold: float, last: list[nn.Module], shape: str):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(FEATURES, 1), *last, *SHAPES[shape]())
    train, validation = two_classes(60, 1), two_classes(40, 2)
    federation = fedcdp.partition((train.inputs, train.targets), clients=3, scheme="iid", validation=validation)
    plan = fedcdp.Plan(method="nonprivate", rounds=5, per_round=3, local_steps=12, batch_size=5, learning_rate=0.1)
    run = fedcdp.simulate(network, federation, plan, loss=loss)
    with torch.no_grad():
        above = run.model(validation.inputs).reshape(-1) > threshold
    assert run.accuracy == pytest.approx(float((above == (validation.targets == 1)).float().mean()))
    assert run.accuracy > 0.95  # 0.8 is the share of class 0


@each_loss
def test_accuracy_counts_each_example_once(loss: Any, threshold: float, last: list[nn.Module]):
    """Outputs that are right on 3 of 8 examples, in batches of every shape; class 0 alone would be right on 5."""
    scale = 1.0 if threshold == 0 else 0.4
    answers = threshold + scale * torch.tensor([1.0, 1, 1, -1, -1, 1, -1, -1])
    data = Dataset(answers[:, None], torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]), 2)
    if last:  # so that the network gives these very answers
        data = replace(data, inputs=torch.logit(data.inputs))
    network = nn.Sequential(nn.Linear(1, 1, bias=False), *last)
    weights = {"0.weight": torch.ones(1, 1)}
    found = evaluate(FunctionalEngine(network, loss), weights, data, torch.device("cpu"))
    assert found["accuracy"] == 3 / 8


@pytest.mark.parametrize("name", LOSSES)
def test_the_threshold_follows_from_the_loss(name: str):
    loss, threshold, _ = LOSSES[name]
    engine = FunctionalEngine(nn.Linear(1, 1), loss)
    for outputs in (torch.zeros(4), torch.zeros(4, 1)):
        assert threshold_of(engine.loss, outputs, torch.zeros(4, dtype=torch.int64)) == threshold


def test_predictions_of_every_shape():
    assert predictions(torch.tensor([[1.0, 2, 0], [5, 4, 3]])).tolist() == [1, 0]
    assert predictions(torch.tensor([-2.0, 0.1, 0, 3])).tolist() == [0, 1, 0, 1]
    assert predictions(torch.tensor([[-2.0], [0.1], [0], [3]])).tolist() == [0, 1, 0, 1]
    assert predictions(torch.tensor([0.2, 0.7]), 0.5).tolist() == [0, 1]
    assert predictions(torch.tensor([[0.3]])).tolist() == [1]


@pytest.mark.parametrize("loss", [F.cross_entropy, logits, F.binary_cross_entropy_with_logits])
def test_a_single_output_for_three_classes_is_refused(loss: Any):
    inputs, labels = torch.randn(30, FEATURES), torch.arange(30) % 3
    federation = fedcdp.partition((inputs, labels), indices=[range(0, 30, 3), range(1, 30)])  # the first holds class 0 alone
    with pytest.raises(ModelError, match=r"1 outputs for the 3 classes of the data; it needs one for each$"):
        fedcdp.simulate(nn.Linear(FEATURES, 1), federation, fedcdp.Plan(method="nonprivate", per_round=2), loss=loss)


def test_a_binary_loss_needs_a_single_output():
    inputs, labels = torch.randn(30, FEATURES), torch.arange(30) % 2
    federation = fedcdp.partition((inputs, labels), clients=2, scheme="iid")
    with pytest.raises(ModelError, match=r"the network returns \[2\] values for targets of one value"):
        fedcdp.simulate(
            nn.Linear(FEATURES, 2), federation, fedcdp.Plan(method="nonprivate", per_round=2), loss=nn.BCEWithLogitsLoss()
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_loaded_model_and_membership_score_a_single_logit(shape: str):
    data = two_classes(40, 3)
    network = nn.Sequential(nn.Linear(FEATURES, 1, bias=False), *SHAPES[shape]())
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[3.0, 0, 0, 0]]))
    trained = made_run(network, fedcdp.partition(data, clients=2, scheme="iid", validation=data))
    found = trained.evaluate("train")
    assert (found["examples"], found["accuracy"]) == (40, 1.0)
    assert found["metrics"] == {
        "balanced_accuracy": 1.0,
        "macro_f1": 1.0,
        "auroc": 1.0,
        "loss": pytest.approx(0.0136, abs=1e-4),
    }
    flipped = replace(data, targets=1 - data.targets)
    assert replace(trained, federation=fedcdp.partition(flipped, clients=2)).evaluate("train")["accuracy"] == 0
    # Members are those whose label the network gives; the others are the same points under the other label.
    assert infer_membership(network, data, replace(data, targets=1 - data.targets)).auc.value == 1.0


# Accuracy that guessing reaches, too -------------------------------------------------------------------------------------


def test_an_accuracy_at_the_share_of_the_largest_class_is_warned_of() -> None:
    data = two_classes(1000, 1)  # four fifths in class 0
    for accuracy in (0.2, 0.8, 0.805):
        said = no_better_than_guessing({"accuracy": accuracy}, data)
        assert said is not None
        assert said.startswith(f"validation accuracy {accuracy:.3f} is no better than always predicting the most frequent")
        assert "(0.800)" in said
    assert no_better_than_guessing({"accuracy": 0.806}, data) is None


def test_without_validation_there_is_nothing_to_warn_of() -> None:
    assert no_better_than_guessing({"accuracy": None}, two_classes(10, 1)) is None
    assert no_better_than_guessing({"accuracy": 0.1}, None) is None
