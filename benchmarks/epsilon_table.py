"""The paper's table of ε, as it prints them and as they are.

python benchmarks/epsilon_table.py > results/epsilon.md
"""

from __future__ import annotations

import math

from fedcdp.accounting.described import population_of
from fedcdp.accounting.statement import Privacy, state
from fedcdp.experiment import assemble
from fedcdp.presets import preset

DATASETS = ("mnist", "cifar10", "lfw", "adult", "cancer")
COLUMNS = {
    "fed-cdp": [("server", "record"), ("server", "unique"), ("example", "record"), ("server", "client")],
    "fed-sdp": [("model", "client"), ("server", "client"), ("example", "record")],
}


def main() -> None:
    """Print the tables."""
    print("# ε of the paper's settings\n")
    print("K = 1000, K_t = 100, σ = 6, C = 4, M = 3 layers, δ = 1e-5, the authors' record order, before it is known who")
    print(
        "takes part. *printed*: `fedcdp account --preset D --method M --local-steps L --mode paper`, which agrees with the"
    )
    print("paper's table to 1e-4 and guarantees nothing. The others: the same command in mode `tight`. Made by")
    print("`python benchmarks/epsilon_table.py`.")
    for method, columns in COLUMNS.items():
        print(f"\n## {method}\n")
        print("| dataset | L | printed | " + " | ".join(f"{adversary}, {unit}" for adversary, unit in columns) + " |")
        print("| --- " * (3 + len(columns)) + "|")
        for dataset in DATASETS:
            for steps in (1, 100):
                experiment = assemble(preset(dataset), {"plan": {"method": method, "local_steps": steps}})
                population = population_of(experiment)
                printed = state(experiment.plan, population, mode="paper").rows[0].epsilon
                privacy = state(experiment.plan, population)
                cells = [cell(privacy, adversary, unit) for adversary, unit in columns]
                print(f"| {dataset} | {steps} | {printed:.4f} | {' | '.join(cells)} |")


def cell(privacy: Privacy, adversary: str, unit: str) -> str:
    """One ε for people."""
    epsilon = privacy.row(adversary, unit).epsilon
    return "∞" if epsilon == math.inf else f"{epsilon:.3g}"


if __name__ == "__main__":
    main()
