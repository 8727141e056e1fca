"""A Grafana dashboard of a deployment, as the JSON that Grafana imports.

Its panels ask only for figures that the plan's server and nodes show (`protocol.monitor_file`).
"""

from __future__ import annotations

import json
import re
from typing import Any

from fedcdp.deploy.protocol.monitor_file import METRICS, PUBLIC

_PANELS = (
    ("Rounds", "timeseries", ("fedcdp_rounds", "fedcdp_rounds_planned"), ""),
    ("Attempts charged", "timeseries", ("fedcdp_releases",), ""),
    ("ε spent and left, server", "timeseries", ("fedcdp_epsilon_spent", "fedcdp_epsilon_left"), ""),
    ("ε left, nodes", "timeseries", ("fedcdp_node_epsilon_left",), ""),
    ("Answers used in ten minutes", "timeseries", ("increase(fedcdp_answers_total[10m])",), ""),
    ("Seconds of the last round", "timeseries", ("fedcdp_last_round_seconds",), "s"),
    ("Left out in an hour, by reason", "timeseries", ("increase(fedcdp_left_out_total[1h])",), ""),
    ("Refused by nodes in an hour, by reason", "timeseries", ("increase(fedcdp_node_refusals_total[1h])",), ""),
    ("Bytes per second, server", "timeseries", ("rate(fedcdp_bytes_total[10m])",), "Bps"),
    ("Bytes per second, nodes", "timeseries", ("rate(fedcdp_node_bytes_total[10m])",), "Bps"),
    ("Releases, nodes", "timeseries", ("fedcdp_node_releases",), ""),
    ("Processes that run", "stat", ("fedcdp_process_running",), ""),
    ("Restarts in a day", "stat", ("increase(fedcdp_process_restarts_total[1d])",), ""),
    ("Certificates expire in", "stat", ("fedcdp_certificate_expires_seconds - time()",), "s"),
)
_NAME = re.compile(r"fedcdp_[a-z_]+")
_WIDTH, _HEIGHT = 12, 8


def names_in(text: str) -> set[str]:
    """The names of figures in an expression, a dashboard or a file of rules."""
    return set(_NAME.findall(text))


def dashboard_text(title: str, *, hidden: bool) -> str:
    """The dashboard. With `hidden`, for a plan under which nobody may know who took part, without the figures not shown."""
    withheld = METRICS.keys() - PUBLIC if hidden else set()
    shown = [each for each in _PANELS if not names_in(" ".join(each[2])) & withheld]
    panels = [_panel(number, *each) for number, each in enumerate(shown)]
    return json.dumps(
        {
            "title": title,
            "uid": None,
            "schemaVersion": 39,
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "templating": {"list": [{"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}]},
            "panels": panels,
        },
        indent=1,
        ensure_ascii=False,
    )


def _panel(number: int, title: str, kind: str, expressions: tuple[str, ...], unit: str) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number + 1,
        "title": title,
        "type": kind,
        "datasource": source,
        "gridPos": {"x": number % 2 * _WIDTH, "y": number // 2 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit} if unit else {}, "overrides": []},
        "targets": [
            {"refId": "ABCDEF"[place], "datasource": source, "expr": expression, "legendFormat": "__auto"}
            for place, expression in enumerate(expressions)
        ],
    }
