"""The rogue-server trial: its hand-written sequences, a sample of the generated ones, and defects that it must find."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedcdp.accounting import pld
from fedcdp.accounting.mechanisms import Gaussian, SlottedPoisson, repeated
from fedcdp.deploy.protocol import client, first_release, grant
from fedcdp.deploy.protocol.client_ledger import Accepted, ClientLedger
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.deploy.protocol.task import Task
from tests.support.pairs import sample_first
from tools.rogue.accountant import Release, loss_of, total_epsilon
from tools.rogue.client import Client, watched
from tools.rogue.sequences import HAND_WRITTEN
from tools.rogue.server import trial

SHARE, SHARES = 40, 6


def play(name: str, base: Path) -> Client:
    reader, events = HAND_WRITTEN[name]
    base.mkdir(parents=True, exist_ok=True)
    one = Client(base, reader, random.Random(0))
    with watched(one):
        events(one)
    return one


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_no_hand_written_sequence_gets_more_than_was_granted(name: str, tmp_path: Path) -> None:
    one = play(name, tmp_path)
    assert one.verdict() is None
    assert bool(one.witness.seen) == (name != "tasks that were never accepted")


@pytest.mark.parametrize("share", sample_first(range(SHARES)))
def test_no_generated_sequence_gets_more_than_was_granted(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client._LOG, "disabled", True)
    found = trial(range(SHARE * share, SHARE * (share + 1)))
    assert found["beyond_the_grant"] == []
    assert found["with_a_release"] > SHARE / 2


# Defects -------------------------------------------------------------------------------------------------------------


def other_tasks_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClientLedger, "reservations", lambda ledger, but=None: [])  # noqa: ARG005


def equal_tasks_hide_each_other(patch: pytest.MonkeyPatch) -> None:
    """As in version 0.1.0: tasks are taken in any form, and those that compare equal are taken for one another."""
    real, affordable, asking = ClientLedger.reservations, ClientPolicy._affordable, list[Task]()

    def reservations(ledger: ClientLedger, but: int | None = None) -> list[Any]:
        return [each for each in real(ledger, but) if each.task not in asking]

    def hiding(policy: ClientPolicy, accepted: Accepted, *rest: Any) -> Any:
        asking[:] = [accepted.task]
        return affordable(policy, accepted, *rest)

    patch.setattr(ClientLedger, "reservations", reservations)
    patch.setattr(ClientPolicy, "_affordable", hiding)
    patch.setattr(Task, "from_json", Task.from_ledger)
    patch.setattr("fedcdp.deploy.protocol.task._unsigned", lambda value: value)


def a_reservation_does_not_bind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accepted, "left", property(lambda accepted: 1 if accepted.blocks else 0))


def the_noise_of_the_first_round_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grant, "least_noise_multiplier", lambda plan: plan.noise_multiplier)


def a_published_seed_is_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClientPolicy, "objection", lambda policy, task: None)  # noqa: ARG005


def nothing_is_charged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClientLedger, "charge", lambda *given: None)  # noqa: ARG005


def moments_are_drawn_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accepted, "gave_moments", False)
    patch.setattr("fedcdp.deploy.protocol.client_ledger._objection", lambda *given: None)  # noqa: ARG005
    patch.setattr("fedcdp.deploy.protocol.first_release.save_tensors", lambda *given: None)  # noqa: ARG005
    drawn: list[Any] = []
    real = first_release.noised_moments
    patch.setattr(first_release, "noised_moments", lambda *given: (drawn.append(real(*given)), drawn[-1])[1])
    patch.setattr(first_release, "_load", lambda *given: drawn[-1])  # noqa: ARG005


def moments_cost_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accepted, "covers_moments", lambda *given: False)  # noqa: ARG005


DEFECTS = {
    moments_are_drawn_again: "moments again and again",
    moments_cost_nothing: "moments again and again",
    other_tasks_are_forgotten: "forty tasks",
    equal_tasks_hide_each_other: "negative zeros",
    a_reservation_does_not_bind: "one round again and again",
    the_noise_of_the_first_round_counts: "the round with the least noise",
    a_published_seed_is_accepted: "tasks without protection",
    nothing_is_charged: "crashes before and after every release",
}


@pytest.mark.slow
@pytest.mark.parametrize(("defect", "name"), DEFECTS.items(), ids=[each.__name__ for each in DEFECTS])
def test_the_trial_finds_a_defect(
    defect: Callable[[pytest.MonkeyPatch], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert play(name, tmp_path / "sound").verdict() is None
    defect(monkeypatch)
    assert play(name, tmp_path / "defective").verdict() is not None


def _release(**changes: Any) -> Release:
    usual = {"adversary": "server", "unit": "record", "method": "fed-cdp", "noise": "example", "noise_at": "server",
             "sampling": "partition", "sigma": 3.0, "quantile_noise": None, "records": 100, "batch": 5, "slots": 5,
             "steps": 2, "per_round": 4, "layers": 2, "secret": True}  # fmt: skip
    return Release(**usual | changes)


@pytest.mark.parametrize("times", [1, 7])
def test_the_trials_accountant_agrees_with_the_packages(times: int) -> None:
    z = 3.0 * math.sqrt(5) / math.sqrt(2)
    assert total_epsilon([_release()] * times, 1e-5) == pytest.approx(
        pld.epsilon(repeated(Gaussian(z), times), 1e-5), rel=1e-4
    )
    sampled = _release(sampling="poisson", slots=15)
    ours = pld.epsilon(repeated(SlottedPoisson(100, 0.05, 15, 3.0 * math.sqrt(15) / math.sqrt(2)), 2 * times), 1e-5)
    assert total_epsilon([sampled] * times, 1e-5) == pytest.approx(ours, rel=0.02)


@pytest.mark.parametrize(
    "changes", [{"secret": False}, {"sigma": 0.0}, {"method": "nonprivate"}, {"method": "fed-sdp"},
                {"adversary": "example", "noise": "batch"}]
)  # fmt: skip
def test_the_trials_accountant_knows_what_protects_nobody(changes: dict[str, Any]) -> None:
    assert loss_of(_release(**changes)).precision == math.inf
    assert total_epsilon([_release(**changes)], 1e-5) == math.inf
