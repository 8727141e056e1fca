"""ε of Opacus' settings, against dp-accounting used directly and against closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.stats import binom, norm
from torch import Tensor, nn

import fedcdp
from fedcdp.checks import OpacusSettings
from fedcdp.checks.adaptive_clipping import effective_noise, public_size_noise, split_noise
from tests.checks.loops import examples, gradients, network

ADAPTIVE = {"clipping": "adaptive", "unclipped_num_std": 5.0, "records": 900}


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
        ({"clipping": "ghost"}, "clipping: 'ghost' is not one of"),
        ({"clip": [1.0, 2.0]}, "with clipping flat, Opacus takes one number"),
        ({"clipping": "per_layer"}, "with clipping per_layer, Opacus takes a list"),
        ({"clipping": "per_layer", "clip": []}, "give a bound for each"),
        ({"clipping": "per_layer", "clip": [1.0, -1.0]}, "clip: -1.0"),
        ({"min_clipbound": 1.0}, "min_clipbound: only for clipping adaptive"),
        ({"clipping": "adaptive", "records": 9}, "unclipped_num_std: give it"),
        ({"clipping": "adaptive", "unclipped_num_std": 5.0}, "records: give their number"),
        ({"clipping": "adaptive", "unclipped_num_std": 0.5, "records": 9}, "Opacus refuses it"),
        (ADAPTIVE | {"min_clipbound": 2.0, "max_clipbound": 2.0}, "max_clipbound: Opacus refuses"),
        (ADAPTIVE | {"target_unclipped_quantile": 2.0}, "target_unclipped_quantile: 2.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(fedcdp.PlanError, match=said):
        OpacusSettings(**{"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 10} | wrong)


# Per-layer and adaptive clipping ---------------------------------------------------------------------------------------


def test_a_bound_for_each_tensor_has_the_epsilon_of_one_bound() -> None:
    each = OpacusSettings(1.1, 0.01, 100, clip=[3.0, 4.0], clipping="per_layer")
    assert each.sensitivity == pytest.approx(5.0)
    assert dict(each.facts())["noise on the sum"] == "standard deviation σC = 5.5"
    assert each.privacy() == OpacusSettings(1.1, 0.01, 100, clip=5.0).privacy()
    assert hash(each) == hash(OpacusSettings(1.1, 0.01, 100, clip=(3.0, 4.0), clipping="per_layer"))


def test_the_noise_is_split_as_in_opacus() -> None:
    assert split_noise(1.0, 5.0) == pytest.approx((1 - 1 / 100) ** -0.5)
    assert public_size_noise(1.0, 0.6) == pytest.approx((1 + 0.75 / 0.36) ** -0.5)  # σ⁻² − 1/4·s⁻² + s⁻²


def pair(epsilon: float, sigma: float, count_std: float, others: int, *, clipped: bool) -> tuple[float, float]:
    """δ of one step with and without a record, in both directions, by integration over a grid of the released values."""
    unclipped = others if clipped else 0  # the others the other way round
    shift = ((not clipped) * others - unclipped) / ((others + 1) * count_std)
    reach, ratio = np.linspace(-11, 11, 441), others / (others + 1)
    absent = norm.pdf(reach)[:, None] * norm.pdf(reach)
    present = norm.pdf(reach, 1 / split_noise(sigma, count_std))[:, None] * norm.pdf(reach, shift, ratio)
    area = (reach[1] - reach[0]) ** 2
    first, second = (np.maximum(p - math.exp(epsilon) * q, 0).sum() * area
                     for p, q in ((present, absent), (absent, present)))  # fmt: skip
    return float(first), float(second)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(("sigma", "count_std", "records", "rate"), [(1.0, 0.6, 40, 0.5), (2.0, 4.0, 12, 1.0)])
def test_the_noise_in_effect_covers_the_pair_of_releases(
    sigma: float, count_std: float, records: int, rate: float, clipped: bool
) -> None:
    z = effective_noise(sigma, count_std, records, rate, 1e-9)
    sizes = range(max(1, int(binom.ppf(1e-6, records - 1, rate))), int(binom.isf(1e-6, records - 1, rate)) + 1)
    weights = binom.pmf(sizes, records - 1, rate)
    for epsilon in (0.0, 0.5, 2.0, 5.0):
        found = np.array([pair(epsilon, sigma, count_std, others, clipped=clipped) for others in sizes])
        allowed = norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z)
        assert max(weights @ found) <= allowed + 1e-5
        nominal = norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * norm.cdf(-0.5 / sigma - epsilon * sigma)
        assert max(weights @ found) > nominal  # the noise multiplier of Opacus does not cover the pair
    assert 0.6 * public_size_noise(sigma, count_std) < z < public_size_noise(sigma, count_std)


def test_many_records_in_a_batch_hide_its_size() -> None:
    assert effective_noise(1.0, 12.8, 60_000, 256 / 60_000, 1e-10) == pytest.approx(0.997, abs=1e-3)
    assert effective_noise(1.0, 1e6, 10**7, 0.1, 1e-10) == pytest.approx(1.0, rel=1e-3)


def test_adaptive_clipping_costs_more_than_its_noise_multiplier_says() -> None:
    base: dict[str, Any] = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 500, "records": 20_000}
    nominal = OpacusSettings(**base).privacy().row("model").epsilon
    costs = [
        OpacusSettings(**base, clipping="adaptive", unclipped_num_std=std).privacy().row("model").epsilon
        for std in (0.55, 2.0, 50.0)
    ]
    assert costs[0] > costs[1] > costs[2] > nominal
    assert costs[0] > 2 * nominal
    assert costs[2] < 1.01 * nominal
    found = fedcdp.check(OpacusSettings(**base, clipping="adaptive", unclipped_num_std=0.55), epsilon=nominal)
    assert found.verdict == "exceeds the claim"
    assert any("in effect is 0.5" in finding.text for finding in found.findings)


def test_shuffled_batches_have_a_public_size() -> None:
    settings = OpacusSettings(1.0, 0.1, 10, poisson=False, clipping="adaptive", unclipped_num_std=0.6)
    assert settings.privacy().row("model").epsilon == pytest.approx(gaussian((1 + 0.75 / 0.36) ** -0.5, 1e-5), rel=1e-3)


def test_a_batch_that_may_hold_nothing_else_has_no_epsilon() -> None:
    settings = OpacusSettings(1.0, 0.01, 10, records=100, clipping="adaptive", unclipped_num_std=5.0)
    row = settings.privacy().row("model")
    assert row.epsilon == math.inf
    assert "no other record" in row.assumption


def test_whole_clients_have_no_epsilon_under_adaptive_clipping() -> None:
    settings = OpacusSettings(
        9.0, 0.5, 4, clients=10, records=200, clipping="adaptive", unclipped_num_std=50.0, target_unclipped_quantile=0.5
    )
    assert settings.privacy().row("server", "client").epsilon == math.inf
    assert settings.privacy().row("server").epsilon < math.inf
    assert dict(settings.facts())["clip bound"] == "quantile 0.5"


# Opacus' own code --------------------------------------------------------------------------------------------------------


def adaptive(count: int, sigma: float, count_std: float, bound: float) -> tuple[list[nn.Parameter], Any]:
    """Opacus' optimiser for `count` parameters of 4,000 values, whose learning rate of the bound is 1."""
    optimizers = pytest.importorskip("opacus.optimizers")
    parameters = [nn.Parameter(torch.zeros(4000)) for _ in range(count)]
    return parameters, optimizers.AdaClipDPOptimizer(
        torch.optim.SGD(parameters, lr=1.0), noise_multiplier=sigma, unclipped_num_std=count_std, max_grad_norm=bound,
        target_unclipped_quantile=0.5, clipbound_learning_rate=1.0, min_clipbound=1e-9, max_clipbound=1e9,
        expected_batch_size=None, loss_reduction="sum",
    )  # fmt: skip


