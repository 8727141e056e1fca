"""The hint how to install an optional part is a command that works."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcdp.files import installation


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the package lies, four levels below the directory that may be a checkout."""
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "src" / "fedcdp" / "files" / "installation.py"))
    return tmp_path


def test_in_a_checkout_it_is_the_checkout(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (installed / "pyproject.toml").write_text('[project]\nname = "fedcdp"\n')
    monkeypatch.chdir(installed)
    assert installation.install_command("report") == "pip install '.[report]'"


def test_elsewhere_it_names_the_path_of_the_checkout(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (installed / "pyproject.toml").write_text('[project]\nname = "fedcdp"\n')
    (installed / "other").mkdir()
    monkeypatch.chdir(installed / "other")
    assert installation.install_command("report") == f"pip install '{installed.resolve()}[report]'"


@pytest.mark.parametrize("project", [None, '[project]\nname = "other"\n', "[project", "name = 3\n"])
def test_a_wheel_gets_only_the_missing_packages(
    installed: Path, monkeypatch: pytest.MonkeyPatch, project: str | None
) -> None:
    if project is not None:
        (installed / "pyproject.toml").write_text(project)
    monkeypatch.chdir(installed)
    assert installation.install_command("flower") == "pip install 'fedcdp[flower]'"
