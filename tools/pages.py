"""Render the pages that quote figures: each template under docs/templates becomes the page at the same path.

    python -m tools.pages                      # render every page
    python -m tools.pages --run flower         # first run the blocks of one tutorial, and write their output into it
    python -m tools.pages --notebook own_loop  # run a notebook, and write the output of its cells into it
    python -m tools.pages --notebook deployment --integration  # also its cells that take minutes

A template is Markdown with jinja2 calls. Every call names the source of its figure:

| call | renders |
| --- | --- |
| `figure(SOURCE, digits)` | the value, rounded, with a comma between thousands: 1,800 or 0.08 |
| `share(SOURCE, digits=3)` | the same without the zero before the point: .956 |
| `percent(SOURCE, digits=0)` | a hundred times the value |
| `megabytes(SOURCE)` | a number of bytes in MB |
| `gaps(SOURCES, OTHERS)` | the difference of two values, with its sign, or the range of several: −.008 to +.003 |
| `quoted(FILE, TEXT)` | TEXT, which must be written in `results/FILE` |
| `bench_table(FILE, SECTION)` | the table of one section of a result file of `fedcdp bench` |
| `attack_matrix(COLUMN, …)` | these columns of `results/attack_matrix.json`, a dash where a cell is missing |
| `presence_limits()`, `membership_limits()` | what presence and LiRA reach, and what ε allows |
| `crafted_presence()` | presence at honest weights, and at those of active servers |
| `breaching_table()` | for each case of `results/breaching.json`, fedcdp's best and `breaching`'s |
| `{% if measured(SOURCE) %}` … `{% endif %}` | a part that appears once SOURCE, or the whole file, is in `results` |

A SOURCE is `FILE.json / step / step …`, a value in `results/FILE.json`, or `account OPTIONS / adversary / unit`, the ε
that `fedcdp account OPTIONS` prints (for `zero-out`, unless a relation follows). A step is a key, a position in a list,
`[key=value; key=value]` for the one row of a list that has these values, or `mean KEY` or `deviation KEY` over the rows of a
list (without KEY: over a list of numbers). SOURCES name several values, `{1,2,8}` one for each alternative.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import statistics
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from typer.testing import CliRunner

from benchmarks import lira, preset_attacks
from benchmarks.attack_matrix import crafted, matrix
from benchmarks.breaching_peer import compared
from fedcdp.cli.program import app
from fedcdp.studies.bench.result_file import read as bench_results
from fedcdp.studies.bench.tables import markdown
from tools import paper_figures

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "docs" / "templates"
CALL = re.compile(r"\{\{ (?P<call>figure|share|percent|megabytes|quoted)\((?P<arguments>.*?)\) \}\}")
_ROW = re.compile(r"\[(.*)\]")


def templates() -> list[Path]:
    """Every template."""
    return sorted(TEMPLATES.rglob("*.jinja"))


def page_of(template: Path) -> Path:
    """The page that a template is rendered to."""
    return (ROOT / template.relative_to(TEMPLATES)).with_suffix("")


def source_of(page: Path) -> Path:
    """The file to edit for a page: its template, or the page itself if it has none."""
    template = TEMPLATES / f"{page.relative_to(ROOT)}.jinja"
    return template if template.exists() else page


def render(text: str) -> str:
    """Render a template's text."""
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(
        figure=figure, share=share, percent=percent, megabytes=megabytes, gaps=gaps, quoted=quoted,
        bench_table=bench_table, measured=measured, attack_matrix=attack_matrix, breaching_table=breaching_table,
        presence_limits=presence_limits, membership_limits=membership_limits, crafted_presence=crafted_presence,
        **paper_figures.CALLS,
    )  # fmt: skip
    return environment.from_string(text).render()


def figure(source: str, digits: int = 0) -> str:
    """A value, rounded to this many digits."""
    return f"{value_of(source):,.{digits}f}"


def share(source: str, digits: int = 3) -> str:
    """A value below 1, written without its leading zero."""
    return re.sub(r"^(-?)0\.", r"\1.", figure(source, digits))


def percent(source: str, digits: int = 0) -> str:
    """A value in percent, without the sign."""
    return f"{100 * value_of(source):.{digits}f}"


def megabytes(source: str) -> str:
    """A number of bytes in millions."""
    return f"{value_of(source) / 1e6:,.0f}"


