"""Gradients from anywhere: a user's own training loop, another library, a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedcdp.attacks.observe import Captured
from fedcdp.config.plan import Plan
from fedcdp.engine.base import Engine
from fedcdp.errors import ModelError, PlanError
from fedcdp.files.tree import Tree


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
    named = _named(gradients, tuple(shapes))
    for name in (*shapes, *named):
        if name not in named or name not in shapes:
            lacks = "have one, and the network has no such parameter to train" if name in named else "have none"
            raise ModelError(f"gradients: they do not belong to this network: for {name} they {lacks}")
    seen: Tree = {}
    for name, shape in shapes.items():
        value = _tensor(f"gradients: {name}", named[name]).detach().to(device=device, dtype=torch.float32)
        if not bool(value.isfinite().all()):
            raise ModelError(f"gradients: {name} has values that are not finite")
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


def _named(gradients: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """The gradients by name, without those of frozen parameters, which PyTorch gives as None."""
    if isinstance(gradients, Mapping):
        return {name: value for name, value in gradients.items() if value is not None}
    if not isinstance(gradients, Sequence) or isinstance(gradients, str):
        raise PlanError(f"target: {type(gradients).__name__} is not a run, a plan, or gradients in a list or by name")
    given = [value for value in gradients if value is not None]
    if len(given) != len(names):
        raise ModelError(f"gradients: {len(given)} tensors do not belong to a network that trains {len(names)}")
    return dict(zip(names, given, strict=True))


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise PlanError(f"{name} is {type(value).__name__}, not a tensor") from None


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
    if not isinstance(truth, tuple | list) or len(truth) != 2:
        raise PlanError("truth: give a pair, the inputs and their labels")
    inputs, targets = (
        _tensor(f"truth: {name}", value).to(device) for name, value in zip(("inputs", "labels"), truth, strict=True)
    )
    given = f"inputs {list(inputs.shape)} and labels {list(targets.shape)}"
    if targets.dim() == 1:  # one victim's examples, or one example for each victim
        several = victims > 1
        inputs, targets = (inputs[:, None], targets[:, None]) if several else (inputs[None], targets[None])
    if targets.dim() != 2 or inputs.shape[:2] != targets.shape or len(targets) != victims or not targets.numel():
        raise PlanError(f"truth: {given} are not of {victims} victims with as many examples each")
    return inputs.float(), targets.long()
