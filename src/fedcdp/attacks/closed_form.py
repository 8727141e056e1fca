"""The closed-form attack on networks whose first layer is dense, as an attack like the others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedcdp.attacks.analytic import Recovered, first_dense, invert_dense
from fedcdp.attacks.capture import Captured
from fedcdp.attacks.forward import predicted
from fedcdp.attacks.labels import infer_labels
from fedcdp.attacks.objectives import Objective
from fedcdp.attacks.reconstruct import Progress, Reconstruction
from fedcdp.attacks.seeds import Seed


def invert(
    captured: Captured, model: nn.Module, classes: int, seed: int = 0, progress: Progress | None = None
) -> Reconstruction:
    """The examples behind the gradient of the first layer, victim by victim; those that were not found are zero."""
    shape = tuple(captured.inputs.shape[2:])
    weight, bias = first_dense(model, shape)
    everyone = torch.arange(len(captured), device=captured.device)
    seeds = Seed("zeros").draw(everyone, captured.inputs.shape[1], shape, seed)
    labels = infer_labels(captured, "counts", classes, Seed("uniform").draw(everyone, captured.inputs.shape[1], shape, seed))
    examples, found = seeds.clone(), torch.zeros(len(captured), dtype=torch.int64, device=captured.device)
    loss = torch.full((len(captured),), torch.inf, device=captured.device)
    for victim in range(len(captured)):
        count = int(captured.present[victim].sum())
        recovered = invert_dense(
            captured.seen[weight][victim],
            None if bias is None else captured.seen[bias][victim],
            count,
            weight=captured.weights[weight][victim],
            bias=None if bias is None else captured.weights[bias][victim],
            seed=seed,
        )
        if recovered.up_to_scale:
            recovered = _scaled(recovered, captured.take(everyone[victim : victim + 1]), labels[victim : victim + 1])
        examples[victim, :count] = recovered.inputs.to(examples).view(count, *shape)
        found[victim] = Reconstruction.CONVERGED if recovered.found else Reconstruction.DIVERGED
        loss[victim] = recovered.residual
        if progress is not None:
            progress(victim + 1, len(captured))
    once = torch.ones(len(captured), dtype=torch.int64, device=captured.device)
    return Reconstruction(examples, examples, seeds, labels, loss, once, found, len(captured))


def _scaled(recovered: Recovered, captured: Captured, labels: Tensor) -> Recovered:
    """Of a layer without bias only the direction is known: take the length that shows what was seen."""
    shape = captured.inputs.shape[2:]

    def distance(inputs: Tensor) -> float:
        examples = inputs.to(captured.device).float().view(1, -1, *shape)
        with torch.no_grad():
            shown = predicted(captured, "gradient", examples, labels[:, : examples.shape[1]], captured.present)
        return float(Objective().between(shown, captured.seen))

    sizes = torch.logspace(-3, 3, 241).tolist()
    rough = min((sign * size for size in sizes for sign in (1, -1)), key=lambda scale: distance(recovered.inputs * scale))
    return recovered.scaled(distance, [rough * (1 + step / 2000) for step in range(-60, 61)])
