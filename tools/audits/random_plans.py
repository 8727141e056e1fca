"""Random plans over all options: compare the package's ε with that of the independent accountant.

python -m tools.audits.random_plans --plans 400 --out results/random_plans.json
python -m tools.audits.random_plans --first 183 --plans 1        # repeat one plan

Exit status 1 if a printed ε is more than half a percent below the recomputed one, if a plan cannot be recomputed, or if a
printed ε is more than 10 % above it and no reason is found.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.clean_tree import clean_commit
from tests.support.independent.epsilon import UnresolvedError
from tests.support.independent.plans import ABOVE, BELOW, Case, Comparison, compare, random_case, rows_of
from tests.support.independent.recipes import Recipes
from tests.support.independent.rows import Made

RDP = "mode rdp: a Rényi bound is inherently looser than a discretised privacy loss distribution"
SAMPLING = "needlessly loose: secret sampling is accounted for at twice the sensitivity; known sampling would cost less"
SIZES = "needlessly loose: one bound covers all clients that hold more records than slots"
COPIES = (
    "needlessly loose: one bound covers a person's copies at clients of different sizes, some with more records than slots"
)
SLOTS = (
    "needlessly loose: one bound covers a person's copies at clients whose slots carry different noise: the highest rate "
    "with the least noise"
)
TABLE = (
    "discretisation: every release is rounded up to the step of the privacy loss distribution, which is visible in a small ε"
)
UNEXPLAINED = "unexplained"


class LiteralRecipes(Recipes):
    """The recipes without the bound that does not rely on secret record sampling."""

    def summed(self, size: int, weight: float | None = None) -> list[Made]:
        """Secret sampling alone."""
        return super().summed(size, weight)[:1]


def reason(case: Case, found: Comparison) -> str:
    """Why a printed ε is more than 10 % above the recomputed one, found by further computations."""
    if case.mode == "rdp":
        return RDP
    if found.key[:2] == ("example", "unique") and case.plan.noise_slots == "held" and len(case.federation.sizes) > 1:
        return SLOTS

    def explained(other: float | None) -> bool:
        return other is not None and found.printed <= other * (1 + ABOVE)

    literal = case.recomputed(LiteralRecipes)[found.key]
    if explained({"epsilon": literal.epsilon, "used": literal.used, "worst": literal.worst}[found.figure]):
        return SAMPLING
    if found.printed - found.recomputed <= _rounded_up(case):
        return TABLE
    if len(case.federation.sizes) > 1:
        alone = []
        for size in case.federation.sizes:
            one = replace(case, federation=replace(case.federation, sizes=(size,))).printed()
            alone.append(0.0 if one is None else rows_of(one)[found.key][("epsilon", "used", "worst").index(found.figure)])
        if explained(max(each or 0.0 for each in alone)):
            return SIZES
        overflow = case.plan.record_sampling == "poisson" and max(case.federation.sizes) > case.plan.slots
        if found.key[1] == "unique" and overflow:
            return COPIES
    return UNEXPLAINED


def _rounded_up(case: Case) -> float:
    """How much rounding may add: the step of the package's table, 1e-4 or an 8,000th of the losses' range, per release."""
    plan, recipes = case.plan, Recipes(case.plan, case.federation)
    quietest = min(recipes.multiplier(t) for t in range(plan.rounds))
    mu = 2 * recipes.distance(quietest, 1.0 if plan.method == "fed-sdp" else recipes.draws)
    releases = max(plan.rounds, len(case.ledger.rounds)) * plan.local_steps * case.federation.copies
    return releases * max(1e-4, (16 * mu + 12 * mu * mu) / 8000)


def attempt(number: int) -> dict[str, Any]:
    """One plan: every figure of every row, and its defects."""
    case = random_case(Random(number))
    result: dict[str, Any] = {"plan": number, "method": case.plan.method, "mode": case.mode}
    privacy = case.printed()
    if privacy is None:
        return result | {"refused": "mode rdp does not support Poisson record sampling with slots"}
    try:
        found = compare(rows_of(privacy), case.recomputed())
    except UnresolvedError as error:
        return result | {"unresolved": str(error)}
    result["rows"] = {
        "/".join((*each.key, each.figure)): [written(each.printed), written(each.recomputed), written(each.ratio)]
        for each in found
    }
    result["below"] = ["/".join((*each.key, each.figure)) for each in found if each.too_small]
    result["above"] = {"/".join((*each.key, each.figure)): reason(case, each) for each in found if each.loose}
    return result


def written(value: float) -> float | str:
    """A number with five digits; JSON has no infinity."""
    return float(f"{value:.5g}") if math.isfinite(value) else "inf"


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Summary of all plans."""
    compared = [each for each in results if "rows" in each]
    ratios = sorted(row[2] for each in compared for row in each["rows"].values() if "inf" not in row)
    loose = [each for each in compared if each["above"]]
    return {
        "plans": len(results),
        "compared": len(compared),
        "refused": sum("refused" in each for each in results),
        "unresolved": sum("unresolved" in each for each in results),
        "figures": sum(len(each["rows"]) for each in compared),
        "median ratio": ratios[len(ratios) // 2] if ratios else None,
        "smallest ratio": ratios[0] if ratios else None,
        f"plans with an ε more than {BELOW:.1%} below": sum(bool(each["below"]) for each in compared),
        f"plans with an ε more than {ABOVE:.0%} above": len(loose),
        "of these, due to rounding or unexplained": sum(
            any(why in (TABLE, UNEXPLAINED) for why in each["above"].values()) for each in loose
        ),
        "plans by reason": dict(Counter(why for each in loose for why in set(each["above"].values()))),
    }


def main() -> int:
    """Recompute plans, print one line each, and write all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=400)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    commit = clean_commit()[:12] if asked.out else ""
    results, started = [], time.perf_counter()
    for number in range(asked.first, asked.first + asked.plans):
        result = attempt(number)
        results.append(result)
        wrong = result.get("below") or result.get("unresolved")
        above = Counter(result.get("above", {}).values())
        print(
            f"plan {number}: {f'DEFECT {wrong}' if wrong else 'holds'}{f', above: {dict(above)}' if above else ''}",
            flush=True,
        )
    found = summary(results)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    if asked.out:
        about = {"command": "make audits", "commit": commit, "python": platform.python_version()}
        about["seconds"] = f"{time.perf_counter() - started:.0f}"
        lines = ",\n  ".join(json.dumps(each, ensure_ascii=False) for each in results)
        head = json.dumps(about | {"summary": found}, indent=1, ensure_ascii=False)[:-2]
        asked.out.write_text(f'{head},\n "results": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
    defects = sum(bool(each.get("below") or each.get("unresolved")) for each in results)
    return 1 if defects or UNEXPLAINED in found["plans by reason"] else 0


if __name__ == "__main__":
    sys.exit(main())
