"""Every problem takes the steps that `torch.optim.LBFGS` takes with it alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from fedcdp.attacks.objectives import Objective, predicted
from fedcdp.attacks.optimisers import LBFGS, Evaluate
from fedcdp.attacks.recipe import Seed
from fedcdp.data.dataset import Dataset
from tests.support.scenes import one_example_each, scene

Function = Callable[[Tensor, int], Tensor]
"""The value of one problem, given by its number, at one point [D]."""


def lockstep(function: Function) -> Evaluate:
    """All problems at once, each by its own autograd: nothing can pass from one to another but through the optimiser."""

    def evaluate(points: Tensor, who: Tensor) -> tuple[Tensor, Tensor]:
        losses, gradients = [], []
        for point, number in zip(points, who.tolist(), strict=True):
            point = point.detach().clone().requires_grad_()
            loss = function(point, number)
            gradients.append(torch.autograd.grad(loss, point)[0])
            losses.append(loss.detach())
        return torch.stack(losses), torch.stack(gradients)

    return evaluate


def trajectory(function: Function, start: Tensor, steps: int, chosen: LBFGS) -> Tensor:
    """The points [steps, n, D] after each step."""
    state, points = chosen.begin(start), []
    for _ in range(steps):
        state.step(lockstep(function))
        points.append(state.point)
    return torch.stack(points)


def reference(function: Function, start: Tensor, steps: int, chosen: LBFGS) -> tuple[Tensor, list[int]]:
    """The same by `torch.optim.LBFGS`, one problem after the other, and how many moves each took."""
    columns, moves = [], []
    for number, point in enumerate(start):
        point = point.clone().requires_grad_()
        optimiser = torch.optim.LBFGS(
            [point], lr=chosen.learning_rate, max_iter=chosen.inner, max_eval=10 * chosen.inner,
            history_size=chosen.history, tolerance_grad=chosen.tolerance_grad, tolerance_change=chosen.tolerance_change,
        )  # fmt: skip

        def closure(point: Tensor = point, number: int = number, optimiser: torch.optim.LBFGS = optimiser) -> Tensor:
            optimiser.zero_grad()
            loss = function(point, number)
            loss.backward()
            return loss

        column = []
        for _ in range(steps):
            optimiser.step(closure)
            column.append(point.detach().clone())
        columns.append(torch.stack(column))
        moves.append(optimiser.state[point]["n_iter"])
    return torch.stack(columns, dim=1), moves


def assert_same(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Relative to the size of the point, victim by victim and step by step."""
    difference = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(difference.max()) < tolerance, difference


def starts(problems: int, size: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(problems, size, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def valley(point: Tensor, number: int) -> Tensor:
    """Convex, not quadratic, and the less well conditioned the higher its number."""
    stiff = torch.logspace(0, 1 + 0.3 * number, len(point), dtype=point.dtype)
    along = (stiff * (point - 0.1 * number) ** 2 + 1).sqrt().sum() + 0.05 * (point**4).sum()
    return along + 0.2 * ((point[1:] - point[:-1]) ** 2).sum()


def bell(point: Tensor, number: int) -> Tensor:
    """Concave away from its centre, so that some pairs have negative curvature."""
    hill = (1 + (point - 0.2 * number) ** 2).log().sum()
    return hill + 0.02 * (point**2).sum() + 0.02 * (point[1:] * point[:-1]).sum()


def bowl(point: Tensor, number: int) -> Tensor:
    return ((number + 1) * torch.arange(1, 1 + len(point), dtype=point.dtype) * (point - 1) ** 2).sum()


# The same steps -------------------------------------------------------------------------------------------------------


# Rounding is amplified from move to move, in torch as here: so many steps leave eight digits.
@pytest.mark.parametrize(("function", "steps"), [(valley, 6), (bell, 3), (bowl, 6)])
@pytest.mark.parametrize("history", [100, 3, 1])
def test_every_problem_takes_the_steps_that_torch_takes(function: Function, steps: int, history: int) -> None:
    chosen = LBFGS(inner=6, history=history)
    start = starts(5, 12)
    expected, moves = reference(function, start, steps, chosen)
    assert max(moves) > 10
    assert_same(trajectory(function, start, steps, chosen), expected, 1e-8)


def test_problems_that_end_sooner_leave_the_others_on_their_way() -> None:
    """Each has its own number of moves, and ends in the middle of a step."""
    chosen, start = LBFGS(inner=7), starts(6, 4)
    start[2] = 1.0  # at its minimum from the beginning

    def function(point: Tensor, number: int) -> Tensor:
        return ((10.0 ** (number - 2)) * (point - 1) ** 2).sum() + ((point - 1) ** 4).sum()

    expected, moves = reference(function, start, 6, chosen)
    assert len(set(moves)) > 3
    assert moves[2] == 0
    assert_same(trajectory(function, start, 6, chosen), expected, 1e-8)


def test_pairs_of_negative_curvature_are_not_stored_as_in_torch() -> None:
    chosen, start = LBFGS(inner=6), starts(5, 12)
    state = chosen.begin(start)
    for _ in range(2):
        state.step(lockstep(bell))
    rejected = state._moves - 1 - state._pairs
    assert rejected.tolist() == [2, 0, 1, 0, 0]
    assert_same(state.point, reference(bell, start, 2, chosen)[0][-1], 1e-10)


def test_a_history_is_overwritten_from_its_oldest_pair_on() -> None:
    """Ten pairs at most, of some forty, in rings that grew on the way and are not full at the same time."""
    chosen, start = LBFGS(inner=9, history=10), starts(5, 12)

    def function(point: Tensor, number: int) -> Tensor:
        return valley(point, number) if number else bowl(point, number)

    expected, moves = reference(function, start, 5, chosen)
    assert max(moves) > 40
    assert min(moves) < 30
    assert_same(trajectory(function, start, 5, chosen), expected, 1e-8)


@pytest.mark.parametrize("learning_rate", [0.3, 1.0])
def test_the_learning_rate_scales_every_move_as_in_torch(learning_rate: float) -> None:
    chosen, start = LBFGS(learning_rate, inner=5), starts(3, 8)
    expected, _ = reference(valley, start, 4, chosen)
    assert_same(trajectory(valley, start, 4, chosen), expected, 1e-8)


def test_a_step_ends_at_a_move_that_is_too_short_as_in_torch() -> None:
    """Where the function is so steep that its values still change."""

    def steep(point: Tensor, number: int) -> Tensor:
        return 1e6 * valley(point, number)

    chosen, start = LBFGS(inner=20, tolerance_change=1e-2), starts(4, 8)
    expected, moves = reference(steep, start, 3, chosen)
    assert max(moves) < 60
    assert_same(trajectory(steep, start, 3, chosen), expected, 1e-8)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    problems=st.integers(1, 4),
    size=st.integers(1, 9),
    inner=st.integers(1, 8),
    history=st.integers(1, 12),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.1, 1.0, 3.0]),
)
def test_problems_of_any_number_and_size_take_the_steps_that_torch_takes(
    problems: int, size: int, inner: int, history: int, seed: int, spread: float
) -> None:
    chosen, start = LBFGS(inner=inner, history=history), spread * starts(problems, size, seed=seed)
    expected, _ = reference(valley, start, 4, chosen)
    assert_same(trajectory(valley, start, 4, chosen), expected, 1e-8)


