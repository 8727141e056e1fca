"""Admission: which updates a server accepts, namely those that the method could have produced.

A client may be broken or hostile. Updates that are not finite, have other shapes or belong to another round are rejected
during parsing (`messages.read_reply`); this module rejects updates that are too large. An admitted update may still be
malicious within those bounds: this check does not protect against poisoning.

The noise is most of an honest update's norm, and spreads over all its coordinates. So each tensor has a bound of its own as
well: otherwise a client could put the room for all noise into one small tensor, such as the last layer's bias.

A client's statements never change its own bound. A step's sum is divided by min(B, N_i), so a client with few records
produces larger updates, and a client that merely claims few records would be admitted with up to B times the norm. The bound
is therefore that of a client with `smallest_records` records, the same for all clients. The server sets this number, and
admits no client with fewer. An honest client has at least as many records, divides by at least as much, fills at most S
slots, and so stays below the bound. Whether a client lies about its own records changes nothing here. It does not change the
server's ε, either, which is stated for clients with `smallest_records` records or any number above (`server`): a client that
states fewer is refused.

Where updates are weighted by records, a client multiplies its update by N_i / mean_records, so an honest client with many
records sends a large one. Its bound is that of the number of records that it stated when it subscribed. For up to B records
the bound is the same, since the weight cancels the divisor. A client that claims more is admitted with a larger norm, but
none may claim more than `most_records`, which the server sets as well (`roster.subscribe`).

| method | the largest admitted norm |
| --- | --- |
| Fed-CDP | what L steps of clipped, noised gradients can sum up to, except with probability 1e-9 |
| Fed-SDP, noise at the client | the clip bound and the noise, except with probability 1e-9 |
| Fed-SDP, noise at the server | any: the server clips. A bound that depends on the other clients' updates would let one client decide whether another's counts, and would void the sensitivity that the noise is scaled to |
| non-private, DSSGD | 100 times (or as configured) the median norm of the round's updates |
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

_TAIL = math.sqrt(2 * math.log(2e9))  # standard deviations that a Gaussian exceeds with probability at most 1e-9
_ROUNDING = 1.01


def is_counted(plan: Plan) -> bool:
    """Whether clients send a count with their update."""
    return plan.quantile is not None and (plan.per_example or plan.noise_at == "client")


def check_size(
    sent: Update, plan: Plan, layout: Layout, asked: Round, smallest_records: int, stated_records: int | None = None
) -> None:
    """Raise `WireError` for an update or a count that no client with `smallest_records` records or more can have made.

    Where updates are weighted by records, it is a client with `stated_records`.
    """
    norm, most = norm_of(sent.update), largest_norm(plan, layout, asked, smallest_records, stated_records)
    if norm > most:
        raise WireError(f"its update is too large: its norm is {norm:.3g}; the method allows at most {most:.3g}")
    for name, value in sent.update.items():
        norm, most = norm_of({name: value}), largest_norm(plan, layout, asked, smallest_records, stated_records, part=name)
        if norm > most:
            raise WireError(f"its update is too large in {name}: {norm:.3g}; the method allows at most {most:.3g}")
    if sent.count is not None and abs(sent.count) > (allowed := largest_count(plan)):
        raise WireError(f"its count is too large: {sent.count:.3g}; the method allows at most {allowed:.3g}")


def largest_norm(
    plan: Plan,
    layout: Layout,
    asked: Round,
    smallest_records: int,
    stated_records: int | None = None,
    part: str | None = None,
) -> float:
    """The largest norm of an update of this plan, except with probability 1e-9; infinite if there is no bound.

    With the name of a tensor as `part`, that of this tensor, which is clipped with its group and has only its own noise.
    """
    if not plan.private or (plan.method == "fed-sdp" and plan.noise_at == "server"):
        return math.inf
    groups = 1 if part is not None else len(layout.groups(plan.clip_mode))
    together = sensitivity(plan.clip_at(asked.number, asked.clip), groups)
    # The norm of d Gaussians exceeds √d + t with probability at most exp(−t²/2).
    spread = math.sqrt(layout.size if part is None else layout.shapes[part].numel()) + _TAIL
    if plan.method == "fed-sdp":
        return _ROUNDING * (together + plan.noise_scale_at(asked.number, asked.clip) * spread)
    clipped = plan.local_steps * plan.slots * together
    noise = math.sqrt(plan.local_steps) * deviation_of_step_sum(plan, asked.number, asked.clip) * spread
    # With momentum a step's gradient counts again in later steps: 1 + β + β² + … times in total, at most. A proximal term
    # with ημ < 1, which every plan has, only takes some of that back.
    rate = plan.learning_rate_at(asked.number) / (1 - plan.momentum)
    if plan.weighting == "equal":
        return _ROUNDING * rate / min(plan.batch_size, smallest_records) * (clipped + noise)
    assert plan.mean_records is not None  # in every task
    records = smallest_records if stated_records is None else stated_records
    return _ROUNDING * rate * records / plan.mean_records / min(plan.batch_size, records) * (clipped + noise)


def largest_count(plan: Plan) -> float:
    """The largest sum of indicators, each from −½ to ½, that a client sends, except with probability 1e-9."""
    if plan.method == "fed-sdp":
        return 0.5 + plan.quantile_noise * _TAIL
    return plan.slots / 2 + deviation_of_count(plan) * _TAIL


def outliers(updates: Mapping[int, Update], plan: Plan, ratio: float) -> dict[int, str]:
    """The clients whose updates are far larger than the others', with the reason; only for non-private methods."""
    if plan.private or not updates:
        return {}
    norms = {client: norm_of(sent.update) for client, sent in updates.items()}
    usual = statistics.median_low(norms.values())
    most = ratio * usual if usual > 0 else math.inf
    return {
        client: f"its update is too large: its norm is {norm:.3g}; the cohort's median is {usual:.3g}"
        for client, norm in norms.items()
        if norm > most
    }


def norm_of(update: Tree) -> float:
    """The norm of a whole update, computed without float32 overflow."""
    norms: Sequence[float] = [float(torch.linalg.vector_norm(value, dtype=torch.float64)) for value in update.values()]
    return math.hypot(*norms)
