"""The independent accountant itself: closed forms, integrals, the specification's vectors, and once dp_accounting."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy.stats import binom

from fedcdp.config.plan import Plan
from tests.support import independent
from tests.support.independent.epsilon import epsilon
from tests.support.independent.losses import (
    Chance,
    Exchanged,
    Release,
    Sampled,
    Several,
    Shift,
    Swapped,
    Times,
    gaussian_delta,
    gaussian_epsilon,
    slotted,
    table,
    together,
)
from tests.support.independent.recipes import Recipes
from tests.support.independent.rows import Federation, Ledger
from tests.support.pairs import sample_first

EXACT = 1e-3


def test_it_shares_nothing_with_what_it_checks() -> None:
    imported = set()
    for name in ("losses", "epsilon", "rows", "recipes"):
        source = (Path(independent.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            imported |= {*modules, node.module} if isinstance(node, ast.ImportFrom) else set(modules)
    assert {each for each in imported if each and each.startswith(("fedcdp", "dp_accounting"))} == {"fedcdp.config.plan"}


# Closed forms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.01, 0.3, 2.0, 40.0])
@pytest.mark.parametrize("times", [1, 50])
def test_gaussians_on_the_circle_are_one_gaussian(mu: float, times: int) -> None:
    on_the_circle = Times(Chance(((1.0, Shift(mu)),)), times)
    assert epsilon(on_the_circle, 1e-5) == pytest.approx(gaussian_epsilon(mu * math.sqrt(times), 1e-5), rel=EXACT)


@pytest.mark.parametrize(
    ("mu", "delta", "expected"), [(0.26805, 1e-5, 1.0), (1.66603, 1e-5, 8.0), (math.sqrt(3) / 6, 1e-5, 1.085)]
)
def test_gaussian_epsilon_is_that_of_the_specification(mu: float, delta: float, expected: float) -> None:
    assert gaussian_epsilon(mu, delta) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("rate", "mu"), [(0.5, 1.0), (1e-3, 3.0), (2e-5, 500.0), (1e-4, 50.0)])
def test_a_lottery_has_its_share_of_delta(rate: float, mu: float) -> None:
    found = epsilon(Chance(((rate, Shift(mu)),)), 1e-5)
    assert rate * gaussian_delta(found, mu) == pytest.approx(1e-5, rel=0.02)
    assert found == pytest.approx(gaussian_epsilon(mu, 1e-5 / rate), rel=EXACT)


@pytest.mark.parametrize(("rate", "mu"), [(0.5, 1.0), (0.01, 0.3), (0.9, 4.0)])
def test_sampling_without_replacement_has_the_curve_of_the_specification(rate: float, mu: float) -> None:
    found = epsilon(Exchanged(rate, mu), 1e-5)
    inner = gaussian_epsilon(mu, 1e-5 / rate)
    assert found == pytest.approx(math.log1p(rate * math.expm1(inner)), rel=EXACT)
    _, probabilities = table(Exchanged(rate, mu), "remove")
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.slow
def test_a_release_that_hits_more_often_than_delta_is_never_overlooked() -> None:
    """z = .002 in one of 10⁹ tries, 20,000 tries: 2 δ. Only what such a release costs once is an honest ε."""
    rare = Times(Chance(((1e-9, Shift(500.0)), (0.1, Sampled(0.01, 0.2)))), 20_000)
    assert epsilon(rare, 1e-5) == pytest.approx(500**2 / 2, rel=0.005)
    assert epsilon(rare, 1e-4) < 1


# Integrals ------------------------------------------------------------------------------------------------------------


def integral(eps: float, upper: list[tuple[float, float]], lower: list[tuple[float, float]]) -> float:
    """∫ (P − e^ε Q)₊ by high-precision quadrature, for mixtures of (weight, mean)."""
    mpmath.mp.dps = 30
    factor = mpmath.exp(eps)

    def excess(x: Any) -> Any:
        p, q = (sum(weight * mpmath.npdf(x, mean, 1) for weight, mean in each) for each in (upper, lower))
        return p - factor * q

    points = np.linspace(-12, 24, 1201)
    signs = [excess(mpmath.mpf(float(x))) > 0 for x in points]
    total, begin = mpmath.mpf(0), points[0] if signs[0] else None
    for left, right, before, after in zip(points, points[1:], signs, signs[1:], strict=False):
        if before != after:
            root = mpmath.findroot(excess, (left, right), solver="anderson")
            if after:
                begin = root
            else:
                total += mpmath.quad(excess, [begin, root])
                begin = None
    if begin is not None:
        total += mpmath.quad(excess, [begin, begin + 4, begin + 12, 40])
    return float(total)


@pytest.mark.parametrize(("rate", "mu"), [(0.01, 0.5), (0.3, 2.0), (0.9, 1.0)])
def test_secret_sampling_agrees_with_the_integral_in_the_worse_direction(rate: float, mu: float) -> None:
    drawn, alone = [(1 - rate, 0.0), (rate, mu)], [(1.0, 0.0)]
    found = epsilon(Sampled(rate, mu), 1e-5)
    worse = max(integral(found, drawn, alone), integral(found, alone, drawn))
    assert worse == pytest.approx(1e-5, rel=0.01)


def test_swapped_samples_agree_with_the_integral() -> None:
    found = epsilon(Swapped(0.2, 1.5), 1e-5)
    assert integral(found, [(0.8, 0.0), (0.2, 1.5)], [(0.8, 0.0), (0.2, -1.5)]) == pytest.approx(1e-5, rel=0.01)


# Slots ----------------------------------------------------------------------------------------------------------------


def spent(release: Release, eps: float) -> float:
    """δ(ε) of one release, in the worse direction, from the tables."""

    def one_way(part: Release, direction: Any) -> float:
        if isinstance(part, Chance):
            return sum(share * one_way(each, direction) for share, each in part.cases)
        losses, probabilities = table(part, direction)  # type: ignore[arg-type]
        return float(-np.expm1(np.minimum(eps - losses, 0.0)) @ probabilities)

    return max(one_way(release, direction) for direction in ("remove", "add"))


def full_step(
    records: int, rate: float, slots: int, record: float, others: float, listed: bool
) -> list[tuple[float, float]]:
    """The law of a step's sum: `others` is what each other record adds; one not `listed` takes nobody's slot."""
    law: dict[float, float] = {}
    for drawn in range(records):
        chance = float(binom.pmf(drawn, records - 1, rate))
        alone = min(drawn, slots) * others
        inside = rate * min(1.0, slots / (drawn + 1)) if listed else 0.0
        law[alone] = law.get(alone, 0.0) + chance * (1 - inside)
        with_record = min(drawn, slots - 1) * others + record
        law[with_record] = law.get(with_record, 0.0) + chance * inside
    return [(weight, mean) for mean, weight in law.items() if weight > 0]


@pytest.mark.parametrize(("records", "rate", "slots", "mu"), [(6, 0.5, 2, 1.0), (11, 5 / 11, 6, 0.7), (20, 0.25, 5, 2.0)])
@pytest.mark.parametrize("eps", sample_first([1.0, 0.1, 3.0]))
def test_slots_cover_a_zeroed_record_with_or_without_its_slot(
    records: int, rate: float, slots: int, mu: float, eps: float
) -> None:
    bound = spent(slotted(records, rate, slots, mu), eps)
    for others in (-mu, -mu / 2, 0.0, mu / 2, mu):
        there = full_step(records, rate, slots, mu, others, listed=True)
        for without in (
            full_step(records, rate, slots, 0.0, others, listed=True),
            full_step(records, rate, slots, 0.0, others, listed=False),
        ):
            worst = max(_hockey_stick(eps, there, without), _hockey_stick(eps, without, there))
            assert worst <= bound * (1 + 1e-6)


def test_slots_are_not_plain_sampling_with_the_probability_of_being_kept() -> None:
    """That an empty slot is kept does not make it so: whoever is left out of a full step tells that the record was in it."""
    records, rate, slots, mu, eps = 6, 0.9, 1, 1.0, 2.0
    there, without = (full_step(records, rate, slots, each, -mu, listed=True) for each in (mu, 0.0))
    kept = float(sum(binom.pmf(u, records - 1, rate) * rate * min(1.0, slots / (u + 1)) for u in range(records)))
    assert _hockey_stick(eps, there, without) > 2 * spent(Sampled(kept, mu), eps)
    assert _hockey_stick(eps, there, without) <= spent(Shift(mu), eps)


def _hockey_stick(eps: float, upper: list[tuple[float, float]], lower: list[tuple[float, float]]) -> float:
    x = np.linspace(-40, 40, 400_001)
    p, q = (sum(weight * np.exp(-((x - mean) ** 2) / 2) for weight, mean in each) for each in (upper, lower))
    return float(np.maximum(p - math.exp(eps) * q, 0).sum() * (x[1] - x[0]) / math.sqrt(2 * math.pi))


# The specification's vectors --------------------------------------------------------------------------------------------

TEN = Ledger(tuple(range(100)), (10,) * 10)


@pytest.mark.parametrize(
    ("sampling", "slots", "noise", "expected"),
    [
        ("poisson", 5, "example", (0.328, 0.298, 1.045)),
        ("poisson", 5, "batch", (0.808, 0.724, 2.581)),
        ("poisson", 10, "example", (0.113, 0.104, 0.362)),
        ("poisson", 15, "example", (0.077, 0.071, 0.249)),
        ("poisson", 15, "batch", (0.354, 0.321, 1.118)),
        ("fixed", 5, "example", (0.339, 0.308, 1.081)),
        ("fixed", 5, "batch", (0.985, 0.880, 3.155)),
        ("partition", 5, "example", (1.80, 1.59, 5.90)),
        ("partition", 5, "batch", (4.59, 3.94, 15.9)),
    ],
)
def test_the_vectors_of_the_specification(sampling: str, slots: int, noise: str, expected: tuple[float, ...]) -> None:
    figures = Recipes(Plan(record_sampling=sampling, slots=slots, noise=noise), Federation(1000, (500,), 1, 3)).figures(TEN)
    found = figures["server", "record", "zero-out"]
    assert (found.epsilon, found.used, found.worst) == pytest.approx(expected, rel=0.02)


def test_the_vectors_of_copies_examples_and_fed_sdp() -> None:
    copied = Recipes(Plan(record_sampling="partition"), Federation(1000, (500,), 10, 3)).figures(TEN)
    assert copied["server", "unique", "zero-out"].epsilon == pytest.approx(6.04, rel=0.02)
    assert copied["example", "record", "zero-out"].epsilon == pytest.approx(4.59, rel=0.02)
    assert copied["example", "record", "replace-one"].epsilon == pytest.approx(10.9, rel=0.02)
    for clients, layers, expected in (("poisson", 3, 1.166), ("poisson", 1, 0.616), ("fixed", 3, 3.13), ("fixed", 1, 1.48)):
        sdp = Recipes(Plan(method="fed-sdp", client_sampling=clients), Federation(1000, (500,), 1, layers)).figures()
        assert sdp["model", "client", "zero-out"].epsilon == pytest.approx(expected, rel=0.02)


def test_full_participation_under_secure_aggregation_has_the_noise_of_everybody() -> None:
    """√100 times the noise of ε = 1: 0.0809, and for 8: 0.5943."""
    for alone, mu, expected in ((1.0, 0.26805, 0.0809), (8.0, 1.66603, 0.5943)):
        plan = Plan(
            local_steps=1, rounds=20, per_round=100, batch_size=1, noise_multiplier=math.sqrt(20) / mu,
            record_sampling="partition", secure_aggregation=True,
        )  # fmt: skip
        figures = Recipes(plan, Federation(100, (1,), 1, 1)).figures()
        assert figures["update", "record", "zero-out"].epsilon == pytest.approx(alone, rel=1e-3)
        assert figures["server", "record", "zero-out"].epsilon == pytest.approx(expected, rel=1e-3)


# Once, other numerics ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_numerics_agree_with_dp_accounting() -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    def close(release: Release, other: Any, times: int) -> None:
        theirs = other.self_compose(times).get_epsilon_for_delta(1e-5)
        assert epsilon(Times(release, times), 1e-5) == pytest.approx(theirs, rel=2e-3)

    step = {"value_discretization_interval": 1e-4}
    for rate, z, times in ((0.01, 1.0, 100), (0.3, 2.0, 10)):
        close(Sampled(rate, 1 / z), pld.from_gaussian_mechanism(z, sampling_prob=rate, **step), times)
    slots = pld.from_truncated_subsampled_gaussian_mechanism(50, 0.1, 6, 3.0, **step)
    close(slotted(50, 0.1, 6, 1 / 3), slots, 40)
    nested = slots.self_compose(10).compute_mixture(pld.identity(1e-4), 0.2)
    close(Chance(((0.2, Times(slotted(50, 0.1, 6, 1 / 3), 10)),)), nested, 20)
    both = pld.from_gaussian_mechanism(4.0, **step).compose(pld.from_gaussian_mechanism(1.0, sampling_prob=0.05, **step))
    close(Several((Shift(0.25), Sampled(0.05, 1.0))), both, 5)


def test_equal_releases_are_gathered() -> None:
    parts: list[tuple[Release, int]] = [
        (Shift(3.0), 1),
        (Sampled(0.1, 1.0), 2),
        (Times(Sampled(0.1, 1.0), 3), 2),
        (Shift(2.0), 4),
    ]
    assert together(parts) == Several((Times(Sampled(0.1, 1.0), 8), Shift(5.0)))
