"""CUDA graphs: an evaluation of hundreds of small kernels, recorded once and launched as one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor], tuple[Tensor, Tensor]]

_WARM_UP = 3  # runs before the recording, in which libraries choose their algorithms


class Graphed:
    """A function of one tensor of fixed shape, replayed on a GPU. What it computes is the same, to the bit."""

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
        """The outputs at these rows of the input, whose values are new; the others keep the last they had."""
        self._input[rows] = points
        self._graph.replay()
        return self._outputs[0][rows], self._outputs[1][rows]


def record(function: Function, example: Tensor) -> Graphed | None:
    """The function as a graph; None on a device without them, or where it asks the host a question on the way."""
    if example.device.type != "cuda":
        return None
    try:
        return Graphed(function, example)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
