"""Planned rotation of a node's key: the old key signs the new one.

```
NODE/node.rotation    the rotations of this node's own key, which it sends along when it subscribes
STATE/rotated-keys    the rotations of other nodes' keys that this client has verified
```

A client follows a rotation only if its owner's policy says so (`accept_rotated_keys`), and only from a key on the owner's
list. The new key has the name of the old one, and counts as made by whoever made the old one: an operator who kept an old
key can sign a new one. The old key is no longer accepted. If one key has signed two different successors, somebody else has
it: then neither it nor a successor is accepted, and the owners compare fingerprints again.

After a compromise a rotation proves nothing, since the thief can sign one as well. `fedcdp deploy rekey` without `--planned`
makes none, and removes the earlier ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA384

from fedcdp.deploy.protocol.known_nodes import NODE_KEY_BYTES, KnownNode, KnownNodes, node_key_of, public_key_of
from fedcdp.deploy.protocol.sum_context import joined
from fedcdp.errors import RunError, WireError
from fedcdp.files.disk import PRIVATE, not_written, write_atomically
from fedcdp.files.untrusted import MOST_JSON, read_bounded

_LOG = logging.getLogger("flwr.fedcdp")
_PURPOSE = b"fedcdp-rotation-1"
_FIXED, _LONGEST_SIGNATURE = 2 * NODE_KEY_BYTES, 128
MOST_ROTATIONS = 100
"""The most rotations of one node, and ten times as many of all others."""


@dataclass(frozen=True)
class KeyRotation:
    """A node's new key, signed by its old one."""

    old: bytes
    new: bytes
    signature: bytes

    def to_bytes(self) -> bytes:
        """The rotation as it is sent."""
        return self.old + self.new + self.signature

    @staticmethod
    def from_bytes(content: object) -> KeyRotation:
        """Parse a rotation that was sent; its signature is not verified yet."""
        if not (isinstance(content, bytes) and _FIXED < len(content) <= _FIXED + _LONGEST_SIGNATURE):
            raise WireError(f"a rotation of a key must have {_FIXED} bytes and a signature")
        return KeyRotation(content[:NODE_KEY_BYTES], content[NODE_KEY_BYTES:_FIXED], content[_FIXED:])

    def holds(self) -> bool:
        """Whether the old key signed the new one, and both are keys."""
        try:
            public_key_of(self.new)
            public_key_of(self.old).verify(self.signature, _signed_text(self.old, self.new), ECDSA(SHA384()))
        except (InvalidSignature, ValueError):
            return False
        return self.old != self.new


def sign_rotation(old: EllipticCurvePrivateKey, new: bytes) -> KeyRotation:
    """The rotation from a node's old key to its new one."""
    before = node_key_of(old.public_key())
    return KeyRotation(before, new, old.sign(_signed_text(before, new), ECDSA(SHA384())))


def _signed_text(old: bytes, new: bytes) -> bytes:
    return joined(_PURPOSE, old, new)


def follow(known: KnownNodes, rotations: Iterable[KeyRotation]) -> KnownNodes:
    """The list after these rotations. One that does not hold, or does not start at a key on the list, changes nothing."""
    successors = dict[bytes, set[bytes]]()
    for each in rotations:
        if each.holds():
            successors.setdefault(each.old, set()).add(each.new)
    nodes = dict[bytes, KnownNode]()
    for node in known.nodes.values():
        if (key := _latest(node, successors)) is not None and (key == node.key or key not in known.nodes):
            nodes[key] = KnownNode(node.name, key, node.made_by)
    return KnownNodes(nodes)


def _latest(node: KnownNode, successors: dict[bytes, set[bytes]]) -> bytes | None:
    """The latest key of a node; None if somebody else has one of its keys."""
    key, seen = node.key, {node.key}
    while following := successors.get(key):
        if len(following) > 1:
            _LOG.warning("a key of %s has signed two successors: compare fingerprints with its owner again", node.name)
            return None
        (key,) = following
        if key in seen:
            return None
        seen.add(key)
    return key


# The files -----------------------------------------------------------------------------------------------------------


def own_rotations(identity: Path) -> list[KeyRotation]:
    """The rotations of this node's own key, which stand beside it."""
    return _read(identity.with_name("node.rotation"))


def keep_own(identity: Path, rotations: Iterable[KeyRotation]) -> None:
    """Store the rotations of this node's own key; none: delete them."""
    _write(identity.with_name("node.rotation"), rotations)


def stored_rotations(state: Path) -> list[KeyRotation]:
    """The rotations of other nodes' keys that this client has kept."""
    return _read(state / "rotated-keys")


def store_rotations(state: Path, rotations: Iterable[KeyRotation]) -> None:
    """Keep rotations of other nodes' keys."""
    _write(state / "rotated-keys", rotations)


def _read(path: Path) -> list[KeyRotation]:
    try:
        lines = read_bounded(path, MOST_JSON).decode().split() if path.exists() else []
        return [KeyRotation.from_bytes(bytes.fromhex(line)) for line in lines]
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, WireError):
        raise RunError(f"{path} is damaged; delete it, and compare the fingerprints of rotated keys again") from None


def _write(path: Path, rotations: Iterable[KeyRotation]) -> None:
    try:
        if lines := [each.to_bytes().hex() for each in rotations]:
            write_atomically(path, "\n".join(lines).encode(), PRIVATE)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise not_written(path, error) from error
