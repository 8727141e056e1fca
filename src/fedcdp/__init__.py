"""fedcdp: gradient-leakage resilient federated learning for PyTorch."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fedcdp")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"

from fedcdp.attacks import attack
from fedcdp.data import Dataset, Splits, load, load_file
from fedcdp.data.partition import Federation, partition
from fedcdp.errors import DataError, FedcdpError, ModelError, PlanError, RunError
from fedcdp.plan import Plan
from fedcdp.reports import report
from fedcdp.schedules import Schedule, constant, cosine, exponential, linear, proportional, quantile
from fedcdp.simulation import Run, simulate

__all__ = [
    "DataError",
    "Dataset",
    "FedcdpError",
    "Federation",
    "ModelError",
    "Plan",
    "PlanError",
    "Run",
    "RunError",
    "Schedule",
    "Splits",
    "__version__",
    "attack",
    "constant",
    "cosine",
    "exponential",
    "linear",
    "load",
    "load_file",
    "partition",
    "proportional",
    "quantile",
    "report",
    "simulate",
]
