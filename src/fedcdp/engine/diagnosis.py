"""Why a network cannot be trained: a mistake that plain PyTorch reports, too, or a limit of `torch.func`."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedcdp.engine.base import Batch, Loss
from fedcdp.errors import ModelError


class _MistakeError(Exception):
    """What is wrong with a network or a loss, found without `torch.func`."""

    def __init__(self, sentence: str, error: Exception | None = None) -> None:
        super().__init__(sentence)
        self.error = error


def refusal(model: nn.Module, loss: Loss, tried: Batch, error: Exception, are_records: bool) -> ModelError:
    """A sentence that says why the gradients of a batch of one client failed with `error`.

    The same batch is first tried in plain PyTorch. The error of that attempt is the cause, if there is one. Otherwise
    `torch.func` is. Of an error on records only the type is told: its text may quote a record.
    """
    try:
        _plain(model, loss, tried)
    except _MistakeError as mistake:
        sentence, cause = str(mistake), mistake.error
    else:
        if "randomness" in str(error):
            return ModelError(
                "the network draws random numbers in its forward pass, which the plan's seed does not fix; take nn.Dropout "
                "in place of torch.nn.functional.dropout: it is switched off"
            )
        sentence, cause = "the network cannot be differentiated by torch.func", error
    if are_records:
        return ModelError(
            f"{sentence}, on the first client's records though not on zeros"
            + (f" ({type(cause).__name__}): is an input out of its range?" if cause is not None else "")
        )
    return ModelError(sentence if cause is None else f"{sentence}: {_first_line(cause)}")


def _plain(model: nn.Module, loss: Loss, tried: Batch) -> None:
    """One forward and backward pass of the batch, and of its first example alone, or a `_MistakeError`."""
    model = copy.deepcopy(model)  # whose buffers a forward pass may change
    shape, trained = list(tried.inputs.shape[2:]), [p for p in model.parameters() if p.requires_grad]
    for count in dict.fromkeys((tried.inputs.shape[1], 1)):
        inputs, targets = tried.inputs[0, :count], tried.targets[0, :count]
        several = "a single example" if count == 1 else f"a batch of {count}"
        with torch.enable_grad():
            try:
                outputs = model(inputs)
            except Exception as error:
                raise _MistakeError(f"the network fails on {several}, with inputs of shape {shape} each", error) from None
            if not isinstance(outputs, torch.Tensor):
                raise _MistakeError(f"the network returns {type(outputs).__name__}, not a tensor of outputs")
            if outputs.dim() == 0 or len(outputs) != count:
                raise _MistakeError(
                    f"the network returns shape {list(outputs.shape)} for {several}: it needs a row for each"
                )
            try:
                value = loss(outputs, targets)
            except Exception as error:
                answer = list(outputs.shape)
                if outputs.dim() == 2 and int(targets.max()) >= answer[1]:
                    raise _MistakeError(f"the loss fails on a label beyond the network's {answer[1]} outputs") from None
                raise _MistakeError(f"the loss fails on {several}, with outputs of shape {answer}", error) from None
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
