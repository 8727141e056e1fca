"""Cost of noise on the sum: rounds of a recommended preset with its own noise and with noise on the sum, in turn.

    python -m benchmarks.secure_sum
    python -m benchmarks.secure_sum --device cuda --out results/secure_sum-gpu.json

Both trainings use the same data, network and clients. Their rounds alternate, so other load on the machine slows both. The
ratio is that of the medians; `ratio_of_best` compares the fastest rounds, which a busy machine disturbs less. `exact_us` is
the time for one exact draw of the discrete Gaussian by OpenDP (None if it is not installed).
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.clean_tree import clean_commit
from fedcdp.config.experiment import assemble
from fedcdp.config.plan import Plan
from fedcdp.config.presets import preset
from fedcdp.engine.runtime import usable_device, wait
from fedcdp.errors import PlanError
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.mechanism.secure_sum import discrete_gaussians
from fedcdp.training.loss_contract import loss_for
from fedcdp.training.prepared import Prepared, prepare_experiment
from fedcdp.training.rounds import Simulator
from fedcdp.training.rundir import State
from fedcdp.training.trainer import begin

_EXACT_DRAWS = 20_000


def begun(prepared: Prepared, plan: Plan, device: torch.device) -> tuple[Simulator, State]:
    """The simulator that `fedcdp train` would use, before its first round."""
    own = replace(prepared, plan=plan)
    network = copy.deepcopy(prepared.network).to(device)
    simulator, state = begin(own, network, device=device, loss=loss_for(prepared.federation.train, None))
    return simulator, replace(state, weights={name: value.to(device) for name, value in state.weights.items()})


def measure(name: str, device: torch.device, rounds: int) -> dict[str, Any]:
    """Seconds of a round with each kind of noise."""
    experiment = assemble(preset(name))
    prepared = prepare_experiment(experiment, quiet=True)
    plans = {"today": experiment.plan, "sum": experiment.plan.but(noise="sum", secure_aggregation=True)}
    trainings = {kind: begun(prepared, plan, device) for kind, plan in plans.items()}
    chosen = torch.from_numpy(choose_clients(experiment.plan, prepared.federation.clients, 0))
    seconds: dict[str, list[float]] = {kind: [] for kind in trainings}
    for number in range(rounds + 2):
        for kind, (simulator, state) in trainings.items():
            wait(device)
            started = time.perf_counter()
            simulator.round(state, chosen)
            wait(device)
            if number >= 2:  # after two rounds of warming up
                seconds[kind].append(time.perf_counter() - started)
    best, usual = ({kind: of(each) for kind, each in seconds.items()} for of in (min, statistics.median))
    return {
        "preset": name,
        "rounds": rounds,
        "clients": len(chosen),
        "weights": next(iter(trainings.values()))[0].engine.layout.size,
        "engines": {kind: [simulator.local_engine.name, simulator.chunk] for kind, (simulator, _) in trainings.items()},
        "seconds_a_round": usual,
        "ratio": usual["sum"] / usual["today"],
        "ratio_of_best": best["sum"] / best["today"],
    }


def exact_us() -> float | None:
    """Microseconds for one exact draw."""
    try:
        discrete_gaussians((10,), 2**24)
    except PlanError:
        return None
    started = time.perf_counter()
    discrete_gaussians((_EXACT_DRAWS,), 2**24)
    return (time.perf_counter() - started) / _EXACT_DRAWS * 1e6


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=["mnist-eps1"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--commit", help="the commit that is measured, where this is a copy without its repository")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = usable_device(given.device)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    found = {"device": device.type, "machine": machine, "torch": torch.__version__, "threads": torch.get_num_threads()}
    if given.out is not None:
        found |= {
            "command": f"python -m benchmarks.secure_sum --device {device.type}",
            "commit": given.commit or clean_commit(),
        }
    result = found | {"exact_us": exact_us(), "presets": [measure(name, device, given.rounds) for name in given.preset]}
    print(json.dumps(result, indent=1))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
