"""The page: complete in one file, true to the runs and attacks it is about, and silent about what nobody accounts for."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcdp
from fedcdp.errors import RunError
from fedcdp.report import report
from fedcdp.report.api import gather, private_records
from fedcdp.report.facts import METHOD_NAMES
from fedcdp.report.wording import NBSP


class Outline(HTMLParser):
    """What a page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def outline(page: Path) -> Outline:
    return Outline(page.read_text(encoding="utf-8"))


@pytest.fixture
def runs(demo_directory: Path, tmp_path: Path) -> Path:
    """The demo's runs, to do with as one likes."""
    return Path(shutil.copytree(demo_directory, tmp_path / "runs"))


def test_the_page_is_one_small_file_that_loads_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert len(text.encode()) < 2e6
    found = outline(page)
    for tag, attributes in found.tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith(("data:", "#")), (tag, attributes)
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    assert "url(" not in text
    policies = [each["content"] for each in found.all("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    assert policies
    assert (policies[0] or "").startswith("default-src 'none'")


def test_the_page_shows_every_method_with_its_accuracy_and_its_spending(demo_directory: Path, page: Path) -> None:
    found = outline(page)
    for row in json.loads((demo_directory / "demo.json").read_text())["table"]:
        assert METHOD_NAMES[row["method"]] in found.text
        assert f"{100 * row['accuracy']:.1f} %" in found.text
        if row["type0"]["epsilon"] != "inf":
            assert f"ε = {row['type0']['epsilon']:.3g}" in found.text


def test_an_infinite_epsilon_is_shown_with_its_reason(page: Path) -> None:
    text = outline(page).text
    assert "Non-private: ε = ∞ (nothing is noised)" in text
    assert "the server adds the noise after it has read the raw updates" in text


def test_every_row_of_the_statement_stands_with_its_assumption(demo_directory: Path, page: Path) -> None:
    text = outline(page).text
    runs, _ = gather([demo_directory])
    for run in runs:
        assert run.privacy is not None
        for row in run.privacy.rows:
            assert row.assumption in text
        for sentence in run.privacy.notes:
            assert sentence in text


def test_epsilon_over_rounds_ends_at_what_the_ledger_says(demo_directory: Path) -> None:
    from fedcdp.training.ledger_check import spent

    for run in gather([demo_directory])[0]:
        _, privacy = spent(demo_directory / run.plan.method)
        assert [at for at, _ in run.spending] == [1, 2, 3]
        assert run.spending[-1][1] == privacy == run.privacy
        used = [stated.row("server").epsilon_used for _, stated in run.spending]
        assert used == sorted(used)


def test_what_leaks_is_as_it_was_measured(demo_directory: Path, page: Path) -> None:
    """Two raw gradients are enough for a readable digit; under Fed-CDP there is none."""
    table = {row["method"]: row for row in json.loads((demo_directory / "demo.json").read_text())["table"]}
    assert (table["nonprivate"]["type2"]["leaked"], table["nonprivate"]["type2"]["of"]) == (2, 2)
    assert (table["fed-sdp"]["type2"]["leaked"], table["fed-sdp"]["type2"]["of"]) == (2, 2)
    assert table["fed-cdp"]["type2"]["leaked"] == table["fed-cdp-decay"]["type2"]["leaked"] == 0
    text = outline(page).text
    assert "reconstructs training examples: 2 of 2 under Non-private and 2 of 2 under Fed-SDP" in text
    assert "leaks: 2 of 2" in text
    assert "none of 2 tried: clip-aware" in text


def test_a_failed_attack_is_neither_green_nor_called_nothing(page: Path) -> None:
    found = outline(page)
    badges = [each["class"] for each in found.all("span") if "badge" in (each.get("class") or "")]
    assert {"badge leaks", "badge failed"} == set(badges)
    assert "--good" not in page.read_text(encoding="utf-8")
    assert "nothing: 0" not in found.text
    assert found.text.count("tried: ") >= 12  # in every cell: four methods, three readers


LINEAR_HEAD = {
    "method": "fed-cdp", "leak": "type2", "attack": "linear-head", "victims": 100, "examples": 100, "success_rate": 0.0,
    "recognisable_rate": 0.0, "candidates": 1000, "tried": [
        {"attack": "linear-head", "success_rate": 0.0}, {"attack": "averaging", "success_rate": None, "refused": "why"},
        {"attack": "cpl", "success_rate": 0.0},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("share", "kind", "words"),
    [(0.4, "leaks", "leaks: 40 of 100 identified among 1,000"), (0.01, "failed", "none of 100")],
)
def test_what_is_identified_above_chance_is_a_leak(tmp_path: Path, share: float, kind: str, words: str) -> None:
    (tmp_path / "leak").mkdir()
    (tmp_path / "leak" / "summary.json").write_text(json.dumps(LINEAR_HEAD | {"identified_rate": share}))
    found = outline(report(tmp_path / "leak", tmp_path / "page.html"))
    assert words in found.text
    assert "tried: linear-head, cpl" in found.text
    assert [each for each in found.all("span") if each.get("class") == f"badge {kind}"]
    assert ("identifies training examples: 40 of 100 under Fed-CDP" in found.text) is (kind == "leaks")


def test_the_slider_is_labelled_and_the_frames_are_there_without_a_script(page: Path) -> None:
    found = outline(page)
    (slider,) = [each for each in found.all("input") if each["type"] == "range"]
    assert slider["aria-valuetext"]
    assert [each for each in found.all("label") if each["for"] == slider["id"]]
    words = (slider["data-words"] or "").split("|")
    assert len(words) == int(slider["max"] or 0) + 1
    assert words[:2] == ["start: random pixels", "after 1 iteration"]
    frames = [each for each in found.all("li") if "data-at" in each]
    assert len(frames) > 4 * 3 * 3


def test_pictures_have_words_and_tables_have_headers(page: Path) -> None:
    found = outline(page)
    assert all(each["alt"] for each in found.all("img"))
    assert all(each.get("scope") in ("col", "row") for each in found.all("th"))
    assert len(found.all("caption")) == len(found.all("table"))
    assert all(each.get("role") == "img" or each.get("aria-hidden") == "true" for each in found.all("svg"))
    assert found.all("html")[0]["lang"] == "en"
    assert [each for each in found.all("a") if each["href"] == "#main"]


def test_the_same_runs_give_the_same_page_to_the_byte(demo_directory: Path, page: Path, tmp_path: Path) -> None:
    assert report(demo_directory, tmp_path / "again.html").read_bytes() == page.read_bytes()


# How it is put -------------------------------------------------------------------------------------------------------


def headline(page: Path) -> str:
    (found,) = re.findall(r'<p class="headline">(.*?)</p>', page.read_text(encoding="utf-8"))
    return str(found).replace(NBSP, " ")


def test_one_headline_says_the_main_result(demo_directory: Path, page: Path) -> None:
    table = {row["method"]: row for row in json.loads((demo_directory / "demo.json").read_text())["table"]}
    reached = [f"{100 * table[method]['accuracy']:.1f} %" for method in ("fed-cdp", "fed-cdp-decay", "nonprivate")]
    private = " and ".join(dict.fromkeys(reached[:2]))
    said = headline(page)
    assert said.startswith(
        "The attacks on this page reconstruct up to 2 of 2 training examples under Non-private and Fed-SDP "
    )
    assert f"and none under Fed-CDP and Fed-CDP (decay), which reach {private} accuracy at ε = " in said
    assert said.endswith(f" for a record against the server; non-private training reaches {reached[2]}.")


def test_the_headline_of_a_run_without_attacks_is_its_accuracy(runs: Path, tmp_path: Path) -> None:
    shutil.rmtree(runs / "fed-sdp" / "attacks")
    said = headline(report(runs / "fed-sdp", tmp_path / "page.html"))
    assert re.fullmatch(r"Accuracy is [\d.]+ % under Fed-SDP(?: \(ε = [\d.]+ for a client against anyone .*\))?\.", said)


def test_the_headline_of_failed_attacks_claims_no_more(runs: Path, tmp_path: Path) -> None:
    said = headline(report(runs / "fed-cdp" / "attacks" / "type2-clip-aware", tmp_path / "page.html"))
    assert said == "The attacks on this page reconstruct no training example under Fed-CDP."


def test_the_headline_counts_an_identified_example_as_leaked(tmp_path: Path) -> None:
    (tmp_path / "leak").mkdir()
    (tmp_path / "leak" / "summary.json").write_text(json.dumps(LINEAR_HEAD | {"identified_rate": 0.4}))
    said = headline(report(tmp_path / "leak", tmp_path / "page.html"))
    assert (
        said == "The attacks on this page identify up to 40 of 100 training examples among 1,000 candidates under Fed-CDP."
    )


def test_no_line_breaks_between_a_number_and_its_unit(page: Path) -> None:
    text = re.sub(r"<(style|script)>.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.search(rf"\d{NBSP}%", text)
    assert not re.search(r"\d\s*\n?[ \t](%|dB|clients?\b)", text.replace("&nbsp;", NBSP))
    assert f"ε{NBSP}={NBSP}" in text
    assert not re.search(r"[εδσ] = ", text)


def test_privacy_statements_are_folded_and_need_no_script(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    folded = re.findall(r"<details([^>]*)>(.*?)</details>", text, flags=re.DOTALL)
    assert all("open" not in attributes for attributes, _ in folded)
    assert text.count("Privacy statement of ") == 4
    assert sum("Privacy statement of " in inside for _, inside in folded) == 4
    assert all(inside.strip().startswith("<summary>") for _, inside in folded)


def test_lines_that_coincide_are_told_apart(page: Path) -> None:
    """The demo's two Fed-CDP runs spend the same ε."""
    text = outline(page).text
    assert text.count("Fed-CDP and Fed-CDP (decay) coincide. Their dashes and marks take turns.") == 4
    dashed = [each for each in outline(page).all("polyline") if "stroke-dashoffset" in (each.get("style") or "")]
    assert {each["class"] for each in dashed} == {"line m-fed-cdp d0", "line m-fed-cdp-decay d0"}


def test_the_table_behind_a_chart_has_about_ten_values_of_a_line(runs: Path, tmp_path: Path) -> None:
    metrics = runs / "nonprivate" / "metrics.jsonl"
    row = json.loads(metrics.read_text().splitlines()[-1])
    metrics.write_text("".join(json.dumps(row | {"round": at, "accuracy": at / 200}) + "\n" for at in range(1, 121)))
    for name in ("ledger.jsonl", "checkpoint.safetensors"):
        (runs / "nonprivate" / name).unlink()
    text = report(runs / "nonprivate", tmp_path / "page.html").read_text(encoding="utf-8")
    (table,) = re.findall(r"<caption>Accuracy on held-out data, by round</caption>(.*?)</table>", text, flags=re.DOTALL)
    assert re.findall(r">Non-private</th><td class=\"number\">(\d+)<", table) == [
        str(at) for at in (*range(1, 110, 12), 120)
    ]


def test_the_page_says_which_network_each_column_is_about(page: Path) -> None:
    text = outline(page).text
    assert "Accuracy network: oriented-gradients" in text
    assert "Type-2 on the client, during training network: small" in text
    assert "Accuracy is that of a linear layer on fixed features (oriented-gradients)." in text
    assert (
        "The attacks are on a small network that learns its own features (small), before its first round, under the" in text
    )
    assert "A plan clips the whole gradient at once, so its ε is the same for both networks." in text


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [(None, "ε is that of the trained network and need not hold for the attacked one."),
     ({"clip_mode": "layer"}, "ε is that of the trained network and need not hold for the attacked one.")],
)  # fmt: skip
def test_an_attack_under_another_plan_is_not_said_to_have_its_epsilon(
    runs: Path, tmp_path: Path, plan: dict[str, str] | None, sentence: str
) -> None:
    for path in (runs / "fed-cdp").glob("attacks/*/summary.json"):
        summary = json.loads(path.read_text())
        summary["plan"] = None if plan is None else summary["plan"] | plan
        path.write_text(json.dumps(summary))
    text = outline(report(runs / "fed-cdp", tmp_path / "page.html")).text
    assert sentence in text
    assert "under the same plan" not in text


def test_fed_sdp_is_shown_with_the_epsilon_of_a_client(demo_directory: Path, page: Path) -> None:
    (row,) = [row for row in json.loads((demo_directory / "demo.json").read_text())["table"] if row["method"] == "fed-sdp"]
    assert row["model"]["epsilon_client"] < row["model"]["epsilon"]
    assert f"ε = {row['model']['epsilon_client']:.3g} for a client" in outline(page).text


# What must not be on it ----------------------------------------------------------------------------------------------


def with_norms(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"gradient_norm": 1.5 + row["round"]}) for row in rows]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_gradient_norms_are_shown_of_a_non_private_run(runs: Path, tmp_path: Path) -> None:
    with_norms(runs / "nonprivate")
    text = outline(report(runs / "nonprivate", tmp_path / "page.html")).text
    assert "Mean gradient norm" in text
    assert "4.5" in text


def test_gradient_norms_of_a_private_run_are_not_shown_even_if_they_were_kept(runs: Path, tmp_path: Path) -> None:
    with_norms(runs / "fed-cdp")
    assert "gradient norm" not in outline(report(runs / "fed-cdp", tmp_path / "page.html")).text


def test_without_gradient_norms_there_is_no_chart_of_them(runs: Path, tmp_path: Path) -> None:
    metrics = runs / "nonprivate" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "gradient_norm"}) + "\n" for row in rows))
    assert "gradient norm" not in outline(report(runs / "nonprivate", tmp_path / "page.html")).text


