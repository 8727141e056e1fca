"""The audit never exceeds the exact ε of a sound mechanism, comes close to it, and exceeds it when one is broken.

The truth is computed here from the exact privacy curve of Gaussian releases, with nothing of fedcdp's accounting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import beta, binomtest, norm

from fedcdp.audit import ADVERSARIES, Audit, audit
from fedcdp.audit.intervals import choose_attack, epsilon_of_errors, gaussian_epsilon, mean_shift, upper_limit
from fedcdp.config.plan import Plan
from fedcdp.errors import PlanError
from fedcdp.methods import FedCDP, FedSDP, Method
from tests.support.sabotage import FAULTS, sabotaged, same_in_every_slot, with_noise

DELTA = 1e-5
LAYERS = 3


def plan(**changes: Any) -> Plan:
    """One client a round, one step, one record, in a fixed order: every release is one Gaussian."""
    settings = {"local_steps": 1, "batch_size": 1, "per_round": 2, "record_sampling": "partition"}
    return Plan(**(settings | changes))


# The truth ------------------------------------------------------------------------------------------------------------


def exact_epsilon(mu: float, delta: float = DELTA) -> float:
    """ε of N(0, 1) against N(μ, 1) at δ."""

    def excess(eps: float) -> float:
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu)) - delta

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, mu * mu / 2 + 10 * mu + 1, xtol=1e-10))


def unamplified_shift(plan: Plan, adversary: str, unit: str, records: int, participations: int) -> float:
    """μ of all that the adversary sees, as if it knew which records were drawn: noise over sensitivity, from privacy.md."""
    groups = LAYERS if plan.clip_mode == "layer" else 1
    noisy_draws = {"example": plan.slots, "batch": 1, "cohort": 1 / plan.per_round**2}[plan.noise]
    if plan.method == "fed-sdp":  # one record can turn its client's update around, unless it is the only one
        turned = 2 if unit == "record" and records > 1 else 1
        z, uses = plan.noise_multiplier / math.sqrt(groups) / turned, 1
    elif unit == "client":
        z, uses = plan.noise_multiplier * math.sqrt(noisy_draws / groups) / plan.slots, plan.local_steps
    else:
        z = plan.noise_multiplier * math.sqrt((1 if adversary == "example" else noisy_draws) / groups)
        uses = plan.local_steps
        if plan.record_sampling == "partition":
            uses = math.ceil(plan.local_steps * min(plan.batch_size, records) / records)
    fading = sum((plan.clip_at(t) * plan.noise_multiplier / plan.noise_scale_at(t)) ** 2 for t in range(participations))
    return math.sqrt(uses * fading) / z


def poisson_epsilon(rate: float, mu: float, delta: float) -> float:
    """ε of one Gaussian release with shift μ in which the record is with a secret probability: the worse direction."""

    def out(x: float) -> float:
        return float(norm.pdf(x))

    def into(x: float) -> float:
        return (1 - rate) * float(norm.pdf(x)) + rate * float(norm.pdf(x - mu))

    def spent(eps: float, one: Callable[[float], float], other: Callable[[float], float]) -> float:
        return float(quad(lambda x: max(one(x) - math.exp(eps) * other(x), 0.0), -12, mu + 12, limit=400, points=[0, mu])[0])

    def excess(eps: float) -> float:
        return max(spent(eps, into, out), spent(eps, out, into)) - delta

    return float(brentq(excess, 0.0, 20.0, xtol=1e-6))


# Sabotage -------------------------------------------------------------------------------------------------------------


SOUND: dict[str, tuple[Plan, type[Method], str]] = {
    "Fed-CDP, type-2": (plan(), FedCDP, "example"),
    "Fed-CDP, server": (plan(), FedCDP, "server"),
    "Fed-CDP, server, batch noise": (plan(batch_size=2, noise="batch"), FedCDP, "server"),
    "Fed-SDP, noise at the client": (plan(method="fed-sdp", noise_at="client"), FedSDP, "server"),
}


TRIALS = {  # that show a fault; the one with √3 takes less noise to show
    "noise halved": 200_000,
    "noise shared by two layers": 200_000,
    "noise forgotten on a layer": 10_000,
    "noise forgotten on a bias": 10_000,
    "clipping skipped": 10_000,
}


def truth_of(release: str) -> float:
    stated, method, adversary = SOUND[release]
    return exact_epsilon(unamplified_shift(stated, adversary, "client" if method is FedSDP else "record", 2, 1))


@pytest.mark.parametrize("release", SOUND)
@pytest.mark.parametrize("fault", TRIALS)
def test_an_attack_proves_more_than_a_broken_mechanism_states(fault: str, release: str) -> None:
    stated, method, adversary = SOUND[release]
    found = audit(stated, adversary, trials=TRIALS[fault], method=sabotaged(method(), FAULTS[fault]))
    assert found.epsilon_lower > truth_of(release)
    if "forgotten" in fault:  # the two worlds are told apart without an error
        assert found.epsilon_lower == pytest.approx(epsilon_of_errors(0, 0, int(0.8 * TRIALS[fault]), DELTA))


@pytest.mark.parametrize("release", SOUND)
def test_the_same_attack_proves_no_more_than_a_sound_one_states(release: str) -> None:
    stated, method, adversary = SOUND[release]
    found = audit(stated, adversary, trials=20_000, method=sabotaged(method(), lambda at: at))
    assert found.epsilon_lower <= truth_of(release)


@pytest.mark.parametrize("fault", ["noise forgotten on a bias", "clipping skipped"])
def test_a_fault_at_the_server_is_caught_with_500_trials(fault: str) -> None:
    stated = plan(method="fed-sdp", noise_at="server")
    found = audit(stated, "model", trials=500, method=sabotaged(FedSDP(), FAULTS[fault]))
    assert found.epsilon_lower > 3.5 > exact_epsilon(unamplified_shift(stated, "model", "client", 1, 1))


def test_an_auditor_undoes_the_servers_optimiser() -> None:
    """It may know the rule and the state: no optimiser hides what sgd shows."""
    stated = plan(method="fed-sdp", noise_at="server", noise_multiplier=0.5)
    moved = stated.but(server_optimizer="adam", server_learning_rate="linear(0.1, 0.01)")
    plain, found = (audit(each, "model", trials=100) for each in (stated, moved))
    assert found.epsilon_lower == pytest.approx(plain.epsilon_lower, rel=1e-3)
    assert found.epsilon_lower > 1


def test_noise_that_all_examples_of_a_step_share_is_subtracted() -> None:
    found = audit(plan(batch_size=3), trials=5_000, method=sabotaged(FedCDP(), with_noise(same_in_every_slot)))
    assert found.epsilon_lower > 5 > exact_epsilon(math.sqrt(LAYERS) / 6)
    assert found.statistic == "fitted"


# Sound mechanisms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "lowest", "lowest_gaussian"),
    [({"trials": 100_000}, 0.5, 1.02), pytest.param({}, 0.75, 1.05, marks=pytest.mark.slow)],
    ids=["100,000 trials", "as many as by default"],
)
def test_one_noised_example_is_bounded_from_both_sides(more: dict[str, int], lowest: float, lowest_gaussian: float) -> None:
    found = audit(plan(), **more)
    truth = exact_epsilon(math.sqrt(LAYERS) / 6)
    assert truth == pytest.approx(1.085, abs=5e-4)
    assert lowest <= found.epsilon_lower <= truth
    assert found.epsilon_gaussian is not None
    assert lowest_gaussian <= found.epsilon_gaussian <= truth
    assert (found.adversary, found.unit, found.relation, found.exposures) == ("example", "record", "zero-out", 1)


@pytest.mark.parametrize(("adversary", "printed"), [("server", 1.59), pytest.param("example", 3.94, marks=pytest.mark.slow)])
def test_ten_participations_in_order_cost_most_of_what_is_printed(adversary: str, printed: float) -> None:
    found = audit(plan(batch_size=5), adversary, participations=10, trials=50_000)
    truth = exact_epsilon(unamplified_shift(plan(batch_size=5), adversary, "record", 5, 10))
    assert truth == pytest.approx(printed, rel=0.01)
    assert 0.35 * truth <= found.epsilon_lower <= truth
    assert found.epsilon_gaussian is not None
    assert 0.9 * truth <= found.epsilon_gaussian <= truth
    assert found.exposures == 10


@pytest.mark.parametrize("adversary", [pytest.param("model", marks=pytest.mark.slow), "server"])
def test_fed_sdp_costs_a_client_most_of_what_its_noise_allows(adversary: str) -> None:
    placed = plan(method="fed-sdp", noise_at="server" if adversary == "model" else "client", noise_multiplier=2)
    found = audit(placed, adversary, trials=2_000 if adversary == "model" else 100_000)
    truth = exact_epsilon(math.sqrt(LAYERS) / 2)
    assert found.unit == "client"
    assert 0.2 * truth <= found.epsilon_lower <= truth
    assert found.epsilon_gaussian is not None
    assert 0.8 * truth <= found.epsilon_gaussian <= truth


@st.composite
def audits(draw: st.DrawFn) -> tuple[Plan, str, str, int, int]:
    method = draw(st.sampled_from(["fed-cdp", "fed-cdp", "fed-cdp-decay", "fed-sdp"]))
    sampling = draw(st.sampled_from(["partition", "fixed", "poisson"]))
    noise_at = draw(st.sampled_from(["server", "client"]))
    batch = draw(st.integers(1, 4))
    chosen = Plan(
        method=method,
        rounds=4,
        per_round=draw(st.integers(1, 3)),
        local_steps=draw(st.integers(1, 3)),
        batch_size=batch,
        clip_mode=draw(st.sampled_from(["layer", "flat"])),
        noise_multiplier=draw(st.floats(0.5, 8)),
        noise=draw(st.sampled_from(["example", "batch", "cohort"])),
        noise_at=noise_at,
        noise_follows_clip=draw(st.booleans()),
        record_sampling=sampling,
        slots=batch + draw(st.integers(0, 4)) if sampling == "poisson" else None,
        learning_rate=draw(st.sampled_from([0.05, 1.0, "linear(0.2, 0.1)"])),
        momentum=draw(st.sampled_from([0.0, 0.5])),
        compression=draw(st.sampled_from([0.0, 0.3])),
        aggregation=draw(st.sampled_from(["fedsgd", "fedaveraging"])),
    )
    if method == "fed-sdp":
        adversary = "model" if noise_at == "server" else draw(st.sampled_from(["server", "update", "model"]))
        unit = draw(st.sampled_from(["client", "record"]))
    else:
        noised_one_by_one = chosen.noise == "example"
        adversary = draw(st.sampled_from(["server", "update", "model", *["example"] * noised_one_by_one]))
        unit = "record" if adversary == "example" else draw(st.sampled_from(["record", "record", "client"]))
    return chosen, adversary, unit, draw(st.integers(1, 12)), draw(st.integers(1, 3))


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True)
@given(audits())
def test_no_bound_exceeds_the_truth(drawn: tuple[Plan, str, str, int, int]) -> None:
    assert_within_the_truth(*drawn)


@pytest.mark.slow
@settings(max_examples=35, deadline=None, derandomize=True)
@given(audits())
def test_no_bound_of_many_plans_exceeds_the_truth(drawn: tuple[Plan, str, str, int, int]) -> None:
    assert_within_the_truth(*drawn)


def assert_within_the_truth(chosen: Plan, adversary: str, unit: str, records: int, participations: int) -> None:
    trials = 200 if adversary == "model" else 3_000
    found = audit(chosen, adversary, unit=unit, records=records, participations=participations, trials=trials, layers=LAYERS)
    truth = exact_epsilon(unamplified_shift(chosen, adversary, unit, records, participations))
    assert 0 <= found.epsilon_lower <= truth
    if chosen.record_sampling == "partition":
        assert found.epsilon_gaussian is not None
        assert found.epsilon_gaussian <= truth


@pytest.mark.slow
def test_secret_inclusion_lowers_the_bound_and_known_does_not() -> None:
    sampled = plan(record_sampling="poisson", slots=10, noise="batch", noise_multiplier=0.5, clip_mode="flat")
    amplified, delta = poisson_epsilon(rate=0.1, mu=2.0, delta=0.01), 0.01
    secret = audit(sampled, "server", records=10, trials=50_000, delta=delta)
    known = audit(sampled, "server", records=1, trials=50_000, delta=delta)
    assert 0.5 * amplified < secret.epsilon_lower <= amplified < known.epsilon_lower <= exact_epsilon(2.0, delta)
    assert secret.epsilon_gaussian is None


def test_one_record_of_fed_sdp_turns_its_clients_update_around() -> None:
    """So that its ε is that of half the noise: more than its client's, which is only taken out."""
    stated = plan(method="fed-sdp", noise_at="client", batch_size=3, noise_multiplier=2.0)
    shown = [audit(stated, "server", unit=unit, records=3, trials=50_000).epsilon_gaussian for unit in ("client", "record")]
    assert shown[0] == pytest.approx(exact_epsilon(math.sqrt(LAYERS) / 2), rel=0.05)
    assert shown[1] == pytest.approx(exact_epsilon(math.sqrt(LAYERS)), rel=0.05)


