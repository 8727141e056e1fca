"""Files that run a deployment as services: behind a proxy, in containers, under systemd, in Kubernetes.

| `--for` | files |
| --- | --- |
| any, or `--proxy nginx` | `proxy/nginx.conf`, `start-proxy.sh` |
| `compose`, `kubernetes` | `container/`: a Dockerfile, and what its image installs |
| `compose` | `compose.yaml`, `.env` |
| `systemd` | `systemd/`: a unit for the server, its proxy, and each node |
| `kubernetes` | `kustomization.yaml` and `kubernetes/` for the server; the same inside each node's folder |

Every way starts the scripts that `fedcdp deploy up` runs. Images hold programs only: a build reads `container/`, which
has no key and no data. Behind the proxy the server listens on the loopback, because Flower lets anyone who reaches its
control API register keys and start apps. A node's machine needs nothing but the node's folder, its script and its unit.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files as resources
from pathlib import Path

from fedcdp._version import __version__
from fedcdp.config.experiment import Experiment
from fedcdp.deploy.site.directory import CONTROL_PORT, NodePlace, Site, SiteSettings
from fedcdp.deploy.site.scripts import node_script, render, runtime_port
from fedcdp.errors import DeploymentError

WAYS = ("compose", "systemd", "kubernetes")
FLEET_CALLS = (
    "activate-node",
    "confirm-message-received",
    "deactivate-node",
    "get-fab",
    "get-run",
    "pull-messages",
    "pull-object",
    "push-messages",
    "push-object",
    "send-node-heartbeat",
)
"""Paths below `/v1/fleet` that a node with a registered key calls. The proxy lets nothing else through."""
SERVER = "fedcdp-server"
"""The server's name among containers, pods and units."""
IMAGE = "fedcdp"
_USER = 10001  # of the image
_BASE = "python:3.11-slim-bookworm"  # of Python 3.11, for which the lists of requirements are
_PROXY_IMAGE = "nginx:1.28-alpine-slim"
_SYSTEMD_PLACE, _SYSTEMD_PROGRAMS = "/srv/fedcdp", "/opt/fedcdp/bin"
_INCLUDED = ("cancer", "mnist5k")  # datasets that no container has to download
_PLAIN, _PROGRAM = 0o644, 0o755

File = tuple[Path, bytes, int]
"""Path, content and mode."""


