"""Which audit catches which sabotage: three broken mechanisms and the honest one, by the one-run and the repeated audit.

python -m benchmarks.audit_sabotages            # results/audit_sabotages.json, about three minutes of a free core
python -m benchmarks.audit_sabotages --seeds 2 --trials 20000 --dry      # a sample; writes nothing

Every audit is on worst-case canaries and at 99.9 % confidence. A broken mechanism is caught if a lower bound exceeds the ε
that is printed for the sound one. The program fails if a sabotage is not caught by any audit, or if the honest mechanism
exceeds its ε with any seed. With 20 seeds, 4 adversaries and 2 audits, a sound mechanism whose bounds were tight would pass
160 bounds with a probability of 85 % at least; the real bounds are far from tight.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.clean_tree import clean_commit
from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import state
from fedcdp.audit import ADVERSARIES, audit, audit_one_run
from fedcdp.config.plan import Plan
from fedcdp.methods import METHODS
from tests.support.sabotage import FAULTS, Fault, clipped_at, sabotaged

RESULTS = Path(__file__).resolve().parents[1] / "results" / "audit_sabotages.json"
CONFIDENCE = 0.999
CANARIES, CLIENTS, LAYERS = 1000, 100, 3
TRIALS, SEEDS = 200_000, 20
PLAN = Plan(
    rounds=1, per_round=CLIENTS, local_steps=2, batch_size=10, record_sampling="partition", momentum=0.5,
    noise_multiplier=3.5, delta=1e-6,
)  # fmt: skip
AUDITS = ("one-run", "repeated")
SABOTAGES: dict[str, Fault] = {
    "no noise on one layer": FAULTS["noise forgotten on a layer"],
    "σ halved": FAULTS["noise halved"],
    "no clipping under momentum": lambda at: clipped_at(1000.0)(at) if at.plan.momentum else at,
}


@dataclass(frozen=True)
class Bound:
    """What one audit proves against one adversary."""

    audit: str
    adversary: str
    epsilon_lower: float
    epsilon_printed: float
    statistic: str
    seed: int

    @property
    def name(self) -> str:
        """The audit and the adversary."""
        return f"{self.audit}/{self.adversary}"

    @property
    def exceeds(self) -> bool:
        """Whether it refutes the printed ε."""
        return self.epsilon_lower > self.epsilon_printed

    def as_json(self) -> dict[str, Any]:
        """For the file of results."""
        return {"epsilon_lower": self.epsilon_lower, "epsilon_printed": self.epsilon_printed,
                "statistic": self.statistic, "seed": self.seed}  # fmt: skip


def printed() -> dict[str, float]:
    """The ε of the sound mechanism for each adversary."""
    privacy = state(PLAN, Population(CLIENTS, CANARIES // CLIENTS, 1, LAYERS))
    return {adversary: privacy.row(adversary).epsilon for adversary in ADVERSARIES}


def bounds(fault: Fault | None, seed: int, trials: int) -> Iterator[Bound]:
    """Both audits of the mechanism with a fault, or without one, against every adversary."""
    method, promised, plan = METHODS[PLAN.method], printed(), PLAN.but(seed=seed)
    method = method if fault is None else sabotaged(method, fault)
    found = audit_one_run(
        plan, canaries=CANARIES, clients=CLIENTS, layers=LAYERS, confidence=CONFIDENCE, seed=seed, method=method
    )
    for each in found:
        yield Bound("one-run", each.adversary, each.epsilon_lower, promised[each.adversary], each.statistic, seed)
    for adversary in ADVERSARIES:
        few = max(1000, trials // 100) if adversary == "model" else trials  # each of its trials needs a server
        records = CANARIES // CLIENTS
        proved = audit(plan, adversary, layers=LAYERS, records=records, trials=few, seed=seed, method=method)
        yield Bound("repeated", adversary, proved.epsilon_lower, promised[adversary], proved.statistic, seed)


def study(seeds: int, trials: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    """All sabotages with one seed, and the honest mechanism with all seeds."""
    told: dict[str, Any] = {"sabotages": {}, "honest": {}}
    for name, fault in SABOTAGES.items():
        found = list(bounds(fault, 0, trials))
        caught = {each: [b.adversary for b in found if b.exceeds and b.audit == each] for each in AUDITS}
        told["sabotages"][name] = {"caught_by": caught} | {each.name: each.as_json() for each in found}
        say(f"{name}: " + "; ".join(f"{how} {', '.join(who) or 'does not catch it'}" for how, who in caught.items()))
    honest = [bound for seed in range(seeds) for bound in bounds(None, seed, trials)]
    largest = sorted(honest, key=lambda bound: bound.epsilon_lower)  # of equal names, the last one stays
    told["honest"] = {"seeds": seeds, "bounds": len(honest), "exceeded": sum(bound.exceeds for bound in honest)}
    told["honest"] |= {each.name: each.as_json() for each in largest}
    say(f"honest: {told['honest']['exceeded']} of {len(honest)} bounds exceed the printed ε, with {seeds} seeds")
    return told


def as_they_must(told: dict[str, Any]) -> bool:
    """Whether every sabotage is caught, and the honest mechanism never."""
    caught = (any(each["caught_by"].values()) for each in told["sabotages"].values())
    return all(caught) and not told["honest"]["exceeded"]


def main() -> None:
    """Run the study."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the honest mechanism")
    parser.add_argument("--trials", type=int, default=TRIALS, help="of the repeated audit in each world")
    parser.add_argument("--dry", action="store_true", help="write no results")
    asked = parser.parse_args()
    commit = None if asked.dry else clean_commit()
    started = time.perf_counter()
    told = study(asked.seeds, asked.trials)
    about = {
        "command": "python -m benchmarks.audit_sabotages",
        "commit": commit,
        "machine": f"{platform.machine()} CPU, one thread, Python {platform.python_version()}, torch {torch.__version__}",
        "seconds": round(time.perf_counter() - started),
        "confidence": CONFIDENCE,
        "canaries": CANARIES,
        "trials": asked.trials,
        "plan": PLAN.written(),
    }
    if not asked.dry:
        RESULTS.write_text(json.dumps(about | told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.exit(0 if as_they_must(told) else 1)


if __name__ == "__main__":
    main()
