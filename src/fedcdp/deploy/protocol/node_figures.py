"""The figures of a client's ledger for those who watch its node: tasks, releases, and ε granted, reserved and left.

They are what the owner's policy and the client's ledger say, and nothing of the data.
"""

from __future__ import annotations

import math
from contextlib import suppress

from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.monitor_file import Tally
from fedcdp.deploy.protocol.policy import ClientPolicy
from fedcdp.errors import PlanError


def note_ledger(tally: Tally, policy: ClientPolicy, ledger: ClientLedger) -> None:
    """Note the figures. A policy without a limit has no ε to show, and none that it had before stays."""
    for name in ("granted", "reserved", "left"):
        tally.forget(f"fedcdp_node_epsilon_{name}")
    tally.set("fedcdp_node_tasks", len(ledger.tasks))
    tally.set("fedcdp_node_releases", sum(len(each.releases) for each in ledger.tasks.values()))
    for grant in policy.grants:
        about = grant.adversary, grant.unit
        tally.set("fedcdp_node_epsilon_granted", grant.epsilon, *about)
        with suppress(PlanError):  # a task that the policy no longer covers
            reserved = math.fsum(grant.costs(ledger.reservations()))
            tally.set("fedcdp_node_epsilon_reserved", reserved, *about)
            tally.set("fedcdp_node_epsilon_left", max(0.0, grant.epsilon - reserved), *about)
