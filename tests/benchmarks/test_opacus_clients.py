"""The peers' batched DP-SGD is Opacus' own, with and without PrivateFL's transformation (`make integrations`)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from benchmarks.peer_settings import NOISE, opacus_mnist_network, tanh_cnn
from benchmarks.private_clients import Clients, LocalTraining, PrivateClients, Transformation

pytest.importorskip("opacus")

from opacus.accountants import PRVAccountant

from benchmarks.opacus_clients import OpacusClient, train_with_opacus

pytestmark = pytest.mark.filterwarnings("ignore")

IMAGES = {"mnist": (opacus_mnist_network, (1, 28, 28)), "cifar10": (tanh_cnn, (3, 32, 32))}


def records(clients: int, count: int, shape: tuple[int, ...]) -> Clients:
    generator = torch.Generator().manual_seed(1)
    return Clients(
        torch.rand(clients, count, *shape, generator=generator),
        torch.randint(10, (clients, count), generator=generator),
    )


def names_of(model: nn.Sequential, personal: bool) -> dict[str, Tensor]:
    """Opacus' weights under the names of the batched program, whose network has no transformation in front."""
    found = {}
    for name, weight in model.named_parameters():
        place, _, kind = name.partition(".")
        if personal:
            name = f"transformation.{kind}" if place == "0" else f"{int(place) - 1}.{kind}"
        found[name] = weight.detach()
    return found


@pytest.mark.parametrize("clip", [0.1, 50.0], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("personal", [False, True], ids=["plain", "transformed"])
@pytest.mark.parametrize("name", IMAGES)
def test_a_step_without_noise_is_opacus_step(name: str, personal: bool, clip: float) -> None:
    build, shape = IMAGES[name]
    setting = LocalTraining(1, 1, clip, learning_rate=0.5, noise_multiplier=0.0, personal_rate=0.5)
    network, data = build(0), records(1, 12, shape)
    together = PrivateClients(network, data, personal=personal, seed=0, at_once=100)
    whole = nn.Sequential(Transformation(shape), *copy.deepcopy(network)) if personal else network
    client = OpacusClient(whole, data.inputs[0], data.targets[0], setting, seed=0)
    before = names_of(copy.deepcopy(client.network), personal)
    client.step(data.inputs[0], data.targets[0])
    together.train(setting)
    after = together.shared | {key: value[0] for key, value in together.personal.items()}
    expected = names_of(client.network, personal)
    assert set(after) == set(expected)
    moved = torch.cat([(expected[key] - before[key]).flatten() for key in expected]).norm()
    assert moved > 1e-3  # far more than the tolerance
    for key, value in expected.items():
        torch.testing.assert_close(after[key], value, rtol=0, atol=1e-5)


def test_rounds_without_noise_are_fedavg_over_opacus_clients() -> None:
    data, setting = records(3, 8, (1, 28, 28)), LocalTraining(3, 1, 0.7, 0.5, 0.0)
    network = opacus_mnist_network(0)
    together = PrivateClients(network, data, personal=False, seed=0, at_once=8)
    together.train(setting)
    trained, _ = train_with_opacus(network, data, setting, seed=0)
    for name, weight in trained.named_parameters():
        torch.testing.assert_close(together.shared[name], weight.detach(), rtol=0, atol=1e-5)


def test_noise_has_the_deviation_of_opacus() -> None:
    data = records(1, 8, (1, 28, 28))
    setting = LocalTraining(rounds=1, batches=2, clip=1e-3, learning_rate=1.0, noise_multiplier=50.0)
    network = opacus_mnist_network(0)
    together = PrivateClients(network, data, personal=False, seed=0, at_once=8)
    together.train(setting)
    trained, _ = train_with_opacus(network, data, setting, seed=0)

    def moved(weights: dict[str, Tensor]) -> float:
        return torch.cat([(weights[name] - start).flatten() for name, start in network.named_parameters()]).std().item()

    assert moved(together.shared) == pytest.approx(moved(dict(trained.named_parameters())), rel=0.03)


def test_opacus_accountant_agrees_with_the_table_of_noise() -> None:
    for (batches, rounds), of_epsilon in NOISE.items():
        for epsilon, sigma in of_epsilon.items():
            accountant = PRVAccountant()
            accountant.history = [(sigma, 1 / batches, batches * rounds)]
            assert accountant.get_epsilon(delta=1e-5) == pytest.approx(epsilon, rel=0.02)
