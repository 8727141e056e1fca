"""The ready-made app. In a Flower app's `pyproject.toml`:

```toml
[tool.flwr.app.components]
serverapp = "fedcdp.flower.app:server"
clientapp = "fedcdp.flower.app:client"
```
"""

from __future__ import annotations

from fedcdp.deploy.protocol.client import client_app
from fedcdp.deploy.protocol.server import server_app

server = server_app()
client = client_app()
