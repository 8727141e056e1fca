"""One case: a random task, roster and vectors; members drop out, and the survivors try again.

A case fails if an attempt that all members answered does not give the plain sum mod 2^64 to the bit, or if one with a
missing member does.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from benchmarks.clean_tree import clean_commit
from fedcdp.config.plan import Plan
from fedcdp.deploy.protocol.masks import add_masks, sum_of
from fedcdp.deploy.protocol.sum_context import SumMember, context_of
from fedcdp.deploy.protocol.task import Task

_MOST_MEMBERS, _MOST_WORDS = 12, 200


@dataclass(frozen=True)
class Party:
    """A member, and the private half of its run key."""

    member: SumMember
    key: X25519PrivateKey

    @staticmethod
    def new(node: bytes, key: X25519PrivateKey) -> Party:
        return Party(SumMember(node, key.public_key().public_bytes_raw()), key)


def one_case(seed: int) -> str | None:
    """What went wrong in a case, or None."""
    case = np.random.default_rng(seed)
    count, length = int(case.integers(2, _MOST_MEMBERS + 1)), int(case.integers(1, _MOST_WORDS + 1))
    task = _task(case, count)
    them = [Party.new(case.bytes(49), X25519PrivateKey.from_private_bytes(case.bytes(32))) for _ in range(count)]
    round_, attempt = int(case.integers(task.plan.rounds)), 0
    while len(them) >= 2:
        context = context_of(
            task=task,
            round_=round_,
            attempt=attempt,
            bound=task.plan.clip_at(round_),
            weights=case.bytes(32),
            members=[each.member for each in them],
        )
        shares = [_vector(case, length) for _ in them]
        roster = [them[place].member for place in case.permutation(len(them))]
        sent = [add_masks(share, each.key, each.member, roster, context) for share, each in zip(shares, them, strict=True)]
        came = [place for place in range(len(them)) if case.random() > 0.1]
        total, plain = sum_of((sent[place] for place in came), length), np.sum(shares, axis=0, dtype=np.int64)
        complete = len(came) == len(them)
        if complete != np.array_equal(total, plain):
            return f"seed {seed}: {len(came)} of {len(them)} members, and the sum is {'wrong' if complete else 'there'}"
        if complete:
            return None
        them, attempt = [them[place] for place in came], attempt + 1
    return None


def _task(case: np.random.Generator, members: int) -> Task:
    plan = Plan(
        rounds=int(case.integers(1, 100)),
        per_round=members,
        local_steps=1,
        noise="sum",
        secure_aggregation=True,
        secure_noise=True,
        colluders=int(case.integers(members)),
        attempts=int(case.integers(1, 9)),
        noise_multiplier=float(case.uniform(0.1, 10)),
        clip=str(float(case.uniform(0.01, 10))),
    )
    return Task(run=case.bytes(16).hex(), shape=(3,), classes=2, network="mlp", activation=None,
                tensors={"0.weight": (2, 3)}, constants="", plan=plan, smallest_cohort=1)  # fmt: skip


def _vector(case: np.random.Generator, length: int) -> NDArray[np.int64]:
    """Shares as they are, or anywhere in the ring, or at its ends."""
    low, high = [(-(2**40), 2**40), (-(2**63), 2**63 - 1), (2**63 - 3, 2**63 - 1)][int(case.integers(3))]
    return case.integers(low, high, length, dtype=np.int64, endpoint=True)


def main() -> None:
    """Run the trial, print its result, and write it."""
    options = argparse.ArgumentParser(prog="python -m tools.sums", description=main.__doc__)
    options.add_argument("--cases", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    kept = {"commit": clean_commit()} if given.out else {}
    started = time.perf_counter()
    wrong = [found for case in range(given.cases) if (found := one_case(given.seed * 10**6 + case)) is not None]
    command = f"python -m tools.sums --cases {given.cases} --seed {given.seed}"
    result = {"command": command, **kept, "cases": given.cases, "wrong": len(wrong)}
    result["seconds"] = round(time.perf_counter() - started)
    print(json.dumps(result), *wrong[:10], sep="\n")
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    if wrong:
        raise SystemExit(1)
