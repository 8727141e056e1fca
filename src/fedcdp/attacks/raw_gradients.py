"""Raw gradients as the target of an attack: from a user's own training loop, another library, or a file.

The loss tells the task: the cross-entropy needs classes, the binary one zeros and ones, the squared error numbers. Any other
loss has classes where its targets are whole numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.attacks.observe import Captured
from fedcdp.attacks.scene import Scene, check_apart, not_real_inputs, require_finite
from fedcdp.attacks.targets import has_classes
from fedcdp.config.plan import Plan
from fedcdp.config.schedules import constant
from fedcdp.data.dataset import Dataset
from fedcdp.data.tasks import TaskName
from fedcdp.engine import Batch, Engine, FunctionalEngine, Loss
from fedcdp.errors import DataError, ModelError, PlanError
from fedcdp.files.tree import Tree
from fedcdp.models.networks import prepare

RawGradients = Mapping[str, Tensor] | Sequence[Tensor]

_BINARY: tuple[object, ...] = (F.binary_cross_entropy_with_logits, F.binary_cross_entropy)
_BINARY_MODULES = (nn.BCEWithLogitsLoss, nn.BCELoss)
_DISTANCES: tuple[object, ...] = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
_DISTANCE_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


def given_gradients(
    gradients: RawGradients,
    model: nn.Module | None,
    truth: tuple[Tensor, Tensor] | None,
    input_shape: tuple[int, ...] | None,
    examples: int,
    device: torch.device,
    loss: Loss | None,
    public: Dataset | None,
) -> Scene:
    """Gradients from any source, taken at the model's own weights."""
    if model is None:
        raise PlanError("model: an attack on gradients needs the network they were computed with")
    check_apart(model)
    loss = F.cross_entropy if loss is None else loss
    # A large learning rate: the method's code adds the gradient to the weights and subtracts them again, which would round
    # a small step away.
    plan = Plan(method="nonprivate", local_steps=1, record_sampling="partition", learning_rate=constant(1e3))
    ready = prepare(model, plan, device)
    engine = FunctionalEngine(ready, loss)
    weights = {name: p.detach() for name, p in ready.named_parameters() if p.requires_grad}
    seen = _by_name(gradients, engine, device)
    victims = len(next(iter(seen.values())))
    if truth is None:
        inputs, targets = _unknown(victims, input_shape, examples, device), None
    else:
        inputs, targets = _examples(truth, victims, engine, weights, loss, device)
    answer = _answer(engine, weights, inputs)
    task = _task(loss, answer, targets)
    targets = _targets(task, targets, answer, inputs)
    given = _captured(seen, weights, engine, plan, inputs, targets, task)
    classes = (2 if task == "binary" else answer.shape[-1]) if has_classes(task) else 0
    if has_classes(task):
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            raise DataError(f"truth: labels run from {low} to {high}, but the network has classes 0 to {classes - 1}")
    engine.check(weights, Batch(inputs[:1], targets[:1], given.present[:1]), per_example=True)
    known = [data.tensor for data in (public,) if data is not None] + ([inputs] if truth is not None else [])
    least = min((float(each.min()) for each in known), default=0.0)
    most = max((float(each.max()) for each in known), default=1.0)
    return Scene(
        plan, ready, engine, given.shape, classes, device, (0.0, 1.0) if least >= 0 and most <= 1 else (least, most), public,
        given=given, scored=truth is not None, loss=loss, not_real=not_real_inputs(inputs),
    )  # fmt: skip


def _captured(
    seen: Tree, weights: Tree, engine: Engine, plan: Plan, inputs: Tensor, targets: Tensor, task: TaskName
) -> Captured:
    """The gradients as an observation: each is the mean over its examples, at the model's weights."""
    victims, count, device = *inputs.shape[:2], inputs.device
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
        client_weight=torch.ones(victims, device=device),
        deviation=torch.zeros(victims, dtype=torch.float64, device=device),
        releases=1,
        current_clip=None,
        slot=torch.zeros(victims, dtype=torch.int64, device=device),
        client=torch.full((victims,), -1, device=device),
        task=task,
    )


def _task(loss: Loss, answer: Tensor, targets: Tensor | None) -> TaskName:
    """What the network predicts, from its loss, its output for one example and, if they are known, the targets."""
    single = answer.numel() == 1
    if loss in _BINARY or isinstance(loss, _BINARY_MODULES):
        return "binary" if single else "multilabel"
    if loss in _DISTANCES or isinstance(loss, _DISTANCE_MODULES):
        return "regression"
    if targets is not None and targets.is_floating_point():
        return "custom"
    if single:
        return "binary" if targets is not None else "custom"
    return "classification"


def _targets(task: TaskName, targets: Tensor | None, answer: Tensor, inputs: Tensor) -> Tensor:
    """The targets [victims, examples, ...] in the type of the task; zeros if they are not known."""
    if targets is None:
        own = () if has_classes(task) or answer.numel() == 1 else tuple(answer.shape)
        kind = torch.int64 if has_classes(task) else torch.float32
        return torch.zeros(*inputs.shape[:2], *own, dtype=kind, device=inputs.device)
    return targets.reshape(targets.shape[:2]).long() if has_classes(task) else targets.float()


