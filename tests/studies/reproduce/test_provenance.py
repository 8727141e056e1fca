"""Which code a cell belongs to: the files it depends on, what counts as a change, and the committed cells that are older."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fedcdp.studies.reproduce import provenance as tracing
from fedcdp.studies.reproduce.catalogue import Cell, Place, tables
from fedcdp.studies.reproduce.provenance import digest, essence, modules, provenance
from fedcdp.studies.reproduce.runner import KINDS, TableResults, measure

COMMITTED = Path(__file__).parents[3] / "results" / "reproduction"
_SMALL: dict[str, Any] = {
    "data": {"dataset": "cancer", "clients": 4},
    "plan": {"per_round": 2, "rounds": 1, "local_steps": 1, "batch_size": 1},
    "rates": [0.1],
}
_ONLY_HERE = ("fedcdp.studies.reproduce.", "fedcdp.files.", "fedcdp.studies.bench.", "fedcdp.cli.")


def cell_of(kind: str) -> Cell:
    attack = {"attack": {"victims": 2, "network": "paper", "name": "batch", "recipe": {"iterations": 1}}}
    return Cell("small", "small", "", _SMALL | {"kind": kind} | (attack if kind == "attack" else {}))


@pytest.mark.parametrize("kind", ["training", "attack"])
def test_whatever_runs_while_a_cell_is_measured_is_in_its_digest(kind: str, tmp_path: Path) -> None:
    ran: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            ran.add(str(frame.f_globals.get("__name__")))

    sys.setprofile(note)
    try:
        measure("table", cell_of(kind), Place(tmp_path))
    finally:
        sys.setprofile(None)
    own = {name for name in ran if name.startswith("fedcdp.") and not name.startswith(_ONLY_HERE)}
    assert {"fedcdp.training.rounds" if kind == "training" else "fedcdp.attacks.reconstruct"} <= own
    assert own <= modules(kind)


def test_a_measured_cell_says_on_which_code(tmp_path: Path) -> None:
    row = measure("table", cell_of("training"), Place(tmp_path, commit="abc"))
    assert row["commit"] == "abc"
    assert row["code"] == digest("training")


def test_every_kind_has_a_digest_of_its_own() -> None:
    assert len({digest(kind) for kind in KINDS}) == len(KINDS)
    assert all("fedcdp.config.plan" in modules(kind) for kind in KINDS)
    assert "fedcdp.mechanism.noise" in modules("training")
    assert not any(name.startswith("fedcdp.attacks") for name in modules("training"))


TEXT = '''"""A module."""

import os  # for files

LIMIT = 3  # so many


class Kept:
    """A class."""

    name: str = "#1"
    """A field."""


def count(what: str) -> int:
    """How many."""
    return f"{what!r:>3}#".count("#") + len("""a
    # b""")
'''


def test_texts_do_not_count() -> None:
    other = TEXT.replace("A module.", "The module.\n\nIt counts.").replace("  # so many", "").replace("A field", "It")
    assert essence(other.replace("How many.", "The number.")) == essence(TEXT)
    assert "so many" not in essence(TEXT)
    assert 'name: str = "#1"' in essence(TEXT)
    assert "    # b" in essence(TEXT)  # in a value


@pytest.mark.parametrize(
    ("old", "new"), [("LIMIT = 3", "LIMIT = 4"), ('"#1"', '"#2"'), ("# b", "# c"), ("import os", "import re")]
)
def test_everything_else_counts(old: str, new: str) -> None:
    assert essence(TEXT.replace(old, new)) != essence(TEXT)


def test_a_change_in_a_file_far_below_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest("training")
    digest.cache_clear()
    monkeypatch.setattr(tracing, "essence", lambda source: essence(source) + ("x" if "def group_norms" in source else ""))
    try:
        assert digest("training") != before
    finally:
        digest.cache_clear()


def test_no_commit_is_named_for_a_tree_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "clean_commit", lambda: None)
    assert provenance("epsilon")["commit"] is None
    assert provenance("epsilon", "abc")["commit"] == "abc"


def test_a_folder_outside_any_repository_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_PACKAGE", tmp_path)
    assert tracing.clean_commit() is None


def test_committed_cells_that_were_measured_on_older_code_are_listed() -> None:
    """A warning, because only the person who changes code can tell whether its figures can change."""
    older = {table.name: TableResults(table, COMMITTED).on_older_code for table in tables()}
    if counts := [f"{table} {len(cells)}" for table, cells in older.items() if cells]:
        listed = "`fedcdp reproduce TABLE --list` names the cells that were measured on older code"
        warnings.warn(f"{listed}: {', '.join(counts)}", stacklevel=1)
    for table in tables():
        results = TableResults(table, COMMITTED)
        assert set(older[table.name]) <= set(results.cells)
