"""`make demo` installs what the demo needs, from where it is told to, and says before a download how large it is."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedcdp

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
ELSEWHERE = "https://index.example/cpu"


@pytest.fixture(scope="module")
def preflight() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / ".ci" / "preflight.py"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree in which nothing is installed."""
    for each in ("Makefile", "pyproject.toml", "constraints.txt", "requirements-ci.txt"):
        shutil.copy(ROOT / each, tmp_path)
    return tmp_path


def _installs(tree: Path, *arguments: str) -> list[str]:
    """What make would hand to pip, in its order."""
    clean = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    command = [shutil.which("make") or "make", "--dry-run", *arguments]
    shown = subprocess.run(command, cwd=tree, env=clean, capture_output=True, text=True, check=True).stdout
    return [each.split(" pip install ")[1] for each in shown.replace("\\\n", "").splitlines() if " pip install " in each]


def test_the_demo_installs_the_package_and_no_extra(tree: Path) -> None:
    torch, package = _installs(tree, "demo")
    assert torch.split()[-1] == "torch"
    assert package.endswith("--constraint constraints.txt --editable .")


def test_the_tests_add_the_extras_to_what_the_demo_installed(tree: Path) -> None:
    *before, extras = _installs(tree, "test")
    assert before == _installs(tree, "demo")
    assert extras.endswith("--constraint constraints.txt --editable '.[dev,report,flower,docs]'")
    (tree / ".venv").mkdir()
    (tree / ".venv" / ".installed-demo").touch()
    assert _installs(tree, "demo") == []
    assert _installs(tree, "test") == [extras]
    (tree / ".venv" / ".installed").touch()
    assert _installs(tree, "demo", "test") == []


@pytest.mark.parametrize("target", ["demo", "test"])
def test_torch_alone_comes_from_the_index_that_is_named(tree: Path, target: str) -> None:
    torch, *others = _installs(tree, target, f"TORCH_INDEX={ELSEWHERE}")
    assert re.search(rf'--constraint constraints.txt torch\s+--no-deps --index-url "{ELSEWHERE}"$', torch)
    assert not any("index" in each for each in [*others, *_installs(tree, target)])


def test_a_locked_installation_takes_nothing_without_a_hash(tree: Path) -> None:
    everything, package = _installs(tree, "test", "LOCKED=1")
    assert "--no-deps --require-hashes --requirement requirements-ci.txt" in everything
    assert "--no-deps --no-build-isolation --editable ." in package
    assert _installs(tree, "demo", "LOCKED=1") == [everything, package]
    (tree / ".venv").mkdir()
    (tree / ".venv" / ".installed-demo").touch()  # without LOCKED
    assert _installs(tree, "test", "LOCKED=1") == [everything, package]


@pytest.mark.parametrize("version", [(2, 7), (3, 6), (3, 10), (3, 14), (4, 12)])
def test_another_python_is_refused(preflight: dict[str, Any], version: tuple[int, int]) -> None:
    line = preflight["unsupported"](version, PYPROJECT)
    assert line.startswith(f"PYTHON: Python {version[0]}.{version[1]} is not supported, 3.11 to 3.13 are")
    assert "\n" not in line


def test_the_supported_pythons_are_let_through(preflight: dict[str, Any]) -> None:
    assert [preflight["unsupported"]((3, minor), PYPROJECT) for minor in (11, 12, 13)] == ["", "", ""]


def test_a_large_download_is_announced_once_and_only_then(preflight: dict[str, Any]) -> None:
    announcement = preflight["announcement"]
    line = announcement("", "Linux", False)
    assert preflight["DOWNLOAD"] in line
    assert preflight["INSTALLED"] in line
    assert "TORCH_INDEX" in line
    assert [announcement(*case) for case in ((ELSEWHERE, "Linux", False), ("", "Linux", True), ("", "Darwin", False))] == [
        ""
    ] * 3


def test_the_sizes_were_measured_with_the_pinned_torch(preflight: dict[str, Any]) -> None:
    assert f"\ntorch=={preflight['MEASURED']}\n" in (ROOT / "constraints.txt").read_text()
    readme = (ROOT / "README.md").read_text()
    assert f"downloads {preflight['DOWNLOAD']}, and `.venv` takes {preflight['INSTALLED']}" in readme
    assert f"a CPU build ({preflight['DOWNLOAD_CPU']} and {preflight['INSTALLED_CPU']})" in readme
    assert f"TORCH_INDEX={preflight['CPU']}`" in readme
    assert preflight["CHOICES"] in readme


