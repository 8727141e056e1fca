"""The matched filter: is a given example in the observation, and which of many candidates is?

An adversary who knows the weights and a candidate x can compute the observation with and without x. If R releases carry
independent Gaussian noise of standard deviation τ, the likelihood ratio of the two worlds is
⟨mean of the releases − midpoint, difference⟩·R/τ². By Neyman and Pearson no other test, and hence no reconstruction, tells
more. If the worlds are a distance d apart, the AUC is Φ(d·√R / (√2·τ)). For one example's gradient g under Fed-CDP,
d = |g| ≤ C·√M and τ = σC.

`matched_filter` runs the test on captured releases. Under secure aggregation the server reads one sum a round: the test asks
for the first record of each of several clients, one at a time, in that sum. For a network with a linear head, `Candidates`
compares the likelihood ratios of many candidates over all observed releases.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcdp.attacks.candidate_pool import matched_filters, own_matched_filters
from fedcdp.attacks.cohort import in_fast_rounds, reads_sum
from fedcdp.attacks.head_solver import Solved, coefficients
from fedcdp.attacks.linear_head import FeaturePrior, LinearHead
from fedcdp.attacks.membership import Estimate, area_under_curve
from fedcdp.attacks.observe import Captured, Leak, Look, capture, cohort_of, noise_of_release
from fedcdp.attacks.reconstruct import Progress
from fedcdp.attacks.sightings import Sighting
from fedcdp.data.dataset import Dataset
from fedcdp.errors import PlanError
from fedcdp.files.tree import each_tensor, tensors_in
from fedcdp.mechanism.randomness import numpy_generator
from fedcdp.training.rounds import Simulator
from fedcdp.training.rundir import State

_USUAL_IN_SUM = 20  # clients whose record is tested; each takes two rounds of all clients


@dataclass(frozen=True)
class Presence:
    """The result of `matched-filter`: how well an adversary detects that a victim's example is present, and which it is.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> found = fedcdp.attack(
        ...     fedcdp.Plan(per_round=10), model=nn.Linear(30, 2), federation=federation, attack="matched-filter", victims=10
        ... )
        >>> found.victims, found.candidates, 0 <= found.auc.low <= found.auc.value <= found.auc.high <= 1
        (10, 144, True)
    """

    method: str
    """The training method."""
    leak: str
    """What the adversary observed: `type0`, `type1` or `type2`."""
    attack: str
    """The name of the attack."""
    victims: int
    """How many victims were attacked."""
    success_rate: float | None
    """Share of victims whose example was picked out of `candidates`; None for updates."""
    candidates: int | None
    """Among how many the example was sought; None for updates."""
    auc: Estimate
    """The probability that a victim scores above a victim whose example was zeroed out."""
    auc_predicted: float | None
    """The same by the formula, from the distances between the two cases; None where there is no noise."""
    distance_between_worlds: float
    """Mean norm of the change that one example makes, in units of a gradient."""
    noise_deviation: float
    """Standard deviation of the noise on the mean of the releases (root mean square over the victims)."""
    releases: int
    """How many releases the adversary averaged."""
    steps: int
    """Local steps of a client in the attacked round."""
    round: int
    """The attacked round, counted from 0."""
    seconds: float
    """How long the attack took."""
    summed_clients: int = 0
    """How many clients' updates were added up before anyone read them; 0: each was read alone."""

    def summary(self) -> dict[str, Any]:
        """All figures."""
        row = {name: value for name, value in asdict(self).items() if name != "summed_clients" or value}
        row |= {"distance_mean": None, "distance_median": None, "psnr_mean": None, "iterations_mean": None}
        return row | {"auc": self.auc.value, "auc_interval_99": [self.auc.low, self.auc.high]}


