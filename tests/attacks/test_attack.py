"""`fedcdp.attack` on runs and plans: what leaks under which method, to which reader, with networks and data of all kinds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks import RECIPES, Criteria, Leaks, Membership
from fedcdp.config.experiment import assemble
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.errors import DataError, FedcdpError, ModelError, PlanError
from fedcdp.models.networks import build
from fedcdp.training.run import Run
from fedcdp.training.saved_run import open_run
from fedcdp.training.trainer import train_experiment
from tests.support.pairs import sample_first

CANCER = (30,)


@pytest.fixture(scope="module")
def tables() -> Federation:
    """426 real records of 30 numbers, at 60 clients."""
    return fedcdp.partition(fedcdp.load("cancer", quiet=True), clients=60, scheme="iid")


@pytest.fixture(scope="module")
def images(digits: Dataset) -> Federation:
    """Real digits, one at a client; others are public."""
    mine, public = torch.arange(0, 1000, 25), torch.arange(1, 1000, 5)
    return fedcdp.partition(digits.take(mine), clients=40, scheme="iid", validation=digits.take(public))


@pytest.fixture(scope="module")
def colours() -> Federation:
    """Pictures of three channels, with values from −1 to 1."""
    generator = torch.Generator().manual_seed(2)
    inputs = F.interpolate(torch.rand(60, 3, 4, 4, generator=generator), size=(8, 8), mode="bilinear") * 2 - 1
    targets = torch.randint(4, (60,), generator=generator)
    public = Dataset(inputs[20:], targets[20:], 4)
    return fedcdp.partition((inputs[:20], targets[:20]), clients=20, scheme="iid", validation=public)


def one_step(**fields: Any) -> Plan:
    """One local step on one record, in a fixed order, without privacy; `fields` change that."""
    defaults = {"method": "nonprivate", "rounds": 3, "per_round": 5, "local_steps": 1, "batch_size": 1}
    return Plan(**defaults | {"record_sampling": "partition", "learning_rate": 0.1} | fields)


@pytest.mark.parametrize("rounded", [False, True])
def test_an_attack_rounds_products_as_the_run_did(
    tables: Federation, monkeypatch: pytest.MonkeyPatch, rounded: bool
) -> None:
    """A GPU would round the products of its convolutions by default: a replay would end at other weights."""
    found: list[tuple[str, bool]] = []

    def noted(*_: object) -> None:
        found.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))

    monkeypatch.setattr("fedcdp.attacks.api.strongest", noted)
    run = fedcdp.simulate(nn.Linear(30, 2), tables, one_step(), tf32=rounded)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    fedcdp.attack(run, model=nn.Linear(30, 2))
    fedcdp.attack(one_step(), model=nn.Linear(30, 2), federation=tables)
    assert found == [("high" if rounded else "highest", rounded), ("highest", False)]
    assert before == (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_run_remembers_how_its_products_were_rounded(tmp_path: Path, rounded: bool) -> None:
    options = {"plan": {"rounds": 1, "per_round": 2, "local_steps": 1}, "data": {"dataset": "cancer", "clients": 4},
               "run": {"tf32": rounded}}  # fmt: skip
    assert train_experiment(assemble(options), tmp_path / "run", quiet=True).tf32 == rounded
    assert open_run(tmp_path / "run").tf32 == rounded


def figures(found: Any) -> dict[str, Any]:
    """What an attack found, but for how long it took."""
    return {name: value for name, value in found.summary().items() if name != "seconds"}


def leaks(*args: Any, **kwargs: Any) -> Leaks:
    found = fedcdp.attack(*args, **kwargs)
    assert isinstance(found, Leaks)
    return found


# What is attacked -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"method": "fed-cdp", "noise_multiplier": 0.01}], ids=["nonprivate", "fed-cdp"])
@pytest.mark.parametrize("leak", ["type2", "type1"])
def test_a_plan_at_a_round_is_attacked_as_the_run_that_got_there(
    tables: Federation, fields: dict[str, Any], leak: Any
) -> None:
    model, plan = build("mlp", CANCER, 2), one_step(rounds=4, local_steps=2, batch_size=2, **fields)
    run = fedcdp.simulate(model, tables, plan, most_releases=2, engine="functional")  # the one that an attack uses
    assert run.rounds == 2
    trained = leaks(run, leak=leak, victims=5)
    planned = leaks(plan, model=model, federation=tables, at_round=2, leak=leak, victims=5)
    again = leaks(run, model=model, at_round=2, leak=leak, victims=5)
    for other in (planned, again):
        assert figures(other) == figures(trained)
        assert torch.equal(other.found.examples, trained.found.examples)
    assert trained.captured.round == 2
    for name, value in run.model.named_parameters():
        assert torch.equal(trained.captured.weights[name][0], value), name
    untrained = leaks(plan, model=model, federation=tables, leak=leak, victims=5)
    assert untrained.captured.round == 0
    assert not torch.equal(untrained.captured.weights["1.weight"][0], trained.captured.weights["1.weight"][0])


def test_a_finished_run_is_attacked_at_its_trained_weights(tables: Federation) -> None:
    run = fedcdp.simulate(build("mlp", CANCER, 2), tables, one_step(rounds=2, ema=0.5))
    found = leaks(run, victims=3)
    for name, value in run.model.named_parameters():
        assert torch.equal(found.captured.weights[name][0], value), name
    assert found.success_rate == 1


def test_an_attack_changes_neither_the_network_nor_the_random_numbers_of_its_user(tables: Federation) -> None:
    model = build("mlp", CANCER, 2).eval()
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    for name in ("cpl", "analytic", "matched-filter"):
        how = RECIPES["cpl"].but(iterations=2) if name == "cpl" else name
        fedcdp.attack(one_step(), model=model, federation=tables, victims=2, attack=how)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Run, Run]:
    """A run, as it was returned and as it is read back from its directory."""
    plan = {"method": "fed-cdp", "rounds": 2, "per_round": 5, "local_steps": 2, "noise_multiplier": 0.05, "ema": 0.3}
    run = train_experiment(
        assemble({"data": {"dataset": "cancer", "clients": 20}, "plan": plan}), tmp_path / "run", quiet=True
    )
    return run, open_run(tmp_path / "run")


@pytest.mark.parametrize("how", ["analytic", "matched-filter", "membership"])
def test_a_run_in_memory_and_its_directory_give_the_same(kept: tuple[Run, Run], how: str) -> None:
    run, trained = kept
    assert figures(fedcdp.attack(run, victims=5, attack=how)) == figures(fedcdp.attack(trained, victims=5, attack=how))


def test_a_run_read_back_has_spent_what_it_spent(kept: tuple[Run, Run]) -> None:
    run, again = kept
    assert (again.rounds, again.releases, again.metrics) == (run.rounds, run.releases, run.metrics)
    assert again.participations.tolist() == run.participations.tolist()
    assert again.privacy().as_json() == run.privacy().as_json()


def test_the_default_attack_is_a_closed_form_where_there_is_one(tables: Federation, colours: Federation) -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    assert leaks(one_step(), model=nn.Linear(30, 2), federation=tables, victims=1).attack == "linear-head"
    assert leaks(one_step(), model=build("mlp", CANCER, 2), federation=tables, victims=1).attack == "analytic"
    for leak in ("type2", "type1"):
        assert leaks(one_step(), model=flat, federation=colours, victims=1, leak=leak).attack == "linear-head"


def test_attacks_are_repeatable_and_the_seed_decides_where_they_start(images: Federation) -> None:
    how: dict[str, Any] = {"model": nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), "federation": images, "victims": 2}
    how["attack"] = RECIPES["cpl"].but(iterations=2)
    one, two, other = (leaks(one_step(), **how, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(one.found.examples, two.found.examples)
    assert torch.equal(one.captured.inputs, other.captured.inputs)
    assert not torch.equal(one.found.seeds, other.found.seeds)


def test_progress_is_told_up_to_the_end(tables: Federation) -> None:
    for how in ("analytic", "matched-filter", "per-layer", RECIPES["cpl"].but(iterations=3, restarts=2)):
        told: list[tuple[int, int]] = []
        model = nn.Linear(30, 2)
        fedcdp.attack(
            one_step(), model=model, federation=tables, victims=3, attack=how, progress=lambda *a, to=told: to.append(a)
        )
        assert len({total for _, total in told}) == 1, how
        assert [done for done, _ in told] == sorted(done for done, _ in told), how
        assert told[-1][0] == told[-1][1], how


# Networks and data of the user's own ----------------------------------------------------------------------------------


class Mine(nn.Module):
    """A network of one's own, with a frozen layer between trained ones and a frozen bias at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.fixed, self.head = nn.Linear(30, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.fixed.requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        answers: Tensor = self.head(torch.tanh(self.fixed(torch.relu(self.seen(inputs)))))
        return answers


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=0.2)


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    right = outputs.gather(1, targets[:, None])
    return F.softplus(1 - right + outputs).mean()


