"""Notebooks as pages: text as it is, code as code, and below it what it printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SHELL = "%%sh\n"


def page(path: Path) -> str:
    """A notebook as Markdown, with a link to the notebook itself below its title."""
    cells = json.loads(path.read_text())["cells"]
    title, _, rest = _text(cells[0]["source"]).partition("\n")
    note = f'<a href="{path.name}" download>Download this notebook</a>, or open it from `docs/notebooks` in the repository.'
    return "\n\n".join([title, note, rest.strip(), *(part for cell in cells[1:] for part in _parts(cell))]) + "\n"


def _parts(cell: dict[str, Any]) -> list[str]:
    source = _text(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    code = ("sh", source.removeprefix(_SHELL)) if source.startswith(_SHELL) else ("python", source)
    printed = "".join(_text(output.get("text", "")) for output in cell["outputs"]).rstrip()
    return [_fenced(*code), *([_fenced("text", printed)] if printed else [])]


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _text(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)
