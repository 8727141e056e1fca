"""How far what a dummy shows is from what was seen."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from fedcdp.attacks.objectives import Objective, total_variation
from fedcdp.errors import PlanError

Trees = tuple[dict[str, Tensor], dict[str, Tensor]]


def trees(seed: int = 0) -> Trees:
    """Of four victims: three tensors each, one of them a scalar."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (4, 3, 2), "b": (4, 3), "t": (4,)}
    one, other = ({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(2))
    return one, other


def joined(tree: dict[str, Tensor], *names: str) -> Tensor:
    return torch.cat([tree[name].reshape(4, -1) for name in names or tree], dim=1)


def test_squared_is_the_sum_of_squares_over_all_tensors() -> None:
    shown, seen = trees()
    torch.testing.assert_close(
        Objective().between(shown, seen), (joined(shown) - joined(seen)).square().sum(1)
    )  # fmt: skip


def test_cosine_is_one_less_the_cosine_of_the_angle_between_the_whole_gradients() -> None:
    shown, seen = trees()
    expected = 1 - F.cosine_similarity(joined(shown), joined(seen))
    torch.testing.assert_close(Objective("cosine").between(shown, seen), expected)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 100))
def test_cosine_is_blind_to_length_and_zero_in_the_same_direction(scale: float, seed: int) -> None:
    shown, seen = trees(seed)
    longer = {name: value * scale for name, value in shown.items()}
    cosine = Objective("cosine")
    torch.testing.assert_close(cosine.between(longer, seen), cosine.between(shown, seen), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cosine.between(longer, shown), torch.zeros(4), rtol=0, atol=1e-5)


@pytest.mark.parametrize("distance", ["squared", "cosine"])
def test_a_zero_gradient_has_a_distance_and_a_slope(distance: str) -> None:
    """A dummy of zeros through a ReLU network without biases shows nothing at all."""
    _, seen = trees()
    shown = {name: torch.zeros_like(value).requires_grad_() for name, value in seen.items()}
    loss = Objective(distance).between(shown, seen)
    assert bool(torch.isfinite(loss).all())
    assert all(bool(torch.isfinite(slope).all()) for slope in torch.autograd.grad(loss.sum(), list(shown.values())))


@pytest.mark.parametrize("distance", ["squared", "cosine"])
@pytest.mark.parametrize("names", [("w",), ("t", "b")])
def test_only_some_tensors_may_count(distance: str, names: tuple[str, ...]) -> None:
    shown, seen = trees()
    part = [{name: tree[name] for name in names} for tree in (shown, seen)]
    found = Objective(distance).only(*names).between(shown, seen)
    torch.testing.assert_close(found, Objective(distance).between(part[0], part[1]))


@pytest.mark.parametrize("distance", ["squared", "cosine"])
def test_what_was_not_shared_does_not_count(distance: str) -> None:
    shown, seen = trees()
    seen["w"][:, 1], seen["b"][2] = 0.0, 0.0
    objective = Objective(distance, shared_only=True)
    before = objective.between(shown, seen)
    shown["w"][:, 1], shown["b"][2] = 7.0, -7.0
    torch.testing.assert_close(objective.between(shown, seen), before)
    assert not torch.allclose(Objective(distance).between(shown, seen), before)


def test_misfit_differs_from_the_squared_distance_by_what_no_dummy_can_change() -> None:
    shown, seen = trees()
    other, _ = trees(1)
    for objective in (Objective(), Objective().only("w"), Objective(shared_only=True)):
        gained = objective.misfit(shown, seen) - objective.misfit(other, seen)
        torch.testing.assert_close(gained, objective.between(shown, seen) - objective.between(other, seen))


def test_total_variation_is_the_mean_difference_of_neighbours_down_and_across() -> None:
    images = torch.randn(2, 3, 1, 4, 5, generator=torch.Generator().manual_seed(0))
    for victim, found in zip(images, total_variation(images), strict=True):
        down = [abs(float(i[0, r + 1, c] - i[0, r, c])) for i in victim for r in range(3) for c in range(5)]
        across = [abs(float(i[0, r, c + 1] - i[0, r, c])) for i in victim for r in range(4) for c in range(4)]
        assert float(found) == pytest.approx(sum(down) / len(down) + sum(across) / len(across), rel=1e-5)


def test_a_flat_image_and_a_vector_have_no_variation() -> None:
    assert total_variation(torch.ones(2, 1, 3, 4, 4)).tolist() == [0, 0]
    assert total_variation(torch.randn(2, 1, 7)).tolist() == [0, 0]


def test_a_distance_that_does_not_exist_is_refused_in_a_sentence() -> None:
    with pytest.raises(PlanError, match=r"^distance: 'l1' is not one of squared, cosine$"):
        Objective("l1")
