"""Run attacks of `breaching` 0.1.2 (Geiping et al.) on gradients that fedcdp captured.

`breaching` itself computes everything: labels, starts, objectives, regularisers and optimisers come from its code and its
configuration. Two things are ours. `load_breaching` puts an empty module in the place of torchvision, of which the attacks
use nothing. On a GPU, `_record_evaluations` records one evaluation of the objective as a CUDA graph: its small kernels take
longer to launch than to run. A replay must give the value and the gradient of `breaching`'s own function, or it is not used.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

SITE = Path(__file__).resolve().parents[2] / "build" / "breaching_site"
_WARM_UP = 8  # evaluations before a recording, in which libraries choose their algorithms
_CLOSE = 1e-4  # relative difference between a recorded evaluation and the original
_MOVED = 0.05  # how far a point is moved for the second comparison


@dataclass(frozen=True)
class Peer:
    """A configuration of `breaching`, and what is changed of it."""

    preset: str
    changes: tuple[str, ...] = ()
    infers_labels: bool = True
    """False: it optimises labels as well, and cannot be told them."""


PEERS = {
    "wei": Peer("wei"),
    # As Wei et al. ran it: a uniform start, the distance of gradients alone, no box.
    "wei, as published": Peer("wei", ("init=rand-patterned-16", "objective.task_regularization=0", "optim.boxed=False")),
    "deepleakage": Peer("deepleakage", infers_labels=False),
    "invertinggradients": Peer("invertinggradients"),
    # The total variation of the preset is for photographs of 224×224 pixels.
    "invertinggradients, TV 0.001": Peer("invertinggradients", ("regularization.total_variation.scale=0.001",)),
    "seethroughgradients": Peer("seethroughgradients"),
}


@dataclass(frozen=True)
class Answer:
    """What `breaching` makes of one gradient."""

    examples: Tensor
    """[examples, channels, height, width]"""
    labels: Tensor
    iterations: int
    evaluations: int
    seconds: float
    recorded: bool = False
    """Whether its evaluations were replays of a CUDA graph."""


class _Metadata(SimpleNamespace):
    """Facts about the data; `breaching` reads some as attributes and some as items."""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@cache
def load_breaching() -> Any:
    """The package `breaching`, from this environment or from build/breaching_site."""
    if SITE.is_dir() and str(SITE) not in sys.path:
        sys.path.append(str(SITE))
    warnings.filterwarnings("ignore", message=r"\s*The version_base parameter is not specified")
    stand_in = _stand_in_for_torchvision()
    before = {name: sys.modules.get(name) for name in stand_in}
    sys.modules |= stand_in
    try:
        import breaching
    except ImportError as error:
        raise SystemExit(f"breaching cannot be imported ({error}); `make breaching` builds build/breaching_site") from error
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
    logging.getLogger("breaching").setLevel(logging.WARNING)
    torch.jit.set_fusion_strategy([("STATIC", 0), ("DYNAMIC", 0)])  # compiling its scripted sums takes longer than they do
    return breaching


def _stand_in_for_torchvision() -> dict[str, ModuleType]:
    """Empty modules in the place of torchvision: `breaching` names it on import, but no attack uses it."""
    parts = {name: ModuleType(name) for name in ("torchvision", "torchvision.models", "torchvision.models.densenet",
                                                 "torchvision.transforms")}  # fmt: skip
    parts["torchvision.models.densenet"]._DenseLayer = nn.Module  # a base class
    parts["torchvision.models"].densenet = parts["torchvision.models.densenet"]
    parts["torchvision"].models = parts["torchvision.models"]
    return parts


def attack_gradient(
    peer: Peer,
    network: nn.Module,
    gradient: list[Tensor],
    shape: tuple[int, ...],
    classes: int,
    examples: int,
    labels: Tensor | None,
    *,
    device: torch.device,
    seed: int,
    iterations: int | None = None,
    record: bool = True,
) -> Answer:
    """Attack one gradient of `examples` examples; `labels` tells their labels to an attack that would infer them.

    `iterations` shortens the attack, for tests; None: as many as its configuration says.
    """
    breaching = load_breaching()
    torch.manual_seed(seed)
    shorter = () if iterations is None else (f"optim.max_iterations={iterations}",)
    with redirect_stdout(StringIO()):  # it prints the name of the configuration
        settings = breaching.get_attack_config(peer.preset, overrides=[*peer.changes, *shorter])
    network = network.to(device)
    attacker = breaching.attacks.prepare_attack(
        network, nn.CrossEntropyLoss(), settings, {"dtype": torch.float, "device": device}
    )
    recordings = _record_evaluations(attacker) if record and device.type == "cuda" else []
    counter = _count_evaluations(attacker)
    about = _Metadata(shape=shape, modality="vision", task="classification", classes=classes)
    told = None if labels is None or not peer.infers_labels else labels.to(device)
    server = {"parameters": list(network.parameters()), "buffers": None, "metadata": about}
    user = {"gradients": [each.to(device) for each in gradient], "buffers": None,
            "metadata": {"num_data_points": examples, "labels": told, "local_hyperparams": None}}  # fmt: skip
    started = time.perf_counter()
    found, stats = attacker.reconstruct([server], [user], {})
    seconds = time.perf_counter() - started
    return Answer(
        found["data"].detach().cpu(), found["labels"].detach().cpu(), len(stats["Trial_0_Val"]), counter["evaluations"],
        seconds, any(recordings),
    )  # fmt: skip


def _count_evaluations(attacker: Any) -> dict[str, int]:
    """Count how often the attack's closure is called."""
    counter, made = {"evaluations": 0}, attacker._compute_objective

    def counted(*words: Any) -> Callable[[], Tensor]:
        closure = made(*words)

        def evaluate() -> Tensor:
            counter["evaluations"] += 1
            value: Tensor = closure()
            return value

        return evaluate

    attacker._compute_objective = counted
    return counter


