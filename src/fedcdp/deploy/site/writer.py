"""Write a deployment: a directory that works as it is, and that lists what to replace before it is more than a test.

The texts (scripts, commented settings, the README) are rendered from `templates/`. A node's folder names its client's data,
and what the client grants and to whom.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcdp.config.default_recipe import recipe_applies
from fedcdp.config.experiment import Experiment
from fedcdp.config.plan import Plan
from fedcdp.config.presets import Settings
from fedcdp.deploy.site.certificates import VALID_DAYS, Authority, new_node_key, require_cryptography
from fedcdp.deploy.site.dashboard import dashboard_text
from fedcdp.deploy.site.directory import CONNECTION, NodePlace, Site, SiteSettings
from fedcdp.deploy.site.node_keys import ListedNode, list_text
from fedcdp.deploy.site.operate_file import monitor_address
from fedcdp.deploy.site.own_file import OwnFile
from fedcdp.deploy.site.scripts import node_script, render, server_scripts
from fedcdp.deploy.site.service_files import ServiceFiles
from fedcdp.errors import DeploymentError, PlanError
from fedcdp.training.planning import Planned, plan_experiment
from fedcdp.training.prepared import deal_out, load_splits, population_of, with_clients_of_file


def node_text(experiment: Experiment, number: int, own: OwnFile | None = None) -> str:
    """`node.toml`: the node's configuration for Flower. Client k of the simulator is node k + 1 here."""
    data, plan = experiment.data, experiment.plan
    if own is not None:
        return render("node.toml", own_records=True, part=own.options(number - 1), sums=plan.sums)
    part: dict[str, str | int | float | None] = {
        "dataset": data.dataset,
        "partition-id": number - 1,
        "num-partitions": data.clients,
        "partition": data.partition,
        "records": data.records,
        "classes-per-client": data.classes_per_client,
        "alpha": data.alpha,
        "split-seed": data.split_seed,
        "scaling": "public" if data.scaling in ("public", "private") else None,  # private scaling starts from public ranges
        "partition-seed": plan.seed,
    }
    given = {name: value for name, value in part.items() if value is not None}
    return render("node.toml", own_records=False, part=given, sums=plan.sums)


def policy_text(experiment: Experiment, epsilon: float | None, records: int | None = None) -> str:
    """`policy.toml`: what the client grants; without an `epsilon`, the plan's cost over all its rounds.

    The cost is that of a client with this many `records`; by default, of the smallest client.
    """
    from fedcdp.deploy.protocol.policy import effective_noise

    if epsilon is not None and not epsilon > 0:
        raise DeploymentError(f"client_epsilon: {epsilon:g} is not allowed; it must be above 0, or inf for no limit")
    plan, run = experiment.plan, experiment.run
    granted = needed_epsilon(experiment, records) if epsilon is None else epsilon
    return render(
        "policy.toml",
        no_limit=granted == math.inf,
        epsilon=_shortest(granted),
        delta=_shortest(plan.delta),
        adversary=run.adversary,
        unit=run.unit,
        method=plan.method,
        smallest_noise_multiplier=_shortest(effective_noise(plan) if plan.private else 0.0),
        allow_reproducible=not plan.secure_noise,
        allow_custom_network=":" in experiment.model.network,
        sums=plan.sums,
        colluders=plan.colluders,
        smallest_honest=min(2, plan.honest),
    )


def needed_epsilon(experiment: Experiment, records: int | None = None) -> float:
    """The ε by a client's own accounting for every round and some repeated ones, rounded up; ∞ if there is none."""
    from fedcdp.deploy.protocol.grant import wanted_participations

    cost = epsilon_of(experiment, wanted_participations(experiment.plan), records)
    return cost if cost in (0.0, math.inf) else _rounded_up(cost)


def epsilon_of(experiment: Experiment, releases: int, records: int | None = None) -> float:
    """The ε by a client's own accounting (`protocol.grant`) for this many releases of its first task."""
    from fedcdp.deploy.protocol.grant import Grant, Reservation
    from fedcdp.deploy.protocol.task import Task

    plan, run = experiment.plan, experiment.run
    if not plan.private:
        return math.inf
    population = population_of(experiment)
    task = Task(
        run="0" * 32,
        shape=(1,),
        classes=2,
        network="mlp",
        activation=None,
        tensors={f"{layer}.weight": (1,) for layer in range(population.layers)},  # only their number matters
        constants="",
        plan=plan,
        smallest_cohort=1,
        reproducible=not plan.secure_noise,
    )
    try:
        reserved = Reservation(task, records or population.records, 1, releases, plan.scaling_noise is not None)
        return Grant(1.0, plan.delta, run.adversary, run.unit).cost(reserved)
    except PlanError as error:
        raise PlanError(f"{error}; choose another --adversary or --unit for the nodes' policies") from None


