"""`fedcdp account --run` states what a run has spent by its own ledger, and by no other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcdp.accounting.ledger import Ledger
from fedcdp.config.experiment import assemble
from fedcdp.errors import RunError
from fedcdp.training.ledger_check import spent
from fedcdp.training.trainer import train_experiment

PLAN = {"rounds": 3, "per_round": 2, "local_steps": 1, "batch_size": 3, "noise_multiplier": 2.0}


def train(out: Path, clients: int = 4, **plan: object) -> Path:
    data = {"dataset": "cancer", "clients": clients, "partition": "iid", "records": 20}
    train_experiment(assemble({"data": data, "plan": PLAN | plan}), out, quiet=True)
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_the_runs_own_ledger_is_taken(copy: Path) -> None:
    assert spent(copy)[1].rows


def test_config_and_ledger_alone_are_enough(copy: Path, tmp_path: Path) -> None:
    for name in ("config.toml", "ledger.jsonl"):
        (tmp_path / "alone").mkdir(exist_ok=True)
        shutil.copy(copy / name, tmp_path / "alone")
    assert spent(tmp_path / "alone")[1].rows == spent(copy)[1].rows


def shortened(copy: Path) -> None:
    lines = (copy / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))


def without_model(copy: Path) -> None:
    shortened(copy)
    (copy / "model.safetensors").unlink()


def emptied(copy: Path) -> None:
    lines = (copy / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "ledger.jsonl").write_bytes(lines[0])


def without_checkpoint(copy: Path) -> None:
    emptied(copy)
    (copy / "checkpoint.safetensors").unlink()


def of_another(**plan: object) -> Callable[[Path], None]:
    def replace(copy: Path) -> None:
        shutil.copy(train(copy.parent / "other", **plan) / "ledger.jsonl", copy)

    return replace


OTHERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a ledger that lacks its last round": (shortened, "has 2 rounds and"),
    "the same, of a run without a model": (without_model, "has 2 rounds and checkpoint"),
    "a ledger without any round": (emptied, "has 0 rounds and"),
    "the same, of a run without a checkpoint": (without_checkpoint, "has 0 rounds and model"),
    "the ledger of another plan": (of_another(noise_multiplier=9.0), "its plan has noise_multiplier = 9.0"),
    "of one with other noise": (of_another(secure_noise=True), "its plan has secure_noise = True"),
    "of one that clips otherwise": (of_another(clip="linear(6, 2)"), r"its plan has clip = linear\(6, 2\)"),
    "of one with more clients": (of_another(clients=9), "is for 9 clients, but .* has 4"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("change", "sentence"), OTHERS.values(), ids=OTHERS.keys())
def test_a_ledger_that_is_shorter_or_anothers_is_refused(change: Callable[[Path], None], sentence: str, copy: Path) -> None:
    change(copy)
    with pytest.raises(RunError, match=sentence):
        spent(copy)


def test_a_checkpoint_of_another_plan_is_refused(copy: Path) -> None:
    shutil.copy(train(copy.parent / "other", noise_multiplier=9.0) / "checkpoint.safetensors", copy)
    with pytest.raises(RunError, match="belongs to another plan"):
        spent(copy)


def test_a_ledger_that_is_ahead_is_taken_for_it_counts_too_much_at_worst(tmp_path: Path) -> None:
    secure = train(tmp_path / "secure", secure_noise=True)
    ledger = Ledger.open(secure / "ledger.jsonl")
    ledger.charge(2, [0, 1], 4.0)
    assert spent(secure)[1].rows


@pytest.mark.parametrize("clients", [[{"records": 20}] * 3, [{"records": 19}] * 4, [], {}, [{}]])
def test_of_a_deployment_the_roster_must_fit(clients: object, copy: Path) -> None:
    (copy / "clients.json").write_text(json.dumps({"clients": [{"records": 20}] * 4}))
    assert spent(copy)[1].rows
    (copy / "clients.json").write_text(json.dumps({"clients": clients}))
    with pytest.raises(RunError, match=r"belongs to another run|is damaged"):
        spent(copy)


@pytest.mark.parametrize(
    "text", ["", "[plan]\nrounds = 0\n", "[plan]\nmagic = 1\n", "plan = 3\n", "[", "data = 3\n[plan]\n"]
)
def test_a_config_that_is_none_is_refused(text: str, copy: Path) -> None:
    (copy / "config.toml").write_text(text)
    with pytest.raises(RunError):
        spent(copy)
