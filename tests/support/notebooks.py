"""Run a notebook without Jupyter: its code cells in order, in one namespace and one new folder.

`python -m tools.pages --notebook NAME` runs a notebook and writes the output of its cells into it.

A cell that starts with `%%sh` is run by the shell. Cells print text and show nothing else. A cell tagged `integration` takes
a minute or more and needs real processes. It is left out, and keeps its output, unless `--integration` is given, too.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.doc_pages import run_python, run_shell, same

Cell = dict[str, Any]
_SHELL = "%%sh\n"


def read(path: Path) -> dict[str, Any]:
    """A notebook as the JSON object that it is."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def source(cell: Cell) -> str:
    """The text of a cell."""
    return "".join(cell["source"])


def printed(cell: Cell) -> str:
    """What a code cell printed when it was last run."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def run(path: Path, folder: Path, integration: bool = False) -> Iterator[tuple[Cell, str]]:
    """Run a notebook in a folder; yields each cell that ran, and what it printed."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]
    with contextlib.chdir(folder):
        for number, cell in enumerate(cells, start=1):
            if not integration and "integration" in cell["metadata"].get("tags", []):
                continue
            code, where = source(cell), f"{path.name}, code cell {number}"
            shown = (
                run_shell(code.removeprefix(_SHELL), where)
                if code.startswith(_SHELL)
                else run_python(code, namespace, where)
            )
            yield cell, re.sub(r"[ \t]+$", "", shown, flags=re.MULTILINE)


def rewrite(path: Path, integration: bool = False) -> None:
    """Run a notebook, and replace the outputs that have changed."""
    notebook = read(path)
    with tempfile.TemporaryDirectory() as folder:
        shown = {cell["id"]: text for cell, text in run(path, Path(folder), integration)}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell["execution_count"] = number
            text = shown.get(cell["id"], printed(cell))
            if not same(printed(cell), text):
                stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
                cell["outputs"] = [stream] if text else []
    write(path, notebook)


def write(path: Path, notebook: dict[str, Any]) -> None:
    """A notebook as Jupyter writes it."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
