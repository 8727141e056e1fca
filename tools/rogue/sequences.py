"""Hand-written sequences of the rogue-server trial: every known or feared way to get more than was granted."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fedcdp.deploy.protocol.local_round import Round
from fedcdp.deploy.protocol.task import Task
from tools.rogue.client import NODES, Client
from tools.rogue.tasks import aliases_of, task_of

_RECORD = ("server", "record")


def _task(number: int = 0, plan: str = "plain", **changes: Any) -> Task:
    task = task_of(random.Random(number), plan)
    return replace(task, plan=task.plan.but(**changes)) if changes else task


def _name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _until_refused(one: Client, digest: str, clip: float | None = None, round_: int = 0) -> None:
    for attempt in range(60):
        if not one.ask(digest, Round(round_, attempt, clip)) and attempt:  # the first may be stale
            return


def _forms(one: Client, forms: list[str]) -> None:
    """A task in several written forms, each requested as long as it yields something, in turn and one after the other."""
    for text in forms:
        one.publish(text)
    for attempt in range(4):
        for text in forms:
            one.ask(_name(text), Round(0, attempt, None))
    for text in forms:
        _until_refused(one, _name(text), round_=1)


def _in_old_forms(one: Client) -> None:
    """A ledger of version 0.1.0 with a task in two forms, which that version confused."""
    first = _task(plan="much noise")
    reordered = replace(first, tensors=dict(reversed(first.tensors.items())))
    one.begin_with_0_1_0(first, 2)
    one.begin_with_0_1_0(reordered, 2)
    for each in (first, reordered):
        one.publish(each.to_json())
        _until_refused(one, each.digest(), round_=5)


def _many_tasks(one: Client) -> None:
    for number in range(40):
        task = _task(number)
        one.publish(task.to_json())
        one.ask(task.digest(), Round(0, 0, None))


def _interleaved(one: Client) -> None:
    tasks = [_task(number, plan) for number, plan in enumerate(["plain", "much noise", "several uses", "sampled"])]
    for task in tasks:
        one.publish(task.to_json())
    for round_ in range(8):
        for task in tasks:
            one.ask(task.digest(), Round(round_, 0, None))
    for task in tasks:
        _until_refused(one, task.digest(), round_=7)


def _crashes(one: Client) -> None:
    task = _task()
    one.publish(task.to_json())
    for attempt in range(40):
        one.witness.crash = ("before", "after", None)[attempt % 3]
        one.ask(task.digest(), Round(0, attempt, None))
        one.witness.crash = None
        one.ask(task.digest(), Round(0, attempt, None))  # the same again: stale


def _torn(one: Client) -> None:
    task = _task()
    one.publish(task.to_json())
    for attempt in range(40):
        with one.torn_write():
            one.ask(task.digest(), Round(0, 2 * attempt, None))
        one.ask(task.digest(), Round(0, 2 * attempt + 1, None))


def _at_once(one: Client) -> None:
    tasks = [_task(number) for number in range(5)]
    for task in tasks:
        one.publish(task.to_json())
    one.ask_at_once([(task.digest(), Round(0, 0, None)) for task in tasks])
    for round_ in range(1, 4):
        one.ask_at_once([(tasks[0].digest(), Round(round_, attempt, None)) for attempt in (0, 0, 1, 2)])
    for task in tasks:
        _until_refused(one, task.digest(), round_=7)


def _quietest_round(one: Client) -> None:
    """The bound grows while the noise stays: the last round has a third of the noise, and is requested again and again."""
    task = _task(plan="a bound that grows under noise that stays")
    one.publish(task.to_json())
    _until_refused(one, task.digest(), round_=task.plan.rounds - 1)


def _clip_bounds(one: Client) -> None:
    task = _task(plan="quantile")
    one.publish(task.to_json())
    for attempt, clip in enumerate([1e-45, 5e-324, 1e-20, 1e30, 4e-6, 4e6, 4.0]):
        one.ask(task.digest(), Round(0, attempt, clip))
    _until_refused(one, task.digest(), 4e-6, round_=1)


def _stricter_and_back(one: Client) -> None:
    for number in range(6):
        task = _task(number, "much noise")
        one.write_policy(epsilon=0.05 if number % 2 else 0.25)
        one.publish(task.to_json())
        _until_refused(one, task.digest())


def _cap_raised(one: Client) -> None:
    """Successive reservations for one task, each for a single participation."""
    task = _task(plan="much noise")
    for most in range(1, 12):
        one.write_policy(participations=most)
        one.publish(task.to_json())
        _until_refused(one, task.digest(), round_=min(most, 7))


def _other_records(one: Client) -> None:
    task, other = _task(0), _task(1)
    one.publish(task.to_json())
    one.ask(task.digest(), Round(0, 0, None))
    one.records = 40
    one.ask(task.digest(), Round(1, 0, None))
    one.publish(task.to_json())
    one.publish(other.to_json())
    _until_refused(one, other.digest())
    one.records = 100
    _until_refused(one, task.digest(), round_=2)


def _on_from_0_1_0(one: Client) -> None:
    task, other = _task(0, "much noise"), _task(1)
    one.begin_with_0_1_0(task, 3)
    one.publish(other.to_json())
    one.ask(other.digest(), Round(0, 0, None))
    one.publish(task.to_json())
    _until_refused(one, task.digest(), round_=4)
    _until_refused(one, other.digest(), round_=1)


def _without_protection(one: Client) -> None:
    for number, plan in enumerate(
        ["a published seed", "raw", "raw at the server", "no noise", "cohort noise", "batch noise"]
    ):
        task = _task(number, plan)
        one.publish(task.to_json())
        _until_refused(one, task.digest())


def _never_accepted(one: Client) -> None:
    one.ask(_task().digest(), Round(0, 0, None))
    one.ask("", Round(0, 0, None))
    one.publish(_task(1).to_json())
    one.ask(_task(2).digest(), Round(0, 0, None))


def _moments_again(plan: str) -> Callable[[Client], None]:
    """Moments of a few tasks, again and again: their average would lose its noise."""

    def play(one: Client) -> None:
        tasks = [_task(number, plan) for number in range(3)]
        for task in tasks:
            one.publish(task.to_json())
        for attempt in range(20):
            for task in tasks:
                one.ask_moments(task.digest(), attempt)
                with one.torn_write():
                    one.ask_moments(task.digest(), attempt + 1)
        for task in tasks:
            _until_refused(one, task.digest())
            one.ask_moments(task.digest(), 99)

    return play


def _moments_late(one: Client) -> None:
    """A round before the moments, moments of a task that has none, and moments at once with rounds."""
    late, none, other = _task(0, "private scaling"), _task(1), _task(2, "private scaling")
    for task in (late, none, other):
        one.publish(task.to_json())
    one.ask(late.digest(), Round(0, 0, None))
    for task in (late, none):
        one.ask_moments(task.digest(), 0)
    for round_ in range(4):
        one.ask_moments(other.digest(), round_)
        one.ask_at_once([(other.digest(), Round(round_, attempt, None)) for attempt in (0, 1)])
    for task in (late, none, other):
        _until_refused(one, task.digest(), round_=7)


def _attempts(one: Client) -> None:
    """Every attempt of every round of two sums, with rosters that shrink, repeat members or are invented."""
    tasks = [_task(number, "a sum") for number in range(2)]
    for task in tasks:
        one.publish(task.to_json())
    for round_ in range(8):
        for attempt in range(5):
            for task in tasks:
                for roster in (NODES[:2], [*NODES[:3], NODES[0]], NODES, NODES[:3], NODES[1:]):
                    one.ask(task.digest(), Round(round_, attempt, None), roster)


def _sums_and_crashes(one: Client) -> None:
    task = _task(plan="a sum")
    one.publish(task.to_json())
    for round_ in range(8):
        for attempt in range(3):
            one.witness.crash = ("before", "after", None)[attempt]
            one.ask(task.digest(), Round(round_, attempt, None), NODES)
            one.witness.crash = None
            one.ask(task.digest(), Round(round_, attempt, None), NODES)
            with one.torn_write():
                one.ask(task.digest(), Round(round_, attempt, None), NODES[:3])


def _greedily(plan: str) -> Callable[[Client], None]:
    def play(one: Client) -> None:
        task = _task(plan=plan)
        one.publish(task.to_json())
        for round_ in range(task.plan.rounds):
            one.ask(task.digest(), Round(round_, 0, None))
        _until_refused(one, task.digest(), round_=task.plan.rounds - 1)

    return play


HAND_WRITTEN: dict[str, tuple[tuple[str, str], Callable[[Client], None]]] = {
    "tensors in another order": (_RECORD, lambda one: _forms(one, [_task().to_json(), *aliases_of(_task().to_json())[:2]])),
    "negative zeros": (_RECORD, lambda one: _forms(one, [_task().to_json(), *aliases_of(_task().to_json())[2:5]])),
    "every other form": (_RECORD, lambda one: _forms(one, [_task().to_json(), *aliases_of(_task().to_json())])),
    "forms that version 0.1.0 accepted": (_RECORD, _in_old_forms),
    "forty tasks": (_RECORD, _many_tasks),
    "tasks that interleave": (_RECORD, _interleaved),
    "one round again and again": (_RECORD, _greedily("plain")),
    "one round again and again, of sampled records": (_RECORD, _greedily("sampled")),
    "one round again and again, of Fed-SDP": (_RECORD, _greedily("Fed-SDP")),
    "one round again and again, against the whole client": (("server", "client"), _greedily("noise for a whole client")),
    "one round again and again, read one by one": (("example", "record"), _greedily("much noise")),
    "crashes before and after every release": (_RECORD, _crashes),
    "lines that a crash cuts short": (_RECORD, _torn),
    "asks at once": (_RECORD, _at_once),
    "the round with the least noise": (_RECORD, _quietest_round),
    "clip bounds without digits": (_RECORD, _clip_bounds),
    "a policy that changes": (_RECORD, _stricter_and_back),
    "a cap that is raised": (_RECORD, _cap_raised),
    "records that change": (_RECORD, _other_records),
    "a ledger of version 0.1.0": (_RECORD, _on_from_0_1_0),
    "tasks without protection": (_RECORD, _without_protection),
    "moments again and again": (_RECORD, _moments_again("private scaling")),
    "moments again and again, read one by one": (("example", "record"), _moments_again("private scaling of single records")),
    "moments at other times": (_RECORD, _moments_late),
    "every attempt at a sum": (_RECORD, _attempts),
    "sums and crashes": (_RECORD, _sums_and_crashes),
    "tasks that were never accepted": (_RECORD, _never_accepted),
}
