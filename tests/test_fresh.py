"""`make fresh` reports each Python in one line, and passes only if every target passed with the package index's torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# In place of the real one: an environment that reports a version of torch, and tests that end as they are told to.
MAKEFILE = """
demo:
	mkdir -p .venv/bin
	printf '#!/bin/sh\\necho $(TORCH)\\n' > .venv/bin/python
	chmod +x .venv/bin/python
	env
test:
	echo '== 3 passed, 1 skipped in 2.00s =='
	$(END)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A committed tree with the script, and a Makefile that takes no time."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "fresh", tmp_path / ".ci")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / ".gitignore").write_text("build/\n")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--no-verify", "--message", "m"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    return tmp_path


def _fresh(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {"FRESH_PYTHONS": sys.executable, "TORCH": "2.13.0", "END": "true", **environment}
    return subprocess.run([tree / ".ci" / "fresh"], env=os.environ | given, capture_output=True, text=True, check=False)


def test_each_python_gets_one_line_with_what_it_did(tree: Path) -> None:
    shown = _fresh(tree, FRESH_PYTHONS=f"{sys.executable} {sys.executable}")
    lines = shown.stdout.splitlines()
    assert (shown.returncode, len(lines)) == (0, 2)
    assert all("torch 2.13.0" in line and "demo ok in" in line and "test ok in" in line for line in lines)
    assert all(line.endswith("(3 passed 1 skipped)") for line in lines)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"END": "false"}, "test FAILED (build/fresh/"),
        ({"FRESH_TARGETS": "demo absent"}, "absent FAILED (build/fresh/"),
        ({"TORCH": "2.13.0+cpu"}, "torch is not the index's"),
        ({"FRESH_TARGETS": "test"}, "torch is not the index's"),
    ],
)
def test_whatever_fails_is_told_and_fails_all(tree: Path, environment: dict[str, str], reason: str) -> None:
    shown = _fresh(tree, **environment)
    assert (shown.returncode, shown.stdout.count("\n")) == (1, 1)
    assert reason in shown.stdout


def test_nothing_of_this_machine_gets_into_a_fresh_installation(tree: Path) -> None:
    kept_out = ("LOCKED", "TORCH_INDEX", "VIRTUAL_ENV", "PYTHONPATH", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")
    assert _fresh(tree, FRESH_TARGETS="demo", **dict.fromkeys(kept_out, "1")).returncode == 0
    (log,) = (tree / "build" / "fresh").iterdir()
    seen = dict(line.split("=", 1) for line in log.read_text().splitlines() if "=" in line)
    assert not seen.keys() & set(kept_out)
    assert seen["PIP_CONFIG_FILE"] == "/dev/null"


def test_a_python_that_is_none_is_refused_in_one_line(tree: Path) -> None:
    shown = _fresh(tree, FRESH_PYTHONS="/bin/false")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == "FRESH_PYTHONS: /bin/false is no Python that can make a virtual environment\n"


def test_changes_that_are_not_committed_are_told_of(tree: Path) -> None:
    (tree / "Makefile").write_text("")
    assert _fresh(tree).stdout.startswith("This tree has changes that are not committed; the clones have the last commit.\n")
