"""What hostile input once did, one test for each: it must not do it again."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcdp.accounting.ledger import Ledger
from fedcdp.config.experiment import assemble, read_assignment, read_toml
from fedcdp.data import load_file
from fedcdp.data.array_files import checked_member
from fedcdp.data.fetch import read_unpacked
from fedcdp.data.formats import read_pickle
from fedcdp.errors import DataError, ModelError, RunError
from fedcdp.files.disk import atomic_write
from fedcdp.files.untrusted import parse_toml, printable, read_bounded
from fedcdp.studies.reproduce.catalogue import Cell, read
from fedcdp.training.prepared import build_network
from fedcdp.training.rundir import RunDirectory

Cli = Callable[..., Any]
OWN = "def make(input_shape, classes):\n    from torch import nn\n    return nn.Linear(input_shape[0], classes)\n"
SMALL = ["--dataset", "cancer", "--clients", 8, "--per-round", 4, "--rounds", 2, "--local-steps", 2, "--quiet"]


# The console ---------------------------------------------------------------------------------------------------------


def test_a_hostile_name_does_not_reach_the_terminal(cli: Cli) -> None:
    Path("my.toml").write_text('[plan]\nmethod = "\\u001b[2J\\u009b1m\\u202e"\n')
    outcome = cli("train", "--config", "my.toml", "--out", "new")
    assert outcome.status == 2
    assert not any(sign in outcome.stderr for sign in "\x1b\x9b\u202e")
    assert printable("\x1b[2J\u202e\x9b é ε") == "\\x1b[2J\\u202e\\x9b é ε"


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written",
    ["a = " + "[" * 20_000, "a = " + "{a = " * 5_000, "a = " + "9" * 5_000, ".".join("a" * 20_000) + " = 1", "x" * 2**19],
    ids=["deep lists", "deep tables", "many digits", "many parts", "long"],
)
def test_a_file_of_settings_that_is_too_much_is_refused_at_once(written: str) -> None:
    Path("my.toml").write_text(written)
    started = time.perf_counter()
    with pytest.raises(RunError, match=r"my\.toml"):
        read_toml("my.toml")
    assert time.perf_counter() - started < 5


def test_settings_without_an_end_are_refused(cli: Cli) -> None:
    assert "larger than" in cli("train", "--config", "/dev/zero", "--out", "new").stderr
    assert read_assignment("clip=" + "[" * 5_000)["plan"]["clip"] == "[" * 5_000  # which a plan then refuses


def test_settings_may_come_from_a_pipe(cli: Cli) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"[plan]\nrounds = 0\n")
    os.close(writing)
    assert "rounds: 0" in cli("train", "--config", f"/dev/fd/{reading}", "--out", "new").stderr
    os.close(reading)


def test_a_pipe_in_a_run_directory_is_not_waited_for(run: Path, cli: Cli) -> None:
    for name in ("config.toml", "model.safetensors"):
        (run / name).rename(run / "kept")
        os.mkfifo(run / name)
        assert cli("evaluate", run).status == 2
        (run / name).unlink()
        (run / "kept").rename(run / name)
    assert cli("evaluate", run).status == 0


def test_a_plan_beyond_all_machines_is_refused(cli: Cli) -> None:
    for option in ("--rounds", "--local-steps", "--batch-size"):
        assert "at most 10,000,000" in cli("account", "--dataset", "cancer", option, 2**40).stderr


# Code ----------------------------------------------------------------------------------------------------------------


def test_a_file_cannot_have_code_imported_that_the_user_never_named(cli: Cli, run: Path) -> None:
    Path("hostile_network.py").write_text("open('was-here', 'w')\n" + OWN)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('network = "auto"', 'network = "hostile_network:make"'))
    Path("my.toml").write_text('[model]\nnetwork = "hostile_network:make"\n')
    Path("own.toml").write_text(
        'title = "t"\nlayout = "accuracy"\n[every.model]\nnetwork = "hostile_network:make"\n[axes.a.b]\n'
    )
    for command in (
        ["evaluate", run],
        ["export", run, "--to", "out.safetensors"],
        ["train", "--resume", "--out", run],
        ["attack", "--run", run],
        ["train", *SMALL, "--config", "my.toml", "--out", "new"],
        ["reproduce", "own.toml", "--out", "results", "--quiet"],
    ):
        outcome = cli(*command)
        assert outcome.status == 2, command
        assert "hostile_network:make" in outcome.stderr, command
    assert not Path("was-here").exists()


def test_code_that_the_user_named_once_is_imported_from_then_on(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own_network.py").write_text(OWN)
    assert cli("train", *SMALL, "--model", "own_network:make", "--out", "new").status == 0
    assert cli("evaluate", "new").status == 0
    monkeypatch.setenv("FEDCDP_CACHE", "another-machine")
    assert "FEDCDP_TRUST=own_network:make" in cli("evaluate", "new").stderr
    monkeypatch.setenv("FEDCDP_TRUST", "other:thing, own_network:make")
    assert cli("evaluate", "new").status == 0


@pytest.mark.parametrize("network", ["os:abort", "builtins:breakpoint", "os.path:abspath"])
def test_pythons_own_library_has_no_networks(network: str) -> None:
    with pytest.raises(ModelError, match="Python's own library"):
        build_network(assemble({"data": {"dataset": "cancer"}, "model": {"network": network}}), (30,), 2)


def test_a_pickle_whose_key_would_be_hashed_for_ever_is_refused() -> None:
    pairs = b"".join(b"q%ch%c\x86" % (n, n) for n in range(200))
    started = time.perf_counter()
    with pytest.raises(DataError, match="keys are not strings or bytes"):
        read_pickle(b"\x80\x02}K\x01K\x01\x86" + pairs + b"K\x01s.", "batch")
    with pytest.raises(DataError):
        read_pickle(b"\x80\x02cnumpy\ndtype\nK\x01K\x01\x86" + pairs + b"\x85R.", "batch")  # whose text would be as long
    assert time.perf_counter() - started < 5
    assert read_pickle(pickle.dumps({b"a": [1]}, protocol=2), "batch") == {b"a": [1]}


# Sizes ---------------------------------------------------------------------------------------------------------------


def test_a_packed_file_is_not_unpacked_beyond_what_it_can_hold() -> None:
    Path("bomb").write_bytes(gzip.compress(bytes(100_000), 9))
    assert Path("bomb").stat().st_size < 1000
    with pytest.raises(DataError, match="unpacks to more than 1,000 bytes"):
        read_unpacked(Path("bomb"), 1000)
    assert read_unpacked(Path("bomb"), 100_000) == bytes(100_000)


def test_an_array_is_not_unpacked_beyond_the_bound() -> None:
    np.savez_compressed("bomb.npz", x=np.zeros((1000, 100)), y=np.arange(1000) % 2)
    with np.load("bomb.npz") as arrays, pytest.raises(DataError, match="unpacks to 800,000 bytes; at most 1,000"):
        checked_member(arrays, "x", 1000)


def test_one_long_label_does_not_take_the_room_of_all() -> None:
    Path("own.csv").write_text("a,label\n" + "1,x\n2,y\n" * 1000 + "1," + "l" * 120_000 + "\n")
    with pytest.raises(DataError, match=r"line 2002.*more than 100 characters"):
        load_file("own.csv")


def test_a_ledger_that_claims_billions_of_clients_takes_no_memory_for_them() -> None:
    ledger = Ledger.create("ledger.jsonl", {"rounds": 3}, {"clients": 2**31 - 1}, "seeded")
    ledger.charge(0, [5, 7], 1.0)
    assert (ledger.most_used(), ledger.busiest(3).tolist()) == (1, [1, 1, 0])
    with pytest.raises(RunError, match="at most"):
        ledger.participations()


def test_a_checkpoint_larger_than_its_network_is_not_read(cli: Cli, run: Path) -> None:
    for name in ("model.safetensors", "checkpoint.safetensors"):
        with (run / name).open("r+b") as file:
            file.truncate(2**38)  # takes no room on the disk
    assert "larger than" in cli("evaluate", run).stderr
    assert "larger than" in cli("train", "--resume", "--out", run).stderr


@pytest.mark.parametrize("row", ['{"round": 1, "loss": ["x"]}', '{"round": 1, "=cmd()": 1}', '{"round": 1, "loss": 1e999}'])
def test_metrics_that_this_program_never_writes_are_refused(run: Path, row: str) -> None:
    (run / "metrics.jsonl").write_text(row + "\n\n")
    with pytest.raises(RunError, match="line 1, is damaged"):
        RunDirectory(run).read_metrics()


# Where things are written --------------------------------------------------------------------------------------------


def test_a_link_in_a_run_directory_does_not_lead_a_run_to_write_elsewhere(cli: Cli, run: Path) -> None:
    directory, ledger = RunDirectory(run), Ledger.open(run / "ledger.jsonl")
    for name, write in {
        "lock": lambda: directory.locked().__enter__(),
        "metrics.jsonl": lambda: directory.append_metrics({"round": 4}),
        "ledger.jsonl": lambda: ledger._write_line({"round": 4}),
    }.items():
        (run / name).rename(f"{name}-elsewhere")
        (run / name).symlink_to(Path(f"{name}-elsewhere").absolute())
        Path(f"{name}-elsewhere").write_bytes(before := Path(f"{name}-elsewhere").read_bytes() or b"dear reader")
        with pytest.raises(RunError, match="cannot be written"):
            write()
        assert Path(f"{name}-elsewhere").read_bytes() == before
    assert cli("train", "--resume", "--out", run).status == 2


def test_a_link_where_a_file_is_written_is_replaced() -> None:
    Path("kept").write_text("kept")
    Path(".new.partial").symlink_to("kept")
    with atomic_write(Path("new")) as file:
        file.write(b"new")
    assert (Path("kept").read_text(), Path("new").read_text()) == ("kept", "new")


def test_a_run_is_for_its_owner_alone_whatever_the_mask(cli: Cli) -> None:
    mask = os.umask(0)
    try:
        assert cli("train", *SMALL, "--out", "runs/new").status == 0
    finally:
        os.umask(mask)
    assert stat.S_IMODE(Path("runs/new").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in Path("runs/new").iterdir()} == {0o600}


@pytest.mark.parametrize("name", ["..", ".", "../..", "a/../..", "x" * 300, "é/漢", ".hidden"])
def test_a_cell_of_any_name_has_a_folder_of_its_own_and_nowhere_else(name: str) -> None:
    slug = Cell(name, name, "", {}).slug
    assert not slug.startswith(".")
    assert "/" not in slug
    assert 0 < len(slug.encode()) < 200


@pytest.mark.parametrize(
    "table",
    ["axes = 3", "axes = {a = 1}", "axes = {}", "axes = {a = {b = {}}}\nvariants = {v = {rows = 3}}",
     "axes = {a = {b = {plan = 3}}}", "axes = {a = {b = {}}}\nprinted = 3"],
)  # fmt: skip
def test_a_table_of_another_shape_is_refused_in_a_sentence(cli: Cli, table: str) -> None:
    Path("own.toml").write_text(f'title = "t"\nlayout = "accuracy"\n{table}\n')
    outcome = cli("reproduce", "own.toml", "--list")
    assert (outcome.status, outcome.stderr.count("\n")) == (2, 1)
    assert "own.toml" in outcome.stderr


def test_a_file_is_read_only_up_to_its_bound() -> None:
    Path("file").write_bytes(b"12345")
    assert read_bounded("file", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_bounded("file", 4)
    with pytest.raises(OSError, match="not a regular file"):
        read_bounded("/dev/zero", 4)
    with pytest.raises(OSError, match="not a valid file name"):
        read_bounded("a\0b", 4)
    assert parse_toml("a = 1\r\n") == {"a": 1}
    assert read("t", _table()).rows == [("b",)]


def _table() -> Path:
    Path("t.toml").write_text('title = "t"\nlayout = "accuracy"\n[axes.a.b]\n')
    return Path("t.toml")


def test_a_result_file_that_cannot_be_written_again_is_refused(cli: Cli) -> None:
    Path("results").mkdir()
    Path("results/t.json").write_text(json.dumps({"format": "fedcdp-reproduction-1", "table": "t", "cells": {"b": 3}}))
    _table()
    assert "is damaged" in cli("reproduce", "t.toml", "--out", "results", "--list").stderr


@pytest.mark.parametrize(
    "options",
    [["--noise-multiplier", "1e-200"], ["--noise-multiplier", "1e300"], ["--clip", "linear(1e300, 1e-300)"]],
    ids=lambda options: options[1],
)
def test_a_number_beyond_what_can_be_accounted_is_refused(cli: Cli, options: list[str]) -> None:
    outcome = cli("account", "--dataset", "cancer", *options)
    assert (outcome.status, outcome.stderr.count("\n")) == (2, 1)
