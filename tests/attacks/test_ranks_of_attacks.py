"""Ranks share an attack: its victims, or the federations of `lira`. Rank 0 finds what one process finds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedcdp
from fedcdp.attacks import RECIPES, Leaks
from fedcdp.attacks import reconstruct as reconstructing
from fedcdp.attacks.lira import Lira
from fedcdp.errors import DataError, FedcdpError, LostRankError, RankError
from fedcdp.training import shared_work
from fedcdp.training.ranks import Ranks
from fedcdp.training.shared_work import agree_on_command, help_out, helped
from tests.support.rank_jobs import ended_on_ranks, on_ranks

PLAN = fedcdp.Plan(rounds=2, per_round=6, local_steps=2, batch_size=5)
SEARCHES: dict[str, dict[str, Any]] = {
    "cpl": {"leak": "type2"},
    "clip-aware": {"leak": "type1"},
    "class-prior": {"leak": "type2"},
    "dlg": {"leak": "type2"},
    "accumulated": {"leak": "type2"},
}


def federation() -> fedcdp.Federation:
    return fedcdp.partition(fedcdp.load("cancer"), clients=12, scheme="linear")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 8), nn.Sigmoid(), nn.Linear(8, 2))


def searched(name: str, chunk: int | None = 2, plan: fedcdp.Plan = PLAN) -> Leaks:
    optimiser = RECIPES[name].optimiser
    short = replace(optimiser, inner=min(optimiser.inner, 4))
    recipe = RECIPES[name].but(iterations=3, restarts=2 if name == "dlg" else 1, optimiser=short)
    found = fedcdp.attack(
        plan, model=network(), federation=federation(), attack=recipe, victims=6, chunk=chunk, **SEARCHES[name]
    )
    assert isinstance(found, Leaks)
    return found


def result(found: Leaks) -> tuple[Any, ...]:
    """All that an attack found; times differ."""
    arrays = {name: value.tobytes() for name, value in found.arrays().items()}
    summary = {name: value for name, value in found.summary().items() if name != "seconds"}
    return arrays, summary, found.first_exact.tolist()


def led(work: Callable[[], Any]) -> Callable[[int], Any]:
    """The work of rank 0 with the help of all others, of which each returns how many pieces it did."""

    def on_rank(_: int) -> Any:
        ranks, done, real = Ranks.present(), [], shared_work._tried

        def counted(work: Any, common: Any, pieces: list[Any], *rest: Any) -> Any:
            done.append(len(pieces))
            return real(work, common, pieces, *rest)

        shared_work._tried = counted
        with ranks.joined():
            agree_on_command(ranks, {})
            if not ranks.leads:
                help_out(ranks)
                return sum(done)
            with helped(ranks):
                return work()

    return on_rank


# Searches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEARCHES)
def test_ranks_find_what_one_process_finds_to_the_bit(name: str) -> None:
    alone = result(searched(name))
    assert on_ranks(2, led(lambda: result(searched(name)))) == [alone, 1]  # rank 1 has one portion of three


@pytest.mark.slow
def test_four_ranks_find_what_one_process_finds_to_the_bit() -> None:
    alone = result(searched("cpl"))
    assert on_ranks(4, led(lambda: result(searched("cpl")))) == [alone, 1, 1, 0]


def test_without_a_chunk_ranks_find_the_same_up_to_rounding() -> None:
    plan = PLAN.but(method="nonprivate")
    alone, (found, done) = searched("cpl", None, plan), on_ranks(2, led(lambda: searched("cpl", None, plan)))
    assert done == 1
    torch.testing.assert_close(found.found.examples, alone.found.examples, atol=1e-4, rtol=0)
    assert found.success_rate == alone.success_rate
    assert {at: shown.shape for at, shown in found.snapshots.items()} == {
        at: shown.shape for at, shown in alone.snapshots.items()
    }


def test_under_secure_noise_all_ranks_attack_what_rank_0_observed() -> None:
    plan = PLAN.but(secure_noise=True, noise_multiplier=1e-6)
    found, done = on_ranks(2, led(lambda: searched("class-prior", 2, plan)))
    assert done == 1
    assert len(found.found.examples) == 6


@pytest.mark.slow
def test_best_tries_the_same_attacks_and_shares_their_searches() -> None:
    def best() -> tuple[Any, ...]:
        images = fedcdp.Dataset(torch.rand(12, 1, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3)
        owners = fedcdp.partition(images, clients=6, scheme="iid")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(32, 3))
        plan = PLAN.but(per_round=3, batch_size=2, local_steps=1, rounds=1, noise_multiplier=0.5)
        return result(fedcdp.attack(plan, model=model, federation=owners, victims=4, chunk=2))

    alone = best()
    first, done = on_ranks(2, led(best))
    assert first == alone
    assert done >= 1


# LiRA ----------------------------------------------------------------------------------------------------------------


def lira(plan: fedcdp.Plan = PLAN, **options: Any) -> Lira:
    few = fedcdp.partition(fedcdp.load("cancer").train.take(torch.arange(60)), clients=6, scheme="iid")
    found = fedcdp.attack(plan, model=nn.Linear(30, 2), federation=few, attack="lira", shadows=20, **options)
    assert isinstance(found, Lira)
    return replace(found, seconds=0.0)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["nonprivate", "fed-cdp"])
def test_lira_is_equal_whatever_the_number_of_ranks(size: int, method: str) -> None:
    plan = PLAN.but(method=method, client_sampling="poisson")

    def measured() -> Lira:
        torch.manual_seed(0)
        return lira(plan)

    assert on_ranks(size, led(measured)) == [measured(), *([1] * 2 + [0])[: size - 1]]  # groups of 8, 8 and 4


# Ranks that do not fit together, errors, and lost ranks --------------------------------------------------------------


def test_ranks_with_other_options_are_refused() -> None:
    def work(rank: int) -> None:
        ranks = Ranks.present()
        with ranks.joined():
            agree_on_command(ranks, {"victims": rank})

    for ended in ended_on_ranks(2, work):
        assert type(ended.error) is RankError
        assert str(ended.error) == "options: rank 1 does not have that of rank 0; all ranks need the same"


def test_an_error_in_a_piece_is_raised_at_rank_0_which_may_go_on() -> None:
    def twice() -> tuple[str, int]:
        try:
            shared_work.share(refusing, None, [0, 1, 2, 3], torch.device("cpu"))
        except DataError as error:
            return str(error), len(searched("dlg").found.examples)
        return "", 0

    assert on_ranks(2, led(twice)) == [("piece 3: not today", 6), 2 + 1]


def refusing(_: Any, pieces: list[int], device: torch.device, tell: Any) -> list[int]:  # noqa: ARG001
    if 3 in pieces:
        raise DataError("piece 3: not today")
    return pieces


def test_a_network_that_cannot_be_sent_is_refused_on_all_ranks() -> None:
    class Local(nn.Linear):
        pass

    def work() -> None:
        few = fedcdp.partition(fedcdp.load("cancer"), clients=12, scheme="linear")
        fedcdp.attack(PLAN, model=Local(30, 2), federation=few, attack="cpl", victims=4)

    for ended in ended_on_ranks(2, led(work)):
        assert type(ended.error) is RankError
        assert "cannot be sent to other ranks" in str(ended.error)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_rank_ends_the_others(victim: int) -> None:
    def on_rank(rank: int) -> Any:
        real = reconstructing._attack

        def attacked(*arguments: Any) -> Any:
            if rank == victim:
                os._exit(9)
            return real(*arguments)

        reconstructing._attack = attacked
        return led(lambda: searched("dlg"))(rank)

    ended = ended_on_ranks(3, on_rank)
    assert ended.pop(victim).status == 9
    for each in ended:
        assert isinstance(each.error, LostRankError), each
        assert isinstance(each.error, FedcdpError)
