"""The keys of nodes in a secure sum: the list that each node keeps, and a new key for a node.

A key that `fedcdp deploy init` makes is in the operator's hands before it is in its owner's. For a secure sum each owner
replaces it on the node itself, and the owners tell each other the new public keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcdp.deploy.site.certificates import new_node_key, require_cryptography
from fedcdp.deploy.site.client_files import state_of
from fedcdp.deploy.site.directory import NodePlace
from fedcdp.errors import DeploymentError
from fedcdp.files.disk import write_atomically
from fedcdp.files.untrusted import MOST_SETTINGS, parse_toml, read_bounded

_SECRET, _PLAIN = 0o600, 0o644
_HEAD = """\
# The nodes whose owners you know. A client takes part in a secure sum with these nodes only.
# Compare each fingerprint (ssh-keygen -lf node.pub) with its owner, by telephone or face to face, not through the server.
# made_by = "operator": the key was not made on its node, and whoever made it can act as the node.

"""


@dataclass(frozen=True)
class ListedNode:
    """A node in `roster.toml`."""

    name: str
    key: str
    """The text of its node.pub."""
    made_by: str = "owner"


@dataclass(frozen=True)
class NewKey:
    """The new key of a node, as its owner tells it to others."""

    public: str
    fingerprint: str


def list_text(nodes: Sequence[ListedNode]) -> str:
    """`roster.toml`."""
    import tomli_w

    return _HEAD + tomli_w.dumps({"node": [vars(each) | {"key": each.key.strip()} for each in nodes]})


def rekey(directory: Path | str, *, planned: bool = False) -> NewKey:
    """Replace a node's key by a new one that is made here, on the node; its list then says so.

    With `planned`, the old key signs the new one, and nodes whose policies allow it follow (`protocol.key_rotation`).
    Without, earlier rotations are deleted as well, since the old key may be in other hands.

    The node's run keys, which the old key signed, are deleted. After a crash the command can be repeated: until the end,
    the list has the key of `node.key` or that of `node.pub`.

    Raises:
        DeploymentError: The directory is not that of a node, or cannot be written.
    """
    require_cryptography()
    from fedcdp.deploy.protocol.key_rotation import MOST_ROTATIONS, keep_own, own_rotations, sign_rotation
    from fedcdp.deploy.protocol.known_nodes import fingerprint, node_key_of, read_identity, read_public_key
    from fedcdp.deploy.protocol.sum_keys import forget_keys

    node = NodePlace(0, Path(directory).absolute())
    if not (node.key.is_file() and node.public_key.is_file()):
        raise DeploymentError(f"{node.path} is not the directory of a node: it has no node.key and node.pub")
    state = state_of(node)
    pair = new_node_key()
    try:
        identity = read_identity(node.key)
        old = {read_public_key(node.public_key.read_text(encoding="utf-8")), node_key_of(identity.public_key())}
        rotation = sign_rotation(identity, read_public_key(pair.public.decode()))
        rotations = [*own_rotations(node.key), rotation][-MOST_ROTATIONS:] if planned else []
        entries = _entries(node.known) if node.known.exists() else None
        write_atomically(node.key, pair.private, _SECRET)
        keep_own(node.key, rotations)
        if entries is not None:
            listed = [_own(each, old, pair.public.decode()) for each in entries]
            write_atomically(node.known, list_text(listed).encode(), _SECRET)
        write_atomically(node.public_key, pair.public, _PLAIN)
        forget_keys(state)
    except OSError as error:
        raise DeploymentError(f"{error.filename or node.path} cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise DeploymentError(f"{node.path}: {error}") from None
    return NewKey(pair.public.decode().strip(), fingerprint(read_public_key(pair.public.decode())))


def _entries(path: Path) -> list[dict[str, Any]]:
    from fedcdp.deploy.protocol.known_nodes import KnownNodes

    KnownNodes.read(path)  # refuses a damaged list
    entries: list[dict[str, Any]] = parse_toml(read_bounded(path, MOST_SETTINGS)).get("node", [])
    return entries


def _own(entry: dict[str, Any], old: set[bytes], new: str) -> ListedNode:
    """An entry of the list, with the new key if it is this node's."""
    from fedcdp.deploy.protocol.known_nodes import read_public_key

    if read_public_key(entry["key"]) in old:
        return ListedNode(entry["name"], new)
    return ListedNode(entry["name"], entry["key"], entry.get("made_by", "owner"))