@pytest.mark.parametrize(
    ("raw", "adversary"),
    [
        (plan(method="nonprivate"), "server"),
        (plan(method="nonprivate"), "example"),
        (plan(method="nonprivate"), "model"),
        (plan(method="dssgd"), "update"),
        (plan(method="fed-sdp", noise_at="server"), "server"),
        (plan(method="fed-sdp", noise_at="client"), "example"),
        (plan(noise="batch"), "example"),
        (plan(noise="cohort"), "example"),
        (plan(noise_multiplier=0.0), "server"),
    ],
)
def test_raw_releases_give_the_largest_bound_that_the_trials_allow(raw: Plan, adversary: str) -> None:
    found = audit(raw, adversary, trials=1_000)
    assert found.epsilon_lower == pytest.approx(epsilon_of_errors(0, 0, 800, DELTA))
    assert found.epsilon_gaussian == math.inf


# Limits and curves ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.floats(0, 1), st.sampled_from([0.0005, 0.05, 0.16]))
def test_upper_limit_is_clopper_and_pearsons(trials: int, share: float, level: float) -> None:
    errors = round(share * trials)
    limit = float(upper_limit(errors, trials, level))
    assert limit == pytest.approx(1.0 if errors == trials else beta.ppf(1 - level, errors + 1, trials - errors), rel=1e-9)
    interval = binomtest(errors, trials).proportion_ci(1 - 2 * level, method="exact")
    assert limit == pytest.approx(interval.high, rel=1e-6)


