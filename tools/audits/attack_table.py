"""Lower bounds on ε from attacks, next to the guaranteed ε.

python -m tools.audits.attack_table > results/audit.md         the usual plans, and the content of results/audit_grid.json
python -m tools.audits.attack_table --grid [--trials N]        all methods, conventions and samplings, and sabotaged ones,
                                                               into results/audit_grid.json; exit 1 on a defect
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.clean_tree import clean_commit
from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import state
from fedcdp.audit import audit
from fedcdp.config.plan import Plan
from tests.support.audit_grid import run, sabotaged_cases, sound_cases

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
GRID = Path(__file__).resolve().parents[2] / "results" / "audit_grid.json"


ABOUT = """\
A worst-case canary attacks the mechanism's own code. M = 3 layers, σ = 6 unless a row says otherwise, N_i = 500, B = 5,
δ = 1e-5. *lower bound*: Clopper–Pearson at 99.9 % confidence, with a threshold chosen on other trials. *Gaussian*: an
estimate that assumes a Gaussian trade-off, for information only. *guaranteed*: the ε of `fedcdp account` for a unit known to
take part this often. Measured on one CPU thread by `python -m tools.audits.attack_table` (one row: `fedcdp audit`).
"""
ABOUT_GRID = """\
Small plans whose low noise makes the attack strong: B = 3, K_t = 4, N_i = 6, M = 3, σ = 3 unless the plan in
`audit_grid.json` says otherwise, δ = 1e-5. *printed* is the ε that `fedcdp account` prints for the plan. Each bound holds
with 99.9 % confidence, so fewer than one grid in twenty has a sound mechanism that exceeds its ε by chance.
Measured by `make audits` (`python -m tools.audits.attack_table --grid`), which fails if a sound mechanism exceeds its ε or a
sabotaged one does not.
"""


def main() -> None:
    """Attack, and print a table."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", action="store_true", help="run the grid into results/audit_grid.json")
    parser.add_argument("--trials", type=int, default=300_000, help="in each world; 1/60 if each trial needs a server")
    asked = parser.parse_args()
    if asked.grid:
        sys.exit(grid(asked.trials))
    table()


def grid(trials: int) -> int:
    """Attack every case of the grid; the status says whether every case behaved as required."""
    commit, verdicts = clean_commit(), []
    for verdict in run([*sound_cases(), *sabotaged_cases()], trials):
        verdicts.append(verdict)
        mark = "" if verdict.as_it_must else "   DEFECT"
        case, found = verdict.case, verdict.found
        print(f"{case.plan.method}, {case.name}, {case.adversary}/{case.unit}: at least {found.epsilon_lower:.3g}, "
              f"printed {shown(verdict.printed)}{mark}", flush=True)  # fmt: skip
    told = {"commit": commit, "cases": [each.as_json() for each in verdicts]}
    GRID.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    defects = sum(not each.as_it_must for each in verdicts)
    print(f"{len(verdicts)} cases, {defects} defects; {GRID}")
    return 1 if defects else 0


def table() -> None:
    """The usual plans, attacked now, and the stored results of the grid."""
    print("# Lower bounds on ε from attacks\n")
    print(ABOUT + f"Measured on commit {clean_commit()[:12]}.\n")
    print("| mechanism | adversary | lower bound | Gaussian | guaranteed | trials per world | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, adversary, participations, plan in ROWS:
        found = audit(plan, adversary, records=500, participations=participations)
        row = state(plan, Population(1000, 500, 1, 3), rounds=participations).row(adversary, _unit(plan, adversary))
        cells = [shown(found.epsilon_lower), shown(found.epsilon_gaussian), shown(row.epsilon_worst)]
        print(f"| {name} | {adversary} | {' | '.join(cells)} | {found.trials} | {found.seconds:.0f} |", flush=True)
    stored = json.loads(GRID.read_text(encoding="utf-8"))
    print(grid_tables(stored["cases"], stored["commit"]))


def grid_tables(cells: list[dict[str, Any]], commit: str) -> str:
    """The grid as Markdown."""
    head = ["| method | plan | adversary, unit, relation | lower bound | Gaussian | printed | trials per world |",
            "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    lines = ["\n## The grid\n", ABOUT_GRID + f"Measured on commit {commit[:12]}.\n", *head]
    for broken in (False, True):
        if broken:
            lines += ["\n### Sabotaged mechanisms: each must exceed the ε printed for the sound mechanism\n", *head]
        lines += [_line(cell) for cell in cells if cell["broken"] == broken]
    return "\n".join(lines)


def _line(cell: dict[str, Any]) -> str:
    figures = [shown(cell[key]) for key in ("epsilon_lower", "epsilon_gaussian", "epsilon_printed")]
    who = f"{cell['adversary']}, {cell['unit']}, {cell['relation']}"
    return f"| {cell['plan']['method']} | {cell['name']} | {who} | {' | '.join(figures)} | {cell['trials']} |"


def _unit(plan: Plan, adversary: str) -> str:
    return "client" if plan.method == "fed-sdp" and adversary != "example" else "record"


def shown(epsilon: float | str | None) -> str:
    """An ε, formatted."""
    if epsilon is None:
        return "-"
    return "∞" if epsilon in (math.inf, "inf") else f"{epsilon:.3g}"


if __name__ == "__main__":
    main()
