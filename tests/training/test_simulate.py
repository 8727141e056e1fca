"""The simulator: rounds of many clients, the same however they are grouped."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.load import load
from fedcdp.data.partition import Federation, partition
from fedcdp.errors import ModelError, PlanError, RunError
from fedcdp.mechanism.sampling import choose_clients, choose_records
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.simulate import simulate

CLASSES = 3
METHODS = ["nonprivate", "fed-sdp", "fed-cdp", "fed-cdp-decay", "dssgd"]


def examples(count: int, seed: int) -> Dataset:
    """Three clouds of points that a line can tell apart, nearly."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(count) % CLASSES
    centres = torch.tensor([[2.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 2.0, 0]])
    return Dataset(centres[targets] + torch.randn(count, 4, generator=generator), targets, CLASSES)


@pytest.fixture
def federation() -> Federation:
    splits = Splits("clouds", examples(120, 1), examples(45, 2), None, "as drawn")
    return partition(splits, clients=10, scheme="iid")


@pytest.fixture
def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def plan(**changes: object) -> Plan:
    usual = {"rounds": 3, "per_round": 7, "local_steps": 3, "batch_size": 4, "noise_multiplier": 0.3}
    return Plan(**usual | changes)  # type: ignore[arg-type]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# what does not change the result -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_how_many_clients_are_trained_at_once_changes_nothing_but_rounding(
    model: nn.Module, federation: Federation, method: str
) -> None:
    whole = simulate(model, federation, plan(method=method))
    assert (weights(whole.model) - weights(model)).abs().max() > 1e-3
    for chunk in (1, 3, 100):
        run = simulate(model, federation, plan(method=method), chunk=chunk)
        torch.testing.assert_close(weights(run.model), weights(whole.model), rtol=0, atol=1e-5)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(model: nn.Module, federation: Federation) -> None:
    one, again, other = (weights(simulate(model, federation, plan(seed=seed)).model) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.allclose(one, other, atol=1e-3)


def test_the_worlds_random_numbers_are_neither_used_nor_moved(model: nn.Module, federation: Federation) -> None:
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    before = torch.get_rng_state()
    one = weights(simulate(model, federation, plan()).model)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    np.random.seed(6)  # noqa: NPY002
    assert torch.equal(weights(simulate(model, federation, plan()).model), one)


def test_the_given_model_is_left_as_it_was(model: nn.Module, federation: Federation) -> None:
    model.eval()
    before = copy.deepcopy(model.state_dict())
    run = simulate(model, federation, plan())
    assert run.model is not model
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_schedule_of_evaluations_does_not_change_the_model(model: nn.Module, federation: Federation) -> None:
    runs = [simulate(model, federation, plan(rounds=5), evaluate_every=every) for every in (1, 2)]
    assert torch.equal(weights(runs[0].model), weights(runs[1].model))
    assert [row["round"] for row in runs[1].metrics if "accuracy" in row] == [2, 4, 5]
    assert runs[0].accuracy == runs[1].accuracy


# what a run says -----------------------------------------------------------------------------------------------------


def test_training_learns(model: nn.Module, federation: Federation) -> None:
    run = simulate(model, federation, plan(method="nonprivate", rounds=20, learning_rate=0.3))
    assert run.accuracy is not None
    assert run.accuracy > 0.75
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]


def test_a_run_knows_its_rounds_steps_and_speed(model: nn.Module, federation: Federation) -> None:
    run = simulate(model, federation, plan(rounds=4))
    assert run.rounds == 4
    assert run.client_steps == 4 * 7 * 3
    assert run.us_per_client_step == pytest.approx(run.seconds / run.client_steps * 1e6)
    assert run.seconds >= sum(row["seconds"] for row in run.metrics) * 0.9
    assert run.accuracy == run.metrics[-1]["accuracy"]
    assert run.directory is None
    assert run.federation is federation


