"""The client: a Flower ClientApp that checks tasks against its own policy, keeps its own ledger, and trains.

```python
app = client_app(data=my_records, policy=ClientPolicy(epsilon=2.0, methods=("fed-cdp",)))
```

Its node configuration: `state-dir` (where its ledger is kept; required), `policy` (a TOML file), `device`, the location of
its data (`local_round`), and, for secure sums, `identity` (its node key) and `roster` (the nodes that it knows). A client
does not trust its server: its own policy and ledger decide what it releases, and how often. Everything it sends back has
passed through the method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcdp.data.dataset import Dataset
from fedcdp.data.table_schema import TableSchema
from fedcdp.data.tasks import task_called
from fedcdp.deploy.protocol import messages, wire
from fedcdp.deploy.protocol.client_ledger import Accepted, ClientLedger, Summed
from fedcdp.deploy.protocol.departure import check_member
from fedcdp.deploy.protocol.first_release import release_moments
from fedcdp.deploy.protocol.kept_features import KeptFeatures, forget_features
from fedcdp.deploy.protocol.key_rotation import KeyRotation
from fedcdp.deploy.protocol.local_round import (
    DataFunction,
    LocalTraining,
    NetworkFunction,
    Round,
    check_described,
    check_network,
    imported,
    name_of_client,
    network_for,
    records_of,
)
from fedcdp.deploy.protocol.monitor_file import MonitorFile, Tally
from fedcdp.deploy.protocol.node_figures import note_ledger
from fedcdp.deploy.protocol.policy import Answer, ClientPolicy, Facts, still_fits
from fedcdp.deploy.protocol.sum_context import weights_hash
from fedcdp.deploy.protocol.sum_keys import forget_keys
from fedcdp.deploy.protocol.sum_member import CheckedAttempt, SumClient
from fedcdp.deploy.protocol.task import Task, constants_of, tensors_of
from fedcdp.engine import Loss
from fedcdp.engine.runtime import usable_device
from fedcdp.errors import FedcdpError, RefusedError, TaskError, WireError
from fedcdp.files.tree import Layout, Tree
from fedcdp.training.scaling import set_standardisation

_LOG = logging.getLogger("flwr.fedcdp")  # Flower shows the messages of its own logger and its children
_OWN_TROUBLE = "the node has an internal error; see its log"


def client_app(
    data: DataFunction | None = None,
    network: NetworkFunction | None = None,
    policy: ClientPolicy | None = None,
    loss: Loss | None = None,
) -> ClientApp:
    """Make a Flower ClientApp that takes part in tasks.

    Arguments that are left out are read from the node configuration.

    Args:
        data: A function of Flower's context that returns inputs and labels, or a `fedcdp.Dataset`. In the node
            configuration: `data-function`, as package.module:function, or `data`, a file.
        network: A function of the task that makes the network, for a network that the task does not name in a way that this
            client may import. In the node configuration: `network-function`, as package.module:function.
        policy: What this client grants. In the node configuration: `policy`, a TOML file. Default: `ClientPolicy()`.
        loss: The loss to train with, which must be the server's. Default: that of the published task, such as cross-entropy
            for classification.

    Returns:
        The app.

    Examples:
        >>> from fedcdp.flower import ClientPolicy, client_app
        >>> app = client_app(policy=ClientPolicy(epsilon=2.0, methods=("fed-cdp",)))
        >>> type(app).__name__
        'ClientApp'
    """
    app = ClientApp()
    client = _Client(data, network, policy, loss)

    def subscribe(message: Message, context: Context) -> Message:
        return client.counted("subscribe", client.subscribe, message, context)

    def moments(message: Message, context: Context) -> Message:
        return client.counted("moments", client.moments, message, context)

    def keys(message: Message, context: Context) -> Message:
        return client.counted("keys", client.keys, message, context)

    def ended(message: Message, context: Context) -> Message:
        return client.counted("ended", client.ended, message, context)

    def train(message: Message, context: Context) -> Message:
        return client.counted("train", client.train, message, context)

    app.query("subscribe")(subscribe)
    app.query("moments")(moments)
    app.query("keys")(keys)
    app.query("ended")(ended)
    app.train()(train)

    return app


class _Client:
    """The handlers. Each message is handled in its own process: only the ledger persists."""

    def __init__(
        self, data: DataFunction | None, network: NetworkFunction | None, policy: ClientPolicy | None, loss: Loss | None
    ) -> None:
        self._data, self._network, self._policy, self._loss = data, network, policy, loss
        self._tally, self._hidden = Tally(), False

    def counted(
        self, kind: str, handle: Callable[[Message, Context], RecordDict], message: Message, context: Context
    ) -> Message:
        """The reply to a message, which is counted for those who watch the node."""
        self._tally, self._hidden = Tally(), False
        content = handle(message, context)
        self._tally.count("fedcdp_node_messages_total", kind)
        if message.has_content():
            self._tally.count("fedcdp_node_bytes_total", "received", by=messages.size_of(message.content))
        self._tally.count("fedcdp_node_bytes_total", "sent", by=messages.size_of(content))
        if (state := context.node_config.get("state-dir")) is not None and Path(str(state)).is_dir():
            MonitorFile(Path(str(state))).add(self._tally, hidden=self._hidden)
        return Message(content, reply_to=message)

    def _note_ledger(self, policy: ClientPolicy, ledger: ClientLedger) -> None:
        """Note what the ledger has counted: nothing else here says what was spent.

        Under a plan that hides its members, an ε against those who get the model may assume that nobody knows who took part.
        A client does not know whether it does, which depends on the number of clients.
        """
        self._hidden = any(each.task.plan.hides_members for each in ledger.tasks.values())
        note_ledger(self._tally, policy, ledger)

    def _said(self, error: Exception, what: str) -> str:
        """Log an error locally, in full, and return what the server may know: no paths, no data."""
        public = isinstance(error, RefusedError | TaskError | WireError)
        kind = error.kind if isinstance(error, RefusedError) else "protocol" if public else "trouble"
        self._tally.count("fedcdp_node_refusals_total", kind)
        _LOG.warning("%s: %s", what, error, exc_info=None if isinstance(error, FedcdpError) else error)
        return str(error) if public else _OWN_TROUBLE

    def subscribe(self, message: Message, context: Context) -> RecordDict:
        """Accept or decline a task; an accepted task is recorded in the ledger."""
        try:
            task = messages.read_task(message.content)
            check_member(_state_dir(context))
            policy = self._policy_of(context)
            if (reason := policy.objection(task)) is not None:  # before importing or reading anything for the task
                raise RefusedError(reason, kind="policy")
            number, loss = _number(task, context), self._loss_for(task)
            data, table = records_of(self._data, context, task)
            if (own := self._network_of(context)) is None:
                check_described(task)
            network = network_for(task, own)
            layout, constants = tensors_of(Layout.of(network)), constants_of(network)
            facts = Facts(len(data), data.shape, data.outputs or 0, layout, constants, data.task, table)
            with _held(context, policy) as ledger:
                answer = policy.decide(task, facts, ledger)
                if not answer.accepts:
                    raise RefusedError(answer.reason, kind=answer.kind)
                if task.digest() not in ledger.tasks:  # version 0.1.0 accepted unused tensors, and such a run may go on
                    check_network(task, network, data, loss)
                key, rotations = None, list[KeyRotation]()
                if task.plan.sums:
                    summing = self._summing(context, policy)
                    key, rotations = summing.signed_key(task, Layout.of(network), len(data)), summing.own_rotations()
                ledger.accept(task, answer.records)
                name = ledger.name_in(task)
                self._note_ledger(policy, ledger)
        except Exception as error:
            return messages.answer(Answer(False, self._said(error, "declines the task")))
        _LOG.info("accepts the task of run %s: %s, with %d records", task.run, task.plan.method, answer.records)
        return messages.answer(answer, name, number, name_of_client(context), key, rotations)

    def moments(self, message: Message, context: Context) -> RecordDict:
        """Release noised moments of the inputs, once for a task that standardises them."""
        try:
            digest, attempt = messages.read_moments_request(message.content)
            policy = self._policy_of(context)
            with _held(context, policy) as ledger:
                accepted, data = self._accepted(policy, ledger, digest, context)
                number = max(_number(accepted.task, context), 0)
                sums = release_moments(policy, ledger, digest, attempt, data, number)
                self._note_ledger(policy, ledger)
        except Exception as error:
            return messages.refuse(self._said(error, "releases no moments"), final=False)
        _LOG.info("released noised moments of its inputs to run %s", accepted.task.run)
        return messages.reply_moments(digest, attempt, sums)

    def keys(self, message: Message, context: Context) -> RecordDict:
        """Keep the run keys of the other clients of a secure sum."""
        try:
            digest, keys, rotations = messages.read_keys(message.content)
            policy = self._policy_of(context)
            with _held(context, policy) as ledger:
                task = _known(ledger, digest).task
                if not task.plan.sums:
                    raise RefusedError("the task has no secure sum")
                kept = self._summing(context, policy).keep_keys(task, keys, rotations)
        except Exception as error:
            return messages.refuse(self._said(error, "keeps no keys"), final=False)
        _LOG.info("keeps %d of %d run keys for run %s", len(kept), len(keys), task.run)
        return messages.keep_keys(kept)

    def ended(self, message: Message, context: Context) -> RecordDict:
        """Delete the keys of a run that has ended, and the features that were kept for it."""
        try:
            digest = messages.read_ended(message.content)
            policy = self._policy_of(context)
            with _held(context, policy) as ledger:
                task = _known(ledger, digest).task.digest()
                forget_keys(_state_dir(context), task)
                forget_features(_state_dir(context), task)
        except Exception as error:
            return messages.refuse(self._said(error, "deletes nothing"), final=False)
        return RecordDict()

    def train(self, message: Message, context: Context) -> RecordDict:
        """Take part in a round: check everything, then charge, then compute; only then does anything leave the client."""
        try:
            digest, asked, arrays = messages.read_ask(message.content)
            policy = self._policy_of(context)
            with _held(context, policy) as ledger:
                accepted, data = self._accepted(policy, ledger, digest, context)
                one_by_one = policy.adversary == "example"
                training = self._training(accepted.task, data, context, message.content, one_by_one=one_by_one)
                weights = wire.decode(arrays, training.engine.layout)
                asked.check(accepted.task.plan)
                attempt = None
                if accepted.task.plan.sums:
                    attempt = self._check_sum(accepted.task, asked, weights, training, message.content, context)
                _charge(policy, ledger, digest, asked, None if attempt is None else attempt.summed)
                self._note_ledger(policy, ledger)
            number = max(_number(accepted.task, context), 0)
            if attempt is None:
                reply = _update(digest, asked, training, weights, number)
            else:
                reply = messages.reply_share(digest, asked, attempt.masked_share(training, weights, asked, number))
        except Exception as error:
            final = isinstance(error, RefusedError) and error.final
            return messages.refuse(self._said(error, "refuses to train"), final)
        _LOG.info("took part in round %d of run %s", asked.number + 1, accepted.task.run)
        return reply

    def _check_sum(
        self, task: Task, asked: Round, weights: Tree, training: LocalTraining, content: RecordDict, context: Context
    ) -> CheckedAttempt:
        """An attempt at a secure sum, checked by this client."""
        standardised = messages.read_standardised(content, task.shape) if task.plan.scaling_noise is not None else None
        hashed = weights_hash(weights, training.engine.layout, standardised)
        summing = self._summing(context, self._policy_of(context))
        return summing.check_attempt(task, asked, messages.read_members(content), hashed)

    def _summing(self, context: Context, policy: ClientPolicy) -> SumClient:
        return SumClient.of(context.node_config, _state_dir(context), policy)

    def _accepted(
        self, policy: ClientPolicy, ledger: ClientLedger, digest: str, context: Context
    ) -> tuple[Accepted, Dataset]:
        """A task that was accepted here, and this client's records for it, checked again."""
        check_member(_state_dir(context))
        accepted = _known(ledger, digest)
        data, table = records_of(self._data, context, accepted.task)
        _check_again(policy, accepted, data, table)
        return accepted, data

    def _training(
        self, task: Task, data: Dataset, context: Context, content: RecordDict, *, one_by_one: bool
    ) -> LocalTraining:
        network = network_for(task, self._network_of(context))
        if not task.fits(Layout.of(network)) or constants_of(network) != task.constants:
            raise RefusedError("the network has changed since the task was accepted", final=True, kind="data")
        if task.plan.scaling_noise is not None:
            set_standardisation(network, *messages.read_standardised(content, task.shape))
        device = usable_device(str(context.node_config.get("device", "cpu")))
        return LocalTraining(
            task,
            network,
            data,
            self._loss_for(task),
            torch.device(device),
            one_by_one=one_by_one,
            kept=KeptFeatures(_state_dir(context), task.digest()),
        )

    def _loss_for(self, task: Task) -> Loss:
        if (loss := self._loss or task_called(task.learning_task).loss) is None:
            raise RefusedError(f"the task is {task.learning_task}, and this client's app has no loss for it", final=True)
        return loss

    def _policy_of(self, context: Context) -> ClientPolicy:
        if self._policy is not None:
            return self._policy
        path = context.node_config.get("policy")
        return ClientPolicy() if path is None else ClientPolicy.read(str(path))

    def _network_of(self, context: Context) -> NetworkFunction | None:
        path = context.node_config.get("network-function")
        if self._network is not None or path is None:
            return self._network
        function: Callable[[Task], torch.nn.Module] = imported(str(path))
        return function


