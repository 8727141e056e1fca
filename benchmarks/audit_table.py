"""What an attack can show of ε, beside what is guaranteed.

python benchmarks/audit_table.py > results/audit.md
"""

from __future__ import annotations

import math

import torch

from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import state
from fedcdp.audit import audit
from fedcdp.plan import Plan

ORDER = {"record_sampling": "partition", "batch_size": 5, "local_steps": 1}
ROWS: list[tuple[str, str, int, Plan]] = [
    ("Fed-CDP, one noised gradient", "example", 1, Plan(**ORDER)),
    ("Fed-CDP, ten participations", "example", 10, Plan(**ORDER)),
    ("Fed-CDP, ten participations", "server", 10, Plan(**ORDER)),
    ("Fed-CDP, batch noise, one participation", "server", 1, Plan(noise="batch", **ORDER)),
    ("Fed-CDP, Poisson sampling, σ = 1, one participation", "server", 1, Plan(noise_multiplier=1.0, local_steps=1)),
    ("Fed-SDP, noise at the client", "server", 1, Plan(method="fed-sdp", noise_at="client", **ORDER)),
    ("Fed-SDP, noise at the server", "model", 1, Plan(method="fed-sdp", **ORDER)),
    ("Fed-CDP, batch noise: single gradients are only clipped", "example", 1, Plan(noise="batch", **ORDER)),
    ("Fed-SDP, noise at the server: the server reads raw updates", "server", 1, Plan(method="fed-sdp", **ORDER)),
    ("non-private", "server", 1, Plan(method="nonprivate", **ORDER)),
]


ABOUT = """\
Worst-case canary, the mechanism's own code, M = 3 layers, σ = 6 unless a row says otherwise, N_i = 500, B = 5, δ = 1e-5.
*shown*: Clopper–Pearson, 99.9 %, threshold chosen on other trials; *Gaussian*: for information, if the trade-off is
Gaussian; *guaranteed*: what `fedcdp account` states for a unit known to take part so often. One thread of a CPU; made by
`python benchmarks/audit_table.py` (one row: `fedcdp audit`).
"""


def main() -> None:
    """Attack each row, and print the table."""
    torch.set_num_threads(1)
    print("# What an attack shows of ε\n")
    print(ABOUT)
    print("| mechanism | adversary | shown | Gaussian | guaranteed | trials a world | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, adversary, participations, plan in ROWS:
        found = audit(plan, adversary, records=500, participations=participations)
        row = state(plan, Population(1000, 500, 1, 3), rounds=participations).row(adversary, _unit(plan, adversary))
        cells = [shown(found.epsilon_lower), shown(found.epsilon_gaussian), shown(row.epsilon_worst)]
        print(f"| {name} | {adversary} | {' | '.join(cells)} | {found.trials} | {found.seconds:.0f} |", flush=True)


def _unit(plan: Plan, adversary: str) -> str:
    return "client" if plan.method == "fed-sdp" and adversary != "example" else "record"


def shown(epsilon: float | None) -> str:
    """An ε for people."""
    if epsilon is None:
        return "-"
    return "∞" if epsilon == math.inf else f"{epsilon:.3g}"


if __name__ == "__main__":
    main()
