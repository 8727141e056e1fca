"""What is attacked: the network, what can be read of it, and what anyone knows of the data.

A scene is a plan, a run, or raw gradients from anywhere: a user's own training loop, another library, a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.attacks.linear_head import LinearHead, find_head
from fedcdp.attacks.observe import Captured, Leak, Look, capture, state_at
from fedcdp.attacks.replay import Course
from fedcdp.attacks.scores import visible_inputs
from fedcdp.config.plan import Plan
from fedcdp.config.schedules import constant
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.engine import Batch, Engine, FunctionalEngine, Loss
from fedcdp.errors import DataError, ModelError, PlanError
from fedcdp.files.tree import Tree
from fedcdp.models.networks import mixing_layers, prepare
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.rundir import State
from fedcdp.training.simulate import Run

RawGradients = Mapping[str, Tensor] | Sequence[Tensor]


@dataclass(frozen=True)
class Scene:
    """What is attacked: the network, what was or will be captured of it, and what anyone knows of the data."""

    plan: Plan
    network: nn.Module
    engine: Engine
    shape: tuple[int, ...]
    classes: int
    device: torch.device
    value_range: tuple[float, float]
    public: Dataset | None
    simulator: Simulator | None = None
    state: State | None = None
    given: Captured | None = None
    scored: bool = True
    loss: Loss = F.cross_entropy
    course: Course | None = None
    """The whole training, where it can be read from its beginning."""

    def __post_init__(self) -> None:
        if self.public is not None and self.public.shape != self.shape:
            raise DataError(
                f"public: inputs of shape {list(self.public.shape)} are not like the victims', {list(self.shape)}"
            )

    def captured(self, look: Look, victims: int | None) -> Captured:
        """What the reader sees."""
        if self.simulator is not None and self.state is not None:
            return capture(self.simulator, self.state, look, victims)
        if self.given is None:
            raise PlanError("there is nothing to attack")
        return self.given

    def visible(self) -> Tensor:
        """Which coordinates of an input the network can see.

        At some weights, such as a zero last layer, the answer is the same for all inputs although gradients are not: then it
        is asked again at other weights.
        """
        for moved in (0.0, 1.0):
            seen = self._visible_at(moved)
            if bool(seen.any()):
                return seen
        raise ModelError("model: its answer does not depend on its inputs; there is nothing to reconstruct")

    def _visible_at(self, moved: float) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        weights = {}
        for name, parameter in self.network.named_parameters():
            weights[name] = parameter.detach()
            if moved and parameter.requires_grad:
                weights[name] = weights[name] + moved * torch.randn(parameter.shape, generator=generator).to(parameter)
        try:
            return visible_inputs(
                lambda inputs: torch.func.functional_call(self.network, weights, (inputs,)), self.shape, self.device
            )
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(f"model: its answer cannot be differentiated by its inputs: {reason}") from error

    def public_examples(self) -> Dataset:
        """Examples that anyone has; where there are none, the middle of the range that inputs have."""
        if self.public is not None:
            return self.public
        middle = torch.full((1, *self.shape), sum(self.value_range) / 2)
        return Dataset(middle, torch.zeros(1, dtype=torch.int64), self.classes)

    @cached_property
    def head(self) -> LinearHead | None:
        """The last layer, where it alone is trained, by the cross-entropy."""
        return find_head(self.network, self.shape) if self.loss is F.cross_entropy else None


def simulated(
    target: Run | Plan,
    model: nn.Module | None,
    federation: Federation | None,
    leak: Leak,
    at_round: int | None,
    step: int,
    steps: int,
    device: torch.device,
    loss: Loss,
    public: Dataset | None,
) -> Scene:
    """A run at its trained weights, or a plan at the beginning of a round that is simulated up to there."""
    if isinstance(target, Run):
        if at_round is not None and model is None:
            raise PlanError("at_round: a run holds only its trained network; give the untrained one as model, too")
        if federation is not None:
            raise PlanError("federation: a run has its own; leave it out")
        plan, federation, network = target.plan, target.federation, target.model if model is None else model
        network = target.model if at_round is None else network
    elif model is None or federation is None:
        raise PlanError("model, federation: an attack on a plan needs both")
    else:
        plan, network = target, model
    _check_place(plan, leak, at_round, step, steps)
    _check_apart(network)
    # The rounds before are the plan's own; only in the captured one does a client take as many steps as are asked for.
    ready = prepare(network, plan, device)
    engine = FunctionalEngine(ready, loss)
    weights = {name: p.detach() for name, p in ready.named_parameters() if p.requires_grad}
    state = State(0, weights, dict(weights) if plan.ema else None, plan.quantile.start if plan.quantile else None)
    if isinstance(target, Run) and at_round is None and target.rounds:
        bound = target.metrics[-1].get("clip") if plan.quantile else None
        state = State(min(target.rounds, plan.rounds - 1), weights, None, bound)
    elif at_round:
        plan.check_clients(federation.clients)
        state = state_at(Simulator.stepwise(ClientData(federation, plan, device), engine), state, at_round)
    looked_at = plan.but(local_steps=max(step + 1, 1) if leak == "type2" else steps)
    simulator = Simulator.stepwise(ClientData(federation, looked_at, device), engine)
    batch = simulator.data.first_batch()
    simulator.engine.check(weights, batch, per_example=True)
    _require_finite(engine.outputs(state.weights, batch.inputs[0]))
    low, high = float(federation.train.inputs.min()), float(federation.train.inputs.max())
    course = None
    if at_round is None and model is not None:
        _check_untrained(model, network)
    if at_round is None and model is not None and plan.per_round <= federation.clients:  # else it cannot be trained
        course = Course(model, federation, plan, device, loss, target if isinstance(target, Run) else None)
    return Scene(
        looked_at, ready, engine, federation.train.shape, federation.train.classes, device,
        (0.0, 1.0) if low >= 0 and high <= 1 else (low, high),
        public or federation.validation or federation.train, simulator, state, loss=loss, course=course,
    )  # fmt: skip


def _check_untrained(model: nn.Module, trained: nn.Module) -> None:
    """Refuse a network that cannot be the run's own before its training."""
    shapes = [{name: p.shape for name, p in each.named_parameters()} for each in (model, trained)]
    if shapes[0] != shapes[1]:
        raise PlanError("model: it is not the run's network; give that, untrained, or leave it out")