@pytest.mark.parametrize(("method", "shown"), [("nonprivate", True), ("fed-cdp", False)])
def test_the_seed_of_a_private_run_is_not_shown(runs: Path, tmp_path: Path, method: str, shown: bool) -> None:
    config = runs / method / "config.toml"
    config.write_text(re.sub(r"^seed = 0$", "seed = 987654", config.read_text(), flags=re.MULTILINE))
    (runs / method / "checkpoint.safetensors").unlink()  # it names the plan with its seed
    assert ("987654" in report(runs / method, tmp_path / "page.html").read_text()) is shown


def test_the_place_of_a_users_file_is_not_shown(runs: Path, tmp_path: Path) -> None:
    config = runs / "fed-cdp" / "config.toml"
    config.write_text(config.read_text().replace('dataset = "mnist5k"', 'file = "/home/somebody/secret/own.npz"'))
    text = report(runs / "fed-cdp", tmp_path / "page.html").read_text()
    assert "own.npz" in text
    assert "somebody" not in text


def test_originals_of_a_public_benchmark_are_no_private_records_and_others_are(runs: Path, tmp_path: Path) -> None:
    assert not private_records(*gather([runs]))
    assert "contains private records" not in outline(report(runs, tmp_path / "public.html")).text
    for summary in runs.glob("*/attacks/*/summary.json"):
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"dataset": "/data/patients.npz"}))
    assert private_records(*gather([runs]))
    assert "contains private records" in outline(report(runs, tmp_path / "private.html")).text


