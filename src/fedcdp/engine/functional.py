"""The reference engine: `torch.func` over any `nn.Module`.

Gradients are `vmap` over clients of `vmap` over examples of `grad`. This is slower than the hand-written rules for known
layers, and it is the reference against which those rules are tested.

`on_targets` lets PyTorch's elementwise losses take targets as a `Dataset` holds them. `refusal` explains why a network
cannot be trained: a mistake that plain PyTorch reports too, or a limit of `torch.func`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedcdp.engine.base import Batch, Loss
from fedcdp.engine.runtime import few_clients
from fedcdp.engine.unfused import has_recurrent_layers, unfused
from fedcdp.errors import ModelError
from fedcdp.files.tree import Group, Inputs, Layout, Tree, each_tensor, first_tensor, masked, tensors_in
from fedcdp.mechanism.clipping import clip
from fedcdp.models.networks import answer_of, outputs_of


class FunctionalEngine:
    """Per-example gradients of any module that `torch.func` can transform.

    The module's trainable parameters are the weights; its frozen parameters and buffers are constants. `loss(outputs,
    targets)` is the mean over a batch of any size, as in `torch.nn.functional.cross_entropy`.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.layout = Layout.of(model)
        self.model = model
        self.loss = on_targets(loss)
        self._made_of = model, loss
        self._recurrent = has_recurrent_layers(model)
        parameters = dict(model.named_parameters())
        frozen = {name: p.detach() for name, p in parameters.items() if name not in self.layout.shapes}
        self._constants: Tree = frozen | dict(model.named_buffers())
        self._per_example = vmap(vmap(grad(self._example_loss), in_dims=(None, 0, 0)))
        self._summed = vmap(grad(self._summed_loss))

    def __reduce__(self) -> tuple[Any, ...]:
        return FunctionalEngine, self._made_of

    def per_example_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`."""
        with unfused(self._recurrent):
            gradients: Tree = self._per_example(weights, batch.inputs, batch.targets)
        return gradients

    def summed_gradients(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`. One backward pass for each client, unless some gradient is not finite."""
        summed = self.plain_sum(weights, batch)
        return summed if all_finite(summed) else sum_of_finite(self.per_example_gradients(weights, batch), batch.present)

    def plain_sum(self, weights: Tree, batch: Batch) -> Tree:
        """See `Engine`."""
        with unfused(self._recurrent):
            summed: Tree = self._summed(weights, batch.inputs, batch.targets, batch.present)
        return summed

    def clipped_sum(
        self, weights: Tree, batch: Batch, groups: tuple[Group, ...], bound: float, *, exact: bool = False
    ) -> Tree:
        """See `Engine`."""
        gradients = self.per_example_gradients(weights, batch)
        if not exact:
            return _clipped_sum(gradients, groups, bound, batch.present)
        held, present = sum(value[0].numel() for value in gradients.values()), batch.present
        parts = [
            _clipped_sum({name: value[some].double() for name, value in gradients.items()}, groups, bound, present[some])
            for some in few_clients(len(present), held, self.layout.size, present.device)
        ]
        return joined(parts)

    def outputs(self, weights: Tree, inputs: Inputs) -> Tensor:
        """See `Engine`."""
        with torch.no_grad():
            return self._call(weights, inputs)

    def check(self, weights: Tree, batch: Batch, per_example: bool) -> None:
        """See `Engine`."""
        gradients = self.per_example_gradients if per_example else self.summed_gradients
        check_by(gradients, self.model, self.loss, weights, batch)

    def _call(self, weights: Tree, inputs: Inputs) -> Tensor:
        arguments, keywords = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
        return answer_of(functional_call(self.model, (weights, self._constants), arguments, keywords))

    def _example_loss(self, weights: Tree, example: Inputs, target: Tensor) -> Tensor:
        return self.loss(self._call(weights, each_tensor(example, lambda value: value[None])), target[None])

    def _summed_loss(self, weights: Tree, inputs: Inputs, targets: Tensor, present: Tensor) -> Tensor:
        outputs = self._call(weights, inputs)
        losses = vmap(lambda output, target: self.loss(output[None], target[None]))(outputs, targets)
        if losses.dim() != 1:
            raise ValueError(f"the loss of one example has shape {list(losses.shape[1:])}; it must be one number")
        return (losses * present).sum()


def check_by(gradients: Callable[[Tree, Batch], object], model: nn.Module, loss: Loss, weights: Tree, batch: Batch) -> None:
    """`Engine.check` by a function that computes gradients: first of zeros, whose errors may be quoted, then of records."""
    single = {name: value[None] for name, value in weights.items()}
    nobody = Batch(each_tensor(batch.inputs, torch.zeros_like), torch.zeros_like(batch.targets), batch.present)
    for tried, are_records in ((nobody, False), (batch, True)):
        try:
            gradients(single, tried)
        except Exception as error:
            raise refusal(model, loss, tried, error, are_records) from (None if are_records else error)


def _clipped_sum(gradients: Tree, groups: tuple[Group, ...], bound: float, present: Tensor) -> Tree:
    return {name: value.sum(1) for name, value in clip(gradients, groups, bound, present).values.items()}


def joined(parts: list[Tree]) -> Tree:
    """The trees [clients, ...] of some clients after the other."""
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def all_finite(tree: Tree) -> bool:
    """Whether every value is finite. A GPU synchronises once, because a sum is finite only if all its terms are."""
    return bool(torch.isfinite(torch.stack([value.double().sum() for value in tree.values()]).sum()))


