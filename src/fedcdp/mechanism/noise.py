"""Noise: where the Gaussian is added, with what scale, and from which stream.

The noise of a simulation is a pure function of (seed, round, client, step, slot, coordinate), drawn from streams that
nothing else uses. Whoever has the seed can subtract it: a seeded run is reproducible research, not protection. Under
`secure_noise` it comes from the operating system instead, and nothing that is kept can give it back.
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

_WHOLE_SUM = 0  # the slot number of a draw that stands for all of a step; single examples count from 1


def deviation_of_step_sum(plan: Plan, round_: int, current: float | None = None) -> float:
    """Standard deviation of the noise on the *sum* of a client's clipped gradients in one local step of Fed-CDP.

    | convention | the noise is added to | on the sum |
    | --- | --- | --- |
    | `example` (the paper's Algorithm 2) | each of the S slots, empty or not | σC·√S |
    | `batch` (the authors' released code) | the sum | σC |
    | `cohort` (fits the accuracy that the paper prints for K ≥ 1000) | the sum, 1/K_t of it | σC / K_t |

    It never depends on how many records a step drew: noise whose energy shows the batch size would void the
    amplification by sampling. `current` is the bound, where it follows a quantile.
    """
    return plan.noise_scale_at(round_, current) * plan.noise_on_sum


def deviation_of_count(plan: Plan) -> float:
    """Standard deviation of the noise on a Fed-CDP client's sum of indicators: the same convention, σ_b in place of σC."""
    return plan.quantile_noise * plan.noise_on_sum


def noised(values: Tree, noise: Tree) -> Tree:
    """Values plus noise, in the values' precision (at least float32).

    The two are added in the noise's precision and rounded once. Noise that was rounded first lies on a grid of its own;
    where it nearly cancels a value, or the value is the finer of the two, the last digits of the sum would be the value's.
    """
    return {
        name: (value + noise[name]).to(torch.promote_types(value.dtype, torch.float32)) for name, value in values.items()
    }


def noise_of(plan: Plan, layout: Layout) -> Noise:
    """The noise that a plan asks for."""
    return SecureNoise(layout, plan.noise_generator) if plan.secure_noise else SeededNoise(plan.seed, layout)


class Noise(ABC):
    """Gaussian noise for every place where a method adds some; no two draws share a value."""

    layout: Layout

    def for_step(self, round_: int, clients: Tensor, step: int, deviation: float) -> Tree:
        """One draw a client [clients, ...] for the whole of a local step."""
        return self._tree("step-noise", round_, clients, step, _WHOLE_SUM, deviation)

    def for_examples(self, round_: int, clients: Tensor, step: int, slots: int, deviation: float) -> Tree:
        """One draw for each slot of a local step [clients, slots, ...]: what a type-2 reader sees is noised one by one."""
        draws = [self._tree("step-noise", round_, clients, step, 1 + slot, deviation) for slot in range(slots)]
        return {name: torch.stack([draw[name] for draw in draws], dim=1) for name in self.layout.shapes}

    def for_update(self, round_: int, clients: Tensor, deviation: float) -> Tree:
        """One draw a client [clients, ...] for the update that it sends."""
        return self._tree("update-noise", round_, clients, 0, 0, deviation)

    def for_server(self, round_: int, device: torch.device, deviation: float) -> Tree:
        """One draw for the server's sum."""
        draw = self._tree("server-noise", round_, _nobody(device), 0, 0, deviation)
        return {name: value[0] for name, value in draw.items()}

    # Of a clip bound that follows a quantile: in streams of their own, in float64

    def for_count(self, round_: int, clients: Tensor, deviation: float) -> Tensor:
        """One draw a client [clients] for the indicators that it sends: their sum, or its only one."""
        return self._unit("indicator-noise", round_, clients, 0, _WHOLE_SUM, 1).double()[:, 0] * deviation

    def for_indicators(self, round_: int, clients: Tensor, slots: int, deviation: float) -> Tensor:
        """One draw for the indicator of each slot [clients, slots]."""
        return self._unit("indicator-noise", round_, clients, 0, 1, slots).double() * deviation

    def for_server_count(self, round_: int, device: torch.device, deviation: float) -> float:
        """One draw for the server's sum of indicators."""
        return self._unit("server-indicator-noise", round_, _nobody(device), 0, 0, 1).item() * deviation

    def _tree(self, purpose: str, round_: int, clients: Tensor, step: int, slot: int, deviation: float) -> Tree:
        drawn = self._unit(purpose, round_, clients, step, slot, self.layout.size)
        return self.layout.unflatten(drawn * deviation)

    def sources(self, round_: int, step: int) -> list[tuple[int, int, int, int]] | None:  # noqa: ARG002
        """What `StepNoise` makes the noise of a local step from; None: it cannot."""
        return None

    @abstractmethod
    def _unit(self, purpose: str, round_: int, clients: Tensor, step: int, slot: int, length: int) -> Tensor:
        """`length` standard normal values for each client."""


@dataclass(frozen=True)
class SeededNoise(Noise):
    """Gaussian noise by counters: the same for any engine, chunking or machine that asks with the same arguments."""

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
    """Gaussian noise from the operating system's entropy, fresh for every draw; it keeps no key and no other state.

    `philox` expands a fresh 64-bit key for every draw, from a fresh place in its stream; it passes the usual statistical
    tests but is not made to withstand cryptanalysis. `chacha20` expands a fresh 256-bit key with a cipher that is.

    A value is half the sum of four independent normal ones in float64; what it is added to is rounded with it, once
    (`noised`). The values that one transform of finitely many random bits can take have gaps, in a pattern that depends on
    what is added to them (Mironov, CCS 2012; Jin et al., IEEE S&P 2022); the sum of several fills the gaps and has too many
    origins to be searched (Holohan and Braghin, ESORICS 2021, which Opacus' secure mode follows, too). What that does not
    guard against: how long anything takes. Only a discrete Gaussian on integers is exact; this has the 53 bits of float64.
    """

    layout: Layout
    generator: NoiseGenerator = "philox"

    def __post_init__(self) -> None:
        if self.generator == "chacha20":
            _chacha20_words(0, 0, torch.device("cpu"))  # says what is missing before any work is done

    def sources(self, round_: int, step: int) -> list[tuple[int, int, int, int]] | None:  # noqa: ARG002
        """See `Noise`. Fresh at every call."""
        if self.generator == "chacha20":
            return None
        return [struct.unpack("<IIII", os.urandom(16)) for _ in range(_TERMS)]

    def _unit(self, purpose: str, round_: int, clients: Tensor, step: int, slot: int, length: int) -> Tensor:  # noqa: ARG002
        words = _chacha20_words if self.generator == "chacha20" else _philox_words
        total = torch.zeros(1, dtype=torch.float64, device=clients.device)
        for _ in range(_TERMS):
            total = total + box_muller(words(len(clients), -(-length // 4), clients.device), torch.float64)[:, :length]
        return total / math.sqrt(_TERMS)


@dataclass(frozen=True)
class StepNoise(Noise):
    """The noise of one local step, made from `sources` [terms, 4] that are a tensor: for a program that is compiled once.

    With one source it is what `SeededNoise` draws for the clients; with several, of the kind that `SecureNoise` draws.
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
    """No noise at all: what a method does besides adding some, for whoever models it (an attack on its releases)."""

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
    cipher = Cipher(algorithms.ChaCha20(os.urandom(32), bytes(16)), mode=None)  # a key for one use needs no nonce
    keystream = cipher.encryptor().update(bytes(16 * rows * blocks))
    words = torch.from_numpy(np.frombuffer(keystream, dtype="<u4").astype(np.int64)).to(device)
    return words.view(rows, blocks, 4).unbind(-1)


def _nobody(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)
