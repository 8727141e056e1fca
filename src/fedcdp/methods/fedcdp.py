"""Fed-CDP: per-example client differential privacy (Wei et al., ICDCS 2021, Algorithm 2).

Fed-CDP(decay) is the same algorithm under a plan whose clip bound decays.

By default the method asks its engine for clipped gradients, or for their sum, and adds the noise afterwards. The release
is the same, but between the two steps an adversary on the client can read gradients that are only clipped. A type-2
adversary (`example`) is in that position. With `NoisedExamples` as its engine, the method receives no gradient without
noise and no sum of such gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from fedcdp.engine.base import Batch, Engine
from fedcdp.errors import DefectError
from fedcdp.files.tree import Tree
from fedcdp.mechanism.clipping import clip
from fedcdp.mechanism.noise import noised
from fedcdp.mechanism.secure_sum import from_integers
from fedcdp.methods.base import GradientSum, Local, Method, Moment, noised_share
from fedcdp.methods.quantile import count_examples, counts_examples, indicators, noise_of_indicators


class FedCDP(Method):
    """Every example's gradient is clipped layer by layer and noised before anything else touches it.

    Guarantees: a step's sum has L2 sensitivity C·√M (C if clipped flat) when a record is zeroed out, and carries Gaussian
    noise with standard deviation `deviation_of_step_sum` on every coordinate, whatever the batch. Under `example` noise
    this is one independent N(0, (σC)²) for each of the S slots (`Moment.slot_noise`: more noise on fewer slots at a client
    with few records), so an adversary who reads per-example gradients also sees noise. Under `batch` and `cohort` noise such
    an adversary sees gradients that are only clipped.

    If the bound follows a quantile, the first step of a round also releases a sum of indicators, whose sensitivity is ½
    and whose noise follows the same convention (`quantile.count_examples`).

    Under `sum` noise the one local step releases the undivided sum of clipped gradients in whole numbers, with a share of
    the noise (`base.noised_share`). The shares of all honest clients together are the noise of the guarantee. The server
    divides by the planned number of records, so every record weighs the same.
    """

    def local_step(self, local: Local, batch: Batch, at: Moment) -> Local:
        """One local iteration; under `sum` noise, only the sum of clipped gradients."""
        if not at.plan.sums:
            return super().local_step(local, batch, at)
        return replace(local, total=self.gradient_sum(local.weights, batch, at).total)

    def release(self, before: Tree, local: Local, at: Moment) -> Tree:
        """The client's update; under `sum` noise, the noised sum of its clipped gradients in whole numbers."""
        if local.total is None:
            return super().release(before, local, at)
        share = noised_share(local.total, at)
        at.show("type1", share)
        return share

    def sanitise_sum(self, total: Tree, at: Moment) -> Tree:
        """Under `sum` noise, −η times the decoded sum over the public mean number of records of a client."""
        if not at.plan.sums:
            return total
        assert at.mean_records is not None
        step = -at.learning_rate / at.mean_records
        return {name: step * value for name, value in from_integers(total, at.clip_bound).items()}

    def gradient_sum(self, weights: Tree, batch: Batch, at: Moment) -> GradientSum:
        """The sum of a step's sanitised gradients; in the first step, also the sum of the indicators of a quantile clip.

        Under `sum` noise the sum is in float64 and only clipped: `release` adds the noise to its whole numbers.
        """
        if isinstance(at.engine, NoisedExamples):  # an adversary may be on this client: lines 6-14 run inside the engine
            released, within = at.engine.released(weights, batch, at)
            at.show("type2", released)
            if within is not None:
                at.show("type2-count", {"within": within})
            return GradientSum(_sum(released), None if within is None else within.sum(1))
        if at.tap is None and not counts_examples(at):  # no observer of single examples: lines 6-12 at once, then line 14
            clipped = at.engine.clipped_sum(weights, batch, at.groups, at.clip_bound, exact=at.plan.sums)
            return GradientSum(_noised(clipped, at))
        gradients = at.engine.per_example_gradients(weights, batch)  # lines 6-7
        if at.plan.sums:
            gradients = {name: value.double() for name, value in gradients.items()}
        count = count_examples(gradients, batch.present, at) if counts_examples(at) else None
        clipped = clip(gradients, at.groups, at.clip_bound, batch.present).values  # lines 8-12
        return GradientSum(_noised_sum(clipped, at), count)


def _noised_sum(clipped: Tree, at: Moment) -> Tree:
    if at.plan.noise == "example" and at.tap is not None:
        released = noise_each(clipped, at)  # line 14 one by one, because the tap reads single examples
        at.show("type2", released)
        return _sum(released)
    at.show("type2", clipped)
    return _noised(_sum(clipped), at)


def _noised(total: Tree, at: Moment) -> Tree:
    """Line 14, in one draw with the summed variance; under `sum` noise, left to `release`."""
    if at.plan.sums:
        return total
    return noised(total, at.noise.for_step(at.round, at.clients, at.step, at.step_deviation))


def _sum(examples: Tree) -> Tree:
    return {name: value.sum(1) for name, value in examples.items()}


class NoisedExamples:
    """An engine that returns only gradients that were clipped and noised one by one.

    Guarantees: the result of `released` carries an independent N(0, (σC)²) on every coordinate of every slot, including
    empty ones (`Moment.slot_noise`: more noise on fewer slots at a client with few records); the sum over the slots has the
    same distribution as with one draw for the whole step. Raw gradients exist only inside the engine, for the duration of
    one step, and are not kept.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.model, self.layout, self.loss = engine.model, engine.layout, engine.loss
        self.outputs, self.check = engine.outputs, engine.check

    def released(self, weights: Tree, batch: Batch, at: Moment) -> tuple[Tree, Tensor | None]:
        """Lines 6 to 14 of Algorithm 2: noised gradients [clients, slots, ...], and noised indicators in a counting step."""
        gradients = self._engine.per_example_gradients(weights, batch)
        within = None
        if counts_examples(at):
            within = noise_of_indicators(at)
            within[:, : batch.present.shape[1]] += indicators(gradients, batch.present, at)
        return noise_each(clip(gradients, at.groups, at.clip_bound, batch.present).values, at), within

    def per_example_gradients(self, weights: Tree, batch: Batch) -> NoReturn:  # noqa: ARG002
        """Refused: they would have no noise."""
        raise _without_noise()

    def summed_gradients(self, weights: Tree, batch: Batch) -> NoReturn:  # noqa: ARG002
        """Refused, for the same reason."""
        raise _without_noise()

    def plain_sum(self, weights: Tree, batch: Batch) -> NoReturn:  # noqa: ARG002
        """Refused, for the same reason."""
        raise _without_noise()

    def clipped_sum(self, *_: object, **__: object) -> NoReturn:
        """Refused, for the same reason."""
        raise _without_noise()


def noise_each(clipped: Tree, at: Moment) -> Tree:
    """Add noise to every slot of the step, including the trailing empty slots that the batch omits."""
    noise = at.noise.for_examples(at.round, at.clients, at.step, at.plan.slots, at.noise_scale)
    if (units := at.slot_noise) is not None:
        noise = {name: value * units.view(*units.shape, *(1,) * (value.dim() - 2)) for name, value in noise.items()}
    slots = {}
    for name, value in clipped.items():
        clients, filled, *shape = value.shape
        slots[name] = torch.cat([value, value.new_zeros(clients, at.plan.slots - filled, *shape)], dim=1)
    return noised(slots, noise)


def _without_noise() -> DefectError:
    return DefectError("this engine returns no gradient without noise; the method must call released()")
