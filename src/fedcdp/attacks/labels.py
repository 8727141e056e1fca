"""Infer labels from the gradient of the last layer, before any optimisation.

With a softmax and cross-entropy, the row of class k in that gradient is Σ_b (p_bk − [y_b = k])·h_b: negative along the
features of the examples that have this label, positive along all others.

| rule | needs | finds |
| --- | --- | --- |
| `gradient` | nothing | one label: by the bias, if there is one, else by `agnostic`; with two classes `negative-sum` |
| `agnostic` | three classes | the row with the most negative inner products with all others: features of any sign |
| `negative-sum` | features ≥ 0 | the row with the most negative sum (iDLG; Zhao et al., 2020) |
| `counts` | their number | how often each label occurs, from the network's outputs on the seeds; also in which step |
| `posterior` | public examples | one label, from the likelihood of public candidates (`candidate_pool`); else as `counts` |
| `known` | the truth | the labels of an adversary who knows them |
| `joint` | nothing | labels are optimised with the examples (DLG; Zhu et al., 2019) |

A network with one logit for two classes has a single row, Σ_b (p_b − y_b)·h_b: it is negative along the features of class 1.
Targets without classes are not inferred here: see `targets.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Literal, get_args

import torch
from torch import Tensor

from fedcdp.attacks.objectives import Knows, predicted
from fedcdp.attacks.observations import Observation
from fedcdp.attacks.observe import Captured
from fedcdp.errors import ModelError, PlanError
from fedcdp.files.tree import Inputs, Layout, Tree, each_tensor, first_tensor

_FEW = 16  # largest number of examples for which every pair is tried

LabelRule = Literal["gradient", "agnostic", "negative-sum", "counts", "posterior", "known", "joint"]


def last_layer(layout: Layout, classes: int) -> tuple[str, str | None]:
    """The names of the last dense layer's weight, with one row per class, and of its bias if it has one."""
    for name in reversed(list(layout.shapes)):
        shape = layout.shapes[name]
        if len(shape) == 2 and shape[0] == classes:
            bias = "".join(name.rpartition(".")[:2]) + "bias"
            return name, bias if layout.shapes.get(bias) == (classes,) else None
    raise ModelError(
        f"labels: the network has no dense last layer with {_counted_rows(classes)} to infer them from; use known or joint"
    )


def _counted_rows(rows: int) -> str:
    return "one row" if rows == 1 else f"{rows} rows"


def _rows(captured: Captured, classes: int) -> int:
    """How many rows the last layer has."""
    return 1 if captured.task == "binary" else classes


def infer_labels(
    captured: Captured,
    rule: LabelRule,
    classes: int,
    seeds: Inputs,
    knows: Knows = "gradient",
    observations: Sequence[Observation] = (),
) -> Tensor:
    """The labels [victims, examples] that an adversary assigns to its dummies, which start from the seeds.

    An adversary that knows the method refines the counts of several examples by simulating it, in all `observations`. The
    label of a single example follows from the signs of the observation (under noise, of its rank-one part); a seed in its
    place could only mislead.
    """
    victims, examples = first_tensor(seeds).shape[:2]
    if rule not in get_args(LabelRule) or rule in ("joint", "posterior"):
        raise PlanError(f"labels: {rule!r} is not one of {', '.join(get_args(LabelRule))}")
    if rule == "known":
        return known_targets(captured, examples)
    weight, bias = last_layer(captured.engine.layout, _rows(captured, classes))
    if rule == "counts" and examples > 1:
        labels = _counted(captured, weight, bias, seeds)
    elif captured.task == "binary":
        evidence = captured.seen[weight].sum((1, 2)) if bias is None else captured.seen[bias][:, 0]
        labels = (evidence < 0).long()[:, None].expand(victims, examples)
    else:
        scores = _single_scores(captured.seen, weight, bias, rule, classes, noisy=captured.noisy)
        labels = scores.argmin(1)[:, None].expand(victims, examples)
    if rule == "counts" and knows == "method" and (examples > 1 or captured.steps > 1):
        return refine_labels(captured, labels, classes, seeds, observations)
    return labels


def known_targets(captured: Captured, examples: int) -> Tensor:
    if examples == captured.targets.shape[1]:
        return captured.targets
    # One dummy for several examples: use their most frequent label, or the mean of their values.
    present = [targets[real] for targets, real in zip(captured.targets, captured.present, strict=True)]
    values = captured.targets.is_floating_point()
    typical = torch.stack([each.mean(0) if values else each.mode(0).values for each in present])[:, None]
    return typical.expand(-1, examples, *typical.shape[2:])


def _single_scores(seen: Tree, weight: str, bias: str | None, rule: LabelRule, classes: int, noisy: bool = False) -> Tensor:
    """[victims, classes]: the lowest score marks the label."""
    rows = seen[weight]
    if noisy and rule in ("gradient", "counts") and classes > 2:
        return _denoised_scores(rows, None if bias is None else seen[bias])
    if rule != "agnostic" and rule != "negative-sum" and bias is not None:
        return seen[bias]
    if rule == "negative-sum" or classes == 2:
        return rows.sum(2)
    inner = rows @ rows.mT
    return inner.sum(2) - inner.diagonal(dim1=1, dim2=2)


