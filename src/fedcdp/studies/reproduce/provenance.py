"""Which code a cell was measured with: the commit, and a digest of the source files that its kind of measurement depends on.

These files are the modules that do the work, and all that they import, directly or not, when they are loaded. Comments,
docstrings and blank lines are left out, so rewriting a text makes no cell old.
"""

from __future__ import annotations

import ast
import hashlib
import io
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]
_EVERY = ("fedcdp.studies.reproduce.cells", "fedcdp.data.datasets")
_TRAINING = (
    "fedcdp.training.trainer", "fedcdp.training.prepared", "fedcdp.engine.kernel_cnn",
    "fedcdp.studies.reproduce.cifar10_networks", *_EVERY,
)  # fmt: skip
_ROOTS = {
    "training": _TRAINING,
    "attack": ("fedcdp.attacks.api", "fedcdp.training.prepared", *_EVERY),
    "epsilon": ("fedcdp.accounting.statement", "fedcdp.training.prepared"),
    "time": ("fedcdp.studies.bench.sections", "fedcdp.engine.kernel_cnn", *_EVERY),
    "tradeoff": ("fedcdp.studies.reproduce.tradeoff", *_TRAINING),
    "release": ("fedcdp.studies.reproduce.authors_release", *_TRAINING),
}
"""The modules that measure a kind of cell, and those that they load only when they need them."""


def provenance(kind: str, commit: str | None = None) -> dict[str, str | None]:
    """The commit and the digest of the code, for a cell that is measured now; no commit in a tree with changes."""
    return {"commit": commit or clean_commit(), "code": digest(kind)}


@cache
def digest(kind: str) -> str:
    """A digest of the code that measures a kind of cell."""
    told = hashlib.sha256()
    for name in sorted(modules(kind)):
        told.update(f"{name}\n{essence(_file_of(name).read_text(encoding='utf-8'))}\n".encode())
    return told.hexdigest()[:16]


@cache
def modules(kind: str) -> frozenset[str]:
    """The modules that a kind of measurement depends on."""
    found: set[str] = set()
    waiting = list(_ROOTS[kind])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imported(name)
    return frozenset(found)


@cache
def _imported(name: str) -> tuple[str, ...]:
    """The modules of the package that a module imports when it is loaded."""
    tree = ast.parse(_file_of(name).read_text(encoding="utf-8"))
    found: list[str] = []
    for node in _run_when_loaded(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    inside = [each for each in found if each.startswith("fedcdp.") and _exists(each)]
    parents = [name.rpartition(".")[0] for name in [*inside, name]]
    return tuple(dict.fromkeys([*inside, *(each for each in parents if each.startswith("fedcdp."))]))


def _run_when_loaded(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module, without those of functions and of blocks for type checkers."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With):
            waiting += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]


def _exists(name: str) -> bool:
    place = _PACKAGE.parent.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def _file_of(name: str) -> Path:
    place = _PACKAGE.parent.joinpath(*name.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def essence(source: str) -> str:
    """A module's source without comments, docstrings and blank lines; the same under every version of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def clean_commit() -> str | None:
    """The commit of the package's source; None if it is not in a repository, or has changes that are not committed."""

    def git(*words: str) -> str:
        asked = ["git", "-C", str(_PACKAGE), *words]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()  # nosec B603

    try:
        return None if git("status", "--porcelain", "--", ".") else git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None
