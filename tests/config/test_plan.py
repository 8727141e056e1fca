from __future__ import annotations

import ast
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fedcdp.config import plan as plan_module
from fedcdp.config.plan import Plan
from fedcdp.config.schedules import Quantile, Schedule, constant, cosine, exponential, linear, proportional, quantile
from fedcdp.errors import PlanError

DIGEST_OF_THE_FIRST_RELEASE = "3cb2f1aac9e32ecc"
BAD_VALUES: list[tuple[str, Any]] = [
    ("method", "fed-xyz"), ("method", None), ("method", 3),
    ("rounds", 0), ("rounds", -1), ("rounds", 2.0), ("rounds", "2"), ("rounds", True), ("rounds", None),
    ("per_round", 0), ("per_round", 1.5), ("local_steps", 0), ("local_steps", None),
    ("batch_size", 0), ("batch_size", -3), ("batch_size", 1.0),
    ("clip", 0), ("clip", -1), ("clip", math.nan), ("clip", math.inf), ("clip", "linear(6)"), ("clip", "four"),
    ("clip", [6, 2]), ("clip_mode", "global"),
    ("noise_multiplier", -0.1), ("noise_multiplier", math.nan), ("noise_multiplier", math.inf),
    ("noise_multiplier", "6"), ("noise_multiplier", None), ("noise_multiplier", False),
    ("noise", "record"), ("noise_at", "wire"), ("noise_slots", "some"), ("weighting", "size"), ("mean_records", 100.0),
    ("clip", "quantile(1, 4)"), ("clip", "quantile(0.5, 0)"), ("clip", "median"),
    ("quantile_noise", 0), ("quantile_noise", -1.0), ("quantile_noise", math.nan), ("quantile_noise", "5"),
    ("quantile_rate", 0), ("quantile_rate", math.inf), ("secure_noise", 1), ("secure_noise", "yes"),
    ("noise_generator", "chacha20"), ("noise_generator", "mt19937"),
    ("noise_follows_clip", 1), ("noise_follows_clip", "yes"),
    ("client_sampling", "partition"), ("record_sampling", "shuffle"),
    ("slots", 0), ("slots", 4), ("slots", 7.5),
    ("learning_rate", 0), ("learning_rate", -0.1), ("learning_rate", "fast"), ("learning_rate", None),
    ("learning_rate", "proportional(4)"),
    ("server_learning_rate", 0), ("server_learning_rate", math.nan), ("server_learning_rate", math.inf),
    ("server_learning_rate", "proportional(4)"), ("server_learning_rate", True), ("server_learning_rate", "fast"),
    ("server_optimizer", "adamw"), ("server_optimizer", None), ("server_momentum", 1), ("server_momentum", -0.1),
    ("server_momentum", "0.9"), ("server_beta2", 1.0), ("server_beta2", math.nan), ("server_epsilon", 0.0),
    ("server_epsilon", -1e-3), ("server_epsilon", 1e31), ("server_epsilon", math.inf), ("proximal", -0.1),
    ("proximal", math.nan), ("proximal", math.inf), ("proximal", 20.0), ("proximal", "1"),
    ("momentum", 1), ("momentum", -0.1), ("momentum", math.nan), ("momentum", "0.9"),
    ("ema", 1.0), ("ema", -0.5), ("aggregation", "median"),
    ("compression", 1), ("compression", -0.1), ("compression", math.nan),
    ("share_fraction", 0), ("share_fraction", 1.1), ("share_fraction", math.nan),
    ("seed", -1), ("seed", 2**63), ("seed", 0.5), ("seed", None),
]  # fmt: skip


def assert_one_sentence(refused: pytest.ExceptionInfo[PlanError], field: str) -> None:
    message = str(refused.value)
    assert message.startswith(f"{field}: ")
    assert "\n" not in message


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_in_one_sentence_that_names_the_field(field, value):
    with pytest.raises(PlanError) as refused:
        Plan(**{field: value})
    assert_one_sentence(refused, field)


@pytest.mark.parametrize("field", ["clip", "learning_rate", "noise_multiplier", "server_learning_rate"])
def test_a_number_beyond_floating_point_is_refused_like_any_other_bad_value(field):
    with pytest.raises(PlanError) as refused:
        Plan(**{field: 10**400})
    assert_one_sentence(refused, field)


@pytest.mark.parametrize("field", ["clip", "learning_rate"])
def test_true_is_no_number_for_a_schedule_either(field):
    with pytest.raises(PlanError) as refused:
        Plan(**{field: True})
    assert_one_sentence(refused, field)


def test_fewer_slots_than_the_batch_are_refused_under_poisson_sampling():
    with pytest.raises(PlanError, match=r"^slots: 4 .*5"):
        Plan(record_sampling="poisson", batch_size=5, slots=4)


