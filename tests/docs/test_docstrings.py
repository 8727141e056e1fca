"""Docstrings of the public names: each says what a caller needs, and its examples run."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import fedcdp
import fedcdp.attacks
import fedcdp.audit
from fedcdp.accounting.budget import privacy_of_plan

FLOWER = importlib.util.find_spec("flwr") is not None
RESULTS = ("Inferred", "LayerLeaks", "Leaks", "Lira", "Membership", "Presence")


def public() -> dict[str, Any]:
    """Every class and function that users call, by name."""
    found = {name: getattr(fedcdp, name) for name in fedcdp.__all__ if name not in ("__version__", "loggers")}
    found |= {name: getattr(fedcdp.loggers, name) for name in fedcdp.loggers.__all__}
    found |= {name: getattr(fedcdp.attacks, name) for name in RESULTS}
    found |= {"privacy": privacy_of_plan, "audit_one_run": fedcdp.audit.audit_one_run}
    if FLOWER:
        flower = importlib.import_module("fedcdp.flower")
        found |= {name: getattr(flower, name) for name in flower.__all__}
    return found


PUBLIC = public()


def examples() -> list[doctest.DocTest]:
    """The examples in the docstring of each public name and of its methods."""
    find = doctest.DocTestFinder(recurse=True).find
    found = [one for name, each in PUBLIC.items() for one in find(each, name, module=inspect.getmodule(each), globs={})]
    return [one for one in found if one.examples]


def documented_arguments(docstring: str) -> list[str]:
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    return re.findall(r"^    \*{0,2}(\w+): ", section[1], re.MULTILINE) if section else []


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_an_example_prints_what_it_shows(
    example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path / "cache"))
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert not failed, capsys.readouterr().out
    assert tried


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_documents_every_argument(name: str) -> None:
    each, docstring = PUBLIC[name], inspect.getdoc(PUBLIC[name])
    assert docstring
    if inspect.isfunction(each):
        assert documented_arguments(docstring) == list(inspect.signature(each).parameters)
        assert "\nReturns:\n" in docstring


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - {"Facts", "PlanStrategy"}))
def test_a_docstring_has_an_example(name: str) -> None:
    assert "\nExamples:\n" in (inspect.getdoc(PUBLIC[name]) or "")


def test_attack_lists_its_arguments() -> None:
    assert len(documented_arguments(inspect.getdoc(fedcdp.attack) or "")) == 21


def test_an_example_that_is_wrong_is_noticed() -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert doctest.DocTestRunner(verbose=False).run(wrong, out=lambda _: None).failed == 1
