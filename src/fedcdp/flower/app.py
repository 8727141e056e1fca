"""The ready-made app. In a Flower app's `pyproject.toml`:

```toml
[tool.flwr.app.components]
serverapp = "fedcdp.flower.app:server"
clientapp = "fedcdp.flower.app:client"
```

Each app is made when it is first used, so a node does not import the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    client: ClientApp
    server: ServerApp

__all__ = ["client", "server"]


def __getattr__(name: str) -> Any:
    if name == "client":
        from fedcdp.deploy.protocol.client import client_app

        made: ClientApp | ServerApp = client_app()
    elif name == "server":
        from fedcdp.deploy.protocol.server import server_app

        made = server_app()
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, made)
