"""L-BFGS and Adam for many independent problems in lockstep: one evaluation serves all of them.

- L-BFGS (Liu and Nocedal, 1989): every problem takes the same steps, to rounding, as under `torch.optim.LBFGS` without a
  line search. The two-loop recursion is written as two triangular systems in the inner products of the stored pairs, so the
  number of operations launched does not grow with the history.
- Adam (Kingma and Ba, 2015): optionally on the sign of the gradient, with the decay of Geiping et al., 2020.

A problem that is done is removed by `keep`; the others continue as if it had never been there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(points [n, D], the problem that each belongs to [n]) to losses [n] and gradients [n, D]."""

_SMALLEST_CURVATURE = 1e-10  # as in torch: a pair with less curvature is not stored


@dataclass(frozen=True)
class LBFGS:
    """Settings with the names and defaults of `torch.optim.LBFGS`; one step is up to `inner` moves."""

    learning_rate: float = 1.0
    inner: int = 20
    history: int = 100
    tolerance_grad: float = 1e-7
    tolerance_change: float = 1e-9

    def begin(self, start: Tensor) -> LockstepLBFGS:
        """Start the minimisers at points [n, D]."""
        return LockstepLBFGS(self, start)


class LockstepLBFGS:
    """Running minimisers. All tensors have the problems on their leading axis."""

    def __init__(self, settings: LBFGS, start: Tensor) -> None:
        count, size = start.shape
        self.settings = settings
        self.point = start.clone()
        self.loss = start.new_full((count,), torch.inf)
        self._gradient = torch.zeros_like(start)
        self._move = torch.zeros_like(start)
        self._scale = start.new_ones(count)
        self._moves = torch.zeros(count, dtype=torch.int64, device=start.device)
        # One ring of pairs per problem: moves s, changes of the gradient y, and all products s_i·y_j and y_i·y_j.
        self._pairs = torch.zeros(count, dtype=torch.int64, device=start.device)
        self._stored = 0  # maximum number of pairs that any ring holds or has held
        self._s = start.new_zeros(count, 0, size)
        self._y = start.new_zeros(count, 0, size)
        self._sy, self._yy = start.new_zeros(count, 0, 0), start.new_zeros(count, 0, 0)

    def keep(self, index: Tensor) -> None:
        """Continue with these problems only."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[index])

    def step(self, evaluate: Evaluate) -> tuple[Tensor, Tensor]:
        """Up to `inner` moves of every problem: the losses before them, and which problems moved."""
        everyone = torch.arange(len(self.point), device=self.point.device)
        loss, gradient = evaluate(self.point, everyone)
        first_loss = loss
        usable = torch.isfinite(loss) & torch.isfinite(gradient).all(1)
        alive = usable & (gradient.abs().amax(1) > self.settings.tolerance_grad)
        moved = torch.zeros_like(alive)
        for inner in range(self.settings.inner):
            direction = self._direction(gradient, alive)
            length = torch.where(
                self._moves == 1, (1 / gradient.abs().sum(1)).clamp(max=1.0), torch.ones_like(loss)
            ) * self.settings.learning_rate  # fmt: skip
            self._gradient = torch.where(alive[:, None], gradient, self._gradient)
            alive = alive & ((gradient * direction).sum(1) <= -self.settings.tolerance_change)
            self._move = torch.where(alive[:, None], direction * length[:, None], self._move)
            self.point = torch.where(alive[:, None], self.point + self._move, self.point)
            moved |= alive
            if inner + 1 == self.settings.inner:
                break
            who = alive.nonzero()[:, 0]
            if len(who) == 0:
                break
            before = loss
            loss, gradient = self._evaluate_some(evaluate, who, loss, gradient)
            usable = torch.isfinite(loss) & torch.isfinite(gradient).all(1)
            alive = (
                alive
                & usable
                & (gradient.abs().amax(1) > self.settings.tolerance_grad)
                & (self._move.abs().amax(1) > self.settings.tolerance_change)
                & ((loss - before).abs() >= self.settings.tolerance_change)
            )
        self.loss = first_loss
        return first_loss, moved

    def _evaluate_some(self, evaluate: Evaluate, who: Tensor, loss: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        if len(who) == len(loss):
            return evaluate(self.point, who)
        some_loss, some_gradient = evaluate(self.point[who], who)
        return loss.index_copy(0, who, some_loss), gradient.index_copy(0, who, some_gradient)

    def _direction(self, gradient: Tensor, alive: Tensor) -> Tensor:
        """The direction of the next move of the live problems, after storing the pair of the last move."""
        change = gradient - self._gradient
        curvature = (change * self._move).sum(1)
        learned = (alive & (self._moves > 0) & (curvature > _SMALLEST_CURVATURE)).nonzero()[:, 0]
        self._moves = self._moves + alive
        place = self._pairs[learned] % self.settings.history
        if len(learned):
            self._make_room()
            self._s[learned, place], self._y[learned, place] = self._move[learned], change[learned]
            self._scale[learned] = curvature[learned] / change[learned].square().sum(1)
            self._pairs[learned] += 1
            self._stored += 1
        if self._stored == 0:
            return -gradient
        # Three vectors at once, so the stored pairs are read from memory only once.
        vectors = torch.stack([gradient, self._move, change], dim=1)
        with_s, with_y = self._s @ vectors.mT, self._y @ vectors.mT
        self._sy[learned, :, place] = with_s[learned, :, 2]
        self._sy[learned, place, :] = with_y[learned, :, 1]
        self._yy[learned, :, place] = self._yy[learned, place, :] = with_y[learned, :, 2]
        sy, yy, along_s, along_y = self._sy, self._yy, -with_s[..., 0], -with_y[..., 0]
        filled = torch.arange(sy.shape[1], device=sy.device) < self._pairs[:, None]
        order = self._by_age()
        if order is not None:
            sy, yy = _rearranged(sy, order), _rearranged(yy, order)
            along_s, along_y = along_s.gather(1, order), along_y.gather(1, order)
        along_s, along_y = (torch.where(filled, each, 0.0) for each in (along_s, along_y))
        # s_i·y_j for pairs i not newer than j; a missing pair has the equation "coefficient = 0".
        upper, both = _masked(sy, filled, 1.0).triu(), _masked(yy, filled, 0.0)
        # First loop, newest to oldest: α_i = s_i·q / (s_i·y_i), q ← q − α_i·y_i, from q = −gradient.
        alpha = torch.linalg.solve_triangular(upper, along_s[..., None], upper=True)
        # Second loop, oldest to newest, from r = γq: r ← r + s_i·(α_i − y_i·r / (s_i·y_i)).
        right = upper.diagonal(dim1=1, dim2=2)[..., None] * alpha
        right = right - self._scale[:, None, None] * (along_y[..., None] - both @ alpha)
        beta = torch.linalg.solve_triangular(upper.mT, right, upper=False)
        alpha, beta = (torch.where(filled, each[..., 0], 0.0) for each in (alpha, beta))
        if order is not None:
            alpha, beta = (torch.zeros_like(each).scatter(1, order, each) for each in (alpha, beta))
        return self._scale[:, None] * (-gradient - (alpha[:, None] @ self._y)[:, 0]) + (beta[:, None] @ self._s)[:, 0]

    def _make_room(self) -> None:
        """Double the capacity of the rings when the fullest one needs it."""
        places = self._s.shape[1]
        if min(self._stored + 1, self.settings.history) <= places:
            return
        more = min(self.settings.history, max(8, 2 * places)) - places
        pad = torch.nn.functional.pad
        self._s, self._y = pad(self._s, (0, 0, 0, more)), pad(self._y, (0, 0, 0, more))
        self._sy, self._yy = pad(self._sy, (0, more, 0, more)), pad(self._yy, (0, more, 0, more))

    def _by_age(self) -> Tensor | None:
        """The places of each ring, oldest first; None while no ring has wrapped around and they are in that order."""
        history = self.settings.history
        if self._stored <= history:
            return None
        ages = torch.arange(history, device=self.point.device)
        return torch.where(self._pairs[:, None] >= history, (ages + self._pairs[:, None]) % history, ages)


def _rearranged(products: Tensor, order: Tensor) -> Tensor:
    """The rows and columns of every matrix in this order."""
    rows = products.gather(1, order[:, :, None].expand_as(products))
    return rows.gather(2, order[:, None, :].expand_as(products))


def _masked(products: Tensor, filled: Tensor, diagonal: float) -> Tensor:
    """The products of existing pairs; zeros for the others, with `diagonal` on the diagonal."""
    absent = torch.diag_embed((~filled).to(products.dtype) * diagonal)
    return torch.where(filled[:, :, None] & filled[:, None, :], products, absent)


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
        """Start the minimisers at points [n, D]."""
        return LockstepAdam(self, start)


class LockstepAdam:
    """Running minimisers.

    This does not wrap `torch.optim.Adam`. A wrapper would be no shorter, and it rounds differently: through the sign of a
    gradient near zero, the same seed would follow other trajectories.
    """

    def __init__(self, settings: Adam, start: Tensor) -> None:
        self.settings = settings
        self.point = start.clone()
        self.loss = start.new_full((len(start),), torch.inf)
        self._mean, self._square = torch.zeros_like(start), torch.zeros_like(start)
        self._moves = 0

    def keep(self, index: Tensor) -> None:
        """Continue with these problems only."""
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
