"""LiRA: its ratios are those of the Gaussians that it fits, and it finds members where a model has learned them by heart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.metrics import roc_auc_score
from torch import nn

import fedcdp
from fedcdp.attacks import lira as module
from fedcdp.attacks.lira import allowed_rate, curve_of, likelihood_ratios
from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.errors import DataError, FedcdpError, PlanError


def seen(shift: float = 0.0, federations: int = 24, records: int = 50, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Confidences of records that differ in difficulty, higher by `shift` where a record is in."""
    random = np.random.default_rng(seed)
    inside = random.random((federations, records)) < 0.5
    hard = 5 * random.normal(size=records)
    return hard + random.normal(size=inside.shape) + shift * inside, inside


@pytest.mark.parametrize("shared", [False, True])
def test_ratios_are_those_of_gaussians_fitted_to_the_other_federations(shared: bool) -> None:
    confidences, inside = seen(shift=1.0)
    online, offline = likelihood_ratios(confidences, inside, shared=shared)
    for target, record in ((0, 0), (5, 17), (23, 49)):
        others = np.arange(len(inside)) != target
        fits = []
        for side in (inside, ~inside):
            mine = confidences[others & side[:, record], record]
            variance = mine.var(ddof=1)
            if shared:
                each = [confidences[others & side[:, r], r] for r in range(inside.shape[1])]
                variance = sum(len(e) * e.var() for e in each) / sum(len(e) - 1 for e in each)
            fits.append((mine.mean(), math.sqrt(variance)))
        value, (kept, out) = confidences[target, record], fits
        assert online[target, record] == pytest.approx(norm.logpdf(value, *kept) - norm.logpdf(value, *out), rel=1e-6)
        assert offline[target, record] == pytest.approx((value - out[0]) / out[1], rel=1e-6)


def test_a_targets_score_does_not_depend_on_what_it_kept() -> None:
    """The fit leaves the target out: else its own bit would show in the score, and ε would not bound the rates."""
    confidences, inside = seen()
    other = inside.copy()
    other[3] = ~other[3]
    for one, two in zip(*(likelihood_ratios(confidences, each, shared=False) for each in (inside, other)), strict=True):
        np.testing.assert_allclose(one[3], two[3])


def test_records_of_different_difficulty_need_shadows() -> None:
    confidences, inside = seen(shift=2.0, federations=64, records=200)
    online, offline = (curve_of(score, inside) for score in likelihood_ratios(confidences, inside, shared=False))
    plain = curve_of(confidences, inside)
    assert plain.auc.value < 0.65 < 0.85 < offline.auc.value <= online.auc.value
    assert online.auc.low < norm.cdf(2 / math.sqrt(2)) + 0.01
    assert online.tpr_at_1_percent is not None
    assert online.tpr_at_1_percent.value == pytest.approx(norm.sf(norm.isf(0.01) - 2), abs=0.08)


def test_where_nothing_shows_rates_are_those_of_guessing() -> None:
    confidences, inside = seen(federations=64, records=400)
    for score in likelihood_ratios(confidences, inside, shared=False):
        found = curve_of(score, inside)
        assert found.auc.low < 0.5 < found.auc.high
        assert found.auc.high - found.auc.low < 0.05
        assert all(abs(true - false) < 0.02 for false, true in found.roc)


def test_a_curve_is_that_of_scikit_learn() -> None:
    confidences, inside = seen(shift=1.0, records=20)
    found = curve_of(np.round(confidences), inside)  # with ties
    assert found.auc.value == pytest.approx(roc_auc_score(inside.ravel(), np.round(confidences).ravel()))
    for false, true in found.roc[:-1]:
        threshold = np.sort(np.round(confidences)[~inside])[-1 - int(false * (~inside).sum())]
        assert true == pytest.approx((np.round(confidences)[inside] > threshold).mean())
    assert found.roc[-1] == (1.0, 1.0)
    assert found.tpr_at_01_percent is None  # 240 others cannot show it


def test_a_record_that_no_shadow_kept_is_no_evidence_and_diverged_ones_are_low() -> None:
    confidences, inside = seen()
    inside[:, 0], inside[:, 1] = False, True
    confidences[2, 5] = -math.inf
    online, offline = likelihood_ratios(confidences, inside, shared=False)
    assert (online[:, :2] == 0).all()
    assert (offline[:, 1] == 0).all()
    assert np.isfinite(online).all()
    assert offline[2, 5] == offline[:, 5].min()


@given(st.floats(0, 20), st.floats(0, 0.1), st.floats(0, 1))
def test_what_epsilon_allows_is_more_than_guessing_and_less_than_all(epsilon: float, delta: float, false: float) -> None:
    most = allowed_rate(epsilon, delta, false)
    assert false - 1e-12 <= most <= 1
    assert most <= math.exp(epsilon) * false + delta + 1e-12
    assert allowed_rate(math.inf, delta, false) == 1


