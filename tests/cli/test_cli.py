"""Whole commands: what they print, what they leave on disk, and that one is the other's input."""

from __future__ import annotations

import csv
import json
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file as load_tensors

import fedcdp
from fedcdp.cli import terminal
from fedcdp.cli.train import _show_run, _summary
from fedcdp.files.installation import install_command
from fedcdp.models.networks import build
from fedcdp.training.prepared import deal_out

METHODS = ["nonprivate", "fed-sdp", "fed-cdp", "fed-cdp-decay", "dssgd"]
TINY = ["--clients", "8", "--per-round", "4", "--rounds", "3", "--local-steps", "2"]
CANCER = ["train", "--dataset", "cancer", *TINY]

Cli = Callable[..., Any]


def summary(outcome: Any) -> dict[str, Any]:
    """The one line of a command under --json."""
    assert outcome.status == 0, outcome.stderr
    assert outcome.stdout.count("\n") == 1
    return json.loads(outcome.stdout)


def metrics(run: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def config(run: Path | str) -> dict[str, Any]:
    return tomllib.loads((Path(run) / "config.toml").read_text(encoding="utf-8"))


def same_model(one: Path | str, other: Path | str) -> bool:
    left, right = (load_tensors(Path(run) / "model.safetensors") for run in (one, other))
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# train ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_training_prints_one_json_line_and_leaves_a_run_directory(cli: Cli, method: str) -> None:
    result = summary(cli(*CANCER, "--method", method, "--json", "--out", "run"))
    assert list(result) == ["accuracy", "rounds", "seconds", "us_per_client_step", "metrics", "epsilon"]
    assert set(result["metrics"]) == {"balanced_accuracy", "macro_f1", "auroc", "loss"}
    assert result["rounds"] == 3
    assert {row["adversary"] for row in result["epsilon"]} == {"server", "update", "example", "model"}
    assert 0 < result["seconds"] < 60
    assert result["us_per_client_step"] == pytest.approx(result["seconds"] / 24 * 1e6, rel=0.05)
    rows = metrics("run")
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert result["accuracy"] == rows[-1]["accuracy"]
    assert config("run")["plan"]["method"] == method


def test_a_run_directory_holds_safetensors_and_texts_and_nothing_pickled(cli: Cli) -> None:
    assert cli(*CANCER, "--quiet", "--out", "run").status == 0
    files = {path.name for path in Path("run").iterdir()}
    assert files - {"lock"} == {
        "config.toml", "metrics.jsonl", "ledger.jsonl", "checkpoint.safetensors", "model.safetensors", "engine.json",
        "scores.json",
    }  # fmt: skip
    with safe_open("run/checkpoint.safetensors", "pt") as checkpoint:
        assert json.loads(checkpoint.metadata()["fedcdp"])["round"] == 3
        assert all(name.startswith("weights/") for name in checkpoint.keys())  # noqa: SIM118
    wanted = build("mlp", (30,), 2).state_dict()
    found = load_tensors("run/model.safetensors")
    assert {name: value.shape for name, value in found.items()} == {name: value.shape for name, value in wanted.items()}


@pytest.mark.slow
def test_the_embedded_digits_are_trained_with_the_paper_cnn(cli: Cli) -> None:
    outcome = cli("train", "--dataset", "mnist5k", *TINY, "--records", 40, "--rounds", 2, "--json", "--out", "run")
    assert summary(outcome)["rounds"] == 2
    assert load_tensors("run/model.safetensors")["0.weight"].shape == (32, 1, 3, 3)


def test_without_json_a_person_reads_a_table_and_stdout_stays_empty(cli: Cli) -> None:
    outcome = cli(*CANCER, "--out", "run")
    assert outcome.status == 0
    assert outcome.stdout == ""
    for shown in ("8 clients × 426 records", "fed-cdp", "validation accuracy", "round 3/3"):
        assert shown in " ".join(outcome.stderr.split()), shown


def test_quiet_is_silent(cli: Cli) -> None:
    outcome = cli(*CANCER, "--quiet", "--out", "run")
    assert (outcome.stdout, outcome.stderr) == ("", "")


@pytest.mark.slow
def test_the_module_is_a_program(start: Callable[..., Any]) -> None:
    process = start("-m", "fedcdp", "--version")
    assert process.communicate(timeout=60) == (f"fedcdp {fedcdp.__version__}\n", "")
    assert process.returncode == 0


@pytest.mark.slow
def test_the_module_trains_as_a_program(start: Callable[..., Any]) -> None:
    process = start("-m", "fedcdp", *CANCER, "--json", "--quiet", "--out", "run")
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    assert json.loads(stdout)["rounds"] == 3


@pytest.mark.parametrize(
    "options",
    [
        [
            "--method",
            "fed-cdp",
            "--clip",
            "linear(6, 2)",
            "--noise",
            "batch",
            "--lr",
            "cosine(0.1, 0.01)",
            "--seed",
            "7",
        ],
        ["--method", "fed-sdp", "--ema", "0.5", "--noise-at", "client", "--client-sampling", "poisson"],
        ["--lr", "0.0123456789"],
    ],
    ids=["fed-cdp", "fed-sdp", "a long learning rate"],
)
def test_the_configuration_of_a_run_gives_the_same_model_again_to_the_bit(cli: Cli, options: list[str]) -> None:
    assert cli(*CANCER, *options, "--quiet", "--out", "one").status == 0
    assert cli("train", "--config", "one/config.toml", "--quiet", "--out", "two").status == 0
    assert same_model("one", "two")
    assert config("one") == config("two")


def test_another_seed_is_another_model(cli: Cli) -> None:
    assert cli(*CANCER, "--quiet", "--out", "one").status == 0
    assert cli(*CANCER, "--seed", 1, "--quiet", "--out", "two").status == 0
    assert not same_model("one", "two")


def test_set_takes_any_setting_by_its_name(cli: Cli) -> None:
    sets = ["clients=6", "plan.per_round=2", "rounds=2", "method=fed-sdp", "clip=linear(6, 2)", "activation=tanh"]
    options = [part for each in sets for part in ("--set", each)]
    assert cli("train", "--dataset", "cancer", "--local-steps", 2, *options, "--quiet", "--out", "run").status == 0
    written = config("run")
    assert written["data"]["clients"] == 6
    assert written["model"]["activation"] == "tanh"
    plan = written["plan"]
    assert (plan["per_round"], plan["rounds"], plan["method"]) == (2, 2, "fed-sdp")
    assert [row["clip"] for row in metrics("run")] == [6, 2]


def test_a_preset_is_the_papers_setting_and_single_options_override_it(cli: Cli) -> None:
    assert cli("train", "--preset", "cancer", *TINY, "--quiet", "--out", "run").status == 0
    written = config("run")
    assert written["data"]["partition"] == "full"
    assert written["data"]["clients"] == 8
    plan = written["plan"]
    assert (plan["record_sampling"], plan["noise"], plan["noise_multiplier"], plan["batch_size"]) == (
        "partition",
        "example",
        6.0,
        4,
    )


def test_a_clip_bound_with_an_end_decays_from_one_to_the_other(cli: Cli) -> None:
    assert cli(*CANCER, "--clip", 6, "--clip-end", 2, "--quiet", "--out", "run").status == 0
    assert [row["clip"] for row in metrics("run")] == [6.0, 4.0, 2.0]


def test_the_metrics_of_a_private_run_hold_nothing_from_before_the_noise(cli: Cli) -> None:
    assert cli(*CANCER, "--quiet", "--out", "run").status == 0
    for row in metrics("run"):
        assert set(row) == {"round", "clients", "learning_rate", "clip", "accuracy", "loss", "seconds"}


def test_own_arrays_are_trained_and_evaluated(cli: Cli, own_npz: Path) -> None:
    options = [
        "--method",
        "nonprivate",
        "--clients",
        6,
        "--per-round",
        6,
        "--rounds",
        15,
        "--local-steps",
        5,
        "--lr",
        "0.2",
    ]
    trained = summary(cli("train", "--data", own_npz.name, *options, "--json", "--quiet", "--out", "run"))
    assert trained["accuracy"] > 0.7
    evaluated = summary(cli("evaluate", "run", "--json"))
    assert (evaluated["split"], evaluated["examples"]) == ("validation", 24)
    assert evaluated["accuracy"] == trained["accuracy"]
    assert evaluated["metrics"] == pytest.approx(trained["metrics"])


def test_own_table_is_trained_over_a_dirichlet_partition(cli: Cli) -> None:
    rows = np.random.default_rng(0).normal(size=(90, 3)).round(3)
    with Path("own.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["kind", "a", "b", "label"])
        writer.writerows([*row, "yes" if row.sum() > 0 else "no"] for row in rows)
    options = ["--partition", "dirichlet", "--alpha", "0.3", "--clients", 5, "--per-round", 3, "--rounds", 2]
    outcome = cli("train", "--data", "own.csv", *options, "--local-steps", 2, "--out", "run")
    assert outcome.status == 0
    assert "Dirichlet(0.3" in outcome.stderr
    assert load_tensors("run/model.safetensors")["5.weight"].shape == (2, 32)


def test_a_run_on_an_own_file_is_found_again_from_another_directory(
    cli: Cli, own_npz: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("train", "--data", own_npz.name, *TINY, "--quiet", "--out", "run").status == 0
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert summary(cli("evaluate", "../run", "--json"))["examples"] == 24


def test_a_network_of_ones_own_comes_from_the_current_directory(cli: Cli, own_npz: Path) -> None:
    Path("networks_of_mine.py").write_text(
        "from torch import nn\n\n\n"
        "def small(input_shape, classes, activation):\n"
        "    act = {None: nn.ReLU, 'tanh': nn.Tanh}[activation]\n"
        "    return nn.Sequential(nn.Linear(input_shape[0], 7), act(), nn.Linear(7, classes))\n"
    )
    options = ["--data", own_npz.name, "--model", "networks_of_mine:small", *TINY, "--quiet"]
    assert cli("train", *options, "--out", "run").status == 0
    assert load_tensors("run/model.safetensors")["0.weight"].shape == (7, 4)
    assert cli("train", *options, "--activation", "tanh", "--out", "other").status == 0
    assert not same_model("run", "other")
    assert summary(cli("evaluate", "run", "--json"))["accuracy"] == metrics("run")[-1]["accuracy"]


def test_the_activation_changes_the_network(cli: Cli) -> None:
    for activation in ("relu", "tanh", "sigmoid"):
        assert cli(*CANCER, "--activation", activation, "--quiet", "--out", activation).status == 0
    losses = {metrics(activation)[-1]["loss"] for activation in ("relu", "tanh", "sigmoid")}
    assert len(losses) == 3


def test_evaluations_can_be_rarer_than_rounds(cli: Cli) -> None:
    assert cli(*CANCER, "--rounds", 5, "--evaluate-every", 2, "--quiet", "--out", "run").status == 0
    assert [row["round"] for row in metrics("run") if "accuracy" in row] == [2, 4, 5]


def test_metrics_are_json_for_every_reader_even_when_training_diverges(cli: Cli) -> None:
    assert cli(*CANCER, "--method", "nonprivate", "--lr", "1e30", "--quiet", "--out", "run").status == 0

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    for line in Path("run/metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


# evaluate ------------------------------------------------------------------------------------------------------------


def test_evaluation_of_the_validation_split_is_the_last_rounds_figure(cli: Cli, run: Path) -> None:
    result = summary(cli("evaluate", run, "--json"))
    last, metrics_of_split = metrics(run)[-1], result.pop("metrics")
    assert result == {"split": "validation", "examples": 143, "accuracy": last["accuracy"]}
    assert metrics_of_split["loss"] == pytest.approx(last["loss"])


def test_evaluation_on_training_data_warns_where_the_run_was_private(cli: Cli, run: Path) -> None:
    outcome = cli("evaluate", run, "--split", "train", "--json")
    assert summary(outcome)["examples"] == 426
    assert "no privacy guarantee covers this figure" in " ".join(outcome.stderr.split())
    assert cli(*CANCER, "--method", "nonprivate", "--quiet", "--out", "open").status == 0
    assert "guarantee" not in cli("evaluate", "open", "--split", "train", "--json").stderr


def test_evaluation_shows_a_person_how_accuracy_spreads_over_clients(cli: Cli, run: Path) -> None:
    outcome = cli("evaluate", run, "--per-client")
    assert outcome.status == 0
    for shown in ("accuracy", "client mean", "client min", "client p10", "client median", "client p90", "client max"):
        assert shown in outcome.stderr, shown


def test_evaluation_lists_clients_by_name(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, owners = tuple(f"site {letter}" for letter in "abcdefgh"), np.arange(143) % 8

    def named(*arguments: Any) -> fedcdp.Federation:
        return replace(deal_out(*arguments), names=names, validation_clients=owners)

    monkeypatch.setattr("fedcdp.training.saved_run.deal_out", named)
    outcome = cli("evaluate", run, "--per-client")
    assert all(name in outcome.stdout for name in (*names, "balanced accuracy", "AUROC")), outcome.stdout
    assert "guarantee" not in outcome.stderr  # only validation records were used
    found = summary(cli("evaluate", run, "--per-client", "--json"))
    assert [row["client"] for row in found["clients"]] == list(names)
    assert sum(row["accuracy"] * row["examples"] for row in found["clients"]) == pytest.approx(143 * found["accuracy"])


def test_a_person_reads_the_metrics_of_a_regression(capsys: pytest.CaptureFixture[str]) -> None:
    inputs = torch.linspace(-1, 1, 60).reshape(20, 3)
    data = fedcdp.Dataset(inputs, 500 * inputs.sum(1), task="regression")
    federation = fedcdp.partition(data, clients=2, scheme="iid", validation=data)
    plan = fedcdp.Plan(method="nonprivate", rounds=2, per_round=2, local_steps=1)
    with terminal.training_progress(plan, quiet=False) as progress:
        run = fedcdp.simulate(torch.nn.Linear(3, 1), federation, plan, progress=progress)
    _show_run(run, None)
    shown = " ".join(capsys.readouterr().err.split())
    assert f"round 2/2 MAE {run.scores['mae']:.4g}" in shown
    assert f"validation MAE │ {run.scores['mae']:.4g}" in shown
    assert "accuracy" not in shown
    found = _summary(run, None)
    assert found["accuracy"] is None
    assert found["metrics"] == run.scores


def test_per_client_figures_are_numbers_where_a_class_is_not_held_out(cli: Cli) -> None:
    labels = np.array([0] * 20 + [1] * 20 + [2])
    features = np.random.default_rng(0).normal(size=(41, 4))
    np.savez("own.npz", x=features, y=labels)
    options = ["--clients", 4, "--per-round", 2, "--rounds", 1, "--local-steps", 1, "--quiet", "--out", "run"]
    assert cli("train", "--data", "own.npz", *options).status == 0
    spread = summary(cli("evaluate", "run", "--per-client", "--json"))["per_client"]
    assert all(0 <= value <= 1 for value in spread.values()), spread


def test_an_unfinished_run_is_evaluated_by_its_checkpoint(cli: Cli, run: Path) -> None:
    whole = summary(cli("evaluate", run, "--json"))
    (run / "model.safetensors").unlink()
    assert summary(cli("evaluate", run, "--json")) == whole


# export --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def inputs() -> torch.Tensor:
    return fedcdp.load("cancer", quiet=True).validation.inputs


@pytest.fixture
def answers(run: Path, inputs: torch.Tensor) -> torch.Tensor:
    """What the run's model says, by plain PyTorch."""
    model = build("mlp", (30,), 2)
    model.load_state_dict(load_tensors(run / "model.safetensors"))
    with torch.no_grad():
        return model(inputs)


def test_exported_tensors_load_into_plain_pytorch(cli: Cli, run: Path, inputs: torch.Tensor, answers: torch.Tensor) -> None:
    outcome = cli("export", run, "--to", "model.safetensors")
    assert (outcome.status, outcome.stdout) == (0, "model.safetensors\n")
    model = build("mlp", (30,), 2, seed=5)
    model.load_state_dict(load_tensors("model.safetensors"))
    with torch.no_grad():
        assert torch.equal(model(inputs), answers)


def test_exported_torchscript_answers_alike_for_any_batch(
    cli: Cli, run: Path, inputs: torch.Tensor, answers: torch.Tensor
) -> None:
    assert cli("export", run, "--format", "torchscript", "--to", "model.pt").status == 0
    module = torch.jit.load("model.pt")
    with torch.no_grad():
        torch.testing.assert_close(module(inputs), answers)
        torch.testing.assert_close(module(inputs[:3]), answers[:3])


@pytest.mark.slow
def test_exported_onnx_answers_alike_for_any_batch(cli: Cli, run: Path, inputs: torch.Tensor, answers: torch.Tensor) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    assert cli("export", run, "--format", "onnx", "--to", "model.onnx").status == 0
    model = onnx.load("model.onnx")
    session = ReferenceEvaluator(model)
    name = model.graph.input[0].name
    for count in (1, 7):
        said = session.run(None, {name: inputs[:count].numpy()})[0]
        np.testing.assert_allclose(said, answers[:count].numpy(), rtol=1e-4, atol=1e-5)


def test_exported_metrics_are_a_table_with_one_row_a_round(cli: Cli, run: Path) -> None:
    assert cli("export", run, "--format", "csv", "--to", "metrics.csv").status == 0
    with Path("metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [{name: float(value) for name, value in row.items()} for row in table] == metrics(run)


def test_exported_events_are_what_tensorboard_reads(cli: Cli, run: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert cli("export", run, "--format", "tensorboard", "--to", "events").status == 0
    events = EventAccumulator("events")
    events.Reload()
    found = [(event.step, round(event.value, 5)) for event in events.Scalars("accuracy")]
    assert found == [(row["round"], round(row["accuracy"], 5)) for row in metrics(run)]


@pytest.mark.parametrize(("form", "package"), [("onnx", "onnx"), ("tensorboard", "tensorboard")])
def test_a_format_whose_package_is_missing_names_the_extra(
    cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch, form: str, package: str
) -> None:
    for name in [
        name for name in sys.modules if name.split(".")[0] == package or name.startswith("torch.utils.tensorboard")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # what Python does for a package that cannot be imported
    outcome = cli("export", run, "--format", form, "--to", "out")
    assert outcome.status == 2
    assert outcome.stderr.count("\n") == 1
    assert package in outcome.stderr
    assert install_command("report") in outcome.stderr
    assert not Path("out").exists()


# the program itself --------------------------------------------------------------------------------------------------


def test_the_version_is_printed(cli: Cli) -> None:
    assert cli("--version").stdout == f"fedcdp {fedcdp.__version__}\n"


def test_without_a_command_the_help_names_every_command(cli: Cli) -> None:
    outcome = cli()
    for command in ("train", "evaluate", "export", "demo"):
        assert command in outcome.stdout
