"""Attacks on every task: one logit, several labels, values and losses of one's own; with privacy, and with false traces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks import RECIPES, Leaks
from fedcdp.attacks.observe import Look
from fedcdp.attacks.portfolio import Attempts
from fedcdp.attacks.scene import simulated
from fedcdp.attacks.scores import Criteria
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.errors import DataError, FedcdpError, ModelError, PlanError
from fedcdp.models.networks import build
from tests.support.pairs import sample_first

WIDTH = 10
VALUES = {"binary": 1, "multilabel": 3, "regression": 1, "several values": 2, "custom": 2}
NAMES = tuple(f"site {letter}" for letter in "abcdefghijklmnopqrst")


def distance(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that fedcdp does not know."""
    return ((1 + (outputs - targets).square()).sqrt() - 1).mean()


def targets_of(task: str, inputs: Tensor) -> Tensor:
    weights = torch.randn(inputs[0].numel(), 3, generator=torch.Generator().manual_seed(7))
    values = inputs.flatten(1) @ weights / inputs[0].numel() ** 0.5
    if task == "binary":
        return (values[:, 0] > values[:, 0].median()).long()
    if task == "multilabel":
        return (values > values.median(0).values).float()
    return values[:, 0] if task == "regression" else values[:, :2]


def federation_of(task: str, inputs: Tensor, clients: int = 20) -> Federation:
    """The first half of the examples at the clients; the others are public."""
    name: Any = "regression" if task == "several values" else task
    data, half = Dataset(inputs, targets_of(task, inputs), task=name), len(inputs) // 2
    mine, public = data.take(torch.arange(half)), data.take(torch.arange(half, len(inputs)))
    return fedcdp.partition(mine, clients=clients, scheme="iid", validation=public)


@pytest.fixture(scope="module")
def tables() -> dict[str, Federation]:
    """Rows of ten standard normal numbers, four at a client, for each task."""
    inputs = torch.randn(160, WIDTH, generator=torch.Generator().manual_seed(0))
    return {task: federation_of(task, inputs) for task in VALUES}


@pytest.fixture(scope="module")
def images() -> dict[str, Federation]:
    """Smooth images of 8×8 pixels, one at a client, for each task."""
    coarse = torch.rand(30, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    inputs = F.interpolate(coarse, size=(8, 8), mode="bilinear")
    return {task: federation_of(task, inputs, clients=15) for task in VALUES}


def plan(**fields: Any) -> Plan:
    """One local step on one record, in a fixed order, without privacy; `fields` change that."""
    defaults = {"method": "nonprivate", "rounds": 3, "per_round": 5, "local_steps": 1, "batch_size": 1}
    return Plan(**defaults | {"record_sampling": "partition", "learning_rate": 0.1} | fields)


PRIVATE = {"method": "fed-cdp", "clip": 1.0, "noise_multiplier": 1.0}


def dense(task: str, hidden: int = 16) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, VALUES[task]))


def convolutional(task: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 6, 3, padding=1), nn.Sigmoid(), nn.Conv2d(6, 6, 3, padding=1), nn.Sigmoid()]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 64, VALUES[task]))
    for parameter in network.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return network


def attacked(task: str, federation: Federation, model: nn.Module, fields: dict[str, Any], **options: Any) -> Leaks:
    loss = distance if task == "custom" else None
    found = fedcdp.attack(plan(**fields), model=model, federation=federation, loss=loss, **{"victims": 10} | options)
    assert isinstance(found, Leaks)
    return found


def target_errors(found: Leaks) -> tuple[float, float]:
    """The error of the inferred targets, and that of a guess from public targets: both 0 if all are right."""
    told = found.summary()
    if told["label_accuracy"] is not None:
        return 1 - told["label_accuracy"], 1 - told["label_baseline"]
    return told["target_rmse"], told["target_rmse_of_mean"]


