"""Attacks on the real path of secure aggregation: below what is printed now, above what the old mistakes would print.

The clients' own code trains, noises and prunes; the server's own code adds up; the adversary reads the model alone.
"""

from __future__ import annotations

import pytest

from tests.support.audit_grid import LAYERS, Case, run, secure_corners
from tests.support.independent.mistakes import AmplifiedInAFixedOrder, CreditedDespitePruning, CreditedDespiteSmallClients
from tests.support.independent.recipes import Recipes
from tests.support.independent.rows import Federation
from tests.support.pairs import sample_first

CORNERS = {case.name.removeprefix("secure aggregation, "): case for case in secure_corners()}
OLD = {
    "the first of 10,000 records in every round": AmplifiedInAFixedOrder,
    "each client prunes its noise": CreditedDespitePruning,
    "every client in every round, one with fewer records than a batch": CreditedDespiteSmallClients,
}


def claimed(case: Case, recipes: type[Recipes]) -> float:
    """The ε of the model's row by the independent accountant, right or with a mistake."""
    sizes = tuple(sorted({case.records, case.others or case.records}))
    groups = LAYERS if case.plan.clip_mode == "layer" else 1
    assert case.clients is not None
    one_round = recipes(case.plan.but(rounds=1), Federation(case.clients, sizes, case.copies, groups))
    return one_round.figures()[case.adversary, case.unit, case.relation].epsilon


@pytest.mark.parametrize("name", sample_first(CORNERS, quick=2))
def test_the_attack_stays_below_what_is_printed_and_exceeds_the_old_figure(name: str) -> None:
    case = CORNERS[name]
    (verdict,) = run([case], trials=1_000)
    right = claimed(case, Recipes)
    assert verdict.found.epsilon_lower <= verdict.printed
    assert verdict.printed == pytest.approx(right, rel=0.01)
    if name in OLD:
        assert claimed(case, OLD[name]) < verdict.found.epsilon_lower <= right


def test_the_corners_are_those_of_the_specification() -> None:
    assert CORNERS.keys() > OLD.keys()
    assert any(case.plan.batch_size == 1 and case.records >= 10_000 for case in CORNERS.values())
    assert any(case.plan.compression > 0.99 for case in CORNERS.values())
    assert any(case.records < case.plan.batch_size <= (case.others or 0) for case in CORNERS.values())
