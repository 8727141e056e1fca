"""Keys for secure sums: what `fedcdp deploy init` writes, and a new key made on its node."""

from __future__ import annotations

import json
import stat
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("cryptography")
pytest.importorskip("flwr")

from fedcdp.accounting.statement import state
from fedcdp.cli.deploy import app
from fedcdp.config.default_recipe import plan_settings
from fedcdp.config.experiment import assemble, read_toml
from fedcdp.deploy.protocol.known_nodes import KnownNodes, node_key_of, read_identity, read_public_key
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.deploy.site import node_keys
from fedcdp.deploy.site.directory import Site, SiteSettings
from fedcdp.deploy.site.node_keys import rekey
from fedcdp.deploy.site.writer import experiment_for, write
from fedcdp.errors import DeploymentError
from fedcdp.training.prepared import population_of

SUM = {"data": {"dataset": "cancer"}, "plan": {"rounds": 3, "secure_aggregation": True}}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return write(tmp_path / "site", SiteSettings(nodes=3), experiment_for(3, [SUM]))


def test_a_site_for_secure_sums_is_marked_as_a_test(site: Site) -> None:
    plan = assemble(read_toml(site.experiment)).plan
    assert (plan.noise, plan.local_steps, plan.attempts, plan.colluders) == ("sum", 1, 2, 1)
    app = tomllib.loads((site.app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["config"]["min-cohort"] == 3
    keys = {node_key_of(read_identity(node.key).public_key()) for node in site.nodes(3)}
    for node in site.nodes(3):
        known = KnownNodes.read(node.known)
        assert known.nodes.keys() == keys
        assert {each.made_by for each in known.nodes.values()} == {"operator"}
        policy = ClientPolicy.read(node.policy)
        assert (policy.trust_operator_keys, policy.colluders, policy.smallest_honest) == (True, 1, 2)
        assert "FOR TESTS ONLY" in node.policy.read_text()
        config = tomllib.loads(node.config.read_text())
        assert (config["identity"], config["roster"]) == ("node.key", "roster.toml")
    assert "trust_operator_keys" in (site.path / "README.md").read_text()


def test_a_site_without_a_plan_uses_the_recipe_for_sums(tmp_path: Path) -> None:
    given = ["--nodes", "5", "--dataset", "cancer", "--secure-aggregation", "--target-epsilon", "4"]
    told = CliRunner().invoke(app, ["init", str(tmp_path / "site"), *given])
    assert told.exit_code == 0, told.output
    said = " ".join(told.output.split())
    assert "No plan given: using the recommended recipe for ε = 4 against the server" in said
    assert "on the sum of all clients, at most 1 colluder" in said
    written = assemble(read_toml(Site(tmp_path / "site").experiment))
    plan, population = written.plan, population_of(written)
    recipe = plan_settings(5, sums=True) | {"clip": plan.clip, "attempts": 2, "batch_size": population.records}
    assert {name: getattr(plan, name) for name in recipe} == recipe
    assert 3.99 < state(plan, population).row("server").epsilon <= 4
    policy = ClientPolicy.read(Site(tmp_path / "site").node(1).policy)
    assert policy.epsilon > 4, "with room for rounds that are tried again"


def test_a_chosen_plan_keeps_its_noise_on_the_sum() -> None:
    chosen = experiment_for(3, [SUM, {"plan": {"noise_multiplier": 2.0}}]).plan
    assert (chosen.noise, chosen.local_steps, chosen.clip_mode, chosen.colluders) == ("sum", 1, "flat", 1)
    assert (chosen.noise_multiplier, chosen.server_optimizer, chosen.rounds) == (2.0, "sgd", 3)


def test_other_sites_have_none_of_it(tmp_path: Path) -> None:
    site = write(tmp_path / "site", SiteSettings(nodes=2), experiment_for(2, [{"data": {"dataset": "cancer"}}]))
    node = site.node(1)
    assert not node.known.exists()
    assert "colluders" not in node.policy.read_text()
    assert "identity" not in node.config.read_text()


def own_entry(site: Site) -> tuple[bytes, str]:
    """The key of node 1, and who made it by its own list."""
    node = site.node(1)
    key = node_key_of(read_identity(node.key).public_key())
    return key, KnownNodes.read(node.known).nodes[key].made_by


def test_a_new_key_is_the_owners_and_deletes_run_keys(site: Site) -> None:
    node, before = site.node(1), own_entry(site)
    node.state.mkdir()
    (node.state / "sum-0.key").write_bytes(bytes(32))
    new = rekey(node.path)
    key, made_by = own_entry(site)
    assert (key != before[0], made_by) == (True, "owner")
    assert read_public_key(node.public_key.read_text()) == read_public_key(new.public) == key
    assert stat.S_IMODE(node.key.stat().st_mode) == 0o600
    assert not list(node.state.glob("sum-*"))
    others = {each.made_by for known, each in KnownNodes.read(node.known).nodes.items() if known != key}
    assert others == {"operator"}


def test_run_keys_are_deleted_where_the_node_keeps_them(site: Site, tmp_path: Path) -> None:
    """Otherwise the new key signs the run key of the old one, which a thief of the state directory has."""
    node, state = site.node(1), tmp_path / "elsewhere"
    state.mkdir()
    node.config.write_text(node.config.read_text().replace('state-dir = "state"', f'state-dir = "{state}"'))
    (state / "sum-0.key").write_bytes(bytes(32))
    rekey(node.path)
    assert not list(state.iterdir())


@pytest.mark.parametrize("written", [0, 1, 2])
def test_after_a_crash_it_can_be_repeated(written: int, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    real, done = node_keys.write_atomically, []

    class Crash(BaseException): ...

    def crashing(*args: object) -> None:
        if len(done) == written:
            raise Crash
        done.append(args)
        real(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(node_keys, "write_atomically", crashing)
        with pytest.raises(Crash):
            rekey(site.node(1).path)
    rekey(site.node(1).path)
    assert own_entry(site)[1] == "owner"
    assert len(KnownNodes.read(site.node(1).known).nodes) == 3


def test_the_command_says_what_must_be_exchanged(site: Site) -> None:
    runner = CliRunner()
    told = runner.invoke(app, ["rekey", str(site.node(1).path)])
    assert told.exit_code == 0
    for part in ("SHA256:", "ecdsa-sha2-nistp384 ", "Register node.pub", "roster.toml", "by telephone or face to face"):
        assert part in told.stdout
    answer = json.loads(runner.invoke(app, ["rekey", str(site.node(1).path), "--json"]).stdout)
    assert answer["public"] == site.node(1).public_key.read_text().strip()


def test_status_shows_attempts_and_rosters(site: Site) -> None:
    from fedcdp.accounting.ledger import Ledger
    from fedcdp.accounting.population import Population
    from fedcdp.training.rundir import RunDirectory

    runner = CliRunner()
    RunDirectory(site.run).create(site.experiment.read_text())
    plan = assemble(read_toml(site.experiment)).plan
    ledger = Ledger.of_run(site.run / "ledger.jsonl", plan, Population(3, 20, 1, 1), "secure", 0)
    for members in ([0, 1, 2], [0, 2]):
        ledger.charge(0, members, 4.0)
    told = runner.invoke(app, ["status", str(site.path)], catch_exceptions=False).output
    assert "2 in 1 rounds" in told
    assert "2 to 3 clients" in told
    assert "clients 1, 3" in told
    answer = json.loads(runner.invoke(app, ["status", str(site.path), "--json"]).stdout)
    assert answer["attempts"][-1] == {"round": 1, "attempt": 2, "members": [0, 2]}


def test_a_directory_that_is_no_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="is not the directory of a node"):
        rekey(tmp_path)
