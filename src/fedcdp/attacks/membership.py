"""Membership inference: was a record in the training data of the final model? (Yeom et al., CSF 2018.)

The adversary has the model, the record and its label. It scores the record by the confidence in the label on the logit
scale, log(p_y / (1 − p_y)) (Carlini et al., IEEE S&P 2022): one threshold for all records, no shadow models. The loss of
Yeom et al., −log p_y, gives the same order of records, so rank-based figures hold for both; only the logit distinguishes
records whose loss rounds to zero. Where there are no classes, the score is the loss, negated. The attacks differ in the
threshold: the mean loss of members, or the best threshold on known records.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedcdp.audit.intervals import Numbers, upper_limit
from fedcdp.data.dataset import Dataset
from fedcdp.engine import Loss
from fedcdp.engine.functional import on_targets
from fedcdp.errors import DataError
from fedcdp.files.tree import Inputs, each_tensor, tensors_in
from fedcdp.mechanism.randomness import numpy_generator
from fedcdp.models.networks import outputs_of
from fedcdp.training.evaluation import is_binary
from fedcdp.training.loss_contract import loss_for

CONFIDENCE = 0.99
_BATCH = 1000


class Estimate(NamedTuple):
    """A measured figure and its 99 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Membership:
    """The result of `membership`: how well training records are told from others.

    All figures are averages: one record may be far more exposed.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> run = fedcdp.simulate(nn.Linear(30, 2), federation, fedcdp.Plan(rounds=3, per_round=10, local_steps=2))
        >>> found = fedcdp.attack(run, attack="membership")
        >>> found.members, found.others, found.auc.low <= found.auc.value <= found.auc.high
        (426, 143, True)
    """

    members: int
    """How many training records were scored."""
    others: int
    """How many other records were scored."""
    auc: Estimate
    """The probability that a member scores above another record, counting ties half (interval: DeLong et al., 1988)."""
    advantage: Estimate
    """True-positive minus false-positive rate, that is 2 · balanced accuracy − 1. The threshold is chosen on one half of the
    records and evaluated on the other half (interval: Clopper and Pearson's for both rates at once)."""
    advantage_at_mean_loss: Estimate
    """The same with the mean loss of the first half's members as threshold (Yeom et al.)."""
    tpr_at_1_percent: Estimate | None
    """The share of members found while at most 1 % of the others are accused. The interval (Clopper and Pearson) is for this
    threshold, as chosen on the others. None: fewer than 100 others cannot show it."""
    tpr_at_01_percent: Estimate | None
    """The same at 0.1 %; None with fewer than 1,000 others."""
    chance: str = "Guessing has an AUC of 0.5, an advantage of 0, and a true-positive rate equal to the false-positive rate."

    def summary(self) -> dict[str, Any]:
        """All figures, each with its interval."""
        row: dict[str, Any] = {"leak": "model", "attack": "membership", "victims": self.members, "others": self.others}
        for name in ("auc", "advantage", "advantage_at_mean_loss", "tpr_at_1_percent", "tpr_at_01_percent"):
            estimate: Estimate | None = getattr(self, name)
            row[name] = None if estimate is None else estimate.value
            row[f"{name}_interval_99"] = None if estimate is None else [estimate.low, estimate.high]
        return row


def infer_membership(
    model: nn.Module,
    members: Dataset,
    others: Dataset,
    *,
    most: int = 10_000,
    seed: int = 0,
    device: str | torch.device = "cpu",
    loss: Loss | None = None,
) -> Membership:
    """Attack a trained model, given records it was trained on and others from the same source.

    At most `most` members and others are used, drawn by `seed`, which also splits them into halves. A non-finite output for
    a record counts as zero confidence. A single output is taken as the logit of class 1. For tasks without classes, `loss`
    (default: the task's own) scores a record. The model is not changed; dropout is off.
    """
    if (fewest := min(len(members), len(others), most)) < 2 or members.shape != others.shape:
        trouble = f"not {fewest}" if fewest < 2 else f"of one shape, not {list(members.shape)} and {list(others.shape)}"
        raise DataError(f"membership: at least 2 members and 2 others are needed, {trouble}")
    random = numpy_generator(seed, "membership")
    used = [data.take(torch.from_numpy(random.permutation(len(data))[:most])) for data in (members, others)]
    together = [torch.cat(each) for each in zip(*(tensors_in(data.inputs) for data in used), strict=True)]
    inputs: Inputs = dict(zip(members.inputs, together, strict=True)) if isinstance(members.inputs, dict) else together[0]
    targets = torch.cat([data.targets for data in used])
    by_loss = None if members.classes else on_targets(loss_for(members, loss))
    # Members and others share batches; otherwise a layer that mixes a batch's examples could reveal membership.
    network, scores = copy.deepcopy(model).to(device).eval(), np.empty(len(targets))
    for batch in torch.from_numpy(random.permutation(len(targets))).split(_BATCH):
        with torch.no_grad():
            outputs = outputs_of(network, each_tensor(inputs, lambda value: value[batch].to(device))).cpu()  # noqa: B023
        own = targets[batch]
        scores[batch.numpy()] = confidence(outputs, own) if by_loss is None else low_losses(by_loss, outputs, own)
    inside, outside = scores[: len(used[0])], scores[len(used[0]) :]
    # The order is random, so any halves will do: the first chooses a threshold, the second evaluates it.
    learned, held_out = (inside[::2], outside[::2]), (inside[1::2], outside[1::2])
    return Membership(
        members=len(inside),
        others=len(outside),
        auc=area_under_curve(inside, outside),
        advantage=_advantage(*held_out, _best_threshold(*learned)),
        advantage_at_mean_loss=_advantage(*held_out, _mean_loss_threshold(learned[0], logits=by_loss is None)),
        tpr_at_1_percent=_true_positives(inside, outside, 100),
        tpr_at_01_percent=_true_positives(inside, outside, 1000),
    )


