"""Metrics of each task agree with scikit-learn, and the user's own are computed with them."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch import Tensor, nn

import fedcdp
from fedcdp.data.dataset import Dataset
from fedcdp.engine import FunctionalEngine
from fedcdp.errors import PlanError
from fedcdp.training.evaluation import evaluate, no_better_than_guessing
from fedcdp.training.metrics import main_figure, metric_text, metric_title, original_unit, task_metrics

seeds = st.integers(0, 10_000)


def drawn(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def coarse(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Values with many ties, which ranks must share."""
    return np.round(values * 4) / 4


def nothing(count: int) -> Tensor:
    return torch.zeros(count, 1)


@pytest.mark.slow
@given(seed=seeds, classes=st.integers(2, 5), count=st.integers(5, 40))
def test_metrics_of_classes_are_those_of_scikit_learn(seed: int, classes: int, count: int) -> None:
    rng = drawn(seed)
    targets = rng.integers(classes, size=count)
    outputs = coarse(rng.normal(size=(count, classes)) + np.eye(classes)[targets])
    found = task_metrics(Dataset(nothing(count), torch.tensor(targets), classes), torch.tensor(outputs), 0.0)
    answers, shares = outputs.argmax(1), torch.tensor(outputs).softmax(1).numpy()
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(targets, answers))
    assert found["balanced_accuracy"] == pytest.approx(sk.recall_score(targets, answers, average="macro",
                                                                       labels=np.unique(targets)))  # fmt: skip
    assert found["macro_f1"] == pytest.approx(sk.f1_score(targets, answers, average="macro", zero_division=0))
    if len(set(targets)) < classes:
        assert found["auroc"] is None
    else:
        expected = sk.roc_auc_score(targets, shares[:, 1] if classes == 2 else shares, multi_class="ovr")
        assert found["auroc"] == pytest.approx(expected)


@given(seed=seeds, count=st.integers(2, 40), threshold=st.sampled_from([0.0, 0.5]), column=st.booleans())
def test_metrics_of_one_logit_are_those_of_scikit_learn(seed: int, count: int, threshold: float, column: bool) -> None:
    rng = drawn(seed)
    targets = rng.integers(2, size=count)
    outputs = coarse(rng.normal(size=count) + targets)
    given = torch.tensor(outputs)[:, None] if column else torch.tensor(outputs)
    found = task_metrics(Dataset(nothing(count), torch.tensor(targets), task="binary"), given, threshold)
    answers = (outputs > threshold).astype(int)
    assert list(found) == ["accuracy", "balanced_accuracy", "f1", "auroc"]
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(targets, answers))
    assert found["f1"] == pytest.approx(sk.f1_score(targets, answers, zero_division=0))
    if len(set(targets)) == 2:
        assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(targets, answers))
        assert found["auroc"] == pytest.approx(sk.roc_auc_score(targets, outputs))
    else:
        assert found["auroc"] is None


@pytest.mark.slow
@given(seed=seeds, count=st.integers(2, 40), labels=st.integers(1, 4))
def test_metrics_of_several_labels_are_those_of_scikit_learn(seed: int, count: int, labels: int) -> None:
    rng = drawn(seed)
    targets = rng.integers(2, size=(count, labels))
    outputs = coarse(rng.normal(size=(count, labels)) + targets - 0.5)
    data = Dataset(nothing(count), torch.tensor(targets, dtype=torch.float32), task="multilabel")
    found = task_metrics(data, torch.tensor(outputs), 0.0)
    answers = (outputs > 0).astype(int)
    assert found["exact_match"] == pytest.approx((answers == targets).all(1).mean())
    each = [sk.f1_score(targets[:, at], answers[:, at], zero_division=0) for at in range(labels)]
    assert found["macro_f1"] == pytest.approx(np.mean(each))
    if all(len(set(targets[:, at])) == 2 for at in range(labels)):
        assert found["auroc"] == pytest.approx(sk.roc_auc_score(targets, outputs, average="macro"))
    else:
        assert found["auroc"] is None


@given(seed=seeds, count=st.integers(2, 40), values=st.integers(0, 3))
def test_metrics_of_numbers_are_those_of_scikit_learn(seed: int, count: int, values: int) -> None:
    rng = drawn(seed)
    targets = rng.normal(size=(count, values) if values else count).astype(np.float32)
    outputs = targets + rng.normal(size=targets.shape)
    given = torch.tensor(outputs)[:, None] if not values else torch.tensor(outputs)
    found = task_metrics(Dataset(nothing(count), torch.tensor(targets), task="regression"), given, 0.0)
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(targets, outputs))
    assert found["rmse"] == pytest.approx(sk.root_mean_squared_error(targets, outputs))
    assert found["r2"] == pytest.approx(sk.r2_score(targets, outputs))


