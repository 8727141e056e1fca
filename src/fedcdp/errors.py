"""Errors: each carries one clear sentence that names the field, the value and what is allowed."""

from __future__ import annotations


class FedcdpError(Exception):
    """Base of every error that a user can cause and mend; the command line prints it as one line and exits with 2."""


class PlanError(FedcdpError):
    """A plan that contradicts itself, the federation, or what can be accounted."""


class DataError(FedcdpError):
    """A dataset that is missing, damaged or not what its format promises."""


class ModelError(FedcdpError):
    """A network that cannot be trained under the chosen method."""


class DefectError(FedcdpError):
    """The program violates its own guarantees; never the user's fault."""


class StoppedError(FedcdpError):
    """The user stopped a long computation; finished work is kept."""


class RunError(FedcdpError):
    """A run directory or checkpoint that cannot be used as asked."""


class StorageError(RunError):
    """A required write failed: the disk is full or broken, or the directory is gone. Existing files are kept."""


class TaskError(FedcdpError):
    """A published task that is invalid, or that this version does not support."""


class WireError(FedcdpError):
    """A message does not follow the protocol."""


class PolicyError(FedcdpError):
    """A client's policy that cannot be read."""


class RefusedError(FedcdpError):
    """A client refuses a server's request."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final
        """Whether the client will not take part in this task again."""


class DeploymentError(FedcdpError):
    """A deployment directory or machine that cannot be used as asked: bad input."""


class DeploymentFailedError(DefectError):
    """A deployment that was started and did not finish; the message names the log with the reason."""
