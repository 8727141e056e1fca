"""The life of a federation in minutes: five nodes behind a proxy, to which everything happens that a year brings.

    python -m tools.federation --out results/reliability/federation.json        # `make federation`

Real processes on the loopback: nginx, Flower's server and five nodes, with TLS, from the scripts of `fedcdp deploy init`.

| from round | event |
| --- | --- |
| 1 | node 1 is killed with SIGKILL, with all that it started, and started at once |
| 5 | node 5 joins |
| 10 | node 2, which has run an earlier commit of fedcdp, is stopped, upgraded and started |
| 15 | node 3 gets a new key, signed by its old one |
| 20 | the server is killed with SIGKILL, with all that it started, and started again |

Before each event, server and nodes are asked for their metrics, and a stranger asks the proxy for the list of runs. All
rounds must be completed and charged. Each release in a client's ledger must be in the server's, no client may count fewer
releases than the server has used, and no process may be left.
"""

from __future__ import annotations

import argparse
import json
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.clean_tree import clean_commit
from fedcdp.accounting.ledger import Ledger
from fedcdp.config.presets import Settings
from fedcdp.deploy.site.flower_commands import free_ports, listens
from fedcdp.files.disk import write_atomically
from fedcdp.studies.bench.result_file import describe, load_average
from tests.support.flower_site import RunningSite, left_of, scraped, wait_until

_ROOT = Path(__file__).parents[1]
_NODES = 5
_EARLIER = "b5137489df71bc815797e9adf4cac2961f8a1baa"
_PATIENCE = 900.0
_SERVER: dict[str, int | float] = {"round-timeout": 90.0, "min-clients": 2, "joining": True, "smallest-records": 10}


