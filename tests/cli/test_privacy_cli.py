"""Accounting as a user meets it: before training, as a budget, in the progress, from the ledger, after a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedcdp
from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.statement import Privacy

Cli = Callable[..., Any]
SMALL = ["--dataset", "cancer", "--clients", 20, "--per-round", 4, "--local-steps", 3]


def answer(outcome: Any) -> dict[str, Any]:
    assert outcome.status == 0, outcome.stderr
    found: dict[str, Any] = json.loads(outcome.stdout)
    return found


def epsilon(rows: list[dict[str, Any]], adversary: str, unit: str = "record", figure: str = "epsilon") -> float:
    return next(r[figure] for r in rows if (r["adversary"], r["unit"], r["relation"]) == (adversary, unit, "zero-out"))


# account and calibrate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "printed"), [("mnist", 0.8227), ("cifar10", 0.8227), ("lfw", 0.6356), ("adult", 0.2761), ("cancer", 0.1469)]
)
def test_the_papers_table_by_its_presets(cli: Cli, dataset: str, printed: float) -> None:
    found = answer(cli("account", "--preset", dataset, "--method", "fed-cdp", "--mode", "paper", "--json"))
    assert found["mode"] == "paper"
    assert epsilon(found["rows"], "model") == pytest.approx(printed, abs=1.01e-4)


def test_a_preset_is_accounted_tightly_with_the_person_behind_the_copies(cli: Cli) -> None:
    rows = answer(cli("account", "--preset", "mnist", "--json"))["rows"]
    assert epsilon(rows, "server") == pytest.approx(1.80, rel=0.02)
    assert epsilon(rows, "server", "unique") == pytest.approx(6.04, rel=0.02)
    assert epsilon(rows, "example") == pytest.approx(4.59, rel=0.02)


def test_single_options_override_a_preset(cli: Cli) -> None:
    options = ["--record-sampling", "poisson", "--copies", 1, "--layers", 1, "--records", 500]
    rows = answer(cli("account", "--preset", "mnist", *options, "--json"))["rows"]
    assert epsilon(rows, "server") < 0.077
    assert not [row for row in rows if row["unit"] == "unique"]


def test_an_infinite_epsilon_is_a_word_in_json_and_a_sign_for_people(cli: Cli) -> None:
    rows = answer(cli("account", "--dataset", "cancer", "--method", "dssgd", "--json"))["rows"]
    assert {row["epsilon"] for row in rows} == {"inf"}
    assert "∞" in cli("account", "--dataset", "cancer", "--method", "dssgd").stdout


def test_the_classical_methods_are_shown_on_request(cli: Cli) -> None:
    found = answer(cli("account", "--preset", "mnist", "--compare", "--json"))["compare"]
    assert found["moments accountant"] == pytest.approx(0.8227, abs=1e-4)
    assert found["base composition"] == pytest.approx(123.457, rel=1e-4)


def test_calibration_gives_the_noise_for_a_target(cli: Cli) -> None:
    options = ["--preset", "mnist", "--target-epsilon", 4, "--adversary", "example", "--json"]
    found = answer(cli("calibrate", *options))
    assert found["noise_multiplier"] == pytest.approx(6.74, rel=0.02)
    assert found["epsilon"] <= 4


@pytest.mark.slow
def test_calibration_may_choose_the_slots(cli: Cli) -> None:
    options = [*SMALL, "--rounds", 1, "--local-steps", 1, "--partition", "iid", "--records", 20]
    found = answer(cli("calibrate", *options, "--target-epsilon", 3, "--slots", "auto", "--json"))
    assert found["slots"] >= 4
    assert found["epsilon"] <= 3


@pytest.mark.parametrize("command", [
    ["account", "--mode", "exact"], ["account", "--mode", "rdp", "--dataset", "mnist", "--noise-multiplier", "6"],
    ["account", "--layers", "0"], ["account", "--copies", "5000"], ["account", "--dataset", "nosuch"],
    ["account", "--model", "some:net", "--noise-multiplier", "6"], ["account", "--records", "0"],
    ["account", "--run", "nowhere"], ["account", "--clip", "median"],
    ["account", "--secure-aggregation", "--client-sampling", "poisson"], ["calibrate"],
    ["calibrate", "--target-epsilon", "0"], ["calibrate", "--target-epsilon", "1", "--adversary", "nobody"],
    ["calibrate", "--target-epsilon", "1", "--mode", "paper"], ["calibrate", "--target-epsilon", "1", "--method", "dssgd"],
    ["train", "--max-epsilon", "1e-9", "--noise-multiplier", "6", "--dataset", "cancer", "--out", "new"],
    ["train", "--slots", "auto", "--out", "new"],
    ["train", "--target-epsilon", "1", "--method", "nonprivate", "--dataset", "cancer", "--out", "new"],
    ["train", "--max-epsilon", "1", "--method", "nonprivate", "--dataset", "cancer", "--out", "new"],
], ids=" ".join)  # fmt: skip
def test_what_cannot_be_accounted_is_refused_in_one_line(cli: Cli, command: list[str]) -> None:
    outcome = cli(*command)
    assert outcome.status == 2
    assert outcome.stderr.startswith("fedcdp: ")
    assert outcome.stderr.strip().count("\n") == 0
    assert not Path("new").exists()


# training within a budget --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["partition", pytest.param("poisson", marks=pytest.mark.slow)])
def test_training_to_a_target_ends_within_it(cli: Cli, sampling: str) -> None:
    options = [*SMALL, "--rounds", 3, "--record-sampling", sampling, "--target-epsilon", 2, "--json", "--quiet"]
    found = answer(cli("train", *options, "--out", "run"))
    assert 1.9 < epsilon(found["epsilon"], "server") <= 2


def test_a_budget_ends_training_before_the_release_that_would_exceed_it(cli: Cli) -> None:
    options = [*SMALL, "--rounds", 30, "--noise-multiplier", 5, "--record-sampling", "partition", "--quiet"]
    found = answer(cli("train", *options, "--max-epsilon", 1.5, "--json", "--out", "run"))
    assert 0 < found["rounds"] < 30
    assert epsilon(found["epsilon"], "server") <= 1.5
    assert Path("run/model.safetensors").exists()
    again = answer(cli("train", "--resume", "--json", "--quiet", "--out", "run"))
    assert again["rounds"] == found["rounds"]
    plan = fedcdp.Plan(**Ledger.open("run/ledger.jsonl").plan)
    one_more = plan.privacy(fedcdp.partition(fedcdp.load("cancer"), clients=20, scheme="full"), rounds=found["rounds"] + 1)
    assert one_more.row("server").epsilon > 1.5


def test_progress_shows_epsilon_and_the_seed_is_warned_about(cli: Cli) -> None:
    outcome = cli("train", *SMALL, "--rounds", 2, "--out", "run")
    setting, first, *_ = outcome.stderr.splitlines()
    assert setting.startswith("setting: cancer, 20 clients")
    assert "ε " in first
    assert "anyone who knows the seed can subtract it" in " ".join(outcome.stderr.split())
    assert Ledger.open("run/ledger.jsonl").noise == "seeded"
    outcome = cli("train", *SMALL, "--rounds", 2, "--secure-noise", "--out", "secret")
    assert "can subtract it" not in " ".join(outcome.stderr.split())
    assert Ledger.open("secret/ledger.jsonl").noise == "secure"


def test_what_is_drawn_does_not_come_from_the_seed_under_secure_noise(cli: Cli) -> None:
    for run in ("one", "other"):
        cli("train", *SMALL, "--rounds", 3, "--record-sampling", "partition", "--secure-noise", "--quiet", "--out", run)
    chosen = [[charge.clients.tolist() for charge in Ledger.open(f"{run}/ledger.jsonl").charges] for run in ("one", "other")]
    assert chosen[0] != chosen[1]
    assert "seed" not in Ledger.open("one/ledger.jsonl").plan


def test_a_run_is_accounted_by_its_ledger_alone(cli: Cli) -> None:
    trained = answer(cli("train", *SMALL, "--rounds", 3, "--json", "--quiet", "--out", "run"))
    for name in ("checkpoint.safetensors", "model.safetensors", "metrics.jsonl"):
        Path("run", name).unlink()
    rows = answer(cli("account", "--run", "run", "--json"))["rows"]
    assert rows == trained["epsilon"]
    assert 0 < epsilon(rows, "server", figure="epsilon_used") <= epsilon(rows, "server", figure="epsilon_worst")


def test_what_was_used_is_what_the_busiest_client_did(cli: Cli) -> None:
    cli("train", *SMALL, "--rounds", 6, "--record-sampling", "partition", "--quiet", "--out", "run")
    counts = Ledger.open("run/ledger.jsonl").participations()
    assert counts.sum() == 6 * 4
    rows = answer(cli("account", "--run", "run", "--json"))["rows"]
    from fedcdp.accounting.pld import gaussian_epsilon

    z = 6 * np.sqrt(4 / 3) / np.sqrt(counts.max())
    assert epsilon(rows, "server", figure="epsilon_used") == pytest.approx(gaussian_epsilon(z, 1e-5), rel=1e-6)


def test_a_tampered_ledger_stops_a_run_from_going_on(cli: Cli) -> None:
    cli("train", *SMALL, "--rounds", 3, "--quiet", "--out", "run")
    ledger = Path("run/ledger.jsonl")
    ledger.write_text(ledger.read_text().replace('"round":1', '"round":2', 1))
    for command in (["train", "--resume", "--quiet", "--out", "run"], ["account", "--run", "run"]):
        outcome = cli(*command)
        assert outcome.status == 2
        assert "ledger.jsonl, line 3" in outcome.stderr


# from Python ---------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_it_costs_before_a_gradient_is_computed() -> None:
    federation = fedcdp.partition(fedcdp.load("cancer"), clients=20, scheme="full")
    privacy = fedcdp.Plan(local_steps=5).privacy(federation, rounds=3, per_round=4)
    assert isinstance(privacy, Privacy)
    assert privacy.row("server", "unique").epsilon > privacy.row("server").epsilon > 0


def test_a_run_in_memory_knows_what_it_has_spent() -> None:
    federation = fedcdp.partition(fedcdp.load("cancer"), clients=20, scheme="full")
    plan = fedcdp.Plan(local_steps=2, record_sampling="partition")
    run = fedcdp.simulate(torch.nn.Linear(30, 2), federation, plan, rounds=4, per_round=5)
    assert run.participations.sum() == 20
    row = run.privacy().row("server")
    assert row.epsilon_used is not None
    assert 0 < row.epsilon_used <= row.epsilon_worst


# without dp-accounting -----------------------------------------------------------------------------------------------

WHERE_ABSENT = "import sys; sys.modules['dp_accounting'] = None; from fedcdp.cli import main; main()"
NEED_IT = ("pld", "rdp", "paper", "statement", "calibrate")  # the modules that cannot be imported without it
REFUSED = [["account"], ["train", "--max-epsilon", "1", "--dataset", "cancer", "--out", "new"]]


def without_accounting(monkeypatch: pytest.MonkeyPatch, cli: Cli, *arguments: object) -> Any:
    """Run a command in this process as where dp-accounting is not installed."""
    with monkeypatch.context() as hidden:
        for name in [each for each in sys.modules if each.partition(".")[0] == "dp_accounting"]:
            hidden.delitem(sys.modules, name)
        hidden.setitem(sys.modules, "dp_accounting", None)
        for name in NEED_IT:
            hidden.delitem(sys.modules, f"fedcdp.accounting.{name}", raising=False)
            hidden.delattr(fedcdp.accounting, name, raising=False)
        return cli(*arguments)


def in_a_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WHERE_ABSENT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_ledger_without_accounting_is_accounted_elsewhere(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [*SMALL, "--rounds", 2, "--record-sampling", "partition", "--json", "--quiet"]
    assert answer(without_accounting(monkeypatch, cli, "train", *options, "--out", "run"))["epsilon"] is None
    assert epsilon(answer(cli("account", "--run", "run", "--json"))["rows"], "server") > 0


@pytest.mark.parametrize("command", REFUSED)
def test_what_needs_dp_accounting_says_so_in_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    refused = without_accounting(monkeypatch, cli, *command)
    assert refused.status == 2
    assert "dp-accounting" in refused.stderr
    assert refused.stderr.strip().count("\n") == 0


@pytest.mark.slow
def test_a_process_trains_without_dp_accounting(cli: Cli) -> None:
    trained = in_a_process("train", *SMALL, "--rounds", 2, "--json", "--quiet", "--out", "run")
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["epsilon"] is None
    assert epsilon(answer(cli("account", "--run", "run", "--json"))["rows"], "server") > 0


@pytest.mark.slow
@pytest.mark.parametrize("command", REFUSED)
def test_a_process_that_needs_dp_accounting_says_so(command: list[str]) -> None:
    refused = in_a_process(*command)
    assert refused.returncode == 2
    assert "dp-accounting" in refused.stderr
    assert refused.stderr.strip().count("\n") == 0


# audit ---------------------------------------------------------------------------------------------------------------


def test_an_audit_stays_below_what_is_guaranteed_and_says_both(cli: Cli) -> None:
    options = ["--noise-multiplier", 2, "--record-sampling", "partition", "--local-steps", 1, "--batch-size", 1]
    options += ["--per-round", 10, "--adversary", "example", "--trials", 20_000]
    found = answer(cli("audit", *options, "--json"))
    assert 0.5 < found["epsilon_lower"] < found["epsilon_guaranteed"]
    assert found["epsilon_guaranteed"] == pytest.approx(4.0, rel=0.1)
    assert "guaranteed: at most" in cli("audit", *options).stdout


def test_an_audit_of_what_is_raw_finds_much_and_is_promised_nothing(cli: Cli) -> None:
    options = ["--method", "nonprivate", "--record-sampling", "partition", "--local-steps", 1, "--trials", 5000]
    found = answer(cli("audit", *options, "--json"))
    assert found["epsilon_lower"] > 5
    assert found["epsilon_guaranteed"] == "inf"


ONE_RUN = ["--dataset", "cancer", "--partition", "iid", "--clients", 10, "--per-round", 10, "--rounds", 2]
ONE_RUN += ["--local-steps", 2]


def test_an_audit_of_one_run_bounds_every_adversary(cli: Cli) -> None:
    options = [*ONE_RUN, "--one-run", "--canaries", 100, "--records", 40]
    found = answer(cli("audit", *options, "--json"))
    assert [row["adversary"] for row in found["rows"]] == ["example", "update", "server", "model"]
    for row in found["rows"]:
        assert (row["kind"], row["canaries"], row["confidence"]) == ("mislabelled", 100, 0.95)
        assert row["epsilon_lower"] <= row["epsilon_guaranteed"]
    shown = cli("audit", *options, "--method", "nonprivate", "--adversary", "example", "--confidence", 0.9)
    assert "example" in shown.stdout
    assert "server" not in shown.stdout
    assert "∞" in shown.stdout
    assert "90 % sure" in shown.stdout


def test_worst_case_canaries_prove_what_is_raw(cli: Cli) -> None:
    options = [*ONE_RUN, "--one-run", "--canaries", 100, "--worst-case", "--noise", "batch", "--batch-size", 10]
    rows = {row["adversary"]: row for row in answer(cli("audit", *options, "--json"))["rows"]}
    assert rows["example"]["kind"] == "worst-case"
    assert rows["example"]["epsilon_guaranteed"] == "inf"
    assert rows["example"]["epsilon_lower"] > 2
    assert rows["server"]["epsilon_lower"] < 1


@pytest.mark.parametrize("more", [["--trials", 100], ["--participations", 2]])
def test_one_run_takes_no_options_of_repeated_trials(cli: Cli, more: list[Any]) -> None:
    outcome = cli("audit", *ONE_RUN, "--one-run", *more)
    assert outcome.status == 2
    assert "--one-run: it trains the plan's own rounds once" in outcome.stderr


@pytest.mark.slow
def test_an_audit_that_exceeds_the_guarantee_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is left out of the real mechanism; exit 1, since that is no fault of the user."""
    from fedcdp.mechanism.noise import SeededNoise

    def forgotten(_: SeededNoise, purpose: str, round_: int, clients: Tensor, step: int, slot: int, length: int) -> Tensor:  # noqa: ARG001
        return torch.zeros(len(clients), length)

    monkeypatch.setattr(SeededNoise, "_unit", forgotten)
    options = ["--record-sampling", "partition", "--local-steps", 1, "--noise", "batch", "--trials", 2000]
    outcome = cli("audit", *options)
    assert outcome.status == 1
    assert "a defect" in outcome.stderr
    outcome = cli("audit", *ONE_RUN, "--one-run", "--canaries", 200, "--worst-case", "--batch-size", 20, "--delta", 1e-7)
    assert outcome.status == 1
    assert "against example, above the guarantee of" in " ".join(outcome.stderr.split())
