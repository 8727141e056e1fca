"""The matrix of methods, attacks and trust models: its cells, their commands, and how it is shown."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.attack_matrix import ROOT, crafted, markdown, matrix, measure, shown
from benchmarks.matrix_cells import COLUMNS, METHODS, SUM, TRUST, Cell, cells
from fedcdp.attacks.active_servers import ACTIVE

NAMES = {cell.name: cell.command for cell in cells()}
QUICK = (
    "fedcdp attack --leak type0 --attack trap-weights --network mlp --dataset mnist5k --local-steps 1 --partition iid "
    "--record-sampling partition --clients 4 --per-round 4 --records 4 --batch-size 4 --victims 2 --method nonprivate"
)


def test_every_active_server_attacks_every_method() -> None:
    for attack in ACTIVE:
        for trust in TRUST if attack != "inconsistent-models" else (SUM,):
            assert {f"{attack}/{trust}/{method}" for method in METHODS} <= set(NAMES)


def test_commands_differ_and_name_their_method() -> None:
    assert len(set(NAMES.values())) == len(NAMES)
    assert "--noise-at client" in NAMES["labels/each update/Fed-SDP, noise at client"]
    assert "--preset mnist-eps1" in NAMES["type-2/each update/Fed-CDP ε = 1"]
    assert NAMES["tokens/the sum/Fed-CDP σ = 6"].endswith("--noise-multiplier 6 --noise sum --secure-aggregation")


def test_a_sum_is_read_without_a_number_of_victims() -> None:
    read_as_sums = [command for name, command in NAMES.items() if "/the sum/" in name and "--leak type0" in command]
    assert all("--victims" not in command for command in read_as_sums if "--attack presence" not in command)


def test_one_network_and_one_leak_in_every_command() -> None:
    for command in NAMES.values():
        assert command.count("--network") <= 1
        assert command.count("--leak") == 1


def test_presence_at_crafted_weights_stands_under_honest_ones() -> None:
    stored = {"cells": {"presence/the sum/Fed-CDP σ = 6": {"auc_predicted": 0.547}, "imprint/the sum/Fed-CDP σ = 6": {}}}
    lines = crafted(stored).splitlines()
    assert lines[0].split(" | ")[2] == "Fed-CDP σ = 6, the sum"
    assert lines[2] == "| honest | – | .547 | – | – |"
    assert lines[3] == "| `imprint` | – | – | – | – |"


@pytest.mark.slow
def test_a_cell_has_the_figures_of_its_command() -> None:
    row = measure(QUICK, "cpu")
    program = [sys.executable, "-m", *shlex.split(QUICK), "--device", "cpu", "--json", "--quiet"]
    done = subprocess.run(program, check=True, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ))
    alone = json.loads(done.stdout)
    for figures in (row, alone):
        for name in ("seconds", "wall_seconds"):
            figures.pop(name, None)
    assert row == alone


def test_a_refusal_is_a_cell_with_its_reason() -> None:
    row = measure("fedcdp attack --dataset cancer --leak type0 --attack fishing --method nonprivate --steps 1000", "cpu")
    assert "steps" in row["refused"]


def test_shares_aucs_and_missing_cells_are_told_apart() -> None:
    assert shown("imprint", {"success_rate": 0.875}) == "87.5 %"
    assert shown("type-2", {"success_rate": 0.0, "recognisable_rate": 1.0}) == "0 / 100 %"
    assert shown("presence", {"auc": 0.5}) == ".50"
    assert shown("imprint", None) == "–"
    assert shown("imprint", {"refused": "why"}) == "refused"


def test_the_matrix_has_a_row_for_every_method_and_trust_model() -> None:
    row: dict[str, Any] = {"refused": "no such sum"}
    lines = matrix({"cells": {"imprint/the sum/DSSGD": row}}, ("imprint", "labels")).splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(METHODS) * len(TRUST)
    assert "| the sum | DSSGD | refused (1) | – |" in lines
    assert lines[-1] == "1. no such sum"


@pytest.mark.parametrize("method", ["dssgd", "fed-sdp --noise-at client"])
def test_a_reader_on_the_client_sees_the_same_under_a_secure_sum(method: str) -> None:
    command = (
        "fedcdp attack --leak type1 --attack labels --dataset mnist5k --network mlp --local-steps 1 --partition iid "
        "--record-sampling partition --clients 4 --per-round 4 --records 4 --batch-size 4 --victims 2 --method"
    )
    rows = [measure(f"{command} {method}{words}", "cpu") for words in ("", " --secure-aggregation")]
    assert rows[0]["label_accuracy"] == rows[1]["label_accuracy"]
    assert rows[0]["noise_deviation"] == rows[1]["noise_deviation"]
    assert "type-1/the sum/DSSGD" not in NAMES
    assert "| the sum | DSSGD | as above |" in matrix({}, ("type-1",))


def test_a_server_that_reads_each_update_has_the_cells_of_type_1() -> None:
    assert not [name for name in NAMES if name.startswith("type-0/each update/")]
    assert "| each update | DSSGD | – | as type-1 |" in matrix({}, ("type-1", "type-0"))


def test_the_page_says_how_long_the_cells_took() -> None:
    cell = Cell("labels", "each update", "DSSGD")
    row = {"victims": 100, "label_accuracy": 0.5, "label_baseline": 0.41, "wall_seconds": 3.2, "command": cell.command}
    runs = [{"cells": 1, "seconds": 540.0, "machine": "a machine", "workers": 16}]
    page = markdown({"runs": runs, "cells": {cell.name: row}})
    assert "1 cells in 9.0 minutes: a machine, 16 processes." in page
    assert "| labels/each update/DSSGD | 100 | – | – | – | – | 50 % | – | labels 41 % | 3 |" in page


def test_every_column_names_a_threat_model() -> None:
    assert all(column.threat and column.kind for column in COLUMNS.values())