def _check_apart(model: nn.Module) -> None:
    """Refuse a network in which one example's gradient is not its own."""
    for name, layer in mixing_layers(model):
        kind = type(layer).__name__
        raise ModelError(f"model: layer {name or '(the network itself)'} is {kind}, which mixes the examples of a batch; "
                         "what a reader sees of one of them is not defined")  # fmt: skip


def _check_place(plan: Plan, leak: Leak, at_round: int | None, step: int, steps: int) -> None:
    """Refuse to read where the plan has nothing to read."""
    if at_round is not None and not 0 <= at_round < plan.rounds:
        raise PlanError(f"at_round: {at_round} is not allowed; the plan has rounds 0 to {plan.rounds - 1}")
    if not 1 <= steps <= plan.local_steps:
        raise PlanError(f"steps: {steps} is not allowed; the plan has 1 to {plan.local_steps} local steps")
    if not 0 <= step < plan.local_steps:
        raise PlanError(f"step: {step} is not allowed; the plan has local steps 0 to {plan.local_steps - 1}")
    if leak == "type2" and steps != 1:
        raise PlanError(
            f"steps: {steps} is for type0 and type1; a reader of type2 sees single examples, at local step `step`"
        )
    if leak != "type2" and step != 0:
        raise PlanError(f"step: {step} is for type2; a reader of {leak} sees whole updates, of `steps` local steps")


def given_gradients(
    gradients: RawGradients,
    model: nn.Module | None,
    truth: tuple[Tensor, Tensor] | None,
    input_shape: tuple[int, ...] | None,
    examples: int,
    device: torch.device,
    loss: Loss,
    public: Dataset | None,
) -> Scene:
    """Gradients from anywhere, at the model's own weights."""
    if model is None:
        raise PlanError("model: an attack on gradients needs the network that they are of")
    _check_apart(model)
    # A large step, for little of a gradient may be lost where the method's code adds it to the weights and takes them off.
    plan = Plan(method="nonprivate", local_steps=1, record_sampling="partition", learning_rate=constant(1e3))
    ready = prepare(model, plan, device)
    engine = FunctionalEngine(ready, loss)
    given = raw_gradients(gradients, ready, engine, plan, truth, input_shape, examples, device)
    shape, weights = tuple(given.inputs.shape[2:]), {name: value[0] for name, value in given.weights.items()}
    try:
        answers = engine.outputs(weights, given.inputs[:1, 0])
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"input_shape: the network does not take inputs of shape {list(shape)}: {reason}") from error
    _require_finite(answers)
    classes = answers.shape[-1]
    low, high = int(given.targets.min()), int(given.targets.max())
    if low < 0 or high >= classes:
        raise DataError(f"truth: labels run from {low} to {high}, but the network has classes 0 to {classes - 1}")
    engine.check(weights, Batch(given.inputs[:1], given.targets[:1], given.present[:1]), per_example=True)
    known = [data.inputs for data in (public,) if data is not None] + ([given.inputs] if truth is not None else [])
    least = min((float(each.min()) for each in known), default=0.0)
    most = max((float(each.max()) for each in known), default=1.0)
    return Scene(
        plan, ready, engine, shape, classes, device, (0.0, 1.0) if least >= 0 and most <= 1 else (least, most), public,
        given=given, scored=truth is not None, loss=loss,
    )  # fmt: skip


def _require_finite(answers: Tensor) -> None:
    if not bool(answers.isfinite().all()):
        raise ModelError("model: its answers are not finite, so that its gradients tell nothing; did its training diverge?")


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
