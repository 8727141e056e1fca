"""What a client accepts, and what it declines, in a table; its budget; its task."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import Usage, state
from fedcdp.config.plan import MethodName
from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.grant import Grant, Reservation, most_participations, wanted_participations
from fedcdp.deploy.protocol.policy import ClientPolicy, Facts, effective_noise
from fedcdp.deploy.protocol.task import Task, constants_of
from fedcdp.errors import FedcdpError, PlanError, PolicyError, RefusedError, TaskError
from fedcdp.models.networks import build
from tests.support.ledgers import written_by_0_1_0
from tests.support.small_task import TENSORS, task

ALL = get_args(MethodName)
FACTS = Facts(records=100, shape=(3,), classes=2, tensors=TENSORS, constants="")
NO_LIMIT = {"epsilon": math.inf, "methods": ALL}
TABLE: dict[str, tuple[dict[str, Any], Task, Facts, str | None]] = {
    "what fits": ({}, task(), FACTS, None),
    "a method that is not allowed": ({}, task(method="nonprivate"), FACTS, "method nonprivate is not allowed here"),
    "no privacy, but a limit": ({"methods": ALL}, task(method="nonprivate"), FACTS, "no finite ε .*nothing is noised"),
    "no privacy, and no limit": (NO_LIMIT, task(method="dssgd"), FACTS, None),
    "Fed-SDP, raw at the server": ({"unit": "client"}, task(method="fed-sdp"), FACTS, "no finite ε .* raw updates"),
    "Fed-SDP, raw at the server, which is trusted": ({"adversary": "model", "unit": "client", "epsilon": 8.0},
                                                     task(method="fed-sdp"), FACTS, None),
    "Fed-SDP at the client": ({"unit": "client"}, task(method="fed-sdp", noise_at="client"), FACTS, None),
    "type-2 under batch noise": ({"adversary": "example"}, task(noise="batch"), FACTS, "single gradients are only clipped"),
    "type-2": ({"adversary": "example"}, task(noise_multiplier=50.0), FACTS, None),
    "a row that there is not": ({"adversary": "example", "unit": "client"}, task(), FACTS, "has no row example/client"),
    "no noise": ({}, task(noise_multiplier=0.0), FACTS, "clipping alone protects nothing"),
    "little noise": ({"smallest_noise_multiplier": 1.0}, task(noise_multiplier=0.5), FACTS, "0.5, is below"),
    "more than is granted": ({"epsilon": 0.01}, task(), FACTS, "the budget of ε = 0.01 against server"),
    "a small cohort": ({"smallest_cohort": 3}, task(), FACTS, "as small as 2; at least 3"),
    "a published seed": ({}, task(reproducible=True), FACTS, "can subtract the noise"),
    "a published seed, for a test": ({"allow_reproducible": True}, task(reproducible=True), FACTS, None),
    "code by name": ({}, task(network="os:system"), FACTS, "by name is not allowed here"),
    "code by name, allowed": ({"allow_custom_network": True}, task(network="my:net"), FACTS, None),
    "another shape": ({}, task(), replace(FACTS, shape=(4,)), r"the shape \[4\], not \[3\]"),
    "more classes": ({}, task(), replace(FACTS, classes=3), "some label here"),
    "fewer classes": ({}, task(), replace(FACTS, classes=1), None),
    "another network": ({}, task(), replace(FACTS, tensors={"0.weight": (4, 3)}), "other tensors"),
    "another frozen layer": ({}, task(), replace(FACTS, constants="ab"), "frozen"),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "published", "facts", "reason"), TABLE.values(), ids=TABLE.keys())
def test_a_client_accepts_or_says_why_not(
    policy: dict[str, Any], published: Task, facts: Facts, reason: str | None, tmp_path: Path
) -> None:
    with ClientLedger.held(tmp_path) as ledger:
        answer = ClientPolicy(**policy).decide(published, facts, ledger)
    assert answer.accepts == (reason is None)
    if reason is not None:
        assert re.search(reason, answer.reason), answer.reason
        assert answer.records == 0
    else:
        assert answer.records == 100


def _cost(grant: Grant, times: int, place: int = 1, published: Task | None = None) -> float:
    return grant.cost(Reservation(published or task(), 100, place, times))


@pytest.mark.parametrize(("adversary", "unit"), [("server", "record"), ("example", "record"), ("server", "client")])
def test_the_cost_of_a_task_is_what_the_statement_says_of_so_many_participations(adversary: str, unit: str) -> None:
    plan = task().plan.but(delta=0.5e-5)
    row = state(plan, Population(50, 100, 1, 2), usage=Usage(tuple(range(10)), (7,))).row(adversary, unit)
    assert _cost(Grant(1.0, 1e-5, adversary, unit), 7) == pytest.approx(row.epsilon_used, rel=1e-9)


def test_the_choice_of_clients_is_not_counted_on() -> None:
    server = task(method="fed-sdp")
    usage = Usage(tuple(range(10)), (10,))
    worst = state(server.plan.but(delta=0.5e-5), Population(4, 100, 1, 2), usage=usage).row("model", "client")
    assert _cost(Grant(1.0, 1e-5, "model", "client"), 10, published=server) == pytest.approx(worst.epsilon_worst, rel=1e-9)


def test_repeats_are_counted_at_the_least_noise_of_any_round() -> None:
    decaying = {"method": "fed-cdp-decay", "noise_follows_clip": False, "noise_multiplier": 2.0}
    grant = Grant(1.0, 1e-5)
    fixed = _cost(grant, 5, published=task(noise_multiplier=2.0 / 1.1))
    assert _cost(grant, 5, published=task(**decaying)) <= fixed
    assert _cost(grant, 5, published=task(**decaying)) >= _cost(grant, 5, published=task(noise_multiplier=2.0))


def test_tasks_add_up_and_later_ones_have_less_delta() -> None:
    grant = Grant(1.0, 1e-5)
    costs = grant.costs(Reservation(task(run=str(n) * 32), 100, n, 3) for n in (1, 2))
    assert costs[1] > costs[0]
    assert Grant(math.fsum(costs), 1e-5).covers(costs)
    assert not Grant(math.fsum(costs) * (1 - 1e-9), 1e-5).covers(costs)


def reserved(ledger: ClientLedger) -> list[tuple[int, int]]:
    return [(each.place, each.participations) for each in ledger.reservations()]


def test_a_client_takes_part_as_often_as_its_budget_allows_and_no_more(tmp_path: Path) -> None:
    policy, digest = ClientPolicy(epsilon=_cost(Grant(1.0, 1e-5), 4) * 1.0001), task().digest()
    with ClientLedger.held(tmp_path) as ledger:
        ledger.accept(task(), 100)
        for round_ in range(4):
            policy.reserve(digest, ledger, round_)
            assert reserved(ledger) == [(1, 4)]
            ledger.charge(digest, round_, 0, 4.0)
        with pytest.raises(RefusedError, match="allows no further"):
            policy.reserve(digest, ledger, 4)
        assert "allows no further" in policy.decide(task(run="1" * 32), FACTS, ledger).reason


def test_a_whole_task_is_reserved_and_another_gets_what_is_left(tmp_path: Path) -> None:
    """Tasks that run at the same time: the second is not given what the first may still use."""
    grant, first, second = Grant(1.0, 1e-5), task(), task(run="1" * 32)
    wanted = wanted_participations(first.plan)
    policy = ClientPolicy(epsilon=_cost(grant, wanted) + _cost(grant, 3, 2) * 1.0001)
    with ClientLedger.held(tmp_path) as ledger:
        for each in (first, second):
            assert policy.decide(each, FACTS, ledger).accepts
            ledger.accept(each, 100)
        for round_ in range(3):
            for each in (first, second):
                policy.reserve(each.digest(), ledger, round_)
                ledger.charge(each.digest(), round_, 0, 4.0)
        assert reserved(ledger) == [(1, wanted), (2, 3)]
        with pytest.raises(RefusedError, match="allows no further"):
            policy.reserve(second.digest(), ledger, 3)
        policy.reserve(first.digest(), ledger, 3)


def test_a_client_that_joins_late_reserves_the_rounds_that_are_left(tmp_path: Path) -> None:
    with ClientLedger.held(tmp_path) as ledger:
        ledger.accept(task(), 100)
        ClientPolicy(epsilon=50.0).reserve(task().digest(), ledger, 7)
        assert reserved(ledger) == [(1, wanted_participations(task().plan, 7))] == [(1, 3 + 2)]


@pytest.mark.parametrize("epsilon", [50.0, math.inf])
def test_a_policy_may_cap_the_participations_in_a_task(epsilon: float, tmp_path: Path) -> None:
    policy, digest = ClientPolicy(epsilon=epsilon, participations=2), task().digest()
    with ClientLedger.held(tmp_path) as ledger:
        ledger.accept(task(), 100)
        for round_ in range(2):
            policy.reserve(digest, ledger, round_)
            ledger.charge(digest, round_, 0, 4.0)
        assert reserved(ledger) == [(1, 2)]
        with pytest.raises(RefusedError, match="at most 2 participations"):
            policy.reserve(digest, ledger, 2)
        assert "at most 2" in policy.decide(task(), FACTS, ledger).reason
        replace(policy, participations=3).reserve(digest, ledger, 2)
        assert reserved(ledger) == [(1, 2), (2, 1)]


def test_a_stricter_policy_refuses_what_was_reserved_before(tmp_path: Path) -> None:
    with ClientLedger.held(tmp_path) as ledger:
        ledger.accept(task(), 100)
        ClientPolicy(epsilon=50.0).reserve(task().digest(), ledger, 0)
        with pytest.raises(RefusedError, match="allows no further"):
            ClientPolicy(epsilon=0.01).reserve(task().digest(), ledger, 0)
        ledger.charge(task().digest(), 0, 0, 4.0)
        with pytest.raises(RefusedError, match="at most 1 participations"):
            ClientPolicy(epsilon=50.0, participations=1).reserve(task().digest(), ledger, 0)


def test_releases_of_an_earlier_version_are_widened_to_the_whole_task_if_that_is_affordable(tmp_path: Path) -> None:
    grant, first, second = Grant(1.0, 1e-5), task(), task(run="1" * 32)
    wanted = wanted_participations(first.plan)
    for name, epsilon, blocks in (
        ("all of it", _cost(grant, wanted) * 1.0001, [(1, wanted)]),
        ("some of it", (_cost(grant, 3) + _cost(grant, 2, 2)) * 1.0001, [(1, 3), (2, 2)]),
    ):
        written_by_0_1_0(tmp_path / name, [(first, 3)])
        with ClientLedger.held(tmp_path / name) as ledger:
            ClientPolicy(epsilon=epsilon).reserve(first.digest(), ledger, 3)
            assert reserved(ledger) == blocks
    written_by_0_1_0(tmp_path / "two", [(first, 3), (second, 3)])
    with ClientLedger.held(tmp_path / "two") as ledger, pytest.raises(RefusedError, match="allows no further"):
        ClientPolicy(epsilon=_cost(grant, wanted)).reserve(first.digest(), ledger, 3)


@pytest.mark.parametrize("most", range(12))
def test_the_largest_affordable_number_is_found(most: int) -> None:
    for wanted in range(-1, 12):
        assert most_participations(lambda times: times <= most, wanted) == max(0, min(most, wanted))


def test_a_task_that_is_accepted_is_not_accepted_with_other_data(tmp_path: Path) -> None:
    with ClientLedger.held(tmp_path) as ledger:
        ledger.accept(task(), 100)
        assert ClientPolicy().decide(task(), FACTS, ledger).accepts
        assert "with 100 records" in ClientPolicy().decide(task(), replace(FACTS, records=99), ledger).reason


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("epsilon = 0", "epsilon: 0.0 is not allowed"),
        ("epsilon = nan", "epsilon: nan"),
        ('epsilon = "1"', "epsilon: '1'"),
        ("delta = 1", "delta: 1.0"),
        ('adversary = "nobody"', "adversary: 'nobody'"),
        ('unit = "unique"', "unit: 'unique'"),
        ('methods = ["magic"]', "methods"),
        ('methods = "fed-cdp"', "methods"),
        ("smallest_cohort = 0", "smallest_cohort: 0"),
        ("allow_reproducible = 1", "allow_reproducible: 1"),
        ("budget = 3", "budget is not one of epsilon"),
        ("epsilon", "is not a TOML file"),
    ],
)
def test_a_policy_that_cannot_be_read_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(PolicyError, match=sentence):
        ClientPolicy.read(tmp_path / "policy.toml")


def test_a_policy_file(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('epsilon = inf\ndelta = 1e-6\nmethods = ["fed-cdp"]\nsmallest_cohort = 5\n')
    policy = ClientPolicy.read(tmp_path / "policy.toml")
    assert policy == ClientPolicy(epsilon=math.inf, delta=1e-6, methods=("fed-cdp",), smallest_cohort=5)
    with pytest.raises(PolicyError, match="cannot be read"):
        ClientPolicy.read(tmp_path / "none.toml")


NOISE: list[tuple[dict[str, Any], float]] = [
    ({}, 6.0),
    ({"noise": "batch"}, 6.0),
    ({"noise": "cohort"}, 6.0 / 4),
    ({"clip": "linear(2, 6)"}, 6.0),
    ({"clip": "linear(2, 6)", "noise_follows_clip": False}, 2.0),
    ({"clip": "proportional(4)", "learning_rate": "linear(0.1, 0.4)", "noise_follows_clip": False}, 1.5),
    ({"clip": "cosine(6, 2)", "noise_follows_clip": False}, 6.0),
    ({"clip": "exponential(2, 6)", "noise_follows_clip": False, "noise": "cohort"}, 0.5),
    ({"clip": "quantile(0.5, 4)"}, 6.0),
    ({"clip": "quantile(0.5, 4)", "quantile_noise": 0.5}, 1.0),
    ({"clip": "quantile(0.5, 4)", "quantile_noise": 0.5, "noise": "cohort"}, 1.0 / 4),
    ({"method": "fed-sdp", "noise": "cohort", "noise_at": "client"}, 6.0),
]


@pytest.mark.parametrize(("plan", "noise"), NOISE)
def test_the_smallest_noise_multiplier_is_that_of_every_round_and_every_sum(plan: dict[str, Any], noise: float) -> None:
    """A plan may say σ = 6 and have less: a bound that grows under noise that stays, a K_t-th of the noise."""
    published = task(**plan)
    assert effective_noise(published.plan) == pytest.approx(noise)
    assert ClientPolicy(smallest_noise_multiplier=noise * (1 - 1e-9)).objection(published) is None
    reason = ClientPolicy(smallest_noise_multiplier=noise * (1 + 1e-9)).objection(published)
    assert reason is not None
    assert "is below" in reason


def test_a_server_that_adds_the_noise_can_promise_no_smallest_cohort() -> None:
    published = task(method="fed-sdp", cohort=3)
    assert ClientPolicy(smallest_cohort=1).objection(published) is None
    assert "no smallest cohort" in (ClientPolicy(smallest_cohort=2).objection(published) or "")
    assert ClientPolicy(smallest_cohort=2).objection(task(method="fed-sdp", noise_at="client", cohort=3)) is None


# The task ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "published",
    [task(), task(reproducible=True, seed=9), task(method="fed-cdp-decay"), task(clip="quantile(0.5, 4)"),
     task(learning_rate="cosine(0.1, 0.01)", clip="proportional(4)"), task(noise_generator="chacha20")],
)  # fmt: skip
def test_a_task_is_read_as_it_was_published(published: Task) -> None:
    read = Task.from_json(published.to_json())
    assert read == published
    assert read.digest() == published.digest()


def test_a_seed_is_published_only_if_the_task_is_reproducible() -> None:
    assert "seed" not in json.loads(task(seed=0).to_json())["plan"]
    assert json.loads(task(seed=8, reproducible=True).to_json())["plan"]["seed"] == 8


def test_tasks_that_differ_have_different_names() -> None:
    tasks = [
        task(),
        task(rounds=11),
        task(run="1" * 32),
        task(noise_multiplier=5.0),
        task(cohort=1),
        task(reproducible=True),
    ]
    assert len({each.digest() for each in tasks}) == len(tasks)


@pytest.mark.parametrize(
    ("field", "value"),
    [("format", "fedcdp-task-9"), ("run", "xyz"), ("run", 5), ("shape", []), ("shape", [3.0]), ("shape", [0]),
     ("classes", 0), ("classes", True), ("network", 3), ("activation", 3), ("tensors", []), ("tensors", [["a", [-1]]]),
     ("tensors", [["a"]]), ("tensors", [["a", [1]], ["a", [1]]]), ("constants", 1), ("plan", []), ("plan", {"rounds": 0}),
     ("plan", {"magic": 1}), ("plan", {"seed": 3}), ("smallest_cohort", 0), ("smallest_cohort", 99),
     ("reproducible", "no"), ("modality", "image"),
     ("extra", 1)],
)  # fmt: skip
def test_a_task_that_is_not_sound_is_refused(field: str, value: object) -> None:
    written = json.loads(task().to_json())
    with pytest.raises(TaskError):
        Task.from_json(json.dumps(written | {field: value}))


def _with(plan: dict[str, Any]) -> str:
    written = json.loads(task(clip="linear(6, 2)").to_json())
    return json.dumps(written | {"plan": written["plan"] | plan})


CANONICAL = task(clip="linear(6, 2)").to_json()
ALIASES = {
    "tensors in another order": replace(task(), tensors=dict(reversed(TENSORS.items()))).to_json(),
    "a negative zero": _with({"momentum": -0.0}),
    "another negative zero": _with({"compression": -0.0}),
    "a whole number for a fraction": _with({"noise_multiplier": 6}),
    "zero for a fraction": _with({"ema": 0}),
    "a schedule without a space": _with({"clip": "linear(6,2)"}),
    "a schedule with more digits": _with({"clip": "linear(6.0, 2.0)"}),
    "a schedule in other words": _with({"clip": "linear(6, 2e0)"}),
    "a number for a schedule": _with({"learning_rate": 0.05}),
    "a derived field left out": _with({"slots": None}),
    "other digits": CANONICAL.replace("6.0", "6.00"),
    "an exponent": CANONICAL.replace("6.0", "0.6e1"),
    "no spaces": json.dumps(json.loads(CANONICAL), separators=(",", ":")),
    "keys in another order": json.dumps(dict(reversed(json.loads(CANONICAL).items()))),
    "a key twice": CANONICAL.replace('{"activation": null', '{"activation": "relu", "activation": null'),
    "a letter by its number": CANONICAL.replace("mlp", "\\u006dlp"),
    "a space in front": " " + CANONICAL,
}  # fmt: skip


@pytest.mark.parametrize("text", ALIASES.values(), ids=ALIASES.keys())
def test_a_task_has_one_written_form(text: str, tmp_path: Path) -> None:
    """Another form of a task is refused, as text or as it does not fit; no two forms hide each other's spending."""
    assert text not in (CANONICAL, task().to_json())
    try:
        read = Task.from_json(text)
    except TaskError:
        return
    with ClientLedger.held(tmp_path) as ledger:  # the order of tensors is the network's, which only the client knows
        assert "in another order" in ClientPolicy().decide(read, FACTS, ledger).reason


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "6", [6.0], None])
@pytest.mark.parametrize("field", ["noise_multiplier", "momentum", "delta", "rounds"])
def test_a_number_of_a_plan_is_a_finite_number(field: str, value: object) -> None:
    with pytest.raises(TaskError):
        Task.from_json(_with({field: value}))


