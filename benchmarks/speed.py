"""The tables and the picture of a result file of `fedcdp bench`.

    fedcdp bench --device cuda --out results/speed.json
    python benchmarks/speed.py table results/speed.json > results/speed.md
    python benchmarks/speed.py plot results/speed.json results/speed.png
    python benchmarks/speed.py page docs/performance.md        # refresh the tables of a page from its result files

A page says where its figures come from: between `<!-- figures: FILE SECTION -->` and `<!-- end of figures -->` stands the
table of that section of that file.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from fedcdp.studies.bench.result_file import read
from fedcdp.studies.bench.tables import markdown, plot_speed

_FIGURES = re.compile(r"(<!-- figures: (\S+) (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def refreshed(page: str, folder: Path) -> str:
    """The page with its tables made anew; a place whose file does not exist yet keeps what it has."""

    def table(found: re.Match[str]) -> str:
        begin, file, section, end = found.groups()
        path = folder / file
        if not path.exists():
            return found.group()
        content = read(path)
        chosen = {name: rows for name, rows in content["sections"].items() if name == section}
        return f"{begin}{markdown(content | {'sections': chosen}).strip()}\n\n{end}"

    return _FIGURES.sub(table, page)


def main() -> None:
    """Parse and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table").add_argument("results", type=Path)
    plotter = commands.add_parser("plot")
    plotter.add_argument("results", type=Path)
    plotter.add_argument("picture", type=Path)
    commands.add_parser("page").add_argument("page", type=Path)
    given = parser.parse_args()
    if given.command == "table":
        print(markdown(read(given.results)))
    elif given.command == "plot":
        plot_speed(read(given.results), given.picture)
    else:
        given.page.write_text(refreshed(given.page.read_text(), given.page.parent.parent))


if __name__ == "__main__":
    main()
