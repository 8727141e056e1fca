"""Run the same plan across real processes and machines with Flower (the extra `flower`).

| name | use it for |
| --- | --- |
| `app` | the ready-made Flower app |
| `client_app`, `server_app`, `ServerSettings` | your own Flower app |
| `PlanStrategy`, `Job` | your own server |
| `Task` | what a server publishes |
| `ClientPolicy`, `Facts`, `ClientLedger` | what a client grants, given its data and its releases so far |

Flower is optional: a name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcdp.deploy.protocol.client import client_app
    from fedcdp.deploy.protocol.client_ledger import ClientLedger
    from fedcdp.deploy.protocol.policy import ClientPolicy, Facts
    from fedcdp.deploy.protocol.server import ServerSettings, server_app
    from fedcdp.deploy.protocol.strategy import Job, PlanStrategy
    from fedcdp.deploy.protocol.task import Task

_PLACES = {
    "ClientLedger": "client_ledger",
    "ClientPolicy": "policy",
    "Facts": "policy",
    "Job": "strategy",
    "PlanStrategy": "strategy",
    "ServerSettings": "server",
    "Task": "task",
    "client_app": "client",
    "server_app": "server",
}

__all__ = [
    "ClientLedger",
    "ClientPolicy",
    "Facts",
    "Job",
    "PlanStrategy",
    "ServerSettings",
    "Task",
    "client_app",
    "server_app",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fedcdp.deploy.protocol.{_PLACES[name]}"), name)
