"""A node tells nothing to a server that cannot prove by its certificate that it is the one meant."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.flower_site import CANCER, HAS_FLOWER, RunningSite, wait_until

trustme = pytest.importorskip("trustme")

pytestmark = [pytest.mark.integration, pytest.mark.skipif(not HAS_FLOWER, reason="Flower is not installed")]

AUTHORITY = trustme.CA()
LONG_AGO = datetime.datetime(2020, 1, 1)


class Listener:
    """A server on a free port of the loopback that shows one certificate, and keeps what it is told."""

    def __init__(self, certificate: Any) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.set_alpn_protocols(["h2", "http/1.1"])
        certificate.configure_cert(self._context)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.told, self.calls = b"", 0
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                called, _ = self._listener.accept()
            except OSError:  # closed
                return
            self.calls += 1
            with contextlib.suppress(OSError), self._context.wrap_socket(called, server_side=True) as secured:
                self.told += secured.recv(2**16)


def test_a_node_talks_to_a_server_that_its_authority_vouches_for(tmp_path: Path) -> None:
    with RunningSite(tmp_path / "site", CANCER) as site, Listener(AUTHORITY.issue_cert("127.0.0.1")) as server:
        site.site.node(1).authority.write_bytes(AUTHORITY.cert_pem.bytes())
        site.start_node(1, FEDCDP_SERVER=f"127.0.0.1:{server.port}")
        wait_until(lambda: server.told, "the node to call")
        assert b"/v1/fleet" in server.told


@pytest.mark.parametrize(
    ("certificate", "reason"),
    [
        (trustme.CA().issue_cert("127.0.0.1"), "issuer certificate"),
        (AUTHORITY.issue_cert("other.example.org"), "not valid for '127.0.0.1'"),
        (AUTHORITY.issue_cert("127.0.0.1", not_before=LONG_AGO, not_after=LONG_AGO.replace(month=2)), "expired"),
    ],
    ids=["another-authority", "another-host", "expired"],
)
def test_a_node_tells_nothing_to_an_impostor(tmp_path: Path, certificate: Any, reason: str) -> None:
    with RunningSite(tmp_path / "site", CANCER) as site, Listener(certificate) as server:
        site.site.node(1).authority.write_bytes(AUTHORITY.cert_pem.bytes())
        node = site.start_node(1, FEDCDP_SERVER=f"127.0.0.1:{server.port}")
        wait_until(lambda: node.status is not None, "the node to give up")
        assert node.status != 0
        assert "CERTIFICATE_VERIFY_FAILED" in site.log("node-1")
        assert reason in site.log("node-1")
        assert (server.told, server.calls > 0) == (b"", True)
