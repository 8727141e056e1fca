"""Two batches that differ in one record, and records that move a loop as far as possible.

Real inputs are multiplied: a record 10,000 times as large has a large gradient. Whole numbers, such as token ids and masks,
cannot be multiplied. There the network's weights are, and the record is the one with the largest gradient among records that
repeat one of the given values at every place. No value is used that the tensor's own examples do not have. All records then
have the label with the largest loss: with large weights, a right prediction has no gradient at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.checks.black_box import BlackBox
from fedcdp.checks.call_attacks import expected_gradient, hostile_label, length
from fedcdp.engine import Loss
from fedcdp.errors import ModelError
from fedcdp.files.tree import Inputs, each_tensor

Batch = tuple[Inputs, Tensor]
_MOST_REPEATED = 16  # values of a tensor that are tried at every place


@dataclass(frozen=True)
class Worlds:
    """Two batches that differ in one record."""

    present: Batch
    absent: Batch


def worlds(batch: Batch, record: Batch, relation: str) -> Worlds:
    """A batch in which `record`, a batch of one, takes the first place, and one without it, or with the former record."""
    rest = each_tensor(batch[0], lambda value: value[1:]), batch[1][1:]
    if isinstance(record[0], dict) and isinstance(rest[0], dict):
        inputs: Inputs = {name: torch.cat([value, rest[0][name]]) for name, value in record[0].items()}
    else:
        assert isinstance(record[0], Tensor)
        assert isinstance(rest[0], Tensor)
        inputs = torch.cat([record[0], rest[0]])
    return Worlds((inputs, torch.cat([record[1], rest[1]])), rest if relation == "remove" else batch)


def record_at(batch: Batch, place: int) -> Batch:
    """A record, as a batch of one."""
    return each_tensor(batch[0], lambda value: value[place : place + 1]), batch[1][place : place + 1]


def real_inputs(inputs: Inputs) -> tuple[str, ...]:
    """The inputs that are real numbers, which can be multiplied; among several, not those that are masks of 0 and 1."""
    if isinstance(inputs, Tensor):
        return ("",) if inputs.is_floating_point() else ()
    return tuple(
        name for name, value in inputs.items() if value.is_floating_point() and not bool(((value == 0) | (value == 1)).all())
    )


def scaled_record(box: BlackBox, batch: Batch, scale: float, *, hostile: bool) -> Batch:
    """The first record with its real inputs multiplied, and, if `hostile`, with the label that makes its loss large."""
    inputs, label = record_at(batch, 0)
    real = real_inputs(batch[0])
    if isinstance(inputs, dict):
        inputs = {name: value * scale if name in real else value for name, value in inputs.items()}
    elif real:
        inputs = inputs * scale
    return inputs, hostile_label(box.model, inputs, label, scale) if hostile else label


def hostile_batch(box: BlackBox, batch: Batch) -> Batch:
    """The batch with the labels that make the loss of each record large."""
    return batch[0], hostile_label(box.model, *batch, 1.0)


def repeated_values(box: BlackBox, batch: Batch, loss: Loss, place: int) -> Batch:
    """The record of whole numbers with the largest gradient: the one at `place`, or one that repeats a value in it."""
    own = record_at(batch, place)
    best = own[0], hostile_label(box.model, *own, 1.0)
    furthest = _gradient_length(box, best, loss)
    for inputs in _repeating(batch[0], own[0]):
        tried = inputs, hostile_label(box.model, inputs, own[1], 1.0)
        if (found := _gradient_length(box, tried, loss)) > furthest and _is_taken(box, batch, tried):
            best, furthest = tried, found
    return best


def _repeating(inputs: Inputs, own: Inputs) -> Iterator[Inputs]:
    """Records in which one tensor has one value at every place, out of the values that its examples have."""
    for name, value in inputs.items() if isinstance(inputs, dict) else [("", inputs)]:
        if value.dim() < 2 or value.is_floating_point() or value.is_complex():
            continue
        known = value.unique()
        for number in known[torch.linspace(0, len(known) - 1, min(len(known), _MOST_REPEATED)).long()]:
            filled = number.expand(1, *value.shape[1:]).clone()
            yield own | {name: filled} if isinstance(own, dict) else filled


def _gradient_length(box: BlackBox, record: Batch, loss: Loss) -> float:
    gradient = expected_gradient(box, *record, loss)
    return 0.0 if gradient is None else length(gradient)


def _is_taken(box: BlackBox, batch: Batch, record: Batch) -> bool:
    """Whether the function returns finite numbers for a batch with this record."""
    try:
        box.finite(*worlds(batch, record, "remove").present)
    except ModelError:
        return False
    return True
