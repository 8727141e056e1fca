"""Corners where the first release printed an ε that was too small: each test covers the whole class, not one example."""

import json
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fedcdp
from fedcdp.accounting import pld
from fedcdp.accounting.budget import Budget
from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.mechanisms import (
    Gaussian,
    Lottery,
    OverfullPoisson,
    PoissonGaussian,
    Repeated,
    Sequence,
    SlottedPoisson,
    WithoutReplacement,
)
from fedcdp.accounting.population import Population
from fedcdp.accounting.rdp import epsilon as rdp_epsilon
from fedcdp.accounting.statement import Privacy, Usage, state
from fedcdp.config.experiment import assemble
from fedcdp.config.plan import Plan
from fedcdp.config.presets import preset
from fedcdp.errors import PlanError
from fedcdp.training.ledger_check import spent

SUM = {"secure_aggregation": True, "local_steps": 1, "rounds": 3, "per_round": 5, "batch_size": 4}


def epsilons(plan: Plan, population: Population, **more: object) -> dict[tuple[str, str, str], float]:
    privacy: Privacy = state(plan, population, **more)  # type: ignore[arg-type]
    return {(row.adversary, row.unit, row.relation): row.epsilon for row in privacy.rows}


# Other clients' noise ------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(4, 10**6), st.sampled_from([0.3, 1.0, 6.0]), st.sampled_from(["example", "batch", "cohort"]))
def test_a_fixed_order_is_not_amplified_by_the_share_of_records(records: int, sigma: float, noise: str) -> None:
    """The first batch is used in every participation: how many records lie behind it hides nothing."""
    plan = Plan(**SUM, record_sampling="partition", noise_multiplier=sigma, noise=noise)
    few, many = (state(plan, Population(10, held, 1, 2)).row("model").epsilon for held in (4, records))
    assert many == few


@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize("clients", [5, 10])
@pytest.mark.parametrize(
    "method",
    [{"record_sampling": "partition"}, {"record_sampling": "fixed"}, {}, {"method": "fed-sdp", "noise_at": "client"}],
    ids=str,
)
def test_pruned_noise_of_others_is_not_credited(method: dict, clients: int, unit: str) -> None:
    plan, population = Plan(**SUM, **method, noise_multiplier=1.0), Population(clients, 40, 1, 2)
    credited = state(plan, population).row("model", unit)
    pruned = state(plan.but(compression=0.01), population)
    assert pruned.row("model", unit).epsilon == pruned.row("server", unit).epsilon >= credited.epsilon
    assert "prunes its own noise" in pruned.row("model", unit).assumption


@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize("clients", [5, 10])
@pytest.mark.parametrize("sampling", ["partition", "fixed", "poisson"])
def test_no_credit_where_a_client_has_fewer_records_than_a_batch(sampling: str, clients: int, unit: str) -> None:
    """It divides by fewer, so its noise is larger, and the energy of the sum's noise shows whether it took part."""
    plan = Plan(**SUM, record_sampling=sampling, noise_multiplier=1.0)
    enough, few = (state(plan, Population(clients, held, 1, 2, (held, 40))) for held in (4, 3))
    for reader in ("server", "model"):
        assert enough.row(reader, unit).epsilon < few.row(reader, unit).epsilon
        assert "secure aggregation holds" in enough.row(reader, unit).assumption
    assert few.row("model", unit).epsilon == few.row("server", unit).epsilon
    assert few.row("server").epsilon == few.row("update").epsilon
    assert "fewer than B records" in few.row("model", unit).assumption


@pytest.mark.parametrize("noise", ["example", "batch", "cohort"])
@pytest.mark.parametrize("layers", [1, 3])
def test_with_everybody_in_every_round_the_sum_is_one_gaussian(noise: str, layers: int) -> None:
    plan = Plan(**SUM, record_sampling="partition", noise_multiplier=2.0, noise=noise)
    privacy = state(plan, Population(5, 40, 1, layers))
    draws = {"example": math.sqrt(4), "batch": 1.0, "cohort": 1 / 5}[noise]
    for reader, known in (("server", 0), ("model", 1)):  # a client knows its own noise
        z = 2.0 * draws * math.sqrt(5 - known) / math.sqrt(layers) / math.sqrt(plan.rounds)
        assert privacy.row(reader).epsilon == pytest.approx(pld.gaussian_epsilon(z, 1e-5), rel=1e-6)
        assert privacy.row(reader, "client").epsilon == pytest.approx(pld.gaussian_epsilon(z / 4, 1e-5), rel=1e-6)
        assert privacy.row(reader).epsilon_worst == privacy.row(reader).epsilon


