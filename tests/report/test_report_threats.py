"""The table of attacks: strongest first, by observation, with the threat model's name and what was refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedcdp.report.api import report
from fedcdp.report.facts import leak_facts
from fedcdp.report.threats import MALICIOUS, MEANS, AttackTable, attack_table


def table(*summaries: dict[str, Any]) -> AttackTable | None:
    return attack_table([leak_facts({"method": "fed-cdp"} | summary, {}) for summary in summaries])


BEST: dict[str, Any] = {
    "leak": "type2", "attack": "cpl", "success_rate": 0.5, "recognisable_rate": 0.75,
    "tried": [
        {"attack": "linear-head", "success_rate": None, "refused": "needs another network"},
        {"attack": "averaging", "success_rate": 0.0, "recognisable_rate": 0.0},
        {"attack": "cpl", "success_rate": 0.5},
    ],
}  # fmt: skip
IMPRINT: dict[str, Any] = {"leak": "type0", "attack": "imprint", "success_rate": 0.9, "recognisable_rate": 0.9}
LIRA: dict[str, Any] = {"leak": "model", "attack": "lira", "auc": 0.612}


def test_the_strongest_attack_comes_first() -> None:
    found = table(LIRA, BEST, IMPRINT)
    assert found is not None
    assert [row.attack for row in found.rows] == ["imprint", "cpl", "lira", "averaging"]
    assert found.observations == ("type2", "type0", "model")


def test_labels_that_are_known_outrank_a_test_that_guesses() -> None:
    labels = {"leak": "type0", "attack": "labels", "label_accuracy": 1.0, "label_baseline": 0.4}
    found = table({"leak": "model", "attack": "membership", "auc": 0.487}, labels)
    assert found is not None
    assert [row.attack for row in found.rows] == ["labels", "membership"]


def test_every_row_names_its_threat_model_and_its_means() -> None:
    found = table(LIRA, BEST, IMPRINT)
    assert found is not None
    assert {row.attack: (row.threat, row.means) for row in found.rows} == {
        "imprint": (
            "malicious server: architecture modification, or a crafted first layer",
            "analytics-based reconstruction",
        ),
        "cpl": ("eavesdropper on the client", "optimisation-based reconstruction"),
        "averaging": ("eavesdropper on the client", "prior-based reconstruction"),
        "lira": ("anyone with the released model", "membership inference"),
    }


def test_figures_of_the_reported_attack_are_those_of_the_result() -> None:
    found = table(BEST)
    assert found is not None
    assert found.rows[0].found == {"type2": "50 % exact, 75 % recognisable"}


def test_refusals_are_listed_with_their_reasons() -> None:
    found = table(BEST)
    assert found is not None
    assert found.refused == [("linear-head", "type2", "needs another network")]


def test_an_attack_on_two_observations_is_one_row() -> None:
    found = table({"leak": "type1", "attack": "labels", "label_accuracy": 1.0}, IMPRINT,
                  {"leak": "type0", "attack": "labels", "label_accuracy": 0.25})  # fmt: skip
    assert found is not None
    row = found.rows[1]
    assert row.found == {"type1": "100 % of the labels", "type0": "25 % of the labels"}
    assert row.threat == "eavesdropper on the client or honest-but-curious server"


def test_a_single_attack_has_no_table() -> None:
    assert table(IMPRINT) is None
    assert table() is None


def test_every_attack_has_a_kind() -> None:
    from fedcdp.attacks.active_servers import ACTIVE
    from fedcdp.attacks.api import ATTACKS

    assert set(ACTIVE) == set(MALICIOUS)
    assert set(ATTACKS) - {"best", "presence"} == set(MEANS)


@pytest.mark.parametrize("tried", ["no list", [1, None], [{"attack": 7, "auc": "much"}, {"attack": {}, "refused": [1]}]])
def test_damaged_lists_of_attacks_are_left_out(tried: Any) -> None:
    found = table(BEST | {"tried": tried}, IMPRINT)
    assert found is not None
    assert "imprint" in {row.attack for row in found.rows}


def test_the_page_shows_the_table(tmp_path: Path) -> None:
    places = []
    for number, summary in enumerate((BEST, IMPRINT)):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "summary.json").write_text(json.dumps({"method": "fed-cdp"} | summary))
        places.append(place)
    page = report(places, tmp_path / "page.html").read_text()
    assert page.index('<th scope="row">imprint</th>') < page.index('<th scope="row">cpl</th>')
    assert "malicious server: architecture modification, or a crafted first layer" in page
    assert "Refused: linear-head" in page
    assert "needs another network" in page
