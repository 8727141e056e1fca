"""One participation: the local training of some clients in a round, and what they then send."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fedcdp.engine.base import Batch
from fedcdp.files.tree import Tree, repeat
from fedcdp.methods.base import Local, Method, Moment, Sent
from fedcdp.methods.quantile import clip_rule


def take_part(method: Method, weights: Tree, batches: Iterable[Batch], at: Moment) -> Sent:
    """Run L local iterations of every client from the global weights W(t); return what the clients send."""
    return take_part_from(method, repeat(weights, len(at.clients)), batches, at)


def take_part_from(method: Method, before: Tree, batches: Iterable[Batch], at: Moment) -> Sent:
    """The same, where each client has a global model of its own [clients, ...]: that of its federation."""
    local = Local(before, start=before)
    for step, batch in enumerate(batches):
        now = replace(at, step=step)
        now.show("local-weights", local.weights)
        local = method.local_step(local, batch, now)
    return leave(method, before, local, at)


def leave(method: Method, before: Tree, local: Local, at: Moment) -> Sent:
    """What clients send after their local steps."""
    sent = Sent(method.release(before, local, at), clip_rule(at.plan).leaving(before, local, at))
    if not at.plan.secure_aggregation:  # else the server reads only the sum of the round (`aggregation.server_update`)
        at.show("type0", sent.update)
    if sent.count is not None:
        for reader in ("type1-count", "type0-count"):
            at.show(reader, {"within": sent.count})
    return sent


def train_locally(method: Method, weights: Tree, batches: Iterable[Batch], at: Moment) -> Tree:
    """`take_part`, returning only the updates [clients, ...]."""
    return take_part(method, weights, batches, at).update
