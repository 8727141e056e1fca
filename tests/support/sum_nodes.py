"""Nodes of a secure sum in this process: each with its own node key, its list of known nodes and its policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w

from fedcdp.config.experiment import Experiment
from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.known_nodes import read_public_key
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.deploy.site.certificates import Pair, new_node_key
from tests.support.local_grid import OPEN, Node, Twist, experiment

MEMBERS = 5


@cache
def node_pair(number: int) -> Pair:  # noqa: ARG001
    """The key of a node; the same whenever it is asked for."""
    return new_node_key()


def node_key(number: int) -> bytes:
    return read_public_key(node_pair(number).public.decode())


def listed(numbers: Any, **entry: str) -> str:
    """A roster.toml with these nodes."""
    known = [{"name": f"n{each}", "key": node_pair(each).public.decode()} | entry for each in numbers]
    return tomli_w.dumps({"node": known})


def sum_experiment(**plan: Any) -> Experiment:
    """Cancer, dealt to five clients, all of whom are in a round, with noise on the sum."""
    usual = {"per_round": MEMBERS, "local_steps": 1, "noise": "sum", "secure_aggregation": True, "attempts": 2,
             "colluders": 1, "clip_mode": "flat", "clip": "1"}  # fmt: skip
    wanted = experiment(**usual | plan)
    return replace(wanted, data=replace(wanted.data, clients=MEMBERS))


@dataclass(frozen=True)
class SumFolder:
    """The files of one node."""

    path: Path

    @staticmethod
    def write(path: Path, number: int, numbers: Any = range(MEMBERS), **entry: str) -> SumFolder:
        path.mkdir(parents=True, exist_ok=True)
        (path / "node.key").write_bytes(node_pair(number).private)
        (path / "roster.toml").write_text(listed(numbers, **entry))
        return SumFolder(path)

    @property
    def config(self) -> dict[str, Any]:
        return {"identity": str(self.path / "node.key"), "roster": str(self.path / "roster.toml"),
                "state-dir": str(self.path / "state")}  # fmt: skip


def sum_nodes(base: Path, policy: ClientPolicy | None = None, **twists: Twist) -> dict[int, Node]:
    """Nodes 100, 101, … with the simulator's clients 0, 1, …, as `local_grid.make_nodes`."""
    policy = policy or replace(OPEN, colluders=1)
    dealt = {"dataset": "cancer", "num-partitions": MEMBERS, "partition": "iid", "records": 20, "partition-seed": 5}
    return {
        100 + number: Node(
            client_app(policy=policy),
            dealt | {"partition-id": number} | SumFolder.write(base / f"client-{number}", number).config,
            twists.get(f"client{number}"),
        )
        for number in range(MEMBERS)
    }
