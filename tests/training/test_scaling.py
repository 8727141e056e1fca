"""Means and variances of the inputs from one noised release: its mechanism, its audit, its ledger and its ε."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedcdp
from fedcdp.accounting.ledger import Ledger
from fedcdp.audit.intervals import gaussian_epsilon, mean_shift
from fedcdp.config.plan import SCALING, Plan
from fedcdp.errors import DataError, PlanError
from fedcdp.files.tree import Layout
from fedcdp.mechanism import moments
from fedcdp.mechanism.moments import moment_sensitivity, noised_moments, standardisation
from fedcdp.mechanism.noise import Noise, SecureNoise, SeededNoise, Silence
from fedcdp.models.features import Standardised
from fedcdp.models.networks import build
from fedcdp.training import scaling
from tests.support.independent.losses import gaussian_epsilon as closed_form

NO_LAYOUT = Layout({}, ())
FEATURES = 4


def federation_of(records: int = 60, clients: int = 3, spread: float = 0.03) -> fedcdp.Federation:
    """Columns that fill a small part of [-1, 1], each elsewhere."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.tensor([-0.8, 0.0, 0.3, 0.9]) + spread * torch.randn(records, FEATURES, generator=generator)
    labels = (inputs[:, 1] > 0).long()
    data = fedcdp.Dataset(inputs, labels, classes=2)
    return fedcdp.partition(data, clients=clients, scheme="iid", validation=data)


def plan_of(**fields: object) -> Plan:
    usual = {"rounds": 4, "per_round": 3, "local_steps": 1, "batch_size": 20, "record_sampling": "partition"}
    return Plan(**usual | {"clip_mode": "flat", "noise_multiplier": 1.0, "scaling_noise": 5.0} | fields)  # type: ignore[arg-type]


# The mechanism --------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=3, max_size=3), min_size=2,
                    max_size=5)
)  # fmt: skip
def test_a_record_moves_the_sums_by_at_most_their_sensitivity(values: list[list[float]]) -> None:
    """Whatever its values are, in floating point, not numbers or infinite."""
    silence = Silence(NO_LAYOUT)
    inputs = torch.tensor(values)
    gone = inputs.clone()
    gone[0] = 0.0
    moved = noised_moments(inputs, 0, silence, 1.0) - noised_moments(gone, 0, silence, 1.0)
    assert float(moved.norm()) <= moment_sensitivity(3) * (1 + 1e-12)


def test_a_record_at_the_border_attains_the_sensitivity() -> None:
    sums = noised_moments(torch.tensor([[1.0, -1.0, 7.0]]), 0, Silence(NO_LAYOUT), 1.0)
    assert float(sums.norm()) == pytest.approx(moment_sensitivity(3))


@pytest.mark.parametrize("records", [1, 50])
@pytest.mark.parametrize("noise", [SeededNoise(3, NO_LAYOUT), SecureNoise(NO_LAYOUT)], ids=["seeded", "secure"])
def test_every_sum_carries_the_noise_whatever_the_number_of_records(noise: Noise, records: int) -> None:
    inputs = torch.zeros(records, FEATURES)
    drawn = torch.stack([noised_moments(inputs, client, noise, 2.0) for client in range(500)])
    deviation = 2.0 * moment_sensitivity(FEATURES)
    assert drawn.std(0).tolist() == pytest.approx([deviation] * 2 * FEATURES, rel=0.15)
    assert float(np.abs(np.corrcoef(drawn.T.numpy()) - np.eye(2 * FEATURES)).max()) < 0.2


def test_each_record_is_noised_before_the_sum() -> None:
    asked = []

    class Watched(Silence):
        def for_moments(self, client: int, records: int, length: int, deviation: float) -> Tensor:
            asked.append((client, records, length, deviation))
            return torch.zeros(records, length, dtype=torch.float64)

    noised_moments(torch.zeros(25, FEATURES), 7, Watched(NO_LAYOUT), 3.0)
    assert asked == [(7, 25, 2 * FEATURES, pytest.approx(3.0 * moment_sensitivity(FEATURES) / 5))]


def test_without_noise_the_result_is_the_mean_and_the_deviation() -> None:
    inputs = torch.rand(500, FEATURES) * torch.tensor([0.2, 0.5, 1.0, 2.0]) - 0.5
    sums = noised_moments(inputs, 0, Silence(NO_LAYOUT), 1e-6)
    mean, scale = standardisation(sums, 500, 1, 1e-6)
    assert torch.allclose(mean, inputs.clamp(-1, 1).mean(0), atol=1e-5)
    assert torch.allclose(1 / scale, inputs.clamp(-1, 1).std(0, correction=0), atol=1e-4)


