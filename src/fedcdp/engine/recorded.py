"""The fast engine for networks of any form: it records what every trained layer reads, and the loss's derivative behind it.

A network runs as the reference engine runs it, example by example under `vmap`, so nothing mixes examples. Meanwhile every
operation that uses a trained tensor is intercepted (`recorder`). The loss is then derived by their probes alone, in one
backward pass. The derivative and the input of every operation together are the gradients of all examples (`use_gradients`),
without forming any that a method does not need.

Attention and recurrent layers are written out in operations with a rule (`attention`, `unfused`). The engine refuses a
network that uses a trained tensor in any other operation, and one whose gradients it computes differently from plain
PyTorch. That comparison is made once, on a made-up example. It also finds uses that cannot be intercepted: inside
TorchScript, in functions with a backward pass of their own, or on inputs that are overwritten later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedcdp.engine.base import Batch, Loss
from fedcdp.engine.by_layer import EngineByLayer
from fedcdp.engine.functional import check_by
from fedcdp.engine.gradients import Formed, Gradients
from fedcdp.engine.made_up import made_up, moved
from fedcdp.engine.recorder import CHANGING, Use, UseRecorder
from fedcdp.engine.unfused import has_recurrent_layers, unfused
from fedcdp.engine.use_gradients import gradients_of, together
from fedcdp.errors import ModelError
from fedcdp.files.tree import Inputs, Tree, each_tensor, first_tensor, masked, tensors_in
from fedcdp.models.networks import answer_of

_CLOSE = 0.01  # the largest difference from plain PyTorch, as a share: fused kernels and tf32 round differently

Derived = Callable[[tuple[Tensor, ...], Tree, Inputs, Tensor], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
"""The loss's derivatives by the probes, and what the uses read, both [clients, examples, ...]."""


