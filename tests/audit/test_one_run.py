"""One training with many canaries: scores are what theory says, and sound mechanisms keep their ε."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedcdp
from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import state
from fedcdp.audit import audit_one_run, one_run
from fedcdp.audit.canary_records import mislabelled, worst_case
from fedcdp.audit.guesses import Guesses
from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.errors import DataError, FedcdpError, PlanError

WHITE = ("example", "update", "server")


def plan(**changes: Any) -> Plan:
    usual: dict[str, Any] = {"rounds": 1, "per_round": 40, "local_steps": 1, "batch_size": 10, "noise_multiplier": 3.0}
    return Plan(**usual | {"record_sampling": "partition"} | changes)


Scored = dict[str, tuple[np.ndarray, np.ndarray]]


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plan], Scored]:
    """A function that audits a plan, and returns each adversary's scores [statistics, canaries] and the coins."""

    def measured(audited: Plan) -> Scored:
        seen: list[tuple[np.ndarray, np.ndarray]] = []

        def keep(scores: np.ndarray, included: np.ndarray, *_: Any, **__: Any) -> Guesses:
            seen.append((scores, included))
            return Guesses(0.0, 0, 0, 0, 1)

        monkeypatch.setattr(one_run, "prove", keep)
        found = audit_one_run(audited, canaries=400, clients=40)
        return {each.adversary: told for each, told in zip(found, seen, strict=True)}

    return measured


@pytest.fixture
def shifts(scored: Callable[[Plan], Scored]) -> Callable[[Plan], dict[str, np.ndarray]]:
    """A function that returns how many deviations of a score included canaries are from those left out, on average."""

    def measured(audited: Plan) -> dict[str, np.ndarray]:
        return {name: _shift(*told) for name, told in scored(audited).items()}

    return measured


def _shift(scores: np.ndarray, included: np.ndarray) -> np.ndarray:
    inside, outside = scores[:, included], scores[:, ~included]
    spread = np.sqrt((inside.var(1) + outside.var(1)) / 2)
    return (inside.mean(1) - outside.mean(1)) / np.maximum(spread, 1e-9)


def test_scores_separate_canaries_as_far_as_gaussian_releases_do(shifts: Callable[[Plan], dict[str, np.ndarray]]) -> None:
    """Uses over √ of their number: for the server, σ·√(S/M) noise on a sum; on one layer alone, σ·√S."""
    found = shifts(plan(local_steps=2, rounds=3, momentum=0.0))
    uses = math.sqrt(2 * 3)  # two steps, each of the whole client, in three rounds
    assert found["example"][0] == pytest.approx(uses * math.sqrt(3) / 3, abs=0.35)
    assert found["server"][0] == pytest.approx(uses * math.sqrt(3) / (3 * math.sqrt(10)), abs=0.3)
    np.testing.assert_allclose(found["update"], found["server"])
    assert found["server"][1:].mean() == pytest.approx(found["server"][0] / math.sqrt(3), abs=0.2)


def test_a_secure_sum_hides_canaries_behind_the_cohorts_noise(shifts: Callable[[Plan], dict[str, np.ndarray]]) -> None:
    found = shifts(plan(secure_aggregation=True, noise="batch", noise_multiplier=0.5))
    assert found["update"][0] == pytest.approx(math.sqrt(3) / 0.5, rel=0.15)
    assert found["server"][0] == pytest.approx(math.sqrt(3) / (0.5 * math.sqrt(40)), abs=0.3)
    assert found["model"][0] == pytest.approx(found["server"][0], abs=0.2)  # one step from a known start


def test_noise_on_the_sum_is_decoded(shifts: Callable[[Plan], dict[str, np.ndarray]]) -> None:
    found = shifts(plan(secure_aggregation=True, noise="sum", noise_multiplier=1.0))
    assert found["server"][0] == pytest.approx(math.sqrt(3), rel=0.2)
    assert found["update"][0] > 5


def test_who_was_drawn_is_known_to_the_example_adversary_alone(scored: Callable[[Plan], Scored]) -> None:
    """A canary that was drawn is scored, whether or not it is included; one that was not drawn is no evidence."""
    found = scored(plan(record_sampling="poisson", batch_size=2, noise_multiplier=0.1, per_round=20))
    scores, included = found["example"]
    drawn = scores[0] != 0
    assert 20 < drawn.sum() < 70  # two of ten records at each of 20 clients are expected
    assert ((scores[0] > 0) == included)[drawn].all()
    assert 0 < (drawn & ~included).sum() < drawn.sum()
    assert (found["server"][0][0] != 0).sum() > 190  # all canaries of the 20 clients


