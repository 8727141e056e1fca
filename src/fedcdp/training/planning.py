"""From what is given to a plan: the settings as they are, their noise calibrated to an ε, or the recommended recipe.

`default_recipe` says when the recipe applies and what it consists of. Here it meets the data: a step takes all records of
the largest client, the accountant calibrates the noise, and the learning rate follows from the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from fedcdp.accounting.budget import accounting_is_installed
from fedcdp.accounting.population import Population
from fedcdp.config import default_recipe
from fedcdp.config.experiment import Experiment, assemble
from fedcdp.config.plan import Plan
from fedcdp.config.presets import Settings
from fedcdp.data.federation import Federation
from fedcdp.errors import PlanError
from fedcdp.files.tree import Layout
from fedcdp.models.image_features import UNIT_FEATURES
from fedcdp.training.prepared import with_clients_of_file


@dataclass(frozen=True)
class Planned:
    """An experiment, and how its plan was chosen."""

    experiment: Experiment
    epsilon: float | None = None
    """The ε that a calibrated plan reaches; None where the noise was given."""
    recipe: str | None = None
    """Where the recommended recipe was used: the line that says so."""


def plan_experiment(
    given: Sequence[Settings],
    population_of: Callable[[Experiment], Population],
    *,
    target_epsilon: float | None = None,
    mode: str = "tight",
) -> Planned:
    """The experiment that a command means by the settings `given`, the later winning.

    Without a target it is what they say, unless they leave the plan open: then it is the recommended recipe, calibrated to
    ε = 8 (or to the largest ε that is allowed, if that is less). With a target, the noise is calibrated to it either way.

    Args:
        given: Layers of settings.
        population_of: What the accountant must know of an experiment's federation and network.
        target_epsilon: The ε that shall not be exceeded, against the adversary and unit of the settings.
        mode: How ε is computed. In `paper` mode, which guarantees nothing, there is no recipe.
    """
    given = with_clients_of_file(given)
    recipe = mode in ("tight", "rdp") and default_recipe.recipe_applies(given)
    if target_epsilon is None and not recipe:
        return Planned(assemble(*given))
    if mode not in ("tight", "rdp"):
        raise PlanError(
            f"mode: {mode!r} is not one of tight, rdp; paper mode is no guarantee, so noise cannot be chosen by it"
        )
    pick_slots = any(layer.get("plan", {}).get("slots") == "auto" for layer in given)
    layers = [_without_auto(layer) for layer in given]
    experiment = assemble(*([default_recipe.recipe_settings(given)] if recipe else []), *layers)
    machine = experiment.run
    if target_epsilon is None:
        target_epsilon = _default_target(machine.max_epsilon)
    if recipe:
        _require_accounting(target_epsilon, "--noise-multiplier or --preset")
    from fedcdp.accounting import calibrate

    target = calibrate.Target(target_epsilon, machine.adversary, machine.unit)
    population = population_of(experiment)
    sizes = population.held or population.sizes or (population.records,)
    plan = experiment.plan
    if recipe:
        chosen = {name for layer in given for name in layer.get("plan", {})}
        plan = default_recipe.for_sizes(plan, sizes, chosen)
        if plan.scaling_noise is not None and "scaling_noise" not in chosen:
            plan = plan.but(scaling_noise=_scaling_noise(target.epsilon, plan.delta))
    find = calibrate.calibrate_slots if pick_slots else calibrate.calibrate_noise
    plan = find(plan, population, target, mode)  # type: ignore[arg-type]
    said = None
    if recipe:
        if not any("learning_rate" in layer.get("plan", {}) for layer in given):
            on_features = default_recipe.on_fixed_features(experiment.model.network)
            plan = plan.but(learning_rate=default_recipe.learning_rate(plan, sizes, on_features, experiment.data.task))
        said = default_recipe.describe_recipe(plan, sizes, target.epsilon, target.adversary, target.unit)
    reached = target.reached(plan, population, mode=mode)  # type: ignore[arg-type]
    return Planned(replace(experiment, plan=plan), reached, said)


def recommended_plan(
    model: nn.Module,
    federation: Federation,
    *,
    target_epsilon: float | None = None,
    adversary: str = "server",
    unit: str = "record",
    rounds: int | None = None,
    per_round: int | None = None,
    scale_inputs: bool = False,
) -> tuple[Plan, str]:
    """The recipe for a model and a federation of the user's own, and the line that says what it is."""
    if target_epsilon is None:
        target_epsilon = _default_target()
    _require_accounting(target_epsilon, "a plan")
    from fedcdp.accounting import calibrate

    target = calibrate.Target(target_epsilon, adversary, unit)
    settings = default_recipe.plan_settings(federation.clients, rounds)
    if per_round is not None:
        settings["per_round"] = per_round
    sizes = federation.sizes(np.arange(federation.clients)).tolist()
    plan = default_recipe.for_sizes(Plan(**settings), sizes)
    plan.check_clients(federation.clients)
    if scale_inputs:
        plan = plan.but(scaling_noise=_scaling_noise(target_epsilon, plan.delta))
    plan = calibrate.calibrate_noise(plan, Population.of(federation, Layout.of(model), plan), target)
    on_features = trains_fixed_features(model)
    plan = plan.but(learning_rate=default_recipe.learning_rate(plan, sizes, on_features, federation.train.task))
    return plan, default_recipe.describe_recipe(plan, sizes, target.epsilon, target.adversary, target.unit)


def _scaling_noise(epsilon: float, delta: float) -> float:
    """The noise of private scaling that takes its share of ε; three digits."""
    from fedcdp.accounting.calibrate import gaussian_multiplier

    return float(f"{gaussian_multiplier(epsilon, delta) / math.sqrt(default_recipe.SCALING_SHARE):.3g}")


def trains_fixed_features(model: nn.Module) -> bool:
    """Whether a model trains nothing but a linear layer on fixed features of norm 1."""
    layers = list(model) if isinstance(model, nn.Sequential) else []
    return (
        len(layers) > 1
        and isinstance(layers[-1], nn.Linear)
        and isinstance(layers[-2], UNIT_FEATURES)
        and not any(parameter.requires_grad for layer in layers[:-1] for parameter in layer.parameters())
    )


def _require_accounting(epsilon: float, instead: str) -> None:
    """Refuse to choose the noise for an ε on a machine that cannot compute one."""
    if not accounting_is_installed():
        raise PlanError(
            f"no plan given, and choosing the noise for ε = {epsilon:g} needs dp-accounting, which is not installed; give "
            f"{instead}, or install it with pip install 'dp-accounting>=0.6,<0.7'"
        )


def _default_target(most: float | None = None) -> float:
    return default_recipe.TARGET_EPSILON if most is None else min(most, default_recipe.TARGET_EPSILON)


def _without_auto(layer: Settings) -> Settings:
    return {
        section: {key: value for key, value in settings.items() if (key, value) != ("slots", "auto")}
        for section, settings in layer.items()
    }
