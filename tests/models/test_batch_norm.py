"""BatchNorm with fixed statistics is trained around and never updated; any other is refused or replaced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcdp
from fedcdp.config.plan import Plan
from fedcdp.data.partition import partition
from fedcdp.engine import engines_for
from fedcdp.engine.base import Batch
from fedcdp.errors import ModelError
from fedcdp.models.batch_norm import mixing_layers
from fedcdp.models.networks import prepare
from fedcdp.training import trainer
from tests.methods.test_against_naive_loop import assert_close, small_plan, train_naively
from tests.support.own_models import FrozenCnn, ResNet, images

PRIVATE = ["fed-sdp", "fed-cdp", "fed-cdp-decay"]


def pretrained(norm: nn.Module) -> nn.Module:
    """A batch norm with statistics of its own, in evaluation mode."""
    nn.init.uniform_(norm.running_mean, -0.3, 0.3)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    return norm.eval()


def sequence(trains_norm: bool = True) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        norm = pretrained(nn.BatchNorm2d(4)).requires_grad_(trains_norm)
        return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def federation(count: int = 24) -> fedcdp.Federation:
    return partition(images(count), indices=[range(first, first + 6) for first in range(0, count, 6)])


# Fixed statistics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", PRIVATE)
@pytest.mark.parametrize(
    "model", [FrozenCnn(), sequence(), sequence(trains_norm=False)], ids=["backbone", "trained", "frozen"]
)
def test_a_batch_norm_in_evaluation_mode_stays_in_it(method: str, model: nn.Module) -> None:
    ready = prepare(model, Plan(method=method), "cpu")
    norms = [layer for layer in ready.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert norms
    assert not any(layer.training for layer in norms)
    assert all(torch.equal(value, statistics(model)[name]) for name, value in ready.named_buffers())


@pytest.mark.parametrize("engine", ["functional", "batched"])
@pytest.mark.parametrize("whole", [False, True], ids=["features kept", "whole network"])
@pytest.mark.parametrize(
    "model", [FrozenCnn(), sequence(), sequence(trains_norm=False)], ids=["backbone", "trained", "frozen"]
)
def test_training_leaves_statistics_bit_identical(
    model: nn.Module, engine: Any, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks: list[nn.Module] = []
    split = trainer.split

    def watched(network: nn.Module, *rest: Any) -> Any:
        networks.append(network)
        return (None, network) if whole else split(network, *rest)

    monkeypatch.setattr(trainer, "split", watched)
    before = statistics(model)
    run = fedcdp.simulate(model, federation(), small_plan(rounds=2, noise_multiplier=0.5), engine=engine)
    for network in (model, run.model, *networks):  # the last one computed gradients from raw records
        assert all(torch.equal(value, before[name]) for name, value in network.named_buffers())


@pytest.mark.parametrize("engine", ["functional", "batched"])
def test_a_raw_batch_leaves_statistics_bit_identical(engine: Any) -> None:
    model = prepare(sequence(), Plan(), "cpu")
    before = statistics(model)
    (local,) = engines_for(model, nn.functional.cross_entropy, engine).values()
    inputs, targets = images(6)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    batch = Batch(100 + inputs[None], targets[None], torch.ones(1, 6, dtype=torch.bool))
    local.check(weights, batch, per_example=True)
    local.outputs(weights, batch.inputs[0])
    single = {name: value[None] for name, value in weights.items()}
    for compute in (local.per_example_gradients, local.summed_gradients, local.plain_sum):
        compute(single, batch)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


@pytest.mark.parametrize("engine", ["functional", "batched"])
@pytest.mark.parametrize("make", [sequence, FrozenCnn], ids=["trained", "backbone"])
def test_fixed_statistics_train_as_the_naive_loop(make: Any, engine: Any) -> None:
    model, clients, plan = make(), federation(), small_plan(noise_multiplier=0.7)
    expected = train_naively(model, clients, plan)
    assert_close(dict(fedcdp.simulate(model, clients, plan, engine=engine).model.named_parameters()), expected)


def test_without_privacy_fixed_statistics_are_kept_too() -> None:
    model = sequence()
    run = fedcdp.simulate(model, federation(), small_plan(method="nonprivate"))
    assert all(torch.equal(value, statistics(model)[name]) for name, value in run.model.named_buffers())


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(4).requires_grad_(False), nn.BatchNorm2d(4, track_running_stats=False).eval()],
    ids=["frozen, in training mode", "no statistics"],
)
def test_a_batch_norm_that_uses_the_batch_is_refused(norm: nn.Module) -> None:
    model = sequence()
    model[1] = norm
    with pytest.raises(ModelError, match=r"layer 1 is BatchNorm2d, which mixes.*fedcdp\.replace_batch_norm.*\.eval\(\)"):
        prepare(model, Plan(), "cpu")


def test_training_mode_after_evaluation_mode_counts() -> None:
    with pytest.raises(ModelError, match=r"layer backbone\.norm is BatchNorm2d"):
        prepare(FrozenCnn().train(), Plan(), "cpu")


def test_a_module_keeps_its_mode_and_may_switch_its_randomness_off() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(nn.functional.dropout(inputs.flatten(1), 0.5, self.training))

    model = Dropping()
    with pytest.raises(ModelError, match=r"draws random numbers.*\.eval\(\)"):
        fedcdp.simulate(model, federation(), small_plan())
    assert not fedcdp.simulate(model.eval(), federation(), small_plan()).model.training


def test_a_lazy_layer_is_refused_before_it_has_a_shape() -> None:
    with pytest.raises(ModelError, match=r"1\.weight has no shape yet"):
        prepare(nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), Plan(), "cpu")


# The replacement ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "groups"),
    [
        (nn.BatchNorm1d(10), 1),
        (nn.BatchNorm2d(3), 1),
        (nn.BatchNorm2d(7), 1),
        (nn.BatchNorm2d(8), 2),
        (nn.BatchNorm2d(20), 5),
        (nn.BatchNorm2d(64), 16),
        (nn.BatchNorm2d(512), 32),
        (nn.BatchNorm3d(24), 6),
        (nn.SyncBatchNorm(16), 4),
    ],
    ids=lambda each: str(each).partition(",")[0],
)
def test_groups_divide_the_channels_and_hold_several(norm: nn.Module, groups: int) -> None:
    found = fedcdp.replace_batch_norm(nn.Sequential(norm))[0]
    assert type(found) is nn.GroupNorm
    assert (found.num_groups, found.num_channels) == (groups, norm.num_features)


def test_the_replacement_copies_what_the_layer_had() -> None:
    norm = nn.BatchNorm2d(8, eps=0.25)
    nn.init.normal_(norm.weight)
    norm.bias.requires_grad_(False)
    model = nn.Sequential(norm, nn.ModuleDict({"again": norm, "bare": nn.BatchNorm2d(8, affine=False)}))
    found = fedcdp.replace_batch_norm(model)
    assert torch.equal(found[0].weight, norm.weight)
    assert found[0].weight is not norm.weight
    assert (found[0].eps, found[0].weight.requires_grad, found[0].bias.requires_grad) == (0.25, True, False)
    assert found[1]["again"] is found[0]
    assert found[1]["bare"].weight is None
    assert model[0] is norm
    assert not mixing_layers(found)


def test_a_network_that_is_itself_a_batch_norm_is_replaced() -> None:
    assert type(fedcdp.replace_batch_norm(nn.BatchNorm1d(4))) is nn.GroupNorm


def test_fixed_statistics_are_not_replaced() -> None:
    model = nn.Sequential(pretrained(nn.BatchNorm2d(4)), nn.BatchNorm2d(4))
    assert [type(layer) for layer in fedcdp.replace_batch_norm(model)] == [nn.BatchNorm2d, nn.GroupNorm]


class OtherBatchNorm(nn.BatchNorm2d):
    """Another library's, which may do anything."""


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.LazyBatchNorm2d(), "channels are not known yet; run a made-up batch"),
        (OtherBatchNorm(4), "no known replacement"),
        (nn.BatchNorm1d(1), "GroupNorm would set to zero"),
    ],
)
def test_a_layer_without_replacement_is_refused(norm: nn.Module, reason: str) -> None:
    with pytest.raises(ModelError, match=f"layer 0 is {type(norm).__name__}.*{reason}"):
        fedcdp.replace_batch_norm(nn.Sequential(norm))


@pytest.mark.parametrize("kind", ["images", "vectors"])
def test_the_replaced_network_learns(kind: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        vectors = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        model = fedcdp.replace_batch_norm(ResNet() if kind == "images" else vectors)
    clients = partition(images(90), clients=3, scheme="iid", validation=images(60))
    plan = Plan(
        rounds=25, per_round=3, local_steps=1, batch_size=30, slots=60, clip=1, clip_mode="flat", noise_multiplier=0.05,
        learning_rate=1,
    )  # fmt: skip
    untouched = copy.deepcopy(model.state_dict())
    run = fedcdp.simulate(model, clients, plan, evaluate_every=25)
    assert run.accuracy is not None
    assert run.accuracy > 0.8
    assert all(torch.equal(value, untouched[name]) for name, value in model.state_dict().items())
