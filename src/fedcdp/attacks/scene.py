"""The target of an attack: the network, the observations, and public knowledge about the data.

A scene is a plan, a run, or raw gradients from any source (`raw_gradients.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.attacks.linear_head import LinearHead, find_head, link_of
from fedcdp.attacks.observe import Captured, Leak, Look, capture, state_at
from fedcdp.attacks.replay import Course
from fedcdp.attacks.scores import visible_inputs
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.input_columns import InputColumns, infer_columns
from fedcdp.data.partition import Federation
from fedcdp.engine import Engine, FunctionalEngine, Loss
from fedcdp.errors import DataError, ModelError, PlanError
from fedcdp.files.tree import Inputs, each_tensor
from fedcdp.models.batch_norm import mixing_layers
from fedcdp.models.networks import prepare
from fedcdp.training.loss_contract import loss_for
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.run import Run
from fedcdp.training.rundir import State
from fedcdp.training.scaling import with_set_scaling


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
    federation: Federation | None = None
    """The clients, if they are known."""
    not_real: str | None = None
    """What the inputs are, if they are not real numbers in one tensor; they cannot be reconstructed then."""

    def __post_init__(self) -> None:
        if self.public is not None and self.public.shape != self.shape:
            raise DataError(
                f"public: inputs of shape {list(self.public.shape)} do not match the victims' shape {list(self.shape)}"
            )
        if self.public is not None and self.federation is not None:
            _check_alike(self.public, self.federation.train)

    def names(self, captured: Captured) -> tuple[str, ...] | None:
        """The name of each victim's client, if clients have names."""
        if self.federation is None or self.federation.names is None or bool((captured.client < 0).any()):
            return None
        return tuple(self.federation.name(client) for client in captured.client.tolist())

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

    def sent(self, network: nn.Module) -> Scene:
        """The same after the server has sent this network instead of its own."""
        if self.simulator is None or self.state is None:
            raise PlanError("attack: an active server needs a run or a plan; the weights of raw gradients are given")
        ready = prepare(network, self.plan, self.device)
        engine = FunctionalEngine(ready, self.loss)
        weights = {name: p.detach() for name, p in ready.named_parameters() if p.requires_grad}
        simulator = Simulator.stepwise(self.simulator.data, engine)
        engine.check(weights, simulator.data.first_batch(), per_example=True)
        state = State(self.state.round, weights, None, self.state.clip)
        return replace(self, network=ready, engine=engine, simulator=simulator, state=state, course=None)

    @cached_property
    def columns(self) -> InputColumns | None:
        """The columns of a table: those of the data or, if these do not say, those that public rows show."""
        if self.not_real or len(self.shape) != 1:
            return None
        known = (None if self.federation is None else self.federation.train, self.public)
        told = next((each.columns for each in known if each is not None and each.columns is not None), None)
        return told if told is not None or self.public is None else infer_columns(self.public.tensor)

    @cached_property
    def head(self) -> LinearHead | None:
        """The last layer, if it is the only trained layer and the loss is one whose gradient is known in closed form."""
        link = None if self.not_real else link_of(self.loss)
        return None if link is None else find_head(self.network, self.shape, link)


def simulated(
    target: Run | Plan,
    model: nn.Module | None,
    federation: Federation | None,
    leak: Leak,
    at_round: int | None,
    step: int,
    steps: int,
    device: torch.device,
    loss: Loss | None,
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
    if plan.scaling_noise is not None and model is not None:  # rounds are computed behind the layer that scales inputs
        given = network is model
        model = with_set_scaling(model, federation, plan, target.model if isinstance(target, Run) else None)
        network = model if given else network
    check_apart(network)
    loss = loss_for(federation.train, loss)
    # Earlier rounds follow the plan; only in the captured round does a client take the requested number of steps.
    ready = prepare(network, plan, device)
    engine = FunctionalEngine(ready, loss)
    weights = {name: p.detach() for name, p in ready.named_parameters() if p.requires_grad}
    state = State.first(plan, weights)
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
    require_finite(engine.outputs(state.weights, each_tensor(batch.inputs, lambda value: value[0])))
    not_real = not_real_inputs(federation.train.inputs)
    low, high = (0.0, 1.0) if not_real else _range_of(federation.train.tensor)
    course = None
    if at_round is None and model is not None:
        _check_untrained(model, network)
    if at_round is None and model is not None and plan.per_round <= federation.clients:  # else training is impossible
        course = Course(model, federation, plan, device, loss, target if isinstance(target, Run) else None)
    return Scene(
        looked_at, ready, engine, federation.train.shape, federation.train.classes, device,
        (0.0, 1.0) if low >= 0 and high <= 1 else (low, high),
        public or federation.validation or federation.train, simulator, state, loss=loss, course=course,
        federation=federation, not_real=not_real,
    )  # fmt: skip


def not_real_inputs(inputs: Inputs) -> str | None:
    """What the inputs are, unless they are real numbers in one tensor."""
    if isinstance(inputs, dict):
        return ", ".join(f"{name} ({_kind(value)})" for name, value in inputs.items())
    return None if inputs.is_floating_point() else "token ids" if inputs.dtype == torch.int64 else _kind(inputs)


def _kind(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _range_of(inputs: Tensor) -> tuple[float, float]:
    return float(inputs.min()), float(inputs.max())


def _check_alike(public: Dataset, victims: Dataset) -> None:
    """Raise unless public examples have inputs and targets like the victims'."""
    names = [list(each.inputs) if isinstance(each.inputs, dict) else None for each in (public, victims)]
    if names[0] != names[1]:
        raise DataError("public: its inputs have other names than the victims'")
    shapes = [f"{_kind(each.targets)} of shape {list(each.targets.shape[1:])}" for each in (public, victims)]
    if shapes[0] != shapes[1]:
        raise DataError(f"public: each target is {shapes[0]}, but the victims' are {shapes[1]}")


def _check_untrained(model: nn.Module, trained: nn.Module) -> None:
    """Raise unless `model` can be the run's network before training."""
    shapes = [{name: p.shape for name, p in each.named_parameters()} for each in (model, trained)]
    if shapes[0] != shapes[1]:
        raise PlanError("model: it is not the run's network; give the run's untrained network, or leave it out")


def check_apart(model: nn.Module) -> None:
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


def require_finite(answers: Tensor) -> None:
    if not bool(answers.isfinite().all()):
        raise ModelError("model: its outputs are not finite, so its gradients show nothing; did its training diverge?")
