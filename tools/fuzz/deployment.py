"""Targets: a deployment's files, and messages on the wire."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedcdp.config.experiment import assemble
from fedcdp.config.plan import Plan
from fedcdp.data.table_schema import TableSchema
from fedcdp.deploy.protocol import messages, wire
from fedcdp.deploy.protocol.admission import check_size, is_counted
from fedcdp.deploy.protocol.client_ledger import ClientLedger, Summed
from fedcdp.deploy.protocol.failures import Failures
from fedcdp.deploy.protocol.key_rotation import follow, sign_rotation, store_rotations, stored_rotations
from fedcdp.deploy.protocol.known_nodes import NODE_KEY_BYTES, KnownNode, KnownNodes, node_key_of, read_identity
from fedcdp.deploy.protocol.local_round import Round, network_for, records_of
from fedcdp.deploy.protocol.policy import ClientPolicy, Facts
from fedcdp.deploy.protocol.roster import Subscribing, load_roster
from fedcdp.deploy.protocol.sum_keys import own_key, sign_key, store_peers, stored_key, stored_peers
from fedcdp.deploy.protocol.task import Task, tensors_of
from fedcdp.deploy.protocol.versions import spoken
from fedcdp.deploy.site.directory import Site
from fedcdp.deploy.site.exporter import ALL_METRICS, Watched
from fedcdp.deploy.site.local_deployment import Follower
from fedcdp.deploy.site.operate_file import OperateSettings
from fedcdp.errors import RunError, WireError
from fedcdp.files.tree import Layout
from fedcdp.models.networks import build
from tools.fuzz.mutations import HOSTILE_NUMBERS, HOSTILE_TEXTS, as_json, as_toml, mutate_bytes, mutate_value
from tools.fuzz.runs import SMALL, _changed_lines, rechained

Attempt = Callable[[Random, Path], None]
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
LAYOUT = Layout.of(build("mlp", (30,), 2))
PLAN = Plan(rounds=10, per_round=4, local_steps=5, batch_size=5, secure_noise=True)
TASK = Task(run="0" * 32, shape=(30,), classes=2, network="mlp", activation=None, tensors=tensors_of(LAYOUT), constants="",
            plan=PLAN, smallest_cohort=2)  # fmt: skip
SUM_PLAN = PLAN.but(noise="sum", secure_aggregation=True, local_steps=1)
SUM_TASK = replace(TASK, plan=SUM_PLAN)
SIGNED = sign_key(generate_private_key(SECP384R1()), SUM_TASK, X25519PrivateKey.generate())
_OLD_KEY = generate_private_key(SECP384R1())
ROTATION = sign_rotation(_OLD_KEY, node_key_of(generate_private_key(SECP384R1()).public_key()))
FACTS = Facts(100, (30,), 2, tensors_of(LAYOUT), "")
FIRST = Round(0, 0, None)


def site(_place: Path) -> Attempt:
    """`deployment.toml`, and the scripts and addresses derived from it."""
    from fedcdp.deploy.site.writer import node_script, server_scripts

    sound = {"nodes": 2, "host": "127.0.0.1", "port": 9443}

    def attempt(case: Random, place: Path) -> None:
        hostile = mutate_bytes(case, as_toml(sound)) if case.random() < 0.4 else as_toml(mutate_value(case, sound))
        (place / "deployment.toml").write_bytes(hostile)
        there = Site(place)
        settings = there.require()
        there.nodes(settings.nodes)
        written = "".join(server_scripts(settings).values()) + node_script(settings, 1) + settings.to_toml()
        if any(sign in settings.host for sign in ";&|<>(){}!*?#\x1b\n~^%"):
            raise AssertionError(f"a script would hold {settings.host!r}: {written[:0]}")

    return attempt


def policy(place: Path) -> Attempt:
    """A client's policy, and its decisions."""
    sound = {"epsilon": 2.0, "delta": 1e-5, "adversary": "server", "unit": "record", "methods": ["fed-cdp"],
             "smallest_noise_multiplier": 0.5, "smallest_cohort": 1, "allow_reproducible": False,
             "allow_custom_network": False}  # fmt: skip
    state = place / "policy-state"

    def attempt(case: Random, where: Path) -> None:
        path = where / "policy.toml"
        path.write_bytes(mutate_bytes(case, as_toml(sound)) if case.random() < 0.4 else as_toml(mutate_value(case, sound)))
        read = ClientPolicy.read(path)
        read.objection(TASK)
        if case.random() < 0.05:
            with ClientLedger.held(state) as ledger:
                read.decide(TASK, FACTS, ledger)

    return attempt