@pytest.mark.parametrize("sampling", ["fixed", "partition"])
@pytest.mark.parametrize("slots", [4, 6])
def test_slots_other_than_the_batch_are_refused_without_poisson_sampling(sampling, slots):
    with pytest.raises(PlanError, match=f"^slots: {slots} .*5"):
        Plan(record_sampling=sampling, batch_size=5, slots=slots)


@pytest.mark.parametrize("bound", [None, "exponential(6, 2)", "cosine(6, 2)", "proportional(6)"])
def test_fed_cdp_decay_takes_bounds_that_decay(bound):
    plan = Plan(method="fed-cdp-decay", clip=bound, learning_rate="linear(0.2, 0.1)")
    assert plan.clip_at(plan.rounds - 1) < plan.clip_at(0)


def test_fed_cdp_decay_refuses_a_bound_proportional_to_a_constant_rate():
    with pytest.raises(PlanError, match=r"^clip: .*decays"):
        Plan(method="fed-cdp-decay", clip="proportional(6)", learning_rate=0.1)


def test_fed_cdp_decay_refuses_a_constant_bound():
    with pytest.raises(PlanError) as refused:
        Plan(method="fed-cdp-decay", clip=4)
    assert_one_sentence(refused, "clip")


def test_fed_cdp_decay_refuses_a_bound_that_grows():
    with pytest.raises(PlanError) as refused:
        Plan(method="fed-cdp-decay", clip="linear(2, 6)")
    assert_one_sentence(refused, "clip")


def test_unknown_fields_are_refused():
    with pytest.raises(PlanError) as refused:
        Plan().but(epochs=3)
    assert_one_sentence(refused, "epochs")


def test_more_clients_a_round_than_there_are_is_refused():
    plan = Plan(per_round=10)
    plan.check_clients(10)
    with pytest.raises(PlanError) as refused:
        plan.check_clients(9)
    assert_one_sentence(refused, "per_round")


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().rounds = 3


def test_the_defaults_are_the_papers_bounds_and_the_slots_that_privacy_needs():
    assert Plan().clip == constant(4)
    assert Plan(method="fed-cdp-decay").clip == linear(6, 2)
    assert Plan(batch_size=7).slots == 21
    assert Plan(batch_size=7, record_sampling="fixed").slots == 7
    assert Plan(batch_size=7, record_sampling="partition").slots == 7


def test_a_whole_number_may_stand_for_a_fraction():
    plan = Plan(noise_multiplier=6, momentum=0, learning_rate=1, clip=3)
    assert (plan.noise_multiplier, plan.learning_rate, plan.clip) == (6.0, constant(1.0), constant(3.0))
    assert type(plan.noise_multiplier) is float


def test_which_methods_are_private():
    methods = ["nonprivate", "dssgd", "fed-sdp", "fed-cdp", "fed-cdp-decay"]
    assert [Plan(method=method).private for method in methods] == [False, False, True, True, True]


def test_bound_rate_and_noise_follow_their_schedules_round_by_round():
    plan = Plan(rounds=5, clip="linear(6, 2)", learning_rate="linear(0.5, 0.1)", noise_multiplier=3)
    assert [plan.clip_at(t) for t in range(5)] == pytest.approx([6, 5, 4, 3, 2])
    assert [plan.noise_scale_at(t) for t in range(5)] == pytest.approx([18, 15, 12, 9, 6])
    assert [plan.learning_rate_at(t) for t in range(5)] == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1])


def test_noise_that_does_not_follow_the_bound_stays_at_that_of_the_first_round():
    plan = Plan(rounds=5, clip="linear(6, 2)", noise_multiplier=3, noise_follows_clip=False)
    assert [plan.noise_scale_at(t) for t in range(5)] == pytest.approx([18] * 5)
    assert plan.clip_at(4) == pytest.approx(2)


def test_a_proportional_bound_follows_the_learning_rate():
    plan = Plan(rounds=3, clip="proportional(4)", learning_rate="exponential(0.4, 0.1)")
    assert [plan.clip_at(t) for t in range(3)] == pytest.approx([4, 2, 1])


@pytest.mark.parametrize("written", ["linear(6, 2)", "exponential(6, 2)", "cosine(6, 2)", "proportional(6)"])
def test_a_plan_of_one_round_uses_the_first_values(written):
    plan = Plan(rounds=1, clip=written, learning_rate="linear(0.5, 0.1)")
    assert (plan.clip_at(0), plan.learning_rate_at(0)) == (6, 0.5)


def test_a_bound_that_follows_a_quantile_is_known_only_as_far_as_the_training_went():
    plan = Plan(rounds=5, clip=quantile(0.5, 4), noise_multiplier=3)
    assert (plan.clip_at(0), plan.noise_scale_at(0)) == (4, 12)
    assert (plan.clip_at(3, 2.5), plan.noise_scale_at(3, 2.5)) == (2.5, 7.5)
    with pytest.raises(PlanError) as refused:
        plan.clip_at(1)
    assert_one_sentence(refused, "clip")


