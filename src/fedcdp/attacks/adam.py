"""Adam for many independent problems in lockstep (Kingma and Ba, 2015), with the sign of the gradient where asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcdp.attacks.lbfgs import Evaluate

_DECAYS_AT = (3 / 8, 5 / 8, 7 / 8)  # of all steps; Geiping et al., 2020


@dataclass(frozen=True)
class Adam:
    """One step is `inner` moves; the rate falls tenfold after 3/8, 5/8 and 7/8 of `total` moves."""

    learning_rate: float = 0.1
    signed: bool = False
    inner: int = 8
    total: int = 2400
    beta1: float = 0.9
    beta2: float = 0.999

    def begin(self, start: Tensor) -> LockstepAdam:
        """Minimisers at their starting points [n, D]."""
        return LockstepAdam(self, start)


class LockstepAdam:
    """Minimisers on their way."""

    def __init__(self, settings: Adam, start: Tensor) -> None:
        self.settings = settings
        self.point = start.clone()
        self.loss = start.new_full((len(start),), torch.inf)
        self._mean, self._square = torch.zeros_like(start), torch.zeros_like(start)
        self._moves = 0

    def keep(self, index: Tensor) -> None:
        """Go on with these problems only."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[index])

    def step(self, evaluate: Evaluate) -> tuple[Tensor, Tensor]:
        """`inner` moves of every problem: the losses before them, and which problems could be moved."""
        settings = self.settings
        everyone = torch.arange(len(self.point), device=self.point.device)
        usable = torch.ones(len(self.point), dtype=torch.bool, device=self.point.device)
        for inner in range(settings.inner):
            loss, gradient = evaluate(self.point, everyone)
            if inner == 0:
                self.loss = loss
            usable &= torch.isfinite(loss) & torch.isfinite(gradient).all(1)
            gradient = torch.where(usable[:, None], gradient, 0.0)
            gradient = gradient.sign() if settings.signed else gradient
            self._moves += 1
            self._mean = settings.beta1 * self._mean + (1 - settings.beta1) * gradient
            self._square = settings.beta2 * self._square + (1 - settings.beta2) * gradient.square()
            mean = self._mean / (1 - settings.beta1**self._moves)
            spread = (self._square / (1 - settings.beta2**self._moves)).sqrt()
            rate = settings.learning_rate * 0.1 ** sum(self._moves > part * settings.total for part in _DECAYS_AT)
            self.point = self.point - rate * mean / (spread + 1e-8)
        return self.loss, usable
