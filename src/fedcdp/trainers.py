"""How the local training of some clients is carried out: step by step, or by a program that was compiled for it.

All trainers run the methods' own code and give the same result but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedcdp.engine.base import Batch, Engine, Unquestioning
from fedcdp.engine.functional import all_finite
from fedcdp.interrupts import stop_if_asked
from fedcdp.methods import Local, Method, Moment, Sent, leave, take_part
from fedcdp.noise import StepNoise
from fedcdp.plan import Plan
from fedcdp.sampling import Draw
from fedcdp.tree import Tree


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

    def __call__(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        """What leaves the clients after the steps of `draw` [steps, clients, slots], whose positions are records."""
        ...


@dataclass
class Stepwise:
    """Local training one step after the other, each as the method writes it. It serves every tap, and is the reference."""

    method: Method
    engine: Engine
    examples: Examples

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


@dataclass(frozen=True)
class _Traced(Moment):
    """A moment whose numbers are tensors, so that a program compiled in one step serves all steps of all rounds."""

    bound: Tensor = field(kw_only=True)
    deviation: Tensor = field(kw_only=True)
    rate: Tensor = field(kw_only=True)

    @property
    def clip_bound(self) -> Any:
        return self.bound

    @property
    def step_deviation(self) -> Any:
        return self.deviation

    @property
    def learning_rate(self) -> Any:
        return self.rate


class Compiled:
    """Local training by one compiled program a step, for always the same number of clients.

    Nothing in it waits for an answer from the device. What the method asks of values (is a sum of gradients finite?) is
    asked once, after the last step; if the answer is no, the steps are done again by the reference. So are steps that
    somebody reads.
    """

    def __init__(self, method: Method, plan: Plan, engine: Engine, examples: Examples, chunk: int, backend: str = "inductor"):
        self.engine = engine
        self._stepwise = Stepwise(method, engine, examples)
        self._chunk, self._plan = chunk, plan
        self._program = torch.compile(_program(method, plan, engine, examples), fullgraph=True, dynamic=False, backend=backend)

    # Every training of a process counts as a variant of one program; by default, the ninth is refused.
    @torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000)
    def __call__(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        """See `Trainer`."""
        if at.tap is not None or self._plan.quantile is not None or at.noise.sources(at.round, 0) is None:
            return self._stepwise(weights, draw, at)
        method, clients = self._stepwise.method, len(at.clients)
        start = {name: value.expand(self._chunk, *value.shape).contiguous() for name, value in weights.items()}
        velocity = {name: torch.zeros_like(value) for name, value in start.items()} if self._plan.momentum else None
        numbers = torch.tensor([at.learning_rate, at.clip_bound, at.step_deviation], device=at.clients.device)
        padded, expected = _padded(at.clients, self._chunk), _padded(at.expected_batch, self._chunk)
        now = start
        for step, (records, present) in enumerate(zip(draw.positions, draw.present, strict=True)):
            stop_if_asked()
            sources = torch.tensor(at.noise.sources(at.round, step), device=at.clients.device)
            slots = _padded(records, self._chunk), _padded(present, self._chunk, value=False)
            now, velocity = self._program(now, velocity, *slots, padded, expected, sources, numbers)
        if not self._plan.per_example and not all_finite(now):
            return self._stepwise(weights, draw, at)
        before, after = ({name: value[:clients] for name, value in tree.items()} for tree in (start, now))
        return leave(method, before, Local(after), at)


def _program(method: Method, plan: Plan, engine: Engine, examples: Examples) -> Callable[..., tuple[Tree, Tree | None]]:
    """One local step as a function of tensors alone."""
    trusting = Unquestioning(engine)

    def step(
        weights: Tree,
        velocity: Tree | None,
        records: Tensor,
        present: Tensor,
        clients: Tensor,
        expected: Tensor,
        sources: Tensor,
        numbers: Tensor,
    ) -> tuple[Tree, Tree | None]:
        rate, bound, deviation = numbers.unbind()
        noise = StepNoise(engine.layout, sources)
        at = _Traced(
            plan, trusting, noise, 0, clients, expected, step=-1, rate=rate, bound=bound, deviation=deviation
        )
        after = method.local_step(Local(weights, velocity), examples.batch(records, present), at)
        return after.weights, after.velocity

    return step


def _padded(values: Tensor, length: int, value: Any = None) -> Tensor:
    """Rows repeated (or filled with `value`) up to a length: clients that are there for their place alone."""
    missing = length - len(values)
    if not missing:
        return values
    filling = values[:1].expand(missing, *values.shape[1:])
    return torch.cat([values, filling if value is None else torch.full_like(filling, value)])
