"""Write the fixtures in `tests/fixtures/0.1.0`: files written by the released code (version 0.1.0, commit 3997731).

The fixtures never change: `tests/test_released_fixtures.py` opens and resumes them with today's code. This program documents
how they were made, and can make those of a later release:

    git worktree add ../released COMMIT
    PYTHONPATH=../released/src python -m tools.released_fixtures tests/fixtures/VERSION

| fixture | what it is |
| --- | --- |
| `records.csv` | the data: 150 records of four features, two classes |
| `trainings/NAME` | a killed training; `NAME.safetensors`: the model after the released code completed it |
| `client` | a client's state directory: several tasks, two of which differ from another only in their written form |
| `SITE` | a deployment whose server was killed during a round. Keys and certificates are omitted: a test makes its own |
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcdp.config.experiment import assemble
from fedcdp.config.plan import Plan
from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.server import ServerSettings, serve
from fedcdp.deploy.protocol.task import Task
from fedcdp.deploy.site.directory import Site, SiteSettings
from fedcdp.deploy.site.writer import experiment_for, write
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.trainer import train_experiment
from tests.support.local_grid import Killed, LocalGrid, Node

NODES, ROUNDS = 3, 4
_USUAL: dict[str, Any] = {"rounds": 6, "per_round": 4, "local_steps": 2, "batch_size": 3, "noise_multiplier": 1.0}
_RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # name: settings of the data, of the plan, and whether it is killed between two rounds or in one that is already charged
    "seeded": ({}, {}, "between"),
    "secure": ({}, {"secure_noise": True}, "within"),
    "quantile": ({}, {"clip": "quantile(0.5, 2)", "quantile_noise": 2.0, "ema": 0.5}, "between"),
    "unequal": ({"partition": "dirichlet", "alpha": 0.4}, {"record_sampling": "partition", "batch_size": 5}, "within"),
    "decay-noise-stays": (
        {},
        {"method": "fed-cdp-decay", "noise_follows_clip": False, "secure_noise": True, "momentum": 0.5},
        "within",
    ),
    "fed-sdp-poisson": ({}, {"method": "fed-sdp", "client_sampling": "poisson"}, "between"),
}
_KILLED_AFTER = 3


def _records(path: Path) -> None:
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 2, 150)
    values = rng.normal(size=(150, 4)) + 1.5 * labels[:, None]
    rows = [",".join(f"{value:.3f}" for value in row) + f",{label}" for row, label in zip(values, labels, strict=True)]
    path.write_text("a,b,c,d,label\n" + "\n".join(rows) + "\n")


def _run(out: Path, data: dict[str, Any], plan: dict[str, Any], killed: str) -> None:
    experiment = assemble({"data": {"file": "records.csv", "clients": 8} | data, "plan": _USUAL | {"seed": 11} | plan,
                           "model": {"network": "mlp"}})  # fmt: skip
    save, done = RunDirectory.save_state, 0

    def stop(*_: object) -> None:
        nonlocal done
        done += 1
        if killed == "between" and done == _KILLED_AFTER:
            raise Killed

    def fail(self: RunDirectory, *rest: Any) -> None:
        if killed == "within" and done == _KILLED_AFTER:
            raise Killed  # charged, trained, metrics written, but no checkpoint
        save(self, *rest)

    RunDirectory.save_state = fail  # type: ignore[method-assign]
    try:
        train_experiment(experiment, out, quiet=True, progress=stop)
    except Killed:
        pass
    finally:
        RunDirectory.save_state = save  # type: ignore[method-assign]
    (out / "lock").unlink()
    if not experiment.plan.secure_noise:
        copy = out.with_name("completed")
        shutil.copytree(out, copy)
        train_experiment(experiment, copy, resume=True, quiet=True)
        shutil.move(copy / "model.safetensors", out.with_suffix(".safetensors"))
        shutil.rmtree(copy)


def _client(directory: Path) -> None:
    """A ledger with tasks that the released code confused: its budget counted less than was released."""
    plan = Plan(rounds=10, per_round=4, local_steps=5, batch_size=5, secure_noise=True)
    tensors = {"0.weight": (4, 3), "0.bias": (4,), "2.weight": (2, 4)}
    first = Task(run="a" * 32, shape=(3,), classes=2, network="mlp", activation=None, tensors=tensors, constants="",
                 plan=plan, smallest_cohort=2)  # fmt: skip
    reordered = replace(first, tensors=dict(reversed(tensors.items())))
    negative = replace(first, plan=plan.but(momentum=-0.0))
    decaying = replace(first, run="b" * 32, plan=plan.but(method="fed-cdp-decay", noise_follows_clip=False))
    moving = replace(first, run="c" * 32, plan=plan.but(clip="quantile(0.5, 4)"))
    accepted_only = replace(first, run="d" * 32)
    made = [(first, 3), (reordered, 2), (negative, 1), (decaying, 2), (moving, 1), (accepted_only, 0)]
    with ClientLedger.held(directory) as ledger:
        for task, times in made:
            ledger.accept(task, 100)
            for round_ in range(times):
                ledger.charge(task.digest(), round_, 0, task.plan.clip_at(0))
    (directory / "lock").unlink()
    (directory.parent / "client.json").write_text(json.dumps([[task.digest(), times] for task, times in made]) + "\n")


def nodes_of(site: Site) -> dict[int, Node]:
    """The nodes of a deployment in this process, each created from its own files."""
    nodes = {}
    for place in site.nodes(NODES):
        config = tomllib.loads(place.config.read_text())
        paths = {name: str(place.path / config[name]) for name in ("policy", "state-dir", "data")}
        number = {"partition-id": place.number - 1}  # number of the simulator's client, for a reproducible task
        nodes[100 + place.number] = Node(client_app(), config | paths | number)
    return nodes


def settings_of(site: Site) -> ServerSettings:
    """The server's settings in a deployment, with shorter timeouts."""
    config = tomllib.loads((site.app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    return replace(ServerSettings.of(config), round_timeout=0.5, subscribe_timeout=1.0)


def _site(path: Path, secure: bool) -> None:
    given = {"data": {"file": "records.csv"}, "model": {"network": "mlp"},
             "plan": {"rounds": ROUNDS, "local_steps": 2, "batch_size": 3, "noise_multiplier": 2.0, "seed": 5}
             | ({} if secure else {"secure_noise": False})}  # fmt: skip
    experiment = experiment_for(NODES, [given])
    site = write(path, SiteSettings(nodes=NODES, port=8443), experiment)
    grid = LocalGrid(nodes_of(site), fail_at=(NODES + 2 * NODES + 1, "after"))  # in the third round, after the second reply
    with contextlib.suppress(Killed):
        serve(grid, experiment, site.run, settings_of(site))
    if not secure:
        copy = path.with_name("completed")
        shutil.copytree(path, copy)
        serve(LocalGrid(nodes_of(Site(copy))), experiment, copy / "run", settings_of(site))
        shutil.move(copy / "run" / "model.safetensors", path.with_suffix(".safetensors"))
        shutil.rmtree(copy)
    (path / ".gitignore").unlink()
    for each in [*path.rglob("*.key"), *path.rglob("*.pem"), *path.rglob("*.pub"), *path.rglob("lock")]:
        each.unlink()
    connection = path / "flwr" / "config.toml"
    connection.write_text(connection.read_text().replace(str(path), "SITE"))


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder).resolve()
        os.chdir(base)
        _records(base / "records.csv")
        (base / "trainings").mkdir()
        for name, (data, plan, killed) in _RUNS.items():
            _run(base / "trainings" / name, data, plan, killed)
        _client(base / "client")
        _site(base / "site", secure=True)
        _site(base / "site-reproducible", secure=False)
        shutil.copytree(base, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
