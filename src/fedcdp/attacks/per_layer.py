"""One tensor at a time: does any released tensor carry less noise than promised, and what does it leak?"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedcdp.attacks.observe import Captured, Look, capture
from fedcdp.attacks.recipe import Recipe
from fedcdp.attacks.reconstruct import Progress, reconstruct
from fedcdp.training.rounds import Simulator
from fedcdp.training.rundir import State

_MUCH_LESS = 0.5  # of the promised deviation: a tensor with less noise was not sanitised
_BY_CHANCE = 1e-6  # unless so little noise has at least this probability, as it has for a few numbers


@dataclass(frozen=True)
class LayerLeak:
    """What one tensor leaked on its own."""

    tensor: str
    """The name of the parameter."""
    noise_deviation: float
    """Measured: the root mean square of the observation less the observation without noise."""
    unsanitised: bool
    """The method promises noise here, but this tensor has far less noise, or none."""
    distance_median: float
    """Median over the victims of the mean squared error of the nearest reconstruction."""
    success_rate: float
    """Share of victims with an exact reconstruction from this tensor alone."""


@dataclass(frozen=True)
class LayerLeaks:
    """The result of `per-layer`: what every tensor leaked on its own.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> found = fedcdp.attack(
        ...     fedcdp.Plan(per_round=10), model=nn.Linear(30, 2), federation=federation, attack="per-layer", victims=2
        ... )
        >>> [layer.tensor for layer in found.layers], found.unsanitised
        (['weight', 'bias'], ())
    """

    method: str
    """The training method."""
    leak: str
    """What the adversary observed: `type0`, `type1` or `type2`."""
    attack: str
    """The name of the attack."""
    victims: int
    """How many victims were attacked."""
    promised_deviation: float
    """Standard deviation of the noise that the method promises on each coordinate (root mean square over the victims)."""
    layers: tuple[LayerLeak, ...]
    """One entry for each tensor."""
    seconds: float
    """How long the attack took."""

    @property
    def unsanitised(self) -> tuple[str, ...]:
        """The tensors without the method's noise."""
        return tuple(layer.tensor for layer in self.layers if layer.unsanitised)

    def summary(self) -> dict[str, Any]:
        """All figures; the success rate is that of the tensor that leaks most."""
        worst = min(self.layers, key=lambda layer: layer.distance_median)
        return {
            "method": self.method,
            "leak": self.leak,
            "attack": self.attack,
            "victims": self.victims,
            "success_rate": max(layer.success_rate for layer in self.layers),
            "distance_mean": None,
            "distance_median": worst.distance_median,
            "psnr_mean": None,
            "iterations_mean": None,
            "most_telling": worst.tensor,
            "unsanitised": list(self.unsanitised),
            "promised_deviation": self.promised_deviation,
            "layers": [vars(layer) for layer in self.layers],
            "seconds": self.seconds,
        }


def layer_by_layer(
    simulator: Simulator,
    state: State,
    look: Look,
    victims: int | None,
    recipe: Recipe,
    classes: int,
    *,
    visible: Tensor,
    value_range: tuple[float, float],
    exact_mse: float,
    seed: int = 0,
    progress: Progress | None = None,
) -> LayerLeaks:
    """Measure the noise on every tensor, and attack with that tensor alone (labels are still inferred from the last)."""
    started = time.perf_counter()
    seen = capture(simulator, state, look, victims)
    silent = capture(simulator, state, Look(look.leak, look.step, silent=True), victims)
    names = list(seen.seen)
    layers = []
    for number, name in enumerate(names):
        noise = (seen.seen[name] - silent.seen[name]).double()

        def told(done: int, total: int, number: int = number) -> None:
            if progress is not None:
                progress(number * total + done, len(names) * total)

        alone = recipe.but(objective=recipe.objective.only(name))
        found = reconstruct(seen, alone, classes, seed=seed, value_range=value_range, progress=told)
        mse = _nearest(found.examples, seen, visible, value_range)
        exact = float((mse < exact_mse).double().mean())
        deviation = float(noise.square().mean().sqrt())
        relative = noise.flatten(1) / torch.where(seen.deviation > 0, seen.deviation, 1.0)[:, None]
        less = seen.noisy and _much_less(float(relative.square().mean().sqrt()), 1.0, noise.numel())
        layers.append(LayerLeak(name, deviation, less, float(mse.quantile(0.5)), exact))
    seconds = round(time.perf_counter() - started, 2)
    return LayerLeaks(simulator.plan.method, look.leak, "per-layer", len(seen), seen.noise_level, tuple(layers), seconds)


def _much_less(measured: float, promised: float, numbers: int) -> bool:
    """Whether the root mean square of `numbers` values is far below the promised deviation of their noise."""
    from scipy.stats import chi2

    if measured >= _MUCH_LESS * promised:
        return False
    return bool(chi2.cdf(numbers * (measured / promised) ** 2, numbers) < _BY_CHANCE)


def _nearest(guesses: Tensor, captured: Captured, visible: Tensor, value_range: tuple[float, float]) -> Tensor:
    """[victims]: the lowest MSE of a guess to any example of the victim."""
    clean = guesses.nan_to_num(value_range[0]).clamp(*value_range)[..., visible].double()
    truth = captured.tensor[..., visible].double()
    distances = torch.cdist(clean, truth).square() / clean.shape[-1]
    return distances.masked_fill(~captured.present[:, None], torch.inf).flatten(1).amin(1)
