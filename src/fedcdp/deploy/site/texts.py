"""The start scripts: short enough to read, and all that another machine needs besides its own folder.

`fedcdp deploy up` runs these very scripts, so that what works here is what is copied.

The README.md of a deployment: what is here, how it is started, and what to replace before it guards real data.
"""

from __future__ import annotations

from fedcdp.config.experiment import Experiment
from fedcdp.deploy.site.certificates import VALID_DAYS
from fedcdp.deploy.site.directory import CONNECTION, SiteSettings

USUAL_PORT = 9443  # of the scripts, where a deployment on one machine takes any free one
_FIRST_RUNTIME_PORT = 9100  # a node's own, for the programs that it starts; on one machine each node needs another

_HEAD = """#!/usr/bin/env bash
# {what}
set -euo pipefail
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"

# Nothing is sent to Flower's makers or looked up on the network, and nothing is installed while running.
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
umask 077
"""


def superlink(settings: SiteSettings) -> str:
    """Start the server."""
    return _HEAD.format(what="The server: accepts nodes whose keys are registered, over TLS, and runs the ServerApp.") + (
        f"""
# The address to listen on: 0.0.0.0 for nodes on other machines, once the README's "Before production" is done.
listen="${{FEDCDP_LISTEN:-127.0.0.1}}"
port="${{FEDCDP_PORT:-{settings.port or USUAL_PORT}}}"

# The ServerApp finds the plan and the run directory from here (app/pyproject.toml).
cd "$here"
export FLWR_HOME="$here/server/flwr"
mkdir -p "$FLWR_HOME"

exec flower-superlink \\
  --host "$listen" --port "$port" \\
  --ssl-ca-certfile "$here/authority/ca.pem" \\
  --ssl-certfile "$here/server/server.pem" \\
  --ssl-keyfile "$here/server/server.key" \\
  --enable-supernode-auth \\
  --database "$here/server/state.db" \\
  --disable-runtime-dependency-installation
"""
    )


def node(settings: SiteSettings, number: int) -> str:
    """Start one node."""
    name = f"node-{number}"
    return _HEAD.format(what=f"Node {number}: copy this file and the folder {name} to its machine, and only these.") + (
        f"""
server="${{FEDCDP_SERVER:-{address_of(settings)}}}"
folder="$here/{name}"

# Its configuration names the client's data, policy and ledger, relative to its folder. They stay on this machine.
export FLWR_HOME="$folder/flwr"
mkdir -p "$FLWR_HOME"
cd "$folder"

exec flower-supernode \\
  --superlink "$server" \\
  --root-certificates "$folder/ca.pem" \\
  --auth-supernode-private-key "$folder/node.key" \\
  --port "${{FEDCDP_NODE_PORT:-{_FIRST_RUNTIME_PORT + number}}}" \\
  --node-config node.toml
"""
    )


def run(settings: SiteSettings) -> str:
    """Register the nodes and start the job."""
    return _HEAD.format(what="The job: registers the nodes' public keys at the server, then starts the training.") + (
        f"""
server="${{FEDCDP_SERVER:-{address_of(settings)}}}"
export FLWR_HOME="$here/flwr"
cat > "$FLWR_HOME/config.toml" <<END
[superlink]
default = "{CONNECTION}"

[superlink.{CONNECTION}]
address = "$server"
root-certificates = "$here/authority/ca.pem"
END

# A key that is registered already is refused, which is as good.
if [ "${{1:-}}" != --run-only ]; then
  for key in "$here"/node-*/node.pub; do
    failed=no
    told="$(flwr supernode register "$key" {CONNECTION} 2>&1)" || failed=yes
    echo "$told"
    if [ "$failed" = yes ] && ! grep -qi "already" <<< "$told"; then exit 1; fi
  done
fi
if [ "${{1:-}}" = --register-only ]; then exit 0; fi

# The ServerApp of a server that was killed may still be ending: wait until it lets go of the run.
if [ -e "$here/run/lock" ] && command -v flock > /dev/null; then
  flock --wait 60 "$here/run/lock" true || {{ echo "the run in $here/run is in use by another process"; exit 1; }}
fi
exec flwr run "$here/app" {CONNECTION} --stream
"""
    )


def address_of(settings: SiteSettings) -> str:
    """Where nodes and commands reach the server."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{host}:{settings.port or USUAL_PORT}"


def text(settings: SiteSettings, experiment: Experiment) -> str:
    """The page for one deployment."""
    plan, data = experiment.plan, experiment.data
    what = data.dataset or "your own examples"
    seeded = "" if plan.secure_noise else _REPRODUCIBLE
    return f"""# A fedcdp deployment: a server and {settings.nodes} nodes

