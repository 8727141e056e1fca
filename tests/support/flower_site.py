"""A deployment of real processes on the loopback, TLS on, that a test can take apart: kill one, start it again, look on."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fedcdp
from fedcdp.accounting.ledger import Ledger
from fedcdp.config.experiment import Experiment, assemble, read_toml
from fedcdp.config.presets import Settings
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.task import Task
from fedcdp.deploy.site import flower_commands
from fedcdp.deploy.site.directory import Site, SiteSettings
from fedcdp.deploy.site.node_keys import rekey
from fedcdp.deploy.site.processes import Process, Supervisor, descendants
from fedcdp.deploy.site.writer import experiment_for, write
from fedcdp.engine.batched import engines_for
from fedcdp.files.tensors import load_tensors
from fedcdp.models.networks import prepare
from fedcdp.training.prepared import deal_out, load_splits, network_of
from fedcdp.training.rounds import ClientData, Simulator
from fedcdp.training.rundir import RunDirectory, State
from fedcdp.training.trainer import train_experiment

_ROOT = Path(__file__).parents[2]
HAS_FLOWER = importlib.util.find_spec("flwr") is not None
PATIENCE = 240.0  # seconds for anything that should happen soon, on a machine that does much else

# The reproducible mode that is made for tests: noise and sampling as the simulator's, from a published seed.
REPRODUCIBLE: Settings = {"plan": {"secure_noise": False, "seed": 7}}
CANCER: Settings = {
    "data": {"dataset": "cancer", "partition": "iid"},
    "plan": {"method": "fed-cdp", "rounds": 3, "local_steps": 5, "noise_multiplier": 1.0, "learning_rate": 0.05},
}
MNIST5K: Settings = {
    "data": {"dataset": "mnist5k", "partition": "shards", "records": 200},
    "plan": {"method": "fed-cdp", "rounds": 3, "local_steps": 5, "noise_multiplier": 1.0, "learning_rate": 0.01},
}


def wait_until(holds: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """What `holds` gives once it is true; fails the test with `what` was waited for otherwise."""
    until = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < until, f"waited {seconds:.0f} s in vain for {what}"
        time.sleep(0.1)
    return found


def source_path() -> str:
    """The package under test first, for every process."""
    return os.pathsep.join([str(Path(fedcdp.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


def scraped(port: int) -> dict[str, float]:
    """The figures that a process shows to those who watch it, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


