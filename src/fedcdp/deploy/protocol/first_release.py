"""The release before the first round: noised moments of every client's inputs, by which all inputs are standardised.

Who must not know what: nobody may learn a client's means and variances except through the noise of `mechanism.moments`, and
nobody may get two independent noised versions of them for the price of one.

A client releases its moments once for a task. It stores the noised sums in its own directory, then charges its ledger, and
only then do they leave. A server that asks again, after a crash or to average the noise away, gets the same values, and
nothing more is charged. A client that crashes before the charge has released nothing; it later uses the stored values.

The server adds the sums up, computes mean and scale (`standardisation`), and sends both with every round. They depend on
nothing but noised sums. A client takes them from the server like the weights. Its guarantee holds whatever they are, because
what it releases is clipped: a server that sends other values gains nothing.
"""

from __future__ import annotations

import logging
import math
import secrets
from pathlib import Path

import numpy as np
import torch
from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor

from fedcdp.accounting.budget import Releases
from fedcdp.config.plan import SCALING, Plan
from fedcdp.data.dataset import Dataset
from fedcdp.deploy.protocol import messages
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.local_round import Round
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.deploy.protocol.roster import Member, Roster, exchange
from fedcdp.errors import RefusedError, RunError, WireError
from fedcdp.files.tensors import load_tensors, save_tensors
from fedcdp.files.tree import Layout
from fedcdp.mechanism.moments import moment_sensitivity, noised_moments, standardisation
from fedcdp.mechanism.noise import noise_of

_LOG = logging.getLogger("flwr.fedcdp")
_FORM, _OWNER_ONLY = "moments-1", 0o600
_NEVER = 1e-9  # the probability that an honest client's sums are refused, at most


# The client ----------------------------------------------------------------------------------------------------------


def release_moments(
    policy: ClientPolicy, ledger: ClientLedger, digest: str, attempt: int, data: Dataset, client: int
) -> Tensor:
    """The noised moments [2·D] that a client sends, reserved and charged. The ledger must be held."""
    accepted = ledger.tasks[digest]
    plan, reproducible = accepted.task.plan, accepted.task.reproducible
    if plan.scaling_noise is None:
        raise RefusedError("the task does not standardise inputs")
    if isinstance(data.inputs, dict) or not data.inputs.is_floating_point():
        raise RefusedError("inputs here are token ids or several tensors, which have no means and variances")
    stored, length = ledger.path.parent / f"moments-{digest}.safetensors", 2 * math.prod(data.shape)
    if accepted.gave_moments:
        if not stored.exists():
            raise RefusedError("the moments of this task have been released, and are not stored here any more")
        return _load(stored, length)
    ledger.check(digest, SCALING, attempt)
    policy.reserve(digest, ledger, 0)
    if not stored.exists():
        noise = noise_of(plan if reproducible else plan.but(seed=secrets.randbits(63)), Layout({}, ()))
        sums = noised_moments(data.tensor.cpu(), client, noise, plan.scaling_noise)
        save_tensors(stored, {"sums": sums}, {"format": _FORM}, _OWNER_ONLY)
    sums = _load(stored, length)
    ledger.charge(digest, SCALING, attempt, moment_sensitivity(length // 2))
    return sums


def _load(path: Path, length: int) -> Tensor:
    sums = load_tensors(path, _FORM)[0].get("sums")
    if sums is None or sums.dtype != torch.float64 or tuple(sums.shape) != (length,):
        raise RunError(f"{path} does not hold the moments of this client's inputs")
    return sums


# The server ----------------------------------------------------------------------------------------------------------


def gather_moments(
    grid: Grid, task: str, plan: Plan, features: int, roster: Roster, releases: Releases, timeout: float
) -> tuple[tuple[Tensor, Tensor] | None, int]:
    """Ask every client for its noised moments, and compute what inputs are standardised by; `task` is the digest.

    The release is charged, for all clients, before anyone is asked. A client that does not answer, or whose sums an honest
    client could not have sent, is left out.

    Returns:
        Mean and scale [D], or None if nobody answered; and the number of clients whose sums were used.
    """
    assert plan.scaling_noise is not None
    releases.charge(SCALING, np.arange(len(roster)), moment_sensitivity(features))
    asked, connected = Round(SCALING, releases.attempt, None), set(grid.get_node_ids())
    content, pending = messages.ask_moments(task, asked), list[tuple[Message, Member]]()
    for member in roster:
        if member.node in connected:
            pending.append((Message(content, member.node, messages.MOMENTS, ttl=timeout + 60, group_id="moments"), member))
        else:
            _leave_out(member, "it is not connected")
    replies = exchange(grid, [message for message, _ in pending], timeout)
    waiting = {message.metadata.message_id: member for message, member in pending}
    used = dict[int, tuple[Tensor, int]]()
    for reply in replies:
        if reply.metadata.reply_to_message_id not in waiting:
            continue
        member = waiting.pop(reply.metadata.reply_to_message_id)
        try:
            sums = messages.read_moments(reply, task, asked, 2 * features)
            _check(sums, member.records, plan.scaling_noise)
            used[member.number] = sums, member.records
        except (RefusedError, WireError) as error:
            _leave_out(member, str(error))
    for member in waiting.values():
        _leave_out(member, "it did not answer in time")
    if not used:
        return None, 0
    total, records = torch.zeros(2 * features, dtype=torch.float64), 0
    for _, (sums, held) in sorted(used.items()):
        total, records = total + sums, records + held
    return standardisation(total, records, len(used), plan.scaling_noise), len(used)


def _check(sums: Tensor, records: int, multiplier: float) -> None:
    """Raise `WireError` for sums that a client with this many records can hardly have sent: each record adds at most 1."""
    tail = math.sqrt(2 * math.log(2 * len(sums) / _NEVER))
    most = records + multiplier * moment_sensitivity(len(sums) // 2) * tail
    if (largest := float(sums.abs().max())) > most:
        raise WireError(f"its moments are too large: {largest:.3g}; {records} records allow at most {most:.3g}")


def _leave_out(member: Member, reason: str) -> None:
    _LOG.warning("standardisation: %s is left out: %s", member.title, reason)
