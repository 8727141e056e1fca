"""Pictures of tables: of what there is, and nothing of what there is not."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedcdp.cli.program import app
from fedcdp.files.installation import install_command
from fedcdp.studies.reproduce.catalogue import Place, table
from fedcdp.studies.reproduce.figures import Images, draw

RESULTS = Path(__file__).parents[3] / "results" / "reproduction"


def keep(place: Place, name: str, cell: str, examples: int) -> None:
    """Arrays as an attack leaves them, of one victim."""
    found = table(name)
    images = np.random.default_rng(0).random((1, examples, 3, 8, 8)).astype(np.float16)
    arrays: dict[str, Any] = dict.fromkeys(("original", "seed", "reconstruction", "iteration_1", "iteration_10"), images)
    path = place.arrays(name, found.cells[cell])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, order=np.arange(examples)[None, ::-1].copy(), **arrays)


@pytest.mark.parametrize("name", ["methods", "leakage", "compression"])
def test_reconstructions_are_drawn_where_there_are_any(tmp_path: Path, name: str) -> None:
    place = Place(tmp_path)
    found = table(name)
    assert draw(found, {"some": {}}, place) == []
    for cell in found.cells.values():
        if cell.kind == "attack":
            keep(place, name, cell.name, 3 if "type1" in cell.name or "type01" in cell.name else 1)
    assert draw(found, {"some": {}}, place) == [f"{name}.png"]
    with Image.open(tmp_path / f"{name}.png") as picture:
        assert min(picture.size) > 200


def test_a_reconstruction_stands_beside_the_image_that_it_is_a_guess_of(tmp_path: Path) -> None:
    place = Place(tmp_path)
    keep(place, "leakage", "type01-lfw", 3)
    images = Images(place.arrays("leakage", table("leakage").cells["type01-lfw"]))
    original, guess = images.of("original"), images.of("reconstruction")
    assert original is not None
    assert guess is not None
    assert all((a == b).all() for a, b in zip(original, reversed(guess), strict=True))
    assert images.of("iteration_7") is None


def test_curves_are_drawn(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert draw(table("gradient-norm"), {"rate0.1": {"curves": {"gradient_norm": [[1, 2.0], [2, 1.0]]}}}, place)
    row = {"round": 1, "bound_median": 0.1, "bound_q10": 0.05, "noise_norm": 1.0}
    assert draw(table("tradeoff"), {"constant/cohort": {"followed": [row, row | {"round": 2}]}}, place) == ["tradeoff.png"]
    assert (tmp_path / "gradient-norm.png").stat().st_size > 1000


def test_without_matplotlib_a_table_is_written_and_its_picture_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shutil.copy(RESULTS / "gradient-norm.json", tmp_path)
    done = CliRunner().invoke(app, ["reproduce", "gradient-norm", "--table-only", "--out", str(tmp_path)])
    assert done.exception is None
    told = " ".join(done.stderr.split())
    hint = install_command("report")
    assert f"gradient-norm.png was not drawn: this needs matplotlib; install it with {hint}" in told
    assert "](gradient-norm.png)" in (RESULTS / "gradient-norm.md").read_text()
    assert "](gradient-norm.png)" not in (tmp_path / "gradient-norm.md").read_text()


def test_tables_without_a_picture_have_none(tmp_path: Path) -> None:
    assert draw(table("clip"), {"some": {}}, Place(tmp_path)) == []
