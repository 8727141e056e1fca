"""Accuracy at one ε of clients with equal and with very unequal numbers of records (results/unequal_sizes.json).

    python -m benchmarks.unequal_sizes --plans build/plans.json                       # calibrate the noise (dp-accounting)
    python -m benchmarks.unequal_sizes --train build/plans.json --device cuda --out results/unequal_sizes.json

100 clients share MNIST's 50,000 training digits: 500 each, or sizes drawn from a Dirichlet distribution, the largest at most
20 times the smallest. The recommended recipe at ε = 2 against the server weights clients by their records; the same plan
with equal weights shows why. The two steps may run on different machines: the second does not need dp-accounting.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.clean_tree import clean_commit
from fedcdp.config.experiment import Experiment, assemble
from fedcdp.config.plan import Plan
from fedcdp.training.prepared import population_of, prepare_experiment
from fedcdp.training.trainer import train_experiment

EPSILON = 2.0
SEEDS = (0, 1, 2)
SIZES: dict[str, dict[str, Any]] = {
    "equal": {"partition": "iid"},
    "unequal": {"partition": "dirichlet-sizes", "alpha": 1.0, "size_ratio": 20.0},
}


def settings(sizes: str, seed: int) -> dict[str, dict[str, Any]]:
    """What a user would give, and nothing of the plan but its seed."""
    return {"data": {"dataset": "mnist", "clients": 100} | SIZES[sizes], "plan": {"seed": seed}}


def plans() -> list[dict[str, Any]]:
    """Every training, with its calibrated plan."""
    from fedcdp.training.planning import plan_experiment

    found = []
    for sizes in SIZES:
        for seed in SEEDS:
            planned = plan_experiment([settings(sizes, seed)], population_of, target_epsilon=EPSILON)
            written = planned.experiment.plan.written() | {"network": planned.experiment.model.network}
            found.append({"sizes": sizes, "seed": seed, "epsilon": planned.epsilon, "plan": written})
            if sizes == "unequal":
                equal = {name: value for name, value in written.items() if name not in ("weighting", "noise_slots")}
                found.append({"sizes": "unequal, equal weights", "seed": seed, "epsilon": planned.epsilon, "plan": equal})
    return found


def train(case: dict[str, Any], device: str) -> dict[str, Any]:
    """One training: its accuracy, and the sizes of its clients."""
    plan = dict(case["plan"])
    network = plan.pop("network")
    given = settings(case["sizes"].partition(",")[0], case["seed"])
    experiment = assemble({"data": given["data"] | {"records": None}, "model": {"network": network}})
    experiment = replace(experiment, plan=Plan(**plan), run=replace(experiment.run, device=device, evaluate_every=40))
    return _result(case, experiment)


def _result(case: dict[str, Any], experiment: Experiment) -> dict[str, Any]:
    prepared = prepare_experiment(experiment, quiet=True)
    run = train_experiment(experiment, None, prepared=prepared)
    federation = run.federation
    return case | {
        "accuracy": run.accuracy,
        "smallest": federation.smallest,
        "largest": federation.largest,
        "seconds": round(run.seconds, 1),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=Path, help="write the calibrated plans here")
    parser.add_argument("--train", type=Path, help="train the plans in this file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.plans is not None:
        given.plans.parent.mkdir(parents=True, exist_ok=True)
        given.plans.write_text(json.dumps({"commit": clean_commit(), "plans": plans()}, indent=1) + "\n")
        return
    planned = json.loads(given.train.read_text())
    done = []
    for case in planned["plans"]:
        done.append(train(case, given.device))
        print({name: value for name, value in done[-1].items() if name != "plan"}, flush=True)
    means = {
        sizes: statistics.mean(each["accuracy"] for each in done if each["sizes"] == sizes)
        for sizes in dict.fromkeys(each["sizes"] for each in done)
    }
    machine = torch.cuda.get_device_name() if given.device.startswith("cuda") else platform.processor() or platform.machine()
    result = {"epsilon": EPSILON, "mean_accuracy": means, "machine": machine, "commit": planned["commit"], "runs": done}
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(means)


if __name__ == "__main__":
    main()
