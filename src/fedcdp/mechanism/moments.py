"""Noised sums of the inputs' first and second moments: what inputs are standardised by without leaking them.

A record with D inputs in [−1, 1] contributes its inputs and their squares, 2·D values in [−1, 1], to the sums of its client.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedcdp.mechanism.noise import Noise

_LEAST_VARIANCE = 1e-4  # of inputs that span [−1, 1]: a column that hardly varies is not blown up
_SURE = 3.0  # standard deviations of its noise that a variance must exceed


def moment_sensitivity(features: int) -> float:
    """How far a record that is zeroed out moves the sums at most, in L2: each of its 2·D values lies in [−1, 1]."""
    return math.sqrt(2 * features)


def noised_moments(inputs: Tensor, client: int, noise: Noise, multiplier: float) -> Tensor:
    """The noised sums [2·D] over the records [N, D] of one client.

    Guarantees: the sums have sensitivity √(2·D), whatever the inputs, which are clamped to [−1, 1] (what is not a number
    counts as 0); their noise has `multiplier` times that deviation. It is drawn record by record, with √N times less each,
    and added before anything is summed, so an adversary who reads single records' values sees noise, too.
    """
    values = torch.nan_to_num(inputs.double().flatten(1), nan=0.0).clamp(-1, 1)
    records, features = values.shape
    deviation = multiplier * moment_sensitivity(features) / math.sqrt(records)
    return (torch.cat([values, values.square()], dim=1) + noise.for_moments(client, records, 2 * features, deviation)).sum(0)


def standardisation(total: Tensor, records: int, clients: int, multiplier: float) -> tuple[Tensor, Tensor]:
    """Mean and scale [D] by which inputs are standardised, from the noised sums over all clients. Post-processing.

    A variance that does not stand out from its noise is raised to that noise, so a column without information stays small.
    """
    first, second = (total / records).chunk(2)
    noise = multiplier * moment_sensitivity(len(first)) * math.sqrt(clients) / records
    variance = (second - first.square()).clamp(min=max(_LEAST_VARIANCE, _SURE * noise))
    return first.clamp(-1, 1).float(), variance.rsqrt().float()
