"""What each method lets a reader see, and what it does at the edges."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcdp.config.plan import Plan
from fedcdp.engine import Batch, FunctionalEngine
from fedcdp.files.tree import Tree
from fedcdp.mechanism.noise import SeededNoise
from fedcdp.methods import METHODS, Local, Moment, train_locally
from tests.support import naive

CLIENTS = [4, 7]
BATCH, STEPS, SLOTS = 3, 2, 9
BOUND, SIGMA, RATE = 0.5, 0.8, 0.2
ALL = ["nonprivate", "fed-sdp", "fed-cdp", "fed-cdp-decay", "dssgd"]


class Training:
    """One round of two clients by a method, with a reader at every tap."""

    def __init__(self, problem, present: list[list[bool]] | None = None, inputs: Tensor | None = None, **fields: Any):
        self.model = problem.model
        defaults = {
            "batch_size": BATCH, "local_steps": STEPS, "per_round": 2, "noise_multiplier": SIGMA, "clip": BOUND,
            "learning_rate": RATE, "rounds": 3, "seed": 11,
        }  # fmt: skip
        if fields.get("method") == "fed-cdp-decay":
            defaults["clip"] = f"linear({BOUND}, {BOUND / 2})"
        self.plan = Plan(**defaults | fields)
        self.method = METHODS[self.plan.method]
        self.engine = FunctionalEngine(problem.model, F.cross_entropy)
        self.noise = SeededNoise(self.plan.seed, self.engine.layout)
        self.weights = {name: p.detach() for name, p in problem.model.named_parameters() if p.requires_grad}
        inputs = problem.inputs if inputs is None else inputs
        self.batches = []
        for step in range(STEPS):
            those = slice(step * 6, step * 6 + 6)
            mask = torch.tensor(present or [[True] * 3] * 2)
            self.batches.append(Batch(inputs[those].unflatten(0, (2, 3)), problem.targets[those].unflatten(0, (2, 3)), mask))

    def run(self, tapped: bool = True, round_: int = 0) -> tuple[Tree, dict[str, list[Tree]]]:
        seen: dict[str, list[Tree]] = defaultdict(list)

        def read(reader: str, at: Moment, shown: Tree) -> None:
            assert at.round == round_
            assert at.clients.tolist() == CLIENTS
            assert at.step == (len(seen[reader]) if reader in ("type2", "local-weights") else 0)
            seen[reader].append(shown)

        clients = torch.tensor(CLIENTS)
        expected = torch.full((2,), BATCH)
        at = Moment(self.plan, self.engine, self.noise, round_, clients, expected, tap=read if tapped else None)
        return train_locally(self.method, self.weights, self.batches, at), seen

    def raw_first_step(self) -> list[list[naive.Weights]]:
        """The gradient of every example of the first step, by plain autograd: [client][example]."""
        batch, start = self.batches[0], naive.trainable(self.model)
        return [
            [naive.gradient(self.model, start, (batch.inputs[c, e], batch.targets[c, e])) for e in range(BATCH)]
            for c in range(2)
        ]

    def groups(self) -> list[list[str]]:
        return naive.layers_of(self.model)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)


def raw_update(training: Training) -> Tree:
    """The update of the same training without any sanitising."""
    raw = copy.copy(training)
    raw.plan = training.plan.but(method="nonprivate", compression=0.0)
    raw.method = METHODS["nonprivate"]
    return raw.run(tapped=False)[0]


# Type 2: each example's gradient, in every local step ----------------------------------------------------------------


def test_a_reader_at_every_tap_is_called_once_a_step_and_once_an_update(small):
    for method in ALL:
        seen = Training(small, method=method).run()[1]
        every_step = {"local-weights": STEPS, "type2": STEPS}
        assert {reader: len(shown) for reader, shown in seen.items()} == every_step | {"type1": 1, "type0": 1}


@pytest.mark.parametrize("fields", [{"method": "nonprivate"}, {"method": "dssgd"}, {"method": "fed-sdp"}])
def test_type2_sees_raw_gradients_where_local_training_is_not_private(small, fields):
    training = Training(small, **fields)
    shown = training.run()[1]["type2"][0]
    for client, examples in enumerate(training.raw_first_step()):
        for example, gradient in enumerate(examples):
            for name, value in gradient.items():
                assert_close(shown[name][client, example], value)


@pytest.mark.parametrize("convention", ["batch", "cohort"])
def test_type2_sees_gradients_that_are_only_clipped_under_batch_and_cohort_noise(small, convention):
    training = Training(small, noise=convention)
    shown = training.run()[1]["type2"][0]
    changed = 0
    for client, examples in enumerate(training.raw_first_step()):
        for example, gradient in enumerate(examples):
            expected = naive.clipped(gradient, training.groups(), BOUND)
            changed += any(not torch.equal(expected[name], gradient[name]) for name in expected)
            for name, value in expected.items():
                assert_close(shown[name][client, example], value)
    assert changed > 0


@pytest.mark.parametrize("method", ["fed-cdp", "fed-cdp-decay"])
def test_type2_sees_every_slot_clipped_and_noised_under_example_noise(small, method):
    training = Training(small, present=[[True, True, False], [True, False, False]], method=method)
    shown = training.run()[1]["type2"][0]
    noise = training.noise.for_examples(0, torch.tensor(CLIENTS), 0, SLOTS, 1.0)
    raw = training.raw_first_step()
    for client, real in enumerate((2, 1)):
        for slot in range(SLOTS):
            for name in training.weights:
                expected = SIGMA * BOUND * noise[name][client, slot].double()
                if slot < real:
                    expected = expected + naive.clipped(raw[client][slot], training.groups(), BOUND)[name]
                assert_close(shown[name][client, slot], expected)


def test_type2_noise_has_deviation_sigma_c_and_is_independent_from_slot_to_slot():
    """On a network of 2,000 weights whose gradient is zero; bounds are five standard errors."""
    model = torch.nn.Linear(400, 5, bias=False)
    problem = SimpleNamespace(model=model, inputs=torch.zeros(12, 400), targets=torch.arange(12) % 5)
    shown = Training(problem).run()[1]["type2"][1]["weight"].flatten(2).double().numpy()
    assert shown.shape == (2, SLOTS, 2000)
    rows = shown.reshape(2 * SLOTS, 2000)
    assert np.abs(rows.std(1) - SIGMA * BOUND).max() < 5 * SIGMA * BOUND / math.sqrt(2 * 2000)
    assert np.abs(np.corrcoef(rows)[np.triu_indices(2 * SLOTS, 1)]).max() < 5 / math.sqrt(2000)


def test_the_local_step_uses_exactly_what_the_type2_reader_saw(small):
    training = Training(small, noise="example", local_steps=2)
    update, seen = training.run()
    for name, value in update.items():
        walked = sum(shown[name].sum(1) for shown in seen["type2"])
        assert_close(value, -RATE / BATCH * walked)


# Types 1 and 0: the update on the wire, and at the server ------------------------------------------------------------


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("placement", ["server", "client"])
def test_types_1_and_0_see_the_update_that_is_sent(small, method, placement):
    update, seen = Training(small, method=method, noise_at=placement).run()
    for reader in ("type1", "type0"):
        assert all(torch.equal(seen[reader][0][name], value) for name, value in update.items())


@pytest.mark.parametrize("fields", [{"method": "nonprivate"}, {"method": "fed-sdp", "noise_at": "server"}])
def test_types_1_and_0_see_raw_updates_without_privacy_and_with_fed_sdp_at_the_server(small, fields):
    training = Training(small, **fields)
    seen = training.run()[1]
    for name, value in raw_update(training).items():
        assert_close(seen["type1"][0][name], value)
        assert_close(seen["type0"][0][name], value)


def test_types_1_and_0_see_clipped_and_noised_updates_with_fed_sdp_at_the_client(small):
    bound = 0.05
    training = Training(small, method="fed-sdp", noise_at="client", clip=bound)
    seen, raw = training.run()[1], raw_update(training)
    noise = training.noise.for_update(0, torch.tensor(CLIENTS), 1.0)
    for client in range(2):
        mine = {name: value[client].double() for name, value in raw.items()}
        expected = naive.clipped(mine, training.groups(), bound)
        assert any(not torch.equal(expected[name], mine[name]) for name in mine)
        for name, value in expected.items():
            for reader in ("type1", "type0"):
                assert_close(seen[reader][0][name][client], value + SIGMA * bound * noise[name][client].double())


def test_fed_sdp_at_the_server_clips_what_it_admits_and_at_the_client_takes_it_as_it_is(small):
    for placement in ("server", "client"):
        training = Training(small, method="fed-sdp", noise_at=placement, clip=0.05)
        update = training.run()[0]
        clients = torch.tensor(CLIENTS)
        at = Moment(training.plan, training.engine, training.noise, 0, clients, clients)
        admitted = training.method.admit(update, at)
        for client in range(2):
            mine = {name: value[client].double() for name, value in update.items()}
            expected = naive.clipped(mine, training.groups(), 0.05) if placement == "server" else mine
            for name, value in expected.items():
                assert_close(admitted[name][client], value)


@pytest.mark.parametrize(
    ("fields", "fraction"),
    [
        ({"method": "dssgd", "share_fraction": 0.2}, 0.2),
        ({"method": "dssgd", "share_fraction": 0.5, "compression": 0.4}, 0.3),
        ({"method": "nonprivate", "compression": 0.7}, 0.3),
        ({"method": "fed-sdp", "compression": 0.7, "noise_at": "server"}, 0.3),
    ],
)
def test_types_1_and_0_see_only_the_shared_part_raw(small, fields, fraction):
    training = Training(small, **fields)
    seen, raw = training.run()[1], raw_update(training)
    for client in range(2):
        mine = naive.largest_entries({name: value[client].double() for name, value in raw.items()}, fraction)
        sent = sum(int((value != 0).sum()) for value in mine.values())
        assert sent == round(fraction * training.engine.layout.size)
        for name, value in mine.items():
            assert_close(seen["type1"][0][name][client], value)
            assert_close(seen["type0"][0][name][client], value)


@pytest.mark.parametrize(
    "fields", [{"method": "fed-cdp"}, {"method": "fed-cdp-decay"}, {"method": "fed-sdp", "noise_at": "client"}]
)
def test_an_update_is_sanitised_before_it_is_pruned(small, fields):
    """Which entries are sent is judged by the noised values; the reverse would leak the support of the raw ones."""
    whole = Training(small, **fields).run(tapped=False)[0]
    pruned = Training(small, compression=0.6, **fields).run(tapped=False)[0]
    for client in range(2):
        expected = naive.largest_entries({name: value[client].double() for name, value in whole.items()}, 0.4)
        for name, value in expected.items():
            assert_close(pruned[name][client], value)


@pytest.mark.parametrize("method", ALL)
def test_reading_changes_nothing_but_the_way_example_noise_is_drawn(small, method):
    for convention in ("example", "batch", "cohort"):
        training = Training(small, method=method, noise=convention)
        read, unread = training.run(tapped=True)[0], training.run(tapped=False)[0]
        redrawn = method.startswith("fed-cdp") and convention == "example"
        assert all(torch.equal(read[name], unread[name]) != redrawn for name in read)


# Edges ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("tapped", [False, True])
def test_an_empty_batch_moves_nothing_but_by_noise(small, method, tapped):
    quiet = Training(small, present=[[False] * 3] * 2, method=method, noise_multiplier=0.0)
    assert all((value == 0).all() for value in quiet.run(tapped)[0].values())


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_example_counts_like_an_empty_slot(small, method, bad):
    inputs = small.inputs.clone()
    inputs[[1, 7]] = bad  # example 1 of the first client, in both steps
    spoilt = Training(small, inputs=inputs, method=method).run(tapped=False)[0]
    present = [[True, False, True], [True, True, True]]
    without = Training(small, present=present, method=method).run(tapped=False)[0]
    for name, value in without.items():
        assert torch.isfinite(value).all()
        assert_close(spoilt[name], value)


def test_a_bad_example_shows_nothing_but_noise_to_a_type2_reader_of_fed_cdp(small):
    inputs = small.inputs.clone()
    inputs[1] = math.inf
    training = Training(small, inputs=inputs)
    noise = training.noise.for_examples(0, torch.tensor(CLIENTS), 0, SLOTS, SIGMA * BOUND)
    shown = training.run()[1]["type2"][0]
    for name, value in shown.items():
        assert_close(value[0, 1], noise[name][0, 1])


@pytest.mark.parametrize("placement", ["server", "client"])
def test_fed_sdp_drops_an_update_that_is_not_finite(small, placement):
    training = Training(small, method="fed-sdp", noise_at=placement, noise_multiplier=0.0)
    clients = torch.tensor(CLIENTS)
    at = Moment(training.plan, training.engine, training.noise, 0, clients, clients)
    before = {name: value.expand(2, *value.shape) for name, value in training.weights.items()}
    after = {name: value + 0.01 for name, value in before.items()}
    after["0.bias"][1, 0] = math.nan
    admitted = training.method.admit(training.method.release(before, Local(after), at), at)
    for value in admitted.values():
        assert (value[1] == 0).all()
        assert (value[0] != 0).all()


def test_a_zero_gradient_stays_zero_under_every_method():
    """The gradient of a linear network without bias is zero where its input is."""
    model = torch.nn.Linear(4, 3, bias=False)
    problem = SimpleNamespace(model=model, inputs=torch.zeros(12, 4), targets=torch.arange(12) % 3)
    for method in ALL:
        update = Training(problem, method=method, noise_multiplier=0.0).run(tapped=False)[0]
        assert (update["weight"] == 0).all()


def test_fed_cdp_decay_uses_the_bound_of_its_round(small):
    training = Training(small, method="fed-cdp-decay", noise_multiplier=0.0, noise="batch")
    raw = training.raw_first_step()
    for round_, bound in enumerate([BOUND, 0.75 * BOUND, 0.5 * BOUND]):
        shown = training.run(round_=round_)[1]["type2"][0]
        expected = naive.clipped(raw[0][0], training.groups(), bound)
        for name, value in expected.items():
            assert_close(shown[name][0, 0], value)


def test_without_noise_reading_changes_nothing(problem):
    training = Training(problem, noise_multiplier=0.0)
    read, unread = training.run(tapped=True)[0], training.run(tapped=False)[0]
    for name, value in unread.items():
        assert_close(read[name], value)


@pytest.mark.parametrize("method", ALL)
def test_the_given_weights_and_batches_are_left_alone(small, method):
    training = Training(small, method=method)
    weights = {name: value.clone() for name, value in training.weights.items()}
    inputs = [batch.inputs.clone() for batch in training.batches]
    training.run()
    assert all(torch.equal(training.weights[name], value) for name, value in weights.items())
    assert all(torch.equal(batch.inputs, value) for batch, value in zip(training.batches, inputs, strict=True))
