"""The client of the rogue-server trial: real handlers, policy file and ledger, with a witness in place of its training."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tomli_w
import torch
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ConfigRecord, Message, RecordDict
from torch import nn

from fedcdp.accounting.journal import Journal
from fedcdp.config.plan import SCALING
from fedcdp.deploy.protocol import client, messages, wire
from fedcdp.deploy.protocol.admission import is_counted
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.local_round import LocalTraining, Round
from fedcdp.deploy.protocol.sum_keys import sign_key
from fedcdp.deploy.protocol.task import Task
from fedcdp.methods import Sent
from tests.support.ledgers import written_by_0_1_0
from tests.support.local_grid import Node
from tests.support.sum_nodes import SumFolder, node_key, node_pair
from tools.rogue.accountant import Moments, Release, total_epsilon
from tools.rogue.tasks import TENSORS

EPSILON, DELTA = 0.25, 1e-5
NETWORK = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
STANDARDISED = (torch.zeros(3), torch.ones(3))
WEIGHTS = {name: torch.zeros(size) for name, size in TENSORS.items()}


_MEMBERS = 4
NODES = [node_key(number) for number in range(_MEMBERS)]
_ROSTERS = [NODES] * 4 + [NODES[:3], NODES[:2], NODES[1:], [*NODES[:3], NODES[1]], [*NODES[:3], node_key(99)], []]


def _identity(number: int) -> EllipticCurvePrivateKey:
    key = load_ssh_private_key(node_pair(number).private, None)
    assert isinstance(key, EllipticCurvePrivateKey)
    return key


class Crash(BaseException):
    """The client's process ends here."""


