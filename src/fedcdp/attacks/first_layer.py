"""A first dense layer as a trap: find it in a network, fill it with crafted rows, and read single inputs from its gradient.

The gradient of a row is Σ g(x)·[x | 1] over the inputs x that open its unit. If one input does, the quotient of the row's
weight gradient and its bias gradient is this input, exactly, whatever weight g the example has: clipping an example or
a whole update changes g alone.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedcdp.attacks.active import CHANGED_NETWORK, CHANGED_WEIGHTS, ActiveAttack, Prior, Stage, awake
from fedcdp.attacks.analytic import first_dense
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.observe import Captured
from fedcdp.attacks.reconstruct import Progress
from fedcdp.errors import ModelError
from fedcdp.files.tree import Tree

_LIVE = 1e-6  # of the largest row: rows below are empty
_SLACK = 0.02  # of the range of inputs, for rounding
_FLAT = 0.5  # of the smallest maximum of public inputs: a quotient below it is an input divided by noise
_APART = 1e-4  # of the squared range: mean squared distance of two different inputs
_EASY = 4  # candidates for each example that are compared with each other


@dataclass(frozen=True)
class FirstLayer:
    """A trained dense layer that receives the inputs; a ReLU and another dense layer follow it."""

    weight: str
    bias: str
    units: int
    following: str
    """The name of the dense layer that follows."""

    @staticmethod
    def of(network: nn.Module, shape: tuple[int, ...]) -> FirstLayer:
        """The first layer of a network for inputs of `shape`.

        Raises:
            ModelError: The network does not begin like this.
        """
        weight, bias = first_dense(network, shape)
        if bias is None:
            raise ModelError("needs a first dense layer with a bias")
        leaves = [(name, module) for name, module in network.named_modules() if next(module.children(), None) is None]
        at = [name for name, _ in leaves].index(weight.rpartition(".")[0])
        kinds = [module for _, module in leaves[at + 1 : at + 3]]
        units = network.get_parameter(weight).shape[0]
        if len(kinds) < 2 or not isinstance(kinds[0], nn.ReLU) or not isinstance(kinds[1], nn.Linear):
            raise ModelError("needs a first dense layer that a ReLU and another dense layer follow")
        if kinds[1].in_features != units or not kinds[1].weight.requires_grad:
            raise ModelError("needs a second dense layer that is trained, on the units of the first one")
        return FirstLayer(weight, bias, units, leaves[at + 2][0])

    def filled(self, network: nn.Module, rows: Tensor, biases: Tensor, public: Tensor, seed: int) -> nn.Module:
        """A copy of the network with these rows. All units count alike in the next layer, whose units are always open.

        So an example's gradient has the same weight g in every row that it opens.
        """
        crafted = awake(copy.deepcopy(network), seed)
        opened = torch.relu(public.flatten(1).double() @ rows.double().T + biases.double()).sum(1)
        generator = torch.Generator().manual_seed(seed)
        following = crafted.get_submodule(self.following)
        assert isinstance(following, nn.Linear)
        # Different sizes: the gradients at the outputs sum to zero, so equal ones would cancel in the last layer.
        each = 0.5 + torch.rand(following.out_features, generator=generator)
        with torch.no_grad():
            crafted.get_parameter(self.weight).copy_(rows)
            crafted.get_parameter(self.bias).copy_(biases)
            following.weight.copy_((each / float(opened.mean().clamp(min=1e-6)))[:, None].expand_as(following.weight))
            if following.bias is not None:
                following.bias.zero_()
        return crafted


@dataclass(frozen=True)
class Rows:
    """The gradient of a crafted layer for one victim: weights [rows, n] and biases [rows], with noise of this deviation."""

    weights: Tensor
    biases: Tensor
    deviation: float
    scale: float
    """The largest norm of a row."""

    @staticmethod
    def of(weights: Tensor, biases: Tensor, deviation: float, *, cumulative: bool = False) -> Rows:
        """The layer's gradient; if inputs open all rows up to their own (`cumulative`), the differences of neighbours."""
        weights, biases = weights.double(), biases.double()
        scale = float(weights.norm(dim=1).max())
        if not cumulative:
            return Rows(weights, biases, deviation, scale)
        weights = torch.cat([weights[:-1] - weights[1:], weights[-1:]])
        return Rows(weights, torch.cat([biases[:-1] - biases[1:], biases[-1:]]), deviation * 2**0.5, scale)

    def peeled(self, layer: Tensor, biases: Tensor, prior: Prior) -> tuple[Tensor, Rows]:
        """Inputs that several rows agree on, and the rows without them; `layer` and `biases` are the crafted ones.

        Two rows with different mixtures of inputs do not agree. An example has the same weight g in every row that it
        opens (`FirstLayer.filled`), so it can be subtracted, and rows that it shared with one other show the other.
        """
        left, found = self, []
        for _ in range(len(self.weights)):
            quotient, certain, _ = left._clear(prior)
            rows = certain.nonzero()[:, 0]
            near = _near(quotient[rows], prior)
            if not len(rows) or int((most := near.sum(1)).max()) < 2:
                break
            best = int(most.argmax())
            one = quotient[rows[best]].clamp(prior.low, prior.high)
            gain = left.biases[rows[near[best]]].median()
            opened = (layer @ one + biases > 0).double() * gain
            found.append(one)
            left = replace(left, weights=left.weights - opened[:, None] * one, biases=left.biases - opened)
        return torch.stack(found) if found else self.weights[:0], left

    def _clear(self, prior: Prior) -> tuple[Tensor, Tensor, Tensor]:
        """The quotient of every row, whether it lies within the range of inputs, and which rows are not empty."""
        size = self.weights.norm(dim=1)
        live = size > _LIVE * self.scale
        quotient = (self.weights / self.biases[:, None]).nan_to_num(torch.inf)
        slack = _SLACK * prior.span
        within = ((quotient >= prior.low - slack) & (quotient <= prior.high + slack)).all(1)
        return quotient, live & within & (quotient.amax(1) >= prior.low + _FLAT * (prior.peak - prior.low)), live

    def inputs(self, count: int, prior: Prior) -> tuple[Tensor, int]:
        """`count` inputs [count, n], those first that are certain; and how many rows hold values of real inputs.

        The reader does not believe that there is noise: a row whose quotient is within the range of inputs in every
        coordinate is taken as it is. If all its entries have one sign, but the quotient is not within the range (a bias
        that is noised, or not shared), the row is the input up to its length, and the range decides the length. From all
        other rows the reader takes the most likely input under the promised noise.
        """
        quotient, certain, live = self._clear(prior)
        weights, biases, quotient, certain = self.weights[live], self.biases[live], quotient[live], certain[live]
        signed = weights * weights.sum(1, keepdim=True).sign()
        largest = signed.amax(1, keepdim=True).clamp(min=1e-30)
        scaled = prior.high * signed / largest
        one_sign = (signed >= -_SLACK * largest).all(1) & (prior.low >= 0)
        guessed = self._likely(weights, biases, prior) if self.deviation > 0 else quotient.clamp(prior.low, prior.high)
        found = torch.where(certain[:, None], quotient, torch.where(one_sign[:, None], scaled, guessed))
        clear = certain | one_sign
        order = clear.double() + certain.double() + weights.norm(dim=1) / (2 * self.scale)
        chosen = _distinct(found[order.argsort(descending=True)][: _EASY * count], count, prior)
        missing = prior.mean.expand(count - len(chosen), -1)
        return torch.cat([chosen, missing]).clamp(prior.low, prior.high), int(clear.sum())

    def _likely(self, weights: Tensor, biases: Tensor, prior: Prior) -> Tensor:
        """The most likely input of each row: its weight g is estimated from the biases, shrunk by how much they vary."""
        noise = self.deviation**2
        signal = max(float(self.biases.square().mean()) - noise, 0.0)
        gain = (biases * signal / (signal + noise))[:, None]
        pull = gain * prior.variance / (gain.square() * prior.variance + noise)
        return prior.mean + pull * (weights - gain * prior.mean)


