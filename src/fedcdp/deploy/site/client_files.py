"""What a node's configuration names: the client's state and its policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcdp.deploy.site.directory import NodePlace
from fedcdp.errors import DeploymentError
from fedcdp.files.untrusted import MOST_SETTINGS, parse_toml, read_bounded

if TYPE_CHECKING:
    from fedcdp.deploy.protocol.policy import ClientPolicy


@dataclass(frozen=True)
class ClientFiles:
    """A client's own files."""

    state: Path
    policy: ClientPolicy
    mark: Path | None
    """The file of the ledger's mark, if the policy has one."""

    @property
    def ledger(self) -> Path:
        """The client's ledger."""
        return self.state / "ledger.jsonl"

    @staticmethod
    def of(node: NodePlace) -> ClientFiles:
        """The files that `node.toml` names, relative to its folder."""
        from fedcdp.deploy.protocol.policy import ClientPolicy

        config = _configuration(node)
        path = config.get("policy")
        policy = ClientPolicy() if path is None else ClientPolicy.read(node.path / str(path))
        return ClientFiles(_state(node, config), policy, policy.mark_below(node.path))


def state_of(node: NodePlace) -> Path:
    """The directory of a client's state: the one that `node.toml` names, if there is one."""
    return _state(node, _configuration(node) if node.config.exists() else {})


def _state(node: NodePlace, config: dict[str, Any]) -> Path:
    return node.path / str(config.get("state-dir", node.state.name))


def _configuration(node: NodePlace) -> dict[str, Any]:
    try:
        config: dict[str, Any] = parse_toml(read_bounded(node.config, MOST_SETTINGS))
    except FileNotFoundError:
        raise DeploymentError(f"{node.path} is not the directory of a node: it has no node.toml") from None
    except OSError as error:
        raise DeploymentError(f"{node.config} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DeploymentError(f"{node.config} is not a TOML file: {error}") from None
    return config


def make_mark(directory: Path, *, forget: bool) -> Path:
    """Make the mark of a client's ledger, or move it; return its path.

    With `forget`, also for a ledger that is older than its mark: its owner has accounted for what was lost.
    """
    from fedcdp.deploy.protocol.client_ledger import ClientLedger
    from fedcdp.deploy.protocol.ledger_mark import LedgerMark

    files = ClientFiles.of(NodePlace(0, directory.absolute()))
    if files.mark is None:
        raise DeploymentError(f"{directory}: the policy has no ledger_mark; set it to a file on another disk")
    if not files.ledger.exists():
        raise DeploymentError(f"{files.ledger} does not exist; a client begins its ledger and the mark together")
    with ClientLedger.held(files.state) as ledger:
        LedgerMark(files.mark).begin(ledger.path, ledger.member, ledger.digests, forget=forget)
    return files.mark
