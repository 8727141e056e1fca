"""`fedcdp check` as a user meets it: tables, JSON, the page, the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
OPACUS = ["check", "opacus", "--noise-multiplier", 1.1, "--sample-rate", 0.01, "--steps", 200]
FLOWER = ["check", "flower", "--noise-multiplier", 1, "--clients", 100, "--per-round", 10, "--rounds", 5]
QUICK = ["--dataset", "cancer", "--model", "mlp", "--trials", 100, "--quiet"]

LOOPS = """
import torch
from torch import nn

def honest(model, inputs, labels, sigma=1.0):
    parameters = [p for p in model.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in parameters]
    for x, y in zip(inputs, labels):
        grads = torch.autograd.grad(nn.functional.cross_entropy(model(x[None]), y[None]), parameters)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        sums = [s + g / max(1.0, float(norm)) for s, g in zip(sums, grads)]
    return [s + sigma * torch.randn_like(s) for s in sums]

def chatty(model, inputs, labels):
    print("epoch 1")
    return honest(model, inputs, labels)

def leaving(model, inputs, labels):
    raise SystemExit(0)

def raw(model, inputs, labels):
    return honest(model, inputs, labels, sigma=0.0)

def broken(model, inputs, labels):
    raise RuntimeError("two\\nlines")

number = 3
"""


@pytest.fixture(autouse=True)
def loops(workplace: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's own in the current directory, with a name that no other test imports."""
    monkeypatch.syspath_prepend(str(workplace))
    name = f"loops_{abs(hash(request.node.name))}"
    (workplace / f"{name}.py").write_text(LOOPS)
    return name


def answer(outcome: Any, status: int = 0) -> dict[str, Any]:
    assert outcome.status == status, outcome.stderr
    found: dict[str, Any] = json.loads(outcome.stdout)
    return found


def row(found: dict[str, Any], adversary: str, unit: str = "record") -> dict[str, Any]:
    rows: list[dict[str, Any]] = found["privacy"]["rows"]
    return next(each for each in rows if (each["adversary"], each["unit"]) == (adversary, unit))


def test_opacus_in_json(cli: Cli) -> None:
    found = answer(cli(*OPACUS, "--json"))
    assert found["verdict"] == "no claim to compare with"
    assert 0 < row(found, "model")["epsilon"] < 5
    assert row(found, "example")["epsilon"] == "inf"
    assert {each["adversary"] for each in found["adversaries"]} == {"model", "example"}


def test_a_loader_tells_the_rate_and_the_steps(cli: Cli) -> None:
    by_loader = ["--batch-size", 64, "--records", 6000, "--epochs", 2]
    found = answer(cli("check", "opacus", "--noise-multiplier", 1.1, *by_loader, "--json"))
    same = answer(cli("check", "opacus", "--noise-multiplier", 1.1, "--sample-rate", 1 / 94, "--steps", 188, "--json"))
    assert row(found, "model") == row(same, "model")


def test_adaptive_and_per_layer_clipping_of_opacus(cli: Cli) -> None:
    flat = answer(cli(*OPACUS, "--json"))
    several = answer(cli(*OPACUS, "--clipping", "per_layer", "--clip", 3, "--clip", 4, "--json"))
    assert row(several, "model") == row(flat, "model")
    assert several["facts"]["noise on the sum"] == "standard deviation σC = 5.5"
    more = ["--clipping", "adaptive", "--unclipped-num-std", 0.7, "--records", 10_000, "--min-clipbound", 0.1]
    following = answer(cli(*OPACUS, *more, "--max-clipbound", 9, "--json"))
    assert row(following, "model")["epsilon"] > 1.5 * row(flat, "model")["epsilon"]
    assert following["facts"]["clip bound"] == "least 0.1, largest 9"
    assert any("in effect" in each["text"] for each in following["findings"])


def test_shuffled_batches_cost_more(cli: Cli) -> None:
    poisson, shuffled = (answer(cli(*OPACUS, *more, "--json")) for more in ([], ["--no-poisson-sampling"]))
    assert row(shuffled, "model")["epsilon"] > 2 * row(poisson, "model")["epsilon"]


@pytest.mark.parametrize("wrapper", ["server-fixed", "client-fixed", "server-adaptive", "client-adaptive"])
def test_flower_in_json(cli: Cli, wrapper: str) -> None:
    more = ["--count-stddev", 5] if wrapper.endswith("adaptive") else []
    found = answer(cli(*FLOWER, "--wrapper", wrapper, *more, "--json"))
    assert row(found, "server", "client")["epsilon"] == "inf"
    assert 0 < row(found, "model", "client")["epsilon"] < 50


