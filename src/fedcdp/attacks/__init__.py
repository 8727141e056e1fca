"""Leakage attacks: what a curious reader of gradients and updates can make of them, measured."""

from fedcdp.attacks.adam import Adam
from fedcdp.attacks.api import ATTACKS, attack
from fedcdp.attacks.captured import LEAKS
from fedcdp.attacks.layers import LayerLeaks
from fedcdp.attacks.lbfgs import LBFGS
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.membership import Membership
from fedcdp.attacks.metrics import Criteria
from fedcdp.attacks.objectives import Objective
from fedcdp.attacks.presence import Presence
from fedcdp.attacks.recipe import RECIPES, Recipe
from fedcdp.attacks.seeds import Seed

__all__ = [
    "ATTACKS",
    "LBFGS",
    "LEAKS",
    "RECIPES",
    "Adam",
    "Criteria",
    "LayerLeaks",
    "Leaks",
    "Membership",
    "Objective",
    "Presence",
    "Recipe",
    "Seed",
    "attack",
]
