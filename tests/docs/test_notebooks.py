"""The notebooks: sound files whose outputs are what their cells print, and whose pages are on the site."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import notebooks
from tests.support.doc_pages import same
from tools.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def as_page() -> ModuleType:
    """The module of the site that makes pages of notebooks."""
    found = importlib.util.spec_from_file_location("notebook_pages", ROOT / "docs" / "site" / "notebooks.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def saved(path: Path, *codes: str, text: str = "") -> Path:
    outputs = [{"name": "stdout", "output_type": "stream", "text": [text]}] if text else []
    cells = [{"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# Title\n", "\n", "Words."]}]
    cells += [
        {"cell_type": "code", "id": f"b{n}", "metadata": {}, "source": code, "outputs": outputs, "execution_count": None}
        for n, code in enumerate(codes)
    ]
    notebooks.write(path, {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    return path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_a_sound_file(path: Path) -> None:
    notebook = notebooks.read(path)
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[\w-]{1,64}", name) for name in names)
    for cell in notebook["cells"]:
        wanted = {"cell_type", "id", "metadata", "source"}
        code = cell["cell_type"] == "code"
        assert cell.keys() == wanted | ({"execution_count", "outputs"} if code else set())
        assert code or cell["cell_type"] == "markdown"
        for output in cell.get("outputs", []):
            assert output.keys() == {"name", "output_type", "text"}
            assert (output["name"], output["output_type"]) == ("stdout", "stream")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_its_outputs(path: Path) -> None:
    cells = [cell for cell in notebooks.read(path)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run it with python -m tools.pages"
    printing = [cell for cell in cells if "print(" in notebooks.source(cell)]
    assert len(printing) >= 3
    assert all(notebooks.printed(cell) for cell in printing)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_committed(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem == "deployment":
        pytest.importorskip("flwr")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path / "cache"))
    for cell, printed in notebooks.run(path, tmp_path):
        assert same(notebooks.printed(cell), printed), f"{path.name}: {notebooks.source(cell)}\nprints\n{printed}"


@pytest.mark.integration
@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="Flower is not installed")
def test_the_deployment_of_a_notebook_runs_with_real_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path / "cache"))
    *_, (_, printed) = notebooks.run(ROOT / "docs" / "notebooks" / "deployment.ipynb", tmp_path, integration=True)
    assert printed.count("5 releases") == 2


def test_cells_share_names_and_the_shell_runs_in_their_folder(tmp_path: Path) -> None:
    codes = ("from pathlib import Path\nname = 'made.txt'", "Path(name).write_text('here')", "%%sh\ncat made.txt")
    ran = list(notebooks.run(saved(tmp_path / "one.ipynb", *codes), tmp_path))
    assert [printed for _, printed in ran] == ["", "", "here"]


def test_a_notebook_whose_output_changed_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path / "one.ipynb", "print(1 + 1)", text="3\n")
    [(cell, printed)] = notebooks.run(path, tmp_path)
    assert not same(notebooks.printed(cell), printed)
    notebooks.rewrite(path)
    [(cell, printed)] = notebooks.run(path, tmp_path)
    assert notebooks.printed(cell) == printed == "2\n"


def test_a_cell_for_integration_is_left_out(tmp_path: Path) -> None:
    path = saved(tmp_path / "one.ipynb", "print(1)")
    notebook = notebooks.read(path)
    notebook["cells"][1]["metadata"] = {"tags": ["integration"]}
    notebooks.write(path, notebook)
    assert list(notebooks.run(path, tmp_path)) == []
    assert len(list(notebooks.run(path, tmp_path, integration=True))) == 1


def test_a_page_shows_text_code_and_output(tmp_path: Path) -> None:
    page = as_page().page(saved(tmp_path / "one.ipynb", "%%sh\necho 2", text="2\n"))
    assert page.startswith('# Title\n\n<a href="one.ipynb" download>')
    assert page.endswith("Words.\n\n```sh\necho 2\n```\n\n```text\n2\n```\n")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_link_of_a_notebook_leads_somewhere(path: Path) -> None:
    for cell in notebooks.read(path)["cells"]:
        if cell["cell_type"] == "markdown":
            for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", notebooks.source(cell)):
                assert link.startswith("https:") or (path.parent / link).exists(), link


def test_every_notebook_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [path.stem for path in NOTEBOOKS] == ["deployment", "own_data", "own_loop"]
    assert all(f": notebooks/{path.stem}.md\n" in navigation for path in NOTEBOOKS)


def test_no_notebook_names_a_place_of_a_single_machine() -> None:
    for path in NOTEBOOKS:
        assert not re.search(r"(?<![\w.])/(work|tmp|root|home)/", json.dumps(notebooks.read(path))), path.name
