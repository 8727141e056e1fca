"""`fedcdp attack` as a user meets it: what it prints, what it leaves on disk, and what it says to bad input."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedcdp
from fedcdp.attacks import ATTACKS, RECIPES, Leaks
from fedcdp.config.experiment import assemble
from fedcdp.training.prepared import deal_out, load_splits, network_of
from fedcdp.training.saved_run import open_run

CONTRACT = [
    "method", "leak", "attack", "victims", "success_rate", "distance_mean", "distance_median", "psnr_mean",
    "iterations_mean",
]  # fmt: skip
TABLE = ["attack", "--dataset", "cancer", "--clients", "20", "--victims", "4"]
DIGITS = ["attack", "--dataset", "mnist5k", "--victims", "2", "--attack", "cpl", "--iterations", "2"]

Cli = Callable[..., Any]


def refuse(constant: str) -> None:
    pytest.fail(f"{constant} is not JSON")


def summary(outcome: Any) -> dict[str, Any]:
    """The one line of JSON on standard output, by a strict reader."""
    assert outcome.status == 0, outcome.stderr
    assert outcome.stdout.count("\n") == 1, outcome.stdout
    found: dict[str, Any] = json.loads(outcome.stdout, parse_constant=refuse)
    return found


def words(text: str) -> str:
    return " ".join(text.split())


# What it prints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["--method", "nonprivate"],
        ["--method", "fed-cdp", "--leak", "type1"],
        ["--method", "fed-sdp", "--noise-at", "client", "--leak", "type0"],
        ["--method", "dssgd", "--leak", "type1", "--attack", "cpl", "--iterations", "1"],
        ["--attack", "matched-filter", "--releases", "2"],
        ["--attack", "presence"],
        ["--attack", "labels", "--leak", "type1"],
        ["--attack", "averaging", "--iterations", "1", "--releases", "2"],
    ],
    ids=" ".join,
)
def test_json_has_the_promised_keys_first_and_no_number_that_json_lacks(cli: Cli, options: list[str]) -> None:
    outcome = cli(*TABLE, *options, "--json")
    row = summary(outcome)
    assert list(row)[: len(CONTRACT)] == CONTRACT
    assert (row["dataset"], row["network"], row["victims"]) == ("cancer", "mlp", 4)
    assert outcome.stderr == ""
    assert row["tried"][0]["attack"] in ATTACKS
    assert all("success_rate" in each for each in row["tried"])


def test_an_active_server_says_what_it_assumes(cli: Cli) -> None:
    crafted = [*TABLE, "--method", "nonprivate", "--leak", "type0"]
    row = summary(cli(*crafted, "--attack", "trap-weights", "--json"))
    assert list(row)[: len(CONTRACT)] == CONTRACT
    assert (row["attack"], row["bins"], row["changed_network"]) == ("trap-weights", 64, False)
    shown = words(cli(*crafted, "--attack", "fishing", "--local-steps", "1").stdout)
    assert "active server" in shown
    assert "singled out" in shown
    refused = cli(*TABLE, "--attack", "imprint")
    assert refused.status == 2
    assert "imprint is an attack by the server, which reads updates: use leak type0 or type1" in words(refused.stderr)


def test_a_table_is_read_without_privacy_and_not_with_fed_cdp(cli: Cli) -> None:
    for method, exact in (("nonprivate", 1), ("fed-cdp", 0)):
        row = summary(cli(*TABLE, "--method", method, "--json"))
        assert (row["method"], row["leak"], row["attack"], row["success_rate"]) == (method, "type2", "analytic", exact)


def test_noise_at_the_server_and_at_the_client_are_different_rows(cli: Cli) -> None:
    for place, exact in (("server", 1), ("client", 0)):
        options = ["--method", "fed-sdp", "--noise-at", place, "--batch-size", 1, "--record-sampling", "fixed"]
        for leak in ("type1", "type0"):
            assert summary(cli(*TABLE, *options, "--leak", leak, "--json"))["success_rate"] == exact, (place, leak)


@pytest.mark.slow
def test_images_are_attacked_on_the_network_that_the_authors_attack_unless_another_is_named(cli: Cli) -> None:
    assert summary(cli(*DIGITS, "--method", "nonprivate", "--json"))["network"] == "cpl"
    paper = summary(cli(*DIGITS, "--network", "paper", "--json"))
    assert (paper["network"], paper["visible_coordinates"], paper["coordinates"]) == ("cnn", 676, 784)
    assert summary(cli(*DIGITS, "--model", "mlp", "--json"))["network"] == "mlp"


def test_the_command_gives_what_python_gives(cli: Cli) -> None:
    row = summary(cli(*TABLE, "--method", "fed-cdp", "--noise-multiplier", "0.01", "--leak", "type1", "--seed", 3, "--json"))
    same = assemble({
        "data": {"dataset": "cancer", "clients": 20}, "plan": {"method": "fed-cdp", "noise_multiplier": 0.01, "seed": 3}
    })  # fmt: skip
    splits = load_splits(same, quiet=True)
    found = fedcdp.attack(
        same.plan, model=network_of(same, splits), federation=deal_out(same, splits), leak="type1", victims=4
    )
    for name, value in found.summary().items():
        if name != "seconds":
            assert row[name] == value, name


@pytest.mark.parametrize("columns", ["80", "200"])
def test_a_person_reads_a_table_with_what_knowing_nothing_scores(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    outcome = cli(*TABLE, "--method", "nonprivate")
    assert outcome.status == 0
    for shown in (
        "nonprivate · type2 · analytic", "cancer, mlp", "1 local step, 1 release, no noise", "exact", "the attack", "100 %",
        "black", "dataset mean", "class mean", "solved for 4 of 4", "labels inferred",
    ):  # fmt: skip
        assert shown in outcome.stdout, shown
    assert "…" not in outcome.stdout
    assert "recognisable" not in outcome.stdout  # of a table
    assert words(outcome.stderr).startswith("setting: cancer, 20 clients × 426 records, nonprivate, ")
    noisy = cli(*TABLE, "--method", "fed-cdp", "--releases", 4)
    assert "4 releases, noise of deviation 12" in words(noisy.stdout)


def test_a_person_reads_the_filters_figures(cli: Cli) -> None:
    shown = words(cli(*TABLE, "--attack", "matched-filter", "--noise-multiplier", "0.5").stdout)
    for part in ("presence", "AUC", "(99 %:", "predicted by the formula", "among 144 candidates"):
        assert part in shown, part


def test_a_person_sees_every_tensor(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcdp.attacks import portfolio

    monkeypatch.setattr(portfolio, "ONE_TENSOR", RECIPES["cpl"].but(iterations=1))
    shown = words(cli(*TABLE, "--attack", "per-layer").stdout)
    for part in ("tensors without noise", "none", "1.weight", "5.bias", "Each tensor attacked alone"):
        assert part in shown, part


def test_quiet_is_silent_and_json_is_not_polluted_by_progress(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = cli(*TABLE, "--quiet")
    assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert summary(cli(*DIGITS, "--method", "nonprivate", "--json"))["attack"] == "cpl"


def test_a_terminal_shows_progress_on_standard_error(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from fedcdp.cli import terminal

    monkeypatch.setattr(terminal, "console", Console(stderr=True, force_terminal=True, width=80))
    outcome = cli(*TABLE, "--method", "nonprivate", "--json")
    assert json.loads(outcome.stdout)["success_rate"] == 1
    assert "attack" in outcome.stderr


def test_help_names_every_attack_and_what_is_read(cli: Cli) -> None:
    outcome = cli("attack", "--help-all")
    assert outcome.status == 0
    shown = words(outcome.stdout)
    for name in (*ATTACKS, "type0|type1|type2", "--victims", "--network", "--steps", "--releases", "--run", "--json"):
        assert name in shown, name
    assert shown.index("--leak") < shown.index("--noise-multiplier")  # its own options come first


# What it leaves on disk -----------------------------------------------------------------------------------------------


def test_results_go_where_they_are_asked_for(cli: Cli) -> None:
    outcome = cli(*DIGITS, "--method", "nonprivate", "--out", "new/place")
    assert outcome.status == 0
    assert "Figures, arrays and pictures are in new/place" in words(outcome.stderr)
    assert {path.name for path in Path("new/place").iterdir()} == {"summary.json", "reconstructions.npz", "grid.png"}
    stored = json.loads(Path("new/place/summary.json").read_text(), parse_constant=refuse)
    assert list(stored)[: len(CONTRACT)] == CONTRACT
    assert (stored["dataset"], stored["network"], stored["attack"]) == ("mnist5k", "cpl", "cpl")
    with np.load("new/place/reconstructions.npz", allow_pickle=False) as arrays:
        assert arrays["original"].shape == arrays["reconstruction"].shape == (2, 1, 1, 28, 28)
        mse = ((np.clip(arrays["reconstruction"], 0, 1) - arrays["original"]) ** 2).mean()
    assert stored["distance_mean"] == pytest.approx(float(mse), rel=1e-4)
    with Image.open("new/place/grid.png") as picture:
        picture.verify()


def test_what_is_printed_is_what_is_kept_and_again_over_the_old(cli: Cli) -> None:
    for _ in range(2):
        row = summary(cli(*TABLE, "--method", "nonprivate", "--out", "mine", "--json"))
        assert json.loads(Path("mine/summary.json").read_text()) == row
        assert {path.name for path in Path("mine").iterdir()} == {"summary.json", "reconstructions.npz", "rows.csv"}


def test_without_out_nothing_is_written(cli: Cli, workplace: Path) -> None:
    assert cli(*TABLE).status == 0
    assert list(workplace.iterdir()) == []


# Runs -----------------------------------------------------------------------------------------------------------------


HEAD = ["--dataset", "cancer", "--clients", 6, "--model", "linear", "--rounds", 3, "--per-round", 6, "--local-steps", 1,
        "--batch-size", 30, "--record-sampling", "partition", "--clip", "0.25", "--noise-multiplier", "0.3"]  # fmt: skip


@pytest.mark.slow
def test_a_plan_with_a_linear_head_is_read_in_all_its_rounds(cli: Cli) -> None:
    for leak, examples in (("type2", 5), ("type0", 60)):
        row = summary(cli("attack", *HEAD, "--victims", 5 if leak == "type2" else 2, "--leak", leak, "--json"))
        assert (row["attack"], row["source"], row["releases_mean"]) == ("linear-head", "a training of the plan", 3)
        assert row["examples"] >= examples
    shown = words(cli("attack", *HEAD, "--victims", 5, "--noise", "batch").stdout)
    for part in (
        "observed in",
        "a training of the plan: 3 releases",
        "recovered with an error of",
        "likeliest of",
        "tried",
        "linear-head:",
    ):
        assert part in shown, part


@pytest.mark.parametrize(("noise", "source"), [("seeded", "replayed from its seed"), ("secure", "a fresh training")])
def test_a_run_with_a_linear_head_is_replayed_or_trained_afresh(cli: Cli, noise: str, source: str) -> None:
    more = ["--secure-noise"] if noise == "secure" else []
    assert cli("train", *HEAD, *more, "--out", "head", "--quiet").status == 0
    row = summary(cli("attack", "--run", "head", "--victims", 5, "--json"))
    assert (row["attack"], row["releases_mean"]) == ("linear-head", 3)
    assert source in row["source"]
    assert source in words(cli("attack", "--run", "head", "--victims", 5).stdout)


def test_a_run_is_attacked_at_its_weights_and_keeps_the_result(cli: Cli, run: Path) -> None:
    row = summary(cli("attack", "--run", run, "--victims", 5, "--leak", "type2", "--json"))
    found = fedcdp.attack(open_run(run), victims=5)
    assert isinstance(found, Leaks)
    assert {**found.summary(), "seconds": 0} == {name: row[name] for name in found.summary()} | {"seconds": 0}
    kept = run / "attacks" / "type2-best"
    assert json.loads((kept / "summary.json").read_text()) == row
    assert summary(cli("evaluate", run, "--json"))["examples"] == 143  # the run itself is as it was


def test_membership_of_a_run(cli: Cli, run: Path) -> None:
    row = summary(cli("attack", "--run", run, "--attack", "membership", "--json"))
    assert list(row)[: len(CONTRACT)] == CONTRACT
    assert (row["method"], row["leak"], row["attack"], row["victims"]) == ("fed-cdp", "model", "membership", 426)
    assert row["auc_interval_99"][0] < row["auc"] < row["auc_interval_99"][1]
    assert (run / "attacks" / "model-membership" / "summary.json").exists()
    shown = words(cli("attack", "--run", run, "--attack", "membership").stdout)
    for part in ("fed-cdp · model · membership", "426, 143 others", "AUC", "advantage over guessing", "1 % false positives"):
        assert part in shown, part


def test_lira_trains_shadow_federations_of_a_run(cli: Cli, run: Path) -> None:
    row = summary(cli("attack", "--run", run, "--attack", "lira", "--shadows", 8, "--victims", 40, "--json"))
    assert list(row)[: len(CONTRACT)] == CONTRACT
    assert (row["method"], row["leak"], row["attack"], row["victims"]) == ("fed-cdp", "model", "lira", 40)
    assert row["auc_interval_99"][0] <= row["auc"] <= row["auc_interval_99"][1]
    assert row["epsilon"] > 0
    assert json.loads((run / "attacks" / "model-lira" / "summary.json").read_text())["roc"] == row["roc"]
    shown = words(cli("attack", "--run", run, "--attack", "lira", "--shadows", 8, "--victims", 40).stdout)
    for part in ("fed-cdp · model · lira", "membership", "8, each without", "one threshold, no shadows", "final model"):
        assert part in shown, part


def test_a_run_is_kept_elsewhere_if_that_is_asked_for(cli: Cli, run: Path) -> None:
    assert cli("attack", "--run", run, "--victims", 3, "--out", "elsewhere", "--quiet").status == 0
    assert Path("elsewhere/summary.json").exists()
    assert not (run / "attacks").exists()


def test_an_attack_on_a_round_trains_up_to_it(cli: Cli) -> None:
    trained = ["--method", "nonprivate", "--per-round", 4, "--local-steps", 2, "--lr", "0.5", "--attack", "matched-filter"]
    first, last = (summary(cli(*TABLE, *trained, "--round", number, "--json")) for number in (0, 2))
    assert (first["round"], last["round"]) == (0, 2)
    assert first["distance_between_worlds"] != last["distance_between_worlds"]


def test_own_data_and_an_own_network_are_attacked(cli: Cli, own_npz: Path) -> None:
    Path("mine.py").write_text(
        "from torch import nn\n\n\n"
        "def dense(input_shape, classes):\n"
        "    return nn.Sequential(nn.Linear(input_shape[0], 9), nn.ReLU(), nn.Linear(9, classes))\n"
    )
    options = ["--data", own_npz.name, "--model", "mine:dense", "--method", "nonprivate", "--victims", 5, "--json"]
    row = summary(cli("attack", *options))
    assert (row["success_rate"], row["network"]) == (1, "mine:dense")
    assert row["dataset"].endswith("own.npz")
    assert summary(cli("attack", *options, "--network", "paper"))["network"] == "mlp"


def test_own_images_are_attacked_and_drawn(cli: Cli) -> None:
    generator = np.random.default_rng(0)
    images, labels = generator.uniform(-1, 1, (40, 3, 8, 8)), np.arange(40) % 4
    np.savez("colours.npz", x=images, y=labels)
    Path("flat_network.py").write_text(
        "from torch import nn\n\n\n"
        "def flat(input_shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(192, classes))\n"
    )
    options = ["--data", "colours.npz", "--model", "flat_network:flat", "--method", "nonprivate", "--victims", 3, "--json"]
    row = summary(cli("attack", *options, "--attack", "analytic", "--out", "out"))
    assert row["success_rate"] == 1
    assert Path("out/grid.png").exists()


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(cli: Cli, workplace: Path) -> Callable[..., str]:
    """Run a command that must be refused with one line and exit status 2, and leave nothing behind; the line."""

    def call(*arguments: object) -> str:
        before = sorted(workplace.rglob("*"))
        outcome = cli(*arguments)
        assert outcome.status == 2, outcome
        assert outcome.stdout == ""
        assert outcome.stderr.startswith("fedcdp: "), outcome.stderr
        assert outcome.stderr.count("\n") == 1, outcome.stderr
        assert [path for path in sorted(workplace.rglob("*")) if "__pycache__" not in str(path)] == before
        return str(outcome.stderr)

    return call


REFUSED: list[tuple[list[object], str]] = [
    (["--leak", "type9"], "leak: 'type9' is not one of type0, type1, type2"),
    (["--attack", "nosuch"], "attack: 'nosuch' is not one of best, "),
    (["--victims", 0], "victims: 0"),
    (["--victims", -3], "victims: -3"),
    (["--victims", "many"], "'--victims': 'many'"),
    (["--victims", 1000], "victims: 1000 is not allowed; type2 has at most"),
    (["--victims", 21, "--leak", "type1"], "in a federation of 20 clients"),
    (["--victims", 1, "--attack", "matched-filter"], "victims: 1"),
    (["--network", "nosuch"], "model: 'nosuch' is not one of"),
    (["--network", "cpl"], "cpl needs images"),
    (["--network", "nosuch:make"], "nosuch"),
    (["--model", "cnn"], "cnn needs images"),
    (["--attack", "cpl", "--labels", "nosuch"], "--labels: 'nosuch' is not one of gradient"),
    (["--attack", "cpl", "--seed-image", "nosuch"], "--seed-image: 'nosuch' is not one of pattern"),
    (["--attack", "cpl", "--iterations", 0], "iterations: 0"),
    (["--attack", "cpl", "--restarts", 0], "restarts: 0"),
    (["--attack", "analytic", "--iterations", 5], "--iterations: only for --attack cpl, "),
    (["--attack", "matched-filter", "--seed-image", "zeros"], "--seed-image: only for --attack cpl, "),
    (["--iterations", 5, "--restarts", 2], "--iterations, --restarts: only for --attack cpl, "),
    (["--attack", "membership"], "attack: membership needs a trained model; give a run"),
    (["--shadows", 8], "--shadows: only for --attack lira"),
    (["--attack", "lira", "--shadows", 2], "shadows: 2 is not allowed"),
    (["--round", -1], "at_round: -1"),
    (["--round", 3], "at_round: 3 is not allowed; the plan has rounds 0 to 2"),
    (["--step", -1], "step: -1"),
    (["--step", 100], "step: 100 is not allowed; the plan has local steps 0 to 99"),
    (["--step", 1, "--leak", "type1"], "step: 1 is for type2"),
    (["--steps", 0, "--leak", "type1"], "steps: 0"),
    (["--steps", 101, "--leak", "type1"], "steps: 101"),
    (["--steps", 2], "steps: 2 is for type0 and type1"),
    (["--releases", 0], "releases: 0"),
    (["--exact-mse", 0], "exact_mse: 0"),
    (["--exact-mse", "nan"], "exact_mse: nan"),
    (["--candidates", 1], "candidates: 1"),
    (["--method", "nosuch"], "method: 'nosuch'"),
    (["--dataset", "nosuch"], "'nosuch'"),
    (["--preset", "nosuch"], "preset: 'nosuch'"),
    (["--data", "own.npz"], "not both"),
    (["--device", "nosuch"], "device: nosuch"),
    (["--nosuch"], "--nosuch"),
]


@pytest.mark.parametrize(
    ("options", "named"), REFUSED, ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else ""
)
def test_bad_input_is_refused_in_one_line(refused: Callable[..., str], options: list[object], named: str) -> None:
    assert named in refused(*TABLE, *options)


def test_the_closed_form_needs_a_dense_network(refused: Callable[..., str]) -> None:
    for network in ("cpl", "paper"):
        line = refused("attack", "--dataset", "mnist5k", "--victims", 2, "--attack", "analytic", "--network", network)
        assert "analytic needs a network whose first layer is dense; this one starts with Conv2d" in line


def test_a_network_that_cannot_take_the_data_is_refused(refused: Callable[..., str], workplace: Path) -> None:
    (workplace / "narrow_network.py").write_text("from torch import nn\n\n\ndef narrow():\n    return nn.Linear(7, 2)\n")
    assert "the network fails on" in refused(*TABLE, "--network", "narrow_network:narrow")


def test_data_that_are_not_there_are_refused(refused: Callable[..., str]) -> None:
    assert "mnist needs" in refused("attack", "--dataset", "mnist", "--victims", 2)
    assert "nosuch.npz" in refused("attack", "--data", "nosuch.npz", "--victims", 2)


def test_a_public_split_that_is_too_small_for_the_prior_is_refused(refused: Callable[..., str], own_npz: Path) -> None:
    assert "public: 24 examples are too few" in refused(
        "attack", "--data", own_npz.name, "--attack", "averaging", "--victims", 2
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--network", "cpl"], "--run: the run has its own network and rounds; leave out --network and --round"),
        (["--round", 1], "leave out --network and --round"),
        (["--dataset", "mnist5k"], "dataset: the run in run was started with cancer, not mnist5k"),
        (["--method", "nonprivate"], "method: the run in run was started with fed-cdp, not nonprivate"),
        (["--victims", 1000], "victims: 1000"),
        (["--steps", 3, "--leak", "type1"], "steps: 3 is not allowed; the plan has 1 to 2"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_a_run_cannot_be_asked_is_refused(
    refused: Callable[..., str], run: Path, options: list[object], named: str
) -> None:
    assert named in refused("attack", "--run", run.name, *options)


def test_a_directory_that_is_no_run_is_refused(refused: Callable[..., str], run: Path) -> None:
    assert "nosuch is not a run directory" in refused("attack", "--run", "nosuch")
    (run / "model.safetensors").unlink()
    (run / "checkpoint.safetensors").unlink()
    assert "not one round is done" in refused("attack", "--run", run)


@pytest.mark.parametrize("out", ["file", "file/below", "/dev/null", "n" * 300])
def test_an_out_that_cannot_be_is_refused_before_anything_is_computed(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    from fedcdp import attacks

    Path("file").write_text("precious")
    monkeypatch.setattr(attacks, "attack", lambda *_, **__: pytest.fail("attacked all the same"))
    assert f"--out: {out} cannot be written" in refused(*TABLE, "--out", out)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_out_that_may_not_be_written_is_refused(refused: Callable[..., str], workplace: Path) -> None:
    locked = workplace / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    try:
        assert "cannot be written" in refused(*TABLE, "--out", "locked/results")
    finally:
        locked.chmod(0o700)


@pytest.mark.parametrize(("method", "rate"), [("nonprivate", "1"), ("fed-cdp", "1e30")])
def test_a_run_that_diverged_is_refused(cli: Cli, refused: Callable[..., str], method: str, rate: str) -> None:
    options = ["--dataset", "cancer", "--clients", 8, "--per-round", 4, "--local-steps", 2, "--rounds", 2, "--quiet"]
    assert cli("train", *options, "--method", method, "--lr", "1e30", "--server-lr", rate, "--out", "run").status == 0
    for name in ("analytic", "matched-filter"):
        assert "model: its outputs are not finite" in refused("attack", "--run", "run", "--victims", 4, "--attack", name)


@pytest.mark.slow
def test_ctrl_c_gives_one_line(start: Callable[..., Any]) -> None:
    process = start(
        "-c",
        "import fedcdp.attacks.reconstruct as r\n"
        "first = r.reconstruct\n"
        "def told(*a, **k):\n"
        "    print('at work', flush=True)\n"
        "    return first(*a, **k)\n"
        "import fedcdp.attacks.portfolio as attempts\n"
        "attempts.reconstruct = told\n"
        "import sys\n"
        "sys.argv = ['fedcdp', 'attack', '--dataset', 'cancer', '--attack', 'dlg', '--iterations', '9999']\n"
        "from fedcdp.cli import main\n"
        "main()\n",
    )
    assert process.stdout.readline() == "at work\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (1, "")
    *before, last = stderr.splitlines()
    assert last == "fedcdp: stopped"
    assert all(line.startswith("setting: ") for line in before)  # if it had begun


# Tables ---------------------------------------------------------------------------------------------------------------


def test_rows_of_a_table_are_scored_by_cells_beside_guesses(cli: Cli) -> None:
    row = summary(cli(*TABLE, "--method", "nonprivate", "--attack", "tableak", "--json"))
    assert (row["cells_right"], row["rows_right"], row["rows_solved"]) == (1.0, 1.0, 1.0)
    assert set(row["cell_baselines"]) == {"mode", "marginals", "public_rows"}
    assert len(row["columns_right"]) == 30
    shown = cli(*TABLE, "--method", "nonprivate", "--attack", "tableak").stdout
    assert "cells right" in shown
    assert "public rows" in shown
    assert "solved for exactly" in shown


def test_the_size_of_the_ensemble_is_an_option(cli: Cli) -> None:
    options = ("--attack", "tableak-search", "--restarts", "2", "--iterations", "5")
    row = summary(cli(*TABLE, "--method", "nonprivate", *options, "--json"))
    assert (row["attack"], row["members"], row["iterations_mean"], row["rows_solved"]) == ("tableak-search", 2, 5, 0)