# Recorded evaluations ------------------------------------------------------------------------------------------------


def _record_evaluations(attacker: Any) -> list[_Recording | None]:
    """Replace the attack's evaluations by replays of one; the list gets it once it is made, or None if it cannot be."""
    optim = attacker.cfg.optim
    recordings: list[_Recording | None] = []
    if optim.langevin_noise > 0 or optim.grad_clip is not None or optim.signed == "soft":
        return recordings  # an evaluation depends on more than the point
    made, joint = attacker._compute_objective, attacker.cfg.attack_type == "joint-optimization"

    def recorded(candidate: Tensor, labels: Tensor, models: Any, optimizer: Any, shared: Any, iteration: int) -> Any:
        own = made(candidate, labels, models, optimizer, shared, iteration)
        moving = [candidate, labels] if joint else [candidate]
        if not recordings:
            copies = [each.detach().clone().requires_grad_() for each in moving]
            closure = made(copies[0], copies[1] if joint else labels, models, torch.optim.SGD(copies, 1.0), shared, 0)
            recordings.append(_Recording.of(attacker, closure, copies, own, moving))
        recording = recordings[0]
        return own if recording is None else lambda: recording.evaluate(attacker, moving)

    attacker._compute_objective = recorded
    return recordings


class _Recording:
    """One evaluation as a CUDA graph: from the values of some tensors to the objective and their gradients."""

    def __init__(self, attacker: Any, closure: Callable[[], Tensor], inputs: list[Tensor]) -> None:
        self._inputs = inputs
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                closure()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        for each in inputs:
            each.grad = None
        gc.collect()  # an earlier recording must not be freed during this one
        gc.disable()
        try:
            with torch.cuda.graph(self._graph):
                self._objective = closure().detach()
        finally:
            gc.enable()
        self._task_loss = attacker.current_task_loss

    @staticmethod
    def of(
        attacker: Any, closure: Callable[[], Tensor], inputs: list[Tensor], own: Callable[[], Tensor], moving: list[Tensor]
    ) -> _Recording | None:
        """The recording, if it can be made and agrees with the original at two points."""
        before = [each.detach().clone() for each in moving]
        try:
            recording = _Recording(attacker, closure, inputs)
            agrees = True
            for moved in (0.0, _MOVED):
                for each, start in zip(moving, before, strict=True):
                    each.data.copy_(start + moved * torch.randn_like(start))
                one, gradients = own().detach().clone(), [each.grad.clone() for each in moving if each.grad is not None]
                other = recording.evaluate(attacker, moving)
                agrees &= bool(torch.isclose(one, other, rtol=_CLOSE, atol=1e-9).all())
                agrees &= all(_alike(a, b.grad) for a, b in zip(gradients, moving, strict=True))
        except RuntimeError:
            torch.cuda.synchronize()
            recording, agrees = None, False
        for each, start in zip(moving, before, strict=True):
            each.data.copy_(start)
        return recording if agrees else None

    def evaluate(self, attacker: Any, moving: list[Tensor]) -> Tensor:
        """The objective; the gradients go to the moving tensors."""
        with torch.no_grad():
            for own, given in zip(self._inputs, moving, strict=True):
                own.copy_(given)
        self._graph.replay()
        for own, given in zip(self._inputs, moving, strict=True):
            assert own.grad is not None
            given.grad = own.grad.clone()
        attacker.current_task_loss = self._task_loss
        return self._objective.clone()


def _alike(one: Tensor, other: Tensor | None) -> bool:
    """Whether nearly all values agree: a sign may differ where a gradient is zero up to rounding."""
    if other is None:
        return False
    differs = (one - other).abs() > 1e-3 * one.abs().amax().clamp(min=1e-12)
    return float(differs.float().mean()) < 0.01
