"""What a reader of each type sees, against a loop that computes one example at a time and imports nothing of fedcdp."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedcdp.attacks import observe as capturing
from fedcdp.attacks.observe import LEAKS, Captured, Leak, state_at, step_weights
from fedcdp.attacks.sightings import _shares
from fedcdp.data.partition import Federation
from fedcdp.errors import PlanError
from fedcdp.files.tree import Tree
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.training.simulate import simulate
from tests.support import naive
from tests.support.scenes import Scene, federation_of, flat, scene

SIZES = [9, 3, 8, 6, 7, 7]
CLIP, SIGMA, RATE, BATCH = 0.5, 0.8, 0.2, 3
FINE = 1e-5  # float32 against float64, in units of a gradient

METHODS: dict[str, dict[str, Any]] = {
    "nonprivate": {"method": "nonprivate"},
    "pruned": {"method": "nonprivate", "compression": 0.7},
    "dssgd": {"method": "dssgd", "share_fraction": 0.2},
    "fed-sdp, noise at the server": {"method": "fed-sdp", "noise_at": "server", "clip": 0.05},
    "fed-sdp, noise at the client": {"method": "fed-sdp", "noise_at": "client", "clip": 0.05},
    "fed-cdp, example noise": {"method": "fed-cdp", "noise": "example"},
    "fed-cdp, batch noise": {"method": "fed-cdp", "noise": "batch"},
    "fed-cdp, cohort noise": {"method": "fed-cdp", "noise": "cohort"},
    "fed-cdp-decay": {"method": "fed-cdp-decay", "noise": "example", "clip": "linear(0.5, 0.1)"},
}

# The specification's table: is noise added to what this reader sees, and of which deviation in units of a gradient?
# σC on one example, σC√S, σC or σC/K_t on the sum of a batch of B, σC on an update of −η times the gradient.
NOISE: dict[tuple[str, str], float] = {
    ("fed-sdp, noise at the client", "update"): SIGMA * 0.05 / RATE,
    ("fed-cdp, example noise", "example"): SIGMA * CLIP,
    ("fed-cdp, example noise", "update"): SIGMA * CLIP * math.sqrt(BATCH) / BATCH,
    ("fed-cdp, batch noise", "update"): SIGMA * CLIP / BATCH,
    ("fed-cdp, cohort noise", "update"): SIGMA * CLIP / 2 / BATCH,
    ("fed-cdp-decay", "example"): SIGMA * CLIP,
    ("fed-cdp-decay", "update"): SIGMA * CLIP * math.sqrt(BATCH) / BATCH,
}


def wide() -> nn.Module:
    """Enough weights to measure a standard deviation on: 1,603."""
    return nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 3))


@pytest.fixture(scope="module")
def federation() -> Federation:
    generator = torch.Generator().manual_seed(1)
    return federation_of(torch.randn(40, 4, generator=generator), torch.randint(3, (40,), generator=generator), SIZES)


def watched(federation: Federation, method: str = "nonprivate", **fields: Any) -> Scene:
    defaults = {
        "clip": CLIP, "noise_multiplier": SIGMA, "learning_rate": RATE, "batch_size": BATCH, "per_round": 2, "rounds": 5,
    }  # fmt: skip
    return scene(wide(), federation, **defaults | METHODS[method] | fields)


# Written out ----------------------------------------------------------------------------------------------------------


def owner(there: Scene, captured: Captured, victim: int) -> int:
    """The client that a victim's examples belong to."""
    record = int((there.federation.train.inputs == captured.inputs[victim, 0]).all(1).nonzero()[0])
    return next(client for client in range(len(SIZES)) if record in there.federation.indices(client).tolist())


def examples_of(captured: Captured, victim: int) -> list[list[tuple[Tensor, Tensor]]]:
    """For each step the examples that the capture says were used."""
    examples = list(zip(captured.inputs[victim], captured.targets[victim], strict=True))
    steps = zip(captured.uses[:, victim].tolist(), captured.used[:, victim].tolist(), strict=True)
    return [[examples[place] for place, real in zip(*step, strict=True) if real] for step in steps]


