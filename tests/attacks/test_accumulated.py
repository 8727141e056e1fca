"""All rounds of a training at once: the likelihood is exact, sampling is followed, and missing noise is noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcdp
from fedcdp.attacks import RECIPES, Leaks, accumulation
from fedcdp.attacks.accumulated_attack import attack_accumulated
from fedcdp.attacks.accumulation import Accumulation, observe_throughout
from fedcdp.attacks.candidate_pool import CandidatePool, log_likelihoods, measured, own_log_likelihoods
from fedcdp.attacks.objectives import check_reproduces, predicted
from fedcdp.attacks.observations import Observation
from fedcdp.attacks.observe import Leak, Look
from fedcdp.attacks.reconstruct import Problem
from fedcdp.attacks.replay import PLAN, REPLAYED, Course
from fedcdp.attacks.scene import simulated
from fedcdp.attacks.spaces import ClassComponents
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.engine import FunctionalEngine
from fedcdp.errors import FedcdpError
from fedcdp.mechanism.sampling import choose_records_of_steps
from fedcdp.models.networks import prepare

SHAPE = (1, 7, 7)
CPU = torch.device("cpu")
SHORT = RECIPES["accumulated"].but(iterations=10)


def plan_of(**fields: Any) -> Plan:
    """One local step on the single record of every client, noised."""
    defaults = {"method": "fed-cdp", "rounds": 4, "per_round": 6, "local_steps": 1, "batch_size": 1, "clip": 1.0}
    defaults |= {"record_sampling": "partition", "learning_rate": 0.1, "noise_multiplier": 0.1}
    return Plan(**defaults | fields)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(100, 10))


@pytest.fixture(scope="module")
def images(digits: Dataset) -> Dataset:
    return Dataset(F.avg_pool2d(digits.inputs, 4), digits.targets, digits.classes)


def federation_of(images: Dataset, records: int = 1) -> Federation:
    mine = torch.arange(0, 1000, 100 // records)[: 6 * records] + 3
    public = torch.arange(0, 1000, 2)
    return fedcdp.partition(images.take(mine), clients=6, scheme="iid", validation=images.take(public))


@pytest.fixture(scope="module")
def federation(images: Dataset) -> Federation:
    """Six clients of one record; others are public."""
    return federation_of(images)


def watch(plan: Plan, network: nn.Module, federation: Federation, leak: Leak = "type2", victims: int = 6) -> Accumulation:
    course = Course(network, federation, plan, CPU, F.cross_entropy)
    engine = FunctionalEngine(prepare(network, plan, CPU), F.cross_entropy)
    return observe_throughout(course, engine, leak, victims, "classification")


def naive_release(network: nn.Module, weights: dict[str, Tensor], image: Tensor, label: Tensor, bound: float) -> Tensor:
    """The gradient of one example, each layer clipped, in plain PyTorch."""
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    outputs = torch.func.functional_call(network, leaves, (image[None],))
    gradients = torch.autograd.grad(F.cross_entropy(outputs, label[None]), list(leaves.values()))
    layers: dict[str, list[Tensor]] = {}
    for name, each in zip(leaves, gradients, strict=True):
        layers.setdefault(name.split(".")[0], []).append(each.flatten().double())
    joined = [torch.cat(each) for each in layers.values()]
    return torch.cat([each * min(1.0, bound / float(each.norm())) for each in joined])


def test_the_likelihood_over_rounds_is_that_of_a_naive_loop(network: nn.Module, federation: Federation) -> None:
    plan = plan_of(method="fed-cdp-decay", clip="linear(1.0, 0.2)", rounds=3)
    seen = watch(plan, network, federation, victims=2)
    public = federation.validation.take(torch.arange(4))  # type: ignore[union-attr]
    found = log_likelihoods(seen.observations, 2, public.tensor, public.targets)
    wanted = torch.zeros(2, 4, dtype=torch.float64)
    for each in seen.observations:
        bound = plan.clip_at(each.captured.round)
        for row, victim in enumerate(each.who.tolist()):
            weights = {name: value[row] for name, value in each.captured.weights.items()}
            got = torch.cat([each.captured.seen[name][row].flatten() for name in weights]).double()
            for candidate in range(4):
                shown = naive_release(network, weights, public.tensor[candidate], public.targets[candidate], bound)
                deviation = plan.noise_scale_at(each.captured.round)
                wanted[victim, candidate] += (got.square().sum() - (got - shown).square().sum()) / (2 * deviation**2)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert len({float(each.captured.deviation[0]) for each in seen.observations}) == 3  # each round has its own noise


def test_each_round_is_seen_at_its_own_weights(network: nn.Module, federation: Federation) -> None:
    seen = watch(plan_of(rounds=3), network, federation)
    course = Course(network, federation, plan_of(rounds=3), CPU, F.cross_entropy)
    states = [state for state, _ in course.states(*course.begin())]
    for each, state in zip(seen.observations, states, strict=True):
        for name, value in state.weights.items():
            assert torch.equal(each.captured.weights[name][-1], value)
    assert not torch.equal(states[0].weights["0.weight"], states[2].weights["0.weight"])


def test_identical_rounds_are_the_mean_of_as_many_releases(network: nn.Module, federation: Federation) -> None:
    scene = simulated(plan_of(), network, federation, "type2", None, 0, 1, CPU, None, None)
    one_by_one = [Observation.alone(scene.captured(Look("type2", 0, 1, number), 3)) for number in range(5)]
    mean = scene.captured(Look("type2", 0, 5), 3)
    public = federation.validation
    assert public is not None
    scores = [log_likelihoods(each, 3, public.tensor, public.targets) for each in (one_by_one, [Observation.alone(mean)])]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-3)
    space = ClassComponents.of(public, 20, 10, CPU)
    points, losses = torch.randn(3, 49), []
    for captured, observations in ((one_by_one[0].captured, one_by_one), (mean, ())):
        problem = Problem(captured, SHORT, space, mean.tensor, mean.targets, torch.zeros(3, 1), None, observations)
        losses.append(problem.evaluate(points, torch.arange(3)))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-2)


def test_victims_not_seen_in_a_round_lose_nothing_by_it(network: nn.Module, federation: Federation) -> None:
    """The loss of some victims is the same alone and among all, with other clients in every round."""
    seen = watch(plan_of(per_round=3, rounds=6), network, federation, victims=5)
    assert {len(each.who) for each in seen.observations} & {1, 2, 3}
    space = ClassComponents.of(federation.validation, 20, 10, CPU)  # type: ignore[arg-type]
    captured, points = seen.captured, torch.randn(5, 49)
    problem = Problem(captured, SHORT, space, captured.tensor, captured.targets, torch.zeros(5, 1), None, seen.observations)
    everyone = problem.evaluate(points, torch.arange(5))
    some = torch.tensor([1, 4])
    few = problem.evaluate(points[some], some)
    for one, other in zip(everyone, few, strict=True):
        torch.testing.assert_close(one[some], other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("leak", ["type2", "type1", "type0"])
def test_without_noise_the_result_is_exact(network: nn.Module, federation: Federation, leak: Leak) -> None:
    plan = plan_of(noise_multiplier=0.0, clip=0.05, rounds=2)
    found = fedcdp.attack(plan, model=network, federation=federation, leak=leak, attack="accumulated", victims=3)
    row = found.summary()
    assert (row["success_rate"], row["identified_rate"], row["label_accuracy"]) == (1, 1, 1)
    assert (row["source"], row["rounds_observed"], row["releases_mean"]) == (PLAN, 2, 2)


def test_fixed_layers_are_no_obstacle(federation: Federation) -> None:
    """Rounds are trained behind the fixed layers, and the search goes through them."""
    torch.manual_seed(4)
    front = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Sigmoid(), nn.Flatten()).requires_grad_(False)
    network = nn.Sequential(front, nn.Linear(200, 30), nn.Sigmoid(), nn.Linear(30, 10))
    plan = plan_of(noise_multiplier=0.0, rounds=2)
    row = fedcdp.attack(plan, model=network, federation=federation, attack="accumulated", victims=3).summary()
    assert (row["success_rate"], row["releases_mean"]) == (1, 2)


def test_a_round_whose_noise_was_left_out_is_noticed(network: nn.Module, federation: Federation) -> None:
    seen = watch(plan_of(noise_multiplier=2.0), network, federation)
    public = federation.validation
    assert public is not None
    how: dict[str, Any] = {"candidates": 400, "value_range": (0.0, 1.0)}
    honest = attack_accumulated(seen, SHORT, public, 10, **how)
    assert honest.quiet == 0
    each = seen.observations[2]
    silent = predicted(each.captured, "method", each.captured.inputs, each.captured.targets, each.captured.present)
    broken = [*seen.observations[:2], replace(each, captured=replace(each.captured, seen=silent)), seen.observations[3]]
    caught = attack_accumulated(replace(seen, observations=broken), SHORT, public, 10, **how)
    assert caught.quiet == 6
    assert caught.identified is not None
    assert bool(caught.identified.all())
    assert honest.identified is not None
    assert not bool(honest.identified.all())


def test_noise_as_promised_is_not_called_missing(network: nn.Module, federation: Federation) -> None:
    seen = watch(plan_of(noise_multiplier=0.02, rounds=8), network, federation)
    public = federation.validation
    assert public is not None
    pool = CandidatePool.of(public, seen.observations, 6, 0, single=True)
    assert measured(seen.observations, pool)[1] == 0


def test_labels_become_certain_over_the_rounds(network: nn.Module, federation: Federation) -> None:
    seen = watch(plan_of(noise_multiplier=1.0, rounds=60, learning_rate=0.001), network, federation)
    public = federation.validation
    assert public is not None
    truth = seen.captured.targets[:, :1]
    right = []
    for count in (1, 60):
        pool = CandidatePool.of(public, seen.observations[:count], 6, 0, single=True)
        right.append(float((pool.labels(10) == truth).double().mean()))
    assert right[0] < right[1] == 1


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "partition"])
def test_a_record_is_seen_as_often_as_steps_draw_it(network: nn.Module, images: Dataset, sampling: str) -> None:
    federation = federation_of(images, records=4)
    plan = plan_of(record_sampling=sampling, batch_size=2, local_steps=3, rounds=3, noise_multiplier=0.0)
    seen = watch(plan, network, federation, victims=6)
    wanted = torch.zeros(6, dtype=torch.int64)
    clients = torch.arange(6)
    table, sizes = (torch.from_numpy(each) for each in federation.table(clients.numpy()))
    for number in range(3):
        drawn = choose_records_of_steps(plan, clients, sizes, number)
        records = table.expand(3, -1, -1).gather(2, drawn.positions)
        for victim, client in enumerate(seen.captured.client.tolist()):
            inputs = federation.train.tensor[records[:, client][drawn.present[:, client]]]
            wanted[victim] += sum(torch.equal(each, seen.captured.tensor[victim, 0]) for each in inputs)
    assert seen.releases.tolist() == wanted.tolist()
    for each in seen.observations:  # also at the weights of later local steps
        check_reproduces(each.captured)


def test_batches_are_read_over_the_rounds(network: nn.Module, images: Dataset) -> None:
    """Rounds draw different records: the union is searched for, and every round tells which of them it used."""
    federation = federation_of(images, records=2)
    plan = plan_of(noise_multiplier=0.0, clip=10.0, record_sampling="fixed", rounds=6, learning_rate=0.02)
    seen = watch(plan, network, federation, "type1", victims=3)
    assert seen.captured.most == 2
    for each in seen.observations:
        check_reproduces(each.captured)
    found = fedcdp.attack(plan, model=network, federation=federation, leak="type1", attack="accumulated", victims=3)
    assert isinstance(found, Leaks)
    assert found.success_rate == 1


def test_only_so_many_rounds_are_kept(network: nn.Module, federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulation, "MOST_ROUNDS", 3)
    seen = watch(plan_of(rounds=7), network, federation)
    assert [each.captured.round for each in seen.observations] == [0, 2, 4]
    assert (seen.rounds, seen.rounds_of) == (3, 7)
    monkeypatch.setattr(accumulation, "_MEMORY", {"cpu": 1})
    assert watch(plan_of(rounds=7), network, federation).rounds == 1


def test_a_runs_own_rounds_are_replayed(network: nn.Module, federation: Federation, tmp_path: Path) -> None:
    run = fedcdp.simulate(network, federation, plan_of(), out=tmp_path / "run", engine="functional")
    how: dict[str, Any] = {"attack": SHORT, "victims": 3}
    of_run = fedcdp.attack(run, model=network, **how).summary()
    of_plan = fedcdp.attack(plan_of(), model=network, federation=federation, **how).summary()
    assert (of_run["source"], of_plan["source"]) == (REPLAYED, PLAN)
    assert of_run["distance_mean"] == pytest.approx(of_plan["distance_mean"], rel=0.05)


def test_a_victims_own_example_is_no_candidate(network: nn.Module, federation: Federation) -> None:
    """A federation without public data has only its own: the victims are taken out."""
    alone = fedcdp.partition(federation.train, clients=6, scheme="iid")
    plan = plan_of(noise_multiplier=0.0)
    for name in ("accumulated", "class-prior"):
        with pytest.raises(FedcdpError, match="public: "):
            fedcdp.attack(plan, model=network, federation=alone, attack=name, victims=6)


def test_one_candidate_each_scores_as_among_many(network: nn.Module, federation: Federation) -> None:
    seen = watch(plan_of(), network, federation)
    inputs, targets = seen.captured.tensor[:, 0], seen.captured.targets[:, 0]
    alone = own_log_likelihoods(seen.observations, inputs, targets)
    torch.testing.assert_close(alone, log_likelihoods(seen.observations, 6, inputs, targets).diagonal())


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "long updates": ({"local_steps": 11}, {"leak": "type1"}, "at most 10 local steps of an update; this plan has 11"),
    "sums": ({"secure_aggregation": True, "noise": "cohort"}, {"leak": "type0"}, "type0 reads only "),
    "one round": ({}, {"at_round": 1}, "accumulated reads all rounds of a training"),
    "releases": ({}, {"releases": 5}, "accumulated reads all rounds of a training"),
    "many victims": ({}, {"victims": 7}, "victims: 7 is not allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_accumulated_is_refused(network: nn.Module, federation: Federation, case: str) -> None:
    fields, how, sentence = REFUSED[case]
    with pytest.raises(FedcdpError, match=sentence) as error:
        fedcdp.attack(plan_of(**fields), model=network, federation=federation, attack="accumulated", **how)
    assert "\n" not in str(error.value)


def test_updates_of_many_records_are_refused(network: nn.Module, images: Dataset) -> None:
    federation = fedcdp.partition(images.take(torch.arange(102)), clients=6, scheme="iid", validation=images)
    plan = plan_of(batch_size=17)
    with pytest.raises(FedcdpError, match="at most 16 records of a client; these updates hold 17"):
        fedcdp.attack(plan, model=network, federation=federation, leak="type1", attack="accumulated")


@pytest.mark.slow
def test_more_rounds_reconstruct_more(network: nn.Module, federation: Federation) -> None:
    errors = []
    for rounds in (1, 20):
        plan = plan_of(rounds=rounds, noise_multiplier=0.02, learning_rate=0.01)
        row = fedcdp.attack(plan, model=network, federation=federation, attack="accumulated", victims=6).summary()
        errors.append(row["distance_median"])
    assert errors[1] < 0.6 * errors[0]
