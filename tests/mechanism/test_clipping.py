from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fedcdp.mechanism.clipping import clip, group_norms

LAYERS = (("w", "b"), ("v",))
FLAT = (("w", "b", "v"),)


def one(w: list[float], b: list[float], v: list[float]) -> dict[str, Tensor]:
    """The gradient of one example of one client."""
    return {name: torch.tensor([[value]]) for name, value in (("w", w), ("b", b), ("v", v))}


def clipped(gradients: dict[str, Tensor], bound: float, groups=LAYERS, present: Tensor | None = None) -> dict[str, list]:
    present = torch.ones(gradients["w"].shape[:2], dtype=torch.bool) if present is None else present
    return {name: value.squeeze((0, 1)).tolist() for name, value in clip(gradients, groups, bound, present).values.items()}


def test_weight_and_bias_of_a_layer_are_clipped_together_and_other_layers_on_their_own():
    result = clipped(one([3.0, 0.0], [4.0], [0.5, 0.0]), bound=1.0)
    assert result["w"] == pytest.approx([0.6, 0])
    assert result["b"] == pytest.approx([0.8])
    assert result["v"] == [0.5, 0]


def test_flat_clipping_scales_everything_by_the_whole_norm():
    result = clipped(one([2.0, 0.0], [3.0], [6.0, 0.0]), bound=3.5, groups=FLAT)
    assert result["w"] == pytest.approx([1, 0])
    assert result["b"] == pytest.approx([1.5])
    assert result["v"] == pytest.approx([3, 0])


def test_a_norm_equal_to_the_bound_changes_nothing():
    assert clipped(one([3.0, 0.0], [4.0], [0.0, 5.0]), bound=5.0) == {"w": [3, 0], "b": [4], "v": [0, 5]}


def test_zero_stays_zero():
    assert clipped(one([0.0, 0.0], [0.0], [0.0, 0.0]), bound=1.0) == {"w": [0, 0], "b": [0], "v": [0, 0]}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("groups", [LAYERS, FLAT])
@pytest.mark.parametrize("where", ["w", "b", "v"])
def test_one_value_that_is_not_finite_makes_the_whole_example_zero_in_every_layer(bad, groups, where):
    gradients = one([0.3, 0.1], [0.2], [0.1, 0.2])
    gradients[where][0, 0, 0] = bad
    assert clipped(gradients, 1.0, groups) == {"w": [0, 0], "b": [0], "v": [0, 0]}


@pytest.mark.parametrize(
    ("w", "b"),
    [([3e38, 3e38], [0.0]), ([1e30, 0.0], [math.inf]), ([3e38, 0.0], [3e38])],
    ids=["within a tensor", "infinite bias", "between tensors of a layer"],
)
def test_a_norm_that_overflows_makes_the_whole_example_zero(w, b):
    assert clipped(one(w, b, [0.1, 0.1]), 1.0) == {"w": [0, 0], "b": [0], "v": [0, 0]}


def test_a_bad_example_leaves_the_others_as_they_are():
    gradients = {name: torch.full((2, 3, 2), 0.25) for name in ("w", "b", "v")}
    gradients["v"][1, 2, 0] = math.nan
    result = clip(gradients, LAYERS, 1.0, torch.ones(2, 3, dtype=torch.bool)).values
    for value in result.values():
        assert value[1, 2].tolist() == [0, 0]
        assert (value.flatten(0, 1)[:5] == 0.25).all()


def test_an_empty_slot_is_zero_whatever_it_holds():
    gradients = {name: torch.full((1, 3, 2), 0.25) for name in ("w", "b", "v")}
    gradients["w"][0, 1] = math.nan
    result = clip(gradients, LAYERS, 1.0, torch.tensor([[True, False, False]])).values
    assert all(value[0].tolist() == [[0.25, 0.25], [0, 0], [0, 0]] for value in result.values())


def test_updates_of_clients_are_clipped_over_one_leading_axis():
    updates = {"w": torch.tensor([[3.0, 0.0], [0.3, 0.0]]), "b": torch.tensor([[4.0], [0.4]]), "v": torch.zeros(2, 2)}
    result = clip(updates, LAYERS, 1.0, torch.tensor([True, True])).values
    torch.testing.assert_close(result["w"], torch.tensor([[0.6, 0.0], [0.3, 0.0]]))
    torch.testing.assert_close(result["b"], torch.tensor([[0.8], [0.4]]))


def test_scalar_weights_are_clipped_too():
    gradients = {"s": torch.tensor([[3.0, 0.1]]), "w": torch.tensor([[[4.0], [0.1]]])}
    result = clip(gradients, (("s", "w"),), 1.0, torch.ones(1, 2, dtype=torch.bool)).values
    torch.testing.assert_close(result["s"], torch.tensor([[0.6, 0.1]]))
    torch.testing.assert_close(result["w"], torch.tensor([[[0.8], [0.1]]]))


@pytest.mark.parametrize(("groups", "sensitivity"), [(LAYERS, 3 * math.sqrt(2)), (FLAT, 3.0)])
def test_the_result_knows_its_sensitivity(groups, sensitivity):
    assert clip(one([1.0, 1.0], [1.0], [1.0, 1.0]), groups, 3.0, torch.ones(1, 1, dtype=torch.bool)).sensitivity == (
        pytest.approx(sensitivity)
    )


def test_the_sensitivity_is_attained_when_every_layer_is_large():
    result = clip(one([90.0, 1.0], [5.0], [70.0, 7.0]), LAYERS, 3.0, torch.ones(1, 1, dtype=torch.bool))
    norm = torch.cat([value.flatten() for value in result.values.values()]).norm()
    assert float(norm) == pytest.approx(result.sensitivity, rel=1e-6)


def test_a_layer_of_a_million_weights_ends_within_the_bound():
    """A running float32 sum loses the squares that are small beside it: a norm too short leaves a result too long."""
    gradients = {"w": torch.full((1, 1, 1_000_000), 2.4e-4)}
    gradients["w"][0, 0, 0] = 1.0
    result = clip(gradients, (("w",),), 0.5, torch.ones(1, 1, dtype=torch.bool)).values["w"]
    assert float(result.double().norm()) <= 0.5 * (1 + 1e-6)


def test_the_norm_of_a_million_weights_is_right_to_float32():
    values = torch.randn(1, 1, 1_000_000, generator=torch.Generator().manual_seed(0))
    norm = group_norms({"w": values}, (("w",),), lead=2)[0]
    assert float(norm) == pytest.approx(float(values.double().norm()), rel=1e-6)


number = st.floats(-1e6, 1e6, width=32)


@settings(deadline=None, derandomize=True)
@given(
    values=st.lists(number, min_size=5, max_size=5),
    bound=st.floats(1e-3, 1e3),
    groups=st.sampled_from([LAYERS, FLAT]),
)
def test_every_group_ends_within_the_bound_in_its_old_direction_and_within_it_unchanged_to_the_bit(values, bound, groups):
    gradients = one(values[:2], values[2:3], values[3:])
    result = clip(gradients, groups, bound, torch.ones(1, 1, dtype=torch.bool)).values
    for group in groups:
        before = torch.cat([gradients[name].flatten() for name in group])
        after = torch.cat([result[name].flatten() for name in group])
        norm = math.sqrt(sum(x * x for x in before.tolist()))
        assert float(after.double().norm()) <= bound * (1 + 1e-6)
        torch.testing.assert_close(after.double(), before.double() / max(1.0, norm / bound), rtol=1e-5, atol=1e-30)
        if norm < bound * (1 - 1e-6):
            assert torch.equal(after, before)
