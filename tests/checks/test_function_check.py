"""The check of a function: broken loops are caught, the honest one passes, bad functions are refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.checks import Check, OpacusSettings
from tests.checks.loops import BATCH, Loop, dp_sgd, examples, gradients, network
from tests.support.seeds import seeds

SETTINGS = OpacusSettings(noise_multiplier=1.0, sample_rate=0.1, steps=10)


def checked(loop: Loop, *, trials: int = 400, settings: OpacusSettings | None = SETTINGS, **more: Any) -> Check:
    return fedcdp.check(loop, model=network(), examples=examples(), settings=settings, trials=trials, **more)


def leaks(found: Check) -> str:
    return "; ".join(finding.text for finding in found.findings if finding.level == "leak")


def raw(model: nn.Module, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    weight, bias = gradients(model, inputs, labels)
    return [weight.mean(0), bias.mean(0)]


def trained(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The weights after one step, trained in place."""
    nn.functional.cross_entropy(model(inputs), labels).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.state_dict()


# The honest loop --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(4))
def test_the_honest_loop_passes(seed: int) -> None:
    found = checked(dp_sgd(), seed=seed)
    assert found.verdict == "consistent with the claim"
    assert not found.fails
    assert found.audit is not None
    assert found.audit.strongest > 2.0  # the attack has power: the loop has ε = 4.38


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_the_honest_loop_passes_with_many_seeds(sigma: float) -> None:
    settings = OpacusSettings(noise_multiplier=sigma, sample_rate=0.1, steps=10)
    verdicts = [checked(dp_sgd(sigma), settings=settings, trials=300, seed=seed).verdict for seed in range(20)]
    assert verdicts == ["consistent with the claim"] * 20


def test_the_honest_mean_passes_where_the_number_is_public() -> None:
    assert checked(dp_sgd(divide=True), relation="replace").verdict == "consistent with the claim"


def test_a_function_for_batches_of_one_length_is_checked() -> None:
    def leaves(model: nn.Module, inputs: Tensor, labels: Tensor) -> Any:
        assert len(inputs) == BATCH
        return dp_sgd(divide=True)(model, inputs, labels)

    assert checked(leaves, relation="replace", trials=200).verdict == "consistent with the claim"
    with pytest.raises(fedcdp.ModelError, match="failed on 3 records"):
        checked(leaves, trials=200)


def test_measured_noise_and_movement_are_those_of_the_loop() -> None:
    found = checked(dp_sgd(sigma=0.05), settings=None)
    for tensor in found.tensors:
        assert tensor.noise == pytest.approx(0.05 / BATCH, rel=0.25)
        assert tensor.bounded
        assert tensor.silent == 0
    far = sum(tensor.moved[1e4] ** 2 for tensor in found.tensors) ** 0.5
    assert far == pytest.approx(1 / BATCH, rel=0.1)  # the clip bound over the batch


# Sabotage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_layer_without_noise_is_caught(name: str, seed: int) -> None:
    found = checked(dp_sgd(silent=(name,)), seed=seed)
    assert found.verdict == "exceeds the claim"
    assert f"without noise: {name}." in leaks(found)


@pytest.mark.parametrize("seed", seeds(3))
def test_half_the_noise_is_caught(seed: int) -> None:
    found = checked(dp_sgd(sigma=0.5), seed=seed)
    assert found.verdict == "exceeds the claim"
    assert "more than the claimed 4.377" in leaks(found)


@pytest.mark.parametrize("seed", seeds(3))
def test_a_missing_clip_is_caught(seed: int) -> None:
    found = checked(dp_sgd(clip=None), seed=seed)
    assert found.verdict == "exceeds the claim"
    assert "not clipped: weight" in leaks(found)


def test_noise_from_a_fixed_seed_is_caught() -> None:
    def draw(each: Tensor) -> Tensor:
        return torch.randn(each.shape, generator=torch.Generator().manual_seed(7))

    found = checked(dp_sgd(draw=draw))
    assert found.verdict == "exceeds the claim"
    assert "fixed seed" in leaks(found)


def test_one_noise_for_all_entries_is_caught() -> None:
    found = checked(dp_sgd(draw=lambda each: torch.randn(()).expand(each.shape)))
    assert found.verdict == "exceeds the claim"
    assert found.audit is not None
    assert found.audit.strongest > 100  # the noise can be subtracted


def test_noise_that_shows_the_number_of_records_is_caught() -> None:
    found = checked(dp_sgd(sigma=3.0, divide=True, draw=lambda each: torch.randn_like(each)), settings=None, epsilon=2.0)
    assert found.verdict in ("leaks", "exceeds the claim")
    assert "depends on the number of records" in leaks(found)
    assert found.fails


