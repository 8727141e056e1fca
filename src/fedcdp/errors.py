"""Errors: each carries one clear sentence that names the field, the value and what is allowed."""

from __future__ import annotations


class FedcdpError(Exception):
    """Base of every error that a user can cause and fix.

    Its message is one sentence that names the field, the value and what is allowed. The command line prints it as one line
    and exits with status 2.

    Examples:
        >>> import fedcdp
        >>> try:
        ...     fedcdp.Plan(rounds=0)
        ... except fedcdp.FedcdpError as error:
        ...     print(error)
        rounds: 0 is not allowed; it must be at least 1
    """


class PlanError(FedcdpError):
    """The plan contradicts itself or the federation, or no ε can be computed for it.

    Examples:
        >>> import fedcdp
        >>> fedcdp.Plan(clip="median")
        Traceback (most recent call last):
        fedcdp.errors.PlanError: clip: ...
    """


class DataError(FedcdpError):
    """The dataset is missing, damaged, or not what its format promises.

    Examples:
        >>> import fedcdp
        >>> fedcdp.load("imagenet")
        Traceback (most recent call last):
        fedcdp.errors.DataError: dataset 'imagenet' is unknown: ...
    """


class ModelError(FedcdpError):
    """The network cannot be trained under the chosen method, for example because a layer mixes examples.

    Examples:
        >>> import fedcdp
        >>> from torch import nn
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> network = nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 2))
        >>> fedcdp.simulate(network, federation, fedcdp.Plan(per_round=10))
        Traceback (most recent call last):
        fedcdp.errors.ModelError: ...BatchNorm1d, which mixes examples...
    """


class DefectError(FedcdpError):
    """The program violates its own guarantees; never the user's fault."""


class ClaimError(FedcdpError):
    """A claim that was checked does not hold."""


class StoppedError(FedcdpError):
    """The user stopped a long computation; finished work is kept."""


class RunError(FedcdpError):
    """The run directory or checkpoint cannot be used as asked.

    Examples:
        >>> import fedcdp
        >>> fedcdp.report("no such directory", "report.html")
        Traceback (most recent call last):
        fedcdp.errors.RunError: no such directory does not exist
    """


class StorageError(RunError):
    """A required write failed: the disk is full or broken, or the directory is gone. Existing files are kept."""


class RankError(FedcdpError):
    """The ranks of a training on several processes do not fit together."""


class LostRankError(RankError):
    """A rank ended, or its connection was lost, so the training ends on all ranks. Finished rounds are kept."""


class TaskError(FedcdpError):
    """A published task that is invalid, or that this version does not support."""


class WireError(FedcdpError):
    """A message does not follow the protocol."""


class PolicyError(FedcdpError):
    """A client's policy that cannot be read."""


class RefusedError(FedcdpError):
    """A client refuses a server's request."""

    def __init__(self, reason: str, *, final: bool = False, kind: str = "refused") -> None:
        super().__init__(reason)
        self.final = final
        """Whether the client will not take part in this task again."""
        self.kind = kind
        """The reason in one word, for figures."""


class DeploymentError(FedcdpError):
    """A deployment directory or machine that cannot be used as asked: bad input."""


class DeploymentFailedError(DefectError):
    """A deployment that was started and did not finish; the message names the log with the reason."""
