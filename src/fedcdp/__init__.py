"""fedcdp: gradient-leakage resilient federated learning for PyTorch."""

# First: Ctrl-C prints no traceback while the command line imports the others.
from fedcdp import (
    _startup,  # noqa: F401
    loggers,
)
from fedcdp._version import __version__
from fedcdp.accounting.budget import privacy_of_plan
from fedcdp.attacks.api import attack
from fedcdp.checks.api import check
from fedcdp.config.plan import Plan
from fedcdp.config.schedules import Schedule, constant, cosine, exponential, linear, proportional, quantile
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.load import load
from fedcdp.data.own_files import load_file
from fedcdp.data.partition import Federation, partition
from fedcdp.data.sources import as_dataset
from fedcdp.errors import DataError, FedcdpError, ModelError, PlanError, RunError
from fedcdp.models.batch_norm import replace_batch_norm
from fedcdp.report.api import report
from fedcdp.training.adoption import PrivateTraining, make_private
from fedcdp.training.calibration import calibrate
from fedcdp.training.progress import RoundMetrics
from fedcdp.training.run import Run
from fedcdp.training.saved_run import open_run
from fedcdp.training.simulate import simulate

__all__ = [
    "DataError",
    "Dataset",
    "FedcdpError",
    "Federation",
    "ModelError",
    "Plan",
    "PlanError",
    "PrivateTraining",
    "RoundMetrics",
    "Run",
    "RunError",
    "Schedule",
    "Splits",
    "__version__",
    "as_dataset",
    "attack",
    "calibrate",
    "check",
    "constant",
    "cosine",
    "exponential",
    "linear",
    "load",
    "load_file",
    "loggers",
    "make_private",
    "open_run",
    "partition",
    "proportional",
    "quantile",
    "replace_batch_norm",
    "report",
    "simulate",
]

Plan.privacy = privacy_of_plan  # accounting is above the plan, which imports nothing of it
