"""Runs made of given parts, without any training."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from fedcdp.accounting.population import Population
from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.files.tree import Layout
from fedcdp.training.run import Run


def made_run(model: nn.Module, federation: Federation, **fields: Any) -> Run:
    """A run of a model that nobody trained."""
    plan = Plan(method="nonprivate", rounds=1, per_round=1)
    given: dict[str, Any] = {
        "plan": plan, "population": Population.of(federation, Layout.of(model), plan), "metrics": [], "seconds": 0.0,
        "client_steps": 0, "charges": (), "participations": np.zeros(federation.clients, dtype=np.int64),
    }  # fmt: skip
    return Run(model=model, federation=federation, **given | fields)
