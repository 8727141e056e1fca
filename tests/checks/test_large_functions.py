"""The check of functions that return too many numbers to keep: faults are still found, and sampling is stated."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.checks import Check, OpacusSettings, black_box, call_attacks, call_audit
from fedcdp.checks.probes import Moments
from tests.checks.loops import BATCH, Loop, dp_sgd
from tests.support.seeds import seeds

WIDTH = 1500
SETTINGS = OpacusSettings(noise_multiplier=1.0, sample_rate=0.1, steps=10)
Draw = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,503 returned numbers are too many to keep, and 315 are sampled."""
    for module in (black_box, call_attacks, call_audit):
        monkeypatch.setattr(module, "MOST_IN_DOUBLE", 1000)
    monkeypatch.setattr(call_audit, "_SAMPLED", 315)


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 3)


def examples() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(BATCH) % 3


def checked(loop: Loop, *, trials: int = 400, **more: Any) -> Check:
    given: dict[str, Any] = {"settings": SETTINGS} | more
    return fedcdp.check(loop, model=wide(), examples=examples(), trials=trials, **given)


def leaks(found: Check) -> str:
    return "; ".join(finding.text for finding in found.findings if finding.level == "leak")


def weaker(row: int, factor: float) -> Draw:
    """Gaussian noise, with less of it in one row of the weight."""

    def draw(each: Tensor) -> Tensor:
        noise = torch.randn_like(each)
        if each.dim() == 2:
            noise[row] *= factor
        return noise

    return draw


@pytest.mark.parametrize("seed", seeds(3))
def test_the_honest_loop_passes_and_the_sampling_is_stated(seed: int) -> None:
    found = checked(dp_sgd(), seed=seed)
    assert found.verdict == "consistent with the claim"
    assert found.audit is not None
    assert found.audit.strongest > 1.5  # the loop has ε = 4.38
    assert found.audit.sampled is not None
    assert 200 < found.audit.sampled < 400
    [text] = [finding.text for finding in found.findings if "drawn at random" in finding.text]
    assert "measured on all 4,503 numbers" in text
    assert found.summary()["audit"]["sampled"] == found.audit.sampled


@pytest.mark.parametrize("seed", seeds(2))
def test_half_the_noise_is_caught(seed: int) -> None:
    found = checked(dp_sgd(sigma=0.5), seed=seed)
    assert found.verdict == "exceeds the claim"
    assert "more than the claimed 4.377" in leaks(found)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_layer_without_noise_is_caught(name: str) -> None:
    assert f"without noise: {name}." in leaks(checked(dp_sgd(silent=(name,)), trials=100))


def test_a_missing_clip_is_caught() -> None:
    assert "not clipped: weight" in leaks(checked(dp_sgd(clip=None), trials=100))


@pytest.mark.parametrize("count", [1, WIDTH])
def test_a_part_without_noise_is_caught_to_the_last_number(count: int) -> None:
    def draw(each: Tensor) -> Tensor:
        noise = torch.randn_like(each)
        if each.dim() == 2:
            noise[1, -count:] = 0
        return noise

    found = checked(dp_sgd(draw=draw), trials=100)
    assert "without noise: weight." in leaks(found)
    assert found.tensors[0].silent == count


@pytest.mark.parametrize("seed", seeds(2))
def test_a_row_with_less_noise_is_caught(seed: int) -> None:
    found = checked(dp_sgd(draw=weaker(2, 0.05)), seed=seed)
    assert found.verdict == "exceeds the claim"
    assert found.audit is not None
    assert "by the noise of each number" in found.audit.statistic


def test_one_noise_for_all_numbers_is_caught() -> None:
    found = checked(dp_sgd(draw=lambda each: torch.randn(()).expand(each.shape)))
    assert found.audit is not None
    assert found.audit.strongest > 20  # the noise can be subtracted


def test_an_unknown_gradient_is_a_warning() -> None:
    def loss(_outputs: Tensor, _targets: Tensor) -> Tensor:
        raise ValueError("another loss")

    found = checked(dp_sgd(), trials=100, loss=loss)
    [text] = [finding.text for finding in found.findings if "may miss that noise is too weak" in finding.text]
    assert "of 4,503 numbers" in text
    assert not any("is compared with all of them" in finding.text for finding in found.findings)


def test_a_reconstruction_is_refused_with_the_reason() -> None:
    found = checked(dp_sgd(sigma=0.0), settings=None, trials=100)
    assert found.verdict == "leaks"
    assert any("take up to 1,000 numbers, and it returns 4,503" in finding.text for finding in found.findings)


def test_moments_are_those_of_all_calls() -> None:
    torch.manual_seed(0)
    calls = torch.randn(20, 7) * 1e-3 + 5
    calls[:, 0] = 0.1
    moments = Moments()
    for each in calls:
        moments.add({"a": each})
    torch.testing.assert_close(moments.mean["a"], calls.mean(0))
    torch.testing.assert_close(moments.variance("a"), calls.double().var(0).float(), rtol=1e-3, atol=0.0)
    assert (moments.deviation("a") == 0).nonzero().flatten().tolist() == [0]


MEMORY = """
import resource, torch, fedcdp
from torch import nn
torch.set_num_threads(1)
model, examples = nn.Linear(2000, 2000), (torch.randn(2, 2000), torch.tensor([0, 1]))
def leaves(model, inputs, labels):
    return [torch.randn(p.shape) for p in model.parameters()]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = fedcdp.check(leaves, model=model, examples=examples, trials=100)
assert found.audit.sampled
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_calls() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    values = 2000 * 2001
    assert int(done.stdout) < 60 * values + 400e6  # 32 calls alone would be 128 bytes for each number
