"""Fed-CDP on transformers and ResNet-18: time and memory beside training without privacy, and beside Opacus.

    python -m benchmarks.sequences --device cuda          # results/sequences.json
    python -m benchmarks.sequences --size small           # results/sequences-cpu.json: networks for a CPU, some minutes
    python -m benchmarks.sequences --size tiny --out /dev/null # the program itself, in seconds

On a machine without a package registry: torch, numpy and scipy (for Opacus) are enough, with `src` and the unpacked wheel of
Opacus on PYTHONPATH. What cannot be measured is stored with its reason, and each network as soon as it is measured.

Every way takes the same local step of the same clients: gradients of a batch, clip and noise (except without privacy), and
the update. fedcdp trains the clients at once, by the methods' own code; Opacus trains them one after the other. Ways take
turns. A figure is the median of the turns with the least and the most; memory is the peak on a GPU, without the weights and
data that were there before.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.clean_tree import clean_commit
from benchmarks.sequence_networks import Transformer, next_words, resnet18
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import partition
from fedcdp.engine import Engine, FunctionalEngine
from fedcdp.engine.recorded import RecordedEngine
from fedcdp.engine.runtime import usable_device, wait
from fedcdp.studies.bench.measurement import ratio, spread
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.rundir import State

RESULTS = Path(__file__).parents[1] / "results"
_MIB = 2**20
_WARM_UPS = 2
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """A network and its data: so many clients at once, with batches of so many examples."""

    network: Callable[[], nn.Module]
    loss: Loss
    clients: int
    batch: int
    shape: tuple[int, ...]
    words: int | None = None
    """Token ids below this number; None: pictures."""

    def data(self) -> Dataset:
        """Made-up examples: speed does not depend on their values."""
        generator = torch.Generator().manual_seed(0)
        count = self.clients * self.batch
        if self.words is None:
            return Dataset(torch.rand(count, *self.shape, generator=generator), torch.arange(count) % 10, 10)
        numbers = torch.randint(self.words, (count, *self.shape), generator=generator)
        if self.loss is next_words:
            return Dataset(numbers, numbers, 0, task="custom")
        return Dataset(numbers, torch.arange(count) % 2, 2)


def subjects(size: str) -> dict[str, Subject]:
    """The networks; `small` and `tiny` ones have the same layers."""
    if size == "small":
        base = {"layers": 2, "width": 128, "heads": 4, "tokens": 64}
        return {
            "GPT-2 of width 128, LoRA rank 8": Subject(
                lambda: Transformer(**base, words=2000, rank=8), next_words, 4, 8, (64,), 2000
            ),
            "BERT of width 128, all weights": Subject(
                lambda: Transformer(**base, words=2000, classes=2).requires_grad_(True), F.cross_entropy, 4, 8, (64,), 2000
            ),
        }
    if size == "tiny":
        small = {"layers": 1, "width": 32, "heads": 2, "words": 50, "tokens": 8}
        return {
            "gpt2-small, LoRA rank 8": Subject(lambda: Transformer(**small, rank=2), next_words, 2, 2, (8,), 50),
            "bert-base, adapters": Subject(
                lambda: Transformer(**small, bottleneck=4, classes=2), F.cross_entropy, 2, 2, (8,), 50
            ),
            "resnet18, group norm": Subject(lambda: resnet18(4), F.cross_entropy, 2, 2, (3, 16, 16)),
        }
    base = {"layers": 12, "width": 768, "heads": 12, "tokens": 128}
    return {
        "gpt2-small, LoRA rank 8": Subject(
            lambda: Transformer(**base, words=50_257, rank=8), next_words, 4, 8, (128,), 50_257
        ),
        "bert-base, adapters": Subject(
            lambda: Transformer(**base, words=30_522, bottleneck=64, classes=2), F.cross_entropy, 4, 16, (128,), 30_522
        ),
        "resnet18, group norm": Subject(resnet18, F.cross_entropy, 4, 32, (3, 32, 32)),
    }


Step = Callable[[], None]


def by_fedcdp(subject: Subject, method: str, engine: str, device: torch.device) -> Step:
    """A local step of all clients by the methods' own code."""
    torch.manual_seed(0)
    network, data = subject.network().to(device), subject.data()
    plan = Plan(
        method=method, per_round=subject.clients, rounds=1, local_steps=1, batch_size=subject.batch, noise_multiplier=1.0,
        clip=1.0, learning_rate=1e-3, record_sampling="partition",
    )  # fmt: skip
    federation = partition(data, clients=subject.clients, scheme="iid")
    example = data.tensor[:1].to(device)
    made: Engine = (
        RecordedEngine(network, subject.loss, example) if engine == "recorded" else FunctionalEngine(network, subject.loss)
    )
    simulator = Simulator.stepwise(ClientData(federation, plan, device), made, subject.clients)
    weights = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    state = State.first(plan, weights)
    clients = torch.arange(subject.clients)
    table, sizes = simulator.data.records_of(clients)
    at = simulator.moment(state, clients.to(device), sizes)
    draw = simulator.data.draw(at, table, sizes)

    def step() -> None:
        simulator.local_engine(weights, draw, at)

    return step