def setting(there: Scene, **changes: Any) -> Any:
    """The plan in plain numbers, without its noise."""
    plan = there.plan
    shared = (plan.share_fraction if plan.method == "dssgd" else 1.0) * (1 - plan.compression)
    plain = {
        "method": plan.method.removesuffix("-decay"), "clips": [plan.clip.start], "rates": [plan.learning_rate.start],
        "planned": plan.per_round, "batch": plan.batch_size, "slots": plan.slots, "flat": plan.clip_mode == "flat",
        "noise_at": plan.noise_at, "momentum": plan.momentum, "proximal": plan.proximal, "sent": shared,
    }  # fmt: skip
    return naive.Setting(**plain | changes)


def silence(weights: Tree) -> Any:
    nothing = {name: torch.zeros_like(value) for name, value in weights.items()}
    return naive.Unit(*(lambda *_: nothing,) * 3, *(lambda *_: 0.0,) * 2)


def sent_by(there: Scene, steps: list[list[tuple[Tensor, Tensor]]], records: int, **changes: Any) -> Tree:
    """What a client with so many records sends without noise, in units of a gradient."""
    plain, weights = setting(there, **changes), naive.trainable(wide_of(there))
    update, _ = naive.train_client(wide_of(there), weights, steps, records, plain, silence(weights), 0, 0)
    return {name: value / -plain.rates[0] for name, value in update.items()}


def wide_of(there: Scene) -> nn.Module:
    model = wide()
    model.load_state_dict(there.state.weights)
    return model


def expected_silently(there: Scene, captured: Captured, victim: int) -> Tree:
    """What this reader would see of a victim if nobody added noise."""
    if captured.leak != "type2":
        records = SIZES[owner(there, captured, victim)]
        return sent_by(there, examples_of(captured, victim), records)
    weights = {name: value[victim].double() for name, value in captured.weights.items()}
    gradient = naive.gradient(wide_of(there), weights, (captured.inputs[victim, 0], captured.targets[victim, 0]))
    if there.plan.per_example:
        groups = [list(gradient)] if there.plan.clip_mode == "flat" else naive.layers_of(wide())
        return naive.clipped(gradient, groups, there.plan.clip.start)
    return gradient


def rest(there: Scene, captured: Captured) -> Tensor:
    """[victims, coordinates]: what was seen, less what is expected without noise."""
    expected = [expected_silently(there, captured, victim) for victim in range(len(captured))]
    tree = {name: torch.stack([each[name] for each in expected]) for name in captured.seen}
    return flat(captured).double() - flat(captured, tree)


def assert_noise(noise: Tensor, deviation: float | Tensor) -> None:
    """Gaussian noise of this deviation: its mean, its deviation in all and in every victim, and none in common."""
    if isinstance(deviation, Tensor):  # of each victim
        noise, deviation = noise / deviation[:, None], 1.0
    if deviation == 0:
        assert float(noise.abs().max()) < FINE
        return
    count = noise.numel()
    assert abs(float(noise.mean())) < 5 * deviation / math.sqrt(count)
    assert float(noise.std()) == pytest.approx(deviation, rel=5 / math.sqrt(2 * count))
    each = 5 / math.sqrt(2 * noise.shape[1])
    assert noise.std(1).tolist() == pytest.approx([deviation] * len(noise), rel=each)
    if len(noise) > 1:
        assert float(noise.corrcoef().fill_diagonal_(0).abs().max()) < 5 / math.sqrt(noise.shape[1])


