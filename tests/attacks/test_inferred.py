"""Inputs that cannot be reconstructed, token ids and dictionaries: labels, presence and membership are inferred."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks import RECIPES, Inferred, Presence
from fedcdp.attacks.inferred import attack_labels
from fedcdp.attacks.membership import infer_membership
from fedcdp.attacks.observe import Captured, Look, capture
from fedcdp.attacks.scene import Scene, simulated
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.errors import DataError, FedcdpError, PlanError
from fedcdp.files.tree import Inputs
from fedcdp.training.run import Run

WORDS, LENGTH, NAMES = 40, 7, tuple(f"site {number}" for number in range(10))
ROWS = {"classification": 3, "binary": 1, "multilabel": 3, "regression": 1}


class Bag(nn.Module):
    """The mean embedding of the words that are not masked, and one linear layer."""

    def __init__(self, rows: int, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, rows, bias=bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        kept = self.words(input_ids) * mask[..., None]
        mean: Tensor = self.head(kept.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))
        return mean


def texts(task: str, as_dict: bool = False) -> Federation:
    """100 made-up texts at ten named clients; 100 others are public."""
    ids = torch.randint(WORDS, (200, LENGTH), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(LENGTH) < 3 + ids[:, :1] % 5).long()
    targets = {
        "classification": ids[:, 0] % 3,
        "binary": ids[:, 0] % 2,
        "multilabel": (ids[:, :3] % 2).float(),
        "regression": ids[:, 0] / WORDS,
    }[task]
    inputs: Inputs = {"input_ids": ids, "attention_mask": mask} if as_dict else ids
    name: Any = task
    data = Dataset(inputs, targets, task=name)
    train, public = data.take(torch.arange(100)), data.take(torch.arange(100, 200))
    return replace(fedcdp.partition(train, clients=10, scheme="iid", validation=public), names=NAMES)


def plan(**fields: Any) -> Plan:
    defaults = {"method": "nonprivate", "rounds": 2, "per_round": 10, "local_steps": 2, "batch_size": 3}
    return Plan(**defaults | {"record_sampling": "partition", "learning_rate": 0.1} | fields)


PRIVATE = {"method": "fed-cdp", "clip": 1.0, "noise_multiplier": 4.0}


def trained(task: str, as_dict: bool = False, **fields: Any) -> Run:
    return fedcdp.simulate(Bag(ROWS[task]), texts(task, as_dict), plan(**fields))


def inferred(*args: Any, **kwargs: Any) -> Inferred:
    found = fedcdp.attack(*args, **kwargs)
    assert isinstance(found, Inferred)
    return found


def scene_of(task: str, leak: Any = "type2", **fields: Any) -> Scene:
    return simulated(plan(**fields), Bag(ROWS[task]), texts(task), leak, None, 0, 1, torch.device("cpu"), None, None)


CASES = [("classification", False), ("classification", True), ("binary", False), ("multilabel", False), ("regression", True)]


# What leaks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "as_dict"), CASES)
def test_a_gradient_shows_labels_and_the_text_itself(task: str, as_dict: bool) -> None:
    found = inferred(trained(task, as_dict), victims=20)
    assert found.attack == "inference"
    assert found.victims == 20
    assert found.presence is not None
    assert found.presence.auc.value == 1
    assert found.presence.success_rate == 1
    assert found.membership is not None
    assert found.membership.members == 100
    if task == "regression":
        assert found.labels is None
        assert "its targets are values" in found.refused["labels"]
    else:
        assert found.labels is not None
        assert found.labels.accuracy == 1
        assert found.labels.baseline is not None
        assert found.labels.baseline < 0.8


@pytest.mark.parametrize(("task", "as_dict"), CASES)
def test_fed_cdp_hides_labels_and_texts(task: str, as_dict: bool) -> None:
    found = inferred(trained(task, as_dict, **PRIVATE), victims=30)
    assert found.presence is not None
    assert found.presence.auc.low < 0.5
    assert found.presence.success_rate is not None
    assert found.presence.success_rate < 0.2
    if found.labels is not None:
        assert found.labels.baseline is not None
        assert found.labels.accuracy < found.labels.baseline + 0.2


@pytest.mark.parametrize("task", ["classification", "binary"])
def test_an_update_shows_the_labels_of_its_batch(task: str) -> None:
    found = inferred(trained(task), leak="type1", attack="labels", victims=10)
    assert found.labels is not None
    assert found.labels.accuracy > 0.9
    assert found.labels.examples == 30
    assert found.labels.baseline is not None
    assert found.labels.baseline < 0.9
    assert found.labels.chance is None  # a batch has no order: guessing is better than one in so many classes


@pytest.mark.parametrize("task", ["classification", "binary", "multilabel"])
def test_labels_of_another_victim_are_a_guess(task: str) -> None:
    scene = scene_of(task)
    right = scene.captured(Look("type2"), 30)
    assert right.task == task

    def accuracy(captured: Captured) -> tuple[float, float]:
        found = attack_labels(captured, scene.classes, scene.public, names=None).labels
        assert found is not None
        assert found.baseline is not None
        return found.accuracy, found.baseline

    assert accuracy(right)[0] == 1
    share, baseline = accuracy(replace(right, seen={name: value.roll(1, 0) for name, value in right.seen.items()}))
    assert share < baseline + 0.2


def test_pure_noise_has_no_presence(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_of("classification")

    def noise(simulator: Any, state: Any, look: Look, victims: int | None) -> Captured:
        seen = capture(simulator, state, look, victims)
        if look.silent:
            return seen
        generator = torch.Generator().manual_seed(look.first)
        return replace(seen, seen={name: torch.randn(v.shape, generator=generator) for name, v in seen.seen.items()})

    monkeypatch.setattr("fedcdp.attacks.presence.capture", noise)
    found = fedcdp.attack(scene.plan, model=Bag(3), federation=texts("classification"), attack="presence", victims=30)
    assert isinstance(found, Presence)
    assert found.auc.low < 0.5 < found.auc.high
    assert found.success_rate is not None
    assert found.success_rate < 0.1


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_members_of_an_overfitted_model_have_low_losses(task: str) -> None:
    generator = torch.Generator().manual_seed(0)
    data = texts(task, as_dict=True)
    model = Remembers(data.train)
    found = infer_membership(model, data.train, data.validation or data.train)
    assert found.auc.value > 0.9
    assert found.advantage.value > 0.5
    both = Dataset(
        {name: torch.cat([value, data.validation.inputs[name]]) for name, value in data.train.inputs.items()},  # type: ignore
        torch.cat([data.train.targets, data.validation.targets]), task=data.train.task,  # type: ignore[union-attr]
    )  # fmt: skip
    order = torch.randperm(200, generator=generator)
    false = infer_membership(model, both.take(order[:100]), both.take(order[100:]))
    assert false.auc.low < 0.5 < false.auc.high


class Remembers(nn.Module):
    """Returns the target of every text that it was trained on, and the mean for others."""

    def __init__(self, data: Dataset) -> None:
        super().__init__()
        rows = data.targets.reshape(len(data), -1)
        rows = 10 * rows - 5 if data.task == "multilabel" else rows  # logits
        texts = data.inputs["input_ids"] if isinstance(data.inputs, dict) else data.inputs
        self._known = {tuple(text): row for text, row in zip(texts.tolist(), rows, strict=True)}
        self._mean = rows.mean(0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # noqa: ARG002
        return torch.stack([self._known.get(tuple(text), self._mean) for text in input_ids.tolist()])


def test_labels_of_real_inputs_can_be_attacked_alone() -> None:
    federation = fedcdp.partition(fedcdp.load("cancer", quiet=True), clients=10, scheme="iid")
    found = inferred(plan(), model=nn.Linear(30, 2), federation=federation, attack="labels", victims=20)
    assert found.labels is not None
    assert found.labels.accuracy == 1
    assert found.presence is None


def test_raw_gradients_of_token_ids_show_labels() -> None:
    model, data = Bag(3), texts("classification").train
    inputs, targets = data.tensor[:1], data.targets[:1]
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(inputs), targets), list(model.parameters()))
    found = inferred(gradients, model=model, truth=(inputs, targets))
    assert found.labels is not None
    assert found.labels.accuracy == 1
    assert found.labels.baseline is None
    assert "raw gradients" in found.refused["matched-filter"]
    assert "give a run" in found.refused["membership"]


# What is told ---------------------------------------------------------------------------------------------------------


def test_results_are_printed_saved_and_reported(tmp_path: Path) -> None:
    found = inferred(trained("classification"), victims=20)
    assert "100 % labels right (public labels alone:" in str(found)
    assert "membership AUC" in repr(found)
    found.save(tmp_path / "leak", dataset="texts")
    told = json.loads((tmp_path / "leak" / "summary.json").read_text())
    assert told["label_accuracy"] == 1
    assert told["success_rate"] is None
    assert told["dataset"] == "texts"
    assert [each["attack"] for each in told["tried"]] == ["labels", "matched-filter", "membership"]
    fedcdp.report([tmp_path / "leak", found], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "leaks: 100 % labels right" in page
    assert "<img" not in page


def test_a_report_says_when_nothing_was_inferred(tmp_path: Path) -> None:
    found = inferred(trained("classification", **PRIVATE), victims=30)
    fedcdp.report([found], tmp_path / "page.html")
    assert "no better than chance" in (tmp_path / "page.html").read_text()


def test_victims_are_named() -> None:
    found = inferred(trained("binary"), victims=20)
    assert found.names is not None
    assert set(found.names) == set(NAMES)
    assert sum(row["victims"] for row in found.summary()["clients"]) == 20


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", [*RECIPES, "analytic", "linear-head", "per-layer", RECIPES["cpl"].but(iterations=2)])
def test_reconstruction_of_token_ids_is_refused(attack: Any) -> None:
    with pytest.raises(DataError) as told:
        fedcdp.attack(plan(), model=Bag(3), federation=texts("classification"), attack=attack)
    assert str(told.value) == (
        "attack: reconstruction needs real-valued inputs in one tensor; these are token ids: use tokens, presence, "
        "labels or membership"
    )


def test_a_dictionary_is_named_in_the_refusal() -> None:
    with pytest.raises(DataError, match=r"these are input_ids \(int64\), attention_mask \(int64\): use tokens"):
        fedcdp.attack(plan(), model=Bag(3), federation=texts("classification", as_dict=True), attack="cpl")


def test_a_plan_has_no_members_yet() -> None:
    found = inferred(plan(), model=Bag(3), federation=texts("classification"), victims=5)
    assert found.membership is None
    assert "give a run" in found.refused["membership"]


REFUSED: list[tuple[Any, dict[str, Any], type[FedcdpError], str]] = [
    (plan(), {"public": texts("classification").train}, DataError, "public: its inputs have other names than the victims'"),
    (plan(), {"attack": "words"}, PlanError, "per-layer, labels, tokens, membership"),
    (plan(), {"attack": "presence", "victims": 1}, PlanError, "the matched filter needs at least 2"),
]


@pytest.mark.parametrize(("target", "options", "error", "sentence"), REFUSED, ids=["public", "name", "victims"])
def test_every_refusal_is_a_sentence(target: Any, options: dict[str, Any], error: type[FedcdpError], sentence: str) -> None:
    with pytest.raises(error) as told:
        fedcdp.attack(target, model=Bag(3), federation=texts("classification", as_dict=True), **options)
    assert sentence in str(told.value)
    assert "\n" not in str(told.value)


def test_labels_are_scored_or_refused() -> None:
    gradients = [torch.ones(2, 4), torch.ones(2)]
    with pytest.raises(DataError, match="the attack labels needs the true examples"):
        fedcdp.attack(gradients, model=nn.Linear(4, 2), input_shape=(4,), attack="labels")


def test_a_capture_of_a_dictionary_is_that_of_its_tensors() -> None:
    federation = texts("classification", as_dict=True)
    both = simulated(plan(), Bag(3), federation, "type1", None, 0, 1, torch.device("cpu"), None, None)
    seen = both.captured(Look("type1"), 4)
    assert isinstance(seen.inputs, dict)
    assert list(seen.inputs) == ["input_ids", "attention_mask"]
    few = seen.take(torch.tensor([2, 0]))
    assert torch.equal(few.inputs["input_ids"], seen.inputs["input_ids"][[2, 0]])  # type: ignore[call-overload]
    with pytest.raises(DataError, match="single tensor"):
        seen.tensor  # noqa: B018
