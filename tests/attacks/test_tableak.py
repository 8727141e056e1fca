"""The attack on tables: rows solved for, rows searched for, and what noise leaves of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedcdp
from fedcdp.attacks import Leaks, TabLeak
from fedcdp.attacks.scene import simulated
from fedcdp.attacks.tableak import why_no_table
from fedcdp.errors import DataError, PlanError
from tests.support.small_tables import network, table

QUICK = TabLeak(members=2, steps=40)


def attacked(method: str = "nonprivate", *, model: nn.Module | None = None, federation: Any = None, **options: Any) -> Leaks:
    names = ("noise", "noise_at", "noise_multiplier", "secure_aggregation", "clip", "weighting", "share_fraction")
    plan = fedcdp.Plan(
        method=method, per_round=4, batch_size=options.pop("batch_size", 8), record_sampling="partition",
        **{name: options.pop(name) for name in names if name in options},
    )  # fmt: skip
    chosen = {"attack": "tableak", "leak": "type1", "victims": 2} | options
    found = fedcdp.attack(plan, model=model or network(), federation=federation or table(), **chosen)
    assert isinstance(found, Leaks)
    assert found.cells is not None
    return found


def test_a_batch_below_the_width_is_solved_to_rounding() -> None:
    found = attacked(batch_size=12)
    told = found.summary()
    assert (told["cells_right"], told["rows_right"], told["rows_solved"]) == (1.0, 1.0, 1.0)
    assert told["success_rate"] == 1.0
    assert told["label_accuracy"] == 1.0
    assert told["distance_mean"] < 1e-8
    assert told["cell_baselines"]["public_rows"]["cells_right"] < 0.7


def test_columns_that_nobody_named_are_found_in_public_rows() -> None:
    assert attacked(batch_size=6, federation=table(named=False)).summary()["rows_right"] == 1.0


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fed-sdp", {"noise_at": "server", "leak": "type0"}),
        ("fed-cdp", {"noise": "batch", "leak": "type2", "batch_size": 4}),
        ("nonprivate", {"leak": "type0", "secure_aggregation": True, "batch_size": 3, "victims": None}),
        ("nonprivate", {"leak": "type0", "weighting": "records"}),
    ],
    ids=["noise at the server", "clipped only", "a sum", "weighted"],
)
def test_everything_without_noise_leaks_every_row(method: str, options: dict[str, Any]) -> None:
    assert attacked(method, **options).summary()["rows_right"] == 1.0


@pytest.mark.parametrize("leak", ["type0", "type2"])
def test_under_fed_cdp_nothing_beats_the_guesses(leak: str) -> None:
    found = attacked("fed-cdp", leak=leak, noise_multiplier=6.0, victims=10, attack=QUICK)
    told = found.summary()
    best = max(each["cells_right"] for each in told["cell_baselines"].values())
    assert told["rows_solved"] == 0
    assert told["cells_right"] < best + 0.05


def test_a_bias_is_not_needed_where_a_category_is_never_empty() -> None:
    draws = np.random.default_rng(0)
    frame = {"ward": list("ABCD") * 100, "age": draws.normal(size=400), "ill": [0, 1] * 200}
    frame |= {name: draws.choice(list("abcdefgh"), size=400).tolist() for name in ("job", "town", "home")}
    federation = fedcdp.Federation.from_frame(
        frame, client="ward", label="ill", categories={name: list("abcdefgh") for name in ("job", "town", "home")},
        ranges={"age": (-4, 4)},
    )  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(28, 40, bias=False), nn.ReLU(), nn.Linear(40, 2))
    found = attacked(model=model, federation=federation)
    assert found.summary()["rows_right"] == 1.0
    assert {"age", "job", "town", "home"} == set(found.summary()["columns_right"])


def test_numbers_alone_are_solved_for_by_sparsity() -> None:
    federation = fedcdp.partition(fedcdp.load("cancer", quiet=True), clients=10, scheme="iid")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))
    assert attacked(model=model, federation=federation, batch_size=4).summary()["rows_right"] == 1.0


def test_a_batch_wider_than_the_layer_is_searched_for() -> None:
    found = attacked(model=network(6), batch_size=10, victims=1, attack=TabLeak(members=3, steps=60)).summary()
    assert found["rows_solved"] == 0
    assert found["members"] == 3
    assert found["iterations_mean"] == 60
    assert found["cells_right"] > found["cell_baselines"]["mode"]["cells_right"]
    assert 0 < found["agreed_cells"] < 1


def test_the_published_attack_is_an_option() -> None:
    found = attacked(batch_size=2, victims=1, attack=TabLeak(members=2, steps=150, learning_rate=0.3, exact=False)).summary()
    assert (found["attack"], found["rows_solved"]) == ("tableak-search", 0)
    assert found["cells_right"] > 0.8


@pytest.mark.parametrize(
    "options", [{"steps": 2}, {"method": "dssgd", "share_fraction": 0.5}], ids=["two steps", "half shared"]
)
def test_other_updates_are_searched_for(options: dict[str, Any]) -> None:
    found = attacked(batch_size=2, victims=2, attack=TabLeak(members=2, steps=150), **options).summary()
    assert found["rows_solved"] == 0
    assert found["cells_right"] > max(each["cells_right"] for each in found["cell_baselines"].values())


def test_the_same_seed_gives_the_same_rows() -> None:
    one, two = (attacked(batch_size=20, model=network(12), victims=1, attack=QUICK) for _ in range(2))
    assert torch.equal(one.found.examples, two.found.examples)


def test_a_scaled_network_gives_raw_rows() -> None:
    from fedcdp.models.networks import with_scaling

    federation = table()
    model = with_scaling(network(), federation.train.shape)
    model.scaling.mean.fill_(0.3)
    model.scaling.scale.fill_(2.0)
    assert attacked(model=model, federation=federation).summary()["rows_right"] == 1.0


@pytest.mark.slow
def test_adult_leaks_nine_cells_of_ten_at_batch_size_32() -> None:
    splits = fedcdp.load("adult", quiet=True)
    federation = fedcdp.partition(splits, clients=100, scheme="iid")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(105, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
    assert attacked(model=model, federation=federation, batch_size=32).summary()["cells_right"] >= 0.9


# Where it applies -----------------------------------------------------------------------------------------------------


def test_it_says_where_it_does_not_apply() -> None:
    images = fedcdp.Dataset(torch.rand(20, 1, 4, 4), torch.arange(20) % 2)
    values = fedcdp.Dataset(torch.rand(20, 4), torch.rand(20), task="regression")
    for data, model, reason in (
        (images, nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), "not the rows of a table"),
        (values, nn.Linear(4, 1), "its task is regression"),
    ):
        federation = fedcdp.partition(data, clients=2, scheme="iid")
        scene = simulated(
            fedcdp.Plan(method="nonprivate", per_round=2), model, federation, "type2", None, 0, 1, torch.device("cpu"), None,
            None,
        )  # fmt: skip
        assert reason in (why_no_table(scene) or "")
        with pytest.raises(DataError, match=reason):
            fedcdp.attack(
                fedcdp.Plan(method="nonprivate", per_round=2), model=model, federation=federation, attack="tableak"
            )


@pytest.mark.parametrize("wrong", [{"members": 0}, {"steps": 0}])
def test_an_ensemble_has_a_member_and_a_step(wrong: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="must be at least 1"):
        TabLeak(**wrong)


def test_the_rows_are_stored_beside_the_summary(tmp_path: Path) -> None:
    attacked(batch_size=3).save(tmp_path)
    assert (tmp_path / "rows.csv").read_text().startswith("victim,row,which,age,hours,job")
