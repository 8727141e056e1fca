"""Result files as Markdown: one page for each table, and an overview of all tables.

A page has the table's sections, the origin of each cell, and the cells not yet run. The overview says how much of each table
was run, and how far measured values are from printed ones.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fedcdp.accounting.statement import format_epsilon
from fedcdp.studies.reproduce.catalogue import Table
from fedcdp.studies.reproduce.layouts import Cells, Section

_NOTHING = "–"


def page(table: Table, cells: Cells, sections: list[Section], pictures: list[str]) -> str:
    """The whole page."""
    parts = [f"# {table.title}"]
    if source := table.content.get("source"):
        parts.append(f"In the paper: {source}.")
    if about := table.content.get("about"):
        parts.append(" ".join(about.split()))
    parts.append(f"Written by `fedcdp reproduce {table.name}`; every cell's command is in `{table.name}.json`.")
    for each in sections:
        if each["measured"]:
            parts += [f"## {each['title']}", written(each)]
    parts += [f"![{table.title}]({name})" for name in pictures]
    machines = Counter(_where(row) for row in cells.values())
    if machines:
        parts.append(
            "Measured on: "
            + "; ".join(f"{name} ({count} cell{'' if count == 1 else 's'})" for name, count in machines.items())
            + "."
        )
    if missing := not_run(table, cells):
        parts.append(f"Not run yet: {', '.join(missing)}.")
    return "\n\n".join(parts) + "\n"


def not_run(table: Table, cells: Cells) -> list[str]:
    """The cells that have not been run; for a value of the first axis without any run cell, that value."""
    groups: dict[str, list[str]] = {}
    for name in table.cells:
        groups.setdefault(name.partition("/")[0], []).append(name)
    told = []
    for start, names in groups.items():
        missing = [name for name in names if name not in cells]
        whole = len(missing) == len(names) and len(names) > 1
        told += [f"all {len(names)} cells of `{start}`"] if whole else [f"`{name}`" for name in missing]
    return told


def written(each: Section) -> str:
    """One section as a table."""
    lines = [[heading for _, heading, _ in each["columns"]], ["---"] * len(each["columns"])]
    lines += [[shown(row[key], form) for key, _, form in each["columns"]] for row in each["rows"]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(value: Any, form: str) -> str:
    """One value, formatted for people."""
    if form == "epsilons" and value is not None:
        return " / ".join(shown(part, "number") for part in value)
    if value is None:
        return _NOTHING
    if value == "inf":
        return format_epsilon(math.inf)
    if isinstance(value, str) or form == "text":
        return str(value)
    if form == "yes":
        return "yes" if value else "no"
    forms = {
        "accuracy": ".3f",
        "difference": "+.3f",
        "difference5": "+.5f",
        "signed": "+.3g",
        "share": ".0%",
        "epsilon4": ".4f",
        "number": ".3g",
    }
    return _plain(format(value, forms[form]))


def _plain(text: str) -> str:
    """1e+04 as 10000, but very large numbers unchanged."""
    return f"{float(text):.0f}" if "e+" in text and float(text) < 1e7 else text


def _where(row: dict[str, Any]) -> str:
    told = str(row["machine"])
    if made := row.get("measured_by"):
        told += f", by {made}"
    if origin := row.get("taken_from"):
        told += f", the same training as in `{origin.partition(':')[0]}`"
    return told


Measured = tuple[Table, Cells, list[Section]]


def overview(measured: list[Measured]) -> str:
    """The page, as Markdown."""
    lines = [["table", "what", "cells run", "measured against printed"], ["---"] * 4]
    for table, cells, sections in measured:
        said = _SAID.get(table.content["layout"])
        told = " · ".join(said(table, cells, sections)) if said and cells else ""
        name = f"[{table.name}]({table.name}.md)" if cells else table.name
        lines.append([name, table.title, f"{len(cells)} of {len(table.cells)}", told or "–"])
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        "# The paper's tables and figures\n\n"
        "Each page shows the paper's printed values, the measured ones, their difference, the true ε, and the cells not yet "
        "run. Each JSON file has the command, the settings and the machine of every cell. Written by "
        "`fedcdp reproduce --table-only`; [docs/reproduction.md](../../docs/reproduction.md) explains the results.\n\n"
        + body
        + "\n"
    )


def _accuracy(table: Table, cells: Cells, sections: list[Section]) -> Iterator[str]:  # noqa: ARG001
    """For each variant, the distance from the printed values."""
    apart: dict[str, list[float]] = {}
    for cell in table.cells.values():
        accuracy, printed = cells.get(cell.name, {}).get("accuracy"), table.printed.get(cell.row)
        if accuracy is not None and isinstance(printed, float):
            apart.setdefault(cell.variant or "measured", []).append(accuracy - printed)
    for variant, values in apart.items():
        spread = f" ({min(values):+.3f} to {max(values):+.3f}, {len(values)} cells)" if len(values) > 1 else ""
        yield f"{variant}: {statistics.median(values):+.3f}{spread}"


def _epsilon(table: Table, cells: Cells, sections: list[Section]) -> Iterator[str]:  # noqa: ARG001
    apart = [abs(row["difference"]) for section in sections for row in section["rows"] if row["difference"] is not None]
    yield f"as the paper computes it, at most {max(apart):.1g} apart in {len(apart)} cells"


def _attacks(table: Table, cells: Cells, sections: list[Section]) -> Iterator[str]:  # noqa: ARG001
    """Rows of Fed-CDP are counted separately: every failed attack agrees with the paper's No, whatever the reason."""
    rows = [row for section in sections for row in section["rows"] if row["agrees"] is not None]
    for kind, which in (("without Fed-CDP", False), ("with Fed-CDP, where a failed attack always agrees", True)):
        agree = [row["agrees"] for row in rows if row["method"].startswith("Fed-CDP") is which]
        yield f"success or failure as printed in {sum(agree)} of {len(agree)} rows {kind}"


def _time(table: Table, cells: Cells, sections: list[Section]) -> Iterator[str]:  # noqa: ARG001
    times = [row["times"] for section in sections for row in section["rows"] if row["times"] is not None]
    yield f"{min(times):.0f} to {max(times):.0f} times as fast as printed"


def _curve(table: Table, cells: Cells, sections: list[Section]) -> Iterator[str]:  # noqa: ARG001
    for name, cell in cells.items():
        norms = [norm for _, norm in cell["curves"]["gradient_norm"]]
        yield f"{name}: {norms[0]:.3g} in the first round, {norms[-1]:.3g} in the last"


_SAID: dict[str, Callable[[Table, Cells, list[Section]], Iterator[Any]]] = {
    "accuracy": _accuracy, "lines": _accuracy, "epsilon": _epsilon, "attacks": _attacks, "time": _time, "curve": _curve,
}  # fmt: skip