def _check_again(policy: ClientPolicy, accepted: Accepted, data: Dataset, table: TableSchema | None) -> None:
    """Check again what held when the task was accepted: the policy may be stricter now, and the data may have changed."""
    if (reason := policy.objection(accepted.task)) is not None:
        raise RefusedError(reason, final=True, kind="policy")
    if len(data) != accepted.records or not still_fits(accepted.task, data, table):
        raise RefusedError("the data have changed since the task was accepted", final=True, kind="data")


def _held(context: Context, policy: ClientPolicy) -> AbstractContextManager[ClientLedger]:
    """This client's ledger, checked against its mark if the policy has one."""
    return ClientLedger.held(_state_dir(context), policy.mark_below(Path()))


def _known(ledger: ClientLedger, digest: str) -> Accepted:
    """A task that was accepted here."""
    if (accepted := ledger.tasks.get(digest)) is None:
        raise RefusedError("this task was not accepted here", final=True, kind="protocol")
    return accepted


def _charge(policy: ClientPolicy, ledger: ClientLedger, digest: str, asked: Round, summed: Summed | None) -> None:
    """Write the release into the ledger, if the budget allows it."""
    accepted = ledger.tasks[digest]
    plan = accepted.task.plan
    ledger.check(digest, asked.number, asked.attempt, summed)
    if not accepted.is_the_last_again(asked.number, asked.attempt, summed):
        policy.reserve(digest, ledger, asked.number)
    bound = plan.clip_at(asked.number, asked.clip) if plan.private else 0.0
    ledger.charge(digest, asked.number, asked.attempt, bound, summed)


def _update(digest: str, asked: Round, training: LocalTraining, weights: Tree, client: int) -> RecordDict:
    """The reply with this client's update."""
    sent = training.take_part(weights, asked, client)
    update: Tree = {name: value[0] for name, value in sent.update.items()}
    count = None if sent.count is None else float(sent.count[0])
    return messages.reply(digest, asked, messages.Update(update, count), training.engine.layout)


def _number(task: Task, context: Context) -> int:
    """The number of the simulator's client, if the task is to reproduce the simulator's result; otherwise −1."""
    if not task.reproducible:
        return -1
    number = context.node_config.get("partition-id")
    if type(number) is not int or number < 0:
        raise RefusedError("a reproducible task needs a partition-id in the node configuration")
    return number


def _state_dir(context: Context) -> Path:
    path = context.node_config.get("state-dir")
    if path is None:
        raise FedcdpError("node configuration: state-dir is missing; set it to the directory of this client's ledger")
    return Path(str(path))
