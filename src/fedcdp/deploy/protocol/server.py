"""The server: a Flower ServerApp that publishes a task, waits for subscribers, and trains into a run directory.

The run directory is that of the simulator, with `task.json`, `clients.json`, for secure sums `failures.json` and, once the
server has ended, `outcome.json`.
Every round is charged in the ledger before a message is sent, and saved before the next round begins. A server killed at any
point therefore continues the same run when it is started again with the same `out`.

Run configuration: `experiment` (a configuration file of fedcdp), `out` (the run directory), and the settings below, written
with hyphens: `min-clients`, `min-cohort`, `smallest-records`, `most-records`, `round-timeout`, `subscribe-timeout`,
`reproducible`, `largest-ratio`, `most-failed-rounds`, `joining`.

The server's ε is stated for a client with `smallest-records` records, and no client with fewer is admitted, so a client that
understates its records changes nothing. Stated sizes above that are counted as well: the printed ε holds for all of them.
(It differs only where more records cost more, which a full step's dropped records may do for N_i close to S.)

If the server adds the noise, ε against adversaries who see the model assumes that nobody knows who took part. Every round
then takes all of `round-timeout`, and neither a number of clients nor a duration is written.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedcdp.accounting.budget import Budget, Releases
from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.ledger import Noise as NoiseKind
from fedcdp.accounting.population import Population
from fedcdp.config.experiment import Experiment, assemble, read_toml
from fedcdp.config.fields import check_types, option
from fedcdp.config.plan import SCALING, Plan
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import Federation
from fedcdp.deploy.protocol.failures import Failures
from fedcdp.deploy.protocol.first_release import gather_moments
from fedcdp.deploy.protocol.kept_features import without_front
from fedcdp.deploy.protocol.local_round import first_batch
from fedcdp.deploy.protocol.monitor_file import MonitorFile, Tally
from fedcdp.deploy.protocol.roster import Roster, exchange, find_again, load_roster, save_roster, subscribe, take_in
from fedcdp.deploy.protocol.strategy import Job, PlanStrategy, deployed
from fedcdp.deploy.protocol.sum_rounds import SumStrategy
from fedcdp.deploy.protocol.task import Task, hides_participation
from fedcdp.engine import Engine, Loss
from fedcdp.engine.independence import check_independent
from fedcdp.engine.reachability import check_all_used
from fedcdp.errors import FedcdpError, PlanError, RunError
from fedcdp.files.disk import write_atomically
from fedcdp.files.tree import Layout
from fedcdp.models.networks import resolve
from fedcdp.training.evaluation import evaluate, no_better_than_guessing, score
from fedcdp.training.metrics import Figures, main_figure
from fedcdp.training.prepared import deal_out, load_splits, network_of, outputs_needed
from fedcdp.training.rundir import Row, RunDirectory, State
from fedcdp.training.scaling import restore_scaling

_LOG = logging.getLogger("flwr.fedcdp")
_ROSTER = "clients.json"
_MOST_TRIES = 10  # for a node that does not answer, until it is not asked any more
_NEWCOMER_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How long a server waits for clients, and with how few it continues.

    In a run configuration of Flower the names have hyphens: `min-clients`.

    Raises:
        PlanError: A value has the wrong type or is not positive.

    Examples:
        >>> from fedcdp.flower import ServerSettings
        >>> ServerSettings(min_clients=3, round_timeout=60).min_cohort
        1
    """

    min_clients: int | None = option(None, "Fewest clients needed to start and to continue. Default: all expected clients.")
    min_cohort: int = option(1, "Fewest updates needed to change the model in a round.")
    smallest_records: int | None = option(
        None, "Fewest records of a client, for which ε is stated. Default: as the experiment partitions its own data."
    )
    most_records: int | None = option(
        None,
        "Most records of a client, where more records count for more: weighting by records, and private scaling. "
        "Default: as the experiment partitions its own data.",
    )
    round_timeout: float = option(600.0, "Seconds until a client that has not answered in a round is left out.")
    subscribe_timeout: float = option(300.0, "Seconds to wait for clients to subscribe.")
    reproducible: bool = option(False, "Take noise and sampling from the published seed: for tests; it protects nobody.")
    largest_ratio: float = option(100.0, "Without privacy: leave out updates this much larger than the median.")
    most_failed_rounds: int = option(3, "Consecutive rounds with too few updates after which the run ends.")
    joining: bool = option(False, "Let nodes that connect after the start join the run between rounds.")

    def __post_init__(self) -> None:
        check_types(self)
        for name in (
            "min_clients",
            "min_cohort",
            "smallest_records",
            "most_records",
            "round_timeout",
            "subscribe_timeout",
            "largest_ratio",
            "most_failed_rounds",
        ):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise PlanError(f"{name}: {value} is not allowed; it must be positive")

    @staticmethod
    def of(config: Mapping[str, Any]) -> ServerSettings:
        """The settings in a run configuration."""
        known = {each.name: each.name.replace("_", "-") for each in fields(ServerSettings)}
        return ServerSettings(**{name: config[key] for name, key in known.items() if key in config})


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `done`, `too-few-clients`, or `budget` (as many releases as the experiment's max_epsilon allows)."""

    ended: str
    rounds: int
    sentence: str
    warning: str | None = None
    """Where the model does no better on the validation split than guessing: a sentence that says so."""


def server_app(
    experiment: Experiment | None = None,
    *,
    out: Path | str | None = None,
    settings: ServerSettings | None = None,
    loss: Loss | None = None,
) -> ServerApp:
    """Make a Flower ServerApp that trains an experiment. Arguments that are left out are read from the run configuration.

    Args:
        experiment: Data, network and plan. In the run configuration: `experiment`, a configuration file of fedcdp.
        out: The run directory. In the run configuration: `out`.
        settings: How long to wait, and with how few clients to continue.
        loss: The loss by which the server evaluates the model, which must be the clients'. Default: that of the data's task,
            such as cross-entropy for classification.

    Returns:
        The app.

    Examples:
        >>> from fedcdp.config.experiment import assemble
        >>> from fedcdp.flower import ServerSettings, server_app
        >>> experiment = assemble({"data": {"dataset": "cancer", "clients": 2}, "plan": {"rounds": 3}})
        >>> app = server_app(experiment, out="run", settings=ServerSettings(min_clients=2))
        >>> type(app).__name__
        'ServerApp'
    """
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        wanted = experiment or assemble(read_toml(_text(config, "experiment")))
        serve(grid, wanted, out or _text(config, "out"), settings or ServerSettings.of(config), loss)

    app.main()(main)
    return app


def serve(
    grid: Grid, experiment: Experiment, out: Path | str, settings: ServerSettings, loss: Loss | None = None
) -> Outcome:
    """Train an experiment over the clients of a grid, or continue the run in the directory."""
    directory = RunDirectory(out)
    if directory.config.is_file():
        experiment = _stored(directory, experiment, settings.reproducible)
        _LOG.info("continuing the run in %s", directory.path)
    else:
        experiment = replace(experiment, plan=deployed(experiment.plan, settings.reproducible))
        directory.create(experiment.to_toml())
    with directory.locked():
        splits = load_splits(experiment, quiet=True)
        dealt = _dealt(experiment, splits)
        if settings.smallest_records is None:
            settings = replace(settings, smallest_records=dealt.smallest if dealt else experiment.plan.batch_size)
        if settings.most_records is None and _counts_records(experiment.plan):
            if dealt is None:
                raise PlanError("most_records: the server's own data do not tell how many records a client may have; set it")
            settings = replace(settings, most_records=dealt.largest)
        job = replace(_job(directory, experiment, splits, settings), loss=loss)
        if job.plan.private and not (directory.path / _ROSTER).exists():  # version 0.1.0 began runs with unused tensors
            check_all_used(job.engine(), first_batch(splits.train, job.plan))
            check_independent(job.engine(), first_batch(splits.train, job.plan))
        # Clients with a part of a benchmark hold the copies that its partition makes; others are assumed to have none.
        copies = dealt.copies if dealt and experiment.data.dataset else 1
        return _Server(grid, directory, experiment, job, splits.validation, dealt, copies, settings).run()


def _dealt(experiment: Experiment, splits: Splits) -> Federation | None:
    """The server's own data as its experiment partitions them; None if they are too few (they are no client's)."""
    try:
        return deal_out(experiment, splits)
    except FedcdpError:
        if experiment.data.dataset:
            raise
        return None


def _counts_records(plan: Plan) -> bool:
    """Whether a client counts for more, the more records it says it has."""
    return plan.weighting == "records" or plan.scaling_noise is not None


def _stored(directory: RunDirectory, given: Experiment, reproducible: bool) -> Experiment:
    """The experiment of an existing run, which must equal the given one."""
    stored = assemble(read_toml(directory.config))
    if stored.plan.secure_noise == reproducible:
        raise RunError(f"reproducible: the run in {directory.path} was started with {not reproducible}")
    wanted = replace(given, plan=deployed(given.plan, reproducible).but(seed=stored.plan.seed))
    for section in ("data", "model", "plan"):
        for name, value in vars(getattr(stored, section)).items():
            if (other := getattr(getattr(wanted, section), name)) != value:
                raise RunError(f"{name}: the run in {directory.path} was started with {value}, not {other}")
    if reproducible and given.plan.seed != stored.plan.seed:
        raise RunError(f"seed: the run in {directory.path} was started with {stored.plan.seed}, not {given.plan.seed}")
    return replace(stored, run=given.run)


def _job(directory: RunDirectory, experiment: Experiment, splits: Splits, settings: ServerSettings) -> Job:
    """The job, under the name that the run got at its start."""
    shape, classes = splits.train.shape, outputs_needed(splits.train)
    job = Job(
        plan=experiment.plan,
        network=network_of(experiment, splits),
        network_name=resolve(experiment.model.network, shape),
        activation=experiment.model.activation,
        shape=shape,
        classes=classes,
        clients=experiment.data.clients,
        smallest_cohort=settings.min_cohort,
        smallest_records=settings.smallest_records,
        reproducible=settings.reproducible,
        learning_task=splits.train.task,
        table=splits.table,
    )
    path = directory.path / "task.json"
    if not path.exists():
        write_atomically(path, job.task().to_json().encode())
        return job
    try:
        published = Task.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, FedcdpError) as error:
        raise RunError(f"{path} cannot be used: {error}") from error
    job = replace(job, run=published.run)
    if published.table is None:  # version 0.1.0 published none
        job = replace(job, table=None)
    if job.task().digest() != published.digest():
        raise RunError(f"{path} is not the task of the current experiment and settings: was min-cohort changed?")
    return job


