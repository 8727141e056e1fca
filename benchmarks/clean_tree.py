"""The commit on which figures are measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def clean_commit(*may_differ: str) -> str:
    """The commit of this tree; exits if files other than results and `may_differ` have uncommitted changes."""
    left_out = [f":!{path}" for path in ("results", *may_differ)]
    if _git("status", "--porcelain", "--", *left_out):
        raise SystemExit("the tree has uncommitted changes: commit them first, so figures belong to a commit")
    return _git("rev-parse", "HEAD")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True, cwd=_ROOT).stdout.strip()  # noqa: S607  # nosec B607
