"""The accountant against figures computed independently of it (design notes, tolerance 2 %), and against the print."""

from __future__ import annotations

import math

import pytest

from fedcdp.accounting import pld
from fedcdp.accounting.mechanisms import PoissonGaussian, repeated
from fedcdp.accounting.paper import classical_epsilons, printed_epsilon
from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import Privacy, Usage, state
from fedcdp.config.plan import Plan

ALONE = Population(clients=1000, records=500, copies=1, layers=3)
COPIED = Population(clients=1000, records=500, copies=10, layers=3)
TEN_TIMES = Usage(rounds=tuple(range(100)), participations=(10,))


def close(value: float | None, expected: float) -> bool:
    return value == pytest.approx(expected, rel=0.02)


def of(plan: Plan, population: Population = ALONE) -> Privacy:
    return state(plan, population, usage=TEN_TIMES)


@pytest.mark.parametrize(
    ("sampling", "slots", "noise", "expected"),
    [
        ("poisson", 5, "example", (0.328, 0.298, 1.045)),
        ("poisson", 5, "batch", (0.808, 0.724, 2.581)),
        ("poisson", 10, "example", (0.113, 0.104, 0.362)),
        ("poisson", 10, "batch", (0.412, 0.374, 1.302)),
        ("poisson", 15, "example", (0.077, 0.071, 0.249)),
        ("poisson", 15, "batch", (0.354, 0.321, 1.118)),
        ("fixed", 5, "example", (0.339, 0.308, 1.081)),
        ("fixed", 5, "batch", (0.985, 0.880, 3.155)),
        ("partition", 5, "example", (1.80, 1.59, 5.90)),
        ("partition", 5, "batch", (4.59, 3.94, 15.9)),
    ],
)
def test_the_servers_view_of_a_record(sampling: str, slots: int, noise: str, expected: tuple[float, ...]) -> None:
    row = of(Plan(record_sampling=sampling, slots=slots, noise=noise)).row("server")
    assert close(row.epsilon, expected[0])
    assert close(row.epsilon_used, expected[1])
    assert close(row.epsilon_worst, expected[2])


@pytest.mark.parametrize(
    ("z", "expected"), [(6 * math.sqrt(5 / 3), (0.141, 0.130, 0.453)), (6 / math.sqrt(3), (0.353, 0.321, 1.116))]
)
def test_plain_poisson_batches_for_comparison(z: float, expected: tuple[float, ...]) -> None:
    from fedcdp.accounting.mechanisms import Lottery

    one = repeated(PoissonGaussian(0.01, z), 100)
    found = [
        pld.epsilon(repeated(Lottery(one, 0.1), 100), 1e-5),
        pld.epsilon(repeated(one, 10), 1e-5),
        pld.epsilon(repeated(one, 100), 1e-5),
    ]
    assert all(close(value, figure) for value, figure in zip(found, expected, strict=True)), found


@pytest.mark.parametrize(
    ("sampling", "slots", "expected"), [("poisson", 10, 0.367), ("poisson", 15, 0.252), ("partition", 5, 6.04)]
)
def test_one_person_behind_ten_copies(sampling: str, slots: int, expected: float) -> None:
    assert close(of(Plan(record_sampling=sampling, slots=slots), COPIED).row("server", "unique").epsilon, expected)


def test_the_reader_of_single_examples() -> None:
    once = state(Plan(record_sampling="partition", rounds=1, per_round=1000), ALONE).row("example")
    assert close(once.epsilon, 1.085)
    partition = of(Plan(record_sampling="partition"))
    assert close(partition.row("example").epsilon, 4.59)
    assert close(partition.row("example", relation="replace-one").epsilon, 10.9)


@pytest.mark.parametrize(("sampling", "slots", "expected"), [("partition", 5, 47.6), ("poisson", 15, 109)])
def test_a_whole_client_in_one_participation(sampling: str, slots: int, expected: float) -> None:
    plan = Plan(record_sampling=sampling, slots=slots, rounds=1)
    assert close(state(plan, ALONE).row("server", "client").epsilon_worst, expected)


