"""Recommended presets: disjoint data, and an ε against the server that is what their name says."""

from __future__ import annotations

import pytest

from fedcdp.accounting.statement import state
from fedcdp.config.experiment import assemble
from fedcdp.config.presets import BENCHMARKS, FEDERATIONS, RECOMMENDED, preset
from fedcdp.data import DATASETS
from fedcdp.files.tree import Layout
from fedcdp.models.networks import build
from fedcdp.training.prepared import population_of


@pytest.mark.parametrize("name", RECOMMENDED)
def test_the_accounted_epsilon_is_the_one_in_the_name_or_just_below(name: str) -> None:
    experiment = assemble(preset(name))
    target = float(name.rpartition("eps")[2])
    rows = {(row.adversary, row.unit): row for row in state(experiment.plan, population_of(experiment)).rows}
    assert 0.9 * target <= rows["server", "record"].epsilon <= target
    assert experiment.plan.delta == 1e-5


@pytest.mark.parametrize("name", [name for name in RECOMMENDED if "10k" not in name])
def test_no_record_is_stored_twice_and_all_clients_fit(name: str) -> None:
    experiment = assemble(preset(name))
    data = experiment.data
    assert population_of(experiment).copies == 1
    assert data.records is not None
    assert data.clients * data.records <= BENCHMARKS[data.dataset or ""].train
    assert experiment.plan.per_round == data.clients


def test_every_dataset_of_the_paper_has_one_at_1_2_and_8() -> None:
    names = {f"{dataset}-eps{epsilon}" for dataset in DATASETS.keys() - {"mnist5k"} for epsilon in (1, 2, 8)}
    assert names <= RECOMMENDED.keys()


@pytest.mark.parametrize(("dataset", "shape"), [("mnist", (1, 28, 28)), ("adult", (105,))])
def test_their_network_is_one_layer_for_the_accountant(dataset: str, shape: tuple[int, ...]) -> None:
    assert len(Layout.of(build(FEDERATIONS[dataset].network, shape, 2)).layers) == 1


def test_single_settings_override_a_recommended_preset_which_stays_as_it_is() -> None:
    changed = assemble(preset("mnist-eps1"), {"plan": {"rounds": 7}, "data": {"partition": "iid"}})
    assert (changed.plan.rounds, changed.data.partition) == (7, "iid")
    preset("mnist-eps1")["plan"]["rounds"] = 1
    assert assemble(preset("mnist-eps1")).plan.rounds != 1
