"""Pairwise masks: they hide each client's vector, and cancel in the sum of all vectors mod 2^64.

Clients i and j derive one key from their X25519 secret and the context of the attempt (`sum_context`). The key is used for
one mask: the ChaCha20 key stream with nonce and counter zero, read as little-endian words. The client with the lower node
key adds the mask, the other subtracts it. A nonce that hashes the context would not do: a server that chooses the weights
finds two attempts with one 96-bit nonce after 2^48 hashes, and the difference of their vectors has no mask.

Flower's own masks are not used: their seeds have 32 bits, of which 28 vary, and their keys are not authenticated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedcdp.deploy.protocol.sum_context import VERSION, SumMember, joined
from fedcdp.errors import RefusedError

Words = NDArray[np.uint64]
_KEY, _WORD = 32, 8
_ZERO = bytes(16)  # counter and nonce


def mask_key(own: X25519PrivateKey, me: SumMember, other: SumMember, context: bytes) -> bytes:
    """The key that two clients share in one context, and nobody else knows.

    Raises:
        RefusedError: The other's key has the all-zero secret with every key.
    """
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(other.run_key))
    except ValueError:
        raise RefusedError("a member's run key is invalid: its shared secret is zero") from None
    pair = sorted((me.node, other.node))
    return HKDF(algorithm=SHA256(), length=_KEY, salt=VERSION, info=joined(context, *pair)).derive(secret)


def key_stream(key: bytes, length: int) -> Words:
    """`length` words of the ChaCha20 key stream. A key must not be used for two vectors."""
    stream = Cipher(ChaCha20(key, _ZERO), mode=None).encryptor().update(bytes(_WORD * length))
    return np.frombuffer(stream, "<u8")


def add_masks(
    share: NDArray[np.int64], own: X25519PrivateKey, me: SumMember, members: Sequence[SumMember], context: bytes
) -> Words:
    """A client's share of the sum under the masks that it shares with every other member, mod 2^64."""
    words = share.astype(np.int64).view(np.uint64).copy()
    for other in members:
        if other.node != me.node:
            mask = key_stream(mask_key(own, me, other, context), len(words))
            if me.node < other.node:
                words += mask
            else:
                words -= mask
    return words


def sum_of(vectors: Iterable[Words], length: int) -> NDArray[np.int64]:
    """The sum of all vectors mod 2^64, read as signed numbers. It is the plain sum only if every member's is there."""
    total = np.zeros(length, np.uint64)
    for vector in vectors:
        total += vector
    return total.view(np.int64)