def matched_filter(
    simulator: Simulator,
    state: State,
    leak: Leak,
    victims: int | None,
    *,
    step: int = 0,
    releases: int = 1,
    public: Dataset,
    candidates: int = 1000,
    progress: Progress | None = None,
) -> Presence:
    """Test victims for their own first example, present or zeroed out; both worlds come from the method's own code."""
    if victims is not None and victims < 2:
        raise PlanError(f"victims: {victims} is not allowed; the matched filter needs at least 2")
    if releases < 1:
        raise PlanError(f"releases: {releases} is not allowed; it must be at least 1")
    if reads_sum(simulator.plan, leak):
        return _in_the_sum(simulator, state, victims, releases, progress)
    started = time.perf_counter()
    if leak != "type2":  # a single example is identified by its inputs; updates need only the trained layers
        simulator = in_fast_rounds(simulator)
    layout = simulator.engine.layout

    def look(without: bool, release: int = 0, silent: bool = False) -> tuple[Captured, Tensor]:
        seen = capture(simulator, state, Look(leak, step, 1, release, without, silent), victims)
        return seen, layout.flatten(seen.seen, lead=1).double()

    (there, expected_with), (_, expected_without) = (look(without, silent=True) for without in (False, True))
    difference, middle = expected_with - expected_without, (expected_with + expected_without) / 2
    means, captured = [], there
    for without in (False, True):
        total = torch.zeros_like(middle)
        for number in range(without * releases, (without + 1) * releases):  # no noise is used twice
            captured, seen = look(without, number)
            total += seen
            if progress is not None:
                progress(number + 1, 2 * releases)
        means.append(total / releases)
    deviation = captured.deviation / math.sqrt(releases)
    distance = difference.norm(dim=1)
    # The scores of victims are compared, so each is in units of its own noise.
    unit = torch.where(deviation > 0, deviation, 1.0)
    scores = [((mean - middle) * difference).sum(1) / unit.square() for mean in means]
    identified, among = None, None
    if leak == "type2" and there.weights_shared:
        identified, among = _identify(there, means[0], public, candidates)
    return Presence(
        simulator.plan.method,
        leak,
        "matched-filter",
        len(there),
        identified,
        among,
        area_under_curve(*(score.cpu().numpy() for score in scores)),
        _predicted(distance / unit) if captured.noisy else None,
        float(distance.mean()),
        captured.noise_level / math.sqrt(releases),
        releases,
        simulator.plan.local_steps,
        state.round,
        round(time.perf_counter() - started, 2),
    )


def _in_the_sum(
    simulator: Simulator, state: State, victims: int | None, releases: int, progress: Progress | None
) -> Presence:
    """The test for the first record of each of several clients, in the sum over the clients of a round."""
    started, simulator = time.perf_counter(), in_fast_rounds(simulator)
    layout, cohort = simulator.engine.layout, cohort_of(simulator, state)
    count = min(_USUAL_IN_SUM, len(cohort.clients)) if victims is None else victims
    if not 2 <= count <= len(cohort.clients):
        raise PlanError(f"victims: {count} is not allowed; a round has {len(cohort.clients)} clients, and 2 are needed")
    order = numpy_generator(simulator.plan.seed, "victims").permutation(len(cohort.clients))[:count]

    def look(number: int, without: int | None, silent: bool = False) -> Tensor:
        seen = cohort.observed(noise_of_release(simulator, number, silent), without)
        return layout.flatten(seen, lead=0).double()

    whole, deviation = look(0, None, silent=True), cohort.deviation / math.sqrt(releases)
    unit = deviation or 1.0
    scores: list[list[float]] = [[], []]
    distances = []
    for place, client in enumerate(cohort.clients[torch.from_numpy(order)].tolist()):
        difference = whole - look(0, client, silent=True)
        distances.append(difference.norm())
        for absent, told in enumerate(scores):
            first = 1 + (2 * place + absent) * releases  # no noise is used twice
            seen = torch.stack([look(first + r, client if absent else None) for r in range(releases)]).mean(0)
            told.append(float((seen - whole + difference / 2) @ difference) / unit**2)
        if progress is not None:
            progress(place + 1, count)
    distance = torch.stack(distances)
    return Presence(
        simulator.plan.method,
        "type0",
        "matched-filter",
        count,
        None,
        None,
        area_under_curve(*(np.array(each) for each in scores)),
        _predicted(distance / unit) if deviation else None,
        float(distance.mean()),
        deviation,
        releases,
        simulator.plan.local_steps,
        state.round,
        round(time.perf_counter() - started, 2),
        len(cohort.clients),
    )


