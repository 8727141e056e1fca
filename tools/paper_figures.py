"""Figures of the reproduced tables for `tools.pages`: measured and printed values, their ranges and differences.

| call | renders |
| --- | --- |
| `accuracy(TABLE, CELLS)` | the accuracy of a cell, .956, or the lowest and the highest of several: .951 to .960 |
| `printed(TABLE, ROWS)` | the same for the paper's printed values |
| `apart(TABLE, CELLS)` | measured minus printed, with its sign, or its range |
| `within(TABLE, CELLS, …)` | the largest distance of measured from printed |
| `over_splits(TABLE, CELL)` | the range of a cell's accuracy over its splits of the data |
| `gain(TABLE, CELL, OTHER)` | the accuracy of one cell minus that of another |
| `true_epsilon(TABLE, CELLS, WHOSE)` | ε of the trained mechanism, or its range; WHOSE is `server/record` or the like |
| `leaked(TABLE, CELLS, WHAT)` | a share of an attack's victims in percent, or its range |
| `agreeing(TABLE, METHODS)` | how many rows of an attack table agree with the paper, of how many; METHODS is a pattern |
| `of_section(TABLE, COLUMN)` | the range of a column over all rows of a table |
| `finished(TABLE)` | whether all cells of a table have been run: true or false |
| `progress(TABLE)` | `not been run yet`, or `been run for 3 of 24 cells` |
| `totals()` | the explanations in the table `rivals` with their total errors, the best first |
| `verdict_on_rivals()` | which explanation fits best, and for which numbers of clients another one does |
| `fit_of_rounds()` | for each rate of the table `rounds`, the number of rounds that fits best, its errors, and a verdict |
| `by_change(PARTITION)` | accuracy without privacy of each network of the table `cifar10`, with its difference |

CELLS and ROWS are names, or patterns such as `fed-cdp/K1000-*/cohort`. A pattern that matches nothing is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from fedcdp.studies.reproduce.catalogue import table
from fedcdp.studies.reproduce.layouts import Section, sections
from fedcdp.studies.reproduce.runner import TableResults

_AS_CLOSE_AS_SEEDS = 0.005
RESULTS = Path(__file__).parents[1] / "results" / "reproduction"


def accuracy(name: str, cells: str) -> str:
    """See the module."""
    return range_of(_short(row["accuracy"]) for row in _cells(name, cells).values())


def printed(name: str, rows: str) -> str:
    """See the module."""
    values = [value for row, value in table(name).printed.items() if fnmatchcase(row, rows)]
    return range_of(_short(value) for value in _some(values, name, rows))


def apart(name: str, cells: str) -> str:
    """See the module."""
    return range_of((signed(each) for each in sorted(_differences(name, cells))), in_order=True)


def within(name: str, *cells: str) -> str:
    """See the module."""
    return _short(max(abs(each) for pattern in cells for each in _differences(name, pattern)))


def over_splits(name: str, cell: str) -> str:
    """See the module."""
    (row,) = _cells(name, cell).values()
    return range_of((_short(each) for each in sorted(row["accuracies"])), in_order=True)


def gain(name: str, cell: str, other: str) -> str:
    """See the module."""
    ((first,), (second,)) = (_cells(name, each).values() for each in (cell, other))
    return signed(first["accuracy"] - second["accuracy"])


def true_epsilon(name: str, cells: str, whose: str) -> str:
    """See the module."""
    values = sorted(float(row["epsilon"][whose]) for row in _cells(name, cells).values())
    return range_of((_three_digits(each) for each in values), in_order=True)


def leaked(name: str, cells: str, what: str = "success_rate") -> str:
    """See the module."""
    values = sorted(100 * row[what] for row in _cells(name, cells).values())
    return range_of((f"{each:.0f}" for each in values), in_order=True)


def agreeing(name: str, methods: str) -> str:
    """See the module."""
    rows = [row for each in sections_of(name) for row in each["rows"] if fnmatchcase(row["method"], methods)]
    return f"{sum(row['agrees'] for row in rows)} of {len(rows)}"


def of_section(name: str, column: str) -> str:
    """See the module."""
    values = sorted(float(row[column]) for each in sections_of(name) for row in each["rows"] if row.get(column) is not None)
    return range_of((_three_digits(each) for each in values), in_order=True)


def finished(name: str) -> bool:
    """See the module."""
    return len(_results(name)) == len(table(name).cells)


def progress(name: str) -> str:
    """See the module."""
    done, cells = len(_results(name)), len(table(name).cells)
    return f"been run for {done} of {cells} cells" if done else "not been run yet"


def totals() -> str:
    """See the module."""
    whole = sorted((row["total"], row["explanation"]) for row in _errors() if row["total"] is not None)
    return ", ".join(f"{total:.2f} for *{name}*" for total, name in whole)


def verdict_on_rivals() -> str:
    """See the module."""
    whole = [row for row in _errors() if row["total"] is not None]
    best = min(whole, key=lambda row: row["total"])
    told = f"*{best['explanation']}* fits best, with a mean error of {_short(best['mean'])}"
    for group in dict.fromkeys(name.partition("-")[0] for name in table("rivals").axes["population"]):
        closest = min((row for row in _errors() if row[group] is not None), key=lambda row: row[group])
        if closest[group] < best[group]:
            clients, errors = group.replace("K", "K = "), f"{_short(closest[group])}, not {_short(best[group])}"
            told += f"; for {clients} *{closest['explanation']}* is closer ({errors})"
    if best["mean"] <= _AS_CLOSE_AS_SEEDS:
        return f"{told}. That is as close as two seeds of one training."
    return f"{told}. None explains all of them: it is off by {_short(best['most'])} in one cell."


def fit_of_rounds() -> str:
    """See the module."""
    told, least = [], 1.0
    for each in sections_of("rounds"):
        row = next(row for row in each["rows"] if "best fit" in str(row["rounds"]))
        apart = max(
            abs(row[name] - value) for name, value in table("rounds").printed.items() if name.startswith("nonprivate/")
        )
        least = min(least, apart)
        number = str(row["rounds"]).partition(",")[0]
        errors = f"off by {_short(apart)} at most; Fed-CDP by {_short(row['fed-cdp error'])} on average"
        told.append(f"{number} at {each['title']} ({errors})")
    verdict = "One number of rounds explains" if least <= _AS_CLOSE_AS_SEEDS else "No number of rounds explains"
    return f"{', '.join(told)}. {verdict} all four."


def by_change(partition: str) -> str:
    """See the module."""
    found = _results("cifar10")
    values = {name: found[f"{partition}/{name}/non-private/plain"]["accuracy"] for name in table("cifar10").axes["network"]}
    first, *others = values
    told = [f"{_short(values[first])} {first}"]
    before = values[first]
    for name in others:
        told.append(f"{_short(values[name])} {name} ({signed(values[name] - before)})")
        before = values[name]
    return ", ".join(told)


CALLS = {each.__name__: each for each in (
    accuracy, printed, apart, within, over_splits, gain, true_epsilon, leaked, agreeing, of_section, finished, progress,
    totals, verdict_on_rivals, fit_of_rounds, by_change,
)}  # fmt: skip


@cache
def _results(name: str) -> dict[str, Any]:
    return TableResults(table(name), RESULTS).cells


@cache
def sections_of(name: str) -> list[Section]:
    return sections(table(name), _results(name))


def _errors() -> list[dict[str, Any]]:
    return list(sections_of("rivals")[0]["rows"])


def _cells(name: str, pattern: str) -> dict[str, Any]:
    found = {cell: row for cell, row in _results(name).items() if fnmatchcase(cell, pattern) or cell == pattern}
    _some(found, name, pattern)
    return found


def _differences(name: str, pattern: str) -> list[float]:
    printed_ = table(name).printed
    return [row["accuracy"] - printed_[table(name).cells[cell].row] for cell, row in _cells(name, pattern).items()]


def _some(found: Any, name: str, pattern: str) -> Any:
    if not found:
        raise ValueError(f"nothing in {name} is called {pattern}")
    return found


def range_of(shown: Iterable[str], in_order: bool = False) -> str:
    """The first and the last of several figures, or the only one."""
    values = list(shown) if in_order else sorted(shown)
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def _short(value: float) -> str:
    return re.sub(r"^0\.", ".", f"{value:.3f}")


def signed(value: float) -> str:
    """A difference of two accuracies, with its sign."""
    return re.sub(r"^([+-])0\.", r"\1.", f"{value:+.3f}").replace("-", "−")


def _three_digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.10g}".replace("inf", "∞")