def _without_extras() -> list[str]:
    """The modules that are installed here and do not come with `pip install .`"""
    waiting = [Requirement(each) for each in tomllib.loads(PYPROJECT)["project"]["dependencies"]]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            stated = [Requirement(each) for each in requires(requirement.name) or []]
        except PackageNotFoundError:
            continue
        environments = [{"extra": name} for name in requirement.extras or {""}]
        waiting += [each for each in stated if each.marker is None or any(map(each.marker.evaluate, environments))]
    needed = {name for name, _ in seen} | {"fedcdp"}
    owners = packages_distributions()
    return sorted(module for module, by in owners.items() if not {canonicalize_name(each) for each in by} & needed)


def test_the_extras_are_told_from_what_the_package_needs() -> None:
    absent = set(_without_extras())
    assert {"pytest", "flwr", "mkdocs", "cryptography", "matplotlib", "onnx", "tensorboard"} <= absent
    assert not {"torch", "numpy", "sklearn", "PIL", "typer"} & absent


@pytest.mark.slow
def test_the_demo_needs_no_extra(tmp_path: Path) -> None:
    absent = _without_extras()
    program = f"""
import sys
sys.modules.update(dict.fromkeys({absent!r}))  # an import of these fails
from pathlib import Path
from tests.support.small_demo import SILENT, SMALLER
from fedcdp.studies.demo import Attack, Demo
from fedcdp.report.api import report
from fedcdp.cli.program import app
out = Path({str(tmp_path)!r}) / "demo"
once = {{**SMALLER, "plan": {{"rounds": 1, "per_round": 2, "local_steps": 1}}}}
Demo(out, once, (Attack("type2", "clip-aware", victims=1, iterations=1),)).run(SILENT)
report(out, out / "report.html")
run = str(out.parent / "run")
train = ["train", "--dataset", "mnist5k", "--clients", "4", "--per-round", "2", "--records", "40", "--rounds", "1"]
for command in (
    ["demo", "--help"],
    ["account", "--preset", "mnist"],
    [*train, "--local-steps", "1", "--out", run],
    ["attack", "--run", run, "--leak", "type2", "--victims", "1", "--attack", "cpl", "--iterations", "1"],
    ["report", run, "--out", run + ".html"],
):
    app(command, standalone_mode=False)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(fedcdp.__file__).parents[1]), str(ROOT)])}
    shown = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "<svg" in (tmp_path / "demo" / "report.html").read_text()
    assert "<svg" in (tmp_path / "run.html").read_text()


def test_every_file_of_the_package_is_in_the_wheel() -> None:
    package = ROOT / "src" / "fedcdp"
    patterns = tomllib.loads(PYPROJECT)["tool"]["setuptools"]["package-data"]["fedcdp"]
    packed = {each for pattern in patterns for each in package.glob(pattern)}
    data = {each for each in package.rglob("*") if each.is_file() and each.suffix not in (".py", ".pyc")}
    assert package / "data" / "digits.npz" in data
    assert data <= packed


def _imported(path: Path) -> set[str]:
    """The first names of all modules that a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
    return {each.partition(".")[0] for each in found}


def test_every_library_that_the_package_imports_is_declared() -> None:
    project = tomllib.loads(PYPROJECT)["project"]
    stated = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    declared = {canonicalize_name(Requirement(each).name) for each in stated}
    # What is in peers/ runs in the peers' own interpreters.
    sources = [each for each in (ROOT / "src").rglob("*.py") if each.parent.name != "peers"]
    imported = set().union(*map(_imported, sources)) - sys.stdlib_module_names - {"fedcdp"}
    assert {"torch", "sklearn", "PIL", "matplotlib"} <= imported
    owners = packages_distributions()
    unknown = {each for each in imported if not {canonicalize_name(owner) for owner in owners.get(each, [each])} & declared}
    # protobuf, in whose classes Flower hands out its messages, and httpx, whose errors its client raises, are Flower's to
    # choose; a logger's service is the user's.
    assert unknown == {"google", "httpx", "mlflow", "wandb"}