def test_undefined_metrics_are_none() -> None:
    same = Dataset(nothing(3), torch.ones(3), task="regression")
    assert task_metrics(same, torch.zeros(3, 1), 0.0) == {"mae": 1.0, "rmse": 1.0, "r2": None}
    assert task_metrics(same, torch.full((3, 1), torch.nan), 0.0) == {"mae": None, "rmse": None, "r2": None}
    own = Dataset(nothing(3), torch.zeros(3, 4, 4), task="custom")
    assert task_metrics(own, torch.zeros(3, 4, 4), 0.0) == {}


def test_errors_are_in_the_unit_of_the_targets() -> None:
    data = Dataset(nothing(2), torch.tensor([-1.0, 1.0]), task="regression")
    object.__setattr__(data, "target_range", (0.0, 100.0))  # mapped to −1 to 1
    assert original_unit(data, data.targets).tolist() == [0.0, 100.0]
    found = task_metrics(data, torch.tensor([[-0.9], [0.9]]), 0.0)
    assert (found["mae"], found["rmse"], found["r2"]) == (pytest.approx(5), pytest.approx(5), pytest.approx(0.99))


def test_the_main_metric_of_figures() -> None:
    assert main_figure({"round": 1, "accuracy": 0.5, "loss": 1.0}) == ("accuracy", 0.5)
    assert main_figure({"mae": 3.0, "loss": 1.0}) == ("mae", 3.0)
    assert main_figure({"accuracy": None, "loss": 1.0}) == ("loss", 1.0)
    assert main_figure({"round": 1}) is None
    assert [metric_title(name) for name in ("mae", "r2", "within_5")] == ["MAE", "R²", "within_5"]
    assert [metric_text(value) for value in (0.00012341, 55.174, -118.117)] == ["0.0001234", "55.17", "-118.1"]
    assert metric_text(10410.4) == "10,410"


# In a training -----------------------------------------------------------------------------------------------------------

PLAN = fedcdp.Plan(method="nonprivate", rounds=8, per_round=4, local_steps=5, batch_size=5, learning_rate=0.3)


def points(task: str, count: int = 80) -> Dataset:
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(2))
    targets = {
        "classification": (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long(),
        "binary": (inputs[:, 0] > 0).long(),
        "multilabel": (inputs[:, :2] > 0).float(),
        "regression": inputs[:, 0] - inputs[:, 1],
        "custom": torch.stack([inputs[:, 0], -inputs[:, 0]], 1)[:, :, None],
    }[task]
    return Dataset(inputs, targets, task=task)  # type: ignore[arg-type]


def federation_of(data: Dataset) -> fedcdp.Federation:
    return fedcdp.partition(data, indices=[range(at, len(data), 4) for at in range(4)], validation=data)


def distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets.flatten(1)).abs().mean()


MAIN = {
    "classification": "accuracy",
    "binary": "accuracy",
    "multilabel": "exact_match",
    "regression": "mae",
    "custom": "loss",
}
OUTPUTS = {"classification": 3, "binary": 1, "multilabel": 2, "regression": 1, "custom": 2}


@pytest.mark.parametrize("task", MAIN)
def test_a_run_has_its_tasks_metrics(task: str) -> None:
    data = points(task)
    run = fedcdp.simulate(
        nn.Linear(3, OUTPUTS[task]), federation_of(data), PLAN, loss=distance if task == "custom" else None
    )
    outputs = run.model(data.inputs)
    expected = task_metrics(data, outputs, 0.0)
    assert {name: value for name, value in run.scores.items() if name != "loss"} == pytest.approx(expected)
    main, value = main_figure(run.scores) or ("", 0.0)
    assert main == MAIN[task]
    assert run.metrics[-1][main] == pytest.approx(value)
    assert run.metrics[-1]["loss"] == pytest.approx(run.scores["loss"])
    assert run.accuracy == (value if main == "accuracy" else None)
    assert set(run.metrics[-1]) - {"clients", "round", "learning_rate", "gradient_norm", "seconds"} == {main, "loss"}
    assert run.warning is None


