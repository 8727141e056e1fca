"""The tables and the picture of a result file of `fedcdp bench`.

fedcdp bench --device cuda --out results/speed.json
python benchmarks/speed.py table results/speed.json > results/speed.md
python benchmarks/speed.py plot results/speed.json results/speed.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedcdp.studies.bench.result_file import read
from fedcdp.studies.bench.tables import markdown, plot_speed


def main() -> None:
    """Parse and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table").add_argument("results", type=Path)
    plotter = commands.add_parser("plot")
    plotter.add_argument("results", type=Path)
    plotter.add_argument("picture", type=Path)
    given = parser.parse_args()
    if given.command == "table":
        print(markdown(read(given.results)))
    else:
        plot_speed(read(given.results), given.picture)


if __name__ == "__main__":
    main()
