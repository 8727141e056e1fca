"""Local training one step after the other, and what every trainer promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedcdp.engine.base import Batch, Engine
from fedcdp.engine.batched import BatchedEngine
from fedcdp.interrupts import stop_if_asked
from fedcdp.methods import Method, Moment, Sent, take_part
from fedcdp.sampling import Draw
from fedcdp.tree import Tree


@dataclass(frozen=True)
class Examples:
    """The training data on the device, where they stay; only places in them move."""

    inputs: Tensor
    targets: Tensor

    def batch(self, records: Tensor, present: Tensor) -> Batch:
        """The examples in some slots."""
        return Batch(self.inputs[records], self.targets[records], present)


class Trainer(Protocol):
    """Trains clients locally from the global weights."""

    engine: Engine

    @property
    def name(self) -> str:
        """As in `--engine`."""
        ...

    def __call__(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        """What leaves the clients after the steps of `draw` [steps, clients, slots], whose positions are records."""
        ...


@dataclass
class Stepwise:
    """Local training one step after the other, each as the method writes it. It serves every tap, and is the reference."""

    method: Method
    engine: Engine
    examples: Examples

    @property
    def name(self) -> str:
        """See `Trainer`."""
        return "batched" if isinstance(self.engine, BatchedEngine) else "functional"

    def __call__(self, weights: Tree, draw: Draw, at: Moment) -> Sent:
        """See `Trainer`."""
        return take_part(self.method, weights, self.batches(draw), at)

    def batches(self, draw: Draw) -> Iterator[Batch]:
        """The batches of the steps, cut to the slots that some client fills."""
        # Filled slots come first. One transfer for the whole round: asking at every step would make a GPU wait.
        widths = draw.present.any(1).sum(1).clamp(min=1).tolist()
        for records, present, width in zip(draw.positions, draw.present, widths, strict=True):
            stop_if_asked()
            yield self.examples.batch(records[:, :width], present[:, :width])