def _rounded_up(value: float) -> float:
    """Round up to two digits, so the number looks chosen rather than computed."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")


def _shortest(value: float) -> int | float:
    """The same number without a needless `.0`. Rounding it might grant more, or refuse the plan it was made for."""
    return int(value) if float(value).is_integer() else value


_SECRET, _PLAIN, _PROGRAM = 0o600, 0o644, 0o755
_USUAL_NODES = 2
_STALLED_SECONDS = 3600  # without a finished round, after which the alert rules complain


def experiment_for(nodes: int | None, given: list[Settings]) -> Experiment:
    """The experiment of `plan_for`."""
    return plan_for(nodes, given).experiment


def plan_for(nodes: int | None, given: list[Settings], target_epsilon: float | None = None) -> Planned:
    """The experiment of a deployment: one client per node, all in every round, noise from the operating system.

    Given settings take precedence, except the number of clients, which is the number of nodes: by default, as many as a
    client column names, else 2. Without a plan, the recommended recipe is used; with a target, the noise is calibrated to
    it. Where clients weigh by their records, the plan gets the public mean of these: clients do not know each other's.
    """
    named = with_clients_of_file(given)[0].get("data", {}).get("clients") if _last(given, "data", "client_column") else None
    if named is not None and nodes not in (None, named):
        raise DeploymentError(f"nodes: {nodes} is not {named}, the number of clients that the client column names")
    nodes = named or nodes or _USUAL_NODES
    if (clients := _last(given, "data", "clients", nodes)) != nodes:
        raise DeploymentError(f"clients: {clients} is not the number of nodes, {nodes}: each node is one client")
    ours: Settings = {"data": {"clients": nodes}, "plan": {"per_round": nodes, "secure_noise": True}}
    if _last(given, "plan", "secure_aggregation") and _last(given, "plan", "noise", "sum") == "sum":
        ours["plan"]["attempts"] = 2
        if not recipe_applies(given):  # the recipe has its own
            ours["plan"] |= {"noise": "sum", "local_steps": 1, "clip_mode": "flat", "colluders": int(nodes > 2)}
    planned = plan_experiment([ours, *given], population_of, target_epsilon=target_epsilon)
    experiment, plan = planned.experiment, planned.experiment.plan
    plan.check_clients(nodes)
    if plan.weighting == "records" and plan.mean_records is None:
        federation = deal_out(experiment, load_splits(experiment, quiet=True))
        mean = float(federation.sizes(np.arange(federation.clients)).mean())
        planned = replace(planned, experiment=replace(experiment, plan=plan.but(mean_records=mean)))
    return planned


def _last(given: list[Settings], section: str, name: str, default: Any = None) -> Any:
    """The value of a setting in the last layer that has it."""
    return next((layer[section][name] for layer in reversed(given) if name in layer.get(section, {})), default)


def write(
    directory: Path | str,
    settings: SiteSettings,
    experiment: Experiment,
    client_epsilon: float | None = None,
    server: Mapping[str, int | float] | None = None,
    ways: Collection[str] = (),
) -> Site:
    """Write a deployment into a new or empty directory; every secret is readable by its owner only.

    Each client's policy grants `client_epsilon`; by default, what the plan costs the client. `server` holds settings of the
    ServerApp that differ from the defaults, such as `round-timeout`. For each of `ways` (`service_files.WAYS`) there are
    files that run the deployment as services.
    """
    require_cryptography()
    site = Site(directory)
    try:
        _refuse_content(site.path)
        site.path.mkdir(parents=True, exist_ok=True)
        own = OwnFile.of(experiment)
        nodes = site.nodes(settings.nodes, () if own is None else own.names)
        services = ServiceFiles(
            site=site, settings=settings, experiment=experiment, nodes=nodes, ways=tuple(dict.fromkeys(ways))
        )
        app = _app(site, experiment, _of_sizes(own) | dict(server or {}))
        texts = [*_texts(services, own, client_epsilon), app]
        records = [] if own is None else [file for node in nodes for file in own.files(node)]
        secrets = _secrets(site, nodes, [settings.host, "localhost", "127.0.0.1", *services.host_names])
        lists = _lists(nodes, secrets) if experiment.plan.sums else []
        for path, content, mode in [*secrets, *texts, *records, *lists, *services.files()]:
            write_new(path, content, mode)
        for folder in services.directories:
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise DeploymentError(f"{error.filename or site.path} cannot be written: {error.strerror}") from error
    return site


def _refuse_content(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise DeploymentError(f"{path} is a file; choose another name for the deployment")
    if path.is_dir() and any(path.iterdir()):
        raise DeploymentError(f"{path} is not empty; choose a new directory for the deployment")


def _secrets(site: Site, nodes: list[NodePlace], hosts: list[str]) -> list[tuple[Path, bytes, int]]:
    authority = Authority.new()
    server = authority.sign_server(hosts)
    files = [
        (site.authority / "ca.key", authority.pair.private, _SECRET),
        (site.authority / "ca.pem", authority.pair.public, _PLAIN),
        (site.server / "server.key", server.private, _SECRET),
        (site.server / "server.pem", server.public, _PLAIN),
    ]
    for node in nodes:
        key = new_node_key()
        files += [
            (node.key, key.private, _SECRET),
            (node.public_key, key.public, _PLAIN),
            (node.authority, authority.pair.public, _PLAIN),
        ]
    return files


def _lists(nodes: list[NodePlace], secrets: list[tuple[Path, bytes, int]]) -> list[tuple[Path, bytes, int]]:
    """Each node's list of the nodes that it knows: all of them, with keys that were made here."""
    written = {path: content for path, content, _ in secrets}
    known = [ListedNode(node.name, written[node.public_key].decode(), "operator") for node in nodes]
    return [(node.known, list_text(known).encode(), _SECRET) for node in nodes]


