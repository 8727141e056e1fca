"""The ledger: whatever was used is in it, after any crash; what cannot be true is refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcdp.accounting.ledger import Charge, Ledger, Noise
from fedcdp.config.plan import Plan
from fedcdp.errors import RunError

PLAN = {"method": "fed-cdp", "rounds": 10, "clip": "linear(6, 2)", "noise_multiplier": 6.0}
POPULATION = {"clients": 100, "records": 500}
NOISES: tuple[Noise, ...] = ("seeded", "secure")


def clients_of(round_: int, population: int = 100) -> list[int]:
    return sorted(random.Random(round_).sample(range(population), 5))


def written(path: Path, rounds: int = 4, noise: Noise = "seeded") -> Ledger:
    """A ledger with some rounds; under secure noise, round 1 was released three times."""
    ledger = Ledger.create(path, PLAN, POPULATION, noise)
    for round_ in range(rounds):
        for _ in range(3 if noise == "secure" and round_ == 1 else 1):
            ledger.charge(round_, clients_of(round_), 6.0 - round_ / 3)
    return ledger


def plain(charge: Charge) -> tuple[int, int, list[int], float]:
    return charge.round, charge.attempt, charge.clients.tolist(), charge.bound


def of(ledger: Ledger) -> list[tuple[int, int, list[int], float]]:
    return [plain(charge) for charge in ledger.charges]


def content(noise: Noise = "seeded") -> bytes:
    """What a ledger of four rounds looks like on the disk, made without one: the format, written down a second time."""
    bodies: list[dict[str, Any]] = [{"ledger": 1, "plan": PLAN, "population": POPULATION, "noise": noise}]
    for round_ in range(4):
        for attempt in range(3 if noise == "secure" and round_ == 1 else 1):
            bodies.append(line(round_, attempt, clients_of(round_), 6.0 - round_ / 3))
    return signed(bodies)


def line(round_: Any = 0, attempt: Any = 0, clients: Any = (1, 2), bound: Any = 4.0) -> dict[str, Any]:
    return {"round": round_, "attempt": attempt, "clients": clients, "bound": bound}


def signed(bodies: list[dict[str, Any]]) -> bytes:
    """Lines with the right digests, whatever they say."""
    text, previous = "", ""
    for body in bodies:
        unsigned = json.dumps({**body, "previous": previous}, separators=(",", ":"))[:-1]
        previous = hashlib.blake2b(unsigned.encode(), digest_size=16).hexdigest()
        text += f'{unsigned},"digest":"{previous}"}}\n'
    return text.encode()


def header(**changes: Any) -> dict[str, Any]:
    return {"ledger": 1, "plan": PLAN, "population": POPULATION, "noise": "seeded"} | changes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


# What is written comes back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", NOISES)
def test_charges_come_back_as_they_were_written(path: Path, noise: Noise) -> None:
    ledger = written(path, noise=noise)
    found = Ledger.open(path)
    assert of(found) == of(ledger)
    assert (found.plan, found.population, found.noise) == (PLAN, POPULATION, noise)
    assert found.rounds_charged == len(found.charges) == (4 if noise == "seeded" else 6)
    assert path.read_bytes() == content(noise)


def test_the_plan_of_a_run_is_kept_as_it_is(path: Path) -> None:
    plan = Plan(method="fed-cdp-decay", noise_multiplier=1 / 3)
    Ledger.create(path, plan.written(), POPULATION, "seeded")
    assert Plan(**Ledger.open(path).plan) == plan


def test_clients_are_kept_in_ascending_order_and_may_be_none(path: Path) -> None:
    ledger = Ledger.create(path, PLAN, POPULATION, "seeded")
    ledger.charge(0, np.array([9, 3, 7], np.uint16), np.float64(4))
    ledger.charge(1, [], 4)
    assert of(Ledger.open(path)) == [(0, 0, [3, 7, 9], 4.0), (1, 0, [], 4.0)]
    assert Ledger.open(path).participations().sum() == 3


def test_a_ledger_is_begun_once(path: Path) -> None:
    written(path)
    before = path.read_bytes()
    with pytest.raises(RunError, match="already exists"):
        Ledger.create(path, PLAN, POPULATION, "seeded")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "header", [({}, POPULATION, "seeded"), (PLAN, {"clients": 0}, "seeded"), (PLAN, POPULATION, "none"),
               (PLAN | {"clip": object()}, POPULATION, "seeded"), (PLAN | {"clip": float("nan")}, POPULATION, "seeded")]
)  # fmt: skip
def test_an_unusable_header_is_refused_and_leaves_no_file(path: Path, header: tuple[Any, Any, Any]) -> None:
    with pytest.raises(RunError):
        Ledger.create(path, *header)
    assert list(path.parent.iterdir()) == []


def test_files_that_cannot_be_used_are_named_in_a_sentence(path: Path) -> None:
    with pytest.raises(RunError, match=r"ledger\.jsonl cannot be read: No such file"):
        Ledger.open(path)
    path.mkdir()
    with pytest.raises(RunError, match="cannot be read: Is a directory"):
        Ledger.open_or_create(path, PLAN, POPULATION, "seeded")
    (path / "file").write_bytes(b"")
    with pytest.raises(RunError, match="cannot be written: "):
        Ledger.create(path / "file" / "ledger.jsonl", PLAN, POPULATION, "seeded")


# Which releases may be charged -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reopened", [False, True])
def test_under_seeded_noise_a_repeated_round_is_the_same_release(path: Path, reopened: bool) -> None:
    ledger = written(path)
    ledger = Ledger.open(path) if reopened else ledger
    before = path.read_bytes()
    ledger.charge(3, clients_of(3)[::-1], 5.0)
    assert path.read_bytes() == before
    assert ledger.rounds_charged == 4
    ledger.charge(4, [1], 2.0)
    assert Ledger.open(path).rounds_charged == 5


@pytest.mark.parametrize(("clients", "bound"), [([1, 2], 5.0), (clients_of(3), 4.9), (clients_of(3), float("nan"))])
def test_under_seeded_noise_a_repeated_round_that_differs_is_refused(path: Path, clients: list[int], bound: float) -> None:
    ledger = written(path)
    with pytest.raises(RunError, match="round 3 with other clients or another bound"):
        ledger.charge(3, clients, bound)
    assert path.read_bytes() == content()


def test_under_secure_noise_a_repeated_round_is_charged_again(path: Path) -> None:
    written(path, noise="secure")
    Ledger.open(path).charge(3, clients_of(3), 5.0)
    Ledger.open(path).charge(3, [8], 5.0)
    found = Ledger.open(path)
    assert [(charge.round, charge.attempt) for charge in found.charges] == [
        (0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (3, 0), (3, 1), (3, 2)
    ]  # fmt: skip
    assert found.participations().sum() == 5 * 7 + 1


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("have", "round_"), [(0, 1), (0, -1), (4, 5), (4, 2), (4, 0), (4, -1), (10, 10)])
def test_rounds_are_charged_in_order(path: Path, noise: Noise, have: int, round_: int) -> None:
    ledger = written(path, have, noise)
    before = path.read_bytes()
    with pytest.raises(RunError, match=f"round {round_} "):
        ledger.charge(round_, [1], 4.0)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("clients", "bound"),
    [([1, 1], 4), ([-1, 2], 4), ([99, 100], 4), ([0.5], 4), ([True], 4), ([[1]], 4), (3, 4), (["1"], 4), ([2**64], 4),
     ([2**64 - 1], 4), ([1], float("inf")), ([1], float("nan")), ([1], -1)],
)  # fmt: skip
def test_impossible_releases_are_not_charged(path: Path, clients: Any, bound: float) -> None:
    ledger = written(path)
    with pytest.raises(RunError):
        ledger.charge(4, clients, bound)
    assert path.read_bytes() == content()
    ledger.charge(4, [0, 99], 0.0)


def test_a_ledger_of_another_run_is_refused(path: Path) -> None:
    ledger = written(path)
    ledger.check(dict(reversed(PLAN.items())), POPULATION, "seeded")
    with pytest.raises(RunError, match="its plan has rounds = 10, not 11"):
        ledger.check(PLAN | {"rounds": 11}, POPULATION, "seeded")
    with pytest.raises(RunError, match="its plan has more = None, not 1"):
        ledger.check(PLAN | {"more": 1}, POPULATION, "seeded")
    with pytest.raises(RunError, match="its population has records = 500, not None"):
        ledger.check(PLAN, {"clients": 100}, "seeded")
    with pytest.raises(RunError, match="noise = seeded, not secure"):
        Ledger.open_or_create(path, PLAN, POPULATION, "secure")


def test_a_ledger_that_does_not_cover_the_checkpoint_is_refused(path: Path) -> None:
    ledger = written(path)
    for done in (3, 4):
        ledger.check(PLAN, POPULATION, "seeded", rounds_done=done)
    for done in (0, 2, 5):
        with pytest.raises(RunError, match=f"has 4 rounds and the checkpoint {done}"):
            ledger.check(PLAN, POPULATION, "seeded", rounds_done=done)


def test_a_lost_ledger_is_not_replaced_in_the_middle_of_a_run(path: Path) -> None:
    written(path)
    path.unlink()
    with pytest.raises(RunError, match="out of order: round 0 is next"):
        Ledger.open_or_create(path, PLAN, POPULATION, "seeded").charge(4, [1], 4.0)


# Counting ----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.sets(st.integers(0, 19)), max_size=10), st.integers(0, 25))
def test_participations_are_counted_client_by_client(chosen: list[set[int]], count: int) -> None:
    bodies = [header(population={"clients": 20}), *(line(t, 0, sorted(ids)) for t, ids in enumerate(chosen))]
    ledger = Ledger(Path("ledger"), signed(bodies))
    counted = Counter(client for ids in chosen for client in ids)
    assert ledger.participations().tolist() == [counted[client] for client in range(20)]
    assert ledger.most_used() == max(counted.values(), default=0)
    assert ledger.busiest(count).tolist() == sorted((counted[client] for client in range(20)), reverse=True)[:count]


def test_a_million_clients_and_a_hundred_large_rounds_stay_small_and_quick(path: Path) -> None:
    chosen = np.random.default_rng(0).permuted(np.tile(np.arange(1_000_000), (1, 1)), axis=1)[0, :500_000].reshape(100, -1)
    ledger = Ledger.create(path, {"rounds": 100}, {"clients": 1_000_000}, "seeded")
    for round_ in range(100):
        ledger.charge(round_, chosen[round_], 4.0)
    started = time.perf_counter()
    found = Ledger.open(path)
    assert found.participations().sum() == 500_000
    assert (found.most_used(), found.busiest(3).tolist()) == (1, [1, 1, 1])
    assert time.perf_counter() - started < 2
    assert path.stat().st_size < 4_000_000


# Tampering ---------------------------------------------------------------------------------------------------------------


def lines_of(whole: bytes) -> list[bytes]:
    return whole.splitlines(keepends=True)


TAMPERED: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "a header edited": (lambda all_: [all_[0].replace(b'"rounds":10', b'"rounds":90'), *all_[1:]], 1),
    "noise made secure": (lambda all_: [all_[0].replace(b"seeded", b"secure"), *all_[1:]], 1),
    "a client altered": (lambda all_: [*all_[:2], all_[2].replace(b'"clients":[', b'"clients":[0,'), *all_[3:]], 3),
    "a bound altered": (lambda all_: [*all_[:4], all_[4].replace(b'"bound":5', b'"bound":4')], 5),
    "a space added": (lambda all_: [*all_[:2], all_[2].replace(b",", b", ", 1), *all_[3:]], 3),
    "a middle line removed": (lambda all_: [*all_[:2], *all_[3:]], 3),
    "the first line removed": (lambda all_: all_[1:], 1),
    "lines swapped": (lambda all_: [*all_[:2], all_[3], all_[2], *all_[4:]], 3),
    "a line duplicated": (lambda all_: [*all_[:3], *all_[2:]], 4),
    "the last line duplicated": (lambda all_: [*all_, all_[-1]], 6),
    "a blank line": (lambda all_: [*all_[:2], b"\n", *all_[2:]], 3),
    "a line of another ledger": (lambda all_: [*all_[:2], *lines_of(content("secure"))[2:]], 3),
    "the beginning of a line in the middle": (lambda all_: [*all_[:3], all_[3][:20] + b"\n", *all_[4:]], 4),
    "the beginning of a line with a newline": (lambda all_: [*all_[:4], all_[4][:-3] + b"\n"], 5),
    "a newline lost": (lambda all_: [*all_[:3], all_[3][:-1], all_[4]], 4),
    "something behind the end": (lambda all_: [*all_, b"else"], 6),
    "zeros behind the end": (lambda all_: [*all_, b'{"round":4' + bytes(100)], 6),
    "something behind the last line": (lambda all_: [*all_[:4], all_[4][:-1] + b"x"], 5),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_tampering_is_noticed_where_it_is(path: Path, name: str) -> None:
    tamper, number = TAMPERED[name]
    path.write_bytes(b"".join(tamper(lines_of(content()))))
    with pytest.raises(RunError, match=rf"ledger\.jsonl, line {number}, "):
        Ledger.open(path)


IMPOSSIBLE: dict[str, tuple[list[dict[str, Any]], str]] = {
    "version": ([header(ledger=2)], "version 2; this program reads version 1"),
    "version text": ([header(ledger="1")], "version"),
    "no plan": ([{"ledger": 1, "population": POPULATION, "noise": "seeded"}], "keys"),
    "plan": ([header(plan=[1])], "plan without a number of rounds"),
    "plan rounds": ([header(plan={"rounds": "10"})], "plan without a number of rounds"),
    "population": ([header(population={"clients": True})], "population without a number of clients"),
    "population size": ([header(population={"clients": 10**18})], "population without a number of clients"),
    "noise": ([header(noise=["seeded"])], "neither seeded nor secure"),
    "missing key": ([header(), {"round": 0, "attempt": 0, "clients": []}], "keys"),
    "further key": ([header(), line() | {"more": 1}], "keys"),
    "a second header": ([header(), header()], "keys"),
    "round kind": ([header(), line(round_=0.0)], "not a number of its kind"),
    "round true": ([header(), line(round_=False)], "not a number of its kind"),
    "attempt kind": ([header(), line(attempt=None)], "not a number of its kind"),
    "bound kind": ([header(), line(bound=10**400)], "not a number of its kind"),
    "bound infinite": ([header(), line(bound=float("inf"))], "finite"),
    "bound nan": ([header(), line(bound=float("nan"))], "finite"),
    "bound negative": ([header(), line(bound=-1.0)], "finite number of 0 or more"),
    "first round": ([header(), line(1)], "out of order: round 0 is next"),
    "skipped": ([header(), line(0), line(2)], "out of order: round 1 is next"),
    "back": ([header(), line(0), line(1), line(0)], "out of order: round 2 is next"),
    "negative round": ([header(), line(-1)], "out of order: round 0 is next"),
    "beyond": ([header(plan={"rounds": 1}), line(0), line(1)], "beyond the plan"),
    "seeded twice": ([header(), line(0), line(0, 1)], "twice"),
    "attempt": ([header(), line(0, 1)], "attempt"),
    "attempt again": ([header(noise="secure"), line(0), line(0, 0)], "attempt"),
    "attempt skipped": ([header(noise="secure"), line(0), line(0, 2)], "attempt"),
    "attempt of the next": ([header(noise="secure"), line(0), line(1, 1)], "attempt"),
    "clients number": ([header(), line(clients=3)], "not whole numbers"),
    "clients text": ([header(), line(clients="12")], "not whole numbers"),
    "clients true": ([header(), line(clients=[True])], "not whole numbers"),
    "clients huge": ([header(), line(clients=[10**30])], "not whole numbers"),
    "clients nested": ([header(), line(clients=[[1]])], "not whole numbers"),
    "clients negative": ([header(), line(clients=[-1, 2])], "outside the population of 100"),
    "clients outside": ([header(), line(clients=[1, 100])], "outside the population of 100"),
    "clients repeated": ([header(), line(clients=[1, 1])], "repeated"),
    "clients unordered": ([header(), line(clients=[2, 1])], "out of order"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_content_is_refused_even_with_the_right_digests(path: Path, name: str) -> None:
    bodies, said = IMPOSSIBLE[name]
    path.write_bytes(signed(bodies))
    with pytest.raises(RunError, match=rf"ledger\.jsonl, line {len(bodies)}, .*{said}"):
        Ledger.open(path)


@pytest.mark.parametrize("noise", NOISES)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_byte_changed_in_a_whole_ledger_is_noticed(noise: Noise, data: st.DataObject) -> None:
    whole = bytearray(content(noise))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RunError):
        Ledger(Path("ledger"), bytes(whole))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_beginning_of_a_ledger_is_refused_or_tells_nothing_that_was_not_charged(data: st.DataObject) -> None:
    whole = content("secure")
    cut = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 3)) if cut else 0):
        cut[data.draw(st.integers(0, len(cut) - 1))] = data.draw(st.integers(0, 255))
    cut += data.draw(st.binary(max_size=5))
    everything = of(Ledger(Path("ledger"), whole))
    try:
        found = of(Ledger(Path("ledger"), bytes(cut)))
    except RunError:
        return
    assert found == everything[: len(found)]
    assert len(found) >= bytes(cut).count(b"\n") - 1


@given(
    st.one_of(
        st.binary(), st.text().map(str.encode), st.integers(0, 5000).map(lambda n: content() + b'{"round":' + b"[" * n)
    )
)
@settings(deadline=None)
def test_whatever_a_file_holds_it_opens_or_is_refused_in_a_sentence(found: bytes) -> None:
    try:
        opened = Ledger(Path("ledger"), found)
    except RunError as refused:
        assert str(refused).startswith("ledger")  # noqa: PT017  (it may also open)
        assert "\n" not in str(refused)  # noqa: PT017
    else:
        assert of(opened) == of(Ledger(Path("ledger"), content()))  # a torn last line is forgotten


# Crashes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", NOISES)
def test_every_prefix_opens_with_the_charges_of_its_whole_lines(noise: Noise) -> None:
    whole = content(noise)
    everything = of(Ledger(Path("ledger"), whole))
    first = whole.index(b"\n")
    for length in range(len(whole)):
        if length < first:
            with pytest.raises(RunError, match="no complete first line"):
                Ledger(Path("ledger"), whole[:length])
        else:
            # A line that lacks nothing but its newline is whole.
            lines = (whole[:length] + (b"\n" if whole[length : length + 1] == b"\n" else b"")).count(b"\n")
            assert of(Ledger(Path("ledger"), whole[:length])) == everything[: lines - 1]


@pytest.mark.parametrize("noise", NOISES)
def test_a_ledger_goes_on_from_every_place_where_a_crash_can_cut_it(path: Path, noise: Noise) -> None:
    whole = content(noise)
    last = whole.rindex(b"\n", 0, -1)
    for length in [*range(last, len(whole), 5), *range(len(whole) - 3, len(whole) + 1)]:
        path.write_bytes(whole[:length])
        ledger = Ledger.open(path)
        assert path.read_bytes() == whole[:length]  # a reader changes nothing
        ledger.charge(3, clients_of(3), 5.0)
        found = Ledger.open(path)
        assert of(found) == of(ledger)
        repeated = noise == "secure" and length >= len(whole) - 1
        assert (
            [(charge.round, charge.attempt) for charge in found.charges[-2:]] == [(3, 0), (3, 1)]
            if repeated
            else [(2, 0), (3, 0)]
        )
        assert path.read_bytes().startswith(whole)


@contextmanager
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls that change a file or bring it to the disk, in order."""
    made: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("write", "ftruncate", "fsync"):
            real = getattr(os, name)

            def noted(file: int, *rest: Any, real: Callable[..., Any] = real, name: str = name) -> Any:
                made.append(name)
                return real(file, *rest)

            patch.setattr(os, name, noted)
        yield made


