"""No private name of a library: what starts with an underscore may be gone in its next release."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    path: ast.parse(path.read_text()) for part in ("src", "benchmarks", "tests") for path in (ROOT / part).rglob("*.py")
}
ALLOWED = {
    "os._exit",  # documented, under this name
    "pickle._Unpickler",  # the only one whose opcodes can be watched
    "torch._dynamo",  # a compilation's exception, its limits and its counters have no other name
    "torch._foreach_add_", "torch._foreach_copy_", "torch._foreach_sub",  # all tensors of a network by one call
    "module._forward_hooks", "module._forward_pre_hooks",  # torch registers hooks, and does not tell of them
    "module._backward_hooks", "module._backward_pre_hooks",
    "dist.distributed_c10d._get_default_store",  # of a process group that somebody else began; it has no public name
    "attacker._compute_objective",  # of breaching 0.1.2, which is pinned: the only place where its evaluations are counted
    "parts['torchvision.models.densenet']._DenseLayer",  # a base class that breaching imports
}  # fmt: skip


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    """Every private name that a file defines: functions, classes, variables, fields and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                yield name
            case ast.Call(ast.Attribute(attr="__setattr__"), [_, ast.Constant(str(name)), _]):
                yield name


OURS = {name for tree in FILES.values() for name in defined(tree)}


def foreign(path: Path, tree: ast.AST) -> Iterator[str]:
    """Private names of libraries that a file uses.

    A name is ours where a file of ours defines it: any file, for what a class uses of itself and for tests, which look into
    all modules; otherwise the file that uses it.
    """
    here = OURS if path.is_relative_to(ROOT / "tests") else set(defined(tree))
    owners = {"self", "cls"} | {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(owner, name) if is_private(name):
                inside = ast.unparse(owner) in owners | {"super()"}
                if name not in (OURS if inside else here):
                    yield ast.unparse(node)
            case ast.Import(names):
                yield from (each.name for each in names if any(map(is_private, each.name.split("."))))
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] != "fedcdp":
                whole = (f"{module}.{each.name}" for each in names)
                yield from (
                    name for name in whole if any(map(is_private, name.split("."))) and name.split(".")[-1] not in here
                )


def test_no_private_name_of_a_library() -> None:
    used = {(str(path.relative_to(ROOT)), name) for path, tree in FILES.items() for name in foreign(path, tree)}
    assert {(path, name) for path, name in used if name not in ALLOWED} == set()
    assert {name for _, name in used} == ALLOWED  # nothing is allowed that is not needed


@pytest.mark.parametrize(
    "statement",
    [
        "accountant._rdp",
        "torch.nn.modules.batchnorm._BatchNorm",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch._inductor.config",
        "from torch._dynamo import config",
        "class Own(nn.Module):\n    def reset(self):\n        return self._modules",
        "accountant = rdp.RdpAccountant()\naccountant._rdp",
        "network._modules = {}",
    ],
)
def test_a_private_name_is_found(statement: str) -> None:
    assert len(set(foreign(ROOT / "src" / "new.py", ast.parse(statement)))) == 1


@pytest.mark.parametrize("statement", ["self._graph = 1\nother._graph", "class Ledger(Journal): ...\nLedger._begin"])
def test_a_name_of_our_own_is_not_found(statement: str) -> None:
    assert list(foreign(ROOT / "src" / "new.py", ast.parse(statement))) == []
