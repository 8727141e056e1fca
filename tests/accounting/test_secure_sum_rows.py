"""Noise on the sum of all clients: the vectors of its specification, colluders, a client's own view, attempts, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcdp.accounting import pld
from fedcdp.accounting.calibrate import Target, calibrate_noise
from fedcdp.accounting.mechanisms import Gaussian, Lottery, repeated
from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import Privacy, Usage, state
from fedcdp.config.plan import Plan
from fedcdp.errors import PlanError
from tests.support.independent.losses import gaussian_epsilon

HUNDRED = Population(100, 500, 1, 1)


def plan_of(**fields: Any) -> Plan:
    usual = {"rounds": 20, "per_round": 100, "local_steps": 1, "batch_size": 500, "record_sampling": "partition"}
    return Plan(**usual | {"clip_mode": "flat", "noise": "sum", "secure_aggregation": True} | fields)


def mu(rounds: int, sigma: float) -> float:
    return math.sqrt(rounds) / sigma


@pytest.mark.parametrize(
    ("sigma", "epsilon", "alone", "twice"), [(16.684, 1, 14.43, 1.465), (8.917, 2, 33.25, 2.954), (2.684, 8, 208.9, 12.26)]
)
def test_the_vectors_of_the_specification(sigma: float, epsilon: float, alone: float, twice: float) -> None:
    stated = state(plan_of(noise_multiplier=sigma, attempts=2), HUNDRED)
    assert stated.row("server").epsilon == pytest.approx(epsilon, rel=0.01)
    assert stated.row("update").epsilon == pytest.approx(alone, rel=0.01)
    assert stated.row("server").epsilon_worst == pytest.approx(twice, rel=0.01)
    assert stated.row("example").epsilon == math.inf


@pytest.mark.parametrize(("epsilon", "noise", "half"), [(1, 0.0809, 0.1183), (2, 0.1606, 0.2343), (8, 0.5943, 0.8681)])
def test_noise_of_single_updates_read_as_a_sum(epsilon: float, noise: float, half: float) -> None:
    """The plan has the noise that ε needs update by update; its server reads sums."""
    batch = plan_of(noise="batch", secure_aggregation=False)
    batch = calibrate_noise(batch, HUNDRED, Target(epsilon))
    for colluders, expected in ((0, noise), (50, half)):
        read = state(batch.but(secure_aggregation=True, colluders=colluders), HUNDRED)
        assert read.row("server").epsilon == pytest.approx(expected, rel=0.01)
        assert read.row("update").epsilon == pytest.approx(epsilon, rel=0.01)


@pytest.mark.parametrize(("clients", "expected"), [(100, 1.006), (10, 1.06), (2, 1.465)])
def test_a_client_that_reads_the_model_knows_its_own_noise(clients: int, expected: float) -> None:
    population = Population(clients, 500, 1, 1)
    plan = calibrate_noise(plan_of(per_round=clients), population, Target(1.0))
    assert state(plan, population).row("model").epsilon == pytest.approx(expected, rel=0.01)
    if clients > 2:
        stated = state(plan.but(colluders=1), population)
        assert stated.row("model").epsilon == stated.row("server").epsilon


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.data())
def test_the_servers_epsilon_does_not_depend_on_colluders(clients: int, data: st.DataObject) -> None:
    colluders = data.draw(st.integers(0, clients - 1))
    population = Population(clients, 500, 1, 1)
    plan = plan_of(per_round=clients, noise_multiplier=9.0)
    none, some = (state(each, population) for each in (plan, plan.but(colluders=colluders)))
    assert some.row("server").epsilon == pytest.approx(none.row("server").epsilon, rel=1e-9)
    assert some.row("update").epsilon <= none.row("update").epsilon * (1 + 1e-9)  # the shares grow instead
    assert some.row("server").epsilon <= some.row("model").epsilon * (1 + 1e-9) <= some.row("update").epsilon * (1 + 2e-9)


def rows(privacy: Privacy) -> dict[tuple[str, str], float]:
    return {(row.adversary, row.unit): row.epsilon for row in privacy.rows if row.relation == "zero-out"}


def test_every_row_of_fed_cdp() -> None:
    plan, layers, copies = plan_of(noise_multiplier=40.0, clip_mode="layer", colluders=20), 3, 4
    found = rows(state(plan, Population(100, 500, copies, layers)))
    z = 40.0 / math.sqrt(layers) / math.sqrt(20)
    expected = {
        ("server", "record"): z, ("model", "record"): z, ("update", "record"): z / math.sqrt(80),
        ("server", "unique"): z / copies, ("server", "client"): z / 500, ("model", "client"): z / 500,
    }  # fmt: skip
    assert found.pop(("example", "record")) == math.inf
    assert found == pytest.approx({row: pld.gaussian_epsilon(each, 1e-5) for row, each in expected.items()}, rel=1e-6)


@pytest.mark.parametrize("steps", [1, 7])
def test_every_row_of_fed_sdp(steps: int) -> None:
    plan = plan_of(method="fed-sdp", noise_at="client", local_steps=steps, noise_multiplier=40.0, colluders=20)
    found = rows(state(plan, Population(100, 500, 4, 1)))
    z = 40.0 / math.sqrt(20)
    expected = {
        ("server", "client"): z, ("server", "record"): z / 2, ("server", "unique"): z / 8, ("model", "client"): z,
        ("model", "record"): z / 2, ("update", "client"): z / math.sqrt(80), ("update", "record"): z / 2 / math.sqrt(80),
    }  # fmt: skip
    assert found.pop(("example", "record")) == math.inf
    assert found == pytest.approx({row: pld.gaussian_epsilon(each, 1e-5) for row, each in expected.items()}, rel=1e-6)


def test_unequal_clients_have_one_epsilon() -> None:
    """Undivided sums with equal noise: neither ε nor the credit depends on how many records a client holds."""
    sizes = (3, 40, 500)
    population = Population(3, 3, 1, 1, sizes, held=(500, 3, 40), names=("a", "b", "c"))
    stated = state(plan_of(per_round=3, noise_multiplier=16.0), population)
    assert {row.epsilon for row in stated.clients} == {stated.row("server").epsilon}
    assert stated.row("server").epsilon == pytest.approx(pld.gaussian_epsilon(16 / math.sqrt(20), 1e-5), rel=1e-6)


def test_a_client_has_no_credit_that_the_federation_has_not() -> None:
    """One client smaller than a batch divides by fewer records: nobody's noise is credited to anybody."""
    population = Population(3, 3, 1, 1, (3, 40, 500), held=(500, 3, 40), names=("a", "b", "c"))
    stated = state(plan_of(per_round=3, noise="batch", batch_size=10, noise_multiplier=8.0), population)
    assert {row.epsilon for row in stated.clients} == {stated.row("update").epsilon} == {stated.row("server").epsilon}