@pytest.mark.parametrize(("task", "said"), [
    ("classification", "validation accuracy .* the most frequent class"),
    ("binary", "validation accuracy .* the most frequent class"),
    ("multilabel", "validation exact match .* the most frequent set of labels"),
    ("regression", r"validation R² .* the mean \(0.000\): the model learned nothing useful"),
])  # fmt: skip
def test_a_model_that_learned_nothing_is_warned_of(task: str, said: str) -> None:
    data = points(task)
    network = nn.Linear(3, OUTPUTS[task])
    network.weight.data.zero_()
    network.weight.requires_grad = False  # the bias alone gives the same answer to every input
    run = fedcdp.simulate(network, federation_of(data), PLAN)
    assert re.search(said, run.warning or "")


def test_the_mean_of_the_targets_is_no_better_than_guessing() -> None:
    data = points("regression")
    guess = float((data.targets - data.targets.mean()).abs().mean())
    assert no_better_than_guessing({"mae": guess}, data) is not None
    assert no_better_than_guessing({"mae": guess * 0.9}, data) is None
    assert no_better_than_guessing({"mae": guess * 0.9, "r2": 0.0}, data) is not None


def test_clients_are_scored_on_their_own_validation_records() -> None:
    data = points("binary")
    owners = np.repeat([0, 1, 3], [30, 40, 10])
    federation = replace(federation_of(data), names=("a", "b", "empty", "d"), validation_clients=owners)
    run = fedcdp.simulate(nn.Linear(3, 1), federation, PLAN)
    assert [(row["client"], row["examples"]) for row in run.client_scores] == [("a", 30), ("b", 40), ("d", 10)]
    right = ((run.model(data.inputs).flatten() > 0) == (data.targets == 1)).numpy()
    for row, owner in zip(run.client_scores, (0, 1, 3), strict=True):
        assert row["accuracy"] == pytest.approx(right[owners == owner].mean())


def test_own_metrics_are_computed_with_the_others() -> None:
    data = points("regression")

    def near(outputs: Tensor, targets: Tensor) -> Tensor:
        assert outputs.shape == targets.shape
        return ((outputs - targets).abs() < 0.5).float().mean()

    run = fedcdp.simulate(nn.Linear(3, 1), federation_of(data), PLAN, metrics={"near": near})
    expected = float(((run.model(data.inputs)[:, 0] - data.targets).abs() < 0.5).float().mean())
    assert run.scores["near"] == pytest.approx(expected)
    assert "near" not in run.metrics[-1]


def failing(*_: Tensor) -> Tensor:
    raise ValueError("no such column")


@pytest.mark.parametrize(("metrics", "said"), [
    ({"broken": failing}, r"^metrics: broken fails on outputs of shape \[80, 2\] .*: ValueError: no such column$"),
    ({"many": lambda o, _: o}, r"^metrics: many returns a tensor of shape \[80, 2\]; it must return one number$"),
    ({"text": lambda *_: "good"}, "^metrics: text returns a str; it must return one number$"),
    ({"accuracy": failing}, "^metrics: 'accuracy' is not allowed as a name"),
    ({"Within 5": failing}, "^metrics: 'Within 5' is not allowed as a name"),
    ({"number": 5}, "^metrics: number is a int, not a function"),
])  # fmt: skip
def test_an_own_metric_that_fails_is_refused_before_training(metrics: Any, said: str, tmp_path: Any) -> None:
    with pytest.raises(PlanError, match=said):
        fedcdp.simulate(nn.Linear(3, 2), federation_of(points("multilabel")), PLAN, metrics=metrics, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_own_metrics_need_a_validation_split() -> None:
    federation = fedcdp.partition(points("regression"), clients=4, scheme="iid")
    with pytest.raises(PlanError, match="there is no validation split on which to compute near"):
        fedcdp.simulate(nn.Linear(3, 1), federation, PLAN, metrics={"near": distance})


def test_an_own_metric_that_fails_at_the_end_keeps_the_model(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def once(*_: Tensor) -> float:
        calls.append(1)
        return 1 / (2 - len(calls))

    with caplog.at_level(logging.WARNING, "fedcdp"):
        run = fedcdp.simulate(nn.Linear(3, 1), federation_of(points("regression")), PLAN, metrics={"once": once})
    assert run.rounds == 8
    assert run.scores["once"] is None
    assert "metrics: once fails" in caplog.text


def test_a_loss_with_float32_tensors_of_its_own_is_evaluated() -> None:
    matrix = torch.eye(1)
    data = points("regression")
    engine = FunctionalEngine(nn.Linear(3, 1), lambda o, t: (o @ matrix - t[:, None]).square().mean())
    weights = {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}
    found = evaluate(engine, weights, data, torch.device("cpu"))
    assert found["loss"] == pytest.approx(float(data.targets.square().mean()))
