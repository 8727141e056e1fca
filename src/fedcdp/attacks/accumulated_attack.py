"""Attack on all rounds of a training: the example that best explains everything that was seen of it.

A record is used in many rounds. The noise is fresh in each of them, and the weights are known. So the adversary maximises
Σ_r log p(g̃_r | x, W_r) over the example x, with the clip bound and the noise of every round, and with the distribution of
public examples of a class as the prior. Among candidates, the same sum is the exact likelihood-ratio test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedcdp.attacks.accumulation import Accumulation
from fedcdp.attacks.candidate_pool import POOL, CandidatePool, log_likelihoods, measured, own_log_likelihoods
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.objectives import check_reproduces
from fedcdp.attacks.recipe import Recipe
from fedcdp.attacks.reconstruct import Progress, Reconstruction, Watch, reconstruct
from fedcdp.data.dataset import Dataset
from fedcdp.errors import DataError


@dataclass(frozen=True)
class AccumulatedFound:
    """The results for all victims."""

    found: Reconstruction
    identified: Tensor | None
    """[victims, 1]: whether the true example was the most likely candidate; None for updates of several examples."""
    candidates: int
    quiet: int
    """How many observations carry clearly less noise than promised."""

    def figures(self, leaks: Leaks, seen: Accumulation) -> Leaks:
        """Add how often and where the victims were observed, and the identification rate."""
        about = {
            "source": seen.source,
            "releases_mean": float(seen.releases.double().mean()),
            "rounds_observed": seen.rounds,
            "rounds_of_training": seen.rounds_of,
            "noise_deviation_accumulated": float(seen.deviation.square().mean().sqrt()),
            "quiet_observations": self.quiet,
        }
        if leaks.scores is None or self.identified is None:
            return replace(leaks, about=about)
        scores = replace(leaks.scores, identified=self.identified & leaks.scores.present, candidates=self.candidates)
        return replace(leaks, scores=scores, about=about | {"identified_by_likelihood": True})


def attack_accumulated(
    seen: Accumulation,
    recipe: Recipe,
    public: Dataset | None,
    classes: int,
    *,
    candidates: int,
    value_range: tuple[float, float],
    seed: int = 0,
    chunk: int | None = None,
    watch: Watch | None = None,
    progress: Progress | None = None,
) -> AccumulatedFound:
    """Search for each victim's examples in all observations, and identify single examples among candidates.

    `public` are examples like the victims', and none of them is a victim's. Without any noise the prior is not needed: the
    search then looks at all values.
    """
    captured, observations = seen.captured, seen.observations
    if public is None:
        raise DataError("public: accumulated needs public examples, none of them a victim's")
    for each in observations:
        check_reproduces(each.captured)
    single, count = captured.most == 1, len(captured)
    size = max(POOL, candidates - 1)
    pool = CandidatePool.of(public, observations, count, seed, single=single, size=size)
    observations, quiet = measured(observations, pool)
    if quiet and single:
        pool = replace(pool, scores=log_likelihoods(observations, count, pool.inputs, pool.targets))
    identified, among = None, 1
    if single:
        others = pool.scores[:, : candidates - 1]
        own = own_log_likelihoods(observations, captured.tensor[:, 0], captured.targets[:, 0])
        identified, among = (own > others.amax(1))[:, None], 1 + others.shape[1]
    noisy = any(each.captured.noisy for each in observations)
    found = reconstruct(
        captured, recipe if noisy else recipe.but(space="free"), classes, seed=seed, value_range=value_range, public=public,
        observations=observations, pool=pool, chunk=chunk, watch=watch, progress=progress,
    )  # fmt: skip
    return AccumulatedFound(found, identified, among, quiet)
