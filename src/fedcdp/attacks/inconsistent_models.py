"""Inconsistent models: under a secure sum, all clients but the victim get weights at which their gradients vanish.

Pasquini, Francati, Ateniese: "Eluding Secure Aggregation in Federated Learning via Model Inconsistency", CCS 2022. At dead
weights every unit of a layer is closed (a ReLU below zero, a saturated sigmoid), so no gradient reaches any weight, and the
sum of the round is the victim's update.

This module simulates a secure sum that does not compare the weights. fedcdp's own sum does: masks of two clients cancel only
if both hold the same hash of the weights, and the server gets uniform bytes (`deploy.protocol.sum_context`). The victim gets
the weights of `imprint`, so single inputs are read from its update.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from fedcdp.attacks.active import ActiveAttack, Prior, Stage
from fedcdp.attacks.cohort import Cohort
from fedcdp.attacks.first_layer import FirstLayer
from fedcdp.attacks.imprint import Imprint
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.observe import Captured, Leak, Look, capture_clients, cohort_of, join, noise_of_release
from fedcdp.attacks.reconstruct import Progress
from fedcdp.engine.base import Batch
from fedcdp.errors import ModelError
from fedcdp.files.tree import Tree

ASSUMPTION = "assumes a secure sum that does not compare weights; masks of a fedcdp deployment cancel only for equal weights"
_LOW = -1e3
_VANISHED = 1e-6
_SOME, _USUAL = 64, 5


class InconsistentModels(ActiveAttack):
    """The attack `inconsistent-models`."""

    name: ClassVar[str] = "inconsistent-models"
    leaks: ClassVar[tuple[Leak, ...]] = ("type0",)

    def why_not(self, stage: Stage) -> str | None:
        """It needs a secure sum, and a layer for `imprint` that some weights close."""
        if not stage.reads_sum:
            return "is an attack on a secure sum; without secure_aggregation the server reads each update anyway"
        try:
            FirstLayer.of(stage.scene.network, stage.scene.shape)
        except ModelError as error:
            reason = str(error).removeprefix("analytic ")
            return f"{reason}; for other networks, leak type1 shows the update that the server would isolate"
        return None if dead_weights(stage) is not None else "knows no weights at which the gradients of this network vanish"

    def run(self, stage: Stage, progress: Progress | None = None) -> Leaks:
        """See `ActiveAttack`."""
        self.require_fit(stage)
        started, dead, baited = time.perf_counter(), dead_weights(stage), Imprint().craft(stage)
        assert dead is not None
        captured = isolated(stage.crafted(baited.network), dead, progress)
        examples, clear = baited.read(captured, Prior.of(stage))
        about: dict[str, Any] = {"bins": captured.seen[baited.bias].shape[1], "changed_network": False,
                                 "assumption": ASSUMPTION, "clear_rows_mean": float(clear.double().mean())}  # fmt: skip
        return stage.result(self.name, captured, examples, started, about, solved=clear > 0)


def dead_weights(stage: Stage) -> Tree | None:
    """Weights at which public examples have no gradient, except for the bias of the last layer; None if none are known."""
    network: nn.Module = copy.deepcopy(stage.scene.network)
    last = list(network.named_parameters())[-1][0]
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            # The first layer is closed by its negative weights, if inputs are positive, or by its biases.
            parameter.data.fill_(0.0 if name == last and name.endswith("bias") else _LOW)
    engine, device = stage.scene.engine, stage.scene.device
    weights = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    some = stage.public.take(torch.arange(min(_SOME, len(stage.public))))
    batch = Batch(some.tensor.to(device)[None], some.targets.to(device)[None], torch.ones(1, len(some), dtype=torch.bool))
    gradients = engine.per_example_gradients({name: value[None] for name, value in weights.items()}, batch)
    loud = [name for name, value in gradients.items() if not bool(value.abs().max() < _VANISHED)]
    return weights if set(loud) <= {last} and (not loud or last.endswith("bias")) else None


def isolated(stage: Stage, dead: Tree, progress: Progress | None = None) -> Captured:
    """The sums of several rounds, in each of which another client is the victim, in units of the victim's gradient."""
    simulator, state, everyone = stage.simulator, stage.state, cohort_of(stage.simulator, stage.state).clients
    deaf = replace(state, weights=dead)
    count = min(_USUAL, len(everyone)) if stage.victims is None else min(stage.victims, len(everyone))
    parts = []
    for number, victim in enumerate(everyone[:count]):
        alone = capture_clients(simulator, state, Look("type1", silent=True), victim[None])
        if alone is None:
            continue
        noise = noise_of_release(simulator, number)
        own, others = Cohort(simulator, state, victim[None]), Cohort(simulator, deaf, everyone[everyone != victim])
        unit = others.divisor / own.divisor
        mine, theirs = own.observed(noise), others.observed(noise)
        deviation = torch.full_like(alone.deviation, math.hypot(own.deviation, unit * others.deviation))
        seen = {name: (value + unit * theirs[name])[None].float() for name, value in mine.items()}
        parts.append(replace(alone, leak="type0", seen=seen, deviation=deviation, summed_clients=len(everyone)))
        if progress is not None:
            progress(number + 1, count)
    if not parts:
        raise ModelError("attack: inconsistent-models found no client that drew a record")
    return join(parts)
