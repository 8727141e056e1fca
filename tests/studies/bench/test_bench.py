"""`fedcdp bench` measures what it says, keeps what it measured, and says in a line what it cannot do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typer.testing import CliRunner

from fedcdp.cli.program import app, main
from fedcdp.config.experiment import EngineName, MachineSettings
from fedcdp.data.dataset import Splits
from fedcdp.errors import FedcdpError, ModelError, RunError
from fedcdp.files.installation import install_command
from fedcdp.studies.bench import measurement, peers, sections
from fedcdp.studies.bench.measurement import BenchData, Case, Visit, compare, ratio, spread, synthetic, visit
from fedcdp.studies.bench.peers import Contestant, contest
from fedcdp.studies.bench.result_file import BenchResults, read
from fedcdp.studies.bench.tables import DATASETS, METHODS, markdown, plot_speed, printed_ms
from fedcdp.training.prepared import deal_out, network_of

ON_CPU = MachineSettings(chunk=4, engine="functional")  # nothing to be tuned
MACHINE = {"device": "cpu", "gpu": None, "cpu": "a CPU", "cores": 2, "threads": 1, "python": "3", "torch": "2"}
TINY = {
    "name": "tiny", "dataset": "cancer", "network": "mlp", "shape": (30,), "classes": 2, "batch_size": 2, "local_steps": 2,
    "per_round": 3, "machine": {"engine": "functional", "chunk": 3},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCDP_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def cancer() -> BenchData:
    return synthetic("cancer")


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize("name", DATASETS)
def test_synthetic_inputs_are_as_many_and_of_the_shape_that_the_preset_needs(name: str) -> None:
    made = synthetic(name)
    case = Case(name, made, ON_CPU, {"per_round": 2})
    experiment = case.experiment(local_steps=1)
    assert made.data == "synthetic"
    assert deal_out(experiment, made.splits).clients == 1000
    assert network_of(experiment, made.splits)(made.splits.train.inputs[:2]).shape == (2, made.splits.train.classes)


def test_files_at_hand_are_used_and_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "synthetic", lambda name: f"random {name}")
    assert measurement.subject("mnist", tmp_path) == "random mnist"
    assert measurement.subject("cancer").data == "real"


def test_the_papers_table_has_a_figure_for_every_dataset_and_method() -> None:
    assert printed_ms("mnist", "fed-cdp") == 22.4
    assert printed_ms("cancer", "fed-cdp-decay") == 12.0
    assert all(printed_ms(dataset, method) > 0 for dataset in DATASETS for method in METHODS)


def test_a_visit_runs_a_warm_up_round_and_those_that_count(cancer: BenchData) -> None:
    seen = visit(Case("one", cancer, ON_CPU, {"per_round": 2}), local_steps=2, rounds=3)
    assert len(seen.rounds) == 3
    assert all(seconds > 0 for seconds in (*seen.rounds, *seen.processor))
    assert seen.start_up >= 0
    assert seen.peak_bytes is None


def test_what_is_timed_is_a_long_training_of_the_papers_setting_that_is_never_evaluated(cancer: BenchData) -> None:
    experiment = Case("one", cancer, ON_CPU, {"method": "fed-sdp"}).experiment(7)
    assert (experiment.plan.batch_size, experiment.plan.noise_multiplier, experiment.plan.local_steps) == (4, 6.0, 7)
    assert experiment.plan.record_sampling == "partition"
    assert experiment.run.evaluate_every == experiment.plan.rounds == 10_000
    assert experiment.run.chunk == 4


def test_cases_take_turns_with_as_many_local_steps_as_the_dearest_affords(
    cancer: BenchData, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def note(case: Case, local_steps: int, rounds: int = 1) -> Visit:
        order.append((case.name, local_steps))
        return Visit(0.0, [0.1 * local_steps] * rounds, [0.05 * local_steps] * rounds, None, {})

    monkeypatch.setattr("fedcdp.studies.bench.measurement.visit", note)
    cases = [Case(name, cancer, ON_CPU, {"per_round": 2}) for name in ("a", "b")]
    timings = compare(cases, repeat=2, seconds=0.5, report=silent)
    assert order == [("b", 1), ("b", 5), ("a", 5), ("b", 5), ("a", 5), ("b", 5)]
    assert timings[0].figures()["us_per_client_step"]["median"] == pytest.approx(0.1 / 2 * 1e6)
    assert timings[0].figures()["cpu_us_per_client_step"]["median"] == pytest.approx(0.05 / 2 * 1e6)
    compare(cases, repeat=1, seconds=1e6, report=silent)
    assert order[-1] == ("b", 100)  # the paper's L


def test_a_figure_is_the_median_with_its_spread_and_a_ratio_is_of_neighbours() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "least": 1.0, "most": 3.0, "samples": [3.0, 1.0, 2.0]}
    assert ratio([2.0, 30.0], [1.0, 10.0])["samples"] == [2.0, 3.0]


@pytest.mark.slow
def test_memory_at_its_peak_is_that_of_a_process_of_its_own(cancer: BenchData) -> None:
    told = measurement.peak_mib(Case("memory", cancer, ON_CPU, {"per_round": 2}), local_steps=1)
    assert 50 < told["before_mib"] <= told["peak_mib"] < 2000


# The sections, on few and small cases ------------------------------------------------------------------------------


@pytest.fixture
def bench(cancer: BenchData, monkeypatch: pytest.MonkeyPatch) -> sections.Bench:
    """Every dataset is the smallest one, and memory is not measured."""
    small = cancer.splits.train.take(torch.arange(120))
    subject = BenchData("cancer", Splits("cancer", small, small, None, ""), "synthetic")
    monkeypatch.setattr(sections, "_loaded", lambda *_: subject)
    monkeypatch.setattr(measurement, "peak_mib", lambda *_: {"peak_mib": 1.0})
    monkeypatch.setattr(sections, "CLIENTS", ((2, 2), (50, 2)))
    monkeypatch.setattr(sections, "PER_ROUND", (2, 3))
    monkeypatch.setattr(sections, "BATCH_SIZE", (1, 2))
    return sections.Bench(ON_CPU, repeat=2, seconds=1e-9, clients_a_round=2)


def said(case: Case, local_steps: int, rounds: int = 1) -> Visit:
    """In place of a visit: every engine is there, and a local step takes a tenth of a second."""
    seconds = [0.1 * local_steps] * rounds
    return Visit(0.0, seconds, seconds, None, {"trained_by": case.machine.engine, "chunk": 4})


def rows_of(name: str, bench: sections.Bench) -> list[dict[str, Any]]:
    """The rows of a section, after a check that they can be written and shown."""
    rows = [row for group in sections.SECTIONS[name](bench, silent) for row in group]
    content = json.loads(json.dumps({"machine": MACHINE, "sections": {name: rows}}))
    measured = [row for row in rows if "missing" not in row]
    assert all(len(row["us_per_client_step"]["samples"]) == 2 for row in measured)
    assert {row["data"] for row in rows} == {"synthetic"}
    assert markdown(content).count("\n| ") >= len(rows)
    return rows


@pytest.mark.parametrize("name", sections.SECTIONS)
def test_every_section_gives_rows_that_can_be_shown(
    name: str, bench: sections.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sections, measurement):
        monkeypatch.setattr(module, "visit", said)
    assert not [row for row in rows_of(name, bench) if "missing" in row]


@pytest.mark.slow
def test_every_engine_is_really_timed(bench: sections.Bench) -> None:
    rows = {row["engine"]: row for row in rows_of("engines", replace(bench, quick=True))}
    assert rows.keys() == set(get_args(EngineName)) - {"auto"}
    assert all("us_per_client_step" in rows[engine] for engine in ("functional", "batched", "compiled"))


def test_steps_compare_the_methods_with_the_paper_and_with_no_privacy(bench: sections.Bench) -> None:
    rows = next(sections.steps(bench, silent))
    assert [row["method"] for row in rows] == list(METHODS)
    assert [row["paper_us"] for row in rows] == [6800.0, 6900.0, 22400.0, 22600.0]
    assert rows[0]["times_nonprivate"]["median"] == 1


def test_engines_are_those_that_there_are_and_one_that_cannot_run_says_why(
    bench: sections.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fussy(case: Case, local_steps: int) -> Visit:
        if case.machine.engine == "batched":
            raise ModelError("not this network")
        return said(case, local_steps)

    monkeypatch.setattr(sections, "visit", fussy)
    monkeypatch.setattr(measurement, "visit", said)
    rows = [row for group in sections.engines(replace(bench, quick=True), silent) for row in group]
    assert {row["engine"] for row in rows} == set(get_args(EngineName)) - {"auto"}
    assert [row["missing"] for row in rows if row["engine"] == "batched"] == ["not this network"]
    assert "us_per_client_step" in next(row for row in rows if row["engine"] == "functional")


def test_poisson_batches_have_three_slots_for_an_example(bench: sections.Bench) -> None:
    rows = next(sections.sampling(bench, silent))
    assert [row["slots"] // row["batch_size"] for row in rows] == [1, 3]


def test_growth_goes_along_clients_a_round_batches_and_clients_in_all(bench: sections.Bench) -> None:
    rows = [row for group in sections.growth(bench, silent) for row in group]
    assert [row["along"] for row in rows] == ["per_round"] * 2 + ["batch_size"] * 2 + ["clients"] * 2
    assert all(row["peak_mib"] and row["start_up_seconds"] >= 0 for row in rows)
    assert rows[-1]["clients"] == 50
    assert rows[-1]["dealing_seconds"] >= 0


# The result file ---------------------------------------------------------------------------------------------------


def test_rows_are_on_disk_as_soon_as_they_are_added_and_a_section_measured_again_replaces_its_own(tmp_path: Path) -> None:
    path = tmp_path / "new" / "speed.json"
    for value in (1, 2):
        results = BenchResults(MACHINE, path)
        results.begin("steps")
        results.add("steps", [{"value": value}])
        assert read(path)["sections"]["steps"] == [{"value": value}]
    results.begin("growth")
    results.add("growth", [{"value": 3}])
    assert list(read(path)["sections"]) == ["steps", "growth"]


def test_a_result_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    BenchResults(MACHINE, tmp_path / "speed.json")
    with pytest.raises(RunError, match="another machine"):
        BenchResults(MACHINE | {"torch": "3"}, tmp_path / "speed.json")


# Peers -------------------------------------------------------------------------------------------------------------


DRIVER = """
import time

