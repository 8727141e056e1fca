"""The page's sentences, each computed from the results."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedcdp.accounting.statement import VACUOUS, format_epsilon
from fedcdp.config.default_recipe import on_fixed_features
from fedcdp.report.facts import METHOD_NAMES, LeakFacts, RunFacts
from fedcdp.training.metrics import SHARES, metric_text, metric_title

NBSP = "\u00a0"
"""A space at which no line breaks: between a number and its unit."""
READERS = {
    "type2": "on the client, during training",
    "type1": "on the client, after training",
    "type0": "at the server",
}
READER_SENTENCES = {
    "type2": "reads single gradients while a client trains (type-2)",
    "type1": "reads a client's update before it leaves (type-1)",
    "type0": "reads a client's update as the server receives it (type-0)",
    "type0-sum": "reads the sum of a round's updates, which is all that the server receives (type-0)",
}
ADVERSARIES = {
    "example": "Anyone who reads each example's gradient on the client (type-2)",
    "update": "Anyone who reads a client's update before it leaves (type-1)",
    "server": "The server, which receives every update (type-0)",
    "model": "Anyone who sees only the model after each round",
}
SERVER_OF_SUMS = "The server, which receives only the sum of a round's updates (type-0)"
NETWORKS = {
    "linear": "a linear layer",
    "small": "a small network that learns its own features",
    "cnn": "the paper's network for images, which learns its own features",
    "mlp": "the paper's network for tables, which learns its own features",
    "cpl": "the network that the paper's authors attack, which learns its own features",
}


def method_name(method: str) -> str:
    """A method's name for people."""
    return METHOD_NAMES.get(method, method or "unknown method")


def network_name(network: str) -> str:
    """A network for people: what it is, where that is known, and its name."""
    if network in NETWORKS:
        return f"{NETWORKS[network]} ({network})"
    return f"a linear layer on fixed features ({network})" if on_fixed_features(network) else f"the network {network}"


def epsilon(value: float | None) -> str:
    """An ε on the page; a dash if there is none."""
    return "–" if value is None else format_epsilon(value, digits=3, large="grouped")


def equation(name: str, value: str) -> str:
    """A symbol and its value, kept on one line."""
    return f"{name}{NBSP}={NBSP}{value}"


def unbroken(text: str) -> str:
    """A sentence from elsewhere, with the same spaces: within an equation, and between a number and its unit."""
    return re.sub(r"(?<=\d) (?=%|dB)", NBSP, re.sub(r"(?<=[εδσ]) = ", f"{NBSP}={NBSP}", text))


def percent(share: float, digits: int = 1) -> str:
    """A share in per cent, kept on one line."""
    return f"{100 * share:.{digits}f}{NBSP}%"


def measured(name: str, value: float) -> str:
    """The value of a metric: a share of right answers in per cent, anything else as a number."""
    return percent(value) if name in SHARES else metric_text(value)


def result_heading(names: Iterable[str]) -> str:
    """What a column of results is called: the metric, where all have the same."""
    found = set(names)
    return metric_title(found.pop()) if len(found) == 1 else "result" if found else "accuracy"


def capital(words: str) -> str:
    """The words with a capital letter at the beginning."""
    return words[:1].upper() + words[1:]


def strength(value: float) -> str:
    """What an ε is worth, in a few words. Empty if it may be worth something."""
    if math.isinf(value):
        return "no guarantee"
    return "too large to guarantee anything" if value >= VACUOUS else ""


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one adversary's attacks: that of the most successful one."""

    kind: Literal["leaks", "failed", "unknown"]
    """A failed attack proves nothing, so the page shows it without a colour that would say otherwise."""
    got: int = 0
    of: int = 0
    identified: tuple[int, int, int] | None = None
    """How many were identified, of how many, among how many candidates."""
    tried: tuple[str, ...] = ()
    """The attacks."""
    inferred: str = ""
    """What was inferred by attacks that reconstruct nothing."""

    @property
    def words(self) -> str:
        """For people."""
        if self.kind == "unknown":
            return "not attacked"
        if self.inferred and not self.of:
            return f"{'leaks' if self.kind == 'leaks' else 'no better than chance'}: {self.inferred}"
        if self.got or self.identified is None:
            return f"leaks: {self.got} of {self.of}" if self.got else f"none of {self.of}"
        return f"leaks: {self.identified[0]} of {self.identified[1]} identified among {self.identified[2]:,}"

    @property
    def attacks(self) -> str:
        """The attacks that were tried, for people."""
        return f"tried: {', '.join(self.tried)}" if self.tried else ""


