"""How to install an optional part of the package: the command that works for this installation."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path


def install_command(extra: str) -> str:
    """The pip command that installs an extra: from the checkout this package is imported from, or next to the wheel.

    | the package is imported from | command for `report` |
    | --- | --- |
    | a checkout, which is the current directory | `pip install '.[report]'` |
    | a checkout elsewhere | `pip install '/path/of/the/checkout[report]'` |
    | an installed wheel (pip adds only what is missing) | `pip install 'fedcdp[report]'` |
    """
    checkout = Path(__file__).resolve().parents[3]
    if not _is_checkout(checkout):
        project = "fedcdp"
    else:
        project = "." if Path.cwd() == checkout else str(checkout)
    return "pip install " + shlex.quote(f"{project}[{extra}]")


def _is_checkout(directory: Path) -> bool:
    try:
        project = tomllib.loads((directory / "pyproject.toml").read_text())
    except (OSError, ValueError):
        return False
    return bool(project.get("project", {}).get("name") == "fedcdp")
