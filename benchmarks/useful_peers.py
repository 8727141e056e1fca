"""Accuracy at ε = 1, 2 and 8 side by side: our presets, plain Opacus clients in FedAvg, and PrivateFL.

    python -m benchmarks.useful_peers run --device cuda                        # presets, and the peers' own networks
    python -m benchmarks.useful_peers run --device cuda --features             # the peers on the presets' fixed features
    python -m benchmarks.useful_peers opacus --features --datasets mnist       # needs opacus: the same with Opacus itself
    python -m benchmarks.useful_peers account                                  # needs dp-accounting: ε of every stored row
    python -m benchmarks.useful_peers noise                                    # needs dp-accounting: prints `NOISE`
    python -m benchmarks.useful_peers run --quick                              # a sample on embedded digits, in seconds

**One set of rules for all.** The federations are those of the presets: 100 clients with two classes each, 500 (MNIST) or
400 (CIFAR-10) records, all clients in every round. ε is against the server, which reads every client's update, for one
record, at δ = 1e-5, over the whole training. The accuracy is that of the last round, on the global validation split, with
seeds 0, 1 and 2. Inputs are scaled by constants; no statistic of the data is used.

**Peers.** Both run DP-SGD at the client and FedAvg at the server (`private_clients`, a batched program that tests compare
with Opacus itself). A client draws Poisson batches, so its ε assumes that the server does not learn which records were
drawn. The presets do not need this assumption. With one batch per round, all records are in every step, and nothing is
assumed.

- `opacus`: plain Opacus clients, with the network of Opacus' own MNIST example and a small tanh CNN for CIFAR-10.
- `privatefl`: the same with PrivateFL's personal transformation of the inputs (`private_clients` says what was
  re-implemented).
- With `--features`, both train a linear layer on the fixed features of a fedcdp network (by default, the network of the
  presets). This separates what features contribute from what the method contributes. The features, of norm 1, are
  multiplied by 10: with a smaller scale the gradient of a transformation outweighs the layer's in the joint clipping.

**Scores of PrivateFL.** A client that holds two classes must still classify all ten on the global validation split. Three
readings exist, and all of them are stored:

| score | the network that is scored |
| --- | --- |
| `shared` | the shared network, without a transformation: all that the server has |
| `mean_transformation` | the shared network behind the mean of the clients' transformations, which ε covers too |
| `personal` | each client's own: the shared network behind its transformation; the mean over the clients |

`accuracies` repeats the score that was best on the tuning split. `personal_own_classes` scores each client on the
validation records of its own two classes. That is another, easier task, and the one closest to the PrivateFL paper, whose
clients are scored on test data of their own classes. The paper also uses δ = 1e-3, and the round that is best on test data.

**Tuning.** Every peer gets the same grid (`GRIDS`) for each dataset and ε: rounds, batches per round, and learning rate, at
a clip bound of 1. For PrivateFL, the best of them is then tried with other learning rates of the transformation. As for the
presets, a setting is trained with seed 0 on four fifths of the training split by four fifths of the clients, and scored on
the other fifth. No ε covers the search. The ranges of the grids and the network for CIFAR-10 come from about 50 earlier
trials: on features, scored on that fifth; of networks, on 5 or 20 clients and scored on a part of the validation split,
which can only favour the peers.

Results are stored in results/useful_peers.json, and stored results are not computed again. Training needs neither
dp-accounting nor opacus: the noise multipliers are in `NOISE`, and tests compare them with the accountant.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.clean_tree import clean_commit
from benchmarks.peer_settings import (
    EPSILONS,
    GRIDS,
    NETWORKS,
    PERSONAL_SHARE,
    PERSONAL_SHARES,
    QUICK,
    Grid,
    epsilon_of,
    print_noise,
    sigma,
)
from benchmarks.private_clients import Clients, LocalTraining, PrivateClients
from benchmarks.recommended import DELTA, SEEDS, Kept, Row, accuracy, featured, for_tuning, splits_of
from fedcdp.config.presets import FEDERATIONS, RECOMMENDED, Federated
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import partition

OUT = Path("results/useful_peers.json")
METHODS = ("opacus", "privatefl")
_PERSONAL = ("shared", "mean_transformation", "personal")
_AT_ONCE = {"cpu": 1_000, "cuda": 10_000}  # examples whose gradients are in memory
_FEATURE_SCALE = 10.0
_FEDERATIONS = FEDERATIONS | {QUICK: Federated(QUICK, "shards", 100, 40, "oriented-gradients")}


@dataclass(frozen=True)
class Cell:
    """One peer on one dataset at one ε, with its own network or on fixed features."""

    dataset: str
    epsilon: int
    method: str
    features: str | None

    @property
    def key(self) -> str:
        """Its name in the file of results, which is the same whatever the features are called."""
        return f"{self.dataset} eps={self.epsilon} {self.method} {'features' if self.features else 'own network'}"

    @property
    def grid(self) -> Grid:
        """What is tried for it; the grid does not depend on the method."""
        return GRIDS[self.dataset, "features" if self.features else "own network", self.epsilon]

    def setting(self, tried: dict[str, Any]) -> LocalTraining:
        """A setting of the grid, with the noise for ε."""
        noise, share = sigma(self.epsilon, tried["batches"], tried["rounds"]), PERSONAL_SHARE * (self.method == "privatefl")
        return LocalTraining(noise_multiplier=noise, personal_rate=share * tried["learning_rate"], **tried)

    def peers(self, seed: int, device: str, tuning: bool) -> tuple[PrivateClients, torch.Tensor, torch.Tensor]:
        """The clients before their first round, and the records on which they are scored."""
        federated, (splits, layers) = _FEDERATIONS[self.dataset], data_of(self.dataset, self.features, device)
        clients = federated.clients
        if tuning:
            splits, clients = for_tuning(splits, seed), clients * 4 // 5
        dealt = partition(splits, clients=clients, scheme=federated.partition, records=federated.records, seed=seed)
        table = torch.from_numpy(dealt.table(range(clients))[0])
        made = PrivateClients(
            layers(seed).to(device),
            Clients(splits.train.tensor[table], splits.train.targets[table].to(device)),
            personal=self.method == "privatefl",
            seed=seed,
            at_once=_AT_ONCE[torch.device(device).type],
        )
        return made, splits.validation.tensor, splits.validation.targets.to(device)


@cache
def data_of(dataset: str, features: str | None, device: str) -> tuple[Splits, Callable[[int], nn.Module]]:
    """The data as the trained layers read them, with all inputs on the device, and the trained layers by the seed."""
    if features is not None:
        splits, layers = featured(dataset, 0, features, device)
        if layers is None:
            raise SystemExit(f"--features {features}: the network has no fixed features")
        return _scaled(splits, 0.0, 1 / _FEATURE_SCALE, device), lambda _: layers
    network = NETWORKS[dataset]
    return _scaled(splits_of(dataset, 0), network.centre, network.width, device), network.build


def _scaled(splits: Splits, centre: float, width: float, device: str) -> Splits:
    def of(data: Dataset) -> Dataset:
        return replace(data, inputs=(data.tensor.to(device) - centre) / width)

    return replace(splits, train=of(splits.train), validation=of(splits.validation))


def scored(cell: Cell, setting: LocalTraining, seed: int, device: str, tuning: bool) -> dict[str, float]:
    """Train with one seed, and score the last round."""
    peers, inputs, targets = cell.peers(seed, device, tuning)
    peers.train(setting)
    return peers.scores(inputs, targets)


def best_of(scores: dict[str, float]) -> str:
    """The name of the best score on the global set."""
    return max((name for name in _PERSONAL if name in scores), key=lambda name: scores[name])


def finish(cell: Cell, seeds: list[int], origin: dict[str, str], device: str) -> dict[str, Any]:
    """Try the grid on the tuning split, then train the best setting with each seed and score it on the validation split."""
    started = time.perf_counter()
    tried: list[tuple[LocalTraining, dict[str, float]]] = []

    def best(settings: Iterable[LocalTraining]) -> LocalTraining:
        tried.extend((each, scored(cell, each, 0, device, tuning=True)) for each in settings)
        return max(tried, key=lambda pair: pair[1][best_of(pair[1])])[0]

    setting = best(map(cell.setting, cell.grid))
    if cell.method == "privatefl":
        setting = best([replace(setting, personal_rate=share * setting.learning_rate) for share in PERSONAL_SHARES])
    score = best_of(dict(tried)[setting])
    finals = [scored(cell, setting, seed, device, tuning=False) for seed in seeds]
    accuracies = [each[score] for each in finals]
    return {
        "dataset": cell.dataset,
        "epsilon": cell.epsilon,
        "delta": DELTA,
        "method": cell.method,
        "network": cell.features or NETWORKS[cell.dataset].name,
        "setting": asdict(setting),
        "score": score,
        "seeds": seeds,
        "accuracies": accuracies,
        **_mean_and_spread(accuracies),
        "scores": {name: _mean_and_spread([each[name] for each in finals]) for name in finals[0]},
        "tuning": [{"setting": asdict(each), "scores": scores} for each, scores in tried],
        "seconds": round(time.perf_counter() - started, 1),
        **origin,
    }


def _mean_and_spread(values: list[float]) -> dict[str, float | None]:
    return {"mean": statistics.mean(values), "spread": statistics.stdev(values) if len(values) > 1 else None}


def finish_preset(name: str, origin: dict[str, str], device: str) -> dict[str, Any]:
    """A preset's accuracy under the same rules, as `benchmarks.recommended` measures it."""
    started, row = time.perf_counter(), Row("peers", "recommended", name)
    accuracies = [accuracy(each, device, tuning=False) for each in row.experiments()]
    return {
        "dataset": row.experiment().data.dataset,
        "epsilon": RECOMMENDED[name].found.epsilon,
        "delta": DELTA,
        "method": "preset",
        "network": row.experiment().model.network,
        "preset": name,
        "plan": row.experiment().plan.written(),
        "seeds": list(SEEDS),
        "accuracies": accuracies,
        **_mean_and_spread(accuracies),
        "seconds": round(time.perf_counter() - started, 1),
        **origin,
    }


