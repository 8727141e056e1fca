"""Server optimisers against their published algorithms, and against Flower's strategies on the same updates."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from fedcdp.config.plan import Plan
from fedcdp.files.tree import Tree
from fedcdp.methods.server_optimizers import OptimizerState, first_optimizer_state, move_model

ROUNDS, CLIENTS = 6, 3
BETAS = {"server_momentum": 0.8, "server_beta2": 0.95, "server_epsilon": 0.02}
OPTIMIZERS = ["momentum", "adam", "yogi"]


def start() -> Tree:
    generator = torch.Generator().manual_seed(0)
    shapes = {"0.weight": (3, 2), "0.bias": (3,)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def updates(seed: int = 1) -> list[list[Tree]]:
    """What each client sends in each round."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            {name: 0.1 * torch.randn(w.shape, generator=generator).double() for name, w in start().items()}
            for _ in range(CLIENTS)
        ]
        for _ in range(ROUNDS)
    ]


def total(sent: list[Tree]) -> Tree:
    return {name: torch.stack([each[name] for each in sent]).sum(0) for name in sent[0]}


def plan_of(**fields: Any) -> Plan:
    return Plan(
        **{"method": "nonprivate", "per_round": CLIENTS, "rounds": ROUNDS, "server_learning_rate": 0.3} | BETAS | fields
    )


def path(plan: Plan, rounds: list[list[Tree]], state: OptimizerState | None = None, rates: Any = None) -> list[Tree]:
    """The models after each round; with `rates`, under that rate in each."""
    weights, models = start(), []
    state = state or first_optimizer_state(plan, weights)
    for round_, sent in enumerate(rounds):
        now = plan if rates is None else plan.but(server_learning_rate=rates(round_))
        weights, state = move_model(weights, total(sent), now, round_, state)
        models.append(weights)
    return models


# The papers -----------------------------------------------------------------------------------------------------------


def published(name: str, rounds: list[list[Tree]], rates: list[float]) -> list[dict[str, np.ndarray]]:
    """Hsu et al. 2019, section 4.3, and Reddi et al. 2021, Algorithm 2, line by line in numpy."""
    b1, b2, tau = BETAS.values()
    x = {key: value.numpy().copy() for key, value in start().items()}
    m = {key: np.zeros_like(value) for key, value in x.items()}
    v = {key: np.full_like(value, tau**2) for key, value in x.items()}
    models = []
    for sent, eta in zip(rounds, rates, strict=True):
        for key in x:
            delta = sum(each[key].numpy() for each in sent) / CLIENTS
            if name == "momentum":
                m[key] = b1 * m[key] + delta
                x[key] = x[key] + eta * m[key]
                continue
            m[key] = b1 * m[key] + (1 - b1) * delta
            if name == "adam":
                v[key] = b2 * v[key] + (1 - b2) * delta**2
            else:
                v[key] = v[key] - (1 - b2) * delta**2 * np.sign(v[key] - delta**2)
            x[key] = x[key] + eta * m[key] / (np.sqrt(v[key]) + tau)
        models.append(dict(x))
    return models


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimiser_is_the_published_algorithm(name: str) -> None:
    rates = [0.3 + (0.1 - 0.3) * round_ / (ROUNDS - 1) for round_ in range(ROUNDS)]
    ours = path(plan_of(server_optimizer=name, server_learning_rate="linear(0.3, 0.1)"), updates())
    for mine, theirs in zip(ours, published(name, updates(), rates), strict=True):
        for key, value in theirs.items():
            np.testing.assert_allclose(mine[key].numpy(), value, rtol=0, atol=1e-12)


def test_momentum_of_zero_is_sgd_up_to_rounding() -> None:
    plain, slow = (path(plan_of(server_optimizer=name, server_momentum=0.0), updates())[-1] for name in ("sgd", "momentum"))
    for key, value in plain.items():
        torch.testing.assert_close(slow[key], value, rtol=0, atol=1e-12)


def test_sgd_adds_the_sum_times_the_rate_over_the_planned_clients_to_the_bit() -> None:
    """As the first release did."""
    weights = {key: value.float() for key, value in start().items()}
    sent = total(updates()[0])
    moved, state = move_model(weights, sent, plan_of(server_learning_rate=0.7, per_round=7), 0, None)
    assert state is None
    for key, value in weights.items():
        assert torch.equal(moved[key], (value.double() + 0.7 / 7 * sent[key]).to(torch.float32))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_divisor_is_the_planned_number_of_clients(name: str) -> None:
    """However many took part: only their sum arrives."""
    twice = [[{key: value * 2 for key, value in each.items()} for each in sent] for sent in updates()]
    half, whole = path(plan_of(server_optimizer=name), updates()), path(plan_of(server_optimizer=name, per_round=6), twice)
    for key, value in half[-1].items():
        torch.testing.assert_close(whole[-1][key], value, rtol=0, atol=1e-12)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["adam", "yogi"]),
    seen=st.lists(st.floats(-1e15, 1e15), min_size=1, max_size=8),
    beta2=st.floats(0, 0.999),
    tau=st.floats(1e-30, 1e3),
)
def test_no_sum_makes_an_adaptive_step_undefined(name: str, seen: list[float], beta2: float, tau: float) -> None:
    """v stays 0 or more, whatever arrives, so √v + τ is positive."""
    plan = plan_of(server_optimizer=name, server_beta2=beta2, server_epsilon=tau)
    weights = {"w": torch.zeros(1)}
    state = first_optimizer_state(plan, weights)
    for value in seen:
        weights, state = move_model(weights, {"w": torch.tensor([value], dtype=torch.float64)}, plan, 0, state)
        assert state is not None
        assert state.variance is not None
        assert bool((state.variance["w"] >= 0).all())
        assert not bool(weights["w"].isnan().any())


