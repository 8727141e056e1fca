"""All tables on one page: how much of each was run, and how far what was measured lies from what is printed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from fedcdp.reproduce.catalogue import Table
from fedcdp.reproduce.layouts import Cells, Section

Measured = tuple[Table, Cells, list[Section]]


def overview(measured: list[Measured]) -> str:
    """The page, as Markdown."""
    lines = [["table", "what", "cells run", "measured beside printed"], ["---"] * 4]
    for table, cells, sections in measured:
        said = _SAID.get(table.content["layout"])
        told = " · ".join(said(table, cells, sections)) if said and cells else ""
        name = f"[{table.name}]({table.name}.md)" if cells else table.name
        lines.append([name, table.title, f"{len(cells)} of {len(table.cells)}", told or "–"])
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        "# The paper's tables and figures\n\n"
        "Each page has what the paper prints, what was measured, the difference, the true ε, and what has not been run; "
        "each JSON file the command, the settings and the machine of every cell. Written by "
        "`fedcdp reproduce --table-only`; [docs/reproduction.md](../../docs/reproduction.md) says what it means.\n\n"
        + body
        + "\n"
    )


def _accuracy(table: Table, cells: Cells, sections: list[Section]) -> Iterator[str]:  # noqa: ARG001
    """Of each variant, how far it is from the print."""
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
    """Rows of Fed-CDP are counted apart: every attack that fails agrees with the paper's No, whatever the reason."""
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