@given(st.floats(0.01, 10), st.sampled_from([1e-6, 1e-5, 1e-2]))
def test_gaussian_epsilon_is_that_of_the_exact_curve(mu: float, delta: float) -> None:
    assert gaussian_epsilon(mu, delta) == pytest.approx(exact_epsilon(mu, delta), abs=1e-6)


def test_gaussian_epsilon_of_no_shift_is_zero_and_of_an_infinite_one_infinite() -> None:
    assert (gaussian_epsilon(0.0, DELTA), gaussian_epsilon(-1.0, DELTA)) == (0.0, 0.0)
    assert gaussian_epsilon(math.inf, DELTA) == math.inf


def test_useless_and_reversed_tests_prove_nothing() -> None:
    assert epsilon_of_errors(500, 500, 1000, DELTA) == 0
    assert epsilon_of_errors(1000, 1000, 1000, DELTA) == 0
    assert epsilon_of_errors(1000, 0, 1000, DELTA) == 0


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_bound_is_the_same_with_the_two_kinds_of_errors_swapped(one: int, other: int) -> None:
    assert epsilon_of_errors(one, other, 1000, DELTA) == epsilon_of_errors(other, one, 1000, DELTA)


def test_fewer_than_one_bound_in_a_hundred_exceeds_the_truth() -> None:
    """At a large δ the attack is nearly optimal, so that the bound comes close to the truth from below."""
    generator, truth, delta = np.random.default_rng(0), exact_epsilon(1.0, 0.1), 0.1
    bounds, shifts = [], []
    for _ in range(500):
        absent, present = generator.normal(0, 1, (2, 2000)), generator.normal(1, 1, (2, 2000))
        _, threshold = choose_attack(absent[0][:, None], present[0][:, None], 2000, delta)
        alarms, misses = (absent[1] > threshold).sum(), (present[1] <= threshold).sum()
        bounds.append(float(epsilon_of_errors(alarms, misses, 2000, delta)))
        shifts.append(mean_shift(absent[1], present[1]))
    assert np.mean(np.array(bounds) > truth) < 0.01
    assert np.mean(bounds) > 0.5 * truth
    assert np.mean(np.array(shifts) > 1.0) < 0.01


