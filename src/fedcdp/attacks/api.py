"""`fedcdp.attack`: attack a run, a plan or raw gradients, and report what leaked."""

from __future__ import annotations

from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.membership import Membership, infer_membership
from fedcdp.attacks.observe import LEAKS, Leak, Look
from fedcdp.attacks.per_layer import LayerLeaks
from fedcdp.attacks.portfolio import Attempts, strongest
from fedcdp.attacks.presence import Presence
from fedcdp.attacks.recipe import RECIPES, Recipe
from fedcdp.attacks.reconstruct import Progress
from fedcdp.attacks.scene import RawGradients, given_gradients, simulated
from fedcdp.attacks.scores import Criteria
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.engine import Loss
from fedcdp.engine.runtime import usable_device
from fedcdp.errors import DataError, PlanError
from fedcdp.training.simulate import Run

ATTACKS = ("best", *RECIPES, "analytic", "linear-head", "matched-filter", "per-layer", "membership")
Found = Leaks | Presence | LayerLeaks | Membership


def attack(
    target: Run | Plan | RawGradients,
    *,
    leak: Leak = "type2",
    attack: str | Recipe | None = None,
    victims: int | None = None,
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

    `attack` is the name of a preset (`ATTACKS`) or a `Recipe` of your own. The default, `best`, tries those that suit the
    plan and gives the strongest, with all that were `tried`. A network whose last layer alone is trained is read in all
    rounds of the plan or run (`linear-head`): those of a run are replayed from its seed, for which it needs the untrained
    `model`; `at_round` reads a single one. There are up to 100 `victims` unless their number is given. `type2` reads
    local step `step`; `type1` and `type0` read an update of `steps` local steps (the paper: 1). With several `releases` the
    reader averages. `public` are examples that anyone has: baselines, candidates and priors come from them (default: the
    federation's validation split or, where it has none, its training data; for raw gradients, nothing but the range of
    the inputs).
    """
    name, recipe = _named(attack)
    if leak not in LEAKS:
        raise PlanError(f"leak: {leak!r} is not one of {', '.join(LEAKS)}")
    _whole_numbers(victims=1 if victims is None else victims, examples=examples, step=step, steps=steps, releases=releases)
    if victims is not None and victims < 1:
        raise PlanError(f"victims: {victims} is not allowed; it must be at least 1")
    device = usable_device(device)
    if name == "membership":
        return _membership(target, public, at_round, seed, device)
    if isinstance(target, Run | Plan):
        _leave_out("raw gradients", truth=truth is not None, input_shape=input_shape is not None, examples=examples != 1)
        scene = simulated(target, model, federation, leak, at_round, step, steps, device, loss, public)
    else:
        _leave_out(
            "a run or a plan", federation=federation is not None, at_round=at_round is not None, step=step != 0,
            steps=steps != 1, releases=releases != 1,
        )  # fmt: skip
        scene = given_gradients(target, model, truth, input_shape, examples, device, loss, public)
    attempts = Attempts(
        scene, Look(leak, step, releases), victims, criteria, scene.plan.seed if seed is None else seed,
        throughout=step == 0 and steps == 1 and releases == 1,
    )  # fmt: skip
    return strongest(attempts, progress) if name == "best" else attempts.run(name, recipe, progress)


def _named(attack: str | Recipe | None) -> tuple[str, Recipe | None]:
    if attack is None:
        return "best", None
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


def _membership(
    target: object, public: Dataset | None, at_round: int | None, seed: int | None, device: torch.device
) -> Membership:
    if not isinstance(target, Run):
        raise PlanError("attack: membership needs a trained model; give a run")
    _leave_out("gradients or updates", at_round=at_round is not None)
    others = public or target.federation.validation
    if others is None:
        raise DataError("public: the federation has no validation split to compare members with; give public examples")
    seed = target.plan.seed if seed is None else seed
    return infer_membership(target.model, target.federation.train, others, seed=seed, device=device)
