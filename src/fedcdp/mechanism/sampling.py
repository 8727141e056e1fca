"""Sampling: which clients take part in a round, and which records in a local step.

Both are derived by counters from (seed, round, client, step), in separate streams, and do not depend on the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcdp.config.plan import Plan
from fedcdp.mechanism.randomness import numpy_generator, stream_key, words


def choose_clients(plan: Plan, clients: int, round_: int) -> NDArray[np.int64]:
    """The clients of a round, in ascending order.

    `fixed`: exactly K_t of them, without replacement. `poisson`: each with probability K_t / K, possibly none.
    """
    generator = numpy_generator(plan.seed, "clients", round_)
    if plan.client_sampling == "poisson":
        return np.flatnonzero(generator.random(clients) < plan.per_round / clients)
    return np.sort(generator.choice(clients, plan.per_round, replace=False).astype(np.int64))


_AT_ONCE = 2**25  # random words drawn and sorted at once; bounds their memory


@dataclass(frozen=True)
class Draw:
    """The records of one local step: positions within each client's own list [clients, slots], and the filled slots."""

    positions: Tensor
    present: Tensor


def choose_records(plan: Plan, clients: Tensor, sizes: Tensor, round_: int, step: int | Tensor) -> Draw:
    """The records that each client uses in a local step; `step` is one number for all clients, or one for each.

    | sampling | a step uses | slots |
    | --- | --- | --- |
    | `poisson` | each record with probability q = min(1, B/N_i); beyond S, dropped at random | S, some empty |
    | `fixed` | B records without replacement, drawn again every step | B |
    | `partition` | the next B in the client's fixed order, restarted every round, wrapping around at the end | B |

    A client with fewer than B records uses each of them once a step and leaves the other slots empty.
    """
    slots = torch.arange(plan.slots, device=sizes.device)
    if plan.record_sampling == "partition":
        first = torch.as_tensor(step, device=sizes.device).expand(len(sizes))[:, None] * plan.batch_size
        return Draw((first + slots) % sizes[:, None], slots < sizes[:, None])
    # One random word for each record. The smallest words win a slot: a uniform choice without replacement. Poisson sampling
    # also requires word < q·2^32; conditioned on that, words are still uniform, so those beyond S are dropped at random.
    longest = int(sizes.max())
    record = torch.arange(longest, device=sizes.device)
    drawn = words(stream_key(plan.seed, "records", round_), clients, step, 0, longest)
    drawn = torch.where(record < sizes[:, None], drawn, 2**32)
    # The record's number in the low bits makes every word distinct, so all machines break ties alike.
    lowest, positions = torch.topk(drawn * 2**30 + record, min(plan.slots, longest), largest=False, sorted=True)
    threshold = torch.full_like(sizes, 2**32)
    if plan.record_sampling == "poisson":
        threshold = words_below(plan.batch_size, sizes)
    empty = (0, plan.slots - positions.shape[1])
    present = lowest >> 30 < threshold[:, None]
    return Draw(torch.nn.functional.pad(positions, empty), torch.nn.functional.pad(present, empty))


def zero_out(draw: Draw, kept: Tensor) -> Draw:
    """The draw without the records that are zeroed out: `kept` says of each slot whether its record stays.

    A zeroed-out record is drawn like any other and then contributes nothing: its slot is empty. Sizes and rates stay, as the
    relation `zero-out` says. Filled slots come first, which engines rely on; the positions move along.
    """
    present = draw.present & kept
    order = present.byte().argsort(dim=-1, descending=True, stable=True)
    return Draw(draw.positions.gather(-1, order), present.gather(-1, order))


def words_below(batch_size: int, sizes: Tensor) -> Tensor:
    """How many of the 2^32 words select a record: at most q·2^32 with q = B/N_i, so no record is drawn more often than q."""
    return (batch_size * 2**32 // sizes).clamp(max=2**32)


def choose_records_of_steps(plan: Plan, clients: Tensor, sizes: Tensor, round_: int) -> Draw:
    """`choose_records` for all local steps of a round at once, [steps, clients, slots]."""
    steps = torch.arange(plan.local_steps, device=sizes.device)
    draws = []
    for some in steps.split(max(1, _AT_ONCE // max(1, int(sizes.sum()), len(sizes) * plan.slots))):
        each = some.repeat_interleave(len(clients))
        draws.append(choose_records(plan, clients.repeat(len(some)), sizes.repeat(len(some)), round_, each))

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).view(plan.local_steps, len(clients), -1)

    return Draw(joined([draw.positions for draw in draws]), joined([draw.present for draw in draws]))
