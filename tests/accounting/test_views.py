"""The table of views: each line applies somewhere, no two at once, and z is what its columns say."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest

from fedcdp.accounting.mechanisms import Gaussian, Records
from fedcdp.accounting.population import Population
from fedcdp.accounting.views import TABLE, Line, Setting, views
from fedcdp.config.plan import Plan
from fedcdp.errors import PlanError

LAYERS, SIGMA = 3, 1.7
CHOICES: dict[str, tuple[Any, ...]] = {
    "method": ("fed-cdp", "fed-sdp"),
    "noise": ("example", "batch", "cohort", "sum"),
    "noise_at": ("server", "client"),
    "client_sampling": ("fixed", "poisson"),
    "per_round": (4, 10),
    "local_steps": (1, 3),
    "secure_aggregation": (False, True),
    "compression": (0.0, 0.5),
    "colluders": (0, 2),
}


def settings() -> list[Setting]:
    found = []
    for chosen in itertools.product(*CHOICES.values()):
        try:
            plan = Plan(batch_size=2, rounds=2, noise_multiplier=SIGMA, **dict(zip(CHOICES, chosen, strict=True)))
        except PlanError:  # noise on the sum, or colluders, where the plan refuses them
            continue
        for copies, records in itertools.product((1, 3), (1, 20)):
            population = Population(10, records, copies, LAYERS)
            found.append(Setting(plan, population, Records(plan, records)))
    return found


SETTINGS = settings()


def test_every_line_applies_somewhere() -> None:
    applied = {line for setting in SETTINGS for line in setting.lines()}
    assert [line for line in TABLE if line not in applied] == []


def test_a_plan_has_one_line_for_each_row() -> None:
    for setting in SETTINGS:
        rows = Counter((line.adversary, line.unit, line.relation) for line in setting.lines())
        assert set(rows.values()) == {1}, setting
        assert {("server", "record", "zero-out"), ("update", "record", "zero-out"), ("model", "record", "zero-out"),
                ("example", "record", "zero-out")} <= set(rows)  # fmt: skip


def expected(line: Line, setting: Setting) -> tuple[float, float]:
    """Sensitivity and noise by the text of docs/guarantees.md, written out once more."""
    plan, slots = setting.plan, setting.plan.slots
    share = 1 / math.sqrt(plan.per_round - plan.colluders)
    step = {"example": math.sqrt(slots), "batch": 1.0, "cohort": 1 / plan.per_round, "sum": share}[plan.noise]
    cohort = plan.secure_aggregation and not plan.compression
    known = {"server": plan.colluders, "model": max(plan.colluders, 1)}.get(line.adversary)
    if line.method == "fed-cdp":
        enough = setting.population.records >= plan.batch_size or plan.noise == "sum"
        cohort = cohort and plan.local_steps == 1 and enough
        if line.adversary == "example":
            return (2.0 if line.relation == "replace-one" else 1.0), 1.0
        moved = slots if line.unit == "client" else 1.0
        if known is None or not cohort:
            return moved, step
        if line.unit == "unique":
            moved = min(3, plan.per_round)
        hidden = line.adversary == "model" and plan.per_round < 10
        return (2.0 * slots if hidden else moved), step * math.sqrt(plan.per_round - known)
    moved = 1.0 if line.unit == "client" or line.adversary == "example" else 2.0
    if line.adversary == "example":
        return 1.0, 1.0
    if plan.noise_at == "client":
        update = share if plan.noise == "sum" else 1.0
        if known is None or not cohort:
            return moved, update
        if line.unit == "unique":
            return 2.0 * min(3, plan.per_round), update * math.sqrt(plan.per_round - known)
        hidden = line.adversary == "model" and plan.per_round < 10
        return (2.0 if hidden else moved), update * math.sqrt(plan.per_round - known)
    if line.adversary == "model" and line.unit == "unique":
        return 2.0 * (3 if plan.client_sampling == "poisson" else min(3, plan.per_round)), 1.0
    return moved, 1.0


def test_sensitivity_and_noise_are_those_of_the_guarantees() -> None:
    for setting in SETTINGS:
        if setting.plan.secure_aggregation and setting.plan.client_sampling == "poisson":
            continue
        for line in setting.lines():
            assert (line.sensitivity.of(setting), line.noise.of(setting)) == pytest.approx(expected(line, setting)), line


def test_z_is_the_noise_over_the_sensitivity() -> None:
    plan = Plan(batch_size=2, rounds=1, local_steps=1, per_round=10, noise_multiplier=SIGMA, record_sampling="partition")
    population = Population(10, 2, 1, LAYERS)
    setting = Setting(plan, population, Records(plan, 2))
    for line, view in zip(setting.lines(), setting.views(), strict=True):
        z = SIGMA * line.noise.of(setting) / (line.sensitivity.of(setting) * math.sqrt(LAYERS))
        shown = view.worst([SIGMA])
        assert isinstance(shown, Gaussian)
        assert shown.z == pytest.approx(z), line


def test_a_secure_sum_of_a_poisson_cohort_is_refused() -> None:
    plan = Plan(batch_size=2, per_round=4, client_sampling="poisson", secure_aggregation=True)
    with pytest.raises(PlanError, match="energy of the noise"):
        views(plan, Population(10, 20, 1, LAYERS))