def gaps(sources: str, others: str) -> str:
    """Each value minus the other one, or the range of these differences."""
    pairs = zip(_alternatives(sources), _alternatives(others), strict=True)
    differences = sorted(value_of(source) - value_of(other) for source, other in pairs)
    return paper_figures.range_of(map(paper_figures.signed, differences), in_order=True)


def quoted(file: str, text: str) -> str:
    """A text that appears in a result file."""
    if re.search(rf"(?<![\d.,]){re.escape(text)}(?![\d]|[.,]\d)", (ROOT / "results" / file).read_text()) is None:
        raise ValueError(f"{text} is not written in results/{file}")
    return text


def bench_table(file: str, section: str) -> str:
    """The table of one section of a result file of `fedcdp bench`, with its machine."""
    content = bench_results(ROOT / "results" / file)
    return markdown(content | {"sections": {section: content["sections"][section]}}).strip()


def attack_matrix(*columns: str) -> str:
    """Some columns of the matrix of methods, attacks and trust models."""
    return matrix(_read("attack_matrix.json") if measured("attack_matrix.json") else {}, columns)


def presence_limits() -> str:
    """How close presence comes to what ε allows, at the presets."""
    return preset_attacks.closeness(_read("preset_attacks.json")["cells"])


def crafted_presence() -> str:
    """The AUC of presence at honest weights, and at those of active servers."""
    return crafted(_read("attack_matrix.json"))


def membership_limits() -> str:
    """How close LiRA comes to what ε allows."""
    return lira.closeness(_read("lira.json")["cells"])


def breaching_table() -> str:
    """What fedcdp's best and the strongest attack of `breaching` recover from the same gradients."""
    return compared(_read("breaching.json"))


def measured(source: str) -> bool:
    """Whether a result file exists, and has this value."""
    file, *steps = source.split(" / ")
    if not (ROOT / "results" / file).exists():
        return False
    found: Any = _read(file) if steps else True
    for step in steps:
        if not isinstance(found, dict) or found.get(step) is None:
            return False
        found = found[step]
    return True


@cache
def value_of(source: str) -> float:
    """The value that a source names."""
    first, *steps = source.split(" / ")
    if first.startswith("account "):
        wanted = dict(zip(("adversary", "unit", "relation"), [*steps, "zero-out"][:3], strict=True))
        rows = _accounted(first.removeprefix("account "))
        return next(float(row["epsilon"]) for row in rows if wanted.items() <= row.items())
    found: Any = _read(first)
    for step in steps:
        found = _step(found, step)
    return float(found)


def _step(found: Any, step: str) -> Any:
    if wanted := _ROW.fullmatch(step):
        pairs = [pair.split("=", 1) for pair in wanted[1].split("; ")]
        [row] = [row for row in found if all(str(row.get(key)) == value for key, value in pairs)]
        return row
    name, _, key = step.partition(" ")
    if isinstance(found, list) and name in ("mean", "deviation"):
        return {"mean": statistics.mean, "deviation": statistics.stdev}[name]([row[key] if key else row for row in found])
    return found[int(step) if isinstance(found, list) else step]


def _alternatives(sources: str) -> list[str]:
    parts = re.split(r"\{(.*?)\}", sources)  # texts, and alternatives between them
    choices = (part.split(",") if at % 2 else [part] for at, part in enumerate(parts))
    return ["".join(chosen) for chosen in itertools.product(*choices)]


@cache
def _read(file: str) -> Any:
    return json.loads((ROOT / "results" / file).read_text())


@cache
def _accounted(options: str) -> Any:
    done = CliRunner().invoke(app, ["account", *shlex.split(options), "--json"], catch_exceptions=False)
    return json.loads(done.stdout)["rows"]


def main() -> None:
    """Render every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", metavar="NAME", help="run the blocks of this tutorial first")
    parser.add_argument("--notebook", metavar="NAME", help="run this notebook instead")
    parser.add_argument("--integration", action="store_true", help="also run the notebook's cells that take minutes")
    given = parser.parse_args()
    if given.notebook:
        from tests.support import notebooks

        notebooks.rewrite(ROOT / "docs" / "notebooks" / f"{given.notebook}.ipynb", given.integration)
        return
    if given.run:
        from tests.support.doc_pages import rewrite

        rewrite(source_of(ROOT / "docs" / "tutorials" / f"{given.run}.md"))
    for template in templates():
        page_of(template).write_text(render(template.read_text()))


if __name__ == "__main__":
    main()
