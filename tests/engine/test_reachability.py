"""Trainable tensors without influence are refused by name, from made-up inputs alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.data.partition import partition
from fedcdp.errors import ModelError
from tests.methods.test_against_naive_loop import small_plan
from tests.support.own_models import LoraMlp, images


class Forgetful(nn.Module):
    """A network with heads of which only the first is used."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(64, 3) for _ in range(heads))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.heads[0](inputs.flatten(1))


FEDERATION = partition(images(24), clients=4, scheme="iid")


@pytest.mark.parametrize("method", ["fed-cdp", "fed-sdp"])
def test_unused_tensors_are_refused_by_name(method: str) -> None:
    plan = small_plan(method=method)
    with pytest.raises(ModelError) as refused:
        fedcdp.simulate(Forgetful(2), FEDERATION, plan)
    assert str(refused.value) == (
        "heads.1.weight, heads.1.bias are trainable, but no output depends on them; freeze them (requires_grad_(False)) or "
        "use them in forward"
    )
    with pytest.raises(ModelError, match=r"heads\.2\.weight and 3 more are trainable"):
        fedcdp.simulate(Forgetful(4), FEDERATION, plan)


def test_a_single_unused_tensor_is_refused_in_the_singular() -> None:
    model = Forgetful(2)
    model.heads[1].bias.requires_grad_(False)
    with pytest.raises(ModelError, match=r"^heads\.1\.weight is trainable, but no output depends on it; freeze it"):
        fedcdp.simulate(model, FEDERATION, small_plan())


def test_frozen_unused_tensors_are_allowed() -> None:
    model = Forgetful(2)
    model.heads[1].requires_grad_(False)
    assert fedcdp.simulate(model, FEDERATION, small_plan()).rounds == 1


def test_unused_tensors_are_harmless_without_privacy() -> None:
    assert fedcdp.simulate(Forgetful(2), FEDERATION, small_plan(method="nonprivate")).rounds == 1


def test_a_tensor_whose_gradient_is_zero_is_used() -> None:
    model = LoraMlp()
    inputs, targets = images(6)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    assert not model.first.a.grad.any()
    assert fedcdp.simulate(model, FEDERATION, small_plan()).rounds == 1


def test_the_answer_does_not_depend_on_records(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcdp.engine import reachability

    seen: list[Tensor] = []
    real = reachability.outputs_of
    monkeypatch.setattr(reachability, "outputs_of", lambda model, inputs: seen.append(inputs) or real(model, inputs))
    fedcdp.simulate(Forgetful(1), FEDERATION, small_plan())
    assert seen
    assert not any(bool(torch.as_tensor(inputs).any()) for inputs in seen)
