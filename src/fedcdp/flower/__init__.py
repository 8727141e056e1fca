"""The same plan across real processes and machines, on Flower (`pip install fedcdp[flower]`).

| part | for |
| --- | --- |
| `app` | the ready Flower app |
| `client.client_app`, `server.server_app`, `strategy.PlanStrategy` | your own Flower app |
| `policy.ClientPolicy` | what a client grants |
| `task.Task` | what a server publishes |

Nothing here is imported unless it is asked for: Flower is an optional part.
"""
