"""Models that people bring, from training to export: trained privately, accounted, attacked, written and read back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedcdp
from fedcdp.attacks.inferred import Inferred
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.recipe import CPL
from fedcdp.config.experiment import Experiment, assemble
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.deploy.protocol.local_round import LocalTraining, Round
from fedcdp.deploy.protocol.strategy import Job
from fedcdp.errors import ModelError
from fedcdp.files.tree import Layout, each_tensor, tensors_in
from fedcdp.models.networks import outputs_of
from fedcdp.training.prepared import network_of, stored
from fedcdp.training.run import Run
from fedcdp.training.saved_run import Trained
from fedcdp.training.trainer import train_experiment
from tests.support.own_models import CLASSES, FrozenCnn, LoraMlp, Recurrent, ResNet, Transformer, images, texts

PLAN = fedcdp.Plan(
    rounds=40, per_round=3, local_steps=1, batch_size=30, slots=60, clip=1, clip_mode="flat", noise_multiplier=0.05,
    learning_rate=1,
)  # fmt: skip


def pictures(count: int) -> Dataset:
    return Dataset(*images(count), CLASSES)


def tokens(count: int) -> Dataset:
    ids, _, targets = texts(count)
    return Dataset(ids, targets, CLASSES)


def masked_tokens(count: int) -> Dataset:
    ids, mask, targets = texts(count)
    return Dataset({"input_ids": ids, "attention_mask": mask}, targets, CLASSES)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    data: Callable[[int], Dataset]
    layers: int
    """The groups of layer clipping."""


CASES = {
    "frozen CNN with BatchNorm": Case(FrozenCnn, pictures, 1),
    "ResNet with GroupNorm": Case(lambda: fedcdp.replace_batch_norm(ResNet()), pictures, 11),
    "LSTM": Case(Recurrent, tokens, 3),
    "TransformerEncoder": Case(Transformer, masked_tokens, 14),
    "LoRA": Case(LoraMlp, pictures, 3),
}
_runs: dict[str, Run] = {}


def run_of(name: str) -> Run:
    """The run of a case, trained once for all tests."""
    if name not in _runs:
        case = CASES[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = case.make()
        federation = fedcdp.partition(case.data(300), clients=3, scheme="iid", validation=case.data(90))
        _runs[name] = fedcdp.simulate(model, federation, PLAN, evaluate_every=40)
    return _runs[name]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CASES)
def test_it_learns_privately_and_is_accounted(name: str) -> None:
    run = run_of(name)
    assert run.accuracy is not None
    assert run.accuracy > 0.6
    promised = PLAN.privacy(run.federation, model=CASES[name].make())
    assert run.privacy().row("server").epsilon_used == pytest.approx(promised.row("server").epsilon)
    assert run.population.layers == 1  # flat clipping: no √M


@pytest.mark.parametrize("name", CASES)
def test_layer_clipping_counts_modules_that_own_tensors(name: str) -> None:
    case = CASES[name]
    assert len(Layout.of(case.make()).layers) == case.layers


@pytest.mark.slow
@pytest.mark.parametrize("leak", ["type2", "type0"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_attacked(name: str, leak: str) -> None:
    run = run_of(name)
    real = CASES[name].data is pictures
    found = fedcdp.attack(run, leak=leak, victims=2, attack=CPL.but(iterations=2) if real else None)
    assert isinstance(found, Leaks if real else Inferred)
    assert found.summary()["victims"] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_it_is_exported_to_onnx_for_any_batch(name: str, tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    run, data = run_of(name), CASES[name].data(7)
    trained = Trained(None, None, Splits("made up", data, data, None, ""), run.model.eval())  # type: ignore[arg-type]
    program = ReferenceEvaluator(str(trained.export("onnx", tmp_path / "model.onnx")))
    for count in (1, 7):
        some = each_tensor(data.inputs, lambda value: value[:count])  # noqa: B023
        given = dict(zip(program.input_names, (value.numpy() for value in tensors_in(some)), strict=True))
        with torch.no_grad():
            expected = outputs_of(run.model, some).numpy()
        np.testing.assert_allclose(program.run(None, given)[0], expected, rtol=1e-4, atol=1e-5)


# A factory, as the command line takes it: stopped, resumed, read back and attacked -----------------------------------------

FACTORY = """
from tests.support.own_models import FrozenCnn

def frozen(): return FrozenCnn()
def forgotten(): return FrozenCnn().train()
"""


def experiment_with(factory: str) -> Experiment:
    return assemble(
        {
            "data": {"file": "images.npz", "clients": 3},
            "model": {"network": f"backbones_for_a_test:{factory}"},
            "plan": {"rounds": 4, "per_round": 3, "local_steps": 1, "batch_size": 10, "noise_multiplier": 1.0},
        }
    )


def test_a_factory_freezes_a_backbone_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    inputs, targets = images(120)
    np.savez("images.npz", x=inputs[:, 0].numpy(), y=targets.numpy())
    Path("backbones_for_a_test.py").write_text(FACTORY)
    with pytest.raises(ModelError, match=r"layer backbone\.norm is BatchNorm2d"):
        train_experiment(experiment_with("forgotten"), None)
    assert train_experiment(experiment_with("frozen"), "run", most_releases=2).rounds == 2
    assert train_experiment(stored("run"), "run", resume=True).rounds == 4
    trained = Trained.load("run")
    built = network_of(trained.experiment, trained.splits)
    trained.evaluate("validation")
    fedcdp.attack(trained.as_run(), leak="type2", victims=1, attack=CPL.but(iterations=1))
    assert len(list(built.buffers())) == 6
    assert not any(isinstance(layer, nn.BatchNorm2d) and layer.training for layer in trained.model.modules())
    for name, value in built.named_buffers():
        assert torch.equal(trained.model.state_dict()[name], value)
    assert not torch.equal(trained.model.head.weight, built.head.weight)


def test_a_deployed_client_leaves_statistics_bit_identical() -> None:
    plan = fedcdp.Plan(rounds=2, per_round=2, local_steps=2, batch_size=5, noise_multiplier=1, secure_noise=True)
    about = {"network_name": "mine:frozen", "shape": (1, 8, 8), "classes": CLASSES, "clients": 2}
    job = Job(network=FrozenCnn(), plan=plan, **about)  # type: ignore[arg-type]
    network = FrozenCnn()
    client = LocalTraining(job.task(), network, pictures(20), nn.functional.cross_entropy, torch.device("cpu"))
    before = {name: value.clone() for name, value in network.named_buffers()}
    weights = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    sent = client.take_part(weights, Round(0, 0, None))
    assert set(sent.update) == set(weights)
    for held in (network, client.engine.model):
        assert all(torch.equal(value, before[name]) for name, value in held.named_buffers())
