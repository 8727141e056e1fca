"""The estimate of a client's memory: it grows with what is held, and holds from above."""

from __future__ import annotations

import platform

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fedcdp.engine import Batch, BatchedEngine, FunctionalEngine
from fedcdp.engine.runtime import BUDGET, clients_within_budget, estimated_bytes, keep_freed_memory
from fedcdp.models.networks import build


def test_more_slots_leave_room_for_fewer_clients():
    model, example = build("cnn", (1, 28, 28), 10), torch.zeros(1, 28, 28)
    fits = [clients_within_budget(model, example, slots, per_example=True) for slots in (1, 5, 15, 10**9)]
    assert fits == sorted(fits, reverse=True)
    assert fits[-1] == 1


def test_a_network_that_does_not_take_the_example_is_left_to_the_engines_check():
    assert clients_within_budget(nn.Linear(3, 2), torch.zeros(5), 1, per_example=True) > 1


def test_a_network_that_keeps_what_it_sees_sees_no_record():
    class Remembers(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + inputs.mean(0)
            return super().forward(inputs)

    model = Remembers(3, 2)
    model.register_buffer("seen", torch.zeros(3))
    clients_within_budget(model, torch.ones(3), 1, per_example=True)
    assert not model.seen.any()


def test_the_network_keeps_no_hooks():
    model = build("cnn", (1, 28, 28), 10)
    clients_within_budget(model, torch.zeros(1, 28, 28), 5, per_example=True)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("engine", [BatchedEngine, FunctionalEngine])
@pytest.mark.parametrize(("network", "shape"), [("cnn", (1, 28, 28)), ("mlp", (105,)), ("cpl", (3, 16, 16))])
def test_what_a_step_holds_at_once_is_within_the_budget(engine, network, shape):
    model = build(network, shape, 10)
    fits = clients_within_budget(model, torch.zeros(shape), 5, per_example=True)
    clients = 8
    weights = {name: p.detach().expand(clients, *p.shape).clone() for name, p in model.named_parameters()}
    batch = Batch(torch.randn(clients, 5, *shape), torch.zeros(clients, 5, dtype=torch.int64), torch.ones(clients, 5) > 0)
    trained = engine(model, F.cross_entropy)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        trained.clipped_sum(weights, batch, trained.layout.layers, 1.0)
    held, peak = 0, 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert peak > 0
    assert peak / clients * fits <= BUDGET["cpu"]


def test_scores_of_attention_are_counted_however_it_is_written():
    class Attention(nn.Module):
        def __init__(self, fused):
            super().__init__()
            self.fused = fused

        def forward(self, tokens):
            if self.fused:
                return F.scaled_dot_product_attention(tokens, key=tokens, value=tokens)
            return F.softmax(tokens @ tokens.mT, -1) @ tokens

    for fused, copies in ((True, 1), (False, 2)):
        for length in (10, 1000):
            model, example = nn.Sequential(Attention(fused), nn.Linear(4, 2)), torch.ones(length, 4)
            others = 10 + length * (4 + 4 + 2)  # weights, inputs, and the outputs of both layers
            assert estimated_bytes(model, example, 1) == 16 * (others + copies * length**2)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries decide for themselves")
def test_what_a_step_frees_the_next_one_gets_without_a_page_fault():
    import resource

    def faults_of_a_step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [torch.ones(2**20) for _ in range(4)]
        del held
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    keep_freed_memory()
    assert min(faults_of_a_step() for _ in range(10)) < 100  # of the 4096 pages that a step writes to
