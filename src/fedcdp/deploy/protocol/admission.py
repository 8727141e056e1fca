"""Which updates a server admits: those that the method could have made, and no others.

A client may be broken or hostile. What is not finite, has other shapes or belongs to another round is left out as it is read
(`messages.read_reply`); here, what is too large. An update that passes may still be poison within those bounds: that is not
what this is against.

Nothing that a client says moves its own bound. A step's sum is divided by min(B, N_i), so a client with few records makes larger
updates, and one that only says so would be admitted with up to B times the norm. So the bound is that of a client with
`smallest_records` records, the same for all clients: the server sets this number, and takes on no client with fewer. An honest
client has at least as many, divides by at least as much, fills at most S slots, and so stays below the bound. Whether a
client lies about its own records changes nothing here. It changes nothing in the server's ε, either, which is stated for
clients with `smallest_records` records or any number above (`server`): to say less ends in a refusal.

| method | the largest norm that is admitted |
| --- | --- |
| Fed-CDP | what L steps of clipped, noised gradients can sum up to, but for a chance of 1e-9 |
| Fed-SDP, noise at the client | the clip bound and the noise, but for a chance of 1e-9 |
| Fed-SDP, noise at the server | any: the server clips. A bound that looks at the other clients' updates would let one client decide whether another's counts, and void the sensitivity that the noise is made for |
| non-private, DSSGD | 100 times (or as set) the median norm of the round's updates |
"""  # noqa: E501

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import torch

from fedcdp.config.plan import Plan
from fedcdp.deploy.protocol.local_round import Round
from fedcdp.deploy.protocol.messages import Update
from fedcdp.errors import WireError
from fedcdp.files.tree import Layout, Tree
from fedcdp.mechanism.clipping import sensitivity
from fedcdp.mechanism.noise import deviation_of_count, deviation_of_step_sum

_TAIL = math.sqrt(2 * math.log(2e9))  # deviations that a Gaussian exceeds with a chance of 1e-9 at most
_ROUNDING = 1.01


def is_counted(plan: Plan) -> bool:
    """Whether clients send a count beside their update."""
    return plan.quantile is not None and (plan.per_example or plan.noise_at == "client")


def check_size(sent: Update, plan: Plan, layout: Layout, asked: Round, smallest_records: int) -> None:
    """Refuse an update, or a count, that no client with so many records or more can have made (`WireError`)."""
    norm, most = norm_of(sent.update), largest_norm(plan, layout, asked, smallest_records)
    if norm > most:
        raise WireError(f"its update is enormous: its norm is {norm:.3g}, and the method's at most {most:.3g}")
    if sent.count is not None and abs(sent.count) > (allowed := largest_count(plan)):
        raise WireError(f"its count is enormous: {sent.count:.3g}, and the method's at most {allowed:.3g}")


def largest_norm(plan: Plan, layout: Layout, asked: Round, smallest_records: int) -> float:
    """The largest norm that an update of this plan has, but for a chance of 1e-9; infinite where there is no bound."""
    if not plan.private or (plan.method == "fed-sdp" and plan.noise_at == "server"):
        return math.inf
    together = sensitivity(plan.clip_at(asked.number, asked.clip), len(layout.groups(plan.clip_mode)))
    # The norm of d Gaussians exceeds √d + t with a chance of at most exp(−t²/2).
    spread = math.sqrt(layout.size) + _TAIL
    if plan.method == "fed-sdp":
        return _ROUNDING * (together + plan.noise_scale_at(asked.number, asked.clip) * spread)
    clipped = plan.local_steps * plan.slots * together
    noise = math.sqrt(plan.local_steps) * deviation_of_step_sum(plan, asked.number, asked.clip) * spread
    # Under momentum a step's gradient counts again in the steps after it: 1 + β + β² + … times in all, at most.
    rate = plan.learning_rate_at(asked.number) / min(plan.batch_size, smallest_records) / (1 - plan.momentum)
    return _ROUNDING * rate * (clipped + noise)


def largest_count(plan: Plan) -> float:
    """The largest sum of indicators, each from −½ to ½, that a client sends, but for a chance of 1e-9."""
    if plan.method == "fed-sdp":
        return 0.5 + plan.quantile_noise * _TAIL
    return plan.slots / 2 + deviation_of_count(plan) * _TAIL


def outliers(updates: Mapping[int, Update], plan: Plan, ratio: float) -> dict[int, str]:
    """Whose updates are out of all proportion to the others', and why; only where nothing is private anyway."""
    if plan.private or not updates:
        return {}
    norms = {client: norm_of(sent.update) for client, sent in updates.items()}
    usual = statistics.median_low(norms.values())
    most = ratio * usual if usual > 0 else math.inf
    return {
        client: f"its update is enormous: its norm is {norm:.3g}, and the cohort's median {usual:.3g}"
        for client, norm in norms.items()
        if norm > most
    }


def norm_of(update: Tree) -> float:
    """The norm of a whole update, which does not overflow where a float32 would."""
    norms: Sequence[float] = [float(torch.linalg.vector_norm(value, dtype=torch.float64)) for value in update.values()]
    return math.hypot(*norms)
