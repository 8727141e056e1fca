"""An opponent that is not ours: `breaching` 0.1.2 (Geiping et al.) reads what our methods release to a type-2 reader, and
agrees with us on who leaks. Skipped where it is not installed, which is best done in an environment of its own:

    python3 -m venv breach
    breach/bin/pip install -c constraints.txt torch==2.13.0
    breach/bin/pip install -c constraints.txt -e . pytest
    breach/bin/pip install hydra-core==1.3.8
    breach/bin/pip install --no-deps breaching==0.1.2 torchvision==0.28.0 lpips==0.1.4
    OMP_NUM_THREADS=1 breach/bin/python -m pytest tests/integration/test_breaching.py

About two minutes on one thread with LFW and CIFAR-10 in FEDCDP_DATA, one on the embedded digits alone. The images have
three channels, for its patterned seeds and its total variation know no others; inputs are in [0, 1], not normalised.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp import Dataset, load
from fedcdp.engine import Batch, FunctionalEngine
from fedcdp.errors import DataError
from fedcdp.methods import METHODS, Moment, take_part
from fedcdp.models import build
from fedcdp.noise import noise_of
from fedcdp.plan import MethodName, Plan
from fedcdp.tree import Tree

try:
    pytest.importorskip("torchvision")
except RuntimeError:  # Its operators were compiled for another build of torch. Nothing here calls them; it wants them declared.
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
breaching = pytest.importorskip("breaching")

pytestmark = pytest.mark.filterwarnings("ignore:\nThe version_base parameter", "ignore::DeprecationWarning")

DATA = os.environ.get("FEDCDP_DATA")  # read before a fixture hides it
VICTIMS = 3
RECONSTRUCTED = 1e-2
UNRECOGNISABLE = 10**-1.5  # a PSNR of 15 dB

# Each preset with the network that it attacks and what is changed of it.
PRESETS = {
    # CPL as its authors ran it starts from uniform noise, matches gradients and nothing else, and is not confined to a box.
    # As shipped, the preset starts from normal noise, adds the cross-entropy, and clamps under L-BFGS: it never converges.
    "wei": (
        "cpl",
        "init=rand-patterned-16",
        "objective.task_regularization=0",
        "optim.boxed=False",
        "optim.max_iterations=60",
    ),
    # A total variation of 0.2 smooths digits away.
    "invertinggradients": (
        "cnn",
        "regularization.total_variation.scale=0.001",
        "optim.max_iterations=1500",
    ),
}
CASES = [("wei", "digits"), ("wei", "lfw"), ("wei", "cifar10"), ("invertinggradients", "digits")]


@dataclass(frozen=True)
class Opponent:
    """`breaching` under one of its presets, with a network, its victims, and what is known of their kind."""

    preset: str
    model: nn.Module
    victims: Dataset
    mean: Tensor

    def seen(self, method: MethodName) -> list[Tree]:
        """Each victim's gradient as a type-2 reader sees it, from the method's own code: a client with one record each."""
        shown: list[Tree] = []
        plan = Plan(
            method=method, noise_multiplier=6.0, clip=4, local_steps=1, batch_size=1, record_sampling="partition", per_round=1
        )
        engine, clients = FunctionalEngine(self.model, F.cross_entropy), torch.arange(len(self.victims))
        at = Moment(
            plan=plan,
            engine=engine,
            noise=noise_of(plan, engine.layout),
            round=0,
            clients=clients,
            expected_batch=torch.ones_like(clients),
            tap=lambda reader, _, seen: shown.append(seen) if reader == "type2" else None,
        )
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        one_each = Batch(self.victims.inputs[:, None], self.victims.targets[:, None], torch.ones(len(clients), 1) > 0)
        take_part(METHODS[method], weights, [one_each], at)
        return [{name: shown[0][name][client, 0] for name in engine.layout.shapes} for client in clients]

    def reconstruct(self, gradient: Tree, label: Tensor | None) -> tuple[Tensor, Tensor]:
        """The image that it makes of a gradient, and the label, which it infers where none is told."""
        settings = breaching.get_attack_config(self.preset, overrides=list(PRESETS[self.preset][1:]))
        attacker = breaching.attacks.prepare_attack(self.model, nn.CrossEntropyLoss(), settings)
        about_data = SimpleNamespace(shape=self.victims.shape, modality="vision")
        server = {"parameters": list(self.model.parameters()), "buffers": None, "metadata": about_data}
        about_user = {"num_data_points": 1, "labels": label, "local_hyperparams": None}
        user = {"gradients": list(gradient.values()), "buffers": None, "metadata": about_user}
        found, _ = attacker.reconstruct([server], [user], {})
        return found["data"][0].clamp(0, 1), found["labels"]

    def errors(self, method: MethodName, labels: list[Tensor | None]) -> tuple[list[float], list[Tensor]]:
        """The mean squared error of each victim's image, and the labels."""
        found = [self.reconstruct(gradient, label) for gradient, label in zip(self.seen(method), labels, strict=True)]
        return [squared_error(image, truth) for (image, _), truth in zip(found, self.victims.inputs, strict=True)], [
            label for _, label in found
        ]


def squared_error(one: Tensor, other: Tensor) -> float:
    return F.mse_loss(one, other).item()


def images(data: str) -> Dataset:
    """A dataset of 3×32×32 pixels: photographs where they are at hand, else digits in three like channels."""
    if data == "digits":
        digits = load("mnist5k").train
        return Dataset(F.pad(digits.inputs, (2, 2, 2, 2)).repeat(1, 3, 1, 1), digits.targets, digits.classes)
    if not DATA:
        pytest.skip(f"FEDCDP_DATA does not name a directory with {data}")
    try:
        return load(data, DATA, download=False).train
    except DataError as error:
        pytest.skip(str(error))