@dataclass
class Witness:
    """Records every release of a client, independently of the client's own statements."""

    adversary: str
    unit: str
    seen: list[tuple[str, Release | Moments]] = field(default_factory=list)
    """The digest of the task, and the release."""
    crash: str | None = None
    """Where the next release ends the process: before anything is computed, or after it has left."""
    known: set[tuple[str, bytes]] = field(default_factory=set)
    """Noised moments that have left the client, with the digest of their task."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    asked_with: threading.local = field(default_factory=threading.local)
    """Its `roster`: distinct members, this client among them, in the request that this thread sends."""

    def note(self, task: Task, records: int, asked: Round, members: int | None = None) -> None:
        plan = task.plan
        # Without a roster a share is read alone, with this client's noise only.
        roster = getattr(self.asked_with, "roster", 0)
        share = {
            "others": max(roster - 1 - plan.colluders, 0),
            "shares": (members or plan.per_round) - plan.colluders,
        }
        release = Release(
            adversary=self.adversary,
            unit=self.unit,
            method=plan.method,
            noise=plan.noise,
            noise_at=plan.noise_at,
            sampling=plan.record_sampling,
            sigma=plan.noise_scale_at(asked.number, asked.clip) / plan.clip_at(asked.number, asked.clip),
            quantile_noise=plan.quantile_noise if plan.quantile else None,
            records=records,
            batch=plan.batch_size,
            slots=plan.slots,
            steps=plan.local_steps,
            per_round=plan.per_round,
            layers=len({name.rpartition(".")[0] for name in TENSORS}),
            secret=plan.secure_noise and not task.reproducible,
            **share if plan.sums else {},
        )
        with self.lock:
            self.seen.append((task.digest(), release))

    def note_moments(self, task: Task, records: int, values: bytes) -> None:
        """A client that sends the same values again releases nothing new."""
        noise, secret = task.plan.scaling_noise, task.plan.secure_noise and not task.reproducible
        assert noise is not None
        with self.lock:
            if (task.digest(), values) not in self.known:
                self.known.add((task.digest(), values))
                self.seen.append((task.digest(), Moments(self.adversary, self.unit, records, noise, secret)))


class Client:
    """One client with its directory, under attack."""

    def __init__(self, base: Path, reader: tuple[str, str], case: random.Random) -> None:
        self.base, self.case, self.witness = base, case, Witness(*reader)
        self.records = 100
        self.texts: list[str] = []
        """The tasks published so far."""
        self.events: Counter[str] = Counter()
        self.sums: dict[str, Task] = {}
        """The published tasks with noise on the sum."""
        self.write_policy()
        self.folder = SumFolder.write(base, 0, range(_MEMBERS))

    def write_policy(self, **changes: Any) -> None:
        settings = {"epsilon": EPSILON, "delta": DELTA, "adversary": self.witness.adversary, "unit": self.witness.unit,
                    "colluders": 1}  # fmt: skip
        (self.base / "policy.toml").write_text(tomli_w.dumps(settings | changes))

    def send(self, content: RecordDict, kind: str) -> RecordDict:
        """Send a message to a fresh process of the client, which may crash on it."""
        records = self.records
        app = client.client_app(
            data=lambda _: (np.zeros((records, 3), np.float32), np.arange(records) % 2), network=lambda _: NETWORK
        )
        config = self.folder.config | {"policy": str(self.base / "policy.toml"), "partition-id": 0}
        message = Message(content, 100, kind)
        message.metadata.__dict__["_message_id"] = "message"
        try:
            reply = Node(app, config).handle(message, 100)
        except Crash:
            self.events["crashed"] += 1
            return RecordDict()
        assert reply is not None
        return reply.content

    def publish(self, text: str) -> bool:
        answer = self.send(RecordDict({"task": ConfigRecord({"task": text})}), messages.SUBSCRIBE)
        accepted = "answer" in answer.config_records and answer.config_records["answer"].get("accepts") is True
        self.events["accepted" if accepted else "declined"] += 1
        self.texts.append(text)
        if accepted and (task := Task.from_json(text)).plan.sums:
            self.sums[task.digest()] = task
            others = [sign_key(_identity(number), task, X25519PrivateKey.generate()) for number in range(1, _MEMBERS)]
            self.send(messages.pass_on_keys(task.digest(), others), messages.KEYS)
        return accepted

    def ask(self, digest: str, asked: Round, roster: list[bytes] | None = None) -> bool:
        """Request a round; of a sum, with a roster that is mostly the honest one."""
        content = messages.ask(digest, asked, wire.dense(WEIGHTS), STANDARDISED)
        if digest in self.sums:
            roster = self.case.choice(_ROSTERS) if roster is None else roster
            self.witness.asked_with.roster = len({*roster} & {*NODES}) if NODES[0] in roster else 0
            content = messages.ask_share(digest, asked, wire.dense(WEIGHTS), roster, STANDARDISED)
        answer = self.send(content, messages.TRAIN)
        released = {"update", "share"} & set(answer.array_records)
        self.events["released" if released else "refused"] += 1
        return bool(released)

    def ask_moments(self, digest: str, attempt: int) -> bool:
        records = self.records
        answer = self.send(messages.ask_moments(digest, Round(SCALING, attempt, None)), messages.MOMENTS)
        self.events["moments" if "moments" in answer.array_records else "refused"] += 1
        if "moments" not in answer.array_records:
            return False
        with ClientLedger.held(self.base / "state") as ledger:
            task = ledger.tasks[digest].task
        self.witness.note_moments(task, records, answer.array_records["moments"]["fedcdp:values"].data)
        return True

    def ask_at_once(self, asks: list[tuple[str, Round]]) -> None:
        threads = [threading.Thread(target=self.ask, args=each) for each in asks]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    @contextmanager
    def torn_write(self) -> Iterator[None]:
        """The next line that the ledger writes is cut short, and the process ends there."""
        armed, share, real = [True], self.case.random(), Journal._write

        def write(journal: Journal, file: int, content: bytes) -> None:
            if armed and content:
                armed.clear()
                os.ftruncate(file, journal._kept)  # as the journal does first: an earlier crash may have left an end there
                os.write(file, content[: int(share * len(content))])
                raise Crash
            real(journal, file, content)

        with mock.patch.object(Journal, "_write", write):
            yield

    def begin_with_0_1_0(self, task: Task, most: int) -> None:
        """A ledger as the first release wrote it, with `most` releases, or as many as its budget allowed."""
        before = len(self.witness.seen)
        for round_ in range(most):
            self.witness.note(task, 100, Round(round_, 0, None))
            if total_epsilon((release for _, release in self.witness.seen), DELTA / 2) > EPSILON:
                self.witness.seen.pop()
        written_by_0_1_0(self.base / "state", [(task, len(self.witness.seen) - before)])
        self.texts.append(task.to_json())

    def verdict(self) -> str | None:
        """What was released beyond the grant, or None."""
        total = total_epsilon((release for _, release in self.witness.seen), DELTA)
        if total > EPSILON:
            return f"ε = {total:.4g} was released in {len(self.witness.seen)} releases, but {EPSILON} granted"
        with ClientLedger.held(self.base / "state") as ledger:
            for digest, made in Counter(digest for digest, _ in self.witness.seen).items():
                accepted = ledger.tasks[digest]
                if made > len(accepted.releases) or accepted.left < 0:
                    return f"{made} releases were made for a task whose ledger has {len(accepted.releases)}"
        return None

    @property
    def total(self) -> float:
        return total_epsilon((release for _, release in self.witness.seen), DELTA)


@contextmanager
def watched(one: Client) -> Iterator[None]:
    """Replace the client's training by its witness."""

    class Watched(LocalTraining):
        def __init__(self, task: Task, network: nn.Module, data: Any, *rest: Any, **named: Any) -> None:
            super().__init__(task, network, data, *rest, **named)
            self.task, self.records = task, len(data)
            assert named["one_by_one"] == (one.witness.adversary == "example")

        def take_part(self, weights: Any, asked: Round, client: int = 0, members: int | None = None) -> Sent:  # noqa: ARG002
            crash, one.witness.crash = one.witness.crash, None
            if crash == "before":
                raise Crash
            one.witness.note(self.task, self.records, asked, members)
            if crash == "after":
                raise Crash
            update = {name: value[None] for name, value in WEIGHTS.items()}
            return Sent(update, torch.zeros(1) if is_counted(self.task.plan) else None)

    with mock.patch.object(client, "LocalTraining", Watched):
        yield
