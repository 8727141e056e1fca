"""fedcdp: gradient-leakage resilient federated learning for PyTorch.

The public names are imported when they are first used, so the command line does not wait for what its command does not need.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedcdp import _startup  # noqa: F401 - first: Ctrl-C prints no traceback while the command line imports the others
from fedcdp._version import __version__
from fedcdp.config.plan import Plan

if TYPE_CHECKING:
    from fedcdp import loggers
    from fedcdp.attacks.api import attack
    from fedcdp.checks.api import check
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

_NAMES = {
    "attacks.api": ("attack",),
    "checks.api": ("check",),
    "config.schedules": ("Schedule", "constant", "cosine", "exponential", "linear", "proportional", "quantile"),
    "data.dataset": ("Dataset", "Splits"),
    "data.load": ("load",),
    "data.own_files": ("load_file",),
    "data.partition": ("Federation", "partition"),
    "data.sources": ("as_dataset",),
    "errors": ("DataError", "FedcdpError", "ModelError", "PlanError", "RunError"),
    "models.batch_norm": ("replace_batch_norm",),
    "report.api": ("report",),
    "training.adoption": ("PrivateTraining", "make_private"),
    "training.calibration": ("calibrate",),
    "training.progress": ("RoundMetrics",),
    "training.run": ("Run",),
    "training.saved_run": ("open_run",),
    "training.simulate": ("simulate",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name == "loggers":
        return import_module("fedcdp.loggers")
    if name not in _HOMES:
        raise AttributeError(f"module 'fedcdp' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"fedcdp.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    """The public names, also those that were not used yet."""
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Importing the package `fedcdp.report` does not hide the function `fedcdp.report`."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


class _StatedLater:
    """`Plan.privacy`, attached when it is first used: accounting is above the plan, which imports nothing of it."""

    def __get__(self, plan: Plan | None, kind: type[Plan]) -> Any:
        from fedcdp.accounting.budget import privacy_of_plan

        Plan.privacy = privacy_of_plan
        return (kind if plan is None else plan).privacy


setattr(Plan, "privacy", _StatedLater())  # noqa: B010 - to the type checker it is the function
