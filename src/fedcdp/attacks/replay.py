"""Replay a training round by round for an adversary that observes all of it: bit-exact for seeded runs, else by its plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from fedcdp.config.experiment import EngineName
from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.engine import Loss
from fedcdp.engine.runtime import stop_if_asked
from fedcdp.errors import RunError
from fedcdp.files.tree import Tree
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.training.prepared import Prepared
from fedcdp.training.rounds import Simulator
from fedcdp.training.run import Run
from fedcdp.training.rundir import RunDirectory, State
from fedcdp.training.trainer import begin

PLAN = "a training of the plan"
REPLAYED = "the run's own rounds, replayed from its seed"
FRESH = "a fresh training of the run's plan: its secure noise cannot be replayed"


@dataclass(frozen=True)
class Course:
    """A whole training: the untrained network, the data, the plan, and the run, if there is one."""

    network: nn.Module
    federation: Federation
    plan: Plan
    device: torch.device
    loss: Loss
    run: Run | None = None

    @property
    def rounds(self) -> int:
        """Number of rounds to observe."""
        return self.plan.rounds if self.run is None else self.run.rounds

    @property
    def is_replay(self) -> bool:
        """Whether the replayed rounds are the run's own."""
        return self.run is not None and not (self.plan.secure_noise and self.plan.private)

    @property
    def source(self) -> str:
        """Description of where the rounds come from."""
        return REPLAYED if self.is_replay else PLAN if self.run is None else FRESH

    def begin(self) -> tuple[Simulator, State]:
        """The simulator and the state before round 0; computes as the run did, if that is known."""
        engine, chunk = self._computing()
        prepared = Prepared.of(self.network, self.federation, self.plan)
        network = prepared.network.to(self.device)
        return begin(prepared, network, device=self.device, loss=self.loss, engine=engine, chunk=chunk, per_example=True)

    def states(self, simulator: Simulator, state: State) -> Iterator[tuple[State, Tensor]]:
        """The state at the beginning of each round, and its clients; raises unless the replay ends at the run's model."""
        for _ in range(self.rounds):
            stop_if_asked()
            chosen = torch.from_numpy(choose_clients(simulator.data.draws, self.federation.clients, state.round))
            yield state, chosen
            state = simulator.round(state, chosen)
        if self.run is not None and self.is_replay:
            _require_same(state.average or state.weights, self.run)

    def _computing(self) -> tuple[EngineName, int | None]:
        """The engine and chunk size of the run: other ones round differently."""
        if self.run is None:
            return "auto", None
        name, chunk = self.run.engine, self.run.chunk
        if self.run.directory is not None:
            kept = RunDirectory(self.run.directory).load_engine(self.device.type)
            if kept is None:
                return "auto", None
            name, chunk = kept
        known: dict[str, EngineName] = {each: each for each in get_args(EngineName)}
        return known.get(name, "auto"), chunk


def _require_same(weights: Tree, run: Run) -> None:
    """Raise unless the replay ends at exactly the run's own weights."""
    trained = {name: p.detach().cpu() for name, p in run.model.named_parameters()}
    wrong = [(value.cpu() - trained[name]).abs().max() for name, value in weights.items()
             if not torch.equal(value.cpu(), trained[name])]  # fmt: skip
    if wrong:
        raise RunError(
            f"replay: it ends at other weights than the run (difference up to {float(max(wrong)):.2g}): was the run "
            "made on another machine, device or version? Attack its plan instead, without --run"
        )
