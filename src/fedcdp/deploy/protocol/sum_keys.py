"""Run keys: a fresh X25519 key of each client for each run, signed with the client's node key.

```
STATE/sum-<task>.key     the private half, readable by its owner only; deleted when the run ends
STATE/sum-<task>.peers   the signed keys of the other clients, as the server passed them on, each verified
```

A client signs (ECDSA, SHA-384) the purpose, the full hash of the task, its node key and its run key. A signature from
another run, another node or for another purpose does not verify. The server passes signed keys on, and can change none.

Nobody else may learn a run key: whoever has it, and every message of the run, can take this client's masks off. It is
deleted when the server says that the run has ended; a run that goes on after all gets a new key. A server that says so early
gains nothing: masks of deleted keys do not cancel.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA384

from fedcdp.deploy.protocol.known_nodes import NODE_KEY_BYTES, node_key_of, public_key_of
from fedcdp.deploy.protocol.sum_context import VERSION, SumMember, joined, task_hash
from fedcdp.deploy.protocol.task import Task
from fedcdp.errors import RunError, WireError
from fedcdp.files.disk import PRIVATE, not_written, write_atomically
from fedcdp.files.untrusted import MOST_JSON, read_bounded

_PURPOSE = VERSION + b" key"
_RUN_KEY_BYTES, _LONGEST_SIGNATURE = 32, 128
_FIXED = NODE_KEY_BYTES + _RUN_KEY_BYTES


@dataclass(frozen=True)
class SignedKey:
    """A client's key for one run, with the signature of its node key."""

    member: SumMember
    signature: bytes

    def to_bytes(self) -> bytes:
        """The key as it is sent."""
        return self.member.node + self.member.run_key + self.signature

    @staticmethod
    def from_bytes(content: object) -> SignedKey:
        """Parse a key that was sent; its signature is not verified yet."""
        if not (isinstance(content, bytes) and _FIXED < len(content) <= _FIXED + _LONGEST_SIGNATURE):
            raise WireError(f"a signed key must have {_FIXED} bytes and a signature")
        return SignedKey(SumMember(content[:NODE_KEY_BYTES], content[NODE_KEY_BYTES:_FIXED]), content[_FIXED:])

    def holds(self, task: Task) -> bool:
        """Whether the node signed this key for this task."""
        try:
            public_key_of(self.member.node).verify(self.signature, _signed_text(task, self.member), ECDSA(SHA384()))
        except (InvalidSignature, ValueError):
            return False
        return True


def sign_key(identity: EllipticCurvePrivateKey, task: Task, run_key: X25519PrivateKey) -> SignedKey:
    """A run key, signed for a task by its node."""
    member = SumMember(node_key_of(identity.public_key()), run_key.public_key().public_bytes_raw())
    return SignedKey(member, identity.sign(_signed_text(task, member), ECDSA(SHA384())))


def _signed_text(task: Task, member: SumMember) -> bytes:
    return joined(_PURPOSE, task_hash(task), member.node, member.run_key)


# The files of a client -----------------------------------------------------------------------------------------------


def own_key(state: Path, task: Task) -> X25519PrivateKey:
    """This client's key for a task: the stored one, or a new one, which is on disk on return."""
    path = _key_path(state, task.digest())
    try:
        if path.exists():
            return _load(path)
        key = X25519PrivateKey.generate()
        write_atomically(path, key.private_bytes_raw(), PRIVATE)
    except OSError as error:
        raise not_written(path, error) from error
    return key


def stored_key(state: Path, task: Task) -> X25519PrivateKey | None:
    """This client's key for a task; None if there is none, or none any more."""
    path = _key_path(state, task.digest())
    return _load(path) if path.exists() else None


def store_peers(state: Path, task: Task, keys: Iterable[SignedKey]) -> None:
    """Keep the keys of the clients of a run, which the caller has verified."""
    path = _peers_path(state, task.digest())
    try:
        write_atomically(path, "\n".join(each.to_bytes().hex() for each in keys).encode(), PRIVATE)
    except OSError as error:
        raise not_written(path, error) from error


def stored_peers(state: Path, task: Task) -> dict[bytes, SumMember]:
    """The keys that this client verified and kept, by node key."""
    path = _peers_path(state, task.digest())
    if not path.exists():
        return {}
    try:
        keys = [SignedKey.from_bytes(bytes.fromhex(line)) for line in read_bounded(path, MOST_JSON).decode().split()]
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, WireError):
        raise RunError(f"{path} is damaged; delete it, and the server passes the keys on again when it resumes") from None
    return {each.member.node: each.member for each in keys}


def forget_keys(state: Path, digest: str | None = None) -> None:
    """Delete the keys of a run, or of all runs: nobody can take this client's masks off any more."""
    paths = [*state.glob("sum-*.key"), *state.glob("sum-*.peers")]
    for path in paths if digest is None else [_key_path(state, digest), _peers_path(state, digest)]:
        with suppress(FileNotFoundError):
            path.unlink()


def _key_path(state: Path, digest: str) -> Path:
    return state / f"sum-{digest}.key"


def _peers_path(state: Path, digest: str) -> Path:
    return state / f"sum-{digest}.peers"


def _load(path: Path) -> X25519PrivateKey:
    try:
        return X25519PrivateKey.from_private_bytes(read_bounded(path, MOST_JSON))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError:
        raise RunError(f"{path} is damaged; delete it, and the client makes a new key when the run resumes") from None
