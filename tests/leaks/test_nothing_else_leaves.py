"""Nothing that a private run writes, prints, logs or keeps depends on the data but through what is accounted.

The same run on neighbouring data (a record replaced; under Fed-SDP, all of a client's), with the same noise and sampling and
the accounted release held fixed: every byte that comes out is the same. The replaced data overflow as gradients, so that a
branch that is taken for them alone would show, too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcdp.cli import terminal
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.federation import Federation
from fedcdp.data.partition import partition
from fedcdp.files.tensors import load_tensors
from fedcdp.training.rounds import Simulator
from fedcdp.training.simulate import simulate
from tests.support.run_output import Seen, differences

RunTwice = Callable[..., list[Seen]]

CDP, SDP = {"method": "fed-cdp"}, {"method": "fed-sdp"}
SAMPLINGS = [{"record_sampling": each} for each in ("poisson", "fixed", "partition")]
CONVENTIONS = [{"noise": each} for each in ("example", "batch", "cohort")]
EXTRAS: dict[str, dict[str, Any]] = {
    "quantile": {"clip": "quantile(0.5, 1)"},
    "momentum, average, pruned": {"momentum": 0.5, "ema": 0.9, "compression": 0.5},
    "Poisson clients, flat, whole models": {
        "client_sampling": "poisson", "clip_mode": "flat", "aggregation": "fedaveraging",
    },
    "secure noise": {"secure_noise": True},
    "server optimiser, proximal": {"server_optimizer": "adam", "server_learning_rate": 0.1, "proximal": 0.5},
}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    **{
        " ".join(["fed-cdp", noise["noise"], sampling["record_sampling"]]): CDP | noise | sampling
        for noise in CONVENTIONS
        for sampling in SAMPLINGS
    },
    **{f"fed-cdp {name}": CDP | extra for name, extra in EXTRAS.items()},
    "fed-cdp batch quantile": CDP | EXTRAS["quantile"] | {"noise": "batch"},
    "fed-cdp-decay": {"method": "fed-cdp-decay", "noise_follows_clip": False},
    **{
        f"fed-sdp {at} {sampling['record_sampling']}": SDP | {"noise_at": at} | sampling
        for at in ("server", "client")
        for sampling in SAMPLINGS
    },
    **{
        f"fed-sdp {at} {name}": SDP | {"noise_at": at} | extra
        for at in ("server", "client")
        for name, extra in EXTRAS.items()
    },
}

RECORDS, FEATURES, CLASSES, CLIENTS = 48, 6, 3, 6


def plan(**changes: Any) -> Plan:
    usual = {"rounds": 3, "per_round": 5, "local_steps": 3, "batch_size": 3, "noise_multiplier": 0.5, "seed": 3}
    return Plan(**usual | changes)


def federation() -> Federation:
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(RECORDS, FEATURES, generator=generator), torch.arange(RECORDS) % CLASSES
    public = Dataset(torch.randn(9, FEATURES, generator=generator), torch.arange(9) % CLASSES, CLASSES)
    return partition(Splits("points", Dataset(inputs, labels, CLASSES), public, None, ""), clients=CLIENTS, scheme="iid")


def with_others(whole: Federation, records: Tensor, scale: float) -> Federation:
    """The neighbour: some records are others, of another class."""
    inputs, labels = whole.train.inputs.clone(), whole.train.targets.clone()
    inputs[records], labels[records] = -scale * inputs[records].sign(), (labels[records] + 1) % CLASSES
    return replace(whole, train=Dataset(inputs, labels, CLASSES))


def neighbours(unit: str, scale: float = 3e38) -> list[Federation]:
    """Three worlds: the data, one with other data for the unit, and one with data for it that overflow."""
    whole = federation()
    held = torch.from_numpy(whole.indices(0))
    changed = held if unit == "client" else held[:1]
    return [whole, with_others(whole, changed, 2.0), with_others(whole, changed, scale)]


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def train(chosen: Plan, engine: str = "auto") -> Callable[[Federation], None]:
    """A run in full view: into a directory, with its progress on the console."""

    def action(given: Federation) -> None:
        with terminal.training_progress(chosen, quiet=False) as progress:
            run = simulate(network(), given, chosen, out="run", engine=engine, progress=progress)  # type: ignore[arg-type]
        print(run.metrics, run.accuracy, run.participations, run.releases, run.chunk, run.engine, run.rounds)
        print(run)

    return action


def everything_equal(seen: list[Seen]) -> None:
    first, *others = seen
    assert {"file run/config.toml", "file run/ledger.jsonl", "file run/metrics.jsonl", "file run/checkpoint.safetensors",
            "file run/model.safetensors"} <= set(first.let_out())  # fmt: skip
    assert (first.failed, first.written, first.connected) == (None, set(), [])
    assert "round 3/3" in first.console
    for other in others:
        assert differences(first, other) == {}


@pytest.mark.parametrize("changes", PLANS.values(), ids=PLANS)
def test_with_the_release_held_every_byte_that_a_run_lets_out_is_equal(run_twice: RunTwice, changes: dict[str, Any]) -> None:
    chosen = plan(**changes)
    unit = "client" if chosen.method == "fed-sdp" else "record"
    everything_equal(run_twice(train(chosen), neighbours(unit)[::2]))


@pytest.mark.parametrize("changes", [PLANS["fed-cdp example poisson"], PLANS["fed-sdp client poisson"]], ids=["cdp", "sdp"])
def test_the_reference_engine_is_as_silent(run_twice: RunTwice, changes: dict[str, Any]) -> None:
    chosen = plan(**changes)
    everything_equal(run_twice(train(chosen, "functional"), neighbours("client" if "sdp" in chosen.method else "record")))


def test_what_is_measured_of_engines_depends_on_shapes_and_the_clock_alone(
    run_twice: RunTwice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedcdp.training.autotune._LONG", 0)
    seen = run_twice(train(plan()), neighbours("record"))
    assert any(name.startswith("cache/engines/") for name in seen[0].files)
    everything_equal(seen)


@pytest.mark.parametrize("changes", PLANS.values(), ids=PLANS)
def test_without_holding_it_only_the_release_differs(run_twice: RunTwice, changes: dict[str, Any]) -> None:
    """The release is seen to depend on the data, so that the tests above hold something fixed; and nothing else does."""
    chosen = plan(**changes)
    released = {"file run/checkpoint.safetensors", "file run/model.safetensors"}
    # Accuracy and loss on public data, a warning that the accuracy is poor, and a bound that follows a quantile.
    measured = {"file run/metrics.jsonl", "file run/scores.json", "console", "log"}
    if chosen.quantile is not None:
        measured.add("file run/ledger.jsonl")
    one, other = run_twice(train(chosen), neighbours("client")[:2], hold=False)
    found = differences(one, other)
    assert released <= set(found) <= released | measured
    logged = [[line for line in seen.log if "validation accuracy" not in line] for seen in (one, other)]
    assert logged[0] == logged[1]
    model, checkpoint = (one.files[f"run/{name}.safetensors"] for name in ("model", "checkpoint"))
    assert {len(model), len(checkpoint)} == {len(other.files[f"run/{name}.safetensors"]) for name in ("model", "checkpoint")}
    functions_of_the_release = {"accuracy", "loss"} | ({"clip"} if chosen.quantile is not None else set())
    rows = [[json.loads(line) for line in seen.files["run/metrics.jsonl"].splitlines()] for seen in (one, other)]
    for left, right in zip(*rows, strict=True):
        assert set(left) == set(right)
        assert {key for key in left if left[key] != right[key]} <= functions_of_the_release
    holds_what_was_released(one, chosen)


def holds_what_was_released(seen: Seen, chosen: Plan) -> None:
    """The checkpoint holds the global weights, their average, the clip bound and the state of the server's optimiser.

    These are tensors of the model's names, and no others.
    """
    names = set(dict(network().named_parameters()))
    tensors, about = load_tensors(seen.place / "run" / "checkpoint.safetensors", "checkpoint-1")
    parts = ["weights"] + ["average"] * bool(chosen.ema) + ["momentum", "variance"] * (chosen.server_optimizer == "adam")
    assert set(tensors) == {f"{part}/{name}" for part in parts for name in names}
    assert set(about) == {"format", "round", "plan"} | ({"clip"} if chosen.quantile is not None else set())
    model, _ = load_tensors(seen.place / "run" / "model.safetensors", "model-1")
    assert set(model) == names
    assert all(torch.equal(model[name], tensors[f"{'average' if chosen.ema else 'weights'}/{name}"]) for name in names)


# The watch can fail --------------------------------------------------------------------------------------------------


def leaks(run_twice: RunTwice) -> set[str]:
    one, other, _ = run_twice(train(plan()), neighbours("client"))
    return set(differences(one, other))


def test_a_metric_of_raw_gradients_is_found(run_twice: RunTwice, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Simulator.measure

    def measure(self: Simulator, before: Any, state: Any, chosen: Tensor, every: int) -> dict[str, Any]:
        everybody = torch.arange(CLIENTS)
        return real(self, before, state, chosen, every) | {"gradient_norm": self.gradient_norm(before, everybody)}

    monkeypatch.setattr(Simulator, "measure", measure)
    assert "file run/metrics.jsonl" in leaks(run_twice)


def test_a_log_line_about_raw_gradients_is_found(run_twice: RunTwice, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Simulator.round

    def round_(self: Simulator, state: Any, chosen: Tensor) -> Any:
        logging.getLogger("fedcdp").debug("norm %f", self.gradient_norm(state, torch.arange(CLIENTS)) or 0.0)
        return real(self, state, chosen)

    monkeypatch.setattr(Simulator, "round", round_)
    assert leaks(run_twice) == {"log"}


def test_a_file_elsewhere_is_found(run_twice: RunTwice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = Simulator.round

    def round_(self: Simulator, state: Any, chosen: Tensor) -> Any:
        (tmp_path / "elsewhere").write_text("")
        return real(self, state, chosen)

    monkeypatch.setattr(Simulator, "round", round_)
    (seen,) = run_twice(train(plan()), [federation()])
    assert seen.written == {str(tmp_path / "elsewhere")}


def test_a_count_of_records_that_were_left_out_is_found(run_twice: RunTwice, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcdp.methods import fedcdp

    real = fedcdp._noised

    def noised(total: Any, at: Any) -> Any:
        print(sum(int((value == 0).sum()) for value in total.values()))
        return real(total, at)

    monkeypatch.setattr(fedcdp, "_noised", noised)
    seen = run_twice(train(plan(record_sampling="partition", local_steps=5)), neighbours("client"))
    assert "console" in differences(seen[0], seen[2])
