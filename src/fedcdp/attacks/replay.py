"""Replay a training round by round for an adversary that observes all of it: bit-exact for seeded runs, else by its plan.

The weights of the last training are kept, so another attack on the same training need not train again.
"""

from __future__ import annotations

import hashlib
import io
import pickle  # nosec B403: nothing is unpickled
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import torch
from torch import Tensor, nn

from fedcdp.config.experiment import EngineName
from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.engine import Loss
from fedcdp.engine.runtime import stop_if_asked
from fedcdp.errors import RunError
from fedcdp.files.tree import Tree, tensors_in
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.training.prepared import Prepared
from fedcdp.training.rounds import Simulator
from fedcdp.training.run import Run
from fedcdp.training.rundir import RunDirectory, State
from fedcdp.training.trainer import begin

_KEPT = 2**29  # bytes of the states of all rounds; those of a longer training, or of a larger network, are not kept
_MOST_CLIENTS = 20_000  # of a federation whose records are compared
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
        training = self._identity(simulator, state)
        if training is not None and training == _LAST.training:
            for state, chosen in _LAST.rounds:
                stop_if_asked()
                yield state, chosen
            return
        rounds: list[tuple[State, Tensor]] = []
        for _ in range(self.rounds):
            stop_if_asked()
            chosen = torch.from_numpy(choose_clients(simulator.data.draws, self.federation.clients, state.round))
            yield state, chosen
            rounds.append((state, chosen))
            state = simulator.round(state, chosen)
        if self.run is not None and self.is_replay:
            _require_same(state.average or state.weights, self.run)
        if training is not None:
            _LAST.training, _LAST.rounds = training, rounds

    def _identity(self, simulator: Simulator, state: State) -> tuple[object, ...] | None:
        """All that decides the weights of every round: code as it is, everything else as a digest. None: they are not kept.

        Secure noise draws every training afresh, and a network that cannot be pickled may hold anything.
        """
        plan, federation = self.plan, self.federation
        size = sum(value.numel() * value.element_size() for tree in state.trees().values() for value in tree.values())
        if plan.secure_noise or size * self.rounds > _KEPT or federation.clients > _MOST_CLIENTS:
            return None
        digest = hashlib.sha256(
            f"{plan.digest()} {self.rounds} {simulator.local_engine.name} {simulator.chunk} {self.device} {self.source} "
            f"{torch.get_float32_matmul_precision()} {torch.backends.cudnn.allow_tf32}".encode()
        )
        settings = io.BytesIO()
        try:
            _ByValue(settings).dump(self.network)  # its settings, too: they need not be in its parameters
        except Exception:
            return None
        digest.update(settings.getbuffer())
        for array in federation.table(np.arange(federation.clients)):
            digest.update(np.ascontiguousarray(array).data)
        values = [*tensors_in(federation.train.inputs), federation.train.targets]
        values += [] if self.run is None else list(self.run.model.parameters())  # a replay was compared with these
        for value in values:
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest(), self.loss, simulator.method, *(type(module) for module in self.network.modules())

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


class _ByValue(pickle.Pickler):
    """Writes each tensor as its values: the pickle of a tensor also holds its address, which no two networks share."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        """The values of a tensor, and its number, which tells tied tensors from equal ones."""
        if not isinstance(obj, Tensor):
            return None
        values = obj.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        number = self._numbers.setdefault(id(obj), len(self._numbers))
        return number, str(obj.dtype), tuple(obj.shape), obj.requires_grad, values


@dataclass
class _Memory:
    """The rounds of the last training that ran to its end."""

    training: tuple[object, ...] | None = None
    rounds: list[tuple[State, Tensor]] = field(default_factory=list)


_LAST = _Memory()


def forget() -> None:
    """Free the memory of the last training."""
    _LAST.training, _LAST.rounds = None, []


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