def test_a_name_from_outside_cannot_become_a_part_of_the_page(runs: Path, tmp_path: Path) -> None:
    evil = (runs / "fed-cdp").rename(runs / "<script>alert(1)</script>".replace("/", "∕"))
    copy = Path(shutil.copytree(evil, tmp_path / "other"))
    text = report([evil, copy], tmp_path / "page.html").read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


# Where it comes from --------------------------------------------------------------------------------------------------


def test_runs_and_leaks_in_memory_make_a_page(tmp_path: Path) -> None:
    data = fedcdp.load("mnist5k", quiet=True)
    federation = fedcdp.partition(data, clients=4, scheme="iid", records=20)
    plan = fedcdp.Plan(method="fed-cdp", local_steps=1, rounds=2, per_round=2, noise_multiplier=1.0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    run = fedcdp.simulate(model, federation, plan)
    leaks = fedcdp.attack(run, leak="type2", victims=2, attack=fedcdp.attacks.RECIPES["cpl"].but(iterations=2))
    page = fedcdp.report([run, leaks], tmp_path / "report.html")
    text = outline(page).text
    assert run.accuracy is not None
    assert f"{100 * run.accuracy:.1f} %" in text
    assert "contains private records" in text  # nobody said that these are public
    row = run.privacy().row("server")
    assert row.epsilon_used is not None
    assert f"{row.epsilon_used:.3g}" in text


def test_runs_of_the_same_method_are_told_apart(runs: Path, tmp_path: Path) -> None:
    second = Path(shutil.copytree(runs / "fed-cdp", tmp_path / "second"))
    found = outline(report([runs / "fed-cdp", second], tmp_path / "page.html"))
    assert "Fed-CDP, fed-cdp" in found.text
    assert "Fed-CDP, second" in found.text
    lines = [each["class"] for each in found.all("polyline")]
    assert {"line m-fed-cdp d0", "line m-fed-cdp d1"} <= set(lines)


def test_an_attack_alone_makes_a_page(runs: Path, tmp_path: Path) -> None:
    text = outline(report(runs / "nonprivate" / "attacks" / "type2-clip-aware", tmp_path / "page.html")).text
    assert "leaks: 2 of 2" in text
    assert "Configuration" not in text


def test_an_unfinished_run_is_shown_as_far_as_it_got_and_said_so(runs: Path, tmp_path: Path) -> None:
    run = runs / "fed-cdp"
    for name in ("model.safetensors", "checkpoint.safetensors"):
        (run / name).unlink()
    for name in ("metrics.jsonl", "ledger.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(lines[:-1]))
    text = outline(report(run, tmp_path / "page.html")).text
    assert "fed-cdp is not finished: 2 of 3 rounds are done" in text


def test_a_ledger_that_lacks_rounds_is_refused(runs: Path, tmp_path: Path) -> None:
    ledger = runs / "fed-cdp" / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(RunError, match="lacks some"):
        report(runs / "fed-cdp", tmp_path / "page.html")


def test_attacks_without_pictures_are_told_in_figures(runs: Path, tmp_path: Path) -> None:
    place = runs / "fed-cdp" / "attacks" / "membership"
    place.mkdir()
    summary = {"method": "fed-cdp", "leak": "model", "attack": "membership", "victims": 10, "auc": 0.512}
    (place / "summary.json").write_text(json.dumps(summary))
    text = outline(report(runs / "fed-cdp", tmp_path / "page.html")).text
    assert "membership" in text
    assert "0.512" in text


LIRA: dict[str, Any] = {
    "method": "fed-cdp", "leak": "model", "attack": "lira", "victims": 500, "shadows": 64, "auc": 0.561,
    "threshold_auc": 0.512, "tpr_at_1_percent": 0.0213, "tpr_at_01_percent": 0.0034, "epsilon": 1.5, "delta": 1e-5,
    "roc": {"online": [[0.0001, 0.0], [0.001, 0.0034], [0.01, 0.0213], [0.1, 0.15], [1.0, 1.0]]},
}  # fmt: skip


def page_with_lira(runs: Path, tmp_path: Path, **changes: Any) -> str:
    place = runs / "fed-cdp" / "attacks" / "model-lira"
    place.mkdir(exist_ok=True)
    (place / "summary.json").write_text(json.dumps(LIRA | changes))
    return report(runs / "fed-cdp", tmp_path / "page.html").read_text()


def test_membership_with_shadow_federations_has_a_curve(runs: Path, tmp_path: Path) -> None:
    page = page_with_lira(runs, tmp_path)
    text = outline(tmp_path / "page.html").text
    for part in (
        "Who was trained on",
        "0.561",
        "2.13 %",
        "0.34 %",
        "0.512",
        "guessing",
        "allowed by",
    ):
        assert part in text, part
    assert "false-positive rate, log scale" in page
    assert "Fed-CDP: 0.0034 at 0.001, 1 at 1" in page  # a rate of zero has no place on the axis


@pytest.mark.parametrize("roc", [None, {}, {"online": [[0.1]]}, {"online": [[0.1, "x"]]}, {"online": [[2.0, 0.1]]}, [1, 2]])
def test_a_damaged_curve_is_left_out(runs: Path, tmp_path: Path, roc: Any) -> None:
    page_with_lira(runs, tmp_path, roc=roc)
    text = outline(tmp_path / "page.html").text
    assert "Who was trained on" not in text
    assert "lira" in text


@pytest.mark.parametrize("epsilon", ["inf", None, 1e6])
def test_an_epsilon_that_allows_everything_is_drawn_or_left_out(runs: Path, tmp_path: Path, epsilon: Any) -> None:
    page_with_lira(runs, tmp_path, epsilon=epsilon)
    text = outline(tmp_path / "page.html").text
    assert "Who was trained on" in text
    assert ("allowed by" in text) == (epsilon == 1e6)


def test_a_page_is_made_again_and_anything_else_is_not_overwritten(demo_directory: Path, tmp_path: Path) -> None:
    page = report(demo_directory, tmp_path / "report.html")
    report(demo_directory, page)
    page.write_text("a letter")
    with pytest.raises(RunError, match="not a page of this program; nothing was overwritten"):
        report(demo_directory, page)
    assert page.read_text() == "a letter"


@pytest.mark.parametrize(
    ("items", "sentence"),
    [
        ([], "there is nothing to show"),
        (["nosuch"], "nosuch does not exist"),
        ([3], "int is neither a run, nor a result of attack, nor a directory"),
    ],
)
def test_what_cannot_be_shown_is_refused(items: list[object], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=sentence):
        report(items, tmp_path / "page.html")  # type: ignore[arg-type]


def test_a_damaged_attack_is_refused_in_a_sentence(runs: Path, tmp_path: Path) -> None:
    (runs / "fed-cdp" / "attacks" / "type2-clip-aware" / "reconstructions.npz").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(RunError, match="damaged"):
        report(runs / "fed-cdp", tmp_path / "page.html")
