"""What a run leaves on disk: whole or not at all, and refused when it is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcdp.config.plan import Plan
from fedcdp.errors import RunError
from fedcdp.files.disk import write_atomically
from fedcdp.files.tensors import load_tensors, save_tensors, size_of
from fedcdp.files.tree import Tree
from fedcdp.methods.server_optimizers import OptimizerState, move_model
from fedcdp.training.rundir import RunDirectory, State


def state(rounds: int = 3, average: bool = False) -> State:
    weights = {"0.weight": torch.arange(6.0).reshape(2, 3), "0.bias": torch.tensor([0.5, -1.0])}
    return State(rounds, weights, {name: value + 1 for name, value in weights.items()} if average else None)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create("# a configuration\n")
    return run


@pytest.mark.parametrize("average", [False, True])
def test_a_state_comes_back_to_the_bit(directory: RunDirectory, average: bool) -> None:
    assert directory.load_state() is None
    saved = state(average=average)
    directory.save_state(saved, "plan")
    found = directory.load_state()
    assert found is not None
    assert found.round == 3
    assert (found.average is not None) == average
    for name, value in saved.weights.items():
        assert torch.equal(found.weights[name], value)
        if found.average is not None:
            assert torch.equal(found.average[name], value + 1)


@pytest.mark.parametrize("clip", [0.1 + 0.2, 1 / 3, 4.0, 1e-300, 1.7976931348623157e308])
def test_a_clip_bound_comes_back_to_the_bit(directory: RunDirectory, clip: float) -> None:
    directory.save_state(replace(state(), clip=clip), "plan")
    found = directory.load_state()
    assert found is not None
    assert found.clip == clip
    directory.save_state(state(), "plan")
    found = directory.load_state()
    assert found is not None
    assert found.clip is None


@pytest.mark.parametrize("clip", [0.0, -1.0, 4, "4", None, float("inf"), True])
def test_a_clip_bound_that_is_none_is_refused(directory: RunDirectory, clip: object) -> None:
    about = {"format": "checkpoint-1", "round": 1, "plan": "plan", "clip": clip}
    save_tensors(directory.checkpoint, {"weights/a": torch.zeros(1)}, about)
    with pytest.raises(RunError, match="clip bound that is not a positive number"):
        directory.load_state()


def optimised(name: str) -> tuple[Plan, State, State]:
    """A plan, its first state, and a state after two rounds."""
    plan = Plan(method="nonprivate", rounds=5, server_optimizer=name)
    fresh = State.first(plan, state().weights)
    weights, optimizer = fresh.weights, fresh.optimizer
    for round_ in range(2):
        total = {key: value.double() / (3 + round_) for key, value in weights.items()}
        weights, optimizer = move_model(weights, total, plan, round_, optimizer)
    return plan, fresh, State(2, weights, None, None, optimizer)


@pytest.mark.parametrize("name", ["momentum", "adam", "yogi"])
def test_the_state_of_an_optimiser_comes_back_to_the_bit(directory: RunDirectory, name: str) -> None:
    plan, fresh, saved = optimised(name)
    directory.save_state(saved, plan.digest())
    found = directory.resumed_state(fresh, plan, size_of(fresh.weights))
    assert found is not None
    kept = {"weights", "momentum"} if name == "momentum" else {"weights", "momentum", "variance"}
    assert found.trees().keys() == saved.trees().keys() == kept
    for part, tree in saved.trees().items():
        for key, value in tree.items():
            assert torch.equal(found.trees()[part][key], value)


def other_shape(tree: Tree) -> Tree:
    return {name: value[..., :1] for name, value in tree.items()}


WRONG: dict[str, tuple[Callable[[State], State], str]] = {
    "missing": (lambda s: replace(s, optimizer=None), "does not hold the state of the server optimiser adam"),
    "half": (
        lambda s: replace(s, optimizer=OptimizerState(s.optimizer.momentum)),
        "does not hold the state of the server optimiser adam",
    ),
    "other shapes": (
        lambda s: replace(s, optimizer=OptimizerState(other_shape(s.optimizer.momentum), s.optimizer.variance)),
        "holds other tensors than the network",
    ),
    "other types": (
        lambda s: replace(s, optimizer=OptimizerState(s.weights, s.optimizer.variance)),
        "holds other tensors than the network",
    ),
    "negative": (
        lambda s: replace(
            s, optimizer=OptimizerState(s.optimizer.momentum, {k: v - 1 for k, v in s.optimizer.variance.items()})
        ),
        "holds a negative mean square",
    ),
    "no momentum": (
        lambda s: replace(s, optimizer=OptimizerState({}, s.optimizer.variance)),
        "holds only half of the state of the server's optimiser",
    ),
    "too many rounds": (lambda s: replace(s, round=6), "does not belong to the plan"),
    "an average": (lambda s: replace(s, average=s.weights), "does not belong to the plan"),
}


@pytest.mark.parametrize(("changed", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_optimiser_state_is_refused(directory: RunDirectory, changed: Any, said: str) -> None:
    plan, fresh, saved = optimised("adam")
    directory.save_state(changed(saved), plan.digest())
    with pytest.raises(RunError, match=said):
        directory.resumed_state(fresh, plan)


def test_an_optimiser_state_that_the_plan_does_not_have_is_refused(directory: RunDirectory) -> None:
    plan = Plan(method="nonprivate")
    directory.save_state(optimised("adam")[2], plan.digest())
    with pytest.raises(RunError, match="does not hold the state of the server optimiser sgd"):
        directory.resumed_state(State.first(plan, state().weights), plan)


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("reason", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, reason: BaseException
) -> None:
    def interrupted(*_: Any) -> None:
        raise reason

    file = tmp_path / "file"
    write_atomically(file, b"old")
    with monkeypatch.context() as patched:
        if step == "fsync":
            patched.setattr(os, "fsync", interrupted)
        else:
            patched.setattr(Path, "replace", interrupted)
        with pytest.raises(type(reason)):
            write_atomically(file, b"new and longer")
    assert file.read_bytes() == b"old"
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_checkpoint_leaves_the_one_before(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.save_state(state(3), "plan")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="No space"):
            directory.save_state(state(4), "plan")
    found = directory.load_state()
    assert found is not None
    assert found.round == 3


def test_a_file_is_on_the_disk_before_it_takes_the_place_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("fsync"), fsync(handle)))
    monkeypatch.setattr(Path, "replace", lambda path, target: (done.append("replace"), replace(path, target)))
    write_atomically(tmp_path / "file", b"content")
    assert done == ["fsync", "replace", "fsync"]


def test_every_truncation_of_a_checkpoint_is_refused(directory: RunDirectory) -> None:
    directory.save_state(state(average=True), "plan")
    whole = directory.checkpoint.read_bytes()
    for length in range(len(whole)):
        directory.checkpoint.write_bytes(whole[:length])
        with pytest.raises(RunError, match=r"checkpoint\.safetensors"):
            directory.load_state()


def test_every_flipped_bit_in_a_checkpoint_is_refused(directory: RunDirectory) -> None:
    directory.save_state(state(), "plan")
    whole = directory.checkpoint.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        directory.checkpoint.write_bytes(damaged)
        with pytest.raises(RunError, match=r"checkpoint\.safetensors"):
            directory.load_state()


def test_a_checkpoint_of_another_plan_is_refused(directory: RunDirectory) -> None:
    directory.save_state(state(), "plan")
    with pytest.raises(RunError, match="another plan"):
        directory.load_state("another")


def test_the_same_tensors_are_the_same_bytes(directory: RunDirectory) -> None:
    written = set()
    for _ in range(20):
        directory.save_state(state(), "plan")
        written.add(directory.checkpoint.read_bytes())
    assert len(written) == 1


def test_a_file_that_is_no_checkpoint_is_refused(directory: RunDirectory) -> None:
    save_tensors(directory.checkpoint, {"weights/a": torch.zeros(1)}, {"format": "other-1", "round": 1})
    with pytest.raises(RunError, match="is not a fedcdp checkpoint-1 file"):
        directory.load_state()


def test_a_checkpoint_that_is_a_directory_is_refused(directory: RunDirectory) -> None:
    directory.checkpoint.mkdir()
    with pytest.raises(RunError, match="cannot be read"):
        directory.load_state()


def test_tensors_come_back_with_their_metadata_whatever_their_strides(tmp_path: Path) -> None:
    square = torch.arange(6.0).reshape(2, 3).t()
    save_tensors(tmp_path / "t", {"square": square, "scalar": torch.tensor(2.0)}, {"format": "mine", "who": "me"})
    tensors, about = load_tensors(tmp_path / "t", "mine")
    assert about == {"format": "mine", "who": "me"}
    assert torch.equal(tensors["square"], square)
    assert tensors["scalar"].item() == 2.0


def test_weights_that_share_memory_can_be_saved(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    save_tensors(tmp_path / "t", {"first": shared, "second": shared}, {"format": "mine"})
    tensors, _ = load_tensors(tmp_path / "t", "mine")
    assert torch.equal(tensors["first"], shared)
    assert torch.equal(tensors["second"], shared)


# metrics -------------------------------------------------------------------------------------------------------------


def test_metrics_are_one_line_a_round(directory: RunDirectory) -> None:
    assert directory.read_metrics() == []
    rows = [{"round": 1, "loss": 0.5}, {"round": 2, "loss": 0.25}]
    for row in rows:
        directory.append_metrics(row)
    assert directory.metrics.read_text().count("\n") == 2
    assert directory.read_metrics() == rows


@pytest.mark.parametrize("torn", ["{", '{"round": 3, "lo', '{"round": 3, "name": "ü'])
def test_a_torn_last_line_is_passed_over_and_the_next_one_stands_alone(directory: RunDirectory, torn: str) -> None:
    rows = [{"round": 1}, {"round": 2}]
    for row in rows:
        directory.append_metrics(row)
    with directory.metrics.open("ab") as file:
        file.write(torn.encode()[:-1] if torn.endswith("ü") else torn.encode())
    assert directory.read_metrics() == rows
    assert directory.forget_metrics_after(2) == rows
    directory.append_metrics({"round": 3})
    assert directory.read_metrics() == [*rows, {"round": 3}]


@pytest.mark.parametrize("damaged", ['{"round": 2, "lo', "[1, 2]", "2", "null", '{"loss": 1}', '{"round": "two"}'])
def test_a_damaged_line_in_the_middle_is_refused_by_its_number(directory: RunDirectory, damaged: str) -> None:
    directory.metrics.write_text(f'{{"round": 1}}\n{damaged}\n{{"round": 3}}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2"):
        directory.forget_metrics_after(3)
    assert directory.metrics.read_text().count("\n") == 3


def test_rounds_after_the_checkpoint_are_forgotten_on_disk_too(directory: RunDirectory) -> None:
    for round_ in (1, 2, 3):
        directory.append_metrics({"round": round_})
    assert directory.forget_metrics_after(2) == [{"round": 1}, {"round": 2}]
    assert [json.loads(line)["round"] for line in directory.metrics.read_text().splitlines()] == [1, 2]


# the directory -------------------------------------------------------------------------------------------------------


def test_a_new_run_makes_its_parents_and_accepts_an_empty_directory(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "a/b/run").create("# one\n")
    assert (tmp_path / "a/b/run/config.toml").read_text() == "# one\n"
    (tmp_path / "empty").mkdir()
    RunDirectory(tmp_path / "empty").create("# two\n")
    assert (tmp_path / "empty/config.toml").read_text() == "# two\n"


def test_a_directory_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("")
    with pytest.raises(RunError, match="already exists"):
        RunDirectory(tmp_path).create("")
    assert [path.name for path in tmp_path.iterdir()] == [".hidden"]


def test_whether_a_run_can_start_is_checked_without_writing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new", "a/b/run"):
        RunDirectory(tmp_path / name).require_creatable()
    with pytest.raises(RunError, match="is a file; choose another name"):
        RunDirectory(tmp_path / "file").require_creatable()
    with pytest.raises(RunError, match=r"file/run cannot be written: .*file is a file"):
        RunDirectory(tmp_path / "file/run").require_creatable()
    with pytest.raises(RunError, match="already exists"):
        RunDirectory(tmp_path).require_creatable()
    assert {path.name for path in tmp_path.iterdir()} == {"file", "empty"}


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_run_cannot_start_below_a_read_only_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(RunError, match="no permission to write to"):
            RunDirectory(tmp_path / "a/run").require_creatable()
    finally:
        tmp_path.chmod(0o700)


def test_a_run_is_held_by_one_at_a_time_and_given_back(directory: RunDirectory) -> None:
    again = RunDirectory(directory.path)
    with directory.locked(), pytest.raises(RunError, match="in use by another process"), again.locked():
        pass
    with again.locked():
        pass


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"not a run directory: it has no config\.toml"):
        RunDirectory(tmp_path).require()
