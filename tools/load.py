"""Load test: many nodes on one machine, for many rounds; every other round one node is killed. `make load`

    python -m tools.load --nodes 20 --rounds 20 --out results/reliability/load.json

Real SuperNodes with TLS on the loopback interface, from the scripts of `fedcdp deploy init`. In every other round a
participating node is killed with SIGKILL, with all its child processes, and the previously killed node is started again. The
run must finish all its rounds, each of them charged in the server's ledger. No client's own ledger may count less than the
server received from it, and no process may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedcdp.config.presets import Settings
from fedcdp.deploy.site.processes import descendants
from fedcdp.files.disk import write_atomically
from fedcdp.studies.bench.result_file import describe, load_average
from tests.support.flower_site import CANCER, RunningSite, left_of, wait_until

_PATIENCE = 1800.0  # seconds for a round, or for a killed node to return


def main() -> int:
    """Run the test, check the result, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--per-round", type=int, default=8, help="Nodes that take part in a round.")
    parser.add_argument("--round-timeout", type=float, default=180.0, help="Seconds after which a missing node is left out.")
    parser.add_argument("--out", type=Path, default=None, help="Write the result to this JSON file.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = load(Path(place) / "site", given.nodes, given.rounds, given.per_round, given.round_timeout)
        result["checks"]["no process is left"] = not left_of(Path(place))
    result["holds"] = all(result["checks"].values())
    written = json.dumps(result, indent=1) + "\n"
    print(written)
    if given.out:
        write_atomically(given.out, written.encode())
    return 0 if result["holds"] else 1


def load(place: Path, nodes: int, rounds: int, per_round: int, patience: float) -> dict[str, Any]:
    """Run the deployment from start to end."""
    work: Settings = {"plan": {"rounds": rounds, "per_round": per_round, "local_steps": 50, "learning_rate": 0.005}}
    server: dict[str, int | float] = {
        "round-timeout": patience,
        "min-clients": max(1, per_round // 2),
        "subscribe-timeout": 1200.0,
    }
    started, peak, killed = time.monotonic(), 0, []
    with RunningSite(place, CANCER, work, nodes=nodes, server=server) as site:
        site.start_all()
        up = time.monotonic() - started
        job = site.start_job()
        down: int | None = None
        for number in range(0, rounds, 2):
            _await(site, lambda n=number: site.rounds() >= n, f"round {number}")
            peak = max(peak, resident(os.getpid()))
            if _ended(site):
                break
            _await(site, lambda n=number: _at_work(site, n), "a node at work")
            if not (victims := _at_work(site, number)):
                break
            victim = victims[0]
            if down is not None:
                site.start_node(down)
            site.kill(site.nodes[victim])
            killed.append({"node": victim, "round": number + 1})
            down = victim
            print(f"node {victim} killed in round {number + 1}", flush=True)
        _await(site, lambda: False, "the run to end")
        state = site.finish(job)
        rows, charges = site.run.read_metrics(), site.charges()
        own = {number: {round_ for round_, _ in site.releases(number)} for number in range(1, nodes + 1)}
        heard = sum(row["clients"] for row in rows)
        checks = {
            "Flower says that it completed": state == "finished:completed",
            "the run is done": site.outcome() == "done",
            "every round is there": [row["round"] for row in rows] == list(range(1, rounds + 1)),
            "every round is charged": {round_ for round_, _, _ in charges} == set(range(rounds)),
            "nodes were killed": len(killed) == -(-rounds // 2),
            "clients count what was taken from them": sum(map(len, own.values())) >= heard,
        }
        return {
            "command": "python -m tools.load "
            f"--nodes {nodes} --rounds {rounds} --per-round {per_round} --round-timeout {patience:g}",
            "nodes": nodes,
            "per_round": per_round,
            "rounds": len(rows),
            "killed": killed,
            "clients_heard": [row["clients"] for row in rows],
            "seconds_until_up": round(up),
            "seconds": round(time.monotonic() - started),
            "seconds_a_round": [row["seconds"] for row in rows],
            "peak_mb_of_all_processes": round(peak / 2**20),
            "checks": checks,
            "machine": describe(torch.device("cpu")) | {"load_average": load_average()},
        }


def _at_work(site: RunningSite, round_: int) -> list[int]:
    """Nodes in this round: their ledgers record a release that is about to happen."""
    return [node for node in range(1, site.nodes_wanted + 1) if any(each >= round_ for each, _ in site.releases(node))]


def _ended(site: RunningSite) -> bool:
    """Whether the run ended, by the server's files: `run.sh` follows the log and may lose a busy server before it ends."""
    return (site.site.run / "outcome.json").exists()


def _await(site: RunningSite, holds: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds, or the run ends."""
    try:
        wait_until(lambda: site.supervisor.reap() or _ended(site) or holds(), what, _PATIENCE)
    except BaseException:
        print(site.log("run")[-3000:], site.log("superlink")[-3000:], file=sys.stderr)
        raise


def resident(*roots: int) -> int:
    """Resident bytes of some processes and their descendants; shared pages count several times."""
    pids = {pid for root in roots for pid in (root, *descendants(root))}
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            continue
    return total


if __name__ == "__main__":
    sys.exit(main())