def test_everybody_in_every_round_of_fed_sdp() -> None:
    plan = Plan(**SUM, method="fed-sdp", noise_at="client", noise_multiplier=2.0)
    privacy = state(plan, Population(5, 40, 1, 3))
    for reader, known in (("server", 0), ("model", 1)):
        z = 2.0 * math.sqrt((5 - known) / 3 / plan.rounds)
        assert privacy.row(reader, "client").epsilon == pytest.approx(pld.gaussian_epsilon(z, 1e-5), rel=1e-6)
        assert privacy.row(reader, "record").epsilon == pytest.approx(pld.gaussian_epsilon(z / 2, 1e-5), rel=1e-6)


def test_the_recommended_preset_under_secure_aggregation() -> None:
    experiment = assemble(preset("mnist-eps1"), {"plan": {"secure_aggregation": True}})
    for colluders, expected in ((0, 0.0809), (50, 0.1183)):
        stated = state(experiment.plan.but(colluders=colluders), Population(100, 500, 1, 1))
        assert stated.row("server").epsilon == pytest.approx(expected, abs=0.0003)


def test_moments_count_for_a_client_that_took_no_part() -> None:
    """Without noise on gradients there is no ε, but what was released before the first round has one."""
    plan = Plan(noise_multiplier=0.0, scaling_noise=2.0, per_round=2)
    used = state(plan, Population(4, 40, 1, 1), usage=Usage((-1, 0), (0,))).row("server").epsilon_used
    assert used == pytest.approx(pld.gaussian_epsilon(2.0, 1e-5), rel=1e-6)


# Repeats -------------------------------------------------------------------------------------------------------------

STAYS = {"clip": "linear(6, 1)", "noise_follows_clip": False, "record_sampling": "partition", "local_steps": 1,
         "per_round": 10, "rounds": 40, "noise_multiplier": 6.0}  # fmt: skip


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 39), min_size=1, max_size=60))
def test_repeated_rounds_cost_what_they_cost(rounds: list[int]) -> None:
    """Under noise that stays, an early round is louder than a late one, and so is its repeat."""
    plan, population = Plan(**STAYS), Population(10, 40, 1, 3)
    released = tuple(sorted(rounds))
    row = state(plan, population, rounds=released, usage=Usage(released, (len(rounds),))).row("server")
    sigma = [6.0 * plan.clip_at(0) / plan.clip_at(t) for t in released]
    exact = pld.gaussian_epsilon(1 / math.sqrt(sum(3 / 5 / s**2 for s in sigma)), 1e-5)
    for found in (row.epsilon, row.epsilon_used, row.epsilon_worst):
        assert found == pytest.approx(exact, rel=1e-6)


def test_a_ledger_with_repeats_is_read_by_its_rounds(tmp_path) -> None:
    plan, population = Plan(**STAYS, secure_noise=True), Population(10, 40, 1, 3)
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.toml").write_text(
        "[plan]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in plan.written().items())
    )
    ledger = Ledger.create(directory / "ledger.jsonl", plan.written(), population.written(), "secure")
    for round_, times in ((0, 5), (1, 1), (2, 1)):
        for _ in range(times):
            ledger.charge(round_, np.arange(10), plan.clip_at(round_))
    found = spent(directory)[1].row("server")
    once = state(plan, population, rounds=7, usage=Usage(tuple(range(7)), (7,))).row("server")
    assert found.epsilon_used > once.epsilon_used
    assert found.epsilon > once.epsilon


