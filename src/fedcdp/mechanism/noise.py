"""Noise: where Gaussian noise is added, at what scale, and from which stream.

The noise of a simulation is a pure function of (seed, round, client, step, slot, coordinate), drawn from streams that
nothing else uses. Anyone who has the seed can subtract it: a seeded run is reproducible research, not protection. Under
`secure_noise` the noise comes from the operating system instead, and nothing that is stored can reproduce it.
"""

from __future__ import annotations

import math
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedcdp.config.plan import NoiseGenerator, Plan
from fedcdp.errors import PlanError
from fedcdp.files.installation import install_command
from fedcdp.files.tree import Layout, Tree
from fedcdp.mechanism.randomness import box_muller, gaussians, normals, philox, stream_key
from fedcdp.mechanism.secure_sum import discrete_gaussians, nearest

_TAIL = 16.0  # standard deviations that no draw reaches
_WHOLE_SUM = 0  # the slot number of a draw for a whole step; single examples are numbered from 1


def deviation_of_step_sum(plan: Plan, round_: int, current: float | None = None) -> float:
    """Standard deviation of the noise on the *sum* of a client's clipped gradients in one local step of Fed-CDP.

    | convention | the noise is added to | on the sum |
    | --- | --- | --- |
    | `example` (the paper's Algorithm 2) | each of the S slots, empty or not | σC·√S |
    | `batch` (the authors' released code) | the sum | σC |
    | `cohort` (fits the accuracy that the paper prints for K ≥ 1000) | the sum, 1/K_t of it | σC / K_t |
    | `sum` (secure aggregation) | the sum of all clients, a share by each of them | σC / √(K_t − t), `secure_sum` |

    It never depends on how many records a step drew: noise whose energy reveals the batch size would void
    amplification by sampling. If the clip bound follows a quantile, `current` is its present value.
    """
    return plan.noise_scale_at(round_, current) * plan.noise_on_sum


def deviation_of_count(plan: Plan) -> float:
    """Standard deviation of the noise on a Fed-CDP client's sum of indicators: the same convention, with σ_b for σC."""
    return plan.quantile_noise * plan.noise_on_sum


def noised(values: Tree, noise: Tree) -> Tree:
    """Values plus noise, in the values' precision (at least float32).

    The two are added in the noise's precision and rounded once. Noise that is rounded first lies on a grid of its own:
    where it nearly cancels a value, or where the value's grid is finer, the last digits of the sum would be the value's.
    """
    return {
        name: (value + noise[name]).to(torch.promote_types(value.dtype, torch.float32)) for name, value in values.items()
    }


def noise_of(plan: Plan, layout: Layout) -> Noise:
    """The noise that a plan asks for."""
    return SecureNoise(layout, plan.noise_generator) if plan.secure_noise else SeededNoise(plan.seed, layout)


