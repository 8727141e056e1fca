"""Engines compute gradients for many clients at once; all engines give the same numbers."""

from fedcdp.config.experiment import EngineName
from fedcdp.engine.base import Batch, Engine, Loss, Unquestioning
from fedcdp.engine.batched import BatchedEngine, engines_for
from fedcdp.engine.functional import FunctionalEngine

__all__ = ["Batch", "BatchedEngine", "Engine", "EngineName", "FunctionalEngine", "Loss", "Unquestioning", "engines_for"]
