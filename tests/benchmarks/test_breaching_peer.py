"""`breaching` against fedcdp: the cells, the verdict, the tables; and the package itself where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.breaching_peer import CASES, cells, compared, markdown, tasks, verdict
from benchmarks.peers.breaching_attacks import PEERS, SITE, Answer, attack_gradient
from fedcdp.models.networks import build

EMPTY: dict[str, Any] = {"ours": {}, "answers": {}}


def row(exact: float, recognisable: float, victims: int = 50, **more: Any) -> dict[str, Any]:
    figures = {"success_rate": exact, "recognisable_rate": recognisable, "identified_rate": 1.0, "distance_median": 0.01}
    return figures | {"victims": victims, "psnr_mean": 20.0, "seconds": 10.0, "attack": "cpl", "tried": []} | more


def test_every_case_is_attacked_by_each_of_its_peers_once() -> None:
    every = [f"{case.name}/{peer}" for case in CASES.values() for peer in case.peers]
    assert sorted(cells()) == sorted(every)
    assert set(PEERS) == {peer for case in CASES.values() for peer in case.peers}


def test_finished_victims_are_not_attacked_again() -> None:
    stored = {"ours": {"single": {"summary": {"victims": 4}}}, "answers": {"single/wei": {0: {}, 2: {}}}}
    left = list(tasks(stored, ["single/wei"], 4, "cpu", None))
    assert [(task.cell, task.victim) for task in left] == [("single/wei", 1), ("single/wei", 3)]


def test_with_more_victims_fedcdp_attacks_all_again() -> None:
    stored = {"ours": {"single": {"summary": {"victims": 1}}}, "answers": {"single/wei": {0: {}}}}
    left = [(task.victim, task.victims) for task in tasks(stored, ["single/wei"], 2, "cpu", None)]
    assert left == [(None, 2), (1, 2)]


def test_fedcdp_attacks_before_breaching() -> None:
    order = [task.victim is None for task in tasks(EMPTY, ["single/wei", "batch/wei"], 2, "cpu", None)]
    assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("whose", ["fedcdp", "breaching"])
def test_the_attacks_of_one_side_can_run_alone(whose: str) -> None:
    left = list(tasks(EMPTY, ["single/wei", "batch/wei"], 3, "cpu", None, (whose,)))
    assert len(left) == (2 if whose == "fedcdp" else 6)
    assert {task.victim is None for task in left} == {whose == "fedcdp"}


@pytest.mark.parametrize(
    ("theirs", "as_good", "stronger"),
    [
        ({"wei": row(0.5, 0.9)}, True, []),
        ({"wei": row(0.6, 0.9)}, False, ["wei"]),
        ({"wei": row(0.5, 0.9), "deepleakage": row(0.0, 1.0)}, False, ["deepleakage"]),
        ({"wei": row(1.0, 1.0, victims=49)}, None, []),
        ({}, None, []),
    ],
)
def test_the_verdict_needs_as_many_exact_and_recognisable(theirs: Any, as_good: bool | None, stronger: list[str]) -> None:
    assert verdict(row(0.5, 0.9), theirs) == {"at_least_as_good": as_good, "stronger": stronger}


def test_the_tables_say_where_breaching_is_stronger() -> None:
    best = row(0.5, 0.9, tried=[{"attack": "cpl", "success_rate": 0.5, "recognisable_rate": 0.9}, {"attack": "batch"}])
    theirs = {"wei": row(0.6, 0.9), "deepleakage": row(0.2, 0.2, victims=7)}
    case = {"title": "a case", "network": "cpl", "breaching_labels": "labels told", "best": best,
            "breaching": theirs, "verdict": verdict(best, theirs)}  # fmt: skip
    found = {"cases": {"single": case}}
    assert compared(found).endswith("| a case | 50 | 50 % / 90 % | 60 % / 90 % | `wei` | no |")
    page = markdown(found)
    assert "Stronger than fedcdp's best here: `wei`." in page
    assert "tried, exact / recognisable: `cpl` 50 % / 90 %." in page


needs_breaching = pytest.mark.skipif(not SITE.is_dir(), reason="make breaching builds build/breaching_site")


def attacked(peer: str, device: str, record: bool = True, iterations: int = 2) -> Answer:
    torch.manual_seed(0)
    network, image, label = build("cpl", (3, 32, 32), 5), torch.rand(1, 3, 32, 32), torch.tensor([3])
    gradient = torch.autograd.grad(F.cross_entropy(network(image), label), list(network.parameters()))
    shape, where = (3, 32, 32), torch.device(device)
    return attack_gradient(
        PEERS[peer], network, list(gradient), shape, 5, 1, None, device=where, seed=0, iterations=iterations, record=record
    )


@needs_breaching
@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_each_attack_of_breaching_runs(peer: str) -> None:
    answer = attacked(peer, "cpu")
    assert answer.examples.shape == (1, 3, 32, 32)
    assert answer.iterations == 2
    assert answer.evaluations >= 2
    assert not answer.recorded
    assert PEERS[peer].infers_labels is False or answer.labels.tolist() == [3]


@needs_breaching
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("peer", ["wei, as published", "deepleakage", "invertinggradients"])
def test_recorded_evaluations_lead_to_the_same_image(peer: str) -> None:
    torch.backends.cudnn.allow_tf32 = False
    plain, recorded = (attacked(peer, "cuda", record, iterations=3) for record in (False, True))
    assert recorded.recorded
    torch.testing.assert_close(plain.examples, recorded.examples, rtol=1e-2, atol=1e-2)
