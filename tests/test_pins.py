"""The pinned versions agree with each other, with pyproject.toml, and with what the package index states about them.

`.ci/metadata.json` holds the requirements of the index's own builds (`.ci/lock.py` writes it). So a pin that contradicts the
CUDA build of torch fails here also where a CPU build, which requires less, is installed.
"""

from __future__ import annotations

import functools
import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
METADATA: dict[str, dict[str, Any]] = json.loads((ROOT / ".ci" / "metadata.json").read_text())
CONSTRAINTS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
LOCKED = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements-ci.txt").read_text(), re.MULTILINE))
PINS = {canonicalize_name(each.name): str(each.specifier)[2:] for each in CONSTRAINTS if "==" in str(each.specifier)}
PYTHONS = runpy.run_path(str(ROOT / ".ci" / "registry.py"))["PYTHONS"]


def _applies(requirement: Requirement, python: str) -> bool:
    """Whether a requirement counts under a Python on Linux x86-64."""
    environment = {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
        "extra": "",
    }
    return requirement.marker is None or requirement.marker.evaluate(environment)


@functools.cache
def _stated() -> list[tuple[str, Requirement]]:
    """Every requirement that is known, with the package that states it."""
    own = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]
    others = [(f"{name} {about['version']}", each) for name, about in METADATA.items() for each in about["requires"]]
    return [(package, Requirement(each)) for package, each in [*(("fedcdp", each) for each in own), *others]]


def conflicts(pins: dict[str, str], python: str) -> list[str]:
    """One line for each pin that a pinned package, or fedcdp, does not admit under a Python."""
    found = [
        f"{name} {about['version']} does not run on Python {python}"
        for name, about in METADATA.items()
        if python not in SpecifierSet(about["requires_python"])
    ]
    for package, requirement in _stated():
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is not None and _applies(requirement, python) and not requirement.specifier.contains(pin, prereleases=True):
            found.append(f"{package} requires {requirement.name}{requirement.specifier}, not {pin}")
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_no_package_contradicts_a_pin(python: str) -> None:
    assert conflicts(PINS, python) == []


@pytest.mark.parametrize("python", PYTHONS)
def test_the_triton_that_the_cpu_build_hid_is_found(python: str) -> None:
    assert conflicts({**PINS, "triton": "3.9.0"}, python) == ["torch 2.13.0 requires triton==3.7.1, not 3.9.0"]


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_on_a_pin_can_be_contradicted(python: str) -> None:
    tried = 0
    for package, requirement in _stated():
        name = canonicalize_name(requirement.name)
        if name in PINS and requirement.specifier and _applies(requirement, python):
            outside = next(each for each in ("0.0.1", "9999") if each not in requirement.specifier)
            line = f"{package} requires {requirement.name}{requirement.specifier}, not {outside}"
            assert line in conflicts({**PINS, name: outside}, python)
            tried += 1
    assert tried > len(PINS)


def test_the_recorded_metadata_belongs_to_the_pins() -> None:
    assert {name: about["version"] for name, about in METADATA.items()} == PINS


def test_a_package_that_a_python_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METADATA, "numpy", {**METADATA["numpy"], "requires_python": "<3.13"})
    assert conflicts(PINS, "3.12") == []
    assert conflicts(PINS, "3.13") == [f"numpy {PINS['numpy']} does not run on Python 3.13"]


def test_ci_installs_what_the_constraints_say() -> None:
    assert all(LOCKED[name] == version for name, version in PINS.items() if name in LOCKED)
    ranges = {each.name: each.specifier for each in CONSTRAINTS if canonicalize_name(each.name) not in PINS}
    assert all(LOCKED[name] in specifier for name, specifier in ranges.items())
    installed = [canonicalize_name(Requirement(each).name) for each in PROJECT["dependencies"]]
    for extra in ("dev", "report", "flower", "docs"):
        installed += [canonicalize_name(Requirement(each).name) for each in PROJECT["optional-dependencies"][extra]]
    assert set(installed) <= LOCKED.keys() & PINS.keys()


def test_the_supported_pythons_are_the_same_everywhere() -> None:
    named = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.fullmatch(r".*:: Python :: 3\.\d+", each)]
    admitted = [f"3.{minor}" for minor in range(40) if f"3.{minor}" in SpecifierSet(PROJECT["requires-python"])]
    assert tuple(named) == tuple(admitted) == PYTHONS
    assert f"for python in {' '.join(PYTHONS)}; do" in (ROOT / ".ci" / "resolve").read_text()
    assert f"for minor in {' '.join(each[2:] for each in PYTHONS)}; do" in (ROOT / ".ci" / "fresh").read_text()
