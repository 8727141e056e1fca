"""What can go wrong with a deployment, each in one clear sentence."""

from fedcdp.errors import DefectError, FedcdpError


class DeploymentError(FedcdpError):
    """A deployment directory or machine that cannot be used as asked: bad input."""


class DeploymentFailedError(DefectError):
    """A deployment that was started and did not finish; the sentence names the log that says why."""
