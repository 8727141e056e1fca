"""Learning tasks: what the targets are, how many outputs a network needs, and the default loss.

A loss is a function of (outputs, targets) that returns the mean over a batch; fedcdp calls it with batches of one example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcdp.config.fields import shown
from fedcdp.errors import DataError, PlanError

TaskName = Literal["classification", "binary", "multilabel", "regression", "language", "custom"]
IGNORED = -100
"""A token id that is not predicted, such as padding: that of `torch.nn.functional.cross_entropy`."""
TaskLoss = Callable[[Tensor, Tensor], Tensor]


class LearningTask(ABC):
    """What is predicted. `check` says in one sentence what came and what was expected."""

    name: TaskName
    loss: TaskLoss | None
    """The loss if none is given; None: one must be given."""

    @abstractmethod
    def check(self, targets: Tensor, classes: int) -> int:
        """The number of classes (0 if there are none), or a `DataError` if the targets do not fit the task."""

    @abstractmethod
    def outputs(self, targets: Tensor, classes: int) -> int | None:
        """How many values a network must return for each example; None if that is open."""

    def _refuse(self, targets: Tensor, expected: str) -> DataError:
        kind = str(targets.dtype).removeprefix("torch.")
        return DataError(f"targets are {kind} of shape {list(targets.shape)}: task {self.name} needs {expected}")


class Classification(LearningTask):
    """One of several classes."""

    name: TaskName = "classification"
    loss = staticmethod(F.cross_entropy)

    def check(self, targets: Tensor, classes: int) -> int:
        """See `LearningTask`."""
        if targets.dim() != 1 or targets.dtype != torch.int64:
            raise self._refuse(targets, "one int64 class number for each example")
        wrong = (targets < 0) | (targets >= classes if classes else targets < 0)
        if bool(wrong.any()):  # the label itself may be private
            allowed = f"from 0 to {classes - 1}" if classes > 1 else "0 or more"
            raise DataError(f"the label of record {int(wrong.nonzero()[0])} is not allowed: it must be {allowed}")
        return classes or int(targets.max()) + 1

    def outputs(self, targets: Tensor, classes: int) -> int:  # noqa: ARG002
        """See `LearningTask`."""
        return classes


class Binary(LearningTask):
    """Yes or no, from one logit."""

    name: TaskName = "binary"
    loss = staticmethod(F.binary_cross_entropy_with_logits)

    def check(self, targets: Tensor, classes: int) -> int:
        """See `LearningTask`."""
        if targets.dim() != 1 or targets.dtype != torch.int64 or int(targets.min()) < 0 or int(targets.max()) > 1:
            raise self._refuse(targets, "one 0 or 1 (int64) for each example")
        if classes not in (0, 2):
            raise DataError(f"classes is {classes}: task binary has 2")
        return 2

    def outputs(self, targets: Tensor, classes: int) -> int:  # noqa: ARG002
        """See `LearningTask`."""
        return 1


class MultiLabel(LearningTask):
    """Several yes-or-no answers, from one logit each."""

    name: TaskName = "multilabel"
    loss = staticmethod(F.binary_cross_entropy_with_logits)

    def check(self, targets: Tensor, classes: int) -> int:
        """See `LearningTask`."""
        fits = targets.dim() == 2 and targets.dtype == torch.float32
        if not fits or not bool(((targets == 0) | (targets == 1)).all()):
            raise self._refuse(targets, "a row of zeros and ones (float32) for each example")
        if classes:
            raise DataError(f"classes is {classes}: task multilabel has none; the columns of the targets count")
        return 0

    def outputs(self, targets: Tensor, classes: int) -> int:  # noqa: ARG002
        """See `LearningTask`."""
        return targets.shape[1]


class Regression(LearningTask):
    """One or several numbers."""

    name: TaskName = "regression"
    loss = staticmethod(F.mse_loss)

    def check(self, targets: Tensor, classes: int) -> int:
        """See `LearningTask`."""
        if targets.dim() not in (1, 2) or targets.dtype != torch.float32 or not bool(torch.isfinite(targets).all()):
            raise self._refuse(targets, "one finite float32 number, or a row of them, for each example")
        if classes:
            raise DataError(f"classes is {classes}: task regression has none")
        return 0

    def outputs(self, targets: Tensor, classes: int) -> int:  # noqa: ARG002
        """See `LearningTask`."""
        return 1 if targets.dim() == 1 else targets.shape[1]


def next_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a language model: the cross-entropy of each token, given those before it.

    A sequence's loss is the mean over its predicted tokens; targets of −100 are not predicted. A sequence without any has
    loss 0. The mean over sequences counts each of them once, however long it is, as clipping does.

    Args:
        outputs: Scores of the next token [sequences, tokens, words].
        targets: Token ids [sequences, tokens], the same positions as the outputs: the first is never predicted.

    Returns:
        One number.
    """
    following = targets[:, 1:]
    losses = F.cross_entropy(outputs[:, :-1].transpose(1, 2), following, ignore_index=IGNORED, reduction="none")
    return (losses.sum(1) / (following != IGNORED).sum(1).clamp(min=1)).mean()


class Language(LearningTask):
    """Every token of a sequence, from those before it."""

    name: TaskName = "language"
    loss = staticmethod(next_tokens)

    def check(self, targets: Tensor, classes: int) -> int:
        """See `LearningTask`."""
        if targets.dim() != 2 or targets.dtype != torch.int64 or targets.shape[1] < 2:
            raise self._refuse(targets, "a row of at least two int64 token ids for each example")
        if bool(((targets < 0) & (targets != IGNORED)).any()):
            raise DataError(
                f"targets hold a negative token id: only {IGNORED} is allowed, for a token that is not predicted"
            )
        if classes:
            raise DataError(f"classes is {classes}: task language has none")
        return 0

    def outputs(self, targets: Tensor, classes: int) -> None:  # noqa: ARG002
        """See `LearningTask`."""
        return None


class Custom(LearningTask):
    """Whatever your own loss takes."""

    name: TaskName = "custom"
    loss = None

    def check(self, targets: Tensor, classes: int) -> int:  # noqa: ARG002
        """See `LearningTask`."""
        return classes

    def outputs(self, targets: Tensor, classes: int) -> None:  # noqa: ARG002
        """See `LearningTask`."""
        return None


_TASKS: dict[str, LearningTask] = {
    task.name: task for task in (Classification(), Binary(), MultiLabel(), Regression(), Language(), Custom())
}


def task_called(name: str) -> LearningTask:
    """The task of this name; a `PlanError` lists the names."""
    if not isinstance(name, str) or name not in _TASKS:
        raise PlanError(f"task: {shown(name)} is not one of {', '.join(get_args(TaskName))}")
    return _TASKS[name]
