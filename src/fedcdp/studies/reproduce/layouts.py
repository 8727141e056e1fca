"""Turn measured cells into readable rows: the paper's printed value, the measured one, and the difference.

A section is a title, columns (key, heading, form) and rows, all plain values: it is stored in the result file, and the
Markdown only renders these sections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fedcdp.errors import PlanError
from fedcdp.studies.reproduce.catalogue import Table
from fedcdp.studies.reproduce.rivals import by_explanation, by_rounds

Cells = dict[str, dict[str, Any]]
Section = dict[str, Any]

_EPSILONS = {
    "fed-cdp": {"server/record": "server, record", "server/unique": "server, person", "example/record": "example"},
    "fed-sdp": {"model/client": "model, client", "server/record": "server, record", "example/record": "example"},
}


def sections(table: Table, cells: Cells) -> list[Section]:
    """All sections of a table."""
    layout = table.content["layout"]
    if layout not in LAYOUTS:
        raise PlanError(f"layout: {layout[:100]!r} is not one of {', '.join(LAYOUTS)}")
    try:
        return list(LAYOUTS[layout](table, cells))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise PlanError(
            f"layout: {layout} does not fit the cells, axes and printed values of {table.name} ({error})"
        ) from error


def section(title: str, columns: list[tuple[str, str, str]], rows: list[dict[str, Any]]) -> Section:
    """One section; a row has a value for every column, None if nothing was measured."""
    keys = [key for key, _, _ in columns]
    kept = [{key: row.get(key) for key in keys} for row in rows]
    given = {"paper", "row", "variant", "dataset", "L", "method", "pruned", "cell", "paper succeeds", "paper distance",
             "paper iterations", "explanation"}  # fmt: skip
    measured = any(value is not None for row in kept for key, value in row.items() if key not in given)
    return {"title": title, "measured": measured, "columns": [list(column) for column in columns], "rows": kept}


def difference(measured: float | None, printed: float | None) -> float | None:
    """Measured minus printed, if both exist."""
    return None if measured is None or printed is None else measured - printed


def _groups(table: Table, lead: int = 1) -> Iterator[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """The rows, grouped by the values of their first axes."""
    for start in dict.fromkeys(values[:lead] for values in table.rows):
        yield start, [values for values in table.rows if values[:lead] == start]


def accuracy(table: Table, cells: Cells) -> Iterator[Section]:
    """A section for each value of the first axis: printed accuracy, then each variant with its difference and its ε."""
    axis = " / ".join(list(table.axes)[1:])
    for start, rows in _groups(table):
        variants = list(dict.fromkeys(name for values in rows for name in table.variants_of("/".join(values))))
        columns = [("row", axis, "text"), ("paper", "paper", "accuracy")]
        epsilons: dict[str, str] = {}
        made = []
        for values in rows:
            row = "/".join(values)
            told: dict[str, Any] = {"row": "/".join(values[1:]), "paper": table.printed.get(row)}
            for variant in table.variants_of(row):
                cell = table.cells[f"{row}/{variant}" if variant else row]
                method = cell.experiment().plan.method.removesuffix("-decay")
                found = cells.get(cell.name, {})
                told[variant] = found.get("accuracy")
                told[f"{variant} rate"] = found.get("rate")
                told[f"{variant} deviation"] = found.get("deviation")
                told[f"{variant} difference"] = difference(found.get("accuracy"), told["paper"])
                if method in _EPSILONS:
                    epsilons |= _EPSILONS[method]
                    epsilon = found.get("epsilon") or {}
                    told[f"{variant} epsilon"] = [epsilon.get(name) for name in _EPSILONS[method]] if epsilon else None
                    told["printed epsilon"] = epsilon.get("printed", told.get("printed epsilon"))
            made.append(told)
        for variant in variants:
            name = variant or "measured"
            columns += [(variant, name, "accuracy"), (f"{variant} difference", "− paper", "difference")]
            if any(row.get(f"{variant} deviation") is not None for row in made):
                columns.append((f"{variant} deviation", "± over splits", "accuracy"))
            columns.append((f"{variant} rate", "rate", "number"))
            if epsilons:
                columns.append((f"{variant} epsilon", f"ε {variant}: {' / '.join(epsilons.values())}", "epsilons"))
        if epsilons:
            columns.append(("printed epsilon", "ε as the paper computes it", "number"))
        yield section("/".join(start), columns, made)


def lines(table: Table, cells: Cells) -> Iterator[Section]:
    """A section for each value of the first axis, with a line for each cell."""
    columns = [("row", "method", "text"), ("variant", "variant", "text"), ("paper", "paper", "accuracy")]
    columns += [("accuracy", "measured", "accuracy"), ("difference", "− paper", "difference")]
    columns += [("deviation", "± over splits", "accuracy"), ("rate", "rate", "number")]
    columns += [("epsilon", "ε: server, record / server, person / example (Fed-SDP: model, client first)", "epsilons")]
    for start, rows in _groups(table):
        made = []
        for cell in table.cells.values():
            if cell.row not in {"/".join(values) for values in rows}:
                continue
            found, printed = cells.get(cell.name, {}), table.printed.get(cell.row)
            method = cell.experiment().plan.method.removesuffix("-decay")
            epsilon = found.get("epsilon") or {}
            told = {"row": cell.row.partition("/")[2], "variant": cell.variant, "paper": printed}
            told |= {name: found.get(name) for name in ("accuracy", "deviation", "rate")}
            told["difference"] = difference(found.get("accuracy"), printed)
            told["epsilon"] = [epsilon.get(name) for name in _EPSILONS[method]] if epsilon else None
            made.append(told)
        yield section("/".join(start), columns, made)


def epsilon(table: Table, cells: Cells) -> Iterator[Section]:
    """A section for each method: the printed ε, the same computed in the paper's way, and the true values."""
    for (method,), rows in _groups(table):
        first = next((cells[name] for values in rows if (name := "/".join(values)) in cells), None)
        keys = [key for key in (first or {}).get("epsilon", {}) if "/" in key]
        columns = [("dataset", "dataset", "text"), ("L", "L", "text"), ("paper", "paper", "epsilon4")]
        columns += [("computed", "computed as in the paper", "epsilon4"), ("difference", "− paper", "difference5")]
        columns += [(key, "true: " + key.replace("/", ", ").replace("unique", "person"), "number") for key in keys]
        made = []
        for _, dataset, steps in rows:
            row = f"{method}/{dataset}/{steps}"
            found = cells.get(row, {}).get("epsilon", {})
            printed = table.printed.get(row)
            told = {"dataset": dataset, "L": steps.removeprefix("L"), "paper": printed, "computed": found.get("printed")}
            made.append(told | {"difference": difference(found.get("printed"), printed)} | found)
        yield section(method, columns, made)