def _predicted(distance: Tensor) -> float:
    """The expected AUC for distances d in units of the noise: the scores of a present victim and of another, absent one
    differ by (d² + d'²)/2 on average, with a variance of d² + d'²."""
    squares = distance.square()
    return float(torch.special.ndtr((squares[:, None] + squares).sqrt() / 2).mean())


def _identify(there: Captured, seen: Tensor, public: Dataset, candidates: int) -> tuple[float, int]:
    """How often the victim's own example is the most likely candidate, and the number of candidates (with differing public
    ones)."""
    order = numpy_generator(there.plan.seed, "candidates").permutation(len(public))[: candidates - 1]
    pool = public.take(torch.from_numpy(order))
    first = each_tensor(there.inputs, lambda value: value[:, 0].cpu())
    pairs = zip(tensors_in(first), tensors_in(pool.inputs), strict=True)
    same = torch.stack([_equal_rows(mine, theirs) for mine, theirs in pairs]).all(0).to(seen.device)
    best = matched_filters(there, pool.inputs, pool.targets, seen).masked_fill(same, -torch.inf).amax(1)
    mine = each_tensor(there.inputs, lambda value: value[:, 0])
    own = own_matched_filters(there, mine, there.targets[:, 0], seen)
    return float((own > best).double().mean()), 1 + len(pool)


def _equal_rows(mine: Tensor, theirs: Tensor) -> Tensor:
    """[mine, theirs]: which rows of two tensors are equal."""
    return torch.stack([(theirs.flatten(1) == each).all(1) for each in mine.flatten(1)])


_LEAST = 1e-18


