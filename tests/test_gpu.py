"""What a GPU does, against the CPU and the reference. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import Federation, partition
from fedcdp.engine import cuda_graphs
from fedcdp.files.tree import Layout
from fedcdp.mechanism.noise import SecureNoise, SeededNoise, StepNoise
from fedcdp.mechanism.randomness import gaussians, normals, stream_key, words
from fedcdp.mechanism.sampling import choose_records_of_steps
from fedcdp.methods import METHODS
from fedcdp.models.networks import build
from fedcdp.training.parallel_federations import ParallelFederations
from fedcdp.training.prepared import Prepared
from fedcdp.training.simulate import simulate

_Graph = cuda_graphs.Graph
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_words_are_those_of_the_cpu_to_the_bit() -> None:
    rows, first = torch.tensor([0, 5, 2**31 + 7]), torch.tensor([1, 2, 2**32 - 1])
    key = stream_key(3, "test")
    for length in (1, 4, 1003):
        assert torch.equal(words(key, rows, first, 9, length), words(key, rows.cuda(), first.cuda(), 9, length).cpu())


def test_normal_values_are_those_of_the_cpu_but_for_rounding() -> None:
    rows, key = torch.arange(50) * 7, stream_key(3, "test")
    torch.testing.assert_close(
        normals(key, rows.cuda(), 4, 5, 9001).cpu(), normals(key, rows, 4, 5, 9001), rtol=0, atol=5e-6
    )
    sources = torch.tensor([[key & 0xFFFFFFFF, key >> 32, 4, 5], [1, 2, 3, 4]])
    for dtype in (torch.float32, torch.float64):
        ours, theirs = gaussians(sources.cuda(), rows.cuda(), 999, dtype).cpu(), gaussians(sources, rows, 999, dtype)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)


def test_noise_within_a_program_is_the_noise_of_the_step() -> None:
    layout = Layout.of(build("mlp", (9,), 3))
    clients = torch.tensor([3, 1, 4]).cuda()
    noise = SeededNoise(7, layout)
    within = StepNoise(layout, torch.tensor(noise.sources(2, 6)).cuda())
    for name, value in noise.for_step(2, clients, 6, 0.3).items():
        torch.testing.assert_close(within.for_step(0, clients, -1, 0.3)[name], value)


@pytest.mark.parametrize("generator", ["philox", "chacha20"])
def test_secure_noise_is_standard_normal(generator: Any) -> None:
    if generator == "chacha20":
        pytest.importorskip("cryptography")
    layout = Layout.of(build("mlp", (400,), 3))
    drawn = layout.flatten(SecureNoise(layout, generator).for_step(0, torch.arange(20).cuda(), 0, 1.0), lead=1)
    assert abs(float(drawn.mean())) < 0.01
    assert float(drawn.std()) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "partition"])
def test_the_same_records_are_drawn(sampling: Any) -> None:
    plan = Plan(record_sampling=sampling, batch_size=4, local_steps=5)
    clients, sizes = torch.arange(30), torch.arange(30) % 7 * 20 + 1
    there, here = (choose_records_of_steps(plan, clients.to(d), sizes.to(d), 1) for d in ("cuda", "cpu"))
    assert torch.equal(there.present.cpu(), here.present)
    assert torch.equal(there.positions.cpu()[here.present], here.positions[here.present])


@pytest.fixture
def federation() -> Federation:
    generator = torch.Generator().manual_seed(5)
    data = Dataset(torch.rand(600, 1, 16, 16, generator=generator), torch.randint(10, (600,), generator=generator), 10)
    return partition(Splits("dots", data, data, None, "as drawn"), clients=20, scheme="iid")


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", ["partition", "poisson"])
def test_the_same_seed_gives_the_same_model_from_all_engines_after_three_rounds(federation, method, sampling) -> None:
    model = build("cnn", (1, 16, 16), 10)
    plan = Plan(
        method=method, rounds=3, per_round=14, local_steps=5, batch_size=4, record_sampling=sampling, noise_multiplier=0.3,
        clip="linear(2, 1)", learning_rate=0.05,
    )  # fmt: skip
    ends = {engine: flat(simulate(model, federation, plan, device="cuda", engine=engine).model)
            for engine in ("functional", "batched", "compiled", "kernel")}  # fmt: skip
    on_cpu = flat(simulate(model, federation, plan, engine="functional").model)
    assert (on_cpu - flat(model)).abs().max() > 1e-3
    for end in ends.values():
        torch.testing.assert_close(end, on_cpu, rtol=0, atol=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_steps_that_the_host_is_too_slow_for_are_recorded_and_give_the_same_model(federation, monkeypatch, momentum) -> None:
    recorded = []
    monkeypatch.setattr(cuda_graphs, "_HOST_IS_SLOWER", 0.0)
    monkeypatch.setattr(cuda_graphs, "Graph", lambda *given: recorded.append(_Graph(*given)) or recorded[-1])
    model = build("mlp", (1, 16, 16), 10)
    plan = Plan(
        method="fed-cdp", rounds=3, per_round=14, local_steps=5, batch_size=4, noise_multiplier=0.3, clip="linear(2, 1)",
        learning_rate=0.05, momentum=momentum, record_sampling="partition",
    )  # fmt: skip
    ends = [flat(simulate(model, federation, plan, device="cuda", engine=name).model) for name in ("compiled", "functional")]
    assert len(recorded) == 1
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", ["compiled", "kernel"])
def test_rounded_products_stay_near_exact_ones(federation, engine) -> None:
    model = build("cnn", (1, 16, 16), 10)
    plan = Plan(method="fed-cdp", rounds=2, per_round=14, local_steps=5, batch_size=4, noise_multiplier=0.3, clip=1.0)
    exact, rounded = (
        flat(simulate(model, federation, plan, device="cuda", engine=engine, tf32=tf32).model) for tf32 in (False, True)
    )
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=1e-2)


def test_federations_in_lockstep_train_as_on_the_cpu() -> None:
    data = Dataset(torch.randn(60, 9, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3, 3)
    plan = Plan(rounds=2, per_round=3, local_steps=2, batch_size=4, noise_multiplier=0.5)
    prepared = Prepared.of(build("mlp", (9,), 3), partition(data, clients=5, scheme="iid"), plan)
    kept = torch.rand(4, 60, generator=torch.Generator().manual_seed(1)) < 0.5
    found = [
        ParallelFederations(prepared, range(4), kept, device=torch.device(device), loss=F.cross_entropy).train()
        for device in ("cpu", "cuda")
    ]
    for ours, theirs in zip(*found, strict=True):
        for name, value in ours.items():
            torch.testing.assert_close(theirs[name].cpu(), value, rtol=1e-3, atol=1e-4)
