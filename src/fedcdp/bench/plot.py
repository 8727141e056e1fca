"""A picture of a result file: speed against the clients in a round, and bars against the peers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcdp.bench.results import Rows
from fedcdp.bench.tables import machine_in_words
from fedcdp.errors import RunError
from fedcdp.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS, _OTHERS = "#1b6ca8", "#b5b5b5"


def plot_speed(content: dict[str, Any], target: Path) -> None:
    """Draw what is there of a result file's growth and peers; the form follows the file's ending."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which looks for a screen
    except ImportError:
        raise RunError("--plot: this needs matplotlib; install it with pip install 'fedcdp[report]'") from None

    sections = content["sections"]
    growth = [row for row in sections.get("growth", []) if row["along"] == "per_round"]
    # One mechanism: bars of several would invite to compare what is not the same.
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
    axes.set(xscale="log", ylim=(0, None), xlabel="clients in a round, $K_t$", ylabel="µs per client step")
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
