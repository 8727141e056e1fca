"""The machine under an engine: devices and threads, precision, interrupts and memory.

- Devices and threads: `usable_device` refuses a device that cannot be used, `one_thread` limits PyTorch to one thread, and
  `wait` returns when a device has finished.
- Precision: `products` chooses how exactly a GPU multiplies matrices.
- Interrupts: Ctrl-C takes effect at a safe point (`stop_if_asked`), never inside a function transformed by torch, which
  must not be interrupted half-way.
- Progress: work that may last minutes before the first round calls `report_work`; `listening` says who hears of it.
- Memory: `clients_within_budget` bounds how many clients are trained at once, by an upper estimate for one client,
  `examples_within_budget` how many examples of one client, and `few_clients` how many clients are converted to float64 at
  once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedcdp.errors import PlanError
from fedcdp.files.tree import Inputs, Layout, each_tensor, first_tensor, tensors_in
from fedcdp.models.networks import outputs_of


def usable_device(device: str | torch.device) -> torch.device:
    """The device; a `PlanError` says why it cannot be used."""
    try:
        torch.zeros(1, device=device).item()
        return torch.device(device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise PlanError(f"device: {device} cannot be used: {reason}") from None


def wait(device: torch.device) -> None:
    """Wait until a device has finished all queued work, since a GPU works asynchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch with one thread, and restore the previous number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Allow or forbid matrix products and convolutions to round their factors to 10 bits (tf32).

    By torch's default, convolutions round and other products do not. Norms, clipping and noise are never rounded.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


_asked = threading.Event()


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer Ctrl-C until `stop_if_asked`; a second Ctrl-C is not deferred. Outside the main thread, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # another program's handler, or ours from an outer call
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _asked.set()

    _asked.clear()
    signal.signal(signal.SIGINT, ask)
    try:
        yield
        stop_if_asked()
    finally:
        signal.signal(signal.SIGINT, before)
        _asked.clear()


def stop_if_asked() -> None:
    """Mark a safe point: raise KeyboardInterrupt if Ctrl-C was pressed."""
    if _asked.is_set():
        _asked.clear()
        raise KeyboardInterrupt


Listener = Callable[[str, int, int], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Pass the progress of long work (its name, done, total) to a listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_work(name: str, done: int, total: int) -> None:
    """Report how much of a piece of work is done."""
    if (listener := _listener.get()) is not None:
        listener(name, done, total)


BUDGET = {"cpu": 2**29, "cuda": 8 * 2**30}  # bytes for all clients that are trained at once

_KEPT = 31 * 2**20  # bytes; just below the limit to which the GNU C library lets its threshold grow

_COPIES = 4  # approximate copies of a value: the value itself, one for the backward pass, and temporaries of both
_WORD = 4
_PIECE = 2**18  # values; two megabytes in float64
_VALUES_IN_A_STEP = 16  # for each output of a recurrent layer: its gates, before and after their activations
_SCORES = 3  # for each pair of positions in attention: scores, masked scores and weights


def clients_within_budget(model: nn.Module, example: Inputs, slots: int, per_example: bool, exact: bool = False) -> int:
    """How many clients, with `slots` examples in a step, fit into the device's memory budget; at least one.

    With `exact`, gradients are summed in float64 (on a CPU, those of `few_clients`).
    """
    fixed, each = _values_of_client(model, example, per_example, exact)
    return max(1, _values_at_once(example) // (fixed + slots * each))


def examples_within_budget(model: nn.Module, example: Inputs, per_example: bool, exact: bool = False) -> int:
    """How many examples of one client fit into the device's memory budget; at least one."""
    fixed, each = _values_of_client(model, example, per_example, exact)
    return max(1, (_values_at_once(example) - fixed) // max(1, each))


def estimated_bytes(model: nn.Module, example: Inputs, examples: int) -> int:
    """The estimate of the memory for one client with so many examples, whose gradients are formed one by one."""
    fixed, each = _values_of_client(model, example, per_example=True, exact=False)
    return (fixed + examples * each) * _COPIES * _WORD


def _values_at_once(example: Inputs) -> int:
    return BUDGET.get(first_tensor(example).device.type, BUDGET["cpu"]) // (_COPIES * _WORD)


def _values_of_client(model: nn.Module, example: Inputs, per_example: bool, exact: bool) -> tuple[int, int]:
    """How many values a step of one client needs, and how many more for each example."""
    weights = Layout.of(model).size
    fixed, each = 0 if per_example else 2 * weights, (weights if per_example else 0) + _activations(model, example)
    if not exact:
        return fixed, each
    return (fixed + 2 * weights, each) if first_tensor(example).device.type == "cpu" else (2 * fixed, 2 * each)


def few_clients(clients: int, values: int, sums: int, device: torch.device) -> list[slice]:
    """All clients, in parts whose `values` for each client are converted to float64 and added up to so many `sums`.

    On a CPU a part stays in its cache. Where a client has more sums than values, the parts would not, and there is one.
    """
    at_once = max(1, _PIECE // values) if device.type == "cpu" and values > sums else max(1, clients)
    return [slice(first, first + at_once) for first in range(0, clients, at_once)]


def keep_freed_memory() -> None:
    """Let the C library keep the memory that a step frees for the next step, in this process and from now on.

    The GNU C library returns large blocks to the system and requests them again, and every page of a new block costs a page
    fault: up to a third of a step's time on a CPU. The threshold for "large" grows with the largest block freed so far; this
    function frees one that is never written to. With other C libraries it has no effect.
    """
    torch.empty(_KEPT, dtype=torch.uint8)


class _ScoresCounted(TorchFunctionMode):
    """Counts the scores of attention outside `nn.MultiheadAttention`: the fused function's, and any softmax of matrices."""

    def __init__(self, counted: list[int]) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        found = func(*args, **kwargs or {})
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key"), args, strict=False)) | (kwargs or {})
            self._counted.append(found[..., 0].numel() * named["key"].shape[-2])
        elif func in (torch.softmax, Tensor.softmax, F.softmax) and found.dim() > 2:
            self._counted.append(2 * found.numel())  # and those without mask
        return found


def _activations(model: nn.Module, example: Inputs) -> int:
    """The number of values that one example has in the whole network: layer outputs, convolution patches, gates, scores."""
    counted = [value.numel() for value in tensors_in(example)]

    def count(layer: nn.Module, _: Any, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor):
            counted.append(first.numel())
        if isinstance(layer, nn.RNNBase) and isinstance(first, Tensor):
            counted.append(first.numel() * layer.num_layers * _VALUES_IN_A_STEP)
        if isinstance(layer, nn.MultiheadAttention) and isinstance(first, Tensor):
            length = first.numel() // layer.embed_dim  # of one example
            counted.append(_SCORES * layer.num_heads * length**2)
        if isinstance(layer, nn.Conv2d) and isinstance(output, Tensor):
            counted.append(output.numel() // layer.out_channels * layer.groups * layer.weight[0].numel())

    counting = (each for each in model.modules() if isinstance(each, nn.MultiheadAttention) or not list(each.children()))
    hooks = [layer.register_forward_hook(count) for layer in counting]
    try:
        with (
            torch.no_grad(),
            _ScoresCounted(counted),
            suppress(Exception),
        ):  # the engine's check refuses unsuitable inputs with a clear message
            outputs_of(
                model, each_tensor(example, lambda value: torch.zeros_like(value)[None])
            )  # zeros, not a record: the network may store its inputs and be released
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counted)
