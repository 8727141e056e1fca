"""The attacks of active servers by name, and which of them fit a plan."""

from __future__ import annotations

from fedcdp.attacks.active import ActiveAttack, Stage
from fedcdp.attacks.fishing import Fishing
from fedcdp.attacks.frozen_weights import FrozenWeights
from fedcdp.attacks.imprint import Imprint
from fedcdp.attacks.inconsistent_models import InconsistentModels
from fedcdp.attacks.trap_weights import TrapWeights

_ALL: tuple[ActiveAttack, ...] = (Imprint(), TrapWeights(), Fishing(), FrozenWeights(), InconsistentModels())
ACTIVE = {each.name: each for each in _ALL}


def fitting(stage: Stage) -> dict[str, str | None]:
    """For each attack of an active server, why it does not fit the plan and the network; None if it fits."""
    return {name: each.unfit(stage) for name, each in ACTIVE.items()}