def by_opacus(subject: Subject, mode: str, device: torch.device) -> Step:
    """The same step by Opacus, client after client; `mode` is its `grad_sample_mode`."""
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    torch.manual_seed(0)
    network, data = subject.network().to(device), subject.data()
    inputs, targets = data.tensor.to(device).split(subject.batch), data.targets.to(device).split(subject.batch)
    noise = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": subject.batch}

    def each_example(outputs: Tensor, wanted: Tensor) -> Tensor:
        return torch.func.vmap(lambda one, other: subject.loss(one[None], other[None]))(outputs, wanted)

    each_example.reduction = "mean"  # type: ignore[attr-defined]
    plain = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=1e-3)
    if mode == "hooks":
        model = GradSampleModule(network)
        optimizer = DPOptimizer(plain, **noise)

        def one(some: Tensor, wanted: Tensor) -> None:
            optimizer.zero_grad()
            each_example(model(some), wanted).mean().backward()
            optimizer.step()
    else:
        fast = GradSampleModuleFastGradientClipping(network, max_grad_norm=1.0, use_ghost_clipping=True)
        quick = DPOptimizerFastGradientClipping(plain, **noise)
        criterion = DPLossFastGradientClipping(fast, quick, each_example, "mean")

        def one(some: Tensor, wanted: Tensor) -> None:
            quick.zero_grad()
            criterion(fast(some), wanted).backward()
            quick.step()

    def step() -> None:
        for some, wanted in zip(inputs, targets, strict=True):
            one(some, wanted)

    return step


WAYS: dict[str, Callable[[Subject, torch.device], Step]] = {
    "without privacy": lambda subject, device: by_fedcdp(subject, "nonprivate", "recorded", device),
    "without privacy, functional": lambda subject, device: by_fedcdp(subject, "nonprivate", "functional", device),
    "Fed-CDP, recorded": lambda subject, device: by_fedcdp(subject, "fed-cdp", "recorded", device),
    "Fed-CDP, functional": lambda subject, device: by_fedcdp(subject, "fed-cdp", "functional", device),
    "Opacus, ghost": lambda subject, device: by_opacus(subject, "ghost", device),
    "Opacus, hooks": lambda subject, device: by_opacus(subject, "hooks", device),
}


def measure(subject: Subject, device: torch.device, turns: int) -> dict[str, Any]:
    """All ways that work here, in turn, and how they compare with training without privacy."""
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}

    def fails(name: str, work: Callable[[], None]) -> bool:
        """Whether a way cannot do this: a peer that is not installed, a network that it cannot train, too little memory."""
        try:
            work()
        except Exception as error:
            rows[name] = {"missing": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}
            return True
        return False

    def begin(name: str) -> None:
        steps[name] = WAYS[name](subject, device)
        for _ in range(_WARM_UPS):
            steps[name]()

    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}

    def take_turn(name: str) -> None:
        wait(device)
        before = _reset(device)
        started = time.perf_counter()
        steps[name]()
        wait(device)
        seconds.setdefault(name, []).append(time.perf_counter() - started)
        if before is not None:
            peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated(device) - before)

    for name in WAYS:
        if fails(name, partial(begin, name)):
            steps.pop(name, None)
            _free(device)
    for _ in range(turns):
        for name in list(steps):
            if fails(name, partial(take_turn, name)):
                del steps[name]
                seconds.pop(name, None)
                _free(device)
    for name, measured in seconds.items():
        rows[name] = {"ms_a_client_step": spread([1e3 * each / subject.clients for each in measured])}
        if name in peaks:
            rows[name]["peak_mib"] = round(peaks[name] / _MIB, 1)
        if "without privacy" in seconds:
            rows[name]["times_nonprivate"] = ratio(measured, seconds["without privacy"])
    weights = sum(p.numel() for p in subject.network().parameters() if p.requires_grad)
    return {
        "clients": subject.clients, "batch": subject.batch, "trained_weights": weights,
        "compared": compared(seconds, peaks), "ways": {name: rows[name] for name in WAYS},
    }  # fmt: skip


def compared(seconds: dict[str, list[float]], peaks: dict[str, int]) -> dict[str, Any]:
    """Fed-CDP beside training without privacy and Opacus, each by the faster of its ways here: `auto` takes that engine."""
    fastest = {}
    for kind in ("Fed-CDP", "without privacy", "Opacus"):
        ways = [name for name in seconds if name.startswith(kind)]
        if ways:
            fastest[kind] = min(ways, key=lambda name: statistics.median(seconds[name]))
    ours, found = fastest.get("Fed-CDP"), dict[str, Any](fastest=fastest)
    if ours and (plain := fastest.get("without privacy")):
        found["time_times_nonprivate"] = ratio(seconds[ours], seconds[plain])
        if peaks.get(plain):
            found["memory_times_nonprivate"] = round(peaks[ours] / peaks[plain], 3)
    if ours and (peer := fastest.get("Opacus")):
        found["opacus_times_ours"] = ratio(seconds[peer], seconds[ours])
    return found


def _free(device: torch.device) -> None:
    """Return what a failed way held: another one may need the memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _reset(device: torch.device) -> int | None:
    """Start to watch a GPU's memory; what is allocated now."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument(
        "--size", default="full", choices=("full", "small", "tiny"), help="small: for a CPU; tiny: for a test"
    )
    parser.add_argument("--only", default="", metavar="PREFIX", help="only networks whose names start so")
    parser.add_argument("--commit", help="the commit that is measured, where this is a copy without its repository")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    out = given.out or RESULTS / ("sequences-cpu.json" if given.size == "small" else "sequences.json")
    device = usable_device(given.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    found: dict[str, Any] = {
        "command": f"python -m benchmarks.sequences --device {given.device} --size {given.size}",
        "commit": given.commit or clean_commit(),
        "machine": f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "networks": {},
    }
    for title, subject in subjects(given.size).items():
        if title.startswith(given.only):
            try:
                found["networks"][title] = measure(subject, device, given.turns)
            except Exception as error:  # the other networks are measured all the same
                found["networks"][title] = {"missing": f"{type(error).__name__}: {str(error)[:200]}"}
            _free(device)
            print(title, json.dumps(found["networks"][title], indent=1), flush=True)
            out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