def features_of(given: argparse.Namespace, dataset: str) -> str | None:
    """The network whose fixed features the peers use, or None if they train networks of their own."""
    return _FEDERATIONS[dataset].network if given.features == "preset" else given.features


def run_all(given: argparse.Namespace, origin: dict[str, str], kept: Kept) -> None:
    """Every cell and preset that is not known yet. Nothing is started after the deadline."""
    deadline = time.time() + given.seconds
    for dataset, epsilon in product(given.datasets, given.epsilons):
        for method in given.methods:
            if method == "preset":
                names = [name for name in (f"{dataset}-eps{epsilon}", f"{dataset}-sum-eps{epsilon}") if name in RECOMMENDED]
                work = {name: partial(finish_preset, name, origin, given.device) for name in names}
            else:
                cell = Cell(dataset, epsilon, method, features_of(given, dataset))
                work = {cell.key: partial(finish, cell, given.seeds, origin, given.device)}
            for key, compute in work.items():
                if time.time() > deadline:
                    return
                kept.get("rows", key, compute)


def compare_with_opacus(given: argparse.Namespace, origin: dict[str, str], kept: Kept) -> None:
    """The settings that were chosen for plain Opacus clients, trained by Opacus itself, next to the batched program."""
    from benchmarks.opacus_clients import train_with_opacus

    for dataset, epsilon in product(given.datasets, given.epsilons):
        cell = Cell(dataset, epsilon, "opacus", features_of(given, dataset))
        row = kept.known["rows"][cell.key]

        def compute(cell: Cell = cell, row: dict[str, Any] = row) -> dict[str, Any]:
            started, accuracies, epsilons = time.perf_counter(), [], []
            for seed in given.seeds:
                peers, inputs, targets = cell.peers(seed, given.device, tuning=False)
                setting = LocalTraining(**row["setting"])
                trained, epsilon = train_with_opacus(peers.network, peers.clients, setting, seed)
                peers.shared = {name: weight.detach() for name, weight in trained.named_parameters()}
                accuracies.append(peers.scores(inputs, targets)["shared"])
                epsilons.append(epsilon)
            return {
                "setting": row["setting"],
                "seeds": given.seeds,
                "accuracies": accuracies,
                **_mean_and_spread(accuracies),
                "batched": row["accuracies"],
                "epsilon_by_opacus": max(epsilons),
                "seconds": round(time.perf_counter() - started, 1),
                **origin,
            }

        kept.get("opacus", cell.key, compute)