def test_a_constant_column_and_one_lost_in_noise_stay_small() -> None:
    inputs = torch.zeros(100, 1)
    _, exact = standardisation(noised_moments(inputs, 0, Silence(NO_LAYOUT), 1e-6), 100, 1, 1e-6)
    _, noisy = standardisation(noised_moments(inputs, 0, SeededNoise(0, NO_LAYOUT), 10.0), 100, 1, 10.0)
    assert float(exact) == pytest.approx(100)
    assert float(noisy) < 2


# The audit ------------------------------------------------------------------------------------------------------------


def shown_by_attack(multiplier: float, halved: bool = False, trials: int = 20_000) -> float:
    """ε that the best direction proves: a record at the border, or none."""
    others = torch.zeros(9, FEATURES)
    worlds = []
    for world in (0.0, 1.0):
        inputs = torch.cat([torch.full((1, FEATURES), world), others])
        exact = noised_moments(inputs, 0, Silence(NO_LAYOUT), multiplier)
        drawn = SeededNoise(int(world), NO_LAYOUT).for_moments(0, 10 * trials, 2 * FEATURES, 1.0)
        deviation = multiplier * moment_sensitivity(FEATURES) / math.sqrt(10) * (0.5 if halved else 1.0)
        worlds.append((exact + drawn.view(trials, 10, -1).sum(1) * deviation).sum(1).numpy())
    return gaussian_epsilon(mean_shift(*worlds), 1e-5)


def test_an_attack_proves_no_more_than_is_stated_and_most_of_it() -> None:
    stated = closed_form(1 / 2.0, 1e-5)
    assert 0.8 * stated < shown_by_attack(2.0) <= stated


def test_half_the_noise_is_found_by_the_attack() -> None:
    assert shown_by_attack(2.0, halved=True) > closed_form(1 / 2.0, 1e-5)


# The statement --------------------------------------------------------------------------------------------------------


def test_the_release_is_part_of_every_epsilon() -> None:
    federation, model = federation_of(), nn.Linear(FEATURES, 2)
    plan = plan_of()
    stated, without = (each.privacy(federation, model=model) for each in (plan, plan.but(scaling_noise=None)))
    z = 1.0 * math.sqrt(20)
    mu = {
        ("server", "record", "zero-out"): math.hypot(2 / z, 1 / 5),
        ("example", "record", "zero-out"): math.hypot(2.0, math.sqrt(20) / 5),
        ("example", "record", "replace-one"): math.hypot(4.0, 2 * math.sqrt(20) / 5),
        ("server", "client", "zero-out"): math.hypot(2 * 20 / z, 20 / 5),
    }
    for key, distance in mu.items():
        assert stated.row(*key).epsilon == pytest.approx(closed_form(distance, 1e-5), rel=0.01)
        assert stated.row(*key).epsilon > without.row(*key).epsilon
    assert any("noised means and variances" in note for note in stated.notes)


@pytest.mark.slow
def test_a_recipe_with_private_scaling_keeps_within_its_target() -> None:
    federation = federation_of(3000, spread=0.05)
    run = fedcdp.simulate(build("linear", (FEATURES,), 2), federation, target_epsilon=4, scale_inputs=True)
    assert 3.9 < run.privacy().row("server").epsilon <= 4
    plain = fedcdp.simulate(build("linear", (FEATURES,), 2), federation, target_epsilon=4)
    assert run.accuracy > plain.accuracy + 0.1
    layer = run.model[0]
    assert isinstance(layer, Standardised)
    assert layer.mean[3] > 0.7


def test_with_a_plan_the_plan_says_whether_inputs_are_scaled() -> None:
    with pytest.raises(PlanError, match="scale_inputs: it is for the recommended recipe; set the plan's scaling_noise"):
        fedcdp.simulate(nn.Linear(FEATURES, 2), federation_of(), plan_of(), scale_inputs=True)


# The ledger -----------------------------------------------------------------------------------------------------------