class Noise(ABC):
    """Gaussian noise for every place where a method adds noise; no two draws share a value."""

    layout: Layout

    def for_step(self, round_: int, clients: Tensor, step: int, deviation: float) -> Tree:
        """One draw for each client [clients, ...], covering a whole local step."""
        return self._tree("step-noise", round_, clients, step, _WHOLE_SUM, deviation)

    def for_examples(self, round_: int, clients: Tensor, step: int, slots: int, deviation: float) -> Tree:
        """One draw for each slot of a local step [clients, slots, ...], because a type-2 adversary sees single examples."""
        draws = [self._tree("step-noise", round_, clients, step, 1 + slot, deviation) for slot in range(slots)]
        return {name: torch.stack([draw[name] for draw in draws], dim=1) for name in self.layout.shapes}

    def for_update(self, round_: int, clients: Tensor, deviation: float) -> Tree:
        """One draw for each client [clients, ...], for the update that it sends."""
        return self._tree("update-noise", round_, clients, 0, 0, deviation)

    def for_server(self, round_: int, device: torch.device, deviation: float) -> Tree:
        """One draw for the server's sum."""
        draw = self._tree("server-noise", round_, _nobody(device), 0, 0, deviation)
        return {name: value[0] for name, value in draw.items()}

    def for_sum(self, round_: int, clients: Tensor, attempt: int, deviation: int) -> Tree:
        """One share of the noise on a secure sum for each client [clients, ...], in whole numbers of grid steps (int64).

        The share of a simulation is a rounded Gaussian, drawn anew in every attempt of a round.
        """
        drawn = self._unit("sum-noise", round_, clients, attempt, _WHOLE_SUM, self.layout.size)
        return self.layout.unflatten(nearest(drawn.double().mul_(deviation), _TAIL * deviation))

    def for_moments(self, client: int, records: int, length: int, deviation: float) -> Tensor:
        """One draw for each record of a client [records, length], in float64, for the moments of its inputs."""
        drawn = self._unit("moment-noise", 0, torch.tensor([client]), 0, _WHOLE_SUM, records * length)
        return drawn[0].double().view(records, length) * deviation

    # Noise for a clip bound that follows a quantile: in separate streams, in float64

    def for_count(self, round_: int, clients: Tensor, deviation: float) -> Tensor:
        """One draw for each client [clients], for the sum of indicators, or the single indicator, that it sends."""
        return self._unit("indicator-noise", round_, clients, 0, _WHOLE_SUM, 1).double()[:, 0] * deviation

    def for_indicators(self, round_: int, clients: Tensor, slots: int, deviation: float) -> Tensor:
        """One draw for the indicator of each slot [clients, slots]."""
        return self._unit("indicator-noise", round_, clients, 0, 1, slots).double() * deviation

    def for_server_count(self, round_: int, device: torch.device, deviation: float) -> float:
        """One draw for the server's sum of indicators."""
        return self._unit("server-indicator-noise", round_, _nobody(device), 0, 0, 1).item() * deviation

    def _tree(self, purpose: str, round_: int, clients: Tensor, step: int, slot: int, deviation: float) -> Tree:
        drawn = self._unit(purpose, round_, clients, step, slot, self.layout.size)
        return self.layout.unflatten(drawn.mul_(deviation))

    def sources(self, round_: int, step: int) -> list[tuple[int, int, int, int]] | None:  # noqa: ARG002
        """The sources from which `StepNoise` draws the noise of a local step; None if this noise has none."""
        return None

    @abstractmethod
    def _unit(self, purpose: str, round_: int, clients: Tensor, step: int, slot: int, length: int) -> Tensor:
        """`length` standard normal values for each client."""


@dataclass(frozen=True)
class SeededNoise(Noise):
    """Counter-based Gaussian noise: the same arguments give the same noise on any engine, chunking or machine."""

    seed: int
    layout: Layout

    def sources(self, round_: int, step: int) -> list[tuple[int, int, int, int]]:
        """See `Noise`."""
        key = stream_key(self.seed, "step-noise", round_)
        return [(key & 0xFFFFFFFF, key >> 32, step, _WHOLE_SUM)]

    def _unit(self, purpose: str, round_: int, clients: Tensor, step: int, slot: int, length: int) -> Tensor:
        return normals(stream_key(self.seed, purpose, round_), clients, step, slot, length)