class RecordedEngine(EngineByLayer):
    """Gradients of any module whose trained tensors are used by known operations. `example` is one made-up example."""

    def __init__(self, model: nn.Module, loss: Loss, example: Inputs) -> None:
        super().__init__(model, loss)
        self._recurrent = has_recurrent_layers(model)
        frozen = {name: p.detach() for name, p in model.named_parameters() if name not in self.layout.shapes}
        self._buffers: Tree = dict(model.named_buffers())
        self._constants = frozen | self._buffers
        self._uses: dict[tuple[Any, ...], tuple[Use, ...]] = {}
        self._derived = self._deriving(self.loss)
        self._compare(example)

    def check(self, weights: Tree, batch: Batch, per_example: bool) -> None:  # noqa: ARG002
        """See `Engine`."""
        check_by(lambda *tried: list(self.gradients(*tried)), self.model, self.loss, weights, batch)

    def gradients(self, weights: Tree, batch: Batch, real_only: bool = False) -> Iterator[Gradients]:
        """See `EngineByLayer`."""
        return self._gradients_by(self._derived, weights, batch, real_only=real_only)

    def _gradients_by(
        self, derived: Derived, weights: Tree, batch: Batch, *, real_only: bool = False
    ) -> Iterator[Gradients]:
        uses = self._uses_for(each_tensor(batch.inputs, lambda value: value[0, :1]))
        lead = batch.present.shape
        probes = tuple(weights[use.weight or use.bias or ""].new_zeros(()).expand(*lead, *use.shape) for use in uses)
        deltas, reads = derived(probes, weights, batch.inputs, batch.targets)
        found: dict[str, list[Gradients]] = {name: [] for name in self.layout.shapes}
        for use, delta, read in zip(uses, deltas, reads, strict=True):
            derivative = masked(delta, batch.present) if real_only else delta
            for each in gradients_of(use, derivative, read, self.layout.shapes):
                found[each.name].append(each)
        for name, parts in found.items():
            shape = self.layout.shapes[name]
            yield together(parts) if parts else Formed(name, weights[name].new_zeros(()).expand(*lead, *shape))

    def _uses_for(self, example: Inputs) -> tuple[Use, ...]:
        """The uses of trained tensors for inputs of this shape, found by running one made-up example."""
        key = tuple((tuple(value.shape), value.dtype) for value in tensors_in(example))
        if key not in self._uses:
            weights = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
            recorder = UseRecorder(weights, None)
            with torch.no_grad():
                self._call(weights, made_up(example), recorder, constants=self._copied())
            self._uses[key] = tuple(recorder.uses)
        return self._uses[key]

    def _call(self, weights: Tree, inputs: Inputs, recorder: UseRecorder, *, constants: Tree) -> Tensor:
        with recorder, unfused(self._recurrent):
            return self._plain(weights, constants, inputs)

    def _plain(self, weights: Tree, constants: Tree, inputs: Inputs) -> Tensor:
        arguments, keywords = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
        return answer_of(functional_call(self.model, (weights, constants), arguments, keywords))

    def _copied(self) -> Tree:
        """Frozen tensors, and copies of the buffers: a made-up example may overwrite these."""
        return self._constants | {name: value.clone() for name, value in self._buffers.items()}

    def _deriving(self, loss: Loss) -> Derived:
        """The loss's derivatives by the probes, for all clients and examples."""

        def example_loss(
            probes: tuple[Tensor, ...], weights: Tree, example: Inputs, target: Tensor
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            recorder, inputs = UseRecorder(weights, probes), each_tensor(example, lambda value: value[None])
            outputs = self._call(weights, inputs, recorder, constants=self._constants)
            if tuple(recorder.uses) != self._uses_for(inputs):
                raise ModelError(CHANGING)
            return loss(outputs, target[None]), tuple(recorder.reads)

        derived: Derived = vmap(vmap(grad(example_loss, has_aux=True), in_dims=(0, None, 0, 0)), in_dims=(0, 0, 0, 0))
        return derived

    def _compare(self, example: Inputs) -> None:
        """Raise unless the gradients of a made-up example are those of plain PyTorch, near the network's weights.

        The gradients are those of a random combination of the outputs: the loss may accept no made-up targets.
        """
        generator = torch.Generator().manual_seed(0)
        trained = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        weights, inputs = moved(trained, generator), made_up(example)
        for value in weights.values():
            value.requires_grad_()
        with torch.enable_grad():
            outputs = self._plain(weights, self._copied(), inputs)
            mix = torch.randn(outputs.shape, generator=generator).to(outputs)
            slopes = torch.autograd.grad((outputs * mix).sum(), list(weights.values()), allow_unused=True)
        present = torch.ones(1, 1, dtype=torch.bool, device=first_tensor(inputs).device)
        batch = Batch(each_tensor(inputs, lambda value: value[None]), present, present)
        alone = {name: value.detach()[None] for name, value in weights.items()}
        with torch.no_grad():
            derived = self._deriving(lambda outputs, _: (outputs * mix).sum())
            found = {each.name: each.formed()[0, 0] for each in self._gradients_by(derived, alone, batch)}
        wanted = {
            name: torch.zeros_like(value[0]) if slope is None else slope
            for (name, value), slope in zip(alone.items(), slopes, strict=True)
        }
        whole = float(torch.stack([value.double().norm() for value in wanted.values()]).norm())
        for name, value in wanted.items():
            one, least = found[name], _CLOSE * (float(value.double().norm()) + _CLOSE * whole)
            if one.shape != value.shape or not float((one - value).double().norm()) <= least:
                raise ModelError(f"the gradient of {name} differs from plain PyTorch's on a made-up example")
        with torch.no_grad():
            two = each_tensor(inputs, lambda value: torch.cat([value, torch.zeros_like(value)]))
            beside, single = self._plain(weights, self._copied(), two)[:1], outputs.detach()
        if beside.shape != single.shape or not float((beside - single).norm()) <= _CLOSE * float(single.norm()):
            raise ModelError("the network mixes the examples of a batch")  # without privacy, other engines let it
