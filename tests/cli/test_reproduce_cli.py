"""`fedcdp reproduce`, with small tables on data that are always at hand."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from fedcdp.cli import reproduce
from fedcdp.studies.reproduce import catalogue, runner
from fedcdp.studies.reproduce.catalogue import Place
from fedcdp.studies.reproduce.markdown import shown

TINY = """
title = "Tiny"
layout = "accuracy"

[every]
data = { dataset = "cancer", clients = 8 }
plan = { per_round = 4, rounds = 2, local_steps = 2 }

[axes.method]
nonprivate = { plan.method = "nonprivate" }
fed-cdp = { plan.method = "fed-cdp" }

[axes.steps]
L1 = { plan.local_steps = 1 }
L2 = { plan.local_steps = 2 }

[variants.measured]
rows = ["nonprivate/*"]
rates = [0.05, 0.1]
tuning_share = 1.0

[variants.cohort]
rows = ["fed-cdp/*"]
plan.noise = "cohort"

[variants.example]
rows = ["fed-cdp/*"]
plan.noise = "example"
splits = 2

[printed]
"fed-cdp/*" = [0.9, 0.95]
"""


@pytest.fixture
def tiny(workplace: Path) -> Path:
    """A table of six cells that take no time."""
    (workplace / "tiny.toml").write_text(TINY)
    return workplace / "tiny.toml"


def content(path: Path) -> dict[str, Any]:
    """A result file; fails on NaN and infinity, which JSON does not have."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    read: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return read


