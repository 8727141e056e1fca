"""pfl-research (Granqvist et al., 2024): its simulated backend in one process, with its own local Gaussian mechanism.

It cannot clip or noise single examples. Its nearest mechanism is Fed-SDP with noise at the client: plain local SGD, after
which the update is clipped and noised. It is therefore compared with Fed-SDP.
"""

from __future__ import annotations

import itertools
from typing import Any

import pfl
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from torch import Tensor, nn
from torch_client import network_of
from turns import NotPossibleError, Task, Turns

_NEVER = 10**9
_CLIENTS = {"cnn": 8, "mlp": 32}


class _Network(nn.Module):
    """The network in the required form: with its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.network(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(float(self.loss(inputs, targets)), 1)}


class _AfterRound(TrainingProcessCallback):
    def __init__(self, turns: Turns, steps: int, note: str) -> None:
        self._tell = turns.after_every_round(steps, pfl.__version__, note)

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        self._tell()
        return False, Metrics()


def serve(task: Task, turns: Turns) -> None:
    """Rounds of Fed-SDP."""
    if task.device != "cpu":
        raise NotPossibleError("only the CPU is compared")
    torch.set_num_threads(1)
    clients = _CLIENTS[task.network]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(clients, task.records, *task.shape, generator=generator)
    targets = torch.randint(task.classes, (clients, task.records), generator=generator)
    users = itertools.cycle(range(clients))
    data = FederatedDataset.from_slices({n: [inputs[n], targets[n]] for n in range(clients)}, lambda: next(users))
    network = _Network(network_of(task))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    mechanism = GaussianMechanism(clipping_bound=task.clip, relative_noise_stddev=task.noise_multiplier)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=_NEVER, evaluation_frequency=_NEVER, train_cohort_size=clients, val_cohort_size=None
        ),
        SimulatedBackend(data, data, [mechanism]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=task.learning_rate, local_batch_size=task.batch_size),
        callbacks=[_AfterRound(turns, clients * task.local_steps, "clips and noises updates, not examples")],
        send_metrics_to_platform=False,
    )