# Tables, in closed form -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leak", ["type2", "type1"])
@pytest.mark.parametrize("task", list(VALUES))
def test_a_row_comes_out_exactly_without_privacy(tables: dict[str, Federation], task: str, leak: str) -> None:
    found = attacked(task, tables[task], dense(task), {}, leak=leak)
    assert found.attack == "analytic"
    assert found.success_rate == 1
    assert found.summary()["distance_mean"] < 1e-10
    if task != "custom":  # the gradient of its loss is not affine in the target
        error, guess = target_errors(found)
        assert error < 1e-5
        assert guess > 0.3


@pytest.mark.parametrize("leak", ["type2", "type1"])
@pytest.mark.parametrize("task", list(VALUES))
def test_fed_cdp_stops_the_closed_form(tables: dict[str, Federation], task: str, leak: str) -> None:
    found = attacked(task, tables[task], dense(task), PRIVATE, leak=leak, victims=20)
    assert found.success_rate == 0
    assert found.summary()["distance_mean"] > found.summary()["knowing_nothing"]["dataset_mean"]["mse"] / 2
    error, guess = target_errors(found)
    assert error > guess / 2


@pytest.mark.parametrize("task", ["regression", "several values", "multilabel"])
def test_a_batch_of_rows_comes_out_with_its_targets(tables: dict[str, Federation], task: str) -> None:
    found = attacked(task, tables[task], dense(task, 40), {"batch_size": 3}, leak="type1")
    assert found.success_rate is not None
    assert found.success_rate > 0.9
    assert target_errors(found)[0] < 1e-4


@pytest.mark.parametrize("task", list(VALUES))
def test_another_victims_gradient_shows_nothing(tables: dict[str, Federation], task: str) -> None:
    loss = distance if task == "custom" else None
    scene = simulated(plan(), dense(task), tables[task], "type2", None, 0, 1, torch.device("cpu"), loss, None)
    attempts = Attempts(scene, Look("type2"), 20, Criteria(), 0)
    right = attempts.captured
    false = replace(right, seen={name: value.roll(1, 0) for name, value in right.seen.items()})
    attempts.__dict__["captured"] = false
    found = attempts.run("analytic")
    assert isinstance(found, Leaks)
    assert found.success_rate == 0
    error, guess = target_errors(found)
    assert error > guess / 2


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_a_layer_without_bias_shows_the_direction(tables: dict[str, Federation], task: str) -> None:
    found = attacked(task, tables[task], nn.Linear(WIDTH, VALUES[task], bias=False), {}, attack="analytic")
    guess, truth = found.found.examples[:, 0], found.captured.tensor[:, 0]
    assert bool((F.cosine_similarity(guess, truth).abs() > 0.999).all())
    assert not bool((found.found.outcome == found.found.CONVERGED).any())  # the length is a guess


# A linear layer on fixed features -------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["binary", "multilabel", "regression", "several values"])
def test_a_linear_head_shows_features_and_targets(tables: dict[str, Federation], task: str) -> None:
    found = attacked(task, tables[task], build("periodic", (WIDTH,), VALUES[task]), {})
    told = found.summary()
    assert found.attack == "linear-head"
    assert told["feature_error_median"] < 1e-5
    assert told["identified_rate"] == 1
    assert target_errors(found)[0] < 1e-4


@pytest.mark.parametrize("task", ["binary", "multilabel", "regression", "several values"])
def test_fed_cdp_hides_the_features_of_a_head(tables: dict[str, Federation], task: str) -> None:
    found = attacked(task, tables[task], build("periodic", (WIDTH,), VALUES[task]), PRIVATE | {"noise_multiplier": 4.0})
    told = found.summary()
    assert told["feature_error_median"] > 0.5
    assert told["identified_rate"] < 0.4
    error, guess = target_errors(found)
    assert error > guess / 2


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_a_batch_without_classes_shows_what_it_has_in_common(tables: dict[str, Federation], task: str) -> None:
    model = build("periodic", (WIDTH,), VALUES[task])
    found = attacked(task, tables[task], model, {"batch_size": 4}, leak="type1", attack="linear-head")
    assert found.success_rate == 0
    same = found.found.features
    assert same is not None
    assert torch.equal(same[:, 0], same[:, 1])


