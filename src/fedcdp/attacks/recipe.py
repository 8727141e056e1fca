"""Recipes: a reconstruction attack as seed × labels × what the reader knows × objective × optimiser × space."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from fedcdp.attacks.labels import LabelRule
from fedcdp.attacks.objectives import Knows, Objective
from fedcdp.attacks.optimisers import LBFGS, Adam
from fedcdp.attacks.spaces import Seed
from fedcdp.errors import PlanError


@dataclass(frozen=True)
class Recipe:
    """How to look for the examples behind what was seen. Attributes are independent of each other."""

    seed: Seed = field(default_factory=Seed)
    labels: LabelRule = "gradient"
    dummies: Literal["one", "all"] = "one"
    """Fit one dummy, whatever was seen (the paper), or as many as the victim has examples."""
    knows: Knows = "gradient"
    """Take what was seen for a plain gradient, or run the method's own code on the dummies, without its noise."""
    objective: Objective = field(default_factory=Objective)
    optimiser: LBFGS | Adam = field(default_factory=LBFGS)
    space: Literal["free", "box", "components"] = "free"
    """Any values; those that an input can have; or principal components of public examples, with their prior."""
    components: int = 60
    iterations: int = 300
    """At most; one iteration is one step of the optimiser, of up to `inner` evaluations."""
    restarts: int = 1
    """Seeds to try for each victim; the reader keeps what fits best."""

    def __post_init__(self) -> None:
        for name in ("components", "iterations", "restarts"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}: {getattr(self, name)} is not allowed; it must be at least 1")
        if isinstance(self.optimiser, Adam):  # its rate falls over all of its moves, however many there are
            lasting = replace(self.optimiser, total=self.iterations * self.optimiser.inner)
            object.__setattr__(self, "optimiser", lasting)

    def but(self, **changes: object) -> Recipe:
        """The same recipe with some ingredients changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


CPL = Recipe()
"""Wei et al., ESORICS 2020, as the paper ran it."""

KNOWING = CPL.but(labels="counts", dummies="all", knows="method", objective=Objective(shared_only=True))
"""A reader who knows the method: fits its clipped gradients, and the update of all its local steps."""

ONE_TENSOR = CPL.but(iterations=100)
"""For one tensor at a time, of which there are many."""

RECIPES: dict[str, Recipe] = {
    "cpl": CPL,
    # Zhu, Liu, Han, NeurIPS 2019: labels are unknowns, too.
    "dlg": Recipe(seed=Seed("normal"), labels="joint", dummies="all"),
    # Zhao, Mopuri, Bilen, 2020.
    "idlg": Recipe(seed=Seed("normal"), labels="negative-sum"),
    # Geiping, Bauermeister, Dröge, Moeller, NeurIPS 2020.
    "inverting-gradients": Recipe(
        seed=Seed("normal"),
        labels="counts",
        dummies="all",
        objective=Objective("cosine", total_variation=1e-4),
        optimiser=Adam(signed=True),
        space="box",
    ),
    # Without it, clipping alone looks like a defence.
    "clip-aware": KNOWING,
    # What keeps several images apart is that each is smooth.
    "batch": CPL.but(labels="counts", dummies="all", objective=Objective(total_variation=0.02)),
    "unrolled": KNOWING.but(objective=Objective(shared_only=True, total_variation=0.02)),
    # Maximum a posteriori in a subspace of likely images, from the mean of many releases.
    "averaging": Recipe(labels="counts", dummies="all", knows="method", space="components", restarts=3),
}
