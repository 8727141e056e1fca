"""What the page shows about runs and attacks, from memory or disk: plain values, and nothing that no ε covers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcdp.config.plan import Plan
from fedcdp.training.export import without_secrets
from fedcdp.training.metrics import main_figure
from fedcdp.training.rundir import Row

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Privacy


Array = NDArray[Any]

METHOD_NAMES = {
    "nonprivate": "Non-private",
    "fed-sdp": "Fed-SDP",
    "fed-cdp": "Fed-CDP",
    "fed-cdp-decay": "Fed-CDP (decay)",
    "dssgd": "DSSGD",
}
ADVERSARY_OF = {"type2": "example", "type1": "update", "type0": "server"}
"""The row of the privacy statement that bounds what an adversary of each type can learn."""

_SHOWN_EXAMPLES = 3
_BY_CHANCE = 1e-3  # identifications less likely than this are not due to chance
_INFERENCES = ("inference", "labels")  # attacks that reconstruct nothing
LONGEST_NAME = 40


@dataclass(frozen=True, eq=False)
class RunFacts:
    """One run, finished or not."""

    name: str
    plan: Plan
    settings: dict[str, dict[str, Any]]
    metrics: list[Row] = field(repr=False)
    privacy: Privacy | None
    privacy_missing: str
    """Why there is no privacy statement, if there is none."""
    spending: list[tuple[int, Privacy]] = field(repr=False)
    """The statement after some of the releases, ascending."""
    finished: bool
    scores: Row = field(default_factory=dict, repr=False)
    """All metrics of the final model on the validation split; empty where they were not stored."""
    client_scores: list[Row] = field(default_factory=list, repr=False)
    """The same for each client, by name, where they are known."""

    @property
    def rounds(self) -> int:
        """Completed rounds."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def figures(self) -> Row:
        """All metrics of the final model; where they were not stored, those of the last round that was evaluated."""
        return self.scores or next((row for row in reversed(self.metrics) if main_figure(_numbers(row))), {})

    @property
    def result(self) -> tuple[str, float] | None:
        """The task's main metric on the validation split, and its value."""
        return main_figure(_numbers(self.figures))

    @property
    def accuracy(self) -> float | None:
        """On the validation split; None for a task that has none."""
        accuracy: float | None = self.figures.get("accuracy")
        return accuracy

    @property
    def network(self) -> str | None:
        """The network's name, where the configuration has one."""
        return _name(self.settings.get("model", {}).get("network"))

    @property
    def clients(self) -> int | None:
        """How many clients share the data, where the configuration says so."""
        told = self.settings.get("data", {}).get("clients")
        return told if isinstance(told, int) else None

    def over_rounds(self, figure: str) -> list[tuple[float, float]]:
        """One metric, round by round."""
        return [(row["round"], float(row[figure])) for row in self.metrics if is_number(row.get(figure))]

    def gradient_norms(self) -> list[tuple[float, float]]:
        """The clients' mean gradient norm, round by round. Empty for a private run, whatever its metrics hold."""
        return [] if self.plan.private else self.over_rounds("gradient_norm")

    def shown_settings(self) -> dict[str, dict[str, Any]]:
        """The configuration, without the seed of a private run and without the directory of a user's own file."""
        return without_secrets(self.settings, self.plan)


@dataclass(frozen=True, eq=False)
class Example:
    """One attacked example: the original if known, its reconstruction, and the search in between."""

    label: int | None
    original: Array | None
    found: Array
    frames: dict[int, Array]
    """By iteration; 0 is the seed."""
    mse: float | None
    recognisable: bool | None


