"""What a privacy statement promises: never less than is lost, never quietly, and readable."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcdp.accounting import pld, rdp
from fedcdp.accounting.mechanisms import (
    Draws,
    Gaussian,
    Lottery,
    Nothing,
    PoissonGaussian,
    Release,
    SlottedPoisson,
    Unprotected,
    WithoutReplacement,
    repeated,
    sequence,
)
from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import VACUOUS, Usage, state
from fedcdp.accounting.views import views
from fedcdp.config.plan import Plan
from fedcdp.errors import PlanError

SMALL = Population(clients=50, records=40, copies=1, layers=3)

plans = st.builds(
    lambda method, sampling, noise, clients, steps, sigma, rounds, at: Plan(
        method=method,
        record_sampling=sampling,
        noise=noise,
        client_sampling=clients,
        local_steps=steps,
        batch_size=4,
        per_round=10,
        noise_multiplier=sigma,
        rounds=rounds,
        noise_at=at,
    ),
    st.sampled_from(["fed-cdp", "fed-sdp"]),
    st.sampled_from(["poisson", "fixed", "partition"]),
    st.sampled_from(["example", "batch"]),
    st.sampled_from(["fixed", "poisson"]),
    st.integers(1, 12),
    st.floats(1.0, 8.0),
    st.integers(1, 20),
    st.sampled_from(["server", "client"]),
)


def epsilons(plan: Plan, population: Population = SMALL) -> dict[tuple[str, str, str], float]:
    return {(r.adversary, r.unit, r.relation): r.epsilon for r in state(plan, population).rows}


def no_larger(smaller: dict[tuple[str, str, str], float], larger: dict[tuple[str, str, str], float]) -> bool:
    # Two per cent for the rounding of the table of losses, upwards. Beyond an ε of 500 e^ε outgrows the table, and a
    # coarser bound takes its place.
    return all(smaller[row] <= larger[row] * 1.02 + 1e-3 for row in larger if larger[row] < 500)


@settings(max_examples=10, deadline=None)
@given(plans, st.floats(1.05, 3.0))
def test_more_noise_never_costs_more(plan: Plan, factor: float) -> None:
    assert no_larger(epsilons(plan.but(noise_multiplier=plan.noise_multiplier * factor)), epsilons(plan))


@settings(max_examples=10, deadline=None)
@given(plans, st.integers(1, 10))
def test_fewer_rounds_never_cost_more(plan: Plan, more: int) -> None:
    assert no_larger(epsilons(plan), epsilons(plan.but(rounds=plan.rounds + more)))


@settings(max_examples=10, deadline=None)
@given(plans, st.integers(1, 9))
def test_fewer_clients_a_round_never_cost_more(plan: Plan, fewer: int) -> None:
    assert no_larger(epsilons(plan.but(per_round=fewer)), epsilons(plan))


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4), st.floats(1.0, 6.0), st.integers(1, 10))
def test_a_smaller_rate_at_the_same_slots_never_costs_more(batch: int, sigma: float, steps: int) -> None:
    plan = Plan(batch_size=4, slots=12, per_round=10, local_steps=steps, noise_multiplier=sigma, rounds=5)
    assert no_larger(epsilons(plan.but(batch_size=batch, slots=12)), epsilons(plan))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(plans)
def test_tight_is_no_larger_than_rdp_where_rdp_knows_the_release(plan: Plan) -> None:
    for view in views(plan, SMALL):
        release = view.before([plan.noise_multiplier] * plan.rounds)
        try:
            by_rdp = rdp.epsilon(release, plan.delta)
        except PlanError:
            assert plan.record_sampling == "poisson"
            continue
        grid = 1.001 if by_rdp < VACUOUS else 1.02  # the table of losses is coarser where ε guarantees nothing any more
        assert pld.epsilon(release, plan.delta) <= by_rdp * grid + 1e-3


def test_rdp_refuses_poisson_sampling_with_slots() -> None:
    with pytest.raises(PlanError, match="slots"):
        state(Plan(), Population(1000, 500, 1, 3), mode="rdp")


@pytest.mark.parametrize("release", [
    repeated(Lottery(Gaussian(2.0), 0.3), 20), repeated(PoissonGaussian(0.1, 1.5), 30),
    repeated(WithoutReplacement(0.2, 1.5), 10), repeated(SlottedPoisson(100, 0.05, 8, 1.2), 20),
    repeated(Draws(Gaussian(3.0), (0.5, 0.3, 0.2)), 10),
])  # fmt: skip
def test_secrecy_of_sampling_only_helps(release: Release) -> None:
    """The table of losses never exceeds the Gaussian releases that remain when all sampling is known and worst."""

    def exposed(part: Release) -> Release:
        match part:
            case Lottery(inner) | Draws(inner, (_, _)):
                return inner
            case Draws(inner, probabilities):
                return repeated(inner, len(probabilities) - 1)
            case PoissonGaussian(_, z) | SlottedPoisson(_, _, _, z) | WithoutReplacement(_, z):
                return Gaussian(z)
        return part

    worst = repeated(exposed(release.inner), release.times)  # type: ignore[union-attr]
    assert pld.epsilon(release, 1e-5) <= pld.epsilon(worst, 1e-5) + 1e-3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0.5, 20), st.integers(1, 50)), min_size=1, max_size=5))
def test_gaussian_releases_add_up_exactly(parts: list[tuple[float, int]]) -> None:
    together = sequence([repeated(Gaussian(z), times) for z, times in parts])
    assert isinstance(together, Gaussian)
    assert together.z == pytest.approx(1 / math.sqrt(sum(times / z**2 for z, times in parts)))


@pytest.mark.slow
def test_gaussian_epsilon_is_the_exact_curve() -> None:
    from dp_accounting.pld import privacy_loss_distribution as tables

    for z in (0.3, 1.0, 4.0):
        table = tables.from_gaussian_mechanism(z, value_discretization_interval=1e-4).get_epsilon_for_delta(1e-5)
        assert pld.gaussian_epsilon(z, 1e-5) == pytest.approx(table, rel=1e-3)


@pytest.mark.parametrize(
    ("method", "changes"),
    [("nonprivate", {}), ("dssgd", {}), ("nonprivate", {"compression": 0.5}), ("fed-cdp", {"noise_multiplier": 0.0})],
)
def test_what_protects_nothing_is_infinite_with_the_reason(method: str, changes: dict[str, float]) -> None:
    privacy = state(Plan(method=method, per_round=10, **changes), SMALL)
    assert {row.adversary for row in privacy.rows} == {"server", "update", "example", "model"}
    assert all(row.epsilon == row.epsilon_worst == math.inf and len(row.assumption) > 10 for row in privacy.rows)
    assert all(row["epsilon"] == "inf" for row in json.loads(json.dumps(privacy.as_json()))["rows"])


@pytest.mark.parametrize("noise", ["batch", "cohort"])
def test_noise_on_the_sum_leaves_single_gradients_open(noise: str) -> None:
    assert state(Plan(noise=noise, per_round=10), SMALL).row("example").epsilon == math.inf


def test_pruning_after_the_noise_costs_nothing() -> None:
    plan = Plan(per_round=10, rounds=5)
    assert epsilons(plan) == epsilons(plan.but(compression=0.5))


@pytest.mark.slow
def test_a_decaying_bound_leaves_epsilon_as_it_is_and_noise_that_stays_improves_it() -> None:
    plan = Plan(per_round=10, rounds=10, local_steps=5)
    decaying = plan.but(method="fed-cdp-decay")
    assert epsilons(decaying) == epsilons(plan)
    stays, falls = epsilons(decaying.but(noise_follows_clip=False)), epsilons(decaying)
    assert all(stays[row] < falls[row] for row in falls)


@pytest.mark.slow
def test_noise_that_stays_while_the_bound_grows_costs_more() -> None:
    """The noise is then below σ times the bound of the round, and the accountant must see that."""
    plan = Plan(per_round=10, rounds=10, local_steps=5, clip="linear(2, 6)")
    less, enough = epsilons(plan.but(noise_follows_clip=False)), epsilons(plan)
    assert all(less[row] > enough[row] for row in enough)


@pytest.mark.parametrize("method", ["fed-cdp", "fed-sdp"])
def test_a_clip_bound_by_quantile_costs_what_its_counts_show(method: str) -> None:
    plan = Plan(method=method, per_round=10, rounds=5, local_steps=5)
    plain = epsilons(plan)
    loud, quiet = (epsilons(plan.but(clip="quantile(0.5, 4)", quantile_noise=noise)) for noise in (1.0, 1e6))
    assert all(loud[row] > plain[row] for row in plain if plain[row] < math.inf)
    assert all(quiet[row] == pytest.approx(plain[row], rel=0.01) for row in plain if plain[row] < math.inf)


def test_one_step_by_quantile_is_one_gaussian_release_of_both() -> None:
    """1/z² = M/σ² + 1/(4σ_b²) for the reader of single examples."""
    plan = Plan(
        clip="quantile(0.5, 4)", quantile_noise=2.0, local_steps=1, rounds=1, per_round=50, record_sampling="partition"
    )
    found = state(plan, SMALL).row("example").epsilon
    assert found == pytest.approx(pld.gaussian_epsilon(1 / math.sqrt(3 / 36 + 1 / 16), 1e-5))


def test_each_layer_counts() -> None:
    one, many = (epsilons(Plan(per_round=10, rounds=5), Population(50, 40, 1, layers)) for layers in (1, 5))
    assert all(many[row] > one[row] for row in one)


def test_copies_cost_the_person_behind_them() -> None:
    privacy = state(Plan(per_round=10, rounds=5), Population(50, 40, 5, 3))
    assert privacy.row("server", "unique").epsilon > privacy.row("server").epsilon
    assert privacy.row("example", "unique").epsilon > privacy.row("example").epsilon
    assert any("5 clients" in note for note in privacy.notes)


def test_everyone_holding_a_copy_is_every_client_of_the_round() -> None:
    """With K copies, exactly K_t of them take part in every round: nothing is left to chance."""
    row = state(Plan(per_round=10, rounds=4, record_sampling="partition"), Population(50, 40, 50, 3)).row("server", "unique")
    assert row.epsilon == pytest.approx(row.epsilon_worst, rel=1e-3)


def test_one_step_under_secure_aggregation_credits_the_others_noise() -> None:
    plan = Plan(per_round=25, rounds=20, local_steps=1)
    alone, together = state(plan, SMALL), state(plan.but(secure_aggregation=True), SMALL)
    assert together.row("model", "client").epsilon < alone.row("model", "client").epsilon
    assert together.row("server").epsilon < alone.row("server").epsilon == together.row("update").epsilon
    several = state(plan.but(secure_aggregation=True, local_steps=2), SMALL)
    assert several.row("model").epsilon == several.row("server").epsilon


def test_secure_aggregation_with_poisson_clients_is_refused() -> None:
    with pytest.raises(PlanError, match="energy of the noise"):
        state(Plan(per_round=10, secure_aggregation=True, client_sampling="poisson", local_steps=1), SMALL)


def test_what_is_used_grows_with_participations_and_ends_at_the_worst() -> None:
    plan = Plan(per_round=10, rounds=10, record_sampling="partition")
    used = [state(plan, SMALL, usage=Usage(tuple(range(10)), (times,))).row("server").epsilon_used for times in range(11)]
    assert used[0] == 0
    assert used == sorted(used)
    assert used[-1] == pytest.approx(state(plan, SMALL).row("server").epsilon_worst)


def test_copies_may_all_have_been_used_in_the_round_with_the_least_noise() -> None:
    """Where noise stays and the bound falls, early rounds cost more; two holders of a record may have met in the first."""
    plan = Plan(per_round=10, rounds=10, record_sampling="partition", clip="linear(6, 1)", noise_follows_clip=False)
    row = state(plan, Population(50, 40, 2, 3), usage=Usage(tuple(range(10)), (1, 1))).row("server", "unique")
    steps = math.ceil(100 * 5 / 40)
    twice_in_the_first = pld.gaussian_epsilon(6 * math.sqrt(5 / 3) / math.sqrt(2 * steps), 1e-5)
    assert row.epsilon_used is not None
    assert row.epsilon_used >= twice_in_the_first


def test_before_a_run_nothing_is_used() -> None:
    assert all(row.epsilon_used is None for row in state(Plan(per_round=10), SMALL).rows)


def test_rounds_that_were_repeated_under_fresh_noise_are_counted() -> None:
    plan = Plan(method="fed-sdp", per_round=10, rounds=5)
    once, again = (
        state(plan, SMALL, usage=Usage(rounds, (5,))).row("model", "client").epsilon_used
        for rounds in (tuple(range(5)), (*range(5), 4, 4))
    )
    assert once is not None
    assert again is not None
    assert again > once


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.5])
def test_any_sensible_delta_has_an_answer(delta: float) -> None:
    assert all(row.epsilon >= 0 for row in state(Plan(per_round=10, rounds=3, delta=delta), SMALL).rows)


def test_a_statement_reads_as_text_as_json_and_in_a_notebook() -> None:
    privacy = state(Plan(per_round=10, rounds=3), SMALL)
    for text in (str(privacy), repr(privacy), privacy._repr_html_()):
        assert "server" in text
        assert "δ" in text
    written = json.loads(json.dumps(privacy.as_json()))
    assert set(written) == {"delta", "mode", "rows"}
    assert set(written["rows"][0]) == {
        "adversary", "unit", "relation", "epsilon", "epsilon_used", "epsilon_worst", "assumption"
    }  # fmt: skip
    assert "<table>" in privacy._repr_html_()


def test_a_missing_row_is_named_with_those_there_are() -> None:
    with pytest.raises(PlanError, match="server/record/zero-out"):
        state(Plan(per_round=10), SMALL).row("nobody")


@pytest.mark.parametrize("field", ["clients", "records", "copies", "layers"])
def test_an_impossible_population_is_refused(field: str) -> None:
    with pytest.raises(PlanError, match=field):
        Population(**({"clients": 10, "records": 10, "copies": 1, "layers": 1} | {field: 0}))


def test_unprotected_releases_poison_a_sequence() -> None:
    assert sequence([Gaussian(1.0), Unprotected("raw")]) == Unprotected("raw")
    assert sequence([Nothing(), Nothing()]) == Nothing()
