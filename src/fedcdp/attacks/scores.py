"""Scores: how close reconstructions are to the ground truth, and how trivial guesses score on the same victims.

A `Judge` holds the true examples [victims, examples, ...]. It scores reconstructions of them, and the baselines. `psnr` and
`ssim` measure the similarity of two images. Only inputs that affect the network (`visible_inputs`) are compared.

| in a reconstruction | scored as |
| --- | --- |
| a value outside [low, high], also ±infinity | the nearer end |
| NaN | low (for an image: black) |
| an absent slot | NaN; no success; left out of every summary |
| the examples of a batch, in any order | matched to the truth by the Hungarian method on MSE |
| no error at all | PSNR 138.5 dB: that of a relative error of float32's resolution, and the maximum |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from fedcdp.config.fields import check_types, option
from fedcdp.data.dataset import Dataset
from fedcdp.errors import PlanError
from fedcdp.mechanism.randomness import numpy_generator


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """Success criteria of an attack."""

    exact_mse: float = option(1e-3, "Exact: an MSE below this; for values that span less than 1, relative to their range.")
    recognisable_psnr: float = option(15.0, "Recognisable: a PSNR of at least this (dB), and closer than the class mean.")
    candidates: int = option(1000, "Identified: the true example is the nearest of this many.")

    def __post_init__(self) -> None:
        check_types(self)
        if self.exact_mse <= 0:
            raise PlanError(f"exact_mse: {self.exact_mse} is not allowed; it must be positive")
        if self.candidates < 2:
            raise PlanError(f"candidates: {self.candidates} is not allowed; it must be at least 2")

    def within(self, low: float, high: float) -> Criteria:
        """The criteria for values from low to high: in a narrow range, every guess has a small MSE."""
        return replace(self, exact_mse=self.exact_mse * min(1.0, (high - low) ** 2 or 1.0))


@dataclass(frozen=True, eq=False)
class Scores:
    """One value for each true example [victims, examples], in the truth's order; `ssim` is NaN unless inputs are images.

    `order` is the index of the reconstruction matched to each example; `coordinates`, the number of compared coordinates of
    an example; `candidates`, the number of candidates for identification, including the example itself (the minimum if they
    differ).
    """

    mse: Tensor
    rmse: Tensor
    psnr: Tensor
    ssim: Tensor
    exact: Tensor
    recognisable: Tensor
    identified: Tensor
    order: Tensor
    present: Tensor
    coordinates: int
    candidates: int

    def summary(self) -> dict[str, float]:
        """One row of a table: means, medians and success rates over the examples that are present."""
        row: dict[str, float] = {"examples": int(self.present.sum())}
        for name in ("mse", "rmse", "psnr", "ssim"):
            values = getattr(self, name)[self.present]
            row |= {name: float(values.mean()), f"median_{name}": float(values.quantile(0.5))}
        for name in ("exact", "recognisable", "identified"):
            row[name] = float(getattr(self, name)[self.present].double().mean())
        return row | {"coordinates": self.coordinates, "candidates": self.candidates}


@dataclass(frozen=True, eq=False)
class Baselines:
    """Scores without any knowledge: a black example (`low` everywhere), the public mean, the public mean of its class.

    In a batch, the best match of many guesses is closer than any one of them. `drawn_means` are as many class means as there
    are examples, of labels drawn from the public ones, matched to the truth as reconstructions are.
    """

    black: Scores
    dataset_mean: Scores
    class_mean: Scores
    drawn_means: Scores | None = None
    """None if every victim has one example."""


@dataclass(frozen=True, eq=False)
class Judge:
    """The victims' true inputs [victims, examples, ...] and labels [victims, examples], and what they are compared with.

    `public` gives the means and the candidates for identification. Candidates are drawn from `seed` separately for each
    victim; if `public` is small, all of it is used. A candidate never equals the truth in all visible coordinates. `present`
    [victims, examples] marks the slots that hold an example; `visible`, in the shape of one input, the compared coordinates.
    Both default to everything. MSE is in the data's own unit, PSNR relative to high − low.
    """

    truth: Tensor
    labels: Tensor
    public: Dataset
    present: Tensor = option(None, "Which slots hold an example.")
    visible: Tensor = option(None, "Which coordinates are compared.")
    low: float = 0.0
    high: float = 1.0
    criteria: Criteria = Criteria()
    seed: int = 0

    def __post_init__(self) -> None:
        lead, shape = self.truth.shape[:2], self.truth.shape[2:]
        for name, wanted in (("labels", lead), ("present", lead), ("visible", shape)):
            given = getattr(self, name)
            whole = torch.ones(wanted, dtype=torch.bool) if given is None else given
            _require(whole.shape == wanted, f"{name}: shape {list(whole.shape)} is not the truth's, {list(wanted)}")
            object.__setattr__(self, name, whole.to(self.truth.device))
        _require(self.public.shape == shape, f"public: shape {list(self.public.shape)} is not the truth's, {list(shape)}")
        _require(bool(self.present.any()), "present: no victim has an example")
        _require(bool(self.visible.any()), "visible: no coordinate is visible")
        _require(-math.inf < self.low < self.high < math.inf, f"low, high: {self.low} to {self.high} is not a finite range")
        known = self.truth[self.present]
        inside = bool(((known >= self.low) & (known <= self.high)).all())
        _require(inside, f"truth: not every value lies between low, {self.low}, and high, {self.high}")

    def score(self, reconstructions: Tensor) -> Scores:
        """Score reconstructions, in the shape of the truth; those of one victim may be in any order."""
        shapes = list(reconstructions.shape), list(self.truth.shape)
        _require(shapes[0] == shapes[1], f"reconstructions: shape {shapes[0]} is not the truth's, {shapes[1]}")
        guesses = cleaned(reconstructions.to(self.truth.device), self.low, self.high)
        order = match(self._compared(guesses), self._compared(self.truth), self.present)
        return self._scores(rearrange(guesses, order), order)

    def baselines(self) -> Baselines:
        """The scores of black and of the means. An example gets its own class's mean; drawn means alone are matched."""
        overall = self.public.tensor.mean(0).to(self.truth.device)
        order = torch.arange(self.truth.shape[1], device=self.truth.device).expand(self.present.shape)
        guesses = (torch.full_like(overall, self.low), overall, self._class_means)
        black, mean, of_class = (
            self._scores(cleaned(guess, self.low, self.high).expand_as(self.truth), order) for guess in guesses
        )
        several = self.truth.shape[1] > 1 and self.public.targets.dim() == 1
        return Baselines(black, mean, of_class, self.score(self._drawn_means) if several else None)

    def _scores(self, guesses: Tensor, order: Tensor) -> Scores:
        mse = self._mse(guesses)
        ratio = psnr(mse, self.high - self.low)
        recognisable = (ratio >= self.criteria.recognisable_psnr) & (mse < self._mse(self._class_means))
        absent = ~self.present
        return Scores(
            mse=mse.masked_fill(absent, math.nan),
            rmse=mse.sqrt().masked_fill(absent, math.nan),
            psnr=ratio.masked_fill(absent, math.nan),
            ssim=self._ssim(guesses).masked_fill(absent, math.nan),
            exact=self.present & (mse < self.criteria.exact_mse),
            recognisable=self.present & recognisable,
            identified=self._identified(guesses),
            order=order,
            present=self.present,
            coordinates=int(self.visible.sum()),
            candidates=1 + min(map(len, self._others.values())),
        )

    def _mse(self, guesses: Tensor) -> Tensor:
        return (self._compared(guesses) - self._compared(self.truth)).square().mean(-1)

    def _ssim(self, guesses: Tensor) -> Tensor:
        if guesses.dim() != 5:
            return torch.full_like(self.present, math.nan, dtype=torch.float64)
        scaled = [(values.double() - self.low) / (self.high - self.low) for values in (guesses, self.truth)]
        return ssim(scaled[0], scaled[1], self.visible)

    def _identified(self, guesses: Tensor) -> Tensor:
        """Whether the truth is strictly nearer than every other candidate."""
        found, seen, truth = torch.zeros_like(self.present), self._compared(guesses), self._compared(self.truth)
        for place, others in self._others.items():
            candidates = torch.cat([truth[place][None].float(), self._pool.index_select(0, others)])
            distances = _distances(seen[place][None].float(), candidates)[0]
            found[place] = (distances[0] < distances[1:]).all()
        return found

    def _compared(self, values: Tensor) -> Tensor:
        """The visible coordinates of values [..., one input] as one last axis."""
        return values[..., self.visible].double()

    @cached_property
    def _class_means(self) -> Tensor:
        """For each victim's example the public mean of its class; the overall mean for a class without public examples."""
        return self._means_of(self.labels)

    @property
    def _drawn_means(self) -> Tensor:
        """Class means of labels drawn from the public ones."""
        drawn = numpy_generator(self.seed, "drawn-means").integers(len(self.public), size=tuple(self.labels.shape))
        return self._means_of(self.public.targets[torch.from_numpy(drawn).to(self.public.targets.device)])

    def _means_of(self, labels: Tensor) -> Tensor:
        inputs, targets, overall = self.public.tensor, self.public.targets, self.public.tensor.mean(0)
        known = {label: inputs[targets == label].mean(0) for label in targets.unique().tolist()}
        means = [known.get(label, overall) for label in labels.flatten().tolist()]
        return torch.stack(means).to(self.truth.device).view_as(self.truth)

    @cached_property
    def _pool(self) -> Tensor:
        return self.public.tensor.to(self.truth.device)[:, self.visible]

    @cached_property
    def _others(self) -> dict[tuple[int, ...], Tensor]:
        """For each present example, at (victim, slot), the public examples that it is identified among."""
        return {place: self._draw(place) for place in map(tuple, self.present.nonzero().tolist())}

    def _draw(self, place: tuple[int, ...]) -> Tensor:
        truth, wanted = self._compared(self.truth[place])[None].float(), self.criteria.candidates - 1
        order = numpy_generator(self.seed, "candidates", *place).permutation(len(self._pool))
        left = torch.from_numpy(order).to(truth.device)
        drawn = left[:0]
        while len(drawn) < wanted and len(left):  # in blocks: comparing with all public examples would take long
            block, left = left[:wanted], left[wanted:]
            drawn = torch.cat([drawn, block[_distances(truth, self._pool.index_select(0, block))[0] > 0]])
        return drawn[:wanted]


