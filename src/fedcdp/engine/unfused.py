"""Attention and recurrent layers without PyTorch's fused kernels, which `torch.func` cannot transform.

- Attention: under `vmap`, the fused kernels run one example at a time. `unfused` chooses the ordinary products.
- `nn.RNN`, `nn.GRU`, `nn.LSTM` and their cells: the kernels (oneDNN, cuDNN) have no batching rule. Under `vmap` the LSTM
  runs one example at a time, with a warning, and the others fail. While `WrittenOut` is active, calls of these kernels
  compute the same values step by step from matrix products and elementwise operations.

The layers themselves stay as they are, so a trained network still runs on the fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State, Sequence[Tensor | None]], State]
"""The next state, from an input [N, features], the state, and the weights of input and state and their biases."""


def _plain(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(inputs: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
        of_inputs, of_state = _products(inputs, state[0], weights)
        return (activation(of_inputs + of_state),)

    return step


def _gru(inputs: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    of_inputs, of_state = (each.chunk(3, -1) for each in _products(inputs, state[0], weights))
    reset, update = (torch.sigmoid(of_inputs[place] + of_state[place]) for place in (0, 1))
    new = torch.tanh(of_inputs[2] + reset * of_state[2])
    return (new + update * (state[0] - new),)


def _lstm(inputs: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    of_inputs, of_state = _products(inputs, state[0], weights)
    entry, forget, cell, out = (of_inputs + of_state).chunk(4, -1)
    kept = torch.sigmoid(forget) * state[1] + torch.sigmoid(entry) * torch.tanh(cell)
    hidden = torch.sigmoid(out) * torch.tanh(kept)
    projection = weights[4] if len(weights) > 4 else None
    return (hidden if projection is None else hidden @ projection.mT, kept)


def _products(inputs: Tensor, hidden: Tensor, weights: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    of_input, of_hidden, bias, hidden_bias = weights[:4]
    assert of_input is not None
    assert of_hidden is not None
    return F.linear(inputs, of_input, bias), F.linear(hidden, of_hidden, hidden_bias)


_STEPS: Mapping[str, Step] = {
    "rnn_tanh": _plain(torch.tanh), "rnn_relu": _plain(torch.relu), "gru": _gru, "lstm": _lstm,
}  # fmt: skip
_CELLS = {f"{name}_cell": step for name, step in _STEPS.items()}


class WrittenOut(TorchFunctionMode):
    """While active, recurrent layers and cells are computed step by step.

    A layer with dropout, or of a packed sequence, is left to PyTorch.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _STEPS and len(args) == 9 and not (args[5] and args[6]):
            return _layers(name, *args)
        if name in _CELLS:
            return _cell(name, *args, **kwargs or {})
        return func(*args, **kwargs or {})


@contextmanager
def unfused(recurrent: bool) -> Iterator[None]:
    """Compute attention and, in a network with `recurrent` layers, these without fused kernels."""
    with sdpa_kernel(SDPBackend.MATH), WrittenOut() if recurrent else nullcontext():
        yield


def has_recurrent_layers(model: nn.Module) -> bool:
    """Whether a model needs `WrittenOut`, which slows down every call a little."""
    return any(isinstance(layer, nn.RNNBase | nn.RNNCellBase) for layer in model.modules())


def _cell(name: str, inputs: Tensor, state: Any, *weights: Tensor | None) -> Any:
    """One step of a cell: its weights of input and state, then their biases."""
    after = _CELLS[name](inputs, state if name == "lstm_cell" else (state,), weights)
    return after if name == "lstm_cell" else after[0]


def _layers(
    name: str, inputs: Tensor, first: Any, weights: Sequence[Tensor], biased: bool, count: int, _dropout: float,
    _training: bool, both_ways: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """All layers of a recurrent module: the outputs of the last one, then the final states of all."""
    step, ways = _STEPS[name], 2 if both_ways else 1
    states: tuple[Tensor, ...] = tuple(first) if name == "lstm" else (first,)
    each = len(weights) // (count * ways)
    sequence = inputs.transpose(0, 1) if batch_first else inputs
    final: list[State] = []
    for layer in range(count):
        outputs = []
        for way in range(ways):
            place = layer * ways + way
            own: list[Tensor | None] = list(weights[place * each : (place + 1) * each])
            if not biased:  # a projection comes after the biases
                own[2:2] = [None, None]
            state: State = tuple(part[place] for part in states)
            found = []
            for value in reversed(sequence.unbind(0)) if way else sequence.unbind(0):
                state = step(value, state, own)
                found.append(state[0])
            outputs.append(torch.stack(found[::-1] if way else found))
            final.append(state)
        sequence = torch.cat(outputs, -1) if both_ways else outputs[0]
    ends = tuple(torch.stack(parts) for parts in zip(*final, strict=True))
    return (sequence.transpose(0, 1) if batch_first else sequence, *ends)
