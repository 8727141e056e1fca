"""FedJAX (Ro et al., 2021): its `for_each_client`, which on one device compiles a step and trains one client at a time."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any

import fedjax
import jax
from jax_vmap import Weights, fed_cdp_step, inputs_of, weights_of
from turns import NotPossibleError, Task, Turns, clients_a_turn, seconds_of


def serve(task: Task, turns: Turns) -> None:
    """Rounds of clients, one at a time."""
    if task.device != "cpu":
        raise NotPossibleError("only the CPU is compared")
    weights = weights_of(task)
    images, labels = inputs_of(task, 1)
    # The form that its datasets provide: batches of NumPy arrays.
    steps = range(task.local_steps)
    batches = [{"x": jax.device_get(images[0, step]), "y": jax.device_get(labels[0, step])} for step in steps]

    def begin(shared: Weights, key: jax.Array) -> dict[str, Any]:
        return {"weights": shared, "key": key}

    def step(state: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
        key, used = jax.random.split(state["key"])
        return {"weights": fed_cdp_step(task, state["weights"], used, batch["x"], batch["y"]), "key": key}

    def end(shared: Weights, state: dict[str, Any]) -> Weights:
        return jax.tree.map(lambda after, before: after - before, state["weights"], shared)

    train = fedjax.for_each_client(begin, step, end)

    def round_of(clients: int) -> None:
        keys = jax.random.split(jax.random.key(2), clients)
        sent = [update for _, update in train(weights, [(n, batches, keys[n]) for n in range(clients)])]
        jax.block_until_ready(jax.tree.map(lambda *each: sum(each), *sent))

    round_of(1)
    clients = clients_a_turn(task, seconds_of(partial(round_of, 1)) / task.local_steps)

    def round_() -> int:
        round_of(clients)
        return clients * task.local_steps

    turns.ready(f"{version('fedjax')}, JAX {jax.__version__}", "one client at a time, its jit backend")
    turns.serve(round_)