def test_a_charge_is_on_the_disk_when_it_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = written(path)
    with calls(monkeypatch) as made:
        ledger.charge(4, [1], 4.0)
    assert made[-2:] == ["write", "fsync"]


def test_a_repeated_round_is_brought_to_the_disk_because_the_crash_may_have_come_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(path)
    ledger = Ledger.open(path)
    with calls(monkeypatch) as made:
        ledger.charge(3, clients_of(3), 5.0)
    assert "write" not in made
    assert made[-1] == "fsync"


def test_a_torn_line_is_removed_from_the_disk_before_anything_is_added(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(content()[:-10])
    ledger = Ledger.open(path)
    with calls(monkeypatch) as made:
        ledger.charge(3, [5], 4.0)
    assert made[-4:] == ["ftruncate", "fsync", "write", "fsync"]


@pytest.mark.parametrize("room", [0, 1, 40])
@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_full_disk_leaves_the_ledger_as_it_was(path: Path, room: int, cut: int) -> None:
    whole = content()
    path.write_bytes(whole[: len(whole) - cut])
    ledger = Ledger.open(path)
    before = of(ledger)
    round_ = len(before)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) - cut + room, hard))
    try:
        with pytest.raises(RunError, match=r"ledger\.jsonl cannot be written: File too large"):
            ledger.charge(round_, range(100), 4.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert of(ledger) == of(Ledger.open(path)) == before
    ledger.charge(round_, range(100), 4.0)
    assert of(ledger) == of(Ledger.open(path)) == [*before, (round_, 0, list(range(100)), 4.0)]


def test_a_charge_that_did_not_reach_the_disk_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = written(path)
    real = os.fsync

    def failing(file: int) -> None:
        if os.path.samestat(os.fstat(file), path.stat()):
            raise OSError(errno.EIO, "Input/output error")
        real(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(RunError, match="cannot be written: Input/output error"):
            ledger.charge(4, [1], 4.0)
    assert path.read_bytes() == content()
    ledger.charge(4, [1], 4.0)
    assert Ledger.open(path).rounds_charged == 5


def test_a_file_that_others_changed_or_removed_is_not_written_to(path: Path) -> None:
    ledger = written(path)
    Ledger.open(path).charge(4, [1], 4.0)
    before = path.read_bytes()
    with pytest.raises(RunError, match="changed by another process"):
        ledger.charge(4, [2], 4.0)
    assert path.read_bytes() == before
    path.unlink()
    with pytest.raises(RunError, match="cannot be written: No such file"):
        ledger.charge(4, [2], 4.0)
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
def test_whatever_was_used_is_in_the_ledger_wherever_the_run_is_killed(tmp_path: Path, noise: Noise) -> None:
    done = subprocess.run([sys.executable, __file__, str(tmp_path), noise], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["kills"] >= 40
    # The kills came where they matter: before there was a ledger, inside a line, between a charge and its use.
    assert min(seen["without a ledger"], seen["torn"], seen["charged and not used"]) >= 1, seen


# The process that is killed, and the one that kills it: run by the test above, because forking needs a process of its own.

_ROUNDS = 1000


def _release_until_killed(folder: Path, noise: Noise) -> None:
    """A run without the training: charge, use, note the round as done; begins where the last one was killed."""
    ledger = Ledger.open_or_create(folder / "ledger.jsonl", {"rounds": _ROUNDS}, POPULATION, noise)
    for round_ in range(len(_noted(folder / "done")), _ROUNDS):
        ledger.charge(round_, clients_of(round_), 4.0)
        last = ledger.charges[-1]
        _note(folder / "used", f"{last.round} {last.attempt}")
        _note(folder / "done", f"{round_}")


_system_write = os.write
_system_fsync = os.fsync


def _note(path: Path, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    _system_write(file, f"{text}\n".encode())
    _system_fsync(file)
    os.close(file)


def _noted(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _die_at_a_step_of_writing(left: int, chance: random.Random) -> None:
    """Have this process killed before, within or after the next system call but so many that writes."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def doomed(real: Callable[..., Any], parts: bool) -> Callable[..., Any]:
        def call(file: int, *rest: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and parts and chance.random() < 0.8:
                real(file, rest[0][: chance.randint(0, len(rest[0]))])
                die()
            if left == 0 and chance.random() < 0.5:
                die()
            result = real(file, *rest)
            if left == 0:
                die()
            return result

        return call

    os.write, os.fsync, os.ftruncate = doomed(os.write, True), doomed(os.fsync, False), doomed(os.ftruncate, False)


def _kill_many(root: Path, noise: Noise) -> Counter[str]:
    chance, seen = random.Random(noise), Counter[str]()
    for run in range(4):
        folder = root / str(run)
        folder.mkdir()
        for kill in range(12):
            by_clock = kill % 3 == 2
            child = os.fork()
            if child == 0:
                try:
                    if not by_clock:  # the first inside `create`, the second within the first charge's line
                        _die_at_a_step_of_writing({0: 1, 1: 4}.get(kill, chance.randint(1, 12)), chance)
                    _release_until_killed(folder, noise)
                finally:
                    os._exit(1)  # not reached by a process that was killed
            if by_clock:
                time.sleep(chance.uniform(0, 0.02))
                os.kill(child, signal.SIGKILL)
            chance.random()  # the child's copy went its own way
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), "the run ended by itself"
            seen["kills"] += 1
            _verify(folder, noise, seen)
        ledger = Ledger.open(folder / "ledger.jsonl")
        ledger.charge(len(_noted(folder / "done")), clients_of(len(_noted(folder / "done"))), 4.0)
        assert of(ledger) == of(Ledger.open(folder / "ledger.jsonl"))
    return seen


def _verify(folder: Path, noise: Noise, seen: Counter[str]) -> None:
    used = [tuple(map(int, each.split())) for each in _noted(folder / "used")]
    path = folder / "ledger.jsonl"
    if not path.exists():
        seen["without a ledger"] += 1
        assert not used
        return
    charges = Ledger.open(path).charges
    assert set(used) <= {(charge.round, charge.attempt) for charge in charges}
    assert noise == "seeded" or len(set(used)) == len(used), "two releases under one charge"
    assert all(charge.clients.tolist() == clients_of(charge.round) for charge in charges)
    seen["torn"] += not path.read_bytes().endswith(b"\n")
    seen["charged and not used"] += bool(charges) and (charges[-1].round, charges[-1].attempt) not in used


if __name__ == "__main__":
    print(json.dumps(_kill_many(Path(sys.argv[1]), "secure" if sys.argv[2] == "secure" else "seeded")))