def test_secret_samples_of_records_are_amplified() -> None:
    plan = plan_of(record_sampling="poisson", batch_size=50, noise_multiplier=4.0)
    fixed = plan_of(noise_multiplier=4.0)
    assert state(plan, HUNDRED).row("server").epsilon < 0.6 * state(fixed, HUNDRED).row("server").epsilon


def test_some_clients_in_a_round_is_a_lottery() -> None:
    plan = plan_of(per_round=10, noise_multiplier=9.0)
    row = state(plan, HUNDRED, usage=Usage(tuple(range(20)), (5,))).row("server")
    assert row.epsilon < row.epsilon_worst == pytest.approx(pld.gaussian_epsilon(9 / math.sqrt(20), 1e-5), rel=1e-6)
    assert row.epsilon_used == pytest.approx(pld.gaussian_epsilon(9 / math.sqrt(5), 1e-5), rel=1e-6)


def test_attempts_that_were_charged_count_once_each() -> None:
    plan = plan_of(noise_multiplier=16.684, attempts=2)
    released = (0, 0, *range(1, 20))
    row = state(plan, HUNDRED, rounds=released, usage=Usage(released, (21,))).row("server")
    expected = pld.gaussian_epsilon(16.684 / math.sqrt(21), 1e-5)
    assert (row.epsilon, row.epsilon_used, row.epsilon_worst) == pytest.approx((expected,) * 3, rel=1e-6)


@pytest.mark.parametrize(("sigma", "tries", "per_round"), [(1.0, 3, 2), (1.0, 2, 10), (4.0, 3, 10), (4.0, 2, 60)])
def test_attempts_at_a_round_have_one_choice_of_clients(sigma: float, tries: int, per_round: int) -> None:
    """With probability q a client is in all attempts, else in none: δ(ε) is q times that of all of them together. After a
    crash they may have a choice each. Counted as independent, (1, 3, 2) had ε = 4.0, and those who drop out choose how many
    attempts there are."""
    plan, rate = plan_of(rounds=1, per_round=per_round, noise_multiplier=sigma, attempts=3), per_round / 100
    row = state(plan, HUNDRED, rounds=(0,) * tries).row("server")
    together = gaussian_epsilon(math.sqrt(tries) / sigma, plan.delta / rate)
    apart = pld.epsilon(repeated(Lottery(Gaussian(sigma), rate), tries), plan.delta)
    assert max(together, apart) <= row.epsilon <= row.epsilon_worst
    if tries * rate < 1:
        assert row.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(tries) / sigma, plan.delta / rate / tries), rel=1e-3)


def test_a_budget_counts_attempts_at_a_round_together() -> None:
    plan, target = plan_of(rounds=5, per_round=10, noise_multiplier=2.0, attempts=2), Target(1.0)
    fresh, again = target.reached(plan, HUNDRED, (0, 1, 2, 3)), target.reached(plan, HUNDRED, (0, 1, 2, 2))
    assert fresh < again
    assert target.reached(plan.but(attempts=1), HUNDRED, (0, 1, 2, 3)) == fresh


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"secure_aggregation": False}, "sum needs secure_aggregation"),
        ({"local_steps": 2}, "sum needs one local step"),
        ({"method": "fed-sdp"}, "set noise_at client"),
        ({"method": "nonprivate"}, "makes no sense with nonprivate"),
        ({"compression": 0.5}, "prune its share"),
        ({"aggregation": "fedaveraging"}, "not models"),
        ({"client_sampling": "poisson"}, "size of the cohort"),
        ({"clip": "quantile(0.5, 4)"}, "not masked"),
        ({"per_round": 1}, "at least two clients"),
        ({"colluders": 100}, "one of 100 clients must be honest"),
        ({"colluders": -1}, "0 or more"),
        ({"attempts": 0}, "from 1 to 100"),
        ({"noise": "batch", "attempts": 2}, "only rounds with noise on the sum"),
        ({"noise": "batch", "secure_aggregation": False, "colluders": 1}, "reads every update anyway"),
    ],
)
def test_refusals(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_of(**fields)