{plan.method} on {what}, {plan.rounds} rounds, {plan.per_round} clients a round, noise multiplier {plan.noise_multiplier:g}.
{seeded}
## On one machine

    fedcdp deploy up .

starts the server and all nodes from the scripts below, runs the job, shows progress and ε, and ends everything. The
run directory is `run/`: what works on one of `fedcdp train` works on it (`fedcdp account --run run`, `fedcdp evaluate run`).
If it is stopped or killed, the same command goes on from the last whole round.

## On several machines

1. Install `fedcdp[flower]`, the same version, on every machine. Everything below takes its programs from `PATH`.
2. The server's machine keeps this folder without the `node-*` folders' private keys and without `authority/ca.key`.
3. Node K gets `start-node-K.sh` and `node-K/`, and nothing else. Its owner, and nobody else, says in
   `node-K/node.toml` where its data are and in `policy.toml` how much ε it grants, and to whom; its ledger stays there, too.
4. Start, in this order: `FEDCDP_LISTEN=0.0.0.0 ./start-superlink.sh` on the server; `./run.sh --register-only` once, there;
   `./start-node-K.sh` on each node; `./run.sh --run-only` on the server. Again `./run.sh --run-only` resumes a run.

| file | who needs it | secret |
| --- | --- | --- |
| `deployment.toml` | `fedcdp deploy up` | no |
| `experiment.toml` | server: the plan, which nodes get as the published task | no |
| `authority/ca.pem` (and `node-*/ca.pem`) | all: by it the server is known | no |
| `authority/ca.key` | nobody who runs; only to sign another server certificate | **yes** |
| `server/server.key`, `server.pem` | server | **key: yes** |
| `server/state.db` | server: registered keys and messages in flight | yes |
| `node-K/node.key` | node K | **yes** |
| `node-K/node.pub` | server, to register it | no |
| `node-K/node.toml`, `policy.toml`, `state/` | node K: its data, its policy, its ledger | its own matter |
| `app/` | server: what to run, and how long to wait for nodes. Sent to every node | no |
| `run/` | server: checkpoint, metrics, ledger, model; `config.toml` has the seed by which clients are drawn | yes |

A lost or restored-from-backup `node-K/state/` makes a client forget what it has spent. Keep it like the data itself.

## Before production

- **The authority.** `authority/` is a test authority that `fedcdp deploy init` made here, valid for {VALID_DAYS} days.
  Have `server/server.pem` and `server.key` issued by your own, for the name that nodes use (now: `{settings.host}`,
  `localhost`, `127.0.0.1`) and for `127.0.0.1`, where the server's own programs call it, put its root certificate in the
  place of every `ca.pem`, and delete `authority/ca.key`.
- **The keys.** Let each node make its own: `ssh-keygen -t ecdsa -b 384 -N "" -f node.key`, and send you only `node.key.pub`.
  A key that leaves its machine has to be replaced: `flwr supernode unregister`, then `./run.sh --register-only`.
- **Who may command the server.** Flower serves nodes (`/v1/fleet`) and operators (`/v1/control`) on one port, and without
  its account service (OIDC, not part of the open distribution) it asks operators for nothing: *whoever reaches
  `/v1/control` can register a key and start an app, and apps run at the nodes.* The server therefore listens on
  127.0.0.1 unless told otherwise. Put a proxy before it that lets only `/v1/fleet` through from outside, and let nodes
  run signed apps only (`flower-supernode --trusted-entities`).
- **Hosts.** `deployment.toml`, or `FEDCDP_SERVER=host:port` for the scripts; for the server also `FEDCDP_PORT` and
  `FEDCDP_LISTEN`.
- **The database.** `server/state.db` is SQLite, which is enough for one server; back up `run/`, not the database: after its
  loss register the keys again and start the job again, and it goes on from `run/`. `fedcdp deploy up` begins with an empty
  database every time.
- **Keeping it up.** A unit for systemd is `ExecStart=/srv/deployment/start-superlink.sh`, `Restart=always`, `RestartSec=20`,
  `KillMode=control-group`, a user of its own; a node's likewise (one that was killed is refused for a minute, as if it
  were still connected). In Kubernetes: one pod each, the secrets above as mounted secrets, `run/` and `node-K/state/` on
  persistent volumes, never shared by two pods.
- **Secrets.** Everything marked in the table has mode 0600; keep it so when copying (`cp -p`, `rsync -p`).

Ports: the server `{settings.port or USUAL_PORT}`; each node opens one on its loopback for the programs it starts.
More: docs/deployment.md of fedcdp.
"""


_REPRODUCIBLE = """
**This deployment is reproducible: its noise comes from a seed that is published with the task, so that anyone can subtract
it. It is for tests and protects nobody.**
"""