@dataclass(frozen=True)
class Baited:
    """A crafted network, and its layer from whose rows inputs are read."""

    network: nn.Module
    weight: str
    bias: str
    cumulative: bool = False
    """Whether inputs open all rows up to their own."""
    overlapping: bool = False
    """Whether an input may open several rows."""
    changed_network: bool = False
    """Whether the network has other tensors than the task's."""

    def read(self, captured: Captured, prior: Prior) -> tuple[Tensor, Tensor]:
        """The inputs [victims, examples, ...] of all victims, and how many rows of each hold values of real inputs."""
        examples = torch.zeros(captured.tensor.shape, dtype=torch.float64, device=captured.device)
        clear = torch.zeros(len(captured), dtype=torch.int64, device=captured.device)
        for victim in range(len(captured)):
            count = int(captured.present[victim].sum())
            tree = {name: value[victim] for name, value in captured.seen.items()}
            found, clear[victim] = self.inputs(tree, float(captured.deviation[victim]), count, prior)
            examples[victim, :count] = found.view(count, *captured.shape)
        return examples, clear

    def inputs(self, seen: Tree, deviation: float, count: int, prior: Prior) -> tuple[Tensor, int]:
        """`count` inputs [count, n] from one gradient with noise of this deviation, and how many rows hold real values."""
        rows = Rows.of(seen[self.weight], seen[self.bias], deviation, cumulative=self.cumulative)
        if not self.overlapping:
            return rows.inputs(count, prior)
        layer, biases = (self.network.get_parameter(name).detach().to(rows.weights) for name in (self.weight, self.bias))
        agreed, rows = rows.peeled(layer, biases, prior)
        others, clear = rows.inputs(max(count - len(agreed), 0), prior)
        return torch.cat([agreed, others])[:count], len(agreed) + clear


class RowAttack(ActiveAttack):
    """An attack that crafts a first dense layer and reads its rows."""

    def craft(self, stage: Stage) -> Baited:
        """The network to send."""
        raise NotImplementedError

    def run(self, stage: Stage, progress: Progress | None = None) -> Leaks:
        """See `ActiveAttack`."""
        self.require_fit(stage)
        started, baited = time.perf_counter(), self.craft(stage)
        staged = stage.crafted(baited.network)
        captured = staged.captured()
        examples, clear = baited.read(captured, Prior.of(stage))
        about: dict[str, Any] = {
            "bins": captured.seen[baited.bias].shape[1],
            "changed_network": baited.changed_network,
            "assumption": CHANGED_NETWORK if baited.changed_network else CHANGED_WEIGHTS,
            "clear_rows_mean": float(clear.double().mean()),
        }
        if captured.noisy:
            about |= staged.presence(progress)
        return stage.result(self.name, captured, examples, started, about, solved=clear > 0)


def _near(found: Tensor, prior: Prior) -> Tensor:
    """[n, n]: which of these inputs [n, size] are the same."""
    return torch.cdist(found, found).square() < _APART * prior.span**2 * found.shape[1]


def _distinct(found: Tensor, count: int, prior: Prior) -> Tensor:
    """The first `count` inputs that differ from all inputs before them."""
    near = _near(found, prior)
    kept: list[int] = []
    for index in range(len(found)):
        if len(kept) < count and not bool(near[index, kept].any()):
            kept.append(index)
    return found[kept]
