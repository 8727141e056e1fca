"""Local training one step after the other, and what every trainer promises.

Local training by a kernel of our own, which keeps a client on one multiprocessor for all its steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedcdp.config.plan import Plan
from fedcdp.engine import kernel
from fedcdp.engine.base import Batch, Engine
from fedcdp.engine.batched import BatchedEngine
from fedcdp.engine.runtime import BUDGET, stop_if_asked
from fedcdp.files.tree import Tree, repeat
from fedcdp.mechanism.noise import SeededNoise
from fedcdp.mechanism.sampling import Draw
from fedcdp.methods import Local, Method, Moment, Sent, leave, take_part


@dataclass(frozen=True)
class Examples:
    """The training data on the device, where they stay; only places in them move."""

    inputs: Tensor
    targets: Tensor

    def batch(self, records: Tensor, present: Tensor) -> Batch:
        """The examples in some slots."""
        return Batch(self.inputs[records], self.targets[records], present)


class Trainer(Protocol):
    """Trains clients locally from the global weights."""

    engine: Engine

    @property
    def name(self) -> str:
        """As in `--engine`."""
        ...

    def __call__(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        """What leaves the clients after the steps of `draw` [steps, clients, slots], whose positions are records."""
        ...


@dataclass
class Stepwise:
    """Local training one step after the other, each as the method writes it. It serves every tap, and is the reference."""

    method: Method
    engine: Engine
    examples: Examples

    @property
    def name(self) -> str:
        """See `Trainer`."""
        return "batched" if isinstance(self.engine, BatchedEngine) else "functional"

    def __call__(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        """See `Trainer`."""
        return take_part(self.method, weights, self.batches(draw), at)

    def batches(self, draw: Draw) -> Iterator[Batch]:
        """The batches of the steps, cut to the slots that some client fills."""
        # Filled slots come first. One transfer for the whole round: asking at every step would make a GPU wait.
        widths = draw.present.any(1).sum(1).clamp(min=1).tolist()
        for records, present, width in zip(draw.positions, draw.present, widths, strict=True):
            stop_if_asked()
            yield self.examples.batch(records[:, :width], present[:, :width])


_LOG = logging.getLogger("fedcdp")
_COPIES = 6  # of a client's weights: before, inside, after, and while an update is formed
_WORD = 4


class Kernel:
    """All local steps of a chunk of clients in one launch, where `refusal` has nothing against it.

    What somebody reads is trained by the reference, step by step; so is everything from then on that a device's compiler
    refuses.
    """

    name = "kernel"

    def __init__(self, method: Method, plan: Plan, engine: Engine, examples: Examples) -> None:
        self.engine = engine
        self._stepwise = Stepwise(method, engine, examples)
        self._plan = plan
        self._network = kernel.cnn_of(engine.model)
        self._works = True

    def __call__(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        """See `Trainer`."""
        if at.tap is not None or not self._works:
            return self._stepwise(weights, draw, at)
        stop_if_asked()
        from triton.errors import TritonError

        try:
            return self._in_one_launch(weights, draw, at)
        except TritonError as error:
            self._works = False
            reason = str(error).strip().partition("\n")[0]
            _LOG.warning("the batched engine is used: the kernel cannot be run on this device: %s", reason)
            return self._stepwise(weights, draw, at)

    def _in_one_launch(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        examples = self._stepwise.examples
        work = kernel.Work(
            draw.positions.transpose(0, 1), draw.present.sum(-1, dtype=torch.int32).T, at.clients, at.expected_batch
        )
        after = kernel.train(self._network, weights, examples.inputs, examples.targets, work, self._rule(at))
        return leave(self._stepwise.method, repeat(weights, len(at.clients)), Local(after), at)

    def _rule(self, at: Moment) -> kernel.StepRule:
        tf32 = torch.get_float32_matmul_precision() != "highest"
        if not self._plan.per_example:
            return kernel.StepRule(at.learning_rate, tf32=tf32)
        assert isinstance(at.noise, SeededNoise)
        ((low, high, _, _),) = at.noise.sources(at.round, 0)
        return kernel.StepRule(
            at.learning_rate, at.clip_bound, self._plan.clip_mode == "flat", at.step_deviation, high << 32 | low, tf32
        )


def refusal(plan: Plan, engine: Engine, examples: Examples) -> str | None:
    """Why the kernel cannot carry out a training, or None if it can."""
    if not examples.inputs.is_cuda:
        return "there is no GPU"
    if plan.momentum:
        return "it has no momentum"
    if plan.per_example and plan.secure_noise:
        return "its noise is seeded"
    if plan.per_example and plan.quantile is not None:
        return "it does not count norms within a clip bound"
    return kernel.fits(engine.model, engine.loss)


def most_clients(engine: Engine) -> int:
    """How many clients may be trained at once within the budget of memory."""
    return max(1, BUDGET["cuda"] // (_COPIES * _WORD * engine.layout.size))


def usual_chunk(device: torch.device, most: int) -> int:
    """How many clients to train at once where nothing is measured; on a CPU, larger chunks fall out of its caches."""
    return min({"cpu": 64, "cuda": 1024}.get(device.type, 64), most)
