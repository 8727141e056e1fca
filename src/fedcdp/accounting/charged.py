"""What a run has released: charged to its ledger before anything of it is used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcdp.accounting.ledger import Ledger


class Releases:
    """What has been released so far: kept in the run's ledger where there is one, before a release is used."""

    def __init__(self, clients: int, ledger: Ledger | None = None) -> None:
        self.count = ledger.rounds_charged if ledger else 0
        self.participations = ledger.participations() if ledger else np.zeros(clients, dtype=np.int64)
        self._ledger = ledger

    def charge(self, round_: int, chosen: NDArray[np.int64], bound: float) -> None:
        """Record a round's release; only then may anything of it be used."""
        before = self.count
        if self._ledger:
            self._ledger.charge(round_, chosen, bound)
        self.count = self._ledger.rounds_charged if self._ledger else self.count + 1
        if self.count > before:  # not the same release once more, after a crash
            self.participations[chosen] += 1

    @property
    def attempt(self) -> int:
        """How often the round that was charged last had been released before."""
        return self._ledger.charges[-1].attempt if self._ledger and self._ledger.charges else 0

    def may_go_on(self, round_: int, most: int | None) -> bool:
        """Whether one more round keeps within the largest number of releases; one that is charged already does."""
        charged = self._ledger is not None and self._ledger.noise == "seeded" and self._ledger.rounds_charged > round_
        return most is None or charged or self.count < most
