"""Result files as tables, the same for a terminal and for a page, and as a picture; with the paper's printed figures.

The paper's milliseconds per local iteration of one client: Wei et al., ICDCS 2021, Table "Time cost per local iteration per
client (ms)", on a 4-core i5 with a GeForce 2080 Ti.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcdp.errors import RunError
from fedcdp.files.disk import atomic_write
from fedcdp.files.installation import install_command
from fedcdp.studies.bench.result_file import Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_CPU = "cpu_us_per_client_step"

Table = tuple[str, list[str], list[list[str]]]
"""A title, headings, and rows of cells."""


def tables(content: dict[str, Any]) -> Iterator[Table]:
    """A table for every measured section."""
    sections = content["sections"]
    for name, table in _TABLES.items():
        if rows := sections.get(name):
            yield table(rows)
    for along, (title, headings) in _GROWTH.items():
        if rows := [row for row in sections.get("growth", []) if row["along"] == along]:
            yield _growth(rows, along, title, headings)
    for task in dict.fromkeys(row["task"] for row in sections.get("peers", [])):
        yield _peers([row for row in sections["peers"] if row["task"] == task], task)


def markdown(content: dict[str, Any]) -> str:
    """All tables and the machine, for a page."""
    lines = [machine_in_words(content["machine"]), ""]
    for title, headings, rows in tables(content):
        lines += [f"**{title}**", "", *_markdown_rows([headings, ["---"] * len(headings), *rows]), ""]
    return "\n".join([*lines, *(f"- {remark}" for remark in remarks(content))])


def machine_in_words(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    computed = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    return f"{computed}; threads: {machine['threads']}; PyTorch {machine['torch']}, Python {machine['python']}"


def _steps(rows: Rows) -> Table:
    cells = [
        [row["dataset"], row["method"], *_speed(row), _times(row["times_nonprivate"]), f"{row['paper_us']:,.0f}",
         f"{row['paper_us'] / row['us_per_client_step']['median']:,.0f}"]
        for row in rows
    ]  # fmt: skip
    title = f"µs per client step, {rows[0]['per_round']} clients per round; ratio to non-private{_synthetic(rows)}"
    return title, ["dataset", "method", "µs", "spread", "ratio", "paper µs", "paper / measured"], cells


def _engines(rows: Rows) -> Table:
    cells = [
        [row["dataset"], row["engine"], *_speed(row), "-" if "missing" in row else _times(row["times_first"])]
        for row in rows
    ]
    return "Fed-CDP by engine", ["dataset", "engine", "µs", "spread", "ratio"], cells


def _sampling(rows: Rows) -> Table:
    cells = [
        [row["record_sampling"], str(row["batch_size"]), str(row["slots"]), *_speed(row), _times(row["times_partition"])]
        for row in rows
    ]
    return "MNIST Fed-CDP by record sampling", ["sampling", "B", "slots", "µs", "spread", "ratio"], cells


_TABLES = {"steps": _steps, "engines": _engines, "sampling": _sampling}

_GROWTH = {
    "per_round": ("MNIST Fed-CDP by clients per round", ["K_t"]),
    "batch_size": ("MNIST Fed-CDP by batch size", ["B"]),
    "clients": ("MNIST Fed-CDP by number of clients", ["K", "K_t"]),
}


def _growth(rows: Rows, along: str, title: str, headings: list[str]) -> Table:
    federation = along == "clients"
    cells = []
    for row in rows:
        place = [f"{row['clients']:,}", f"{row['per_round']:,}"] if federation else [f"{row[along]:,}"]
        more = [f"{row['start_up_seconds']:.2f}", f"{row['dealing_seconds']:.2f}"] if federation else []
        cells.append([*place, *_speed(row), *more, f"{row['peak_mib']:,.0f}"])
    more = ["start-up (s)", "assignment (s)"] if federation else []
    steps = rows[0]["local_steps"]
    return f"{title} (L = {steps})", [*headings, "µs", "spread", *more, "MiB"], cells


def _peers(rows: Rows, task: str) -> Table:
    cells = []
    for row in rows:
        times = _times(row["times_fedcdp"]) if "times_fedcdp" in row else "-"
        busy = [_figure(row[_CPU]["median"]), _times(row["cpu_times_fedcdp"])] if _CPU in row else ["-", "-"]
        cells.append([row["who"], *_speed(row), times, *busy])
    return (
        f"µs per client step, {task}; ratio to fedcdp",
        ["implementation", "µs", "spread", "ratio", "CPU µs", "CPU ratio"],
        cells,
    )


def remarks(content: dict[str, Any]) -> list[str]:
    """Remarks on the rows of the peers: how each was done, or why it was not."""
    rows = [row for row in content["sections"].get("peers", []) if not row["who"].startswith("fedcdp")]
    told = [
        f"{row['task'].partition(',')[0]}, {row['who']}: {row.get('missing') or row['note']}"
        for row in rows
        if row.get("missing") or row.get("note")
    ]
    missing = [
        f"{row['dataset']}, {row['engine']} engine: {row['missing']}"
        for row in content["sections"].get("engines", [])
        if "missing" in row
    ]
    return list(dict.fromkeys([*told, *missing]))


def _speed(row: dict[str, Any]) -> list[str]:
    """The median and the spread; dashes if it could not be measured."""
    if "missing" in row:
        return ["-", "-"]
    figure = row["us_per_client_step"]
    return [_figure(figure["median"]), f"{_figure(figure['least'])}…{_figure(figure['most'])}"]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _times(figure: dict[str, Any]) -> str:
    return f"{figure['median']:.3g}"


def _synthetic(rows: Rows) -> str:
    names = list(dict.fromkeys(row["dataset"] for row in rows if row["data"] == "synthetic"))
    return f" (random inputs for {', '.join(names)})" if names else ""


def _markdown_rows(rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in rows]


DATASETS = ("mnist", "cifar10", "lfw", "adult", "cancer")
METHODS = ("nonprivate", "fed-sdp", "fed-cdp", "fed-cdp-decay")

_PRINTED = {
    "nonprivate": (6.8, 32.5, 30.9, 5.1, 5.1),
    "fed-sdp": (6.9, 33.8, 31.3, 5.2, 5.1),
    "fed-cdp": (22.4, 131.5, 112.4, 11.8, 11.9),
    "fed-cdp-decay": (22.6, 132.1, 114.6, 12.1, 12.0),
}


def printed_ms(dataset: str, method: str) -> float:
    """The paper's milliseconds for one of DATASETS and one of METHODS."""
    return _PRINTED[method][DATASETS.index(dataset)]


