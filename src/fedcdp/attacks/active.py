"""Active servers: attacks by a server that chooses what it sends, and then reads what comes back.

An active attack has two parts. It crafts weights, or a whole network, that make a client's gradient tell more than it would
at honest weights. Then it reads the release, which comes from the method's own code, as for every other attack.

| what the server changes | a fedcdp deployment |
| --- | --- |
| the network: more or other layers | refuses it: a client builds the task's network itself, and compares all tensors |
| the weights of the task's network | accepts them: no client can tell crafted weights from trained ones |
| the weights for some clients of a secure sum | returns uniform bytes: masks cancel only for equal weights |

Fed-CDP's guarantee against the server holds for every choice of weights, also if each depends on earlier releases.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedcdp.attacks.cohort import reads_sum
from fedcdp.attacks.judging import Observer, told
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.observe import Captured, Leak, Look, capture, cohort_of
from fedcdp.attacks.presence import matched_filter
from fedcdp.attacks.reconstruct import Progress, Reconstruction
from fedcdp.attacks.scene import Scene
from fedcdp.attacks.scores import Criteria, cleaned
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.errors import ModelError, PlanError
from fedcdp.training.rounds import Simulator
from fedcdp.training.rundir import State

CHANGED_NETWORK = "assumes that clients accept a changed network; a fedcdp deployment refuses it (digest)"
CHANGED_WEIGHTS = "the network is the task's own; no client can tell crafted weights from trained ones"
_USUAL_VICTIMS = 10
_NEIGHBOURS_AT_ONCE = 256


@dataclass(frozen=True)
class Stage:
    """What an active server attacks, and what it knows: the plan, the network, public examples, and who reads."""

    scene: Scene
    look: Look
    victims: int | None
    criteria: Criteria
    seed: int

    @property
    def plan(self) -> Plan:
        """The plan, as run in the attacked round."""
        return self.scene.plan

    @property
    def simulator(self) -> Simulator:
        """The simulator of the honest network.

        Raises:
            PlanError: Raw gradients are attacked: their weights were chosen before.
        """
        if self.scene.simulator is None:
            raise PlanError("attack: an active server needs a run or a plan; the weights of raw gradients are given")
        return self.scene.simulator

    @property
    def state(self) -> State:
        """The state at the beginning of the attacked round."""
        if self.scene.state is None:
            raise PlanError("attack: an active server needs a run or a plan; the weights of raw gradients are given")
        return self.scene.state

    @property
    def reads_sum(self) -> bool:
        """Whether the server reads only the sum over the clients of a round."""
        return reads_sum(self.plan, self.look.leak)

    @property
    def public(self) -> Dataset:
        """Public examples."""
        return self.scene.public_examples()

    @property
    def examples(self) -> int:
        """How many records are behind an observation: public, as the numbers of records and clients are."""
        return self.batch * self.plan.local_steps * (self.plan.per_round if self.reads_sum else 1)

    @property
    def batch(self) -> int:
        """How many records a client uses in a step."""
        federation = self.simulator.data.federation
        return max(1, min(self.plan.batch_size, len(federation.train) // federation.clients))

    def crafted(self, network: nn.Module) -> Stage:
        """The same after the server has sent this network."""
        return replace(self, scene=self.scene.sent(network))

    def captured(self, first: int = 0) -> Captured:
        """The adversary's observation; `first` is the number of its first release, each of which has its own noise."""
        look = replace(self.look, first=first, unequal=True)
        return capture(self.simulator, self.state, look, self.usual_victims if self.victims is None else self.victims)

    @property
    def usual_victims(self) -> int | None:
        """How many clients are attacked by default: a few, because each holds many examples; None for a sum."""
        return None if self.reads_sum else min(_USUAL_VICTIMS, self.simulator.data.federation.clients)

    def observer(self, captured: Captured, visible: Tensor | None = None) -> Observer:
        """Compares with the truth: in all coordinates, unless some of them cannot be seen."""
        whole = torch.ones(self.scene.shape, dtype=torch.bool, device=self.scene.device)
        return Observer(captured, self.criteria, whole if visible is None else visible, self.scene.value_range)

    def result(
        self, name: str, captured: Captured, examples: Tensor, started: float, about: dict[str, Any], **more: Any
    ) -> Leaks:
        """The scored result for these examples [victims, guesses, ...], with targets like those of similar public ones."""
        observer = self.observer(captured, more.pop("visible", None))
        found = closed_form(captured, examples, self.public, **more)
        leaks = told(self.scene, name, captured, found, observer, time.perf_counter() - started, watched=False)
        return replace(leaks, about=leaks.about | about)

    def presence(self, progress: Progress | None = None, releases: int = 1) -> dict[str, Any]:
        """Under noise: how well the likelihood-ratio test at these weights detects a victim's first record."""
        victims = self.usual_victims if self.reads_sum or self.victims is None else self.victims
        if victims is not None and victims < 2:
            return {}
        found = matched_filter(
            self.simulator, self.state, self.look.leak, victims, releases=releases, public=self.public, progress=progress
        )
        told_ = found.summary()
        names = ("auc", "auc_interval_99", "auc_predicted", "distance_between_worlds")
        return {name: told_[name] for name in names} | {"presence_releases": releases}


