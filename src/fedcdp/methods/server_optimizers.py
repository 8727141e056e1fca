"""Server optimisers: how the server moves the global model by the mean update of a round.

| name | rule, with Δ the mean update, s the server's learning rate, and W the global model |
| --- | --- |
| sgd | W ← W + s·Δ (FedAvg, McMahan et al., AISTATS 2017) |
| momentum | m ← β1·m + Δ; W ← W + s·m (FedAvgM, Hsu, Qi and Brown, 2019) |
| adam | m ← β1·m + (1−β1)·Δ; v ← β2·v + (1−β2)·Δ²; W ← W + s·m/(√v + τ) (FedAdam) |
| yogi | m as for adam; v ← v − (1−β2)·Δ²·sign(v − Δ²); W as for adam (FedYogi) |

FedAdam and FedYogi are Algorithm 2 of Reddi et al., "Adaptive Federated Optimization", ICLR 2021: m starts at 0, v at τ²,
and there is no bias correction.

Guarantee: every function here reads the *sanitised* sum of a round, the plan, and its own state, which is a function of
earlier sanitised sums. Nothing else enters. The next model and the next state are therefore post-processing of releases that
the ledger has charged, and cost no privacy. The divisor is the planned number of clients K_t, never the real one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedcdp.config.plan import Plan
from fedcdp.files.tree import Tree, combine


@dataclass(frozen=True)
class OptimizerState:
    """What an optimiser carries from round to round, in float64."""

    momentum: Tree
    """m, the running mean (`momentum`: the running sum) of the mean updates."""
    variance: Tree | None = None
    """v, the running mean square of the mean updates; None: the optimiser has none."""

    def parts(self) -> dict[str, Tree]:
        """The trees by name, as a checkpoint stores them."""
        return {"momentum": self.momentum} | ({} if self.variance is None else {"variance": self.variance})


def first_optimizer_state(plan: Plan, weights: Tree) -> OptimizerState | None:
    """The state before the first round; None: the optimiser has none."""
    if plan.server_optimizer == "sgd":
        return None
    nothing = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in weights.items()}
    if plan.server_optimizer == "momentum":
        return OptimizerState(nothing)
    return OptimizerState(nothing, {name: torch.full_like(zero, plan.server_epsilon**2) for name, zero in nothing.items()})


def move_model(
    weights: Tree, total: Tree, plan: Plan, round_: int, state: OptimizerState | None
) -> tuple[Tree, OptimizerState | None]:
    """W(t+1) and the optimiser's next state, from the sanitised sum of the updates of a round, in float64."""
    rate = plan.server_learning_rate_at(round_)
    if plan.server_optimizer == "sgd":
        return _moved(weights, total, rate / plan.per_round), None
    assert state is not None
    mean = {name: value / plan.per_round for name, value in total.items()}
    if plan.server_optimizer == "momentum":
        momentum = combine(mean, state.momentum, plan.server_momentum)
        return _moved(weights, momentum, rate), OptimizerState(momentum)
    assert state.variance is not None
    kept = plan.server_momentum
    momentum = {name: kept * m + (1 - kept) * mean[name] for name, m in state.momentum.items()}
    squares = {name: value.square() for name, value in mean.items()}
    rule = {"adam": _adam, "yogi": _yogi}[plan.server_optimizer]
    variance = rule(state.variance, squares, plan.server_beta2)
    step = {name: m / (variance[name].sqrt() + plan.server_epsilon) for name, m in momentum.items()}
    return _moved(weights, step, rate), OptimizerState(momentum, variance)


def _adam(variance: Tree, squares: Tree, kept: float) -> Tree:
    return {name: kept * v + (1 - kept) * squares[name] for name, v in variance.items()}


def _yogi(variance: Tree, squares: Tree, kept: float) -> Tree:
    return {name: v - (1 - kept) * squares[name] * torch.sign(v - squares[name]) for name, v in variance.items()}


def _moved(weights: Tree, step: Tree, rate: float) -> Tree:
    return {name: (value.double() + rate * step[name]).to(value.dtype) for name, value in weights.items()}
