"""The demo: real runs and attacks that resume after any stop, settings as fair as stated, and nothing destroyed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedcdp.accounting.calibrate import Target
from fedcdp.errors import RunError
from fedcdp.report.facts import mechanism_of
from fedcdp.studies.demo import ATTACKS, METHODS, Demo
from fedcdp.training.prepared import Prepared, deal_out, load_splits, network_of, population_of
from fedcdp.training.saved_run import open_run
from fedcdp.training.simulate import simulate
from tests.support.small_demo import FEWER, SILENT, SMALLER


def times(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_the_demo_leaves_ordinary_runs_with_their_attacks(demo_directory: Path) -> None:
    told = json.loads((demo_directory / "demo.json").read_text())
    assert told["finished"] is True
    assert [row["method"] for row in told["table"]] == ["nonprivate", "fed-sdp", "fed-cdp", "fed-cdp-decay"]
    for row in told["table"]:
        run = demo_directory / row["method"]
        assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"] == row["accuracy"]
        assert {path.name for path in (run / "attacks").iterdir()} == {"type2-clip-aware", "type1-batch", "type0-batch"}
    assert open_run(run).evaluate()["accuracy"] == row["accuracy"]


def test_all_methods_are_attacked_on_the_same_examples(demo_directory: Path) -> None:
    originals = []
    for path in sorted(demo_directory.glob("*/attacks/type2-clip-aware/reconstructions.npz")):
        with np.load(path) as stored:
            originals.append(stored["original"])
    assert len(originals) == 4
    assert all(np.array_equal(originals[0], each) for each in originals)


def test_a_finished_demo_is_shown_again_and_not_computed_again(demo_directory: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(demo_directory, tmp_path / "demo"))
    before = times(out)
    Demo(out, SMALLER, FEWER).run(SILENT)
    after = times(out)
    assert {name for name in after if after[name] != before.get(name)} == {"demo.json"}
    assert (out / "demo.json").read_text() == (demo_directory / "demo.json").read_text()


@pytest.mark.slow
def test_a_demo_that_was_killed_anywhere_goes_on_to_the_same_end(demo_directory: Path, tmp_path: Path) -> None:
    """One run half trained, another's attack torn, a third not begun."""
    out = Path(shutil.copytree(demo_directory, tmp_path / "demo"))
    shutil.rmtree(out / "fed-cdp-decay")
    shutil.rmtree(out / "fed-cdp" / "attacks")
    (out / "fed-cdp" / "model.safetensors").unlink()
    (out / "nonprivate" / "attacks" / "type0-batch" / "summary.json").unlink()
    (out / "demo.json").write_text('{"finished": false}')
    assert not Demo(out, SMALLER, FEWER).finished
    Demo(out, SMALLER, FEWER).run(SILENT)
    assert (out / "demo.json").read_text() == (demo_directory / "demo.json").read_text()


@pytest.mark.parametrize("content", ["config.toml", "letter.txt"])
def test_a_directory_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / content).write_text("mine")
    with pytest.raises(RunError, match="holds something other than a demo"):
        Demo(tmp_path, SMALLER, FEWER).run(SILENT)
    assert {path.name for path in tmp_path.iterdir()} == {content}


def test_a_demo_of_other_settings_is_left_alone(demo_directory: Path) -> None:
    before = times(demo_directory)
    with pytest.raises(RunError, match="a demo with other settings"):
        Demo(demo_directory, SMALLER | {"plan": SMALLER["plan"] | {"rounds": 4}}, FEWER).run(SILENT)
    assert times(demo_directory) == before


def test_a_demo_with_other_settings_is_refused_before_anything_is_written(demo_directory: Path, tmp_path: Path) -> None:
    """Such as a finished demo of an earlier version: the last of its runs differs."""
    out = Path(shutil.copytree(demo_directory, tmp_path / "demo"))
    config = out / "fed-cdp-decay" / "config.toml"
    config.write_text(config.read_text().replace('network = "oriented-gradients"', 'network = "small"'))
    before = times(out)
    with pytest.raises(RunError, match="a demo with other settings"):
        Demo(out, SMALLER, FEWER).check()
    assert times(out) == before


def test_attacks_are_on_a_network_that_learns_its_own_features(demo_directory: Path) -> None:
    story = Demo(demo_directory, SMALLER, FEWER)
    for method in METHODS:
        trained, attacked = story.experiment(method), story.attacked(method)
        assert (trained.model.network, attacked.model.network) == ("oriented-gradients", "small")
        same = {"per_round": trained.plan.per_round}
        assert attacked.plan.but(**same) == trained.plan
        for path in (demo_directory / method / "attacks").glob("*/summary.json"):
            summary = json.loads(path.read_text())
            assert (summary["network"], summary["round"]) == ("small", 0)
            assert summary["plan"] == mechanism_of(trained.plan)


@pytest.mark.parametrize("method", ["fed-sdp", "fed-cdp", "fed-cdp-decay"])
def test_epsilon_is_the_same_for_the_trained_and_the_attacked_network(method: str) -> None:
    experiment = Demo(Path("unused")).experiment(method)
    splits = load_splits(experiment, quiet=True)
    trained = Prepared.of(network_of(experiment, splits), deal_out(experiment, splits), experiment.plan)
    attacked = replace(experiment, model=replace(experiment.model, network="small"))
    other = Prepared.of(network_of(attacked, splits), deal_out(attacked, splits), experiment.plan)
    assert trained.population == other.population


@pytest.mark.parametrize(
    ("method", "target"),
    [("fed-sdp", Target(3, "model", "client")), ("fed-cdp", Target(3)), ("fed-cdp-decay", Target(3))],
)
def test_every_private_method_has_an_epsilon_of_three_for_its_unit(method: str, target: Target) -> None:
    experiment = Demo(Path("unused")).experiment(method)
    assert 2.99 < target.reached(experiment.plan, population_of(experiment)) <= 3


@pytest.mark.slow
def test_private_accuracy_is_close_to_that_without_privacy() -> None:
    story = Demo(Path("unused"))
    splits = load_splits(story.experiment("nonprivate"), quiet=True)
    reached = {}
    for method in METHODS:
        experiment = story.experiment(method)
        federation, plan = deal_out(experiment, splits), experiment.plan
        reached[method] = simulate(network_of(experiment, splits), federation, plan, evaluate_every=plan.rounds).accuracy
    assert reached["nonprivate"] is not None
    assert all((reached[method] or 0) >= reached["nonprivate"] - 0.03 for method in METHODS)


def test_every_reader_attacks_in_the_whole_demo() -> None:
    for noised_only in (False, True):
        assert [each.leak for each in ATTACKS if each.noised_only == noised_only] == ["type2", "type1", "type0"]


def test_what_type_1_and_type_0_read_alike_is_attacked_once_and_told_of_both(demo_directory: Path) -> None:
    for method in ("nonprivate", "fed-cdp"):
        found = [json.loads((demo_directory / method / "attacks" / f"{leak}-batch" / "summary.json").read_text())
                 for leak in ("type1", "type0")]  # fmt: skip
        assert [each["leak"] for each in found] == ["type1", "type0"]
        assert found[0]["distance_mean"] == found[1]["distance_mean"]
