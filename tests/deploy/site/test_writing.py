"""`fedcdp deploy init`: complete, safe to leave lying around, and never over something that is there."""

from __future__ import annotations

import stat
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

pytest.importorskip("cryptography")
pytest.importorskip("flwr")

from fedcdp.config.experiment import Experiment, assemble, read_toml
from fedcdp.deploy.protocol.policy import ClientPolicy, effective_noise
from fedcdp.deploy.protocol.strategy import Job, deployed
from fedcdp.deploy.site.directory import Site, SiteSettings
from fedcdp.deploy.site.writer import experiment_for, node_script, render, server_scripts, write
from fedcdp.errors import DeploymentError, PlanError
from fedcdp.training.prepared import build_network, deal_out, load_splits

CANCER = {"data": {"dataset": "cancer"}, "plan": {"rounds": 3, "local_steps": 2}}
SECRETS = ("ca.key", "server.key", "node.key", "node.toml", "policy.toml")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return write(tmp_path / "site", SiteSettings(nodes=2), experiment_for(2, [CANCER]))


def test_the_directory_gives_back_what_was_written(site: Site) -> None:
    assert site.require() == SiteSettings(nodes=2)
    experiment = assemble(read_toml(site.experiment))
    assert (experiment.data.clients, experiment.plan.per_round, experiment.plan.rounds) == (2, 2, 3)
    assert experiment.plan.secure_noise


def test_secrets_are_their_owners_only_and_programs_can_be_run(site: Site) -> None:
    found = 0
    for path in site.path.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.name in SECRETS:
            found += 1
            assert mode == 0o600, path
        elif path.suffix == ".sh":
            assert mode == 0o755, path
    assert found == 2 + 2 * 3


def test_the_app_holds_no_secret(site: Site) -> None:
    sent = b"".join(path.read_bytes() for path in site.app.rglob("*") if path.is_file())
    assert b"PRIVATE" not in sent
    assert str(site.path).encode() not in sent
    app = tomllib.loads(sent.decode())["tool"]["flwr"]["app"]
    assert app["config"]["reproducible"] is False
    assert app["components"] == {"serverapp": "fedcdp.flower.app:server", "clientapp": "fedcdp.flower.app:client"}


def test_each_node_has_a_part_of_its_own(site: Site) -> None:
    for node in site.nodes(2):
        assert tomllib.loads(node.config.read_text())["partition-id"] == node.number - 1


def test_of_a_file_each_node_gets_its_own_part(tmp_path: Path) -> None:
    inputs = np.arange(40, dtype=np.float32)[:, None].repeat(3, axis=1)
    np.savez(tmp_path / "all.npz", x=inputs, y=np.arange(40) % 2)
    own = {"data": {"file": str(tmp_path / "all.npz")}, "plan": {"rounds": 1, "batch_size": 2}}
    experiment = experiment_for(2, [own])
    site = write(tmp_path / "site", SiteSettings(nodes=2), experiment)
    federation = deal_out(experiment, load_splits(experiment))
    held = [np.load(node.records()) for node in site.nodes(2)]
    assert [len(part["x"]) for part in held] == [16, 16]
    assert not set(held[0]["x"][:, 0]) & set(held[1]["x"][:, 0])
    for number, part in enumerate(held):
        assert np.array_equal(part["x"], federation.train.inputs.numpy()[federation.indices(number)])
    assert stat.S_IMODE(site.node(1).records().stat().st_mode) == 0o600
    assert tomllib.loads(site.node(1).config.read_text())["data"] == "records.npz"
    with pytest.raises(DeploymentError, match="several nodes"):
        write(tmp_path / "copies", SiteSettings(nodes=2), experiment_for(2, [own, {"data": {"partition": "full"}}]))


def test_the_scripts_are_sound_and_ask_for_tls_and_node_authentication(site: Site) -> None:
    for script in site.path.glob("*.sh"):
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
        assert "--insecure" not in script.read_text()
        assert "FLWR_TELEMETRY_ENABLED=0" in script.read_text()
    server, node = ((site.path / name).read_text() for name in ("start-superlink.sh", "start-node-1.sh"))
    assert "--enable-supernode-auth" in server
    assert "--disable-runtime-dependency-installation" in server
    assert "--root-certificates" in node
    assert "--auth-supernode-private-key" in node


@pytest.mark.parametrize("host", ["fl.example.org", "10.0.0.7", "::1", "fe80::1%eth0"])
def test_a_shell_reads_the_address_as_it_is(host: str) -> None:
    settings = SiteSettings(host=host, port=9999)
    for script in (node_script(settings, 1), server_scripts(settings)["run.sh"]):
        line = next(each for each in script.splitlines() if each.startswith("server="))
        said = subprocess.run(
            ["bash", "-c", f'{line}; printf %s "$server"'], env={}, capture_output=True, check=True, text=True
        )
        assert said.stdout == settings.address


@pytest.mark.parametrize("value", ["$(id)", "`id`", 'a"; id; "', "a}; id; {", "a\\", "a\nid"])
def test_no_script_takes_what_a_shell_obeys_within_quotes(value: str) -> None:
    with pytest.raises(DeploymentError, match="cannot be written into a script"):
        render("start-node.sh", settings=SimpleNamespace(address=value), number=1, folder="node-1", runtime_port=9101)


