"""The settings of an Opacus training, and the ε that they give against each adversary.

Opacus (1.6) clips the gradient of every record at C, adds N(0, (σC)²) to the sum over a batch, and divides by the expected
batch size, a constant. z is therefore σ. `clipping="per_layer"` clips every parameter tensor at its own bound; C is then the
norm of all bounds, by which Opacus scales the noise. `clipping="adaptive"` also releases how many gradients are unclipped,
with less noise than its formula assumes: z is smaller than σ (`adaptive_clipping`).

What the adversary does not know decides the rest:

| sampling | unknown | a step |
| --- | --- | --- |
| Poisson (`poisson_sampling=True`) | which records are in a batch | `PoissonGaussian(q, z)` |
| shuffled (`poisson_sampling=False`) | nothing that is credited | `Gaussian(z)`, once an epoch |

Opacus itself computes ε as if batches were Poisson samples in both cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fedcdp.accounting.mechanisms import Gaussian, Lottery, PoissonGaussian, Release, Unprotected, repeated
from fedcdp.accounting.statement import VACUOUS, Privacy, Row
from fedcdp.checks.adaptive_clipping import effective_noise, public_size_noise, split_noise
from fedcdp.checks.bounds import require_count, require_delta, require_noise, require_number
from fedcdp.checks.findings import AttackScope, Finding, membership_accuracy
from fedcdp.errors import PlanError

Clipping = Literal["flat", "per_layer", "adaptive"]


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
    clip: float | Sequence[float] = 1.0
    """C: `max_grad_norm` of Opacus: a number, or with `per_layer` a list with a bound for each parameter tensor."""
    poisson: bool = True
    """`poisson_sampling` of Opacus. False: a shuffled `DataLoader`."""
    clients: int = 1
    """Clients that each run Opacus on records of their own; 1: there is no federation."""
    per_round: int | None = None
    """Clients in a round, drawn at random; None: all of them."""
    rounds: int = 1
    """Rounds, after each of which the server reads the models."""
    records: int | None = None
    """Records at a client, for the rows about whole clients; None: unknown. Without clients, those of the training. Needed
    for adaptive clipping of Poisson samples."""
    clipping: Clipping = "flat"
    """`clipping` of Opacus."""
    unclipped_num_std: float | None = None
    """Adaptive clipping: standard deviation of the noise on the number of unclipped gradients. Needed there."""
    target_unclipped_quantile: float | None = None
    """Adaptive clipping: the share of gradients that the bound should leave unclipped. ε does not depend on it."""
    clipbound_learning_rate: float | None = None
    """Adaptive clipping: the learning rate of the bound. ε does not depend on it."""
    min_clipbound: float | None = None
    """Adaptive clipping: the least bound. ε does not depend on it."""
    max_clipbound: float | None = None
    """Adaptive clipping: the largest bound. ε does not depend on it."""

    def __post_init__(self) -> None:
        require_noise(self.noise_multiplier)
        require_number("sample_rate", self.sample_rate, low=1e-12, high=1)
        if self.clipping not in get_args(Clipping):
            raise PlanError(f"clipping: {self.clipping!r} is not one of {', '.join(get_args(Clipping))}")
        self._require_clip()
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
        self._require_adaptive()

    def _require_clip(self) -> None:
        """Raise unless the clip bound is one number, or, for `per_layer`, a list of them."""
        several = isinstance(self.clip, Sequence) and not isinstance(self.clip, str)
        if several:
            object.__setattr__(self, "clip", self.bounds)  # a tuple, which has a hash
        if several != (self.clipping == "per_layer"):
            wanted = "a list with a bound for each parameter tensor" if self.clipping == "per_layer" else "one number"
            raise PlanError(f"clip: with clipping {self.clipping}, Opacus takes {wanted}")
        for bound in self.bounds:
            require_number("clip", bound, low=0, above=True)
        if not self.bounds:
            raise PlanError("clip: give a bound for each parameter tensor")

    def _require_adaptive(self) -> None:
        """Raise unless the settings of adaptive clipping are there where they belong, and as Opacus allows them."""
        given = [name for name in _ADAPTIVE if getattr(self, name) is not None]
        if self.clipping != "adaptive":
            if given:
                raise PlanError(f"{', '.join(given)}: only for clipping adaptive; leave it out")
            return
        if self.unclipped_num_std is None:
            raise PlanError("unclipped_num_std: give it for clipping adaptive, because ε depends on it")
        require_number("unclipped_num_std", self.unclipped_num_std, low=0, high=1e9, above=True)
        if self.noise_multiplier >= 2 * self.unclipped_num_std:
            raise PlanError(
                f"unclipped_num_std: {self.unclipped_num_std:g} is not allowed; Opacus refuses it, because it is not above "
                f"half the noise multiplier {self.noise_multiplier:g}"
            )
        if self.target_unclipped_quantile is not None:
            require_number("target_unclipped_quantile", self.target_unclipped_quantile, low=0, high=1)
        for name in ("clipbound_learning_rate", "min_clipbound", "max_clipbound"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), low=0)
        if self.min_clipbound is not None and self.max_clipbound is not None and self.max_clipbound <= self.min_clipbound:
            raise PlanError("max_clipbound: Opacus refuses one that is not above min_clipbound")
        if self.poisson and self.records is None:
            raise PlanError("records: give their number for clipping adaptive, which divides by the size of every batch")

    @property
    def bounds(self) -> tuple[float, ...]:
        """The clip bounds: one, or one for each parameter tensor."""
        return tuple(self.clip) if isinstance(self.clip, Sequence) else (self.clip,)

    @property
    def sensitivity(self) -> float:
        """The largest norm of a clipped gradient; with adaptive clipping, at first."""
        return math.hypot(*self.bounds)

    @property
    def z(self) -> float:
        """The noise multiplier in effect: σ, or less with adaptive clipping; 0 where no noise bounds what leaves."""
        if self.unclipped_num_std is None or self.noise_multiplier == 0:
            return self.noise_multiplier
        if not self.poisson:  # the sizes of the batches of a DataLoader are no secret
            return public_size_noise(self.noise_multiplier, self.unclipped_num_std)
        assert self.records is not None
        return effective_noise(
            sigma=self.noise_multiplier,
            count_std=self.unclipped_num_std,
            records=self.records,
            rate=self.sample_rate,
            tail=_TAIL * self.delta / (self.steps * self.rounds),
        )

    @property
    def _spent_elsewhere(self) -> float:
        """δ without the share that adaptive clipping spends on unusual batches."""
        return self.delta * (1 - _TAIL) if self.clipping == "adaptive" and self.poisson else self.delta

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
        z, rate = self.z, self.sample_rate
        if z == 0:
            return Unprotected(_NO_NOISE if self.noise_multiplier == 0 else _UNBOUNDED)
        if self.poisson and rate < 1:
            return repeated(PoissonGaussian(rate, z), self.steps)
        return repeated(Gaussian(z), math.ceil(self.steps / math.floor(1 / rate + 1e-9)))

    def _whole_client(self) -> Release:
        """The same against all records of a client: a Poisson batch may hold all of them, another one only its share."""
        if self.noise_multiplier == 0:
            return Unprotected(_NO_NOISE)
        if self.records is None:
            return Unprotected("the number of records at a client is unknown; give it for a finite ε")
        if self.clipping == "adaptive" and self.poisson:
            return Unprotected(_NO_CLIENT)
        most = self.records if self.poisson else math.ceil(self.records * self.sample_rate)
        return repeated(Gaussian(self.z / most), self.steps)

    def _row(self, adversary: str, unit: str, participation: Release, assumption: str) -> Row:
        from fedcdp.accounting.pld import epsilon

        if isinstance(participation, Unprotected):
            return Row(adversary, unit, "zero-out", math.inf, None, math.inf, participation.reason)
        points = {"points": _POINTS} if self.steps * self.rounds <= _MANY_STEPS else {}
        rate = (self.per_round or self.clients) / self.clients
        delta = self._spent_elsewhere
        worst = epsilon(repeated(participation, self.rounds), delta, **points)
        drawn = participation if rate == 1 else Lottery(participation, rate)
        before = worst if rate == 1 else epsilon(repeated(drawn, self.rounds), delta, **points)
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
        return found + (self._about_adaptive() if self.clipping == "adaptive" and self.noise_multiplier else [])

    def _about_adaptive(self) -> list[Finding]:
        """What Opacus' adaptive clipping releases beside the gradients."""
        real = f"the noise multiplier in effect is {self.z:.3g}" if self.z else "no ε is known"
        return [
            Finding("warning", "Opacus splits the noise as if a record moved the number of unclipped gradients by 1/2. It "
                    "divides that number by the size of the drawn batch, so a record moves it by up to 1, and its noise "
                    f"shows the size: {real}, not {self.noise_multiplier:g}"),
            Finding("warning", "no ε holds with BatchMemoryManager or other virtual steps: Opacus' adaptive clipping then "
                    "counts only the last part of a batch, and one record may change where the parts end"),
        ]  # fmt: skip

    def facts(self) -> list[tuple[str, str]]:
        """Settings and figures, by name."""
        epochs, each = self.steps * self.sample_rate, " in each round" if self.federated else ""
        facts = [
            ("mechanism", f"gradient of every record clipped {self._clipped()}, Gaussian noise on the batch's sum"),
            *self._noise_facts(),
            ("sampling", f"{'Poisson' if self.poisson else 'shuffled'}, q = {self.sample_rate:g}"),
            ("steps", f"{self.steps:,}{each}: {epochs:.3g} epoch{'' if epochs == 1 else 's'}"),
        ]
        if self.federated:
            facts.append(
                ("federation", f"{self.per_round or self.clients:,} of {self.clients:,} clients, {self.rounds:,} rounds")
            )
        return facts

    def _clipped(self) -> str:
        if self.clipping == "per_layer":
            return f"tensor by tensor, over all {len(self.bounds)} at C = {self.sensitivity:.4g}"
        return f"at C = {self.sensitivity:g}" if self.clipping == "flat" else f"at C, which starts at {self.sensitivity:g}"

    def _noise_facts(self) -> list[tuple[str, str]]:
        """The noise on what leaves: the sum, and with adaptive clipping the number of unclipped gradients."""
        sigma, least, most = self.noise_multiplier, self.min_clipbound, self.max_clipbound
        if self.unclipped_num_std is None:
            return [("noise on the sum", f"standard deviation σC = {sigma * self.sensitivity:.6g}")]
        on_sum = split_noise(sigma, self.unclipped_num_std) if sigma else 0.0
        figures = {"quantile": self.target_unclipped_quantile, "learning rate": self.clipbound_learning_rate,
                   "least": least, "largest": most}  # fmt: skip
        follows = ", ".join(f"{name} {value:g}" for name, value in figures.items() if value is not None)
        return [
            ("noise on the sum", f"standard deviation {on_sum:.4g}·C"),
            ("noise on the count", f"standard deviation {self.unclipped_num_std:g}"),
            *([("clip bound", follows)] if follows else []),
            ("noise over sensitivity", f"z = {self.z:.4g}"),
        ]

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


_ADAPTIVE = (
    "unclipped_num_std", "target_unclipped_quantile", "clipbound_learning_rate", "min_clipbound", "max_clipbound",
)  # fmt: skip
_TAIL = 0.01  # the share of δ that adaptive clipping spends on unusual batches
_MOST_STEPS = 1_000_000
_POINTS = 100_000  # of the tables of losses: as tight as other accountants, with which a claim is compared
_MANY_STEPS = 100_000  # from here on, the usual tables, which compose faster
_NO_NOISE = "the noise multiplier is 0, and clipping alone protects nothing"
_CLIPPED = "the noise is on the sum of a batch; single gradients are only clipped"
_UNBOUNDED = "a batch may hold no other record, or the noise is very weak: nothing bounds what the next clip bound shows"
_NO_CLIENT = "without the client's records its batches are empty, which the next clip bound shows"
_WHOLE = "covers all records of a client at once, in every step"
