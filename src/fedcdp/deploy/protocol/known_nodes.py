"""The nodes whose owners a client knows: `roster.toml`, which each owner keeps.

```toml
[[node]]
name = "charite"
key = "ecdsa-sha2-nistp384 AAAA…"   # the text of its node.pub
made_by = "owner"                   # or "operator"
```

Owners compare fingerprints (`ssh-keygen -lf node.pub`) outside the server: by telephone, or face to face. The list is what
stops a server from inventing clients: a node that only the server vouches for may be the server itself.

A key that was not made on its own machine, such as those of `fedcdp deploy init`, is marked as made by the operator. Whoever
made a key may have kept it, and can act as the node.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedcdp.errors import PolicyError
from fedcdp.files.untrusted import MOST_SETTINGS, parse_toml, printable, read_bounded

NODE_KEY_BYTES = 49
_MAKERS = ("owner", "operator")
_FIELDS = {"name", "key", "made_by"}
_LONGEST_NAME = 100
_UNREADABLE = (ValueError, TypeError, NotImplementedError, UnsupportedAlgorithm)  # as cryptography raises them


def node_key_of(key: EllipticCurvePublicKey) -> bytes:
    """A node's public key in its only form here: the compressed point on P-384, 49 bytes."""
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def public_key_of(node: bytes) -> EllipticCurvePublicKey:
    """The key that `node_key_of` wrote; raises `ValueError` for anything else."""
    if len(node) != NODE_KEY_BYTES:
        raise ValueError(f"a node key has {NODE_KEY_BYTES} bytes")
    return EllipticCurvePublicKey.from_encoded_point(SECP384R1(), node)


def fingerprint(node: bytes) -> str:
    """The fingerprint that owners compare, as `ssh-keygen -lf` prints it."""
    line = public_key_of(node).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def read_identity(path: Path | str) -> EllipticCurvePrivateKey:
    """The private key of a node, with which it also authenticates to Flower's server.

    Raises:
        PolicyError: The file cannot be read, or is no such key.
    """
    try:
        key = load_ssh_private_key(read_bounded(path, MOST_SETTINGS), password=None)
    except OSError as error:
        raise PolicyError(f"identity: {path} cannot be read: {error.strerror or error}") from error
    except _UNREADABLE:
        raise PolicyError(f"identity: {path} is not a private key in OpenSSH format without a password") from None
    if not (isinstance(key, EllipticCurvePrivateKey) and isinstance(key.curve, SECP384R1)):
        raise PolicyError(f"identity: {path} is not an EC key on P-384")
    return key


def read_public_key(text: str) -> bytes:
    """The node key in a line such as that of `node.pub`; raises `ValueError` if it is none."""
    try:
        key = load_ssh_public_key(text.strip().encode())
    except _UNREADABLE:
        raise ValueError("it is not a public key in OpenSSH format") from None
    if not (isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP384R1)):
        raise ValueError("it is not an EC key on P-384")
    return node_key_of(key)


@dataclass(frozen=True)
class KnownNode:
    """A node on the list."""

    name: str
    key: bytes
    made_by: str = "owner"


@dataclass(frozen=True)
class KnownNodes:
    """The list, by node key."""

    nodes: dict[bytes, KnownNode]

    @staticmethod
    def read(path: Path | str) -> KnownNodes:
        """Read `roster.toml`.

        Raises:
            PolicyError: The file cannot be read, or an entry is not allowed.
        """
        try:
            written: dict[str, Any] = parse_toml(read_bounded(path, MOST_SETTINGS))
        except OSError as error:
            raise PolicyError(f"roster: {path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise PolicyError(f"roster: {path} is not a TOML file: {error}") from None
        entries = written.get("node", [])
        if written.keys() - {"node"} or not isinstance(entries, list):
            raise PolicyError(f"roster: {path} must hold tables [[node]] and nothing else")
        nodes = dict[bytes, KnownNode]()
        for number, entry in enumerate(entries, start=1):
            try:
                node = _entry(entry)
            except ValueError as error:
                raise PolicyError(f"roster: {path}, node {number}: {error}") from None
            if node.key in nodes:
                raise PolicyError(f"roster: {path}, node {number}: its key is that of {nodes[node.key].name}")
            nodes[node.key] = node
        return KnownNodes(nodes)

    def title(self, node: bytes) -> str:
        """A node in a message: its name here, or the start of its key."""
        return self.nodes[node].name if node in self.nodes else f"{node[:8].hex()}…"


def _entry(entry: object) -> KnownNode:
    if not isinstance(entry, dict) or not {"name", "key"} <= entry.keys() <= _FIELDS:
        raise ValueError("it must have a name and a key, and may say made_by")
    name, key, made_by = entry["name"], entry["key"], entry.get("made_by", "owner")
    if not (isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and name.isprintable()):
        raise ValueError(f"name: it must be a text of up to {_LONGEST_NAME} characters")
    if not isinstance(key, str):
        raise ValueError("key: it must be a text")
    if made_by not in _MAKERS:
        raise ValueError(f"made_by: {printable(str(made_by)[:40])} is not one of {', '.join(_MAKERS)}")
    try:
        return KnownNode(name, read_public_key(key), made_by)
    except ValueError as error:
        raise ValueError(f"key: {error}") from None