def test_local_dp_in_json(cli: Cli) -> None:
    mod = ["--wrapper", "local", "--clip", 1, "--sensitivity", 1, "--mod-epsilon", 1, "--clients", 10, "--rounds", 3]
    found = answer(cli("check", "flower", *mod, "--json"))
    assert 1 < row(found, "server", "client")["epsilon"] < 3


def test_a_wrong_claim_ends_with_status_1_and_one_line(cli: Cli) -> None:
    outcome = cli(*OPACUS, "--claimed-epsilon", 0.01)
    assert outcome.status == 1
    assert outcome.stderr.startswith("fedcdp: the check failed: the claimed ε = 0.01 is smaller")
    assert outcome.stderr.count("\n") == 1


def test_tables_and_page_are_written(cli: Cli, workplace: Path) -> None:
    outcome = cli(*OPACUS, "--out", "check.html")
    assert outcome.status == 0
    assert "Attacks that apply" in outcome.stdout
    assert "Report: check.html" in outcome.stdout
    assert "ε for each adversary" in (workplace / "check.html").read_text()


def test_the_honest_loop_ends_with_status_0(cli: Cli, loops: str) -> None:
    found = answer(cli("check", f"{loops}:honest", *QUICK, "--noise-multiplier", 1, "--json"))
    assert found["verdict"] == "consistent with the claim"
    assert found["audit"]["trials"] == 100
    assert len(found["tensors"]) == 6


def test_what_a_function_prints_is_not_in_the_json(cli: Cli, loops: str) -> None:
    found = answer(cli("check", f"{loops}:chatty", *QUICK, "--json"))
    assert found["verdict"] == "no claim to compare with"


def test_a_loop_without_noise_ends_with_status_1(cli: Cli, loops: str) -> None:
    outcome = cli("check", "loop", f"{loops}:raw", *QUICK, "--claimed-epsilon", 8, "--out", "check.html")
    assert outcome.status == 1
    assert "without noise" in outcome.stderr
    assert "What leaves the client" in outcome.stdout
    assert Path("check.html").exists()


def test_ones_own_file_is_the_batch(cli: Cli, loops: str, own_npz: Path) -> None:
    given = ["--data", own_npz, "--records", 3, "--model", "mlp", "--trials", 100, "--quiet", "--json"]
    found = answer(cli("check", f"{loops}:raw", *given))
    assert found["verdict"] == "leaks"
    assert found["facts"]["records"].startswith("3;")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["check", "opacus"], "--sample-rate: give it"),
        (["check", "opacus", "--noise-multiplier", 1, "--sample-rate", 0.1], "--steps, --epochs"),
        (["check", "opacus", "--sample-rate", 0.1, "--steps", 5], "--noise-multiplier: give it"),
        (["check", "opacus", "--batch-size", 9, "--records", 5, "--steps", 5], "--batch-size: 9"),
        ([*OPACUS, "--delta", 2], "delta: 2"),
        ([*OPACUS, "--clip", 1, "--clip", 2], "clip: with clipping flat, Opacus takes one number"),
        ([*OPACUS, "--clipping", "adaptive"], "unclipped_num_std: give it"),
        ([*OPACUS, "--clipping", "adaptive", "--unclipped-num-std", 5], "records: give their number"),
        ([*OPACUS, "--out", "no/such/check.html"], "there is no directory"),
        ([*FLOWER, "--wrapper", "none"], "wrapper: 'none' is not one of"),
        ([*FLOWER, "--wrapper", "server-fixed", "--sensitivity", 1], "--sensitivity: only for --wrapper local"),
        ([*FLOWER, "--wrapper", "local"], "not for --wrapper local"),
        (["check", "flower", "--wrapper", "server-fixed"], "--clients: give it"),
        (["check", "nothing"], "No such command"),
        (["check", "LOOPS:honest"], "--data, --dataset: give exactly one"),
        (["check", "LOOPS:honest", *QUICK, "--records", 1], "--records: 1"),
        (["check", "LOOPS:honest", *QUICK, "--steps", 3], "only with --noise-multiplier"),
        (["check", "LOOPS:nothing", *QUICK], "cannot be imported as a function"),
        (["check", "LOOPS:number", *QUICK], "cannot be imported as a function"),
        (["check", "LOOPS:broken", *QUICK], "broken failed on 8 records: RuntimeError: two"),
        (["check", "LOOPS:leaving", *QUICK], "leaving failed on 8 records: SystemExit"),
        (["check", "os:getcwd", *QUICK], "Python's own library"),
        (["check", ":", *QUICK], "cannot be imported"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(cli: Cli, loops: str, given: list[Any], said: str) -> None:
    outcome = cli(*(str(each).replace("LOOPS", loops) for each in given))
    assert outcome.status == 2, outcome.stdout
    assert said in outcome.stderr
    assert outcome.stderr.startswith("fedcdp: ")
    assert outcome.stderr.count("\n") == 1
