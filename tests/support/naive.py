"""Federated training written out: one client, one step, one example, one layer at a time.

Plain autograd in float64 and Python loops; nothing here imports fedcdp. It follows the paper's Algorithms 1 and 2 and
privacy.md, and is what the package's batched code is compared with.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = dict[str, Tensor]
Example = tuple[Tensor | dict[str, Tensor], Tensor]
ExampleLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Unit:
    """Where noise of standard deviation 1 is read from: for a step, for an update, for the server's sum; and for the
    count of a quantile clip, at a client and at the server."""

    step: Callable[[int, int, int], Weights]
    update: Callable[[int, int], Weights]
    server: Callable[[int], Weights]
    count: Callable[[int, int], float]
    server_count: Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A training in plain numbers. `clips` and `rates` have one entry a round; with a quantile to follow, the loop appends
    to `clips` what each round gives for the next."""

    method: str
    clips: list[float]
    rates: list[float]
    planned: int
    batch: int
    slots: int
    sigma: float = 0.0
    flat: bool = False
    convention: str = "example"
    noise_at: str = "server"
    noise_clips: list[float] | None = None
    momentum: float = 0.0
    proximal: float = 0.0
    server_rates: list[float] | None = None  # one a round; default: 1
    optimizer: str = "sgd"
    beta1: float = 0.0
    beta2: float = 0.0
    tau: float = 0.0
    averaging: bool = False
    sent: float = 1.0
    quantile: float | None = None
    quantile_noise: float = 0.0
    quantile_rate: float = 0.0
    mean_records: float | None = None
    """Updates weigh by N_i over it; None: all weigh the same."""
    loss: ExampleLoss | None = None  # of one example's outputs and target; default: cross-entropy


def trainable(model: nn.Module) -> Weights:
    """A float64 copy of the weights that are trained."""
    return {name: p.detach().clone().double() for name, p in model.named_parameters() if p.requires_grad}


def layers_of(model: nn.Module) -> list[list[str]]:
    """The names of each module's own trainable weights; a weight that two modules share belongs to the first."""
    layers, owned = [], set()
    for module_name, module in model.named_modules():
        layer = []
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in owned:
                owned.add(id(parameter))
                layer.append(f"{module_name}.{name}" if module_name else name)
        if layer:
            layers.append(layer)
    return layers


