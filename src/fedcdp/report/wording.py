"""The page's sentences, each made from what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedcdp.accounting.statement import VACUOUS, format_epsilon
from fedcdp.report.facts import METHOD_NAMES, LeakFacts, RunFacts

READERS = {
    "type2": "on the client, during training",
    "type1": "on the client, after training",
    "type0": "at the server",
}
READER_SENTENCES = {
    "type2": "reads single gradients while a client trains (type-2)",
    "type1": "reads a client's update before it leaves (type-1)",
    "type0": "reads a client's update as the server receives it (type-0)",
}
ADVERSARIES = {
    "example": "Whoever reads each example's gradient on the client (type-2)",
    "update": "Whoever reads a client's update before it leaves (type-1)",
    "server": "The server, which receives every update (type-0)",
    "model": "Whoever sees only the model after each round",
}


def method_name(method: str) -> str:
    """A method's name for people."""
    return METHOD_NAMES.get(method, method or "unknown method")


def epsilon(value: float | None) -> str:
    """An ε on the page; a dash where there is none."""
    return "–" if value is None else format_epsilon(value, digits=3, large="grouped")


def strength(value: float) -> str:
    """What an ε is worth, in a word or two; nothing where it may be worth something."""
    if math.isinf(value):
        return "no guarantee"
    return "too large to guarantee anything" if value >= VACUOUS else ""


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


@dataclass(frozen=True)
class Verdict:
    """What the attacks of one reader came to; of several the one that got most."""

    kind: Literal["leaks", "failed", "unknown"]
    """A failed attack proves nothing: it is shown without a colour that would say so."""
    got: int = 0
    of: int = 0
    identified: tuple[int, int, int] | None = None
    """How many were picked out, of how many, among how many candidates."""
    tried: tuple[str, ...] = ()
    """The attacks."""

    @property
    def words(self) -> str:
        """For people."""
        if self.kind == "unknown":
            return "not attacked"
        if self.got or self.identified is None:
            return f"leaks: {self.got} of {self.of}" if self.got else f"0 of {self.of} came out"
        return f"leaks: {self.identified[0]} of {self.identified[1]} identified among {self.identified[2]:,}"

    @property
    def attacks(self) -> str:
        """What was tried, for people."""
        return f"tried: {', '.join(self.tried)}" if self.tried else ""


def verdict(leaks: Iterable[LeakFacts]) -> Verdict:
    """What these attacks came to."""
    leaks = list(leaks)
    scored = [leak.leaked for leak in leaks if leak.leaked is not None]
    tried = tuple(dict.fromkeys(name for leak in leaks for name in leak.tried))
    if not scored:
        return Verdict("unknown", tried=tried)
    got, of = max(scored, key=lambda pair: pair[0] / max(pair[1], 1))
    identified = max(
        (leak.identified for leak in leaks if leak.identified), key=lambda each: each[0] / each[1], default=None
    )
    return Verdict("leaks" if got or identified else "failed", got, of, identified, tried)


def what_leaks(leaks: Sequence[LeakFacts]) -> str:
    """The first thing to know."""
    scored = [leak for leak in leaks if leak.leaked is not None]
    if not scored:
        return "No attack with a known truth is among these results, so this page cannot say what leaks."
    told: dict[str, list[str]] = {}  # readers who got the same are told in one sentence
    for kind, doing in READER_SENTENCES.items():
        if got := _by_method([leak for leak in scored if leak.leak == kind and leak.leaked and leak.leaked[0]]):
            what = listed([f"{pair[0]} of {pair[1]} under {method_name(method)}" for method, pair in got.items()])
            told.setdefault(what, []).append(doing)
    sentences = [f"Whoever {' or '.join(doing)} gets training examples back: {what}." for what, doing in told.items()]
    return " ".join(sentences) or "No attack on this page got a single training example back."


def what_stops_it(leaks: Sequence[LeakFacts], runs: Sequence[RunFacts]) -> str:
    """The second."""
    scored = [leak for leak in leaks if leak.leaked is not None]
    stopped = []
    for method in dict.fromkeys(leak.method for leak in scored):
        mine = [leak for leak in scored if leak.method == method]
        if all(leak.leaked is not None and leak.leaked[0] == 0 and leak.identified is None for leak in mine):
            tried = dict.fromkeys(name for leak in mine for name in leak.tried)
            most = {reader: max(leak.leaked[1] for leak in mine if leak.leaked and leak.leak == reader)
                    for reader in {leak.leak for leak in mine}}  # fmt: skip
            stopped.append((method, sum(most.values()), ", ".join(tried)))
    if not stopped:
        return "Nothing on this page stopped every attack." if scored else ""
    told = listed([f"{method_name(method)} (0 of {of}; tried: {tried})" for method, of, tried in stopped])
    sentence = f"The attacks that were tried got nothing recognisable under {told}."
    plans = [run.plan for run in runs if run.plan.method in {method for method, _, _ in stopped}]
    if plans and all(plan.per_example and plan.noise == "example" for plan in plans):
        sentence += " There every example's gradient is clipped and noised before anything else uses it."
    return sentence + " An attack that fails is not a proof; the proof is ε, below."


def what_it_costs(runs: Sequence[RunFacts]) -> str:
    """The third."""
    told = []
    for run in runs:
        if run.accuracy is None:
            continue
        words = f"{100 * run.accuracy:.1f} % under {method_name(run.plan.method)}"
        row = None if run.privacy is None else run.privacy.row("server")
        if row is not None and row.epsilon_used is not None and math.isfinite(row.epsilon_used):
            words += f" (ε = {epsilon(row.epsilon_used)} against the server)"
        told.append(words)
    return f"Accuracy: {listed(told)}." if told else ""


def part_of_an_update(leak: LeakFacts, run: RunFacts | None) -> str:
    """What to say where the attacked update has fewer local steps than those of the run."""
    steps = leak.summary.get("steps")
    if leak.leak == "type2" or run is None or not isinstance(steps, int) or steps >= run.plan.local_steps:
        return ""
    of = "the first local step" if steps == 1 else f"the first {steps} local steps"
    return f"Attacked is the update of {of}; the run has {run.plan.local_steps}, and more of them hide more."


def unfinished(run: RunFacts) -> str:
    """What to say of a run that is not done."""
    if run.finished:
        return ""
    return f"{run.name} is not finished: {run.rounds} of {run.plan.rounds} rounds are done. It is shown as far as it got."


def _by_method(leaks: Sequence[LeakFacts]) -> dict[str, tuple[int, int]]:
    best: dict[str, tuple[int, int]] = {}
    for leak in leaks:
        pair = leak.leaked or (0, 0)
        if pair[0] >= best.get(leak.method, (0, 0))[0]:
            best[leak.method] = pair
    return best