def test_the_figures_of_a_round_are_those_of_the_model(model: nn.Module, federation: Federation) -> None:
    run = simulate(model, federation, plan())
    validation = federation.validation
    assert validation is not None
    with torch.no_grad():
        outputs = run.model(validation.inputs)
    accuracy = (outputs.argmax(-1) == validation.targets).double().mean().item()
    assert run.metrics[-1]["accuracy"] == pytest.approx(accuracy)
    assert run.metrics[-1]["loss"] == pytest.approx(F.cross_entropy(outputs, validation.targets).item(), rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_metrics_hold_nothing_that_the_guarantee_does_not_cover(
    model: nn.Module, federation: Federation, method: str
) -> None:
    private = method.startswith("fed-")
    expected = {"round", "clients", "learning_rate", "accuracy", "loss", "seconds"}
    expected |= {"clip" if private else "gradient_norm"}
    for row in simulate(model, federation, plan(method=method)).metrics:
        assert set(row) == expected


def test_metrics_follow_the_schedules(model: nn.Module, federation: Federation) -> None:
    run = simulate(model, federation, plan(clip="linear(6, 2)", learning_rate="linear(0.3, 0.1)"))
    assert [row["clip"] for row in run.metrics] == [6, 4, 2]
    assert [row["learning_rate"] for row in run.metrics] == pytest.approx([0.3, 0.2, 0.1])
    assert [row["clients"] for row in run.metrics] == [7, 7, 7]


def test_progress_is_told_every_row_once(model: nn.Module, federation: Federation) -> None:
    told: list[dict[str, object]] = []
    run = simulate(model, federation, plan(), progress=told.append)
    assert told == run.metrics


def test_the_validation_figure_under_a_moving_average_is_the_averages(
    model: nn.Module, federation: Federation, tmp_path: Path
) -> None:
    run = simulate(model, federation, plan(ema=0.9, rounds=4, learning_rate=0.5), out=tmp_path / "run")
    state = RunDirectory(tmp_path / "run").load_state()
    validation = federation.validation
    assert state is not None
    assert state.average is not None
    assert validation is not None
    losses = {}
    for name, tree in (("average", state.average), ("latest", state.weights)):
        network = copy.deepcopy(model)
        network.load_state_dict(tree)
        with torch.no_grad():
            losses[name] = F.cross_entropy(network(validation.inputs), validation.targets).item()
    assert run.metrics[-1]["loss"] == pytest.approx(losses["average"], rel=1e-5)
    assert abs(losses["average"] - losses["latest"]) > 1e-3
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, state.average[name])


def test_the_moving_average_is_kept_from_the_first_model_on(model: nn.Module, federation: Federation) -> None:
    latest = [simulate(model, federation, plan(rounds=rounds)).model for rounds in (1, 2)]
    average = simulate(model, federation, plan(rounds=2, ema=0.75)).model
    expected = weights(model)
    for each in latest:
        expected = 0.75 * expected + 0.25 * weights(each)
    torch.testing.assert_close(weights(average), expected, rtol=1e-5, atol=1e-6)


# who takes part ------------------------------------------------------------------------------------------------------


def test_rounds_and_clients_can_be_said_at_the_call(model: nn.Module, federation: Federation) -> None:
    run = simulate(model, federation, plan(rounds=100, per_round=9), rounds=2, per_round=4)
    assert (run.rounds, run.plan.rounds, run.plan.per_round) == (2, 2, 4)
    same = simulate(model, federation, plan(rounds=2, per_round=4))
    assert torch.equal(weights(run.model), weights(same.model))


def test_more_clients_than_there_are_cannot_be_asked_for(model: nn.Module, federation: Federation) -> None:
    with pytest.raises(PlanError, match=r"per_round: 11 .* at most 10"):
        simulate(model, federation, plan(), per_round=11)


def test_poisson_clients_come_in_varying_numbers(model: nn.Module, federation: Federation) -> None:
    run = simulate(model, federation, plan(client_sampling="poisson", rounds=30, per_round=8, local_steps=1))
    counts = [row["clients"] for row in run.metrics]
    assert len(set(counts)) > 2
    assert max(counts) <= 10
    assert 6.5 < np.mean(counts) < 9.5
    assert run.client_steps == sum(counts)


@pytest.mark.parametrize("method", METHODS)
def test_a_round_without_any_client_is_a_round(model: nn.Module, federation: Federation, method: str) -> None:
    options = {"client_sampling": "poisson", "rounds": 12, "per_round": 1, "local_steps": 1, "method": method}
    seen: list[Tensor] = []
    run = simulate(model, federation, plan(**options), evaluate_every=1)
    assert 0 in [row.get("clients", 0) for row in run.metrics]
    assert torch.isfinite(weights(run.model)).all()
    if method in ("nonprivate", "dssgd", "fed-cdp"):  # no client, no update: the model stays
        first = next(row["round"] for row in run.metrics if row["clients"] == 0)
        for rounds in (first - 1, first):
            shorter = simulate(model, federation, plan(**options | {"rounds": rounds})) if rounds else None
            seen.append(weights(shorter.model if shorter else model))
        assert torch.equal(seen[0], seen[1])