def share(bound: float, optimizer: Any) -> float:
    """The noised share of unclipped gradients, which the next bound tells."""
    return 0.5 - math.log(float(optimizer.max_grad_norm) / bound)


def records(norms: list[float]) -> Tensor:
    return torch.tensor(norms)[:, None] * torch.eye(len(norms), 4000)


def test_opacus_noises_the_sum_at_the_bound_that_it_clipped_at() -> None:
    torch.manual_seed(0)
    [parameter], optimizer = adaptive(1, 1.0, 0.6, 3.0)
    parameter.grad_sample = records([100.0] * 6)  # type: ignore[attr-defined]
    optimizer.pre_step()
    assert parameter.grad is not None
    assert float(parameter.grad[6:].std()) == pytest.approx(3.0 * split_noise(1.0, 0.6), rel=0.05)
    assert abs(float(optimizer.max_grad_norm) - 3.0) > 0.1  # the bound moved afterwards


@pytest.mark.parametrize("clipped", [True, False])
def test_a_record_moves_opacus_count_by_one_and_not_by_half(clipped: bool) -> None:
    torch.manual_seed(0)
    others, count_std = 9, 2.0
    shares: list[list[float]] = []
    for extra in ([], [100.0 if clipped else 0.01]):
        norms = [0.01 if clipped else 100.0] * others + extra
        shares.append([])
        for _ in range(1500):
            [parameter], optimizer = adaptive(1, 1.0, count_std, 1.0)
            parameter.grad_sample = records(norms)  # type: ignore[attr-defined]
            optimizer.pre_step()
            shares[-1].append(share(1.0, optimizer))
    absent, present = (np.array(each) for each in shares)
    apart = abs(present.mean() - absent.mean()) / absent.std()
    assert apart == pytest.approx(others / (others + 1) / count_std, rel=0.15)
    assert apart > 1.4 * 0.5 / count_std  # what Theorem 1 assumes
    assert present.std() / absent.std() == pytest.approx(others / (others + 1), rel=0.06)  # the noise shows the size


