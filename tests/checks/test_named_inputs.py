"""The check of functions whose inputs are dictionaries: the same faults are caught, and no value out of range is tried."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.checks import Check, OpacusSettings
from fedcdp.report.check_page import render_check
from tests.checks.text_loops import COUNT, LENGTH, Tokens, classifier, dp_sgd, gradients, texts
from tests.support.seeds import seeds

SETTINGS = OpacusSettings(noise_multiplier=1.0, sample_rate=0.1, steps=10)
EXTRAS = [0, 3]  # only whole numbers, and real numbers beside them


def checked(loop: Any, extras: int = 0, *, trials: int = 300, **more: Any) -> Check:
    given: dict[str, Any] = {"settings": SETTINGS} | more
    return fedcdp.check(loop, model=classifier(extras), examples=texts(extras), trials=trials, **given)


def leaks(found: Check) -> str:
    return "; ".join(finding.text for finding in found.findings if finding.level == "leak")


def test_the_closed_form_is_the_gradient() -> None:
    inputs, labels = texts(3)
    model = classifier(3)
    nn.functional.cross_entropy(model(**inputs).logits, labels, reduction="sum").backward()
    for name, each in gradients(model, inputs, labels).items():
        torch.testing.assert_close(each.sum(0), model.get_parameter(name).grad)


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("seed", seeds(2))
def test_the_honest_loop_passes(extras: int, seed: int) -> None:
    found = checked(dp_sgd(), extras, seed=seed)
    assert found.verdict == "consistent with the claim"
    assert all(tensor.bounded for tensor in found.tensors)
    assert found.audit is not None
    assert found.audit.strongest > 1.5  # the attack has power: the loop has ε = 4.38


@pytest.mark.parametrize("extras", EXTRAS)
def test_half_the_noise_is_caught(extras: int) -> None:
    found = checked(dp_sgd(sigma=0.5), extras)
    assert found.verdict == "exceeds the claim"
    assert "more than the claimed 4.377" in leaks(found)


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize(
    "name", ["words.weight", *(pytest.param(name, marks=pytest.mark.slow) for name in ("head.weight", "head.bias"))]
)
def test_a_layer_without_noise_is_caught(extras: int, name: str) -> None:
    found = checked(dp_sgd(silent=(name,)), extras, trials=100)
    assert found.verdict == "exceeds the claim"
    assert f"without noise: {name}." in leaks(found)


@pytest.mark.parametrize("extras", EXTRAS)
def test_a_missing_clip_is_caught(extras: int) -> None:
    found = checked(dp_sgd(clip=None), extras)
    assert found.verdict == "exceeds the claim"
    assert "not clipped: " in leaks(found)
    assert "head.weight" in leaks(found)
    assert found.multiplied == ("inputs" if extras else "weights")
    assert ("With weights ten times as large" in leaks(found)) is (not extras)
    assert ("the network&#39;s weights multiplied" in render_check(found)) is (not extras)


@pytest.mark.parametrize("relation", ["remove", "replace"])
@pytest.mark.parametrize("extras", EXTRAS)
def test_whole_numbers_stay_within_those_of_the_examples(extras: int, relation: str) -> None:
    given, _ = texts(extras)
    called: list[set[int]] = [set(), set()]

    def leaves(model: nn.Module, inputs: Tokens, labels: Tensor) -> dict[str, Any]:
        for seen, name in zip(called, ("input_ids", "attention_mask"), strict=True):
            assert inputs[name].dtype == torch.int64
            assert inputs[name].shape == (len(labels), LENGTH)
            seen |= set(inputs[name].unique().tolist())
        assert inputs.keys() == given.keys()
        return dp_sgd()(model, inputs, labels)

    checked(leaves, extras, trials=100, relation=relation)
    assert called == [set(given["input_ids"].unique().tolist()), {0, 1}]


def test_a_mask_of_real_numbers_is_not_multiplied() -> None:
    given, labels = texts(3)
    given["attention_mask"] = given["attention_mask"].float()
    largest = [0.0, 0.0]

    def leaves(model: nn.Module, inputs: Tokens, labels: Tensor) -> dict[str, Any]:
        for at, name in enumerate(("attention_mask", "extras")):
            largest[at] = max(largest[at], float(inputs[name].abs().max()))
        return dp_sgd()(model, inputs, labels)

    fedcdp.check(leaves, model=classifier(3), examples=(given, labels), settings=SETTINGS, trials=100)
    assert largest[0] == 1.0
    assert largest[1] > 1e3


@pytest.mark.slow
def test_another_record_of_whole_numbers_takes_the_place() -> None:
    found = checked(dp_sgd(sigma=0.25), relation="replace")
    assert found.verdict == "exceeds the claim"
    assert checked(dp_sgd(), relation="replace").verdict == "consistent with the claim"


def test_a_record_that_the_function_refuses_is_not_tried_again() -> None:
    refused = 0

    def leaves(model: nn.Module, inputs: Tokens, labels: Tensor) -> dict[str, Any]:
        nonlocal refused
        if any(len(row.unique()) == 1 for row in inputs["input_ids"]):  # the record that repeats a word
            refused += 1
            raise ValueError("no text")
        return dp_sgd()(model, inputs, labels)

    assert checked(leaves, trials=100).verdict == "consistent with the claim"
    assert refused


def test_the_function_gets_a_dictionary_of_its_own() -> None:
    def leaves(model: nn.Module, inputs: Tokens, labels: Tensor) -> dict[str, Any]:
        assert type(inputs) is dict
        sent = dp_sgd()(model, inputs, labels)
        for value in inputs.values():
            value.zero_()  # a function may change what it gets
        return sent

    encoded, labels = texts()
    examples: Any = (UserDict(encoded), labels)  # as a tokenizer returns them
    found = fedcdp.check(leaves, model=classifier(), examples=examples, settings=SETTINGS, trials=100)
    assert found.verdict == "consistent with the claim"
    assert int(encoded["input_ids"].min()) >= 2


def test_attacks_that_take_one_tensor_are_refused_with_the_reason() -> None:
    def leaves(model: nn.Module, inputs: Tokens, labels: Tensor) -> dict[str, Any]:
        nn.functional.cross_entropy(model(**inputs).logits, labels).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    found = checked(leaves, trials=100, settings=None)
    assert found.verdict == "leaks"
    [text] = [finding.text for finding in found.findings if "reconstruction" in finding.text]
    assert "a dictionary (input_ids, attention_mask)" in text
    assert [each["attack"] for each in found.attacks] == ["matched-filter"]


def test_clipping_is_not_called_tested_where_no_gradient_is_known() -> None:
    def loss(_outputs: Tensor, _targets: Tensor) -> Tensor:
        raise ValueError("another loss")

    found = checked(dp_sgd(clip=None), trials=100, loss=loss)
    assert all(tensor.bounded is None for tensor in found.tensors)
    assert any("clipping was not tested" in finding.text for finding in found.findings)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, "empty dictionary"),
        ({"ids": torch.zeros(COUNT, 2), "mask": torch.zeros(3, 2)}, r"ids \[4, 2\], mask \[3, 2\] and labels \[4\]"),
        ({"ids": torch.tensor(1)}, r"ids \[\] and labels"),
        ({"ids": ["one", "two"]}, "must be tensors"),
        ({"ids": torch.full((COUNT, 2), float("nan"))}, "must be finite"),
    ],
)
def test_bad_dictionaries_are_refused(inputs: Any, said: str) -> None:
    with pytest.raises(fedcdp.DataError, match=said):
        fedcdp.check(dp_sgd(), model=classifier(), examples=(inputs, torch.arange(COUNT) % 3), settings=SETTINGS)
