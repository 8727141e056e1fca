"""The layout of the package: layers that import downwards only, no cycle, no name used twice."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fedcdp

PACKAGE = Path(fedcdp.__file__).parent
LAYERS = (
    {"_startup", "_version", "errors"},
    {"files"},
    {"config"},
    {"mechanism"},
    {"data", "models"},
    {"engine"},
    {"methods"},
    {"accounting"},
    {"training"},
    {"audit", "loggers"},
    {"attacks"},
    {"checks"},
    {"report", "deploy"},
    {"studies", "flower"},
    {"cli"},
    {"__init__", "__main__"},
)
"""Lowest first. A module imports from its own package and from layers below; packages of one layer stand side by side."""
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
SHARED_NAMES = {"__init__", "api", "base"}


def modules(package: Path = PACKAGE) -> dict[str, ast.Module]:
    """Every module by its dotted name below the package; a package's own file ends in `__init__`."""
    found = sorted(path for path in package.rglob("*.py"))
    return {".".join(path.relative_to(package).with_suffix("").parts): ast.parse(path.read_text()) for path in found}


MODULES = modules()


def imported(module: str, tree: ast.Module, known: dict[str, ast.Module]) -> Iterator[tuple[str, int]]:
    """The modules of the package that a module imports, wherever the statement stands: late and type-only ones, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"{module}, line {node.lineno}: a relative import")
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "fedcdp" or name.startswith("fedcdp."):
                yield resolved(name.removeprefix("fedcdp").removeprefix("."), known), node.lineno


def resolved(name: str, known: dict[str, ast.Module]) -> str:
    """The module that holds what `name` stands for: a module, a package, or something defined in either."""
    parts = name.split(".") if name else []
    for end in range(len(parts), -1, -1):
        for found in (".".join(parts[:end]), ".".join([*parts[:end], "__init__"])):
            if found in known:
                return found
    raise AssertionError(f"fedcdp.{name} is not in the package")


def upward(known: dict[str, ast.Module]) -> list[str]:
    """Imports that do not go down."""
    wrong = []
    for module, tree in known.items():
        own = module.split(".")[0]
        for target, line in imported(module, tree, known):
            other = target.split(".")[0]
            if other != own and RANK[other] >= RANK[own]:
                wrong.append(f"{module}, line {line}: imports {target}")
    return wrong


def test_every_top_level_name_has_a_layer() -> None:
    assert {module.split(".")[0] for module in MODULES} == set(RANK)


def test_imports_go_down() -> None:
    assert upward(MODULES) == []


def test_no_import_cycle() -> None:
    graph = {}
    for module, tree in MODULES.items():
        graph[module] = {target for target, _ in imported(module, tree, MODULES)} - {module}
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a cycle


@pytest.mark.parametrize(
    "statement",
    [
        "from fedcdp.training.run import Run",
        "def late():\n    from fedcdp.accounting import statement",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fedcdp.cli.program import app",
        "import fedcdp",
        "import fedcdp.methods.base as base",
    ],
)
def test_an_upward_import_is_found(statement: str) -> None:
    assert len(upward(MODULES | {"config.plan": ast.parse(statement)})) == 1


def test_packages_of_one_layer_do_not_import_each_other() -> None:
    assert upward(MODULES | {"models.networks": ast.parse("from fedcdp.data.dataset import Dataset")})


def test_a_file_name_is_used_once() -> None:
    names = Counter(module.split(".")[-1] for module in MODULES)
    assert [name for name, times in names.items() if times > 1 and name not in SHARED_NAMES] == []


def test_a_class_name_is_used_once() -> None:
    names = Counter(node.name for tree in MODULES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, times in names.items() if times > 1] == []


def test_few_files_at_the_top() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 6


def test_the_map_in_the_documentation_is_that_of_the_files() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "internals.md").read_text()
    rows = [row.split("|") for row in page.splitlines() if row.startswith("| `")]
    mapped = [(name, row[3]) for row in rows for name in re.findall(r"`([\w.]+)`", row[1])]
    ranks = [RANK[name] for name, _ in mapped]
    assert ranks == sorted(ranks)
    listed = {f"{name}.{each}" for name, cell in mapped for each in re.findall(r"`([\w.]+)`", cell)}
    alone = {name for name, cell in mapped if not cell.strip()}
    files = {module for module in MODULES if not module.endswith("__init__") and module != "__main__"}
    assert (listed | alone) == files
