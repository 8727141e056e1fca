"""Noised moments of the inputs in a deployment: released once, charged before they leave, the same as in a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedcdp.accounting.ledger import Ledger
from fedcdp.config.plan import SCALING
from fedcdp.deploy.protocol import messages, wire
from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.first_release import gather_moments
from fedcdp.deploy.protocol.grant import Grant, Reservation
from fedcdp.deploy.protocol.local_round import Round
from fedcdp.deploy.protocol.policy import ClientPolicy, effective_noise
from fedcdp.deploy.protocol.roster import Member
from fedcdp.deploy.protocol.server import serve
from fedcdp.deploy.protocol.strategy import Job, deployed
from fedcdp.deploy.protocol.task import constants_of
from fedcdp.errors import RunError
from fedcdp.files.tensors import load_tensors
from fedcdp.models.networks import build, with_scaling
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.scaling import set_standardisation
from fedcdp.training.trainer import train_experiment
from tests.support.independent.losses import gaussian_epsilon
from tests.support.local_grid import CLIENTS, OPEN, Killed, LocalGrid, Node, experiment, make_nodes, settings
from tests.support.one_client import send

Z = 7.0
NETWORK = with_scaling(build("mlp", (30,), 2), (30,))
UNCHANGED = (torch.zeros(30), torch.ones(30))
PLAIN = {"record_sampling": "partition", "local_steps": 1, "clip_mode": "flat"}


def wanted(**plan: Any) -> Any:
    made = experiment(**{"scaling_noise": Z} | plan)
    return replace(made, data=replace(made.data, scaling="private"))


def nodes_of(base: Path, policy: ClientPolicy = OPEN) -> dict[int, Node]:
    nodes = make_nodes(base, policy)
    for node in nodes.values():
        node.config["scaling"] = "public"
    return nodes


def one_client(base: Path, policy: ClientPolicy, **plan: Any) -> tuple[Node, str]:
    """A client that has accepted a task, and the task's digest."""
    chosen = deployed(wanted(**{"per_round": 1, "noise_multiplier": 2.0} | plan).plan, False)
    job = Job(plan=chosen, network=NETWORK, network_name="mlp", shape=(30,), classes=2, clients=1)
    node = nodes_of(base, policy)[100]
    answer = send(node, messages.publish(job.task()), messages.SUBSCRIBE).config_records["answer"]
    assert answer["accepts"] is True, answer["reason"]
    return node, job.task().digest()


def moments(node: Node, digest: str, attempt: int = 0) -> torch.Tensor | str:
    """What a client answers: its noised moments, or why not."""
    content = send(node, messages.ask_moments(digest, Round(SCALING, attempt, None)), messages.MOMENTS)
    if "refused" in content.config_records:
        return str(content.config_records["refused"]["reason"])
    return wire.decode_doubles(content.array_records["moments"], 60)


def train(node: Node, digest: str, round_: int = 0, standardised: Any = UNCHANGED) -> RecordDict:
    weights = wire.dense({name: p.detach() for name, p in NETWORK.named_parameters()})
    return send(node, messages.ask(digest, Round(round_, 0, None), weights, standardised), messages.TRAIN)


def released(base: Path, digest: str) -> list[tuple[int, int]]:
    with ClientLedger.held(base / "client-0") as ledger:
        return ledger.tasks[digest].releases


# The same as a simulation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [{}, {"method": "fed-sdp", "noise_at": "client"}], ids=["fed-cdp", "fed-sdp"])
def test_a_deployment_ends_in_the_simulators_model(plan: dict[str, Any], tmp_path: Path) -> None:
    run = train_experiment(wanted(**plan), tmp_path / "simulated", quiet=True)
    grid = LocalGrid(nodes_of(tmp_path))
    assert serve(grid, wanted(**plan), tmp_path / "deployed", settings(reproducible=True)).ended == "done"
    model, _ = load_tensors(tmp_path / "deployed" / "model.safetensors", "model-1")
    assert float((model["scaling.scale"] - 1).abs().max()) > 0.5
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(model[name], value, rtol=0, atol=1e-5)
    ours, theirs = (Ledger.open(tmp_path / name / "ledger.jsonl") for name in ("deployed", "simulated"))
    assert ours.rounds == theirs.rounds == (SCALING, 0, 1, 2)


