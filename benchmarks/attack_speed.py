"""The cost of a victim: 100 attacked in lockstep, compared with one at a time by `torch.optim.LBFGS` (one thread each).

    python benchmarks/attack_speed.py --out results/attack_speed.json

Both fit the same gradients with the same steps: the paper's attack (CPL network, 20 evaluations per iteration). The loop for
one victim at a time is the plain PyTorch loop of the attack's authors. The two take turns; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks.api import attack
from fedcdp.attacks.recipe import CPL
from fedcdp.models.networks import build


def one_at_a_time(network: nn.Module, gradients: list[Tensor], label: Tensor, seed: Tensor, iterations: int) -> Tensor:
    """The attack as it is usually written."""
    dummy = seed.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([dummy])
    parameters = list(network.parameters())

    def closure() -> Tensor:
        optimiser.zero_grad()
        shown = torch.autograd.grad(F.cross_entropy(network(dummy), label), parameters, create_graph=True)
        distance = torch.stack([(a - b).square().sum() for a, b in zip(shown, gradients, strict=True)]).sum()
        distance.backward()
        return distance

    for _ in range(iterations):
        optimiser.step(closure)
    return dummy.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victims", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--network", default="cpl", choices=["cpl", "cnn"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = fedcdp.load("mnist5k")
    network = build(given.network, data.train.shape, data.train.classes)
    inputs, labels = data.train.inputs[: given.victims], data.train.targets[: given.victims]
    parameters = list(network.parameters())
    each = [
        torch.autograd.grad(F.cross_entropy(network(x[None]), y[None]), parameters)
        for x, y in zip(inputs, labels, strict=True)
    ]
    together = [torch.stack(parts) for parts in zip(*each, strict=True)]
    recipe = CPL.but(iterations=given.iterations)
    seeds = recipe.seed.draw(torch.arange(given.victims), 1, data.train.shape, 0)
    lockstep, single, nearest = [], [], []
    for repeat in range(given.repeats):
        found = attack(together, model=network, truth=(inputs, labels), attack=recipe, seed=0, public=data.validation)
        lockstep.append(found.seconds / given.victims)  # type: ignore[union-attr]
        victim = repeat % given.victims
        started = time.perf_counter()
        image = one_at_a_time(network, list(each[victim]), labels[victim : victim + 1], seeds[victim], given.iterations)
        single.append(time.perf_counter() - started)
        nearest.append(float((image - found.found.last[victim]).abs().max()))  # type: ignore[union-attr]
    result = {
        "machine": f"{platform.machine()}, one thread, torch {torch.__version__}",
        "network": given.network,
        "victims": given.victims,
        "iterations": given.iterations,
        "one_at_a_time_seconds_a_victim": statistics.median(single),
        "lockstep_seconds_a_victim": statistics.median(lockstep),
        "ratio": statistics.median(single) / statistics.median(lockstep),
        "largest_difference_of_a_pixel": max(nearest),
    }
    print(json.dumps(result, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