class _Server:
    """One run, from subscription to the trained model."""

    def __init__(
        self,
        grid: Grid,
        directory: RunDirectory,
        experiment: Experiment,
        job: Job,
        validation: Dataset | None,
        dealt: Federation | None,
        copies: int,
        settings: ServerSettings,
    ) -> None:
        self._grid, self._directory, self._experiment, self._job = grid, directory, experiment, job
        self._validation, self._dealt, self._copies, self._settings = validation, dealt, copies, settings
        self._least = settings.min_clients or job.clients
        self._hidden = hides_participation(job.plan)
        self._heard: Counter[int] = Counter()  # nodes that are not part of the run, and how often they were asked

    def run(self) -> Outcome:
        """Everything that remains of the run."""
        (self._directory.path / "outcome.json").unlink(missing_ok=True)
        resumed = Tally()
        resumed.forget("fedcdp_run_ended")
        MonitorFile(self._directory.path).add(resumed, hidden=self._hidden)
        standardised = self._job.plan.scaling_noise is None or restore_scaling(self._job.network, self._directory)
        state = self._load_state()
        if state.round >= self._job.plan.rounds:
            return self._end("done", state, "all rounds are done")
        fewest = self._least if self._roster_path.exists() else max(self._least, self._job.plan.per_round)
        roster, present = self._subscribers()
        if present < fewest:
            return self._end("too-few-clients", state, _too_few(present, fewest))
        save_roster(self._roster_path, roster)
        population = self._population(roster)
        self._job = replace(self._job, smallest_records=population.records)
        releases = Releases(len(roster), self._ledger(population, state.round))
        while len(releases.participations) < len(roster):  # a server was killed while a client joined
            releases.join()
        if not self._lets_join:
            others = set(self._grid.get_node_ids()) - {member.node for member in roster}
            self._heard.update(dict.fromkeys(others, _MOST_TRIES))  # they were asked just now
        budget = Budget(self._experiment, population)
        if not standardised and (failed := self._standardise(roster, releases, budget, fewest)) is not None:
            return self._end(failed[0], state, failed[1])
        strategy = self._strategy(roster, releases, state)
        strategy.summary()
        if self._hidden:
            _LOG.info("every round takes %g s (round-timeout): its duration must not reveal who took part",
                      self._settings.round_timeout)  # fmt: skip
        outcome = self._rounds(strategy, budget)
        total = Tally()
        total.set("fedcdp_releases", len(strategy.releases.charges))
        self._show_spent(total, budget.spent_by(strategy.releases.rounds, always=True))
        MonitorFile(self._directory.path).add(total, hidden=self._hidden)
        strategy.say_ended(self._grid)
        return outcome

    def _strategy(self, roster: Roster, releases: Releases, state: State) -> PlanStrategy:
        named: dict[str, Any] = {
            "releases": releases,
            "state": state,
            "largest_ratio": self._settings.largest_ratio,
            "message_lifetime": self._settings.round_timeout + 60,
        }
        if not self._job.plan.sums:
            return PlanStrategy(self._job, roster, **named)
        return SumStrategy(self._job, roster, failures=Failures(self._directory.path / "failures.json"), **named)

    def _standardise(self, roster: Roster, releases: Releases, budget: Budget, fewest: int) -> tuple[str, str] | None:
        """Standardise inputs by a release of all clients; if it is not possible, how the run ends, and why."""
        if not releases.may_go_on(SCALING, budget.allows):
            return "budget", "the release of moments would exceed max_epsilon"
        features, digest = math.prod(self._job.shape), self._job.task().digest()
        found, answered = gather_moments(
            self._grid, digest, self._job.plan, features, roster, releases, self._settings.round_timeout
        )
        if found is None or answered < fewest:
            return "too-few-clients", f"{_too_few(answered, fewest)} to standardise inputs"
        self._directory.save_scaling(*found)
        restore_scaling(self._job.network, self._directory)
        _LOG.info("inputs are standardised by the noised moments of %d clients", answered)
        return None

    def _rounds(self, strategy: PlanStrategy, budget: Budget) -> Outcome:
        plan, failed = self._job.plan, 0
        self._directory.forget_metrics_after(strategy.state.round)
        while strategy.state.round < plan.rounds:
            remaining = len(strategy.roster) - len(strategy.gone)
            # A client reports that it left when it is drawn: ending a hidden run then would reveal who was drawn and when.
            fewest = 1 if self._hidden else self._least
            if remaining < fewest:
                return self._end("too-few-clients", strategy.state, _too_few(remaining, fewest))
            if failed >= self._settings.most_failed_rounds:
                return self._end("too-few-clients", strategy.state, f"{failed} rounds in a row had too few updates")
            if not strategy.releases.may_go_on(strategy.state.round, budget.allows):
                return self._end("budget", strategy.state, "one more round would exceed max_epsilon")
            self._take_in_newcomers(strategy)
            failed = 0 if self._round(strategy, budget) else failed + 1
        return self._end("done", strategy.state, "all rounds are done")

    @property
    def _lets_join(self) -> bool:
        """Whether clients may join. Those of a reproducible run are the simulator's; where an ε assumes that nobody knows
        who takes part, a client that joins would be known to take part from then on."""
        return self._settings.joining and not self._job.reproducible and not self._hidden

    def _take_in_newcomers(self, strategy: PlanStrategy) -> None:
        """Ask nodes that have connected since: clients of the run that came back elsewhere, and new ones if they may join.

        The roster is on disk before a client's number is used.
        """
        there = set(self._grid.get_node_ids())
        new = {node for node in there - {each.node for each in strategy.roster} if self._heard[node] < _MOST_TRIES}
        if not new:
            return
        timeout = min(self._settings.subscribe_timeout, _NEWCOMER_SECONDS)
        fewest = self._job.smallest_records if self._lets_join else None
        roster, heard = take_in(
            self._grid,
            self._job.task(),
            strategy.roster,
            new,
            timeout,
            smallest_records=fewest,
            most_records=self._most_records,
        )
        self._heard.update(dict.fromkeys(new - heard, 1) | dict.fromkeys(heard, _MOST_TRIES))
        if roster != strategy.roster:
            save_roster(self._roster_path, roster)
            strategy.take_in(roster)

    def _round(self, strategy: PlanStrategy, budget: Budget) -> bool:
        """Run one round, charged before it begins and saved before the next one; returns whether it moved the model."""
        started, before = time.perf_counter(), strategy.state
        number = before.round + 1
        moved = self._move(strategy, number, budget)
        row = self._measure(strategy, before)
        seconds = round(time.perf_counter() - started, 4)
        if not self._hidden:
            row["seconds"] = seconds
        self._directory.append_metrics(row)
        self._directory.save_state(strategy.state, self._job.plan.digest())
        self._show(strategy, budget, seconds)
        told = {name: row[name] for name in ("clients",) if name in row} | dict(filter(None, [main_figure(row)]))
        _LOG.info("round %d of %d: %s", number, self._job.plan.rounds, ", ".join(f"{k} {v:.4g}" for k, v in told.items()))
        return moved

    def _show(self, strategy: PlanStrategy, budget: Budget, seconds: float) -> None:
        """Write what those who watch the server may see of a finished round (`monitor_file`).

        Durations of rounds are left out wherever the simulator may hide them (`training.run.hides_time`): a server does not
        know whether its clients' sizes differ.
        """
        tally, plan, strategy.tally = strategy.tally, self._job.plan, Tally()
        self._show_progress(tally, strategy.state)
        tally.set("fedcdp_clients", len(strategy.roster))
        tally.set("fedcdp_releases", len(strategy.releases.charges))
        tally.count("fedcdp_answers_total", by=len(strategy.admitted))
        if not plan.hides_members:
            tally.set("fedcdp_last_round_seconds", seconds)
        self._show_spent(tally, budget.spent_by(strategy.releases.rounds))
        MonitorFile(self._directory.path).add(tally, hidden=self._hidden)

    def _show_spent(self, tally: Tally, spent: float | None) -> None:
        """ε so far. One that is not known is not shown: an earlier one would be too small."""
        run = self._experiment.run
        for name in ("fedcdp_epsilon_spent", "fedcdp_epsilon_left"):
            tally.forget(name)
        if spent is not None:
            tally.set("fedcdp_epsilon_spent", spent, run.adversary, run.unit)
            if run.max_epsilon is not None:
                tally.set("fedcdp_epsilon_left", max(0.0, run.max_epsilon - spent), run.adversary, run.unit)

    def _show_progress(self, tally: Tally, state: State) -> None:
        tally.set("fedcdp_rounds", state.round)
        tally.set("fedcdp_rounds_planned", self._job.plan.rounds)

    def _move(self, strategy: PlanStrategy, number: int, budget: Budget) -> bool:
        """Ask the clients of a round, and move the model by what they answer; returns whether it moved."""
        if isinstance(strategy, SumStrategy):
            return strategy.run_round(self._grid, self._settings.round_timeout, budget.allows)
        out = strategy.configure_train(number, strategy.arrays(), ConfigRecord(), self._grid)
        replies = exchange(self._grid, list(out), self._settings.round_timeout, in_full=self._hidden, tally=strategy.tally)
        return strategy.aggregate_train(number, replies)[0] is not None

    def _measure(self, strategy: PlanStrategy, before: State) -> Row:
        """The metrics row of a round: nothing in it comes from a client except through the mechanism."""
        plan, state, every = self._job.plan, strategy.state, self._experiment.run.evaluate_every
        row: Row = {"round": state.round}
        if not self._hidden:
            row["clients"] = len(strategy.admitted)
        row["learning_rate"] = plan.learning_rate_at(before.round)
        if plan.private:
            row["clip"] = plan.clip_at(before.round, before.clip)
        if self._validation is not None and (state.round % every == 0 or state.round == plan.rounds):
            engine, records = self._watched
            row |= evaluate(engine, state.average or state.weights, records, torch.device("cpu"))
        return row

    @cached_property
    def _watched(self) -> tuple[Engine, Dataset]:
        """The network behind its frozen front, and the validation records as that front gives them, in all rounds."""
        assert self._validation is not None
        trained, inputs = without_front(self._job.network, self._validation.inputs, torch.device("cpu"), None)
        return self._job.engine(trained), replace(self._validation, inputs=inputs)

    # Stored files ----------------------------------------------------------------------------------------------------

    @property
    def _roster_path(self) -> Path:
        return self._directory.path / _ROSTER

    def _load_state(self) -> State:
        """The current state of the run. The first weights are stored as well: a resumed run begins with the same."""
        plan = self._job.plan
        trained = {name: p.detach() for name, p in self._job.network.named_parameters() if p.requires_grad}
        fresh = State.first(plan, trained)
        stored = self._directory.resumed_state(fresh, plan)
        if stored is None:
            self._directory.save_state(fresh, plan.digest())
            return fresh
        return stored

    def _subscribers(self) -> tuple[Roster, int]:
        """The clients of the run, and how many of them are connected."""
        timeout, task = self._settings.subscribe_timeout, self._job.task()
        if self._roster_path.exists():
            return find_again(self._grid, task, load_roster(self._roster_path), timeout)
        if self._directory.ledger.exists():
            raise RunError(f"{self._roster_path} is missing: the ledger counts by the numbers in it")
        roster = subscribe(self._grid, task, self._job.clients, timeout, self._job.smallest_records, self._most_records)
        return roster, len(roster)

    @property
    def _most_records(self) -> int | None:
        """The most records of a client, where more records count for more."""
        return self._settings.most_records if _counts_records(self._job.plan) else None

    def _population(self, roster: Roster) -> Population:
        """The population that ε is stated for: clients with the fewest allowed records or more, whatever they say.

        So no client can change the ε of another by misstating its records. A run begun by version 0.1.0 is stated as it was
        then: for the fewest records that its clients claimed, or any number above.
        """
        clients = len(roster)
        layers = len(Layout.of(self._job.network).groups(self._job.plan.clip_mode))
        said = min(member.records for member in roster)
        allowed = min(said, self._job.smallest_records or said)
        if self._directory.ledger.exists():
            stated = Population.read(Ledger.open(self._directory.ledger).population)
            allowed, clients = stated.records, stated.clients  # without those that joined: see `accounting.ledger`
            if allowed > said:
                raise RunError(f"{self._directory.ledger} is for clients with {allowed} records or more, but one has {said}")
        if allowed < said:
            _LOG.info("every client has %d records or more: smallest-records = %d gives a smaller ε", said, said)
        return Population(clients, allowed, min(self._copies, clients), layers, sizes=None)

    def _ledger(self, population: Population, rounds_done: int) -> Ledger:
        noise: NoiseKind = "seeded" if self._job.reproducible else "secure"
        return Ledger.of_run(self._directory.ledger, self._job.plan, population, noise, rounds_done)

    def _score(self, state: State) -> Figures:
        """All metrics of the model on the validation split, which are also stored."""
        if self._validation is None or not state.round:
            return {}
        weights = state.average or state.weights
        scores, clients = score(self._job.engine(), weights, self._dealt, self._validation, torch.device("cpu"), {})
        self._directory.save_scores(state.round, scores, clients)
        return scores

    def _end(self, ended: str, state: State, sentence: str) -> Outcome:
        """Save the result, and log its privacy cost."""
        network = self._job.network
        network.load_state_dict(state.average or state.weights, strict=False)
        self._directory.save_model(network.state_dict(), state.round)
        warning = no_better_than_guessing(self._score(state), self._validation)
        outcome = Outcome(ended, state.round, sentence, warning)
        write_atomically(self._directory.path / "outcome.json", json.dumps(asdict(outcome)).encode())
        shown = Tally()
        self._show_progress(shown, state)
        shown.set("fedcdp_run_ended", 1, ended)
        MonitorFile(self._directory.path).add(shown, hidden=self._hidden)
        _LOG.info("the run ends after %d of %d rounds: %s", state.round, self._job.plan.rounds, sentence)
        if warning is not None:
            _LOG.warning("%s", warning)
        if self._directory.ledger.exists():
            from fedcdp.training.ledger_check import spent

            _LOG.info("\n%s", spent(self._directory.path)[1])
        return outcome


def _too_few(clients: int, needed: int) -> str:
    return f"{clients} clients are too few: {needed} are needed"


def _text(config: Mapping[str, Any], name: str) -> str:
    if not isinstance(value := config.get(name), str):
        raise PlanError(f"run configuration: {name} is missing; it must be a path")
    return value