@pytest.mark.parametrize("place", [CLIENTS, CLIENTS + 2, 2 * CLIENTS - 1, 2 * CLIENTS])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_server_gets_the_same_moments_again(place: int, when: str, tmp_path: Path) -> None:
    """In the release and right after it. Clients charge it once; the server, which cannot know, charges each attempt."""
    with pytest.raises(Killed):
        serve(LocalGrid(nodes_of(tmp_path), fail_at=(place, when)), wanted(), tmp_path / "run", settings())
    before = {path.name: path.read_bytes() for path in tmp_path.glob("client-*/moments-*")}
    grid = LocalGrid(nodes_of(tmp_path))
    assert serve(grid, wanted(), tmp_path / "run", settings()).ended == "done"
    for number in range(CLIENTS):
        with ClientLedger.held(tmp_path / f"client-{number}") as ledger:
            [accepted] = ledger.tasks.values()
            assert [round_ for round_, _ in accepted.releases].count(SCALING) == 1
    assert before.items() <= {path.name: path.read_bytes() for path in tmp_path.glob("client-*/moments-*")}.items()
    charged = Ledger.open(tmp_path / "run" / "ledger.jsonl").rounds
    assert charged.count(SCALING) == (1 if place == 2 * CLIENTS else 2)


def test_a_resumed_run_keeps_what_inputs_are_standardised_by(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        serve(LocalGrid(nodes_of(tmp_path), fail_at=(2 * CLIENTS + 4, "after")), wanted(), tmp_path / "run", settings())
    kept = RunDirectory(tmp_path / "run").load_scaling()
    grid = LocalGrid(nodes_of(tmp_path))
    assert serve(grid, wanted(), tmp_path / "run", settings()).ended == "done"
    assert not [message for message in grid.sent if message.metadata.message_type == messages.MOMENTS]
    again = LocalGrid(nodes_of(tmp_path))
    assert serve(again, wanted(), tmp_path / "run", settings()).ended == "done"  # all rounds are done: the model stays
    assert kept is not None
    model, _ = load_tensors(tmp_path / "run" / "model.safetensors", "model-1")
    assert torch.equal(model["scaling.mean"], kept[0])
    assert torch.equal(model["scaling.scale"], kept[1])


def test_a_budget_without_room_releases_nothing(tmp_path: Path) -> None:
    made = wanted(noise_multiplier=50.0)
    tight = replace(made, run=replace(made.run, max_epsilon=0.5))
    grid = LocalGrid(nodes_of(tmp_path))
    with pytest.raises(Exception, match="max_epsilon"):
        serve(grid, tight, tmp_path / "run", settings())
    assert not list(tmp_path.glob("client-*/moments-*"))


def test_too_few_moments_end_the_run(tmp_path: Path) -> None:
    nodes = nodes_of(tmp_path)
    grid = LocalGrid(nodes)
    for node in list(nodes)[:2]:
        nodes[node].app = _without_moments(nodes[node].app)
    outcome = serve(grid, wanted(), tmp_path / "run", settings())
    assert (outcome.ended, outcome.rounds) == ("too-few-clients", 0)
    assert "2 clients are too few: 4 are needed to standardise inputs" in outcome.sentence
    assert Ledger.open(tmp_path / "run" / "ledger.jsonl").rounds == (SCALING,)


def _without_moments(app: Any) -> Callable[..., Message]:
    def handle(message: Message, context: Any) -> Message:
        if message.metadata.message_type == messages.MOMENTS:
            return Message(messages.refuse("not today", final=False), reply_to=message)
        return app(message, context)

    return handle


# The client does not trust its server ---------------------------------------------------------------------------------


def test_asked_again_a_client_repeats_its_values_for_nothing(tmp_path: Path) -> None:
    node, digest = one_client(tmp_path, ClientPolicy(epsilon=5.0))
    first = moments(node, digest)
    assert isinstance(first, torch.Tensor)
    for attempt in (0, 1, 7):
        assert torch.equal(first, moments(node, digest, attempt))
    assert released(tmp_path, digest) == [(SCALING, 0)]
    train(node, digest)
    assert torch.equal(first, moments(node, digest, 9))  # also after a round
    (tmp_path / "client-0" / f"moments-{digest}.safetensors").unlink()
    assert "not stored here any more" in str(moments(node, digest))


def test_two_tasks_get_different_noise(tmp_path: Path) -> None:
    (node, one), (_, other) = (one_client(tmp_path, ClientPolicy(epsilon=9.0)) for _ in range(2))
    found = [moments(node, digest) for digest in (one, other)]
    assert all(isinstance(each, torch.Tensor) for each in found)
    assert (found[0] - found[1]).abs().min() > 0  # type: ignore[operator]


def test_nothing_leaves_before_the_charge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that dies between storing its values and charging them uses the stored ones later."""
    node, digest = one_client(tmp_path, ClientPolicy(epsilon=5.0))

    def dies(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(ClientLedger, "charge", dies)
        with pytest.raises(Killed):
            moments(node, digest)
    assert released(tmp_path, digest) == []
    stored, _ = load_tensors(tmp_path / "client-0" / f"moments-{digest}.safetensors", "moments-1")
    assert torch.equal(stored["sums"], moments(node, digest))  # type: ignore[arg-type]
    assert released(tmp_path, digest) == [(SCALING, 0)]


def test_moments_do_not_come_after_a_round(tmp_path: Path) -> None:
    node, digest = one_client(tmp_path, ClientPolicy(epsilon=5.0))
    assert "update" in train(node, digest).array_records
    assert "is stale" in str(moments(node, digest))
    assert not list((tmp_path / "client-0").glob("moments-*"))


@pytest.mark.parametrize(
    ("standardised", "said"),
    [
        (None, "there are no arrays standardised"),
        ((torch.zeros(29), torch.ones(29)), "has the shape [29], not [30]"),
        ((torch.full((30,), math.nan), torch.ones(30)), "tensor mean holds a value that is not finite"),
        ((torch.zeros(30), torch.full((30,), math.inf)), "tensor scale holds a value that is not finite"),
    ],
)
def test_a_round_needs_a_mean_and_a_scale(standardised: Any, said: str, tmp_path: Path) -> None:
    node, digest = one_client(tmp_path, ClientPolicy(epsilon=5.0))
    moments(node, digest)
    assert said in train(node, digest, standardised=standardised).config_records["refused"]["reason"]
    assert released(tmp_path, digest) == [(SCALING, 0)]


def test_a_huge_scale_sends_nothing_that_is_not_clipped(tmp_path: Path) -> None:
    node, digest = one_client(tmp_path, OPEN, noise_multiplier=1e-6, **PLAIN)
    content = train(node, digest, standardised=(torch.zeros(30), torch.full((30,), 1e38)))
    update = wire.decode(content.array_records["update"], _layout(), may_be_sparse=True)
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in update.values()))
    assert norm <= 0.05 * 4.0 * 1.001  # learning rate times the clip bound


def _layout() -> Any:
    from fedcdp.files.tree import Layout

    return Layout.of(NETWORK)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"moments": ConfigRecord({"task": 3, "attempt": 0})}),
        RecordDict({"moments": ConfigRecord({"task": "x", "attempt": "0"})}),
        RecordDict({"moments": ConfigRecord({"task": "0" * 32, "attempt": 0})}),
    ],
)
def test_other_requests_get_nothing(content: RecordDict, tmp_path: Path) -> None:
    node, digest = one_client(tmp_path, ClientPolicy(epsilon=5.0))
    answer = send(node, content, messages.MOMENTS)
    assert not answer.array_records
    assert released(tmp_path, digest) == []


def test_a_task_without_private_scaling_has_no_moments(tmp_path: Path) -> None:
    chosen = deployed(experiment(per_round=1, noise_multiplier=2.0).plan, False)
    job = Job(plan=chosen, network=build("mlp", (30,), 2), network_name="mlp", shape=(30,), classes=2, clients=1)
    node, digest = nodes_of(tmp_path, ClientPolicy(epsilon=5.0))[100], job.task().digest()
    send(node, messages.publish(job.task()), messages.SUBSCRIBE)
    assert moments(node, digest) == "the task does not standardise inputs"


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    node, digest = one_client(tmp_path, ClientPolicy(epsilon=5.0))
    moments(node, digest)
    path = tmp_path / "client-0" / f"moments-{digest}.safetensors"
    path.write_bytes(path.read_bytes()[:-8] + b"12345678")
    assert isinstance(moments(node, digest), str)


# What it costs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adversary", "unit", "share"), [("server", "record", 1), ("example", "record", 20), ("server", "client", 400)]
)
def test_the_first_reservation_pays_for_the_moments(adversary: str, unit: str, share: int) -> None:
    """Against a closed form: all releases are Gaussian here, and their precisions add up."""
    chosen = deployed(wanted(noise_multiplier=40.0, **PLAIN).plan, False)
    task = Job(plan=chosen, network=NETWORK, network_name="mlp", shape=(30,), classes=2, clients=3).task()
    grant, times = Grant(1.0, 1e-5, adversary, unit), 5
    without = Reservation(task, 20, 1, times)
    z = {"server": 40 * 2.0, "example": 40.0}[adversary]  # noise on each of B = 4 examples of a step
    z /= 4 if unit == "client" else 1
    for moments_too, precision in ((False, times / z**2), (True, times / z**2 + share / Z**2)):
        expected = gaussian_epsilon(math.sqrt(precision), 0.5e-5)
        found = grant.cost(replace(without, moments=moments_too))
        assert expected <= found * (1 + 1e-9)
        assert found == pytest.approx(expected, rel=2e-3)


def test_a_client_reserves_the_moments_once_and_keeps_to_its_budget(tmp_path: Path) -> None:
    node, digest = one_client(tmp_path, ClientPolicy(epsilon=2.0, participations=2), noise_multiplier=40.0, **PLAIN)
    moments(node, digest)
    with ClientLedger.held(tmp_path / "client-0") as ledger:
        [block] = ledger.reservations()
    assert (block.moments, block.participations) == (True, 2)
    for round_ in (0, 1):
        assert "update" in train(node, digest, round_).array_records
    assert "at most 2 participations" in train(node, digest, 2).config_records["refused"]["reason"]
    node.app = client_app(policy=ClientPolicy(epsilon=2.0))
    assert "update" in train(node, digest, 2).array_records
    with ClientLedger.held(tmp_path / "client-0") as ledger:
        assert [each.moments for each in ledger.reservations()] == [True, False]


def test_a_budget_that_the_moments_exceed_refuses_the_task(tmp_path: Path) -> None:
    alone = gaussian_epsilon(1 / Z, 0.5e-5)
    chosen = deployed(wanted(noise_multiplier=400.0, per_round=1, **PLAIN).plan, False)
    job = Job(plan=chosen, network=NETWORK, network_name="mlp", shape=(30,), classes=2, clients=1)
    for epsilon, accepts in ((0.98 * alone, False), (1.05 * alone, True)):
        node = nodes_of(tmp_path / str(accepts), ClientPolicy(epsilon=epsilon))[100]
        answer = send(node, messages.publish(job.task()), messages.SUBSCRIBE).config_records["answer"]
        assert answer["accepts"] is accepts


def test_least_noise_of_a_policy_counts_the_moments() -> None:
    plan = wanted(noise_multiplier=40.0).plan
    assert (effective_noise(plan), effective_noise(plan.but(scaling_noise=None))) == (Z, 40.0)


def test_a_ledger_without_the_reservation_is_damaged(tmp_path: Path) -> None:
    from tests.support.ledgers import written_by_0_1_0

    chosen = deployed(wanted(per_round=1).plan, False)
    job = Job(plan=chosen, network=NETWORK, network_name="mlp", shape=(30,), classes=2, clients=1)
    written_by_0_1_0(tmp_path, [(job.task(), 1)])
    with pytest.raises(RunError, match="has no reservation"), ClientLedger.held(tmp_path):
        pass


def test_constants_do_not_depend_on_what_is_released() -> None:
    network = with_scaling(build("mlp", (30,), 2), (30,))
    before = constants_of(network)
    set_standardisation(network, torch.full((30,), 0.3), torch.full((30,), 2.0))
    assert constants_of(network) == before


# The server does not trust its clients --------------------------------------------------------------------------------


def _sums(factor: float, length: int = 60, kind: str = "<f8") -> RecordDict:
    values = torch.full((length,), factor, dtype=torch.float64).numpy().astype(kind)
    return RecordDict({
        "moments": ArrayRecord({"fedcdp:values": Array(values)}), "about": ConfigRecord({"task": "t", "attempt": 0}),
    })  # fmt: skip


class OneReply(LocalGrid):
    """A grid whose only node answers with this."""

    def __init__(self, content: RecordDict) -> None:
        super().__init__({100: Node(lambda message, _: Message(content, reply_to=message), {})})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "used"),
    [
        (_sums(20.0), 1),
        (_sums(5e3), 0),
        (_sums(math.nan), 0),
        (_sums(math.inf), 0),
        (_sums(1.0, length=59), 0),
        (_sums(1.0, kind="<f4"), 0),
        (RecordDict({**_sums(1.0), "about": ConfigRecord({"task": "u", "attempt": 0})}), 0),
        (RecordDict({**_sums(1.0), "about": ConfigRecord({"task": "t", "attempt": 1})}), 0),
        (RecordDict({"about": ConfigRecord({"task": "t", "attempt": 0})}), 0),
        (RecordDict(), 0),
        (messages.refuse("no", final=True), 0),
    ],
)
def test_moments_that_no_client_sends_are_left_out(content: RecordDict, used: int) -> None:
    from fedcdp.accounting.budget import Releases

    releases = Releases(1)
    roster = (Member(0, 100, 20, "0" * 32),)
    found, answered = gather_moments(OneReply(content), "t", wanted().plan, 30, roster, releases, 0.2)
    assert (answered, found is not None, releases.rounds) == (used, bool(used), (SCALING,))
