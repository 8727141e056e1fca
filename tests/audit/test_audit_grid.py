"""No attack on the grid of plans proves more than the ε that is printed, and sabotage is caught: `make audits`, in short.

The full grid takes minutes (results/audit.md). Here, few trials: beside the bound that needs no assumption stands the
sharper one of a Gaussian release, which every unmixed release is, and which shows an ε that is too small by a third.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.audit_grid import Case, Verdict, run, sabotaged_cases, sound_cases

QUICK = [case for case in sound_cases() if case.adversary != "model" and case.clients is None and case.participations == 1]
SOUND = [case for case in QUICK if case.plan.record_sampling == "partition" or case.plan.local_steps == 1]
BROKEN = [case for case in sabotaged_cases() if case.adversary != "model"]
TRIALS = 3_000


def named(cases: list[Case]) -> list[str]:
    return [f"{case.plan.method}, {case.name}, {case.adversary}" for case in cases]


def every_third(cases: list[Case]) -> list[Any]:
    """All cases, of which all but every third are slow."""
    return [pytest.param(case, marks=[] if at % 3 == 0 else pytest.mark.slow) for at, case in enumerate(cases)]


def verdict(case: Case, trials: int) -> Verdict:
    (found,) = run([case], trials)
    return found


def test_the_grid_covers_all_methods_conventions_and_samplings() -> None:
    cases = sound_cases()
    assert len(cases) >= 30
    assert all(0 < case.printed() < 30 for case in cases[::5])
    seen = {(case.plan.noise, case.plan.record_sampling) for case in cases if case.plan.method == "fed-cdp"}
    assert len(seen) == 11  # every sampling of three conventions, and two of noise on the sum
    assert {case.plan.method for case in cases} == {"fed-cdp", "fed-cdp-decay", "fed-sdp"}
    assert {(case.plan.noise_at, case.unit) for case in cases if case.plan.method == "fed-sdp"} == {
        (place, unit) for place in ("server", "client") for unit in ("record", "client", "unique")
    }
    assert {case.adversary for case in cases} == {"example", "update", "server", "model"}


@pytest.mark.parametrize("case", every_third(SOUND), ids=named(SOUND))
def test_a_sound_mechanism_keeps_within_what_is_printed(case: Case) -> None:
    found = verdict(case, TRIALS)
    assert found.as_it_must
    if found.found.epsilon_gaussian is not None:
        assert 0.5 * found.printed < found.found.epsilon_gaussian <= found.printed


@pytest.mark.parametrize("case", every_third(BROKEN), ids=named(BROKEN))
def test_sabotage_shows(case: Case) -> None:
    found = verdict(case, TRIALS).found
    shown = found.epsilon_lower if found.epsilon_gaussian is None else found.epsilon_gaussian
    assert shown > case.printed()


def test_an_audit_that_is_fooled_is_a_defect() -> None:
    """What `make audits` fails on."""
    sound, broken = SOUND[0], BROKEN[0]
    both = [verdict(case, 1_000) for case in (sound, broken)]
    assert both[0].as_it_must
    fooled = Verdict(broken, math.inf, both[1].found)
    wrong = Verdict(sound, -1.0, both[0].found)
    assert not fooled.as_it_must
    assert not wrong.as_it_must