@pytest.mark.parametrize(
    ("clients", "layers", "expected"), [("poisson", 3, 1.166), ("poisson", 1, 0.616), ("fixed", 3, 3.13), ("fixed", 1, 1.48)]
)
def test_fed_sdp_with_noise_at_the_server(clients: str, layers: int, expected: float) -> None:
    privacy = of(Plan(method="fed-sdp", client_sampling=clients), Population(1000, 500, 1, layers))
    assert close(privacy.row("model", "client").epsilon, expected)
    assert privacy.row("server", "client").epsilon == privacy.row("update", "client").epsilon == math.inf
    assert privacy.row("example").epsilon == math.inf


def test_fed_sdp_with_noise_at_the_client_is_a_gaussian_a_participation() -> None:
    privacy = of(Plan(method="fed-sdp", noise_at="client"))
    assert close(privacy.row("server", "client").epsilon_used, 3.94)
    # A record may turn its client's update around: twice the distance, as under half the noise.
    halved = of(Plan(method="fed-sdp", noise_at="client", noise_multiplier=3.0))
    assert privacy.row("server", "record").epsilon == halved.row("server", "client").epsilon


# The paper's table ---------------------------------------------------------------------------------------------------

PRINTED = {  # rounds: (Fed-CDP L=1, Fed-CDP L=100, Fed-SDP), as printed
    100: (0.0845, 0.8227, 0.8536),
    60: (0.0689, 0.6356, 0.6677),
    10: (0.0494, 0.2761, 0.3025),
    3: (0.0467, 0.1469, 0.2065),
}


@pytest.mark.parametrize("rounds", PRINTED)
def test_paper_mode_gives_every_printed_cell(rounds: int) -> None:
    once, often, sdp = PRINTED[rounds]
    assert printed_epsilon(Plan(rounds=rounds, local_steps=1)) == pytest.approx(once, abs=1.01e-4)
    assert printed_epsilon(Plan(rounds=rounds, local_steps=100)) == pytest.approx(often, abs=1.01e-4)
    for steps in (1, 100):
        assert printed_epsilon(Plan(method="fed-sdp", rounds=rounds, local_steps=steps)) == pytest.approx(sdp, abs=1.01e-4)


@pytest.mark.parametrize(
    ("method", "sigma", "holds"),
    [
        ("fed-cdp", 6.0, True),
        ("fed-cdp-decay", 6.25, False),
        ("fed-cdp", 8.0, False),
        ("fed-sdp", 0.5, True),
        ("fed-sdp", 6.0, False),
    ],
)
def test_paper_mode_names_plans_that_break_the_papers_own_condition(method: str, sigma: float, holds: bool) -> None:
    """q < 1/(16σ), with q = .01 for records and .1 for clients. At σ = 6 only the former holds."""
    privacy = state(Plan(method=method, noise_multiplier=sigma), ALONE, mode="paper")
    assert any("q < 1/(16σ), does not hold" in note for note in privacy.notes) == (not holds)


def test_paper_mode_says_that_it_guarantees_nothing() -> None:
    privacy = state(Plan(), ALONE, mode="paper")
    assert [(row.adversary, row.unit) for row in privacy.rows] == [("model", "record"), ("model", "client")]
    assert all("not a guarantee" in row.assumption for row in privacy.rows)
    assert "not a guarantee" in str(privacy)


def test_the_five_methods_of_the_authors_scripts() -> None:
    found = classical_epsilons(Plan())
    expected = [123.457, 6.686, 6.740, 1.1588, 0.8227]
    assert list(found.values()) == pytest.approx(expected, rel=1e-4)
    assert pld.epsilon(repeated(PoissonGaussian(0.01, 6), 10_000), 1e-5) == pytest.approx(0.601, rel=0.01)
