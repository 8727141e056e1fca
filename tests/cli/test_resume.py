"""A run that was stopped, however it was stopped, ends as if it had not been."""

from __future__ import annotations

import json
import shutil
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedcdp.config.experiment import assemble
from fedcdp.training.rundir import RunDirectory, State
from fedcdp.training.trainer import train_experiment

ROUNDS = 60
LONG = ["train", "--dataset", "cancer", "--clients", 12, "--per-round", 8, "--local-steps", 4, "--rounds", ROUNDS]

EVERY_STATE = [
    "--ema", "0.7", "--clip", "linear(6, 2)", "--momentum", "0.5", "--client-sampling", "poisson", "--proximal", "0.5",
    "--server-optimizer", "adam", "--server-lr", "cosine(0.1, 0.02)",
]  # fmt: skip

# Kills a training with SIGKILL again and again, at moments that differ from time to time: some counted from the birth
# of the process, the others from the next round that it writes (a resumed training first takes rounds back that no
# checkpoint has). Each process is a fork, so that it starts at once.
KILLER = """
import json, os, random, signal, sys, time
import torch
torch.set_num_threads(1)
import fedcdp
from fedcdp.cli import main

fedcdp.load("cancer", quiet=True)
command, metrics, kills = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def lines():
    return open(metrics, "rb").read().count(b"\\n") if os.path.exists(metrics) else 0


for kill in range(kills):
    before = lines()
    child = os.fork()
    if child == 0:
        sys.argv = ["fedcdp", *command, *(["--resume"] if kill else [])]
        try:
            main()
        finally:
            os._exit(9)
    deadline = time.monotonic() + 300
    while (kill == 0 or kill % 2) and lines() <= before and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"process {kill} ended by itself: {status}"
print(lines())
"""

Cli = Callable[..., Any]


def model(run: Path | str) -> dict[str, torch.Tensor]:
    return load_file(Path(run) / "model.safetensors")


def rows(run: Path | str) -> list[dict[str, Any]]:
    """A run's metrics, but for the time that they took."""
    read = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in read]


