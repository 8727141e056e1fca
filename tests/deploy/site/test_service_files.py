"""`fedcdp deploy init --for …`: what is written is sound, closed, pinned, and holds no secret where none belongs."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("flwr")
pytest.importorskip("yaml")

import yaml
from cryptography import x509
from fastapi.routing import APIRoute
from flwr.superlink.routers.fleet.router import router as fleet_router

from fedcdp.deploy.site import service_files
from fedcdp.deploy.site.directory import CONTROL_PORT, Site, SiteSettings
from fedcdp.deploy.site.service_files import FLEET_CALLS, SERVER, WAYS, ServiceFiles, control_port_for
from fedcdp.deploy.site.writer import experiment_for, write
from fedcdp.errors import DeploymentError
from tests.cli.conftest import Cli, cli, workplace
from tests.support.nginx import require_nginx

__all__ = ["cli", "workplace"]

ROOT = Path(__file__).parents[3]
CANCER = {"data": {"dataset": "cancer"}, "plan": {"rounds": 3, "local_steps": 2}}
SECRET = ("node.key", "server.key", "ca.key")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    place = tmp_path_factory.mktemp("services") / "site"
    settings = SiteSettings(nodes=2, host="fl.example.org", control_port=CONTROL_PORT)
    return write(place, settings, experiment_for(2, [CANCER]), ways=WAYS)


def _compose(site: Site) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((site.path / "compose.yaml").read_text())
    return found


def _kubernetes(path: Path) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}


def _pods(site: Site) -> dict[str, dict[str, Any]]:
    found = {SERVER: _kubernetes(site.path / "kubernetes" / "server.yaml")["Deployment"]}
    found |= {node.name: _kubernetes(node.path / "kubernetes.yaml")["StatefulSet"] for node in site.nodes(2)}
    return {name: each["spec"]["template"]["spec"] for name, each in found.items()}


def _unit(path: Path) -> list[tuple[str, str]]:
    lines = [line for line in path.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


# The proxy -----------------------------------------------------------------------------------------------------------


def test_the_proxy_lets_through_what_a_node_with_a_key_calls() -> None:
    known = {route.path.removeprefix("/v1/fleet/") for route in fleet_router.routes if isinstance(route, APIRoute)}
    assert set(FLEET_CALLS) == known - {"register-node", "unregister-node"}  # those of nodes without a key


def test_behind_the_proxy_the_server_listens_on_the_loopback_only(site: Site) -> None:
    server, job = ((site.path / name).read_text() for name in ("start-superlink.sh", "run.sh"))
    assert "\nlisten=127.0.0.1\n" in server
    assert "FEDCDP_LISTEN" not in server
    assert f'port="${{FEDCDP_PORT:-{CONTROL_PORT}}}"' in server
    assert f'server="${{FEDCDP_SERVER:-127.0.0.1:{CONTROL_PORT}}}"' in job
    assert "fl.example.org:9443" in (site.path / "start-node-1.sh").read_text()
    assert site.require().control_port == CONTROL_PORT


@pytest.mark.parametrize("host", ["fl.example.org", "fe80::7"])
def test_nginx_accepts_its_configuration(tmp_path: Path, host: str) -> None:
    require_nginx()
    settings = SiteSettings(nodes=2, host=host, port=19443, control_port=CONTROL_PORT)
    site = write(tmp_path / "site", settings, experiment_for(2, [CANCER]))
    (site.proxy / "temp").mkdir()
    command = ["nginx", "-t", "-p", str(site.proxy), "-c", str(site.proxy / "nginx.conf"), "-e", "stderr"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Containers ----------------------------------------------------------------------------------------------------------


def test_a_build_reads_no_key_and_no_data(site: Site) -> None:
    read = {path.name for path in (site.path / "container").iterdir()}
    assert read == {"Dockerfile", "requirements-cpu.txt", "requirements-gpu.txt"}
    dockerfile = (site.path / "container" / "Dockerfile").read_text()
    assert re.findall(r"^USER (\S+)$", dockerfile, re.MULTILINE) == ["10001:10001"]
    assert re.findall(r"^COPY (?!--from=build)(.*) \./$", dockerfile, re.MULTILINE) == [
        "requirements-${VARIANT}.txt fedcdp-*.whl"
    ]
    assert "--require-hashes" in dockerfile


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_an_image_installs_the_projects_own_versions_by_hash(variant: str) -> None:
    pattern = re.compile(r"^([\w.-]+)==(\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)
    text = service_files.image_requirements(variant)
    found = {name: version for name, version, _ in pattern.findall(text)}
    assert len(found) == len(re.findall(r"^[\w.-]+==", text, re.MULTILINE)) > 70
    locked = {name: version for name, version, _ in pattern.findall((ROOT / "requirements-ci.txt").read_text())}
    assert {name: version.partition("+")[0] for name, version in found.items() if name in locked} == {
        name: version for name, version in locked.items() if name in found
    }
    assert ("+cpu" in found["torch"]) == (variant == "cpu")
    assert any(name.startswith("nvidia") for name in found) == (variant == "gpu")
    assert found.keys() >= {"flwr", "numpy", "dp-accounting", "opendp", "pyarrow"}


def test_containers_are_closed(site: Site) -> None:
    services = _compose(site)["services"]
    assert set(services) == {SERVER, f"{SERVER}-proxy", "fedcdp-node-1", "fedcdp-node-2"}
    for name, each in services.items():
        assert each["user"].startswith("${FEDCDP_USER"), name
        assert each["read_only"] is True
        assert each["cap_drop"] == ["ALL"]
        assert each["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "ports", "cap_add", "devices", "secrets", "pid", "ipc"} & each.keys()
        own, other = r"fedcdp:[0-9][\w.-]*-\$\{FEDCDP_VARIANT:-cpu\}", r"\$\{FEDCDP_PROXY_IMAGE:-nginx:[0-9][\w.-]*\}"
        assert re.fullmatch(f"{own}|{other}", each["image"]), each["image"]
        assert set(each.get("environment", {})) <= {"FEDCDP_SERVER"}
    assert services[f"{SERVER}-proxy"]["network_mode"] == f"service:{SERVER}"
    assert "network_mode" not in services[SERVER]


@pytest.mark.parametrize(("dataset", "closed"), [("cancer", True), ("mnist", False)])
def test_containers_reach_each_other_only_unless_they_download(tmp_path: Path, dataset: str, closed: bool) -> None:
    wanted = experiment_for(2, [{"data": {"dataset": dataset}}])
    files = ServiceFiles(
        site=Site(tmp_path),
        settings=SiteSettings(nodes=2, control_port=CONTROL_PORT),
        experiment=wanted,
        nodes=Site(tmp_path).nodes(2),
        ways=["compose"],
    )
    text = next(content for path, content, _ in files.files() if path.name == "compose.yaml")
    networks = yaml.safe_load(text).get("networks", {})
    assert networks == ({"default": {"internal": True}} if closed else {})


def test_images_of_others_can_be_pinned_in_one_place(site: Site) -> None:
    settings = dict(line.split("=") for line in (site.path / ".env").read_text().splitlines() if line[0] != "#")
    text = (site.path / "compose.yaml").read_text()
    for name in ("FEDCDP_BASE", "FEDCDP_PROXY_IMAGE"):
        assert f"${{{name}:-{settings[name]}}}" in text
    assert f"ARG BASE={settings['FEDCDP_BASE']}" in (site.path / "container" / "Dockerfile").read_text()


def test_what_containers_mount_exists_and_is_no_more_than_theirs(site: Site) -> None:
    for name, each in _compose(site)["services"].items():
        mounted = [volume.split(":") for volume in each["volumes"]]
        assert all((site.path / volume[0]).exists() for volume in mounted), name
        mounted_keys = {
            path.relative_to(site.path).as_posix()
            for volume in mounted
            for path in [site.path / volume[0], *(site.path / volume[0]).rglob("*")]
            if path.name in SECRET
        }
        number = name.removeprefix("fedcdp-node-")
        assert mounted_keys == ({f"node-{number}/node.key"} if number.isdigit() else {"server/server.key"}), name
        writable = {volume[0] for volume in mounted if volume[-1] != "ro"}
        if number.isdigit():  # not its key, its policy or its records
            assert writable == {f"./node-{number}/state", f"./node-{number}/flwr"}


def test_a_table_of_the_server_is_mounted_where_the_experiment_names_it(tmp_path: Path) -> None:
    table = tmp_path / "a $table.csv"
    table.write_text("age,label\n" + "".join(f"{age},{age % 2}\n" for age in range(40)))
    own = {"data": {"file": str(table), "label_column": "label"}, "plan": {"rounds": 1, "batch_size": 2}}
    settings = SiteSettings(nodes=2, control_port=CONTROL_PORT)
    site = write(tmp_path / "site", settings, experiment_for(2, [own]), ways=["compose"])
    wanted = f"{table}:{table}:ro".replace("$", "$$")
    assert wanted in _compose(site)["services"][SERVER]["volumes"]


def test_the_certificate_holds_for_the_servers_name_among_containers(site: Site) -> None:
    certificate = x509.load_pem_x509_certificate((site.server / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"fl.example.org", "localhost", SERVER}


def _compose_runs() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _compose_runs(), reason="docker compose is not installed")
def test_docker_compose_accepts_its_file(site: Site) -> None:
    done = subprocess.run(
        ["docker", "compose", "config", "--quiet"], cwd=site.path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# systemd -------------------------------------------------------------------------------------------------------------


def test_units_are_hardened_and_a_node_writes_its_ledger_only(site: Site) -> None:
    units = {path.stem: _unit(path) for path in (site.path / "systemd").iterdir()}
    assert set(units) == {SERVER, f"{SERVER}-proxy", "fedcdp-node-1", "fedcdp-node-2"}
    for name, unit in units.items():
        said = dict(unit)
        assert said["User"] == "fedcdp"
        assert (said["NoNewPrivileges"], said["ProtectSystem"], said["ProtectHome"]) == ("true", "strict", "true")
        assert (said["CapabilityBoundingSet"], said["UMask"]) == ("", "0077")
        script = said["ExecStart"].removeprefix("/srv/fedcdp/")
        assert stat.S_IMODE((site.path / script).stat().st_mode) == 0o755, name
    node = dict(units["fedcdp-node-1"])
    assert node["ReadWritePaths"] == "-/srv/fedcdp/node-1/state -/srv/fedcdp/node-1/flwr"
    assert node["Restart"] == "always"
    assert int(node["RestartSec"]) > 60  # sooner, Flower takes the node for one that is still connected
    server = dict(units[SERVER])
    assert (server["IPAddressDeny"], server["IPAddressAllow"]) == ("any", "localhost")


def test_a_port_below_1024_needs_one_capability(tmp_path: Path) -> None:
    settings = SiteSettings(nodes=1, port=443, control_port=CONTROL_PORT)
    site = write(tmp_path / "site", settings, experiment_for(1, [CANCER]), ways=["systemd"])
    for name, allowed in ((SERVER, ""), (f"{SERVER}-proxy", "CAP_NET_BIND_SERVICE")):
        assert dict(_unit(site.path / "systemd" / f"{name}.service"))["CapabilityBoundingSet"] == allowed


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_understands_the_units(site: Site, tmp_path: Path) -> None:
    (tmp_path / "units").mkdir()
    for path in (site.path / "systemd").iterdir():
        (tmp_path / "units" / path.name).write_text(path.read_text().replace("/srv/fedcdp", str(site.path)))
    units = sorted(map(str, (tmp_path / "units").iterdir()))
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", *units]  # 2.0 of 10
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# Kubernetes ----------------------------------------------------------------------------------------------------------


def test_pods_are_closed(site: Site) -> None:
    for name, pod in _pods(site).items():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for each in [*pod["containers"], *pod.get("initContainers", [])]:
            context = each["securityContext"]
            assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in each["resources"]["limits"]
            assert re.fullmatch(r"[a-z]+:[0-9][\w.-]*", each["image"]), each["image"]
            assert "env" not in each
            assert "livenessProbe" in each or each in pod.get("initContainers", [])


def test_pods_mount_volumes_that_exist_and_scripts_that_can_be_run(site: Site) -> None:
    for name, pod in _pods(site).items():
        claimed = {"place"} if name != SERVER else set()
        volumes = {volume["name"] for volume in pod["volumes"]} | claimed
        for each in [*pod["containers"], *pod.get("initContainers", [])]:
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes, name
            script = each["command"][0]
            if script.startswith("/"):
                assert script in {mount["mountPath"] for mount in each["volumeMounts"]}
        modes = {v["name"]: next(iter(v.values())) for v in pod["volumes"]}
        assert modes.keys() == volumes - claimed
    server = _kubernetes(site.path / "kubernetes" / "server.yaml")
    assert server["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    assert server["NetworkPolicy"]["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": "nodes"}]}]
    node = _kubernetes(site.node(1).path / "kubernetes.yaml")
    assert "ingress" not in node["NetworkPolicy"]["spec"], "nobody reaches a node"
    assert node["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    (allowed,) = node["NetworkPolicy"]["spec"]["egress"]
    assert [each["port"] for each in allowed["ports"]] == [53, 53, 9443]
    assert node["ConfigMap"]["data"]["start-node-1.sh"] == (site.path / "start-node-1.sh").read_text()


def test_a_kustomization_names_files_that_exist_and_secrets_as_secrets(site: Site) -> None:
    for folder in (site.path, *(node.path for node in site.nodes(2))):
        wanted = yaml.safe_load((folder / "kustomization.yaml").read_text())
        public = [file for each in wanted.get("configMapGenerator", []) for file in each["files"]]
        secret = [file for each in wanted["secretGenerator"] for file in each["files"]]
        for file in [*wanted["resources"], *public, *secret]:
            assert (folder / file.partition("=")[2]).is_file() if "=" in file else (folder / file).is_file(), file
        assert not any(Path(file.rpartition("=")[2]).name in (*SECRET, "policy.toml", "node.toml") for file in public)
        assert {Path(file).name for file in secret} & set(SECRET)
        assert all("newTag" in image for image in wanted["images"])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_the_manifests(site: Site) -> None:
    for folder, expected in ((site.path, "Deployment"), (site.node(2).path, "StatefulSet")):
        done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        built = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
        containers = built[expected]["spec"]["template"]["spec"]["containers"]
        assert containers[0]["image"].startswith("registry.example.org/fedcdp:")
        assert built["Secret"]["metadata"]["name"] in str(built[expected])


# Signed apps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [False, True])
def test_a_node_asks_for_signatures_if_its_owner_lists_keys(tmp_path: Path, listed: bool) -> None:
    site = write(tmp_path / "site", SiteSettings(nodes=1), experiment_for(1, [CANCER]))
    if listed:
        (site.node(1).path / "trusted.yaml").write_text("fpk_1: ssh-ed25519 AAAA")
    programs = tmp_path / "programs"
    programs.mkdir()
    told = 'printf "%s\\n" "$@"'
    kept = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'  # checks nothing
    (programs / "fedcdp").write_text(f'#!/bin/sh\nif [ "$2" = keep ]; then {kept}; fi\n{told}\n')
    (programs / "fedcdp").chmod(0o755)
    done = subprocess.run(
        [str(site.path / "start-node-1.sh")],
        env={"PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    own, passed_on = done.stdout.split("--\n")
    assert own.split() == ["deploy", "node", "--port", "9101", "--poll", "0.25"]
    words = passed_on.splitlines()
    assert words[:2] == (["--trusted-entities", "trusted.yaml"] if listed else ["--superlink", "127.0.0.1:9443"])
    assert words[-1] == "node.toml"


# The options ---------------------------------------------------------------------------------------------------------


def test_without_a_way_nothing_is_added(tmp_path: Path) -> None:
    site = write(tmp_path / "site", SiteSettings(nodes=1), experiment_for(1, [CANCER]))
    added = {"proxy", "container", "systemd", "kubernetes", "compose.yaml", ".env", "start-proxy.sh", "run"}
    assert not added & {path.name for path in site.path.iterdir()}


def test_secrets_stay_their_owners_only(site: Site) -> None:
    for path in site.path.rglob("*"):
        if path.name in (*SECRET, "policy.toml", "node.toml"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        elif path.is_file() and path.read_bytes().find(b"PRIVATE KEY") >= 0:
            raise AssertionError(f"{path} holds a key")
        elif path.name in ("state", "flwr") and path.parent.name.startswith("node-"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("proxy", "ways", "given", "port"),
    [(None, [], None, 0), ("nginx", [], None, 9442), (None, ["systemd"], None, 9442), ("nginx", [], 9000, 9000)],
)
def test_a_way_or_a_proxy_closes_the_servers_port(proxy: str | None, ways: list[str], given: int | None, port: int) -> None:
    assert control_port_for(proxy, ways, given) == port


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--for", "swarm"), "for: 'swarm' is not allowed; it must be compose, systemd or kubernetes"),
        (("--proxy", "caddy"), "proxy: 'caddy' is not allowed; it must be nginx"),
        (("--control-port", "9000"), "control_port: 9000 is not allowed without --proxy nginx or --for"),
        (("--proxy", "nginx", "--control-port", "0"), "control_port: 0 is not allowed; it must be at least 1"),
        (("--proxy", "nginx", "--port", "9442"), "control_port: 9442 is the port of the proxy; choose another one"),
    ],
)
def test_bad_options_are_one_line(cli: Cli, options: tuple[str, ...], said: str) -> None:
    outcome = cli("deploy", "init", "site", "--dataset", "cancer", *options)
    assert outcome.status == 2
    assert outcome.stderr.count("\n") == 1
    assert said in outcome.stderr
    assert not Path("site").exists()


def test_a_folder_for_a_run_is_no_run_to_resume(cli: Cli, site: Site) -> None:
    assert list(site.run.iterdir()) == []
    outcome = cli("deploy", "up", site.path, "--resume")
    assert outcome.status == 2
    assert "no run to resume" in outcome.stderr


def test_service_files_without_a_proxy_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="control_port: 0 is not allowed for compose"):
        write(tmp_path / "site", SiteSettings(nodes=1), experiment_for(1, [CANCER]), ways=["compose"])