def test_a_trained_layer_with_bias_is_solved_for_every_task(tables: dict[str, Federation]) -> None:
    for task in ("binary", "multilabel", "regression", "several values"):
        found = attacked(task, tables[task], nn.Linear(WIDTH, VALUES[task]), {}, attack="linear-head")
        assert found.success_rate == 1
        assert target_errors(found)[0] < 1e-4


# Images, by a search --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("task", list(VALUES))
def test_a_search_finds_image_and_target(images: dict[str, Federation], task: str) -> None:
    recipe = RECIPES["cpl"].but(iterations=60, restarts=4 if task == "custom" else 1)
    found = attacked(task, images[task], convolutional(task), {}, attack=recipe, victims=4)
    assert found.success_rate == 1
    assert target_errors(found)[0] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("task", list(VALUES))
def test_a_search_finds_nothing_under_fed_cdp(images: dict[str, Federation], task: str) -> None:
    recipe = RECIPES["cpl"].but(iterations=3)
    found = attacked(task, images[task], convolutional(task), PRIVATE, attack=recipe, victims=4)
    assert found.success_rate == 0
    assert found.summary()["recognisable_rate"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("task", ["binary", "multilabel", "several values"])
def test_a_search_takes_a_batch_apart(images: dict[str, Federation], task: str) -> None:
    recipe = RECIPES["batch"].but(iterations=40)
    pairs = fedcdp.partition(images[task].train, clients=7, scheme="iid", validation=images[task].validation)
    found = attacked(task, pairs, convolutional(task), {"batch_size": 2}, leak="type1", attack=recipe, victims=3)
    told = found.summary()
    assert told["examples"] == 6
    assert told["recognisable_rate"] >= 0.6
    if task != "several values":  # the errors of values in a batch may cancel
        error, guess = target_errors(found)
        assert error < guess / 2


@pytest.mark.slow
@pytest.mark.parametrize("task", ["regression", "multilabel", "custom"])
def test_known_targets_are_used(images: dict[str, Federation], task: str) -> None:
    recipe = RECIPES["cpl"].but(iterations=30, labels="known")
    found = attacked(task, images[task], convolutional(task), {}, attack=recipe, victims=3)
    assert found.success_rate == 1
    assert target_errors(found)[0] == 0


@pytest.mark.parametrize("attack", sample_first(["clip-aware", "inverting-gradients", "dlg", "averaging", "per-layer"]))
@pytest.mark.parametrize("task", ["binary", "multilabel", "regression"])
def test_every_attack_takes_every_task(images: dict[str, Federation], task: str, attack: str) -> None:
    recipe = RECIPES[attack].but(iterations=2, components=10) if attack in RECIPES else attack
    found = fedcdp.attack(plan(**PRIVATE), model=convolutional(task), federation=images[task], attack=recipe, victims=2)
    assert found.summary()["victims"] == 2


# Scores ---------------------------------------------------------------------------------------------------------------


def test_what_is_told_fits_the_task(tables: dict[str, Federation]) -> None:
    told = {task: attacked(task, tables[task], dense(task), {}).summary() for task in VALUES}
    assert told["binary"]["label_chance_99"] is not None
    assert "class_mean" in told["binary"]["knowing_nothing"]
    for task in ("multilabel", "regression", "custom"):
        assert told[task]["label_chance_99"] is None
        assert list(told[task]["knowing_nothing"]) == ["black", "dataset_mean"]
    assert told["regression"]["label_accuracy"] is None
    assert "target_rmse" not in told["binary"]
    assert "targets wrong by" in str(attacked("regression", tables["regression"], dense("regression"), {}))


def test_exact_is_relative_to_a_narrow_range() -> None:
    small = 0.01 * torch.randn(80, WIDTH, generator=torch.Generator().manual_seed(0))
    federation = federation_of("regression", small)
    found = attacked("regression", federation, dense("regression"), PRIVATE)
    assert found.success_rate == 0  # every guess has an MSE below 0.001
    assert attacked("regression", federation, dense("regression"), {}).success_rate == 1


def test_victims_have_their_clients_names(tables: dict[str, Federation]) -> None:
    federation = replace(tables["regression"], names=NAMES)
    found = attacked("regression", federation, dense("regression"), {}, victims=20)
    assert found.names is not None
    assert len(found.names) == 20
    for name, record in zip(found.names, found.captured.tensor[:, 0], strict=True):
        mine = federation.train.tensor[torch.from_numpy(federation.indices(NAMES.index(name)))]
        assert bool((mine == record).all(1).any())
    rows = found.summary()["clients"]
    assert sum(row["examples"] for row in rows) == 20
    assert all(row["success_rate"] == 1 for row in rows)
    assert {row["client"] for row in rows} <= set(NAMES)
    assert "client" in found.arrays()
    assert "clients" not in attacked("regression", tables["regression"], dense("regression"), {}).summary()


def test_names_follow_a_linear_head_through_its_rounds(tables: dict[str, Federation]) -> None:
    federation = replace(tables["binary"], names=NAMES)
    found = attacked("binary", federation, nn.Linear(WIDTH, 1), {}, attack="linear-head")
    assert found.names is not None
    for name, record in zip(found.names, found.captured.tensor[:, 0], strict=True):
        mine = federation.train.tensor[torch.from_numpy(federation.indices(NAMES.index(name)))]
        assert bool((mine == record).all(1).any())


def test_one_output_for_two_classes_is_one_logit(tables: dict[str, Federation]) -> None:
    given = tables["binary"]
    federation = replace(given, train=replace(given.train, task="classification", classes=2))
    loss = F.binary_cross_entropy_with_logits
    found = fedcdp.attack(plan(), model=dense("binary"), federation=federation, loss=loss, victims=10)
    assert isinstance(found, Leaks)
    assert found.success_rate == 1
    assert found.label_accuracy() == 1


def test_results_are_saved_and_shown_for_every_task(tables: dict[str, Federation], tmp_path: Any) -> None:
    for task in ("multilabel", "regression", "custom"):
        found = attacked(task, tables[task], dense(task), {}, victims=3)
        found.save(tmp_path / task)
        fedcdp.report([tmp_path / task, found], tmp_path / f"{task}.html")
        assert "3 of 3" in (tmp_path / f"{task}.html").read_text()


def test_pictures_of_every_task_are_shown(images: dict[str, Federation], tmp_path: Any) -> None:
    for task in ("binary", "multilabel", "regression"):
        recipe = RECIPES["cpl"].but(iterations=1)
        found = attacked(task, images[task], convolutional(task), {}, attack=recipe, victims=2)
        found.save(tmp_path / task)
        fedcdp.report([tmp_path / task], tmp_path / f"{task}.html")
        assert "<img" in (tmp_path / f"{task}.html").read_text()


@pytest.mark.parametrize("task", ["binary", "multilabel", "regression"])
def test_a_run_at_a_modest_epsilon_shows_no_row(tables: dict[str, Federation], task: str) -> None:
    run = fedcdp.simulate(dense(task), tables[task], plan(**PRIVATE | {"rounds": 2, "per_round": 20}))
    server = next(row for row in run.privacy().rows if row.adversary == "server" and row.unit == "record")
    assert server.epsilon < 10
    for leak in ("type0", "type2"):
        found = fedcdp.attack(run, leak=leak, victims=20)  # type: ignore[arg-type]
        assert isinstance(found, Leaks)
        assert found.success_rate == 0


# Raw gradients --------------------------------------------------------------------------------------------------------


LOSSES = {
    "binary": F.binary_cross_entropy_with_logits,
    "multilabel": F.binary_cross_entropy_with_logits,
    "regression": F.mse_loss,
    "several values": F.mse_loss,
    "custom": distance,
}


@pytest.mark.parametrize("several", [False, True], ids=["one victim", "victims"])
@pytest.mark.parametrize("task", list(VALUES))
def test_raw_gradients_of_every_loss(tables: dict[str, Federation], task: str, several: bool) -> None:
    model, loss, data = dense(task), LOSSES[task], tables[task].train
    inputs, targets = data.tensor[:4], data.targets[:4]

    def gradient(some: slice) -> list[Tensor]:
        outputs = model(inputs[some])
        wanted = targets[some].float().reshape(outputs.shape)
        return list(torch.autograd.grad(loss(outputs, wanted), list(model.parameters())))

    if several:
        each = [gradient(slice(at, at + 1)) for at in range(4)]
        gradients, truth = [torch.stack(values) for values in zip(*each, strict=True)], (inputs, targets)
    else:
        gradients, truth = gradient(slice(0, 1)), (inputs[:1], targets[:1])
    found = fedcdp.attack(gradients, model=model, truth=truth, loss=loss)
    assert isinstance(found, Leaks)
    assert found.success_rate == 1
    assert found.captured.task == ("regression" if task == "several values" else task)
    unknown = fedcdp.attack(gradients, model=model, input_shape=(WIDTH,), loss=loss, attack="analytic")
    assert isinstance(unknown, Leaks)
    assert torch.allclose(unknown.found.examples[:, 0], truth[0], atol=1e-3)


# Refusals -------------------------------------------------------------------------------------------------------------


def by_class(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets[:, 0])


def coded(images: dict[str, Federation]) -> Federation:
    """Targets that only one's own loss understands: a class and another number."""
    given = images["custom"].train.tensor
    return fedcdp.partition(
        Dataset(given, torch.zeros(len(given), 2, dtype=torch.int64), task="custom"), clients=5, scheme="iid"
    )


def refused(images: dict[str, Federation], tables: dict[str, Federation], case: str) -> None:
    other = tables["binary"].train
    if case == "no loss":
        fedcdp.attack(plan(), model=dense("custom"), federation=tables["custom"])
    if case == "coded targets":
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
        fedcdp.attack(plan(), model=model, federation=coded(images), loss=by_class, attack="cpl")
    if case == "labels of values":
        fedcdp.attack(plan(), model=dense("regression"), federation=tables["regression"], attack="labels")
    if case == "labels of a batch":
        several = plan(batch_size=3)
        fedcdp.attack(several, model=dense("multilabel"), federation=tables["multilabel"], attack="labels", leak="type1")
    if case == "other public targets":
        fedcdp.attack(plan(), model=dense("regression"), federation=tables["regression"], public=other)
    if case == "unknown head":
        model = build("periodic", (WIDTH,), 2)
        fedcdp.attack(plan(), model=model, federation=tables["custom"], loss=distance, attack="linear-head")
    if case == "no last layer":
        model = nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh(), nn.Linear(2, 4), Mean())
        fedcdp.attack(plan(), model=model, federation=tables["binary"], attack="cpl")