# The table ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("method", METHODS)
def test_a_reader_sees_what_the_table_says_and_noise_of_the_promised_deviation(
    federation: Federation, method: str, leak: Leak
) -> None:
    there = watched(federation, method)
    captured = there.look(leak, 8 if leak == "type2" else len(SIZES))
    deviation = NOISE.get((method, "example" if leak == "type2" else "update"), 0.0)
    assert captured.deviation.tolist() == pytest.approx([deviation] * len(captured))
    assert_noise(rest(there, captured), deviation)
    silent = there.look(leak, len(captured), silent=True)
    assert not silent.noisy
    assert_noise(rest(there, silent), 0.0)


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("method", METHODS)
def test_a_flat_clip_bound_is_seen_as_such(federation: Federation, method: str, leak: Leak) -> None:
    there = watched(federation, method, clip_mode="flat")
    assert_noise(rest(there, there.look(leak, 5, silent=True)), 0.0)


def test_clipping_is_seen_and_differs_by_layer_and_flat(federation: Federation) -> None:
    """Otherwise the comparisons above could not tell."""
    by_layer, whole = (watched(federation, "fed-cdp, batch noise", clip_mode=mode) for mode in ("layer", "flat"))
    raw = watched(federation, "nonprivate")
    seen = [flat(each.look("type2", 6)) for each in (by_layer, whole, raw)]
    for one, other in itertools.combinations(seen, 2):
        assert float((one - other).norm(dim=1).min()) > 0.01


@pytest.mark.parametrize("method", ["pruned", "dssgd"])
def test_a_reader_of_updates_sees_only_the_shared_part(federation: Federation, method: str) -> None:
    there = watched(federation, method)
    share = {"pruned": 0.3, "dssgd": 0.2}[method]
    filled = (flat(there.look("type1", 6)) != 0).double().mean(1)
    assert filled.tolist() == pytest.approx([share] * 6, abs=1e-3)
    assert bool((flat(there.look("type2", 6)) != 0).all())


@pytest.mark.parametrize("method", METHODS)
def test_the_server_receives_what_left_the_client(federation: Federation, method: str) -> None:
    there = watched(federation, method, local_steps=2)
    sent, received = (flat(there.look(leak, 6)) for leak in ("type1", "type0"))
    assert torch.equal(sent, received)


# Several steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("method", METHODS)
def test_an_update_of_several_steps_is_seen_in_units_of_a_gradient(
    federation: Federation, method: str, momentum: float
) -> None:
    there = watched(federation, method, local_steps=3, momentum=momentum)
    captured = there.look("type1", 4, silent=True)
    assert captured.steps == 3
    assert_noise(rest(there, captured), 0.0)


@pytest.mark.parametrize("method", METHODS)
def test_an_update_with_a_proximal_term_is_seen_in_units_of_a_gradient(federation: Federation, method: str) -> None:
    there = watched(federation, method, local_steps=3, momentum=0.5, proximal=0.5 / RATE)
    captured = there.look("type1", 4, silent=True)
    assert_noise(rest(there, captured), 0.0)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("proximal", [0.0, 400.0])
def test_a_step_weighs_as_much_as_the_update_shows(federation: Federation, momentum: float, proximal: float) -> None:
    """Noise in one step alone, without examples: it is in the update as often as its weight says."""
    rate, steps = 1e-3, 4
    there = watched(federation, "fed-cdp, batch noise", local_steps=steps, learning_rate=rate, momentum=momentum,
                    proximal=proximal)  # fmt: skip
    weights, start = step_weights(there.plan, 0, steps), naive.trainable(wide_of(there))
    assert weights[-1] == 1

    def in_step(wanted: int) -> Any:
        return lambda _round, _client, step: {n: torch.full_like(v, float(step == wanted)) for n, v in start.items()}

    for step, weight in enumerate(weights):
        unit = replace(silence(start), step=in_step(step))
        plain = setting(there, sigma=1.0, convention="batch")
        update, _ = naive.train_client(wide_of(there), start, [[]] * steps, BATCH, plain, unit, 0, 0)
        for value in update.values():
            moved = value / -rate * BATCH / CLIP
            torch.testing.assert_close(moved, torch.full_like(moved, weight), rtol=1e-9, atol=1e-9)