def main() -> int:
    """Run the federation, check what is left of it, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="at least 25")
    parser.add_argument("--earlier", default=_EARLIER, help="the commit that node 2 runs before it is upgraded")
    parser.add_argument("--commit", help="the commit that is tested, where this is a copy without its repository")
    parser.add_argument("--out", type=Path, default=None, help="write the result to this JSON file")
    given = parser.parse_args()
    commit = given.commit or clean_commit()
    with tempfile.TemporaryDirectory() as place:
        source = _source_of(given.earlier, Path(place) / "earlier")
        life = _Life(Path(place) / "site", given.rounds, source)
        result = life.run()
        result["checks"]["no process is left"] = not left_of(Path(place))
    about = {
        "command": f"python -m tools.federation --rounds {given.rounds} --earlier {given.earlier}",
        "commit": commit,
        "machine": describe(torch.device("cpu")) | {"load_average": load_average()},
    }
    written = json.dumps(about | result | {"holds": all(result["checks"].values())}, indent=1) + "\n"
    print(written)
    if given.out:
        write_atomically(given.out, written.encode())
    return 0 if all(result["checks"].values()) else 1


def _source_of(commit: str, place: Path) -> Path:
    """The package as it was at a commit."""
    place.mkdir()
    archive = subprocess.run(["git", "archive", commit, "src"], check=True, capture_output=True, cwd=_ROOT)
    subprocess.run(["tar", "-x", "-C", str(place)], check=True, input=archive.stdout)
    return place / "src"


class _Life:
    """One federation, and what was seen of it."""

    def __init__(self, place: Path, rounds: int, earlier: Path) -> None:
        plan = {"rounds": rounds, "local_steps": 5, "noise_multiplier": 1.0, "learning_rate": 0.05}
        work: Settings = {"data": {"dataset": "cancer", "partition": "iid"}, "plan": plan | {"method": "fed-cdp"}}
        self.site = RunningSite(place, work, nodes=_NODES, server=_SERVER, proxy=True)
        self.rounds, self.earlier = rounds, earlier
        self.ports = dict(enumerate(free_ports(1 + _NODES)))  # of metrics: the server's, and each node's
        self.seen: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """From the first process to the last."""
        started = time.monotonic()
        self.site.expect_clients(_NODES - 1)
        with self.site as site:
            self._start_server()
            site.start_proxy()
            site.register()
            self._use_earlier_code(2)
            for number in range(1, _NODES):
                self._start_node(number)
            site.start_job()
            self._at(1, "node 1 is killed, and started at once", self._crash)
            self._at(5, "node 5 joins", self._join)
            self._at(10, "node 2 is upgraded", self._upgrade)
            self._at(15, "node 3 gets a new key", lambda: site.rotate_key(3, **self._watched(3)))
            self._at(20, "the server is killed, and started again", self._restart_server)
            job = site.start_job()
            ended = site.finish(job)
            return {
                "nodes": _NODES,
                "rounds": self.rounds,
                "seconds": round(time.monotonic() - started),
                "seconds_a_round": [row.get("seconds") for row in site.run.read_metrics()],
                "events": self.seen,
                "releases": {f"node {number}": len(site.releases(number)) for number in range(1, _NODES + 1)},
                "checks": self._checks(ended),
            }

    def _at(self, round_: int, what: str, event: Callable[[], object]) -> None:
        """Wait for a round, look at everything from outside, and let the event happen."""
        site = self.site
        self._await(lambda: self._figure("fedcdp_rounds") >= round_, f"round {round_}")
        figures = scraped(self.ports[0])
        seen = {
            "round": site.rounds(),
            "event": what,
            "rounds_scraped": figures["fedcdp_rounds"],
            "clients_scraped": figures["fedcdp_clients"],
            "nodes_scraped": [number for number in range(1, _NODES + 1) if _is_watched(self.ports[number])],
            "stranger": self._status_for_a_stranger(),
        }
        self.seen.append(seen)
        print(f"round {seen['round']}: {what}", file=sys.stderr, flush=True)
        event()

    def _figure(self, name: str) -> float:
        """A figure of the server; 0 before it has one."""
        return scraped(self.ports[0]).get(name, 0.0)

    def _await(self, holds: Callable[[], bool], what: str) -> None:
        try:
            wait_until(lambda: self.site.supervisor.reap() or holds(), what, _PATIENCE)
        except BaseException:
            print(self.site.log("run")[-3000:], self.site.log("superlink")[-2000:], file=sys.stderr)
            raise

    def _status_for_a_stranger(self) -> int:
        """What the proxy answers to somebody who asks for the list of runs, with the public certificate."""
        context = ssl.create_default_context(cafile=str(self.site.site.authority / "ca.pem"))
        address = f"https://127.0.0.1:{self.site.public_port}/v1/control/list-runs"
        try:
            with urllib.request.urlopen(address, data=b"", context=context, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    # The events ------------------------------------------------------------------------------------------------------

    def _start_server(self) -> None:
        site = self.site
        monitor = f"127.0.0.1:{self.ports[0]}"
        site.server = site.start("superlink", "start-superlink.sh", FEDCDP_MONITOR=monitor)
        wait_until(lambda: _is_watched(self.ports[0]), "the server to be watched", _PATIENCE)
        wait_until(lambda: listens(site.port), "the server to listen", _PATIENCE)

    def _watched(self, number: int) -> dict[str, str]:
        return {"FEDCDP_MONITOR": f"127.0.0.1:{self.ports[number]}"}

    def _start_node(self, number: int) -> None:
        self.site.start_node(number, **self._watched(number))

    def _crash(self) -> None:
        site, before = self.site, len(self.site.releases(1))
        site.kill(site.nodes[1])
        self._start_node(1)

        def is_back() -> bool:
            """It was refused; or it took longer than a minute to start, on a busy machine, and took part at once."""
            return "starting it again" in site.log("node-1") or len(site.releases(1)) > before + 1

        wait_until(is_back, "the killed node to be started again, or to take part", _PATIENCE)

    def _join(self) -> None:
        self._start_node(_NODES)
        ledger = self.site.run.ledger
        wait_until(lambda: Ledger.open(ledger).members == _NODES, "node 5 to join", _PATIENCE)

    def _use_earlier_code(self, number: int) -> None:
        """Let a node run the earlier package, by the start script that was written then."""
        script = self.site.site.path / f"start-node-{number}.sh"
        self._new_script = script.read_text()
        head, _, tail = self._new_script.partition("exec fedcdp deploy keep")
        options = tail.partition('"${trusted[@]}" \\\n')[2]
        path = f'export PYTHONPATH="{self.earlier}"\n'
        script.write_text(f'{head}{path}exec flower-supernode --port "$FEDCDP_NODE_PORT" \\\n{options}')

    def _upgrade(self) -> None:
        site = self.site
        site.stop_node(2)
        (site.site.path / "start-node-2.sh").write_text(self._new_script)
        self._start_node(2)

    def _restart_server(self) -> None:
        assert self.site.server is not None
        self.site.kill(self.site.server)
        self._start_server()

    # The end ---------------------------------------------------------------------------------------------------------

    def _checks(self, ended: str) -> dict[str, bool]:
        site, charges, rows = self.site, self.site.charges(), self.site.run.read_metrics()
        released = {number: site.releases(number) for number in range(1, _NODES + 1)}
        counted = {number: [charge[:2] for charge in charges if site.client_of(number) in charge[2]] for number in released}
        figures = scraped(self.ports[0])
        return {
            "Flower says that it completed": ended == "finished:completed",
            "the run is done": site.outcome() == "done",
            "every round is there": [row["round"] for row in rows] == list(range(1, self.rounds + 1)),
            "every round is charged": {round_ for round_, _, _ in charges} == set(range(self.rounds)),
            "each client's releases are in the server's ledger": all(
                set(released[number]) <= set(counted[number]) for number in released
            ),
            "clients count what was taken from them": sum(map(len, released.values()))
            >= sum(row["clients"] for row in rows),
            "every node took part": all(released.values()),
            "a node took part after its crash": _after(released[1], 1),
            "a node took part before and after its upgrade": _before(released[2], 10) and _after(released[2], 10),
            "a node took part under its old key and its new one": _before(released[3], 15) and _after(released[3], 15),
            "a node that joined took part": _after(released[_NODES], 5),
            "metrics were scraped at every event": all(
                0 <= each["round"] - each["rounds_scraped"] <= 1 and each["nodes_scraped"] for each in self.seen
            ),
            "metrics at the end": figures["fedcdp_rounds"] == self.rounds and figures["fedcdp_clients"] == _NODES,
            "strangers were refused": {each["stranger"] for each in self.seen} == {403},
        }


def _before(released: list[tuple[int, int]], round_: int) -> bool:
    return any(each < round_ for each, _ in released)


def _after(released: list[tuple[int, int]], round_: int) -> bool:
    return any(each > round_ for each, _ in released)


def _is_watched(port: int) -> bool:
    try:
        return scraped(port)["fedcdp_process_running"] == 1
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
