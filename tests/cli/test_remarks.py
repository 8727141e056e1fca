"""Notes on options that are overridden or have no effect, and the line that names the setting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedcdp import attacks
from fedcdp.cli import terminal
from fedcdp.cli.remarks import describe_setting, remarks
from fedcdp.config.experiment import assemble

Cli = Callable[..., Any]


def said(outcome: Any) -> str:
    return " ".join(outcome.stderr.split())


SUM = {"noise": "sum", "secure_aggregation": True, "local_steps": 1}
NO_EFFECT: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"data": {"alpha": 0.3}}, "--alpha has no effect here: it is for --partition dirichlet"),
    (
        {"data": {"classes_per_client": 3, "partition": "iid"}},
        "--classes-per-client has no effect here: it is for --partition",
    ),
    ({"data": {"smallest": 3}}, "--smallest has no effect here: it is for a --partition of unequal sizes"),
    ({"data": {"size_ratio": 3.0}}, "--size-ratio has no effect here: it is for --partition dirichlet-sizes"),
    ({"data": {"standardise": True}}, "--standardise has no effect here: it is for your own data (--data)"),
    ({"data": {"validation_fraction": 0.3}}, "--validation-fraction has no effect here"),
    (
        {"data": {"scaling": "public"}},
        "--scaling has no effect here: it is for the datasets adult and cancer, and",
    ),
    ({"plan": {"noise_at": "client"}}, "--noise-at has no effect here: it is for fed-sdp"),
    ({"plan": {"noise": "batch", "method": "fed-sdp"}}, "--noise has no effect here: it is for fed-cdp"),
    ({"plan": {"share_fraction": 0.5}}, "--share-fraction has no effect here: it is for dssgd"),
    (
        {"plan": {"server_momentum": 0.5}},
        "--server-momentum has no effect here: it is for --server-optimizer momentum, adam",
    ),
    (
        {"plan": {"server_beta2": 0.5, "server_optimizer": "momentum"}},
        "--server-beta2 has no effect here: it is for --server-optimizer adam or yogi",
    ),
    ({"plan": {"server_epsilon": 0.5}}, "--server-epsilon has no effect here: it is for --server-optimizer adam or yogi"),
    ({"plan": {"proximal": 0.5, "local_steps": 1}}, "--proximal has no effect here: it is for several local steps"),
    ({"plan": {"server_optimizer": "adam"}}, "--server-optimizer adam moves weights by about --server-lr a round, 1"),
    ({"plan": {"clip": "3", "method": "nonprivate"}}, "--clip has no effect here: it is for a private method"),
    ({"plan": {"noise_multiplier": 3.0, "method": "nonprivate"}}, "--noise-multiplier has no effect here"),
    ({"plan": {"quantile_noise": 3.0}}, "--quantile-noise has no effect here: it is for a quantile clip"),
    ({"plan": {"quantile_rate": 0.3}}, "--quantile-rate has no effect here: it is for a quantile clip"),
    ({"plan": {"slots": 5, "record_sampling": "fixed"}}, "--slots has no effect here: it is for --record-sampling poisson"),
    ({"plan": {"noise_generator": "philox"}}, "--noise-generator has no effect here: it is for --secure-noise"),
    ({"plan": {"weighting": "records"} | SUM}, "--weighting has no effect here: with noise on the sum"),
    (
        {"plan": {"noise_generator": "chacha20", "secure_noise": True} | SUM},
        "--noise-generator has no effect here: noise",
    ),
    ({"plan": {"batch_size": 5000}}, "--batch-size 5000 is more than the 40 records of a client"),
]


@pytest.mark.parametrize(("given", "sentence"), NO_EFFECT, ids=lambda value: value if isinstance(value, str) else "")
def test_an_option_without_effect_gets_a_sentence(given: dict[str, dict[str, Any]], sentence: str) -> None:
    experiment = assemble(given)
    [found] = remarks(experiment, [given])
    assert found.startswith(sentence)
    assert list(remarks(experiment, [given, {}])) == []  # from a preset or a file


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"data": {"partition": "dirichlet", "alpha": 0.3}},
        {
            "data": {"partition": "dirichlet-sizes", "alpha": 0.3, "smallest": 3, "size_ratio": 20.0},
            "plan": {"batch_size": 500},
        },
        {"data": {"partition": "shards", "classes_per_client": 3}},
        {"data": {"dataset": "adult", "scaling": "public"}},
        {"plan": {"method": "fed-sdp", "noise_at": "client"}},
        {
            "plan": {
                "method": "fed-cdp-decay",
                "noise": "batch",
                "clip": "linear(6, 2)",
                "noise_multiplier": 2.0,
                "slots": 20,
            }
        },
        {"plan": {"clip": "quantile(0.5, 4)", "quantile_noise": 3.0, "quantile_rate": 0.3}},
        {"plan": {"method": "dssgd", "share_fraction": 0.5}},
        {"plan": {"secure_noise": True, "noise_generator": "chacha20", "batch_size": 40}},
    ],
    ids=str,
)
def test_an_option_with_an_effect_gets_none(given: dict[str, dict[str, Any]]) -> None:
    assert list(remarks(assemble(given), [given])) == []


def test_noise_is_overridden_by_a_target() -> None:
    given: list[dict[str, dict[str, Any]]] = [{"plan": {"noise_multiplier": 3.0}}]
    assert list(remarks(assemble(*given), given)) == []
    [found] = remarks(assemble(*given), given, calibrated=True)
    assert found == "--noise-multiplier is overridden: the noise is chosen for the target ε"


def test_records_that_were_loaded_are_counted() -> None:
    given: list[dict[str, dict[str, Any]]] = [{"data": {"file": "own.npz"}, "plan": {"batch_size": 200}}]
    assert list(remarks(assemble(*given), given)) == []  # not loaded: unknown
    [found] = remarks(assemble(*given), given, records=165)
    assert found.startswith("--batch-size 200 is more than the 165 records of a client")


def test_a_setting_is_one_line() -> None:
    assert describe_setting(assemble({"data": {"dataset": "mnist"}})) == (
        "mnist, 1000 clients × 500 records, fed-cdp, 100 rounds, K_t = 100, L = 100, B = 5, σ = 6, C = 4"
    )
    assert "426 records" in describe_setting(assemble({"data": {"dataset": "cancer"}}))
    assert "σ" not in describe_setting(assemble({"plan": {"method": "nonprivate"}}))
    assert describe_setting(assemble({"data": {"file": "own.npz"}})).startswith("own.npz, 10 clients, fed-cdp, ")


# on the command line --------------------------------------------------------------------------------------------------

TINY = ["--dataset", "cancer", "--clients", 8, "--per-round", 4, "--local-steps", 2, "--rounds", 1]
SENSELESS = ["--noise-at", "client", "--batch-size", 5000]


def test_bare_account_names_its_setting(cli: Cli) -> None:
    outcome = cli("account")
    assert outcome.status == 0
    said_first, setting = outcome.stderr.splitlines()
    assert said_first.startswith("No plan given: using the recommended recipe for ε = 8 against the server (")
    assert setting.startswith("setting: mnist5k, 100 clients × 40 records, fed-cdp, ")
    assert "setting" not in outcome.stdout
    assert cli("account", "--json").stderr.splitlines() == [said_first]
    assert cli("account", "--preset", "mnist", "--json").stderr == ""


def test_bare_attack_names_its_setting_before_it_begins(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def begins(*_: object, progress: Callable[[int, int], None], **__: object) -> None:
        progress(1, 100)
        raise KeyboardInterrupt

    monkeypatch.setattr(attacks, "attack", begins)
    outcome = cli("attack")
    assert outcome.status == 1
    assert outcome.stderr.startswith("setting: mnist5k, 100 clients × 40 records, fed-cdp, ")


def test_attacks_and_audits_note_options_without_effect(cli: Cli) -> None:
    attacked = cli("attack", *TINY, "--noise-at", "client", "--victims", 2, "--attack", "analytic", "--json")
    assert said(attacked) == "note: --noise-at has no effect here: it is for fed-sdp"
    audited = cli("audit", *TINY, "--noise-at", "client", "--record-sampling", "partition", "--trials", 200)
    assert said(audited) == "note: --noise-at has no effect here: it is for fed-sdp"


def test_account_notes_options_without_effect(cli: Cli) -> None:
    outcome = cli("account", *TINY, *SENSELESS)
    assert "note: --noise-at has no effect here: it is for fed-sdp" in said(outcome)
    assert "note: --batch-size 5000 is more than the 426 records of a client" in said(outcome)
    assert outcome.stdout == cli("account", *TINY, "--batch-size", 5000).stdout


def test_training_notes_options_without_effect(cli: Cli) -> None:
    outcome = cli("train", *TINY, *SENSELESS, "--slots", 5000, "--json", "--out", "run")
    assert "note: --noise-at has no effect here" in said(outcome)
    assert "note: --batch-size 5000 is more than the 426 records" in said(outcome)
    quiet = cli("train", *TINY, *SENSELESS, "--slots", 5000, "--quiet", "--out", "other")
    assert (quiet.stdout, quiet.stderr) == ("", "")
    again = cli("train", "--config", "run/config.toml", "--out", "third")
    assert "no effect" not in said(again)


def test_noise_next_to_a_target_is_noted(cli: Cli) -> None:
    options = [*TINY, "--record-sampling", "partition", "--noise-multiplier", 3, "--target-epsilon", 2]
    for command in (["calibrate", *options], ["train", *options, "--out", "run"]):
        assert "note: --noise-multiplier is overridden" in said(cli(*command)), command


def test_own_data_are_counted_before_the_note(cli: Cli, own_npz: Path) -> None:
    options = ["--clients", 6, "--per-round", 2, "--rounds", 1, "--local-steps", 1, "--batch-size", 50, "--out", "run"]
    outcome = cli("train", "--data", own_npz.name, *options)
    assert "note: --batch-size 50 is more than the 16 records of a client" in said(outcome)


# ε used ---------------------------------------------------------------------------------------------------------------


def test_an_epsilon_used_above_epsilon_is_explained(cli: Cli) -> None:
    clients = ["--dataset", "cancer", "--clients", 20, "--local-steps", 3, "--rounds", 6, "--record-sampling", "partition"]
    assert cli("train", *clients, "--per-round", 4, "--quiet", "--out", "some").status == 0
    assert "ε used can be larger than ε" in " ".join(cli("account", "--run", "some").stdout.split())
    assert cli("train", *clients, "--per-round", 20, "--quiet", "--out", "all").status == 0
    assert "ε used can be larger" not in " ".join(cli("account", "--run", "all").stdout.split())


# progress -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test sets."""
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def test_long_work_prints_lines_without_a_terminal(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.steps("attack", quiet=False) as progress:
        assert progress is not None
        for second in range(0, 36):
            clock[0] = float(second)
            progress(second, 35)
        progress(35, 35)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "attack: 28 % done after 10 s",
        "attack: 57 % done after 20 s",
        "attack: 85 % done after 30 s",
        "attack: 100 % done after 35 s",
    ]


def test_short_work_prints_no_progress_without_a_terminal(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.steps("attack", quiet=False) as progress:
        assert progress is not None
        for done in range(6):
            clock[0] = float(done)
            progress(done, 5)
    assert capsys.readouterr().err == ""


def test_quiet_work_prints_no_progress() -> None:
    with terminal.steps("attack", quiet=True) as progress:
        assert progress is None
