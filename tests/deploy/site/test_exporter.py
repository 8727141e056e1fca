"""/metrics and /healthz of a kept process, and that rules and dashboards name what is there."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from fedcdp.config.presets import Settings
from fedcdp.deploy.protocol.monitor_file import FILE, METRICS, PUBLIC, REASONS, MonitorFile, Tally
from fedcdp.deploy.site.dashboard import names_in
from fedcdp.deploy.site.directory import SiteSettings
from fedcdp.deploy.site.exporter import ALL_METRICS, PROCESS_METRICS, Endpoint, Watched, metrics_text
from fedcdp.deploy.site.writer import experiment_for, write

HIDDEN: Settings = {"plan": {"method": "fed-sdp", "noise_at": "server", "noise_multiplier": 1.0, "rounds": 2}}
OPEN: Settings = {"plan": {"method": "fed-cdp", "noise_multiplier": 1.0, "rounds": 2}}


def watched(base: Path, running: Callable[[], bool] = lambda: True) -> Watched:
    return Watched("server", "1.2", base / FILE, {"server.pem": 2e9}, running)


def get(port: int, path: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers["Content-Type"]


def test_metrics_are_those_of_the_file_and_of_the_process(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    tally = Tally()
    tally.set("fedcdp_epsilon_spent", 1.5, "server", "record")
    tally.count("fedcdp_left_out_total", "late", by=3)
    MonitorFile(tmp_path).add(tally)
    MonitorFile(tmp_path).add(tally)
    with Endpoint("127.0.0.1", 0, watched(tmp_path)) as endpoint:
        status, text, kind = get(endpoint.port, "/metrics")
    assert status == 200
    assert kind.startswith("text/plain; charset=utf-8; version=0.0.4")
    samples = {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}
    assert samples["fedcdp_epsilon_spent"].labels == {"adversary": "server", "unit": "record"}
    assert samples["fedcdp_epsilon_spent"].value == 1.5
    assert samples["fedcdp_left_out_total"].value == 6
    assert samples["fedcdp_build_info"].labels == {"role": "server", "version": "1.2"}
    assert samples["fedcdp_certificate_expires_seconds"].value == 2e9
    assert samples.keys() <= ALL_METRICS.keys()


@pytest.mark.parametrize("running", [True, False])
def test_health_says_whether_the_process_runs_and_nothing_else(running: bool, tmp_path: Path) -> None:
    with Endpoint("127.0.0.1", 0, watched(tmp_path, lambda: running)) as endpoint:
        status, text, _ = get(endpoint.port, "/healthz")
        assert (status, json.loads(text)) == (200 if running else 503, {"running": running})
        assert get(endpoint.port, "/")[0] == 404
        assert get(endpoint.port, "/../../etc/passwd")[0] == 404


def test_without_the_package_health_still_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prometheus_client", "prometheus_client.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with Endpoint("127.0.0.1", 0, watched(tmp_path)) as endpoint:
        status, text, _ = get(endpoint.port, "/metrics")
        assert (status, "pip install 'fedcdp[metrics]'" in text) == (501, True)
        assert get(endpoint.port, "/healthz")[0] == 200


@pytest.mark.parametrize(("plan", "hidden"), [(OPEN, False), (HIDDEN, True)], ids=["open", "hidden"])
def test_rules_and_dashboard_name_figures_that_are_shown(plan: Settings, hidden: bool, tmp_path: Path) -> None:
    site = write(tmp_path / "site", SiteSettings(nodes=2), experiment_for(2, [{"data": {"dataset": "cancer"}}, plan]))
    shown = (PUBLIC if hidden else METRICS.keys()) | PROCESS_METRICS.keys()
    rules, board = (site.monitoring / "alerts.yml").read_text(), (site.monitoring / "dashboard.json").read_text()
    for text in (rules, board):
        assert names_in(text)
        assert names_in(text) <= shown
    panels = json.loads(board)["panels"]
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    if not hidden:
        named = names_in(rules) | names_in(board)
        assert METRICS.keys() - named == {
            "fedcdp_clients",
            "fedcdp_node_tasks",
            "fedcdp_node_messages_total",
            "fedcdp_node_epsilon_reserved",
        }
    for label, values in re.findall(r'(reason|how)[!=~]+"([^"]+)"', rules):
        assert label in {"reason", "how"}
        assert values


def test_the_page_explains_every_figure_and_reason() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operate" / "monitoring.md").read_text()
    assert ALL_METRICS.keys() == names_in(page)
    assert set(re.findall(r"`([a-z]+)`", page.partition("The reasons are ")[2].partition("\n")[0])) == set(REASONS)


def test_the_rules_are_yaml(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    site = write(tmp_path / "site", SiteSettings(nodes=2), experiment_for(2, [{"data": {"dataset": "cancer"}}, OPEN]))
    rules = yaml.safe_load((site.monitoring / "alerts.yml").read_text())["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) == 10
    assert all({"expr", "annotations"} <= rule.keys() for rule in rules)
    assert {rule["labels"]["severity"] for rule in rules} == {"critical", "warning", "info"}
    scraped = yaml.safe_load((site.monitoring / "prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for each in job["static_configs"] for target in each["targets"]]
    assert targets == ["127.0.0.1:9400", "127.0.0.1:9401", "127.0.0.1:9402"]


# Series of one server, a value for each minute: two hours without a round, from the second minute on little ε is left, the
# process is down for five minutes and back again, and the certificate expires after 13 days.
SERIES = {
    "up": "1x120",
    "fedcdp_process_running": "1 0x4 1x115",
    "fedcdp_rounds": "3x120",
    "fedcdp_rounds_planned": "9x120",
    "fedcdp_epsilon_spent": "1 9.5x119",
    "fedcdp_epsilon_left": "9 0.5x119",
    "fedcdp_certificate_expires_seconds": f"{13 * 86400}x120",
    "fedcdp_process_restarts_total": "0x60 1+1x59",
}
FIRING = {
    "1m": {"FedcdpBudgetLow", "FedcdpCertificateExpires"},
    "4m": {"FedcdpBudgetLow", "FedcdpCertificateExpires", "FedcdpProcessDown"},
    "10m": {"FedcdpBudgetLow", "FedcdpCertificateExpires"},
    "70m": {"FedcdpBudgetLow", "FedcdpCertificateExpires", "FedcdpNoProgress", "FedcdpRestarts"},
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_the_files_and_the_rules_fire(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    site = write(tmp_path / "site", SiteSettings(nodes=2), experiment_for(2, [{"data": {"dataset": "cancer"}}, OPEN]))
    rules = yaml.safe_load((site.monitoring / "alerts.yml").read_text())["groups"][0]["rules"]
    series = [
        {"series": f'{name}{{job="fedcdp-server", instance="s"}}', "values": values} for name, values in SERIES.items()
    ]
    expected = [
        {"eval_time": when, "alertname": rule["alert"], "exp_alerts": [_alert(rule)] if rule["alert"] in firing else []}
        for when, firing in FIRING.items()
        for rule in rules
    ]
    case = {
        "rule_files": [str(site.monitoring / "alerts.yml")],
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": expected}],
    }
    (tmp_path / "case.yml").write_text(yaml.safe_dump(case))
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", str(tmp_path / "case.yml")]):
        done = subprocess.run(["promtool", *command], cwd=site.monitoring, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def _alert(rule: dict[str, Any]) -> dict[str, Any]:
    """An alert of the one server, as promtool expects it."""
    labels = rule["labels"] | {"instance": "s", "job": "fedcdp-server"}
    said = rule["annotations"]["summary"].replace("{{ $labels.instance }}", "s").replace("{{ $labels.file }}", "")
    return {"exp_labels": labels, "exp_annotations": {"summary": said}}


def test_a_client_that_hangs_up_leaves_no_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Endpoint("127.0.0.1", 0, watched(tmp_path)) as endpoint:
        for request in (b"GET /healthz HTTP/1.0\r\n\r\n", b"\x16\x03\x01", b"GET /metrics HTTP/1.0\r\nA: " + b"x" * 70_000):
            with socket.create_connection(("127.0.0.1", endpoint.port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset, not a farewell
                client.sendall(request)
        assert get(endpoint.port, "/healthz")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_a_damaged_file_leaves_the_process_figures(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    (tmp_path / FILE).write_bytes(b'\xff{"figures"')
    text = metrics_text(watched(tmp_path)).decode()
    assert "fedcdp_process_running 1.0" in text
    assert "fedcdp_rounds" not in text
