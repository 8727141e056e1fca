"""CUDA graphs: many small kernels, recorded once and launched as one.

`Launcher` runs the compiled local steps of a chunk of clients. A step of few clients, or of a small network, finishes
before the host has launched the next one. A graph is recorded once and then launched as a whole; the device itself counts
the steps. Large steps gain nothing from a graph and would pay for a copy of their weights. The launcher therefore times the
first steps: if the host is slower than the device, it records a graph; otherwise it keeps launching step by step.

`record` turns an attack's evaluation, a function of one tensor that launches hundreds of small kernels, into a graph.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.engine.runtime import stop_if_asked
from fedcdp.files.tree import Tree

State = tuple[Tree, Tree | None]
"""Weights and velocity of a chunk of clients [clients, ...]."""
Program = Callable[..., State]
"""One local step of a chunk of clients as a function of tensors alone."""

_LOG = logging.getLogger("fedcdp")
_LOOKED_AT = 20  # steps; few enough not to fill the device's queue, which would make the host wait
_HOST_IS_SLOWER = 0.8  # share of the time until the device finishes that the host spends launching


@dataclass(frozen=True)
class Steps:
    """All local steps of a chunk of clients, on the device."""

    records: Tensor
    """[steps, clients, slots]"""
    present: Tensor
    """[steps, clients, slots]"""
    sources: Tensor
    """[steps, terms, 4]: the sources of the noise."""
    clients: Tensor
    expected: Tensor
    numbers: Tensor
    """Learning rate, clip bound and standard deviation of the round."""

    def __len__(self) -> int:
        return len(self.records)

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of the fields."""
        return self.records, self.present, self.sources, self.clients, self.expected, self.numbers


def take(program: Program, steps: Steps, step: Tensor | int, weights: Tree, velocity: Tree | None) -> State:
    """Run one step; its number may be on the device."""
    records, present, source = (_row(each, step) for each in (steps.records, steps.present, steps.sources))
    return program(weights, velocity, records, present, steps.clients, steps.expected, source, steps.numbers)


def _row(values: Tensor, number: Tensor | int) -> Tensor:
    return values[number] if isinstance(number, int) else values.index_select(0, number)[0]


class Launcher:
    """Runs all steps of a chunk: one launch a step at first, and a graph once the host proves slower than the device."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._graph: Graph | None = None
        self._looked = False

    def __call__(self, steps: Steps, weights: Tree, velocity: Tree | None) -> State:
        """Weights and velocity after all steps."""
        if self._graph is not None and self._graph.takes(steps):
            return self._graph(steps, weights, velocity)
        on_gpu = steps.records.is_cuda
        for step in range(len(steps)):
            stop_if_asked()
            if on_gpu and step == 1 and not self._looked:  # not step 0, which may include compilation
                torch.cuda.synchronize()
                started = time.perf_counter()
            weights, velocity = take(self._program, steps, step, weights, velocity)
            if on_gpu and step == min(_LOOKED_AT, len(steps) - 1) > 0 and not self._looked:
                self._looked = True
                launched = time.perf_counter() - started
                torch.cuda.synchronize()
                if launched > _HOST_IS_SLOWER * (time.perf_counter() - started):
                    self._graph = _recorded(self._program, steps, weights, velocity)
        return weights, velocity


class Graph:
    """One recorded step: it reads its number, records and weights from where the previous step left them."""

    def __init__(self, program: Program, steps: Steps, weights: Tree, velocity: Tree | None) -> None:
        self._steps = Steps(*(each.clone() for each in steps.tensors()))
        self._weights, self._velocity = _copy(weights), None if velocity is None else _copy(velocity)
        self._step = torch.zeros(1, dtype=torch.int64, device=steps.records.device)
        self._graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm up, because the setup of a library at its first use cannot be recorded
            take(program, self._steps, self._step, self._weights, self._velocity)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph):
            after, moved = take(program, self._steps, self._step, self._weights, self._velocity)
            _overwrite(self._weights, after)
            if self._velocity is not None and moved is not None:
                _overwrite(self._velocity, moved)
            self._step.add_(1)

    def takes(self, steps: Steps) -> bool:
        """Whether the recorded step has the shapes of these steps."""
        shapes = ([each.shape for each in given.tensors()] for given in (self._steps, steps))
        return next(shapes) == next(shapes)

    def __call__(self, steps: Steps, weights: Tree, velocity: Tree | None) -> State:
        """Weights and velocity after all steps."""
        for own, given in zip(self._steps.tensors(), steps.tensors(), strict=True):
            own.copy_(given)
        _overwrite(self._weights, weights)
        if self._velocity is not None and velocity is not None:
            _overwrite(self._velocity, velocity)
        self._step.zero_()
        for _ in range(len(steps)):
            stop_if_asked()
            self._graph.replay()
        return _copy(self._weights), None if self._velocity is None else _copy(self._velocity)


def _recorded(program: Program, steps: Steps, weights: Tree, velocity: Tree | None) -> Graph | None:
    try:
        return Graph(program, steps, weights, velocity)
    except RuntimeError as error:
        _LOG.info("steps are launched one by one, because recording failed: %s", str(error).strip().partition("\n")[0])
        return None


def _copy(tree: Tree) -> Tree:
    return {name: value.clone() for name, value in tree.items()}


def _overwrite(tree: Tree, by: Tree) -> None:
    for name, value in tree.items():
        value.copy_(by[name])


Function = Callable[[Tensor], tuple[Tensor, Tensor]]

_WARM_UP = 3  # runs before the recording, in which libraries choose their algorithms


class Graphed:
    """A function of one tensor of fixed shape, replayed on a GPU. The results are the same, to the bit."""

    def __init__(self, function: Function, example: Tensor) -> None:
        self._input = example.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                function(self._input)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = function(self._input)

    def __call__(self, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs at these rows of the input, which get new values; the other rows keep their last values."""
        self._input[rows] = points
        self._graph.replay()
        return self._outputs[0][rows], self._outputs[1][rows]


def record(function: Function, example: Tensor) -> Graphed | None:
    """The function as a graph; None on a device without graphs, or if the function synchronises with the host."""
    if example.device.type != "cuda":
        return None
    try:
        return Graphed(function, example)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
