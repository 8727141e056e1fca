"""A plan of your own, with the noise that an ε needs: `fedcdp.calibrate`."""

from __future__ import annotations

from torch import nn

from fedcdp.accounting.budget import accounting_is_installed
from fedcdp.config.arguments import checked
from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.errors import PlanError
from fedcdp.training.prepared import Prepared


@checked
def calibrate(
    plan: Plan,
    federation: Federation,
    model: nn.Module,
    *,
    target_epsilon: float,
    adversary: str = "server",
    unit: str = "record",
    delta: float | None = None,
) -> Plan:
    """Find the smallest noise multiplier with which a plan stays within an ε.

    Everything else in the plan is kept, also the noise of `scaling_noise`, whose release is part of the ε.

    Args:
        plan: The plan. Its own noise multiplier is replaced.
        federation: The clients, of which only the number, sizes and names count.
        model: The network. Each layer that is clipped separately adds to ε.
        target_epsilon: The ε that must not be exceeded.
        adversary: The adversary that the ε is for: `server`, `update`, `example` or `model`.
        unit: What the ε protects: `record`, `client` or `unique`.
        delta: Replaces the δ of the plan.

    Returns:
        The plan with that noise multiplier, which is at most 0.1 % too large.

    Raises:
        PlanError: No noise gives this ε, or an argument is not allowed.
        ModelError: The plan cannot train this network.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> plan = fedcdp.Plan(rounds=20, per_round=10, local_steps=1, clip_mode="flat")
        >>> plan = fedcdp.calibrate(plan, federation, nn.Linear(30, 2), target_epsilon=4)
        >>> 3.9 < plan.privacy(federation, model=nn.Linear(30, 2)).row("server").epsilon <= 4
        True
    """
    if not accounting_is_installed():
        raise PlanError("target_epsilon: needs dp-accounting; install it with pip install 'dp-accounting>=0.6,<0.7'")
    from fedcdp.accounting.calibrate import Target, calibrate_noise

    target = Target(target_epsilon, adversary, unit)
    plan = plan if delta is None else plan.but(delta=delta)
    if not plan.private:
        raise PlanError(f"method: {plan.method} has no finite ε, whatever the noise; calibrate a private method")
    return calibrate_noise(plan, Prepared.of(model, federation, plan).population, target)
