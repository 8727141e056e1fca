"""DP-SGD at many clients at once and FedAvg between them, with or without PrivateFL's personal transformation.

The step is that of Opacus: every record joins a batch with probability 1/batches, each example's whole gradient is clipped
at C, Gaussian noise σC joins the sum, and the sum is divided by the expected batch size. `tests/benchmarks` compares it with
Opacus itself. Per-example gradients come from fedcdp's rules for layers.

PrivateFL (Yang, Hui, Yuan, Gong and Cao, USENIX Security 2023) is re-implemented from the published paper:

- every client has a transformation of its inputs, x' = scale · x + shift, with one scale per channel and one shift per pixel
  (on features: one scale, and one shift per feature). It starts as the identity;
- the client trains its transformation together with the shared network, in the same DP-SGD step. One bound clips both
  gradients together, and both carry the noise, so the client's ε covers the transformation too. Its learning rate may
  differ from the network's: the noise of a transformation is not averaged over clients;
- the server averages the shared network. The transformation stays at its client.

The shapes of scale and shift, and that one step trains both parts, were checked against the authors' published program; no
code was taken from it. Left out: networks pretrained on public images, central (client-level) DP, and the methods that
PrivateFL is combined with in the paper. Different: a learning rate of its own for the transformation under DP-SGD.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedcdp.engine.batched import chain_of
from fedcdp.engine.gradients import Formed, Gradients
from fedcdp.engine.layers import Back, Rule
from fedcdp.files.tree import Tree, repeat

_SCALE, _SHIFT = "transformation.scale", "transformation.shift"
_OPACUS_TINY = 1e-6  # Opacus adds it to a norm before it divides by the norm


@dataclass(frozen=True)
class LocalTraining:
    """What all clients do: in each of `rounds`, `batches` local steps on a share of 1/batches of their records."""

    rounds: int
    batches: int
    clip: float
    learning_rate: float
    noise_multiplier: float
    personal_rate: float = 0.0
    """The learning rate of the transformation, if there is one."""

    def expected_batch(self, records: int) -> int:
        """The number by which Opacus divides the noised sum of a batch."""
        return int(records * (1 / self.batches))


class Transformation(nn.Module):
    """PrivateFL's transformation of one client's inputs: the identity at first."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape[0] if len(shape) > 1 else 1))
        self.shift = nn.Parameter(torch.zeros(shape))

    def forward(self, inputs: Tensor) -> Tensor:
        """Transform inputs [examples, ...]."""
        return inputs * _per_channel(self.scale[None], inputs) + self.shift


class _TransformationRule(Rule):
    """The transformation for all clients at once, for the engine's chain of layers."""

    def __call__(self, weights: Tree, inputs: Tensor, inputs_matter: bool) -> tuple[Tensor, Back]:
        """See `Rule`."""
        scale = _per_channel(weights[_SCALE][:, None], inputs)

        def back(deltas: Tensor) -> tuple[Tensor | None, list[Gradients]]:
            products = deltas * inputs
            of_scale = products.flatten(3).sum(-1) if products.dim() > 3 else products.sum(-1, keepdim=True)
            return (deltas * scale if inputs_matter else None), [Formed(_SCALE, of_scale), Formed(_SHIFT, deltas)]

        return inputs * scale + weights[_SHIFT][:, None], back


def _per_channel(scale: Tensor, inputs: Tensor) -> Tensor:
    """Scales [..., channels] in a shape that multiplies inputs [..., channels, height, width]; one scale stays as it is."""
    return scale.view(*scale.shape, *(1,) * (inputs.dim() - scale.dim())) if inputs.dim() > scale.dim() else scale


@dataclass(frozen=True)
class Clients:
    """The records of all clients: inputs [clients, records, ...] and targets [clients, records]."""

    inputs: Tensor
    targets: Tensor

    @property
    def records(self) -> int:
        """Records at each client."""
        return self.targets.shape[1]