def _distances(points: Tensor, others: Tensor) -> Tensor:
    # A matrix product would be faster, but it rounds small distances away.
    return torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist")


def _require(met: bool, sentence: str) -> None:
    if not met:
        raise PlanError(sentence)


def cleaned(reconstructions: Tensor, low: float, high: float) -> Tensor:
    """Every value between low and high: NaN becomes low, any other value the nearest allowed one."""
    return reconstructions.nan_to_num(low, high, low).clamp(low, high)


def match(reconstructions: Tensor, truth: Tensor, present: Tensor) -> Tensor:
    """Match the reconstructions of a victim to its true examples [victims, examples] such that the mean MSE is least.

    Both are [victims, examples, ...] and finite where present. A slot that is not `present` is matched to itself.
    """
    from scipy.optimize import linear_sum_assignment

    costs = _distances(truth.flatten(2), reconstructions.flatten(2)).square().cpu().numpy()
    order = torch.arange(truth.shape[1]).repeat(len(truth), 1)
    for row, cost, real in zip(order, costs, present.cpu().numpy(), strict=True):
        slots = real.nonzero()[0]
        row[slots] = torch.from_numpy(slots[linear_sum_assignment(cost[slots][:, slots])[1]])
    return order.to(truth.device)


def rearrange(values: Tensor, order: Tensor) -> Tensor:
    """The values [victims, examples, ...] (reconstructions, labels) in the order of `match` or `Scores.order`."""
    return values[torch.arange(len(order), device=values.device)[:, None], order.to(values.device)]