@dataclass(frozen=True)
class ServiceFiles:
    """The files that are written besides those of a deployment that people start."""

    site: Site
    settings: SiteSettings
    experiment: Experiment
    nodes: Sequence[NodePlace]
    ways: Collection[str]

    def __post_init__(self) -> None:
        require_ways(self.ways)
        if self.ways and not self.settings.control_port:
            raise DeploymentError(f"control_port: 0 is not allowed for {', '.join(self.ways)}; the server needs a proxy")

    @property
    def host_names(self) -> list[str]:
        """The names of the server that its certificate must have besides the public one."""
        return [SERVER] if self._in_containers else []

    @property
    def directories(self) -> list[Path]:
        """Directories that must exist before a container can mount them."""
        if "compose" not in self.ways:
            return []
        return [self.site.run, *(folder for node in self.nodes for folder in (node.state, node.path / "flwr"))]

    def files(self) -> list[File]:
        """All files, for the proxy and for each way."""
        texts = [*self._of_proxy(), *self._of_containers(), *self._of_compose(), *self._of_systemd(), *self._of_kubernetes()]
        return [(path, text.encode(), _PROGRAM if path.suffix == ".sh" else _PLAIN) for path, text in texts]

    def files_of(self, node: NodePlace) -> list[File]:
        """The files of one more node: its unit and its manifests. Those of the server stay as its operator has made them."""
        texts = [self._unit_of(node)] if "systemd" in self.ways else []
        texts += self._manifests_of(node) if "kubernetes" in self.ways else []
        return [(path, text.encode(), _PLAIN) for path, text in texts]

    @property
    def _in_containers(self) -> bool:
        return "compose" in self.ways or "kubernetes" in self.ways

    def _of_proxy(self) -> Iterator[tuple[Path, str]]:
        if self.settings.control_port:
            yield self.site.proxy / "nginx.conf", render("nginx.conf", settings=self.settings, calls=FLEET_CALLS)
            yield self.site.path / "start-proxy.sh", render("start-proxy.sh")

    def _of_containers(self) -> Iterator[tuple[Path, str]]:
        if self._in_containers:
            folder = self.site.path / "container"
            yield folder / "Dockerfile", self._render("Dockerfile", base=_BASE)
            for variant in ("cpu", "gpu"):
                yield folder / f"requirements-{variant}.txt", image_requirements(variant)

    def _of_compose(self) -> Iterator[tuple[Path, str]]:
        if "compose" in self.ways:
            data = self.experiment.data
            read = [str(path) for path in (data.file, data.columns) if path is not None]  # by the server
            internal = data.file is not None or data.dataset in _INCLUDED
            values = {"server_data": read, "base": _BASE, "internal": internal}
            yield self.site.path / "compose.yaml", self._render("compose.yaml", **values)
            owner = f"{os.getuid()}:{os.getgid()}" if os.getuid() else f"{_USER}:{_USER}"  # never root
            yield self.site.path / ".env", self._render("compose.env", owner=owner, base=_BASE)

    def _of_systemd(self) -> Iterator[tuple[Path, str]]:
        if "systemd" in self.ways:
            folder = self.site.path / "systemd"
            privileged = "CAP_NET_BIND_SERVICE" if self.settings.port_in_scripts < 1024 else ""
            yield folder / f"{SERVER}.service", self._unit("server")
            yield folder / f"{SERVER}-proxy.service", self._unit("proxy", capability=privileged)
            for node in self.nodes:
                yield self._unit_of(node)

    def _unit_of(self, node: NodePlace) -> tuple[Path, str]:
        return self.site.path / "systemd" / f"fedcdp-node-{node.number}.service", self._unit("node", node=node)

    def _unit(self, name: str, capability: str = "", node: NodePlace | None = None) -> str:
        return render(
            f"{name}.service",
            server=SERVER,
            place=_SYSTEMD_PLACE,
            programs=_SYSTEMD_PROGRAMS,
            capability=capability,
            node=node,
        )

    def _of_kubernetes(self) -> Iterator[tuple[Path, str]]:
        if "kubernetes" in self.ways:
            yield self.site.path / "kustomization.yaml", self._render("kustomization-server.yaml")
            yield self.site.path / "kubernetes" / "server.yaml", self._render("kubernetes-server.yaml")
            for node in self.nodes:
                yield from self._manifests_of(node)

    def _manifests_of(self, node: NodePlace) -> Iterator[tuple[Path, str]]:
        secret = ["node.key", "node.toml", "policy.toml", "operate.toml", "ca.pem"]
        secret += ["roster.toml"] if self.experiment.plan.sums else []
        script, port = node_script(self.settings, node.number, node.name), runtime_port(node.number)
        values = {"node": node, "files": secret, "script": script, "runtime_port": port}
        yield node.path / "kustomization.yaml", self._render("kustomization-node.yaml", **values)
        yield node.path / "kubernetes.yaml", self._render("kubernetes-node.yaml", **values)

    def _render(self, name: str, **values: object) -> str:
        usual = {
            "settings": self.settings,
            "nodes": self.nodes,
            "server": SERVER,
            "image": IMAGE,
            "version": __version__.replace("+", "-"),  # as tags allow
            "proxy_image": _PROXY_IMAGE,
            "user": _USER,
            "health": self._health,
        }
        return render(name, **usual | values)

    @property
    def _health(self) -> str:
        """A Python program that ends with status 0 if the server answers."""
        address = f"https://127.0.0.1:{self.settings.control_port}/health"
        context = "ssl.create_default_context(cafile='/deployment/authority/ca.pem')"
        return f"import ssl, urllib.request; urllib.request.urlopen('{address}', context={context}, timeout=5)"


def ways_of(site: Site) -> list[str]:
    """The ways of running services for which a deployment has files."""
    marks = {"compose": "compose.yaml", "systemd": "systemd", "kubernetes": "kubernetes"}
    return [way for way, name in marks.items() if (site.path / name).exists()]


def require_ways(ways: Collection[str]) -> None:
    """Raise if there are no service files of such a name."""
    for way in ways:
        if way not in WAYS:
            raise DeploymentError(f"for: {way!r} is not allowed; it must be {', '.join(WAYS[:-1])} or {WAYS[-1]}")


def control_port_for(proxy: str | None, ways: Collection[str], given: int | None) -> int:
    """The port of a server behind a proxy, by the options of `deploy init`; 0 without a proxy.

    Raises:
        DeploymentError: There is no such proxy or way, or a port was given without a proxy.
    """
    require_ways(ways)
    if proxy not in (None, "nginx"):
        raise DeploymentError(f"proxy: {proxy!r} is not allowed; it must be nginx")
    if not (proxy or ways):
        if given is not None:
            raise DeploymentError(f"control_port: {given} is not allowed without --proxy nginx or --for")
        return 0
    if given is not None and not 0 < given < 2**16:
        raise DeploymentError(f"control_port: {given} is not allowed; it must be at least 1 and below 65536")
    return CONTROL_PORT if given is None else given


def image_requirements(variant: str) -> str:
    """What an image for `cpu` or `gpu` installs, by version and hash; `.ci/lock.py` writes the list."""
    found = resources("fedcdp.deploy.site") / "templates" / f"requirements-{variant}.txt"
    return found.read_text(encoding="utf-8")