def test_a_loss_that_leaves_beside_the_gradient_is_caught() -> None:
    def leaves(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        return dp_sgd()(model, inputs, labels) | {"loss": nn.functional.cross_entropy(model(inputs), labels).item()}

    assert "without noise: loss." in leaks(checked(leaves))


def test_raw_gradients_are_reconstructed() -> None:
    found = checked(raw, settings=None)
    assert found.verdict == "leaks"
    assert not found.fails  # nothing was claimed
    assert any(each.get("success_rate") == 1.0 for each in found.attacks)


def test_new_weights_are_attacked_as_the_update_they_are() -> None:
    found = checked(trained, settings=None)
    assert any(each.get("success_rate") == 1.0 for each in found.attacks)


# What is no leak --------------------------------------------------------------------------------------------------------


def test_the_number_of_records_is_named_and_not_attacked() -> None:
    def leaves(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        return dp_sgd()(model, inputs, labels) | {"num-examples": len(inputs)}

    found = checked(leaves)
    assert found.verdict == "consistent with the claim"
    assert any("(num-examples)" in finding.text for finding in found.findings)


def test_a_constant_without_noise_is_no_leak() -> None:
    def leaves(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        return dp_sgd()(model, inputs, labels) | {"round": 3, "frozen": torch.ones(2)}

    assert checked(leaves).verdict == "consistent with the claim"


def test_other_noise_is_judged_without_the_gaussian_bound() -> None:
    laplace = torch.distributions.Laplace(0.0, 4.0)
    found = checked(dp_sgd(draw=lambda each: laplace.sample(each.shape)))
    assert found.audit is not None
    assert found.audit.epsilon_gaussian is None
    assert found.verdict == "consistent with the claim"


def test_settings_give_the_table_and_say_that_nothing_is_proven() -> None:
    found = checked(dp_sgd())
    assert found.privacy is not None
    assert found.privacy.row("model").epsilon == SETTINGS.privacy().row("model").epsilon
    assert "no check can prove" in found.privacy.notes[0]
    broken = checked(dp_sgd(silent=("bias",)))
    assert broken.privacy is not None
    assert "none of them holds" in broken.privacy.notes[0]


def test_the_model_and_the_randomness_of_the_caller_stay() -> None:
    model, before = network(), network().state_dict()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    fedcdp.check(trained, model=model, examples=examples(), trials=100)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int]] = []
    checked(dp_sgd(), trials=100, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_token_ids_are_checked_with_larger_weights() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))

    def leaves(network: nn.Module, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(nn.functional.cross_entropy(network(inputs), labels), list(network.parameters())))

    tokens = torch.arange(12).reshape(4, 3) % 9
    found = fedcdp.check(leaves, model=model, examples=(tokens, torch.tensor([0, 1, 0, 1])), trials=100)
    assert found.verdict == "leaks"
    assert "With weights ten times as large" in leaks(found)
    assert found.multiplied == "weights"


def test_a_record_that_cannot_become_larger_tests_no_clipping() -> None:
    model = nn.Sequential(nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3))

    def leaves(network: nn.Module, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        loss = nn.functional.cross_entropy(network(inputs), labels, reduction="sum")
        return [each + torch.randn_like(each) for each in torch.autograd.grad(loss, list(network.parameters()))]

    found = fedcdp.check(leaves, model=model, examples=examples(), trials=100)
    assert all(tensor.bounded is None for tensor in found.tensors)
    assert any("clipping was not tested" in finding.text for finding in found.findings)


# Bad functions and arguments ---------------------------------------------------------------------------------------------


def failing(_model: nn.Module, _inputs: Tensor, _labels: Tensor) -> None:
    raise ZeroDivisionError("no luck")


def changing() -> Loop:
    calls = iter(range(10**6))
    return lambda _model, _inputs, _labels: torch.zeros(1 + next(calls) % 3)


def counted(_model: nn.Module, inputs: Tensor, _labels: Tensor) -> Tensor:
    return torch.zeros(len(inputs))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (failing, "failing failed on 4 records: ZeroDivisionError: no luck"),
        (changing(), "every call must return the same shapes"),
        (counted, "every call must return the same shapes"),
        (lambda _model, _inputs, _labels: "gradients", "returned str in returned"),
        (lambda _model, _inputs, _labels: {}, "returned no tensor"),
        (lambda _model, _inputs, _labels: [], "returned no tensor"),
        (lambda _model, _inputs, _labels: None, "returned NoneType in returned"),
        (lambda model, _inputs, _labels: model, "returned a network"),
        (lambda _model, _inputs, _labels: torch.tensor([1.0, float("nan")]), "not finite"),
        (lambda _model, inputs: inputs, "TypeError"),
        (lambda _model, _inputs, _labels: {"a": object()}, "returned object in a"),
    ],
)
def test_a_bad_function_is_refused_in_one_line(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(fedcdp.ModelError, match=said) as refused:
        checked(function, trials=100)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"trials": 50}, "trials: 50"),
        ({"relation": "swap"}, "relation: 'swap'"),
        ({"epsilon": 3.0}, "leave them out"),
        ({"epsilon": -1.0, "settings": None}, "epsilon: -1.0"),
        ({"delta": 1.5, "settings": None}, "delta: 1.5"),
        ({"examples": (torch.zeros(1, 6), torch.zeros(1))}, "two or more records"),
        ({"examples": (torch.zeros(3, 6), torch.zeros(2))}, "two or more records"),
        ({"examples": (torch.full((3, 6), float("inf")), torch.zeros(3))}, "must be finite"),
        ({"examples": None}, "needs both"),
        ({"model": None}, "needs both"),
        ({"model": "mlp"}, "model"),
    ],
)
def test_bad_arguments_are_refused(wrong: dict[str, Any], said: str) -> None:
    given = {"model": network(), "examples": examples(), "settings": SETTINGS} | wrong
    with pytest.raises(fedcdp.FedcdpError, match=said):
        fedcdp.check(dp_sgd(), **given)


def test_arguments_of_a_function_do_not_go_with_settings() -> None:
    with pytest.raises(fedcdp.PlanError, match="model, trials: only for a function"):
        fedcdp.check(SETTINGS, model=network(), trials=200)