@dataclass(frozen=True, eq=False)
class LeakFacts:
    """The results of one attack."""

    method: str
    leak: str
    attack: str
    summary: dict[str, Any] = field(repr=False)
    examples: list[Example] = field(repr=False)
    """The first few, for images only, with values from 0 to 1."""
    run: str | None = None
    """The name of the run it belongs to, if any."""

    @property
    def reader(self) -> str:
        """Its adversary; `type0-sum` for a server that read only sums over the clients of a round."""
        return "type0-sum" if self.leak == "type0" and self.summary.get("summed_clients") else self.leak

    @property
    def has_originals(self) -> bool:
        """Whether it holds training records."""
        return any(example.original is not None for example in self.examples)

    @property
    def leaked(self) -> tuple[int, int] | None:
        """How many examples were reconstructed (images recognisably, others exactly), of how many. None if not scored."""
        share = self.summary.get("recognisable_rate")
        share = self.summary.get("success_rate") if share is None else share
        examples = self.summary.get("examples")
        return None if share is None or examples is None else (round(share * examples), int(examples))

    @property
    def identified(self) -> tuple[int, int, int] | None:
        """How many examples were identified, of how many, among how many candidates. None if chance explains as many."""
        from scipy.stats import binom

        told: list[Any] = [self.summary.get(name) for name in ("identified_rate", "examples", "candidates")]
        share, examples, candidates = (float(each) if is_number(each) else 0.0 for each in told)
        count = round(share * examples)
        if candidates < 2 or binom.sf(count - 1, int(examples), 1 / candidates) > _BY_CHANCE:
            return None
        return count, int(examples), int(candidates)

    @property
    def inferred(self) -> tuple[str, bool] | None:
        """What an attack inferred that reconstructs nothing, in words, and whether chance is ruled out. None for others."""
        from scipy.stats import binom

        if self.attack not in _INFERENCES:
            return None
        told, beyond = [], False
        figures: dict[str, Any] = {name: value for name, value in self.summary.items() if is_number(value)}
        share, baseline, examples = (figures.get(name) for name in ("label_accuracy", "label_baseline", "labels_inferred"))
        if share is not None and 0 <= share <= 1:
            beside = "" if baseline is None else f" (public labels alone: {100 * baseline:.3g} %)"
            told.append(f"{100 * share:.3g} % labels right{beside}")
            if baseline is not None and examples is not None and 0 <= baseline <= 1:
                beyond |= bool(binom.sf(round(share * examples) - 1, int(examples), baseline) < _BY_CHANCE)
        interval = self.summary.get("auc_interval_99")
        if "auc" in figures:
            told.append(f"presence AUC {figures['auc']:.3f}")
            beyond |= isinstance(interval, list) and bool(interval) and is_number(interval[0]) and interval[0] > 0.5
        return (", ".join(told), beyond) if told else None

    @property
    def tried(self) -> tuple[str, ...]:
        """The attacks that were tried; this one reconstructed most."""
        told = self.summary.get("tried")
        named = (
            [each for each in told if isinstance(each, dict) and not each.get("refused")] if isinstance(told, list) else []
        )
        return tuple(str(each.get("attack"))[:LONGEST_NAME] for each in named) or (self.attack,)

    @property
    def roc(self) -> list[tuple[float, float]]:
        """False- and true-positive rates of the attack `lira`, for logarithmic axes. Empty for others, or if damaged."""
        told = self.summary.get("roc")
        curve = told.get("online") if self.attack == "lira" and isinstance(told, dict) else None
        points = curve if isinstance(curve, list) else []
        if not all(isinstance(p, list) and len(p) == 2 and all(is_number(v) and 0 <= v <= 1 for v in p) for p in points):
            return []
        return sorted((float(false), float(true)) for false, true in points if false > 0 and true > 0)

    def figure(self, name: str) -> float | None:
        """A number of the summary; None if it has none by this name."""
        value = self.summary.get(name)
        return value if is_number(value) else None

    @property
    def network(self) -> str | None:
        """The name of the attacked network, where the summary has one."""
        return _name(self.summary.get("network"))

    def has_mechanism_of(self, plan: Plan) -> bool:
        """Whether the attacked method clips and noises as a plan does. The summary must say so."""
        told = self.summary.get("plan")
        return isinstance(told, dict) and told == mechanism_of(plan)


