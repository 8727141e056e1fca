"""DSSGD: distributed selective SGD (Shokri and Shmatikov, CCS 2015).

Each client shares only the entries of its update that changed most. That protects nothing: the shared part is raw.
"""

from __future__ import annotations

from fedcdp.config.plan import Plan
from fedcdp.methods.nonprivate import NonPrivate


class DSSGD(NonPrivate):
    """Local training as without privacy; the largest `share_fraction` of the update is sent, the rest is zero."""

    def shared_fraction(self, plan: Plan) -> float:
        """θ of the original, less what the plan prunes of it."""
        return plan.share_fraction * super().shared_fraction(plan)
