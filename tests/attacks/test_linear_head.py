"""A linear head is read in closed form: features to rounding without noise, and over all rounds of a training with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks import Leaks, replay
from fedcdp.attacks.head_solver import leading_direction
from fedcdp.attacks.linear_head import find_head
from fedcdp.attacks.replay import FRESH, PLAN, REPLAYED, Course
from fedcdp.attacks.sightings import sighted_throughout
from fedcdp.config.experiment import assemble
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.errors import ModelError, RunError
from fedcdp.models.networks import build
from fedcdp.training import feature_cache
from fedcdp.training.prepared import load_splits, network_of
from fedcdp.training.rounds import Simulator
from fedcdp.training.rundir import State
from fedcdp.training.saved_run import open_run
from fedcdp.training.trainer import train_experiment
from tests.support.pairs import sample_first

CLASSES, SIZE = 5, 12
DEFENCES: dict[str, dict[str, Any]] = {
    "no privacy": {"method": "nonprivate"},
    "clipping only": {"method": "fed-cdp", "noise_multiplier": 0.0, "clip": 0.05},
    "batch noise": {"method": "fed-cdp", "noise": "batch", "clip": 0.05, "noise_multiplier": 1.0},
}


def plan_of(**fields: Any) -> Plan:
    """One local step on all records of every client, in a fixed order."""
    defaults = {"method": "nonprivate", "rounds": 3, "per_round": 8, "local_steps": 1, "batch_size": 1}
    return Plan(**defaults | {"record_sampling": "partition", "learning_rate": 0.5} | fields)


class Front(nn.Module):
    """Fixed features: a rotation, a bend, and a norm of 1 or of any length."""

    def __init__(self, unit: bool = True) -> None:
        super().__init__()
        self.unit = unit
        self.register_buffer("turn", torch.randn(SIZE, 20, generator=torch.Generator().manual_seed(5)))

    def forward(self, inputs: Tensor) -> Tensor:
        bent = torch.tanh(inputs @ self.turn)
        return F.normalize(bent, dim=1) if self.unit else bent


def network(bias: bool, zero: bool, unit: bool = True) -> nn.Module:
    torch.manual_seed(7)
    head = nn.Linear(20, CLASSES, bias=bias)
    if zero:
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
    return nn.Sequential(Front(unit), head)


@pytest.fixture(scope="module")
def blobs() -> Dataset:
    """1,200 points around five centres."""
    generator = torch.Generator().manual_seed(3)
    centres = torch.randn(CLASSES, SIZE, generator=generator)
    targets = torch.arange(1200) % CLASSES
    return Dataset(centres[targets] + 0.7 * torch.randn(1200, SIZE, generator=generator), targets, CLASSES)


@pytest.fixture(scope="module")
def federation(blobs: Dataset) -> Federation:
    """Eight clients of one record; a thousand others are public."""
    public = blobs.take(torch.arange(200, 1200))
    return fedcdp.partition(blobs.take(torch.arange(8)), clients=8, scheme="iid", validation=public)


def attacked(*args: Any, **kwargs: Any) -> Leaks:
    found = fedcdp.attack(*args, **kwargs)
    assert isinstance(found, Leaks)
    assert found.attack == "linear-head"
    return found


def truth(found: Leaks, model: nn.Module) -> Tensor:
    head = find_head(model, (SIZE,))
    assert head is not None
    victims, examples = found.captured.inputs.shape[:2]
    return head.features(found.captured.inputs.flatten(0, 1)).view(victims, examples, -1)


# Without noise --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("defence", DEFENCES)
@pytest.mark.parametrize("zero", [True, False], ids=["zero head", "any head"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("at_round", sample_first([None, 0, 1]))
def test_features_of_single_examples_come_out_to_rounding(
    federation: Federation, bias: bool, zero: bool, defence: str, at_round: int | None
) -> None:
    model = network(bias, zero)
    found = attacked(plan_of(**DEFENCES[defence]), model=model, federation=federation, at_round=at_round)
    assert found.found.features is not None
    wrong = (found.found.features - truth(found, model)).norm(dim=2)
    assert float(wrong.max()) < 1e-5
    assert torch.equal(found.found.labels, found.captured.targets)
    row = found.summary()
    assert (row["label_accuracy"], row["identified_rate"]) == (1, 1)
    assert row["feature_error_median"] < 1e-5


def test_an_update_of_one_example_that_fed_sdp_clips_is_read_like_its_gradient(federation: Federation) -> None:
    plan = plan_of(method="fed-sdp", noise_at="client", noise_multiplier=0.0, clip=0.01)
    found = attacked(plan, model=network(False, zero=True), federation=federation, leak="type0")
    assert found.summary()["feature_error_median"] < 1e-5


@pytest.mark.parametrize("zero", [True, False], ids=["zero head", "any head"])
def test_features_of_any_length_come_out_where_nothing_is_clipped(federation: Federation, zero: bool) -> None:
    model = network(bias=False, zero=zero, unit=False)
    found = attacked(plan_of(), model=model, federation=federation)
    assert found.summary()["feature_error_median"] < 1e-5


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_leading_direction_is_that_of_a_decomposition(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 300, generator=generator, dtype=torch.float64)
    factors = torch.randn(40, 2, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 1e-3])
    rows = scale * (factors[:, :1] * one + factors[:, 1:] * other)
    expected = torch.linalg.svd(rows, full_matrices=False).Vh[0]
    assert abs(float(expected @ leading_direction(rows))) == pytest.approx(1, abs=1e-12)
    assert not leading_direction(torch.zeros_like(rows)).any()


def test_where_features_are_the_inputs_these_are_exact(federation: Federation) -> None:
    for model in (nn.Linear(SIZE, CLASSES), nn.Sequential(nn.Flatten(), nn.Linear(SIZE, CLASSES, bias=False))):
        assert attacked(plan_of(), model=model, federation=federation).success_rate == 1


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("leak", ["type1", "type0"])
def test_a_batch_of_different_labels_is_solved_from_one_update_at_a_zero_head(blobs: Dataset, bias: bool, leak: Any) -> None:
    some = blobs.take(torch.arange(8))  # labels 0 1 2 3 | 4 0 1 2
    clients = fedcdp.partition((some.inputs, some.targets), indices=[range(4), range(4, 8)],
                               validation=blobs.take(torch.arange(200, 1200)))  # fmt: skip
    model = network(bias, zero=True)
    found = attacked(plan_of(batch_size=4, per_round=2), model=model, federation=clients, leak=leak, at_round=0)
    row = found.summary()
    assert (row["examples"], row["feature_error_median"] < 1e-5) == (8, True)
    for labels, targets in zip(found.found.labels, found.captured.targets, strict=True):
        assert sorted(labels.tolist()) == sorted(targets.tolist())


# Under noise ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_identification_and_labels_rise_with_the_rounds(blobs: Dataset) -> None:
    many = fedcdp.partition(blobs.take(torch.arange(60)), clients=60, scheme="iid",
                            validation=blobs.take(torch.arange(200, 1200)))  # fmt: skip
    plan = plan_of(method="fed-cdp", clip=0.5, noise_multiplier=0.8, per_round=60)
    rows = [
        attacked(plan.but(rounds=rounds), model=network(False, zero=True), federation=many, leak="type2").summary()
        for rounds in (1, 60)
    ]
    assert [row["releases_mean"] for row in rows] == [1, 60]
    assert rows[0]["identified_rate"] < 0.1
    assert rows[1]["identified_rate"] > 0.5
    assert rows[1]["label_accuracy"] > 0.9 > rows[0]["label_accuracy"]
    assert rows[1]["feature_error_median"] < rows[0]["feature_error_median"]


def test_records_that_are_drawn_at_random_are_read_whenever_they_are(blobs: Dataset) -> None:
    clients = fedcdp.partition(blobs.take(torch.arange(40)), clients=4, scheme="iid",
                               validation=blobs.take(torch.arange(200, 1200)))  # fmt: skip
    plan = plan_of(per_round=2, batch_size=2, local_steps=3, rounds=8, record_sampling="poisson")
    row = attacked(plan, model=network(False, zero=True), federation=clients, leak="type2").summary()
    assert 1 <= row["releases_mean"] < 8 * 3
    assert row["feature_error_median"] < 1e-5


@pytest.mark.parametrize("name", ["scattering", "scattering+oriented-gradients"])
def test_digits_are_recognised_by_their_scattering_features(name: str) -> None:
    digits = fedcdp.load("mnist5k").train
    few = digits.take(torch.randperm(len(digits), generator=torch.Generator().manual_seed(1))[:404])
    few = Dataset(F.avg_pool2d(few.tensor, 2), few.targets, 10)
    public = few.take(torch.arange(4, 404))
    federation = fedcdp.partition(few.take(torch.arange(4)), clients=4, scheme="iid", validation=public)
    row = attacked(plan_of(per_round=4), model=build(name, few.shape, 10), federation=federation).summary()
    assert row["feature_error_median"] < 1e-5
    assert row["identified_rate"] == 1


# What is a linear head, and what is not -------------------------------------------------------------------------------


def test_fewer_victims_are_taken_where_they_fill_the_memory(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = network(bias=False, zero=True), plan_of()
    assert attacked(plan, model=model, federation=federation).summary()["victims"] == 8
    monkeypatch.setattr("fedcdp.attacks.sightings._MOST_VALUES", 3 * plan.rounds * CLASSES * 20)
    assert attacked(plan, model=model, federation=federation).summary()["victims"] == 3
    assert attacked(plan, model=model, federation=federation, victims=5).summary()["victims"] == 5


@pytest.mark.parametrize(("changes", "looked_at"), [
    ({}, [0, 3, 6]),
    ({"method": "fed-cdp", "noise_multiplier": 0.1}, range(7)),
    ({"per_round": 4}, range(7)),
])  # fmt: skip
def test_without_noise_a_few_rounds_are_read_if_memory_is_short(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], looked_at: Sequence[int]
) -> None:
    monkeypatch.setattr("fedcdp.attacks.sightings._MOST_WITHOUT_NOISE", 3 * CLASSES * 20)
    model, plan = network(bias=False, zero=True), plan_of(rounds=7, **changes)
    course = Course(model, federation, plan, torch.device("cpu"), F.cross_entropy)
    head = find_head(model, (SIZE,))
    assert head is not None
    seen = sighted_throughout(course, head, "type2", None).victims
    every = [state.weights["1.weight"].double() for state, _ in course.states(*course.begin())]
    read = [weights.double() for victim in seen for weights in victim.weights]
    assert {at for at, weights in enumerate(every) if any(torch.equal(weights, each) for each in read)} == set(looked_at)
    if not changes:
        assert attacked(plan, model=model, federation=federation).summary()["label_accuracy"] == 1


def test_weights_that_all_victims_share_are_kept_once(federation: Federation) -> None:
    model = network(bias=True, zero=True)
    head, course = find_head(model, (SIZE,)), Course(model, federation, plan_of(), torch.device("cpu"), F.cross_entropy)
    assert head is not None
    one, *others = sighted_throughout(course, head, "type2", None).victims
    assert len(others) == 7
    assert all(each.weights is one.weights for each in others)
    assert not torch.equal(one.weights[0], one.weights[1])


def test_every_preset_that_is_recommended_has_a_linear_head() -> None:
    digits, pictures = (1, 28, 28), (3, 32, 32)
    cases = [("oriented-gradients", digits), ("oriented-gradients", pictures), ("scattering", digits), ("linear", (30,))]
    for name, shape in [*cases, ("scattering+oriented-gradients", pictures)]:
        head = find_head(build(name, shape, 10), shape)
        assert head is not None
        assert head.bias is None


def test_other_networks_have_none() -> None:
    frozen_end = nn.Sequential(nn.Linear(30, 8), nn.Linear(8, 2).requires_grad_(False))
    for model in (build("mlp", (30,), 2), frozen_end, nn.Sequential(nn.Linear(30, 2), nn.Tanh())):
        assert find_head(model, (30,)) is None


def test_a_loss_of_ones_own_has_no_closed_form(federation: Federation) -> None:
    def doubled(outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * F.cross_entropy(outputs, targets)

    with pytest.raises(ModelError, match="linear-head needs"):
        fedcdp.attack(plan_of(), model=network(True, True), federation=federation, loss=doubled, attack="linear-head")


def test_a_zero_last_layer_behind_trained_ones_is_not_refused(federation: Federation) -> None:
    model = nn.Sequential(nn.Linear(SIZE, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    for parameter in model[2].parameters():
        nn.init.zeros_(parameter)
    found = fedcdp.attack(plan_of(), model=model, federation=federation, attack="cpl", victims=2)
    assert found.summary()["visible_coordinates"] == SIZE


# Runs -----------------------------------------------------------------------------------------------------------------


SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"dataset": "cancer", "clients": 6, "scaling": "public"},
    "model": {"network": "linear"},
    "plan": {"method": "fed-cdp", "rounds": 4, "per_round": 4, "local_steps": 2, "batch_size": 8, "clip": 0.25,
             "noise_multiplier": 0.3, "learning_rate": 4.0, "ema": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_seeded_run_is_replayed_to_the_bit(tmp_path: Path, in_memory: bool) -> None:
    experiment = assemble(SETTINGS)
    run = train_experiment(experiment, tmp_path / "run", quiet=True)
    splits = load_splits(experiment, quiet=True)
    target = run if in_memory else open_run(tmp_path / "run")
    course = Course(network_of(experiment, splits), run.federation, run.plan, torch.device("cpu"), F.cross_entropy, target)
    assert course.source == REPLAYED
    simulator, first = course.begin()
    last = None
    for state, chosen in course.states(simulator, first):
        last = simulator.round(state, chosen)
    assert last is not None
    assert last.average is not None
    for name, value in run.model.named_parameters():
        assert torch.equal(last.average[name], value), name
    row = attacked(target, model=network_of(experiment, splits), victims=5).summary()
    assert row["source"] == REPLAYED
    assert row["releases_mean"] >= 1


def weights_of(course: Course) -> list[Tensor]:
    """The weights at the beginning of every round."""
    return [next(iter(state.weights.values())) for state, _ in course.states(*course.begin())]


@pytest.mark.parametrize("leak", ["type1", "type2"])
def test_cached_features_change_no_figure(
    federation: Federation, leak: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path))
    monkeypatch.setattr(feature_cache, "WORTH_KEEPING", -1.0)
    front = nn.Linear(SIZE, 20).requires_grad_(False)
    model = nn.Sequential(front, nn.Tanh(), nn.Linear(20, CLASSES))
    assert federation.validation is not None
    train, validation = (replace(each, benchmark="known") for each in (federation.train, federation.validation))
    known = replace(federation, train=train, validation=validation)

    def figures(federation: Federation) -> dict[str, float]:
        row = attacked(plan_of(**DEFENCES["batch noise"]), model=model, federation=federation, leak=leak).summary()
        return {name: value for name, value in row.items() if isinstance(value, float) and name != "seconds"}

    own, computed, read = figures(federation), figures(known), figures(known)
    assert len(list(tmp_path.rglob("features-*.safetensors"))) == 2
    assert computed == pytest.approx(own, rel=1e-5)
    assert read == computed


def test_a_second_attack_on_a_training_does_not_train_again(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(bias=True, zero=True)
    first = attacked(plan_of(), model=model, federation=federation, leak="type1").summary()
    trained: list[int] = []
    ordinary = Simulator.round

    def noted(self: Simulator, state: State, chosen: Tensor) -> State:
        trained.append(state.round)
        return ordinary(self, state, chosen)

    monkeypatch.setattr(Simulator, "round", noted)
    same = network(bias=True, zero=True)  # elsewhere in memory, as in another command
    second = attacked(plan_of(), model=same, federation=federation, leak="type1").summary()
    assert not trained
    assert {**second, "seconds": 0} == {**first, "seconds": 0}
    for changed in ({"plan": plan_of(seed=1)}, {"model": network(bias=True, zero=False)}):
        trained.clear()
        attacked(changed.get("plan", plan_of()), model=changed.get("model", model), federation=federation)
        assert trained == list(range(plan_of().rounds))


OTHERS = ("data", "clients", "plan", "network", "setting", "loss", "secure noise", "memory")


@pytest.mark.parametrize("other", OTHERS)
def test_a_training_is_replayed_from_memory_only_if_it_is_the_same(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    model, plan, loss = nn.Linear(SIZE, CLASSES), plan_of(per_round=3), F.cross_entropy
    if other == "setting":
        model = network(bias=True, zero=False)
    if other == "memory":
        monkeypatch.setattr("fedcdp.attacks.replay._KEPT", 100)
    if other == "secure noise":
        plan = plan.but(method="fed-cdp", secure_noise=True)
    before = weights_of(Course(model, federation, plan, torch.device("cpu"), loss))
    if other == "data":
        changed = federation.train.tensor.clone()
        changed += 1
        federation = replace(federation, train=replace(federation.train, inputs=changed))
    elif other == "clients":
        federation = fedcdp.partition(federation.train, clients=federation.clients, scheme="iid", seed=9)
    elif other == "plan":
        plan = plan.but(learning_rate=0.123)
    elif other == "network":
        model = nn.Linear(SIZE, CLASSES)
    elif other == "setting":
        model = network(bias=True, zero=False, unit=False)  # no parameter, buffer or name differs
    elif other == "loss":
        loss = lambda outputs, targets: 2 * F.cross_entropy(outputs, targets)  # noqa: E731
    after = weights_of(Course(model, federation, plan, torch.device("cpu"), loss))
    if other == "memory":
        assert all(map(torch.equal, before, after))
        assert not replay._LAST.rounds
    else:
        assert not torch.equal(before[-1], after[-1])


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "yogi"])
def test_a_run_of_a_server_optimiser_is_replayed(federation: Federation, optimizer: str) -> None:
    """The replay ends at the run's own weights, or it would be refused: it carries the optimiser's state."""
    model = nn.Linear(SIZE, CLASSES)
    plan = plan_of(
        method="fed-cdp", noise_multiplier=0.3, rounds=3, local_steps=2, server_optimizer=optimizer,
        server_learning_rate="linear(0.1, 0.05)", proximal=0.5,
    )  # fmt: skip
    run = fedcdp.simulate(model, federation, plan)
    for leak in ("type2", "type0"):
        assert attacked(run, model=model, leak=leak, victims=4).summary()["source"] == REPLAYED
    fedcdp.attack(run, model=model, at_round=2, attack="labels", victims=2)


@pytest.mark.parametrize("behind", [lambda model: model, lambda model: nn.Sequential(model)])
def test_a_run_with_private_scaling_is_replayed(federation: Federation, behind: Callable[[nn.Module], nn.Module]) -> None:
    model, plan = behind(nn.Linear(SIZE, CLASSES)), plan_of(method="fed-cdp", noise_multiplier=0.3, scaling_noise=2.0)
    run = fedcdp.simulate(model, federation, plan)
    replayed = attacked(run, model=model, victims=4)
    assert replayed.summary()["source"] == REPLAYED
    planned = attacked(plan, model=model, federation=federation, victims=4)
    # The plan's seed gives the same release, and the same training.
    assert torch.equal(replayed.found.examples, planned.found.examples)
    fedcdp.attack(run, model=model, at_round=1, attack="labels", victims=2)


def test_a_replay_that_ends_elsewhere_is_refused(tmp_path: Path) -> None:
    experiment = assemble(SETTINGS)
    run = train_experiment(experiment, tmp_path / "run", quiet=True)
    with torch.no_grad():
        next(run.model.parameters()).add_(1e-6)
    with pytest.raises(RunError, match="replay: it ends at other weights"):
        fedcdp.attack(run, model=network_of(experiment, load_splits(experiment, quiet=True)), victims=4)


def test_secure_noise_is_attacked_in_a_fresh_training_and_that_is_said(tmp_path: Path) -> None:
    experiment = assemble(SETTINGS, {"plan": {"secure_noise": True}})
    run = train_experiment(experiment, tmp_path / "run", quiet=True)
    model = network_of(experiment, load_splits(experiment, quiet=True))
    assert attacked(run, model=model, victims=4).summary()["source"] == FRESH
    plan = attacked(run.plan, model=model, federation=run.federation, victims=4).summary()
    assert plan["source"] == PLAN


def test_without_the_untrained_network_a_run_is_looked_at_once() -> None:
    experiment = assemble(SETTINGS)
    run = train_experiment(experiment, None, quiet=True)
    row = attacked(run, victims=4).summary()
    assert (row["source"], row["releases_mean"]) == ("a single look", 1)
