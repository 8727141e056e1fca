"""The start scripts: short enough to read, and all that another machine needs besides its own folder.

`fedcdp deploy up` runs these very scripts, so that what works here is what is copied.
"""

from __future__ import annotations

from fedcdp.deploy.site import CONNECTION, SiteSettings

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
