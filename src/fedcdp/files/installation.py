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
    project, here = checkout / "pyproject.toml", Path("pyproject.toml")
    if not _is_ours(project):
        return f"pip install 'fedcdp[{extra}]'"
    place = "." if here.exists() and here.samefile(project) else checkout
    return "pip install " + shlex.quote(f"{place}[{extra}]")


def _is_ours(project: Path) -> bool:
    try:
        return bool(tomllib.loads(project.read_text()).get("project", {}).get("name") == "fedcdp")
    except (OSError, ValueError):
        return False
