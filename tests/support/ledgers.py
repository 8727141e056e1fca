"""Clients' ledgers as earlier versions wrote them."""

from __future__ import annotations

from pathlib import Path

from fedcdp.deploy.protocol.client_ledger import ClientLedger
from fedcdp.deploy.protocol.task import Task


def written_by_0_1_0(directory: Path, made: list[tuple[Task, int]]) -> None:
    """A ledger as the first release wrote it: releases, and no reservation."""
    with ClientLedger.held(directory) as ledger:
        for accepted, times in made:
            ledger.accept(accepted, 100)
            for round_ in range(times):
                ledger._write_line({"released": accepted.digest(), "round": round_, "attempt": 0, "bound": 4.0})
