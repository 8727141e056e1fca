"""DSSGD: distributed selective SGD (Shokri and Shmatikov, CCS 2015).

Each client shares only the entries of its update that changed most. This protects nothing: the shared entries are raw.
"""

from __future__ import annotations

from fedcdp.config.plan import Plan
from fedcdp.methods.nonprivate import NonPrivate


class DSSGD(NonPrivate):
    """Non-private local training; the largest `share_fraction` of the update is sent, the rest is zero."""

    def shared_fraction(self, plan: Plan) -> float:
        """θ of the original paper, times the share that the plan's compression keeps."""
        return plan.share_fraction * super().shared_fraction(plan)
