"""The targets of a victim's examples, for every task: what a search optimises, what known inputs reveal, and the scores.

| task | an adversary | scored as |
| --- | --- | --- |
| `classification`, `binary` | infers labels before the search (`labels.py`) | share of right labels |
| `multilabel` | searches for logits with the inputs; a known input reveals the signs of p − y | share of right entries |
| `regression` | searches for values with the inputs; a known input reveals outputs − target | root mean square error |
| `custom` | as `regression`, if a target has the shape of the outputs; else targets must be known | as `regression` |

The gradient of the squared error and of the cross-entropy with logits is affine in the target. Once the inputs are known,
the targets follow by least squares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedcdp.attacks.objectives import predicted
from fedcdp.attacks.observe import Captured
from fedcdp.data.dataset import Dataset
from fedcdp.data.tasks import TaskName
from fedcdp.errors import DataError
from fedcdp.files.tree import each_tensor

_WIDEST = 4.0  # how far values are searched for, in standard deviations of public targets
_FEWEST = 10  # public targets that show how far values spread
_AT_ONCE = 64  # guesses evaluated together
_MOST_UNKNOWN = 64  # largest number of target values of a victim that are solved for; a larger batch is not inverted


def has_classes(task: TaskName) -> bool:
    """Whether a target is one of several classes."""
    return task in ("classification", "binary")


@dataclass(frozen=True)
class FreeTarget:
    """A target as free values, which are optimised with the inputs."""

    task: TaskName
    shape: tuple[int, ...]
    """The shape of the values of one example."""
    usual: tuple[Tensor, Tensor] | None = None
    """Mean and standard deviation of public targets: values stay near them. Else the errors of a batch could cancel."""

    @staticmethod
    def of(captured: Captured, classes: int, public: Dataset | None = None) -> FreeTarget:
        """The free values for the captured task; a `DataError` if such targets cannot be optimised."""
        if captured.task == "classification":
            return FreeTarget(captured.task, (classes,))
        shape = tuple(captured.targets.shape[2:])
        if captured.task in ("custom", "language") and not _like_outputs(captured):
            raise DataError(
                f"labels: targets of task {captured.task} can be searched for only if they are real numbers in the shape of "
                "the outputs; use labels='known' in a recipe (--labels known), or the attacks matched-filter and membership"
            )
        if captured.task == "multilabel" or captured.task == "binary" or public is None or len(public) < _FEWEST:
            return FreeTarget(captured.task, shape)
        known = public.targets.to(captured.device)
        return FreeTarget(captured.task, shape, (known.mean(0), known.std(0).clamp(min=1e-6)))

    def soft(self, values: Tensor) -> Tensor:
        """The targets [..., shape] that the loss takes, differentiable in the values."""
        if self.task == "classification":
            return values.softmax(-1)
        return values.sigmoid() if self.task in ("binary", "multilabel") else self._real(values)

    def _real(self, values: Tensor) -> Tensor:
        if self.usual is None:
            return values
        mean, deviation = self.usual
        return mean + _WIDEST * deviation * (values / _WIDEST).tanh()

    def settled(self, values: Tensor) -> Tensor:
        """The adversary's answer: labels, zeros and ones, or the values themselves."""
        if self.task == "classification":
            return values.argmax(-1)
        if self.task == "binary":
            return (values > 0).long()
        return (values > 0).float() if self.task == "multilabel" else self._real(values)


def _like_outputs(captured: Captured) -> bool:
    """Whether targets are real numbers, as many as the network's outputs."""
    return captured.targets.is_floating_point() and _outputs(captured, 0).numel() == captured.targets[0, 0].numel()


def _outputs(captured: Captured, victim: int) -> Tensor:
    weights = {name: value[victim] for name, value in captured.weights.items()}
    return captured.engine.outputs(weights, each_tensor(captured.inputs, lambda value: value[victim, :1]))[0]


def solve_targets(captured: Captured, examples: Tensor) -> Tensor:
    """The targets [victims, examples, ...] that best explain the observation, once the inputs are known.

    Clipping scales an example's gradient by an unknown factor: the values of a regression are then biased towards the
    outputs, and the zeros and ones of several labels, which follow from signs, are not.
    """
    size = captured.targets[0, 0].numel()
    found = torch.zeros(captured.targets.shape, device=captured.device)
    if not captured.targets.is_floating_point() or captured.most * size > _MOST_UNKNOWN:
        return found
    for victim in range(len(captured)):
        count = int(captured.present[victim].sum())
        solved = _solved(captured.take(torch.tensor([victim], device=captured.device)), examples[victim : victim + 1], count)
        if captured.task == "multilabel":  # p − y is negative exactly where y is 1
            weights = {name: value[victim] for name, value in captured.weights.items()}
            outputs = captured.engine.outputs(weights, examples[victim, :count])
            solved = (solved > outputs.sigmoid().reshape(solved.shape)).to(solved)
        found[victim, :count] = solved.reshape(found[victim, :count].shape)
    return found


def _solved(one: Captured, examples: Tensor, count: int) -> Tensor:
    """[count, values]: least squares over the whole gradient of one victim, as an affine function of its targets."""
    shape, size = one.targets.shape[1:], one.targets[0, 0].numel()
    free = count * size
    tried = torch.zeros(1 + free, one.most * size, device=one.device)
    tried[1:, :free] = torch.eye(free, device=one.device)
    shown = []
    for some in tried.split(_AT_ONCE):
        many = one.take(torch.zeros(len(some), dtype=torch.int64, device=one.device))
        dummies = examples.expand(len(some), *examples.shape[1:])
        with torch.no_grad():
            tree = predicted(many, "gradient", dummies, some.view(len(some), *shape), many.present)
        shown.append(one.engine.layout.flatten(tree, lead=1).double().cpu())
    gradients = torch.cat(shown)
    seen = one.engine.layout.flatten(one.seen, lead=1).double().cpu()[0]
    columns = (gradients[1:] - gradients[0]).T
    if not bool(columns.isfinite().all()):
        return torch.zeros(count, size, device=one.device)
    solution: Tensor = torch.linalg.lstsq(columns, (seen - gradients[0])[:, None], driver="gelsd").solution
    return solution.view(count, size).to(one.device, torch.float32)


def recovery(task: TaskName, found: Tensor, truth: Tensor, present: Tensor, public: Dataset | None) -> dict[str, Any]:
    """How well targets [victims, examples, ...] were recovered, and how well a guess from public targets alone does.

    For classes and labels, the guess is the most frequent public one; for values, the public mean.
    """
    found, truth = found[present], truth[present]
    known = None if public is None else public.targets.to(truth.device)
    if known is not None and (known.dtype, known.shape[1:]) != (truth.dtype, truth.shape[1:]):
        known = None
    if has_classes(task):
        guess = None if known is None else known.mode().values
        right = None if guess is None else float((truth == guess).double().mean())
        return {"label_accuracy": float((found == truth).double().mean()), "label_baseline": right}
    if task == "multilabel":
        guess = None if known is None else (known.mean(0) >= 0.5).to(truth)
        right = None if guess is None else float((truth == guess).double().mean())
        return {"label_accuracy": float((found == truth).double().mean()), "label_baseline": right}
    if not truth.is_floating_point():
        return {}
    mean = None if known is None else known.mean(0)
    return {"target_rmse": _rmse(found, truth), "target_rmse_of_mean": None if mean is None else _rmse(mean, truth)}


def _rmse(guess: Tensor, truth: Tensor) -> float:
    error = float((guess - truth).double().square().mean())
    return math.sqrt(error) if math.isfinite(error) else math.inf