@pytest.mark.slow
def test_fewer_than_one_audit_in_a_hundred_exceeds_the_truth() -> None:
    truth = exact_epsilon(1.0, 0.1)
    checked = plan(noise_multiplier=1.0, clip_mode="flat")
    bounds = [audit(checked, "server", trials=1_000, delta=0.1, seed=seed).epsilon_lower for seed in range(101)]
    assert np.mean(np.array(bounds) > truth) < 0.01
    assert np.mean(bounds) > 0.3 * truth


# The call -------------------------------------------------------------------------------------------------------------


def test_a_seed_fixes_the_audit_and_no_seed_does_not() -> None:
    def run(seed: int | None) -> Audit:
        return replace(audit(plan(noise_multiplier=1.0), trials=1_000, seed=seed), seconds=0.0)

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(None) != run(None)


def test_secure_noise_is_audited_as_it_is_drawn() -> None:
    truth = exact_epsilon(math.sqrt(LAYERS) / 2)
    found = audit(plan(noise_multiplier=2.0, secure_noise=True), "server", trials=50_000)
    assert 0.3 * truth < found.epsilon_lower <= truth


def test_progress_reaches_the_end() -> None:
    told: list[tuple[int, int]] = []
    audit(plan(), trials=1_000, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (2_000, 2_000)


def test_number_of_layers_raises_the_bound_under_layer_clipping_alone() -> None:
    one, many = (audit(plan(), layers=layers, trials=50_000).epsilon_gaussian for layers in (1, 6))
    flat = audit(plan(clip_mode="flat"), layers=6, trials=50_000).epsilon_gaussian
    assert one == pytest.approx(exact_epsilon(1 / 6), rel=0.2)
    assert many == pytest.approx(exact_epsilon(math.sqrt(6) / 6), rel=0.2)
    assert flat == pytest.approx(one, rel=0.2)


@pytest.mark.parametrize(
    ("given_", "named"),
    [
        ({"adversary": "nobody"}, "adversary"),
        ({"unit": "household"}, "unit"),
        ({"relation": "cousin"}, "relation"),
        ({"copies": 3}, "copies"),
        ({"clients": 1}, "per_round"),
        ({"layers": 0}, "layers"),
        ({"records": 0}, "records"),
        ({"participations": 0}, "participations"),
        ({"participations": 101}, "participations"),
        ({"trials": 99}, "trials"),
        ({"delta": 0.0}, "delta"),
    ],
)
def test_what_cannot_be_audited_is_refused_by_name(given_: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match=f"^{named}: "):
        audit(plan(), **given_)


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_bound_that_follows_a_quantile_is_refused(adversary: str) -> None:
    with pytest.raises(PlanError, match=r"^clip: "):
        audit(plan(clip="quantile(0.5, 4)"), adversary)
