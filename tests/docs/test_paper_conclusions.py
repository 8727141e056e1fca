"""Conclusions on the page about the reproduction: each still stands on the page, and the measured figures still carry it."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest

from fedcdp.studies.reproduce.catalogue import table
from fedcdp.studies.reproduce.runner import TableResults
from tools.pages import ROOT

PAGE = " ".join((ROOT / "docs" / "reproduction.md").read_text().split())


@cache
def cells_of(name: str) -> dict[str, Any]:
    return TableResults(table(name), ROOT / "results" / "reproduction").cells


def each(name: str, cells: str, what: str = "accuracy") -> list[float]:
    """A figure of all cells of a pattern, in the order of the table."""
    found = [cells_of(name)[cell][what] for cell in table(name).cells if cell in cells_of(name) and fnmatchcase(cell, cells)]
    assert found, f"nothing in {name} is called {cells}"
    return found


def one(name: str, cell: str, what: str = "accuracy") -> float:
    return float(cells_of(name)[cell][what])


def apart(name: str, cells: str) -> list[float]:
    """Measured minus printed."""
    rows = [table(name).cells[cell].row for cell in cells_of(name) if fnmatchcase(cell, cells)]
    found = [cells_of(name)[cell]["accuracy"] for cell in cells_of(name) if fnmatchcase(cell, cells)]
    assert found, f"nothing in {name} is called {cells}"
    return [value - table(name).printed[row] for row, value in zip(rows, found, strict=True)]


def range_of(values: list[float]) -> float:
    return max(values) - min(values)


def gain(population: str) -> float:
    return one("population", f"fed-cdp-decay/{population}/cohort") - one("population", f"fed-cdp/{population}/cohort")


_FITTING = ("mnist", "lfw", "adult", "cancer")
CONCLUSIONS: list[tuple[str, Callable[[], bool]]] = [
    ("**Accuracy without privacy** on MNIST, LFW and Adult.",
     lambda: all(min(apart("accuracy", f"{name}/non-private/plain")) > -0.005 for name in ("mnist", "lfw", "adult"))),
    ("**Fed-CDP under `cohort` noise** on MNIST, LFW, Adult and cancer",
     lambda: all(abs(apart("accuracy", f"{name}/Fed-CDP/cohort")[0]) < 0.03 for name in _FITTING)),
    ("Using half of 10,000 clients per round is as good as using a twentieth",
     lambda: range_of(each("population", "fed-cdp/K10000-Kt[5]*00/cohort")) < 0.01),
    ("**More noise costs little**",
     lambda: all(range_of(each("noise", f"{name}/*/cohort")) < 0.015 for name in ("mnist", "adult"))),
    ("On LFW it costs more than printed",
     lambda: one("noise", "lfw/s0.5/cohort") - one("noise", "lfw/s8/cohort") > 0.683 - 0.646),
    ("**Fed-SDP** at C = 0.5 with a moving average and noise at the server",
     lambda: abs(apart("accuracy", "mnist/Fed-SDP/C = 0.5; average .9")[0]) < 0.02),
    ("It needs many clients in a round",
     lambda: (found := each("population", "fed-sdp/K1000-Kt*/C=0.5")) == sorted(found) and found[0] < 0.7),
    ("and 0 % under Fed-CDP", lambda: max(each("attacks", "*/type2/Fed-CDP*", "success_rate")) == 0),
    ("**Pruning is no defence**",
     lambda: one("compression", "leakage/50%/non-private (aware)", "success_rate") > 0.9),
    ("**Fed-CDP as its algorithm is written** (`example`).",
     lambda: max(*apart("population", "fed-cdp*/*/example"), *apart("accuracy", "mnist/Fed-CDP/example*")) < -0.05),
    ("**Fed-SDP at C = 4**", lambda: one("accuracy", "mnist/Fed-SDP/C = 4") < 0.3),
    ("With 500 clients in a round it learns", lambda: one("population", "fed-sdp/K1000-Kt500/C=4") > 0.9),
    ("Under `cohort` noise, at a learning rate that fits the bound, MNIST stays within",
     lambda: all(range_of(each("clip", f"{name}/*/cohort")) < 0.02 for name in ("mnist", "cifar10", "adult", "cancer"))),
    ("LFW falls from", lambda: one("clip", "lfw/C0.5/cohort") - one("clip", "lfw/C8/cohort") > 0.05),
    ("**The gain of a decaying clip bound** under `cohort` noise depends on K_t",
     lambda: min(map(gain, ("K100-Kt5", "K100-Kt10", "K100-Kt20"))) > 0.03 > gain("K1000-Kt100")),
    ("**Cancer's .993** comes from one split",
     lambda: min(found := cells_of("accuracy")["cancer/non-private/plain"]["accuracies"]) < 0.993 <= max(found)),
    ("`cohort` noise fits those of 1,000 clients and more, but not those of 100",
     lambda: max(map(abs, apart("population", "fed-cdp*/K1000*/cohort"))) < 0.02
     and max(map(abs, apart("population", "fed-cdp*/K100-*/cohort"))) > 0.1),
    ("Noise that depends on K_t alone cannot distinguish the two",
     lambda: abs(one("population", "fed-cdp/K100-Kt50/cohort") - one("population", "fed-cdp/K1000-Kt50/cohort")) < 0.01),
    ("Without privacy, the paper prints .924 to .965 for K = 100, and we measure",
     lambda: min(apart("population", "nonprivate/K100-*/measured")) > 0.01),
    ("**Time**", lambda: all(found["us"]["median"] < 10 for found in cells_of("time").values())),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "holds"), CONCLUSIONS, ids=[sentence[:50] for sentence, _ in CONCLUSIONS])
def test_the_figures_carry_what_the_page_concludes(sentence: str, holds: Callable[[], bool]) -> None:
    assert sentence in PAGE
    assert holds(), "the figures no longer carry this sentence: rewrite it in docs/templates/docs/reproduction.md.jinja"