@dataclass(frozen=True)
class SecureNoise(Noise):
    """Gaussian noise from the operating system's entropy, fresh for every draw; no key or other state is kept.

    `philox` expands a fresh 64-bit key for every draw, from a fresh position in its stream; it passes the usual statistical
    tests but is not designed to withstand cryptanalysis. `chacha20` expands a fresh 256-bit key with a cipher that is.

    Each value is half the sum of four independent normal values in float64; it is rounded once, together with the value
    that it is added to (`noised`). A single transform of finitely many random bits leaves gaps between the values that it
    can take, in a pattern that depends on what is added to them (Mironov, CCS 2012; Jin et al., IEEE S&P 2022). The sum of
    several fills the gaps and has too many origins to be searched (Holohan and Braghin, ESORICS 2021, which Opacus' secure
    mode also follows). This does not protect against timing attacks. Only a discrete Gaussian on integers is exact; this
    one has the 53 bits of float64.
    """

    layout: Layout
    generator: NoiseGenerator = "philox"

    def __post_init__(self) -> None:
        if self.generator == "chacha20":
            _chacha20_words(0, 0, torch.device("cpu"))  # reports a missing package before any work is done

    def sources(self, round_: int, step: int) -> list[tuple[int, int, int, int]] | None:  # noqa: ARG002
        """See `Noise`. Fresh on every call."""
        if self.generator == "chacha20":
            return None
        return [struct.unpack("<IIII", os.urandom(16)) for _ in range(_TERMS)]

    def for_sum(self, round_: int, clients: Tensor, attempt: int, deviation: int) -> Tree:  # noqa: ARG002
        """See `Noise`. Exact draws of the discrete Gaussian, whatever the generator."""
        shape = len(clients), self.layout.size
        drawn = discrete_gaussians(shape, deviation) if deviation else torch.zeros(shape, dtype=torch.int64)
        return self.layout.unflatten(drawn.to(clients.device))

    def _unit(self, purpose: str, round_: int, clients: Tensor, step: int, slot: int, length: int) -> Tensor:  # noqa: ARG002
        words = _chacha20_words if self.generator == "chacha20" else _philox_words
        total = torch.zeros(1, dtype=torch.float64, device=clients.device)
        for _ in range(_TERMS):
            total = total + box_muller(words(len(clients), -(-length // 4), clients.device), torch.float64)[:, :length]
        return total / math.sqrt(_TERMS)


@dataclass(frozen=True)
class StepNoise(Noise):
    """The noise of one local step, drawn from `origins` [terms, 4] (`Noise.sources` as a tensor).

    Because the origins are a tensor, a program compiled once can draw with any key.
    With one source the draws equal those of `SeededNoise`; with several they are of the kind that `SecureNoise` draws.
    """

    layout: Layout
    origins: Tensor

    def _unit(self, purpose: str, round_: int, clients: Tensor, step: int, slot: int, length: int) -> Tensor:  # noqa: ARG002
        terms = len(self.origins)
        if terms == 1:
            return gaussians(self.origins, clients, length, torch.float32)
        rows = torch.arange(len(clients), device=clients.device)
        return gaussians(self.origins, rows, length, torch.float64) / math.sqrt(terms)


@dataclass(frozen=True)
class Silence(Noise):
    """No noise: lets an attack model the other operations of a method on its releases."""

    layout: Layout

    def _unit(self, purpose: str, round_: int, clients: Tensor, step: int, slot: int, length: int) -> Tensor:  # noqa: ARG002
        return torch.zeros(len(clients), length, device=clients.device)


_TERMS = 4


def _philox_words(rows: int, blocks: int, device: torch.device) -> Sequence[Tensor]:
    key, first, second = struct.unpack("<QII", os.urandom(16))
    return philox(key, (torch.arange(blocks, device=device), first, second, torch.arange(rows, device=device)[:, None]))


def _chacha20_words(rows: int, blocks: int, device: torch.device) -> Sequence[Tensor]:
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ImportError:
        wanted = f"install it with {install_command('secure')}, or use philox"
        raise PlanError(f"noise_generator: chacha20 needs the package cryptography; {wanted}") from None
    cipher = Cipher(algorithms.ChaCha20(os.urandom(32), bytes(16)), mode=None)  # a single-use key needs no nonce
    keystream = cipher.encryptor().update(bytes(16 * rows * blocks))
    words = torch.from_numpy(np.frombuffer(keystream, dtype="<u4").astype(np.int64)).to(device)
    return words.view(rows, blocks, 4).unbind(-1)


def _nobody(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)
