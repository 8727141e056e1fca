"""Code named in a file is imported only if the user has named it as well.

A user's own network is written as `package.module:factory`, which is imported and called. In a file, the author of the
file chooses that code. A configuration, a table of `reproduce` or a run directory may therefore name only a network that
this user has named before: on a command line (`--model`) or from Python, both remembered in the user's cache, or in the
comma-separated environment variable FEDCDP_TRUST.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fedcdp.errors import ModelError
from fedcdp.files.disk import PRIVATE, user_cache, write_atomically
from fedcdp.files.untrusted import MOST_SETTINGS, printable, read_bounded

_LONGEST = 500
_OWN = "fedcdp.studies.reproduce.cifar10_networks:"  # a module of networks and nothing else


def remember(network: str) -> None:
    """Record that the user named a network. fedcdp's own networks need no record; a read-only cache is left as it is."""
    if not _is_code(network) or network in _remembered() or len(network) > _LONGEST:
        return
    names = [*_remembered(), network]
    with suppress(OSError, UnicodeEncodeError):
        write_atomically(_file(), "".join(f"{name}\n" for name in names).encode(), PRIVATE)


def require(network: object, source: Path | str) -> None:
    """Refuse a network named in a file if it is code that the user never named."""
    if not isinstance(network, str) or not _is_code(network):
        return
    named = [each.strip() for each in os.environ.get("FEDCDP_TRUST", "").split(",")]
    if network not in named and network not in _remembered():
        shown = printable(network[:100])
        raise ModelError(
            f"model: {source} names {shown}, code that would be imported and run, but that you have not named "
            f"yourself; if you trust it, pass --model {shown} or set FEDCDP_TRUST={shown}"
        )


def _is_code(network: str) -> bool:
    return ":" in network and not network.startswith(_OWN)


def _file() -> Path:
    return user_cache() / "trusted-networks"


def _remembered() -> list[str]:
    try:
        return read_bounded(_file(), MOST_SETTINGS).decode().splitlines()
    except (OSError, ValueError):
        return []
