"""Recipes: a reconstruction attack as seed × labels × adversary knowledge × objective × optimiser × space.

A point [victims, D] of a `Space` stands for examples [victims, examples, ...]: pixels, or principal components of public
examples. A `Seed` draws the starting examples. Its choice decides how often an attack succeeds (Wei et al., ESORICS 2020).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from fedcdp.attacks.labels import LabelRule
from fedcdp.attacks.objectives import Knows, Objective
from fedcdp.attacks.optimisers import LBFGS, Adam
from fedcdp.data.dataset import Dataset
from fedcdp.errors import DataError, PlanError
from fedcdp.mechanism.randomness import normals, stream_key, words


class Space(Protocol):
    """Represents examples as points, with a prior over the points and the set of allowed ones."""

    has_prior: bool

    def points(self, examples: Tensor) -> Tensor:
        """The points nearest to examples [victims, examples, ...]."""
        ...

    def examples(self, points: Tensor) -> Tensor:
        """The examples [victims, examples, ...] that points stand for."""
        ...

    def penalty(self, points: Tensor) -> Tensor:
        """[victims]: negative log-likelihood of the points, up to a constant."""
        ...

    def project(self, points: Tensor) -> Tensor:
        """The nearest allowed points."""
        ...


@dataclass(frozen=True)
class Pixels:
    """Each coordinate is free; with a `box`, within these bounds."""

    shape: tuple[int, ...]
    box: tuple[float, float] | None = None
    has_prior = False

    def points(self, examples: Tensor) -> Tensor:
        """See `Space`."""
        return self.project(examples.flatten(1))

    def examples(self, points: Tensor) -> Tensor:
        """See `Space`."""
        return points.view(len(points), -1, *self.shape)

    def penalty(self, points: Tensor) -> Tensor:
        """See `Space`."""
        return points.new_zeros(len(points))

    def project(self, points: Tensor) -> Tensor:
        """See `Space`."""
        return points if self.box is None else points.clamp(*self.box)


@dataclass(frozen=True)
class Subspace:
    """Principal components of public examples, with the Gaussian prior fitted to them."""

    shape: tuple[int, ...]
    mean: Tensor
    basis: Tensor
    """[components, size]: orthogonal directions, each one standard deviation long."""
    has_prior = True

    @staticmethod
    def of(public: Dataset, components: int, device: torch.device) -> Subspace:
        """The leading components of the public examples."""
        flat = public.tensor.flatten(1).to(device)
        if len(flat) <= components:
            raise DataError(f"public: {len(flat)} examples are too few for {components} principal components")
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            _, deviations, directions = torch.pca_lowrank(flat, q=min(components, flat.shape[1]), niter=4)
        scaled = directions.T * (deviations / (len(flat) - 1) ** 0.5)[:, None]
        return Subspace(public.shape, flat.mean(0), scaled)

    def points(self, examples: Tensor) -> Tensor:
        """See `Space`."""
        centred = examples.flatten(2) - self.mean
        return (centred @ (self.basis / self.basis.square().sum(1, keepdim=True).clamp(min=1e-12)).T).flatten(1)

    def examples(self, points: Tensor) -> Tensor:
        """See `Space`."""
        coefficients = points.view(len(points), -1, len(self.basis))
        flat = self.mean + coefficients @ self.basis
        return flat.view(*flat.shape[:2], *self.shape)

    def penalty(self, points: Tensor) -> Tensor:
        """See `Space`."""
        return points.square().sum(1) / 2

    def project(self, points: Tensor) -> Tensor:
        """See `Space`."""
        return points


SeedKind = Literal["pattern", "uniform", "normal", "zeros"]


@dataclass(frozen=True)
class Seed:
    """`pattern` tiles a uniform [0, 1) patch `tiles` times a side (the paper's "patterned random" is 2); `uniform` is
    [0, 1) and `normal` N(0, 1) in every coordinate."""

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
        tiles = self.tiles if self.kind == "pattern" else 1
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
    space: Literal["free", "box", "components"] = "free"
    """Any values; values an input can have; or principal components of public examples, with their prior."""
    components: int = 60
    iterations: int = 300
    """Maximum number of iterations; one iteration is one optimiser step of up to `inner` evaluations."""
    restarts: int = 1
    """Number of seeds to try for each victim; the adversary keeps the best fit."""

    def __post_init__(self) -> None:
        for name in ("components", "iterations", "restarts"):
            if getattr(self, name) < 1:
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
}
