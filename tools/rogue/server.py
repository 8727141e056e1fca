"""The rogue-server trial: a server that tries everything to get more from a client than ε = 0.25.

    python -m tools.rogue --sequences 10000 --out results/reliability/rogue_server.json

A sequence is a list of events against one client: its real handlers, policy file, ledger and locks. Tasks are published in
their canonical form and in others. Rounds are requested in and out of order, repeatedly, concurrently, and with wrong clip
bounds; moments are requested again and again. The client crashes before, between and after its writes; its owner edits the
policy and changes the data. Some sequences begin with a ledger of version 0.1.0. Only the training is replaced: by a witness
that records every release.

At the end nothing may have been released beyond the grant: all releases that the witness saw, as `accountant` composes them,
must stay within (0.25, 1e-5), and no task may have more releases than the client's ledger has charged and reserved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.clean_tree import clean_commit
from fedcdp.deploy.protocol import client
from fedcdp.deploy.protocol.local_round import Round
from tools.rogue.client import DELTA, EPSILON, Client, watched
from tools.rogue.sequences import HAND_WRITTEN
from tools.rogue.tasks import PLANS, aliases_of, task_of

READERS = [("server", "record")] * 5 + [("server", "client"), ("example", "record")]


# Sequences -----------------------------------------------------------------------------------------------------------


def one_sequence(seed: int, base: Path) -> Client:
    """Play the sequence of a seed to its end."""
    case = random.Random(seed)
    reader = case.choice(READERS)
    one = Client(base, reader, case)
    with watched(one):
        if case.random() < 0.15:
            one.begin_with_0_1_0(task_of(case, case.choice(["plain", "much noise"])), case.randint(1, 4))
        else:
            one.publish(task_of(case, case.choice(PLANS)).to_json())
        for _ in range(case.randint(6, 16)):
            _EVENTS[case.choices(range(len(_EVENTS)), _SHARES)[0]](one)
    return one


def _publish(one: Client) -> None:
    one.publish(task_of(one.case, one.case.choice(PLANS)).to_json())


def _publish_alias(one: Client) -> None:
    one.publish(one.case.choice(aliases_of(one.case.choice(one.texts))))


def _publish_again(one: Client) -> None:
    one.publish(one.case.choice(one.texts))


def _asked(one: Client) -> tuple[str, Round]:
    """A round of some published task: mostly one that may come next."""
    text, case = one.case.choice(one.texts), one.case
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    made = [seen for seen, _ in one.witness.seen].count(digest)
    number = case.choice([made, made, made, made + 1, made - 1, 0, 10**6, -1, case.randint(0, 9)])
    clip = None
    if "quantile(" in text:
        clip = case.choice([4.0, 4.0, 4.0, 2.0, 4e-6, 4e6, 1e-45, 1e-20, 1e30, None])
    return digest, Round(number, case.choice([0, 0, 0, 1, 2, 7]), clip)


def _ask(one: Client) -> None:
    one.ask(*_asked(one))


def _ask_moments(one: Client) -> None:
    digest, asked = _asked(one)
    for attempt in range(asked.attempt, asked.attempt + one.case.choice([1, 1, 5])):
        one.ask_moments(digest, attempt)


def _ask_until_refused(one: Client) -> None:
    digest, asked = _asked(one)
    for attempt in range(asked.attempt, asked.attempt + 40):
        if not one.ask(digest, Round(asked.number, attempt, asked.clip)):
            return


def _ask_at_once(one: Client) -> None:
    one.ask_at_once([_asked(one) for _ in range(one.case.randint(2, 4))])


def _crash(one: Client) -> None:
    one.witness.crash = one.case.choice(["before", "after"])
    _ask(one)
    one.witness.crash = None


def _torn(one: Client) -> None:
    with one.torn_write():
        one.case.choice([_ask, _ask_moments, _publish])(one)


def _edit_policy(one: Client) -> None:
    edits: list[dict[str, Any]] = [{}, {"epsilon": 0.2}, {"epsilon": 0.05}, {"delta": 1e-6}, {"participations": 1},
                                   {"participations": 3}, {"smallest_cohort": 2}, {"smallest_noise_multiplier": 50.0},
                                   {"methods": ["fed-cdp"]}]  # fmt: skip
    one.write_policy(**one.case.choice(edits))


def _change_records(one: Client) -> None:
    one.records = one.case.choice([100, 100, 40, 99])


_EVENTS: list[Callable[[Client], None]] = [_publish, _publish_alias, _publish_again, _ask, _ask_until_refused, _ask_at_once,
                                           _crash, _torn, _edit_policy, _change_records, _ask_moments]  # fmt: skip
_SHARES = [12, 12, 4, 30, 14, 8, 6, 5, 5, 4, 8]


# The program ---------------------------------------------------------------------------------------------------------


def hand_written() -> list[dict[str, Any]]:
    """Play the hand-written sequences."""
    found = []
    for name, (reader, play) in HAND_WRITTEN.items():
        with tempfile.TemporaryDirectory() as base:
            one = Client(Path(base), reader, random.Random(0))
            with watched(one):
                play(one)
            found.append({"name": name, "releases": len(one.witness.seen), "epsilon": one.total, "beyond": one.verdict()})
    return found


def trial(seeds: range) -> dict[str, Any]:
    """Play the sequences of some seeds: their number, the largest ε released, and the sequences that exceeded the grant."""
    events: Counter[str] = Counter()
    totals, beyond, shared = [], [], "/dev/shm" if Path("/dev/shm").is_dir() else None
    for seed in seeds:
        with tempfile.TemporaryDirectory(dir=shared) as base:
            one = one_sequence(seed, Path(base))
            events.update(one.events)
            totals.append(one.total)
            if (wrong := one.verdict()) is not None:
                beyond.append({"seed": seed, "why": wrong})
    return {"sequences": len(seeds), "with_a_release": sum(total > 0 for total in totals), "largest_epsilon": max(totals),
            "above_nine_tenths": sum(total > 0.9 * EPSILON for total in totals), "events": dict(sorted(events.items())),
            "beyond_the_grant": beyond}  # fmt: skip


def main() -> None:
    """Play all sequences, print the results, and store them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    kept = {"commit": clean_commit()} if given.out else {}
    torch.set_num_threads(1)
    started = time.perf_counter()
    with mock.patch.object(client._LOG, "disabled", True):
        by_hand = hand_written()
        found = trial(range(given.first, given.first + given.sequences))
    command = f"python -m tools.rogue --sequences {given.sequences} --first {given.first}"
    result = {"command": command, **kept, "granted": {"epsilon": EPSILON, "delta": DELTA}} | found
    result["hand_written"] = by_hand
    result["seconds"] = round(time.perf_counter() - started)
    print(json.dumps(result, indent=1))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if found["beyond_the_grant"] or any(each["beyond"] for each in by_hand) else 0)
