"""What a run has released: charged to its ledger before anything of it is used."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedcdp.accounting.ledger import Charge, Ledger

Allows = Callable[[tuple[int, ...]], bool]
"""Whether a budget has room for releases of these rounds, repeats included."""


class Releases:
    """What has been released so far: kept in the run's ledger where there is one, before a release is used."""

    def __init__(self, clients: int, ledger: Ledger | None = None) -> None:
        self.charges: list[Charge] = list(ledger.charges) if ledger else []
        self.participations = ledger.participations() if ledger else np.zeros(clients, dtype=np.int64)
        self._ledger = ledger

    def charge(self, round_: int, chosen: NDArray[np.int64], bound: float) -> None:
        """Record a round's release; only then may anything of it be used."""
        if self._ledger:
            self._ledger.charge(round_, chosen, bound)
            if self._ledger.rounds_charged == len(self.charges):  # the same release once more, after a crash
                return
        self.charges.append(self._ledger.charges[-1] if self._ledger else Charge(round_, 0, chosen, bound))
        self.participations[chosen] += 1

    @property
    def rounds(self) -> tuple[int, ...]:
        """The round of every release so far; one that was released twice stands there twice."""
        return tuple(charge.round for charge in self.charges)

    @property
    def attempt(self) -> int:
        """How often the round that was charged last had been released before."""
        return self._ledger.charges[-1].attempt if self._ledger and self._ledger.charges else 0

    def may_go_on(self, round_: int, allows: Allows | None) -> bool:
        """Whether a budget allows the releases so far and this round; a round that is charged already costs nothing more."""
        charged = self._ledger is not None and self._ledger.noise == "seeded" and self._ledger.rounds_charged > round_
        return allows is None or charged or allows((*self.rounds, round_))