class PrivateClients:
    """Clients that train one shared network under DP-SGD; with `personal`, each behind its own transformation."""

    def __init__(self, network: nn.Module, clients: Clients, *, personal: bool, seed: int, at_once: int) -> None:
        """`at_once` bounds the number of examples whose gradients are held in memory, but never splits a client's batch."""
        self.network, self.clients, self.at_once = network, clients, at_once
        self._chain = chain_of(network)
        self.shared: Tree = {name: weight.detach().clone() for name, weight in network.named_parameters()}
        self.personal: Tree = {}
        if personal:
            self._chain = replace(self._chain, rules=(_TransformationRule(), *self._chain.rules), first_trained=0)
            new = Transformation(tuple(clients.inputs.shape[2:])).to(clients.inputs.device)
            own = {_SCALE: new.scale.detach(), _SHIFT: new.shift.detach()}
            self.personal = {name: value.clone() for name, value in repeat(own, len(clients.targets)).items()}
        self._random = torch.Generator(clients.inputs.device).manual_seed(seed)

    @torch.no_grad()
    def train(self, setting: LocalTraining) -> None:
        """All rounds: local steps from the shared network, then the mean over the clients."""
        for _ in range(setting.rounds):
            local = repeat(self.shared, len(self.clients.targets)) | self.personal
            for _ in range(setting.batches):
                local = self.step(local, setting, *self._drawn(setting))
            self.shared = {name: local[name].mean(0) for name in self.shared}
            self.personal = {name: local[name] for name in self.personal}

    @torch.no_grad()
    def step(self, local: Tree, setting: LocalTraining, positions: Tensor, present: Tensor) -> Tree:
        """One DP-SGD step of every client from its weights `local`, on the records at `positions` that are `present`."""
        parts = [self._clipped_sums(local, setting.clip, positions, present, some) for some in self._chunks(positions)]
        expected = setting.expected_batch(self.clients.records)
        after = {}
        for name, weight in local.items():
            noise = torch.empty(weight.shape, device=weight.device).normal_(generator=self._random)
            total = torch.cat([part[name] for part in parts]) + setting.noise_multiplier * setting.clip * noise
            rate = setting.personal_rate if name in self.personal else setting.learning_rate
            after[name] = weight - rate / expected * total
        return after

    def _clipped_sums(self, local: Tree, clip: float, positions: Tensor, present: Tensor, some: slice) -> Tree:
        """For some of the clients, the sum of the clipped gradients of the records that are present."""
        rows = torch.arange(len(self.clients.targets), device=positions.device)[some, None]
        inputs, targets = (each[rows, positions[some]] for each in (self.clients.inputs, self.clients.targets))
        outputs, back = self._chain({name: weight[some] for name, weight in local.items()}, inputs)
        deltas = outputs.softmax(-1) - nn.functional.one_hot(targets, outputs.shape[-1])
        gradients = [each.ready_to_clip() for each in back(deltas)]
        norms = torch.stack([each.squared_norms() for each in gradients]).sum(0).sqrt()
        factors = (clip / (norms + _OPACUS_TINY)).clamp(max=1.0)
        return {each.name: each.weighted_sum(factors, present[some]) for each in gradients}

    def _chunks(self, positions: Tensor) -> Iterator[slice]:
        clients, slots = positions.shape
        size = max(1, self.at_once // max(1, slots))
        return (slice(start, start + size) for start in range(0, clients, size))

    def _drawn(self, setting: LocalTraining) -> tuple[Tensor, Tensor]:
        """A Poisson batch of every client: positions [clients, slots] of its records, and which slots are filled."""
        shape, device = self.clients.targets.shape, self.clients.targets.device
        if setting.batches == 1:
            return torch.arange(shape[1], device=device).expand(shape), torch.ones(shape, dtype=torch.bool, device=device)
        chosen = torch.rand(shape, device=device, generator=self._random) < 1 / setting.batches
        slots = int(chosen.sum(1).max())
        positions = chosen.int().argsort(dim=1, descending=True, stable=True)[:, :slots]
        return positions, chosen.gather(1, positions)

    # Scores ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def scores(self, inputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Accuracy on one set of records for all: see `useful_peers` for the meaning of each."""
        shared = {"shared": self._right(inputs, targets).float().mean().item()}
        if not self.personal:
            return shared
        mean = {name: value.mean(0) for name, value in self.personal.items()}
        shared["mean_transformation"] = self._right(inputs, targets, mean).float().mean().item()
        everyone, own = [], []
        for client, held in enumerate(self.clients.targets):
            right = self._right(inputs, targets, {name: value[client] for name, value in self.personal.items()}).float()
            everyone.append(right.mean().item())
            own.append(right[torch.isin(targets, held)].mean().item())
        shared["personal"] = sum(everyone) / len(everyone)
        shared["personal_own_classes"] = sum(own) / len(own)
        return shared

    def _right(self, inputs: Tensor, targets: Tensor, own: Tree | None = None) -> Tensor:
        """Which records the shared network classifies correctly, behind a transformation if one is given."""
        if own is not None:
            inputs = inputs * _per_channel(own[_SCALE][None], inputs) + own[_SHIFT]
        outputs = [functional_call(self.network, self.shared, (some,)) for some in inputs.split(self.at_once)]
        return torch.cat(outputs).argmax(1) == targets