def roster(_place: Path) -> Attempt:
    """The roster and the outcome of a run, as a server wrote them."""
    clients = {
        "clients": [{"number": n, "node": 10**18 + n, "records": 50, "name": f"{n:032x}", "client": "a"} for n in range(3)]
    }
    outcome = {"ended": "done", "rounds": 3, "sentence": "all rounds are done", "warning": "no better than guessing"}
    experiment, failures = assemble(SMALL), {"failures": {"0": 1, "12": 2}}

    def attempt(case: Random, place: Path) -> None:
        (place / "failures.json").write_bytes(
            mutate_bytes(case, as_json(failures)) if case.random() < 0.4 else as_json(mutate_value(case, failures))
        )
        with suppress(RunError):
            if any(type(client) is not int or client < 0 for client in Failures(place / "failures.json").too_many()):
                raise AssertionError("a client that cannot exist was believed")
        hostile = mutate_bytes(case, as_json(clients)) if case.random() < 0.4 else as_json(mutate_value(case, clients))
        (place / "outcome.json").write_bytes(
            mutate_bytes(case, as_json(outcome)) if case.random() < 0.4 else as_json(mutate_value(case, outcome))
        )
        Follower(place, experiment).ended()
        Follower(place, experiment).warning()
        path = place / "clients.json"
        path.write_bytes(hostile)
        for member in load_roster(path):
            if (
                type(member.records) is not int
                or member.records < 1
                or type(member.node) is not int
                or len(member.name) != 32
            ):
                raise AssertionError(f"{member} was believed")

    return attempt


def task(place: Path) -> Attempt:
    """A published task, up to the network that a client would build for it."""
    table = TableSchema((("age", (0.0, 110.0)), ("sex", ("f", "m")), ("bmi", None)), (("ill", None),), ("no", "yes"))
    sound = json.loads(replace(TASK, learning_task="binary", table=table).to_json())
    own = replace(FACTS, learning_task="binary", classes=1, table=table)
    state = place / "task-state"

    def attempt(case: Random, _where: Path) -> None:
        hostile = mutate_bytes(case, as_json(sound)) if case.random() < 0.3 else as_json(mutate_value(case, sound))
        read = messages.read_task(RecordDict({"task": ConfigRecord({"task": hostile.decode("utf-8", "replace")})}))
        read.digest()
        careless = ClientPolicy(epsilon=float("inf"), methods=("fed-cdp", "fed-sdp", "fed-cdp-decay", "dssgd", "nonprivate"))
        if careless.objection(read) is None:
            network_for(read)
        if case.random() < 0.1:
            with ClientLedger.held(state) as ledger:
                ClientPolicy().decide(read, own, ledger)

    return attempt


def node_table(_place: Path) -> Attempt:
    """A client's table, under hostile options of its node configuration."""
    sound = {"data": "records.csv", "label-column": "ill", "task": "binary", "categories": "sex=f|m", "classes": "no|yes",
             "client-column": "site", "client": "a", "missing": "indicator", "delimiter": "comma",
             "drop-columns": "id"}  # fmt: skip
    table = b"site,id,age,sex,ill\na,1,40,f,no\nb,2,50,m,yes\na,3,60,x,yes\n"

    def attempt(case: Random, where: Path) -> None:
        (where / "records.csv").write_bytes(table if case.random() < 0.7 else mutate_bytes(case, table))
        config = mutate_value(case, sound) if case.random() < 0.8 else sound
        config = (config if isinstance(config, dict) else {}) | {"data": str(where / "records.csv")}
        found, _ = records_of(None, SimpleNamespace(node_config=config), TASK)
        if not found.tensor.isfinite().all():
            raise AssertionError("an input that is not finite was believed")

    return attempt


