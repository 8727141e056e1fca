"""A client's own ledger: on the disk before a release, refused when damaged."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.grant import Grant, Reservation
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.errors import RefusedError, RunError
from tests.support.ledgers import written_by_0_1_0
from tests.support.small_task import task

TASK = task()
TEST = task(reproducible=True)


def releases(directory: Path, of: str) -> list[tuple[int, int]]:
    with ClientLedger.held(directory) as ledger:
        return ledger.tasks[of].releases


def charged(directory: Path, published: object = TASK) -> str:
    with ClientLedger.held(directory) as ledger:
        ledger.accept(published, 100)  # type: ignore[arg-type]
        ledger.reserve(published.digest(), 1, 4)  # type: ignore[attr-defined]
        for round_ in (0, 2):
            ledger.charge(published.digest(), round_, 0, 4.0)  # type: ignore[attr-defined]
    return published.digest()  # type: ignore[attr-defined, no-any-return]


def test_what_was_charged_is_there_in_another_process(tmp_path: Path) -> None:
    assert releases(tmp_path, charged(tmp_path)) == [(0, 0), (2, 0)]


def test_later_rounds_and_later_attempts_are_charged(tmp_path: Path) -> None:
    digest = charged(tmp_path)
    with ClientLedger.held(tmp_path) as ledger:
        ledger.charge(digest, 2, 1, 4.0)
        ledger.charge(digest, 5, 0, 4.0)
    assert releases(tmp_path, digest) == [(0, 0), (2, 0), (2, 1), (5, 0)]


@pytest.mark.parametrize("asked", [(2, 0), (1, 0), (0, 5), (10, 0), (-1, 0), (3, -1)])
def test_a_stale_or_impossible_round_is_refused_and_costs_nothing(asked: tuple[int, int], tmp_path: Path) -> None:
    digest = charged(tmp_path)
    with ClientLedger.held(tmp_path) as ledger, pytest.raises(RefusedError, match=r"stale|is not one of the"):
        ledger.charge(digest, *asked, 4.0)
    assert len(releases(tmp_path, digest)) == 2


def test_under_a_published_seed_the_last_round_again_is_the_same_release(tmp_path: Path) -> None:
    digest = charged(tmp_path, TEST)
    with ClientLedger.held(tmp_path) as ledger:
        ledger.charge(digest, 2, 0, 4.0)
        with pytest.raises(RefusedError, match="stale"):
            ledger.charge(digest, 0, 0, 4.0)
    assert len(releases(tmp_path, digest)) == 2


def test_a_release_is_on_the_disk_when_charging_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = charged(tmp_path)
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_size), real(file))[1])
    with ClientLedger.held(tmp_path) as ledger:
        ledger.charge(digest, 3, 0, 4.0)
    assert synced[-1] == (tmp_path / "ledger.jsonl").stat().st_size


def test_a_line_that_a_crash_cut_short_was_never_used(tmp_path: Path) -> None:
    digest = charged(tmp_path)
    path = tmp_path / "ledger.jsonl"
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rpartition(b"\n")[2]
    for cut in range(len(last) - 1):
        path.write_bytes(whole[: len(whole) - len(last) - 1 + cut])
        assert releases(tmp_path, digest) == [(0, 0)]
    path.write_bytes(whole[:-1])
    assert releases(tmp_path, digest) == [(0, 0), (2, 0)]


def test_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    charged(tmp_path)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = [
        b"", b"{}\n", lines[0] + lines[2] + lines[3], lines[0] + lines[1] + lines[3], b"".join(lines[:3]) + lines[4],
        b"".join(lines).replace(b"4.0", b"5.0"), b"".join([*lines, lines[4]]), b"".join(lines[1:]),
        b"".join(lines).replace(b'"participations":4', b'"participations":9'), b"".join([*lines[:3], *lines[2:]]),
        b"".join(lines) + b"\x00",
    ]  # fmt: skip
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(RunError), ClientLedger.held(tmp_path):
            pass


def test_a_client_is_known_by_another_name_in_every_task(tmp_path: Path) -> None:
    with ClientLedger.held(tmp_path / "a") as one, ClientLedger.held(tmp_path / "b") as other:
        names = {ledger.name_in(each) for ledger in (one, other) for each in (TASK, TEST)}
        assert len(names) == 4
        assert all(len(name) == 32 for name in names)
    with ClientLedger.held(tmp_path / "a") as one:
        assert one.name_in(TASK) in names


def test_tasks_without_a_reservation_take_no_share_of_delta(tmp_path: Path) -> None:
    with ClientLedger.held(tmp_path) as ledger:
        for number in range(3):
            ledger.accept(task(run=str(number) * 32), 100)
        for place, number in enumerate((2, 0), start=1):
            ledger.reserve(task(run=str(number) * 32).digest(), place, 5)
    with ClientLedger.held(tmp_path) as ledger:
        assert {each.task.run[0]: each.place for each in ledger.reservations()} == {"2": 1, "0": 2}
        assert ledger.next_place == 3


def test_no_release_without_a_reservation(tmp_path: Path) -> None:
    digest = charged(tmp_path)
    with ClientLedger.held(tmp_path) as ledger:
        for round_ in (3, 4):
            ledger.charge(digest, round_, 0, 4.0)
        with pytest.raises(RefusedError, match="no participation is reserved"):
            ledger.charge(digest, 5, 0, 4.0)
        with pytest.raises(RefusedError, match="must have the next place"):
            ledger.reserve(digest, 1, 4)  # what was reserved is not reserved again
        ledger.reserve(digest, 2, 1)
        ledger.charge(digest, 5, 0, 4.0)
        with pytest.raises(RefusedError, match="must have the next place"):
            ledger.reserve(digest, 2, 3)
    with ClientLedger.held(tmp_path) as ledger:
        assert [(each.place, each.participations) for each in ledger.reservations()] == [(1, 4), (2, 1)]


@pytest.mark.parametrize(("place", "participations"), [(0, 1), (3, 1), (-1, 1), (2, 0), (2, -5), (1, 9)])
def test_a_reservation_out_of_place_is_refused(place: int, participations: int, tmp_path: Path) -> None:
    digest = charged(tmp_path)
    other = task(run="1" * 32)
    with ClientLedger.held(tmp_path) as ledger:
        ledger.accept(other, 100)
        with pytest.raises(RefusedError, match="a reservation"):
            ledger.reserve(other.digest(), place, participations)
        with pytest.raises(RefusedError, match="a reservation"):
            ledger.reserve(digest, 2, 5)  # some are left


def test_releases_without_a_reservation_count_as_many_as_they_are(tmp_path: Path) -> None:
    first, second = task(), task(run="1" * 32)
    written_by_0_1_0(tmp_path, [(first, 3), (second, 2)])
    with ClientLedger.held(tmp_path) as ledger:
        assert [(each.place, each.participations) for each in ledger.reservations()] == [(1, 3), (2, 2)]
        with pytest.raises(RefusedError, match="no participation is reserved"):
            ledger.charge(first.digest(), 3, 0, 4.0)
        with pytest.raises(RefusedError, match="must exceed the number of releases"):
            ledger.reserve(first.digest(), 1, 3)
        ledger.reserve(first.digest(), 1, 12)
        ledger.charge(first.digest(), 3, 0, 4.0)
        ledger.reserve(second.digest(), 3, 1)
    with ClientLedger.held(tmp_path) as ledger:
        assert sorted((each.place, each.participations) for each in ledger.reservations()) == [(1, 12), (2, 2), (3, 1)]


def _greedy(directory: Path, epsilon: float, name: str, together: Any, made: Any) -> None:
    """Take part in a task as often as may be."""
    policy, mine, times = ClientPolicy(epsilon=epsilon), task(run=name * 32), 0
    together.wait()
    with contextlib.suppress(RefusedError):
        for round_ in range(10):
            with ClientLedger.held(directory) as ledger:
                ledger.accept(mine, 100)
                policy.reserve(mine.digest(), ledger, round_)
                ledger.charge(mine.digest(), round_, 0, 4.0)
            times += 1
    made.put(times)


def test_processes_that_ask_at_once_do_not_spend_the_same_budget_twice(tmp_path: Path) -> None:
    grant = Grant(1.0, 1e-5)
    epsilon = grant.cost(Reservation(task(), 100, 1, 12)) + grant.cost(Reservation(task(), 100, 2, 2)) * 1.0001
    fork = multiprocessing.get_context("fork")
    together, made = fork.Barrier(3), fork.Queue()
    processes = [fork.Process(target=_greedy, args=(tmp_path, epsilon, name, together, made)) for name in "abc"]
    for each in processes:
        each.start()
    for each in processes:
        each.join(120)
    assert sorted(made.get(timeout=1) for _ in processes) == [0, 2, 10]
    with ClientLedger.held(tmp_path) as ledger:
        assert [each.participations for each in sorted(ledger.reservations(), key=lambda each: each.place)] == [12, 2]
        assert Grant(epsilon, 1e-5).covers(grant.costs(ledger.reservations()))