class Candidates:
    """Public examples among which a victim's own example is searched."""

    def __init__(
        self, head: LinearHead, public: Dataset, candidates: int, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        order = torch.from_numpy(numpy_generator(seed, "candidates").permutation(len(public))[: candidates - 1])
        some = public.take(order)
        self._rows, self._labels = _rows(some.tensor), some.targets.to(device)
        self._features = head.features_of(public, order).to(device)
        self._at: tuple[Tensor, Tensor, Tensor] | None = None
        self._errors = torch.empty(0)

    def __len__(self) -> int:
        return len(self._rows)

    def picks(
        self, sighting: Sighting, prior: FeaturePrior, solved: Solved, own: Tensor, features: Tensor, labels: Tensor
    ) -> Tensor:
        """[examples]: whether each of the victim's own examples is more likely than every candidate that differs from it."""
        if len(own) == 1 or not sighting.classes:  # without classes nothing is known about the others of a batch
            share = (sighting.shares.sum(1) / len(own))[:, None, None]
            mine = matched_filter_scores(sighting, features, coefficients(sighting, features, labels) * share)
            others = matched_filter_scores(sighting, self._features, self._coefficients(sighting) * share)
        else:
            both = torch.cat([features, self._features]), torch.cat([labels, self._labels])
            mine, others = scores_among_others(sighting, prior, solved.labels, *both).tensor_split([len(own)])
        same = torch.tensor([[row == other for other in self._rows] for row in _rows(own)])
        return mine > others.expand(len(own), -1).masked_fill(same, -torch.inf).amax(1)

    def _coefficients(self, sighting: Sighting) -> Tensor:
        """The coefficients of all candidates, computed once for victims observed at the same weights."""
        at = (sighting.weights, sighting.biases, sighting.bound)
        if self._at is None or not all(torch.equal(one, other) for one, other in zip(at, self._at, strict=True)):
            self._at, self._errors = at, coefficients(sighting, self._features, self._labels)
        return self._errors


def _rows(inputs: Tensor) -> list[bytes]:
    """Each example as bytes, to find equal ones."""
    return [row.tobytes() for row in inputs.flatten(1).float().cpu().numpy()]


def matched_filter_scores(sighting: Sighting, features: Tensor, errors: Tensor) -> Tensor:
    """Σ (⟨G, g(x)⟩ − |g(x)|²/2) / τ² over all releases G: the exact log-likelihood of single examples, up to a constant.

    `errors` holds their `coefficients` [releases, candidates, classes].
    """
    whole = torch.cat([features, features.new_ones(len(features), 1)], dim=1) if sighting.has_bias else features
    variance = torch.where(sighting.deviation > 0, sighting.deviation, 1.0).square()[:, None]
    # In float32: one product for all releases, which is most of the work.
    along = whole.float() @ sighting.seen.float().flatten(0, 1).T
    inner = (along.view(len(features), *sighting.seen.shape[:2]).permute(1, 0, 2) * errors).sum(2)
    scores: Tensor = ((inner - errors.square().sum(2) * whole.square().sum(1) / 2) / variance).sum(0)
    return scores


def scores_among_others(sighting: Sighting, prior: FeaturePrior, batch: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """The log-likelihood ratio of a candidate in a batch with these labels, whose other examples are drawn from the prior.

    The other examples of class y are assumed to have the same coefficients a_y, those of the class mean. Along each axis of
    the prior, with variance λ, the observation has the covariance Σ_y n_y λ a_y a_yᵀ + τ². The class means leave τ²
    unexplained.
    """
    size = features.shape[1]
    present, counts = batch.unique(return_counts=True)
    share = sighting.shares.sum(1) / sighting.shares.shape[1]

    def columns(points: Tensor, of: Tensor) -> Tensor:
        each = coefficients(sighting, points, of) * share[:, None, None]
        return each.transpose(1, 2).flatten(0, 1)  # [releases · classes, points]

    classes = columns(prior.means[present], present)
    seen = sighting.seen[..., :size].flatten(0, 1)
    left = seen - classes @ (counts[:, None] * prior.means[present])
    basis = torch.linalg.qr(classes).Q
    outside = left - basis @ (basis.T @ left)
    tau = max(float(outside.square().sum()) / max(1, (len(seen) - len(present)) * size), _LEAST)
    spread = classes * counts.double().sqrt()
    values, vectors = torch.linalg.eigh(spread.T @ spread)
    inside = spread @ vectors / values.clamp(min=_LEAST).sqrt()  # an orthonormal basis of the subspace that the others span
    values = values.clamp(min=0)[:, None]
    # The candidate replaces one unknown example of its class: the expected observation moves by a_x f_x − a_y μ_y.
    means = prior.means[labels]
    mine, typical = columns(features, labels), columns(means, labels)
    inner = ((mine.T @ left) * features).sum(1) - ((typical.T @ left) * means).sum(1)
    cross = (mine * typical).sum(0) * (features * means).sum(1)
    squared = mine.square().sum(0) * features.square().sum(1) + typical.square().sum(0) * means.square().sum(1) - 2 * cross
    gains, losses, left = (inside.T @ mine).T, (inside.T @ typical).T, inside.T @ left

    def explained(new: Tensor, old: Tensor, observed: Tensor, shrink: Tensor) -> Tensor:
        """What the others explain of the move, along axes on which they take the share `shrink` [present, axes]."""
        linear = gains * (new @ (shrink * observed).T) - losses * (old @ (shrink * observed).T)
        square = gains.square() * (new.square() @ shrink.T) + losses.square() * (old.square() @ shrink.T)
        found: Tensor = (linear - square / 2 + gains * losses * ((new * old) @ shrink.T)).sum(1)
        return found

    shrink = 1 / tau - 1 / (tau + values * prior.variances)
    rest = 1 / tau - 1 / (tau + values * prior.rest) if prior.others else torch.zeros_like(values)
    shared = explained(features @ prior.basis, means @ prior.basis, left @ prior.basis, shrink - rest)
    shared = shared + explained(features, means, left, rest.expand_as(left))
    scores: Tensor = (inner - squared / 2) / tau - shared
    return scores
