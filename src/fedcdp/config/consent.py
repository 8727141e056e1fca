"""Code that a file names is imported only if the user has named it, too.

A network of the user's own is written as `package.module:factory`, imported and called. In a file, whoever wrote the file
chooses what that is. So a configuration, a table of `reproduce` or a run directory may name only what this user named
before: on a command line (`--model`) or from Python, which is remembered in the user's cache, or in the variable
FEDCDP_TRUST, where commas separate several.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fedcdp.errors import ModelError
from fedcdp.files.disk import PRIVATE, user_cache, write_atomically
from fedcdp.files.untrusted import MOST_SETTINGS, printable, read_bounded

_LONGEST = 500


def remember(network: str) -> None:
    """Note that the user named a network; one of this package needs no note. A cache that is read-only stays as it is."""
    if not _is_code(network) or network in _remembered() or len(network) > _LONGEST:
        return
    names = [*_remembered(), network]
    with suppress(OSError, UnicodeEncodeError):
        write_atomically(_file(), "".join(f"{name}\n" for name in names).encode(), PRIVATE)


def require(network: object, source: Path | str) -> None:
    """Refuse a network that a file names, if it is code and the user never named it."""
    if not isinstance(network, str) or not _is_code(network):
        return
    named = [each.strip() for each in os.environ.get("FEDCDP_TRUST", "").split(",")]
    if network not in named and network not in _remembered():
        shown = printable(network[:100])
        raise ModelError(
            f"model: {source} names {shown}, which is code that would be imported and run, and which you have not named "
            f"yourself; if you trust it, say --model {shown} or set FEDCDP_TRUST={shown}"
        )


def _is_code(network: str) -> bool:
    return ":" in network


def _file() -> Path:
    return user_cache() / "trusted-networks"


def _remembered() -> list[str]:
    try:
        return read_bounded(_file(), MOST_SETTINGS).decode().splitlines()
    except (OSError, ValueError):
        return []