def test_tasks_are_told_apart_by_their_digest_alone(tmp_path: Path) -> None:
    """Tasks that compare equal and have other digests, as version 0.1.0 accepted them: each counts."""
    reordered = replace(task(), tensors=dict(reversed(TENSORS.items())))
    assert reordered == task()
    assert reordered.digest() != task().digest()
    written_by_0_1_0(tmp_path, [(task(), 3), (reordered, 4)])
    with ClientLedger.held(tmp_path) as ledger:
        assert reserved(ledger) == [(1, 3), (2, 4)]
        grant = Grant(1.0, 1e-5)
        spent = _cost(grant, 3) + _cost(grant, 4, 2)
        assert math.fsum(grant.costs(ledger.reservations())) == pytest.approx(spent)
        for each in (task(), reordered):
            with pytest.raises(RefusedError, match="allows no further"):
                ClientPolicy(epsilon=spent).reserve(each.digest(), ledger, 4)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, "x" * 2**21])
def test_what_is_no_task_is_refused(text: str) -> None:
    with pytest.raises(TaskError):
        Task.from_json(text)


def test_secure_aggregation_and_seeded_noise_are_not_deployed() -> None:
    with pytest.raises(PlanError, match="only with noise sum, not example"):
        task(secure_aggregation=True)
    with pytest.raises(FedcdpError, match="operating system"):
        replace(task(), reproducible=True)


@pytest.mark.parametrize(
    ("network", "shape", "digest"),
    [
        ("oriented-gradients", (3, 32, 32), "d892590995d577752f16c1afa39fe761"),
        ("scattering", (1, 28, 28), "0db6052f0f4190858a30e5fb6716fd33"),
        ("scattering+oriented-gradients", (3, 32, 32), "fedfe9a642a5e31bfebd46d0b24ace1c"),
    ],
)
def test_every_machine_holds_the_same_constants_of_fixed_features(network: str, shape: tuple[int, ...], digest: str) -> None:
    """A client declines a task whose constants have another digest than its own."""
    assert constants_of(build(network, shape, 10)) == digest