def serve(task, turns):
    turns.ready('1')
    turns.serve(lambda: time.sleep(0.01) or 1)
"""


@pytest.fixture
def light_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real processes and turns, with contestants that train nothing."""
    for name in ("worker.py", "turns.py"):
        shutil.copy(peers.drivers() / name, tmp_path)
    for name in ("fedcdp_simulator.py", "torch_client.py"):
        (tmp_path / name).write_text(DRIVER)
    monkeypatch.setattr(peers, "DRIVERS", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("light_drivers")
def test_contestants_take_turns() -> None:
    check_turns()


@pytest.mark.slow
def test_contestants_that_train_take_turns() -> None:
    check_turns()


def check_turns() -> None:
    """Everybody is measured twice, one after the other; who cannot take part says why."""
    asked = []
    contestants = (
        Contestant("fedcdp", "fedcdp_simulator", "nonprivate"),
        Contestant("a loop", "torch_client", "nonprivate"),
        Contestant("nobody", "nobody_at_all", "fed-cdp", peer="nobody"),
    )
    rows = contest(TINY, contestants, {}, 2, asked.append)
    assert [row["who"] for row in rows] == ["fedcdp", "a loop", "nobody"]
    assert [len(row["us_per_client_step"]["samples"]) for row in rows[:2]] == [2, 2]
    assert rows[0]["times_fedcdp"]["median"] == 1
    assert "nobody_at_all is not installed" in rows[2]["missing"]
    assert asked[-4:] == [f"{who}, cancer ({turn} of 2)" for turn in (1, 2) for who in ("fedcdp", "a loop")]


def test_a_contestant_that_fails_is_out_and_the_others_go_on(light_drivers: Path) -> None:
    (light_drivers / "fragile.py").write_text(
        "def serve(task, turns):\n    turns.ready('1')\n    turns.wait()\n    raise OSError('full')\n"
    )
    contestants = (Contestant("fedcdp", "fedcdp_simulator", "fed-cdp"), Contestant("fragile", "fragile", "fed-cdp"))
    ours, other = contest(TINY, contestants, {}, 2, silent)
    assert len(ours["us_per_client_step"]["samples"]) == 2
    assert other["missing"] == "OSError: full"


@pytest.mark.usefixtures("light_drivers")
def test_ours_is_measured_only_where_there_is_somebody_to_compare_with() -> None:
    contestants = (
        Contestant("fedcdp", "fedcdp_simulator", "fed-cdp"),
        Contestant("fedcdp, Fed-SDP", "fedcdp_simulator", "fed-sdp"),
    )
    assert [row["who"] for row in contest(TINY, contestants, {}, 1, silent)] == ["fedcdp"]


def test_opacus_trains_the_same_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opacus")
    monkeypatch.syspath_prepend(str(peers.drivers()))
    import opacus_client  # type: ignore[import-not-found]
    from turns import Task  # type: ignore[import-not-found]

    task = Task(**TINY | {"noise_multiplier": 0.0, "clip": 0.01, "local_steps": 1})
    sent = [opacus_client.private_client(task, way) for way in ("hooks", "ew")]
    for client in sent:
        client.train()
    for one, other in zip(sent[0].sent, sent[1].sent, strict=True):
        assert one.norm() <= task.learning_rate * task.clip * 1.001
        torch.testing.assert_close(one, other)


# The picture and the command ---------------------------------------------------------------------------------------


def test_the_picture_shows_growth_and_peers_and_refuses_to_show_nothing(tmp_path: Path) -> None:
    figure = spread([1.0, 2.0])
    growth = [{"along": "per_round", "per_round": n, "batch_size": 5, "us_per_client_step": figure} for n in (100, 200)]
    peer = [{"task": "t", "who": who, "mechanism": "fed-cdp", "us_per_client_step": figure} for who in ("fedcdp", "other")]
    content = {"machine": MACHINE, "sections": {"growth": growth, "peers": [*peer, {"task": "t", "missing": "why"}]}}
    plot_speed(content, tmp_path / "pictures" / "speed.png")
    assert (tmp_path / "pictures" / "speed.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RunError, match="nothing to draw"):
        plot_speed({"machine": MACHINE, "sections": {}}, tmp_path / "none.png")


def test_without_matplotlib_a_picture_is_refused_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sentence = f"--plot: this needs matplotlib; install it with {install_command('report')}"
    out = tmp_path / "speed.json"
    done = CliRunner().invoke(app, ["bench", "--plot", str(tmp_path / "speed.png"), "--out", str(out)])
    assert str(done.exception) == sentence
    assert isinstance(done.exception, FedcdpError)
    assert not out.exists()
    with pytest.raises(RunError) as caught:
        plot_speed({"machine": MACHINE, "sections": {}}, tmp_path / "speed.png")
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--section", "colours"], "--section: 'colours' is not one of steps, engines"),
        (["--repeat", "0"], "--repeat: 0 is not allowed"),
        (["--per-round", "-1"], "--per-round: -1 is not allowed"),
        (["--device", "tpu9"], "device: tpu9 cannot be used"),
        (["--set", "clip=1"], "only settings of [run] can be changed"),
        (["--set", "engine=steam"], "'steam' is not one of"),
        (["--peer-python", "opacus"], "write it as PEER=PYTHON"),
        (["--peer-python", "opacus=/no/such/python"], "there is no file /no/such/python"),
        (["--plot", "speed.txt"], "must end with .png, .pdf or .svg"),
        (["--out", "/dev/null/speed.json"], "/dev/null/speed.json cannot be"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(arguments: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(done.exception, FedcdpError)
    assert sentence in str(done.exception)


def test_bad_input_gets_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fedcdp", "bench", "--section", "colours"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_interrupt_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def steps(*_: object) -> Iterator[list[dict[str, Any]]]:
        yield [{"value": 1}]
        raise KeyboardInterrupt

    monkeypatch.setitem(sections.SECTIONS, "steps", steps)
    path = tmp_path / "speed.json"
    monkeypatch.setattr(sys, "argv", ["fedcdp", "bench", "--section", "steps", "--out", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "the measurements so far are in" in " ".join(capsys.readouterr().err.split())
    assert read(path)["sections"] == {"steps": [{"value": 1}]}


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    command = [sys.executable, "-m", "fedcdp", "bench", "--section", "steps", "--out", str(path), "--set", "chunk=10"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"FEDCDP_DATA": str(tmp_path)})
    assert started.stderr is not None
    assert "measuring" in started.stderr.readline()
    time.sleep(0.5)
    started.send_signal(signal.SIGINT)
    _, told = started.communicate(timeout=60)
    assert started.returncode == 1
    assert f"the measurements so far are in {path}" in told
    assert read(path)["sections"] == {}
