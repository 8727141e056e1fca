"""A plan as a Flower strategy: the planned divisor, server learning rate and optimiser, moving average, server noise.

```python
job = Job(plan=plan, network=network, network_name="cnn", shape=(1, 28, 28), classes=10, clients=20)
roster = subscribe(grid, job.task(), expected=20, timeout=300)
strategy = PlanStrategy(job, roster)
strategy.start(grid, strategy.arrays(), num_rounds=plan.rounds)
```

`fedcdp.deploy.protocol.server` is the same with a run directory: a ledger on disk, checkpoints, resuming, and the release of
moments by which a plan may standardise inputs (`first_release`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import nn

from fedcdp.accounting.budget import Releases
from fedcdp.config.plan import Plan
from fedcdp.data.table_schema import TableSchema
from fedcdp.data.tasks import TaskName, task_called
from fedcdp.deploy.protocol import admission, messages, wire
from fedcdp.deploy.protocol.local_round import Round
from fedcdp.deploy.protocol.messages import Update
from fedcdp.deploy.protocol.monitor_file import Tally
from fedcdp.deploy.protocol.roster import Member, Roster, exchange
from fedcdp.deploy.protocol.task import Task, constants_of, hides_participation, tensors_of
from fedcdp.engine import Engine, Loss
from fedcdp.engine.batched import engines_for
from fedcdp.engine.frozen import split
from fedcdp.errors import PlanError, RefusedError, WireError
from fedcdp.files.tree import Layout
from fedcdp.mechanism.noise import noise_of
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.methods import METHODS, Moment, Sent
from fedcdp.methods.aggregation import Aggregate, moving_average, next_clip, server_update
from fedcdp.methods.quantile import clip_rule
from fedcdp.models.networks import prepare
from fedcdp.training.rundir import State
from fedcdp.training.scaling import standardised_by

_LOG = logging.getLogger("flwr.fedcdp")
_SECONDS_TO_END = 10.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a server wants to train: the plan, the network and the shape of the data.

    Examples:
        >>> import fedcdp
        >>> from fedcdp.flower import Job
        >>> from torch import nn
        >>> plan = fedcdp.Plan(per_round=2, secure_noise=True)
        >>> job = Job(plan=plan, network=nn.Linear(30, 2), network_name="linear", shape=(30,), classes=2, clients=2)
        >>> job.task().network
        'linear'
    """

    plan: Plan
    """If the job is reproducible, the plan's seed decides which clients are drawn, and is published; otherwise neither."""
    network: nn.Module
    """The network with its first weights."""
    network_name: str
    """The name by which clients make the same network: cnn, mlp, cpl, or package.module:factory."""
    activation: str | None = None
    """relu, tanh or sigmoid; None: the network's own."""
    shape: tuple[int, ...]
    """The shape of one input."""
    classes: int
    """How many outputs the network needs: one for each class, label or value."""
    clients: int
    """Number of clients expected to subscribe."""
    smallest_cohort: int = 1
    """Fewest updates that are put into the model in a round."""
    smallest_records: int | None = None
    """Fewest records of a client, which bounds the largest update that is admitted (`admission`). None: a batch."""
    reproducible: bool = False
    """Take noise and sampling from the published seed: for tests; it protects nobody."""
    run: str = field(default_factory=lambda: secrets.token_hex(16))
    """The run's random name."""
    loss: Loss | None = None
    """The loss by which the server evaluates the model; None: that of the learning task."""
    learning_task: TaskName = "classification"
    """What is predicted."""
    table: TableSchema | None = None
    """What the columns of clients' tables mean, which they check; None: nothing is said."""

    def engine(self, network: nn.Module | None = None) -> Engine:
        """The network, or a part of it, prepared for its plan, and its loss."""
        if (loss := self.loss or task_called(self.learning_task).loss) is None:
            raise PlanError(
                f"loss: task {self.learning_task} has no loss of its own; pass a function of outputs and targets"
            )
        return next(iter(engines_for(prepare(network or self.network, self.plan, "cpu"), loss).values()))

    def task(self) -> Task:
        """The task that the server publishes for this job."""
        layout = Layout.of(self.network)
        return Task(
            run=self.run,
            shape=self.shape,
            classes=self.classes,
            network=self.network_name,
            activation=self.activation,
            tensors=tensors_of(layout),
            constants=constants_of(self.network),
            plan=self.plan if self.reproducible else self.plan.but(seed=0),
            smallest_cohort=self.smallest_cohort,
            reproducible=self.reproducible,
            learning_task=self.learning_task,
            table=self.table,
        )


def deployed(plan: Plan, reproducible: bool) -> Plan:
    """A plan as a deployment runs it: noise and client sampling use the operating system's randomness, unless
    everything is to be reproducible."""
    if reproducible:
        return plan.but(secure_noise=False, noise_generator="philox")
    return plan.but(secure_noise=True, seed=secrets.randbits(63))


