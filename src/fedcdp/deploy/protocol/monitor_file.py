"""The figures that a deployment shows to those who watch it, and the file in which its processes keep them.

Flower runs each message in a process of its own, so figures live in a file: `monitor.json` in a client's state directory and
in the server's run directory. The process that keeps a node or the server (`site.keeper`) reads it whenever it is asked.

The list `METRICS` is closed: a figure that is not on it cannot be written. None of them comes from before the noise. They
count messages, bytes, charged releases and ε, which follow from the plan and the ledger. Where an ε assumes that nobody
knows who took part (`task.hides_participation`), nothing that moves with taking part is written: `PUBLIC` lists what
remains.

The clients of a secure sum write no more than that, either.

Figures are for people. A crash may lose the latest ones. The ledger decides what was released, and never this file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedcdp.errors import DefectError
from fedcdp.files.disk import PRIVATE, open_unlinked, write_atomically
from fedcdp.files.untrusted import MOST_SETTINGS, parse_json, read_bounded

_LOG = logging.getLogger("flwr.fedcdp")
FILE = "monitor.json"
_BETWEEN = "|"

REASONS = ("budget", "data", "late", "left", "missing", "policy", "protocol", "refused", "repeated", "roster", "trouble",
           "version")  # fmt: skip
"""Why something was refused or left out: a closed list, without the words that a log has."""


@dataclass(frozen=True)
class Metric:
    """One figure: its kind, what it says, and its labels."""

    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    "fedcdp_rounds": Metric("gauge", "Rounds that the server has completed."),
    "fedcdp_rounds_planned": Metric("gauge", "Rounds of the plan."),
    "fedcdp_clients": Metric("gauge", "Clients of the run."),
    "fedcdp_releases": Metric("gauge", "Attempts at a round that the server's ledger has charged."),
    "fedcdp_epsilon_spent": Metric("gauge", "ε of all releases of the run.", ("adversary", "unit")),
    "fedcdp_epsilon_left": Metric("gauge", "max_epsilon less the ε of the run.", ("adversary", "unit")),
    "fedcdp_run_ended": Metric("gauge", "1 once the run has ended, with the reason.", ("how",)),
    "fedcdp_answers_total": Metric("counter", "Updates and shares that the server has used."),
    "fedcdp_left_out_total": Metric("counter", "Clients that the server left out of an attempt.", ("reason",)),
    "fedcdp_last_round_seconds": Metric("gauge", "Seconds of the last round."),
    "fedcdp_bytes_total": Metric("counter", "Bytes of the arrays in the server's messages.", ("direction",)),
    "fedcdp_node_tasks": Metric("gauge", "Tasks that the client has accepted."),
    "fedcdp_node_releases": Metric("gauge", "Releases in the client's ledger."),
    "fedcdp_node_messages_total": Metric("counter", "Messages that the client has answered.", ("kind",)),
    "fedcdp_node_refusals_total": Metric("counter", "Messages that the client has refused.", ("reason",)),
    "fedcdp_node_bytes_total": Metric("counter", "Bytes of the arrays in the client's messages.", ("direction",)),
    "fedcdp_node_epsilon_granted": Metric("gauge", "ε that the client's policy grants.", ("adversary", "unit")),
    "fedcdp_node_epsilon_reserved": Metric("gauge", "ε that the client's ledger has reserved.", ("adversary", "unit")),
    "fedcdp_node_epsilon_left": Metric("gauge", "ε granted and not reserved.", ("adversary", "unit")),
}
"""Everything that a server or a client may show."""

PUBLIC = {
    "fedcdp_rounds",
    "fedcdp_rounds_planned",
    "fedcdp_clients",
    "fedcdp_releases",
    "fedcdp_epsilon_spent",
    "fedcdp_epsilon_left",
    "fedcdp_run_ended",
    "fedcdp_node_tasks",
    "fedcdp_node_epsilon_granted",
}
"""What may be shown even if nobody may know who took part: it is the same whoever did."""

Figures = dict[str, dict[str, float]]
"""Values by metric, and by the values of its labels."""


class Tally:
    """Figures that have changed and are not yet in the file: counters to add to, gauges to replace."""

    def __init__(self) -> None:
        self.counted: Figures = {}
        self.gauges: Figures = {}

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        series = self.counted.setdefault(name, {})
        series[_key(name, "counter", labels)] = series.get(_key(name, "counter", labels), 0.0) + by

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge; its series of earlier times are removed. A value that is not finite is not shown."""
        key, series = _key(name, "gauge", labels), self.gauges.setdefault(name, {})
        if math.isfinite(value):
            series[key] = float(value)

    def forget(self, name: str) -> None:
        """Remove all series of a gauge."""
        self.gauges[name] = {}


class MonitorFile:
    """The figures of one client or one server on disk; processes may add to it at the same time."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    def add(self, tally: Tally, *, hidden: bool = False) -> None:
        """Write what a tally has. With `hidden`, only what is the same whoever took part; everything else is deleted.

        A file that was hidden stays so: a message that fails early does not know better. A failure is logged. It does not
        stop a round: nothing that a release depends on is in this file.
        """
        try:
            lock = open_unlinked(self._path.with_name("monitor.lock"), os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                figures, hidden = self._changed(tally), hidden or _is_hidden(self._path)
                if hidden:
                    figures = {name: series for name, series in figures.items() if name in PUBLIC}
                write_atomically(self._path, json.dumps({"hidden": hidden, "figures": figures}).encode(), PRIVATE)
            finally:
                os.close(lock)
        except OSError as error:
            _LOG.warning("%s cannot be written: %s", self._path, error.strerror or error)

    def _changed(self, tally: Tally) -> Figures:
        figures = read_figures(self._path)
        for name, series in tally.counted.items():
            known = figures.setdefault(name, {})
            figures[name] = known | {key: known.get(key, 0) + value for key, value in series.items()}
        return figures | tally.gauges


def read_figures(path: Path) -> Figures:
    """The figures in a file. One that is missing or damaged has none: they are for people only."""
    try:
        written = parse_json(read_bounded(path, MOST_SETTINGS))["figures"]
        return {name: _series(series) for name, series in written.items() if name in METRICS}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _is_hidden(path: Path) -> bool:
    """Whether a file hides who took part; also if it cannot be read."""
    try:
        return parse_json(read_bounded(path, MOST_SETTINGS))["hidden"] is not False
    except FileNotFoundError:
        return False
    except (OSError, ValueError, TypeError, KeyError):
        return True


def labels_of(name: str, key: str) -> dict[str, str]:
    """The labels of a series, by name."""
    return dict(zip(METRICS[name].labels, key.split(_BETWEEN), strict=False)) if METRICS[name].labels else {}


def _series(written: Mapping[str, Any]) -> dict[str, float]:
    return {str(key): float(value) for key, value in written.items() if math.isfinite(float(value))}


def _key(name: str, kind: str, labels: tuple[str, ...]) -> str:
    metric = METRICS.get(name)
    if metric is None or metric.kind != kind or len(metric.labels) != len(labels):
        raise DefectError(f"{name} with {len(labels)} labels is not a {kind} that a deployment shows")
    if "reason" in metric.labels and not set(labels) <= set(REASONS):
        raise DefectError(f"{name}: {labels} is not one of {', '.join(REASONS)}")
    return _BETWEEN.join(labels)
