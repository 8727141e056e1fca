"""Local training by a kernel of our own, which keeps a client on one multiprocessor for all its steps."""

from __future__ import annotations

import logging

import torch

from fedcdp.engine import kernel
from fedcdp.engine.base import Engine
from fedcdp.engine.memory import BUDGET
from fedcdp.interrupts import stop_if_asked
from fedcdp.methods import Local, Method, Moment, Sent, leave
from fedcdp.noise import SeededNoise
from fedcdp.plan import Plan
from fedcdp.sampling import Draw
from fedcdp.trainers.stepwise import Examples, Stepwise
from fedcdp.tree import Tree, repeat

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