def known_nodes(_place: Path) -> Attempt:
    """A client's list of known nodes, and its node key."""
    from fedcdp.deploy.site.certificates import new_node_key

    pair = new_node_key()
    sound = {"node": [{"name": "a", "key": pair.public.decode(), "made_by": "owner"}]}

    def attempt(case: Random, where: Path) -> None:
        path, key = where / "roster.toml", where / "node.key"
        key.write_bytes(mutate_bytes(case, pair.private))
        if case.random() < 0.3:
            read_identity(key)
        path.write_bytes(mutate_bytes(case, as_toml(sound)) if case.random() < 0.4 else as_toml(mutate_value(case, sound)))
        for node, entry in KnownNodes.read(path).nodes.items():
            if len(node) != NODE_KEY_BYTES or not entry.name.isprintable():
                raise AssertionError(f"{entry} was believed")

    return attempt


def run_keys(place: Path) -> Attempt:
    """The files of run keys in a client's state directory."""
    state = place / "sum-state"
    state.mkdir()
    own_key(state, SUM_TASK)
    store_peers(state, SUM_TASK, [SIGNED])
    sound = {path: path.read_bytes() for path in state.iterdir()}

    def attempt(case: Random, _where: Path) -> None:
        for path, content in sound.items():
            path.write_bytes(mutate_bytes(case, content))
        stored_key(state, SUM_TASK)
        if any(len(node) != NODE_KEY_BYTES for node in stored_peers(state, SUM_TASK)):
            raise AssertionError("a key of another length was believed")

    return attempt


def sum_ledger(place: Path) -> Attempt:
    """A client's ledger with shares of sums."""
    state, digest = place / "sum-ledger", SUM_TASK.digest()
    with ClientLedger.held(state) as ledger:
        ledger.accept(SUM_TASK, 100)
        ledger.reserve(digest, 1, 9)
        for round_ in range(3):
            ledger.charge(digest, round_, 0, 4.0, Summed(4, "0" * 64))
    path = state / "ledger.jsonl"
    content = path.read_bytes()
    lines = [json.loads(line) for line in content.splitlines()]

    def attempt(case: Random, _where: Path) -> None:
        path.write_bytes(mutate_bytes(case, content) if case.random() < 0.4 else rechained(_changed_lines(case, lines)))
        with ClientLedger.held(state) as ledger:
            for each in ledger.tasks.values():
                if len(each.sums) != len(each.releases) or any(type(one.members) is not int for one in each.sums):
                    raise AssertionError("a share without a context was believed")

    return attempt