def confidence(outputs: Tensor, targets: Tensor) -> Numbers:
    """z_y − log Σ_{j≠y} e^{z_j}: the logit of p_y, computed without a p_y that could round to 0 or 1."""
    if is_binary(outputs):  # one logit, for class 1; the logit of class 0 is 0
        outputs = torch.stack([torch.zeros_like(outputs.flatten()), outputs.flatten()], 1)
    if outputs.dim() != 2 or outputs.shape[1] <= int(targets.max()):
        raise DataError(f"the network's output has shape {list(outputs.shape)}, not one number for each class")
    outputs, own = outputs.double(), targets[:, None]
    score = outputs.gather(1, own)[:, 0] - outputs.scatter(1, own, -torch.inf).logsumexp(1)
    return torch.where(score.isfinite(), score, -torch.inf).numpy()


def low_losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Numbers:
    """The loss of each record, negated: high for members of an overfitted model."""
    losses = torch.stack([loss(output[None], target[None]) for output, target in zip(outputs, targets, strict=True)])
    return torch.where(losses.isfinite(), -losses.double(), -torch.inf).numpy()


def area_under_curve(inside: Numbers, outside: Numbers) -> Estimate:
    """The probability that a score inside exceeds one outside, by ranks; the interval (DeLong et al., 1988) is computed on
    the logit scale, so it stays within 0 and 1."""
    from scipy.special import expit, logit, ndtri
    from scipy.stats import rankdata

    m, n = len(inside), len(outside)
    ranks = rankdata(np.concatenate([inside, outside]))
    beaten = (ranks[:m] - rankdata(inside)) / n  # share of others that each member beats
    beating = 1 - (ranks[m:] - rankdata(outside)) / m
    auc, variance = float(beaten.mean()), float(beaten.var(ddof=1) / m + beating.var(ddof=1) / n)
    if variance < 1e-18:  # All pairs compare alike; with min(m, n) independent pairs, a rarer outcome shows in none.
        unseen = float(upper_limit(0, min(m, n), (1 - CONFIDENCE) / 2))
        return Estimate(auc, max(0.0, auc - unseen), min(1.0, auc + unseen))
    reach = ndtri((1 + CONFIDENCE) / 2) * np.sqrt(variance) / (auc * (1 - auc))
    return Estimate(auc, float(expit(logit(auc) - reach)), float(expit(logit(auc) + reach)))


def _best_threshold(inside: Numbers, outside: Numbers) -> float:
    """The score above which calling a record a member gains the most."""
    candidates = np.unique(np.concatenate([inside, outside]))
    below_inside, below_outside = (np.searchsorted(np.sort(each), candidates) / len(each) for each in (inside, outside))
    return float(candidates[(below_outside - below_inside).argmax()])


def _mean_loss_threshold(inside: Numbers, logits: bool = True) -> float:
    """The score of a record with the members' mean loss: the logit of p_y at −log p_y = mean loss; or the loss, negated."""
    if not logits:
        usable = inside[np.isfinite(inside)]
        return float(usable.mean()) if len(usable) else -np.inf
    losses = np.logaddexp(0.0, -inside[np.isfinite(inside)])
    return float(-losses.mean() - np.log(-np.expm1(-losses.mean()))) if losses.any() else -np.inf


def _advantage(inside: Numbers, outside: Numbers, threshold: float) -> Estimate:
    true, false = (_rate(int((each >= threshold).sum()), len(each), (1 - CONFIDENCE) / 4) for each in (inside, outside))
    return Estimate(true.value - false.value, true.low - false.high, true.high - false.low)


def _true_positives(inside: Numbers, outside: Numbers, one_in: int) -> Estimate | None:
    threshold = np.sort(outside)[-1 - len(outside) // one_in]
    return _rate(int((inside > threshold).sum()), len(inside), (1 - CONFIDENCE) / 2) if len(outside) >= one_in else None


def _rate(count: int, trials: int, level: float) -> Estimate:
    """Clopper and Pearson's interval; each side is wrong with probability at most `level`."""
    low, high = 1 - upper_limit(trials - count, trials, level), upper_limit(count, trials, level)
    return Estimate(count / trials, float(low), float(high))