@pytest.fixture(scope="module")
def tables() -> Federation:
    return fedcdp.partition(fedcdp.load("cancer"), clients=5, scheme="iid", records=20)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 2))


PLAN = Plan(
    method="nonprivate", rounds=10, per_round=5, local_steps=20, batch_size=5, learning_rate=0.2, record_sampling="partition"
)


def attacked(federation: Federation, plan: Plan = PLAN, **changes: Any) -> module.Lira:
    given: dict[str, Any] = {"model": network(), "federation": federation, "shadows": 16} | changes
    found = fedcdp.attack(plan, attack="lira", **given)
    assert isinstance(found, module.Lira)
    return found


def test_an_overfitted_model_gives_its_members_away_and_fed_cdp_does_not(tables: Federation) -> None:
    steps: list[tuple[int, int]] = []
    found = attacked(tables, progress=lambda *step: steps.append(step))
    assert (found.shadows, found.candidates, found.variance, found.epsilon) == (16, 100, "global", math.inf)
    assert found.online.auc.low > 0.55
    assert found.online.auc.value > found.threshold.auc.value
    assert steps == [(done, 20) for done in range(1, 21)]  # two groups of federations
    private = attacked(tables, PLAN.but(method="fed-cdp", noise_multiplier=2.0))
    assert private.epsilon is not None
    assert private.epsilon_shown <= private.epsilon
    for false, true in private.online.roc:
        assert true <= allowed_rate(private.epsilon, private.delta, false) + 0.05


def test_fewer_candidates_leave_all_other_records_in(tables: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    original = module.ParallelFederations

    def spied(prepared: Any, seeds: Any, kept: torch.Tensor, **more: Any) -> Any:
        seen.append(kept)
        return original(prepared, seeds, kept, **more)

    monkeypatch.setattr(module, "ParallelFederations", spied)
    assert attacked(tables, PLAN.but(rounds=1, local_steps=1), victims=30).candidates == 30
    mixed = ~seen[0].all(0)
    assert 25 <= mixed.sum() <= 30
    assert 0.3 < seen[0][:, mixed].float().mean() < 0.7


def test_copies_of_a_record_are_one_and_seeds_fix_everything() -> None:
    shared = fedcdp.partition(fedcdp.load("cancer"), clients=4, scheme="full")
    short = PLAN.but(rounds=1, local_steps=2, per_round=4, method="fed-cdp")
    one, again, other = (attacked(shared, short, victims=20, shadows=8, seed=seed) for seed in (0, 0, 1))
    assert one.unit == "unique"
    assert one.online == again.online != other.online


def test_the_loss_scores_records_without_classes() -> None:
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    data = fedcdp.Dataset(inputs, torch.randn(60, generator=torch.Generator().manual_seed(1)), task="regression")
    federation = fedcdp.partition(data, clients=3, scheme="iid")
    deep = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 1))
    found = attacked(federation, PLAN.but(per_round=3, rounds=20), model=deep)
    assert found.online.auc.value > 0.6


def test_a_run_is_attacked_by_its_plan(tables: Federation) -> None:
    short = PLAN.but(rounds=1, local_steps=1)
    run = fedcdp.simulate(network(), tables, short)
    found = fedcdp.attack(run, attack="lira", model=network(), shadows=8)
    assert isinstance(found, module.Lira)
    assert found.online == attacked(tables, short, shadows=8).online
    told = found.summary()
    assert (told["leak"], told["attack"], told["victims"], told["epsilon"]) == ("model", "lira", 100, "inf")
    assert len(told["roc"]["online"]) == 61


REFUSED: dict[str, tuple[dict[str, Any], type[FedcdpError], str]] = {
    "few shadows": ({"shadows": 7}, PlanError, "shadows: 7 is not allowed; it must be a whole number from 8 to 4096"),
    "many victims": ({"victims": 101}, DataError, "victims: 101 is not allowed; the clients hold 100 records"),
    "no network": ({"model": None}, PlanError, "model, federation: lira trains the plan anew"),
    "a round": ({"at_round": 1}, PlanError, "at_round: only for an attack on gradients"),
    "half a shadow": ({"shadows": 8.5}, PlanError, "shadows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_attacked_is_refused(name: str, tables: Federation) -> None:
    given, kind, sentence = REFUSED[name]
    with pytest.raises(kind, match=sentence):
        attacked(tables, **given)


def test_shadows_are_for_lira_and_gradients_are_not(tables: Federation) -> None:
    with pytest.raises(PlanError, match="shadows: only for an attack on membership by lira"):
        fedcdp.attack(PLAN, model=network(), federation=tables, shadows=8)
    with pytest.raises(PlanError, match="give a plan or a run"):
        fedcdp.attack([torch.zeros(2)], model=network(), attack="lira")
