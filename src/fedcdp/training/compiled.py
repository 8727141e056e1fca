"""Local training by a program that is compiled from the method's own code, once for all steps of all rounds."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedcdp.config.plan import Plan
from fedcdp.engine.base import Engine, Unquestioning
from fedcdp.engine.cuda_graphs import Launcher, Program, Steps
from fedcdp.engine.functional import all_finite
from fedcdp.engine.packing import PackedEngine, rows_needed
from fedcdp.files.tree import Tree
from fedcdp.mechanism.noise import StepNoise
from fedcdp.mechanism.sampling import Draw
from fedcdp.methods import Local, Method, Moment, Sent, leave
from fedcdp.training.trainers import Examples, Stepwise

_LOG = logging.getLogger("fedcdp")
_WORTH_PACKING = 0.75  # of the slots at most are filled
_ROOM = 1.05


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

    name = "compiled"

    def __init__(
        self, method: Method, plan: Plan, engine: Engine, examples: Examples, chunk: int, backend: str = "inductor"
    ) -> None:
        self.engine = engine
        self._stepwise = Stepwise(method, engine, examples)
        self._chunk, self._plan, self._backend = chunk, plan, backend
        self._width = (plan.batch_size + 1) // 2
        self._rows = 0
        self._works = True
        self._launchers: dict[int, Launcher] = {}

    def __call__(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        """See `Trainer`."""
        read = at.tap is not None or self._plan.quantile is not None
        if read or at.noise.sources(at.round, 0) is None or not self._works:
            return self._stepwise(weights, draw, at)
        # Every training of a process counts as a variant of one program; by default, the ninth is refused.
        with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
            try:
                return self._compiled_steps(weights, draw, at)
            except torch._dynamo.exc.TorchDynamoException as error:
                self._works = False
                _LOG.warning("the batched engine is used: a local step cannot be compiled: %s", _first_line(error))
                return self._stepwise(weights, draw, at)

    def _compiled_steps(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        method, clients = self._stepwise.method, len(at.clients)
        start = {name: value.expand(self._chunk, *value.shape).contiguous() for name, value in weights.items()}
        velocity = {name: torch.zeros_like(value) for name, value in start.items()} if self._plan.momentum else None
        device = at.clients.device
        numbers = torch.tensor([at.learning_rate, at.clip_bound, at.step_deviation], device=device)
        # One transfer for all steps: the device waits for each.
        sources = torch.tensor([at.noise.sources(at.round, step) for step in range(len(draw.positions))], device=device)
        steps = Steps(
            _padded(draw.positions, self._chunk, 1), _padded(draw.present, self._chunk, 1, value=False), sources,
            _padded(at.clients, self._chunk), _padded(at.expected_batch, self._chunk), numbers,
        )  # fmt: skip
        now, _ = self._launcher_for(draw.present)(steps, start, velocity)
        if not self._plan.per_example and not all_finite(now):
            return self._stepwise(weights, draw, at)
        before, after = ({name: value[:clients] for name, value in tree.items()} for tree in (start, now))
        return leave(method, before, Local(after), at)

    def _launcher_for(self, present: Tensor) -> Launcher:
        """The program for these slots [steps, clients, slots]: packed if many are empty, with some room to spare."""
        clients, slots = present.shape[1:]
        needed = int(rows_needed(present, self._width).max())
        if needed * self._width > _WORTH_PACKING * clients * slots:
            rows = 0
        elif needed <= self._rows:
            rows = self._rows
        else:
            rows = self._rows = math.ceil(needed / clients * self._chunk * _ROOM)
        if rows not in self._launchers:
            engine = PackedEngine(self.engine, rows, self._width) if rows else self.engine
            self._launchers[rows] = Launcher(self._compiled(engine))
        return self._launchers[rows]

    def _compiled(self, engine: Engine) -> Program:
        step = _program(self._stepwise.method, self._plan, engine, self._stepwise.examples)
        return torch.compile(step, fullgraph=True, dynamic=False, backend=self._backend)


def _program(method: Method, plan: Plan, engine: Engine, examples: Examples) -> Program:
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
        at = _Traced(plan, trusting, noise, 0, clients, expected, step=-1, rate=rate, bound=bound, deviation=deviation)
        after = method.local_step(Local(weights, velocity), examples.batch(records, present), at)
        return after.weights, after.velocity

    return step


def _padded(values: Tensor, length: int, axis: int = 0, value: Any = None) -> Tensor:
    """Clients repeated (or filled with `value`) up to a number: they are there for their place alone."""
    missing = length - values.shape[axis]
    if not missing:
        return values
    shape = list(values.shape)
    shape[axis] = missing
    filling = values.narrow(axis, 0, 1).expand(shape)
    return torch.cat([values, filling if value is None else torch.full_like(filling, value)], axis)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