@pytest.mark.parametrize(
    "changes",
    [{}, {"record_sampling": "poisson", "batch_size": 3}, {"noise": "batch"}, {"method": "fed-cdp-decay", "rounds": 3}],
)
def test_a_sound_mechanism_keeps_within_its_epsilon(changes: dict[str, Any]) -> None:
    audited = plan(noise_multiplier=1.0) if not changes else plan(**{"noise_multiplier": 1.0} | changes)
    privacy = state(audited, Population(40, 10, 1, 3))
    for found in audit_one_run(audited, canaries=400, clients=40, confidence=0.999):
        assert found.epsilon_lower <= privacy.row(found.adversary).epsilon


@pytest.mark.parametrize("method", ["nonprivate", "fed-sdp"])
def test_without_privacy_every_coin_is_guessed(method: str) -> None:
    audited = plan(method=method, learning_rate=0.1)
    for found in audit_one_run(audited, WHITE, canaries=200, clients=40):
        assert (found.guesses, found.correct) == (200, 200)
        assert found.epsilon_lower > 2.5


@pytest.fixture(scope="module")
def tables() -> Federation:
    return fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")


def test_a_real_training_is_audited_on_its_own_data(tables: Federation) -> None:
    raw = Plan(method="nonprivate", rounds=2, per_round=10, local_steps=9, batch_size=5, record_sampling="partition")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 2))
    bounds = {each.adversary: each for each in audit_one_run(raw, model=model, federation=tables, canaries=100)}
    assert bounds["example"].kind == "mislabelled"
    assert bounds["example"].epsilon_lower > 1.9
    noised = audit_one_run(raw.but(method="fed-cdp"), model=model, federation=tables, canaries=100)
    assert all(each.epsilon_lower < 1 for each in noised)


def test_canaries_are_records_of_one_client_with_a_wrong_label(tables: Federation) -> None:
    changed, placed = mislabelled(tables, 50, seed=3)
    assert len(placed.records.unique()) == 50
    for record, client in zip(placed.records.tolist(), placed.clients.tolist(), strict=True):
        assert record in tables.indices(client)
    wrong = changed.train.targets != tables.train.targets
    assert wrong.nonzero()[:, 0].tolist() == sorted(placed.records.tolist())
    assert not torch.equal(placed.records, mislabelled(tables, 50, seed=4)[1].records)


def test_worst_case_gradients_are_orthogonal_in_every_layer() -> None:
    _, federation, placed = worst_case(plan(), 40, 8, 3)
    layers = federation.train.tensor.view(40, 3, 41).transpose(0, 1)
    for gradients in layers:
        products = gradients @ gradients.T
        assert torch.equal(products, products.diag().diag())
        assert (products.diag() > plan().clip_at(0) ** 2).all()
    assert placed.clients.tolist() == [client for client in range(8) for _ in range(5)]


def test_coins_change_with_the_seed_and_with_nothing_else() -> None:
    def correct(**changes: Any) -> list[int]:
        return [each.correct for each in audit_one_run(plan(), WHITE, canaries=80, clients=40, guesses=80, **changes)]

    assert correct() == correct()
    assert correct() != correct(seed=1)


REFUSED: dict[str, tuple[dict[str, Any], type[FedcdpError], str]] = {
    "adversary": ({"adversaries": ["all"]}, PlanError, "adversaries: all is not one of example"),
    "canaries": ({"canaries": 1}, PlanError, "canaries: 1 is not allowed"),
    "confidence": ({"confidence": 1.0}, PlanError, "confidence: 1.0 is not allowed"),
    "model": ({"model": nn.Linear(2, 2)}, PlanError, "model, federation: give both"),
    "clients": ({"canaries": 7, "clients": 2}, PlanError, "clients: 2 is not allowed; each must hold"),
    "quantile": ({"plan": plan(clip="quantile(0.5, 4)")}, PlanError, "clip: quantile"),
    "scaling": ({"plan": plan(scaling_noise=1.0)}, PlanError, "scaling_noise: private scaling"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_audited_is_refused(name: str) -> None:
    given, kind, sentence = REFUSED[name]
    with pytest.raises(kind, match=sentence):
        audit_one_run(**{"plan": plan()} | given)


def test_data_without_classes_or_with_too_few_records_is_refused(tables: Federation) -> None:
    with pytest.raises(DataError, match="canaries: 500 is not allowed; a single client holds each of only 420 records"):
        mislabelled(tables, 500, 0)
    values = fedcdp.Dataset(torch.zeros(20, 3), torch.zeros(20), task="regression")
    with pytest.raises(DataError, match="records of task regression cannot be mislabelled"):
        mislabelled(fedcdp.partition(values, clients=2, scheme="iid"), 5, 0)
