"""Every public function refuses nonsense in one sentence: no error of NumPy or torch comes through."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedcdp
from fedcdp.config.arguments import checked
from tests.support.logged import federation_of

NONSENSE: list[Any] = [
    None, "", "x", "\0", b"\0", -1, 0, 10**30, 1.5, math.nan, math.inf, True, [], [None], [1, 2], (), {}, {"a": 1}, object(),
    np.zeros(0), np.int64(3), torch.zeros(2, 2), print,
]  # fmt: skip
FEDERATION, MODEL = federation_of(), nn.Linear(3, 2)
PLAN = fedcdp.Plan(rounds=1, per_round=2, local_steps=1, batch_size=4)
PAIR = (torch.zeros(20, 3), torch.arange(20) % 2)
FRAME = {"c": ["a", "b"] * 10, "v": list(range(20)), "label": [0, 0, 1, 1] * 5}
RUN = fedcdp.simulate(MODEL, FEDERATION, PLAN)
QUICK: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "partition": (fedcdp.partition, {"data": PAIR, "clients": 3}),
    "load": (fedcdp.load, {"name": "cancer"}),
    "load_file": (fedcdp.load_file, {"path": "table.csv", "client": "c"}),
    "as_dataset": (fedcdp.as_dataset, {"source": PAIR}),
    "from_frame": (fedcdp.Federation.from_frame, {"frame": FRAME, "client": "c", "label": "label"}),
    "from_datasets": (fedcdp.Federation.from_datasets, {"datasets": {"a": PAIR, "b": [*zip(*PAIR, strict=True)]}}),
    "Dataset": (fedcdp.Dataset, {"inputs": PAIR[0], "targets": PAIR[1], "classes": 2}),
    "open_run": (fedcdp.open_run, {"path": "nowhere"}),
    "constant": (fedcdp.constant, {"value": 1.0}),
    "linear": (fedcdp.linear, {"start": 2.0, "end": 1.0}),
    "exponential": (fedcdp.exponential, {"start": 2.0, "end": 1.0}),
    "cosine": (fedcdp.cosine, {"start": 2.0, "end": 1.0}),
    "proportional": (fedcdp.proportional, {"start": 2.0}),
    "quantile": (fedcdp.quantile, {"target": 0.5, "start": 1.0}),
    "Run.evaluate": (RUN.evaluate, {}),
    "Run.export": (RUN.export, {"path": "model.safetensors"}),
    "TensorBoardLogger": (fedcdp.loggers.TensorBoardLogger, {"directory": "board"}),
    "MLflowLogger": (fedcdp.loggers.MLflowLogger, {}),
    "WandbLogger": (fedcdp.loggers.WandbLogger, {}),
}
TRAINS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "simulate": (fedcdp.simulate, {"model": MODEL, "federation": FEDERATION, "plan": PLAN}),
    "calibrate": (
        fedcdp.calibrate,
        {"plan": PLAN, "federation": FEDERATION, "model": MODEL, "target_epsilon": 8.0},
    ),
    "attack a plan": (
        fedcdp.attack,
        {"target": PLAN, "model": MODEL, "federation": FEDERATION, "victims": 2, "attack": "analytic"},
    ),
    "attack a run": (fedcdp.attack, {"target": RUN, "victims": 2, "attack": "analytic"}),
    "report": (fedcdp.report, {"items": RUN, "path": "report.html"}),
    "Run.resume": (RUN.resume, {}),
    "Run.privacy": (RUN.privacy, {}),
    "Plan.privacy": (PLAN.privacy, {"federation": FEDERATION, "model": MODEL}),
}


def refusal(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """The error of a call, or nothing; any error but fedcdp's own fails the test."""
    try:
        function(**arguments)
    except fedcdp.FedcdpError as error:
        return str(error)
    return ""


def refuses_nonsense(function: Callable[..., Any], usual: dict[str, Any]) -> None:
    for name in inspect.signature(function).parameters:
        for value in NONSENSE:
            said = refusal(function, usual | {name: value})
            assert "\n" not in said, (name, value)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{row % 3},{row / 60},{row % 2}" for row in range(60)]
    Path("table.csv").write_text("\n".join(["c,a,label", *rows]) + "\n")


@pytest.mark.parametrize("name", QUICK)
def test_nonsense_is_refused_in_a_sentence(name: str) -> None:
    refuses_nonsense(*QUICK[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAINS)
def test_nonsense_for_a_training_is_refused_in_a_sentence(name: str) -> None:
    refuses_nonsense(*TRAINS[name])


@pytest.mark.parametrize("name", [each for each in fedcdp.Plan.__dataclass_fields__ if each != "privacy"])
def test_nonsense_in_a_plan_is_refused_in_a_sentence(name: str) -> None:
    for value in NONSENSE:
        assert "\n" not in refusal(fedcdp.Plan, {name: value})


# The check itself -------------------------------------------------------------------------------------------------------


@checked
def example(
    count: int, rate: float = 0.5, flag: bool = False, name: str | None = None, some: list[int] | None = None
) -> Any:
    return count, rate, flag, name, some


@settings(max_examples=50, deadline=None)
@given(count=st.integers(-(2**64) + 1, 2**64 - 1), rate=st.floats(allow_nan=False, allow_infinity=False), flag=st.booleans())
def test_what_the_annotations_allow_passes_unchanged(count: int, rate: float, flag: bool) -> None:
    assert example(count, rate, flag=flag, name="n", some=[1]) == (count, rate, flag, "n", [1])
    count %= 2**63
    found = example(np.int64(count), np.float64(rate), np.bool_(flag))
    assert found[:3] == (count, rate, flag)
    assert [type(each) for each in found[:3]] == [int, float, bool]


@pytest.mark.parametrize(
    ("given_", "sentence"),
    [
        ({"count": 1.0}, "count: 1.0 is not a whole number"),
        ({"count": True}, "count: True is not a whole number"),
        ({"count": 2**64}, "count: 18446744073709551616 is not a whole number"),
        ({"count": 1, "rate": "1"}, "rate: '1' is not a number"),
        ({"count": 1, "flag": 1}, "flag: 1 is not True or False"),
        ({"count": 1, "name": 3}, "name: 3 is not a string or None"),
        ({"count": 1, "some": "ab"}, "some: 'ab' is not a list or None"),
        ({"count": torch.zeros(2, 2)}, "count: an object of type Tensor is not a whole number"),
    ],
)
def test_what_the_annotations_exclude_is_named(given_: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fedcdp.PlanError) as refused:
        example(**given_)
    assert str(refused.value) == sentence


def test_records_in_an_argument_are_not_quoted() -> None:
    with pytest.raises(fedcdp.PlanError) as refused:
        fedcdp.Federation.from_datasets([([[98765.0]], [1])])  # type: ignore[arg-type]
    assert str(refused.value) == "datasets: an object of type list is not a dictionary"


def test_the_signature_and_the_docstring_stay() -> None:
    assert "target_epsilon" in inspect.signature(fedcdp.simulate).parameters
    assert (fedcdp.simulate.__doc__ or "").startswith("Train a network")
