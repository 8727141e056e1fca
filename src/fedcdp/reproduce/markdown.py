"""A result file as Markdown: its sections written out, where each cell came from, and what has not been run."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fedcdp.reproduce.catalogue import Table
from fedcdp.reproduce.layouts import Cells, Section

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
    """The cells that have not been run; where nothing of a first axis' value has, that value."""
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
    """One value for people."""
    if form == "epsilons" and value is not None:
        return " / ".join(shown(part, "number") for part in value)
    if value is None:
        return _NOTHING
    if value == "inf":
        return "∞"
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
    """1e+04 as 10000, but very large ones as they are."""
    return f"{float(text):.0f}" if "e+" in text and float(text) < 1e7 else text


def _where(row: dict[str, Any]) -> str:
    told = str(row["machine"])
    if made := row.get("measured_by"):
        told += f", by {made}"
    if origin := row.get("taken_from"):
        told += f", the same training as in `{origin.partition(':')[0]}`"
    return told
