"""The recipes of the accountant's specification, written a second time: a plan's fields to releases, releases to ε.

Nothing is imported from fedcdp.accounting. Of a `Plan` only plain fields and `clip_at` are read. A subclass of `Recipes` may
do one thing wrong on purpose; the tests compare it with this one.

μ is 1/z: the sensitivity of a released sum over the noise on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations_with_replacement

from tests.support.independent.losses import Exchanged, Release, Sampled, Shift, slotted, together
from tests.support.independent.rows import Key, Made, Row, Rows, lottery


class Recipes(Rows):
    """The recipes, row by row."""

    # Rows ------------------------------------------------------------------------------------------------------------

    def rows(self) -> dict[Key, tuple[str, list[list[Row | None]]]]:
        """For each row its kind and, for each size of a client, those that hold; None: no guarantee."""
        plan = self.plan
        if plan.method in ("nonprivate", "dssgd") or plan.noise_multiplier == 0:
            return {(who, "record", "zero-out"): ("none", [[None]]) for who in ("server", "update", "example", "model")}
        return self._fed_sdp() if plan.method == "fed-sdp" else self._fed_cdp()

    def _for_sizes(self, make: Callable[[int], list[Row | None]]) -> list[list[Row | None]]:
        return [make(size) for size in self.federation.sizes]

    # Fed-CDP ---------------------------------------------------------------------------------------------------------

    def _fed_cdp(self) -> dict[Key, tuple[str, list[list[Row | None]]]]:
        plan = self.plan
        exposed = [("example", 1.0, "zero-out"), ("example", 0.5, "replace-one")] if plan.noise == "example" else []
        rows: dict[Key, tuple[str, list[list[Row | None]]]] = {}
        rows["update", "record", "zero-out"] = "server", self._for_sizes(lambda size: self._known(self.summed(size)))
        credit = "credited" if self.credited() else "server"
        rows["server", "record", "zero-out"] = (
            credit,
            self._for_sizes(lambda size: self._known(self.summed(size, self.server_sees))),
        )
        rows["model", "record", "zero-out"] = (
            credit,
            self._for_sizes(lambda size: self._model(self.summed(size, self.client_sees), self.cohort_rate(size))),
        )
        rows["server", "client", "zero-out"] = "client", [[self.known(self._every_step(self.server_sees / plan.slots))]]
        rows["model", "client", "zero-out"] = (
            credit,
            [self._model([self._every_step(self.client_sees / plan.slots)], self.others_rate)],
        )
        for who, weight, relation in exposed:
            rows[who, "record", relation] = (
                "seen",
                self._for_sizes(
                    lambda size, weight=weight: [self.known(self._steps(size, weight * self.on_a_slot(size), self._seen))]
                ),
            )
        if not exposed:
            rows["example", "record", "zero-out"] = "none", [[None]]
        if self.federation.copies > 1:
            rows["server", "unique", "zero-out"] = (
                "unique",
                [[*row, *self._moved_together(1.0)] for row in self._copied()],
            )
            if exposed:
                rows["example", "unique", "zero-out"] = (
                    "unique",
                    self._for_sizes(lambda size: [self.unique(self._steps(size, self.on_a_slot(size), self._seen))]),
                )
        return rows

    def on_a_slot(self, size: int) -> float:
        """The noise on one example, in units of σC: all S slots carry 1, or those that the client can fill carry more."""
        if self.plan.noise_slots == "all" or size >= self.plan.slots:
            return 1.0
        return math.sqrt(self.plan.slots / size)

    def record_rate(self, size: int) -> float:
        """q_l."""
        return min(1.0, self.plan.batch_size / size)

    def _uses(self, size: int) -> int:
        """In how many steps of a round a record may be."""
        steps, batch = self.plan.local_steps, self.plan.batch_size
        return min(steps, -(-steps * batch // size)) if self.plan.record_sampling == "partition" else steps

    def _steps(self, size: int, weight: float, step: Callable[[int, float], Release]) -> Made:
        """One participation: as many steps as may hold the record."""

        def participation(sigma: float) -> Release:
            first, later = (step(size, self.distance(sigma, weight, is_first)) for is_first in (True, False))
            return together([(first, 1), (later, self._uses(size) - 1)])

        return participation

    def _known(self, participations: list[Made]) -> list[Row | None]:
        return [self.known(once) for once in participations]

    def summed(self, size: int, weight: float | None = None) -> list[Made]:
        """One participation in the sums of its steps: with secret sampling; and with sampling that is known.

        The noise on a sum is that of its client, or of `weight` draws.

        A record that is zeroed out keeps its slot, so that known sampling moves a sum by one sensitivity. The dominating
        pairs of `fixed` sampling and of slots that overflow move it by two, and may cost more than secrecy saves.
        """
        plan, weight = self.plan, self.draws if weight is None else weight
        secret = self._steps(size, weight, self._hidden)
        if plan.record_sampling == "fixed" or (plan.record_sampling == "poisson" and size > plan.slots):
            return [secret, self._steps(size, weight, lambda _, mu: Shift(mu))]
        return [secret]

    def _every_step(self, weight: float) -> Made:
        def participation(sigma: float) -> Release:
            first, later = (Shift(self.distance(sigma, weight, is_first)) for is_first in (True, False))
            return together([(first, 1), (later, self.plan.local_steps - 1)])

        return participation

    def _hidden(self, size: int, mu: float) -> Release:
        """A step's sum, for a reader who does not know which records are in it."""
        rate = self.record_rate(size)
        if self.plan.record_sampling == "partition" or rate == 1:
            return Shift(mu)
        if self.plan.record_sampling == "fixed":
            return Exchanged(rate, 2 * mu)
        return slotted(size, rate, self.plan.slots, mu)

    def _seen(self, size: int, mu: float) -> Release:
        """A noised gradient, for a reader who knows whose it is."""
        rate = 1.0 if self.plan.record_sampling == "partition" else self.record_rate(size)
        return lottery(Shift(mu), rate)

    def _copied(self) -> list[list[Row | None]]:
        """One person, with all copies at clients of one size; and, where no size is always the worst, at clients of several.

        Slots overflow only at large clients and smaller clients draw more often, so that neither dominates the other.
        Then one copy at each may cost more than two at either.
        """
        sizes, plan = self.federation.sizes, self.plan
        rows = self._for_sizes(lambda size: [self.unique(once) for once in self.summed(size)])
        if plan.record_sampling == "poisson" and sizes[-1] > plan.slots:
            for held in combinations_with_replacement(sizes, self.federation.copies):
                if len(set(held)) > 1:
                    rows.append([self.mixed([self.summed(size)[way] for size in held]) for way in (0, -1)])
        return rows

    # Secure aggregation ----------------------------------------------------------------------------------------------

    @property
    def server_sees(self) -> float:
        """The noise on what the server reads of a client's steps, in draws: its own, or that of all who do not collude."""
        return self.draws * (math.sqrt(self.plan.per_round - self.plan.colluders) if self.credited() else 1.0)

    @property
    def client_sees(self) -> float:
        """The noise on a round's sum that a client does not know, who may have added some of it itself, in draws."""
        return self.draws * self._unknown()

    def _unknown(self) -> float:
        """√ of the clients whose noise a client of the round and all colluders together do not know."""
        known = max(self.plan.colluders, 1)
        return math.sqrt(max(1, self.plan.per_round - known)) if self.credited() else 1.0

    @property
    def others_rate(self) -> float:
        """How often one of the other clients takes part, for a client who knows when it took part itself."""
        others = max(1, self.federation.clients - max(self.plan.colluders, 1))
        return min(1.0, self.plan.per_round / others)

    def credited(self) -> bool:
        """Whether the noise of the other clients counts for whoever reads a round's sum alone."""
        plan = self.plan
        if plan.noise == "sum":  # equal noise on undivided sums
            return True
        if not plan.secure_aggregation or self.pruned():
            return False
        return plan.method == "fed-sdp" or (plan.local_steps == 1 and not self.uneven())

    def pruned(self) -> bool:
        """Whether clients prune their own noise."""
        return self.plan.compression > 0

    def uneven(self) -> bool:
        """Whether the noise of a client shows that it took part: that of a small one, divided by fewer records than B; or,
        where updates weigh by N_i, that of a large one, multiplied by more records than the B that it is divided by."""
        if self.plan.weighting == "records":
            return max(self.federation.sizes) > self.plan.batch_size
        return min(self.federation.sizes) < self.plan.batch_size

    def cohort_rate(self, size: int) -> float:
        """How often a record is in a round's sum, in secret: under `partition`, whenever its client is."""
        secret = 1.0 if self.plan.record_sampling == "partition" else self.record_rate(size)
        return self.others_rate * secret

    def _model(self, participations: list[Made], rate: float) -> list[Row | None]:
        """The rows of a reader who knows the cohort; and, where others' noise counts and not everybody takes part, one more:
        whoever is drawn in the unit's client's place moves the sum by two whole steps of S."""
        known: list[Row | None] = [self.known(once) for once in participations]
        if not self.credited() or self.client_rate == 1:
            return known
        slots, once = 2 * self.plan.slots, participations[0]
        return [*known, self._secret(rate, lambda sigma: self.distance(sigma, self.client_sees / slots), once)]

    def _moved_together(self, moved: float) -> list[Row | None]:
        """Where the server reads a sum: all copies of a person move it by `moved` clip bounds each."""
        if not self.credited():
            return []
        copies = self.unique(lambda _: Shift(0.0)).most
        noise = self.server_sees if self.plan.method != "fed-sdp" else self._update_noise * self._honest()

        def made(sigma: float) -> Release:
            return Shift(self.distance(sigma, noise / (moved * copies)))

        return [Row(made, made, made, hidden=True)]

    def _secret(self, rate: float, mu: Callable[[float], float], once: Made) -> Row:
        return Row(lambda sigma: Exchanged(rate, mu(sigma)), once, once, hidden=True)

    # Fed-SDP ---------------------------------------------------------------------------------------------------------

    def _fed_sdp(self) -> dict[Key, tuple[str, list[list[Row | None]]]]:
        plan = self.plan
        rows: dict[Key, tuple[str, list[list[Row | None]]]] = {("example", "record", "zero-out"): ("none", [[None]])}
        for unit, weight in (("client", 1.0), ("record", 0.5)):
            update = self._update(weight * self._update_noise)
            if plan.noise_at == "client":
                kind = "credited" if self.credited() else "server"
                rows["update", unit, "zero-out"] = "server", [[self.known(update)]]
                seen = self._update(weight * self._update_noise * self._honest())
                rows["server", unit, "zero-out"] = kind, [[self.known(seen)]]
                rows["model", unit, "zero-out"] = kind, [self._noisy_sum(weight)]
                continue
            rows["server", unit, "zero-out"] = rows["update", unit, "zero-out"] = "none", [[None]]
            rows["model", unit, "zero-out"] = "hidden", [[Row(self._amplified(unit, update), update, update, hidden=True)]]
        if self.federation.copies > 1:
            if plan.noise_at == "client":
                single = self.unique(self._update(0.5 * self._update_noise))
                rows["server", "unique", "zero-out"] = "unique", [[single, *self._moved_together(2.0)]]
            else:
                most = self.unique(self._update(0.5)).most
                moved = self._update(0.5 / most)
                rows["model", "unique", "zero-out"] = "unique", [[Row(moved, moved, moved, hidden=True)]]
        return rows

    def _update(self, weight: float) -> Made:
        return lambda sigma: Shift(self.distance(sigma, weight))

    def _amplified(self, unit: str, update: Made) -> Made:
        """Noise at the server: its sum, for whoever does not know who took part."""

        def summed(sigma: float) -> Release:
            moved = update(sigma)
            if self.client_rate == 1 or not isinstance(moved, Shift):
                return moved
            if unit == "record":  # its client's update is another one: `update` is over that distance already
                return Exchanged(self.client_rate, moved.mu)
            if self.plan.client_sampling == "poisson":
                return Sampled(self.client_rate, moved.mu)
            return Exchanged(self.client_rate, 2 * moved.mu)

        return summed

    @property
    def _update_noise(self) -> float:
        """The noise of one client on its update, in draws."""
        return self.share if self.plan.noise == "sum" else 1.0

    def _honest(self) -> float:
        return math.sqrt(self.plan.per_round - self.plan.colluders) if self.credited() else 1.0

    def _noisy_sum(self, weight: float) -> list[Row | None]:
        """Noise at the clients, of which only the sum is seen, by a client who knows its own."""
        noise = self._update_noise * self._unknown()
        known = self._update(weight * noise)
        if not self.credited() or self.client_rate == 1:
            return [self.known(known)]
        return [
            self.known(known),
            self._secret(self.others_rate, lambda sigma: self.distance(sigma, noise / 2), known),
        ]
