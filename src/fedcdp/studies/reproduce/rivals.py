"""Layouts that compare explanations of the printed accuracies: by the number of rounds, and by what each gets wrong in all.

The error of a cell is the absolute difference between the measured accuracy and the printed one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from fedcdp.studies.reproduce.catalogue import Table

Cells = dict[str, dict[str, Any]]
Column = tuple[str, str, str]
Shown = tuple[str, list[Column], list[dict[str, Any]]]
"""Title, columns and rows of a section (`layouts.section`)."""

_SHOWN_ROUNDS = (5, 10, 15, 20, 30, 40, 50, 75, 100)


def by_rounds(table: Table, cells: Cells) -> Iterator[Shown]:
    """For each variant: accuracy and mean error by the number of rounds, and the number that fits the first method best."""
    methods = list(table.axes["method"])
    for variant in table.variants_of("/".join(table.rows[0])):
        courses = {method: _courses(table, cells, method, variant) for method in methods}
        if not all(courses.values()):
            continue
        errors = {method: _errors(table, found) for method, found in courses.items()}
        fewest = min(errors[methods[0]], key=lambda number: errors[methods[0]][number])
        columns: list[Column] = [("rounds", "rounds", "text")]
        for method, found in courses.items():
            columns += [(row, row.replace("/", ", "), "accuracy") for row in found]
            columns.append((f"{method} error", f"{method}: mean error", "accuracy"))
        rows = []
        for number in sorted({*_SHOWN_ROUNDS, fewest} & set(errors[methods[0]])):
            told: dict[str, Any] = {"rounds": f"{number}, the best fit of {methods[0]}" if number == fewest else number}
            for method, found in courses.items():
                told |= {row: course.get(number) for row, course in found.items()}
                told[f"{method} error"] = errors[method].get(number)
            rows.append(told)
        rows.append({"rounds": "printed"} | {row: table.printed.get(row) for found in courses.values() for row in found})
        yield variant, columns, rows


def _courses(table: Table, cells: Cells, method: str, variant: str) -> dict[str, dict[int, float]]:
    """For each row of a method, its accuracy by the number of rounds; empty unless all rows were measured."""
    rows = [row for values in table.rows if values[0] == method and variant in table.variants_of(row := "/".join(values))]
    names = {row: f"{row}/{variant}" for row in rows}
    if not all(name in cells for name in names.values()):
        return {}
    return {row: {int(number): value for number, value in cells[name]["curves"]["accuracy"]} for row, name in names.items()}


def _errors(table: Table, courses: dict[str, dict[int, float]]) -> dict[int, float]:
    """The mean error over the rows, by the number of rounds."""
    numbers = set.intersection(*(set(course) for course in courses.values()))
    return {
        number: statistics.mean(abs(course[number] - table.printed[row]) for row, course in courses.items())
        for number in sorted(numbers)
    }


def by_explanation(table: Table, cells: Cells) -> Iterator[Shown]:
    """The total error of every explanation, its mean error for each number of clients, and the accuracy of every cell.

    Explanations are compared over the cells that were measured under all that explain them. One that does not explain every
    cell has no total. One whose cells were followed over the rounds (`curves`) ends after the number of rounds that fits the
    first method best.
    """
    explanations = list(table.content["variants"])
    ends = {name: _best_fit(table, cells, name) for name in explanations}
    found = {name: _explained(table, cells, name, ends) for name in explanations}
    whole = [name for name in explanations if len(found[name]) == len(table.printed)]
    groups: dict[str, list[str]] = {}
    for row in table.printed:
        groups.setdefault(row.rpartition("/")[2].partition("-")[0], []).append(row)

    def errors(name: str, rows: list[str]) -> list[float]:
        """Over the rows that were measured under all explanations of all of them."""
        among = [each for each in found.values() if all(row in each for row in rows)]
        if found[name] not in among:
            return []
        common = [row for row in rows if all(each[row] is not None for each in among)]
        return [abs(value - table.printed[row]) for row in common if (value := found[name][row]) is not None]

    columns: list[Column] = [("explanation", "explanation", "text"), ("cells", "cells", "text")]
    columns += [("total", "total error", "number"), ("mean", "mean error", "accuracy"), ("most", "largest", "accuracy")]
    columns += [(group, f"mean error, {group.replace('K', 'K = ')}", "accuracy") for group in groups]
    rows = []
    for name in explanations:
        told: dict[str, Any] = {"explanation": f"{name} ({number})" if (number := ends[name]) else name}
        if name in whole and (over_all := errors(name, list(table.printed))):
            told |= {
                "cells": len(over_all),
                "total": sum(over_all),
                "mean": statistics.mean(over_all),
                "most": max(over_all),
            }
        for group, members in groups.items():
            over_group = errors(name, members)
            told[group] = statistics.mean(over_group) if over_group else None
        rows.append(told)
    yield "Errors of each explanation", columns, rows
    columns = [("row", "cell", "text"), ("paper", "paper", "accuracy")]
    columns += [(name, told["explanation"], "accuracy") for name, told in zip(explanations, rows, strict=True)]
    yield (
        "Every cell",
        columns,
        [
            {"row": row, "paper": printed} | {name: each.get(row) for name, each in found.items()}
            for row, printed in table.printed.items()
        ],
    )


def _explained(table: Table, cells: Cells, name: str, ends: dict[str, int | None]) -> dict[str, float | None]:
    """The accuracy of each row that an explanation explains, itself or by the one that stands for it; None: not measured."""
    found: dict[str, float | None] = {}
    for row in table.printed:
        variant: str | None = name
        while variant is not None and variant not in table.variants_of(row):
            variant = table.content["variants"][variant].get("otherwise")
        if variant is not None:
            cell, number = cells.get(f"{row}/{variant}", {}), ends[variant]
            course = {int(round_): value for round_, value in cell.get("curves", {}).get("accuracy", [])}
            found[row] = cell.get("accuracy") if number is None else course.get(number)
    return found


def _best_fit(table: Table, cells: Cells, variant: str) -> int | None:
    """The number of rounds that fits the first method best, if the cells of a variant were followed over the rounds."""
    if "curves" not in table.content["variants"][variant]:
        return None
    courses = _courses(table, cells, next(iter(table.axes["method"])), variant)
    errors = _errors(table, courses) if courses else {}
    return min(errors, key=lambda number: errors[number]) if errors else 0
