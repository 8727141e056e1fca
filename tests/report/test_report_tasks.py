"""The page about tasks without an accuracy, about token inputs, and about named clients."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedcdp
from fedcdp.data.dataset import Dataset
from fedcdp.errors import RunError
from fedcdp.report.api import gather, report
from fedcdp.report.facts import leak_facts
from fedcdp.training.rundir import RunDirectory

PLAN = fedcdp.Plan(rounds=3, per_round=3, local_steps=2, batch_size=4, noise_multiplier=0.3)
INPUTS = torch.linspace(-1, 1, 72).reshape(24, 3)
TOKENS = torch.arange(24 * 4).reshape(24, 4) % 7
CASES: dict[str, tuple[Dataset, nn.Module, Any, str]] = {
    "regression": (Dataset(INPUTS, INPUTS.sum(1), task="regression"), nn.Linear(3, 1), None, "MAE"),
    "multilabel": (Dataset(INPUTS, (INPUTS > 0).float(), task="multilabel"), nn.Linear(3, 3), None, "Exact match"),
    "tokens": (
        Dataset(TOKENS, torch.arange(24) % 2, task="binary"),
        nn.Sequential(nn.Embedding(7, 2), nn.Flatten(), nn.Linear(8, 1)), None, "Accuracy",
    ),
    "custom": (
        Dataset(INPUTS, INPUTS[:, None], task="custom"), nn.Linear(3, 3), lambda o, t: (o - t[:, 0]).square().mean(), "Loss",
    ),
}  # fmt: skip


def trained(name: str, out: Path | None = None, named: bool = False) -> fedcdp.Run | Any:
    data, network, loss, _ = CASES[name]
    federation = fedcdp.partition(data, indices=[range(8), range(8, 16), range(16, 24)], validation=data)
    if named:
        owners = np.repeat([0, 1, 2], [4, 8, 12])
        federation = replace(federation, names=("charite", "<b>bonn</b>", "ulm"), validation_clients=owners)
    return fedcdp.simulate(network, federation, PLAN, loss=loss, out=out)


@pytest.mark.parametrize("name", CASES)
def test_every_task_has_a_page_with_its_main_metric(name: str, tmp_path: Path) -> None:
    title = CASES[name][3]
    in_memory = trained(name, tmp_path / "run")
    page = report(in_memory, tmp_path / "memory.html").read_text()
    assert f'<th scope="col" class="number">{title}</th>' in page
    assert f"{title} on held-out data, by round" in page
    assert re.search(f'<p class="headline">{title} is [-0-9.]+', page)
    stored = report(tmp_path / "run", tmp_path / "disk.html").read_text()
    assert f"{title} on held-out data, by round" in stored
    (facts,), _ = gather([tmp_path / "run"])
    assert facts.scores == pytest.approx(in_memory.scores)
    assert facts.accuracy == in_memory.accuracy


def test_runs_of_different_tasks_share_a_page(tmp_path: Path) -> None:
    page = report([trained("regression"), trained("multilabel")], tmp_path / "page.html").read_text()
    assert '<th scope="col" class="number">Result</th>' in page
    assert "MAE on held-out data, by round" in page
    assert "Exact match on held-out data, by round" in page


def test_clients_are_listed_by_name(tmp_path: Path) -> None:
    run = trained("regression", tmp_path / "run", named=True)
    for item, name in ((run, "memory.html"), (tmp_path / "run", "disk.html")):
        page = report(item, tmp_path / name).read_text()
        table = page[page.index("each client on its own held-out records") :].partition("</details>")[0]
        assert re.findall(r'<th scope="row">(.*?)</th><td class="number">(\d+)</td>', table) == [
            ("charite", "4"), ("&lt;b&gt;bonn&lt;/b&gt;", "8"), ("ulm", "12")
        ]  # fmt: skip
        assert f"{run.client_scores[0]['mae']:.4g}" in table


def test_labels_that_are_no_classes_are_not_shown() -> None:
    image = np.zeros((1, 1, 1, 4, 4))
    arrays = {"reconstruction": image, "seed": image, "original": image, "order": np.zeros((1, 1), int)}
    for labels in (np.full((1, 1), 0.5), np.zeros((1, 1, 3))):
        (example,) = leak_facts({}, arrays | {"original_label": labels}).examples
        assert example.label is None
    (example,) = leak_facts({}, arrays | {"original_label": np.full((1, 1), 3)}).examples
    assert example.label == 3


# scores.json -------------------------------------------------------------------------------------------------------------


def test_scores_of_another_round_are_not_shown(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.read_scores(3) == ({}, [])
    directory.save_scores(3, {"mae": 1.5, "r2": None}, [{"client": "ulm", "examples": 4, "mae": 1.0}])
    assert directory.read_scores(3) == ({"mae": 1.5, "r2": None}, [{"client": "ulm", "examples": 4, "mae": 1.0}])
    assert directory.read_scores(2) == ({}, [])


@pytest.mark.parametrize("written", [
    "", "[]", "{}", '{"round": 3}', '{"round": 3, "metrics": [], "clients": []}',
    '{"round": 3, "metrics": {"mae": "1"}, "clients": []}', '{"round": 3, "metrics": {"<b>": 1}, "clients": []}',
    '{"round": 3, "metrics": {"mae": NaN}, "clients": []}', '{"round": 3, "metrics": {}, "clients": {}}',
    '{"round": 3, "metrics": {}, "clients": [{"client": 3}]}', '{"round": 3, "metrics": {}, "clients": [3]}',
    '{"round": 3, "metrics": {}, "clients": [{"client": "a", "mae": []}]}',
])  # fmt: skip
def test_damaged_scores_are_refused_in_a_sentence(tmp_path: Path, written: str) -> None:
    (tmp_path / "scores.json").write_text(written)
    with pytest.raises(RunError, match=r"scores\.json is damaged$"):
        RunDirectory(tmp_path).read_scores(3)


def test_a_run_writes_its_scores(tmp_path: Path) -> None:
    run = trained("regression", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "scores.json").read_text()) == {
        "round": 3, "metrics": run.scores, "clients": []
    }  # fmt: skip
