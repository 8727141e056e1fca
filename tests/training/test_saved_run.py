"""A trained model: its accuracy on any split and for each client, recomputed by other means; its exports, read back."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedcdp.config.experiment import assemble
from fedcdp.config.plan import Plan
from fedcdp.data import load
from fedcdp.data.partition import partition
from fedcdp.errors import RunError
from fedcdp.files.tensors import save_tensors
from fedcdp.models.networks import build
from fedcdp.training.run import Run
from fedcdp.training.saved_run import open_experiment, open_run
from fedcdp.training.simulate import simulate
from fedcdp.training.split_evaluation import split_of
from fedcdp.training.trainer import train_experiment

QUANTILES = {"min": 0, "p10": 10, "median": 50, "p90": 90, "max": 100}


@pytest.fixture(scope="module")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trained")
    labels = np.arange(150) % 3
    features = np.random.default_rng(1).normal(size=(150, 4)) + 1.0 * labels[:, None]
    np.savez(place / "own.npz", x=features, y=labels)
    experiment = assemble(
        {
            "data": {"file": str(place / "own.npz"), "partition": "shards", "clients": 7, "classes_per_client": 2},
            "plan": {"method": "nonprivate", "per_round": 7, "rounds": 6, "local_steps": 5, "learning_rate": 0.2},
        }
    )
    train_experiment(experiment, place / "run")
    return place / "run"


@pytest.fixture
def run(_trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_trained, tmp_path / "run"))


@pytest.fixture
def trained(run: Path) -> Run:
    return open_run(run)


def right(trained: Run, split: str) -> list[bool]:
    """Whether each example is classified rightly, one at a time."""
    data = split_of(trained.federation, split)
    answers = [int(trained.model(inputs[None]).argmax()) for inputs in data.inputs]
    return [answer == target for answer, target in zip(answers, data.targets.tolist(), strict=True)]


def spread(accuracies: list[float]) -> dict[str, float]:
    return {"mean": float(np.mean(accuracies))} | {
        name: float(np.percentile(accuracies, percent)) for name, percent in QUANTILES.items()
    }


@pytest.mark.parametrize("split", ["train", "validation"])
def test_accuracy_is_the_share_of_right_answers(trained: Run, split: str) -> None:
    answers = right(trained, split)
    result = trained.evaluate(split)
    assert (result["split"], result["examples"]) == (split, len(answers))
    assert result["accuracy"] == pytest.approx(np.mean(answers))
    assert set(result["metrics"]) == {"balanced_accuracy", "macro_f1", "auroc", "loss"}
    assert 0.5 < result["accuracy"] < 1.0


def test_a_clients_training_accuracy_is_that_on_its_own_records(trained: Run) -> None:
    answers = right(trained, "train")
    federation = trained.federation
    own = [float(np.mean([answers[record] for record in federation.indices(client)])) for client in range(7)]
    assert len(set(own)) > 1
    assert trained.evaluate("train", per_client=True)["per_client"] == pytest.approx(spread(own))


def test_a_clients_validation_accuracy_weighs_classes_as_it_holds_them(trained: Run) -> None:
    answers = right(trained, "validation")
    targets = trained.federation.validation.targets.tolist()
    of_class = [np.mean([ok for ok, target in zip(answers, targets, strict=True) if target == c]) for c in range(3)]
    federation = trained.federation
    held = trained.federation.train.targets
    own = [float(np.mean([of_class[int(held[i])] for i in federation.indices(client)])) for client in range(7)]
    assert len(set(own)) > 1
    assert trained.evaluate("validation", per_client=True)["per_client"] == pytest.approx(spread(own))


@pytest.mark.parametrize("split", ["test", "nosuch"])
def test_a_split_that_is_not_there_is_named_with_those_that_are(trained: Run, split: str) -> None:
    with pytest.raises(RunError, match=f"the federation has train, validation, not '{split}'"):
        trained.evaluate(split)


def test_an_unfinished_run_is_its_checkpoint(run: Path) -> None:
    whole = open_run(run).model.state_dict()
    (run / "model.safetensors").unlink()
    partial = open_run(run).model.state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in partial.items())


def test_a_run_without_any_round_has_no_model(run: Path) -> None:
    (run / "model.safetensors").unlink()
    (run / "checkpoint.safetensors").unlink()
    with pytest.raises(RunError, match="not one round is done"):
        open_run(run)


def test_the_model_of_another_network_is_refused(run: Path) -> None:
    save_tensors(run / "model.safetensors", {"0.weight": torch.zeros(3, 4)}, {"format": "model-1"})
    with pytest.raises(RunError, match="holds other tensors"):
        open_run(run)


def test_tensors_of_another_type_are_refused(run: Path) -> None:
    tensors = load_file(run / "model.safetensors")
    save_file({name: value.to(torch.int32) for name, value in tensors.items()}, run / "model.safetensors")
    with pytest.raises(RunError, match=r"model\.safetensors"):
        open_run(run)


def test_a_run_made_in_python_is_not_taken_for_the_default_experiment(tmp_path: Path) -> None:
    federation = partition(load("mnist5k", quiet=True), clients=100)
    plan = Plan(method="nonprivate", rounds=1, per_round=2, local_steps=1)
    simulate(build("cnn", (1, 28, 28), 10), federation, plan, out=tmp_path / "run")
    with pytest.raises(RunError):
        open_run(tmp_path / "run")


# exports -------------------------------------------------------------------------------------------------------------


def test_exported_tensors_are_the_models(trained: Run, tmp_path: Path) -> None:
    found = load_file(trained.export(tmp_path / "out.safetensors", "safetensors"))
    expected = trained.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_exported_torchscript_answers_as_the_model(trained: Run, tmp_path: Path) -> None:
    module = torch.jit.load(str(trained.export(tmp_path / "out.pt", "torchscript")))
    inputs = trained.federation.validation.inputs
    with torch.no_grad():
        torch.testing.assert_close(module(inputs), trained.model(inputs))


def test_exported_table_has_the_metrics_to_the_last_digit(trained: Run, tmp_path: Path) -> None:
    lines = trained.export(tmp_path / "out.csv", "csv").read_text().splitlines()
    rows = trained.metrics
    assert lines[0].split(",") == list(rows[0])
    assert [[float(cell) for cell in line.split(",")] for line in lines[1:]] == [list(row.values()) for row in rows]


def test_a_round_that_was_not_evaluated_leaves_its_cells_empty(run: Path, tmp_path: Path) -> None:
    (run / "metrics.jsonl").write_text('{"round": 1, "clients": 7}\n{"round": 2, "clients": 7, "accuracy": 0.5}\n')
    table = open_run(run).export(tmp_path / "out.csv", "csv").read_text()
    assert table == "round,clients,accuracy\n1,7,\n2,7,0.5\n"


def test_an_unknown_format_is_refused(trained: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="format: 'pickle' is not one of safetensors, torchscript, onnx, csv, tensorboard"):
        trained.export(tmp_path / "out", "pickle")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["safetensors", "torchscript", "onnx", "csv", "tensorboard"])
def test_an_export_never_overwrites(trained: Run, tmp_path: Path, form: str) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(RunError, match="already exists; nothing was overwritten"):
        trained.export(tmp_path / "mine", form)
    assert (tmp_path / "mine").read_text() == "precious"


def test_the_exported_model_of_a_network_with_tied_weights_can_be_read(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tied_network.py").write_text(
        "from torch import nn\n\n\n"
        "def make():\n"
        "    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))\n"
        "    network[2].weight = network[0].weight\n"
        "    return network\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    experiment = open_experiment(run)[0]
    network = {"model": {"network": "tied_network:make"}}
    data = {name: value for name, value in vars(experiment.data).items() if value is not None}
    tied = assemble({"data": data, "plan": {"per_round": 7, "rounds": 1, "local_steps": 1}}, network)
    train_experiment(tied, tmp_path / "tied")
    assert open_run(tmp_path / "tied").evaluate()["examples"] == 30