def test_a_template_needs_all_its_values() -> None:
    with pytest.raises(UndefinedError, match="connection"):
        render("run.sh", settings=SiteSettings())


@given(dataset=st.text(st.characters(codec="utf-8")), alpha=st.floats(allow_nan=False), records=st.integers())
def test_any_value_comes_back_from_a_nodes_configuration(dataset: str, alpha: float, records: int) -> None:
    part = {"dataset": dataset, "alpha": alpha, "records": records}
    read = tomllib.loads(render("node.toml", own_records=False, part=part, sums=False))
    assert read == {"policy": "policy.toml", "state-dir": "state"} | part


def test_a_policy_grants_what_the_plan_costs_or_what_is_said(tmp_path: Path) -> None:
    plan = experiment_for(2, [CANCER])
    granted = {}
    for epsilon in (None, 0.5, 1.23456789):
        written = write(tmp_path / str(epsilon), SiteSettings(nodes=2), plan, epsilon)
        policy = tomllib.loads(written.node(1).policy.read_text())
        assert policy["methods"] == ["fed-cdp"]
        granted[epsilon] = policy["epsilon"]
    assert 0 < granted.pop(None) < 100
    assert all(written == said for said, written in granted.items())


def test_the_client_reads_its_policy_as_it_was_written(site: Site) -> None:
    policy = ClientPolicy.read(site.node(2).policy)
    assert policy.methods == ("fed-cdp",)
    assert policy.smallest_noise_multiplier == 6
    assert not policy.allow_reproducible


def test_a_plan_without_privacy_gets_a_policy_that_says_so(tmp_path: Path) -> None:
    open_plan = experiment_for(2, [CANCER, {"plan": {"method": "nonprivate"}}])
    written = write(tmp_path / "site", SiteSettings(nodes=2), open_plan).node(1).policy.read_text()
    assert tomllib.loads(written)["epsilon"] == float("inf")
    assert "no limit, and no guarantee" in written


def test_a_directory_with_content_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(DeploymentError, match="not empty"):
        write(tmp_path, SiteSettings(), experiment_for(2, [CANCER]))
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_an_empty_directory_is_used_and_a_file_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert write(tmp_path / "empty", SiteSettings(), experiment_for(2, [CANCER])).require().nodes == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(DeploymentError, match="is a file"):
        write(tmp_path / "file", SiteSettings(), experiment_for(2, [CANCER]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": {"clients": 5}}, "clients: 5 is not the number of nodes, 2"),
        ({"plan": {"per_round": 3}}, "per_round: 3"),
        ({"plan": {"secure_aggregation": True, "noise": "example"}}, "secure_aggregation"),
        ({"plan": {"secure_aggregation": True, "local_steps": 2}}, "noise: sum needs one local step"),
    ],
)
def test_what_cannot_be_deployed_is_said_in_a_sentence(
    tmp_path: Path, given: dict[str, dict[str, object]], said: str
) -> None:
    with pytest.raises((DeploymentError, PlanError), match=said):
        write(tmp_path / "site", SiteSettings(), experiment_for(2, [CANCER, given]))
    assert list((tmp_path / "site").glob("*")) == []


@pytest.mark.parametrize("bad", [{"nodes": 0}, {"port": 70000}, {"host": ""}, {"host": 'a"; rm -rf /'}, {"host": "$(id)"}])
def test_settings_that_cannot_be_meant_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(DeploymentError, match=next(iter(bad))):
        SiteSettings(**bad)  # type: ignore[arg-type]


def test_a_directory_that_is_no_deployment_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=r"no deployment\.toml"):
        Site(tmp_path).require()
    (tmp_path / "deployment.toml").write_text("nodes = ")
    with pytest.raises(DeploymentError, match="not a TOML file"):
        Site(tmp_path).require()
    (tmp_path / "deployment.toml").write_text("nodez = 3")
    with pytest.raises(DeploymentError, match="nodez"):
        Site(tmp_path).require()


@pytest.mark.parametrize(
    "plan",
    [{"noise_multiplier": 0.681234567}, {"noise_multiplier": 1 / 3}, {"noise": "cohort"}, {"clip": "linear(2, 6)",
     "noise_follows_clip": False}, {"clip": "quantile(0.5, 4)"}, {"method": "fed-cdp-decay", "noise_follows_clip": False}],
)  # fmt: skip
def test_the_policy_accepts_the_noise_of_the_plan_that_it_was_written_for(plan: dict[str, object], tmp_path: Path) -> None:
    """A number that was rounded up would refuse it; σ, where a round or a sum has less, too."""
    given = {"data": {"dataset": "cancer"}, "plan": {"rounds": 3, "local_steps": 2} | plan}
    experiment = experiment_for(2, [given])
    site = write(tmp_path / "site", SiteSettings(nodes=2), experiment)
    policy = ClientPolicy.read(site.node(1).policy)
    task = Job(plan=deployed(experiment.plan, False), network=build_network(experiment, (30,), 2), network_name="mlp",
               shape=(30,), classes=2, clients=2).task()  # fmt: skip
    assert policy.smallest_noise_multiplier == effective_noise(experiment.plan) > 0
    assert policy.objection(task) is None
    assert "is below" in str(policy.objection(replace(task, plan=task.plan.but(noise_multiplier=0.9 * _sigma(experiment)))))


def _sigma(experiment: Experiment) -> float:
    return experiment.plan.noise_multiplier
