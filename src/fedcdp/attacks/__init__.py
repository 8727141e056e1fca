"""Leakage attacks: measure what an adversary can recover from gradients and updates."""

from fedcdp.attacks.api import ATTACKS, attack
from fedcdp.attacks.inferred import Inferred, LabelGuesses
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.lira import Lira
from fedcdp.attacks.membership import Membership
from fedcdp.attacks.objectives import Objective
from fedcdp.attacks.observe import LEAKS
from fedcdp.attacks.optimisers import LBFGS, Adam
from fedcdp.attacks.per_layer import LayerLeaks
from fedcdp.attacks.presence import Presence
from fedcdp.attacks.recipe import RECIPES, Recipe, Seed
from fedcdp.attacks.scores import Criteria
from fedcdp.attacks.table_scores import CellScores
from fedcdp.attacks.tableak import TabLeak
from fedcdp.attacks.text_tokens import TokenGuesses

__all__ = [
    "ATTACKS",
    "LBFGS",
    "LEAKS",
    "RECIPES",
    "Adam",
    "CellScores",
    "Criteria",
    "Inferred",
    "LabelGuesses",
    "LayerLeaks",
    "Leaks",
    "Lira",
    "Membership",
    "Objective",
    "Presence",
    "Recipe",
    "Seed",
    "TabLeak",
    "TokenGuesses",
    "attack",
]
