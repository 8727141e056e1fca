"""Engines compute gradients for many clients at once; every engine gives the same numbers."""

from fedcdp.engine.base import Batch, Engine, Loss
from fedcdp.engine.functional import FunctionalEngine

__all__ = ["Batch", "Engine", "FunctionalEngine", "Loss"]