def assert_same(one: Path | str, other: Path | str) -> None:
    left, right = model(one), model(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name
    assert rows(one) == rows(other)


def stop_after(run: Path, whole: Path, rounds: int) -> None:
    """Leave `run` as a process that was killed after some rounds of `whole` left it; `whole` is in the meantime done."""
    shutil.rmtree(run, ignore_errors=True)
    train_experiment(assemble(_settings(whole)), run, quiet=True, most_releases=rounds)
    (run / "model.safetensors").unlink()


def _settings(run: Path) -> dict[str, dict[str, Any]]:
    return tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(cli: Cli, start: Callable[..., Any]) -> None:
    options = EVERY_STATE
    command = [*map(str, LONG), *options, "--quiet", "--out", "killed"]
    killer = start("-c", KILLER, json.dumps(command), "killed/metrics.jsonl", 10)
    stdout, stderr = killer.communicate(timeout=600)
    assert (killer.returncode, stderr) == (0, "")
    assert 0 < int(stdout) < ROUNDS
    assert cli(*command, "--resume").status == 0
    assert cli(*LONG, *options, "--quiet", "--out", "whole").status == 0
    assert_same("killed", "whole")
    assert len(rows("killed")) == ROUNDS


def test_an_interrupted_run_ends_as_one_that_was_not(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [*LONG, "--rounds", 4, *EVERY_STATE, "--quiet"]
    save_state = RunDirectory.save_state

    def interrupt(directory: RunDirectory, state: State, *rest: Any) -> None:
        save_state(directory, state, *rest)
        if state.round == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_state", interrupt)
        stopped = cli(*command, "--out", "stopped")
    assert (stopped.status, stopped.stdout) == (1, "")
    assert stopped.stderr.startswith("fedcdp: ")
    assert stopped.stderr.count("\n") == 1
    assert "--resume" in stopped.stderr
    assert not Path("stopped/model.safetensors").exists()
    assert cli("train", "--resume", "--quiet", "--out", "stopped").status == 0
    assert cli(*command, "--out", "whole").status == 0
    assert_same("stopped", "whole")


@pytest.mark.slow
def test_ctrl_c_ends_with_one_line_and_resume_goes_on(
    cli: Cli, start: Callable[..., Any], wait_for_rounds: Callable[[Path, int], None]
) -> None:
    command = [*LONG, "--rounds", 80, "--chunk", 1, "--quiet", "--out", "stopped"]
    process = start("-m", "fedcdp", *command)
    wait_for_rounds(Path("stopped"), 2)

    process.send_signal(signal.SIGSTOP)  # or it might be done, on a busy machine, before anybody asks
    meanwhile = cli("train", "--quiet", "--resume", "--out", "stopped")
    assert meanwhile.status == 2
    assert "stopped is in use by another process" in meanwhile.stderr
    assert "already exists" in cli(*command).stderr

    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    assert stdout == ""
    assert "Traceback" not in stderr
    assert "--resume" in stderr
    assert stderr.strip().count("\n") == 0
    assert stderr.startswith("fedcdp: "), repr(stderr)

    state = RunDirectory("stopped").load_state()
    assert state is not None
    assert 2 <= state.round < 80
    assert not Path("stopped/model.safetensors").exists()
    assert cli("train", "--quiet", "--resume", "--chunk", 8, "--out", "stopped").status == 0
    assert [row["round"] for row in rows("stopped")] == list(range(1, 81))


def test_a_finished_run_is_resumed_by_doing_nothing(cli: Cli, run: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    trained = model(run)
    outcome = cli("train", "--resume", "--json", "--quiet", "--out", run)
    assert outcome.status == 0
    assert json.loads(outcome.stdout)["rounds"] == 3
    assert json.loads(outcome.stdout)["accuracy"] == rows(run)[-1]["accuracy"]
    after = {path.name: path.read_bytes() for path in run.iterdir()}
    assert after.keys() == before.keys()
    for name in ("config.toml", "metrics.jsonl", "checkpoint.safetensors"):
        assert after[name] == before[name], name
    assert all(torch.equal(value, trained[name]) for name, value in model(run).items())


def test_a_torn_last_line_is_written_anew(cli: Cli, run: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run.rename(whole)
    stop_after(run, whole, 2)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "clients": 4, "learn')
    assert cli("train", "--resume", "--quiet", "--out", run).status == 0
    assert_same(run, whole)


def test_a_round_whose_checkpoint_was_not_written_is_not_counted_twice(cli: Cli, run: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run.rename(whole)
    stop_after(run, whole, 1)
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    assert cli("train", "--resume", "--quiet", "--out", run).status == 0
    assert_same(run, whole)


def test_a_run_that_was_stopped_before_its_first_checkpoint_starts_again(cli: Cli, run: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(run, tmp_path / "whole"))
    for name in ("checkpoint.safetensors", "model.safetensors", "metrics.jsonl"):
        (run / name).unlink()
    header, first, *_ = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run / "ledger.jsonl").write_bytes(header + first)  # its first round was charged, and not finished
    assert cli("train", "--resume", "--quiet", "--out", run).status == 0
    assert_same(run, whole)


def test_a_run_whose_checkpoint_is_lost_is_not_started_again(cli: Cli, run: Path) -> None:
    (run / "checkpoint.safetensors").unlink()
    refused = cli("train", "--resume", "--quiet", "--out", run)
    assert refused.status == 2
    assert "do not match" in refused.stderr


def test_a_run_that_was_killed_while_it_was_created_can_be_started(cli: Cli) -> None:
    Path("run").mkdir()
    Path("run/.config.toml.partial").write_text("# fedcdp")
    assert cli(*LONG, "--rounds", 1, "--quiet", "--out", "run").status == 0


def test_what_a_killed_write_left_behind_does_no_harm(cli: Cli, run: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run.rename(whole)
    stop_after(run, whole, 2)
    (run / ".checkpoint.safetensors.partial").write_bytes(b"half of a checkpoi")
    assert cli("train", "--resume", "--quiet", "--out", run).status == 0
    assert_same(run, whole)


def test_a_resumed_run_may_repeat_the_command_that_started_it(cli: Cli) -> None:
    command = ["train", "--preset", "cancer", "--clients", 8, "--per-round", 4, "--local-steps", 2, "--clip", 6]
    command += ["--clip-end", 2, "--lr", "0.0123456789", "--set", "momentum=0.5", "--quiet", "--out", "run"]
    assert cli(*command).status == 0
    again = cli(*command, "--resume")
    assert (again.status, again.stderr) == (0, "")


def test_a_run_goes_on_with_other_chunks_on_the_same_device(cli: Cli, run: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run.rename(whole)
    stop_after(run, whole, 2)
    assert cli("train", "--resume", "--quiet", "--out", run, "--chunk", 1, "--device", "cpu").status == 0
    for name, value in model(whole).items():
        torch.testing.assert_close(model(run)[name], value, rtol=1e-5, atol=1e-5)


def test_metrics_that_lost_a_round_are_not_passed_off_as_whole(cli: Cli, run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:1]))
    outcome = cli("train", "--resume", "--quiet", "--json", "--out", run)
    assert (outcome.status, outcome.stdout) == (2, "")
    assert "does not have one line for each of the 3 rounds in the checkpoint" in outcome.stderr
