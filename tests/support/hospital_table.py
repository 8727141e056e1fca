"""A made-up table of patients at four named hospitals of unequal size, and its deployment in this process."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedcdp.config.experiment import Experiment
from fedcdp.config.presets import Settings
from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.deploy.site.directory import Site, SiteSettings
from fedcdp.deploy.site.writer import experiment_for, write
from tests.support.local_grid import OPEN, Node

SIZES = {"St. Georg": 80, "Charité": 50, "Jena": 30, "Süd/2": 12}
LABELS = {
    "binary": "readmitted",
    "classification": "ward",
    "multilabel": "pain,fever",
    "regression": "days",
}
COLUMNS = "[age]\nrange = [0, 110]\n\n[days]\nrange = [0, 30]\n"
PLAN = {"rounds": 3, "local_steps": 2, "batch_size": 8, "noise_multiplier": 0.3, "learning_rate": 0.1, "seed": 5}


def write_table(path: Path) -> Path:
    """The table as a `.csv` file with semicolons; all of it is made up."""
    rng = np.random.default_rng(7)
    lines = ["hospital;patient;age;sex;bmi;readmitted;ward;pain;fever;days"]
    hospitals = [name for name, size in SIZES.items() for _ in range(size)]
    for number, hospital in enumerate(rng.permutation(hospitals)):
        age, sex, bmi = int(rng.integers(20, 90)), rng.choice(["f", "m", "x"]), round(float(rng.normal(0, 1)), 2)
        old = age + 20 * (sex == "m") > 60
        ward = "surgery" if bmi > 0.5 else "eyes" if old else "skin"
        lines.append(
            f'{hospital};p{number};{age};"{sex}";{bmi};{"yes" if old else "no"};{ward};{int(bmi > 0)};{int(old)};{age / 4}'
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def settings_of(directory: Path, task: str = "binary", **plan: Any) -> Settings:
    """The settings of a training on the table, which is written if it is missing."""
    table, columns = directory / "hospitals.csv", directory / "columns.toml"
    if not table.exists():
        write_table(table)
    columns.write_text(COLUMNS if task == "regression" else COLUMNS.partition("[days]")[0])
    unused = {"patient", *",".join(LABELS.values()).split(",")} - set(LABELS[task].split(","))
    data = {"file": str(table), "client_column": "hospital", "label_column": LABELS[task], "task": task,
            "drop_columns": ",".join(sorted(unused)), "categories": "sex=f|m", "columns": str(columns)}  # fmt: skip
    return {"data": data, "plan": {"secure_noise": False} | PLAN | plan}


def write_site(directory: Path, task: str = "binary", **plan: Any) -> tuple[Site, Experiment]:
    """A reproducible deployment of the table."""
    wanted = experiment_for(None, [settings_of(directory, task, **plan)])
    return write(directory / "site", SiteSettings(nodes=len(SIZES)), wanted), wanted


def nodes_of(site: Site, policy: ClientPolicy | None = OPEN) -> dict[int, Node]:
    """The nodes of a deployment, with paths as they would see them from their own folders; policy None: their own."""
    nodes = {}
    for place in site.nodes(len(SIZES)):
        config = tomllib.loads(place.config.read_text())
        named = [name for name in ("data", "columns", "policy", "state-dir") if name in config]
        paths = {name: str(place.path / config[name]) for name in named}
        nodes[100 + place.number - 1] = Node(client_app(policy=policy), config | paths)
    return nodes