def test_a_federation_without_validation_is_trained_without_figures(model: nn.Module) -> None:
    run = simulate(model, partition(examples(60, 1), clients=8, scheme="iid"), plan())
    assert run.accuracy is None
    assert all("accuracy" not in row and "loss" not in row for row in run.metrics)
    assert not torch.equal(weights(run.model), weights(model))


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "partition"])
def test_clients_may_hold_different_numbers_of_records(model: nn.Module, sampling: str) -> None:
    data = examples(60, 1)
    lists = np.split(np.arange(60), [1, 3, 10, 30])
    listed = partition(data, indices=lists, validation=examples(30, 2))
    options = plan(per_round=5, record_sampling=sampling, method="nonprivate")
    whole = simulate(model, listed, options)
    assert whole.accuracy is not None
    one_by_one = simulate(model, listed, options, chunk=1)
    torch.testing.assert_close(weights(one_by_one.model), weights(whole.model), rtol=0, atol=1e-5)


# what is written of raw gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "partition"])
@pytest.mark.parametrize("method", ["nonprivate", "dssgd"])
def test_the_gradient_norm_is_that_of_each_clients_first_batch_at_the_global_model(
    model: nn.Module, federation: Federation, method: str, sampling: str
) -> None:
    told = plan(method=method, record_sampling=sampling, per_round=4, rounds=2)
    written = [row["gradient_norm"] for row in simulate(model, federation, told, evaluate_every=1).metrics]
    at_start = [copy.deepcopy(model), simulate(model, federation, told, rounds=1).model]
    for round_, network in enumerate(at_start):
        clients = torch.from_numpy(choose_clients(told, federation.clients, round_))
        table, sizes = federation.table(clients.numpy())
        draw = choose_records(told, clients, torch.from_numpy(sizes), round_, 0)
        norms = []
        for records, positions, present in zip(torch.from_numpy(table), draw.positions, draw.present, strict=True):
            used = records[positions[present]]
            network.zero_grad()
            loss = F.cross_entropy(network(federation.train.inputs[used]), federation.train.targets[used], reduction="sum")
            loss.backward()
            norms.append(torch.cat([each.grad.flatten() for each in network.parameters()]).norm() / told.batch_size)
        assert written[round_] == pytest.approx(float(torch.stack(norms).mean()), rel=1e-4)


def test_the_gradient_norm_depends_neither_on_the_engine_nor_on_the_chunk(model: nn.Module, federation: Federation) -> None:
    raw = plan(method="nonprivate")
    runs = [simulate(model, federation, raw, engine=name) for name in ("functional", "batched")]
    runs.append(simulate(model, federation, raw, chunk=2))
    norms = [[row["gradient_norm"] for row in run.metrics] for run in runs]
    assert all(norm > 0.01 for norm in norms[0])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert norms[2] == pytest.approx(norms[0], rel=1e-4)


def test_the_gradient_norm_is_written_where_a_round_is_evaluated(model: nn.Module, federation: Federation) -> None:
    run = simulate(model, federation, plan(method="nonprivate", rounds=5), evaluate_every=2)
    assert [row["round"] for row in run.metrics if "gradient_norm" in row] == [2, 4, 5]


@pytest.mark.parametrize("method", ["fed-sdp", "fed-cdp", "fed-cdp-decay"])
@pytest.mark.parametrize("noise_multiplier", [0.3, 0.0])
def test_a_private_run_writes_no_gradient_norm(
    model: nn.Module, federation: Federation, method: str, noise_multiplier: float
) -> None:
    run = simulate(model, federation, plan(method=method, noise_multiplier=noise_multiplier))
    assert all("gradient_norm" not in row for row in run.metrics)


def test_a_gradient_norm_that_does_not_exist_is_null(model: nn.Module, federation: Federation, tmp_path: Path) -> None:
    empty = plan(method="nonprivate", client_sampling="poisson", rounds=12, per_round=1, local_steps=1)
    run = simulate(model, federation, empty, out=tmp_path / "run")
    assert any(row["clients"] == 0 and row["gradient_norm"] is None for row in run.metrics)
    assert all(row["gradient_norm"] > 0 for row in run.metrics if row["clients"])


# what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "value"), [("chunk", 0), ("evaluate_every", 0), ("rounds", 0), ("per_round", 0)])
def test_numbers_below_one_are_refused(model: nn.Module, federation: Federation, option: str, value: int) -> None:
    with pytest.raises(PlanError, match=f"{option}: 0 is not allowed"):
        simulate(model, federation, plan(), **{option: value})  # type: ignore[arg-type]


def test_a_device_that_is_not_there_is_refused(model: nn.Module, federation: Federation) -> None:
    with pytest.raises(PlanError, match="device: nosuch cannot be used"):
        simulate(model, federation, plan(), device="nosuch")


