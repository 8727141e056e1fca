"""Candidates: public examples, weighted by how well each explains what an adversary observed of single examples.

Under Gaussian noise of standard deviation τ, the log-likelihood of a candidate x is −|seen − g(x)|² / 2τ², with the method's
own release g(x), summed over all observations of a victim. It is exact, so no other test picks an example out better. The
weighted candidates are the adversary's posterior knowledge if the victim's example is like a public one. They tell its
label, and where a search should start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcdp.attacks.objectives import predicted, prunes
from fedcdp.attacks.observations import Observation
from fedcdp.attacks.observe import Captured
from fedcdp.data.dataset import Dataset
from fedcdp.engine.runtime import stop_if_asked
from fedcdp.files.tree import Inputs, each_tensor
from fedcdp.mechanism.randomness import numpy_generator, stream_key, words

POOL = 1000
"""How many public examples are compared with an observation."""
LEAST_NOISE = 1e-3
"""The least standard deviation that a likelihood assumes: rounding errors, and examples that are only like public ones."""
_AT_ONCE = {"cpu": 100, "cuda": 500}  # candidates
_SURPRISING, _AT_MOST = 6.0, 0.9  # in standard deviations of the measured noise; as a share of the promised noise


@dataclass(frozen=True)
class CandidatePool:
    """Public examples, and the log-likelihood of each for every victim."""

    inputs: Tensor
    """[candidates, ...]."""
    targets: Tensor
    """[candidates, ...]."""
    scores: Tensor
    """[victims, candidates], up to a constant for each victim; zeros if candidates cannot be compared one by one."""

    @staticmethod
    def of(
        public: Dataset, observations: Sequence[Observation], victims: int, seed: int, *, single: bool, size: int = POOL
    ) -> CandidatePool:
        """Draw candidates and compare them with the observations, if these are of single examples."""
        order = numpy_generator(seed, "candidate-pool").permutation(len(public))[:size]
        some = public.take(torch.from_numpy(order))
        device = observations[0].captured.device
        inputs, targets = some.tensor.to(device), some.targets.to(device)
        scores = torch.zeros(victims, len(inputs), dtype=torch.float64, device=device)
        if single:
            scores = log_likelihoods(observations, victims, inputs, targets)
        return CandidatePool(inputs, targets, scores)

    def take(self, victims: Tensor) -> CandidatePool:
        """The pool of some victims."""
        return CandidatePool(self.inputs, self.targets, self.scores[victims])

    def labels(self, classes: int) -> Tensor:
        """[victims, 1]: the label with the largest posterior probability."""
        each = torch.zeros(len(self.scores), classes, dtype=self.scores.dtype, device=self.scores.device)
        each.index_add_(1, self.targets, self.scores.softmax(1))
        return each.argmax(1)[:, None]

    def start(self, labels: Tensor | None, who: Tensor, dummies: int, seed: int, restart: int) -> Tensor:
        """Where searches for the victims `who` begin [victims, dummies, ...], for labels [victims, dummies].

        The first search for a single example begins at the posterior mean of the candidates with its label. Others begin at
        a candidate drawn from the posterior.
        """
        shape = (len(self.scores), dummies, len(self.inputs))
        scores = self.scores[:, None].expand(shape)
        if labels is not None:
            same = labels[..., None] == self.targets
            scores = scores.masked_fill(~same & same.any(2, keepdim=True), -torch.inf)
        if restart == 0 and dummies == 1:
            weights = scores.softmax(2).float()
            return (weights @ self.inputs.flatten(1)).view(*shape[:2], *self.inputs.shape[1:])
        drawn = words(stream_key(seed, "candidates"), who, restart, 0, dummies * len(self.inputs)).double()
        uniform = ((drawn + 0.5) / 2**32).view(shape)
        return self.inputs[(scores - (-uniform.log()).log()).argmax(2)]  # the largest of Gumbel-perturbed scores


def log_likelihoods(observations: Sequence[Observation], victims: int, inputs: Inputs, targets: Tensor) -> Tensor:
    """[victims, candidates]: the log-likelihood of candidates over all observations, up to a constant for each victim."""
    total = torch.zeros(victims, len(targets), dtype=torch.float64, device=observations[0].captured.device)
    for each in observations:
        stop_if_asked()
        total.index_add_(0, each.who, matched_filters(each.captured, inputs, targets) / _variance(each.captured)[:, None])
    return total


def own_log_likelihoods(observations: Sequence[Observation], inputs: Inputs, targets: Tensor) -> Tensor:
    """[victims]: as `log_likelihoods`, of one candidate for each victim."""
    total = torch.zeros(len(targets), dtype=torch.float64, device=observations[0].captured.device)
    for each in observations:
        mine = each_tensor(inputs, lambda value: value[each.who])  # noqa: B023
        filtered = own_matched_filters(each.captured, mine, targets[each.who])
        total.index_add_(0, each.who, filtered / _variance(each.captured))
    return total


def _variance(captured: Captured) -> Tensor:
    return captured.deviation.double().clamp(min=LEAST_NOISE).square()


def measured(observations: Sequence[Observation], pool: CandidatePool) -> tuple[list[Observation], int]:
    """The observations with the noise that they carry, where this is clearly less than promised; and how many these are.

    The noise on thousands of coordinates shows how large it is. What is left of an observation after the likeliest candidate
    is subtracted is noise, up to the difference to the true example. A round without noise would otherwise be weighed as if
    it had some.
    """
    likeliest = pool.scores.argmax(1)
    found, quiet = [], 0
    for each in observations:
        captured, mine = each.captured, likeliest[each.who]
        seen = _flat(captured)
        left = seen
        if captured.most == 1:
            left = (seen - _shown(captured, pool.inputs[mine], pool.targets[mine])) * _compared(captured)
        spread = left.square().mean(1).sqrt()
        surprising = 1 - _SURPRISING / math.sqrt(2 * seen.shape[1])
        less = spread < captured.deviation * min(surprising, _AT_MOST)
        quiet += int(less.sum())
        found.append(replace(each, captured=replace(captured, deviation=torch.where(less, spread, captured.deviation))))
    return found, quiet


def matched_filters(captured: Captured, inputs: Inputs, targets: Tensor, seen: Tensor | None = None) -> Tensor:
    """[victims, candidates]: ⟨observation, noiseless release of the candidate⟩ − |the latter|² / 2.

    Instead of the captured observations, those in `seen` [victims, coordinates] are compared.
    """
    seen, compared = _flat(captured) if seen is None else seen, _compared(captured)
    groups = [torch.arange(len(captured), device=captured.device)]
    if not _alike(captured):
        groups = list(groups[0].split(1))
    found = torch.zeros(len(captured), len(targets), dtype=torch.float64, device=captured.device)
    at_once = _AT_ONCE.get(captured.device.type, 100)
    for some in torch.arange(len(targets)).split(at_once):
        few = each_tensor(inputs, lambda value: value[some.to(value.device)].to(captured.device))  # noqa: B023
        for mine in groups:
            alike = captured.take(mine[:1].expand(len(some)))
            shown = _shown(alike, few, targets[some.to(targets.device)])
            squares = (compared[mine] if compared.shape[0] > 1 else compared) @ shown.square().T
            found[mine[:, None], some.to(found.device)] = seen[mine] @ shown.T - squares / 2
    return found


def own_matched_filters(captured: Captured, inputs: Inputs, targets: Tensor, seen: Tensor | None = None) -> Tensor:
    """[victims]: as `matched_filters`, of one candidate for each victim."""
    seen, found = _flat(captured) if seen is None else seen, []
    for some in torch.arange(len(captured), device=captured.device).split(_AT_ONCE.get(captured.device.type, 100)):
        part = captured.take(some)
        shown = _shown(part, each_tensor(inputs, lambda value: value[some]), targets[some])  # noqa: B023
        found.append(((seen[some] - shown / 2) * shown * _compared(part)).sum(1))
    return torch.cat(found)


def _alike(captured: Captured) -> bool:
    """Whether a candidate has the same release for all victims."""
    same = [captured.expected_batch, captured.client_weight, captured.used.permute(1, 0, 2).flatten(1)]
    return captured.weights_shared and all(bool((each == each[:1]).all()) for each in same)


def _shown(captured: Captured, inputs: Inputs, targets: Tensor) -> Tensor:
    """[victims, coordinates]: the noiseless release of one example for each victim."""
    alone = each_tensor(inputs, lambda value: value[:, None])
    with torch.no_grad():
        tree = predicted(captured, "method", alone, targets.to(captured.device)[:, None], captured.present)
    return captured.engine.layout.flatten(tree, lead=1).double()


def _flat(captured: Captured) -> Tensor:
    return captured.engine.layout.flatten(captured.seen, lead=1).double()


def _compared(captured: Captured) -> Tensor:
    """[victims or 1, coordinates]: which coordinates are compared: those that were sent."""
    seen = _flat(captured)
    return (seen != 0).double() if prunes(captured) else seen.new_ones(1, seen.shape[1])