class ActiveAttack:
    """An attack by an active server."""

    name: ClassVar[str]
    leaks: ClassVar[tuple[Leak, ...]] = ("type0", "type1")
    """Which adversaries can read the answer: the server, and someone who works with it."""
    unequal: ClassVar[bool] = True
    """Whether the records of a sum may weigh differently."""

    def why_not(self, stage: Stage) -> str | None:
        """Why the attack does not fit the plan and the network; None if it fits."""
        raise NotImplementedError

    def run(self, stage: Stage, progress: Progress | None = None) -> Leaks:
        """Craft, observe, read and score."""
        raise NotImplementedError

    def require_fit(self, stage: Stage) -> None:
        """Raise unless the attack fits."""
        if (reason := self.unfit(stage)) is not None:
            raise ModelError(f"attack: {self.name} {reason}")

    def unfit(self, stage: Stage) -> str | None:
        """Why the attack cannot be run here; None if it can."""
        if stage.scene.simulator is None:
            return "needs a run or a plan; the weights of raw gradients are given"
        if stage.scene.not_real:
            return f"needs real-valued inputs in one tensor; these are {stage.scene.not_real}"
        if stage.look.leak not in self.leaks:
            return f"is an attack by the server, which reads updates: use leak {' or '.join(self.leaks)}"
        if stage.plan.scaling_noise is not None:
            return "does not know the layer that scales inputs"
        if stage.reads_sum:
            reason = cohort_of(stage.simulator, stage.state).why_not_inverted(self.unequal)
            if reason is not None:
                return f"cannot read the sum of a round: {reason}"
        return self.why_not(stage)


@dataclass(frozen=True)
class Prior:
    """Public knowledge about single inputs: mean and variance of every coordinate, and the range."""

    mean: Tensor
    variance: Tensor
    peak: float
    """The smallest maximum of an input: no input is flatter."""
    low: float
    high: float

    @cached_property
    def span(self) -> float:
        """The width of the range."""
        return self.high - self.low

    @staticmethod
    def of(stage: Stage) -> Prior:
        """The prior that public examples give."""
        flat = stage.public.tensor.flatten(1).double().to(stage.scene.device)
        peak = float(flat.amax(1).min())
        return Prior(flat.mean(0), flat.var(0, unbiased=False), peak, *stage.scene.value_range)


def closed_form(
    captured: Captured, examples: Tensor, public: Dataset, solved: Tensor | None = None, iterations: int = 1
) -> Reconstruction:
    """The result of an attack without a search; targets are those of the nearest public example."""
    victims, device = len(captured), captured.device
    flat, known = examples.flatten(2).float(), public.tensor.flatten(1).float().to(device)
    nearest = torch.cat([torch.cdist(cleaned(some, -1e6, 1e6), known[None]).argmin(-1).flatten()
                         for some in flat.flatten(0, 1)[None].split(_NEIGHBOURS_AT_ONCE, dim=1)])  # fmt: skip
    labels = public.targets.to(device)[nearest].view(*examples.shape[:2], *public.targets.shape[1:])
    outcome = torch.zeros(victims, dtype=torch.int64, device=device)
    if solved is not None:
        outcome = torch.where(solved, Reconstruction.CONVERGED, 0)
    rounds = torch.full((victims,), iterations, dtype=torch.int64, device=device)
    loss = torch.zeros(victims, device=device)
    return Reconstruction(
        examples.float(), examples.float(), torch.zeros_like(examples).float(), labels, loss, rounds, outcome, victims
    )


def awake(network: nn.Module, seed: int) -> nn.Module:
    """A copy of the network whose trained dense layers are not zero: through a zero layer no gradient flows."""
    network = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(seed)
    for layer in network.modules():
        if isinstance(layer, nn.Linear) and layer.weight.requires_grad and not bool(layer.weight.any()):
            drawn = torch.randn(layer.weight.shape, generator=generator) / layer.in_features**0.5
            layer.weight.data.copy_(drawn)
    return network
