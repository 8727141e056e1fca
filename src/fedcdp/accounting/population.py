"""What the accountant must know about a federation and its network, besides the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.errors import PlanError
from fedcdp.files.tree import Layout


@dataclass(frozen=True)
class Population:
    """K clients, N_i records at the smallest client, R copies of a record, M groups that are clipped separately."""

    clients: int
    records: int
    copies: int
    layers: int
    sizes: tuple[int, ...] | None = ()
    """The distinct N_i, ascending. Empty: every client holds `records`. None: only the smallest N_i is known, as in ledgers
    of the first release."""

    def __post_init__(self) -> None:
        for name in ("clients", "records", "copies", "layers"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 2**63:
                raise PlanError(f"{name}: {str(value)[:40]} is not allowed; it must be a whole number of at least 1")
        if self.copies > self.clients:
            raise PlanError(f"copies: {self.copies} copies of a record do not fit at {self.clients} clients, one at each")
        if self.sizes is not None:
            object.__setattr__(self, "sizes", self._checked_sizes())

    @staticmethod
    def of(federation: Federation, layout: Layout, plan: Plan) -> Population:
        """The population of a federation that trains a network under a plan."""
        layers = len(layout.groups(plan.clip_mode))
        sizes = np.unique(federation.sizes(np.arange(federation.clients))).tolist()
        return Population(
            federation.clients, federation.smallest, federation.copies, layers, tuple(sizes) if len(sizes) > 1 else ()
        )

    @property
    def largest(self) -> int | None:
        """N_i of the client with the most records; None if that is unknown."""
        return None if self.sizes is None else max(self.sizes, default=self.records)

    @staticmethod
    def read(stored: Mapping[str, Any]) -> Population:
        """The population stored in a ledger; the first release stored only the smallest number of records."""
        return Population(**({"sizes": None} | dict(stored)))

    def written(self) -> dict[str, Any]:
        """The population as plain values, for a ledger."""
        return asdict(self)

    def _checked_sizes(self) -> tuple[int, ...]:
        sizes = tuple(self.sizes or ())
        ascending = all(type(size) is int and 1 <= size < 2**63 for size in sizes) and sizes == tuple(sorted(set(sizes)))
        if not ascending or (sizes and sizes[0] != self.records):
            raise PlanError(
                f"sizes: {str(list(sizes))[:60]} is not allowed; it must list distinct whole numbers in ascending order, "
                f"beginning with the fewest records, {self.records}"
            )
        return sizes