def account(kept: Kept) -> None:
    """Add the accountant's ε to every stored row: the server's, for one record."""
    from benchmarks.recommended import epsilons_of

    for row in kept.known["rows"].values():
        if row["method"] == "preset":
            row["epsilon_accounted"] = epsilons_of(Row("peers", "recommended", row["preset"]))["server record"]
        else:
            row["epsilon_accounted"] = epsilon_of(LocalTraining(**row["setting"]))
        print(f"{row['dataset']} {row['method']}: {row['epsilon_accounted']:.4f}")
    kept.path.write_text(json.dumps(kept.known, indent=1) + "\n")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "opacus", "account", "noise"))
    parser.add_argument("--datasets", nargs="+", choices=("mnist", "cifar10"), default=["mnist", "cifar10"])
    parser.add_argument("--epsilons", nargs="+", type=int, choices=EPSILONS, default=list(EPSILONS))
    parser.add_argument("--methods", nargs="+", choices=("preset", *METHODS), default=["preset", *METHODS])
    parser.add_argument(
        "--features", nargs="?", const="preset", help="peers train a linear layer on a network's fixed features"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after so many")
    parser.add_argument("--commit", help="the commit that is measured, where this is a copy without its repository")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--quick", action="store_true", help="one small setting of each peer on embedded digits")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if given.quick:
        given.datasets, given.epsilons, given.methods, given.features = [QUICK], [8], METHODS, "preset"
    if given.what == "noise":
        print_noise()
        return
    kept = Kept(given.out)
    if given.what == "account":
        account(kept)
        return
    features = {None: "", "preset": " --features"}.get(given.features, f" --features {given.features}")
    origin = {
        "hardware": torch.cuda.get_device_name() if given.device.startswith("cuda") else "CPU, one thread",
        "command": f"python -m benchmarks.useful_peers {given.what} --device {given.device}{features}",
        "commit": given.commit or ("not recorded" if given.quick else clean_commit()),
    }
    (run_all if given.what == "run" else compare_with_opacus)(given, origin, kept)


if __name__ == "__main__":
    main()
