"""`fedcdp.attack`: attack a run, a plan or raw gradients, and say what leaked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.attacks.capture import LEAKS, Captured, Leak, Look, capture, state_at
from fedcdp.attacks.closed_form import invert
from fedcdp.attacks.forward import check_reproduces
from fedcdp.attacks.layers import LayerLeaks, layer_by_layer
from fedcdp.attacks.leaks import Leaks, Observer, judged
from fedcdp.attacks.membership import Membership, infer_membership
from fedcdp.attacks.metrics import Criteria, visible_inputs
from fedcdp.attacks.presence import Presence, matched_filter
from fedcdp.attacks.raw import raw_gradients
from fedcdp.attacks.recipe import CPL, RECIPES, Recipe
from fedcdp.attacks.reconstruct import Progress, reconstruct
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.engine import Engine, FunctionalEngine, Loss
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
      of its parameter, or of several victims [victims, ...]. With `truth`, the inputs and labels [(victims,) examples, ...]
      that they are the mean gradient of, the result is scored; without it, give `input_shape` and how many `examples`
      each is of.

    `attack` is the name of a preset (`ATTACKS`) or a `Recipe` of your own; by default the paper's for single images,
    `batch` for updates, `analytic` for tables. `type2` reads local step `step`; `type1` and `type0` read an update of
    `steps` local steps (the paper: 1). With several `releases` the reader averages. `public` are examples that anyone has:
    baselines, candidates and priors come from them (default: the federation's validation split).
    """
    name, recipe = _named(attack)
    device = usable_device(device)
    if isinstance(target, Run | Plan):
        scene = _simulated(
            target, model, federation, leak, at_round, step, steps, device, loss, public, name == "membership"
        )
    else:
        scene = _given(target, model, truth, input_shape, examples, device, loss, public)
    name = name or scene.default_attack(leak)
    recipe = recipe or RECIPES.get(name)
    seed = scene.plan.seed if seed is None else seed
    if name == "membership":
        return _membership(scene, target, seed, device)
    look = Look(leak, step, releases)
    if name in ("matched-filter", "per-layer"):
        if scene.simulator is None or scene.state is None:
            raise PlanError(f"attack: {name} needs a run or a plan, whose noise it can know; these are raw gradients")
        if name == "matched-filter":
            return matched_filter(
                scene.simulator, scene.state, leak, victims, step=step, releases=releases, public=scene.public_examples(),
                candidates=criteria.candidates,
            )  # fmt: skip
        return layer_by_layer(
            scene.simulator, scene.state, look, victims, CPL, scene.classes, visible=scene.visible(),
            value_range=scene.value_range, exact_mse=criteria.exact_mse, seed=seed, progress=progress,
        )  # fmt: skip
    captured = scene.captured(look, victims)
    if scene.scored:
        check_reproduces(captured)
    observer = Observer(captured, criteria, scene.visible(), scene.value_range)
    started = time.perf_counter()
    if name == "analytic":
        found = invert(captured, scene.network, scene.classes, seed, progress)
    else:
        found = reconstruct(
            captured, recipe or CPL, scene.classes, seed=seed, value_range=scene.value_range, public=scene.public,
            watch=observer, progress=progress,
        )  # fmt: skip
    seconds = time.perf_counter() - started
    if not scene.scored:
        return Leaks(
            name, captured, found, None, None, None, scene.classes, observer.first_exact, observer.snapshots, seconds
        )
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
        return visible_inputs(
            lambda inputs: torch.func.functional_call(self.network, weights, (inputs,)), self.shape, self.device
        )

    def public_examples(self) -> Dataset:
        """Examples that anyone has, or a sentence that they are missing."""
        if self.public is None:
            raise DataError("public: this attack needs examples like the victims' that anyone has; there are none")
        return self.public

    def default_attack(self, leak: Leak) -> str:
        """The paper's for single images, all dummies for updates, closed form for tables."""
        if len(self.shape) < 3:
            return "analytic"
        return "cpl" if leak == "type2" else "batch"


def _named(attack: str | Recipe | None) -> tuple[str, Recipe | None]:
    if attack is None:
        return "", None
    if isinstance(attack, Recipe):
        return "recipe", attack
    if attack not in ATTACKS:
        raise PlanError(f"attack: {attack!r} is not one of {', '.join(ATTACKS)}")
    return attack, None


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
    trained_only: bool,
) -> Scene:
    if leak not in LEAKS:
        raise PlanError(f"leak: {leak!r} is not one of {', '.join(LEAKS)}")
    if steps < 1:
        raise PlanError(f"steps: {steps} is not allowed; it must be at least 1")
    if isinstance(target, Run):
        if model is None and at_round is not None:
            raise PlanError("at_round: a run holds only its trained network; give the untrained one as model, too")
        plan, federation, network = target.plan, target.federation, model if at_round is not None else target.model
    else:
        plan, network = target, model
        if model is None or federation is None:
            raise PlanError("model, federation: an attack on a plan needs both")
    if network is None or federation is None:
        raise PlanError("model, federation: an attack needs both")
    if at_round is not None and not 0 <= at_round < plan.rounds:
        raise PlanError(f"at_round: {at_round} is not allowed; the plan has rounds 0 to {plan.rounds - 1}")
    # The rounds before are the plan's own; only in the captured one does a client take as many steps as are asked for.
    ready = prepare(network, plan, device)
    engine = FunctionalEngine(ready, loss)
    weights = {name: p.detach() for name, p in ready.named_parameters() if p.requires_grad}
    state = State(0, weights, dict(weights) if plan.ema else None, plan.quantile.start if plan.quantile else None)
    if isinstance(target, Run) and at_round is None and target.rounds:
        bound = target.metrics[-1].get("clip") if plan.quantile else None
        state = State(min(target.rounds, plan.rounds - 1), weights, None, bound)
    elif at_round and not trained_only:
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
    plan = Plan(method="nonprivate", local_steps=1, record_sampling="partition", learning_rate=constant(1.0))
    ready = prepare(model, plan, device)
    engine = FunctionalEngine(ready, loss)
    given = raw_gradients(gradients, ready, engine, plan, truth, input_shape, examples, device)
    shape = tuple(given.inputs.shape[2:])
    try:
        classes = engine.outputs({n: v[0] for n, v in given.weights.items()}, given.inputs[:1, 0]).shape[-1]
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"input_shape: the network does not take inputs of shape {list(shape)}: {reason}") from error
    known = [data.inputs for data in (public,) if data is not None] + ([given.inputs] if truth is not None else [])
    low = min((float(each.min()) for each in known), default=0.0)
    high = max((float(each.max()) for each in known), default=1.0)
    if public is None and truth is not None:
        public = Dataset(given.inputs.flatten(0, 1).float().cpu(), given.targets.flatten().cpu(), classes)
    return Scene(
        plan, ready, engine, shape, classes, device, (0.0, 1.0) if low >= 0 and high <= 1 else (low, high), public,
        given=given, scored=truth is not None,
    )  # fmt: skip


def _membership(scene: Scene, target: Any, seed: int, device: torch.device) -> Membership:
    if not isinstance(target, Run):
        raise PlanError("attack: membership is inferred from a trained model; give a run")
    if target.federation.validation is None:
        raise DataError("membership: the federation has no validation split to compare its members with")
    return infer_membership(scene.network, target.federation.train, target.federation.validation, seed=seed, device=device)