def test_opacus_counts_only_the_last_part_of_a_split_batch() -> None:
    [parameter], optimizer = adaptive(1, 1.0, 0.6, 1.0)
    for last in (False, True):
        optimizer.signal_skip_step(do_skip=not last)
        parameter.grad_sample = records([100.0] * (2 if last else 5))  # type: ignore[attr-defined]
        optimizer.step()
        assert optimizer.sample_size == (2 if last else 5)
        optimizer.zero_grad()


def test_opacus_noises_every_tensor_by_the_norm_of_all_bounds() -> None:
    optimizers = pytest.importorskip("opacus.optimizers")
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(4000)) for _ in range(2)]
    settings = OpacusSettings(2.0, 0.1, 1, clip=[3.0, 4.0], clipping="per_layer")
    optimizer = optimizers.DPPerLayerOptimizer(
        torch.optim.SGD(parameters, lr=1.0), noise_multiplier=2.0, max_grad_norm=[3.0, 4.0], expected_batch_size=None,
        loss_reduction="sum",
    )  # fmt: skip
    for parameter in parameters:
        parameter.grad_sample = records([100.0])  # type: ignore[attr-defined]
    optimizer.pre_step()
    for parameter in parameters:
        assert parameter.grad is not None
        assert float(parameter.grad[1:].std()) == pytest.approx(2.0 * settings.sensitivity, rel=0.05)


def opacus_step(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
    """One step of Opacus' adaptive clipping; the noise of the next step shows its bound, so the bound leaves as well."""
    optimizers = pytest.importorskip("opacus.optimizers")
    parameters = dict(model.named_parameters())
    optimizer = optimizers.AdaClipDPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.0, unclipped_num_std=0.55, max_grad_norm=20.0,
        target_unclipped_quantile=0.5, clipbound_learning_rate=1.0, min_clipbound=1e-9, max_clipbound=1e9,
        expected_batch_size=None, loss_reduction="sum",
    )  # fmt: skip
    for parameter, each in zip(parameters.values(), gradients(model, inputs, labels), strict=True):
        parameter.grad_sample = each  # type: ignore[attr-defined]
    optimizer.pre_step()
    return {name: each.grad for name, each in parameters.items()} | {"share": share(20.0, optimizer)}


def test_an_audit_of_opacus_code_exceeds_its_own_noise_multiplier() -> None:
    pytest.importorskip("opacus")
    found = fedcdp.check(
        opacus_step, model=network(), examples=examples(16), settings=OpacusSettings(1.0, 0.1, 10), trials=400
    )
    assert found.verdict == "exceeds the claim"
    assert any("more than the claimed 4.377" in finding.text for finding in found.findings)


def test_an_audit_of_opacus_code_stays_below_the_noise_in_effect() -> None:
    pytest.importorskip("opacus")
    settings = OpacusSettings(1.0, 0.1, 10, poisson=False, clipping="adaptive", unclipped_num_std=0.55)
    found = fedcdp.check(
        opacus_step, model=network(), examples=examples(16), settings=settings, trials=400, relation="replace"
    )
    assert found.verdict == "consistent with the claim"
