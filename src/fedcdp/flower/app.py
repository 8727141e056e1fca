"""The ready app: in a Flower app's `pyproject.toml`,

```toml
[tool.flwr.app.components]
serverapp = "fedcdp.flower.app:server"
clientapp = "fedcdp.flower.app:client"
```
"""

from fedcdp.flower.client import client_app
from fedcdp.flower.server import server_app

server = server_app()
client = client_app()
