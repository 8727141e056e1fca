"""What the accountant must know of a federation and its network, beside the plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fedcdp.data.partition import Federation
from fedcdp.errors import PlanError
from fedcdp.plan import Plan
from fedcdp.tree import Layout


@dataclass(frozen=True)
class Population:
    """K clients, N_i records at the client that holds the fewest, R copies of a record, M groups that are clipped apart.

    The client with the fewest records is the worst off: each of its records is used the most.
    """

    clients: int
    records: int
    copies: int
    layers: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or not 1 <= value < 2**63:
                raise PlanError(f"{name}: {str(value)[:40]} is not allowed; it must be a whole number of at least 1")
        if self.copies > self.clients:
            raise PlanError(f"copies: {self.copies} copies of a record cannot lie at {self.clients} clients, one at each")

    @staticmethod
    def of(federation: Federation, layout: Layout, plan: Plan) -> Population:
        """That of a federation that trains a network by a plan."""
        layers = len(layout.groups(plan.clip_mode))
        return Population(federation.clients, federation.smallest, federation.copies, layers)