def entropy(outputs: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of one example."""
    return F.cross_entropy(outputs.unsqueeze(0), target.unsqueeze(0))


def answer(network: nn.Module, inputs: Tensor | dict[str, Tensor]) -> Tensor:
    """A network's outputs for one example: several inputs are its keywords, and `logits` of an object are its outputs."""

    def alone(value: Tensor) -> Tensor:
        return (value.double() if value.is_floating_point() else value).unsqueeze(0)

    if isinstance(inputs, dict):
        returned = network(**{name: alone(value) for name, value in inputs.items()})
    else:
        returned = network(alone(inputs))
    outputs: Tensor = returned if isinstance(returned, Tensor) else returned.logits
    return outputs[0]


def gradient(model: nn.Module, weights: Weights, example: Example, loss: ExampleLoss | None = None) -> Weights:
    """The gradient of one example's loss at some weights."""
    network = copy.deepcopy(model).double()
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            parameters[name].copy_(value)
    inputs, target = example
    (loss or entropy)(answer(network, inputs), target).backward()
    found = {}
    for name in weights:
        slope = parameters[name].grad
        found[name] = torch.zeros_like(parameters[name]) if slope is None else slope
    return found


def clipped(vector: Weights, groups: list[list[str]], bound: float) -> Weights:
    """g / max(1, ‖g‖ / C) for each group; nothing at all of a vector that is not finite somewhere."""
    if any(not math.isfinite(x) for value in vector.values() for x in value.flatten().tolist()):
        return {name: torch.zeros_like(value) for name, value in vector.items()}
    result = {}
    for group in groups:
        squares = 0.0
        for name in group:
            squares += float((vector[name] ** 2).sum())
        for name in group:
            result[name] = vector[name] / max(1.0, math.sqrt(squares) / bound)
    return result


def indicator(vector: Weights, groups: list[list[str]], bound: float) -> float:
    """The share of the groups that are within the bound, less a half; 0 of a vector that is not finite somewhere."""
    if any(not math.isfinite(x) for value in vector.values() for x in value.flatten().tolist()):
        return 0.0
    inside = 0
    for group in groups:
        squares = 0.0
        for name in group:
            squares += float((vector[name] ** 2).sum())
        if math.sqrt(squares) <= bound:
            inside += 1
    return inside / len(groups) - 0.5


def next_clip(counts: list[float], setting: Setting, unit: Unit, round_: int) -> float:
    """Andrew et al.: C · exp(−η (b − γ)), b = ½ + (noised sum of the indicators) / (their planned number)."""
    total, planned = sum(counts), setting.planned
    if setting.method == "fed-cdp":
        planned *= setting.batch
    elif setting.noise_at == "server":
        total += setting.quantile_noise * unit.server_count(round_)
    assert setting.quantile is not None
    return setting.clips[round_] * math.exp(-setting.quantile_rate * (0.5 + total / planned - setting.quantile))


def largest_entries(update: Weights, fraction: float) -> Weights:
    """All but the largest `fraction` of the entries set to zero, at least one kept, the earlier of two equals."""
    entries = [
        (-abs(value), position)
        for position, value in enumerate(x for name in update for x in update[name].flatten().tolist())
    ]
    kept = {position for _, position in sorted(entries)[: max(1, round(fraction * len(entries)))]}
    result, position = {}, 0
    for name, value in update.items():
        flat = []
        for x in value.flatten().tolist():
            flat.append(x if position in kept else 0.0)
            position += 1
        result[name] = torch.tensor(flat, dtype=torch.float64).reshape(value.shape)
    return result


def add(left: Weights, right: Weights, factor: float = 1.0) -> Weights:
    """left + factor · right."""
    return {name: left[name] + factor * right[name].double() for name in left}


def step_deviation(setting: Setting, round_: int) -> float:
    """Standard deviation of the noise on the sum of a Fed-CDP step (privacy.md, section 2)."""
    return on_sum(setting, setting.sigma * (setting.noise_clips or setting.clips)[round_])


def on_sum(setting: Setting, deviation: float) -> float:
    """What a deviation becomes on the sum of a step."""
    if setting.convention == "example":
        return deviation * math.sqrt(setting.slots)
    return deviation if setting.convention == "batch" else deviation / setting.planned


def train_client(
    model: nn.Module, start: Weights, steps: list[list[Example]], records: int, setting: Setting,
    unit: Unit, round_: int, client: int,
) -> tuple[Weights, float]:  # fmt: skip
    """What one client sends in one round: its steps, then what its method does to the update; and its count."""
    groups = [list(start)] if setting.flat else layers_of(model)
    bound, rate = setting.clips[round_], setting.rates[round_]
    deviation = setting.sigma * (setting.noise_clips or setting.clips)[round_]
    count = 0.0
    weights, velocity = start, {name: torch.zeros_like(value) for name, value in start.items()}
    for step, examples in enumerate(steps):
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for example in examples:
            found = gradient(model, weights, example, setting.loss)
            if setting.method == "fed-cdp":
                if step == 0:
                    count += indicator(found, groups, bound)
                found = clipped(found, groups, bound)
            if all(bool(torch.isfinite(value).all()) for value in found.values()):
                total = add(total, found)
        if setting.method == "fed-cdp":
            total = add(total, unit.step(round_, client, step), step_deviation(setting, round_))
        for name in weights:
            mean = total[name] / min(setting.batch, records) + setting.proximal * (weights[name] - start[name])
            velocity[name] = setting.momentum * velocity[name] + mean
        weights = {name: weights[name] - rate * velocity[name] for name in weights}
    weight = 1.0 if setting.mean_records is None else records / setting.mean_records
    update = {name: weight * (weights[name] - start[name]) for name in start}
    if setting.method == "fed-cdp":
        count += on_sum(setting, setting.quantile_noise) * unit.count(round_, client)
    if setting.method == "fed-sdp" and setting.noise_at == "client":
        count = indicator(update, groups, bound) + setting.quantile_noise * unit.count(round_, client)
    if setting.method == "fed-sdp" and setting.noise_at == "client":
        update = add(clipped(update, groups, bound), unit.update(round_, client), deviation)
    if setting.sent < 1:
        update = largest_entries(update, setting.sent)
    if setting.method == "fed-sdp" and setting.noise_at == "server":
        count = indicator(update, groups, bound)
    return update, count


def move_server(
    model: nn.Module, weights: Weights, updates: list[Weights], setting: Setting, unit: Unit, round_: int,
    memory: dict[str, Weights] | None = None,
) -> Weights:  # fmt: skip
    """The global weights after a round: over the planned number of clients, whoever took part.

    `memory` is what a server optimiser keeps between rounds; empty before the first.
    """
    groups = [list(weights)] if setting.flat else layers_of(model)
    deviation = setting.sigma * (setting.noise_clips or setting.clips)[round_]
    at_server = setting.method == "fed-sdp" and setting.noise_at == "server"
    mean = {name: torch.zeros_like(value) for name, value in weights.items()}
    for update in updates:
        if at_server:
            update = clipped(update, groups, setting.clips[round_])
        for name in mean:
            if setting.averaging:  # the client sends its whole model
                sent = weights[name] + update[name]
                mean[name] = mean[name] + (sent - weights[name]) / setting.planned
            else:
                mean[name] = mean[name] + update[name] / setting.planned
    if at_server:
        mean = add(mean, unit.server(round_), deviation / setting.planned)
    rate = 1.0 if setting.server_rates is None else setting.server_rates[round_]
    return add(weights, optimised(mean, setting, {} if memory is None else memory), rate)


def optimised(mean: Weights, setting: Setting, memory: dict[str, Weights]) -> Weights:
    """The direction in which a server optimiser moves, one coordinate at a time (Hsu et al. 2019; Reddi et al. 2021)."""
    if setting.optimizer == "sgd":
        return mean
    directions = {}
    for name, value in mean.items():
        flat = value.flatten().tolist()
        m = memory.setdefault("m", {}).get(name, torch.zeros(len(flat)).double()).tolist()
        v = memory.setdefault("v", {}).get(name, torch.full((len(flat),), setting.tau**2).double()).tolist()
        found = []
        for at, delta in enumerate(flat):
            if setting.optimizer == "momentum":
                m[at] = setting.beta1 * m[at] + delta
                found.append(m[at])
                continue
            m[at] = setting.beta1 * m[at] + (1 - setting.beta1) * delta
            if setting.optimizer == "adam":
                v[at] = setting.beta2 * v[at] + (1 - setting.beta2) * delta**2
            else:
                sign = (v[at] > delta**2) - (v[at] < delta**2)
                v[at] = v[at] - (1 - setting.beta2) * delta**2 * sign
            found.append(m[at] / (math.sqrt(v[at]) + setting.tau))
        memory["m"][name], memory["v"][name] = (torch.tensor(each, dtype=torch.float64) for each in (m, v))
        directions[name] = torch.tensor(found, dtype=torch.float64).reshape(value.shape)
    return directions


def batches_in_order(order: list[int], batch: int, steps: int) -> list[list[int]]:
    """The authors' order: consecutive batches, around the end; never a record twice in one batch."""
    return [[order[(step * batch + j) % len(order)] for j in range(min(batch, len(order)))] for step in range(steps)]


def rounded_share(values: Weights, bound: float, noise: Weights) -> dict[str, list[int]]:
    """What a client sends with noise on the sum: its values in steps of C·2^-24, and whole numbers of noise, mod 2^64."""
    return {
        name: [
            (round(x * 2**24 / bound) + int(drawn)) % 2**64
            for x, drawn in zip(value.flatten().tolist(), noise[name].flatten().tolist(), strict=True)
        ]
        for name, value in values.items()
    }


def sum_of_shares(shares: list[dict[str, list[int]]], bound: float) -> dict[str, list[float]]:
    """What the server reads: the sum of the shares modulo 2^64, as a signed number of steps."""
    found = {}
    for name in shares[0]:
        totals = [sum(each) % 2**64 for each in zip(*(share[name] for share in shares), strict=True)]
        found[name] = [(x - 2**64 if x >= 2**63 else x) * bound / 2**24 for x in totals]
    return found