def sum_messages(_place: Path) -> Attempt:
    """The messages of a secure sum, each parsed by its receiver."""
    log, digest = logging.getLogger("flwr.fedcdp"), SUM_TASK.digest()
    node = SIGNED.member.node

    def read(case: Random) -> None:
        kind = case.randrange(5)
        signed = [mutate_bytes(case, SIGNED.to_bytes()) if case.random() < 0.5 else SIGNED.to_bytes() for _ in range(2)]
        if kind == 0:
            rotated = [mutate_bytes(case, ROTATION.to_bytes()) if case.random() < 0.5 else ROTATION.to_bytes()]
            about = {"task": digest, "keys": signed, "rotations": rotated}
            _, keys, rotations = messages.read_keys(_some({"keys": _config(case, about)}, case))
            if any(each.holds() and (each.old, each.new) != (ROTATION.old, ROTATION.new) for each in rotations):
                raise AssertionError("a rotation that nobody signed was believed")
            if any(each.holds(SUM_TASK) and each.member != SIGNED.member for each in keys):
                raise AssertionError("a key that nobody signed was believed")
        elif kind == 1:
            others = [mutate_bytes(case, node) if case.random() < 0.5 else node for _ in range(2)]
            members = messages.read_members(_some({"roster": _config(case, {"members": others})}, case))
            if len(set(members)) != len(members):
                raise AssertionError("a node twice was believed")
        elif kind == 2:
            about = {"task": digest, "round": 0, "attempt": 0}
            parts = {"share": _arrays(case, case.random() < 0.5), "about": _config(case, about)}
            if case.random() < 0.5:
                parts["share"] = wire.words(np.zeros(case.choice((6, 6, 5, 0)), np.uint64))
            words = messages.read_share(_reply(_some(parts, case)), digest, FIRST, 6)
            if words.shape != (6,) or words.dtype != np.uint64:
                raise AssertionError("a share of another size was believed")
        elif kind == 3:
            messages.read_kept(_reply(_some({"kept": _config(case, {"keys": 1, "nodes": [node]})}, case)))
            messages.read_ended(_some({"ended": _config(case, {"task": digest})}, case))
        else:
            answer = {"accepts": True, "reason": "accepted", "records": 100, "member": "0" * 32, "number": -1,
                      "key": signed[0]}  # fmt: skip
            content = _some({"answer": _config(case, answer), "versions": _config(case, spoken())}, case)
            Subscribing(_NoGrid(), SUM_TASK)._hear(_reply(content))  # type: ignore[arg-type]

    def attempt(case: Random, _where: Path) -> None:
        with _logged_to_the_console(log):
            read(case)

    return attempt


def rotated_keys(place: Path) -> Attempt:
    """The rotations of node keys that a client keeps, and its list after them."""
    state = place / "rotations"
    state.mkdir()
    store_rotations(state, [ROTATION])
    path = state / "rotated-keys"
    content, known = path.read_bytes(), KnownNodes({ROTATION.old: KnownNode("a", ROTATION.old)})

    def attempt(case: Random, _where: Path) -> None:
        path.write_bytes(mutate_bytes(case, content))
        if not follow(known, stored_rotations(state)).nodes.keys() <= {ROTATION.old, ROTATION.new}:
            raise AssertionError("a key that nobody signed was believed")

    return attempt


def marked_ledger(place: Path) -> Attempt:
    """The mark of a client's ledger: whatever it says, a ledger that has lost lines is not used."""
    state, mark = place / "marked-state", place / "marked-elsewhere"
    with ClientLedger.held(state, mark) as ledger:
        ledger.accept(TASK, 100)
    sound = json.loads(mark.read_bytes())

    def attempt(case: Random, _where: Path) -> None:
        mark.write_bytes(mutate_bytes(case, as_json(sound)) if case.random() < 0.4 else as_json(mutate_value(case, sound)))
        with ClientLedger.held(state, mark) as ledger:
            if len(ledger.digests) != 2 or ledger.tasks.keys() != {TASK.digest()}:
                raise AssertionError("another ledger was opened")

    return attempt


def monitored(_place: Path) -> Attempt:
    """What a process that is watched reads: its figures and its settings."""
    figures = {"hidden": False, "figures": {"fedcdp_rounds": {"": 3.0}, "fedcdp_left_out_total": {"late": 2.0}}}
    settings = {"listen": "127.0.0.1:9401", "log-format": "text", "log-file": "", "log-bytes": 10_000_000, "log-files": 5}

    def attempt(case: Random, where: Path) -> None:
        path = where / "monitor.json"
        path.write_bytes(
            mutate_bytes(case, as_json(figures)) if case.random() < 0.4 else as_json(mutate_value(case, figures))
        )
        for name, labels, value in Watched("node", "1", path).series():
            if name not in ALL_METRICS or labels.keys() - set(ALL_METRICS[name].labels) or not math.isfinite(value):
                raise AssertionError(f"{name} with {labels} was believed")
        (where / "operate.toml").write_bytes(
            mutate_bytes(case, as_toml(settings)) if case.random() < 0.4 else as_toml(mutate_value(case, settings))
        )
        OperateSettings.read(where)

    return attempt


