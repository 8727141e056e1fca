"""An opponent that is not ours: `breaching` 0.1.2 (Geiping et al.) reads what our methods show to a type-2 reader, and
agrees with us on who leaks. Skipped where it is not installed, which is best done in an environment of its own:

    python3 -m venv breach
    breach/bin/pip install -c constraints.txt torch==2.13.0
    breach/bin/pip install -c constraints.txt -e . pytest hydra-core==1.3.8
    breach/bin/pip install --no-deps breaching==0.1.2 torchvision==0.28.0 lpips==0.1.4
    OMP_NUM_THREADS=1 breach/bin/python -m pytest tests/attacks/test_breaching.py

Some seventy seconds on one thread for the embedded digits, and 35 more for each of LFW and CIFAR-10 that FEDCDP_DATA has.
Images have three channels, for its patterned seeds and its total variation know no others; inputs are in [0, 1] and not
normalised.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.config.plan import MethodName, Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.load import load
from fedcdp.engine import Batch, FunctionalEngine
from fedcdp.errors import DataError
from fedcdp.files.tree import Tree
from fedcdp.mechanism.noise import noise_of
from fedcdp.methods import METHODS, Moment, take_part
from fedcdp.models.networks import build

try:
    pytest.importorskip("torchvision")
except RuntimeError:
    # Its operators are compiled for another build of torch. Nothing here uses them, but it wants them declared.
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
breaching = pytest.importorskip("breaching")

pytestmark = pytest.mark.filterwarnings(r"ignore:\s*The version_base parameter is not specified")

DATA = os.environ.get("FEDCDP_DATA")  # read before a fixture hides it
VICTIMS = 3
UNRECOGNISABLE = 10**-1.5  # a PSNR of 15 dB


@dataclass(frozen=True)
class Attack:
    """A preset of `breaching`, the network of ours that it attacks, and what is changed of the preset."""

    preset: str
    network: str
    infers_labels: bool
    reaches: float
    """What its median squared error stayed below, on each of a few seeds, when nothing defended the victims."""
    changes: tuple[str, ...]


# CPL starts from uniform noise, matches gradients and nothing else, and is free to leave the box. The shipped preset starts
# from normal noise, adds the cross-entropy and clamps between the steps of L-BFGS: on this network it does not converge.
# Some starts are bad ones, hence two, of which it takes the one that matches the gradient better.
CPL = Attack(
    "wei",
    "cpl",
    True,
    1e-2,
    (
        "init=rand-patterned-16",
        "objective.task_regularization=0",
        "optim.boxed=False",
        "optim.max_iterations=40",
        "restarts.num_trials=2",
    ),
)
# As much total variation as the preset has, 0.2, smooths digits away. The network has no bias to infer labels from.
INVERTING_GRADIENTS = Attack(
    "invertinggradients",
    "cnn",
    False,
    2e-2,
    ("regularization.total_variation.scale=0.001", "optim.max_iterations=1500"),
)


@functools.cache
def images(data: str) -> Dataset:
    """Images of 3×32×32 pixels: photographs where they are at hand, else digits, the same in every channel."""
    if data == "digits":
        digits = load("mnist5k").train
        return Dataset(F.pad(digits.inputs, (2, 2, 2, 2)).repeat(1, 3, 1, 1), digits.targets, digits.classes)
    if not DATA:
        pytest.skip(f"FEDCDP_DATA does not name a directory with {data}")
    try:
        return load(data, DATA, download=False).train
    except DataError as error:
        pytest.skip(str(error))


def gradients_shown(method: MethodName, model: nn.Module, victims: Dataset) -> list[Tree]:
    """Each victim's gradient as a type-2 reader sees it, by the method's own code; every victim is a client's one record."""
    shown: list[Tree] = []

    def tap(reader: str, _: Moment, seen: Tree) -> None:
        if reader == "type2":
            shown.append(seen)

    one_record = {"local_steps": 1, "batch_size": 1, "record_sampling": "partition"}
    plan = Plan(method=method, noise_multiplier=6.0, clip=4, **one_record)
    engine, clients = FunctionalEngine(model, F.cross_entropy), torch.arange(len(victims))
    at = Moment(plan, engine, noise_of(plan, engine.layout), 0, clients, torch.ones_like(clients), tap=tap)
    batch = Batch(victims.inputs[:, None], victims.targets[:, None], torch.ones(len(victims), 1, dtype=torch.bool))
    take_part(METHODS[method], {name: parameter.detach() for name, parameter in model.named_parameters()}, [batch], at)
    assert len(shown) == 1
    return [{name: shown[0][name][client, 0] for name in engine.layout.shapes} for client in clients]


