"""Small federations for attacks by active servers: digits of 14×14 pixels, other digits are public."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fedcdp
from fedcdp.attacks.active import Stage
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.observe import Leak, Look
from fedcdp.attacks.scene import simulated
from fedcdp.attacks.scores import Criteria
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.models.networks import build

SHAPE = (1, 14, 14)
CLIENTS = 4


def small_federation(digits: Dataset, records: int = 8, clients: int = CLIENTS) -> Federation:
    """So many digits at each client; the second half of the digits is public."""
    small = Dataset(F.avg_pool2d(digits.inputs, 2), digits.targets, digits.classes)
    drawn = torch.randperm(len(small) // 2, generator=torch.Generator().manual_seed(0))[: records * clients]
    return fedcdp.partition(
        small.take(drawn), clients=clients, scheme="iid", validation=small.take(torch.arange(len(small) // 2, len(small)))
    )


def plan_of(records: int = 8, **fields: Any) -> Plan:
    """One local step over all records of a client."""
    usual = {"method": "nonprivate", "rounds": 3, "per_round": CLIENTS, "local_steps": 1, "batch_size": records}
    return Plan(**usual | {"record_sampling": "partition", "learning_rate": 0.1, "seed": 1} | fields)


def network_of(name: str = "mlp") -> nn.Module:
    return build(name, SHAPE, 10)


def leaks_of(
    name: str, federation: Federation, plan: Plan, network: str = "mlp", leak: Leak = "type0", **more: Any
) -> Leaks:
    """The result of an attack through the API."""
    found = fedcdp.attack(plan, model=network_of(network), federation=federation, leak=leak, attack=name, **more)
    assert isinstance(found, Leaks)
    return found


def stage_of(federation: Federation, plan: Plan, network: str | nn.Module = "mlp", leak: Leak = "type0") -> Stage:
    """What an active server knows, without the API."""
    model = network_of(network) if isinstance(network, str) else network
    scene = simulated(plan, model, federation, leak, None, 0, 1, torch.device("cpu"), None, None)
    return Stage(scene, Look(leak), None, Criteria(candidates=100), 1)


METHODS: dict[str, dict[str, Any]] = {
    "no privacy": {"method": "nonprivate"},
    "Fed-SDP, noise at the server": {"method": "fed-sdp", "noise_at": "server"},
    "DSSGD": {"method": "dssgd", "share_fraction": 0.1},
    "Fed-SDP, noise at the client": {"method": "fed-sdp", "noise_at": "client"},
    "Fed-CDP": {"method": "fed-cdp"},
}
"""Those that leak first; DSSGD hides what it does not share."""
LEAKING = ("no privacy", "Fed-SDP, noise at the server")
NOISED = ("Fed-SDP, noise at the client", "Fed-CDP")