def client_ledger(place: Path) -> Attempt:
    """A client's own ledger."""
    state = place / "client-state"
    with ClientLedger.held(state) as ledger:
        accepted = ledger.accept(TASK, 100)
        ledger.reserve(accepted.task.digest(), 1, 5)
        for round_ in range(3):
            ledger.charge(accepted.task.digest(), round_, 0, 4.0)
    path = state / "ledger.jsonl"
    content = path.read_bytes()
    lines = [json.loads(line) for line in content.splitlines()]

    def attempt(case: Random, _where: Path) -> None:
        path.write_bytes(mutate_bytes(case, content) if case.random() < 0.4 else rechained(_changed_lines(case, lines)))
        with ClientLedger.held(state) as ledger:
            ledger.reservations()

    return attempt


class _Captured(logging.Handler):
    """Prints log messages to the console, to be checked for control characters."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage())


@contextmanager
def _logged_to_the_console(log: logging.Logger) -> Iterator[None]:
    """Only within this block, at the lowest level; a logger belongs to the whole process."""
    before = log.handlers, log.propagate, log.level
    log.handlers, log.propagate = [_Captured()], False
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.handlers, log.propagate = before[:2]
        log.setLevel(before[2])


class _NoGrid:
    """A grid that sends nothing."""


def _config(case: Random, sound: dict[str, Any]) -> ConfigRecord:
    """A record with some fields changed to other values that Flower supports."""
    fields: dict[str, Any] = dict(sound)
    for _ in range(case.choice((0, 1, 1, 2))):
        name = case.choice((*sound, "other"))
        numbers = [each for each in HOSTILE_NUMBERS if not isinstance(each, int) or -(2**63) <= each < 2**63]
        texts = [each for each in HOSTILE_TEXTS if "\ud800" not in each]
        fields[name] = case.choice((*numbers, *texts, True, False, b"\xff\x1b", [1, 2], ["\x1b[2J"], [], sound.get(name, 0)))
        if case.random() < 0.2:
            del fields[name]
    return ConfigRecord(fields)


def _arrays(case: Random, sparse: bool) -> ArrayRecord:
    """The arrays of a tree, some of them invalid."""
    tree = LAYOUT.unflatten(torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(case.randrange(99))))
    if sparse:
        tree = {name: torch.where(value.abs() > 2, value, torch.zeros(())) for name, value in tree.items()}
    sound = dict(wire.sparse(tree, LAYOUT) if sparse else wire.dense(tree))
    record = dict(sound)
    for _ in range(case.choice((0, 1, 1, 2))):
        name = case.choice([each for each in record if each in sound])
        array = record[name]
        act = case.randrange(6)
        if act == 0:
            array = Array(array.dtype, array.shape, array.stype, mutate_bytes(case, array.data))
        elif act == 1:
            kind = case.choice(("<f4", "<f8", "<u4", "|u1", "|O", "<i8", "<U4"))
            shape = case.choice(((), (0,), (5,), (2**31,), (10**12,), (3, 3)))
            header = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
            header = mutate_bytes(case, header) if case.random() < 0.3 else header
            size = len(header).to_bytes(2, "little") if len(header) < 65536 else b"\xff\xff"
            array = Array(
                "float32", (1,), "numpy.ndarray", b"\x93NUMPY\x01\x00" + size + header + bytes(case.choice((0, 20, 400)))
            )
        elif act == 2:
            values = np.array(sound[name].numpy())
            if values.size:
                odd = (0, 1, 255) if values.dtype.kind == "u" else (np.nan, np.inf, 1e38, -1e38, 0.0)
                values.flat[case.randrange(values.size)] = case.choice(odd)
            array = Array(values)
        elif act == 3:
            array = Array(array.dtype, array.shape, case.choice(HOSTILE_TEXTS[:-8]), array.data)
        elif act == 4:
            array = Array(np.zeros(case.choice(((), (0,), (1,), (10_000,))), case.choice(("f4", "f8", "u4", "u1", "i8"))))
        record[name] = array
        if case.random() < 0.1:
            record[case.choice(HOSTILE_TEXTS[:14])] = record.pop(name)
    return ArrayRecord(record)


def wire_arrays(_place: Path) -> Attempt:
    """Weights and updates, dense and sparse."""

    def attempt(case: Random, _where: Path) -> None:
        wire.decode(_arrays(case, case.random() < 0.5), LAYOUT, may_be_sparse=case.random() < 0.7)

    return attempt


def flower_messages(_place: Path) -> Attempt:
    """All messages, each parsed by its receiver, and what a server logs about them."""
    log = logging.getLogger("flwr.fedcdp")
    digest = TASK.digest()

    def read(case: Random) -> None:
        counted = Plan(**PLAN.written() | {"clip": "quantile(0.5, 4)"})
        plan = counted if case.random() < 0.3 else PLAN
        kind = case.randrange(6)
        try:
            if kind == 0:
                about = {"task": digest, "round": 0, "attempt": 0, "clip": 4.0}
                _, asked, arrays = messages.read_ask(
                    _some({"weights": _arrays(case, False), "round": _config(case, about)}, case)
                )
                wire.decode(arrays, LAYOUT)
                if type(asked.number) is not int or type(asked.attempt) is not int:
                    raise AssertionError("a round that is no number was believed")
            elif kind == 1:
                answer = {"accepts": True, "reason": "accepted", "records": 100, "member": "0" * 32, "number": -1,
                          "client": "charite"}  # fmt: skip
                content = _some({"answer": _config(case, answer)}, case)
                Subscribing(_NoGrid(), TASK)._hear(_reply(content))  # type: ignore[arg-type]
            elif kind == 2:
                messages.read_moments_request(_some({"moments": _config(case, {"task": digest, "attempt": 0})}, case))
                messages.read_standardised(_some({"standardised": _arrays(case, False)}, case), (3,))
            elif kind == 3:
                about = {"task": digest, "attempt": 0}
                parts = {"moments": _arrays(case, case.random() < 0.5), "about": _config(case, about)}
                sums = messages.read_moments(_reply(_some(parts, case)), digest, FIRST, 6)
                if sums.shape != (6,) or not bool(torch.isfinite(sums).all()):
                    raise AssertionError("moments of another length, or not finite, were believed")
            else:
                about = {"task": digest, "round": 0, "attempt": 0} | ({"count": 1.5} if is_counted(plan) else {})
                parts = {"update": _arrays(case, case.random() < 0.5), "about": _config(case, about)}
                if case.random() < 0.2:
                    parts["refused"] = _config(case, {"reason": "the budget is spent", "final": True})
                sent = messages.read_reply(_reply(_some(parts, case)), digest, FIRST, LAYOUT, is_counted(plan))
                check_size(sent, plan, LAYOUT, FIRST, 100)
        except WireError as error:
            log.warning("left out: %s", error)  # as the strategy logs it
            raise

    def attempt(case: Random, _where: Path) -> None:
        with _logged_to_the_console(log):
            read(case)

    return attempt


def _some(parts: dict[str, Any], case: Random) -> RecordDict:
    if case.random() < 0.1:
        del parts[case.choice(tuple(parts))]
    return RecordDict(parts)


def _reply(content: RecordDict) -> Message:
    asked = Message(RecordDict(), 1, messages.TRAIN)
    return Message(content, reply_to=asked)


TARGETS: dict[str, Callable[[Path], Attempt]] = {
    "deployment.toml": site,
    "policy.toml": policy,
    "clients.json, outcome.json": roster,
    "task": task,
    "node table": node_table,
    "client ledger": client_ledger,
    "mark of a ledger": marked_ledger,
    "known nodes": known_nodes,
    "rotated keys": rotated_keys,
    "monitored figures": monitored,
    "run keys": run_keys,
    "ledger of sums": sum_ledger,
    "messages of sums": sum_messages,
    "wire arrays": wire_arrays,
    "Flower messages": flower_messages,
}
