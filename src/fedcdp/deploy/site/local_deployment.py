"""A whole deployment on this machine: the server, its nodes and the job, started from the scripts and ended together.

`Follower` reads the finished rounds, and ε so far, from the run directory while the server writes to it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcdp.accounting.budget import Budget
from fedcdp.accounting.ledger import Charge, Ledger
from fedcdp.accounting.population import Population
from fedcdp.config.experiment import Experiment, assemble, read_toml
from fedcdp.deploy.site import flower_commands
from fedcdp.deploy.site.directory import Site, SiteSettings
from fedcdp.deploy.site.operate_file import OVERRIDE
from fedcdp.deploy.site.processes import Process, Supervisor, ended_by_signals
from fedcdp.errors import DeploymentError, DeploymentFailedError, RunError
from fedcdp.files.disk import open_unlinked
from fedcdp.files.untrusted import MOST_SETTINGS, parse_json, printable, read_bounded
from fedcdp.training.metrics import MAIN_METRICS, main_figure
from fedcdp.training.rundir import Row, RunDirectory

_POLL_SECONDS = 0.25
_SERVER_SECONDS = 180.0  # until it listens: imports are slow on a busy machine

Tell = Callable[[str], None]


@dataclass(frozen=True)
class LocalOutcome:
    """How a job ended."""

    rounds: int
    accuracy: float | None
    seconds: float
    ended: str
    """`done`, `too-few-clients` or `budget`, or `unfinished`."""
    sentence: str
    warning: str | None = None
    """What the server says of a model that is no better than guessing."""
    scores: Row = field(default_factory=dict)
    """All metrics of the final model on the validation split, or those of the last round that was evaluated."""


class Deployment:
    """A deployment directory that can be started on this machine."""

    def __init__(self, directory: Path | str) -> None:
        self.site = Site(directory)
        self.settings: SiteSettings = self.site.require()
        self.experiment: Experiment = assemble(read_toml(self.site.experiment))
        self.follower = Follower(self.site.run, self.experiment)

    def up(self, progress: Callable[[Row], None] | None, tell: Tell, *, monitor: bool = False) -> LocalOutcome:
        """Run the job to its end, from the last complete round if any. Leaves no process behind, however it ends.

        With `monitor`, the processes can be watched where their `operate.toml` says.
        """
        started = time.perf_counter()
        if not self.follower.finished():
            flower_commands.require_flower()
            with self._locked(), ended_by_signals(), Supervisor() as supervisor:
                _Local(self, supervisor, tell, monitor=monitor).run(progress)
        return self.outcome(time.perf_counter() - started)

    def outcome(self, seconds: float) -> LocalOutcome:
        """The progress of the run, according to its directory."""
        rows = self.follower.rows()
        scores = self.follower.scores()
        accuracy = scores.get("accuracy")
        ended, sentence = self.follower.ended() or ("unfinished", "the run has not ended")
        rounds = int(rows[-1]["round"]) if rows else 0
        warning = self.follower.warning()
        return LocalOutcome(rounds, accuracy, seconds, ended, sentence, warning, scores)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            opened = open_unlinked(self.site.path / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise DeploymentError(f"{self.site.path / 'lock'} cannot be written: {error.strerror}") from error
        with os.fdopen(opened, "r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise DeploymentError(f"{self.site.path} is already running, by another process") from None
            yield


class _Local:
    """The processes of one deployment on this machine."""

    def __init__(self, deployment: Deployment, supervisor: Supervisor, tell: Tell, *, monitor: bool) -> None:
        self._deployment, self._supervisor, self._tell = deployment, supervisor, tell
        self._site, self._settings = deployment.site, deployment.settings
        self._environment = flower_commands.environment(self._settings.nodes) | ({OVERRIDE: ""} if monitor else {})
        self._nodes: list[Process] = []
        self._told_of: set[str] = set()

    def run(self, progress: Callable[[Row], None] | None) -> None:
        port, *node_ports = flower_commands.free_ports(1 + self._settings.nodes)
        if self._settings.port:
            port = self._settings.port
            flower_commands.require_free(port)
        # On one machine the nodes reach the server over the loopback interface, which the certificate covers as well.
        self._environment |= {"FEDCDP_PORT": str(port), "FEDCDP_SERVER": f"127.0.0.1:{port}"}
        self._forget_database()
        server = self._start("superlink", "start-superlink.sh")
        self._wait_for(server, port)
        self._finish(self._start("register", "run.sh", "--register-only"), server)
        for number, node_port in enumerate(node_ports, start=1):
            self._environment["FEDCDP_NODE_PORT"] = str(node_port)
            name = self._site.node(number).name
            self._nodes.append(self._start(name, f"start-{name}.sh"))
        self._deployment.follower.forget_outcome()
        job = self._start("run", "run.sh", "--run-only")
        self._follow(job, server, progress)
        if self._deployment.follower.ended() is None:  # the server writes this last
            run = flower_commands.started_run(job.log)
            state = flower_commands.state_of(run, self._site, self._environment) if run else "not started"
            raise DeploymentFailedError(f"the job ended as {state}; {self._log_of(job)} says why")

    def _forget_database(self) -> None:
        """Start with an empty database: the run is in the run directory, and keys are registered again.

        In a database that outlived its server, nodes would count as connected and be refused for a minute.
        """
        for path in self._site.server.glob(f"{self._site.database.name}*"):
            path.unlink()

    def _start(self, name: str, script: str, *arguments: str) -> Process:
        log = self._site.logs / f"{name}.log"
        if name == "run":
            log.unlink(missing_ok=True)  # the run id is read from it
        return self._supervisor.start(name, [str(self._site.path / script), *arguments], self._environment, log)

    def _wait_for(self, server: Process, port: int) -> None:
        until = time.monotonic() + _SERVER_SECONDS
        while not flower_commands.listens(port):
            self._check(server)
            if time.monotonic() > until:
                raise DeploymentFailedError(f"the server does not listen; {self._log_of(server)} may say why")
            time.sleep(_POLL_SECONDS)

    def _finish(self, process: Process, server: Process) -> None:
        while (status := process.status) is None:
            self._check(server)
            time.sleep(_POLL_SECONDS)
        if status:
            raise DeploymentFailedError(f"the nodes' keys were not registered; {self._log_of(process)} says why")

    def _follow(self, job: Process, server: Process, progress: Callable[[Row], None] | None) -> None:
        """Report every round, and every lost node, until the job ends."""
        ended = False
        while not ended:
            ended = job.status is not None  # before reading, to include the last round
            self._check(server)
            self._supervisor.reap()
            for row in self._deployment.follower.new_rows():
                if progress:
                    progress(row)
            lost = [node for node in self._nodes if node.status is not None]
            for node in lost:
                if node.name not in self._told_of:
                    self._told_of.add(node.name)
                    self._tell(f"{node.name} ended; rounds continue with the others ({self._log_of(node)})")
            if len(lost) == len(self._nodes):
                raise DeploymentFailedError(f"all nodes ended; {self._log_of(lost[0])} says why")
            time.sleep(0 if ended else _POLL_SECONDS)

    def _check(self, server: Process) -> None:
        if server.status is not None:
            raise DeploymentFailedError(
                f"the server ended; {self._log_of(server)} says why; fedcdp deploy up continues from the last complete round"
            )

    @staticmethod
    def _log_of(process: Process) -> str:
        return str(process.log)


class Follower:
    """Reads a run directory that another process writes to; incomplete files are read again next time."""

    def __init__(self, directory: Path, experiment: Experiment) -> None:
        self._run = RunDirectory(directory)
        self._experiment = experiment
        self._told = self.rounds_done()
        self._budget: Budget | None = None

    def rounds_done(self) -> int:
        """Number of rounds that would not be repeated if the server ended now."""
        return self._run.rounds_done()

    def charges(self) -> tuple[Charge, ...]:
        """The releases that the server's ledger has charged: rounds, attempts and rosters."""
        path = self._run.ledger
        return Ledger.open(path).charges if path.exists() else ()

    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self._run.model.exists() and self.rounds_done() >= self._experiment.plan.rounds

    def ended(self) -> tuple[str, str] | None:
        """How the run ended according to the server, as a word and a sentence; None while it is running."""
        try:
            told = self._outcome()
            return printable(str(told["ended"])[:100]), printable(str(told["sentence"])[:1000])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def warning(self) -> str | None:
        """What the server warns of at the end of the run."""
        try:
            told = self._outcome().get("warning")
        except (OSError, ValueError, AttributeError):
            return None
        return None if told is None else printable(str(told)[:1000])

    def _outcome(self) -> Any:
        return parse_json(read_bounded(self._run.path / "outcome.json", MOST_SETTINGS))

    def forget_outcome(self) -> None:
        """Remove the outcome of an earlier end before the server continues."""
        (self._run.path / "outcome.json").unlink(missing_ok=True)

    def rows(self) -> list[Row]:
        """All rounds so far."""
        try:
            return self._run.read_metrics()
        except RunError:  # being replaced at this moment
            return []

    def scores(self) -> Row:
        """The metrics of the final model; before the end, those of the last round that was evaluated."""
        rows = self.rows()
        measured = next((row for row in reversed(rows) if main_figure(row)), {})
        try:
            final = self._run.read_scores(rows[-1]["round"])[0] if rows else {}
        except RunError:  # being replaced at this moment
            final = {}
        return final or {name: value for name, value in measured.items() if name in MAIN_METRICS}

    def new_rows(self) -> Iterator[Row]:
        """The rounds finished since the last call."""
        for row in self.rows():
            if row["round"] > self._told:
                self._told = row["round"]
                yield row

    def epsilon_after(self, rounds: int) -> str:
        """ε so far, formatted; empty until the server has opened its ledger."""
        if self._budget is None:
            try:
                population = Population.read(Ledger.open(self._run.ledger).population)
            except (RunError, TypeError):
                return ""
            self._budget = Budget(self._experiment, population, self._run.ledger)
        return self._budget.shown_after(rounds)