class Mean(nn.Module):
    """One output, from a layer of several."""

    def forward(self, values: Tensor) -> Tensor:
        return values.mean(1)


@pytest.mark.parametrize(
    ("case", "error", "sentence"),
    [
        ("no loss", PlanError, "task custom has no loss of its own"),
        ("coded targets", DataError, "only if they are real numbers in the shape of the outputs"),
        ("labels of values", DataError, "does not apply to task regression here: its targets are values"),
        ("labels of a batch", DataError, "the labels of several examples overlap"),
        ("other public targets", DataError, "public: each target is int64 of shape []"),
        ("unknown head", ModelError, "by the (binary) cross-entropy or the squared error"),
        ("no last layer", ModelError, "no dense last layer with one row"),
    ],
)
def test_what_cannot_be_attacked_is_said_in_a_sentence(
    images: dict[str, Federation], tables: dict[str, Federation], case: str, error: type[FedcdpError], sentence: str
) -> None:
    with pytest.raises(error) as told:
        refused(images, tables, case)
    assert sentence in str(told.value)
    assert "\n" not in str(told.value)


def test_a_closed_form_needs_no_target(tables: dict[str, Federation]) -> None:
    given = tables["custom"].train.tensor
    federation = fedcdp.partition(
        Dataset(given, torch.zeros(len(given), 2, dtype=torch.int64), task="custom"), clients=5, scheme="iid"
    )
    found = fedcdp.attack(plan(), model=dense("custom"), federation=federation, loss=by_class, victims=5)
    assert isinstance(found, Leaks)
    assert found.success_rate == 1
    assert found.label_accuracy() is None
    assert "target_rmse" not in found.summary()
