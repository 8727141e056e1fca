"""Writing a deployment: a directory that works as it is, and that says what to replace before it is more than a test."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from fedcdp.config.experiment import Experiment, assemble
from fedcdp.config.presets import Settings
from fedcdp.deploy.site import texts
from fedcdp.deploy.site.certificates import Authority, new_node_key, require_cryptography
from fedcdp.deploy.site.directory import CONNECTION, Site, SiteSettings
from fedcdp.deploy.site.policies import node_text, policy_text
from fedcdp.errors import DeploymentError
from fedcdp.training.prepared import deal_out, load_splits

_SECRET, _PLAIN, _PROGRAM = 0o600, 0o644, 0o755


def experiment_for(nodes: int, given: list[Settings]) -> Experiment:
    """The experiment of a deployment: one client a node, all in every round, noise from the operating system.

    Settings that are given win, but for the number of clients, which is the number of nodes.
    """
    ours: Settings = {"data": {"clients": nodes}, "plan": {"per_round": nodes, "secure_noise": True}}
    experiment = assemble(ours, *given)
    if experiment.data.clients != nodes:
        raise DeploymentError(
            f"clients: {experiment.data.clients} is not the number of nodes, {nodes}: each node is one client"
        )
    experiment.plan.check_clients(nodes)
    return experiment


def write(
    directory: Path | str,
    settings: SiteSettings,
    experiment: Experiment,
    client_epsilon: float | None = None,
    server: Mapping[str, int | float] | None = None,
) -> Site:
    """Write a deployment into a directory that is new or empty; every secret is readable by its owner only.

    Each client's policy grants `client_epsilon`; where none is given, what the plan costs it. `server` has settings of
    the ServerApp that are not the usual ones, such as `round-timeout`.
    """
    require_cryptography()
    site = Site(directory)
    try:
        _refuse_content(site.path)
        site.path.mkdir(parents=True, exist_ok=True)
        policy = policy_text(experiment, client_epsilon)
        texts = [*_texts(site, settings, experiment, policy), _app(site, experiment, server or {})]
        for path, content, mode in [*_secrets(site, settings), *texts, *_records(site, experiment)]:
            _write(path, content, mode)
    except OSError as error:
        raise DeploymentError(f"{error.filename or site.path} cannot be written: {error.strerror}") from error
    return site


def _refuse_content(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise DeploymentError(f"{path} is a file; choose another name for the deployment")
    if path.is_dir() and any(path.iterdir()):
        raise DeploymentError(f"{path} is not empty; choose a new directory for the deployment")


def _secrets(site: Site, settings: SiteSettings) -> list[tuple[Path, bytes, int]]:
    authority = Authority.new()
    server = authority.sign_server([settings.host, "localhost", "127.0.0.1"])
    files = [
        (site.authority / "ca.key", authority.pair.private, _SECRET),
        (site.authority / "ca.pem", authority.pair.public, _PLAIN),
        (site.server / "server.key", server.private, _SECRET),
        (site.server / "server.pem", server.public, _PLAIN),
    ]
    for node in site.nodes(settings.nodes):
        key = new_node_key()
        files += [
            (node.key, key.private, _SECRET),
            (node.public_key, key.public, _PLAIN),
            (node.authority, authority.pair.public, _PLAIN),
        ]
    return files


def _texts(site: Site, settings: SiteSettings, experiment: Experiment, policy: str) -> list[tuple[Path, bytes, int]]:
    files = [
        (site.settings_file, settings.to_toml(), _PLAIN),
        (site.experiment, experiment.to_toml(), _PLAIN),
        (site.flwr / "config.toml", _connection(site, settings), _PLAIN),
        (site.path / "start-superlink.sh", texts.superlink(settings), _PROGRAM),
        (site.path / "run.sh", texts.run(settings), _PROGRAM),
        (site.path / "README.md", texts.text(settings, experiment), _PLAIN),
        (site.path / ".gitignore", "*\n", _PLAIN),  # a deployment holds keys, which belong in no repository
    ]
    for node in site.nodes(settings.nodes):
        files += [
            (node.config, node_text(experiment, node.number), _SECRET),
            (node.policy, policy, _SECRET),
            (site.path / f"start-{node.name}.sh", texts.node(settings, node.number), _PROGRAM),
        ]
    return [(path, content.encode(), mode) for path, content, mode in files]


def _records(site: Site, experiment: Experiment) -> list[tuple[Path, bytes, int]]:
    """Of a file of the user's, each node gets the part that the simulator's client has, and no other."""
    if experiment.data.file is None:
        return []
    federation = deal_out(experiment, load_splits(experiment, quiet=True))
    if federation.copies > 1:  # a server does not know of copies among clients' own records, and would count too little
        raise DeploymentError(f"partition: {experiment.data.partition} gives a record to several nodes; deal out each once")
    files = []
    for node in site.nodes(federation.clients):
        part, content = federation.train.take(torch.from_numpy(federation.indices(node.number - 1))), BytesIO()
        np.savez(content, x=part.inputs.numpy(), y=part.targets.numpy())
        files.append((node.records, content.getvalue(), _SECRET))
    return files


def _app(site: Site, experiment: Experiment, server: Mapping[str, int | float]) -> tuple[Path, bytes, int]:
    return site.app / "pyproject.toml", app_project(experiment, server).encode(), _PLAIN


def app_project(experiment: Experiment, server: Mapping[str, int | float]) -> str:
    """The Flower app: which parts of this package to run. It goes to every node, so nothing that is secret is in it."""
    usual: dict[str, int | float] = {
        "min-clients": experiment.data.clients,
        "min-cohort": 1,
        "round-timeout": 600.0,
        "subscribe-timeout": 300.0,
        "most-failed-rounds": 3,
    }
    waiting = "\n".join(f"{name} = {value}" for name, value in (usual | dict(server)).items())
    return f"""# A Flower app that consists of fedcdp's own ServerApp and ClientApp, which are installed where they run.
# This file is sent to every node: the plan is published by the server, policies and data stay at the nodes.
[project]
name = "fedcdp-deployment"
version = "1.0.0"
description = "Gradient-leakage resilient federated learning"
license = "Apache-2.0"
dependencies = ["fedcdp[flower]"]

[tool.flwr.app]
publisher = "fedcdp"

[tool.flwr.app.components]
serverapp = "fedcdp.flower.app:server"
clientapp = "fedcdp.flower.app:client"

[tool.flwr.app.config]
# The plan and the run directory, where the server runs.
experiment = "experiment.toml"
out = "run"
# Noise from a published seed, which protects nobody: for tests.
reproducible = {str(not experiment.plan.secure_noise).lower()}
# Fewest clients to start and go on with, fewest updates for a model, seconds to wait for a round and for subscribers.
# smallest-records: fewest records of a client, for which ε is stated; by default, as the experiment deals its data out.
# With fed-sdp and noise at the server every round takes all of round-timeout: its length must not show who took part.
{waiting}
"""


def _connection(site: Site, settings: SiteSettings) -> str:
    address = texts.address_of(settings)
    certificate = json.dumps(str(site.authority / "ca.pem"), ensure_ascii=False)
    return (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n'
        f'[superlink.{CONNECTION}]\naddress = "{address}"\nroot-certificates = {certificate}\n'
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Never readable by others, not even for the moment before its permissions are set.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    path.chmod(mode)  # the process's mask may have taken more away
