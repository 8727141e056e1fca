"""Tuning: the engine and the number of clients at once with which a training is fastest on this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fedcdp.engine import Batch, Engine
from fedcdp.engine.choice import chunks_up_to, fastest, machine, remembered
from fedcdp.methods import METHODS, Local
from fedcdp.sampling import choose_records
from fedcdp.tree import repeat

if TYPE_CHECKING:
    from fedcdp.rundir import State
    from fedcdp.simulation import Simulator

_STEPS = 2  # are measured, after one to warm up
_LONG = 20_000  # client steps; a shorter training ends before a measurement has paid


def tuned(simulator: Simulator, engines: Mapping[str, Engine], state: State, chunk: int | None) -> tuple[Engine, int]:
    """The fastest of the engines and, unless it is given, the fastest chunk; a short training keeps what it has."""
    plan = simulator.plan
    chunks = [chunk] if chunk else chunks_up_to(min(simulator.most_clients(), plan.per_round), simulator.device)
    if plan.rounds * plan.per_round * plan.local_steps < _LONG or len(engines) * len(chunks) == 1:
        return simulator.engine, simulator.chunk
    what = machine(simulator.device) | {
        "network": str(simulator.engine.model),
        "example": [list(simulator.inputs.shape[1:]), str(simulator.inputs.dtype)],
        "step": [plan.method, plan.batch_size, plan.slots, plan.clip_mode, plan.noise, plan.secure_noise, plan.momentum],
        "engines": list(engines),
        "chunks": chunks,
    }

    def seconds(name: str, clients: int) -> float:
        return seconds_a_client_step(simulator, engines[name], state, clients)

    found = remembered(what, lambda: fastest(engines, chunks, seconds))
    if found.engine not in engines or found.chunk not in chunks:  # somebody edited the cache
        return simulator.engine, simulator.chunk
    return engines[found.engine], found.chunk


def seconds_a_client_step(simulator: Simulator, engine: Engine, state: State, clients: int) -> float:
    """How long a local step of one client takes when so many are trained at once: gradients, clip, noise and update."""
    method, numbers = METHODS[simulator.plan.method], torch.arange(clients) % simulator.federation.clients
    table, sizes = simulator.records_of(numbers)
    at = replace(simulator.moment(state, numbers.to(simulator.device), sizes), engine=engine)
    draw = choose_records(simulator.plan, at.clients, sizes, at.round, at.step)
    width = max(1, int(draw.present.any(0).sum()))
    records = table.gather(1, draw.positions[:, :width])
    batch = Batch(simulator.inputs[records], simulator.targets[records], draw.present[:, :width])
    local = method.local_step(Local(repeat(state.weights, clients)), batch, at)
    _wait(simulator.device)
    started = time.perf_counter()
    for _ in range(_STEPS):
        local = method.local_step(local, batch, at)
    _wait(simulator.device)
    return (time.perf_counter() - started) / _STEPS / clients


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