def _answer(engine: Engine, weights: Tree, inputs: Tensor) -> Tensor:
    """The network's output for the first example."""
    shape = list(inputs.shape[2:])
    try:
        answers = engine.outputs(weights, inputs[:1, 0])
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"input_shape: the network does not take inputs of shape {shape}: {reason}") from error
    require_finite(answers)
    return answers[0]


def _by_name(gradients: Mapping[str, Tensor] | Sequence[Tensor], engine: Engine, device: torch.device) -> Tree:
    shapes = engine.layout.shapes
    named = _named(gradients, tuple(shapes))
    for name in (*shapes, *named):
        if name not in named or name not in shapes:
            lacks = "is not one of its trained parameters" if name in named else "is missing"
            raise ModelError(f"gradients: they do not match this network: {name} {lacks}")
    seen: Tree = {}
    for name, shape in shapes.items():
        value = _tensor(f"gradients: {name}", named[name]).detach().to(device=device, dtype=torch.float32)
        if not bool(value.isfinite().all()):
            raise ModelError(f"gradients: {name} contains values that are not finite")
        lead = value.dim() - len(shape)
        if lead not in (0, 1) or value.shape[lead:] != shape:
            raise ModelError(
                f"gradients: {name} has shape {list(value.shape)}, but the network's parameter has {list(shape)}"
            )
        seen[name] = value if lead else value[None]
    counts = {len(value) for value in seen.values()}
    if len(counts) != 1 or counts == {0}:
        raise PlanError(f"victims: the gradients are of {sorted(counts)} victims; all must have the same number, at least 1")
    return seen


def _named(gradients: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Gradients by name, without those of frozen parameters, for which PyTorch returns None."""
    if isinstance(gradients, Mapping):
        return {name: value for name, value in gradients.items() if value is not None}
    if not isinstance(gradients, Sequence) or isinstance(gradients, str):
        raise PlanError(f"target: {type(gradients).__name__} is not a run, a plan, or gradients as a list or by name")
    given = [value for value in gradients if value is not None]
    if len(given) != len(names):
        raise ModelError(f"gradients: {len(given)} tensors do not match a network that trains {len(names)}")
    return dict(zip(names, given, strict=True))


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise PlanError(f"{name} is {type(value).__name__}, not a tensor") from None


def _unknown(victims: int, shape: tuple[int, ...] | None, examples: int, device: torch.device) -> Tensor:
    """Zeros in the place of inputs that are not known."""
    if shape is None:
        raise PlanError("input_shape: give the shape of one input, or the true examples")
    if examples < 1:
        raise PlanError(f"examples: {examples} is not allowed; it must be at least 1")
    return torch.zeros(victims, examples, *shape, device=device)


def _examples(
    truth: tuple[Tensor, Tensor], victims: int, engine: Engine, weights: Tree, loss: Loss, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Inputs and targets [victims, examples, ...]."""
    if not isinstance(truth, tuple | list) or len(truth) != 2:
        raise PlanError("truth: give a pair of inputs and labels")
    inputs, targets = (
        _tensor(f"truth: {name}", value).to(device) for name, value in zip(("inputs", "labels"), truth, strict=True)
    )
    inputs = inputs if inputs.dtype == torch.int64 and _takes_tokens(engine, weights, inputs) else inputs.float()
    given = f"inputs {list(inputs.shape)} and labels {list(targets.shape)}"
    if _lead(inputs, targets, engine, weights, loss) == 1:  # one victim's examples, or one example for each victim
        several = victims > 1
        inputs, targets = (inputs[:, None], targets[:, None]) if several else (inputs[None], targets[None])
    if targets.dim() < 2 or inputs.shape[:2] != targets.shape[:2] or len(targets) != victims or not targets.numel():
        raise PlanError(f"truth: {given} do not match {victims} victims with the same number of examples each")
    return inputs, targets


def _takes_tokens(engine: Engine, weights: Tree, inputs: Tensor) -> bool:
    """Whether the network takes whole numbers, such as token ids."""
    try:
        engine.outputs(weights, inputs[:1])
    except Exception:
        return False
    return True


def _lead(inputs: Tensor, targets: Tensor, engine: Engine, weights: Tree, loss: Loss) -> int:
    """Whether the examples have one leading axis or two: [victims, examples]."""
    if targets.dim() == 1 or loss is F.cross_entropy:
        return 1 if targets.dim() == 1 else 2
    if inputs.dim() < 3 or inputs.shape[:2] != targets.shape[:2] or not targets.numel():
        return 1
    try:
        values = engine.outputs(weights, inputs[0, :1])[0].numel()
    except Exception:  # not the shape of an example
        return 1
    return 2 if targets.dim() == 2 or values == targets[0, 0].numel() else 1
