"""The kernel against the engines: the same weights after all steps, whatever the batch; and what it leaves to them.

Without a GPU the kernel runs under Triton's interpreter, in NumPy.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import Federation, partition
from fedcdp.engine import Batch, BatchedEngine, FunctionalEngine, kernel
from fedcdp.errors import ModelError
from fedcdp.files.tree import Tree, repeat
from fedcdp.mechanism.noise import deviation_of_step_sum, noise_of
from fedcdp.mechanism.randomness import stream_key
from fedcdp.methods import METHODS, Moment
from fedcdp.methods.base import Local
from fedcdp.models.networks import build, prepare
from fedcdp.training.local_engines import Examples, KernelEngine, StepwiseEngine, refusal
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.rundir import State
from fedcdp.training.simulate import simulate
from tests.support.pairs import sample_first

ROUND = 7
CLASSES = 3
EXAMPLES = 12

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def device() -> torch.device:
    """A GPU, or the CPU with the kernel as the interpreter takes it."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Case:
    """Clients with records in some steps."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    work: kernel.Work

    @property
    def weights(self) -> Tree:
        return {name: p.detach() for name, p in self.model.named_parameters()}


def case_of(
    device: torch.device, counts: list[list[int]], shape: tuple[int, ...] = (1, 10, 10), activation: str | None = None
) -> Case:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.tensor(counts, device=device)
    slots = max(1, int(drawn.max()))
    records = torch.randint(EXAMPLES, (*drawn.shape, slots), generator=generator).to(device)
    clients = torch.tensor([5, 2**31 + 3, 0], device=device)[: len(drawn)]
    expected = torch.tensor([4, 4, 2], device=device)[: len(drawn)]
    return Case(
        build("cnn", shape, CLASSES, activation).to(device),
        torch.randn(EXAMPLES, *shape, generator=generator).to(device),
        torch.randint(CLASSES, (EXAMPLES,), generator=generator).to(device),
        kernel.Work(records, drawn, clients, expected),
    )


def plan_of(**changes: object) -> Plan:
    settings = {"method": "fed-cdp", "clip": "0.5", "noise_multiplier": 0.05, "batch_size": 4, "seed": 2, "local_steps": 2}
    return Plan(**(settings | changes))


def by_engine(case: Case, plan: Plan, engine: BatchedEngine | FunctionalEngine) -> Tree:
    """What `Method.local_step` makes of the same work."""
    work = case.work
    at = Moment(plan, engine, noise_of(plan, engine.layout), ROUND, work.clients, work.expected_batch)
    local = Local(repeat(case.weights, len(work.clients)))
    for step in range(work.records.shape[1]):
        records = work.records[:, step]
        present = torch.arange(records.shape[1], device=records.device) < work.counts[:, step, None]
        batch = Batch(case.inputs[records], case.targets[records], present)
        local = METHODS[plan.method].local_step(local, batch, replace(at, step=step))
    return local.weights


def by_kernel(case: Case, plan: Plan, tuning: kernel.Tuning | None = None) -> Tree:
    rule = kernel.StepRule(plan.learning_rate_at(ROUND), noise_key=stream_key(plan.seed, "step-noise", ROUND))
    if plan.method == "fed-cdp":
        deviation = deviation_of_step_sum(plan, ROUND)
        rule = replace(rule, clip_bound=plan.clip_at(ROUND), flat=plan.clip_mode == "flat", deviation=deviation)
    network = kernel.cnn_of(case.model)
    return kernel.train(network, case.weights, case.inputs, case.targets, case.work, rule, tuning)


def assert_same(found: Tree, expected: Tree) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


FULL = [[3, 2], [2, 3]]
POISSON = [[4, 0], [0, 1], [0, 0]]


@needs_triton
@pytest.mark.parametrize("engine", sample_first([BatchedEngine, FunctionalEngine]))
def test_fed_cdp_with_its_noise(device: torch.device, engine: type) -> None:
    case, plan = case_of(device, FULL), plan_of()
    assert_same(by_kernel(case, plan), by_engine(case, plan, engine(case.model, F.cross_entropy)))


@needs_triton
@pytest.mark.parametrize(
    "changes",
    [{"noise_multiplier": 0.0}, {"clip": "50"}, {"clip_mode": "flat"}, {"method": "nonprivate"}],
    ids=["no noise", "nothing clipped", "flat", "nonprivate"],
)
def test_other_plans(device: torch.device, changes: dict[str, object]) -> None:
    case, plan = case_of(device, [[3]]), plan_of(**changes)
    assert_same(by_kernel(case, plan), by_engine(case, plan, BatchedEngine(case.model, F.cross_entropy)))


@needs_triton
@pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
def test_other_activations_and_images_of_three_colours(device: torch.device, activation: str) -> None:
    case, plan = case_of(device, [[2]], (3, 11, 13), activation), plan_of()
    assert_same(by_kernel(case, plan), by_engine(case, plan, BatchedEngine(case.model, F.cross_entropy)))


@needs_triton
def test_other_numbers_of_channels(device: torch.device) -> None:
    case, plan = case_of(device, [[2]]), plan_of()
    network = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(), nn.Linear(32, CLASSES, bias=False),
    )  # fmt: skip
    case = replace(case, model=network.to(device))
    assert_same(by_kernel(case, plan), by_engine(case, plan, BatchedEngine(case.model, F.cross_entropy)))


@pytest.mark.slow
@needs_triton
def test_a_step_without_examples_is_noise_alone(device: torch.device) -> None:
    case, plan = case_of(device, POISSON), plan_of()
    found = by_kernel(case, plan, kernel.Tuning(programs=2))  # one program trains two clients
    assert_same(found, by_engine(case, plan, BatchedEngine(case.model, F.cross_entropy)))
    silent = by_kernel(case, plan_of(noise_multiplier=0.0))
    assert all(torch.equal(silent[name][2], value) for name, value in case.weights.items())


@pytest.mark.slow
@needs_triton
def test_more_examples_than_the_dense_layer_takes_at_once(device: torch.device) -> None:
    case, plan = case_of(device, [[18]]), plan_of()
    assert_same(by_kernel(case, plan), by_engine(case, plan, BatchedEngine(case.model, F.cross_entropy)))


@needs_triton
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("method", ["fed-cdp", "nonprivate"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_an_example_that_is_not_finite_is_left_out(device: torch.device, method: str, bad: float) -> None:
    if method == "nonprivate" and bad == 1e30:
        pytest.skip("its gradient is finite, and no longer says anything about rounding")
    case, plan = case_of(device, [[3]]), plan_of(method=method)
    case.inputs[case.work.records[0, 0, 1], 0, 4, 4] = bad
    found = by_kernel(case, plan)
    assert all(value.isfinite().all() for value in found.values())
    assert_same(found, by_engine(case, plan, BatchedEngine(case.model, F.cross_entropy)))


# What fits ------------------------------------------------------------------------------------------------------------


def _cnn(**changes: object) -> nn.Sequential:
    model = build("cnn", (1, 10, 10), CLASSES)
    assert isinstance(model, nn.Sequential)
    for place, layer in changes.items():
        model[int(place.removeprefix("layer"))] = layer
    return model


@needs_triton
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_the_papers_cnn_fits(shape: tuple[int, ...]) -> None:
    assert kernel.fits(build("cnn", shape, 10), F.cross_entropy) is None


@needs_triton
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (build("mlp", (4,), CLASSES), "not convolution"),
        (_cnn(layer0=nn.Conv2d(1, 32, 3)), "bias"),
        (_cnn(layer0=nn.Conv2d(1, 32, 3, padding=1, bias=False)), "3×3"),
        (_cnn(layer0=nn.Conv2d(1, 30, 3, bias=False)), "30 channels"),
        (_cnn(layer1=nn.Tanh()), "both ReLU"),
        (_cnn(layer2=nn.MaxPool2d(2, ceil_mode=True)), "2×2"),
        (_cnn(layer7=nn.Linear(64, CLASSES, bias=False).requires_grad_(False)), "frozen"),
        (build("cnn", (1, 46, 46), CLASSES), "too large"),
    ],
    ids=["mlp", "bias", "padding", "channels", "activations", "pooling", "frozen", "large"],
)
def test_what_does_not_fit_is_named(model: nn.Module, reason: str) -> None:
    assert reason in str(kernel.fits(model, F.cross_entropy))


@needs_triton
def test_no_other_loss_fits() -> None:
    assert "loss" in str(kernel.fits(_cnn(), F.nll_loss))


def test_inputs_of_another_shape_are_refused() -> None:
    with pytest.raises(ModelError, match="shape"):
        kernel.cnn_of(_cnn()).check(torch.zeros(1, 1, 20, 20))


# As a local engine ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def federation() -> Federation:
    generator = torch.Generator().manual_seed(5)
    data = Dataset(
        torch.randn(60, 1, 10, 10, generator=generator), torch.randint(CLASSES, (60,), generator=generator), CLASSES
    )
    return partition(Splits("dots", data, data, None, "as drawn"), clients=6, scheme="iid")


def trained(federation: Federation, plan: Plan, device: torch.device, by_kernel: bool, tap: object = None) -> Tensor:
    """The global weights after a round of four clients."""
    network = prepare(build("cnn", (1, 10, 10), CLASSES), plan, device)
    engine = BatchedEngine(network, F.cross_entropy)
    simulator = Simulator.stepwise(ClientData(federation, plan, device), engine, 3)
    method = METHODS[plan.method]
    make = KernelEngine if by_kernel else lambda method, _, *rest: StepwiseEngine(method, *rest)
    simulator.local_engine = make(method, plan, engine, simulator.data.examples)
    if tap is not None:
        simulator.moment = lambda *given: replace(Simulator.moment(simulator, *given), tap=tap)
    weights = {name: p.detach() for name, p in network.named_parameters()}
    state = simulator.round(State(0, weights, None, None), torch.tensor([0, 2, 3, 5]))
    return engine.layout.flatten(state.weights, lead=0)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("method", sample_first(["fed-cdp", "fed-sdp", "nonprivate"]))
def test_a_round_of_the_simulator_ends_in_the_same_model(federation, device, method) -> None:
    plan = plan_of(method=method, record_sampling="poisson", batch_size=2, rounds=1, per_round=4)
    torch.testing.assert_close(
        trained(federation, plan, device, by_kernel=True),
        trained(federation, plan, device, by_kernel=False),
        rtol=0,
        atol=1e-5,
    )


@needs_triton
def test_what_somebody_reads_is_trained_step_by_step(federation, device) -> None:
    plan, seen = plan_of(rounds=1, per_round=4), []
    with_reader = trained(federation, plan, device, by_kernel=True, tap=lambda reader, *_: seen.append(reader))
    assert "type2" in seen
    torch.testing.assert_close(with_reader, trained(federation, plan, device, by_kernel=False, tap=lambda *_: None))


@needs_triton
def test_a_device_that_refuses_the_kernel_trains_by_the_batched_engine_and_a_line_says_so(
    federation, device, monkeypatch, caplog
) -> None:
    from triton.errors import TritonError

    def refuses(*_: object) -> Tree:
        raise TritonError("out of shared memory\nand more")

    monkeypatch.setattr(kernel, "train", refuses)
    plan = plan_of(rounds=1, per_round=4)
    with caplog.at_level(logging.WARNING, logger="fedcdp"):
        found = trained(federation, plan, device, by_kernel=True)
    assert torch.equal(found, trained(federation, plan, device, by_kernel=False))
    assert [record.getMessage() for record in caplog.records] == [
        "using the batched engine: the kernel cannot run on this device: out of shared memory"
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"momentum": 0.5}, "momentum"), ({"secure_noise": True}, "secure noise"), ({"clip": "quantile(0.5, 1)"}, "quantile")],
)
def test_plans_that_the_kernel_refuses(changes: dict[str, object], reason: str) -> None:
    class Elsewhere:
        is_cuda = True

    examples = Examples(Elsewhere(), Elsewhere())  # type: ignore[arg-type]
    assert reason in str(refusal(plan_of(**changes), BatchedEngine(_cnn(), F.cross_entropy), examples))


def test_asked_for_without_a_gpu_the_kernel_leaves_training_to_the_batched_engine(federation, caplog) -> None:
    plan = plan_of(rounds=1, per_round=2)
    with caplog.at_level(logging.WARNING, logger="fedcdp"):
        run = simulate(_cnn(), federation, plan, engine="kernel", device="cpu")
    assert run.engine == "batched"
    said = [record.getMessage() for record in caplog.records if "engine" in record.getMessage()]
    assert said == ["using the batched engine, not the kernel: there is no GPU"]
