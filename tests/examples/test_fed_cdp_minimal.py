"""The one-file Fed-CDP of examples/ and `simulate` give the same weights, from the same clients, records and noise.

The example draws by three functions of its own. They are replaced by functions that hand out fedcdp's draws in the order of
Algorithm 2's loops. Copies of the example with one error each must fail the comparison.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcdp import Federation, Plan, partition, simulate
from fedcdp.files.tree import Layout
from fedcdp.mechanism.noise import SeededNoise
from fedcdp.mechanism.sampling import choose_clients, choose_records

SOURCE = Path(__file__).parents[2] / "examples" / "fed_cdp_minimal.py"
SIZES = [9, 2, 6, 7]  # one client holds fewer records than a batch
TOLERANCE = 1e-5
NETWORK_SEED, DATA_SEED, SLOT_SEED = 9, 8, 11


def example_with(changes: dict[str, str] | None = None) -> ModuleType:
    """The example as a module; with some of its text changed, a sabotaged copy."""
    source = SOURCE.read_text()
    for before, after in (changes or {}).items():
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    module = ModuleType(SOURCE.stem)
    exec(compile(source, SOURCE, "exec"), module.__dict__)
    return module


def network() -> nn.Module:
    torch.manual_seed(NETWORK_SEED)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def federation_with(first: float | None = None) -> Federation:
    """Four small clients; `first` replaces a value in a record of the first one."""
    generator = torch.Generator().manual_seed(DATA_SEED)
    inputs = torch.randn(sum(SIZES), 4, generator=generator)
    targets = torch.randint(3, (sum(SIZES),), generator=generator)
    if first is not None:
        inputs[3, 1] = first
    return partition((inputs, targets), indices=[part.tolist() for part in torch.arange(sum(SIZES)).split(SIZES)])


def plan_with(**fields: Any) -> Plan:
    """Slots that are sometimes empty and sometimes too few, bounds that clip some gradients and not others."""
    settings = {
        "method": "fed-cdp", "rounds": 4, "per_round": 2, "local_steps": 3, "batch_size": 3, "slots": 4, "clip": 0.8,
        "noise_multiplier": 0.4, "learning_rate": 0.2, "client_sampling": "poisson", "seed": 5,
    }  # fmt: skip
    return Plan(**settings | fields)


class Draws:
    """fedcdp's draws for a plan, in the order in which Algorithm 2 needs them."""

    def __init__(self, plan: Plan, layout: Layout) -> None:
        self.clients: list[list[int]] = []
        self.records: list[Tensor] = []
        self.noise: list[Tensor] = []
        drawn, split = SeededNoise(plan.seed, layout), torch.Generator().manual_seed(SLOT_SEED)
        for t in range(plan.rounds):
            self.clients.append(choose_clients(plan, len(SIZES), t).tolist())
            for i in self.clients[-1]:
                for step in range(plan.local_steps):
                    draw = choose_records(plan, torch.tensor([i]), torch.tensor([SIZES[i]]), t, step)
                    self.records.append(draw.positions[0][draw.present[0]])
                    of_step = drawn.for_step(t, torch.tensor([i]), step, 1.0)
                    self.noise += [split_over_slots(value[0], plan.slots, split) for value in of_step.values()]


def split_over_slots(of_sum: Tensor, slots: int, generator: torch.Generator) -> Tensor:
    """Independent standard normal draws for the slots, given that their sum is √S times a standard normal draw."""
    free = torch.randn(slots, *of_sum.shape, generator=generator)
    return free - free.mean(0) + of_sum / math.sqrt(slots)


def train_by_example(example: ModuleType, federation: Federation, plan: Plan) -> dict[str, Tensor]:
    """The example's last weights from fedcdp's draws, all of which it must ask for."""
    model = network()
    draws = Draws(plan, Layout.of(model))
    clients, records, noise = iter(draws.clients), iter(draws.records), iter(draws.noise)
    example.choose_clients = lambda *_: next(clients)
    example.choose_records = lambda *_: next(records)
    example.gaussian = lambda shape, _: checked(next(noise), shape)
    held = [federation.indices(i) for i in range(federation.clients)]
    data = [(federation.train.inputs[one], federation.train.targets[one]) for one in held]
    rounds = example.fed_cdp(
        model, data, torch.Generator(), T=plan.rounds, K_t=plan.per_round, L=plan.local_steps, B=plan.batch_size,
        S=plan.slots, C=plan.clip.start, sigma=plan.noise_multiplier, eta=plan.learning_rate.start,
    )  # fmt: skip
    *_, weights = rounds
    for left in (clients, records, noise):
        assert not list(left)
    return weights


def checked(draw: Tensor, shape: torch.Size) -> Tensor:
    assert draw.shape == shape
    return draw


def train_by_fedcdp(federation: Federation, plan: Plan, engine: Any = "functional") -> dict[str, Tensor]:
    run = simulate(network(), federation, plan, engine=engine)
    return {name: value.detach() for name, value in run.model.named_parameters()}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference of two weights; infinite where one is not a number."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().nan_to_num(math.inf).max()) for name in left)


@pytest.mark.parametrize("engine", ["functional", "batched"])
@pytest.mark.parametrize("client_sampling", ["fixed", "poisson"])
def test_example_and_simulate_give_the_same_weights(engine: str, client_sampling: str) -> None:
    plan = plan_with(client_sampling=client_sampling)
    expected = train_by_fedcdp(federation_with(), plan, engine)
    assert distance(expected, network().state_dict()) > 0.1
    assert distance(train_by_example(example_with(), federation_with(), plan), expected) < TOLERANCE


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_counts_as_zero_in_both(value: float) -> None:
    federation, plan = federation_with(value), plan_with()
    expected = train_by_fedcdp(federation, plan)
    assert all(weight.isfinite().all() for weight in expected.values())
    assert distance(train_by_example(example_with(), federation, plan), expected) < TOLERANCE
    careless = example_with({" & torch.stack(list(norm.values())).isfinite().all(0)": ""})
    assert distance(train_by_example(careless, federation, plan), expected) > 100 * TOLERANCE


