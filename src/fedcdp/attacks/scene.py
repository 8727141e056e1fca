"""The target of an attack: the network, the observations, and public knowledge about the data.

A scene is a plan, a run, or raw gradients from any source: a user's own training loop, another library, a file.
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
from fedcdp.files.tree import Tree, each_tensor
from fedcdp.models.networks import mixing_layers, prepare
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.rundir import State
from fedcdp.training.simulate import Run

RawGradients = Mapping[str, Tensor] | Sequence[Tensor]


@dataclass(frozen=True)
class Scene:
    """The target of an attack: the network, its past or future observations, and public knowledge about the data."""

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
    """The whole training, if it can be observed from its beginning."""

    def __post_init__(self) -> None:
        if self.public is not None and self.public.shape != self.shape:
            raise DataError(
                f"public: inputs of shape {list(self.public.shape)} do not match the victims' shape {list(self.shape)}"
            )

    def captured(self, look: Look, victims: int | None) -> Captured:
        """The adversary's observation."""
        if self.simulator is not None and self.state is not None:
            return capture(self.simulator, self.state, look, victims)
        if self.given is None:
            raise PlanError("target: there is nothing to attack; give a run, a plan or gradients")
        return self.given

    def visible(self) -> Tensor:
        """Mask of the input coordinates that affect the network's output.

        At some weights, such as a zero last layer, the output is the same for all inputs although gradients differ. The mask
        is then computed at other weights.
        """
        for moved in (0.0, 1.0):
            seen = self._visible_at(moved)
            if bool(seen.any()):
                return seen
        raise ModelError("model: its output does not depend on its inputs; there is nothing to reconstruct")

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
            raise ModelError(f"model: its output cannot be differentiated with respect to its inputs: {reason}") from error

    def public_examples(self) -> Dataset:
        """Public examples; if there are none, a single example at the middle of the input range."""
        if self.public is not None:
            return self.public
        middle = torch.full((1, *self.shape), sum(self.value_range) / 2)
        return Dataset(middle, torch.zeros(1, dtype=torch.int64), self.classes)

    @cached_property
    def head(self) -> LinearHead | None:
        """The last layer, if it is the only trained layer and the loss is the cross-entropy."""
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
    """A run at its trained weights, or a plan simulated up to the beginning of a round."""
    if isinstance(target, Run):
        if at_round is not None and model is None:
            raise PlanError("at_round: a run holds only its trained network; also give the untrained one as model")
        if federation is not None:
            raise PlanError("federation: a run has its own federation; leave it out")
        plan, federation, network = target.plan, target.federation, target.model if model is None else model
        network = target.model if at_round is None else network
    elif model is None or federation is None:
        raise PlanError("model, federation: an attack on a plan needs both")
    else:
        plan, network = target, model
    _check_place(plan, leak, at_round, step, steps)
    _check_apart(network)
    # Earlier rounds follow the plan; only in the captured round does a client take the requested number of steps.
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
    _require_finite(engine.outputs(state.weights, each_tensor(batch.inputs, lambda value: value[0])))
    low, high = float(federation.train.tensor.min()), float(federation.train.tensor.max())
    course = None
    if at_round is None and model is not None:
        _check_untrained(model, network)
    if at_round is None and model is not None and plan.per_round <= federation.clients:  # else training is impossible
        course = Course(model, federation, plan, device, loss, target if isinstance(target, Run) else None)
    return Scene(
        looked_at, ready, engine, federation.train.shape, federation.train.classes, device,
        (0.0, 1.0) if low >= 0 and high <= 1 else (low, high),
        public or federation.validation or federation.train, simulator, state, loss=loss, course=course,
    )  # fmt: skip


def _check_untrained(model: nn.Module, trained: nn.Module) -> None:
    """Raise unless `model` can be the run's network before training."""
    shapes = [{name: p.shape for name, p in each.named_parameters()} for each in (model, trained)]
    if shapes[0] != shapes[1]:
        raise PlanError("model: it is not the run's network; give the run's untrained network, or leave it out")


def _check_apart(model: nn.Module) -> None:
    """Reject a network whose per-example gradients depend on other examples of the batch."""
    for name, layer in mixing_layers(model):
        kind = type(layer).__name__
        raise ModelError(f"model: layer {name or '(the network itself)'} is {kind}, which mixes the examples of a batch; "
                         "the gradient of a single example is not defined")  # fmt: skip


def _check_place(plan: Plan, leak: Leak, at_round: int | None, step: int, steps: int) -> None:
    """Reject a round or step that the plan does not have."""
    if at_round is not None and not 0 <= at_round < plan.rounds:
        raise PlanError(f"at_round: {at_round} is not allowed; the plan has rounds 0 to {plan.rounds - 1}")
    if not 1 <= steps <= plan.local_steps:
        raise PlanError(f"steps: {steps} is not allowed; the plan has 1 to {plan.local_steps} local steps")
    if not 0 <= step < plan.local_steps:
        raise PlanError(f"step: {step} is not allowed; the plan has local steps 0 to {plan.local_steps - 1}")
    if leak == "type2" and steps != 1:
        raise PlanError(
            f"steps: {steps} is for type0 and type1; a type2 adversary sees single examples, at local step `step`"
        )
    if leak != "type2" and step != 0:
        raise PlanError(f"step: {step} is for type2; a {leak} adversary sees whole updates, of `steps` local steps")


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
    """Gradients from any source, taken at the model's own weights."""
    if model is None:
        raise PlanError("model: an attack on gradients needs the network they were computed with")
    _check_apart(model)
    # A large learning rate: the method's code adds the gradient to the weights and subtracts them again, which would round
    # a small step away.
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
    known = [data.tensor for data in (public,) if data is not None] + ([given.inputs] if truth is not None else [])
    least = min((float(each.min()) for each in known), default=0.0)
    most = max((float(each.max()) for each in known), default=1.0)
    return Scene(
        plan, ready, engine, shape, classes, device, (0.0, 1.0) if least >= 0 and most <= 1 else (least, most), public,
        given=given, scored=truth is not None, loss=loss,
    )  # fmt: skip


def _require_finite(answers: Tensor) -> None:
    if not bool(answers.isfinite().all()):
        raise ModelError("model: its outputs are not finite, so its gradients show nothing; did its training diverge?")


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
    """The gradients as an observation: each is the mean over its examples, at the model's weights."""
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
        raise PlanError("truth: give a pair of inputs and labels")
    inputs, targets = (
        _tensor(f"truth: {name}", value).to(device) for name, value in zip(("inputs", "labels"), truth, strict=True)
    )
    given = f"inputs {list(inputs.shape)} and labels {list(targets.shape)}"
    if targets.dim() == 1:  # one victim's examples, or one example for each victim
        several = victims > 1
        inputs, targets = (inputs[:, None], targets[:, None]) if several else (inputs[None], targets[None])
    if targets.dim() != 2 or inputs.shape[:2] != targets.shape or len(targets) != victims or not targets.numel():
        raise PlanError(f"truth: {given} do not match {victims} victims with the same number of examples each")
    return inputs.float(), targets.long()