def chance_interval(trials: int, probability: float, confidence: float = 0.99) -> tuple[float, float]:
    """Success rates that pure chance reaches with at least this confidence: the central binomial interval."""
    from scipy.stats import binom

    if trials < 1 or not 0 <= probability <= 1 or not 0 < confidence < 1:
        raise PlanError(f"chance: {trials} trials of probability {probability} have no interval of confidence {confidence}")
    low, high = binom.ppf([(1 - confidence) / 2, (1 + confidence) / 2], trials, probability) / trials
    return float(low), float(high)


_RESOLUTION = torch.finfo(torch.float32).eps
_C1, _C2 = 0.01**2, 0.03**2  # of SSIM, for images in [0, 1]
_PROBES, _QUIET_ROUNDS = 128, 4
_NOTICED = 1e-5  # share of a probe's largest gradient below which an input is invisible


def psnr(mse: Tensor, span: float = 1.0) -> Tensor:
    """The peak signal-to-noise ratio in dB for data that spans `span`; at most 138.5, whatever the MSE."""
    return -10 * (mse / span**2).clamp(min=_RESOLUTION**2).log10()


def ssim(first: Tensor, second: Tensor, visible: Tensor | None = None, window: int = 11) -> Tensor:
    """Structural similarity of images [..., C, H, W] in [0, 1] (Wang et al., 2004): a Gaussian window, σ = 1.5.

    The mean over channels and over the windows inside the image that, if `visible` [C, H, W] is given, hold nothing
    invisible; NaN if there is none. In smaller images the window is the largest odd one that fits.
    """
    height, width = first.shape[-2:]
    window = min(window, height - 1 + height % 2, width - 1 + width % 2)
    offsets = torch.arange(window, device=first.device).double() - window // 2
    bell = torch.softmax(-offsets.square() / (2 * 1.5**2), 0)
    # In float64, not least because a GPU may round the float32 inputs of a convolution to ten bits.
    x, y = (images.double().reshape(-1, 1, height, width) for images in (first, second))
    down = functional.conv2d(torch.cat([x, y, x * x, y * y, x * y]), bell.view(1, 1, -1, 1))
    mean_x, mean_y, xx, yy, xy = functional.conv2d(down, bell.view(1, 1, 1, -1)).chunk(5)
    means, variances = mean_x.square() + mean_y.square(), xx + yy - mean_x.square() - mean_y.square()
    similar = (2 * mean_x * mean_y + _C1) * (2 * (xy - mean_x * mean_y) + _C2) / ((means + _C1) * (variances + _C2))
    seen = torch.ones(first.shape[-3:]) if visible is None else visible.float()
    whole = functional.max_pool2d(-seen, window, stride=1).bool().to(first.device)
    return similar.view(*first.shape[:-2], *similar.shape[-2:])[..., whole].mean(-1)