def test_the_comparison_meets_every_case() -> None:
    """Clipped and unclipped layers, empty and overflowing slots, a small client, cohorts other than K_t."""
    plan, example = plan_with(), example_with()
    draws, clip, unclipped = Draws(plan, Layout.of(network())), example.clip, []

    def watched(g: dict[str, Tensor], present: Tensor, bound: float) -> dict[str, Tensor]:
        clipped = clip(g, present, bound)
        unclipped.extend((clipped[name] == g[name]).flatten(1).all(1)[present] for name in g)
        return clipped

    example.clip = watched
    train_by_example(example, federation_with(), plan)
    assert 0.2 < torch.cat(unclipped).float().mean() < 0.8
    drawn = {len(records) for records in draws.records}
    assert plan.slots in drawn
    assert min(drawn) < plan.batch_size
    assert {len(clients) for clients in draws.clients} - {plan.per_round}
    assert any(SIZES[i] < plan.batch_size for clients in draws.clients for i in clients)


NOISE, CLIP_FACTOR, DIVISOR = "sigma * C * gaussian(g[name].shape, rng)", "1 / (norm[layer] / C).clamp(min=1)", "min(B, N_i)"
SABOTAGE = {
    "noise on one slot": (NOISE, f"{NOISE}[:1] / S"),
    "noise on filled slots only": (NOISE, f"({NOISE}).mul_(present.view(S, *[1] * (g[name].dim() - 1)))"),
    "noise without C": (NOISE, NOISE.replace(" * C", "")),
    "no noise": (NOISE, f"0 * {NOISE}"),
    "no clipping": (CLIP_FACTOR, "torch.ones_like(norm[layer])"),
    "short gradients stretched to C": (CLIP_FACTOR, "C / norm[layer]"),
    "clipped to 1": (CLIP_FACTOR, "1 / norm[layer].clamp(min=1)"),
    "clipped all layers at once": ('name.rpartition(".")[0]', '""'),
    "clipped weight and bias apart": ('name.rpartition(".")[0]', "name"),
    "empty slots count": ("usable = present & ", "usable = "),
    "divided by B at a small client": (DIVISOR, "B"),
    "divided by the records drawn": (DIVISOR, "max(1, len(drawn))"),
    "divided by the slots": (DIVISOR, "S"),
    "divided by the clients drawn": ("for update in updates) / K_t", "for update in updates) / max(1, len(updates))"),
    "all steps from the global weights": ("per_example_gradients(W_i, ", "per_example_gradients(W, "),
}


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return train_by_fedcdp(federation_with(), plan_with())


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_sabotaged_copy_fails_the_comparison(name: str, expected: dict[str, Tensor]) -> None:
    sabotaged = example_with(dict([SABOTAGE[name]]))
    assert distance(train_by_example(sabotaged, federation_with(), plan_with()), expected) > 100 * TOLERANCE


def test_the_example_samples_records_independently() -> None:
    example, rng, draws = example_with(), torch.Generator().manual_seed(1), 2000

    def joined(slots: int) -> Tensor:
        drawn = [example.choose_records(20, 5, slots, rng) for _ in range(draws)]
        return torch.stack([torch.bincount(records, minlength=20) for records in drawn])

    every = joined(slots=20)
    assert every.max() == 1
    assert every.double().mean(0).sub(0.25).abs().max() < 5 * math.sqrt(0.25 * 0.75 / draws)
    assert float(every.sum(1).double().var()) == pytest.approx(20 * 0.25 * 0.75, rel=0.2)  # a fixed size has none
    few = joined(slots=5)
    assert few.sum(1).max() == 5
    rate = float(few.double().mean())
    assert rate < 0.23
    assert few.double().mean(0).sub(rate).abs().max() < 5 * math.sqrt(rate * (1 - rate) / draws)  # no favourites
    assert sorted(example.choose_records(3, 5, 6, rng).tolist()) == [0, 1, 2]


def test_the_example_draws_distinct_clients_and_standard_normal_noise() -> None:
    example, rng = example_with(), torch.Generator().manual_seed(1)
    chosen = torch.tensor([example.choose_clients(6, 4, rng) for _ in range(500)])
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    assert torch.bincount(chosen.flatten(), minlength=6).sub(500 * 4 / 6).abs().max() < 5 * math.sqrt(500 * 2 / 9)
    noise = example.gaussian(torch.Size((100, 100)), rng)
    assert abs(float(noise.mean())) < 0.05
    assert float(noise.std()) == pytest.approx(1, abs=0.04)


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."


def test_the_example_is_one_short_file_without_fedcdp() -> None:
    source = SOURCE.read_text()
    packages = {name.partition(".")[0] for name in imported(ast.parse(source))}
    assert packages == {"__future__", "collections", "sklearn", "torch", "typing"}
    assert len(source.splitlines()) <= 125


def test_the_example_learns_and_prints_no_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    example_with().main(T=3)
    *rounds, last = capsys.readouterr().out.splitlines()
    accuracies = [re.fullmatch(r"round +(\d+): accuracy ([01]\.\d{3})", line) for line in rounds]
    assert [found and int(found[1]) for found in accuracies] == [1, 2, 3]
    assert accuracies[-1] is not None
    assert float(accuracies[-1][2]) > 0.25  # guessing gives 0.1
    assert last.endswith("For ε, attacks and a ledger, use fedcdp.")