def sum_of_finite(gradients: Tree, present: Tensor) -> Tree:
    """Sum [clients, examples, ...] over the examples that are present and finite in every tensor."""
    lead = present.shape
    finite = [torch.isfinite(value.reshape(*lead, -1)).all(-1) for value in gradients.values()]
    usable = present & torch.stack(finite).all(0)
    return {name: masked(value, usable).sum(1) for name, value in gradients.items()}


_ELEMENTWISE: tuple[object, ...] = (
    F.binary_cross_entropy_with_logits, F.binary_cross_entropy, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
)  # fmt: skip
_ELEMENTWISE_MODULES = (nn.BCEWithLogitsLoss, nn.BCELoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


def on_targets(loss: Loss) -> Loss:
    """The loss as a function of outputs and targets as a `Dataset` holds them.

    PyTorch's elementwise losses expect targets in the shape and type of the outputs, and broadcast them otherwise: outputs
    [N, 1] with targets [N] would be compared all with all. A network with one output for each example may return [N] or
    [N, 1]. Every other loss is returned unchanged.
    """
    if loss not in _ELEMENTWISE and not isinstance(loss, _ELEMENTWISE_MODULES):
        return loss

    def elementwise(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.numel() != targets.numel():
            found, wanted = list(outputs.shape[1:]), list(targets.shape[1:])
            raise ValueError(
                f"this loss compares outputs and targets one by one, and the network returns {found} values for targets of "
                f"{wanted or 'one value'}"
            )
        return loss(outputs, targets.to(outputs.dtype).reshape(outputs.shape))

    return elementwise


class _MistakeError(Exception):
    """A mistake in a network or a loss, found without `torch.func`."""

    def __init__(self, sentence: str, error: Exception | None = None) -> None:
        super().__init__(sentence)
        self.error = error


def refusal(model: nn.Module, loss: Loss, tried: Batch, error: Exception, are_records: bool) -> ModelError:
    """The error that explains why the gradients of a batch of one client failed with `error`.

    The same batch is first tried in plain PyTorch. If that fails, its error is the cause; otherwise `torch.func` is. For an
    error on records, only the type is reported, because its text may quote a record.
    """
    try:
        _plain(model, loss, tried)
    except _MistakeError as mistake:
        sentence, cause = str(mistake), mistake.error
    else:
        if "randomness" in str(error):
            return ModelError(
                "the network draws random numbers in its forward pass, which the plan's seed does not fix; use nn.Dropout, "
                "which fedcdp switches off, instead of torch.nn.functional.dropout, or call .eval() on the module"
            )
        sentence, cause = "the network cannot be differentiated by torch.func", error
    if are_records:
        return ModelError(
            f"{sentence}, on the first client's records though not on zeros"
            + (f" ({type(cause).__name__}): is an input out of its range?" if cause is not None else "")
        )
    return ModelError(sentence if cause is None else f"{sentence}: {_first_line(cause)}")


def _plain(model: nn.Module, loss: Loss, tried: Batch) -> None:
    """Run a forward and backward pass on the batch, and on its first example alone; a failure is a `_MistakeError`."""
    model = copy.deepcopy(model)  # because a forward pass may change its buffers
    shape = " and ".join(str(list(value.shape[2:])) for value in tensors_in(tried.inputs))
    trained = [p for p in model.parameters() if p.requires_grad]
    for count in dict.fromkeys((first_tensor(tried.inputs).shape[1], 1)):
        inputs, targets = each_tensor(tried.inputs, lambda value: value[0, :count]), tried.targets[0, :count]  # noqa: B023
        several = "a single example" if count == 1 else f"a batch of {count}"
        with torch.enable_grad():
            try:
                outputs = outputs_of(model, inputs)
            except Exception as error:
                raise _MistakeError(f"the network fails on {several}, with inputs of shape {shape} each", error) from None
            if not isinstance(outputs, torch.Tensor):
                raise _MistakeError(f"the network returns {type(outputs).__name__}, not a tensor of outputs")
            if outputs.dim() == 0 or len(outputs) != count:
                raise _MistakeError(
                    f"the network returns shape {list(outputs.shape)} for {several}; it must return one row for each example"
                )
            try:
                value = loss(outputs, targets)
            except Exception as error:
                answer = list(outputs.shape)
                if outputs.dim() == 2 and targets.dim() == 1 and int(targets.max()) >= answer[1]:
                    raise _MistakeError(f"the loss fails on a label beyond the network's {answer[1]} outputs") from None
                kinds = (str(each.dtype).removeprefix("torch.") for each in (outputs, targets))
                came = "{} outputs of shape {} and {} targets of shape {}"
                told = came.format(next(kinds), answer, next(kinds), list(targets.shape))
                raise _MistakeError(f"the loss fails on {several}, with {told}", error) from None
            if not isinstance(value, torch.Tensor):
                raise _MistakeError(f"the loss returns {type(value).__name__}, not a tensor")
            if value.dim() != 0:
                raise _MistakeError(f"the loss returns shape {list(value.shape)}, not one number, the mean over a batch")
            if not value.requires_grad:
                raise _MistakeError("the loss does not depend on the network's trainable weights")
            try:
                torch.autograd.grad(value, trained, allow_unused=True)
            except Exception as error:
                raise _MistakeError("the network fails in its backward pass", error) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
