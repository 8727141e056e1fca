"""The page: arrange the facts, and render the template."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from typing import Any

from fedcdp._version import __version__
from fedcdp.accounting.statement import VACUOUS
from fedcdp.attacks.lira import allowed_rate
from fedcdp.errors import RunError
from fedcdp.report import comparison, wording
from fedcdp.report.charts import Series, coincident, data_uri, keys, line_chart
from fedcdp.report.facts import Example, LeakFacts, RunFacts
from fedcdp.report.subjects import READER_TYPES, Subject, spent, subjects_of
from fedcdp.report.threats import OBSERVATIONS, THREATS, attack_table
from fedcdp.training.metrics import metric_text, metric_title

_VALUES = 10  # of each line, in the table behind a chart
_MEMBERSHIP_FIGURES = ("shadows", "victims", "auc", "tpr_at_1_percent", "tpr_at_01_percent", "threshold_auc")


def render(runs: list[RunFacts], leaks: list[LeakFacts], title: str | None = None, private_records: bool = False) -> str:
    """The whole page as one text. It loads nothing and refers to no other file or address."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise RunError("report: needs jinja2; install it with pip install jinja2") from error

    environment = Environment(
        loader=PackageLoader("fedcdp.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    template_folder = files("fedcdp.report") / "templates"
    style, script = ((template_folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    subjects = subjects_of(runs, leaks)
    positions = _positions(leaks)
    return environment.get_template("page.html").render(
        title=title or _title(runs, leaks),
        headline=comparison.headline(subjects),
        version=__version__,
        style=style,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        private_records=private_records,
        has_originals=any(leak.has_originals for leak in leaks),
        unfinished=[sentence for sentence in map(wording.unfinished, runs) if sentence],
        in_short=[
            (heading, sentence)
            for heading, sentence in (
                ("What leaks", wording.what_leaks(leaks)),
                ("What stops it", wording.what_stops_it(leaks, runs)),
                ("What it costs", comparison.what_it_costs(subjects)),
            )
            if sentence
        ],
        readers={leak: wording.READERS[leak] for leak in READER_TYPES},
        subjects=subjects,
        networks=comparison.which_networks(subjects),
        trained_network=_only(each.network for each in subjects if each.run),
        attacked_network=_only(leak.network for leak in leaks),
        pictures=_pictures(subjects),
        positions=positions,
        players=_players(subjects, positions),
        result_heading=wording.result_heading(each.result[0] for each in subjects if each.result),
        charts=_charts(subjects),
        all_metrics=_metrics(subjects),
        each_client=_clients(subjects),
        spending=_spending(subjects),
        norms=_norms(subjects),
        membership=_membership(subjects),
        tables=[(subject, table) for subject in subjects if (table := attack_table(subject.leaks)) is not None],
        threats=THREATS,
        observations=OBSERVATIONS,
        attacks=[_figures(leak) for leak in leaks],
        e=wording.epsilon,
        equation=wording.equation,
        percent=wording.percent,
        measured=wording.measured,
        capital=wording.capital,
        metric_title=metric_title,
        unbroken=wording.unbroken,
        strength=wording.strength,
        vacuous=VACUOUS,
        picture=data_uri,
    )


def _title(runs: Sequence[RunFacts], leaks: Sequence[LeakFacts]) -> str:
    methods = dict.fromkeys([run.plan.method for run in runs] + [leak.method for leak in leaks])
    return "Federated training with " + wording.listed([wording.method_name(method) for method in methods])


def _only(names: Iterable[str | None]) -> str | None:
    """The name that all have in common, if there is one."""
    found = set(names)
    return found.pop() if len(found) == 1 else None


# Pictures ------------------------------------------------------------------------------------------------------------


def _attack_of(subject: Subject, leak: str) -> LeakFacts | None:
    """The attack whose pictures are shown: the one that reconstructed most."""
    mine = [each for each in subject.leaks if each.leak == leak and each.examples]
    return max(mine, key=lambda each: (each.leaked or (0, 1))[0], default=None)


def _pictures(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """For each adversary, the reconstructions under each method. Originals that all methods share are shown once."""
    shown = []
    for leak in READER_TYPES:
        attacks = [(subject, attack) for subject in subjects if (attack := _attack_of(subject, leak)) is not None]
        if not attacks:
            continue
        rows = []
        for subject, attack in attacks:
            got = wording.verdict([attack])
            rows.append({"name": subject.name, "style": subject.style, "verdict": got, "attack": attack})
        first = attacks[0][1].examples
        same = first[0].original is not None and all(_same_originals(first, attack.examples) for _, attack in attacks)
        readers = dict.fromkeys(attack.reader for _, attack in attacks)
        sentence = ", or ".join(wording.READER_SENTENCES[reader] for reader in readers)
        shown.append({"leak": leak, "reader": wording.READERS[leak], "sentence": sentence,
                      "only": wording.part_of_an_update([attack for _, attack in attacks],
                                                        [subject.run for subject, _ in attacks if subject.run]),
                      "originals": first if same else None, "rows": rows})  # fmt: skip
    return shown


def _same_originals(one: Sequence[Example], other: Sequence[Example]) -> bool:
    if len(one) != len(other):
        return False
    pairs = [(a.original, b.original) for a, b in zip(one, other, strict=True)]
    return all(a is not None and b is not None and a.shape == b.shape and (a == b).all() for a, b in pairs)


def _positions(leaks: Sequence[LeakFacts]) -> list[int]:
    """The iterations at which the slider stops. The attack's result comes after the last of them."""
    return sorted({at for leak in leaks for example in leak.examples[:1] for at in example.frames})


def _players(subjects: Sequence[Subject], positions: list[int]) -> list[dict[str, Any]]:
    """For each adversary and subject, the first example during the attack."""
    players = []
    for leak in READER_TYPES:
        row = []
        for subject in subjects:
            attack = _attack_of(subject, leak)
            if attack is None:
                continue
            example = attack.examples[0]
            frames = [(positions.index(at), f"after {at}" if at else "start", image) for at, image in example.frames.items()]
            frames.append((len(positions), "result", example.found))
            row.append({"name": subject.name, "style": subject.style, "frames": frames, "example": example})
        if row:
            players.append({"leak": leak, "reader": wording.READERS[leak], "row": row})
    return players


# Charts --------------------------------------------------------------------------------------------------------------


def _charts(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """The main metric by round: one chart for each that the runs have."""
    charts = []
    for metric in dict.fromkeys(each.result[0] for each in subjects if each.result):
        runs = [(each, each.run) for each in subjects if each.run and each.result and each.result[0] == metric]
        series = [Series(each.name, each.style, run.over_rounds(metric), each.mark) for each, run in runs]
        title = wording.capital(metric_title(metric))
        charts += _chart(series, f"{title} on held-out data, by round", metric_title(metric))
    return charts


def _metrics(subjects: Sequence[Subject]) -> dict[str, Any] | None:
    """All metrics of all runs, if any run has more than its main one."""
    rows = [(each, each.run.scores) for each in subjects if each.run and each.run.scores]
    names = list(dict.fromkeys(name for _, scores in rows for name in scores))
    if not rows:
        return None
    return {"headings": [wording.capital(metric_title(name)) for name in names],
            "rows": [(each, [_number(scores.get(name)) for name in names]) for each, scores in rows]}  # fmt: skip


def _clients(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """The metrics of each client, by name, for the runs that have them."""
    shown = []
    for subject in subjects:
        rows = [] if subject.run is None else subject.run.client_scores
        if rows:
            names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "client"]
            cells = [(row["client"], [_number(row.get(name)) for name in names]) for row in rows]
            headings = [wording.capital(metric_title(name)) for name in names]
            shown.append({"subject": subject, "headings": headings, "rows": cells})
    return shown


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else metric_text(value)


def _norms(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    series = [Series(each.name, each.style, each.run.gradient_norms(), each.mark) for each in subjects if each.run]
    return _chart(series, "Mean gradient norm of a round's clients", "L2 norm")


def _chart(
    series: list[Series],
    title: str,
    y_label: str,
    *,
    x_label: str = "round",
    log: bool = False,
    log_x: bool = False,
    told: Callable[[Series], float] = lambda each: each.points[-1][1],
) -> list[dict[str, Any]]:
    """A chart, with the value of each line that its legend tells: by default the last one."""
    shown = [each for each in series if each.points]
    if not shown:
        return []
    scales = {"log": log, "log_x": log_x}
    together = [wording.together([each.name for each in group]) for group in coincident(shown, **scales)]
    return [{"title": title, "svg": line_chart(shown, title, x_label, y_label, **scales), "rows": _values(shown),
             "figure": wording.capital(y_label), "across": wording.capital(x_label),
             "keys": [(each, picture, told(each)) for each, picture in keys(shown, **scales)],
             "together": together}]  # fmt: skip


def _membership(subjects: Sequence[Subject]) -> dict[str, Any] | None:
    """The ROC curves of attacks with shadow federations, what ε allows, and their figures; None where there are none."""
    curves: list[Series] = []
    rows = []
    for subject in subjects:
        for leak in subject.leaks:
            points = leak.roc
            if not points:
                continue
            curves.append(Series(subject.name, subject.style, points, subject.mark))
            epsilon = leak.figure("epsilon")
            if epsilon is not None:
                delta = leak.figure("delta") or 0.0
                most = [(false, allowed_rate(epsilon, delta, false)) for false, _ in points]
                words = f"allowed by {wording.equation('ε', wording.epsilon(epsilon))} of {subject.name}"
                curves.append(Series(words, f"{subject.style.split()[0]} d2", most, subject.mark))
            rows.append({"subject": subject, "epsilon": epsilon,
                         "figures": [leak.figure(name) for name in _MEMBERSHIP_FIGURES]})  # fmt: skip
    if not rows:
        return None
    every = sorted({false for each in curves for false, _ in each.points})
    curves.append(Series("guessing", "m-other d1", [(false, false) for false in every], len(subjects)))
    (chart,) = _chart(
        curves, "Members found by LiRA, by the share of others that are accused", "true-positive rate",
        x_label="false-positive rate", log=True, log_x=True, told=_at_one_in_a_thousand,
    )  # fmt: skip
    return {"chart": chart, "rows": rows}


def _at_one_in_a_thousand(curve: Series) -> float:
    """The true-positive rate at the measured false-positive rate that is nearest to 0.1 %."""
    return min(curve.points, key=lambda point: abs(math.log(point[0] / 1e-3)))[1]


def _values(series: Sequence[Series]) -> list[tuple[str, float, float]]:
    """About ten points of each line, the last one included."""
    rows = []
    for each in series:
        step = -(-len(each.points) // _VALUES)
        last = len(each.points) - 1
        rows += [(each.name, x, y) for at, (x, y) in enumerate(each.points) if at == last or at % step == 0]
    return rows


def _spending(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """For each adversary, a chart of ε spent on a record, and the reason for every infinite ε."""
    shown = []
    for adversary, title in wording.ADVERSARIES.items():
        series, endless = [], []
        apart = False
        for subject in subjects:
            run: RunFacts | None = subject.run
            if run is None or not run.spending:
                continue
            apart |= not run.plan.secure_aggregation
            stated = [(at, privacy.row(adversary)) for at, privacy in run.spending]
            points = [(float(at), value) for at, row in stated if (value := spent(row)) is not None and math.isfinite(value)]
            series.append(Series(subject.name, subject.style, points, subject.mark))
            if not points:
                endless.append({"name": subject.name, "style": subject.style, "reason": stated[-1][1].assumption})
        if series:
            title = title if apart or adversary != "server" else wording.SERVER_OF_SUMS
            charts = _chart(series, f"{title}: ε spent on a record", "ε", log=True)
            shown.append({"title": title, "chart": charts[0] if charts else None, "endless": endless})
    return shown


def _figures(leak: LeakFacts) -> dict[str, Any]:
    told = leak.summary
    return {
        "method": wording.method_name(leak.method),
        "leak": leak.leak.replace("type", "type-"),
        "attack": leak.attack,
        "victims": told.get("victims"),
        "examples": told.get("examples"),
        "network": told.get("network"),
        "exact": told.get("success_rate"),
        "recognisable": told.get("recognisable_rate"),
        "mse": told.get("distance_median"),
        "auc": told.get("auc"),
        "iterations": told.get("iterations_median"),
        "noise": told.get("noise_deviation"),
    }