def test_shares_count_a_step_by_its_weight(federation: Federation) -> None:
    there = watched(federation, "nonprivate", local_steps=3, momentum=0.5, proximal=0.5 / RATE)
    captured = there.look("type1", 4)
    weights = step_weights(there.plan, 0, 3)
    per_step = captured.used.sum(2).T.double() / captured.expected_batch[:, None]
    assert captured.means.tolist() == pytest.approx((per_step @ torch.tensor(weights).double()).tolist())
    assert _shares(captured).sum(1).tolist() == pytest.approx(captured.means.tolist())


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("method", [name for name, seen in NOISE if seen == "update"])
def test_noise_of_several_steps_adds_up_as_promised(federation: Federation, method: str, momentum: float) -> None:
    """At a rate so small that noise in one step does not reach the gradients of the next."""
    rate = 1e-3
    there = watched(federation, method, local_steps=4, momentum=momentum, learning_rate=rate)
    captured = there.look("type1", 6)
    assert_noise(rest(there, captured), captured.deviation)
    at_one = float(watched(federation, method, learning_rate=rate).look("type1", 6).deviation[0])
    if method.startswith("fed-cdp"):
        weights = [sum(momentum**later for later in range(1 + left)) for left in range(4)]
        at_one *= math.sqrt(sum(weight**2 for weight in weights))
    assert captured.deviation.tolist() == pytest.approx([at_one] * len(captured))


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("method", ["nonprivate", "fed-sdp, noise at the client", "fed-cdp, batch noise"])
def test_a_later_step_is_seen_at_the_clients_own_weights(federation: Federation, method: str, step: int) -> None:
    there = watched(federation, method, local_steps=3, noise_multiplier=0.0, momentum=0.5)
    captured = there.look("type2", 5, step=step)
    assert not captured.weights_shared
    assert captured.steps == 1
    plain = setting(there, method=there.plan.method if there.plan.per_example else "nonprivate")
    start = naive.trainable(wide_of(there))
    for victim in range(5):
        client = owner(there, captured, victim)
        order = there.federation.indices(client).tolist()
        steps = [
            [(there.federation.train.inputs[record], there.federation.train.targets[record]) for record in batch]
            for batch in naive.batches_in_order(order, BATCH, 3)
        ]
        update, _ = naive.train_client(wide_of(there), start, steps[:step], len(order), plain, silence(start), 0, client)
        for name, value in captured.weights.items():
            torch.testing.assert_close(value[victim].double(), start[name] + update[name], rtol=0, atol=FINE)
        assert any(torch.equal(captured.inputs[victim, 0], example) for example, _ in steps[step])
    assert_noise(rest(there, captured), 0.0)


def test_a_later_step_under_fed_cdp_is_noised_like_the_first(federation: Federation) -> None:
    there = watched(federation, "fed-cdp, example noise", local_steps=2)
    captured = there.look("type2", 6, step=1)
    assert captured.deviation.tolist() == pytest.approx([SIGMA * CLIP] * len(captured))
    assert_noise(rest(there, captured), SIGMA * CLIP)
    moved = flat(captured, captured.weights)
    assert float((moved[0] - moved[1:]).norm(dim=1).min()) > 0.1


# Whom it sees ---------------------------------------------------------------------------------------------------------


def test_every_client_is_a_victim_before_any_is_one_twice(federation: Federation) -> None:
    there = watched(federation)
    clients = [owner(there, captured, victim) for captured in [there.look("type2", 18)] for victim in range(18)]
    for seen in (clients[:6], clients[6:12], clients[12:]):
        assert sorted(seen) == [0, 1, 2, 3, 4, 5]
    records = there.look("type2", 18).inputs[:, 0]
    assert len(records.unique(dim=0)) == 18


def test_fewer_victims_are_the_first_of_more(federation: Federation) -> None:
    there = watched(federation, "fed-cdp, example noise")
    many, few = there.look("type2", 12), there.look("type2", 4)
    assert torch.equal(flat(many)[:4], flat(few))
    assert torch.equal(many.inputs[:4], few.inputs)


