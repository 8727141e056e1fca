"""A deployment directory: its layout and its settings.

```
DIR/deployment.toml     the server's address, and the number of nodes
DIR/experiment.toml     the plan; read by the server only
DIR/authority/          ca.pem, and ca.key: only needed to sign another server certificate
DIR/server/             server.pem, server.key, operate.toml (its log, and where it can be watched), the server's database
DIR/node-1/             node.toml (its data), policy.toml (what it grants), node.key, node.pub, ca.pem, operate.toml, its
ledger (node-1-charite/ where the client has a name); for secure sums roster.toml (nodes it knows)
DIR/app/                the Flower app: names what to run, and holds no secret
DIR/flwr/config.toml    where `flwr` finds the server
DIR/monitoring/         Prometheus' targets and alert rules, and a Grafana dashboard
DIR/logs/  DIR/run/     the logs; the run directory
DIR/proxy/              the proxy's configuration, if the server is behind one
```

`service_files` lists what containers, systemd and Kubernetes need besides.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from fedcdp.config.fields import check_types, option
from fedcdp.errors import DeploymentError
from fedcdp.files.untrusted import MOST_SETTINGS, parse_toml, read_bounded

CONNECTION = "deployment"
MOST_NODES = 10_000
_USUAL_PORT = 9443
CONTROL_PORT = 9442
"""Where a server behind a proxy usually listens, on the loopback only."""
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}|[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9]{1,15})?")  # scripts contain it
_FOLDER = re.compile(r"[^A-Za-z0-9._-]+")  # what a client's name is stripped of in the names of files
_LONGEST_FOLDER = 40


@dataclass(frozen=True, kw_only=True)
class SiteSettings:
    """`deployment.toml`."""

    nodes: int = option(2, "Number of SuperNodes; each is one client.")
    host: str = option("127.0.0.1", "Name or address at which the nodes reach the server.")
    port: int = option(0, "The server's port; 0: a free one, for a deployment on one machine.")
    control_port: int = option(0, "Port of the loopback where the server listens behind a proxy; 0: no proxy.")

    def __post_init__(self) -> None:
        check_types(self)
        if not 1 <= self.nodes <= MOST_NODES:
            raise DeploymentError(f"nodes: {self.nodes} is not allowed; it must be at least 1 and at most {MOST_NODES}")
        if not 0 <= self.port < 2**16:
            raise DeploymentError(f"port: {self.port} is not allowed; it must be at least 0 and below 65536")
        if not 0 <= self.control_port < 2**16:
            raise DeploymentError(f"control_port: {self.control_port} is not allowed; it must be at least 0 and below 65536")
        if self.control_port == self.port_in_scripts:
            raise DeploymentError(f"control_port: {self.control_port} is the port of the proxy; choose another one")
        if not _HOST.fullmatch(self.host):
            raise DeploymentError(f"host: {self.host!r} is not the name or address of a host")

    def to_toml(self) -> str:
        """The file from which these settings can be read back."""
        import tomli_w

        return tomli_w.dumps(vars(self))

    @property
    def port_in_scripts(self) -> int:
        """The server's port, also if a deployment on one machine takes any free one."""
        return self.port or _USUAL_PORT

    @property
    def address(self) -> str:
        """The address at which nodes reach the server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port_in_scripts}"

    @property
    def server_port(self) -> int:
        """The port at which the server itself listens: behind a proxy, one of the loopback."""
        return self.control_port or self.port_in_scripts

    @property
    def control_address(self) -> str:
        """The address at which the operator's commands reach the server."""
        return f"127.0.0.1:{self.control_port}" if self.control_port else self.address


@dataclass(frozen=True)
class NodePlace:
    """One node's part of the deployment: everything its machine needs, and nothing of other nodes."""

    number: int
    path: Path

    @property
    def name(self) -> str:
        """`node-1` and so on, or `node-1-charite` where the client has a name."""
        return self.path.name

    @property
    def key(self) -> Path:
        """The private key."""
        return self.path / "node.key"

    @property
    def public_key(self) -> Path:
        """The public key, which is registered at the server."""
        return self.path / "node.pub"

    @property
    def config(self) -> Path:
        """The configuration: locations of its data, its policy and its ledger."""
        return self.path / "node.toml"

    @property
    def policy(self) -> Path:
        """What the client grants."""
        return self.path / "policy.toml"

    @property
    def known(self) -> Path:
        """The list of nodes whose owners the client's owner knows, for secure sums."""
        return self.path / "roster.toml"

    @property
    def operate(self) -> Path:
        """Where its log goes, and where it can be watched."""
        return self.path / "operate.toml"

    def records(self, suffix: str = ".npz") -> Path:
        """The client's own records, if they come from a file of this kind."""
        return self.path / f"records{suffix}"

    @property
    def columns(self) -> Path:
        """The public categories and ranges of the columns, if they come from a file."""
        return self.path / "columns.toml"

    @property
    def authority(self) -> Path:
        """The certificate that authenticates the server."""
        return self.path / "ca.pem"

    @property
    def state(self) -> Path:
        """The state that the client must keep across restarts: its ledger."""
        return self.path / "state"


class Site:
    """A deployment on disk."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.settings_file = self.path / "deployment.toml"
        self.experiment = self.path / "experiment.toml"
        self.app = self.path / "app"
        self.flwr = self.path / "flwr"
        self.monitoring = self.path / "monitoring"
        self.logs = self.path / "logs"
        self.run = self.path / "run"
        self.authority = self.path / "authority"
        self.server = self.path / "server"
        self.database = self.server / "state.db"
        self.proxy = self.path / "proxy"

    def require(self) -> SiteSettings:
        """The settings of an existing deployment; raises an error if the directory holds none."""
        try:
            written = parse_toml(read_bounded(self.settings_file, MOST_SETTINGS))
        except FileNotFoundError:
            raise DeploymentError(
                f"{self.path} is not a deployment: it has no deployment.toml; fedcdp deploy init writes one"
            ) from None
        except OSError as error:
            raise DeploymentError(f"{self.settings_file} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise DeploymentError(f"{self.settings_file} is not a TOML file: {error}") from error
        unknown = written.keys() - {each.name for each in fields(SiteSettings)}
        if unknown:
            raise DeploymentError(f"{self.settings_file}: there is no setting called {min(unknown)!r}")
        return SiteSettings(**written)

    def node(self, number: int, client: str = "") -> NodePlace:
        """The directory of a node, counted from 1: a new one that is named for its client, or the one that is there."""
        plain = self.path / f"node-{number}"
        if folder := _folder(client):
            return NodePlace(number, self.path / f"node-{number}-{folder}")
        named = [] if plain.exists() else sorted(self.path.glob(f"node-{number}-*"))
        return NodePlace(number, named[0] if named else plain)

    def nodes(self, count: int, clients: Sequence[str] = ()) -> list[NodePlace]:
        """The directories of all nodes; new ones are named for their `clients`."""
        return [self.node(number, clients[number - 1] if clients else "") for number in range(1, count + 1)]


def _folder(client: str) -> str:
    """A client's name in the names of files: letters without accents, digits, and a few signs."""
    plain = "".join(sign for sign in unicodedata.normalize("NFKD", client) if not unicodedata.combining(sign))
    return _FOLDER.sub("-", plain).strip("-.")[:_LONGEST_FOLDER]
