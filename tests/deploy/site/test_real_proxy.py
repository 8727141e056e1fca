"""The real nginx in front of a real SuperLink: a stranger with the public certificate can list and start nothing."""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("flwr")

from fastapi.routing import iter_route_contexts
from flwr.proto.control_pb2 import ListNodesRequest, ListNodesResponse, ListRunsRequest, ListRunsResponse
from flwr.superlink.main import create_app

from fedcdp.deploy.site.service_files import FLEET_CALLS
from tests.support.flower_site import CANCER, RunningSite, wait_until
from tests.support.nginx import require_nginx

pytestmark = pytest.mark.slow

ALLOWED = {f"/v1/fleet/{call}" for call in FLEET_CALLS}
DISGUISED = (
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/get-run/../../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/%2e%2e%2fcontrol/list-runs",
    "/v1/fleet/%252e%252e/control/list-runs",
    "/v1/fleet//../control/list-runs",
    "//v1/control/list-runs",
    "/./v1/control/list-runs",
    "/v1/%63ontrol/list-runs",
    "/V1/CONTROL/LIST-RUNS",
    "/v1/fleet/get-run;/../../control/list-runs",
    "/v1/control/list-runs?/v1/fleet/get-run",
    "/v1/control/list-runs#/v1/fleet/get-run",
    "/v1/control/list-runs%3f/../../fleet/get-run%00",
)


def _call(site: RunningSite, port: int, path: str, method: str = "POST", content: bytes = b"") -> tuple[int, bytes]:
    """The status and the content of an answer to somebody who has the authority's certificate and nothing else."""
    context = ssl.create_default_context(cafile=str(site.site.authority / "ca.pem"))
    caller = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
    try:
        kind = "application/protobuf"
        caller.request(method, path, body=content, headers={"content-type": kind, "accept": kind})
        answer = caller.getresponse()
        return answer.status, answer.read()
    finally:
        caller.close()


def _listening(port: int) -> set[str]:
    """The addresses at which somebody listens on a port of this machine, as the kernel writes them."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.rpartition(":")
            if state == "0A" and int(number, 16) == port:
                found.add(address)
    return found


def _refused() -> list[str]:
    """Every path of Flower's server that is no call of a node, and some that look like one."""
    offered = {getattr(each.route, "path", "/") for each in iter_route_contexts(create_app().routes)}
    assert offered > ALLOWED
    assert len([path for path in offered if path.startswith("/v1/control/")]) > 30
    return sorted(offered - ALLOWED | {"/", "/v1/fleet/", "/v1/fleet/get-run/", "/v1/fleet/get-run2", "/v1/control"})


def _known(site: RunningSite) -> tuple[int, int]:
    """How many nodes and runs the server has, by its control API on the loopback."""
    nodes, runs = ListNodesResponse(), ListRunsResponse()
    for path, request, answer in (("list-nodes", ListNodesRequest(), nodes), ("list-runs", ListRunsRequest(), runs)):
        status, content = _call(site, site.port, f"/v1/control/{path}", content=request.SerializeToString())
        assert status == 200
        answer.ParseFromString(content)
    return len(nodes.nodes_info), len(runs.run_dict)


def test_a_stranger_can_list_and_start_nothing(tmp_path: Path) -> None:
    require_nginx()
    with RunningSite(tmp_path / "site", CANCER, nodes=1, proxy=True) as site:
        site.start_server()
        proxy = site.start_proxy()
        assert _listening(site.port) == {"0100007F"}
        assert _listening(site.public_port) == {"00000000"}
        assert _known(site) == (0, 0)

        for path in _refused():
            for method in ("POST", "GET"):
                assert _call(site, site.public_port, path, method)[0] == 403, (method, path)
        for path in DISGUISED:
            status, content = _call(site, site.public_port, path)
            assert status in (400, 401, 403, 404), (path, status, content)
        for path in sorted(ALLOWED):
            assert _call(site, site.public_port, path)[0] == 401, path  # by the server: no key
            assert _call(site, site.public_port, path, "GET")[0] == 403, path

        public = f"127.0.0.1:{site.public_port}"
        for name in ("--register-only", "--run-only"):
            stranger = site.start(f"stranger{name}", "run.sh", name, FEDCDP_SERVER=public)
            wait_until(lambda stranger=stranger: stranger.status is not None, "the stranger to give up")  # type: ignore[misc]
            assert stranger.status != 0
            assert "403" in site.log(f"stranger{name}")
        assert _known(site) == (0, 0)
        assert "access forbidden by rule" in site.log("proxy")
        assert proxy.status is None
        site.register()
        assert _known(site) == (1, 0)
