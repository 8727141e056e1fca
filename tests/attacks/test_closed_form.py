"""The closed form through `fedcdp.attack`: tables are read exactly without noise, and not at all with Fed-CDP's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedcdp
from fedcdp.attacks import Leaks
from fedcdp.attacks.analytic import invert
from fedcdp.attacks.reconstruct import Reconstruction
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.models.networks import build


@pytest.fixture(scope="module")
def tables() -> Federation:
    """426 real records, dealt to 60 clients."""
    return fedcdp.partition(fedcdp.load("cancer", quiet=True), clients=60, scheme="iid")


def read(federation: Federation, model: nn.Module | None = None, victims: int = 40, **fields: Any) -> Leaks:
    leak = fields.pop("leak", "type1")
    options = {name: fields.pop(name) for name in ("public", "at_round") if name in fields}
    defaults = {"method": "nonprivate", "rounds": 3, "per_round": 20, "local_steps": 1, "batch_size": 1}
    plan = Plan(**defaults | {"record_sampling": "partition", "learning_rate": 0.1} | fields)
    network = build("mlp", (30,), 2) if model is None else model
    found = fedcdp.attack(
        plan, model=network, federation=federation, victims=victims, leak=leak, attack="analytic", **options
    )
    assert isinstance(found, Leaks)
    return found


def without_bias(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(30, 16, bias=False), nn.ReLU(), nn.Linear(16, 2, bias=False))


@pytest.mark.parametrize("leak", ["type2", "type1", "type0"])
def test_single_records_are_read_exactly_all_of_them(tables: Federation, leak: Any) -> None:
    row = read(tables, leak=leak).summary()
    assert row["success_rate"] == row["identified_rate"] == row["label_accuracy"] == 1
    assert row["distance_mean"] < 1e-8
    assert (row["converged"], row["diverged"], row["iterations_mean"]) == (40, 0, 1)


def test_batches_of_three_are_read_nearly_all(tables: Federation) -> None:
    found = read(tables, batch_size=3)
    row = found.summary()
    assert (row["victims"], row["examples"]) == (40, 120)
    assert row["success_rate"] >= 0.95
    assert row["distance_median"] < 1e-8


def test_what_the_reader_takes_for_solved_is_exact(tables: Federation) -> None:
    found = read(tables, batch_size=4, victims=30)
    assert found.scores is not None
    solved = found.found.outcome == Reconstruction.CONVERGED
    assert solved.sum() >= 15
    assert found.scores.exact[solved].all()


def test_batches_of_different_sizes_are_read_together(tables: Federation) -> None:
    found = read(tables, batch_size=2, record_sampling="poisson")
    sizes = found.captured.present.sum(1)
    assert len(sizes.unique()) >= 3
    assert found.scores is not None
    small = sizes <= 2
    assert found.scores.exact[found.captured.present & small[:, None]].double().mean() >= 0.95
    absent = ~found.captured.present
    assert not found.found.examples[absent].any()


@pytest.mark.parametrize("leak", ["type2", "type1", "type0"])
@pytest.mark.parametrize("batch", [1, 3])
def test_under_fed_cdp_not_one_record_is_read(tables: Federation, leak: Any, batch: int) -> None:
    row = read(tables, leak=leak, batch_size=batch, method="fed-cdp", clip=4.0, noise_multiplier=6.0).summary()
    assert row["success_rate"] == row["converged"] == 0
    assert row["identified_rate"] <= 0.15
    assert row["distance_mean"] > 0.5


@pytest.mark.parametrize("seed", range(3))
def test_without_any_bias_the_length_is_found_too(tables: Federation, seed: int) -> None:
    """But for the rare record of which another length would show the same."""
    row = read(tables, without_bias(seed), victims=30, leak="type2").summary()
    assert row["success_rate"] >= 0.9
    assert row["distance_median"] < 1e-6


def test_without_any_bias_a_trained_network_is_read_as_well(tables: Federation) -> None:
    """It is sure of some records, so that others of another length would show the same: all directions are right, and most
    lengths, for the public records tell how long records are."""
    found = read(tables, without_bias(0), victims=30, leak="type2", at_round=2, local_steps=20, learning_rate=0.05)
    assert found.captured.round == 2
    cosines = nn.functional.cosine_similarity(found.captured.inputs[:, 0], found.found.examples[:, 0], dim=1)
    torch.testing.assert_close(cosines, torch.ones(30))
    assert found.success_rate is not None
    assert found.success_rate >= 0.6


def test_of_two_lengths_that_show_the_same_the_usual_one_is_taken() -> None:
    """w·x = s: the gradient (1 − p)·x is as large for a short x as for a long one of which the network is sure."""
    network = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    truth = torch.tensor([[0.2, 0.0]])
    gradient = [torch.autograd.grad(nn.functional.cross_entropy(network(truth), torch.tensor([0])), network.weight)[0]]

    def found(size: float | None) -> float:
        public = None
        if size is not None:
            public = Dataset(torch.tensor([[size, 0.0], [0.0, size]]), torch.tensor([0, 1]), 2)
        leaks = fedcdp.attack(gradient, model=network, input_shape=(2,), attack="analytic", public=public)
        assert isinstance(leaks, Leaks)
        length: float = leaks.found.examples[0, 0].norm().item()
        again = leaks.found.examples[0]
        shown = torch.autograd.grad(nn.functional.cross_entropy(network(again), torch.tensor([0])), network.weight)[0]
        torch.testing.assert_close(shown, gradient[0], rtol=1e-3, atol=1e-5)
        return length

    assert found(None) == pytest.approx(0.2, rel=1e-3)
    assert found(0.3) == pytest.approx(0.2, rel=1e-3)
    assert found(3.0) > 1


def test_among_batches_without_a_bias_those_of_one_record_are_read(tables: Federation) -> None:
    found = read(tables, without_bias(1), victims=20, batch_size=2, record_sampling="poisson")
    assert found.found.examples.isfinite().all()
    single = found.captured.present.sum(1) == 1
    assert found.scores is not None
    assert single.any()
    assert found.scores.exact[single, 0].all()


def test_without_a_bias_noise_is_no_reason_to_fail(tables: Federation) -> None:
    row = read(tables, without_bias(0), victims=5, leak="type2", method="fed-cdp", noise_multiplier=6.0).summary()
    assert row["success_rate"] == 0


def test_a_gradient_of_zeros_gives_zeros(tables: Federation) -> None:
    for network in (without_bias(0), build("mlp", (30,), 2)):
        found = read(tables, network, victims=2)
        dead = {name: torch.zeros_like(value) for name, value in found.captured.seen.items()}
        captured = type(found.captured)(**vars(found.captured) | {"seen": dead})
        result = invert(captured, network, 2)
        assert not result.examples.any()
        assert (result.outcome == Reconstruction.DIVERGED).all()


def test_images_in_a_dense_network_are_read_like_tables(digits: Dataset) -> None:
    federation = fedcdp.partition(digits, clients=50, scheme="iid")
    row = read(federation, build("mlp", (1, 28, 28), 10), victims=10, batch_size=2).summary()
    assert row["success_rate"] >= 0.9
    assert row["recognisable_rate"] >= 0.9