def _texts(services: ServiceFiles, own: OwnFile | None, client_epsilon: float | None) -> list[tuple[Path, bytes, int]]:
    site, settings, experiment, nodes = services.site, services.settings, services.experiment, services.nodes
    policies: dict[int | None, str] = {}
    files = [
        (site.settings_file, settings.to_toml(), _PLAIN),
        (site.experiment, experiment.to_toml(), _PLAIN),
        (site.flwr / "config.toml", _connection(site, settings), _PLAIN),
        (site.server / "operate.toml", operate_text("server", 0), _SECRET),
        *((site.monitoring / name, text, _PLAIN) for name, text in monitoring_texts(nodes, experiment).items()),
        (site.path / "README.md", _readme(services), _PLAIN),
        (site.path / ".gitignore", "*\n", _PLAIN),  # a deployment holds keys, which do not belong in a repository
    ]
    files += [(site.path / name, text, _PROGRAM) for name, text in server_scripts(settings).items()]
    for node in nodes:
        held = None if own is None else own.records(node.number - 1)
        if held not in policies:
            policies[held] = policy_text(experiment, client_epsilon, held)
        files += [
            (node.config, node_text(experiment, node.number, own), _SECRET),
            (node.policy, policies[held], _SECRET),
            (node.operate, operate_text("node", node.number), _SECRET),
            (site.path / f"start-{node.name}.sh", node_script(settings, node.number, node.name), _PROGRAM),
        ]
    return [(path, content.encode(), mode) for path, content, mode in files]


def operate_text(role: str, number: int) -> str:
    """`operate.toml` of the server (0) or of a node."""
    return render("operate.toml", role=role, listen=monitor_address(number))


def monitoring_texts(nodes: Sequence[NodePlace], experiment: Experiment) -> dict[str, str]:
    """What Prometheus reads and watches for, and a dashboard. They name nothing that the plan hides."""
    hidden = experiment.plan.hides_members
    targets = {node.name: monitor_address(node.number) for node in nodes}
    return {
        "prometheus.yml": render("prometheus.yml", server=monitor_address(0), nodes=targets),
        "alerts.yml": render("alerts.yml", hidden=hidden, stalled=_STALLED_SECONDS),
        "dashboard.json": dashboard_text("fedcdp", hidden=hidden),
    }


def _of_sizes(own: OwnFile | None) -> dict[str, int | float]:
    """The server's settings that follow from the sizes of clients in a user's own file, whatever file the server gets."""
    if own is None:
        return {}
    return {"smallest-records": own.federation.smallest, "most-records": own.federation.largest}


def _app(site: Site, experiment: Experiment, server: Mapping[str, int | float]) -> tuple[Path, bytes, int]:
    return site.app / "pyproject.toml", app_project(experiment, server).encode(), _PLAIN


def app_project(experiment: Experiment, server: Mapping[str, int | float]) -> str:
    """The Flower app: which parts of this package to run. It is sent to every node, so it holds no secret."""
    usual: dict[str, int | float] = {
        "min-clients": experiment.data.clients,
        "min-cohort": smallest_roster(experiment.plan) if experiment.plan.sums else 1,
        "round-timeout": 600.0,
        "subscribe-timeout": 300.0,
        "most-failed-rounds": 3,
        "joining": False,
    }
    return render("app.toml", reproducible=not experiment.plan.secure_noise, waiting=usual | dict(server))


def smallest_roster(plan: Plan) -> int:
    """The smallest cohort that a deployment promises for secure sums: two honest clients, or as many as there are."""
    return min(plan.per_round, plan.colluders + 2)


def _readme(services: ServiceFiles) -> str:
    """What the directory holds, how to start it, and what to replace before it guards real data."""
    settings, experiment = services.settings, services.experiment
    return render(
        "README.md",
        settings=settings,
        ways=services.ways,
        names=[settings.host, *services.host_names],
        plan=experiment.plan,
        data=experiment.data.dataset or "your own examples",
        valid_days=VALID_DAYS,
    )


def _connection(site: Site, settings: SiteSettings) -> str:
    """Where `flwr` finds the server."""
    import tomli_w

    place = {"address": settings.control_address, "root-certificates": str(site.authority / "ca.pem")}
    return tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: place}})


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a file that does not exist yet, with exactly this mode."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Never readable by others, not even briefly before its permissions are set.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    path.chmod(mode)  # the umask may have removed more permissions
