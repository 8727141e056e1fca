"""Fed-CDP: per-example client differential privacy (Wei et al., ICDCS 2021, Algorithm 2).

Fed-CDP(decay) is the same algorithm under a plan whose clip bound decays.
"""

from __future__ import annotations

from torch import Tensor

from fedcdp.clipping import clip
from fedcdp.engine.base import Batch
from fedcdp.methods.base import Method, Moment
from fedcdp.methods.noised_examples import NoisedExamples, noise_each
from fedcdp.methods.quantile import count_examples
from fedcdp.noise import noised
from fedcdp.plan import Plan
from fedcdp.tree import Tree


class FedCDP(Method):
    """Every example's gradient is clipped layer by layer and noised before anything else touches it.

    Guarantees: a step's sum has L2 sensitivity C·√M (C flat) when a record is zeroed out, and carries Gaussian noise of
    `deviation_of_step_sum` a coordinate, whatever the batch. Under `example` noise that is one independent N(0, (σC)²)
    for each of the S slots, so that a reader of single examples meets noise too; under `batch` and `cohort` noise such a
    reader sees gradients that are only clipped.

    If the bound follows a quantile, the first step of a round also releases a sum of indicators, whose sensitivity is ½
    and whose noise follows the same convention (`quantile.count_examples`).
    """

    def gradient_sum(self, weights: Tree, batch: Batch, at: Moment) -> Tree:
        """The sum of a step's sanitised gradients."""
        return self.counted_sum(weights, batch, at)[0]

    def counted_sum(self, weights: Tree, batch: Batch, at: Moment) -> tuple[Tree, Tensor | None]:
        """The sum of a step's sanitised gradients; in the first step, also of the indicators of a quantile clip."""
        counted = at.plan.quantile is not None and at.step == 0
        if isinstance(at.engine, NoisedExamples):  # somebody may read along on this client: lines 6-14 inside the engine
            released, within = at.engine.released(weights, batch, at, counted)
            at.show("type2", released)
            if within is not None:
                at.show("type2-count", {"within": within})
            return _sum(released), None if within is None else within.sum(1)
        if at.tap is None and not counted:  # nobody looks at a single example: lines 6-12 at once, then line 14
            return _noised(at.engine.clipped_sum(weights, batch, at.groups, at.clip_bound), at), None
        gradients = at.engine.per_example_gradients(weights, batch)  # lines 6-7
        count = count_examples(gradients, batch.present, at) if counted else None
        clipped = clip(gradients, at.groups, at.clip_bound, batch.present).values  # lines 8-12
        return _noised_sum(clipped, at), count

    def planned_count(self, plan: Plan) -> int:
        """K_t batches of B examples."""
        return plan.per_round * plan.batch_size


def _noised_sum(clipped: Tree, at: Moment) -> Tree:
    if at.plan.noise == "example" and at.tap is not None:
        released = noise_each(clipped, at)  # line 14, one by one, for somebody reads the examples
        at.show("type2", released)
        return _sum(released)
    at.show("type2", clipped)
    return _noised(_sum(clipped), at)


def _noised(total: Tree, at: Moment) -> Tree:
    """Line 14, in one draw of the summed variance."""
    return noised(total, at.noise.for_step(at.round, at.clients, at.step, at.step_deviation))


def _sum(examples: Tree) -> Tree:
    return {name: value.sum(1) for name, value in examples.items()}
