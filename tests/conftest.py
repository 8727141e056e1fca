"""Small networks with data that are theirs, and a small demo, for all tests."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedcdp.models.networks import build
from tests.support.made_once import made_once

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():  # read when Triton is first imported, and one test or another may do that
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What is compiled once is there for all workers and for the next session.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"fedcdp-tests-inductor-{os.getuid()}"))

CLASSES = 3
EXAMPLES = 24


@dataclass(frozen=True)
class Problem:
    """A network, and examples that it can be trained on."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor


class Tied(nn.Module):
    """Two layers that share one weight, each with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


class Sentences(nn.Module):
    """An embedding of word numbers, averaged and normalised, with a scalar weight at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES)
        self.temperature = nn.Parameter(torch.tensor(0.8))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.words(inputs.long()).mean(-2))) * self.temperature


def _frozen() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    network[0].requires_grad_(False)
    network[2].bias.requires_grad_(False)
    return network


def _normalised() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()),
        nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)),
    )


def _vectors(generator: torch.Generator) -> Tensor:
    return torch.randn(EXAMPLES, 4, generator=generator)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "paper cnn": (lambda: build("cnn", (1, 10, 10), CLASSES), lambda g: torch.randn(EXAMPLES, 1, 10, 10, generator=g)),
    "mlp with biases": (lambda: build("mlp", (4,), CLASSES), _vectors),
    "tied weights": (Tied, _vectors),
    "frozen layer and frozen bias": (_frozen, _vectors),
    "group norm in blocks": (_normalised, lambda g: torch.randn(EXAMPLES, 1, 6, 6, generator=g)),
    "embedding and scalar": (
        Sentences,
        lambda g: torch.randint(7, (EXAMPLES, 5), generator=g).float(),
    ),
}


def _problem(name: str) -> Problem:
    make, inputs = NETWORKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = make()
    generator = torch.Generator().manual_seed(8)
    return Problem(model, inputs(generator), torch.randint(CLASSES, (EXAMPLES,), generator=generator))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_initial_weights() -> None:
    """Networks that a test makes itself start from PyTorch's global generator: the same in every run of the suite."""
    torch.manual_seed(0)


@pytest.fixture(params=NETWORKS)
def problem(request: pytest.FixtureRequest) -> Problem:
    """Each of the small networks in turn."""
    return _problem(request.param)


@pytest.fixture
def small() -> Problem:
    """One small network, where any will do: 4 inputs, a hidden layer of 5, biases."""
    found = _problem("mlp with biases")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    return Problem(model, found.inputs, found.targets)


@pytest.fixture(scope="session")
def demo_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished small demo: four real runs, each attacked by three readers. Not to be changed."""
    from fedcdp.studies.demo import Demo
    from tests.support.small_demo import FEWER, SILENT, SMALLER

    return made_once(tmp_path_factory, "demo", lambda out: Demo(out, SMALLER, FEWER).run(SILENT))


@pytest.fixture(autouse=True)
def no_training_of_another_test() -> None:
    """A test may change code that the memory of attacks does not compare."""
    if (replay := sys.modules.get("fedcdp.attacks.replay")) is not None:
        replay.forget()
