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

MOST_LISTED = 1000
"""The most clients that are listed one by one."""


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
    held: tuple[int, ...] = ()
    """N_i of each client, in their order, to state ε for each. Empty: they are equal, unknown, or too many to list."""
    names: tuple[str, ...] = ()
    """The name of each client; empty: they have none, or are too many to list."""

    def __post_init__(self) -> None:
        for name in ("clients", "records", "copies", "layers"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 2**63:
                raise PlanError(f"{name}: {str(value)[:40]} is not allowed; it must be a whole number of at least 1")
        if self.copies > self.clients:
            raise PlanError(f"copies: {self.copies} copies of a record do not fit at {self.clients} clients, one at each")
        if self.sizes is not None:
            object.__setattr__(self, "sizes", self._checked_sizes())
        object.__setattr__(self, "held", tuple(self.held))
        object.__setattr__(self, "names", tuple(self.names))
        if self.held and (len(self.held) != self.clients or tuple(sorted(set(self.held))) != self.sizes):
            raise PlanError("held: it must list the records of each client, which are the sizes")
        if self.names and (len(set(self.names)) != self.clients or not all(isinstance(name, str) for name in self.names)):
            raise PlanError("names: it must list a name of its own for each client")

    @staticmethod
    def of(federation: Federation, layout: Layout, plan: Plan) -> Population:
        """The population of a federation that trains a network under a plan."""
        layers = len(layout.groups(plan.clip_mode))
        held = federation.sizes(np.arange(federation.clients)).tolist()
        sizes, listed = sorted(set(held)), len(held) <= MOST_LISTED
        return Population(
            federation.clients,
            federation.smallest,
            federation.copies,
            layers,
            sizes=tuple(sizes) if len(sizes) > 1 else (),
            held=tuple(held) if len(sizes) > 1 and listed else (),
            names=(federation.names or ()) if listed else (),
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
        return {name: value for name, value in asdict(self).items() if value or name not in ("held", "names")}

    def name(self, client: int) -> str:
        """What a client is called."""
        return self.names[client] if self.names else f"client {client}"

    def _checked_sizes(self) -> tuple[int, ...]:
        sizes = tuple(self.sizes or ())
        ascending = all(type(size) is int and 1 <= size < 2**63 for size in sizes) and sizes == tuple(sorted(set(sizes)))
        if not ascending or (sizes and sizes[0] != self.records):
            raise PlanError(
                f"sizes: {str(list(sizes))[:60]} is not allowed; it must list distinct whole numbers in ascending order, "
                f"beginning with the fewest records, {self.records}"
            )
        return sizes