def _denoised_scores(rows: Tensor, bias: Tensor | None) -> Tensor:
    """Under noise, use the rank-one part alone: the gradient is (p − y) ⊗ h, and |p_y − 1| is the sum of all other |p_k|.

    The bias, whose feature is 1, determines the sign; without a bias, the longest row is the label's.
    """
    whole = rows if bias is None else torch.cat([rows, bias[..., None]], dim=2)
    left, _, right = torch.linalg.svd(whole, full_matrices=False)
    error = left[:, :, 0]
    scores: Tensor = -error.square() if bias is None else error * torch.where(right[:, 0, -1:] < 0, -1.0, 1.0)
    return scores


def _counted(captured: Captured, weight: str, bias: str | None, seeds: Inputs) -> Tensor:
    """Labels with estimated multiplicities.

    If all examples gave the same probabilities p and features h, then count_k = B·(p_k − row_k·h / |h|²). Both are estimated
    from the seeds, with labels chosen such that their own gradient reveals p and h.
    """
    victims, examples = first_tensor(seeds).shape[:2]
    everyone = torch.ones(victims, examples, dtype=torch.bool, device=captured.device)
    means = captured.means[:, None]

    def last_rows(label: int) -> tuple[Tensor, Tensor | None]:
        targets = torch.full((victims, examples), label, device=captured.device)
        tree = predicted(captured, "gradient", seeds, targets, everyone)
        return tree[weight] / means[..., None], None if bias is None else tree[bias] / means

    with torch.no_grad():
        zero, zero_bias = last_rows(0)
        one, _ = last_rows(1)
    features = one[:, 0] - zero[:, 0]  # (p_0 − 0)·h − (p_0 − 1)·h
    if captured.task == "binary":
        features = -features  # p·h − (p − 1)·h
    if bias is not None and zero_bias is not None:
        measured, base = captured.seen[bias] / means, zero_bias.clone()
    else:
        squared = features.square().sum(1, keepdim=True).clamp(min=1e-12)
        measured = (captured.seen[weight] / means[..., None] * features[:, None]).sum(2) / squared
        base = (zero * features[:, None]).sum(2) / squared
    count = captured.present.sum(1, keepdim=True)
    if captured.task == "binary":  # one logit: base is the probability of class 1
        ones = (base - measured) * count
        wanted = torch.cat([count - ones, ones], dim=1)
    else:
        base[:, 0] += 1  # the probabilities themselves
        wanted = (base - measured) * count
    labels = []
    for _ in range(examples):  # assign one example at a time to the class with the largest remaining count
        chosen = wanted.argmax(1)
        labels.append(chosen)
        wanted = wanted.scatter_add(1, chosen[:, None], -torch.ones_like(wanted[:, :1]))
    return torch.stack(labels, dim=1)


def refine_labels(
    captured: Captured, labels: Tensor, classes: int, examples: Inputs, observations: Sequence[Observation] = ()
) -> Tensor:
    """Improve labels: change one at a time, then swap, as long as this brings the simulated last-layer gradient closer.

    The examples (or seeds in their place) are run through the method's own code and compared with the observation of the
    last layer, in one observation or in all of several. If a method clips, or the network learns over several steps, counts
    alone are not enough. Once the examples are known, this determines which of them has which label.
    """
    weight, bias = last_layer(captured.engine.layout, _rows(captured, classes))
    names = [weight] if bias is None else [weight, bias]

    def misfit(tried: Tensor) -> Tensor:
        if not observations:
            return distance(captured, examples, tried)
        total = torch.zeros(len(tried), device=captured.device)
        for each in observations:
            mine = each_tensor(examples, lambda value: value[each.who])  # noqa: B023
            total.index_add_(0, each.who, distance(each.captured, mine, tried[each.who]))
        return total

    def distance(part: Captured, inputs: Inputs, tried: Tensor) -> Tensor:
        with torch.no_grad():
            tree = predicted(part, "method", inputs, tried, part.present)
        return torch.stack([(tree[name] - part.seen[name]).flatten(1).square().sum(1) for name in names]).sum(0)

    best = misfit(labels)

    def kept_if_better(tried: Tensor) -> None:
        nonlocal labels, best
        found = misfit(tried)
        labels = torch.where((found < best)[:, None], tried, labels)
        best = torch.minimum(found, best)

    places = range(labels.shape[1])
    for place in places:
        for label in range(classes):
            changed = labels.clone()
            changed[:, place] = label
            kept_if_better(changed)
    for one, other in combinations(places, 2) if len(places) <= _FEW else ():
        swapped = labels.clone()
        swapped[:, [one, other]] = labels[:, [other, one]]
        kept_if_better(swapped)
    return labels
