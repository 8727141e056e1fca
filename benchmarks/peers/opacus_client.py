"""Opacus (Yousefpour et al., 2021): per-layer clipping in local SGD, one client at a time.

A client consists of the two objects that the documentation requires, created once and kept: a wrapped network and a
`DPPerLayerOptimizer`. Of Opacus' ways to compute per-example gradients, `hooks` is the default; "ghost" cannot clip layer by
layer. Opacus clips every tensor separately, so it bounds two norms in a layer with a bias where Fed-CDP bounds one.
"""

from __future__ import annotations

import warnings

import opacus
import torch
import torch.nn.functional as F
from opacus.grad_sample.utils import wrap_model
from opacus.optimizers import DPPerLayerOptimizer
from torch import Tensor
from torch_client import Client, network_of, serve_clients
from turns import NotPossibleError, Task, Turns

_WAYS = ("hooks", "functorch", "ew")


def private_client(task: Task, way: str) -> Client:
    """A client that in every step clips each tensor of each example's gradient at C and adds noise σC to the sum."""
    network = wrap_model(network_of(task), grad_sample_mode=way, loss_reduction="mean")
    parameters = list(network.parameters())
    bounds = [task.clip] * len(parameters)
    optimiser = DPPerLayerOptimizer(
        torch.optim.SGD(parameters, lr=task.learning_rate),
        noise_multiplier=task.noise_multiplier / len(bounds) ** 0.5,  # Opacus scales the noise by the norm of all bounds
        max_grad_norm=bounds,
        expected_batch_size=task.batch_size,
        loss_reduction="mean",
    )

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimiser.zero_grad()
        F.cross_entropy(network(inputs), targets).backward()
        optimiser.step()

    return Client(task, network, step)


def fastest_client(task: Task) -> tuple[Client, str]:
    """The client with the task's way, or with the fastest one here, and the name of that way."""
    clients, why = {}, ""
    for way in (task.way,) if task.way else _WAYS:
        try:
            client = private_client(task, way)
            clients[way] = client, client.seconds_a_step()
        except Exception as error:  # a way that this version or this network does not support
            why = f"{way}: {error}"
    if not clients:
        raise NotPossibleError(f"no per-example gradients: {why}")
    way = min(clients, key=lambda each: clients[each][1])
    return clients[way][0], way


def serve(task: Task, turns: Turns) -> None:
    """SGD with per-layer clipping and noise, one client at a time."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    client, way = fastest_client(task)
    serve_clients(task, turns, client, opacus.__version__, f"one client at a time, grad_sample_mode {way}")