def table_lines(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_tables_are_listed_and_so_are_the_cells_of_one(cli) -> None:
    listed = cli("reproduce", "--list")
    assert listed.status == 0
    for name in ("epsilon", "population", "clip", "noise", "time", "attacks", "compression", "gradient-norm", "tradeoff"):
        assert any(line.startswith(f"{name} ") for line in listed.stdout.splitlines())
    cells = cli("reproduce", "population", "--list").stdout.splitlines()
    assert len(cells) == 108
    assert cells[0].split() == ["nonprivate/K100-Kt5/measured", "not", "run"]


@pytest.mark.slow
def test_a_table_is_run_and_the_markdown_is_what_the_json_says(cli, tiny: Path) -> None:
    done = cli("reproduce", tiny, "--workers", 1, "--out", "out")
    assert (done.status, done.stdout.strip()) == (0, "out/tiny.md")
    found = content(Path("out/tiny.json"))
    assert len(found["cells"]) == 6
    assert not Path("out/running").exists()
    expected = []
    for section in found["sections"]:
        expected.append([heading for _, heading, _ in section["columns"]])
        expected += [[shown(row[key], form) for key, _, form in section["columns"]] for row in section["rows"]]
    assert table_lines(Path("out/tiny.md").read_text()) == expected
    row = found["sections"][1]["rows"][0]
    cell = found["cells"]["fed-cdp/L1/example"]
    assert row["paper"] == 0.9
    assert row["example"] == cell["accuracy"] == pytest.approx(sum(cell["accuracies"]) / 2)
    assert row["example difference"] == pytest.approx(cell["accuracy"] - 0.9)
    assert row["example epsilon"][0] == cell["epsilon"]["server/record"] > 0
    assert found["cells"]["fed-cdp/L1/cohort"]["epsilon"]["example/record"] == "inf"
    tried = found["cells"]["nonprivate/L2/measured"]
    assert tried["rates_tried"].keys() >= {"0.05", "0.1"}
    assert tried["rate"] < max(map(float, tried["rates_tried"]))  # a larger one was worse
    assert tried["rates_tried"][f"{tried['rate']}"] == max(tried["rates_tried"].values())
    assert tried["epsilon"] is None


def test_what_is_measured_is_not_measured_again(cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("reproduce", tiny, "--cells", "fed-cdp/L1", "--workers", 1, "--out", "out").status == 0
    before = content(Path("out/tiny.json"))["cells"]
    assert list(before) == ["fed-cdp/L1/cohort", "fed-cdp/L1/example"]
    begun: list[str] = []
    measure = runner.measure

    def noted(table: str, cell: Any, place: Any) -> dict[str, Any]:
        begun.append(cell.name)
        return measure(table, cell, place)

    monkeypatch.setattr(runner, "measure", noted)
    assert cli("reproduce", tiny, "--cells", "fed-cdp", "--workers", 1, "--out", "out").status == 0
    assert sorted(begun) == ["fed-cdp/L2/cohort", "fed-cdp/L2/example"]
    after = content(Path("out/tiny.json"))["cells"]
    assert {name: after[name] for name in before} == before
    listed = cli("reproduce", tiny, "--out", "out", "--list").stdout
    assert listed.count("not run") == 2


def test_cells_of_older_code_are_told_apart_and_measured_again_on_request(cli, tiny: Path) -> None:
    usual = ("reproduce", tiny, "--cells", "fed-cdp/L1", "--workers", 1, "--out", "out")
    assert cli(*usual, "--commit", "first").status == 0
    found = content(Path("out/tiny.json"))
    found["cells"]["fed-cdp/L1/cohort"]["code"] = "older"
    Path("out/tiny.json").write_text(json.dumps(found))
    listed = cli("reproduce", tiny, "--out", "out", "--list").stdout.splitlines()
    assert [line.endswith("on older code") for line in listed if "fed-cdp/L1" in line] == [True, False]
    for more, commits in (((), ["first", "first"]), (("--again",), ["second", "first"])):
        assert cli(*usual, *more, "--commit", "second").status == 0
        assert [row["commit"] for row in content(Path("out/tiny.json"))["cells"].values()] == commits


def test_a_cell_of_other_settings_does_not_count(cli, tiny: Path) -> None:
    assert cli("reproduce", tiny, "--cells", "nonprivate/L1", "--workers", 1, "--out", "out").status == 0
    tiny.write_text(TINY.replace("rates = [0.05, 0.1]", "rates = [0.2]"))
    told = cli("reproduce", tiny, "--table-only", "--out", "out")
    assert told.status == 0
    assert "measured with other settings" in told.stderr
    apart = content(Path("out/tiny.json"))
    assert apart["cells"] == {}
    assert list(apart["other_settings"]) == ["nonprivate/L1/measured"]
    tiny.write_text(TINY)
    assert cli("reproduce", tiny, "--table-only", "--out", "out").status == 0
    assert list(content(Path("out/tiny.json"))["cells"]) == ["nonprivate/L1/measured"]


def test_epsilon_is_added_where_it_can_be_computed(cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(reproduce, "accounting_is_installed", lambda: False)
        assert cli("reproduce", tiny, "--cells", "fed-cdp/L1/example", "--workers", 1, "--out", "out").status == 0
    without = content(Path("out/tiny.json"))["cells"]["fed-cdp/L1/example"]
    assert "epsilon" not in without
    assert cli("reproduce", tiny, "--table-only", "--out", "out").status == 0
    completed = content(Path("out/tiny.json"))["cells"]["fed-cdp/L1/example"]
    assert completed == without | {"epsilon": completed["epsilon"]}
    assert completed["epsilon"]["server/record"] > 0


def test_no_cell_is_begun_once_the_time_is_up(cli, tiny: Path) -> None:
    ended = cli("reproduce", tiny, "--time-limit", 0, "--workers", 1, "--out", "out")
    assert ended.status == 0
    assert "6 cells are left" in " ".join(ended.stderr.split())
    assert content(Path("out/tiny.json"))["cells"] == {}
    assert "Not run yet" in Path("out/tiny.md").read_text()


def test_a_cell_that_fails_does_not_hold_up_the_others(cli, tiny: Path) -> None:
    tiny.write_text(TINY.replace("L1 = { plan.local_steps = 1 }", "L1 = { plan.per_round = 9 }"))
    ended = cli("reproduce", tiny, "--cells", "fed-cdp", "--workers", 1, "--out", "out")
    assert ended.status == 2
    assert "2 of 4 cells failed; tiny: fed-cdp/L1/cohort: per_round: 9" in ended.stderr
    assert "note: fed-cdp/L1/example failed: per_round: 9" in ended.stderr
    assert list(content(Path("out/tiny.json"))["cells"]) == ["fed-cdp/L2/cohort", "fed-cdp/L2/example"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nosuch"], "'nosuch' is not one of the tables"),
        ([], "reproduce: name a table, or use --all"),
        (["clip", "--all"], "reproduce: name tables, or use --all, but not both"),
        (["clip", "--cells", "mnist/C3"], "no cell of clip is called 'mnist/C3'"),
        (["clip", "--workers", "-1"], "--workers: -1 is not allowed"),
        (["clip", "--time-limit", "nan"], "--time-limit: nan is not allowed"),
        (["clip", "--set", "rounds=3"], "only settings of [run] can be changed"),
        (["clip", "--device", "nosuch"], "device: nosuch cannot be used"),
        (["none.toml"], "none.toml cannot be read"),
    ],
)
def test_bad_input_gets_one_line(cli, arguments: list[str], reason: str) -> None:
    ended = cli("reproduce", *arguments, "--out", "out")
    assert ended.status == 2
    assert reason in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_file_that_is_not_a_result_is_not_written_over(cli, tiny: Path) -> None:
    Path("out").mkdir()
    Path("out/tiny.json").write_text('{"mine": 1}')
    ended = cli("reproduce", tiny, "--out", "out")
    assert ended.status == 2
    assert "is not a result file" in ended.stderr
    assert Path("out/tiny.json").read_text() == '{"mine": 1}'


def test_a_training_that_another_table_has_measured_is_taken_from_there(
    cli, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiny.with_name("other.toml")
    other.write_text(TINY.replace('title = "Tiny"', 'title = "Other"').replace("[0.05, 0.1]", "[0.1, 0.2]"))
    both = [catalogue.table(str(tiny)), catalogue.table(str(other))]
    monkeypatch.setattr(catalogue, "tables", lambda: both)
    assert cli("reproduce", tiny, "--workers", 1, "--out", "out").status == 0
    assert cli("reproduce", other, "--workers", 1, "--time-limit", 0, "--out", "out").status == 0
    taken, origin = content(Path("out/other.json"))["cells"], content(Path("out/tiny.json"))["cells"]
    assert sorted(taken) == sorted(name for name in origin if name.startswith("fed-cdp"))  # other rates to choose from
    for name, row in taken.items():
        assert row["taken_from"] == f"tiny: {name}"
        assert row["accuracy"] == origin[name]["accuracy"]
    assert cli("reproduce", "--table-only", "--out", "out").status == 0
    overview = Path("out/README.md").read_text()
    assert "[tiny](tiny.md) | Tiny | 6 of 6 |" in overview
    assert "[other](other.md) | Other | 4 of 6 |" in overview


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_several_tables_are_measured_in_one_go_each_training_once(cli, tiny: Path, workers: int) -> None:
    other = tiny.with_name("other.toml")
    other.write_text(TINY.replace('title = "Tiny"', 'title = "Other"').replace("[0.05, 0.1]", "[0.1]"))
    cells = "nonprivate/L1,fed-cdp/L2/cohort"
    done = cli("reproduce", tiny, other, "--cells", cells, "--workers", workers, "--out", "out")
    assert (done.status, done.stdout.split()) == (0, ["out/tiny.md", "out/other.md"])
    first, second = (content(Path(f"out/{name}.json"))["cells"] for name in ("tiny", "other"))
    assert list(first) == list(second) == ["nonprivate/L1/measured", "fed-cdp/L2/cohort"]
    rows = [row for found in (first, second) for row in found.values()]
    assert sum("taken_from" in row for row in rows) == (2 if first["nonprivate/L1/measured"]["rate"] == 0.1 else 1)
    assert first["fed-cdp/L2/cohort"]["accuracy"] == second["fed-cdp/L2/cohort"]["accuracy"]
    listed = cli("reproduce", tiny, other, "--cells", cells, "--out", "out", "--list").stdout.splitlines()
    assert [line.split("  ")[0] for line in listed[::2]] == ["tiny: nonprivate/L1/measured", "other: nonprivate/L1/measured"]
    assert not Path("out/running").exists()


def test_all_tables_are_written_with_the_overview(cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "tables", lambda: [catalogue.table(str(tiny))])
    done = cli("reproduce", "--all", "--cells", "fed-cdp/L1/cohort", "--workers", 1, "--out", "out")
    assert (done.status, done.stdout.strip()) == (0, "out/README.md")
    assert "[tiny](tiny.md) | Tiny | 1 of 6 |" in Path("out/README.md").read_text()
    assert Path("out/tiny.md").is_file()


def test_cells_of_epsilon_alone_are_left_out_without_its_package(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "accounting_is_installed", lambda: False)
    done = cli("reproduce", "epsilon", "--cells", "fed-sdp/mnist", "--workers", 1, "--out", "out")
    assert done.status == 0
    assert "2 cells consist of ε alone and are left out" in " ".join(done.stderr.split())
    assert content(Path("out/epsilon.json"))["cells"] == {}


def test_an_attack_and_a_curve_are_tables_too(cli, workplace: Path) -> None:
    (workplace / "leaks.toml").write_text(
        'title = "Leaks"\nlayout = "leaks"\n[every]\nkind = "attack"\ndata = { dataset = "mnist5k", clients = 4 }\n'
        "plan.per_round = 4\nattack = { victims = 1, recipe.iterations = 2 }\n"
        '[axes.method]\nnonprivate = { plan.method = "nonprivate" }\n'
    )
    assert cli("reproduce", "leaks.toml", "--workers", 1, "--out", "out").status == 0
    (row,) = content(Path("out/leaks.json"))["sections"][0]["rows"]
    assert row["victims"] == 1
    assert row["distance"] > 0
    assert Path("out/arrays/leaks-nonprivate.npz").is_file()
    (workplace / "curve.toml").write_text(
        'title = "Curve"\nlayout = "curve"\n'
        '[every]\ndata = { dataset = "cancer", clients = 4 }\ncurves = ["gradient_norm"]\n'
        'plan = { method = "nonprivate", per_round = 2, rounds = 3, local_steps = 2 }\nrun.evaluate_every = 1\n'
        "[axes.rate]\nlow = { rates = [0.05] }\n"
    )
    assert cli("reproduce", "curve.toml", "--workers", 1, "--out", "out").status == 0
    rows = content(Path("out/curve.json"))["sections"][0]["rows"]
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert all(row["gradient_norm"] > 0 for row in rows)


def test_a_time_and_a_trade_off_are_tables_too(cli, workplace: Path) -> None:
    (workplace / "speed.toml").write_text(
        'title = "Speed"\nlayout = "time"\nalone = true\n[every]\nkind = "time"\nseconds = 0.01\nrepeat = 1\n'
        '[axes.dataset]\ncancer = { preset = "cancer" }\n[axes.method]\nfed-cdp = { plan.method = "fed-cdp" }\n'
    )
    assert cli("reproduce", "speed.toml", "--out", "out").status == 0
    (row,) = content(Path("out/speed.json"))["sections"][0]["rows"]
    assert row["paper"] == 11.9
    assert row["times"] == pytest.approx(11.9 / row["measured"])
    (workplace / "trade.toml").write_text(
        'title = "Trade"\nlayout = "tradeoff"\n[every]\nkind = "tradeoff"\nlooks = 2\nexamples = 20\n'
        'data = { dataset = "cancer", clients = 4 }\n'
        'plan = { method = "fed-cdp-decay", per_round = 2, rounds = 3, local_steps = 2 }\n'
        '[axes.noise]\ncohort = { plan.noise = "cohort" }\n'
    )
    assert cli("reproduce", "trade.toml", "--workers", 1, "--out", "out").status == 0
    rows = content(Path("out/trade.json"))["sections"][0]["rows"]
    assert [(row["round"], row["clip"]) for row in rows] == [(1, 6.0), (3, 2.0)]
    assert rows[0]["noise_norm"] > 2 * rows[1]["noise_norm"] > 0


LONG = TINY.replace("rounds = 2", "rounds = 100").replace("L2 = { plan.local_steps = 2 }", "L2 = { plan.rounds = 1 }")


def _until(holds: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _begun(start: Any, tiny: Path, workers: int) -> subprocess.Popen[str]:
    """A short cell is done and a long one under way."""
    tiny.write_text(LONG)
    process = start("-m", "fedcdp", "reproduce", tiny, "--cells", "fed-cdp/*/cohort", "--workers", workers, "--out", "out")
    result = Path("out/tiny.json")
    _until(lambda: result.exists() and len(content(result)["cells"]) == 1, process)
    _until(lambda: bool(_of_long_cell()), process)
    return process


def _of_long_cell() -> list[Path]:
    """The metrics of the long cell, once it has trained for several rounds."""
    every = Path("out/running/tiny").glob("fed-cdp_L1_cohort/*/metrics.jsonl")
    return [each for each in every if len(each.read_text().splitlines()) > 3]


@pytest.mark.slow
def test_after_kill_9_the_same_command_goes_on_and_no_worker_is_left(
    cli, start, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = _begun(start, tiny, workers=2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = content(Path("out/tiny.json"))["cells"]
    assert list(kept) == ["fed-cdp/L2/cohort"]
    (metrics,) = _of_long_cell()
    time.sleep(1.0)  # the workers notice
    rounds = len(metrics.read_text().splitlines())
    time.sleep(0.3)
    assert len(metrics.read_text().splitlines()) == rounds
    before = metrics.read_text().splitlines()[:3]  # with the time that each round took
    monkeypatch.setattr(Place, "forget", lambda *_: None)
    assert cli("reproduce", tiny, "--cells", "fed-cdp/*/cohort", "--workers", 1, "--out", "out").status == 0
    after = content(Path("out/tiny.json"))["cells"]
    assert after["fed-cdp/L1/cohort"]["rounds"] == 100
    assert after["fed-cdp/L2/cohort"] == kept["fed-cdp/L2/cohort"] | {"epsilon": after["fed-cdp/L2/cohort"]["epsilon"]}
    assert metrics.read_text().splitlines()[:3] == before


def test_a_folder_left_by_a_finished_cell_is_cleared(cli, tiny: Path) -> None:
    words = ("reproduce", tiny, "--cells", "fed-cdp/L2/cohort", "--workers", 1, "--out", "out")
    assert cli(*words).status == 0
    left = Path("out/running/tiny/fed-cdp_L2_cohort/split-0-killed")
    left.mkdir(parents=True)
    assert cli(*words).status == 0
    assert not Path("out/running").exists()


@pytest.mark.slow
def test_sigterm_ends_it_with_what_is_done(start, tiny: Path) -> None:
    process = _begun(start, tiny, workers=1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "stopped by SIGTERM; 1 cells are in out/tiny.json; the same command resumes" in " ".join(errors.split())
    assert "Not run yet" in Path("out/tiny.md").read_text()
