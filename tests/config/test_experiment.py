"""An experiment is one value: made of layers, written to a file, and the same again when read."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fedcdp.config.experiment import SECTIONS, Experiment, assemble, read_assignment, read_toml
from fedcdp.config.plan import Plan
from fedcdp.config.schedules import linear
from fedcdp.errors import DataError, FedcdpError, PlanError, RunError
from fedcdp.training.prepared import deal_out, load_splits, network_of, stored
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.trainer import train_experiment

SMALL = {"data": {"dataset": "cancer", "clients": 6}, "plan": {"per_round": 3, "rounds": 2, "local_steps": 2}}


def written_and_read(experiment: Experiment) -> Experiment:
    return assemble(tomllib.loads(experiment.to_toml()))


# layers --------------------------------------------------------------------------------------------------------------


def test_the_later_layer_wins_setting_by_setting() -> None:
    layers = [
        {"plan": {"rounds": 5, "seed": 1}},
        {"plan": {"rounds": 6}},
        {"data": {"clients": 50}},
        {"plan": {"seed": 2}},
    ]
    experiment = assemble(*layers)
    assert (experiment.plan.rounds, experiment.plan.seed, experiment.data.clients) == (6, 2, 50)


def test_nothing_given_is_the_embedded_digits_in_their_own_federation() -> None:
    experiment = assemble()
    assert experiment.data.dataset == "mnist5k"
    assert (experiment.data.clients, experiment.data.records, experiment.plan.per_round) == (100, 40, 10)


def test_the_defaults_are_those_of_the_dataset_that_the_layers_name_at_last() -> None:
    experiment = assemble({"data": {"dataset": "mnist"}}, {"data": {"dataset": "adult"}})
    assert (experiment.data.partition, experiment.plan.rounds, experiment.plan.batch_size) == ("iid", 10, 3)


def test_own_data_bring_a_federation_for_few_records() -> None:
    experiment = assemble({"data": {"file": "mine.csv"}})
    assert experiment.data.dataset is None
    assert (experiment.data.partition, experiment.data.clients, experiment.plan.per_round) == ("iid", 10, 10)


@pytest.mark.parametrize(
    ("data", "scaling", "standardise"),
    [
        ({"dataset": "adult"}, "training", False),
        ({"file": "mine.csv"}, None, False),
        ({"file": "mine.csv", "standardise": True}, "training", True),
        ({"file": "mine.csv", "scaling": "training"}, "training", True),
        ({"file": "mine.csv", "scaling": "public"}, "public", False),
        ({"file": "mine.csv", "scaling": "training", "standardise": False}, None, False),  # as 0.1.0 wrote it
    ],
)
def test_own_data_are_scaled_only_if_asked(data: dict[str, Any], scaling: str | None, standardise: bool) -> None:
    experiment = assemble({"data": data})
    assert (experiment.data.scaling, experiment.data.standardise) == (scaling, standardise)
    assert written_and_read(experiment) == experiment


def test_contradicting_scalings_are_refused() -> None:
    with pytest.raises(PlanError, match="scaling: public contradicts standardise"):
        assemble({"data": {"file": "mine.csv", "scaling": "public", "standardise": True}})


def test_a_client_column_partitions_naturally() -> None:
    assert assemble({"data": {"file": "mine.csv", "client_column": "site"}}).data.partition == "natural"


@pytest.mark.parametrize(
    ("method", "noise", "rate"),
    [
        ("nonprivate", "example", 0.05),
        ("fed-sdp", "example", 0.05),
        ("fed-cdp", "example", 0.001),
        ("fed-cdp-decay", "batch", 0.001),
        ("fed-cdp", "cohort", 0.05),
    ],
)
def test_the_learning_rate_fits_the_method_unless_it_is_given(method: str, noise: str, rate: float) -> None:
    layer = {"data": {"dataset": "cancer"}, "plan": {"method": method, "noise": noise}}
    assert assemble(layer).plan.learning_rate_at(0) == rate
    assert assemble(layer, {"plan": {"learning_rate": 0.7}}).plan.learning_rate_at(0) == 0.7


@pytest.mark.parametrize("layer", [{"plan": {"nosuch": 1}}, {"nosuch": {"rounds": 1}}, {"data": {"rounds": 1}}])
def test_a_setting_that_does_not_exist_is_named(layer: dict[str, Any]) -> None:
    section, key = next((section, key) for section, keys in layer.items() for key in keys)
    with pytest.raises(PlanError, match=rf"{section}\.{key}: there is no such setting"):
        assemble(layer)


def test_a_dataset_and_a_file_contradict_each_other() -> None:
    with pytest.raises(PlanError, match="not both"):
        assemble({"data": {"dataset": "cancer", "file": "mine.csv"}})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("data", "clients", "many"),
        ("data", "clients", 2.0),
        ("data", "clients", True),
        ("data", "standardise", 1),
        ("data", "dataset", 3),
        ("model", "network", None),
        ("plan", "rounds", None),
        ("plan", "momentum", "0.5"),
        ("run", "chunk", 1.5),
        ("run", "engine", "nosuch"),
        ("run", "device", 0),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_its_name(section: str, key: str, value: object) -> None:
    with pytest.raises(PlanError, match=f"{key}: "):
        assemble({section: {key: value}})


def test_a_whole_number_stands_for_a_fraction() -> None:
    experiment = assemble({"plan": {"noise_multiplier": 1}, "data": {"alpha": 2}})
    assert isinstance(experiment.plan.noise_multiplier, float)
    assert isinstance(experiment.data.alpha, float)


# the configuration file ----------------------------------------------------------------------------------------------

positive = st.floats(min_value=1e-10, max_value=1e10)
fractions = st.floats(min_value=0, max_value=1, exclude_max=True)


@given(
    file=st.text(st.characters(codec="utf-8"), min_size=1),
    clients=st.integers(1, 10**6),
    momentum=fractions,
    noise_multiplier=st.just(0.0) | st.floats(1e-6, 1e6),
    alpha=st.floats(0, 1e300),
    seed=st.integers(0, 2**63 - 1),
    standardise=st.booleans(),
)
@example(
    file='a\x7f"\\b\n',
    clients=3,
    momentum=0.1,
    noise_multiplier=1 / 3,
    alpha=1e-300,
    seed=2**63 - 1,
    standardise=True,
)
def test_an_experiment_comes_back_from_its_file(
    file: str, clients: int, momentum: float, noise_multiplier: float, alpha: float, seed: int, standardise: bool
) -> None:
    experiment = assemble(
        {
            "data": {"file": file, "clients": clients, "alpha": alpha, "standardise": standardise},
            "plan": {"momentum": momentum, "noise_multiplier": noise_multiplier, "seed": seed},
            "run": {"chunk": 3},
        }
    )
    assert written_and_read(experiment) == experiment


@given(start=positive, end=positive, rate=positive, kind=st.sampled_from(["linear", "exponential", "cosine"]))
def test_schedules_come_back_from_the_file_to_the_last_digit(start: float, end: float, rate: float, kind: str) -> None:
    experiment = assemble({"plan": {"clip": f"{kind}({start!r}, {end!r})", "learning_rate": rate}})
    again = written_and_read(experiment)
    assert again.plan.clip == experiment.plan.clip
    assert again.plan.learning_rate == experiment.plan.learning_rate


@pytest.mark.parametrize("alpha", [float("inf"), float("nan"), -1.0])
def test_what_no_file_can_hold_is_not_accepted_either(alpha: float) -> None:
    try:
        experiment = assemble({"data": {"alpha": alpha}})
    except FedcdpError:
        return
    assert written_and_read(experiment).data.alpha == alpha


def test_a_setting_left_out_of_the_file_is_its_default(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('[data]\ndataset = "cancer"\n\n[plan]\nrounds = 7\nclip = "linear(6, 2)"\n')
    experiment = assemble(read_toml(tmp_path / "my.toml"))
    assert experiment.plan.rounds == 7
    assert experiment.plan.clip == linear(6, 2)
    assert experiment.plan.batch_size == 4


def test_the_file_has_a_section_for_each_part() -> None:
    assert list(tomllib.loads(assemble(SMALL).to_toml())) == list(SECTIONS)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[plan", "is not a TOML file"),
        (b"\xff", "is not a TOML file"),
        (b"[elsewhere]\n", "elsewhere is not one of the sections data, model, plan, run"),
        (b"plan = 3\n", "plan is not one of the sections"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "my.toml").write_bytes(content)
    with pytest.raises(FedcdpError, match=sentence):
        read_toml(tmp_path / "my.toml")


# single settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "setting"),
    [
        ("rounds=3", {"plan": {"rounds": 3}}),
        (" rounds = 3 ", {"plan": {"rounds": 3}}),
        ("plan.rounds=3", {"plan": {"rounds": 3}}),
        ("clients=12", {"data": {"clients": 12}}),
        ("noise_multiplier=1.5", {"plan": {"noise_multiplier": 1.5}}),
        ("standardise=true", {"data": {"standardise": True}}),
        ("method=fed-sdp", {"plan": {"method": "fed-sdp"}}),
        ('method="fed-sdp"', {"plan": {"method": "fed-sdp"}}),
        ("clip=linear(6, 2)", {"plan": {"clip": "linear(6, 2)"}}),
        ("network=my.module:make", {"model": {"network": "my.module:make"}}),
        ("file=a=b.csv", {"data": {"file": "a=b.csv"}}),
        ("device=cuda:1", {"run": {"device": "cuda:1"}}),
    ],
)
def test_an_assignment_is_read_as_in_toml_with_optional_quotes(written: str, setting: dict[str, Any]) -> None:
    assert read_assignment(written) == setting


@pytest.mark.parametrize("written", ["rounds", "", "=3", "nosuch=3", "nosuch.rounds=3"])
def test_what_is_no_assignment_is_refused(written: str) -> None:
    with pytest.raises(PlanError, match="--set"):
        read_assignment(written)


def test_no_name_stands_in_two_sections() -> None:
    names = [name for kind in SECTIONS.values() for name in kind.__dataclass_fields__]
    assert len(names) == len(set(names))


# running it ----------------------------------------------------------------------------------------------------------


def test_an_experiment_runs_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = train_experiment(assemble(SMALL), None, quiet=True)
    assert (run.rounds, run.directory) == (2, None)
    assert list(tmp_path.iterdir()) == []


def test_only_a_run_that_begins_in_a_directory_needs_the_toml_writer(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tomli_w", None)  # an import of it fails
    assert train_experiment(assemble(SMALL), None, quiet=True).rounds == 2
    assert train_experiment(assemble(SMALL), directory, resume=True, quiet=True).rounds == 2
    with pytest.raises(ImportError, match="tomli_w"):
        train_experiment(assemble(SMALL), directory.with_name("new"), quiet=True)


def test_the_network_and_the_federation_follow_the_plans_seed() -> None:
    data = {"dataset": "cancer", "partition": "iid", "clients": 10}
    one, other = (assemble({"data": data, "plan": {"seed": seed}}) for seed in (1, 2))
    splits = load_splits(one, quiet=True)
    assert torch.equal(next(network_of(one, splits).parameters()), next(network_of(one, splits).parameters()))
    assert not torch.equal(next(network_of(one, splits).parameters()), next(network_of(other, splits).parameters()))
    assert deal_out(one, splits).indices(0).tolist() == deal_out(one, splits).indices(0).tolist()
    assert deal_out(one, splits).indices(0).tolist() != deal_out(other, splits).indices(0).tolist()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mine\.csv does not exist"):
        load_splits(assemble({"data": {"file": str(tmp_path / "mine.csv")}}))


# stored in a run directory -------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    RunDirectory(tmp_path / "run").create(assemble(SMALL).to_toml())
    return tmp_path / "run"


def test_a_stored_experiment_may_be_given_again_and_run_elsewhere(directory: Path) -> None:
    assert stored(directory) == assemble(SMALL)
    again = stored(directory, [SMALL, {"run": {"device": "cuda", "chunk": 5, "evaluate_every": 2}}])
    assert (again.run.device, again.run.chunk, again.run.evaluate_every) == ("cuda", 5, 2)
    assert again.plan == assemble(SMALL).plan


@pytest.mark.parametrize("layer", [{"plan": {"seed": 1}}, {"data": {"clients": 7}}, {"model": {"activation": "tanh"}}])
def test_a_stored_experiment_refuses_a_contradiction_by_its_name(directory: Path, layer: dict[str, Any]) -> None:
    name = next(iter(next(iter(layer.values()))))
    with pytest.raises(RunError, match=f"{name}: the run in .* was started with"):
        stored(directory, [layer])


def test_a_plan_is_part_of_an_experiment_as_it_is() -> None:
    assert Experiment(plan=Plan(rounds=3)).plan == Plan(rounds=3)
