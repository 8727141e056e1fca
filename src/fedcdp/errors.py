"""Errors of ours: each carries one clear sentence that names the field, the value and what is allowed."""


class FedcdpError(Exception):
    """Base of every error that a user can cause and mend; the command line prints it as one line and exits with 2."""


class PlanError(FedcdpError):
    """A plan that contradicts itself, the federation, or what can be accounted."""


class DataError(FedcdpError):
    """A dataset that is missing, damaged or not what its format promises."""


class ModelError(FedcdpError):
    """A network that cannot be trained under the chosen method."""


class DefectError(FedcdpError):
    """The program does not keep what it promises; never the user's fault."""


class StoppedError(FedcdpError):
    """The user stopped long work; what was done is kept."""


class RunError(FedcdpError):
    """A run directory or checkpoint that cannot be used as asked."""


class StorageError(RunError):
    """What had to be written was not: the disk is full or broken, or the directory is gone. What was there is kept."""