def reconstruct(
    attack: Attack, model: nn.Module, gradient: Tree, shape: tuple[int, ...], label: Tensor | None
) -> tuple[Tensor, int]:
    """What `breaching` makes of a gradient: an image, and the label, which it infers unless it is told."""
    settings = breaching.get_attack_config(attack.preset, overrides=list(attack.changes))
    attacker = breaching.attacks.prepare_attack(model, nn.CrossEntropyLoss(), settings)
    about_data = SimpleNamespace(shape=shape, modality="vision")
    about_user = {"num_data_points": 1, "labels": label, "local_hyperparams": None}
    server = {"parameters": list(model.parameters()), "buffers": None, "metadata": about_data}
    user = {"gradients": list(gradient.values()), "buffers": None, "metadata": about_user}
    found, _ = attacker.reconstruct([server], [user], {})
    return found["data"][0].clamp(0, 1), int(found["labels"])


@dataclass(frozen=True)
class Outcome:
    """How far the image is from the victim's, and how far the mean of all images is; both labels."""

    error: float
    error_of_mean: float
    label: int
    true_label: int


def attacked(attack: Attack, data: str, method: MethodName, tell_labels: bool) -> list[Outcome]:
    everybody = images(data)
    victims, mean = everybody.take(torch.arange(VICTIMS)), everybody.inputs.mean(0)
    model = build(attack.network, victims.shape, victims.classes)
    outcomes = []
    for gradient, image, label in zip(gradients_shown(method, model, victims), victims.inputs, victims.targets, strict=True):
        if method == "nonprivate":  # else a failure would say nothing about the opponent
            own = torch.autograd.grad(F.cross_entropy(model(image[None]), label[None]), list(model.parameters()))
            torch.testing.assert_close(list(gradient.values()), list(own), rtol=1e-4, atol=1e-5)
        found, inferred = reconstruct(attack, model, gradient, victims.shape, label[None] if tell_labels else None)
        outcomes.append(Outcome(F.mse_loss(found, image).item(), F.mse_loss(mean, image).item(), inferred, int(label)))
    return outcomes


every_case = pytest.mark.parametrize(
    ("attack", "data"),
    [(CPL, "digits"), (CPL, "lfw"), (CPL, "cifar10"), (INVERTING_GRADIENTS, "digits")],
    ids=["cpl-digits", "cpl-lfw", "cpl-cifar10", "inverting-gradients-digits"],
)


@every_case
def test_an_undefended_gradient_gives_the_image_and_its_label_away(attack: Attack, data: str) -> None:
    outcomes = attacked(attack, data, "nonprivate", tell_labels=not attack.infers_labels)
    assert [each.label for each in outcomes] == [each.true_label for each in outcomes]
    assert median(each.error for each in outcomes) < attack.reaches, outcomes


@every_case
def test_under_fed_cdp_no_image_is_found_even_by_who_is_told_the_label(attack: Attack, data: str) -> None:
    for outcome in attacked(attack, data, "fed-cdp", tell_labels=True):
        assert outcome.error > outcome.error_of_mean
        assert outcome.error > UNRECOGNISABLE
