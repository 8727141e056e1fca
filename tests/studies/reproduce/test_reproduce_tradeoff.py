"""The noise that a round injects, and the noise that an example bears."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import partition
from fedcdp.engine import FunctionalEngine
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.studies.reproduce.tradeoff import borne, injected
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.rundir import State

CPU = torch.device("cpu")


def simulator(inputs: torch.Tensor, **changes: object) -> tuple[Simulator, State]:
    """A linear network over some clients."""
    data = Dataset(inputs, torch.arange(len(inputs)) % 3, 3)
    usual = {"method": "fed-cdp", "per_round": 5, "rounds": 2, "local_steps": 4, "batch_size": 2, "record_sampling": "fixed"}
    plan = Plan(**usual | changes)  # type: ignore[arg-type]
    model = nn.Linear(inputs.shape[1], 3, bias=False)
    federation = partition(Splits("x", data, data, None, "none"), clients=6, scheme="iid")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return Simulator.stepwise(ClientData(federation, plan, CPU), FunctionalEngine(model, F.cross_entropy)), State(
        0, weights, None
    )


@pytest.mark.parametrize("noise", ["example", "batch", "cohort"])
def test_what_is_injected_is_what_a_round_without_gradients_adds(noise: str) -> None:
    made, state = simulator(torch.zeros(60, 4), noise=noise)  # of no inputs, a linear network has no gradient
    chosen = torch.from_numpy(choose_clients(made.plan, 6, 0))
    after = made.round(state, chosen).weights
    torch.testing.assert_close(injected(made, state, chosen)["weight"], after["weight"] - state.weights["weight"])


def test_its_norm_is_that_of_the_sum_of_all_draws() -> None:
    made, state = simulator(torch.randn(60, 400), noise="example", learning_rate=0.01)
    noise = injected(made, state, torch.from_numpy(choose_clients(made.plan, 6, 0)))["weight"]
    plan = made.plan
    per_step = plan.noise_multiplier * 4.0 * math.sqrt(plan.slots) / plan.batch_size
    expected = 0.01 * per_step * math.sqrt(plan.local_steps / plan.per_round) * math.sqrt(noise.numel())
    assert float(noise.norm()) == pytest.approx(expected, rel=0.1)


def test_the_bound_of_a_linear_network_is_the_way_to_the_nearest_other_class() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 5, generator=generator)
    model = nn.Linear(5, 3, bias=False)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    targets = (inputs @ weights["weight"].T).argmax(1)
    data, engine = Dataset(inputs, targets, 3), FunctionalEngine(model, F.cross_entropy)
    logits = inputs @ weights["weight"].T
    gaps = torch.sort(logits, dim=1, descending=True).values
    distances = (gaps[:, 0] - gaps[:, 1]) / (math.sqrt(2) * inputs.norm(dim=1))
    silence = {"weight": torch.zeros(3, 5)}
    told = borne(engine, weights, silence, data, CPU)
    assert (told["right"], told["within"], told["flipped"]) == (40, 1.0, 0.0)
    assert told["bound_median"] == pytest.approx(float(distances.double().quantile(0.5)), rel=1e-4)
    for size in (0.1, 0.5, 2.0):
        noise = {"weight": size * torch.randn(3, 5, generator=generator)}
        told = borne(engine, weights, noise, data, CPU)
        assert told["exceptions"] == 0
        wrong = ((inputs @ (weights["weight"] + noise["weight"]).T).argmax(1) != targets).double().mean()
        assert told["flipped"] == pytest.approx(float(wrong))
        assert told["within"] == pytest.approx(float((distances >= noise["weight"].norm()).double().mean()))


def test_where_nothing_is_right_there_is_no_bound() -> None:
    made, state = simulator(torch.randn(12, 4))
    wrong = Dataset(made.data.examples.inputs, 1 + 0 * made.data.examples.targets, 3)
    weights = {"weight": torch.zeros(3, 4)}
    told = borne(made.engine, weights, state.weights, wrong, CPU)
    assert told["right"] == 0
    assert told["within"] is told["bound_median"] is None
