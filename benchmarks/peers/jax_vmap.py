"""JAX, as FedJAX writes it (Ro et al., 2021), for many clients: `vmap` over clients of `vmap` over examples of `grad`.

Compiled, on a CPU. The number of clients at once, and whether the loop over local steps is inside the compiled program, are
chosen by measurement, as fedcdp chooses its chunk; one client at a time is among the choices. The noise is JAX's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from turns import NotPossibleError, Task, Turns, clients_a_turn, seconds_of

_AT_ONCE = {"cnn": (1, 4, 16), "mlp": (1, 16, 64)}  # larger numbers are slower
_TRIED_STEPS = 3

Weights = dict[str, Any]
"""Layers by name, each a dictionary of its tensors."""


def weights_of(task: Task) -> Weights:
    """The paper's network, drawn at random: the tensors of `fedcdp.models.networks.paper_cnn` or `paper_mlp`."""
    if task.network == "cnn":
        channels, height, width = task.shape
        height, width = ((height - 2) // 2 - 2) // 2, ((width - 2) // 2 - 2) // 2
        shapes: dict[str, dict[str, tuple[int, ...]]] = {
            "conv1": {"kernel": (3, 3, channels, 32)},
            "conv2": {"kernel": (3, 3, 32, 64)},
            "dense": {"kernel": (height * width * 64, task.classes)},
        }
    else:
        sizes = (task.shape[0], 64, 32, task.classes)
        shapes = {f"dense{n}": {"kernel": (sizes[n], sizes[n + 1]), "bias": (sizes[n + 1],)} for n in range(3)}
    key = jax.random.key(0)
    return {
        layer: {name: 0.1 * jax.random.normal(key, shape) for name, shape in tensors.items()}
        for layer, tensors in shapes.items()
    }


def inputs_of(task: Task, clients: int) -> tuple[jax.Array, jax.Array]:
    """Batches [clients, steps, B, ...] of images (channels last, which XLA prefers on a CPU) or rows, and labels."""
    shape = (*task.shape[1:], task.shape[0]) if task.network == "cnn" else task.shape
    key = jax.random.key(1)
    places = (clients, task.local_steps, task.batch_size)
    return jax.random.uniform(key, (*places, *shape)), jax.random.randint(key, places, 0, task.classes)


def _outputs(task: Task, weights: Weights, inputs: jax.Array) -> jax.Array:
    if task.network == "cnn":
        for layer in ("conv1", "conv2"):
            inputs = jax.lax.conv_general_dilated(
                inputs, weights[layer]["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            inputs = jax.nn.relu(inputs)
            inputs = jax.lax.reduce_window(inputs, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return inputs.reshape(len(inputs), -1) @ weights["dense"]["kernel"]
    for number, layer in enumerate(("dense0", "dense1", "dense2")):
        inputs = inputs @ weights[layer]["kernel"] + weights[layer]["bias"]
        inputs = inputs if number == 2 else jax.nn.relu(inputs)
    return inputs


def _loss(task: Task, weights: Weights, example: jax.Array, target: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(_outputs(task, weights, example[None]))[0, target]


def fed_cdp_step(task: Task, weights: Weights, key: jax.Array, inputs: jax.Array, targets: jax.Array) -> Weights:
    """One local step of one client: each layer of each example's gradient clipped at C, the sum noised with σC."""
    gradients = jax.vmap(jax.grad(partial(_loss, task)), (None, 0, 0))(weights, inputs, targets)
    moved = {}
    for (layer, tensors), layer_key in zip(gradients.items(), jax.random.split(key, len(gradients)), strict=True):
        squares = sum(jnp.square(each).sum(range(1, each.ndim)) for each in tensors.values())
        factors = jnp.minimum(1.0, task.clip / jnp.maximum(jnp.sqrt(squares), 1e-12))
        moved[layer] = {}
        for (name, each), tensor_key in zip(tensors.items(), jax.random.split(layer_key, len(tensors)), strict=True):
            noise = task.noise_multiplier * task.clip * jax.random.normal(tensor_key, each.shape[1:])
            released = jnp.tensordot(factors, each, 1) + noise
            moved[layer][name] = weights[layer][name] - task.learning_rate / task.batch_size * released
    return moved


def _scanned_round(task: Task, at_once: int) -> Callable[..., Weights]:
    """The sum of the updates of some clients after a round, with all local steps in one compiled program."""

    def client(weights: Weights, key: jax.Array, inputs: jax.Array, targets: jax.Array) -> Weights:
        def step(local: Weights, given: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Weights, None]:
            return fed_cdp_step(task, local, *given), None

        steps = inputs.shape[0]
        return jax.lax.scan(step, weights, (jax.random.split(key, steps), inputs, targets))[0]

    def round_(weights: Weights, key: jax.Array, inputs: jax.Array, targets: jax.Array) -> Weights:
        moved = jax.vmap(client, (None, 0, 0, 0))(weights, jax.random.split(key, at_once), inputs, targets)
        return jax.tree.map(lambda after, before: (after - before).sum(0), moved, weights)

    return jax.jit(round_)


def _stepped_round(task: Task, at_once: int) -> Callable[..., Weights]:
    """The same, with one call of the compiled program per step."""
    step = jax.jit(jax.vmap(partial(fed_cdp_step, task)))
    keys = jax.jit(lambda key, number: jax.random.split(jax.random.fold_in(key, number), at_once))
    begin = jax.jit(lambda weights: jax.tree.map(lambda each: jnp.broadcast_to(each, (at_once, *each.shape)), weights))
    end = jax.jit(lambda after, before: jax.tree.map(lambda a, b: (a - b).sum(0), after, before))

    def round_(weights: Weights, key: jax.Array, inputs: Any, targets: Any) -> Weights:
        local = begin(weights)
        for number in range(inputs.shape[1]):
            local = step(local, keys(key, number), inputs[:, number], targets[:, number])
        return end(local, weights)

    return round_


def _finished(call: Callable[..., Any], *arguments: Any) -> None:
    jax.block_until_ready(call(*arguments))


def serve(task: Task, turns: Turns) -> None:
    """Choose the fastest variant and number of clients, then run rounds of them."""
    if task.device != "cpu":
        raise NotPossibleError("only the CPU is compared")
    weights, key = weights_of(task), jax.random.key(2)
    tried = {}
    for at_once in _AT_ONCE[task.network]:
        inputs, targets = inputs_of(task, at_once)
        for name, way in (("one program a round", _scanned_round), ("one program a step", _stepped_round)):
            train = way(task, at_once)
            few = partial(_finished, train, weights, key, inputs[:, :_TRIED_STEPS], targets[:, :_TRIED_STEPS])
            few()
            tried[at_once, name] = seconds_of(few, 5) / at_once / _TRIED_STEPS
    at_once, name = min(tried, key=lambda each: tried[each])
    round_of_some = (_scanned_round if name == "one program a round" else _stepped_round)(task, at_once)
    inputs, targets = inputs_of(task, at_once)
    _finished(round_of_some, weights, key, inputs, targets)
    groups = -(-clients_a_turn(task, tried[at_once, name]) // at_once)

    def round_() -> int:
        sent = [round_of_some(weights, key, inputs, targets) for _ in range(groups)]
        jax.block_until_ready(jax.tree.map(lambda *each: sum(each), *sent))
        return groups * at_once * task.local_steps

    turns.ready(jax.__version__, f"clients at once: {at_once}; {name}")
    turns.serve(round_)
