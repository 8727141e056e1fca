"""The strongest attack known for a plan: several are tried, cheap ones first, and the best is told with all the others.

An attack that fails says little, and a weak one that fails says nothing. `best` tries every kind of attack that can succeed
against what is read, stops when one has recovered everything, and says what each came to. The truth decides which is the
best: an auditor wants to know the worst.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedcdp.attacks.analytic import first_dense
from fedcdp.attacks.attempts import FINE, Attempts, part_of
from fedcdp.attacks.forward import predicted, prunes
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.objectives import Objective
from fedcdp.attacks.reconstruct import Progress
from fedcdp.attacks.scene import Scene
from fedcdp.errors import DataError, FedcdpError, ModelError

_FITS = 1e-3  # of the squared norm of what was seen: it is explained
_MOST_SEARCHED = 16  # examples of a batch
_MOST = 8  # attacks at most, for the progress
_FIGURES = ("success_rate", "recognisable_rate", "identified_rate", "label_accuracy", "auc")


def strongest(attempts: Attempts, progress: Progress | None = None) -> Leaks:
    """Try the attacks that suit the scene until one has recovered everything; the best, with all that were tried."""
    results: list[Leaks] = []
    tried: list[dict[str, Any]] = []
    refusals: list[FedcdpError] = []

    def attempt(names: list[str]) -> None:
        for name in names:
            if results and _recovered_all(results[-1]):
                return
            try:
                found = attempts.run(name, progress=part_of(progress, len(tried), _MOST))
            except (ModelError, DataError) as error:
                refusals.append(error)
                tried.append({"attack": name, "success_rate": None, "refused": str(error)})
                continue
            tried.append(trial(found.summary()))
            if isinstance(found, Leaks):
                results.append(found)

    attempt(closed_forms(attempts.scene))
    if not any(each.attack == "linear-head" and _needs_no_search(each) for each in results):
        table = len(attempts.scene.shape) < 3 and bool(results)
        attempt(filters(attempts) if table else [*searches(attempts), *filters(attempts)])
    if progress is not None:
        progress(_MOST * FINE, _MOST * FINE)
    if not results:
        raise refusals[0]
    return replace(max(results, key=_rank), tried=tuple(tried))


def _needs_no_search(found: Leaks) -> bool:
    """The features hold all that the gradient of a linear head tells of one example: a search finds them no better. Of a
    batch it might, but not of a large one."""
    examples = found.captured.inputs.shape[1]
    return examples == 1 or examples > _MOST_SEARCHED


def closed_forms(scene: Scene) -> list[str]:
    """The attacks that compute their answer; they take seconds."""
    names = [] if scene.head is None else ["linear-head"]
    try:
        first_dense(scene.network, scene.shape)
    except ModelError:
        return names
    return [*names, "analytic"]


def searches(attempts: Attempts) -> list[str]:
    """The attacks that search, the likeliest to succeed first: those that know the method where it changes a gradient."""
    captured = attempts.captured
    single = captured.inputs.shape[1] == 1 and captured.steps == 1
    if captured.deviation:
        return ["clip-aware" if single else "batch", "averaging"]
    if captured.plan.per_example or prunes(captured) or captured.steps > 1:
        return ["clip-aware", "cpl", "inverting-gradients"] if single else ["unrolled", "clip-aware", "batch"]
    return ["cpl", "clip-aware", "inverting-gradients"] if single else ["batch", "unrolled"]


def filters(attempts: Attempts) -> list[str]:
    """Under noise: the test that says what a reader can tell at all."""
    known = attempts.scene.simulator is not None and len(attempts.captured) > 1
    return ["matched-filter"] if known and attempts.captured.deviation else []


def trial(summary: dict[str, Any]) -> dict[str, Any]:
    """What an attack came to, in a few figures."""
    told = {"attack": summary["attack"], "success_rate": summary.get("success_rate")}
    return told | {name: summary[name] for name in _FIGURES if summary.get(name) is not None}


def _recovered_all(found: Leaks) -> bool:
    """Every example exactly; without the truth: what was found explains what was seen."""
    if found.scores is not None:
        return bool(found.scores.exact[found.scores.present].all())
    return _misfit(found) < _FITS


def _rank(found: Leaks) -> tuple[float, ...]:
    """Exact ones first, then recognisable, identified, and the distance; without the truth, how well it fits."""
    if found.scores is None:
        return (-_misfit(found),)
    row = found.scores.summary()
    return row["exact"], row["recognisable"], row["identified"], -row["median_mse"]


def _misfit(found: Leaks) -> float:
    """How much of what was seen the examples do not explain: the share of its squared norm, the median over victims."""
    captured, objective = found.captured, Objective()
    present = captured.present[:, : found.found.examples.shape[1]]
    shown = predicted(captured, "gradient", found.found.examples, found.found.labels, present)
    nothing = {name: value * 0 for name, value in captured.seen.items()}
    share = objective.between(shown, captured.seen) / objective.between(nothing, captured.seen).clamp(min=1e-30)
    return float(share.nan_to_num(1e30).quantile(0.5))
