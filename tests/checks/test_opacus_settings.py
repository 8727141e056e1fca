"""ε of Opacus' settings, against dp-accounting used directly and against closed forms."""

from __future__ import annotations

import math

import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.stats import norm

import fedcdp
from fedcdp.checks import OpacusSettings


def gaussian(z: float, delta: float) -> float:
    """ε of one Gaussian release (Balle and Wang 2018), from its formula."""
    mu = 1 / z

    def excess(eps: float) -> float:
        tail = math.exp(eps + norm.logcdf(-eps / mu - mu / 2))
        return float(norm.cdf(-eps / mu + mu / 2) - tail - delta)

    return float(brentq(excess, 0, mu * mu + 20 * mu + 1))


def tight() -> PLDAccountant:
    return PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)  # the relation of Opacus


def dp_sgd(accountant: PLDAccountant | RdpAccountant, sigma: float, rate: float, steps: int) -> float:
    step = PoissonSampledDpEvent(rate, GaussianDpEvent(sigma))
    return float(accountant.compose(SelfComposedDpEvent(step, steps)).get_epsilon(1e-5))


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(1.1, 0.004, 15000), (1.0, 1 / 15, 150), (4.0, 0.1, 50)])
def test_poisson_training_has_the_epsilon_of_dp_accounting(sigma: float, rate: float, steps: int) -> None:
    stated = OpacusSettings(sigma, rate, steps).privacy().row("model").epsilon
    assert stated == pytest.approx(dp_sgd(tight(), sigma, rate, steps), rel=0.01)
    assert stated < dp_sgd(RdpAccountant(), sigma, rate, steps)


def test_the_tutorial_of_opacus_has_the_epsilon_of_its_accountant() -> None:
    # Opacus 1.6 (PRV accountant) printed 5.63 for these settings: docs/tutorials/coming-from-opacus.md
    assert OpacusSettings(1.0, 1 / 15, 150).privacy().row("model").epsilon == pytest.approx(5.63, abs=0.03)


@pytest.mark.parametrize(("steps", "uses"), [(250, 1), (251, 2), (15000, 60)])
def test_a_shuffled_loader_gets_no_amplification(steps: int, uses: int) -> None:
    stated = OpacusSettings(1.1, 0.004, steps, poisson=False).privacy().row("model").epsilon
    assert stated == pytest.approx(gaussian(1.1 / math.sqrt(uses), 1e-5), rel=1e-3)
    assert stated > OpacusSettings(1.1, 0.004, steps).privacy().row("model").epsilon


def test_a_batch_of_everything_uses_every_record_in_every_step() -> None:
    for poisson in (True, False):
        stated = OpacusSettings(5.0, 1.0, 9, poisson=poisson).privacy().row("model").epsilon
        assert stated == pytest.approx(gaussian(5 / 3, 1e-5), rel=1e-3)


def test_clients_are_a_public_lottery() -> None:
    settings = OpacusSettings(1.1, 0.05, 20, clients=100, per_round=10, rounds=50)
    row = settings.privacy().row("server")
    once = pld.from_gaussian_mechanism(1.1, sampling_prob=0.05, value_discretization_interval=1e-3).self_compose(20)
    drawn = once.compute_mixture(pld.identity(1e-3), 0.1).self_compose(50)
    assert row.epsilon == pytest.approx(drawn.get_epsilon_for_delta(1e-5), rel=0.02)
    assert row.epsilon_worst == pytest.approx(dp_sgd(tight(), 1.1, 0.05, 1000), rel=0.02)
    assert settings.privacy().row("update").epsilon == settings.privacy().row("model").epsilon == row.epsilon


def test_a_whole_client_moves_a_poisson_batch_by_all_its_records() -> None:
    row = OpacusSettings(100.0, 0.1, 4, clients=10, records=20).privacy().row("server", "client")
    assert row.epsilon == pytest.approx(gaussian(100 / 20 / 2, 1e-5), rel=1e-3)
    unknown = OpacusSettings(100.0, 0.1, 4, clients=10).privacy().row("server", "client")
    assert unknown.epsilon == math.inf
    assert "unknown" in unknown.assumption


def test_a_reader_of_gradients_has_no_epsilon() -> None:
    for settings in (OpacusSettings(10.0, 0.01, 5), OpacusSettings(10.0, 0.01, 5, clients=9, rounds=2)):
        assert settings.privacy().row("example").epsilon == math.inf


def test_without_noise_no_row_has_an_epsilon() -> None:
    rows = OpacusSettings(0.0, 0.01, 5, clients=9, records=7).privacy().rows
    assert {row.epsilon for row in rows} == {math.inf}


def test_every_row_is_listed_with_the_attacks_that_apply() -> None:
    found = fedcdp.check(OpacusSettings(1.1, 0.05, 20, clients=100, rounds=5))
    assert {scope.adversary for scope in found.scopes} == {row.adversary for row in found.privacy.rows}
    assert all(set(scope.attacks) <= set(fedcdp.attacks.ATTACKS) for scope in found.scopes)
    limits = {scope.adversary: scope.accuracy for scope in found.scopes}
    assert limits["example"] == 1.0
    assert 0.5 < limits["server"] < 1.0


def test_a_claim_that_credits_shuffling_does_not_hold() -> None:
    poisson = OpacusSettings(1.1, 0.004, 15000)
    claimed = poisson.privacy().row("model").epsilon
    assert fedcdp.check(poisson, epsilon=claimed).verdict == "consistent with the claim"
    shuffled = fedcdp.check(OpacusSettings(1.1, 0.004, 15000, poisson=False), epsilon=claimed)
    assert shuffled.verdict == "exceeds the claim"
    assert shuffled.fails


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"noise_multiplier": -1}, "noise_multiplier: -1"),
        ({"noise_multiplier": math.nan}, "noise_multiplier: nan"),
        ({"sample_rate": 1.5}, "sample_rate: 1.5"),
        ({"sample_rate": 0}, "sample_rate: 0"),
        ({"steps": 0}, "steps: 0"),
        ({"delta": 0}, "delta: 0"),
        ({"clip": True}, "clip: True"),
        ({"per_round": 2}, "per_round: 2 is not allowed; there are 1 clients"),
        ({"rounds": 2}, "rounds: only for several clients"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(fedcdp.PlanError, match=said):
        OpacusSettings(**{"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 10} | wrong)  # type: ignore[arg-type]
