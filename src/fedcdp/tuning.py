"""Tuning: the trainer and the number of clients at once with which a training is fastest on this machine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fedcdp.devices import wait
from fedcdp.engine import BatchedEngine, Engine, EngineName
from fedcdp.engine.choice import Choice, chunks_up_to, fastest, machine, remembered
from fedcdp.methods import METHODS
from fedcdp.sampling import Draw
from fedcdp.trainers import Compiled, Kernel, Stepwise, Trainer
from fedcdp.trainers.kernel import most_clients, refusal

if TYPE_CHECKING:
    from fedcdp.rundir import State
    from fedcdp.simulation import Simulator

_LOG = logging.getLogger("fedcdp")
_STEPS = 2  # are measured, after as many to warm up
_LONG = 20_000  # client steps; a shorter training ends before a measurement has paid
_WORTH_COMPILING = 60.0  # seconds of training; a program takes about twenty to compile
_GAIN_OF_COMPILING = 0.55  # of the time, about; to compile a program only to measure it would take longer than it may save
_WORTH_A_KERNEL = 20.0  # seconds of training; a kernel takes up to ten to compile


def tuned(
    simulator: Simulator, engines: Mapping[str, Engine], state: State, chunk: int | None, name: EngineName
) -> tuple[Trainer, int]:
    """The fastest trainer among those that `name` allows and, unless it is given, the fastest chunk."""
    choice = _measured(simulator, engines, state, chunk)
    engine, plan = engines[choice.engine], simulator.plan
    seconds = choice.seconds * plan.rounds * plan.per_round * plan.local_steps
    predicted = seconds if simulator.device.type == "cuda" and math.isfinite(seconds) else 0.0
    if isinstance(engine, BatchedEngine):
        if name == "kernel" or (name == "auto" and predicted > _WORTH_A_KERNEL):
            found = _kernel(simulator, engine, state, chunk, name, choice.seconds)
            if found:
                return found
        if name == "compiled" or (name == "auto" and predicted > _WORTH_COMPILING):
            equal = _equal_chunks(plan.per_round, choice.chunk)
            return Compiled(METHODS[plan.method], plan, engine, simulator.examples, equal), equal
    return Stepwise(METHODS[plan.method], engine, simulator.examples), choice.chunk


def _kernel(
    simulator: Simulator, engine: Engine, state: State, chunk: int | None, name: EngineName, seconds: float
) -> tuple[Trainer, int] | None:
    """The kernel, if it can carry out the training and, unless it was asked for, is the fastest."""
    plan, asked = simulator.plan, name == "kernel"
    reason = refusal(plan, engine, simulator.examples)
    if reason:
        _LOG.log(logging.WARNING if asked else logging.DEBUG, "the batched engine is used, not the kernel: %s", reason)
        return None
    trainer = Kernel(METHODS[plan.method], plan, engine, simulator.examples)
    equal = _equal_chunks(plan.per_round, chunk or most_clients(engine))
    if not asked and seconds_a_client_step(simulator, trainer, state, equal) > seconds * _GAIN_OF_COMPILING:
        return None
    return trainer, equal


def _equal_chunks(clients: int, most: int) -> int:
    """A number of clients at once that leaves little of the last chunk empty, where it is computed all the same."""
    return math.ceil(clients / math.ceil(clients / most))


def _measured(simulator: Simulator, engines: Mapping[str, Engine], state: State, chunk: int | None) -> Choice:
    """The fastest of the engines and the fastest chunk, remembered; a short training keeps what it has."""
    plan = simulator.plan
    first = Choice(next(iter(engines)), simulator.chunk)
    chunks = [chunk] if chunk else chunks_up_to(min(simulator.most_clients(), plan.per_round), simulator.device)
    if plan.rounds * plan.per_round * plan.local_steps < _LONG or len(engines) * len(chunks) == 1:
        return first
    what = machine(simulator.device) | {
        "network": str(simulator.engine.model),
        "example": [list(simulator.examples.inputs.shape[1:]), str(simulator.examples.inputs.dtype)],
        "step": [plan.method, plan.batch_size, plan.slots, plan.clip_mode, plan.noise, plan.secure_noise, plan.momentum],
        "precision": torch.get_float32_matmul_precision(),
        "engines": list(engines),
        "chunks": chunks,
    }

    def seconds(name: str, clients: int) -> float:
        trainer = Stepwise(METHODS[plan.method], engines[name], simulator.examples)
        return seconds_a_client_step(simulator, trainer, state, clients)

    found = remembered(what, lambda: fastest(engines, chunks, seconds))
    return found if found.engine in engines and found.chunk in chunks else first  # somebody may have edited the cache


def seconds_a_client_step(simulator: Simulator, trainer: Trainer, state: State, clients: int) -> float:
    """How long a local step of one client takes when so many are trained at once: gradients, clip, noise and update."""
    numbers = torch.arange(clients) % simulator.federation.clients
    table, sizes = simulator.records_of(numbers)
    at = replace(simulator.moment(state, numbers.to(simulator.device), sizes), engine=trainer.engine)
    draw = simulator.draw(at, table, sizes)
    steps = min(_STEPS, len(draw.positions))
    some = Draw(draw.positions[:steps], draw.present[:steps])
    trainer(state.weights, some, at)
    wait(simulator.device)
    started = time.perf_counter()
    trainer(state.weights, some, at)
    wait(simulator.device)
    return (time.perf_counter() - started) / steps / clients
