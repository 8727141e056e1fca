"""`make_private` against Opacus itself: the same ε, and the same weights after the same batches (`make integrations`)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import fedcdp
from tests.support.dp_sgd import clouds, drawn, flat, network

pytest.importorskip("opacus")

from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.utils import get_noise_multiplier

pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS = [(1_500, 100, 1.0, 10), (60_000, 600, 1.1, 15), (50_000, 500, 0.6, 20), (1_000, 50, 2.0, 20), (455, 64, 1.0, 5)]


def loader(records: int, batch: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*clouds(records)), batch_size=batch)


@pytest.mark.parametrize(("records", "batch", "sigma", "epochs"), SETTINGS)
def test_epsilon_is_at_most_one_per_cent_above_prv(records: int, batch: int, sigma: float, epochs: int) -> None:
    made = fedcdp.make_private(
        network(), loader(records, batch), epochs=epochs, learning_rate=1, noise_multiplier=sigma
    )  # fmt: skip
    steps = len(loader(records, batch))
    by_opacus = []
    for accountant in (PRVAccountant(), RDPAccountant()):
        accountant.history = [(sigma, 1 / steps, steps * epochs)]
        by_opacus.append(accountant.get_epsilon(delta=1e-5))
    ours = made.privacy().row("server").epsilon
    prv, rdp = by_opacus
    assert 0.98 * prv <= ours <= 1.01 * prv
    assert ours < rdp


@pytest.mark.parametrize(("records", "batch"), [(200, 20), (200, 30), (455, 64)])
def test_the_same_batches_give_the_same_weights(records: int, batch: int) -> None:
    made = fedcdp.make_private(
        network(), loader(records, batch), epochs=2, learning_rate=0.5, max_grad_norm=0.2, noise_multiplier=0.0
    )
    model = copy.deepcopy(made.model)
    module, optimizer, poisson = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), data_loader=loader(records, batch),
        noise_multiplier=0.0, max_grad_norm=0.2,
    )  # fmt: skip
    assert optimizer.expected_batch_size == made.plan.batch_size
    assert len(poisson) * 2 == made.plan.rounds
    data = made.federation.train
    for [batch_] in drawn(made):
        optimizer.zero_grad()
        F.cross_entropy(module(data.inputs[batch_]), data.targets[batch_]).backward()  # type: ignore[index]
        optimizer.step()
    torch.testing.assert_close(flat(made.train().model), flat(model), rtol=0, atol=1e-6)


def test_the_noise_for_an_epsilon_is_that_of_prv() -> None:
    made = fedcdp.make_private(network(), loader(1_500, 100), epochs=10, learning_rate=1, target_epsilon=3)
    wanted = get_noise_multiplier(
        target_epsilon=3, target_delta=1e-5, sample_rate=1 / 15, epochs=10, accountant="prv", epsilon_tolerance=0.001
    )
    assert made.plan.noise_multiplier == pytest.approx(wanted, rel=0.01)
