"""Loggers, which keep the metrics of a run in TensorBoard, MLflow or Weights & Biases."""

from fedcdp.loggers.trackers import MLflowLogger, TensorBoardLogger, WandbLogger
from fedcdp.training.progress import Logger

__all__ = ["Logger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]
