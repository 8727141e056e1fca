"""The peers of `benchmarks.useful_peers`: their DP-SGD against a naive loop, their noise against the accountant."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peer_settings import EPSILONS, GRIDS, epsilon_of
from benchmarks.private_clients import Clients, LocalTraining, PrivateClients, Transformation
from benchmarks.useful_peers import OUT, Cell, best_of
from fedcdp.config.experiment import assemble
from fedcdp.config.presets import preset

PLAIN = LocalTraining(rounds=1, batches=1, clip=0.5, learning_rate=0.5, noise_multiplier=0.0, personal_rate=0.5)
SHAPES = {"images": (3, 6, 6), "features": (7,)}


def network(shape: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(0)
    if len(shape) == 1:
        return nn.Sequential(nn.Linear(*shape, 4, bias=False))
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))


def records(clients: int, count: int, shape: tuple[int, ...]) -> Clients:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(clients, count, *shape, generator=generator)
    return Clients(inputs, torch.randint(4, (clients, count), generator=generator))


def naive_step(model: nn.Module, inputs: Tensor, targets: Tensor, setting: LocalTraining) -> nn.Module:
    """One step of DP-SGD without noise: one example after the other, the whole gradient clipped."""
    weights = list(model.parameters())
    total = [torch.zeros_like(weight) for weight in weights]
    for each, target in zip(inputs, targets, strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(each[None]), target[None]), weights)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        factor = min(1.0, setting.clip / norm.item())
        total = [before + factor * gradient for before, gradient in zip(total, gradients, strict=True)]
    with torch.no_grad():
        for weight, moved in zip(weights, total, strict=True):
            weight -= setting.learning_rate * moved / setting.expected_batch(len(targets))
    return model


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_two_rounds_with_transformations_equal_a_naive_loop(shape: tuple[int, ...]) -> None:
    data, start = records(3, 5, shape), network(shape)
    peers = PrivateClients(start, data, personal=True, seed=0, at_once=10)
    own = [Transformation(shape) for _ in range(3)]
    shared = start
    for _ in range(2):
        peers.train(PLAIN)
        local = [nn.Sequential(each, *copy.deepcopy(shared)) for each in own]
        for number, model in enumerate(local):
            naive_step(model, data.inputs[number], data.targets[number], PLAIN)
        shared = copy.deepcopy(start)
        with torch.no_grad():
            of_clients = [list(model[1:].parameters()) for model in local]
            for weight, *found in zip(shared.parameters(), *of_clients, strict=True):
                weight.copy_(torch.stack(found).mean(0))
    for name, weight in shared.named_parameters():
        torch.testing.assert_close(peers.shared[name], weight.detach(), rtol=0, atol=1e-5)
    for name in ("scale", "shift"):
        expected = torch.stack([getattr(each, name).detach() for each in own])
        torch.testing.assert_close(peers.personal[f"transformation.{name}"], expected, rtol=0, atol=1e-5)
        assert not torch.equal(expected[0], expected[1])


def test_a_poisson_batch_has_the_records_that_were_drawn() -> None:
    data = records(50, 40, (7,))
    peers = PrivateClients(network((7,)), data, personal=False, seed=0, at_once=10)
    setting = LocalTraining(1, 4, 1.0, 1.0, 0.0)
    sizes = []
    for _ in range(50):
        positions, present = peers._drawn(setting)
        for row, filled in zip(positions, present, strict=True):
            assert len(row[filled].unique()) == filled.sum()  # no record twice
        sizes.append(present.sum(1).float())
    drawn = torch.cat(sizes)
    assert drawn.mean().item() == pytest.approx(10, abs=0.3)
    assert drawn.var().item() == pytest.approx(40 * 0.25 * 0.75, rel=0.15)  # binomial, not of one fixed size


def test_the_best_score_is_one_on_the_global_set() -> None:
    scores = {"shared": 0.5, "mean_transformation": 0.6, "personal": 0.4, "personal_own_classes": 0.9}
    assert best_of(scores) == "mean_transformation"
    assert best_of({"shared": 0.5}) == "shared"


def test_personal_scores_use_each_clients_transformation() -> None:
    data = records(2, 5, (7,))
    peers = PrivateClients(network((7,)), data, personal=True, seed=0, at_once=10)
    inputs, targets = data.inputs[0], data.targets[0]
    before = peers.scores(inputs, targets)
    assert before["shared"] == before["personal"] == before["mean_transformation"]
    peers.personal["transformation.scale"][1] = -1.0  # the second client sees everything negated
    right = [(peers.network(sign * inputs).argmax(1) == targets).float().mean().item() for sign in (1, -1)]
    assert right[0] != right[1]
    assert peers.scores(inputs, targets)["personal"] == pytest.approx(sum(right) / 2)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_every_setting_of_the_grids_has_its_epsilon(epsilon: int) -> None:
    for dataset, kind, at in GRIDS:
        if at == epsilon:
            cell = Cell(dataset, epsilon, "opacus", None if kind == "own network" else "oriented-gradients")
            for tried in cell.grid:
                assert 0.995 * epsilon < epsilon_of(cell.setting(tried)) <= epsilon


@pytest.mark.skipif(not OUT.exists(), reason="nothing is stored yet")
def test_stored_rows_are_of_the_current_presets_and_keep_their_epsilon() -> None:
    for name, row in json.loads(OUT.read_text())["rows"].items():
        if row["method"] == "preset":
            assert row["plan"] == assemble(preset(name)).plan.written(), "measure the row again"
        else:
            assert 0.995 * row["epsilon"] < epsilon_of(LocalTraining(**row["setting"])) <= row["epsilon"]


@pytest.mark.slow
def test_the_quick_sample_learns(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    command = [sys.executable, "-m", "benchmarks.useful_peers", "run", "--quick", "--seeds", "0", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=120, cwd=Path(__file__).parents[2])
    rows = json.loads(out.read_text())["rows"]
    assert {row["method"] for row in rows.values()} == {"opacus", "privatefl"}
    for row in rows.values():
        assert row["mean"] > 0.9  # chance: 0.1
