"""`fedcdp.attack`: attack a run, a plan or raw gradients, and say what leaked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.attacks.capture import LEAKS, Captured, Leak, Look, capture, state_at
from fedcdp.attacks.closed_form import invert
from fedcdp.attacks.forward import check_reproduces
from fedcdp.attacks.layers import LayerLeaks, layer_by_layer
from fedcdp.attacks.leaks import Leaks, Observer, judged, unjudged
from fedcdp.attacks.membership import Membership, infer_membership
from fedcdp.attacks.metrics import Criteria, visible_inputs
from fedcdp.attacks.presence import Presence, matched_filter
from fedcdp.attacks.raw import raw_gradients
from fedcdp.attacks.recipe import CPL, ONE_TENSOR, RECIPES, Recipe
from fedcdp.attacks.reconstruct import Progress, reconstruct
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.engine import Batch, Engine, FunctionalEngine, Loss
from fedcdp.errors import DataError, ModelError, PlanError
from fedcdp.models import prepare
from fedcdp.plan import Plan
from fedcdp.rundir import State
from fedcdp.schedules import constant
from fedcdp.simulation import Run, Simulator, usable_device

ATTACKS = (*RECIPES, "analytic", "matched-filter", "per-layer", "membership")
Found = Leaks | Presence | LayerLeaks | Membership
RawGradients = Mapping[str, Tensor] | Sequence[Tensor]


def attack(
    target: Run | Plan | RawGradients,
    *,
    leak: Leak = "type2",
    attack: str | Recipe | None = None,
    victims: int = 100,
    model: nn.Module | None = None,
    federation: Federation | None = None,
    truth: tuple[Tensor, Tensor] | None = None,
    input_shape: tuple[int, ...] | None = None,
    examples: int = 1,
    public: Dataset | None = None,
    at_round: int | None = None,
    step: int = 0,
    steps: int = 1,
    releases: int = 1,
    criteria: Criteria = Criteria(),  # noqa: B008
    device: str | torch.device = "cpu",
    loss: Loss = F.cross_entropy,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Found:
    """Attack what a reader sees, and measure what it gets.

    - A `Run`: what a reader would see of one more round at its trained weights, or, with `at_round`, of that round of it
      (which is simulated again from `model`, the untrained network).
    - A `Plan` with `model` and `federation`: the same before any training, in round 0 or, simulated up to it, `at_round`.
    - Raw gradients of your own training loop, by parameter name or in the order of `model.parameters()`, each in the shape
      of its parameter, or of several victims [victims, ...]; None stands for that of a frozen one. With `truth`, the inputs
      and labels [(victims,) examples, ...] that they are the mean gradient of, the result is scored; without it, give
      `input_shape` and how many `examples` each is of.

    `attack` is the name of a preset (`ATTACKS`) or a `Recipe` of your own; by default the paper's for single images,
    `batch` for updates, `analytic` for tables. `type2` reads local step `step`; `type1` and `type0` read an update of
    `steps` local steps (the paper: 1). With several `releases` the reader averages. `public` are examples that anyone has:
    baselines, candidates and priors come from them (default: the federation's validation split or, where it has none, its
    training data; for raw gradients, nothing but the range of the inputs).
    """
    name, recipe = _named(attack)
    if leak not in LEAKS:
        raise PlanError(f"leak: {leak!r} is not one of {', '.join(LEAKS)}")
    _whole_numbers(victims=victims, examples=examples, step=step, steps=steps, releases=releases)
    device = usable_device(device)
    if name == "membership":
        return _membership(target, public, at_round, seed, device)
    if isinstance(target, Run | Plan):
        _leave_out("raw gradients", truth=truth is not None, input_shape=input_shape is not None, examples=examples != 1)
        scene = _simulated(target, model, federation, leak, at_round, step, steps, device, loss, public)
    else:
        _leave_out(
            "a run or a plan", federation=federation is not None, at_round=at_round is not None, step=step != 0,
            steps=steps != 1, releases=releases != 1,
        )  # fmt: skip
        scene = _given(target, model, truth, input_shape, examples, device, loss, public)
    name = name or scene.default_attack(leak)
    recipe = recipe or RECIPES.get(name)
    seed = scene.plan.seed if seed is None else seed
    look = Look(leak, step, releases)
    if name in ("matched-filter", "per-layer"):
        if scene.simulator is None or scene.state is None:
            raise PlanError(f"attack: {name} needs a run or a plan, whose noise it can know; these are raw gradients")
        if name == "matched-filter":
            return matched_filter(
                scene.simulator, scene.state, leak, victims, step=step, releases=releases, public=scene.public_examples(),
                candidates=criteria.candidates, progress=progress,
            )  # fmt: skip
        return layer_by_layer(
            scene.simulator, scene.state, look, victims, ONE_TENSOR, scene.classes, visible=scene.visible(),
            value_range=scene.value_range, exact_mse=criteria.exact_mse, seed=seed, progress=progress,
        )  # fmt: skip
    captured = scene.captured(look, victims)
    if scene.scored:
        check_reproduces(captured)
    observer = Observer(captured, criteria, scene.visible(), scene.value_range)
    started = time.perf_counter()
    if name == "analytic":
        found = invert(captured, scene.network, scene.classes, seed=seed, public=scene.public, progress=progress)
    else:
        found = reconstruct(
            captured, recipe or CPL, scene.classes, seed=seed, value_range=scene.value_range, public=scene.public,
            watch=observer, progress=progress,
        )  # fmt: skip
    seconds = time.perf_counter() - started
    if not scene.scored:
        return unjudged(name, captured, found, observer, scene.classes, seconds)
    if name == "analytic":
        observer(1, torch.arange(len(captured), device=device), found.examples)
    return judged(name, captured, found, observer, scene.public_examples(), scene.classes, seconds)


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

    def __post_init__(self) -> None:
        if self.public is not None and self.public.shape != self.shape:
            raise DataError(
                f"public: inputs of shape {list(self.public.shape)} are not like the victims', {list(self.shape)}"
            )

    def captured(self, look: Look, victims: int) -> Captured:
        """What the reader sees."""
        if self.simulator is not None and self.state is not None:
            return capture(self.simulator, self.state, look, victims)
        if self.given is None:
            raise PlanError("there is nothing to attack")
        return self.given

    def visible(self) -> Tensor:
        """Which coordinates of an input the network can see."""
        weights = {name: p.detach() for name, p in self.network.named_parameters()}
        try:
            seen = visible_inputs(
                lambda inputs: torch.func.functional_call(self.network, weights, (inputs,)), self.shape, self.device
            )
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(f"model: its answer cannot be differentiated by its inputs: {reason}") from error
        if not bool(seen.any()):
            raise ModelError("model: its answer does not depend on its inputs; there is nothing to reconstruct")
        return seen

    def public_examples(self) -> Dataset:
        """Examples that anyone has; where there are none, the middle of the range that inputs have."""
        if self.public is not None:
            return self.public
        middle = torch.full((1, *self.shape), sum(self.value_range) / 2)
        return Dataset(middle, torch.zeros(1, dtype=torch.int64), self.classes)

    def default_attack(self, leak: Leak) -> str:
        """The paper's for single images, all dummies for updates, closed form for tables."""
        if len(self.shape) < 3:
            return "analytic"
        return "cpl" if (self.given.leak if self.given else leak) == "type2" else "batch"


