"""LiRA: membership inference by likelihood ratios (Carlini et al., "Membership inference attacks from first principles",
IEEE S&P 2022), with shadow federations that are trained in one batched program (`parallel_federations`).

In each of S federations every candidate record is zeroed out with probability ½, independently of all else. Each federation
is the target once, and all others are its shadows. The adversary has the target's final model, the plan, the initial
weights, and all records; it does not know the target's seed, nor which candidates the target kept. For a record it compares
the target's confidence in the true label, on the logit scale, with the shadows' confidences: those that kept the record
(mean μ_in, variance σ_in²) and those that did not (μ_out, σ_out²).

| variant | score | needs shadows that kept the record |
| --- | --- | --- |
| online | log N(φ; μ_in, σ_in²) − log N(φ; μ_out, σ_out²) | yes |
| offline | (φ − μ_out) / σ_out | no |
| one threshold | φ, the score of the attack `membership` | no shadows at all |

With fewer than 64 shadows, one variance for all records is more reliable than one for each. A record that no shadow kept, or
that all kept, scores 0: no evidence.

What ε allows. Zeroing out a record is the relation `zero-out`. For a final model that is (ε, δ)-private under it, every
record and every threshold satisfy TPR ≤ e^ε·FPR + δ and 1 − FPR ≤ e^ε·(1 − TPR) + δ. Both are linear, so they hold for the
averages over records and targets that are measured here. The choice of a record's bit is independent of everything that the
adversary's thresholds depend on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from fedcdp.accounting.budget import accounting_is_installed
from fedcdp.attacks.membership import CONFIDENCE, Estimate, confidence, low_losses
from fedcdp.audit.intervals import Numbers
from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.engine import Loss
from fedcdp.engine.functional import on_targets
from fedcdp.errors import DataError, PlanError
from fedcdp.mechanism.randomness import numpy_generator, stream_key
from fedcdp.training.loss_contract import loss_for
from fedcdp.training.parallel_federations import CHUNKS, ParallelFederations
from fedcdp.training.prepared import Prepared
from fedcdp.training.shared_work import share, workers

FEWEST, MOST = 8, 4096
_ENOUGH = 64  # shadows from which on each record gets a variance of its own
_TOGETHER = 8  # federations in a batch on a CPU, at most
_POINTS = 61
_LEAST_RATE = 1e-4
VARIANTS = ("online", "offline", "threshold")


@dataclass(frozen=True)
class Curve:
    """How well one variant tells members from others, over all targets and candidates."""

    auc: Estimate
    """The probability that a member scores above another record, counting ties half."""
    tpr_at_1_percent: Estimate | None
    """The share of members found while 1 % of the others are accused. None: fewer than 100 others."""
    tpr_at_01_percent: Estimate | None
    """The same at 0.1 %; None with fewer than 1,000 others."""
    roc: tuple[tuple[float, float], ...] = field(repr=False)
    """False-positive rates, on a logarithmic scale, and the true-positive rate at each."""


@dataclass(frozen=True)
class Lira:
    """The result of `lira`: how well an adversary with shadow federations tells a target's members from other records.

    The intervals are Student's, over the targets: each federation is the target once, with the others as its shadows.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> plan = fedcdp.Plan(method="nonprivate", rounds=3, per_round=10, local_steps=5)
        >>> found = fedcdp.attack(plan, model=nn.Linear(30, 2), federation=federation, attack="lira", shadows=16)
        >>> found.shadows, found.candidates, found.online.auc.low <= found.online.auc.value <= found.online.auc.high
        (16, 420, True)
    """

    method: str
    """The training method."""
    shadows: int
    """How many federations were trained. Each is the target once."""
    candidates: int
    """How many records are in or out."""
    online: Curve
    """With shadows that kept the record and shadows that did not."""
    offline: Curve
    """With shadows that did not keep the record only."""
    threshold: Curve
    """Without shadows: one threshold for all records, as in the attack `membership`."""
    variance: str
    """`record` if each record has its own variances; `global` if all share them."""
    epsilon: float | None
    """ε of the final model for a record before the training; None without the package dp-accounting."""
    unit: str
    """What ε is for: a `record`, or `unique` where clients hold copies of a record, which are zeroed out together."""
    delta: float
    """δ of that ε."""
    seconds: float
    """Time for training and attack."""

    @property
    def epsilon_shown(self) -> float:
        """The smallest ε that allows the online curve, at its measured rates of at least 0.1 %: an estimate, not a bound."""
        rates = [(f, t) for f, t in self.online.roc if f >= 1e-3]
        ratios = [((t - self.delta) / f, (1 - self.delta - f) / (1 - t) if t < 1 else 0.0) for f, t in rates]
        return math.log(max(1.0, *(each for pair in ratios for each in pair)))

    def summary(self) -> dict[str, Any]:
        """All figures, each with its interval; those of the online variant come first."""
        row: dict[str, Any] = {"leak": "model", "attack": "lira", "method": self.method, "victims": self.candidates}
        row |= {"shadows": self.shadows, "variance": self.variance}
        for variant in VARIANTS:
            curve: Curve = getattr(self, variant)
            prefix = "" if variant == "online" else f"{variant}_"
            for name in ("auc", "tpr_at_1_percent", "tpr_at_01_percent"):
                estimate: Estimate | None = getattr(curve, name)
                row[prefix + name] = None if estimate is None else estimate.value
                row[f"{prefix}{name}_interval_99"] = None if estimate is None else [estimate.low, estimate.high]
        row["roc"] = {variant: [list(point) for point in getattr(self, variant).roc] for variant in VARIANTS}
        told = {"epsilon": self.epsilon, "epsilon_unit": self.unit, "delta": self.delta, "epsilon_shown": self.epsilon_shown}
        return row | {"seconds": self.seconds} | {k: "inf" if v == math.inf else v for k, v in told.items()}


def allowed_rate(epsilon: float, delta: float, false: float) -> float:
    """The largest true-positive rate that (ε, δ)-privacy allows at a false-positive rate."""
    ratio = math.exp(min(epsilon, 700.0))
    return min(1.0, ratio * false + delta, 1 - (1 - delta - false) / ratio) if math.isfinite(epsilon) else 1.0


def lira(
    plan: Plan,
    model: nn.Module,
    federation: Federation,
    *,
    shadows: int = 64,
    candidates: int | None = None,
    device: torch.device | None = None,
    loss: Loss | None = None,
    seed: int | None = None,
    chunk: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Lira:
    """Train `shadows` federations in lockstep, each without a random half of the candidates, and attack each by the others.

    Args:
        plan: The plan. Its noise is drawn from seeds, also where the plan asks for secure noise.
        model: The untrained network, from which all federations start.
        federation: The clients and their data.
        shadows: How many federations are trained.
        candidates: How many records are in or out; all others are always in. Default: all records that a client holds.
        device: Where they are trained; by default the CPU.
        loss: The loss. Default: that of the data's task.
        seed: Fixes the seeds of the federations and which records each keeps. Default: the plan's.
        chunk: How many clients are trained at once. Default: as many as memory allows, up to a limit.
        progress: Called with the rounds done so far and in all.

    Raises:
        PlanError: The number of shadows is not allowed, or the plan cannot be trained in lockstep.
    """
    if not FEWEST <= shadows <= MOST:
        raise PlanError(f"shadows: {shadows} is not allowed; it must be a whole number from {FEWEST} to {MOST}")
    started = time.perf_counter()
    device = torch.device("cpu") if device is None else device
    seed = plan.seed if seed is None else seed
    loss = loss_for(federation.train, loss)
    chosen = _candidates(federation, candidates, seed)
    kept = torch.ones(shadows, len(federation.train), dtype=torch.bool)
    kept[:, chosen] = torch.from_numpy(numpy_generator(seed, "lira-members").random((shadows, len(chosen))) < 0.5)
    seeds = [stream_key(seed, "lira-shadow", number) >> 1 for number in range(shadows)]
    prepared = Prepared.of(model, federation, plan)
    common = _Shadows(prepared, seeds, kept, chosen, loss, chunk)
    confidences = np.concatenate(share(_confidences, common, common.groups(device), device, progress))
    inside, shared = kept[:, chosen].numpy(), shadows < _ENOUGH
    scores = likelihood_ratios(confidences, inside, shared=shared)
    epsilon, unit = epsilon_of_model(prepared)
    return Lira(
        method=plan.method,
        shadows=shadows,
        candidates=len(chosen),
        **{name: curve_of(score, inside) for name, score in zip(VARIANTS, (*scores, confidences), strict=True)},
        variance="global" if shared else "record",
        epsilon=epsilon,
        unit=unit,
        delta=plan.delta,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True)
class _Shadows:
    """All that the shadow federations have in common, wherever they are trained."""

    prepared: Prepared
    seeds: list[int]
    kept: torch.Tensor
    chosen: torch.Tensor
    loss: Loss
    chunk: int | None

    def groups(self, device: torch.device) -> list[slice]:
        """The federations that are trained in one batch. On a CPU groups do not depend on the number of ranks.

        Sums over a batch round differently in another batch.
        """
        count, at_once = len(self.seeds), self.chunk or CHUNKS.get(device.type, CHUNKS["cpu"])
        most = _TOGETHER if device.type == "cpu" else -(-count // workers())
        size = min(most, max(1, at_once // self.prepared.plan.per_round))
        return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def _confidences(
    common: _Shadows, groups: list[slice], device: torch.device, progress: Callable[[int, int], None] | None
) -> list[Numbers]:
    """How sure the final model of each federation in a group is of each candidate [federations, candidates]."""
    data, loss, rounds = common.prepared.federation.train, common.loss, common.prepared.plan.rounds
    targets = data.targets[common.chosen]
    trained = ParallelFederations(common.prepared, common.seeds, common.kept, device=device, loss=loss, chunk=common.chunk)
    found = []
    for number, group in enumerate(groups):
        some = trained.some(group)
        before = number * rounds

        def tell(done: int, _: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done, len(groups) * rounds)

        models = some.train(tell)
        found.append(np.stack([
            confidence(outputs, targets) if data.classes else low_losses(on_targets(loss), outputs, targets)
            for outputs in some.outputs(models, common.chosen)
        ]))  # fmt: skip
    return found


def _candidates(federation: Federation, wanted: int | None, seed: int) -> torch.Tensor:
    held = np.unique(np.concatenate([federation.indices(client) for client in range(federation.clients)]))
    if wanted is None:
        wanted = len(held)
    if not 2 <= wanted <= len(held):
        raise DataError(f"victims: {wanted} is not allowed; the clients hold {len(held)} records, and lira needs at least 2")
    drawn = numpy_generator(seed, "lira-candidates").permutation(len(held))[:wanted]
    return torch.from_numpy(np.sort(held[drawn]))


def epsilon_of_model(prepared: Prepared) -> tuple[float | None, str]:
    """ε against anyone who has the final model, and its unit."""
    unit = "unique" if prepared.federation.copies > 1 else "record"
    if not prepared.plan.private:
        return math.inf, unit
    if not accounting_is_installed():
        return None, unit
    from fedcdp.accounting.statement import state

    rows = {
        row.adversary: row.epsilon
        for row in state(prepared.plan, prepared.population).rows
        if (row.unit, row.relation) == (unit, "zero-out")
    }
    return rows.get("model", rows["server"]), unit  # the model is computed from what the server receives


def likelihood_ratios(confidences: Numbers, inside: np.ndarray, *, shared: bool) -> tuple[Numbers, Numbers]:
    """The online and the offline score of each target and record [federations, records].

    Row s is scored by Gaussians that are fitted to all rows but s. With `shared`, all records have the same variances.
    """
    finite = np.isfinite(confidences)
    low = confidences[finite].min() if finite.any() else 0.0
    values = np.where(finite, confidences, low)
    values = values - values.mean(0)  # smaller numbers cancel less below
    (mean_in, spread_in, some_in), (mean_out, spread_out, some_out) = (
        _others(values, side, shared) for side in (inside, ~inside)
    )

    def logarithm(mean: Numbers, variance: Numbers) -> Numbers:
        found: Numbers = -0.5 * (np.log(variance) + (values - mean) ** 2 / variance)
        return found

    online = np.where(some_in & some_out, logarithm(mean_in, spread_in) - logarithm(mean_out, spread_out), 0.0)
    return online, np.where(some_out, (values - mean_out) / np.sqrt(spread_out), 0.0)


def _others(values: Numbers, side: np.ndarray, shared: bool) -> tuple[Numbers, Numbers, np.ndarray]:
    """Mean and variance of the values on one side in all other rows, and whether there are enough for them."""
    own = np.where(side, values, 0.0)
    count = side.sum(0) - side
    mean = (own.sum(0) - own) / np.maximum(count, 1)
    second = (np.square(own).sum(0) - np.square(own)) / np.maximum(count, 1)
    variance = np.maximum(second - mean**2, 0.0)
    enough = count >= (1 if shared else 2)
    if shared:  # pooled over records, each counted by its degrees of freedom
        freedom = np.maximum(count - 1, 0)
        variance = np.broadcast_to(((variance * count).sum(1) / np.maximum(freedom.sum(1), 1))[:, None], values.shape)
    else:
        variance = variance * count / np.maximum(count - 1, 1)
    floor = 1e-12 + 1e-6 * float(np.median(variance))
    return mean, np.maximum(variance, floor), enough


def curve_of(scores: Numbers, inside: np.ndarray) -> Curve:
    """The figures of a score over all targets [federations, records], given which records each kept."""
    from scipy.stats import rankdata, t

    scores = np.where(np.isfinite(scores), scores, -np.inf)
    members, others = np.sort(scores[inside]), np.sort(scores[~inside])
    reach = float(t.ppf((1 + CONFIDENCE) / 2, len(scores) - 1)) / math.sqrt(len(scores))

    def estimate(value: float, each: list[float]) -> Estimate:
        margin = reach * float(np.std(each, ddof=1))
        return Estimate(value, max(0.0, value - margin), min(1.0, value + margin))

    def area(values: Numbers, are_members: np.ndarray) -> float:
        m, n = int(are_members.sum()), int((~are_members).sum())
        return (
            float((rankdata(values).reshape(values.shape)[are_members].sum() - m * (m + 1) / 2) / (m * n))
            if m and n
            else 0.5
        )

    def threshold(false: float) -> float:
        return float(others[-1 - int(false * len(others))]) if false < 1 else -np.inf

    def true_rate(false: float) -> float:
        return 1 - float(np.searchsorted(members, threshold(false), "right")) / len(members) if false < 1 else 1.0

    def estimated_rate(one_in: int) -> Estimate | None:
        if len(others) < one_in:
            return None
        found = scores > threshold(1 / one_in)
        each = [float(row[own].mean()) for row, own in zip(found, inside, strict=True) if own.any()]
        return estimate(true_rate(1 / one_in), each)

    grid = np.geomspace(max(_LEAST_RATE, 1 / len(others)), 1.0, _POINTS).tolist()
    return Curve(
        auc=estimate(area(scores, inside), [area(row, own) for row, own in zip(scores, inside, strict=True)]),
        tpr_at_1_percent=estimated_rate(100),
        tpr_at_01_percent=estimated_rate(1000),
        roc=tuple((false, true_rate(false)) for false in grid),
    )
