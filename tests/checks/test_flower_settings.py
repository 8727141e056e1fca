"""ε of Flower's differential privacy, against Flower's own code and dp-accounting used directly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from scipy.stats import norm
from torch import Tensor, nn

import fedcdp
from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import state
from fedcdp.checks import FlowerSettings, LocalDpSettings
from tests.checks.loops import examples, network

ALL = {"clients": 50, "per_round": 50, "rounds": 20}


def composed(z: float, rounds: int) -> float:
    """ε of Gaussian releases at δ = 1e-5."""
    distribution = from_gaussian_mechanism(z / math.sqrt(rounds), value_discretization_interval=1e-3)
    return float(distribution.get_epsilon_for_delta(1e-5))


@pytest.mark.parametrize("wrapper", ["server-fixed", "client-fixed"])
def test_every_client_in_every_round_is_a_gaussian(wrapper: Any) -> None:
    privacy = FlowerSettings(wrapper, 2.0, **ALL).privacy()
    assert privacy.row("model", "client").epsilon == pytest.approx(composed(2.0, 20), rel=0.01)
    assert privacy.row("model", "record").epsilon == pytest.approx(composed(1.0, 20), rel=0.01)


def test_the_server_and_the_wire_have_no_epsilon() -> None:
    privacy = FlowerSettings("client-fixed", 2.0, **ALL).privacy()
    for unit in ("client", "record"):
        assert {privacy.row(who, unit).epsilon for who in ("server", "update")} == {math.inf}
    assert privacy.row("example").epsilon == math.inf


def test_drawn_clients_are_those_of_the_same_plan() -> None:
    plan = fedcdp.Plan(
        method="fed-sdp", noise_at="server", per_round=50, rounds=30, clip_mode="flat", noise_multiplier=1.5, delta=1e-5
    )
    row = FlowerSettings("server-fixed", 1.5, 1000, 50, 30).privacy().row("model", "client")
    ours = state(plan, Population(1000, 1, 1, 1)).row("model", "client")
    assert row.epsilon == ours.epsilon < composed(1.5, 30)
    assert row.epsilon_worst == pytest.approx(composed(1.5, 30), rel=0.01)


def test_a_heavy_client_weakens_the_noise() -> None:
    even = FlowerSettings("server-fixed", 2.0, **ALL).privacy().row("model", "client").epsilon
    heavy = FlowerSettings("server-fixed", 2.0, **ALL, largest_share=0.04)
    assert heavy.z == pytest.approx(1.0)
    assert heavy.privacy().row("model", "client").epsilon == pytest.approx(composed(1.0, 20), rel=0.01)
    assert heavy.privacy().row("model", "client").epsilon > even
    assert any("in effect" in finding.text for finding in heavy.findings())


def test_another_strategy_has_no_epsilon() -> None:
    found = fedcdp.check(FlowerSettings("server-fixed", 2.0, **ALL, strategy="other"), epsilon=8.0)
    assert {row.epsilon for row in found.privacy.rows} == {math.inf}
    assert found.verdict == "exceeds the claim"


def test_adaptive_clipping_pays_for_the_count_and_the_next_bound() -> None:
    nominal = FlowerSettings("server-fixed", 1.0, 1000, 50, 100)
    adaptive = FlowerSettings("server-adaptive", 1.0, 1000, 50, 100)
    s, tail = 50 / 20, norm.isf(0.01 * 1e-5 / 100)
    update = (1 - (2 * s) ** -2) ** -0.5 * math.exp(-0.2 * (1 + tail * s / 50 - 0.5))
    assert adaptive.z == pytest.approx((update**-2 + s**-2) ** -0.5)
    rows = [each.privacy().row("model", "client") for each in (nominal, adaptive)]
    assert rows[1].epsilon > rows[0].epsilon
    assert adaptive.privacy().delta == 1e-5


def test_local_dp_is_a_gaussian_per_message() -> None:
    mod = LocalDpSettings(clip=2.0, sensitivity=1.0, epsilon=0.5, mod_delta=1e-5, clients=10, per_round=10, rounds=8)
    deviation = math.sqrt(2 * math.log(1.25e5)) / 0.5
    assert mod.deviation == pytest.approx(deviation)
    row = mod.privacy().row("server", "client")
    assert row.epsilon == pytest.approx(composed(deviation / 2, 8), rel=0.01)
    assert mod.privacy().row("model", "client").epsilon == row.epsilon
    assert mod.privacy().row("server", "record").epsilon == pytest.approx(composed(deviation / 4, 8), rel=0.01)


@pytest.mark.parametrize(("epsilon", "holds"), [(1.0, True), (100.0, False)])
def test_the_classical_formula_is_compared_with_the_truth(epsilon: float, holds: bool) -> None:
    mod = LocalDpSettings(clip=1.0, sensitivity=1.0, epsilon=epsilon, mod_delta=1e-5, clients=5, per_round=5, rounds=1)
    assert (mod.message_epsilon() <= epsilon) is holds
    assert any(finding.level == "leak" for finding in mod.findings()) is not holds


def test_a_sensitivity_below_the_clip_bound_is_noticed() -> None:
    mod = LocalDpSettings(clip=5.0, sensitivity=1.0, epsilon=1.0, mod_delta=1e-5, clients=5, per_round=5, rounds=1)
    assert mod.message_epsilon() > 1.0
    assert any("clip bound" in finding.text for finding in mod.findings())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"wrapper": "server"}, "wrapper: 'server' is not one of"),
        ({"strategy": "fedadam"}, "strategy: 'fedadam' is not one of"),
        ({"per_round": 51}, "per_round: 51 is not allowed; there are 50 clients"),
        ({"largest_share": 0.01}, "largest_share: 0.01"),
        ({"count_stddev": 1.0}, "only for the adaptive wrappers"),
        ({"wrapper": "server-adaptive", "noise_multiplier": 5.0}, "Flower refuses it"),
        ({"rounds": 1.5}, "rounds: 1.5"),
    ],
)
def test_settings_that_flower_refuses_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(fedcdp.PlanError, match=said):
        FlowerSettings(**{"wrapper": "server-fixed", "noise_multiplier": 1.0, **ALL} | wrong)


# Flower's own code -----------------------------------------------------------------------------------------------------

VALUES = 20_000


def aggregated(strategy: Any, lengths: list[float], examples: list[int]) -> np.ndarray[Any, Any]:
    """What a wrapper of the legacy API makes of updates of these lengths, all in one direction."""
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays

    strategy.current_round_params = [np.zeros(VALUES)]
    direction = np.zeros(VALUES)
    direction[0] = 1.0
    results = [
        (None, FitRes(Status(Code.OK, ""), ndarrays_to_parameters([length * direction]), number, {"norm_bit": length > 1}))
        for length, number in zip(lengths, examples, strict=True)
    ]
    parameters, _ = strategy.aggregate_fit(1, results, [])
    return np.asarray(parameters_to_ndarrays(parameters)[0])


def test_flower_adds_the_noise_that_is_accounted() -> None:
    strategies = pytest.importorskip("flwr.server.strategy")
    wrapper = strategies.DifferentialPrivacyServerSideFixedClipping(strategies.FedAvg(), 2.0, 1.0, 4)
    moved = aggregated(wrapper, [9.0, 1e-9, 1e-9, 1e-9], [10, 10, 10, 10])
    assert moved[1:].std() == pytest.approx(2.0 / 4, rel=0.03)  # σC/K
    assert abs(moved[0] - 1 / 4) < 5 * 2.0 / 4  # one client moves the mean by C/K


def test_flower_weighs_by_examples_but_not_its_noise() -> None:
    strategies = pytest.importorskip("flwr.server.strategy")
    wrapper = strategies.DifferentialPrivacyServerSideFixedClipping(strategies.FedAvg(), 1e-6, 1.0, 4)
    moved = aggregated(wrapper, [9.0, 1e-9, 1e-9, 1e-9], [70, 10, 10, 10])
    assert moved[0] == pytest.approx(0.7, abs=1e-3)
    settings = FlowerSettings("server-fixed", 1.0, 4, 4, 1, largest_share=0.7)
    assert settings.z == pytest.approx(1.0 / 4 / 0.7)  # the noise on the mean over what the client moves it by


@pytest.mark.parametrize("kind", ["server", "client"])
def test_flowers_adaptive_noise_follows_the_next_bound(kind: str) -> None:
    strategies = pytest.importorskip("flwr.server.strategy")
    np.random.seed(0)  # noqa: NPY002  Flower draws from it
    name = f"DifferentialPrivacy{kind.title()}SideAdaptiveClipping"
    wrapper = getattr(strategies, name)(strategies.FedAvg(), 1.0, 20, initial_clipping_norm=1.0)
    settings = FlowerSettings("server-adaptive", 1.0, 20, 20, 1, clip=1.0)
    moved = aggregated(wrapper, [9.0] * 20, [10] * 20)
    assert wrapper.clipping_norm < 0.95  # all updates were clipped at 1, so the next bound is smaller
    on_mean = moved[1:].std() * 20  # in units of what a client moves the mean by, the old bound
    nominal = (1 - (2 * settings.count_noise) ** -2) ** -0.5
    assert on_mean == pytest.approx(nominal * wrapper.clipping_norm, rel=0.03)
    together = (on_mean**-2 + settings.count_noise**-2) ** -0.5
    assert settings.z <= together < 1.0  # less than the noise multiplier that was asked for


def test_flowers_local_mod_adds_the_noise_that_is_accounted() -> None:
    privacy = pytest.importorskip("flwr.supercore.differential_privacy")
    from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays

    noised = privacy.add_localdp_gaussian_noise_to_params(ndarrays_to_parameters([np.zeros(VALUES)]), 1.0, 0.5, 1e-5)
    mod = LocalDpSettings(clip=1.0, sensitivity=1.0, epsilon=0.5, mod_delta=1e-5, clients=2, per_round=2, rounds=1)
    assert parameters_to_ndarrays(noised)[0].std() == pytest.approx(mod.deviation, rel=0.03)


def test_flower_cuts_the_noise_of_whole_numbers() -> None:
    privacy = pytest.importorskip("flwr.supercore.differential_privacy")
    counts = [np.zeros(1000, dtype=np.int64)]
    privacy.add_gaussian_noise_inplace(counts, 0.2)
    assert (counts[0] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(("sensitivity", "verdict"), [(0.2, "exceeds the claim"), (2.0, "consistent with the claim")])
def test_flowers_local_mod_is_checked_as_a_function(sensitivity: float, verdict: str) -> None:
    """A record may turn the clipped update around, so a sensitivity of 2·C is honest and one of C/5 is not."""
    privacy = pytest.importorskip("flwr.supercore.differential_privacy")

    def leaves(model: nn.Module, inputs: Tensor, labels: Tensor) -> list[Any]:
        before = [parameter.detach().numpy().copy() for parameter in model.parameters()]
        nn.functional.cross_entropy(model(inputs), labels).backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        after = [parameter.detach().numpy() for parameter in model.parameters()]
        privacy.compute_clip_model_update(after, before, 1.0)
        privacy.add_gaussian_noise_inplace(after, sensitivity * math.sqrt(2 * math.log(1.25 / 1e-5)) / 1.0)
        return after

    np.random.seed(0)  # noqa: NPY002  Flower draws from it
    found = fedcdp.check(leaves, model=network(), examples=examples(), epsilon=1.0, trials=600)
    assert found.verdict == verdict