def _named(attack: str | Recipe | None) -> tuple[str, Recipe | None]:
    if attack is None:
        return "", None
    if isinstance(attack, Recipe):
        return "recipe", attack
    if attack not in ATTACKS:
        raise PlanError(f"attack: {attack!r} is not one of {', '.join(ATTACKS)}")
    return attack, None


def _whole_numbers(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, Integral):
            raise PlanError(f"{name}: {value!r} is not a whole number")


def _leave_out(where: str, **given: bool) -> None:
    if names := [name for name, is_given in given.items() if is_given]:
        raise PlanError(f"{', '.join(names)}: only for an attack on {where}; leave it out")


def _simulated(
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
    if isinstance(target, Run):
        if at_round is not None and model is None:
            raise PlanError("at_round: a run holds only its trained network; give the untrained one as model, too")
        if federation is not None or (at_round is None and model is not None):
            raise PlanError("model, federation: a run has its own; leave them out")
        plan, federation, network = target.plan, target.federation, target.model if model is None else model
    elif model is None or federation is None:
        raise PlanError("model, federation: an attack on a plan needs both")
    else:
        plan, network = target, model
    _check_place(plan, leak, at_round, step, steps)
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
        state = state_at(Simulator(engine, federation, plan, device, None), state, at_round)
    looked_at = plan.but(local_steps=max(step + 1, 1) if leak == "type2" else steps)
    simulator = Simulator(engine, federation, looked_at, device, None)
    simulator.engine.check(weights, simulator.batch_of_first_client(), per_example=True)
    low, high = float(federation.train.inputs.min()), float(federation.train.inputs.max())
    return Scene(
        looked_at, ready, engine, federation.train.shape, federation.train.classes, device,
        (0.0, 1.0) if low >= 0 and high <= 1 else (low, high),
        public or federation.validation or federation.train, simulator, state,
    )  # fmt: skip


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


def _given(
    gradients: RawGradients,
    model: nn.Module | None,
    truth: tuple[Tensor, Tensor] | None,
    input_shape: tuple[int, ...] | None,
    examples: int,
    device: torch.device,
    loss: Loss,
    public: Dataset | None,
) -> Scene:
    if model is None:
        raise PlanError("model: an attack on gradients needs the network that they are of")
    # A large step, for little of a gradient may be lost where the method's code adds it to the weights and takes them off.
    plan = Plan(method="nonprivate", local_steps=1, record_sampling="partition", learning_rate=constant(1e3))
    ready = prepare(model, plan, device)
    engine = FunctionalEngine(ready, loss)
    given = raw_gradients(gradients, ready, engine, plan, truth, input_shape, examples, device)
    shape, weights = tuple(given.inputs.shape[2:]), {name: value[0] for name, value in given.weights.items()}
    try:
        classes = engine.outputs(weights, given.inputs[:1, 0]).shape[-1]
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"input_shape: the network does not take inputs of shape {list(shape)}: {reason}") from error
    low, high = int(given.targets.min()), int(given.targets.max())
    if low < 0 or high >= classes:
        raise DataError(f"truth: labels run from {low} to {high}, but the network has classes 0 to {classes - 1}")
    engine.check(weights, Batch(given.inputs[:1], given.targets[:1], given.present[:1]), per_example=True)
    known = [data.inputs for data in (public,) if data is not None] + ([given.inputs] if truth is not None else [])
    least = min((float(each.min()) for each in known), default=0.0)
    most = max((float(each.max()) for each in known), default=1.0)
    return Scene(
        plan, ready, engine, shape, classes, device, (0.0, 1.0) if least >= 0 and most <= 1 else (least, most), public,
        given=given, scored=truth is not None,
    )  # fmt: skip


def _membership(
    target: object, public: Dataset | None, at_round: int | None, seed: int | None, device: torch.device
) -> Membership:
    if not isinstance(target, Run):
        raise PlanError("attack: membership is inferred from a trained model; give a run")
    _leave_out("gradients or updates", at_round=at_round is not None)
    others = public or target.federation.validation
    if others is None:
        raise DataError("public: the federation has no validation split to compare its members with")
    seed = target.plan.seed if seed is None else seed
    return infer_membership(target.model, target.federation.train, others, seed=seed, device=device)