def test_fewer_victims_are_the_first_of_more_among_many_clients_too() -> None:
    inputs, targets = torch.randn(300, 4), torch.arange(300) % 3
    many = scene(nn.Linear(4, 3), federation_of(inputs, targets, [1] * 300))
    few, more = many.look("type1", 3), many.look("type1", 20)
    assert torch.equal(few.inputs, more.inputs[:3])


def test_victims_do_not_depend_on_how_clients_are_chunked(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    there = watched(federation, "fed-cdp, example noise", record_sampling="poisson", local_steps=2)
    for leak in LEAKS:
        whole = there.look(leak, 5, releases=2)
        with monkeypatch.context() as patched:
            patched.setattr(capturing, "_MEMORY", {"cpu": 1})
            apart = there.look(leak, 5, releases=2)
        torch.testing.assert_close(flat(apart), flat(whole), rtol=0, atol=1e-5)
        for victim in range(5):
            assert torch.equal(apart.targets[victim][apart.present[victim]], whole.targets[victim][whole.present[victim]])


def test_victims_are_drawn_from_the_plans_seed(federation: Federation) -> None:
    one, same, other = (watched(federation, seed=seed).look("type1", 3).inputs for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_some_of_the_victims_can_be_taken_in_any_order(federation: Federation) -> None:
    for step, local_steps in ((0, 1), (1, 2)):
        captured = watched(federation, local_steps=local_steps).look("type2", 6, step=step)
        some = captured.take(torch.tensor([4, 0]))
        assert len(some) == 2
        assert torch.equal(flat(some), flat(captured)[[4, 0]])
        assert torch.equal(flat(some, some.weights), flat(captured, captured.weights)[[4, 0]])
        assert torch.equal(some.inputs, captured.inputs[[4, 0]])
        assert torch.equal(some.uses, captured.uses[:, [4, 0]])


# Poisson sampling, and clients of different sizes -------------------------------------------------------------------------


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("method", METHODS)
def test_poisson_batches_with_empty_slots_and_empty_clients_are_seen_as_they_are(
    federation: Federation, method: str, leak: Leak
) -> None:
    """One record expected a step: a third of the clients draw none, and others several."""
    there = watched(federation, method, record_sampling="poisson", batch_size=1, slots=4)
    captured = there.look(leak, 3)
    filled = captured.used.sum((0, 2))
    assert bool((filled > 0).all())
    assert captured.present.sum(1).tolist() == filled.tolist()
    slots = {"fed-cdp, example noise": 2, "fed-cdp-decay": 2}.get(method, 1)
    deviation = NOISE.get((method, "example" if leak == "type2" else "update"), 0.0)
    if leak != "type2" and "cdp" in method:
        deviation *= slots / math.sqrt(BATCH if slots == 2 else 1) * BATCH  # √S for √B, and divided by 1
    assert captured.deviation.tolist() == pytest.approx([deviation] * len(captured))
    assert_noise(rest(there, captured), deviation)


def test_a_client_that_drew_nothing_is_no_victim(federation: Federation) -> None:
    """Of six clients, those that draw a record in the one step: as many victims, and no more."""
    there = watched(federation, record_sampling="poisson", batch_size=1)
    with pytest.raises(PlanError, match=r"^victims: 6 is not allowed; type1 has at most (\d) here") as error:
        there.look("type1", 6)
    most = int(str(error.value).partition("at most ")[2][0])
    assert 0 < most < 6
    assert len(there.look("type1", most)) == most


@pytest.mark.parametrize("method", ["nonprivate", "fed-cdp, example noise", "fed-sdp, noise at the client"])
def test_steps_of_which_some_drew_nothing_add_up(federation: Federation, method: str) -> None:
    there = watched(federation, method, record_sampling="poisson", batch_size=1, local_steps=4)
    captured = there.look("type0", 5, silent=True)
    in_steps = captured.used.sum(2)
    assert int(in_steps.min()) == 0
    assert int(in_steps.max()) > 1
    assert_noise(rest(there, captured), 0.0)
    torch.testing.assert_close(captured.means, in_steps.sum(0).float())


def test_a_step_that_nobody_drew_a_record_for_has_no_victims() -> None:
    """Of two clients, in some of twelve steps, whatever they drew in the steps before."""
    nothing = torch.zeros(60, dtype=torch.int64)
    there = watched(
        federation_of(torch.randn(60, 4), nothing, [30, 30]), record_sampling="poisson", batch_size=1, local_steps=12
    )
    sentences = []
    for step in range(12):
        try:
            assert len(there.look("type2", 1, step=step)) == 1
        except PlanError as error:
            sentences.append(str(error))
    assert 0 < len(sentences) < 12
    assert all("victims: 1 is not allowed; type2 has at most 0 here" in sentence for sentence in sentences)


def test_a_client_with_fewer_records_than_a_batch_is_divided_by_what_it_has(federation: Federation) -> None:
    there = watched(federation, batch_size=5)
    captured = there.look("type1", 6)
    clients = [owner(there, captured, victim) for victim in range(6)]
    assert captured.expected_batch.tolist() == [min(5, SIZES[client]) for client in clients]
    assert captured.present.sum(1).tolist() == captured.expected_batch.tolist()
    assert_noise(rest(there, captured), 0.0)


def test_an_example_used_in_several_steps_is_one_example(federation: Federation) -> None:
    """Three records, two a step, in turn: three steps use each twice."""
    there = watched(federation, batch_size=2, local_steps=3)
    captured = there.look("type1", 6)
    victim = [owner(there, captured, each) for each in range(6)].index(1)
    assert int(captured.present[victim].sum()) == 3
    assert captured.uses[:, victim].flatten().bincount(minlength=3).tolist()[:3] == [2, 2, 2]
    assert_noise(rest(there, captured), 0.0)


# Releases, worlds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "leak"),
    [("fed-cdp, example noise", "type2"), ("fed-cdp, batch noise", "type1"), ("fed-sdp, noise at the client", "type0")],
)
def test_the_mean_of_several_releases_has_that_much_less_noise(federation: Federation, method: str, leak: Leak) -> None:
    there = watched(federation, method)
    one, mean = there.look(leak, 6), there.look(leak, 6, releases=9)
    assert mean.deviation.tolist() == pytest.approx((one.deviation / 3).tolist())
    assert mean.releases == 9
    assert_noise(rest(there, mean), one.deviation / 3)


def test_releases_of_different_numbers_have_independent_noise_and_the_same_examples(federation: Federation) -> None:
    there = watched(federation, "fed-cdp, example noise")
    singles = [there.look("type2", 4, first=number) for number in range(3)]
    noises = torch.cat([rest(there, each) for each in singles])
    assert_noise(noises, SIGMA * CLIP)
    assert all(torch.equal(each.inputs, singles[0].inputs) for each in singles)
    together = there.look("type2", 4, releases=3)
    torch.testing.assert_close(flat(together), torch.stack([flat(each) for each in singles]).mean(0))
    torch.testing.assert_close(flat(there.look("type2", 4, first=1, releases=2)), (flat(singles[1]) + flat(singles[2])) / 2)


def test_secure_noise_is_fresh_at_every_look(federation: Federation) -> None:
    there = watched(federation, "fed-cdp, example noise", secure_noise=True)
    one, other = there.look("type2", 4), there.look("type2", 4)
    assert_noise(torch.cat([rest(there, one), rest(there, other)]), SIGMA * CLIP)
    assert_noise(rest(there, there.look("type2", 4, releases=4)), SIGMA * CLIP / 2)


@pytest.mark.parametrize("method", METHODS)
def test_without_its_example_a_type2_reader_sees_noise_alone(federation: Federation, method: str) -> None:
    there = watched(federation, method)
    without = there.look("type2", 6, without_example=True)
    assert_noise(flat(without).double(), NOISE.get((method, "example"), 0.0))
    gone = flat(there.look("type2", 6)) - flat(without)
    torch.testing.assert_close(gone, flat(there.look("type2", 6, silent=True)), rtol=0, atol=1e-5)


def test_a_later_step_without_its_example_comes_after_the_same_steps(federation: Federation) -> None:
    there = watched(federation, "fed-cdp, example noise", local_steps=2)
    whole, without = (there.look("type2", 6, step=1, without_example=gone) for gone in (False, True))
    assert torch.equal(flat(whole, whole.weights), flat(without, without.weights))


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("pruned", "dssgd")])
def test_without_a_victims_first_example_its_update_lacks_just_that(
    federation: Federation, method: str, local_steps: int
) -> None:
    there = watched(federation, method, local_steps=local_steps, batch_size=2)
    captured = there.look("type1", 5, silent=True, without_example=True)
    first = captured.inputs[:, 0]
    for victim in range(5):
        steps = [
            [example for example in batch if not torch.equal(example[0], first[victim])]
            for batch in examples_of(captured, victim)
        ]
        assert sum(map(len, steps)) < int(captured.used[:, victim].sum())
        expected = sent_by(there, steps, SIZES[owner(there, captured, victim)])
        for name, value in captured.seen.items():
            torch.testing.assert_close(value[victim].double(), expected[name], rtol=0, atol=FINE)


