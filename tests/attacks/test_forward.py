"""What a reader expects to see of examples: just what was captured of them where there is no noise, and differentiable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedcdp.attacks.objectives import Knows, Objective, check_reproduces, predicted
from fedcdp.attacks.observe import LEAKS, Captured, Leak
from fedcdp.errors import ModelError
from fedcdp.mechanism.clipping import clip, group_norms
from fedcdp.models.networks import build
from tests.support import naive
from tests.support.scenes import Scene, federation_of, flat, scene

SIZES = [9, 3, 6, 6]
METHODS: dict[str, dict[str, Any]] = {
    "nonprivate": {"method": "nonprivate"},
    "fed-sdp at the server": {"method": "fed-sdp", "noise_at": "server", "clip": 0.05},
    "fed-sdp at the client": {"method": "fed-sdp", "noise_at": "client", "clip": 0.05},
    "fed-cdp, example noise": {"method": "fed-cdp", "noise": "example"},
    "fed-cdp, batch noise": {"method": "fed-cdp", "noise": "batch"},
    "fed-cdp-decay": {"method": "fed-cdp-decay", "clip": "linear(0.5, 0.1)"},
    "fed-cdp, quantile": {"method": "fed-cdp", "clip": "quantile(0.5, 0.4)"},
    "fed-sdp at the client, quantile": {"method": "fed-sdp", "noise_at": "client", "clip": "quantile(0.5, 0.05)"},
}
PRUNED: dict[str, dict[str, Any]] = {
    "dssgd": {"method": "dssgd", "share_fraction": 0.3},
    "pruned": {"method": "nonprivate", "compression": 0.6},
    "pruned fed-cdp": {"method": "fed-cdp", "compression": 0.6},
}
KNOWS: tuple[Knows, ...] = ("gradient", "method")


def watched(problem: Any, method: str = "nonprivate", **fields: Any) -> Scene:
    """Without noise, with bounds that clip some gradients and not others."""
    defaults = {"clip": 0.5, "noise_multiplier": 0.0, "learning_rate": 0.2, "batch_size": 3}
    federation = federation_of(problem.inputs, problem.targets, SIZES)
    return scene(problem.model, federation, **defaults | (METHODS | PRUNED)[method] | fields)


def again(captured: Captured, knows: Knows = "method") -> Tensor:
    """What the true examples would show."""
    return flat(captured, predicted(captured, knows, captured.inputs, captured.targets, captured.present))


def assert_reproduced(captured: Captured) -> None:
    torch.testing.assert_close(again(captured), flat(captured), rtol=1e-4, atol=1e-5)
    check_reproduces(captured)


# Whoever knows the method ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fields", [{}, {"local_steps": 3, "momentum": 0.6}, {"clip_mode": "flat"}], ids=str)
def test_the_true_examples_show_what_was_seen_under_every_method(
    small: Any, method: str, leak: Leak, fields: dict[str, Any]
) -> None:
    there = watched(small, method, **fields)
    step = {"step": 2} if leak == "type2" and fields.get("local_steps") else {}
    assert_reproduced(there.look(leak, 4, **step))


@pytest.mark.parametrize("leak", ["type1", "type2"])
@pytest.mark.parametrize("method", ["nonprivate", "fed-cdp, batch noise", "fed-sdp at the client"])
def test_the_true_examples_show_what_was_seen_of_every_network(problem: Any, method: str, leak: Leak) -> None:
    assert_reproduced(watched(problem, method, local_steps=2).look(leak, 4))


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("method", METHODS)
def test_the_true_examples_show_what_was_seen_of_poisson_batches(small: Any, method: str, leak: Leak) -> None:
    """Of two records expected, in four steps: some slots and some steps are empty."""
    there = watched(small, method, record_sampling="poisson", batch_size=2, local_steps=4)
    captured = there.look(leak, 3)
    assert_reproduced(captured)
    if leak != "type2":
        assert len(set(captured.used.sum(2).flatten().tolist())) > 2


@pytest.mark.parametrize("leak", ["type1", "type0"])
@pytest.mark.parametrize("method", PRUNED)
def test_pruning_is_not_modelled_and_what_was_shared_is(small: Any, method: str, leak: Leak) -> None:
    captured = watched(small, method, local_steps=2).look(leak, 4)
    shared = flat(captured) != 0
    assert 0 < float(shared.double().mean()) < 0.5
    shown = again(captured)
    torch.testing.assert_close(shown[shared], flat(captured)[shared], rtol=1e-4, atol=1e-5)
    assert bool((shown != 0).all())
    assert float(Objective(shared_only=True).between(captured.engine.layout.unflatten(shown), captured.seen).max()) < 1e-8


def test_noise_is_not_modelled(small: Any) -> None:
    there = watched(small, "fed-cdp, example noise", noise_multiplier=2.0, local_steps=2)
    for leak in LEAKS:
        seen, silent = (there.look(leak, 4, silent=silent) for silent in (False, True))
        torch.testing.assert_close(again(seen), flat(silent), rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_true_examples_show_what_was_seen_under_any_plan(small: Any, data: st.DataObject) -> None:
    there = watched(
        small,
        data.draw(st.sampled_from(list(METHODS))),
        batch_size=data.draw(st.integers(1, 4)),
        record_sampling=data.draw(st.sampled_from(["poisson", "fixed", "partition"])),
        local_steps=data.draw(st.integers(1, 4)),
        momentum=data.draw(st.sampled_from([0.0, 0.8])),
        proximal=data.draw(st.sampled_from([0.0, 1.0])),
        clip_mode=data.draw(st.sampled_from(["layer", "flat"])),
        noise_multiplier=data.draw(st.sampled_from([0.0, 3.0])),
        learning_rate=data.draw(st.sampled_from([0.05, 0.5])),
        seed=data.draw(st.integers(0, 2**32)),
    )
    assert_reproduced(there.look(data.draw(st.sampled_from(LEAKS)), 1, silent=True))


def test_one_dummy_may_stand_for_all_examples(small: Any) -> None:
    """It is then used wherever one of them was: of equal examples it shows what was seen."""
    there = watched(small, "fed-cdp, batch noise", local_steps=2)
    captured = there.look("type1", 3)
    inputs, targets = captured.inputs[:, :1], captured.targets[:, :1]
    one = predicted(captured, "method", inputs, targets, captured.present[:, :1])
    every = predicted(
        captured, "method", inputs.expand_as(captured.inputs), targets.expand_as(captured.targets), captured.present
    )
    torch.testing.assert_close(flat(captured, one), flat(captured, every))


# Whoever takes it for a plain gradient ----------------------------------------------------------------------------------


def mean_gradient(problem: Any, captured: Captured, victim: int) -> Tensor:
    """By plain autograd, one example at a time."""
    weights = naive.trainable(problem.model)
    real = captured.present[victim]
    examples = zip(captured.inputs[victim][real], captured.targets[victim][real], strict=True)
    trees = [naive.gradient(problem.model, weights, example) for example in examples]
    return torch.stack([torch.cat([value.flatten() for value in tree.values()]) for tree in trees]).mean(0)


@pytest.mark.parametrize("local_steps", [1, 3])
def test_a_plain_gradient_is_the_mean_over_the_examples_once_for_every_step(problem: Any, local_steps: int) -> None:
    captured = watched(problem, local_steps=local_steps).look("type1", 4)
    shown = again(captured, "gradient")
    for victim in range(4):
        expected = local_steps * mean_gradient(problem, captured, victim)
        torch.testing.assert_close(shown[victim].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_plain_gradient_is_what_a_type2_reader_sees_without_privacy(problem: Any) -> None:
    captured = watched(problem).look("type2", 6)
    torch.testing.assert_close(again(captured, "gradient"), flat(captured), rtol=1e-4, atol=1e-6)


def test_at_a_clients_own_weights_a_plain_gradient_is_taken_there(small: Any) -> None:
    captured = watched(small, local_steps=3).look("type2", 6, step=2)
    torch.testing.assert_close(again(captured, "gradient"), flat(captured), rtol=1e-4, atol=1e-6)


def test_a_poisson_batch_is_divided_by_its_expected_size_however_many_were_drawn(small: Any) -> None:
    """A reader knows how many there are. Otherwise Poisson sampling would look like a defence."""
    captured = watched(small, record_sampling="poisson", batch_size=2).look("type1", 3)
    assert set(captured.present.sum(1).tolist()) - {2}
    torch.testing.assert_close(again(captured, "gradient"), flat(captured), rtol=1e-4, atol=1e-5)


def test_one_dummy_shows_as_much_gradient_as_all_examples_together(small: Any) -> None:
    captured = watched(small, record_sampling="poisson", batch_size=2, local_steps=2).look("type1", 3)
    inputs, targets = captured.inputs[:, :1], captured.targets[:, :1]
    single = captured.take(torch.arange(3))
    shown = flat(captured, predicted(single, "gradient", inputs, targets, captured.present[:, :1]))
    for victim in range(3):
        alone = replace(captured, present=torch.zeros_like(captured.present))
        alone.present[:, 0] = True
        expected = float(captured.used[:, victim].sum()) / 2 * mean_gradient(small, alone, victim)
        torch.testing.assert_close(shown[victim].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("knows", KNOWS)
@pytest.mark.parametrize("method", ["nonprivate", "fed-cdp, batch noise"])
def test_a_label_may_be_given_as_probabilities(small: Any, method: str, knows: Knows) -> None:
    for leak in LEAKS:
        captured = watched(small, method).look(leak, 4)
        soft = nn.functional.one_hot(captured.targets, 3).float()
        shown = predicted(captured, knows, captured.inputs, soft, captured.present)
        torch.testing.assert_close(flat(captured, shown), again(captured, knows), rtol=1e-4, atol=1e-5)


# The check before an attack -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("method", ["nonprivate", "fed-cdp, batch noise", "fed-sdp at the client"])
def test_a_capture_that_its_examples_do_not_reproduce_is_refused_in_a_sentence(small: Any, method: str, leak: Leak) -> None:
    captured = watched(small, method).look(leak, 4)
    wrong = {
        "normalised otherwise": replace(captured, inputs=(captured.inputs - 0.1) / 0.9),
        "other labels": replace(captured, targets=(captured.targets + 1) % 3),
        "other weights": replace(captured, weights={name: value + 0.1 for name, value in captured.weights.items()}),
        "not finite": replace(captured, inputs=captured.inputs * torch.nan),
    }
    for tampered in wrong.values():
        with pytest.raises(ModelError, match=r"^the true examples do not give this gradient at these weights \(they differ"):
            check_reproduces(tampered)


def test_one_bad_victim_is_enough_to_refuse(small: Any) -> None:
    captured = watched(small).look("type2", 4)
    inputs = captured.inputs.clone()
    inputs[2] += 0.2
    with pytest.raises(ModelError):
        check_reproduces(replace(captured, inputs=inputs))


def test_what_is_noised_or_pruned_cannot_be_checked(small: Any) -> None:
    noised = watched(small, "fed-cdp, example noise", noise_multiplier=1.0).look("type2", 4)
    pruned = watched(small, "dssgd").look("type1", 4)
    for captured in (noised, pruned):
        check_reproduces(replace(captured, inputs=captured.inputs + 1))
    raw = watched(small, "dssgd").look("type2", 4)
    with pytest.raises(ModelError):
        check_reproduces(replace(raw, inputs=raw.inputs + 1))


def test_a_gradient_of_zero_is_reproduced_by_zero(small: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False))
    dead = replace(small, model=model, inputs=torch.zeros_like(small.inputs))
    captured = watched(dead).look("type2", 4)
    assert not flat(captured).any()
    check_reproduces(captured)


# Slopes ---------------------------------------------------------------------------------------------------------------


def in_double(captured: Captured) -> Captured:
    return replace(captured, weights={name: value.double() for name, value in captured.weights.items()})


@pytest.mark.parametrize("leak", ["type1", "type2"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("knows", KNOWS)
def test_what_is_shown_has_the_slopes_that_small_differences_give(small: Any, method: str, leak: Leak, knows: Knows) -> None:
    """In float64; the norms by which a method clips stay in float32, hence the size of a difference."""
    captured = in_double(watched(small, method, local_steps=2, momentum=0.5).look(leak, 2))
    small.model.double()
    inputs = captured.inputs.double().requires_grad_()
    soft = torch.full((*captured.targets.shape, 3), 1 / 3, dtype=torch.float64)
    torch.manual_seed(1)
    weights = torch.randn(2, captured.engine.layout.size, dtype=torch.float64)

    def shown(examples: Tensor) -> Tensor:
        return (flat(captured, predicted(captured, knows, examples, soft, captured.present)) * weights).sum()

    (slopes,) = torch.autograd.grad(shown(inputs), inputs)
    assert bool(slopes.abs().amax((1, 2)).gt(1e-3).all())
    direction = torch.randn_like(inputs)
    step = 1e-3
    with torch.no_grad():
        difference = (shown(inputs + step * direction) - shown(inputs - step * direction)) / (2 * step)
    assert float((slopes * direction).sum()) == pytest.approx(float(difference), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("knows", KNOWS)
def test_what_is_shown_of_a_plain_method_passes_gradcheck(small: Any, knows: Knows) -> None:
    captured = in_double(watched(small, local_steps=2).look("type1", 2))
    small.model.double()
    soft = torch.full((*captured.targets.shape, 3), 1 / 3, dtype=torch.float64)

    def shown(examples: Tensor, labels: Tensor) -> Tensor:
        return flat(captured, predicted(captured, knows, examples, labels, captured.present))

    assert torch.autograd.gradcheck(shown, (captured.inputs.double().requires_grad_(), soft.requires_grad_()))


@pytest.mark.parametrize("leak", ["type1", "type2"])
@pytest.mark.parametrize("knows", KNOWS)
@pytest.mark.parametrize("distance", ["squared", "cosine"])
@pytest.mark.parametrize("method", METHODS)
def test_a_dummy_whose_gradient_is_zero_in_a_layer_has_finite_slopes(
    method: str, leak: Leak, knows: Knows, distance: Any
) -> None:
    """Black through a ReLU network without biases: nothing is shown, and a norm of 0 has no slope of its own."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(24, 1, 10, 10, generator=generator)
    federation = federation_of(inputs, torch.randint(3, (24,), generator=generator), SIZES)
    fields = {"clip": 0.5, "noise_multiplier": 0.0, "batch_size": 2} | METHODS[method]
    captured = scene(build("cnn", (1, 10, 10), 3), federation, **fields).look(leak, 3)
    for start in (torch.zeros_like(captured.inputs), -captured.inputs):
        dummies = start.requires_grad_()
        shown = predicted(captured, knows, dummies, captured.targets, captured.present)
        loss = Objective(distance).between(shown, captured.seen)
        (slopes,) = torch.autograd.grad(loss.sum(), dummies)
        assert bool(torch.isfinite(loss).all())
        assert bool(torch.isfinite(slopes).all())


def test_the_slope_of_clipping_leaves_its_values_as_they_are() -> None:
    """Zero, tiny, at the bound, beyond it, not finite: to the bit what the formula without that care gives."""
    rows = [[0.0, 0.0], [1e-30, 0.0], [1e-20, 1e-21], [3.0, 4.0], [30.0, -4.0], [torch.nan, 0.0], [torch.inf, 0.0]]
    gradients = {"w": torch.tensor(rows)[None]}
    everyone = torch.ones(1, len(rows), dtype=torch.bool)
    for bound in (1e-3, 5.0, 1e6):
        norms = gradients["w"].square().sum(-1).sqrt()
        plain = gradients["w"] * (bound / norms.clamp(min=bound))[..., None]
        plain = torch.where(torch.isfinite(norms)[..., None], plain, 0.0)
        assert torch.equal(clip(gradients, (("w",),), bound, everyone).values["w"], plain)
    assert group_norms(gradients, (("w",),), lead=2)[0][0, 0] < 1e-18
