"""Plain Opacus clients in FedAvg: Opacus itself, one client at a time.

Every client is what Opacus' documentation asks for: a network, an SGD optimiser and a DataLoader that a `PrivacyEngine`
makes private, with Poisson batches and the accountant that Opacus uses by default. The server
averages the clients' networks.

This runs hundreds of small steps a round. `private_clients` does the same for all clients at once, and
`python -m benchmarks.useful_peers opacus` measures both (results/useful_peers.json, "opacus").
"""

from __future__ import annotations

import copy
import math
import warnings

import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.private_clients import Clients, LocalTraining
from fedcdp.files.tree import Tree


class _Records(TensorDataset):
    """Records that a loader fetches batch by batch rather than one by one."""

    def __getitems__(self, numbers: list[int]) -> list[tuple[Tensor, ...]]:
        return list(zip(*(each[numbers].unbind() for each in self.tensors), strict=True))


class OpacusClient:
    """One client: its private network, optimiser and loader, made once and kept over the rounds."""

    def __init__(self, network: nn.Module, inputs: Tensor, targets: Tensor, setting: LocalTraining, seed: int) -> None:
        warnings.filterwarnings("ignore")  # Opacus warns of noise that is not cryptographic, and of its own hooks
        size = -(-len(targets) // setting.batches)
        chosen = torch.Generator().manual_seed(seed)
        loader = DataLoader(_Records(inputs, targets), batch_size=size, generator=chosen)
        self.network = copy.deepcopy(network)
        self.engine = PrivacyEngine()
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=self.network,
            optimizer=torch.optim.SGD(self.network.parameters(), lr=setting.learning_rate),
            data_loader=loader,
            noise_multiplier=setting.noise_multiplier,
            max_grad_norm=setting.clip,
            noise_generator=torch.Generator(inputs.device).manual_seed(seed),
        )
        assert len(self.loader) == setting.batches

    def epoch(self, shared: Tree) -> Tree:
        """Train on one epoch of Poisson batches from the shared network; returns the client's network."""
        self.network.load_state_dict(shared)
        for inputs, targets in self.loader:
            self.step(inputs, targets)
        return {name: weight.detach().clone() for name, weight in self.network.named_parameters()}

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """One private step."""
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(inputs), targets).backward()
        self.optimizer.step()


def train_with_opacus(network: nn.Module, clients: Clients, setting: LocalTraining, seed: int) -> tuple[nn.Module, float]:
    """FedAvg over Opacus clients: the last round's network, and ε of a client by Opacus' own accountant at δ = 1e-5."""
    everyone = [
        OpacusClient(network, inputs, targets, setting, seed=1_000 * seed + number)
        for number, (inputs, targets) in enumerate(zip(clients.inputs, clients.targets, strict=True))
    ]
    shared = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    for _ in range(setting.rounds):
        found = [client.epoch(shared) for client in everyone]
        shared = {name: torch.stack([each[name] for each in found]).mean(0) for name in shared}
    trained = copy.deepcopy(network)
    trained.load_state_dict(shared)
    return trained, everyone[0].engine.get_epsilon(1e-5) if setting.noise_multiplier else math.inf
