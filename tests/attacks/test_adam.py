"""Every problem takes the steps that `torch.optim.Adam` takes with it alone, under the rate's decay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fedcdp.attacks.optimisers import Adam


def evaluate(points: Tensor, who: Tensor) -> tuple[Tensor, Tensor]:
    """A convex function that differs from problem to problem."""
    points = points.detach().requires_grad_()
    stiff = (1 + who.to(points.dtype))[:, None] * torch.linspace(0.5, 3, points.shape[1], dtype=points.dtype)
    losses = (stiff * (points - 0.3 * who[:, None]) ** 2 + 1).sqrt().sum(1)
    return losses.detach(), torch.autograd.grad(losses.sum(), points)[0]


def starts(problems: int = 3, size: int = 5) -> Tensor:
    return torch.randn(problems, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def reference(start: Tensor, steps: int, chosen: Adam) -> Tensor:
    """The points [steps, n, D] by torch, one problem after the other, with the decay that Geiping et al. use."""
    columns = []
    for number, point in enumerate(start):
        point = point.clone().requires_grad_()
        optimiser = torch.optim.Adam([point], chosen.learning_rate, (chosen.beta1, chosen.beta2))
        decays = [int(part * chosen.total) for part in (3 / 8, 5 / 8, 7 / 8)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, decays, 0.1)
        column = []
        for _ in range(steps):
            for _ in range(chosen.inner):
                _, gradient = evaluate(point[None], torch.tensor([number]))
                point.grad = gradient[0].sign() if chosen.signed else gradient[0]
                optimiser.step()
                schedule.step()
            column.append(point.detach().clone())
        columns.append(torch.stack(column))
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("total", [10_000, 32])
def test_every_problem_takes_the_steps_that_torch_takes(signed: bool, total: int) -> None:
    """Also over the three places where the rate falls tenfold."""
    chosen = Adam(signed=signed, inner=4, total=total)
    state = chosen.begin(starts())
    for expected in reference(starts(), 8, chosen):
        state.step(evaluate)
        torch.testing.assert_close(state.point, expected, rtol=1e-10, atol=1e-12)


def kingma_and_ba(start: Tensor, number: int, moves: int, chosen: Adam) -> Iterator[Tensor]:
    """The points of one problem by Algorithm 1 of Kingma and Ba, 2015, whose α falls tenfold as in Geiping et al., 2020."""
    point, first, second = start, torch.zeros_like(start), torch.zeros_like(start)
    for move in range(1, moves + 1):
        gradient = evaluate(point[None], torch.tensor([number]))[1][0]
        gradient = gradient.sign() if chosen.signed else gradient
        first = chosen.beta1 * first + (1 - chosen.beta1) * gradient
        second = chosen.beta2 * second + (1 - chosen.beta2) * gradient**2
        unbiased = first / (1 - chosen.beta1**move), second / (1 - chosen.beta2**move)
        tenths = sum(move > chosen.total * eighths / 8 for eighths in (3, 5, 7))
        point = point - chosen.learning_rate / 10**tenths * unbiased[0] / (unbiased[1].sqrt() + 1e-8)
        yield point


@pytest.mark.parametrize("signed", [False, True])
def test_formulas_of_the_paper_with_problems_dropped_on_the_way(signed: bool) -> None:
    """In single precision, as attacks run; one problem leaves after the second step, two after the fifth."""
    chosen = Adam(signed=signed, inner=4, total=32)
    start = starts(problems=6, size=20).float()
    expected = torch.stack([torch.stack([*kingma_and_ba(point, n, 32, chosen)]) for n, point in enumerate(start)])
    state, left = chosen.begin(start), torch.arange(6)
    for step, leaving in enumerate([[], [3], [], [], [0, 5], [], [], []], start=1):
        state.step(lambda points, who, left=left: evaluate(points, left[who]))
        torch.testing.assert_close(state.point, expected[left, 4 * step - 1], rtol=1e-5, atol=1e-6)
        stay = torch.isin(left, torch.tensor(leaving), invert=True).nonzero()[:, 0]
        state.keep(stay)
        left = left[stay]
    assert left.tolist() == [1, 2, 4]


def test_a_step_tells_the_losses_from_before_it_and_who_could_move() -> None:
    state = Adam(inner=3).begin(starts())
    before, _ = evaluate(starts(), torch.arange(3))
    loss, moved = state.step(evaluate)
    assert torch.equal(loss, before)
    assert moved.tolist() == [True, True, True]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_problem_that_is_not_finite_is_told_and_does_not_disturb_the_others(bad: float) -> None:
    def breaking(points: Tensor, who: Tensor) -> tuple[Tensor, Tensor]:
        losses, gradients = evaluate(points, who)
        gradients[1] = bad
        return losses, gradients

    broken, whole = (Adam(inner=4).begin(starts()) for _ in range(2))
    for _ in range(2):
        _, moved = broken.step(breaking)
        whole.step(evaluate)
    assert moved.tolist() == [True, False, True]
    assert torch.equal(broken.point[[0, 2]], whole.point[[0, 2]])
    assert bool(torch.isfinite(broken.point).all())


def test_dropping_a_problem_changes_nothing_for_the_others() -> None:
    kept = torch.tensor([0, 2])
    together, apart = (Adam(inner=4, total=30).begin(starts()) for _ in range(2))
    for state in (together, apart):
        state.step(evaluate)
    apart.keep(kept)
    for _ in range(4):
        together.step(evaluate)
        apart.step(lambda points, who: evaluate(points, kept[who]))
        assert torch.equal(apart.point, together.point[kept])
