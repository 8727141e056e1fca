"""Loggers: what TensorBoard, MLflow and Weights & Biases are told, and when. The last two are small fakes here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from torch import nn

import fedcdp
from fedcdp.errors import PlanError, RunError
from fedcdp.training.progress import Logger
from fedcdp.training.rundir import Row
from tests.support.logged import federation_of, plan_of, shown_rows

AGAINST: dict[str, Any] = {"adversary": "model", "unit": "client"}  # a row that both plans have
HIDDEN = pytest.mark.parametrize("hidden", [False, True], ids=["shown", "hidden"])


def trained(logger: Logger, hidden: bool, **how: Any) -> fedcdp.Run:
    plan = plan_of(hides_time=hidden)
    return fedcdp.simulate(nn.Linear(3, 2), federation_of(), plan, **AGAINST, progress=logger, **how)


class Notes(Logger):
    """Notes what it is told, and how many rounds were done by then."""

    name = "the notebook"

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.told: list[tuple[str, Any]] = []
        self.rounds = 0

    def open(self, settings: Any) -> None:
        self.told.append(("open", (settings, self.rounds)))

    def write(self, row: Row) -> None:
        self.told.append(("write", row))

    def close(self, scores: Any, finished: bool) -> None:
        self.told.append(("close", (scores, finished)))

    def count(self, row: Any) -> None:
        self.rounds = row["round"]


# The base ---------------------------------------------------------------------------------------------------------------


@HIDDEN
def test_a_logger_sees_the_rows_of_the_run_and_nothing_else(hidden: bool) -> None:
    notes = Notes(epsilon_every=2)
    run = trained(notes, hidden)
    kinds = [kind for kind, _ in notes.told]
    assert kinds == ["open", *["write"] * 5, "close"]
    rows = [{name: value for name, value in row.items() if name != "epsilon"} for kind, row in notes.told if kind == "write"]
    assert rows == run.metrics
    assert [row["round"] for kind, row in notes.told if kind == "write" and "epsilon" in row] == [2, 4, 5]
    assert notes.told[-1] == ("close", (run.scores, True))
    settings = notes.told[0][1][0]
    assert settings["plan"]["noise_multiplier"] == 1.0
    assert "seed" not in settings["plan"]
    assert {"clients", "seconds"} & rows[0].keys() == (set() if hidden else {"clients", "seconds"})


@HIDDEN
def test_where_durations_are_secret_everything_comes_at_the_end(hidden: bool) -> None:
    notes = Notes()
    assert trained([notes.count, notes], hidden).hides_time is hidden  # type: ignore[arg-type]
    assert notes.told[0][1][1] == (5 if hidden else 0)


@HIDDEN
def test_a_stopped_training_closes_its_loggers(hidden: bool) -> None:
    class StopError(Exception):
        pass

    def stop(row: Any) -> None:
        if row["round"] == 2:
            raise StopError

    notes = Notes(epsilon_every=0)
    with pytest.raises(StopError):
        trained([notes, stop], hidden)  # type: ignore[arg-type]
    assert [kind for kind, _ in notes.told] == ["open", "write", "write", "close"]
    assert notes.told[-1] == ("close", ({}, False))


def test_a_resumed_run_goes_on_with_its_logger() -> None:
    notes = Notes(epsilon_every=0)
    trained(notes, False, most_releases=2).resume()
    assert [row["round"] for kind, row in notes.told if kind == "write"] == [1, 2, 3, 4, 5]


def test_the_failure_of_a_service_is_one_sentence(tmp_path: Path) -> None:
    class Broken(Notes):
        def open(self, settings: Any) -> None:  # noqa: ARG002
            raise ConnectionError("no route\nto host")

    with pytest.raises(RunError, match=r"^progress: the notebook cannot record this run: no route$"):
        trained(Broken(), False, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_without_privacy_has_no_epsilon() -> None:
    notes = Notes(epsilon_every=1)
    plan = fedcdp.Plan(method="nonprivate", rounds=1, per_round=2, local_steps=1)
    fedcdp.simulate(nn.Linear(3, 2), federation_of(), plan, progress=notes)
    assert "epsilon" not in notes.told[1][1]
    assert "seed" in notes.told[0][1][0]["plan"]  # nothing to subtract


@pytest.mark.parametrize("progress", [3, "x", {"a": print}, [print, None]], ids=str)
def test_what_is_no_function_is_refused(progress: Any) -> None:
    with pytest.raises(PlanError, match=r"^progress: "):
        fedcdp.simulate(nn.Linear(3, 2), federation_of(), plan_of(hides_time=False), progress=progress)


def test_epsilon_is_that_of_the_statement() -> None:
    seen: list[float] = []
    run = trained(lambda row: seen.append(row.epsilon), False)  # type: ignore[arg-type]
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(run.privacy().row("model", "client").epsilon)


# TensorBoard ------------------------------------------------------------------------------------------------------------


def board(place: Path) -> tuple[dict[str, dict[int, float]], str]:
    """The scalars in event files, and the text."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place))
    events.Reload()
    scalars = {name: {each.step: each.value for each in events.Scalars(name)} for name in events.Tags()["scalars"]}
    [text] = events.Tensors("config/text_summary")
    return scalars, text.tensor_proto.string_val[0].decode()


