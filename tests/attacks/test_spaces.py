"""Where a reconstruction is looked for."""

from __future__ import annotations

import pytest
import torch

from fedcdp.attacks.spaces import ClassComponents, Pixels, Subspace
from fedcdp.data.dataset import Dataset
from fedcdp.errors import DataError

CPU = torch.device("cpu")


def test_pixels_stand_for_themselves() -> None:
    examples = torch.randn(3, 2, 1, 4, 5)
    space = Pixels((1, 4, 5))
    assert space.points(examples).shape == (3, 40)
    assert torch.equal(space.examples(space.points(examples)), examples)
    assert torch.equal(space.project(space.points(examples)), space.points(examples))
    assert space.penalty(space.points(examples)).tolist() == [0, 0, 0]


def test_a_box_has_bounds() -> None:
    space = Pixels((6,), box=(-1.0, 2.0))
    inside = space.project(torch.tensor([[-3.0, -1.0, 0.0, 1.5, 2.0, 9.0]]))
    assert inside.tolist() == [[-1, -1, 0, 1.5, 2, 2]]
    assert torch.equal(space.points(torch.full((1, 1, 6), 5.0)), torch.full((1, 6), 2.0))


@pytest.fixture(scope="module")
def public() -> Dataset:
    """Vectors that vary in five directions, by 5, 4, 3, 2 and 1, about a mean of their own."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(12, 5, generator=generator))[0].T
    varied = torch.randn(4000, 5, generator=generator) * torch.tensor([5.0, 4, 3, 2, 1])
    inputs = torch.linspace(-1, 1, 12) + varied @ directions
    return Dataset(inputs, torch.zeros(4000, dtype=torch.int64), 2)


def test_components_are_orthogonal_and_as_long_as_a_standard_deviation(public: Dataset) -> None:
    space = Subspace.of(public, 5, CPU)
    exact = torch.linalg.svdvals(public.inputs.double() - public.inputs.double().mean(0))[:5] / (len(public) - 1) ** 0.5
    torch.testing.assert_close(space.basis @ space.basis.T, torch.diag(exact.square()).float(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(space.mean, public.inputs.mean(0))


def test_an_example_within_the_components_comes_back(public: Dataset) -> None:
    space = Subspace.of(public, 5, CPU)
    examples = public.inputs[:6].view(3, 2, 12)
    points = space.points(examples)
    assert points.shape == (3, 10)
    torch.testing.assert_close(space.examples(points), examples, rtol=1e-3, atol=1e-3)


def test_the_nearest_example_within_the_components_is_found(public: Dataset) -> None:
    """What is left is at a right angle to all of them."""
    space = Subspace.of(public, 3, CPU)
    away = torch.randn(4, 1, 12)
    rest = (away - space.examples(space.points(away)))[:, 0]
    torch.testing.assert_close(rest @ space.basis.T, torch.zeros(4, 3), rtol=0, atol=1e-4)


def test_the_prior_is_that_of_independent_unit_normals(public: Dataset) -> None:
    space = Subspace.of(public, 5, CPU)
    points = space.points(public.inputs[:, None])
    torch.testing.assert_close(points.mean(0), torch.zeros(5), rtol=0, atol=1e-3)
    torch.testing.assert_close(points.T.cov(), torch.eye(5), rtol=0, atol=1e-2)
    torch.testing.assert_close(space.penalty(points), points.square().sum(1) / 2)


def test_images_keep_their_shape(digits: Dataset) -> None:
    space = Subspace.of(digits, 20, CPU)
    found = space.examples(space.points(digits.inputs[:8].view(4, 2, 1, 28, 28)))
    assert found.shape == (4, 2, 1, 28, 28)
    lost = (found.flatten(0, 1) - digits.inputs[:8]).square().mean()
    assert float(lost) < 0.5 * float((digits.inputs[:8] - space.mean.view(1, 28, 28)).square().mean())


def test_the_components_do_not_depend_on_torchs_own_generator(public: Dataset) -> None:
    torch.manual_seed(1)
    one = Subspace.of(public, 3, CPU).basis
    state = torch.get_rng_state()
    assert torch.equal(Subspace.of(public, 3, CPU).basis, one)
    assert torch.equal(torch.get_rng_state(), state)


def test_more_components_than_coordinates_are_all_coordinates(public: Dataset) -> None:
    space = Subspace.of(public, 60, CPU)
    assert space.basis.shape == (12, 12)
    assert bool(torch.isfinite(space.points(public.inputs[:4, None])).all())


def test_too_few_public_examples_are_refused_in_a_sentence(public: Dataset) -> None:
    few = public.take(torch.arange(5))
    with pytest.raises(DataError, match=r"^public: 5 examples are too few for 5 principal components$"):
        Subspace.of(few, 5, CPU)


@pytest.fixture(scope="module")
def classes() -> Dataset:
    """Two classes about means of their own, which vary in two directions each, by 4 and 2, and elsewhere by 0.1."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.arange(6000) % 2
    turns = [torch.linalg.qr(torch.randn(12, 12, generator=generator))[0] for _ in range(2)]
    scale = torch.tensor([4.0, 2.0, *[0.1] * 10])
    varied = torch.randn(6000, 12, generator=generator) * scale
    inputs = torch.stack([row @ turns[label].T + 10 * label for row, label in zip(varied, targets.tolist(), strict=True)])
    return Dataset(inputs, targets, 2)


def test_every_example_has_a_point_within_its_class(classes: Dataset) -> None:
    labels = torch.tensor([[0, 1], [1, 0]])
    space = ClassComponents.of(classes, 2, 2, CPU).within(labels)
    examples = 100 * torch.randn(2, 2, 12)
    points = space.points(examples)
    assert points.shape == (2, 24)
    torch.testing.assert_close(space.examples(points), examples, rtol=1e-3, atol=1e-2)


def test_points_of_a_class_are_independent_unit_normals(classes: Dataset) -> None:
    for label in (0, 1):
        mine = classes.inputs[classes.targets == label][:, None]
        space = ClassComponents.of(classes, 2, 2, CPU).within(torch.full((len(mine), 1), label))
        points = space.points(mine)
        torch.testing.assert_close(points.mean(0), torch.zeros(12), rtol=0, atol=0.05)
        torch.testing.assert_close(points.T.cov(), torch.eye(12), rtol=0, atol=0.1)
        torch.testing.assert_close(space.penalty(points), points.square().sum(1) / 2)


def test_a_class_with_few_examples_has_its_mean_and_the_axes_of_all(classes: Dataset) -> None:
    few = torch.cat([(classes.targets == 0).nonzero()[:, 0], (classes.targets == 1).nonzero()[:2, 0]])
    space = ClassComponents.of(classes.take(few), 2, 2, CPU)
    torch.testing.assert_close(space.means[1], classes.inputs[few[-2:]].mean(0))
    overlap = (space.axes[0] @ space.axes[1].T).abs()
    torch.testing.assert_close(overlap, torch.eye(2), rtol=0, atol=0.05)


def test_without_classes_all_examples_are_one_group(classes: Dataset) -> None:
    space = ClassComponents.of(classes, 2, 1, CPU)
    assert space.means.shape == (1, 12)
    assert space.within(torch.tensor([[0.3], [7.0]])).means.shape == (2, 1, 12)


def test_too_few_public_examples_give_no_prior(classes: Dataset) -> None:
    with pytest.raises(DataError, match=r"^public: 9 examples are too few for a prior; it needs 10$"):
        ClassComponents.of(classes.take(torch.arange(9)), 2, 2, CPU)