class RunningSite:
    """The processes of a deployment; leaving ends all of them."""

    def __init__(
        self,
        directory: Path,
        *settings: Settings,
        nodes: int = 2,
        client_epsilon: float | None = None,
        server: dict[str, int | float] | None = None,
        proxy: bool = False,
    ) -> None:
        self.nodes_wanted = nodes
        self.port, self.public_port, *self._node_ports = flower_commands.free_ports(2 + nodes)
        place = (
            SiteSettings(nodes=nodes, port=self.public_port, control_port=self.port) if proxy else SiteSettings(nodes=nodes)
        )
        experiment = experiment_for(nodes, list(settings))
        self.site: Site = write(directory, place, experiment, client_epsilon, server)
        self.supervisor = Supervisor()
        self.nodes: dict[int, Process] = {}
        self.server: Process | None = None
        self._environment = flower_commands.environment(nodes) | {
            "PYTHONPATH": source_path(),
            "FEDCDP_CACHE": str(directory.parent / "cache"),
        }
        if not proxy:  # behind one, the scripts have the ports
            self._environment |= {"FEDCDP_PORT": str(self.port), "FEDCDP_SERVER": f"127.0.0.1:{self.port}"}

    def __enter__(self) -> RunningSite:
        self.supervisor.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.__exit__()

    @property
    def experiment(self) -> Experiment:
        return assemble(read_toml(self.site.experiment))

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.site.run)

    # Starting and ending -------------------------------------------------------------------------------------------------

    def start(self, name: str, script: str, *arguments: str, **environment: str) -> Process:
        command = [str(self.site.path / script), *arguments]
        return self.supervisor.start(name, command, self._environment | environment, self.site.logs / f"{name}.log")

    def start_server(self) -> Process:
        self.server = self.start("superlink", "start-superlink.sh")
        wait_until(lambda: flower_commands.listens(self.port), "the server to listen")
        return self.server

    def start_proxy(self) -> Process:
        proxy = self.start("proxy", "start-proxy.sh")
        wait_until(lambda: flower_commands.listens(self.public_port), "the proxy to listen")
        return proxy

    def register(self) -> None:
        done = self.start("register", "run.sh", "--register-only")
        wait_until(lambda: done.status is not None, "the keys to be registered")
        assert done.status == 0, self.log("register")

    def start_node(self, number: int, **environment: str) -> Process:
        given = {"FEDCDP_NODE_PORT": str(self._node_ports[number - 1])} | environment
        self.nodes[number] = self.start(f"node-{number}", f"start-node-{number}.sh", **given)
        return self.nodes[number]

    def start_all(self, **environments: dict[str, str]) -> None:
        """The server, all keys, all nodes; `environments` by the name of a node, such as node_1."""
        self.start_server()
        self.register()
        for number in range(1, self.nodes_wanted + 1):
            self.start_node(number, **environments.get(f"node_{number}", {}))

    def start_job(self) -> Process:
        (self.site.logs / "run.log").unlink(missing_ok=True)
        return self.start("run", "run.sh", "--run-only")

    def finish(self, job: Process) -> str:
        """Wait for the job's end; how Flower says that it ended."""
        wait_until(lambda: self.supervisor.reap() or job.status is not None, "the job to end", 2 * PATIENCE)
        number = flower_commands.started_run(job.log)
        assert number is not None, self.log("run")
        return flower_commands.state_of(number, self.site, self._environment)

    def expect_clients(self, count: int) -> None:
        """The server expects so many clients, who are all in a round; other nodes join later."""
        text = self.site.experiment.read_text()
        for name in ("clients", "per_round"):
            assert f"{name} = {self.nodes_wanted}" in text
            text = text.replace(f"{name} = {self.nodes_wanted}", f"{name} = {count}")
        self.site.experiment.write_text(text)

    def stop_node(self, number: int) -> None:
        """Stop a node in order."""
        os.kill(self.nodes[number].pid, signal.SIGTERM)
        wait_until(lambda: self.nodes[number].status is not None, "the node to end")

    def rotate_key(self, number: int, **environment: str) -> None:
        """Stop a node in order, rotate its key, register it, and start the node again."""
        self.stop_node(number)
        rekey(self.site.node(number).path, planned=True)
        self.register()
        time.sleep(1.0)
        self.start_node(number, **environment)

    def use_client(self, component: str) -> None:
        """Let the nodes run another ClientApp, of a module of this repository."""
        project = self.site.app / "pyproject.toml"
        project.write_text(project.read_text().replace("fedcdp.flower.app:client", component))
        self._environment["PYTHONPATH"] = os.pathsep.join([source_path(), str(_ROOT)])

    def kill(self, process: Process, *, wholly: bool = True) -> None:
        """kill -9, of the process and (wholly) of all that it started, as when a machine loses power."""
        victims = [process.pid, *(descendants(process.pid) if wholly else [])]
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        wait_until(lambda: process.status is not None, "a killed process to end")

    # Looking on ----------------------------------------------------------------------------------------------------------

    def log(self, name: str) -> str:
        path = self.site.logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def rounds(self) -> int:
        """Rounds that are done, by the metrics."""
        return len(self.run.read_metrics())

    def wait_for_rounds(self, count: int) -> None:
        wait_until(lambda: self.supervisor.reap() or self.rounds() >= count, f"round {count}")

    def model(self) -> dict[str, Tensor]:
        return load_tensors(self.run.model, "model-1")[0]

    def outcome(self) -> str:
        return str(json.loads((self.site.run / "outcome.json").read_text())["ended"])

    def charges(self) -> list[tuple[int, int, list[int]]]:
        """What the server's ledger says was released: round, attempt and clients."""
        ledger = Ledger.open(self.run.ledger)
        return [(charge.round, charge.attempt, charge.clients.tolist()) for charge in ledger.charges]

    def client_of(self, number: int) -> int:
        """Under which number the server counts a node's client."""
        task = Task.from_json((self.site.run / "task.json").read_text())
        name = ClientLedger.open(self.site.node(number).state / "ledger.jsonl").name_in(task)
        roster = json.loads((self.site.run / "clients.json").read_text())["clients"]
        return next(int(each["number"]) for each in roster if each["name"] == name)

    def releases(self, number: int) -> list[tuple[int, int]]:
        """What a client's own ledger says that it released: rounds and attempts, in order."""
        path = self.site.node(number).state / "ledger.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [(line["round"], line["attempt"]) for line in lines if "released" in line or "summed" in line]


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def simulated(experiment: Experiment, rounds: list[list[int]] | None = None) -> dict[str, Tensor]:
    """The model of the simulator, from the same plan and seed; with only these clients heard in each round, if given."""
    torch.set_num_threads(1)
    if rounds is None:
        run = train_experiment(experiment, None)
        return {name: value.detach().clone() for name, value in run.model.state_dict().items()}
    splits = load_splits(experiment, quiet=True)
    network = prepare(network_of(experiment, splits), experiment.plan, "cpu")
    engine = next(iter(engines_for(network, F.cross_entropy).values()))
    simulator = Simulator.stepwise(ClientData(deal_out(experiment, splits), experiment.plan, torch.device("cpu")), engine)
    state = State(0, {name: p.detach() for name, p in network.named_parameters()}, None)
    for heard in rounds:
        state = simulator.round(state, torch.tensor(heard, dtype=torch.int64))
    return state.weights


def pids_of(place: Path) -> dict[int, str]:
    """Processes that still run and name a place in their command line, with that line."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(place) in command and int(entry.parent.name) != os.getpid():
            found[int(entry.parent.name)] = command
    return found


def left_of(place: Path) -> list[str]:
    """Processes that still run and name a deployment in their command line."""
    return list(pids_of(place).values())