def test_the_presets_are_those_of_torch_but_for_the_history() -> None:
    torchs = torch.optim.LBFGS([torch.zeros(1)]).defaults
    chosen = LBFGS()
    assert (chosen.learning_rate, chosen.inner) == (torchs["lr"], torchs["max_iter"])
    assert (chosen.tolerance_grad, chosen.tolerance_change) == (torchs["tolerance_grad"], torchs["tolerance_change"])
    assert (torchs["history_size"], torchs["line_search_fn"]) == (100, None)


# The paper's objective ------------------------------------------------------------------------------------------------


def paper_objective(cpl: nn.Module, digits: Dataset, dtype: torch.dtype) -> tuple[Evaluate, Function, Tensor]:
    """CPL's, of three digits: all at once as the attack computes it, and one at a time by plain autograd."""
    captured = scene(cpl, one_example_each(digits)).look("type2", 3)
    network = copy.deepcopy(cpl).to(dtype)
    parameters = [p.detach().requires_grad_() for p in network.parameters()]
    names = [name for name, _ in network.named_parameters()]

    def gradients(image: Tensor, label: Tensor) -> list[Tensor]:
        output = torch.func.functional_call(network, dict(zip(names, parameters, strict=True)), (image.view(1, 1, 28, 28),))
        loss = nn.functional.cross_entropy(output, label.view(1))
        return list(torch.autograd.grad(loss, parameters, create_graph=True))

    inputs, labels = captured.inputs[:, 0].to(dtype), captured.targets[:, 0]
    seen = [[g.detach() for g in gradients(*example)] for example in zip(inputs, labels, strict=True)]

    def alone(point: Tensor, number: int) -> Tensor:
        shown = gradients(point, labels[number])
        return torch.stack([(a - b).square().sum() for a, b in zip(shown, seen[number], strict=True)]).sum()

    def together(points: Tensor, who: Tensor) -> tuple[Tensor, Tensor]:
        points = points.detach().requires_grad_()
        part = captured.take(who)
        shown = predicted(part, "gradient", points.view(-1, 1, 1, 28, 28), part.targets, part.present)
        loss = Objective().between(shown, part.seen)
        return loss.detach(), torch.autograd.grad(loss.sum(), points)[0]

    start = Seed().draw(torch.arange(3), 1, (1, 28, 28), 0).flatten(1).to(dtype)
    return together, alone, start


def test_the_papers_attack_takes_the_steps_that_torch_takes_in_float32(cpl: nn.Module, few_digits: Dataset) -> None:
    """To four digits for the first five moves; L-BFGS amplifies rounding with every further one, torch's as ours."""
    together, alone, start = paper_objective(cpl, few_digits, torch.float32)
    chosen = LBFGS(inner=5)
    expected, _ = reference(alone, start, 2, chosen)
    state = chosen.begin(start)
    for step, digits in enumerate((1e-4, 1e-2)):
        state.step(together)
        assert_same(state.point, expected[step], digits)