def test_a_scheduled_bound_has_no_state():
    assert Plan(clip=4).clip_at(0, 2.5) == 4


def test_what_a_plan_follows():
    assert Plan(clip="quantile(0.5, 4)").quantile == quantile(0.5, 4)
    assert Plan(clip="quantile(0.5, 4)", method="fed-sdp").quantile == quantile(0.5, 4)
    assert Plan().quantile is None
    for method in ("nonprivate", "dssgd"):
        assert Plan(clip="quantile(0.5, 4)", method=method).quantile is None


def test_noise_that_could_not_follow_a_quantile_is_refused():
    with pytest.raises(PlanError) as refused:
        Plan(clip="quantile(0.5, 4)", noise_follows_clip=False)
    assert_one_sentence(refused, "noise_follows_clip")


def test_fed_cdp_decay_refuses_a_quantile():
    with pytest.raises(PlanError, match=r"^clip: .*decays.*quantile\(0\.5, 4\)"):
        Plan(method="fed-cdp-decay", clip="quantile(0.5, 4)")


# Written and changed ------------------------------------------------------------------------------------------------

positive = st.floats(1e-3, 1e3)
fraction = st.floats(0, 1, exclude_max=True)
rates = st.one_of(
    positive.map(constant), st.builds(linear, positive, positive), st.builds(exponential, positive, positive),
    st.builds(cosine, positive, positive),
)  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    batch = draw(st.integers(1, 50))
    sampling = draw(st.sampled_from(["poisson", "fixed", "partition"]))
    clip = draw(st.one_of(rates, positive.map(proportional), st.builds(quantile, st.floats(0.001, 0.999), positive)))
    secure = draw(st.booleans())
    return Plan(
        method=draw(st.sampled_from(["nonprivate", "fed-sdp", "fed-cdp", "dssgd"])),
        rounds=draw(st.integers(1, 1000)),
        per_round=draw(st.integers(1, 1000)),
        local_steps=draw(st.integers(1, 1000)),
        batch_size=batch,
        clip=clip,
        quantile_noise=draw(positive),
        quantile_rate=draw(positive),
        clip_mode=draw(st.sampled_from(["layer", "flat"])),
        noise_multiplier=draw(st.just(0.0) | st.floats(1e-6, 1e3)),
        noise=draw(st.sampled_from(["example", "batch", "cohort"])),
        noise_at=draw(st.sampled_from(["server", "client"])),
        noise_follows_clip=isinstance(clip, Quantile) or draw(st.booleans()),
        secure_noise=secure,
        noise_generator=draw(st.sampled_from(["philox", "chacha20"])) if secure else "philox",
        client_sampling=draw(st.sampled_from(["fixed", "poisson"])),
        record_sampling=sampling,
        slots=draw(st.integers(batch, 5 * batch)) if sampling == "poisson" else None,
        learning_rate=draw(rates),
        server_learning_rate=draw(rates | positive),
        server_optimizer=draw(st.sampled_from(["sgd", "momentum", "adam", "yogi"])),
        server_momentum=draw(fraction),
        server_beta2=draw(fraction),
        server_epsilon=draw(positive),
        momentum=draw(fraction),
        ema=draw(fraction),
        aggregation=draw(st.sampled_from(["fedsgd", "fedaveraging"])),
        weighting=draw(st.sampled_from(["equal", "records"])),
        compression=draw(fraction),
        share_fraction=draw(st.floats(0, 1, exclude_min=True)),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@settings(deadline=None, derandomize=True, max_examples=50)
@given(plan=plans())
def test_a_written_plan_gives_back_exactly_the_same_plan(plan):
    assert Plan(**plan.written()) == plan


@settings(deadline=None, derandomize=True, max_examples=50)
@given(plan=plans())
def test_a_written_plan_consists_of_plain_values(plan):
    written = plan.written()
    left_out = {field.name for field in dataclasses.fields(Plan)} - set(written)
    assert left_out <= set(plan_module._ADDED)
    assert all(getattr(plan, name) == getattr(Plan(), name) for name in left_out)
    assert Plan(**written) == plan
    assert {type(value) for value in written.values()} <= {str, int, float, bool}
    assert json.loads(json.dumps(written)) == written


@settings(deadline=None, derandomize=True, max_examples=50)
@given(plan=plans())
def test_a_plan_but_for_nothing_is_the_same(plan):
    assert plan.but() == plan


@pytest.mark.parametrize("given", [0.7, constant(0.7), "0.7", "constant(0.7)"])
def test_a_plain_server_rate_is_written_as_the_number_of_the_first_release(given):
    plan = Plan(server_learning_rate=given)
    assert plan.written()["server_learning_rate"] == 0.7
    assert type(plan.written()["server_learning_rate"]) is float
    assert plan.digest() == Plan(server_learning_rate=0.7).digest()
    assert type(Plan(server_learning_rate=3).written()["server_learning_rate"]) is float


def test_a_schedule_of_the_server_rate_has_a_value_in_every_round():
    plan = Plan(server_learning_rate="exponential(4, 1)", rounds=3)
    assert [plan.server_learning_rate_at(round_) for round_ in range(3)] == [4, 2, 1]
    assert plan.written()["server_learning_rate"] == "exponential(4, 1)"


def test_a_proximal_term_that_overshoots_is_refused_for_the_fastest_round():
    Plan(proximal=4.9, learning_rate="linear(0.1, 0.2)")
    with pytest.raises(PlanError, match=r"^proximal: 5\.0 is not allowed; times the learning rate, 0\.2"):
        Plan(proximal=5.0, learning_rate="linear(0.1, 0.2)")


def test_but_changes_what_is_named_and_nothing_else():
    plan = Plan(rounds=7, momentum=0.5)
    changed = plan.but(rounds=9)
    assert changed.written() | {"rounds": 7} == plan.written()
    assert changed.rounds == 9
    assert plan.rounds == 7


def test_but_derives_the_slots_anew_from_what_they_derive_from():
    plan = Plan(batch_size=5)
    assert plan.but(batch_size=2).slots == 6
    assert plan.but(record_sampling="partition").slots == 5
    assert plan.but(record_sampling="partition").but(record_sampling="poisson").slots == 15
    assert plan.but(batch_size=2, slots=3).slots == 3
    assert plan.but(rounds=3).slots == 15


def test_but_exchanges_the_papers_bounds_with_the_method_and_keeps_any_other():
    assert Plan().but(method="fed-cdp-decay").clip == linear(6, 2)
    assert Plan(method="fed-cdp-decay").but(method="fed-cdp").clip == constant(4)
    assert Plan(clip=2).but(method="fed-sdp").clip == constant(2)
    assert Plan().but(method="fed-cdp-decay", clip="cosine(3, 1)").clip == cosine(3, 1)


def test_but_checks_the_changed_plan():
    with pytest.raises(PlanError, match=r"^momentum: "):
        Plan().but(momentum=2.0)
    with pytest.raises(PlanError, match=r"^clip: "):
        Plan(clip=2).but(method="fed-cdp-decay")


def test_a_schedule_may_be_given_as_an_object():
    plan = Plan(clip=linear(3, 1), learning_rate=constant(0.1))
    assert isinstance(plan.clip, Schedule)
    assert plan.written()["clip"] == "linear(3, 1)"


def test_the_constructor_takes_every_field_and_says_what_may_be_given() -> None:
    """The signature that type checkers see is written out; it must not lag behind the fields."""
    (plan,) = (
        node for node in ast.parse(Path(plan_module.__file__).read_text()).body if getattr(node, "name", "") == "Plan"
    )
    assert isinstance(plan, ast.ClassDef)
    (seen,) = (node for node in ast.walk(plan) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    accepted = {each.arg: ast.unparse(each.annotation) for each in seen.args.kwonlyargs if each.annotation}
    held = {each.name: str(each.type) for each in dataclasses.fields(Plan)}
    assert list(accepted) == list(held)
    wider = {name for name in held if accepted[name] != held[name]}
    assert wider == {"clip", "learning_rate", "server_learning_rate", "slots"}
    for name in wider:
        assert set(held[name].split(" | ")) <= set(accepted[name].split(" | "))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"weighting": "records", "mean_records": 0.5}, "mean_records: 0.5 is not allowed"),
        ({"mean_records": 30.0}, "mean_records: it applies to weighting by records only"),
        ({"noise_slots": "held", "noise": "batch"}, "noise_slots: held applies to example noise"),
        ({"noise_slots": "held", "method": "fed-sdp"}, "noise_slots: held applies to example noise"),
    ],
)
def test_options_for_unequal_clients_that_make_no_sense_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan(**fields)


def test_a_plan_for_unequal_clients_has_a_counterpart_without_privacy() -> None:
    plan = Plan(weighting="records", noise_slots="held")
    assert plan.but(method="nonprivate").weighting == "records"


def test_options_added_since_the_first_release_leave_its_digests_alone() -> None:
    """The digest of the default plan in 0.1.0: checkpoints, ledgers and tasks name it."""
    assert Plan().digest() == DIGEST_OF_THE_FIRST_RELEASE
    assert Plan(weighting="records").digest() != DIGEST_OF_THE_FIRST_RELEASE
    assert Plan(noise_slots="held").digest() != DIGEST_OF_THE_FIRST_RELEASE
