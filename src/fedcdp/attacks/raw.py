"""Gradients from anywhere: a user's own training loop, another library, a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedcdp.attacks.capture import Captured
from fedcdp.engine.base import Engine
from fedcdp.errors import ModelError, PlanError
from fedcdp.plan import Plan
from fedcdp.tree import Tree


def raw_gradients(
    gradients: Mapping[str, Tensor] | Sequence[Tensor],
    model: nn.Module,
    engine: Engine,
    plan: Plan,
    truth: tuple[Tensor, Tensor] | None,
    input_shape: tuple[int, ...] | None,
    examples: int,
    device: torch.device,
) -> Captured:
    """What was seen, as if captured: each gradient is the mean over its examples, at the model's weights."""
    seen = _by_name(gradients, engine, device)
    victims = len(next(iter(seen.values())))
    inputs, targets = _examples(truth, victims, input_shape, examples, device)
    count = inputs.shape[1]
    weights = {name: p.detach() for name, p in model.named_parameters() if name in seen}
    everything = torch.ones(victims, count, dtype=torch.bool, device=device)
    return Captured(
        leak="type2" if count == 1 else "type1",
        plan=plan.but(batch_size=count, slots=count),
        engine=engine,
        round=0,
        seen=seen,
        weights={name: value.expand(victims, *value.shape) for name, value in weights.items()},
        weights_shared=True,
        inputs=inputs,
        targets=targets,
        present=everything,
        uses=torch.arange(count, device=device).expand(1, victims, count),
        used=everything[None],
        expected_batch=torch.full((victims,), count, device=device),
        deviation=0.0,
        releases=1,
        current_clip=None,
        slot=torch.zeros(victims, dtype=torch.int64, device=device),
    )


def _by_name(gradients: Mapping[str, Tensor] | Sequence[Tensor], engine: Engine, device: torch.device) -> Tree:
    shapes = engine.layout.shapes
    if not isinstance(gradients, Mapping):
        if len(gradients) != len(shapes):
            raise ModelError(f"gradients: {len(gradients)} tensors do not belong to a network with {len(shapes)}")
        gradients = dict(zip(shapes, gradients, strict=True))
    for name in (*(set(shapes) - set(gradients)), *(set(gradients) - set(shapes))):
        lacks = "have none" if name in shapes else "have one the network does not have"
        raise ModelError(f"gradients: they do not belong to this network: for {name} they {lacks}")
    seen: Tree = {}
    for name, shape in shapes.items():
        value = gradients[name].detach().to(device=device, dtype=torch.float32)
        lead = value.dim() - len(shape)
        if lead not in (0, 1) or value.shape[lead:] != shape:
            raise ModelError(
                f"gradients: {name} has shape {list(value.shape)}, but the network's parameter has {list(shape)}"
            )
        seen[name] = value if lead else value[None]
    counts = {len(value) for value in seen.values()}
    if len(counts) != 1 or counts == {0}:
        raise PlanError(f"victims: the gradients are of {sorted(counts)} victims; one number above 0 is needed")
    return seen


def _examples(
    truth: tuple[Tensor, Tensor] | None, victims: int, shape: tuple[int, ...] | None, examples: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    if truth is None:
        if shape is None:
            raise PlanError("input_shape: give the shape of one input, or the true examples")
        if examples < 1:
            raise PlanError(f"examples: {examples} is not allowed; it must be at least 1")
        unknown = torch.zeros(victims, examples, *shape, device=device)
        return unknown, torch.zeros(victims, examples, dtype=torch.int64, device=device)
    inputs, targets = truth[0].to(device).float(), truth[1].to(device)
    if targets.dim() == 1:  # one victim's examples, or one example for each victim
        several = victims > 1
        inputs, targets = (inputs[:, None], targets[:, None]) if several else (inputs[None], targets[None])
    if targets.dim() != 2 or inputs.shape[:2] != targets.shape or len(targets) != victims:
        raise PlanError(
            f"truth: inputs {list(truth[0].shape)} and labels {list(truth[1].shape)} are not of {victims} victims with "
            "as many examples each"
        )
    return inputs, targets.long()