@pytest.mark.parametrize("follows", [True, False])
def test_a_budget_counts_repeats_by_their_rounds(follows: bool) -> None:
    settings_ = {"plan": STAYS | {"noise_follows_clip": follows}, "run": {"max_epsilon": 2.0}, "data": {"clients": 10}}
    budget = Budget(assemble(settings_), Population(10, 40, 1, 3))
    most = max(n for n in range(41) if budget.allows(tuple(range(n))))
    assert 1 < most < 40
    repeats = max(n for n in range(41) if budget.allows((0,) * n))
    assert repeats == most if follows else repeats < most


def test_a_budget_with_room_allows_repeats_beyond_the_planned_rounds() -> None:
    budget = Budget(
        assemble({"plan": STAYS, "run": {"max_epsilon": 100.0}, "data": {"clients": 10}}), Population(10, 40, 1, 3)
    )
    assert budget.allows((*range(40), 39, 39))


def test_the_progress_shows_what_the_ledger_charged(tmp_path) -> None:
    experiment, population = assemble({"plan": STAYS, "data": {"clients": 10}}), Population(10, 40, 1, 3)
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(path, Plan(**STAYS, secure_noise=True).written(), population.written(), "secure")
    for _ in range(6):
        ledger.charge(0, np.arange(10), 6.0)
    shown = [Budget(experiment, population, each).shown_after(1) for each in (path, None)]
    figures = [float(text.split()[1]) for text in shown]
    assert figures[0] == pytest.approx(state(experiment.plan, population, rounds=(0,) * 6).row("server").epsilon, rel=0.01)
    assert figures[0] > figures[1]


# Small rates and nested lotteries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e-10, 1e-7, 4e-7, 1.5e-6, 1e-3])
def test_rates_of_sampling_without_replacement_are_not_rounded(rate: float) -> None:
    release = Repeated(WithoutReplacement(rate, 0.5), 50)
    assert rdp_epsilon(release, 1e-9) >= pld.epsilon(release, 1e-9) > 0


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.floats(1e-9, 1e-5), st.floats(0.05, 1.0), st.integers(1, 10**6))
def test_tails_of_nested_lotteries_are_spent_once_a_participation(inner: float, outer: float, times: int) -> None:
    """A release with next to no noise, drawn at least once with more than δ: no finite promise of a small ε can hold."""
    delta = 1e-5
    drawn = -math.expm1(times * math.log1p(-inner * outer))
    release = Repeated(Lottery(Sequence((Lottery(Gaussian(1e-4), inner), Gaussian(10.0))), outer), times)
    assume(drawn > 2 * delta)
    assert pld.epsilon(release, delta) > 1e5


@pytest.mark.parametrize("records", [2_000, 200_000, 20_000_000])
@pytest.mark.parametrize("quantile", ["4", "quantile(0.5, 4)"])
def test_a_record_that_is_hardly_ever_drawn_divides_by_nothing(records: int, quantile: str) -> None:
    plan = Plan(rounds=1, per_round=1, local_steps=1, batch_size=1, delta=1e-3, noise_multiplier=1e-3, clip=quantile)
    found = epsilons(plan, Population(100, records, 1, 3))[("example", "record", "zero-out")]
    assert found == 0 if 1 / records < 1e-5 else 0 < found < math.inf


# Clients of different sizes ------------------------------------------------------------------------------------------

SLOTTED = {"batch_size": 5, "slots": 10, "per_round": 10, "rounds": 5, "local_steps": 1, "noise": "batch"}


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.sets(st.integers(5, 60), min_size=2, max_size=5), st.sampled_from([0.3, 0.5, 1.0]))
def test_the_worst_of_all_client_sizes_is_printed(sizes: set[int], sigma: float) -> None:
    """More slots than records: none overflow. So a client with more records may be the worst off."""
    plan, held = Plan(**SLOTTED, noise_multiplier=sigma), tuple(sorted(sizes))
    together = epsilons(plan, Population(20, held[0], 1, 1, held))
    alone = [epsilons(plan, Population(20, size, 1, 1)) for size in held]
    unknown = epsilons(plan, Population(20, held[0], 1, 1, None))
    for row, found in together.items():
        worst = max(each[row] for each in alone)
        assert worst <= found * (1 + 1e-9)
        assert found <= 1.1 * worst
        assert alone[0][row] <= unknown[row] * (1 + 1e-9)