class PlanStrategy(Strategy):
    """A Flower strategy that trains a job, one round at a time.

    A round is charged before anything is sent. Its sum is divided by the planned number of clients.

    An update is left out, with a line in the log, if it comes too late, cannot be read, belongs to another round, or could
    not have been made by the method (`admission`). With fewer than `smallest_cohort` updates a round is still charged, and
    leaves the model as it is. Where the server adds the noise, it adds noise in every round, to the sum of the updates that
    came, and divides by the planned number. A model that stood still would show that few clients were drawn, and the ε
    against those who get the model assumes that nobody knows that (`task.hides_participation`). In that case no number of
    clients is reported either.

    Args:
        job: What is trained.
        roster: The clients that subscribed.
        releases: The releases so far, and their ledger. Default: none, in memory.
        state: Where a resumed training continues. Default: the network's first weights.
        largest_ratio: Without privacy: leave out updates this much larger than the median.
        message_lifetime: Seconds after which Flower drops a message.

    Raises:
        PlanError: The roster has fewer clients than the plan needs in a round, or the noise is on the sum, which needs
            `SumStrategy`.
    """

    supports_sums = False

    def __init__(
        self,
        job: Job,
        roster: Roster,
        *,
        releases: Releases | None = None,
        state: State | None = None,
        largest_ratio: float = 100.0,
        message_lifetime: float = 3600.0,
    ) -> None:
        job.plan.check_clients(len(roster))
        if job.plan.sums and not self.supports_sums:
            raise PlanError("noise: sum needs several attempts in a round; use SumStrategy or server_app")
        self.job, self.roster, self.task = job, roster, job.task().digest()
        self.engine = job.engine()
        self.releases = releases or Releases(len(roster))
        weights = {name: p.detach() for name, p in self.engine.model.named_parameters() if p.requires_grad}
        self.state = state or State.first(job.plan, weights)
        self.gone: set[int] = set()
        """The numbers of clients that will not take part again, by their own statement."""
        self.admitted: list[int] = []
        """The clients whose updates the last round used."""
        self.tally = Tally()
        """What those who watch the server are shown, since it was last written (`server`)."""
        self._noise = noise_of(job.plan, self.engine.layout)
        # A round repeated after a crash is charged as two releases of independently drawn cohorts. Every process therefore
        # draws with its own seed, which is not stored.
        self._draws = job.plan if job.reproducible else job.plan.but(seed=secrets.randbits(62))
        self._mean_records = job.plan.mean_records
        self._largest_ratio, self._lifetime = largest_ratio, message_lifetime
        self._smallest_records = job.plan.batch_size if job.smallest_records is None else job.smallest_records
        self._pending: list[tuple[Message, Member]] = []
        self._asked = Round(0, 0, None)

    def take_in(self, roster: Roster) -> None:
        """Go on with a roster in which clients have joined, or are at other nodes. Those that joined are in the ledger."""
        while len(self.releases.participations) < len(roster):
            self.releases.join()
        self.roster = roster

    def arrays(self) -> ArrayRecord:
        """The global weights."""
        return wire.dense(self.state.weights)

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,  # noqa: ARG002
        grid: Grid,
    ) -> Iterable[Message]:
        """Choose the clients of a round, charge it, and create the request to each of them."""
        if server_round != self.state.round + 1:
            raise PlanError(f"round {server_round} cannot follow round {self.state.round}: rounds must be consecutive")
        plan, round_, clip = self.job.plan, self.state.round, self.state.clip
        self.state = replace(self.state, weights=wire.decode(arrays, self.engine.layout))
        # Draw from all clients of the run, connected or not: ε rests on the choice being random.
        chosen = choose_clients(self._draws, len(self.roster), round_)
        self.releases.charge(round_, chosen, plan.clip_at(round_, clip) if plan.private else 0.0)
        self._asked, self._pending = Round(round_, self.releases.attempt, clip), []
        connected = set(grid.get_node_ids())
        content = messages.ask(self.task, self._asked, arrays, standardised_by(self.job.network))
        for member in (self.roster[number] for number in chosen.tolist()):
            if member.number in self.gone:
                self._leave_out(member, "it does not take part any more", "left")
            elif member.node not in connected:
                self._leave_out(member, "it is not connected", "missing")
            else:
                message = Message(content, member.node, messages.TRAIN, ttl=self._lifetime, group_id=str(server_round))
                self._pending.append((message, member))
        return [message for message, _ in self._pending]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Move the global model by the admitted updates; None if there are too few."""
        updates = self._read(replies)
        for number, reason in admission.outliers(updates, self.job.plan, self._largest_ratio).items():
            self._leave_out(self.roster[number], reason, "protocol")
            del updates[number]
        self.admitted = sorted(updates)
        hidden = hides_participation(self.job.plan)
        counted = MetricRecord({} if hidden else {"clients": len(updates)})
        if not hidden and len(updates) < self.job.smallest_cohort and self._asked_anyone(len(updates)):
            _LOG.warning("round %d does not change the model: %d updates are too few, %d are needed", server_round,
                         len(updates), self.job.smallest_cohort)  # fmt: skip
            self.state = replace(self.state, round=self.state.round + 1)
            return None, counted
        self.state = self._moved(updates)
        return self.arrays(), counted

    def configure_evaluate(
        self,
        server_round: int,  # noqa: ARG002
        arrays: ArrayRecord,  # noqa: ARG002
        config: ConfigRecord,  # noqa: ARG002
        grid: Grid,  # noqa: ARG002
    ) -> Iterable[Message]:
        """Nothing: the model's accuracy on a client's records is a function of them that no ε covers."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:  # noqa: ARG002
        """Nothing, for the same reason."""
        return None

    def say_ended(self, grid: Grid) -> None:
        """Tell all clients that the run has ended, so they delete what they keep for it: keys, and features.

        A client that does not answer keeps them. Nobody is told if there is nothing to delete.
        """
        nothing = torch.zeros(1, *self.job.shape)
        if not self.job.plan.sums and split(self.job.network, nothing, nothing.device)[0] is None:
            return
        connected, content = set(grid.get_node_ids()), messages.say_ended(self.task)
        if nodes := [member.node for member in self.roster if member.node in connected]:
            out = [Message(content, node, messages.ENDED, ttl=self._lifetime, group_id="ended") for node in nodes]
            for _ in exchange(grid, out, _SECONDS_TO_END):
                pass

    def summary(self) -> None:
        """Log what is trained."""
        plan = self.job.plan
        _LOG.info("%s: %d rounds of %d out of %d clients", plan.method, plan.rounds, plan.per_round, len(self.roster))
        if self.job.reproducible:
            _LOG.warning("REPRODUCIBLE: noise and sampling come from a published seed and protect nobody")

    def _read(self, replies: Iterable[Message]) -> dict[int, Update]:
        """The admitted updates, by client."""
        waiting = dict(self._pending_by_message())
        plan, updates = self.job.plan, dict[int, Update]()
        for reply in replies:
            member = waiting.pop(reply.metadata.reply_to_message_id, None)
            if member is None:
                _LOG.warning("ignoring a reply that matches no request of this round")
                continue
            try:
                sent = messages.read_reply(reply, self.task, self._asked, self.engine.layout, admission.is_counted(plan))
                admission.check_size(sent, plan, self.engine.layout, self._asked, self._smallest_records, member.records)
                updates[member.number] = sent
            except RefusedError as error:
                self._leave_out(member, f"it refuses: {error}", "refused")
                self.gone |= {member.number} if error.final else set()
            except WireError as error:
                self._leave_out(member, str(error), "protocol")
        for member in waiting.values():
            self._leave_out(member, "it did not answer in time", "late")
        return updates

    def _pending_by_message(self) -> Iterable[tuple[str, Member]]:
        # A grid assigns a message its id when sending it.
        return ((message.metadata.message_id, member) for message, member in self._pending)

    def _asked_anyone(self, received: int) -> bool:
        """Whether too few updates are a failure: a Poisson draw may choose nobody, which is a normal round."""
        return (
            received > 0 or self.job.smallest_cohort > 1 or bool(self._pending) or self.job.plan.client_sampling == "fixed"
        )

    def _moved(self, updates: dict[int, Update]) -> State:
        """The state after a round with these updates, summed in the order of the clients' numbers."""
        plan, state, method = self.job.plan, self.state, METHODS[self.job.plan.method]
        received = Aggregate(state.weights, plan)
        for number, sent in sorted(updates.items()):
            one = Sent(
                {name: value[None] for name, value in sent.update.items()},
                None if sent.count is None else torch.tensor([sent.count], dtype=torch.float64),
            )
            at = self._moment(torch.tensor([number]))
            received.add(method.admit(one.update, at), clip_rule(at.plan).admitted(one, at))
        at = self._moment(torch.zeros(0, dtype=torch.int64))
        weights, optimizer = server_update(method, state.weights, received, at, state.optimizer)
        average = None if state.average is None else moving_average(state.average, weights, plan.ema)
        return State(state.round + 1, weights, average, next_clip(received, at), optimizer)

    def _moment(self, clients: torch.Tensor) -> Moment:
        """What the server's functions may depend on; of the clients' numbers of records, only their public mean."""
        plan, state = self.job.plan, self.state
        mean = self._mean_records
        return Moment(
            plan, self.engine, self._noise, state.round, clients, clients, current_clip=state.clip, mean_records=mean
        )

    def _leave_out(self, member: Member, reason: str, kind: str) -> None:
        self.tally.count("fedcdp_left_out_total", kind)
        _LOG.warning("round %d: %s is left out: %s", self.state.round + 1, member.title, reason)