_OURS, _OTHERS = "#1b6ca8", "#b5b5b5"


def plot_speed(content: dict[str, Any], target: Path) -> None:
    """Draw a result file's growth and peers, if present; the format follows the file's suffix."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which looks for a display
    except ImportError:
        raise RunError(f"--plot: this needs matplotlib; install it with {install_command('report')}") from None

    sections = content["sections"]
    growth = [row for row in sections.get("growth", []) if row["along"] == "per_round"]
    # One mechanism only: bars of several would invite comparing different things.
    peers = [row for row in sections.get("peers", []) if "missing" not in row and row["mechanism"] == "fed-cdp"]
    tasks = list(dict.fromkeys(row["task"] for row in peers))
    panels = bool(growth) + len(tasks)
    if not panels:
        raise RunError("--plot: nothing to draw; it needs the section growth or peers")
    figure = Figure(figsize=(4.5 * panels, 3.6), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    if growth:
        _draw_growth(axes.pop(0), growth)
    for each, task in zip(axes, tasks, strict=True):
        _draw_peers(each, task, [row for row in peers if row["task"] == task])
    figure.suptitle(machine_in_words(content["machine"]), fontsize=8)
    try:
        with atomic_write(target) as file:
            figure.savefig(file, dpi=150, format=target.suffix[1:] or "png")
    except OSError as error:
        raise RunError(f"--plot: {target} cannot be written: {error.strerror}") from error


def _draw_growth(axes: Axes, rows: Rows) -> None:
    figures = [row["us_per_client_step"] for row in rows]
    counts = [row["per_round"] for row in rows]
    axes.plot(counts, [each["median"] for each in figures], "o-", color=_OURS)
    axes.fill_between(
        counts, [each["least"] for each in figures], [each["most"] for each in figures], color=_OURS, alpha=0.2
    )
    axes.set(xscale="log", ylim=(0, None), xlabel="clients per round, $K_t$", ylabel="µs per client step")
    axes.set_xticks(counts, [f"{each:,}" for each in counts])
    axes.minorticks_off()
    axes.set_title(f"MNIST, Fed-CDP, B = {rows[0]['batch_size']}")


def _draw_peers(axes: Axes, task: str, rows: Rows) -> None:
    rows = sorted(rows, key=lambda row: -float(row["us_per_client_step"]["median"]))
    figures = [row["us_per_client_step"] for row in rows]
    medians = [each["median"] for each in figures]
    spreads = [[each["median"] - each["least"] for each in figures], [each["most"] - each["median"] for each in figures]]
    colours = [_OURS if row["who"].startswith("fedcdp") else _OTHERS for row in rows]
    bars = axes.barh([row["who"] for row in rows], medians, xerr=spreads, color=colours)
    axes.bar_label(bars, [f"{each:,.0f}" for each in medians], padding=3, fontsize=8)
    axes.set(xlabel="µs per client step", xlim=(0, 1.25 * max(each["most"] for each in figures)))  # room for the labels
    axes.set_title(f"{task}, Fed-CDP", fontsize=9)  # a task has a long name
    axes.set_xlim(0, 1.2 * max(each["most"] for each in figures))
