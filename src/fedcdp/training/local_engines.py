"""Local engines: run all local steps of a chunk of clients, with the method's own code on top of an engine.

All give the result of the methods' own code, up to rounding. `StepwiseEngine` takes one step at a time, serves every tap,
and is the reference. `CompiledEngine` runs a program compiled from the method's own code, once for all steps of all rounds.
`KernelEngine` keeps a client on one multiprocessor for all its steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedcdp.config.plan import Plan
from fedcdp.engine import kernel
from fedcdp.engine.base import Batch, Engine, Unquestioning
from fedcdp.engine.batched import BatchedEngine
from fedcdp.engine.cuda_graphs import Launcher, Program, Steps
from fedcdp.engine.functional import all_finite
from fedcdp.engine.microbatches import MicrobatchEngine
from fedcdp.engine.packing import PackedEngine, rows_needed
from fedcdp.engine.recorded import RecordedEngine
from fedcdp.engine.runtime import BUDGET, stop_if_asked
from fedcdp.files.tree import Inputs, Tree, each_tensor, repeat
from fedcdp.mechanism.noise import SeededNoise, StepNoise
from fedcdp.mechanism.sampling import Draw
from fedcdp.methods import Local, Method, Moment, Sent, leave, take_part


@dataclass(frozen=True)
class Examples:
    """The training data, kept on the device; only indices into them move."""

    inputs: Inputs
    targets: Tensor

    @property
    def tensor(self) -> Tensor:
        """The inputs, where they are one tensor."""
        assert isinstance(self.inputs, Tensor)
        return self.inputs

    def batch(self, records: Tensor, present: Tensor) -> Batch:
        """The examples in these slots."""
        return Batch(each_tensor(self.inputs, lambda value: value[records]), self.targets[records], present)


_NAMES = {BatchedEngine: "batched", RecordedEngine: "recorded"}


class LocalEngine(Protocol):
    """Trains clients locally from the global weights."""

    gradients: Engine
    """The engine that computes the gradients."""

    @property
    def name(self) -> str:
        """The engine's name in `--engine`."""
        ...

    def __call__(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        """What the clients send after the steps of `draw` [steps, clients, slots], whose positions are records."""
        ...


@dataclass
class StepwiseEngine:
    """Local training one step at a time, as the method is written. It serves every tap, and is the reference."""

    method: Method
    gradients: Engine
    examples: Examples

    @property
    def name(self) -> str:
        """See `LocalEngine`."""
        engine = self.gradients.whole if isinstance(self.gradients, MicrobatchEngine) else self.gradients
        return next((name for kind, name in _NAMES.items() if isinstance(engine, kind)), "functional")

    def __call__(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        """See `LocalEngine`."""
        return take_part(self.method, weights, self.batches(draw), at)

    def batches(self, draw: Draw) -> Iterator[Batch]:
        """The batches of the steps, cut to the slots that at least one client fills."""
        # Filled slots come first. One transfer for the whole round: a query at every step would make a GPU wait.
        widths = draw.present.any(1).sum(1).clamp(min=1).tolist()
        for records, present, width in zip(draw.positions, draw.present, widths, strict=True):
            stop_if_asked()
            yield self.examples.batch(records[:, :width], present[:, :width])


_LOG = logging.getLogger("fedcdp")
_COPIES = 6  # copies of a client's weights: before, during and after training, and while the update is computed
_WORD = 4


class KernelEngine:
    """All local steps of a chunk of clients in one launch, if `refusal` returns None.

    Tapped steps are trained by the reference, step by step. So is everything after the device's compiler has rejected the
    kernel.
    """

    name = "kernel"

    def __init__(self, method: Method, plan: Plan, engine: Engine, examples: Examples) -> None:
        self.gradients = engine
        self._stepwise = StepwiseEngine(method, engine, examples)
        self._plan = plan
        self._network = kernel.cnn_of(engine.model)
        self._works = True

    def __call__(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        """See `LocalEngine`."""
        if at.tap is not None or not self._works:
            return self._stepwise(weights, draw, at)
        stop_if_asked()
        from triton.errors import TritonError

        try:
            return self._in_one_launch(weights, draw, at)
        except TritonError as error:
            self._works = False
            reason = str(error).strip().partition("\n")[0]
            _LOG.warning("using the batched engine: the kernel cannot run on this device: %s", reason)
            return self._stepwise(weights, draw, at)

    def _in_one_launch(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        examples = self._stepwise.examples
        work = kernel.Work(
            draw.positions.transpose(0, 1), draw.present.sum(-1, dtype=torch.int32).T, at.clients, at.expected_batch
        )
        after = kernel.train(self._network, weights, examples.tensor, examples.targets, work, self._rule(at))
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
    """Why the kernel cannot run a training, or None if it can."""
    if not examples.targets.is_cuda:
        return "there is no GPU"
    if plan.momentum:
        return "it does not support momentum"
    if plan.proximal:
        return "it does not support a proximal term"
    if plan.per_example and plan.sums:
        return "it sums in float32, and noise on the sum needs float64"
    if plan.per_example and plan.secure_noise:
        return "it does not support secure noise"
    if plan.per_example and plan.quantile is not None:
        return "it does not support clip bounds that follow a quantile"
    return kernel.fits(engine.model, engine.loss)


def most_clients(engine: Engine) -> int:
    """Number of clients that can be trained at once within the memory budget."""
    return max(1, BUDGET["cuda"] // (_COPIES * _WORD * engine.layout.size))


def usual_chunk(device: torch.device, most: int) -> int:
    """Default chunk size without a measurement; on a CPU, larger chunks do not fit its caches."""
    return min({"cpu": 64, "cuda": 1024}.get(device.type, 64), most)


_LOG = logging.getLogger("fedcdp")
_WORTH_PACKING = 0.75  # pack if at most this share of the slots is filled
_ROOM = 1.05


@dataclass(frozen=True)
class _Traced(Moment):
    """A moment whose numbers are tensors, so a program compiled in one step serves all steps of all rounds."""

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


class CompiledEngine:
    """Local training by one compiled program per step, for a fixed number of clients.

    It never waits for a result from the device. Checks on values (is a sum of gradients finite?) run once, after the last
    step. If a check fails, the reference repeats the steps. Tapped steps also run in the reference.
    """

    name = "compiled"

    def __init__(
        self, method: Method, plan: Plan, engine: Engine, examples: Examples, chunk: int, backend: str = "inductor"
    ) -> None:
        self.gradients = engine
        self._stepwise = StepwiseEngine(method, engine, examples)
        self._chunk, self._plan, self._backend = chunk, plan, backend
        self._width = (plan.batch_size + 1) // 2
        self._rows = 0
        self._works = True
        self._launchers: dict[int, Launcher] = {}

    def __call__(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        """See `LocalEngine`."""
        read = at.tap is not None or self._plan.quantile is not None or self._plan.proximal > 0
        if read or at.noise.sources(at.round, 0) is None or not self._works:
            return self._stepwise(weights, draw, at)
        # Every training in a process counts as a variant of one program; by default, the ninth is rejected.
        with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
            try:
                return self._compiled_steps(weights, draw, at)
            except torch._dynamo.exc.TorchDynamoException as error:
                self._works = False
                _LOG.warning("using the batched engine: a local step cannot be compiled: %s", _first_line(error))
                return self._stepwise(weights, draw, at)

    def _compiled_steps(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        method, clients = self._stepwise.method, len(at.clients)
        start = {name: value.expand(self._chunk, *value.shape).contiguous() for name, value in weights.items()}
        velocity = {name: torch.zeros_like(value) for name, value in start.items()} if self._plan.momentum else None
        device = at.clients.device
        numbers = torch.tensor([at.learning_rate, at.clip_bound, at.step_deviation], device=device)
        # One transfer for all steps, because the device waits for each transfer.
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
        """The program for these slots [steps, clients, slots]; if many are empty, packed, with some spare room."""
        clients, slots = present.shape[1:]
        needed = int(rows_needed(present, self._width).max())
        if needed * self._width > _WORTH_PACKING * clients * slots:
            rows = 0
        elif needed <= self._rows:
            rows = self._rows
        else:
            rows = self._rows = math.ceil(needed / clients * self._chunk * _ROOM)
        if rows not in self._launchers:
            engine = PackedEngine(self.gradients, rows, self._width) if rows else self.gradients
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
    """Pad to a fixed number of clients, by repeating them or with `value`; padded clients only fill places."""
    missing = length - values.shape[axis]
    if not missing:
        return values
    shape = list(values.shape)
    shape[axis] = missing
    filling = values.narrow(axis, 0, 1).expand(shape)
    return torch.cat([values, filling if value is None else torch.full_like(filling, value)], axis)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