def mechanism_of(plan: Plan) -> dict[str, Any]:
    """The settings of a plan that decide how it clips and noises."""
    names = ("method", "clip", "clip_mode", "noise_multiplier", "noise", "noise_at", "batch_size", "record_sampling")
    written = plan.written()
    together = {"secure_aggregation": True} if plan.secure_aggregation else {}
    return {name: written[name] for name in names} | together


def leak_facts(summary: dict[str, Any], arrays: dict[str, Array], run: str | None = None) -> LeakFacts:
    """The facts about an attack, from its summary and its arrays as `Leaks` saves them ({} if there are none)."""
    method, leak, attack = (str(summary.get(name) or "") for name in ("method", "leak", "attack"))
    return LeakFacts(method, leak, attack, summary, _examples(arrays), run)


def _examples(arrays: dict[str, Array]) -> list[Example]:
    found = arrays.get("reconstruction")
    if found is None or found.ndim != 5 or found.shape[2] not in (1, 3):
        return []
    for name, axes in (("seed", 2), ("original", 2), ("snapshot", 3)):
        if name in arrays and arrays[name].shape[axes:] != found.shape[2:]:
            raise ValueError(f"the images of {name} have another shape than those of reconstruction")
    low, high = arrays.get("value_range", _guessed_range(arrays))
    places = list(np.ndindex(*found.shape[:2]))
    if (mse := arrays.get("mse")) is not None:  # one for each original; NaN for an empty slot
        places = [place for place in np.ndindex(*mse.shape) if np.isfinite(mse[place])]
    return [_example(arrays, victim, slot, float(low), float(high)) for victim, slot in places[:_SHOWN_EXAMPLES]]


def _example(arrays: dict[str, Array], victim: int, example: int, low: float, high: float) -> Example:
    def shown(image: Array) -> Array:
        return np.nan_to_num((image - low) / (high - low), nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1)

    order = arrays.get("order")
    dummy = example if order is None else int(order[victim, example])
    found, originals, labels = arrays["reconstruction"][victim, dummy], arrays.get("original"), arrays.get("original_label")
    original = label = None
    if originals is not None and order is not None:
        which = example
        if originals.shape[1] != order.shape[1]:  # one dummy for a whole batch: compare it with the nearest original
            which = int(((originals[victim] - shown(found)) ** 2).reshape(len(originals[victim]), -1).sum(1).argmin())
        original = shown(originals[victim, which])
        label = int(labels[victim, which]) if labels is not None and labels.ndim == 2 and labels.dtype.kind in "iu" else None
    frames = {0: shown(arrays["seed"][victim, dummy])}
    snapshots = arrays.get("snapshot")
    if snapshots is not None and victim < snapshots.shape[1]:
        ended = int(arrays["iterations"][victim])
        for at, snapshot in zip(map(int, arrays["snapshot_at"]), snapshots, strict=True):
            if at <= ended:
                frames[at] = shown(snapshot[victim, dummy])
    scored = {name: None if name not in arrays else arrays[name][victim, example] for name in ("mse", "recognisable")}
    return Example(
        label, original, shown(found), frames,
        None if scored["mse"] is None else float(scored["mse"]),
        None if scored["recognisable"] is None else bool(scored["recognisable"]),
    )  # fmt: skip


def _guessed_range(arrays: dict[str, Array]) -> tuple[float, float]:
    """The range of values, if an older file does not state it."""
    truth = arrays.get("original")
    if truth is None or (truth.min() >= 0 and truth.max() <= 1):
        return 0.0, 1.0
    return float(truth.min()), float(truth.max())


def _numbers(row: Row) -> Row:
    return {name: value for name, value in row.items() if is_number(value)}


def _name(value: object) -> str | None:
    return value[:LONGEST_NAME] if isinstance(value, str) and value else None


def is_number(value: object) -> bool:
    """Whether a value is a finite number, which can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
