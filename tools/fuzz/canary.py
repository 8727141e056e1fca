"""A module that a hostile file may name. Nothing may import it."""

from __future__ import annotations

from typing import NoReturn


def make() -> NoReturn:
    """What a file would call in place of a network."""
    raise SystemExit("code was run")
