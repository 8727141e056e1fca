"""Errors of a deployment: each carries one clear sentence, for the log of whoever meets it."""

from fedcdp.errors import FedcdpError


class TaskError(FedcdpError):
    """A published task that is not one, or not one that this version knows."""


class WireError(FedcdpError):
    """What arrived over the wire is not what was agreed on."""


class PolicyError(FedcdpError):
    """A client's policy that cannot be read."""


class RefusedError(FedcdpError):
    """A client does not do what the server asks."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final
        """Whether it will not take part in this task again."""
