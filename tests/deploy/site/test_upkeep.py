"""Commands for the life of a deployment: certificates, the ledger's mark, leaving and coming back."""

from __future__ import annotations

import os
import shutil
import stat
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("cryptography")
pytest.importorskip("flwr")

from fedcdp.cli.operate import app
from fedcdp.cli.program import main
from fedcdp.deploy.protocol import messages
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.known_nodes import KnownNodes
from fedcdp.deploy.site import certificates
from fedcdp.deploy.site.directory import CONTROL_PORT, Site, SiteSettings
from fedcdp.deploy.site.new_node import add_node
from fedcdp.deploy.site.preflight import certificates_in, check_node, check_server, seconds_ahead
from fedcdp.deploy.site.writer import experiment_for, write
from fedcdp.errors import DeploymentError
from tests.deploy.site.test_preflight import Server
from tests.support.local_grid import Node
from tests.support.one_client import ask, job, send


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Site:
    given = [{"data": {"dataset": "cancer"}, "plan": {"method": "fed-cdp", "rounds": 2, "noise_multiplier": 1.0}}]
    return write(
        tmp_path_factory.mktemp("made") / "site", SiteSettings(nodes=2, host="fl.example.org"), experiment_for(2, given)
    )


@pytest.fixture
def site(made: Site, tmp_path: Path) -> Site:
    shutil.copytree(made.path, tmp_path / "site")
    return Site(tmp_path / "site")


def run(*arguments: object) -> str:
    told = CliRunner().invoke(app, [str(each) for each in arguments])
    assert told.exit_code == 0, told.output
    return told.output


def failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    monkeypatch.setattr("sys.argv", ["fedcdp", "deploy", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_servers_certificate_is_renewed_for_the_same_names(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (old,) = certificates_in(site.server / "server.pem")
    monkeypatch.setattr(certificates, "VALID_DAYS", 400)
    assert "Restart the server" in run("renew", site.path)
    (new,) = certificates_in(site.server / "server.pem")
    assert new.not_valid_after_utc > old.not_valid_after_utc
    assert [each.value for each in new.extensions[3].value] == [each.value for each in old.extensions[3].value]
    assert stat.S_IMODE((site.server / "server.key").stat().st_mode) == 0o600
    server = Server(site)  # the key fits
    try:
        assert seconds_ahead(site.node(1).authority, server.address) is not None
    finally:
        server.close()


def test_a_new_authority_stands_beside_the_old_one_until_the_server_uses_it(site: Site) -> None:
    old_root = site.node(1).authority.read_bytes()
    assert "Copy authority/ca.pem to every node" in run("renew", site.path, "--authority")
    both = site.node(2).authority.read_bytes()
    assert len(certificates_in(site.node(2).authority)) == 2
    for after, roots in ((False, (old_root, both)), (True, (both,))):
        if after:
            run("renew", site.path)
        server = Server(site)
        try:
            for root in roots:
                (site.path / "root.pem").write_bytes(root)
                assert seconds_ahead(site.path / "root.pem", server.address) is not None
        finally:
            server.close()
    assert check_server(site).warnings == []


def test_an_expired_root_beside_a_valid_one_does_not_stop_the_start(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "VALID_DAYS", 0)
    expired = certificates.Authority.new().pair.public
    path = site.authority / "ca.pem"
    path.write_bytes(expired + path.read_bytes())
    assert check_server(site).warnings == []
    monkeypatch.undo()
    run("renew", site.path, "--authority")
    assert len(certificates_in(path)) == 2, "the expired one is gone"


def test_without_the_authoritys_key_its_owner_is_to_be_asked(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (site.authority / "ca.key").unlink()
    assert "let the authority that issued server/server.pem renew it" in failed(monkeypatch, capsys, "renew", site.path)
    (site.authority / "ca.key").write_bytes(certificates.Authority.new().pair.private)
    assert "it is not the key of a certificate in ca.pem" in failed(monkeypatch, capsys, "renew", site.path)


def test_a_mark_is_made_and_an_older_ledger_forgotten_only_on_demand(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = site.node(1)
    assert "the policy has no ledger_mark" in failed(monkeypatch, capsys, "mark", node.path)
    node.policy.write_text(node.policy.read_text() + f'ledger_mark = "{tmp_path / "mark"}"\n')
    assert "does not exist" in failed(monkeypatch, capsys, "mark", node.path)
    with ClientLedger.held(node.state):
        pass
    assert str(tmp_path / "mark") in run("mark", node.path).replace("\n", "")
    backup = (node.state / "ledger.jsonl").read_bytes()
    with ClientLedger.held(node.state, tmp_path / "mark") as ledger:
        ledger.accept(job().task(), 20)
    (node.state / "ledger.jsonl").write_bytes(backup)
    assert "is older than its mark" in failed(monkeypatch, capsys, "mark", node.path)
    run("mark", node.path, "--forget")
    with ClientLedger.held(node.state, tmp_path / "mark"):
        pass


def test_a_client_that_left_refuses_everything_until_it_comes_back(site: Site) -> None:
    from fedcdp.deploy.protocol.client import client_app
    from fedcdp.deploy.protocol.policy import ClientPolicy

    place = site.node(1)
    config = {"dataset": "cancer", "num-partitions": 4, "partition-id": 0, "records": 20, "state-dir": str(place.state)}
    node, task = Node(client_app(policy=ClientPolicy(epsilon=1e6)), config), job(rounds=9).task()
    send(node, messages.publish(task), messages.SUBSCRIBE)
    assert "update" in send(node, ask(task, 0), messages.TRAIN)
    private = [place.state / name for name in ("sum-x.key", "features-x-y.safetensors")]
    for path in private:
        path.write_bytes(b"a run key, or what frozen layers make of the records")
    assert "has left" in run("leave", place.path)
    assert not any(path.exists() for path in private)
    refused = send(node, ask(task, 1), messages.TRAIN).config_records["refused"]
    assert (refused["final"], refused["reason"]) == (True, "this client has left the federation")
    answer = send(node, messages.publish(job().task()), messages.SUBSCRIBE).config_records["answer"]
    assert answer["accepts"] is False
    run("join", place.path)
    assert "update" in send(node, ask(task, 2), messages.TRAIN)


def test_what_is_no_node_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("leave", "join", "mark"):
        assert "is not the directory of a node" in failed(monkeypatch, capsys, command, tmp_path)
    assert "is not a deployment" in failed(monkeypatch, capsys, "renew", tmp_path)
    assert "give --server host:port" in failed(monkeypatch, capsys, "keep", _folder(tmp_path), "--", "flower-supernode")


def _folder(path: Path) -> Path:
    (path / "node.toml").write_text("")
    return path


@pytest.mark.parametrize("sums", [False, True])
def test_one_more_node_is_written_for_its_owner(
    sums: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = {"rounds": 2, "secure_aggregation": True} if sums else {"method": "fed-cdp", "rounds": 2, "noise_multiplier": 1.0}
    given = [{"data": {"dataset": "cancer"}, "plan": plan}]
    site = write(tmp_path / "site", SiteSettings(nodes=3), experiment_for(3, given))
    with pytest.raises(
        DeploymentError, match=r"^client_epsilon: -1 is not allowed; it must be above 0, or inf for no limit$"
    ):
        add_node(site, "riverside", -1.0)
    others = {path: path.read_bytes() for path in site.path.glob("node-*/*") if path.is_file()}
    assert "joining = true" in run("add", site.path, "--client", "riverside")
    node = site.node(4)
    assert node.name == "node-4-riverside"
    assert site.require().nodes == 4
    config = tomllib.loads(node.config.read_text())
    assert (config["data"], config["client"]) == ("records.npz", "riverside")
    assert stat.S_IMODE(node.key.stat().st_mode) == 0o600
    assert node.authority.read_bytes() == site.node(1).authority.read_bytes()
    assert os.access(site.path / "start-node-4-riverside.sh", os.X_OK)
    assert "joining = false" in (site.app / "pyproject.toml").read_text()
    check_node(node, "127.0.0.1:1")
    assert {path: path.read_bytes() for path in others} == others, "other owners' files are theirs"
    if sums:
        assert [each.name for each in KnownNodes.read(node.known).nodes.values()][-1] == "node-4-riverside"
        assert len(KnownNodes.read(node.known).nodes) == 4
    assert not list(node.path.glob("*.yaml")), "nor files of services, which this deployment has none of"
    site.settings_file.write_text(site.settings_file.read_text().replace("nodes = 4", "nodes = 3"))
    assert "already exists" in failed(monkeypatch, capsys, "add", site.path, "--client", "riverside")


def test_one_more_node_gets_the_service_files_that_others_have(tmp_path: Path) -> None:
    settings = SiteSettings(nodes=1, host="fl.example.org", control_port=CONTROL_PORT)
    ways = ["systemd", "kubernetes"]
    site = write(tmp_path / "site", settings, experiment_for(1, [{"data": {"dataset": "cancer"}}]), ways=ways)
    before = {path: path.read_bytes() for path in site.path.rglob("*") if path.is_file()}
    node = add_node(site, "riverside")
    written = {path for path in site.path.rglob("*") if path.is_file()} - before.keys()
    assert {path.name for path in written} >= {"fedcdp-node-2.service", "kustomization.yaml", "kubernetes.yaml"}
    unit = (site.path / "systemd" / "fedcdp-node-2.service").read_text()
    assert f"ExecStart=/srv/fedcdp/start-{node.name}.sh\n" in unit
    assert f"start-{node.name}.sh: |" in (node.path / "kubernetes.yaml").read_text()
    changed = {path.name for path, content in before.items() if path.read_bytes() != content}
    assert changed == {"deployment.toml"}, "what operators may have edited stays as it is"