@pytest.mark.slow
def test_the_papers_attack_is_as_near_to_its_exact_steps_in_float32_as_torch_is(cpl: nn.Module, few_digits: Dataset) -> None:
    """After three attack iterations of twenty moves, in which the triangular systems hold sixty pairs."""
    together, alone, start = paper_objective(cpl, few_digits, torch.float32)
    _, exactly, start_exactly = paper_objective(cpl, few_digits, torch.float64)
    exact = reference(exactly, start_exactly, 3, LBFGS())[0][-1]
    torchs = reference(alone, start, 3, LBFGS())[0][-1]
    state = LBFGS().begin(start)
    for _ in range(3):
        state.step(together)
    ours, theirs = ((each - exact).norm(dim=1).median() / exact.norm(dim=1).median() for each in (state.point, torchs))
    assert float(ours) < max(5 * float(theirs), 0.02)


@pytest.mark.slow
def test_the_papers_attack_takes_the_steps_that_torch_takes_in_float64(cpl: nn.Module, few_digits: Dataset) -> None:
    _, alone, start = paper_objective(cpl, few_digits, torch.float64)
    expected, moves = reference(alone, start, 3, LBFGS())
    assert moves == [60, 60, 60]
    assert_same(trajectory(alone, start, 3, LBFGS()), expected, 1e-6)


# Problems that go wrong, and that are dropped ---------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("calls_before", [0, 1, 9])
def test_a_problem_without_a_finite_loss_does_not_disturb_the_others(bad: float, calls_before: int) -> None:
    """From the beginning, in the middle of the first step, or in a later one, when it has a history."""
    chosen, start = LBFGS(inner=6), starts(4, 8)
    calls = [0]

    def breaking(point: Tensor, number: int) -> Tensor:
        if number != 1:
            return valley(point, number)
        calls[0] += 1
        return valley(point, number) * (bad if calls[0] > calls_before else 1.0)

    state = chosen.begin(start)
    others = torch.tensor([0, 2, 3])
    expected, _ = reference(valley, start, 4, chosen)
    moved = [state.step(lockstep(breaking))[1] for _ in range(4)]
    assert_same(state.point[others], expected[-1][others], 1e-8)
    assert not bool(moved[-1][1])
    assert bool(torch.isfinite(state.point).all())


def test_a_problem_whose_gradient_alone_is_not_finite_stays_where_it_is() -> None:
    def rooted(point: Tensor, number: int) -> Tensor:
        return point.abs().sqrt().sum() if number == 0 else valley(point, number)

    start = starts(3, 5)
    start[0] = 0.0
    state = LBFGS(inner=4).begin(start)
    _, moved = state.step(lockstep(rooted))
    assert moved.tolist() == [False, True, True]
    assert state.point[0].tolist() == [0.0] * 5
    assert_same(state.point[1:], reference(valley, start, 1, LBFGS(inner=4))[0][0, 1:], 1e-8)


@pytest.mark.parametrize("history", [100, 4])
def test_dropping_a_problem_changes_nothing_for_the_others(history: int) -> None:
    chosen, start = LBFGS(inner=5, history=history), starts(5, 10)
    kept = torch.tensor([0, 2, 4])
    together, apart = chosen.begin(start), chosen.begin(start)
    for _ in range(2):
        together.step(lockstep(valley))
        apart.step(lockstep(valley))
    apart.keep(kept)
    for _ in range(3):
        together.step(lockstep(valley))
        loss, _ = apart.step(lambda points, who: lockstep(valley)(points, kept[who]))
        torch.testing.assert_close(loss, together.loss[kept], rtol=1e-12, atol=0)
        torch.testing.assert_close(apart.point, together.point[kept], rtol=1e-10, atol=1e-12)


def test_a_step_tells_the_losses_from_before_it_and_who_moved() -> None:
    start = starts(3, 4)
    start[1] = 1.0
    state = LBFGS(inner=3).begin(start)
    before, _ = lockstep(bowl)(start, torch.arange(3))
    loss, moved = state.step(lockstep(bowl))
    assert torch.equal(loss, before)
    assert torch.equal(state.loss, before)
    assert moved.tolist() == [True, False, True]


def test_a_step_evaluates_each_problem_as_often_as_it_moves() -> None:
    """One that has ended is not computed with the others."""
    asked: list[list[int]] = []

    def counting(points: Tensor, who: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(who.tolist())
        return lockstep(valley)(points, who)

    start = starts(2, 4)
    LBFGS(inner=4).begin(start).step(counting)
    assert asked == [[0, 1]] * 4
    asked.clear()
    state = LBFGS(inner=4, tolerance_grad=1e9).begin(start)
    state.step(counting)
    assert asked == [[0, 1]]
    assert torch.equal(state.point, start)
