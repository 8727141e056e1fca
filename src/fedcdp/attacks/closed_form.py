"""The closed-form attack on networks whose first layer is dense, as an attack like the others."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.attacks.analytic import Recovered, first_dense, invert_dense
from fedcdp.attacks.captured import Captured
from fedcdp.attacks.forward import predicted
from fedcdp.attacks.labels import LabelRule, infer_labels, refine_labels
from fedcdp.attacks.objectives import Objective
from fedcdp.attacks.reconstruct import Progress, Reconstruction
from fedcdp.attacks.seeds import Seed
from fedcdp.data.dataset import Dataset

_SCALES_AT_ONCE = 64
_SHORTEST = 1e-3
_RULES: tuple[LabelRule, LabelRule] = ("counts", "gradient")
_FITS = 1e-6  # of the squared norm of what was seen: a length that shows it


def invert(
    captured: Captured,
    model: nn.Module,
    classes: int,
    *,
    seed: int = 0,
    public: Dataset | None = None,
    progress: Progress | None = None,
) -> Reconstruction:
    """The examples behind the gradient of the first layer, victim by victim: exact where converged, else a best guess.

    Where the layer has no bias, several lengths of an example may show the same: that of the `public` ones is the likeliest.
    """
    shape = tuple(captured.inputs.shape[2:])
    weight, bias = first_dense(model, shape)
    everyone = torch.arange(len(captured), device=captured.device)
    seeds = Seed("zeros").draw(everyone, captured.inputs.shape[1], shape, seed)
    drawn = Seed("uniform").draw(everyone, captured.inputs.shape[1], shape, seed)
    counted, single = (infer_labels(captured, rule, classes, drawn) for rule in _RULES)
    labels = torch.where(captured.present.sum(1, keepdim=True) == 1, single, counted)
    usual = None if public is None else float(public.inputs.flatten(1).norm(dim=1).median())
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
        if recovered.up_to_scale and recovered.inputs.any():
            alone = everyone[victim : victim + 1]
            recovered = _scaled(recovered, captured.take(alone), labels[alone], usual)
        examples[victim, :count] = recovered.inputs.to(examples).view(count, *shape)
        found[victim] = Reconstruction.CONVERGED if recovered.found else Reconstruction.DIVERGED
        loss[victim] = recovered.residual
        if progress is not None:
            progress(victim + 1, len(captured))
    labels = refine_labels(captured, labels, classes, examples)
    once = torch.ones(len(captured), dtype=torch.int64, device=captured.device)
    return Reconstruction(examples, examples, seeds, labels, loss, once, found, len(captured))


def _scaled(recovered: Recovered, captured: Captured, labels: Tensor, usual: float | None) -> Recovered:
    """Of a layer without bias only the direction is known: take a length that shows what was seen.

    In a network without any bias there may be two, for a longer example shows more, but the network is surer of it. Of
    those that fit, the one nearest to the `usual` is taken; where that is not known, the shortest.
    """

    def misfits(scales: Tensor) -> Tensor:
        many = captured.take(torch.zeros(len(scales), dtype=torch.int64, device=captured.device))
        guesses = torch.zeros_like(many.inputs)
        scaled = recovered.inputs * scales.to(recovered.inputs).view(-1, 1, 1)
        guesses[:, : scaled.shape[1]] = scaled.to(guesses).view(*scaled.shape[:2], *guesses.shape[2:])
        with torch.no_grad():
            shown = predicted(many, "gradient", guesses, labels.expand(len(scales), -1), many.present)
        return Objective().between(shown, many.seen).nan_to_num(math.inf).cpu()

    def nearest(rough: float, width: float) -> tuple[float, float]:
        scales = rough * (1 + torch.linspace(-width, width, 121))
        found = misfits(scales)
        return float(found.min()), float(scales[found.argmin()])

    lengths = torch.logspace(math.log10(_SHORTEST), 3, 241)
    scales = torch.stack([lengths, -lengths])
    rough = torch.stack([torch.cat([misfits(some) for some in side.split(_SCALES_AT_ONCE)]) for side in scales])
    shown_nothing = float(sum(value.square().sum() for value in captured.seen.values()))
    lowest = (-F.max_pool1d(-rough, 3, 1, padding=1) == rough) & (rough <= max(float(rough.min()), shown_nothing / 10))
    fits = [nearest(nearest(scale, 0.03)[1], 0.0005) for scale in scales[lowest].tolist()]
    bound, wanted = min(fits)[0] + _FITS * shown_nothing, math.log(max(usual or 0.0, _SHORTEST))
    best = min((scale for misfit, scale in fits if misfit <= bound), key=lambda scale: abs(math.log(abs(scale)) - wanted))
    return replace(recovered, inputs=recovered.inputs * best, up_to_scale=False)