def time(table: Table, cells: Cells) -> Iterator[Section]:
    """Milliseconds per local iteration of one client."""
    from fedcdp.studies.bench.tables import printed_ms

    columns = [("dataset", "dataset", "text"), ("method", "method", "text"), ("paper", "paper (ms)", "number")]
    columns += [("measured", "measured (ms)", "number"), ("least", "minimum", "number"), ("most", "maximum", "number")]
    columns += [("times", "paper / measured", "number"), ("K_t", "clients per round", "text"), ("engine", "engine", "text")]
    if any("us_alone" in found for found in cells.values()):
        columns += [("alone", "one client (ms)", "number")]
    made = []
    for dataset, method in table.rows:
        found = cells.get(f"{dataset}/{method}", {})
        us, alone = found.get("us", {}), found.get("us_alone")
        ms = {name: us[name] / 1000 if name in us else None for name in ("median", "least", "most")}
        paper = printed_ms(dataset, method)
        told = {"dataset": dataset, "method": method, "paper": paper, "measured": ms["median"], "least": ms["least"]}
        told |= {"most": ms["most"], "times": paper / ms["median"] if ms["median"] else None}
        told["alone"] = alone["median"] / 1000 if alone else None
        made.append(told | {"K_t": found.get("per_round"), "engine": found.get("engine")})
    yield section("Milliseconds per local iteration of one client", columns, made)


_LEAKS = [
    ("exact", "exact", "share"), ("recognisable", "recognisable", "share"), ("fitted", "fitted", "share"),
    ("distance", "distance (final RMSE)", "number"), ("iterations", "iterations", "number"),
]  # fmt: skip


def _leak_columns(cells: Cells) -> list[tuple[str, str, str]]:
    """The columns of `_LEAKS`, without one that no cell has: the adversary's own measure is younger than other figures."""
    told = any(found.get("fitted_rate") is not None for found in cells.values())
    return [column for column in _LEAKS if told or column[0] != "fitted"]


def _leak(found: dict[str, Any]) -> dict[str, Any]:
    names = {"exact": "success_rate", "recognisable": "recognisable_rate", "fitted": "fitted_rate",
             "distance": "rmse_mean_at_end", "iterations": "iterations_median"}  # fmt: skip
    return {name: found.get(key) for name, key in names.items()}