def verdict(leaks: Iterable[LeakFacts]) -> Verdict:
    """The outcome of these attacks."""
    leaks = list(leaks)
    scored = [leak.leaked for leak in leaks if leak.leaked is not None]
    tried = tuple(dict.fromkeys(name for leak in leaks for name in leak.tried))
    inferred = [leak.inferred for leak in leaks if leak.inferred is not None]
    if not scored and inferred:
        words, beyond = max(inferred, key=lambda each: each[1])
        return Verdict("leaks" if beyond else "failed", tried=tried, inferred=words)
    if not scored:
        return Verdict("unknown", tried=tried)
    got, of = max(scored, key=lambda pair: pair[0] / max(pair[1], 1))
    identified = max(
        (leak.identified for leak in leaks if leak.identified), key=lambda each: each[0] / each[1], default=None
    )
    return Verdict("leaks" if got or identified else "failed", got, of, identified, tried)


# In short ------------------------------------------------------------------------------------------------------------


def what_leaks(leaks: Sequence[LeakFacts]) -> str:
    """What the attacks got."""
    scored = [leak for leak in leaks if leak.leaked is not None]
    inferred = [(leak, leak.inferred[0]) for leak in leaks if leak.inferred is not None and leak.inferred[1]]
    if not scored and any(leak.inferred is not None for leak in leaks):
        told_of = [f"An adversary who {READER_SENTENCES.get(leak.reader, 'observes the training')} infers, under "
                   f"{method_name(leak.method)}: {what}." for leak, what in inferred]  # fmt: skip
        return " ".join(told_of) or "No attack on this page inferred more than chance."
    if not scored:
        return "No attack in these results has known originals, so this page cannot say what leaks."
    told: dict[str, list[str]] = {}  # adversaries with equal results share a sentence
    for kind, doing in READER_SENTENCES.items():
        mine = [leak for leak in scored if leak.reader == kind]
        if got := _by_method([leak for leak in mine if leak.leaked and leak.leaked[0]]):
            what = listed([f"{pair[0]} of {pair[1]} under {method_name(method)}" for method, pair in got.items()])
            told.setdefault(f"reconstructs training examples: {what}", []).append(doing)
        named = {leak.method: leak.identified for leak in mine if leak.identified and leak.method not in got}
        if named:
            what = listed([f"{each[0]} of {each[1]} under {method_name(method)}, among {each[2]:,} candidates"
                           for method, each in named.items()])  # fmt: skip
            told.setdefault(f"identifies training examples: {what}", []).append(doing)
    sentences = [f"An adversary who {' or '.join(doing)} {what}." for what, doing in told.items()]
    return " ".join(sentences) or "No attack on this page reconstructed a training example."


def what_stops_it(leaks: Sequence[LeakFacts], runs: Sequence[RunFacts]) -> str:
    """The methods under which every attack failed."""
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
        return "Under every method on this page, at least one attack succeeded." if scored else ""
    told = listed([f"{method_name(method)} (0 of {of}; tried: {tried})" for method, of, tried in stopped])
    sentence = f"The attacks that were tried reconstructed nothing recognisable under {told}."
    plans = [run.plan for run in runs if run.plan.method in {method for method, _, _ in stopped}]
    if plans and all(plan.per_example and plan.noise == "example" for plan in plans):
        sentence += " These methods clip and noise every example's gradient before anything else uses it."
    return sentence + " A failed attack proves nothing; the guarantee is ε, below."


# Notes ---------------------------------------------------------------------------------------------------------------


def part_of_an_update(leaks: Sequence[LeakFacts], runs: Sequence[RunFacts]) -> str:
    """What to say if attacked updates have fewer local steps than those of the runs."""
    steps = {leak.summary.get("steps") for leak in leaks if leak.leak != "type2"}
    local = sorted({run.plan.local_steps for run in runs})
    if len(steps) != 1 or not local or not isinstance(attacked := steps.pop(), int) or attacked >= local[0]:
        return ""
    of = "the first local step" if attacked == 1 else f"the first {attacked} local steps"
    whole = f"The run has {local[0]}" if len(local) == 1 else f"The runs have {listed([str(each) for each in local])}"
    return f"The attacked update is that of {of}. {whole}, and more steps hide more."


def together(names: Sequence[str]) -> str:
    """What to say about lines of a chart that lie on each other."""
    return f"{listed(names)} coincide. Their dashes and marks take turns."


def unfinished(run: RunFacts) -> str:
    """What to say about a run that is not finished."""
    if run.finished:
        return ""
    return f"{run.name} is not finished: {run.rounds} of {run.plan.rounds} rounds are done. The page shows these rounds."


def _by_method(leaks: Sequence[LeakFacts]) -> dict[str, tuple[int, int]]:
    best: dict[str, tuple[int, int]] = {}
    for leak in leaks:
        pair = leak.leaked or (0, 0)
        if pair[0] >= best.get(leak.method, (0, 0))[0]:
            best[leak.method] = pair
    return best
