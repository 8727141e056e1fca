"""The kernel on a GPU: its agreement with the batched engine, and the time of a client's local step.

    python benchmarks/kernel.py --clients 500 1000 5000

Inputs and targets are random: neither the time nor the agreement depends on them. Local training is that of Fed-CDP,
including noise, with the paper's CNN.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.engine import Batch, BatchedEngine, kernel
from fedcdp.files.tree import Tree, repeat
from fedcdp.mechanism.noise import deviation_of_step_sum, noise_of
from fedcdp.mechanism.randomness import stream_key
from fedcdp.methods import METHODS, Moment
from fedcdp.methods.base import Local
from fedcdp.models.networks import build

EXAMPLES = 2000
CLASSES = 10
SHAPES = ((1, 28, 28), (3, 32, 32))


@dataclass(frozen=True)
class Case:
    """Clients with random records, and a plan for them."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    work: kernel.Work
    plan: Plan

    @property
    def weights(self) -> Tree:
        return {name: p.detach() for name, p in self.model.named_parameters()}


def case_of(shape: tuple[int, ...], clients: int, steps: int, batch: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    records = torch.randint(EXAMPLES, (clients, steps, batch), generator=generator)
    work = kernel.Work(
        records.cuda(), torch.full((clients, steps), batch).cuda(), torch.arange(clients).cuda(),
        torch.full((clients,), batch).cuda(),
    )  # fmt: skip
    plan = Plan(batch_size=batch, local_steps=steps, noise_multiplier=0.1, learning_rate=0.05)
    inputs = torch.randn(EXAMPLES, *shape, generator=generator).cuda()
    targets = torch.randint(CLASSES, (EXAMPLES,), generator=generator).cuda()
    return Case(build("cnn", shape, CLASSES).cuda(), inputs, targets, work, plan)


def by_kernel(case: Case, tf32: bool) -> Tree:
    rule = kernel.StepRule(
        case.plan.learning_rate_at(0), case.plan.clip_at(0), deviation=deviation_of_step_sum(case.plan, 0),
        noise_key=stream_key(case.plan.seed, "step-noise", 0), tf32=tf32,
    )  # fmt: skip
    return kernel.train(kernel.cnn_of(case.model), case.weights, case.inputs, case.targets, case.work, rule)


def by_engine(case: Case, tf32: bool) -> Tree:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    engine, work = BatchedEngine(case.model, F.cross_entropy), case.work
    at = Moment(case.plan, engine, noise_of(case.plan, engine.layout), 0, work.clients, work.expected_batch)
    local = Local(repeat(case.weights, len(work.clients)))
    for step in range(work.records.shape[1]):
        records = work.records[:, step]
        batch = Batch(case.inputs[records], case.targets[records], torch.ones_like(records, dtype=torch.bool))
        local = METHODS[case.plan.method].local_step(local, batch, replace(at, step=step))
    return local.weights


def largest_difference(one: Tree, other: Tree) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def microseconds(case: Case, tf32: bool, repetitions: int = 3) -> float:
    """Microseconds per client step of a whole call: the median, after one call that compiles."""
    by_kernel(case, tf32)
    times = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        by_kernel(case, tf32)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 1000 * statistics.median(times) / case.work.counts.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[500, 1000, 5000])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=5)
    options = parser.parse_args()
    for shape in SHAPES:
        case = case_of(shape, 8, 3, options.batch)
        exact = by_engine(case, tf32=False)
        moved = largest_difference(exact, repeat(case.weights, 8))
        print(f"{shape}: weights moved by {moved:.1e}; the batched engine's tf32 is off by "
              f"{largest_difference(by_engine(case, tf32=True), exact):.1e}, the kernel by "
              f"{largest_difference(by_kernel(case, tf32=False), exact):.1e}, its tf32 by "
              f"{largest_difference(by_kernel(case, tf32=True), exact):.1e}")  # fmt: skip
        for clients in options.clients:
            case = case_of(shape, clients, options.steps, options.batch)
            fast, slow = (microseconds(case, tf32) for tf32 in (True, False))
            print(f"{shape}: {clients} clients: {fast:.2f} µs a client's step (tf32), {slow:.2f} µs", flush=True)


if __name__ == "__main__":
    main()