@pytest.mark.parametrize("loss", [F.cross_entropy, smoothed, margin])
@pytest.mark.parametrize("leak", ["type2", "type1", "type0"])
def test_a_network_with_frozen_parameters_and_a_loss_of_ones_own_leaks_every_record(
    tables: Federation, loss: Any, leak: Any
) -> None:
    found = leaks(one_step(), model=Mine(), federation=tables, loss=loss, leak=leak, victims=10)
    assert set(found.captured.seen) == {"seen.weight", "seen.bias", "head.weight"}
    assert found.success_rate == 1
    assert found.summary()["distance_median"] < 1e-8


def test_a_loss_of_ones_own_is_used_throughout(tables: Federation) -> None:
    plain, other = (
        leaks(one_step(), model=Mine(), federation=tables, loss=loss, victims=3, attack=RECIPES["cpl"].but(iterations=1))
        for loss in (F.cross_entropy, smoothed)
    )
    assert not torch.equal(plain.captured.seen["head.weight"], other.captured.seen["head.weight"])


def test_pictures_of_three_channels_outside_0_to_1_are_reconstructed_as_they_are(colours: Federation) -> None:
    network = nn.Sequential(nn.Conv2d(3, 6, 5, padding=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(6 * 64, 4))
    found = leaks(one_step(), model=network, federation=colours, victims=3, attack="cpl")
    assert found.success_rate == 1
    assert float(found.found.examples.min()) < -0.2
    low, high = found.value_range
    assert -1 <= low < -0.5
    assert 0.5 < high <= 1
    row = found.summary()
    assert (row["recognisable_rate"], row["label_accuracy"], row["coordinates"]) == (1, 1, 192)
    assert row["knowing_nothing"]["black"]["mse"] > 0.1
    assert found.picture().mode == "RGB"


def test_one_dummy_for_a_batch_is_compared_with_the_nearest_example_on_the_datas_own_scale(colours: Federation) -> None:
    plan = one_step(batch_size=1, local_steps=1)
    two = fedcdp.partition((colours.train.inputs, colours.train.targets), clients=10, scheme="iid")
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    found = leaks(
        plan.but(batch_size=2, slots=2), model=network, federation=two, leak="type1", victims=4,
        attack=RECIPES["cpl"].but(iterations=1), public=colours.validation,
    )  # fmt: skip
    assert found.scores is not None
    guesses = found.found.examples.clamp(*found.value_range)
    nearest = (guesses - found.captured.inputs).square().flatten(2).mean(2).amin(1)
    assert found.scores.mse[:, 0].tolist() == pytest.approx(nearest.tolist(), rel=1e-5)


def test_records_far_outside_0_to_1_are_exact_in_their_own_unit() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = 1000 * torch.randn(40, 5, generator=generator), torch.randint(2, (40,), generator=generator)
    federation = fedcdp.partition((inputs, targets), clients=20, scheme="iid")
    found = leaks(one_step(), model=nn.Linear(5, 2), federation=federation, victims=10)
    low, high = found.value_range
    assert (low, high) == (float(inputs.min()), float(inputs.max()))
    assert found.summary()["psnr_mean"] > 60


def test_a_federation_without_public_examples_is_attacked_all_the_same(tables: Federation) -> None:
    alone = fedcdp.partition((tables.train.inputs, tables.train.targets), clients=60, scheme="iid")
    assert alone.validation is None
    found = leaks(one_step(), model=nn.Linear(30, 2), federation=alone, victims=5).summary()
    assert (found["success_rate"], found["identified_rate"]) == (1, 1)


def test_public_examples_of_ones_own_are_what_candidates_and_baselines_come_from(tables: Federation) -> None:
    public = Dataset(torch.zeros(7, 30), torch.zeros(7, dtype=torch.int64), 2)
    row = leaks(one_step(), model=nn.Linear(30, 2), federation=tables, victims=5, public=public).summary()
    assert row["candidates"] == 8
    nothing = row["knowing_nothing"]
    assert nothing["dataset_mean"]["mse"] == nothing["class_mean"]["mse"]


# Methods and readers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    fields: dict[str, Any]
    type2: float
    type1: float
    type0: float


NOISY = {"noise_multiplier": 6.0, "clip": 4.0}
WHO_SEES = {
    "non-private": Row({"method": "nonprivate"}, 1, 1, 1),
    "fed-sdp, noise at the server": Row({"method": "fed-sdp", "noise_at": "server"} | NOISY, 1, 1, 1),
    "fed-sdp, noise at the client": Row({"method": "fed-sdp", "noise_at": "client"} | NOISY, 1, 0, 0),
    "fed-cdp": Row({"method": "fed-cdp"} | NOISY, 0, 0, 0),
    "fed-cdp-decay": Row({"method": "fed-cdp-decay", "clip": "linear(6, 2)", "noise_multiplier": 6.0}, 0, 0, 0),
    "fed-cdp, noise on the batch": Row({"method": "fed-cdp", "noise": "batch"} | NOISY, 1, 0, 0),
    "dssgd that shares everything": Row({"method": "dssgd", "share_fraction": 1.0}, 1, 1, 1),
}


@pytest.mark.parametrize("name", WHO_SEES)
def test_who_reads_raw_records_under_which_method(tables: Federation, name: str) -> None:
    """Batches of one record of a table: the closed form reads them exactly, or not at all."""
    row, model = WHO_SEES[name], build("mlp", CANCER, 2)
    for leak, wanted in (("type2", row.type2), ("type1", row.type1), ("type0", row.type0)):
        found = leaks(one_step(**row.fields), model=model, federation=tables, leak=leak, victims=15)  # type: ignore[arg-type]
        figures = found.summary()
        assert figures["success_rate"] == wanted, leak
        assert (figures["noise_deviation"] == 0) == (wanted == 1), leak
        if not wanted:
            assert figures["distance_mean"] > 0.1, leak


@pytest.mark.slow
@pytest.mark.parametrize("name", sample_first(["analytic", *RECIPES], quick=3))
def test_one_release_of_fed_cdp_shows_nothing_to_any_attack(images: Federation, cpl: nn.Module, name: str) -> None:
    plan = one_step(method="fed-cdp", **NOISY)
    model = build("mlp", (1, 28, 28), 10) if name == "analytic" else cpl
    how = name if name == "analytic" else RECIPES[name].but(iterations=4)
    row = leaks(plan, model=model, federation=images, victims=3, attack=how).summary()
    assert (row["success_rate"], row["recognisable_rate"], row["identified_rate"]) == (0, 0, 0)
    assert row["noise_deviation"] == 24


@pytest.mark.slow
def test_the_same_attack_succeeds_where_nothing_is_added(images: Federation, cpl: nn.Module) -> None:
    found = leaks(one_step(), model=cpl, federation=images, victims=2, attack=RECIPES["cpl"].but(iterations=8))
    assert found.summary()["recognisable_rate"] == 1


def test_several_releases_have_less_noise_and_give_a_record_away_in_the_end(tables: Federation) -> None:
    plan = one_step(method="fed-cdp", noise_multiplier=0.02, clip=4.0)
    few, many = (
        leaks(plan, model=nn.Linear(30, 2), federation=tables, victims=10, releases=releases) for releases in (1, 100)
    )
    assert few.captured.noise_level == pytest.approx(0.08)
    assert many.captured.noise_level == pytest.approx(0.008)
    assert many.summary()["distance_median"] < few.summary()["distance_median"] / 20


@pytest.mark.parametrize(
    ("fields", "share"),
    [({"method": "dssgd", "share_fraction": 0.1}, 0.1), ({"compression": 0.7}, 0.3),
     ({"method": "dssgd", "share_fraction": 0.5, "compression": 0.5}, 0.25)],
    ids=["dssgd", "pruned", "dssgd, pruned"],
)  # fmt: skip
def test_a_reader_of_selective_updates_has_the_shared_part_and_no_more(
    tables: Federation, fields: dict[str, Any], share: float
) -> None:
    model = build("mlp", CANCER, 2)

    def read(leak: Any, **changes: Any) -> Tensor:
        found = leaks(one_step(**changes), model=model, federation=tables, leak=leak, victims=4)
        return found.captured.engine.layout.flatten(found.captured.seen, lead=1)

    everything = read("type1")
    for leak in ("type1", "type0"):
        seen = read(leak, **fields)
        for mine, whole in zip(seen, everything, strict=True):
            shared = mine != 0
            assert 0 < int(shared.sum()) <= share * len(mine) + 1
            torch.testing.assert_close(mine[shared], whole[shared], rtol=1e-4, atol=1e-6)
            assert whole[shared].abs().min() >= whole[~shared].abs().max() - 1e-6
    torch.testing.assert_close(read("type2", **fields), everything, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_what_is_pruned_still_gives_images_away_to_a_reader_who_knows(images: Federation, cpl: nn.Module) -> None:
    how = RECIPES["clip-aware"].but(iterations=10)
    plan = one_step(method="dssgd", share_fraction=0.3)
    found = leaks(plan, model=cpl, federation=images, victims=2, leak="type0", attack=how)
    assert found.summary()["identified_rate"] == 1


# Bad input ------------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """Word numbers in, so that no gradient leads to them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        answers: Tensor = self.head(self.words(inputs.long().clamp(0, 6)).mean(-2))
        return answers


REFUSED: dict[str, tuple[dict[str, Any], type[FedcdpError], str]] = {
    "no victims": ({"victims": 0}, PlanError, "victims: 0"),
    "fewer than no victims": ({"victims": -1}, PlanError, "victims: -1"),
    "too many victims": ({"victims": 1000, "leak": "type1"}, PlanError, "victims: 1000 is not allowed; type1 has"),
    "part of a victim": ({"victims": 2.5}, PlanError, "victims: 2.5 is not a whole number"),
    "a leak that is none": ({"leak": "type3"}, PlanError, "leak: 'type3' is not one of type0, type1, type2"),
    "an attack that is none": ({"attack": "nosuch"}, PlanError, "attack: 'nosuch' is not one of best, "),
    "labels by no rule": ({"attack": RECIPES["cpl"].but(labels="nosuch")}, PlanError, "labels: 'nosuch'"),
    "a round before the first": ({"at_round": -1}, PlanError, "at_round: -1"),
    "a round after the last": ({"at_round": 3}, PlanError, "at_round: 3 is not allowed; the plan has rounds 0 to 2"),
    "a step before the first": ({"step": -1}, PlanError, "step: -1"),
    "a step after the last": ({"step": 2}, PlanError, "step: 2 is not allowed; the plan has local steps 0 to 1"),
    "a step of an update": ({"step": 1, "leak": "type1"}, PlanError, "step: 1 is for type2"),
    "no steps": ({"steps": 0, "leak": "type1"}, PlanError, "steps: 0"),
    "more steps than there are": ({"steps": 3, "leak": "type1"}, PlanError, "steps: 3 is not allowed; the plan has 1 to 2"),
    "steps of an example": ({"steps": 2}, PlanError, "steps: 2 is for type0 and type1"),
    "no release": ({"releases": 0}, PlanError, "releases: 0"),
    "no release to filter": ({"releases": 0, "attack": "matched-filter"}, PlanError, "releases: 0"),
    "a filter for one": ({"victims": 1, "attack": "matched-filter"}, PlanError, "victims: 1"),
    "no network": ({"model": None}, PlanError, "model, federation"),
    "no federation": ({"federation": None}, PlanError, "model, federation"),
    "another network": ({"model": build("cpl", (1, 28, 28), 2)}, ModelError, "the network fails on"),
    "a network of words": ({"model": Words()}, ModelError, "model: its output"),
    "an answer that is always the same": (
        {"model": nn.Sequential(nn.Linear(30, 2), nn.Softmax(1), nn.Hardtanh(2, 3)), "attack": "cpl"},
        ModelError, "model: its output does not depend",
    ),
    "BatchNorm": ({"model": nn.Sequential(nn.Linear(30, 2), nn.BatchNorm1d(2)), "plan": "fed-cdp"}, ModelError, "mixes"),
    "the closed form of a convolution": (
        {"model": nn.Sequential(nn.Unflatten(1, (1, 30)), nn.Conv1d(1, 1, 3), nn.Flatten(), nn.Linear(28, 2)),
         "attack": "analytic"},
        ModelError, "analytic needs a network whose first layer is dense; this one starts with Unflatten",
    ),
    "public examples of another shape": (
        {"public": Dataset(torch.zeros(9, 7), torch.zeros(9, dtype=torch.int64), 2)},
        DataError, "public: inputs of shape [7]",
    ),
    "too few public examples": (
        {"public": Dataset(torch.zeros(9, 30), torch.zeros(9, dtype=torch.int64), 2), "attack": "averaging"},
        DataError, "public: 9 examples",
    ),
    "membership of a plan": ({"attack": "membership"}, PlanError, "attack: membership needs a trained model"),
    "the truth of a plan": ({"truth": (torch.zeros(1, 30), torch.zeros(1))}, PlanError, "truth: only for an attack on raw"),
    "a device that is not there": ({"device": "nosuch"}, PlanError, "device: nosuch"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_attacked_is_refused_in_a_sentence(tables: Federation, name: str) -> None:
    given, kind, sentence = REFUSED[name]
    plan = one_step(method=given.get("plan", "nonprivate"), local_steps=2)
    given = {"model": nn.Linear(30, 2), "federation": tables, "victims": 3} | given
    given.pop("plan", None)
    with pytest.raises(kind) as refused:
        fedcdp.attack(plan, **given)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def small_run(tables: Federation) -> Run:
    return fedcdp.simulate(nn.Linear(30, 2), tables, one_step(rounds=1))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"at_round": 0}, "at_round: a run holds only its trained network"),
        ({"model": nn.Linear(30, 3)}, "model: it is not the run's network"),
        ({"attack": "membership", "at_round": 0}, "at_round: only for an attack on gradients or updates"),
        ({"input_shape": (30,), "examples": 2}, "input_shape, examples: only for an attack on raw gradients"),
    ],
)
def test_what_a_run_does_not_need_is_refused(small_run: Run, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        fedcdp.attack(small_run, **given)


def test_membership_needs_records_that_were_held_out(tables: Federation) -> None:
    alone = fedcdp.partition((tables.train.inputs, tables.train.targets), clients=60, scheme="iid")
    run = fedcdp.simulate(nn.Linear(30, 2), alone, one_step(rounds=1))
    with pytest.raises(DataError, match="public: the federation has no validation split"):
        fedcdp.attack(run, attack="membership")
    found = fedcdp.attack(run, attack="membership", public=tables.validation)
    assert isinstance(found, Membership)
    assert (found.members, found.others) == (426, 143)


def test_the_summary_has_what_was_promised_and_is_strict_json(tables: Federation) -> None:
    promised = ["method", "leak", "attack", "victims", "success_rate", "distance_mean", "distance_median", "psnr_mean"]
    for how in ("analytic", "matched-filter", "per-layer", RECIPES["cpl"].but(iterations=1)):
        found = fedcdp.attack(one_step(), model=nn.Linear(30, 2), federation=tables, victims=2, attack=how)
        row = json.loads(json.dumps(found.summary(), allow_nan=False))
        assert {*promised, "iterations_mean"} <= set(row), how


def test_what_counts_as_success_can_be_said(tables: Federation) -> None:
    plan = one_step(method="fed-cdp", noise_multiplier=0.02)
    strict, lax = (
        leaks(plan, model=nn.Linear(30, 2), federation=tables, victims=10, criteria=criteria)
        for criteria in (Criteria(exact_mse=1e-9, candidates=10), Criteria(exact_mse=1e3, candidates=20))
    )
    assert (strict.success_rate, lax.success_rate) == (0, 1)
    assert (strict.summary()["candidates"], lax.summary()["candidates"]) == (10, 20)


def test_a_network_that_mixes_examples_is_refused():
    data = fedcdp.load("mnist5k")
    federation = fedcdp.partition(data, clients=4, scheme="iid", records=20)
    mixing = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2 * 26 * 26, 10))
    plan = fedcdp.Plan(method="nonprivate", record_sampling="fixed")
    with pytest.raises(ModelError, match="layer 1 is BatchNorm2d, which mixes the examples"):
        fedcdp.attack(plan, model=mixing, federation=federation)


def test_the_rate_of_a_recipe_falls_over_all_of_its_iterations():
    recipe = RECIPES["inverting-gradients"].but(iterations=50)
    assert recipe.optimiser.total == 50 * recipe.optimiser.inner
