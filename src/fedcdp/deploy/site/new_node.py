"""One more node for a deployment that exists, for a client that joins: its folder, its start script, its service files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedcdp.config.experiment import assemble, read_toml
from fedcdp.deploy.site.certificates import new_node_key, require_cryptography
from fedcdp.deploy.site.directory import MOST_NODES, NodePlace, Site
from fedcdp.deploy.site.node_keys import ListedNode, list_text
from fedcdp.deploy.site.scripts import node_script, render
from fedcdp.deploy.site.service_files import ServiceFiles, ways_of
from fedcdp.deploy.site.writer import operate_text, policy_text, write_new
from fedcdp.errors import DeploymentError
from fedcdp.files.disk import write_atomically

_SECRET, _PLAIN, _PROGRAM = 0o600, 0o644, 0o755


def add_node(site: Site, client: str = "", client_epsilon: float | None = None) -> NodePlace:
    """Write the next node of a deployment. Its owner names the records in `node.toml` before it is started.

    The other nodes' files stay as they are: each owner decides whether to list the new node for secure sums.
    """
    require_cryptography()
    settings = site.require()
    if settings.nodes == MOST_NODES:
        raise DeploymentError(f"{site.path} has {MOST_NODES} nodes, and no more are allowed")
    experiment = assemble(read_toml(site.experiment))
    number, key = settings.nodes + 1, new_node_key()
    node = site.node(number, client)
    if node.path.exists():
        raise DeploymentError(f"{node.path} already exists")
    config = render("node.toml", own_records=True, part=_part(client), sums=experiment.plan.sums)
    files = [
        (node.key, key.private, _SECRET),
        (node.public_key, key.public, _PLAIN),
        (node.authority, (site.authority / "ca.pem").read_bytes(), _PLAIN),
        (node.config, config.encode(), _SECRET),
        (node.policy, policy_text(experiment, client_epsilon).encode(), _SECRET),
        (node.operate, operate_text("node", number).encode(), _SECRET),
        (site.path / f"start-{node.name}.sh", node_script(settings, number, node.name).encode(), _PROGRAM),
    ]
    if experiment.plan.sums:
        known = [*_listed(site, settings.nodes), ListedNode(node.name, key.public.decode(), "operator")]
        files.append((node.known, list_text(known).encode(), _SECRET))
    services = ServiceFiles(site=site, settings=settings, experiment=experiment, nodes=[node], ways=ways_of(site))
    files += services.files_of(node)
    try:
        for path, content, mode in files:
            write_new(path, content, mode)
        write_atomically(site.settings_file, replace(settings, nodes=number).to_toml().encode(), _PLAIN)
    except OSError as error:
        raise DeploymentError(f"{error.filename or site.path} cannot be written: {error.strerror}") from error
    return node


def _part(client: str) -> dict[str, str]:
    """Where the records are, for the owner to replace."""
    return {"data": "records.npz"} | ({"client": client} if client else {})


def _listed(site: Site, nodes: int) -> list[ListedNode]:
    """The nodes whose public keys are here. Their owners may have made new ones."""
    keys: list[tuple[str, Path]] = [(node.name, node.public_key) for node in site.nodes(nodes)]
    return [ListedNode(name, path.read_text(encoding="utf-8"), "operator") for name, path in keys if path.is_file()]
