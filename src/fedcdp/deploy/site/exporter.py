"""The HTTP endpoint of a node or a server: `/metrics` for Prometheus, and `/healthz`.

It reads figures when it is asked, from the files that Flower's short processes write (`protocol.monitor_file`). It shows no
secret: no path, no name of a client, no text of an error. It listens on the loopback unless the owner chooses another
address.

The module imports the standard library and small modules only, since the process that runs it lives as long as the node
(`keeper`). `prometheus-client` is imported when metrics are asked for; without it, `/healthz` still answers.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedcdp.deploy.protocol.monitor_file import METRICS, Metric, labels_of, read_figures

PROCESS_METRICS: dict[str, Metric] = {
    "fedcdp_process_running": Metric("gauge", "Whether Flower's process runs."),
    "fedcdp_process_restarts_total": Metric("counter", "Restarts after the server refused a node that had crashed."),
    "fedcdp_certificate_expires_seconds": Metric("gauge", "Unix time at which a certificate expires.", ("file",)),
    "fedcdp_build_info": Metric("gauge", "1, with the version and the role of the process.", ("role", "version")),
}
"""What the keeping process itself shows."""

ALL_METRICS = METRICS | PROCESS_METRICS
_MISSING = "metrics need prometheus-client: pip install 'fedcdp[metrics]'\n"
_PLAIN = "text/plain; charset=utf-8"


@dataclass(eq=False)
class Watched:
    """What the endpoint shows, besides the figures in the file."""

    role: str
    """`node` or `server`."""
    version: str
    figures: Path
    """The file that the processes write."""
    expiries: dict[str, float] = field(default_factory=dict)
    """When certificates expire, by the name of the file."""
    running: Callable[[], bool] = lambda: False
    restarts: int = 0

    def series(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Every series: name, labels and value."""
        yield "fedcdp_process_running", {}, float(self.running())
        yield "fedcdp_process_restarts_total", {}, float(self.restarts)
        yield "fedcdp_build_info", {"role": self.role, "version": self.version}, 1.0
        for name, when in self.expiries.items():
            yield "fedcdp_certificate_expires_seconds", {"file": name}, when
        for name, values in read_figures(self.figures).items():
            for key, value in values.items():
                yield name, labels_of(name, key), value

    def collect(self) -> Iterator[Any]:
        """The families of prometheus-client, each with its series."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for name, labels, value in self.series():
            metric = ALL_METRICS[name]
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = families.setdefault(name, kind(name, metric.help, labels=metric.labels))
            family.add_metric([labels.get(each, "") for each in metric.labels], value)
        yield from families.values()


def metrics_text(watched: Watched) -> bytes:
    """The page that Prometheus reads."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(watched)
    text: bytes = generate_latest(registry)
    return text


class Endpoint:
    """The listening socket and its thread. Leaving closes it."""

    def __init__(self, host: str, port: int, watched: Watched) -> None:
        self._server = _MonitorServer((host, port), _handler(watched), socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def port(self) -> int:
        """The port, also if any free one was asked for."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Endpoint:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _MonitorServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], family: socket.AddressFamily
    ) -> None:
        self.address_family = family
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has hung up is no news; Python would write a traceback into the log."""


def _handler(watched: Watched) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # a client that sends nothing is not waited for
        server_version, sys_version = "fedcdp", ""

        def do_GET(self) -> None:
            status, kind, content = _answer(self.path.partition("?")[0], watched)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """A request is no news."""

    return Handler


def _answer(path: str, watched: Watched) -> tuple[int, str, bytes]:
    if path == "/healthz":
        running = watched.running()
        return (200 if running else 503), "application/json", json.dumps({"running": running}).encode() + b"\n"
    if path != "/metrics":
        return 404, _PLAIN, b"there are /metrics and /healthz\n"
    try:
        return 200, f"{_PLAIN}; version=0.0.4", metrics_text(watched)
    except ModuleNotFoundError:
        return 501, _PLAIN, _MISSING.encode()
