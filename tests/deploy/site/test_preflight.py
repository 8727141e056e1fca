"""Checks before a start: certificates, the clock, the policy and the ledger, each with one line."""

from __future__ import annotations

import datetime
import email.utils
import http.server
import shutil
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("flwr")

from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.site import certificates, preflight
from fedcdp.deploy.site.directory import NodePlace, Site, SiteSettings
from fedcdp.deploy.site.preflight import check_node, check_server, seconds_ahead
from fedcdp.deploy.site.starting import node_to_keep, server_to_keep
from fedcdp.deploy.site.writer import experiment_for, write
from fedcdp.errors import DeploymentError, PolicyError, RunError

NOBODY = "127.0.0.1:1"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Site:
    given = [{"data": {"dataset": "cancer"}, "plan": {"method": "fed-cdp", "rounds": 2, "noise_multiplier": 1.0}}]
    return write(tmp_path_factory.mktemp("made") / "site", SiteSettings(nodes=2), experiment_for(2, given))


@pytest.fixture
def site(made: Site, tmp_path: Path) -> Site:
    shutil.copytree(made.path, tmp_path / "site")
    return Site(tmp_path / "site")


class Server:
    """The server's port over TLS, with a clock of its own."""

    def __init__(self, site: Site) -> None:
        outer, self.ahead = self, 0.0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(404)
                self.end_headers()

            def date_time_string(self, timestamp: float | None = None) -> str:  # noqa: ARG002
                now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=outer.ahead)
                return email.utils.format_datetime(now, usegmt=True)

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(site.server / "server.pem", site.server / "server.key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(site: Site) -> Iterator[Server]:
    one = Server(site)
    yield one
    one.close()


def test_a_node_that_is_in_order_is_kept(site: Site, server: Server) -> None:
    said: list[str] = []
    kept = node_to_keep(site.node(1).path, server.address, ["flower-supernode", "--flag"], said.append)
    assert said == []
    assert (kept.role, kept.name, kept.command) == ("node", "node-1", ("flower-supernode", "--flag"))
    assert kept.listen == "127.0.0.1:9401"
    assert kept.figures == str(site.node(1).state / "monitor.json")
    assert kept.expiries.keys() == {"ca.pem"}
    served = server_to_keep(site.path, ["flower-superlink"], said.append)
    assert (served.role, served.listen, served.expiries.keys()) == ("server", "127.0.0.1:9400", {"server.pem", "ca.pem"})
    assert said == []


@pytest.mark.parametrize(
    ("ahead", "said"),
    [(-20, "is 20 s ahead of the server's"), (400, "is 400 s behind the server's"), (-3, None), (200, None)],
)
def test_a_clock_that_is_off_is_said_before_the_start(ahead: float, said: str | None, site: Site, server: Server) -> None:
    server.ahead = ahead
    if said is None:
        assert check_node(site.node(1), server.address).warnings == []
        return
    with pytest.raises(DeploymentError, match="set the clocks first") as raised:
        check_node(site.node(1), server.address)
    assert said.split(" s ")[1] in str(raised.value)


def test_a_server_that_does_not_answer_is_no_error(site: Site) -> None:
    assert seconds_ahead(site.node(1).authority, NOBODY) is None
    (warning,) = check_node(site.node(1), NOBODY).warnings
    assert "does not answer yet" in warning


def test_a_server_of_another_authority_is_refused(site: Site, server: Server) -> None:
    node = site.node(1)
    node.authority.write_bytes(certificates.Authority.new().pair.public)
    with pytest.raises(DeploymentError, match="is not valid here"):
        check_node(node, server.address)


@pytest.mark.parametrize(("days", "said"), [(0, "expired on"), (20, None), (60, "")])
def test_certificates_are_warned_of_before_they_expire(
    days: int, said: str | None, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "VALID_DAYS", days)
    renewed = certificates.Authority.new().sign_server(["localhost"])
    (site.server / "server.pem").write_bytes(renewed.public)
    if said == "expired on":
        with pytest.raises(DeploymentError, match=r"server\.pem expired on .*; fedcdp deploy renew"):
            check_server(site)
        return
    warnings = check_server(site).warnings
    assert len(warnings) == (said is None)
    assert said is not None or "server.pem expires in 19 days" in warnings[0]


def test_a_certificate_of_the_future_says_to_check_the_clock(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_CLOCKS_DIFFER", datetime.timedelta(days=-2))
    (site.server / "server.pem").write_bytes(certificates.Authority.new().sign_server(["localhost"]).public)
    with pytest.raises(DeploymentError, match=r"is not valid before .*; check the clock first"):
        check_server(site)


def test_another_release_of_flower_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.importlib.metadata, "version", lambda _: "1.43.1")
    with pytest.raises(DeploymentError, match=r"flwr 1\.43\.1 is not supported; install .* from 1\.41 and below 1\.42"):
        check_server(site)


def test_a_policy_and_a_ledger_are_read_before_the_start(site: Site) -> None:
    node = site.node(1)
    with ClientLedger.held(node.state, node.path / "elsewhere" / "mark"):
        pass
    node.policy.write_text(node.policy.read_text() + 'ledger_mark = "elsewhere/mark"\n')
    assert len(check_node(node, NOBODY).warnings) == 1
    (node.state / "ledger.jsonl").unlink()
    with pytest.raises(RunError, match="older than its mark"):
        check_node(node, NOBODY)
    node.policy.write_text("epsilon = -1")
    with pytest.raises(PolicyError, match="epsilon: -1"):
        check_node(node, NOBODY)


def test_what_is_no_node_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=r"it has no node\.key"):
        check_node(NodePlace(0, tmp_path), NOBODY)
    with pytest.raises(DeploymentError, match="must be host:port"):
        node_to_keep(tmp_path, "fl.example.org", [], lambda _: None)