def test_the_release_is_charged_before_it_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(scaling, "noised_moments", killed)
    with pytest.raises(KeyboardInterrupt):
        fedcdp.simulate(nn.Linear(FEATURES, 2), federation_of(), plan_of(), out=tmp_path / "run")
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").rounds == (SCALING,)
    assert not (tmp_path / "run" / "scaling.safetensors").exists()


@pytest.mark.parametrize(("secure", "charged"), [(False, 1), (True, 2)], ids=["seeded", "secure"])
def test_a_release_that_was_lost_is_charged_again_if_it_differs(tmp_path: Path, secure: bool, charged: int) -> None:
    federation, model, plan = federation_of(), nn.Linear(FEATURES, 2), plan_of(secure_noise=secure)
    fedcdp.simulate(model, federation, plan, out=tmp_path / "run", most_releases=1)
    first = (tmp_path / "run" / "scaling.safetensors").read_bytes()
    (tmp_path / "run" / "scaling.safetensors").unlink()
    run = fedcdp.simulate(model, federation, plan, out=tmp_path / "run", resume=True)
    assert [charge.round for charge in run.charges] == [SCALING] * charged + [0, 1, 2, 3]
    assert ((tmp_path / "run" / "scaling.safetensors").read_bytes() == first) is not secure
    once = plan.privacy(federation, model=model).row("server").epsilon
    assert (run.privacy().row("server").epsilon > once * 1.001) is secure
    assert run.participations.tolist() == [4, 4, 4]


def test_a_resumed_run_reads_what_was_released(tmp_path: Path) -> None:
    federation, model, plan = federation_of(), nn.Linear(FEATURES, 2), plan_of(secure_noise=True)
    fedcdp.simulate(model, federation, plan, out=tmp_path / "run", most_releases=3)
    kept = (tmp_path / "run" / "scaling.safetensors").read_bytes()
    run = fedcdp.simulate(model, federation, plan, out=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "scaling.safetensors").read_bytes() == kept
    assert run.rounds == 4
    assert run.releases == 5


def test_a_damaged_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    federation, model, plan = federation_of(), nn.Linear(FEATURES, 2), plan_of()
    fedcdp.simulate(model, federation, plan, out=tmp_path / "run", most_releases=2)
    (tmp_path / "run" / "scaling.safetensors").write_bytes(b"no")
    with pytest.raises(fedcdp.RunError, match="scaling"):
        fedcdp.simulate(model, federation, plan, out=tmp_path / "run", resume=True)


def test_a_seeded_run_is_the_same_in_one_go_or_resumed(tmp_path: Path) -> None:
    federation, model, plan = federation_of(), nn.Linear(FEATURES, 2), plan_of()
    whole = fedcdp.simulate(model, federation, plan)
    fedcdp.simulate(model, federation, plan, out=tmp_path / "run", most_releases=2)
    resumed = fedcdp.simulate(model, federation, plan, out=tmp_path / "run", resume=True)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name])


def test_without_room_in_the_budget_nothing_is_released(tmp_path: Path) -> None:
    federation, model, plan = federation_of(), nn.Linear(FEATURES, 2), plan_of()
    run = fedcdp.simulate(model, federation, plan, out=tmp_path / "run", most_releases=0)
    assert (run.releases, run.rounds) == (0, 0)
    assert not (tmp_path / "run" / "scaling.safetensors").exists()
    once = fedcdp.simulate(model, federation, plan, out=tmp_path / "other", most_releases=1)
    assert ([charge.round for charge in once.charges], once.rounds) == ([SCALING], 0)
    picky = fedcdp.simulate(model, federation, plan, budget=lambda rounds: SCALING not in rounds)
    assert (picky.releases, picky.rounds) == (0, 0)


# Options that do not fit ----------------------------------------------------------------------------------------------


def test_token_ids_have_no_means() -> None:
    ids = torch.randint(0, 9, (30, 5))
    federation = fedcdp.partition(fedcdp.Dataset(ids, torch.arange(30) % 2), clients=3, scheme="iid")
    with pytest.raises(DataError, match="only real-valued inputs are standardised"):
        fedcdp.simulate(nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(10, 2)), federation, plan_of())


def test_scaling_without_privacy_is_refused() -> None:
    with pytest.raises(PlanError, match="scaling_noise: it makes no sense with nonprivate"):
        plan_of(method="nonprivate")


def test_the_moments_module_exports_what_the_simulator_uses() -> None:
    """A deployment would use the same functions."""
    assert scaling.noised_moments is moments.noised_moments
