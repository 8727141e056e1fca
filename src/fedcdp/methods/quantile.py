"""The clip bound of the next round: scheduled, or privately following a quantile of the norms (Andrew et al.,
"Differentially private learning with adaptive clipping", NeurIPS 2021).

The Fed-CDP paper suggests the median norm as the bound. A median computed directly depends on the data, and no finite ε
holds. Here each example (Fed-CDP, in the first local step of a round) or each client (Fed-SDP) reports only whether its
norm lay within the bound, and the report is noised. The noised sum moves the bound: C · exp(−η · (share within C − γ)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedcdp.config.plan import Plan
from fedcdp.files.tree import Tree, masked
from fedcdp.mechanism.clipping import group_norms
from fedcdp.mechanism.noise import deviation_of_count
from fedcdp.methods.base import Local, Moment, Sent, raw_update


def clip_rule(plan: Plan) -> ClipRule:
    """The rule for a plan: who counts, who adds the noise, and how many indicators a round is planned to have."""
    if plan.quantile is None:
        return ClipRule()
    if plan.per_example:
        return ExamplesCount()
    return ClientsCount() if plan.noise_at == "client" else ServerCounts()


class ClipRule:
    """A scheduled bound: nothing is counted."""

    def leaving(self, before: Tree, local: Local, at: Moment) -> Tensor | None:  # noqa: ARG002
        """The noised indicators [clients] that clients send along with their updates."""
        return None

    def admitted(self, sent: Sent, at: Moment) -> Tensor | None:  # noqa: ARG002
        """The indicators [clients] that the server adds up."""
        return sent.count

    def sanitised(self, total: float, at: Moment) -> float:  # noqa: ARG002
        """The sum of the indicators in the form that the server uses."""
        return total

    def planned(self, plan: Plan) -> int:
        """The planned number of indicators in a round: the divisor of their sum, however many arrived."""
        return plan.per_round

    def next_bound(self, total: float, at: Moment) -> float | None:
        """The next round's clip bound, from the sum of the admitted indicators; None if it is scheduled.

        The share within the bound is ½ + (Σ indicators, sanitised) / their planned number. A missing indicator (a client
        that dropped out, a client with fewer than B records, a record that could not be used) counts as half within and
        pulls the share towards ½.
        """
        if at.plan.quantile is None:
            return None
        within = 0.5 + self.sanitised(total, at) / self.planned(at.plan)
        return at.plan.quantile.moved(at.clip_bound, within, at.plan.quantile_rate)


class ExamplesCount(ClipRule):
    """Fed-CDP: the examples of a round's first local step report whether they lay within the bound, noised as their
    gradients are."""

    def leaving(self, before: Tree, local: Local, at: Moment) -> Tensor | None:  # noqa: ARG002
        """The count of the first local step."""
        return local.count

    def planned(self, plan: Plan) -> int:
        """K_t batches of B examples."""
        return plan.per_round * plan.batch_size


class ClientsCount(ClipRule):
    """Fed-SDP with noise at the client: each sends its own indicator, noised."""

    def leaving(self, before: Tree, local: Local, at: Moment) -> Tensor:
        """The indicator of each client's raw update, noised."""
        noise = at.noise.for_count(at.round, at.clients, at.plan.quantile_noise)
        return count_clients(raw_update(before, local.weights, at), at) + noise


class ServerCounts(ClipRule):
    """Fed-SDP with noise at the server: the server counts the raw updates that it received and noises the sum."""

    def admitted(self, sent: Sent, at: Moment) -> Tensor:
        """The indicator of each received update."""
        return count_clients(sent.update, at)

    def sanitised(self, total: float, at: Moment) -> float:
        """Noise the sum once, regardless of which clients took part."""
        return total + at.noise.for_server_count(at.round, at.clients.device, at.plan.quantile_noise)


def counts_examples(at: Moment) -> bool:
    """Whether the examples of this local step are counted."""
    return at.plan.per_example and at.plan.quantile is not None and at.step == 0


def indicators(values: Tree, present: Tensor, at: Moment) -> Tensor:
    """For each entry, the share of its groups with norm ≤ C, minus ½; zero for an entry that clipping would drop.

    Guarantees: a number in [−½, ½]. Zeroing out one record changes the sum over a step by at most ½; zeroing out a client
    changes it by at most S/2 (its step's sum) or ½ (its update).
    """
    norms = torch.stack(group_norms(values, at.groups, present.dim()))
    usable = present & torch.isfinite(norms).all(0)
    return masked((norms <= at.clip_bound).double().mean(0) - 0.5, usable)


def count_examples(gradients: Tree, present: Tensor, at: Moment) -> Tensor:
    """The noised sum of a step's indicators [clients], under the same noise convention as its gradients."""
    raw = indicators(gradients, present, at)
    if at.plan.noise == "example" and at.tap is not None:
        released = noise_of_indicators(at)
        released[:, : raw.shape[1]] += raw
        at.show("type2-count", {"within": released})
        return released.sum(1)
    at.show("type2-count", {"within": raw})
    return raw.sum(1) + at.noise.for_count(at.round, at.clients, deviation_of_count(at.plan))


def noise_of_indicators(at: Moment) -> Tensor:
    """The noise of each slot's indicator [clients, slots], spread over the slots like that of their gradients."""
    noise, units = at.noise.for_indicators(at.round, at.clients, at.plan.slots, at.plan.quantile_noise), at.slot_noise
    return noise if units is None else noise * units


def count_clients(update: Tree, at: Moment) -> Tensor:
    """The indicator of each client's update [clients], without noise."""
    return indicators(update, torch.ones_like(at.clients, dtype=torch.bool), at)
