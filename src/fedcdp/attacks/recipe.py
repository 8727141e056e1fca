"""Recipes: a reconstruction attack as seed × labels × adversary knowledge × objective × optimiser × space.

A `Seed` draws the starting examples. Its choice decides how often an attack succeeds (Wei et al., ESORICS 2020).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fedcdp.attacks.labels import LabelRule
from fedcdp.attacks.objectives import Knows, Objective
from fedcdp.attacks.optimisers import LBFGS, Adam
from fedcdp.errors import PlanError
from fedcdp.mechanism.randomness import normals, stream_key, words

SeedKind = Literal["pattern", "uniform", "normal", "zeros", "posterior"]


@dataclass(frozen=True)
class Seed:
    """`pattern` tiles a uniform [0, 1) patch `tiles` times a side (the paper's "patterned random" is 2); `uniform` is
    [0, 1) and `normal` N(0, 1) in every coordinate. `posterior` starts from public examples (`candidate_pool`); the
    pattern that is drawn here only serves to infer labels."""

    kind: SeedKind = "pattern"
    tiles: int = 2

    def __post_init__(self) -> None:
        if self.kind not in get_args(SeedKind):
            raise PlanError(f"seed: {self.kind!r} is not one of {', '.join(get_args(SeedKind))}")
        if self.tiles < 1:
            raise PlanError(f"tiles: {self.tiles} is not allowed; it must be at least 1")

    def draw(self, victims: Tensor, examples: int, shape: tuple[int, ...], seed: int, restart: int = 0) -> Tensor:
        """[victims, examples, *shape]; a victim's seed depends only on its number, not on the other victims."""
        lead, size = (len(victims), examples), torch.Size(shape).numel()
        key = stream_key(seed, "attack-seed")
        if self.kind == "zeros":
            return torch.zeros(*lead, *shape, device=victims.device)
        if self.kind == "normal":
            return normals(key, victims, restart, 0, examples * size).view(*lead, *shape)
        tiles = 1 if self.kind == "uniform" else self.tiles
        sides = min(2, len(shape))  # tile both height and width of an image, or the length of a vector
        patch = [*shape[:-sides], *(-(-side // tiles) for side in shape[-sides:])]
        # A float32 below 1 holds 24 bits; with more bits, the largest value would round to 1.
        drawn = (words(key, victims, restart, 0, examples * torch.Size(patch).numel()) >> 8).float() / 2**24
        tiled = drawn.view(*lead, *patch).tile((tiles,) * sides)
        for axis, side in enumerate(shape[-sides:]):
            tiled = tiled.narrow(axis - sides, 0, side)
        return tiled.contiguous()


@dataclass(frozen=True)
class Recipe:
    """How to search for the examples behind an observation. Attributes are independent of each other."""

    seed: Seed = field(default_factory=Seed)
    labels: LabelRule = "gradient"
    dummies: Literal["one", "all"] = "one"
    """Fit a single dummy example (as in the paper), or as many as the victim has examples."""
    knows: Knows = "gradient"
    """Treat the observation as a plain gradient, or run the method's own code on the dummies, without its noise."""
    objective: Objective = field(default_factory=Objective)
    optimiser: LBFGS | Adam = field(default_factory=LBFGS)
    space: Literal["free", "box", "components", "class-components"] = "free"
    """Any values; values an input can have; principal components of public examples, or of those of each class, with their
    prior."""
    components: int = 60
    iterations: int = 300
    """Maximum number of iterations; one iteration is one optimiser step of up to `inner` evaluations."""
    patience: int | None = None
    """Stop after this many iterations in a row that improve the fit by less than 0.1 % in all. None: never."""
    sharpening: int | None = None
    """Then search on from the best fit, for at most this many iterations, without the preference for smooth images. None:
    the search ends before."""
    rounds: Literal["one", "all"] = "one"
    """Attack what was seen in one round, or in all rounds of a training (`accumulated_attack`)."""
    restarts: int = 1
    """Number of seeds to try for each victim; the adversary keeps the best fit."""

    def __post_init__(self) -> None:
        for name in ("components", "iterations", "restarts", "patience", "sharpening"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name}: {getattr(self, name)} is not allowed; it must be at least 1")
        if isinstance(self.optimiser, Adam):  # its learning rate decays over the total number of moves
            lasting = replace(self.optimiser, total=self.iterations * self.optimiser.inner)
            object.__setattr__(self, "optimiser", lasting)

    def but(self, **changes: object) -> Recipe:
        """The same recipe with some ingredients changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


CPL = Recipe()
"""Wei et al., ESORICS 2020, as run in the paper."""

KNOWING = CPL.but(labels="counts", dummies="all", knows="method", objective=Objective(shared_only=True))
"""An adversary that knows the method: fits its clipped gradients, and the update over all its local steps."""

CLASS_PRIOR = Recipe(
    seed=Seed("posterior"),
    labels="posterior",
    dummies="all",
    knows="method",
    objective=Objective(shared_only=True),
    space="class-components",
    components=150,
    iterations=60,
    restarts=2,
)
"""An adversary that knows how examples of each class are distributed."""

ONE_TENSOR = CPL.but(iterations=100)
"""For attacks on one tensor at a time, which run many searches."""

RECIPES: dict[str, Recipe] = {
    "cpl": CPL,
    # Zhu, Liu, Han, NeurIPS 2019: labels are optimised as well.
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
    # Without knowledge of the method, clipping alone looks like a defence.
    "clip-aware": KNOWING,
    # Total variation keeps several images apart, because each of them is smooth.
    "batch": CPL.but(labels="counts", dummies="all", objective=Objective(total_variation=0.02)),
    "unrolled": KNOWING.but(objective=Objective(shared_only=True, total_variation=0.02)),
    # Maximum a posteriori in a subspace of likely images, from the mean of many releases.
    "averaging": Recipe(labels="counts", dummies="all", knows="method", space="components", restarts=3),
    # Maximum a posteriori within a class, from the posterior mean over public candidates.
    "class-prior": CLASS_PRIOR,
    # The same over all rounds of a training; each evaluation computes every round.
    "accumulated": CLASS_PRIOR.but(rounds="all", iterations=40, restarts=1),
}