def attacks(table: Table, cells: Cells) -> Iterator[Section]:
    """A section for each dataset and kind of attack."""
    columns = [
        ("method", "method", "text"),
        ("victims", "victims", "text"),
        ("paper succeeds", "paper: attack succeeds", "yes"),
    ]
    *shares, distance, iterations = _leak_columns(cells)
    columns += [*shares, ("paper distance", "paper: distance", "number"), distance, ("difference", "− paper", "signed")]
    columns += [("paper iterations", "paper: iterations", "number"), iterations, ("agrees", "agrees", "yes")]
    for start, rows in _groups(table, 2):
        made = []
        for values in rows:
            row = "/".join(values)
            printed, found = table.printed.get(row, {}), _leak(cells.get(row, {}))
            told = {"method": values[-1], **found, **{f"paper {name}": value for name, value in printed.items()}}
            told["victims"] = cells.get(row, {}).get("victims")
            told["difference"] = difference(found["distance"], printed.get("distance"))
            if found["recognisable"] is not None and "succeeds" in printed:
                # Half of the victims recognisable: a reading of the paper's single Yes or No for all of them.
                told["agrees"] = (found["recognisable"] >= 0.5) == printed["succeeds"]
            made.append(told)
        yield section(", ".join(start), columns, made)


def compression(table: Table, cells: Cells) -> Iterator[Section]:
    """Accuracy and reconstruction rates by the pruned share."""
    for (what,), rows in _groups(table):
        shares = [values[1] for values in rows]
        variants = list(dict.fromkeys(name for values in rows for name in table.variants_of("/".join(values))))
        columns = [("pruned", "pruned", "text")]
        made: list[dict[str, Any]] = [{"pruned": share} for share in shares]
        for variant in variants:
            found = [cells.get(f"{what}/{share}/{variant}", {}) for share in shares]
            if what == "accuracy":
                columns.append((variant, variant, "accuracy"))
                for row, each in zip(made, found, strict=True):
                    row[variant] = each.get("accuracy")
                continue
            columns += [(f"{variant} {key}", f"{variant}: {key}", "share") for key in ("exact", "recognisable")]
            for row, each in zip(made, found, strict=True):
                row |= {f"{variant} {key}": _leak(each)[key] for key in ("exact", "recognisable")}
        yield section(f"{what.capitalize()} by share of pruned entries", columns, made)


def curve(table: Table, cells: Cells) -> Iterator[Section]:
    """The tracked values over the rounds, every tenth round."""
    for name in table.cells:
        curves = cells.get(name, {}).get("curves", {})
        columns = [("round", "round", "text"), *((key, key.replace("_", " "), "number") for key in curves)]
        values = {key: dict(map(tuple, pairs)) for key, pairs in curves.items()}
        rounds = sorted({round_ for pairs in values.values() for round_ in pairs})
        step = max(1, len(rounds) // 10)
        shown = sorted({*rounds[:1], *rounds[step - 1 :: step]})
        made = [{"round": round_} | {key: pairs.get(round_) for key, pairs in values.items()} for round_ in shown]
        yield section(name, columns, made)


def leaks(table: Table, cells: Cells) -> Iterator[Section]:
    """Figures of cells whose main result is pictures."""
    columns = [("cell", "cell", "text"), ("victims", "victims", "text"), *_leak_columns(cells)]
    made = [
        {"cell": name, **_leak(cells.get(name, {})), "victims": cells.get(name, {}).get("victims")} for name in table.cells
    ]
    yield section(table.title, columns, made)


def tradeoff(table: Table, cells: Cells) -> Iterator[Section]:
    """The inspected rounds: the noise norm, and the noise norm that the examples tolerate."""
    forms = {"round": "text", "accuracy": "accuracy", "within": "share", "flipped": "share", "exceptions": "text"}
    names = {
        "round": "round", "clip": "C", "noise_norm": "‖ξ‖", "bound_q10": "bound, 10th percentile",
        "bound_median": "bound, median", "within": "within the bound", "flipped": "flipped by ξ",
        "exceptions": "flipped within the bound", "accuracy": "accuracy",
    }  # fmt: skip
    columns = [(key, heading, forms.get(key, "number")) for key, heading in names.items()]
    for name in table.cells:
        yield section(name, columns, cells.get(name, {}).get("followed", []))


def rounds(table: Table, cells: Cells) -> Iterator[Section]:
    """`rivals.by_rounds`."""
    for title, columns, rows in by_rounds(table, cells):
        yield section(title, columns, rows)


def rivals(table: Table, cells: Cells) -> Iterator[Section]:
    """`rivals.by_explanation`."""
    for title, columns, rows in by_explanation(table, cells):
        yield section(title, columns, rows)


LAYOUTS: dict[str, Callable[[Table, Cells], Iterator[Section]]] = {
    "accuracy": accuracy, "lines": lines, "epsilon": epsilon, "time": time, "attacks": attacks, "compression": compression,
    "curve": curve, "leaks": leaks, "tradeoff": tradeoff, "rounds": rounds, "rivals": rivals,
}  # fmt: skip