def test_a_larger_client_may_be_the_worst_off() -> None:
    plan = Plan(**SLOTTED | {"rounds": 1}, noise_multiplier=0.5)
    few, more, both = (
        state(plan, Population(10, held[0], 1, 1, held)).row("server").epsilon for held in ((10,), (11,), (10, 11))
    )
    assert few == pytest.approx(8.98, abs=0.01)
    assert both == more == pytest.approx(10.0, abs=0.01)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(6, 30), st.integers(1, 200), st.sampled_from([0.4, 1.0, 3.0]))
def test_one_bound_covers_every_client_above_the_slots(slots: int, more: int, z: float) -> None:
    from scipy.stats import poisson

    held = slots + more
    exact = Repeated(SlottedPoisson(held, 5 / held, slots, z), 10)
    overflow = float(poisson.sf(slots - 1, 5))
    bound = Repeated(OverfullPoisson(5 / held, overflow, z), 10)
    assert pld.epsilon(exact, 1e-5) <= pld.epsilon(bound, 1e-5) * (1 + 1e-9)
    told = pld.epsilon(Repeated(OverfullPoisson(5 / held, overflow, z, told=True), 10), 1e-5)
    never = pld.epsilon(Repeated(PoissonGaussian(5 / held, z), 10), 1e-5)
    always = pld.epsilon(Repeated(Lottery(Gaussian(z), 5 / held), 10), 1e-5)
    assert never <= told * (1 + 1e-9)
    assert told <= always * (1 + 1e-9)


def test_a_federation_tells_its_distinct_sizes() -> None:
    data = fedcdp.load("cancer").train
    lists = [range(3), range(3, 10), range(10, 17)]
    federation = fedcdp.partition(data, scheme="custom", indices=[list(each) for each in lists])
    plan = Plan(per_round=2)
    found = Population.of(
        federation, fedcdp.files.tree.Layout.of(fedcdp.models.networks.build("linear", data.shape, 2)), plan
    )
    assert (found.records, found.sizes) == (3, (3, 7))


@pytest.mark.parametrize("sizes", [(7, 3), (3, 3), (4, 7), (3, 0), (3, 7.0), (3, True)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple) -> None:
    with pytest.raises(PlanError, match="sizes"):
        Population(10, 3, 1, 1, sizes)


def test_sizes_survive_a_ledger(tmp_path) -> None:
    population = Population(10, 3, 1, 1, (3, 7))
    ledger = Ledger.create(tmp_path / "ledger.jsonl", Plan().written(), population.written(), "seeded")
    assert Population.read(Ledger.open(ledger.path).population) == population
    old = {key: value for key, value in json.loads(json.dumps(population.written())).items() if key != "sizes"}
    assert Population.read(old).sizes is None


# What a hidden cohort must not show ----------------------------------------------------------------------------------


def test_no_metric_shows_how_many_clients_a_hidden_cohort_had() -> None:
    federation = fedcdp.partition(fedcdp.load("cancer"), clients=20, scheme="iid")
    model = fedcdp.models.networks.build("linear", federation.train.shape, 2)
    shown = {}
    for sampling in ("poisson", "fixed"):
        plan = Plan(method="fed-sdp", client_sampling=sampling, per_round=5, rounds=3, local_steps=1)
        run = fedcdp.simulate(model, federation, plan, engine="functional")
        shown[sampling] = set().union(*run.metrics)
        assert run.client_steps == 15
    assert shown["fixed"] - shown["poisson"] == {"clients", "seconds"}


@pytest.mark.parametrize("noise", ["example", "batch", "cohort"])
def test_the_row_of_single_gradients_says_where_it_holds(noise: str) -> None:
    row = state(Plan(per_round=10, noise=noise), Population(50, 40, 1, 3)).row("example")
    if noise == "example":
        assert "noised before the sum" in row.assumption
    else:
        assert row.epsilon == math.inf