# Flower ---------------------------------------------------------------------------------------------------------------

Flower = dict[str, Any]


def legacy(kind: str, options: Flower) -> list[list[np.ndarray]]:
    """The models of a strategy of `flwr.server.strategy` that gets the same updates."""
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server import strategy

    now = [value.numpy() for value in start().values()]
    made = getattr(strategy, kind)(initial_parameters=ndarrays_to_parameters(now), **options)
    models = []
    for round_, sent in enumerate(updates(), start=1):
        results = [
            (
                None,
                FitRes(
                    Status(Code.OK, ""),
                    ndarrays_to_parameters([w + u.numpy() for w, u in zip(now, each.values(), strict=True)]),
                    5,
                    {},
                ),
            )
            for each in sent
        ]
        now = parameters_to_ndarrays(made.aggregate_fit(round_, results, [])[0])
        models.append(now)
    return models


class _Nodes:
    """A grid of which a strategy asks only who is there."""

    def get_node_ids(self) -> list[int]:
        return list(range(1, CLIENTS + 1))


def current(kind: str, options: Flower) -> list[list[np.ndarray]]:
    """The models of a strategy of `flwr.serverapp.strategy` that gets the same updates."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import strategy
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
    made = getattr(strategy, kind)(**options)
    arrays = ArrayRecord({name: Array(value.numpy()) for name, value in start().items()})
    models = []
    for round_, sent in enumerate(updates(), start=1):
        asked = list(made.configure_train(round_, arrays, ConfigRecord(), _Nodes()))
        replies = []
        for message, each in zip(asked, sent, strict=True):
            model = {name: Array(arrays[name].numpy() + value.numpy()) for name, value in each.items()}
            content = RecordDict({"arrays": ArrayRecord(model), "metrics": MetricRecord({"num-examples": 5})})
            message.metadata.__dict__["_message_id"] = str(len(replies))
            replies.append(Message(content, reply_to=message))
        arrays, _ = made.aggregate_train(round_, replies)
        models.append([arrays[name].numpy() for name in start()])
    return models


def assert_same_path(ours: list[Tree], theirs: list[list[np.ndarray]]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        for value, wanted in zip(mine.values(), other, strict=True):
            np.testing.assert_allclose(value.numpy(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("flower", [legacy, current])
def test_momentum_is_flowers_fedavgm(flower: Any) -> None:
    pytest.importorskip("flwr")
    theirs = flower("FedAvgM", {"server_learning_rate": 0.3, "server_momentum": 0.8})
    assert_same_path(path(plan_of(server_optimizer="momentum"), updates()), theirs)


def nothing() -> OptimizerState:
    """Flower's v starts at 0; the paper's, which is ours, at τ² or more."""
    zero = {name: torch.zeros_like(value) for name, value in start().items()}
    return OptimizerState(zero, zero)


@pytest.mark.parametrize("flower", [legacy, current])
def test_yogi_is_flowers_fedyogi_but_for_its_start(flower: Any) -> None:
    pytest.importorskip("flwr")
    theirs = flower("FedYogi", {"eta": 0.3, "beta_1": 0.8, "beta_2": 0.95, "tau": 0.02})
    assert_same_path(path(plan_of(server_optimizer="yogi"), updates(), nothing()), theirs)


@pytest.mark.parametrize("flower", [legacy, current])
def test_adam_is_flowers_fedadam_but_for_its_bias_correction(flower: Any) -> None:
    """Flower scales the rate of round t by √(1 − β2^(t+1)) / (1 − β1^(t+1)); the paper has no such factor."""
    pytest.importorskip("flwr")
    theirs = flower("FedAdam", {"eta": 0.3, "beta_1": 0.8, "beta_2": 0.95, "tau": 0.02})
    plan = plan_of(server_optimizer="adam")

    def corrected(round_: int) -> float:
        return 0.3 * math.sqrt(1 - 0.95 ** (round_ + 2)) / (1 - 0.8 ** (round_ + 2))

    assert_same_path(path(plan, updates(), nothing(), corrected), theirs)
    plain = path(plan, updates())
    apart = max(
        float(np.abs(mine.numpy() - wanted).max()) for mine, wanted in zip(plain[-1].values(), theirs[-1], strict=True)
    )
    assert apart > 1e-3
