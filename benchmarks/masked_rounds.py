"""The cost of masks: bytes and seconds of a round with a secure sum and of one without, ten nodes in one process.

    python -m benchmarks.masked_rounds --out results/masked_rounds.json

Both trainings have one local step and the paper's network for the dataset. With seeded noise, which is drawn alike in both,
the difference is that of keys and masks. With secure noise, a secure sum also draws its noise exactly (OpenDP), which takes
about 10 µs a weight. Nodes work one after the other, without Flower's processes and network; those cost seconds in a round
either way. Bytes are those of the records as Flower serialises them, in both directions, for all nodes together.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from flwr.common.serde import recorddict_to_proto

from benchmarks.clean_tree import clean_commit
from fedcdp.config.experiment import assemble
from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.deploy.protocol.server import ServerSettings, serve
from fedcdp.training.rundir import RunDirectory
from tests.support.local_grid import LocalGrid, Node
from tests.support.sum_nodes import SumFolder

NODES, ROUNDS, REPEATS = 10, 8, 3
DATASETS = {"cancer": 40, "mnist5k": 200}
PLANS: dict[str, dict[str, Any]] = {
    "without masks": {"noise": "batch"},
    "with masks": {"noise": "sum", "secure_aggregation": True, "colluders": 1},
}


def measure(dataset: str, records: int, plan: dict[str, Any], *, seeded: bool) -> dict[str, Any]:
    """Train, and read seconds and bytes of a round; the first round, which passes keys on, does not count for seconds."""
    data = {"dataset": dataset, "clients": NODES, "partition": "iid", "records": records}
    usual = {"rounds": ROUNDS, "per_round": NODES, "local_steps": 1, "batch_size": records, "noise_multiplier": 4.0}
    experiment = assemble({"data": data, "plan": usual | plan, "run": {"evaluate_every": ROUNDS}})
    dealt = {"dataset": dataset, "num-partitions": NODES, "partition": "iid", "records": records}
    with tempfile.TemporaryDirectory() as place:
        nodes = {
            100 + number: Node(
                client_app(policy=ClientPolicy(epsilon=float("inf"), colluders=1, allow_reproducible=True)),
                dealt | {"partition-id": number} | SumFolder.write(Path(place) / f"{number}", number, range(NODES)).config,
            )
            for number in range(NODES)
        }
        grid = LocalGrid(nodes)
        serve(grid, experiment, Path(place) / "run", ServerSettings(min_cohort=3, round_timeout=60.0, reproducible=seeded))
        seconds = [row["seconds"] for row in RunDirectory(Path(place) / "run").read_metrics()]
    sent, messages = Counter[str](), Counter[str]()
    for message in grid.sent:
        messages[message.metadata.message_type] += 1
        sent[f"{message.metadata.message_type} down"] += recorddict_to_proto(message.content).ByteSize()
    for node in nodes.values():
        for reply in node.answered:
            sent[f"{reply.metadata.message_type} up"] += recorddict_to_proto(reply.content).ByteSize()
    once = {name: size for name, size in sent.items() if not name.startswith("train")}
    return {
        "seconds": round(statistics.median(seconds[1:]), 4),
        "bytes_down_per_round": sent["train down"] // ROUNDS,
        "bytes_up_per_round": sent["train up"] // ROUNDS,
        "bytes_once": dict(sorted(once.items())),
        "messages": dict(sorted(messages.items())),
    }


def compare(dataset: str, records: int, *, seeded: bool) -> dict[str, Any]:
    """Both kinds of rounds in turn, since other work on the machine disturbs some of them; all seconds are stored."""
    runs = [{name: measure(dataset, records, plan, seeded=seeded) for name, plan in PLANS.items()} for _ in range(REPEATS)]
    seconds = {name: [run[name]["seconds"] for run in runs] for name in PLANS}
    ratio = statistics.median(seconds["with masks"]) / statistics.median(seconds["without masks"])
    each = {name: runs[0][name] | {"seconds": seconds[name]} for name in PLANS}
    return each | {"ratio_of_median_seconds": round(ratio, 3)}


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    kept = {"commit": clean_commit()} if given.out else {}
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {"command": "python -m benchmarks.masked_rounds", **kept, "machine": platform.machine(),
                             "nodes": NODES, "rounds": ROUNDS}  # fmt: skip
    for dataset, records in DATASETS.items():
        found[dataset] = {noise: compare(dataset, records, seeded=noise == "seeded") for noise in ("seeded", "secure")}
    print(json.dumps(found, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
