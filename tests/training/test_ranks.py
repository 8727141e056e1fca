"""Several ranks train as one process does: the same result to the bit, each release once. Nobody waits for a lost rank."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fedcdp
from fedcdp.accounting.ledger import Ledger
from fedcdp.errors import FedcdpError, LostRankError, PlanError, RankError, RunError
from fedcdp.mechanism import noise
from fedcdp.training import rounds
from fedcdp.training.ranks import Ranks
from tests.support.rank_jobs import ended_on_ranks, on_ranks

SMALL = {"rounds": 2, "per_round": 7, "local_steps": 2, "batch_size": 5}
PLANS: dict[str, dict[str, Any]] = {
    "fed-cdp, trimmed mean": {"aggregator": "trimmed-mean", "trim": 0.3},
    "non-private with momentum": {"method": "nonprivate", "momentum": 0.5},
    "dssgd": {"method": "dssgd", "record_sampling": "fixed"},
    "fed-sdp at the server": {"method": "fed-sdp", "clip": "quantile(0.5, 4)"},
    "fed-sdp at the client": {"method": "fed-sdp", "noise_at": "client", "client_sampling": "poisson"},
    "fed-cdp": {"server_optimizer": "adam", "ema": 0.5},
    "fed-cdp, quantile clip": {"clip": "quantile(0.5, 4)", "aggregation": "fedaveraging"},
    "fed-cdp-decay": {"method": "fed-cdp-decay", "compression": 0.3, "record_sampling": "partition"},
    "fed-cdp, noise on the sum": {"noise": "sum", "secure_aggregation": True, "local_steps": 1},
    "fed-sdp, noise on the sum": {"method": "fed-sdp", "noise_at": "client", "noise": "sum", "secure_aggregation": True},
    "private scaling": {"scaling_noise": 5.0},
}


def federation() -> fedcdp.Federation:
    return fedcdp.partition(fedcdp.load("cancer"), clients=12, scheme="linear")


def trained(plan: fedcdp.Plan, **options: Any) -> fedcdp.Run:
    torch.manual_seed(0)
    return fedcdp.simulate(nn.Linear(30, 2), federation(), plan, chunk=2, **options)


def result(run: fedcdp.Run) -> tuple[Any, ...]:
    """All that a run found; times differ."""
    weights = {name: value.numpy().tobytes() for name, value in run.model.state_dict().items()}
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in run.metrics]
    charges = [(charge.round, charge.attempt, charge.clients.tolist(), charge.bound) for charge in run.charges]
    return weights, rows, charges, run.participations.tolist(), run.scores, run.chunk, run.engine


def plan_of(name: str) -> fedcdp.Plan:
    return fedcdp.Plan(**SMALL | PLANS[name])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_compute_what_one_process_does_to_the_bit(size: int) -> None:
    def all_results(_: int) -> list[tuple[Any, ...]]:
        return [result(trained(plan_of(name))) for name in PLANS]

    alone = all_results(0)
    for results in on_ranks(size, all_results):
        for name, ours, theirs in zip(PLANS, alone, results, strict=True):
            assert ours == theirs, name


def test_ranks_write_the_same_run_directory(tmp_path: Path) -> None:
    trained(plan_of("fed-cdp"), out=tmp_path / "alone")
    on_ranks(3, lambda rank: trained(plan_of("fed-cdp"), out=tmp_path / f"of rank {rank}").rounds)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "of rank 0"]  # the others write nothing
    for name in ("ledger.jsonl", "model.safetensors", "checkpoint.safetensors", "config.toml", "engine.json"):
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "of rank 0" / name).read_bytes()


def test_a_run_of_ranks_goes_on_with_any_number(tmp_path: Path) -> None:
    plan = plan_of("fed-cdp").but(rounds=4)

    def part(rounds: int, **options: Any) -> Callable[[int], Any]:
        return lambda _: trained(plan, out=tmp_path / "run", most_releases=rounds, **options).rounds

    assert on_ranks(3, part(1)) == [1, 1, 1]
    assert on_ranks(2, part(2, resume=True)) == [2, 2]
    assert trained(plan, out=tmp_path / "run", most_releases=3, resume=True).rounds == 3
    assert on_ranks(2, lambda _: result(trained(plan, out=tmp_path / "run", resume=True)))[1] == result(trained(plan))


def test_a_run_in_memory_is_resumed_by_all_ranks() -> None:
    plan = plan_of("fed-sdp at the server")

    def in_parts(_: int) -> tuple[Any, ...]:
        return result(trained(plan, most_releases=1).resume())

    assert on_ranks(2, in_parts) == [result(trained(plan))] * 2


def test_a_follower_does_not_go_on_alone_with_a_run_in_memory() -> None:
    """It has no state to go on from, and not the releases of a training that failed."""

    def alone(_: int) -> int:
        run = trained(plan_of("fed-cdp"), most_releases=1)
        dist.destroy_process_group()
        return run.resume().releases

    first, second = ended_on_ranks(2, alone)
    assert first.result == 2
    assert type(second.error) is RunError
    assert "only rank 0 can go on alone" in str(second.error)


# Noise and draws -----------------------------------------------------------------------------------------------------


def watched(plan: fedcdp.Plan) -> Callable[[int], tuple[list[Any], int]]:
    """A training of which each rank returns the noise that it drew, as (purpose, round, client, step, values), and the
    seed of its draws."""

    def work(_: int) -> tuple[list[Any], int]:
        drawn: list[Any] = []
        kind = noise.SecureNoise if plan.secure_noise else noise.SeededNoise
        real, seeds = kind._unit, set()

        def unit(self: Any, purpose: str, round_: int, clients: Tensor, step: int, slot: int, length: int) -> Tensor:
            values = real(self, purpose, round_, clients, step, slot, length)
            for client, row in zip(clients.tolist(), values, strict=True):
                drawn.append((purpose, round_, client, step, row[:4].tolist()))
            return values

        real_portion = rounds.Simulator._portion

        def portion(self: Any, *arguments: Any) -> Any:
            seeds.add(self.data.draws.seed)
            return real_portion(self, *arguments)

        kind._unit, rounds.Simulator._portion = unit, portion  # type: ignore[method-assign]
        trained(plan)
        (seed,) = seeds
        return drawn, seed

    return work


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("name", ["fed-sdp at the server", "fed-sdp at the client", "fed-cdp", "private scaling"])
def test_each_draw_of_noise_is_made_once_and_differs(name: str, secure: bool) -> None:
    plan = plan_of(name).but(secure_noise=secure, client_sampling="fixed")
    both = on_ranks(2, watched(plan))
    everything = [each for drawn, _ in both for each in drawn]
    assert max(Counter(each[:4] for each in everything).values()) == 1
    assert max(Counter(tuple(each[4]) for each in everything).values()) == 1
    purposes = [{each[0] for each in drawn} for drawn, _ in both]
    drawn_by_the_server = {"server-noise", "server-indicator-noise", "moment-noise"}
    assert not purposes[1] & drawn_by_the_server  # rank 0 alone
    if plan.method == "fed-sdp" and plan.noise_at == "server":
        assert sum(each[0] == "server-noise" for each in everything) == plan.rounds
    else:
        counted = Counter(each[0] for each in everything if each[0] not in drawn_by_the_server)
        steps = 1 if plan.method == "fed-sdp" else plan.local_steps
        assert set(counted.values()) == {plan.rounds * plan.per_round * steps}


def test_secret_draws_are_those_of_rank_0() -> None:
    plan = plan_of("fed-cdp").but(secure_noise=True)
    (_, ours), (_, theirs) = on_ranks(2, watched(plan))
    assert ours == theirs != plan.seed
    assert on_ranks(2, watched(plan))[0][1] != ours


def test_secure_noise_is_accounted_as_in_one_process(tmp_path: Path) -> None:
    plan = plan_of("fed-cdp").but(secure_noise=True)
    found = on_ranks(2, lambda _: result(trained(plan, out=tmp_path / "run")))
    assert found[0] == found[1]  # one server step, shared
    ledger = Ledger.open(tmp_path / "run" / "ledger.jsonl")
    assert (ledger.noise, ledger.rounds, ledger.participations().sum()) == ("secure", (0, 1), 2 * plan.per_round)


def test_the_ledger_is_on_disk_before_any_rank_trains(tmp_path: Path) -> None:
    def charged_at_the_start(_: int) -> list[tuple[int, int]]:
        seen, real = [], rounds.Simulator._portion

        def portion(self: Any, state: Any, *rest: Any) -> Any:
            seen.append((state.round, Ledger.open(tmp_path / "run" / "ledger.jsonl").rounds[-1]))
            return real(self, state, *rest)

        rounds.Simulator._portion = portion  # type: ignore[method-assign]
        trained(plan_of("fed-cdp"), out=tmp_path / "run")
        return seen

    for seen in on_ranks(3, charged_at_the_start):
        assert {number for number, _ in seen} == {0, 1}
        assert all(number == charged for number, charged in seen)


# Ranks that do not fit together, and lost ones -----------------------------------------------------------------------


def other_data() -> fedcdp.Federation:
    return fedcdp.partition(fedcdp.load("cancer"), clients=12, scheme="iid", seed=1)


DIFFERENT: dict[str, Callable[[], Any]] = {
    "plan": lambda: trained(plan_of("fed-cdp").but(clip=3.0)),
    "arguments": lambda: trained(plan_of("fed-cdp"), evaluate_every=2),
    "data": lambda: fedcdp.simulate(nn.Linear(30, 2), other_data(), plan_of("fed-cdp"), chunk=2),
    "network": lambda: fedcdp.simulate(nn.Sequential(nn.Linear(30, 2)), federation(), plan_of("fed-cdp"), chunk=2),
    "loss": lambda: trained(plan_of("fed-cdp"), loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets)),
}


@pytest.mark.parametrize("field", DIFFERENT)
def test_a_rank_that_differs_is_refused_before_the_first_release(tmp_path: Path, field: str) -> None:
    def work(rank: int) -> None:
        DIFFERENT[field]() if rank == 1 else trained(plan_of("fed-cdp"), out=tmp_path / "run")

    for ended in ended_on_ranks(3, work):
        assert type(ended.error) is RankError
        assert str(ended.error).startswith(f"{field}: rank 1 does not have that of rank 0")
    assert not (tmp_path / "run").exists()


def test_an_error_of_the_leader_is_raised_on_all_ranks(tmp_path: Path) -> None:
    trained(plan_of("fed-cdp"), out=tmp_path / "run")
    for ended in ended_on_ranks(3, lambda _: trained(plan_of("fed-cdp"), out=tmp_path / "run")):
        assert type(ended.error) is RunError
        assert "already exists" in str(ended.error)


@pytest.mark.parametrize("error", [PlanError("clip: not today"), ValueError("a record: 17")])
def test_an_error_of_a_follower_ends_all_ranks(error: Exception) -> None:
    def work(rank: int) -> None:
        def fail(*_: Any) -> Any:
            raise error

        if rank == 1:
            rounds.Simulator._portion = fail  # type: ignore[method-assign]
        trained(plan_of("fed-cdp"))

    first, second, third = ended_on_ranks(3, work)
    assert type(second.error) is type(error)
    for each in (first, third):
        known = isinstance(error, FedcdpError)
        assert type(each.error) is (PlanError if known else LostRankError)
        assert ("rank 1: clip: not today" if known else "rank 1 failed (ValueError)") in str(each.error)
        assert "17" not in str(each.error)  # an unknown error may quote data


@pytest.mark.parametrize("victim", [0, 2])
def test_a_lost_rank_ends_the_others_and_the_run_goes_on(tmp_path: Path, victim: int) -> None:
    plan = plan_of("fed-cdp").but(rounds=3)

    def work(rank: int) -> None:
        real = rounds.Simulator._portion

        def portion(self: Any, state: Any, *rest: Any) -> Any:
            if state.round == 1 and rank == victim:
                os._exit(9)
            return real(self, state, *rest)

        rounds.Simulator._portion = portion  # type: ignore[method-assign]
        trained(plan, out=tmp_path / "run")

    ended = ended_on_ranks(3, work)
    assert ended.pop(victim).status == 9
    for each in ended:
        assert type(each.error) is LostRankError
        assert "was lost, so this job ends" in str(each.error)
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").rounds == (0, 1)  # the round that was lost is counted
    again = trained(plan, out=tmp_path / "run", resume=True)
    assert result(again) == result(trained(plan))


# One process ---------------------------------------------------------------------------------------------------------


def test_one_process_has_no_followers() -> None:
    ranks = Ranks.present()
    assert (ranks.leads, ranks.several) == (True, False)
    with ranks.joined():
        ranks.agree({"plan": b"any"})
        assert ranks.once(lambda: 3) == 3
    assert ranks.device("cuda") == "cuda"