def test_both_worlds_have_the_same_noise(federation: Federation) -> None:
    there = watched(federation, "fed-cdp, example noise")
    difference = [
        flat(there.look("type1", 6, silent=silent)) - flat(there.look("type1", 6, silent=silent, without_example=True))
        for silent in (False, True)
    ]
    torch.testing.assert_close(difference[0], difference[1], rtol=0, atol=1e-5)


# Rounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_state_at_a_round_is_what_training_reaches(federation: Federation, method: str) -> None:
    there = watched(federation, method, local_steps=2, ema=0.5)
    reached = state_at(there.simulator, there.state, 3)
    assert reached.round == 3
    assert there.state.round == 0
    shorter = {"rounds": 3} | ({"clip": "linear(0.5, 0.3)"} if method == "fed-cdp-decay" else {})
    trained = dict(simulate(wide_of(there), federation, there.plan.but(**shorter)).model.named_parameters())
    assert reached.average is not None
    for name, value in reached.average.items():
        torch.testing.assert_close(value, trained[name].detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", [name for name in METHODS if "noise" in name])
def test_the_bound_at_a_round_is_what_training_reaches(federation: Federation, method: str) -> None:
    there = watched(federation, method, clip="quantile(0.5, 0.4)", quantile_rate=1.0)
    assert (
        state_at(there.simulator, there.state, 3).clip == simulate(wide_of(there), federation, there.plan).metrics[3]["clip"]
    )


def test_a_later_round_is_seen_at_its_weights_with_its_clip_bound_rate_and_records(federation: Federation) -> None:
    there = watched(
        federation, "fed-cdp-decay", learning_rate="linear(0.2, 0.1)", record_sampling="fixed", noise_multiplier=0.0
    )
    later = Scene(there.simulator, state_at(there.simulator, there.state, 2))
    captured = later.look("type1", 5)
    assert captured.round == 2
    assert captured.clip_bound() == pytest.approx(0.3)
    assert {name: value[0] for name, value in captured.weights.items()}.keys() == later.state.weights.keys()
    for victim in range(5):
        assert all(torch.equal(value[victim], later.state.weights[name]) for name, value in captured.weights.items())
        records = SIZES[owner(there, captured, victim)]
        expected = sent_by(later, examples_of(captured, victim), records, clips=[0.3], rates=[0.15])
        for name, value in captured.seen.items():
            torch.testing.assert_close(value[victim].double(), expected[name], rtol=0, atol=FINE)
    first = there.look("type1", 5)
    assert not torch.equal(first.inputs, captured.inputs)


def test_a_bound_that_follows_a_quantile_scales_the_noise_where_it_has_come_to(federation: Federation) -> None:
    there = watched(federation, "fed-cdp, example noise", clip="quantile(0.5, 0.9)", quantile_rate=2.0)
    later = Scene(there.simulator, state_at(there.simulator, there.state, 3))
    bound = later.state.clip
    assert bound is not None
    assert abs(bound - 0.9) > 0.05
    captured = later.look("type2", 6)
    assert captured.clip_bound() == bound
    assert captured.deviation.tolist() == pytest.approx([SIGMA * bound] * len(captured))
    silent = later.look("type2", 6, silent=True)
    assert_noise((flat(captured) - flat(silent)).double(), SIGMA * bound)
    layers = naive.layers_of(wide())
    for layer in layers:
        norms = torch.cat([silent.seen[name].flatten(1) for name in layer], 1).norm(dim=1)
        assert float(norms.max()) <= bound * (1 + 1e-5)


def test_running_up_to_a_round_chooses_the_clients_of_those_rounds(federation: Federation) -> None:
    there = watched(federation)
    by_hand = there.state
    for round_ in range(2):
        by_hand = there.simulator.round(by_hand, torch.from_numpy(choose_clients(there.plan, len(SIZES), round_)))
    reached = state_at(there.simulator, there.state, 2)
    assert all(torch.equal(reached.weights[name], value) for name, value in by_hand.weights.items())
    assert state_at(there.simulator, reached, 2) is reached


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leak", "victims", "look", "sentence"),
    [
        ("type2", 0, {}, "victims: 0 is not allowed; it must be at least 1"),
        ("type1", -3, {}, "victims: -3 is not allowed; it must be at least 1"),
        (
            "type1", 7, {},
            "victims: 7 is not allowed; type1 has at most 6 here, in a federation of 6 clients",
        ),
        (
            "type2", 19, {},
            "victims: 19 is not allowed; type2 has at most 18 here, in a federation of 6 clients",
        ),
        ("type3", 1, {}, "leak: 'type3' is not one of type0, type1, type2"),
        ("type2", 1, {"step": 2}, "step: 2 is not allowed; a client takes 2 local steps, counted from 0"),
        ("type2", 1, {"step": -1}, "step: -1 is not allowed; it must be at least 0"),
        ("type1", 1, {"step": 1}, "step: 1 is for type2; a type1 adversary sees whole updates"),
        ("type0", 1, {"step": 1}, "step: 1 is for type2; a type0 adversary sees whole updates"),
        ("type2", 1, {"releases": 0}, "releases: 0 is not allowed; it must be at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_refused_in_a_sentence(
    federation: Federation, leak: Any, victims: int, look: dict[str, int], sentence: str
) -> None:
    with pytest.raises(PlanError) as error:
        watched(federation, local_steps=2).look(leak, victims, **look)
    assert str(error.value) == sentence


# All at once ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_reader_of_any_plan_sees_what_the_naive_loop_gives(federation: Federation, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 4))
    sampling = data.draw(st.sampled_from(["poisson", "fixed", "partition"]))
    there = watched(
        federation,
        data.draw(st.sampled_from(list(METHODS))),
        batch_size=batch,
        record_sampling=sampling,
        slots=data.draw(st.integers(batch, 2 * batch)) if sampling == "poisson" else None,
        local_steps=data.draw(st.integers(1, 3)),
        momentum=data.draw(st.sampled_from([0.0, 0.6])),
        proximal=data.draw(st.sampled_from([0.0, 0.3 / RATE])),
        clip_mode=data.draw(st.sampled_from(["layer", "flat"])),
        seed=data.draw(st.integers(0, 2**32)),
    )
    leak: Leak = data.draw(st.sampled_from(LEAKS))
    step = data.draw(st.integers(0, there.plan.local_steps - 1)) if leak == "type2" else 0
    captured = there.look(leak, 2, step=step, silent=True)
    assert_noise(rest(there, captured), 0.0)
