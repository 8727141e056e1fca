"""The settings of an Opacus training, and the ε that they give against each adversary.

Opacus clips the gradient of every record at C, adds N(0, (σC)²) to the sum over a batch, and divides by the expected batch
size, a constant. z is therefore σ. What the adversary does not know decides the rest:

| sampling | unknown | a step |
| --- | --- | --- |
| Poisson (`poisson_sampling=True`) | which records are in a batch | `PoissonGaussian(q, σ)` |
| shuffled (`poisson_sampling=False`) | nothing that is credited | `Gaussian(σ)`, once an epoch |

Opacus itself computes ε as if batches were Poisson samples in both cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedcdp.accounting.mechanisms import Gaussian, Lottery, PoissonGaussian, Release, Unprotected, repeated
from fedcdp.accounting.statement import VACUOUS, Privacy, Row
from fedcdp.checks.bounds import require_count, require_delta, require_noise, require_number
from fedcdp.checks.findings import AttackScope, Finding, membership_accuracy
from fedcdp.errors import PlanError


@dataclass(frozen=True)
class OpacusSettings:
    """DP-SGD by Opacus: in one place, or at each of several clients whose models a server averages.

    Examples:
        >>> import fedcdp
        >>> from fedcdp.checks import OpacusSettings
        >>> shuffled = OpacusSettings(noise_multiplier=1.1, sample_rate=0.004, steps=15000, poisson=False)
        >>> round(fedcdp.check(shuffled).privacy.row("model").epsilon, 1)
        54.1
    """

    noise_multiplier: float
    """σ: `noise_multiplier` of Opacus."""
    sample_rate: float
    """q: 1 / `len(data_loader)`."""
    steps: int
    """Optimiser steps: of the whole training, or of a client in one round."""
    delta: float = 1e-5
    """δ of the statement."""
    clip: float = 1.0
    """C: `max_grad_norm` of Opacus."""
    poisson: bool = True
    """`poisson_sampling` of Opacus. False: a shuffled `DataLoader`."""
    clients: int = 1
    """Clients that each run Opacus on records of their own; 1: there is no federation."""
    per_round: int | None = None
    """Clients in a round, drawn at random; None: all of them."""
    rounds: int = 1
    """Rounds, after each of which the server reads the models."""
    records: int | None = None
    """Records at a client, for the rows about whole clients; None: unknown."""

    def __post_init__(self) -> None:
        require_noise(self.noise_multiplier)
        require_number("sample_rate", self.sample_rate, low=1e-12, high=1)
        require_number("clip", self.clip, low=0, above=True)
        require_delta(self.delta)
        for name in ("steps", "clients", "rounds", "per_round", "records"):
            value = getattr(self, name)
            if value is not None:
                require_count(name, value)
        if self.steps * self.rounds > _MOST_STEPS:
            raise PlanError(f"steps: {self.steps:,} in {self.rounds:,} rounds are too many; {_MOST_STEPS:,} are allowed")
        if self.per_round is not None and self.per_round > self.clients:
            raise PlanError(f"per_round: {self.per_round} is not allowed; there are {self.clients} clients")
        if self.clients == 1 and self.rounds > 1:
            raise PlanError("rounds: only for several clients; a training in one place has steps")

    @property
    def federated(self) -> bool:
        """Whether clients train and a server averages."""
        return self.clients > 1

    @property
    def title(self) -> str:
        """The settings in words."""
        where = f"at {self.clients:,} clients" if self.federated else "in one place"
        return f"Opacus {where}, σ = {self.noise_multiplier:g}, q = {self.sample_rate:g}, {self.steps:,} steps"

    def privacy(self) -> Privacy:
        """ε against every adversary."""
        participation, whole = self._participation(), self._whole_client()
        rows = []
        if self.federated:
            rows += [self._row(reader, "record", participation, self._hidden()) for reader in ("server", "update")]
            same = "same ε as against the server: other clients' noise is not credited over several local steps"
            rows += [self._row("model", "record", participation, same)]
            rows += [self._row(reader, "client", whole, _WHOLE) for reader in ("server", "model")]
        else:
            rows += [self._row("model", "record", participation, f"{self._hidden()}; covers the model after every step")]
        rows.append(self._row("example", "record", Unprotected(_CLIPPED), _CLIPPED))
        vacuous = any(VACUOUS <= row.epsilon < math.inf for row in rows)
        notes = (f"an ε above {VACUOUS:g} guarantees nothing in practice",) if vacuous else ()
        return Privacy(self.delta, "tight", tuple(rows), notes)

    def _participation(self) -> Release:
        """All steps of a client in a round, against one record.

        In a shuffled order, a record is in one batch of every epoch that was begun. An epoch has ⌊1/q⌋ batches or more.
        """
        sigma, rate = self.noise_multiplier, self.sample_rate
        if sigma == 0:
            return Unprotected(_NO_NOISE)
        if self.poisson and rate < 1:
            return repeated(PoissonGaussian(rate, sigma), self.steps)
        return repeated(Gaussian(sigma), math.ceil(self.steps / math.floor(1 / rate + 1e-9)))

    def _whole_client(self) -> Release:
        """The same against all records of a client: a Poisson batch may hold all of them, another one only its share."""
        if self.noise_multiplier == 0:
            return Unprotected(_NO_NOISE)
        if self.records is None:
            return Unprotected("the number of records at a client is unknown; give it for a finite ε")
        most = self.records if self.poisson else math.ceil(self.records * self.sample_rate)
        return repeated(Gaussian(self.noise_multiplier / most), self.steps)

    def _row(self, adversary: str, unit: str, participation: Release, assumption: str) -> Row:
        from fedcdp.accounting.pld import epsilon

        if isinstance(participation, Unprotected):
            return Row(adversary, unit, "zero-out", math.inf, None, math.inf, participation.reason)
        points = {"points": _POINTS} if self.steps * self.rounds <= _MANY_STEPS else {}
        rate = (self.per_round or self.clients) / self.clients
        worst = epsilon(repeated(participation, self.rounds), self.delta, **points)
        drawn = participation if rate == 1 else Lottery(participation, rate)
        before = worst if rate == 1 else epsilon(repeated(drawn, self.rounds), self.delta, **points)
        return Row(adversary, unit, "zero-out", min(before, worst), None, worst, assumption)

    def _hidden(self) -> str:
        if self.sample_rate == 1:
            return "every record is in every batch, so ε gets no reduction from sampling"
        if self.poisson:
            known = "; the adversary may know who takes part" if self.federated else ""
            return f"nobody sees which records a step draws (independently, at rate {self.sample_rate:.4g}){known}"
        return "each record is in one batch of every epoch, so ε gets no reduction from sampling"

    def findings(self) -> list[Finding]:
        """What these settings do not protect."""
        found = [
            Finding("warning", "no ε holds against a reader of single gradients where they are computed: Opacus only clips "
                    "them, and adds noise to the sum of the batch"),
            Finding("note", "this ε covers the gradients. Metrics, batch sizes and early stopping by private data are not "
                    "covered; nor is noise from a known seed (use secure_mode=True)"),
        ]  # fmt: skip
        if not self.poisson and self.sample_rate < 1:
            found.append(
                Finding("warning", "batches of a shuffled DataLoader are no Poisson samples: the ε of Opacus' accountants "
                        "does not hold for them, and nothing is credited here")
            )  # fmt: skip
        return found

    def facts(self) -> list[tuple[str, str]]:
        """Settings and figures, by name."""
        epochs, each = self.steps * self.sample_rate, " in each round" if self.federated else ""
        facts = [
            ("mechanism", f"gradient of every record clipped at C = {self.clip:g}, Gaussian noise on the batch's sum"),
            ("noise on the sum", f"standard deviation σC = {self.noise_multiplier * self.clip:g}"),
            ("sampling", f"{'Poisson' if self.poisson else 'shuffled'}, q = {self.sample_rate:g}"),
            ("steps", f"{self.steps:,}{each}: {epochs:.3g} epoch{'' if epochs == 1 else 's'}"),
        ]
        if self.federated:
            facts.append(
                ("federation", f"{self.per_round or self.clients:,} of {self.clients:,} clients, {self.rounds:,} rounds")
            )
        return facts

    def scopes(self, privacy: Privacy) -> list[AttackScope]:
        """What each adversary reads, and the attacks that apply."""
        clipped = AttackScope("example", "each record's gradient, clipped, without noise",
                              ("clip-aware", "analytic", "linear-head", "labels"), 1.0)  # fmt: skip

        def limit(adversary: str) -> float:
            return membership_accuracy(privacy.row(adversary).epsilon, self.delta)

        model = AttackScope("model", "the model after every step", ("membership", "lira", "matched-filter"), limit("model"))
        if not self.federated:
            return [model, clipped]
        reads = "a client's model after its local steps"
        attacks = ("matched-filter", "averaging", "unrolled", "frozen-weights", "lira")
        server = AttackScope("server", reads, attacks, limit("server"))
        update = AttackScope("update", reads, attacks[:3], limit("update"))
        model = AttackScope("model", "the averaged model after every round", ("membership", "lira"), limit("model"))
        return [server, update, model, clipped]


_MOST_STEPS = 1_000_000
_POINTS = 100_000  # of the tables of losses: as tight as other accountants, with which a claim is compared
_MANY_STEPS = 100_000  # from here on, the usual tables, which compose faster
_NO_NOISE = "the noise multiplier is 0, and clipping alone protects nothing"
_CLIPPED = "the noise is on the sum of a batch; single gradients are only clipped"
_WHOLE = "covers all records of a client at once, in every step"
