"""Standardise inputs by means and variances that the clients release once, noised, before the first round.

The noised sums are charged to the ledger, as round −1, before they are computed; they are stored before they are used, and
a resumed run reads them. Under secure noise a repeated release is charged again.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from fedcdp.accounting.budget import Allows, Releases
from fedcdp.config.plan import SCALING, Plan
from fedcdp.data.federation import Federation
from fedcdp.errors import DataError, RunError
from fedcdp.files.tree import Layout
from fedcdp.mechanism.moments import moment_sensitivity, noised_moments, standardisation
from fedcdp.mechanism.noise import noise_of
from fedcdp.models.features import Standardised
from fedcdp.models.networks import scaling_of, with_scaling
from fedcdp.training.memory import Memory
from fedcdp.training.rundir import RunDirectory


def set_scaling(
    network: nn.Module,
    federation: Federation,
    plan: Plan,
    releases: Releases,
    *,
    store: RunDirectory | Memory,
    budget: Allows | None,
) -> bool:
    """Set the network's layer that standardises inputs: from what the run has stored, or by a release of all clients.

    Returns False, and releases nothing, if the budget has no room for the release.
    """
    if restore_scaling(network, store):
        return True
    if not releases.may_go_on(SCALING, budget):
        return False
    mean, scale = _released(federation, plan, releases)
    store.save_scaling(mean, scale)
    set_standardisation(network, mean, scale)
    return True


def restore_scaling(network: nn.Module, store: RunDirectory | Memory) -> bool:
    """Set the layer from what a run has stored; False if that is nothing yet."""
    stored = store.load_scaling()
    if stored is None:
        return False
    if any(each.numel() != _layer(network).mean.numel() for each in stored):
        raise RunError(f"{store.scaling} does not fit inputs of {_layer(network).mean.numel()} values")
    set_standardisation(network, *stored)
    return True


def with_set_scaling(model: nn.Module, federation: Federation, plan: Plan, trained: nn.Module | None) -> nn.Module:
    """A copy of an untrained model behind its scaling layer, set as in a trained network, or as the plan's training would.

    Without a trained network the clients' moments are released here, under the plan's noise, and no ledger counts that: it
    is for an attack on a plan.
    """
    check_inputs(federation)
    network = with_scaling(copy.deepcopy(model), federation.train.shape)
    known = None if trained is None else scaling_of(trained)
    if known is None:
        releases = Releases(federation.clients)
        set_scaling(network, federation, plan, releases, store=Memory(releases), budget=None)
    else:
        set_standardisation(network, known.mean, known.scale)
    return network


def copy_scaling(source: nn.Module, target: nn.Module) -> None:
    """Give a network the layer's mean and scale of another one; without such a layer, nothing."""
    if (layer := scaling_of(source)) is not None:
        set_standardisation(target, layer.mean, layer.scale)


def set_standardisation(network: nn.Module, mean: Tensor, scale: Tensor) -> None:
    """Set the layer that standardises a network's inputs."""
    layer = _layer(network)
    layer.mean.copy_(mean.view_as(layer.mean))
    layer.scale.copy_(scale.view_as(layer.scale))


def standardised_by(network: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Mean and scale by which a network standardises its inputs; None if it does not."""
    layer = scaling_of(network)
    return None if layer is None else (layer.mean, layer.scale)


def check_inputs(federation: Federation) -> None:
    """Refuse inputs that have no means and variances."""
    if isinstance(federation.train.inputs, dict) or not federation.train.inputs.is_floating_point():
        raise DataError("scaling_noise: inputs are token ids or several tensors; only real-valued inputs are standardised")


def _released(federation: Federation, plan: Plan, releases: Releases) -> tuple[Tensor, Tensor]:
    """Every client sends noised sums of the moments of its inputs; the server adds them up."""
    inputs, multiplier = federation.train.tensor, plan.scaling_noise
    assert multiplier is not None
    everybody = np.arange(federation.clients)
    features = inputs[0].numel()
    releases.charge(SCALING, everybody, moment_sensitivity(features))
    noise = noise_of(plan, Layout({}, ()))
    total, records = torch.zeros(2 * features, dtype=torch.float64), 0
    for client in everybody.tolist():
        held = inputs[torch.from_numpy(federation.indices(client))].cpu()
        total += noised_moments(held, client, noise, multiplier)
        records += len(held)
    return standardisation(total, records, federation.clients, multiplier)


def _layer(network: nn.Module) -> Standardised:
    layer = scaling_of(network)
    assert layer is not None
    return layer