def visible_inputs(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], device: torch.device | str = "cpu", seed: int = 0
) -> Tensor:
    """Mask [*shape] of the coordinates of an input of `shape` that can change the output of `function` on a batch of inputs.

    Gradients of random combinations of the outputs are taken at random inputs, uniform and normal in turn, until several
    hundred more reveal no new coordinate. Marked coordinates are visible; one that the network rarely reacts to might be
    missed.
    """
    generator = torch.Generator().manual_seed(seed)
    seen, quiet, draws = torch.zeros(shape, dtype=torch.bool, device=device), 0, (torch.rand, torch.randn)
    while quiet < _QUIET_ROUNDS and not seen.all():
        draws = draws[::-1]
        inputs = draws[0](_PROBES, *shape, generator=generator).to(device).requires_grad_()
        with torch.enable_grad():
            outputs = function(inputs)
        weights = torch.randn(outputs.shape, generator=generator).to(device)
        (gradient,) = torch.autograd.grad(outputs, inputs, weights, materialize_grads=True)
        # Not "non-zero": the fast convolutions of a GPU leave rounding errors at coordinates that have no effect.
        found = seen | (gradient.abs() > _NOTICED * gradient.abs().amax()).any(0)
        quiet, seen = (quiet + 1 if torch.equal(found, seen) else 0), found
    return seen
