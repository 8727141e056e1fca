"""Run a page: its `python` and `sh` blocks in order, as a reader would paste them, and compare what they print.

`python -m tools.pages --run NAME` runs a tutorial and writes what its blocks print into it.

Python blocks share one namespace, and all blocks of a page share one new folder. A `text` block right after a block is
what that block printed; `...` in it stands for anything, where a figure differs from machine to machine. A template comment
before a block says what is special:

| comment | the block |
| --- | --- |
| `{# file: NAME #}` | is written to a file instead of run |
| `{# needs: MODULE #}` | is left out where that cannot be imported |
| `{# integration: WHY #}` | runs in the integration tests only |
| `{# not run: WHY #}` | is for people only |
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import multiprocessing
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch._dynamo  # noqa: F401  with the next, what a command would otherwise import by itself

import fedcdp.accounting.calibrate
import fedcdp.cli  # noqa: F401

_BLOCK = re.compile(
    r"^(?:\{# (?P<mark>file|needs|integration|not run): (?P<what>.*?) #\}\n)?"
    r"^```(?P<language>python|sh)\n(?P<code>.*?)^```\n"
    r"(?:\n*^```text\n(?P<printed>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
_WIDTH = 100  # of a terminal, in characters
_LOOSELY = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A block of a page, what the page says that it prints, and the line where it starts."""

    language: str
    code: str
    printed: str | None
    mark: str | None
    what: str | None
    line: int
    span: tuple[int, int]
    """Where in the page `printed` stands."""


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code")) + 1
        yield Block(
            *found.group("language", "code", "printed", "mark", "what"), line=line, span=found.span("printed")
        )  # fmt: skip


def run(page: Path, folder: Path, integration: bool = False) -> Iterator[tuple[Block, str]]:
    """Run a page in a folder; each block that ran, and what it printed. A block that fails raises, and says where."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found = list(blocks(page))
    with contextlib.chdir(folder):
        for block in found:
            if _left_out(block, integration):
                continue
            if block.mark == "file":
                Path(block.what or "").write_text(block.code)
            elif block.language == "python":
                yield block, run_python(block.code, namespace, str(page), block.line)
            elif block.language == "sh":
                yield block, run_shell(block.code, f"{page.name}, line {block.line}")


def _left_out(block: Block, integration: bool) -> bool:
    if block.mark == "needs":
        return importlib.util.find_spec(block.what or "") is None
    return block.mark == "not run" or (block.mark == "integration" and not integration)


def same(written: str, printed: str) -> bool:
    """Whether a page's text is what was printed; its `...` stands for anything."""
    return doctest.OutputChecker().check_output(written, printed, _LOOSELY)


def run_python(code: str, namespace: dict[str, Any], page: str, line: int = 1) -> str:
    """Run code that stands on this line of a page; returns what it printed."""
    shown = io.StringIO()
    compiled = compile("\n" * (line - 1) + code, page, "exec")  # an error names the line of the page
    with contextlib.redirect_stdout(shown):
        exec(compiled, namespace)
    return shown.getvalue()


def run_shell(code: str, where: str) -> str:
    """Run shell commands line by line; returns what they printed.

    A fedcdp command runs in a copy of this process, which has imported everything that takes seconds.
    """
    shown = ""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            if words[:2] == ["fedcdp", "deploy"]:  # starts processes, which must not be copies
                command = [sys.executable, "-m", *words]
                status = subprocess.run(command, stdout=out, stderr=errors, check=False).returncode
            elif words[:1] == ["fedcdp"]:
                copy = multiprocessing.get_context("fork").Process(target=_fedcdp, args=(words, out, errors))
                copy.start()
                copy.join()
                status = copy.exitcode
            else:
                status = subprocess.run(
                    ["bash", "-euc", f"export LC_ALL=C; {line}"], stdout=out, stderr=errors, check=False
                ).returncode
            out.seek(0)
            errors.seek(0)
            if status:
                raise AssertionError(f"{where}: {line}: exit status {status}\n{errors.read()}")
            shown += out.read()
    return shown


def _fedcdp(words: list[str], out: IO[str], errors: IO[str]) -> None:
    from fedcdp.cli import main, terminal

    sys.argv, sys.stdout, sys.stderr = words, out, errors
    terminal.stdout.width = terminal.console.width = _WIDTH
    main()


def rewrite(page: Path) -> None:
    """Run a page, and put what was printed in the place of what no longer fits."""
    text = page.read_text()
    with tempfile.TemporaryDirectory() as folder:
        ran = list(run(page, Path(folder)))
    for block, printed in reversed(ran):
        if block.printed is not None and not same(block.printed, printed):
            start, end = block.span
            text = text[:start] + "".join(f"{line.rstrip()}\n" for line in printed.splitlines()) + text[end:]
    page.write_text(text)