@HIDDEN
def test_tensorboard_has_the_rows_and_the_plan(tmp_path: Path, hidden: bool) -> None:
    pytest.importorskip("tensorboard")
    run = trained(fedcdp.loggers.TensorBoardLogger(tmp_path / "board", epsilon_every=2), hidden)
    scalars, text = board(tmp_path / "board")
    for name, values in shown_rows(run).items():
        assert scalars[name] == pytest.approx(values, rel=1e-6)
    assert scalars["epsilon"].keys() == {2, 4, 5}
    assert scalars["final/accuracy"] == pytest.approx({5: run.accuracy})
    assert "noise_multiplier = 1.0" in text
    assert "seed" not in text


def test_the_export_shows_what_the_logger_shows(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = trained(fedcdp.loggers.TensorBoardLogger(tmp_path / "live", epsilon_every=0), False)
    run.export(tmp_path / "after")
    live, after = board(tmp_path / "live"), board(tmp_path / "after")
    assert {name: values for name, values in live[0].items() if not name.startswith("final/")} == after[0]
    assert live[1] == after[1]


# MLflow and Weights & Biases --------------------------------------------------------------------------------------------


class FakeClient:
    """The calls of `MlflowClient` that the logger makes, with MLflow's signatures."""

    stores: ClassVar[dict[str | None, dict[str, Any]]] = {}

    def __init__(self, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:  # noqa: ARG002
        self.store = self.stores.setdefault(tracking_uri, {"experiments": {}, "runs": {}})

    def get_experiment_by_name(self, name: str) -> Any:
        known = self.store["experiments"].get(name)
        return None if known is None else SimpleNamespace(experiment_id=known)

    def create_experiment(self, name: str, artifact_location: str | None = None, tags: Any = None) -> str:  # noqa: ARG002
        self.store["experiments"][name] = "7"
        return "7"

    def create_run(self, experiment_id: str, start_time: Any = None, tags: Any = None, run_name: str | None = None) -> Any:  # noqa: ARG002
        made = {"name": run_name, "metrics": [], "params": {}, "status": "RUNNING", "experiment": experiment_id}
        self.store["runs"]["r1"] = made
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = (), synchronous: Any = None) -> None:  # noqa: ARG002
        run = self.store["runs"][run_id]
        assert run["status"] == "RUNNING"
        run["metrics"] += [(each.key, each.value, each.step) for each in metrics]
        run["params"] |= {each.key: each.value for each in params}

    def update_run(self, run_id: str, status: str | None = None, name: str | None = None) -> None:  # noqa: ARG002
        self.store["runs"][run_id]["status"] = status

    def set_terminated(self, run_id: str, status: str | None = None, end_time: Any = None) -> None:  # noqa: ARG002
        self.store["runs"][run_id]["status"] = status


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> dict[str | None, dict[str, Any]]:
    def metric(key: str, value: float, timestamp: int, step: int) -> Any:
        assert type(value) is float
        assert type(timestamp) is int
        return SimpleNamespace(key=key, value=value, step=step)

    def param(key: str, value: str) -> Any:
        assert type(value) is str
        return SimpleNamespace(key=key, value=value)

    fake, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    monkeypatch.setattr(FakeClient, "stores", {})
    fake.MlflowClient, entities.Metric, entities.Param = FakeClient, metric, param  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return FakeClient.stores


@HIDDEN
def test_mlflow_is_told_rows_plan_and_end(mlflow: dict[str | None, dict[str, Any]], hidden: bool) -> None:
    logger = fedcdp.loggers.MLflowLogger("sqlite:///x.db", experiment="hospitals", run_name="first")
    run = trained(logger, hidden, most_releases=3).resume()
    store = mlflow["sqlite:///x.db"]
    stored = store["runs"][logger.run_id]
    assert (stored["name"], stored["status"], store["experiments"]) == ("first", "FINISHED", {"hospitals": "7"})
    told = {(key, step): value for key, value, step in stored["metrics"] if not key.startswith("final_")}
    rows = {(name, round_): value for name, values in shown_rows(run).items() for round_, value in values.items()}
    assert told.items() >= rows.items()
    assert told.keys() - rows.keys() == {("epsilon", 5)}
    assert stored["params"]["plan.noise_multiplier"] == "1.0"
    assert "plan.seed" not in stored["params"]


class FakeRun:
    """The calls of a W&B run that the logger makes."""

    def __init__(self, **given: Any) -> None:
        self.given, self.rows, self.id, self.exit_code = given, [], given["id"] or "w1", None
        self.summary: dict[str, Any] = {}

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:  # noqa: ARG002
        self.rows.append((step, data))

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:  # noqa: ARG002
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    made: list[FakeRun] = []

    def settings(*, x_disable_stats: bool, console: str, disable_code: bool, disable_git: bool) -> dict[str, Any]:
        assert (x_disable_stats, console, disable_code, disable_git) == (True, "off", True, True)
        return {}

    def init(*, project: Any, name: Any, mode: Any, dir: Any, id: Any, resume: Any, config: Any, settings: Any,
             reinit: Any) -> FakeRun:  # fmt: skip
        assert settings == {}
        assert reinit == "create_new"
        made.append(FakeRun(project=project, name=name, mode=mode, dir=dir, id=id, resume=resume, config=config))
        return made[-1]

    fake = ModuleType("wandb")
    fake.Settings, fake.init = settings, init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return made


@HIDDEN
def test_wandb_is_told_rows_plan_and_end(wandb: list[FakeRun], tmp_path: Path, hidden: bool) -> None:
    logger = fedcdp.loggers.WandbLogger("hospitals", name="first", mode="offline", directory=tmp_path)
    run = trained(logger, hidden, most_releases=3).resume()
    first, second = wandb
    assert (second.given["id"], second.given["resume"], first.exit_code, second.exit_code) == (first.id, "allow", 0, 0)
    assert first.given["config"]["plan"]["noise_multiplier"] == 1.0
    assert "seed" not in first.given["config"]["plan"]
    told = [{"round": step} | {name: value for name, value in row.items() if name != "epsilon"}
            for step, row in first.rows + second.rows]  # fmt: skip
    assert told == run.metrics
    assert second.summary["final/accuracy"] == run.accuracy


@pytest.mark.parametrize(("package", "logger"), [("mlflow", "MLflowLogger"), ("wandb", "WandbLogger")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str, logger: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RunError, match=rf"^progress: \w+ is not installed; pip install {package} installs it$"):
        trained(getattr(fedcdp.loggers, logger)(), False)
