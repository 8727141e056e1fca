"""A linear head: the only trained layer is the last one, so that its gradient is (p − y) ⊗ features.

The presets that `fedcdp.recommended` lists train such a head on fixed features. At its zero start the network's answer does
not depend on its inputs, but its gradient does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.tree import Tree

_BATCH = 500
_SAME = 1e-4


@dataclass(frozen=True)
class LinearHead:
    """The trained last layer of a network, and the fixed layers before it."""

    network: nn.Module
    layer: nn.Linear
    weight: str
    """The name of the weight among the trained parameters."""
    bias: str | None
    """The name of the bias; None where there is none, or where it is not trained."""

    @property
    def classes(self) -> int:
        """Rows of the weight."""
        return self.layer.out_features

    @torch.no_grad()
    def features(self, inputs: Tensor) -> Tensor:
        """What the layers before the head make of inputs [n, ...]: [n, D] in float64."""
        kept: list[Tensor] = []
        hook = self.layer.register_forward_pre_hook(lambda _, given: kept.append(given[0].double().cpu()))
        device = self.layer.weight.device
        try:
            for some in inputs.split(_BATCH):
                self.network(some.to(device))
        finally:
            hook.remove()
        return torch.cat(kept)

    def gradient(self, tree: Mapping[str, Tensor]) -> Tensor:
        """[..., classes, D] of a tree; where the bias is trained, D + 1, of which the last column is its gradient."""
        weight = tree[self.weight].double().cpu()
        return weight if self.bias is None else torch.cat([weight, tree[self.bias].double().cpu()[..., None]], dim=-1)

    def weights(self, tree: Tree) -> tuple[Tensor, Tensor]:
        """Weight [..., classes, D] and bias [..., classes] of a tree of trained parameters."""
        weight = tree[self.weight].double().cpu()
        if self.bias is not None:
            return weight, tree[self.bias].double().cpu()
        fixed = torch.zeros(self.classes) if self.layer.bias is None else self.layer.bias.detach()
        return weight, fixed.double().cpu().expand(weight.shape[:-1])


def find_head(network: nn.Module, shape: tuple[int, ...]) -> LinearHead | None:
    """The linear head of a network for inputs of `shape`; None where more than one last dense layer is trained."""
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    for name, layer in network.named_modules():
        prefix = f"{name}." if name else ""
        if not isinstance(layer, nn.Linear) or f"{prefix}weight" not in trained:
            continue
        if not trained <= {f"{prefix}weight", f"{prefix}bias"}:
            return None
        head = LinearHead(network, layer, f"{prefix}weight", f"{prefix}bias" if f"{prefix}bias" in trained else None)
        return head if _is_last(head, shape) else None
    return None


def _is_last(head: LinearHead, shape: tuple[int, ...]) -> bool:
    """Whether the network's answer is the layer's: nothing follows it, and it is used once, on vectors."""
    layer = head.layer
    probe = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            answers = head.network(probe.to(layer.weight.device)).double().cpu()
        features = head.features(probe)
    except Exception:  # an engine's check says in a sentence what the network does not take
        return False
    if features.dim() != 2 or len(features) != len(probe) or not bool(features.isfinite().all()):
        return False
    bias = None if layer.bias is None else layer.bias.detach().double().cpu()
    wanted = F.linear(features, layer.weight.detach().double().cpu(), bias)
    return answers.shape == wanted.shape and torch.allclose(answers, wanted, rtol=_SAME, atol=_SAME)
