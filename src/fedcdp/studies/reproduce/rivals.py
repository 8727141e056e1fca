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
    rows = ["/".join(values) for values in table.rows if values[0] == method]
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
    """The total error of every explanation, and the accuracy of every cell.

    A row without a cell of its own under an explanation has that of the first one: without privacy, noise plays no part.
    """
    first, *_ = explanations = list(table.content["variants"])
    measured = {
        explanation: {
            row: value for row in table.printed if (value := _accuracy(table, cells, row, explanation, first)) is not None
        }
        for explanation in explanations
    }
    common = set.intersection(*(set(found) for found in measured.values()))
    groups = {name: name.partition("-")[0] for name in table.axes["population"]}
    columns: list[Column] = [("explanation", "explanation", "text"), ("cells", "cells", "text")]
    columns += [("total", "total error", "number"), ("mean", "mean error", "accuracy"), ("most", "largest", "accuracy")]
    columns += [(group, f"mean error, {group.replace('K', 'K = ')}", "accuracy") for group in dict.fromkeys(groups.values())]
    rows = []
    for explanation, found in measured.items():
        errors = {row: abs(found[row] - table.printed[row]) for row in table.printed if row in common}
        told: dict[str, Any] = {"explanation": explanation, "cells": len(errors)}
        if errors:
            told |= {"total": sum(errors.values()), "mean": statistics.mean(errors.values()), "most": max(errors.values())}
        for group in dict.fromkeys(groups.values()):
            some = [error for row, error in errors.items() if groups[row.rpartition("/")[2]] == group]
            told[group] = statistics.mean(some) if some else None
        rows.append(told)
    yield "Total error over the cells that all explanations have", columns, rows
    columns = [("row", "cell", "text"), ("paper", "paper", "accuracy")]
    columns += [(explanation, explanation, "accuracy") for explanation in explanations]
    yield (
        "Every cell",
        columns,
        [
            {"row": row, "paper": printed} | {name: found.get(row) for name, found in measured.items()}
            for row, printed in table.printed.items()
        ],
    )


def _accuracy(table: Table, cells: Cells, row: str, explanation: str, first: str) -> float | None:
    name = f"{row}/{explanation if explanation in table.variants_of(row) else first}"
    return cells.get(name, {}).get("accuracy")