def test_a_network_for_other_inputs_is_refused_before_any_file_is_written(federation: Federation, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the network fails on a batch of .* mat1 and mat2"):
        simulate(nn.Linear(5, 3), federation, plan(), out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


# on disk -------------------------------------------------------------------------------------------------------------


def test_what_is_on_disk_is_what_is_in_the_result(model: nn.Module, federation: Federation, tmp_path: Path) -> None:
    run = simulate(model, federation, plan(), out=tmp_path / "run", config="# mine\n")
    assert run.directory == tmp_path / "run"
    assert (run.directory / "config.toml").read_text() == "# mine\n"
    assert [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()] == run.metrics
    stored = load_file(run.directory / "model.safetensors")
    assert stored.keys() == run.model.state_dict().keys()
    assert all(torch.equal(stored[name], value) for name, value in run.model.state_dict().items())
    in_memory = simulate(model, federation, plan())
    assert torch.equal(weights(in_memory.model), weights(run.model))


def test_a_run_stopped_by_its_caller_goes_on_where_it_was(model: nn.Module, federation: Federation, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(row: dict[str, object]) -> None:
        if row["round"] == 2:
            raise StopError

    out = tmp_path / "run"
    with pytest.raises(StopError):
        simulate(model, federation, plan(rounds=5), out=out, progress=stop)
    assert not (out / "model.safetensors").exists()
    resumed = simulate(model, federation, plan(rounds=5), out=out, resume=True)
    assert resumed.client_steps == 3 * 7 * 3
    assert [row["round"] for row in resumed.metrics] == [1, 2, 3, 4, 5]
    assert torch.equal(weights(resumed.model), weights(simulate(model, federation, plan(rounds=5)).model))


def test_a_run_is_not_written_over_another(model: nn.Module, federation: Federation, tmp_path: Path) -> None:
    simulate(model, federation, plan(), out=tmp_path / "run")
    before = (tmp_path / "run/model.safetensors").read_bytes()
    with pytest.raises(RunError, match="already exists"):
        simulate(model, federation, plan(seed=1), out=tmp_path / "run")
    assert (tmp_path / "run/model.safetensors").read_bytes() == before


def test_a_directory_in_use_is_refused_before_calibration(
    model: nn.Module, federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedcdp.training.simulate.recommended_plan", lambda *_, **__: pytest.fail("calibration started"))
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(RunError, match="already exists"):
        simulate(model, federation, target_epsilon=1, out=tmp_path)


def test_a_run_is_not_resumed_under_another_plan(model: nn.Module, federation: Federation, tmp_path: Path) -> None:
    simulate(model, federation, plan(rounds=2), out=tmp_path / "run")
    with pytest.raises(RunError):
        simulate(model, federation, plan(rounds=4, noise_multiplier=0.0), out=tmp_path / "run", resume=True)


def test_a_network_with_tied_weights_is_kept_too(federation: Federation, tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)
            self.second.weight = self.first.weight

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(torch.tanh(self.second(torch.tanh(self.first(inputs)))))

    run = simulate(Tied(), federation, plan(), out=tmp_path / "run")
    stored = load_file(tmp_path / "run/model.safetensors")
    again = Tied()
    again.load_state_dict(stored, strict=False)
    assert torch.equal(weights(again), weights(run.model))


def test_a_frozen_layer_and_a_buffer_stay_and_are_kept(federation: Federation, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    network[0].requires_grad_(False)
    network.register_buffer("scale", torch.tensor([3.0]))
    before = copy.deepcopy(network.state_dict())
    simulate(network, federation, plan(), out=tmp_path / "run")
    stored = load_file(tmp_path / "run/model.safetensors")
    for name in ("0.weight", "0.bias", "scale"):
        assert torch.equal(stored[name], before[name])
    assert not torch.equal(stored["2.weight"], before["2.weight"])


def test_the_loss_is_the_callers(model: nn.Module, federation: Federation) -> None:
    run = simulate(model, federation, plan(), loss=F.multi_margin_loss)
    validation = federation.validation
    assert validation is not None
    with torch.no_grad():
        loss = F.multi_margin_loss(run.model(validation.inputs), validation.targets).item()
    assert run.metrics[-1]["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_run_knows_the_loss_that_was_given_and_no_other() -> None:
    """Attacks recognise PyTorch's own losses; a wrapper of one would send them to weaker attacks."""
    federation = partition(load("cancer"), clients=4, scheme="iid")
    plan = Plan(rounds=1, per_round=4, local_steps=1)
    assert simulate(nn.Linear(30, 2), federation, plan).loss is None
    assert simulate(nn.Linear(30, 2), federation, plan, loss=F.cross_entropy).loss is F.cross_entropy
