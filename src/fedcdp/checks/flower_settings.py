"""The settings of Flower's differential privacy (flwr 1.41), and the ε that they give against each adversary.

The wrappers of strategies clip each client's update at C, over all arrays together, and add N(0, (σC/K)²) to every entry of
the aggregate, where K is `num_sampled_clients`. `FedAvg` weighs updates by their number of examples. A client with the share
w of a round's weight moves the mean by w·C, so z = σ / (K·w): σ only where all weigh the same and all reply.

| wrapper | clips | reads raw updates | z |
| --- | --- | --- | --- |
| `server-fixed`, `client-fixed` | the server, the clients | the server reads them before the noise | σ/(K·w) |
| `server-adaptive`, `client-adaptive` | at a bound that follows a quantile of the norms | the same | see `_adaptive_z` |
| `LocalDpMod` | the client | nobody: the noise is added on the client | noise / C |

Any other strategy than `FedAvg` computes with the aggregate before the noise is added: momentum, for example, keeps a state
without noise. No ε is stated for those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import Privacy, Row, format_epsilon, state
from fedcdp.checks.bounds import require_count, require_delta, require_noise, require_number
from fedcdp.checks.findings import AttackScope, Finding, membership_accuracy
from fedcdp.config.plan import Plan
from fedcdp.errors import PlanError

Wrapper = Literal["server-fixed", "client-fixed", "server-adaptive", "client-adaptive"]
Strategy = Literal["fedavg", "other"]
_TAIL = 0.01  # the share of δ for rounds in which the noise of the count makes the next bound unusually small


@dataclass(frozen=True)
class FlowerSettings:
    """A wrapper of a Flower strategy that adds noise at the server: `DifferentialPrivacyServerSideFixedClipping` and so on.

    Examples:
        >>> import fedcdp
        >>> from fedcdp.checks import FlowerSettings
        >>> found = fedcdp.check(FlowerSettings("server-fixed", noise_multiplier=2.0, clients=50, per_round=50, rounds=20))
        >>> round(found.privacy.row("model", "client").epsilon, 2), found.privacy.row("server", "client").epsilon
        (11.48, inf)
    """

    wrapper: Wrapper
    """Who clips, and whether the bound adapts."""
    noise_multiplier: float
    """σ: `noise_multiplier` of the wrapper."""
    clients: int
    """Clients from which Flower draws."""
    per_round: int
    """K: `num_sampled_clients` of the wrapper, all of whom reply."""
    rounds: int
    """Rounds."""
    delta: float = 1e-5
    """δ of the statement."""
    clip: float = 0.1
    """`clipping_norm`, or `initial_clipping_norm`."""
    largest_share: float | None = None
    """The largest share that one client has in a round's weighted mean; None: all weigh the same and all reply."""
    strategy: Strategy = "fedavg"
    """The wrapped strategy."""
    clip_norm_lr: float = 0.2
    """Adaptive clipping: the learning rate of the bound."""
    quantile: float = 0.5
    """Adaptive clipping: `target_clipped_quantile`."""
    count_stddev: float | None = None
    """Adaptive clipping: `clipped_count_stddev`; None: Flower's default, K/20."""

    def __post_init__(self) -> None:
        for name, value, known in (("wrapper", self.wrapper, Wrapper), ("strategy", self.strategy, Strategy)):
            if value not in get_args(known):
                raise PlanError(f"{name}: {value!r} is not one of {', '.join(get_args(known))}")
        require_noise(self.noise_multiplier)
        require_number("clip", self.clip, low=0, above=True)
        require_delta(self.delta)
        for name in ("clients", "per_round"):
            require_count(name, getattr(self, name))
        require_count("rounds", self.rounds, most=100_000)
        if self.per_round > self.clients:
            raise PlanError(f"per_round: {self.per_round} is not allowed; there are {self.clients} clients")
        if self.largest_share is not None:
            require_number("largest_share", self.largest_share, low=1 / self.per_round * (1 - 1e-9), high=1)
        if not self.adaptive and (self.count_stddev is not None or (self.clip_norm_lr, self.quantile) != (0.2, 0.5)):
            raise PlanError("count_stddev, clip_norm_lr, quantile: only for the adaptive wrappers")
        require_number("clip_norm_lr", self.clip_norm_lr, low=0, high=100, above=True)
        require_number("quantile", self.quantile, low=0, high=1)
        if self.count_stddev is not None:
            require_number("count_stddev", self.count_stddev, low=0, high=1e9)
        if self.adaptive and self.noise_multiplier >= 2 * self.count_noise:
            raise PlanError(
                f"count_stddev: {self.count_noise:g} is not allowed; Flower refuses it, because it is not above half the "
                f"noise multiplier {self.noise_multiplier:g}"
            )

    @property
    def adaptive(self) -> bool:
        """Whether the clip bound follows a quantile of the norms."""
        return self.wrapper.endswith("adaptive")

    @property
    def count_noise(self) -> float:
        """The standard deviation of the noise on the number of clipped updates."""
        return self.per_round / 20 if self.count_stddev is None else self.count_stddev

    @property
    def z(self) -> float:
        """The noise on a round's mean over what one client moves it by."""
        share = 1 / self.per_round if self.largest_share is None else self.largest_share
        if self.noise_multiplier == 0:
            return 0.0
        return self._adaptive_z(share) if self.adaptive else self.noise_multiplier / (self.per_round * share)

    def _adaptive_z(self, share: float) -> float:
        """The mean and the noised count of clipped updates together, except with probability `_TAIL`·δ over all rounds.

        The wrapper splits σ: the count gets noise s, and the mean σ_Δ = (σ⁻² − (2s)⁻²)^−½. Two points are not as in Andrew
        et al. (2021). The count moves by 1, not by 1/2. And updates are clipped at C_t, but the noise is σ_Δ·C_{t+1}: the
        bound is updated first, to C_{t+1} = C_t·exp(−η(b − γ)), which is smaller where more than a share γ was clipped. b,
        the noised share, is at most 1 + k·s/K except where the Gaussian noise of the count exceeds k·s. The noise scale is a
        function of b, which is released under its own noise, so both releases compose.
        """
        from scipy.stats import norm

        s, count = self.count_noise, self.per_round
        spread = float(norm.isf(_TAIL * self.delta / self.rounds))
        shrunk = math.exp(-self.clip_norm_lr * (1 + spread * s / count - self.quantile))
        update = (self.noise_multiplier**-2 - (2 * s) ** -2) ** -0.5 * min(1.0, shrunk) / (count * share)
        return float((update**-2 + s**-2) ** -0.5)

    @property
    def title(self) -> str:
        """The settings in words."""
        return f"Flower, {_CLASSES[self.wrapper]}, σ = {self.noise_multiplier:g}, {self.rounds:,} rounds"

    def privacy(self) -> Privacy:
        """ε against every adversary."""
        if self.strategy == "other":
            rows = [
                _no_row(reader, unit, _OTHER) for unit in ("client", "record") for reader in ("server", "update", "model")
            ]
            return Privacy(self.delta, "tight", (*rows, _no_row("example", "record", _LOCAL)))
        inner = self.delta * (1 - _TAIL) if self.adaptive else self.delta
        plan = _summed(self.z, self.clip, self.per_round, self.rounds, inner, noise_at="server")
        stated = replace(state(plan, Population(self.clients, 1, 1, 1)), delta=self.delta)
        if self.z == 0:
            return stated
        rows = []
        for row in stated.rows:
            more = f"; {_EVEN}" if row.adversary == "model" and self.largest_share is None else ""
            rows.append(replace(row, assumption=row.assumption + more))
        return replace(stated, rows=tuple(rows), notes=_without_records(stated.notes))

    def findings(self) -> list[Finding]:
        """What these settings do not protect."""
        found = [
            Finding("warning", "no ε holds against the server, nor against a reader of updates on their way: the noise is "
                    "added after the server has read the updates"),
            Finding("note", "metrics that clients send, such as a loss, leave without noise, and no ε covers them"),
            Finding("note", "arrays of whole numbers, such as BatchNorm's num_batches_tracked, get noise that Flower cuts "
                    "to whole numbers: often none. Do not send them"),
        ]  # fmt: skip
        if self.strategy == "other":
            found.append(Finding("leak", _OTHER))
        if self.largest_share is None:
            found.append(
                Finding("warning", "FedAvg weighs clients by num-examples, and Flower only warns if fewer clients reply "
                        "than num_sampled_clients. ε holds for equal weights and all replies; otherwise give the largest "
                        "share")
            )  # fmt: skip
        elif self.largest_share * self.per_round > 1 + 1e-9:
            found.append(
                Finding("warning", f"one client may have {100 * self.largest_share:.3g} % of the mean, but the noise is "
                        f"scaled for {100 / self.per_round:.3g} %: the noise multiplier in effect is at most "
                        f"{self.noise_multiplier / (self.per_round * self.largest_share):.3g}, "
                        f"not {self.noise_multiplier:g}")
            )  # fmt: skip
        if self.adaptive and self.noise_multiplier:
            found.append(
                Finding("warning", "the adaptive wrappers clip at the old bound and scale the noise by the next one, and "
                        f"the count moves by 1, not by 1/2: the noise multiplier in effect is {self.z:.3g}, "
                        f"not {self.noise_multiplier:g}")
            )  # fmt: skip
        return found

    def facts(self) -> list[tuple[str, str]]:
        """Settings and figures, by name."""
        who = "the server" if self.wrapper.startswith("server") else "each client"
        bound = f"C starts at {self.clip:g} and adapts" if self.adaptive else f"C = {self.clip:g}"
        return [
            ("mechanism", f"{who} clips a client's update, {bound}; the server adds Gaussian noise to the mean"),
            ("noise on the mean", f"standard deviation σC/K = {self.noise_multiplier * self.clip / self.per_round:g}"
             + (" at first" if self.adaptive else "")),
            ("noise over sensitivity", f"z = {self.z:.4g}"),
            ("federation", f"{self.per_round:,} of {self.clients:,} clients, {self.rounds:,} rounds"),
        ]  # fmt: skip

    def scopes(self, privacy: Privacy) -> list[AttackScope]:
        """What each adversary reads, and the attacks that apply."""
        model = privacy.row("model", "record").epsilon
        clipped = ", clipped" if self.wrapper.startswith("client") else ""
        raw = ("analytic", "batch", "unrolled", "labels", "matched-filter")
        return [
            AttackScope("server", f"every client's update{clipped}, without noise", (*raw, "imprint", "fishing"), 1.0),
            AttackScope("update", f"a client's update{clipped}, without noise", raw, 1.0),
            AttackScope("model", "the averaged model after every round", ("membership", "lira"),
                        membership_accuracy(model, self.delta)),
            AttackScope("example", "each record's raw gradient", ("cpl", "analytic", "inverting-gradients", "labels"), 1.0),
        ]  # fmt: skip


@dataclass(frozen=True)
class LocalDpSettings:
    """Flower's `LocalDpMod`: each client clips its update, adds Gaussian noise, and sends it.

    Examples:
        >>> import fedcdp
        >>> from fedcdp.checks import LocalDpSettings
        >>> mod = LocalDpSettings(
        ...     clip=1.0, sensitivity=1.0, epsilon=1.0, mod_delta=1e-5, clients=100, per_round=10, rounds=20
        ... )
        >>> round(fedcdp.check(mod).privacy.row("server", "client").epsilon_worst, 1)
        4.0
    """

    clip: float
    """`clipping_norm` of the mod."""
    sensitivity: float
    """`sensitivity` of the mod, which scales the noise."""
    epsilon: float
    """`epsilon` of the mod: the ε of one message, by the classical formula."""
    mod_delta: float
    """`delta` of the mod."""
    clients: int
    """Clients from which Flower draws."""
    per_round: int
    """Clients in a round."""
    rounds: int
    """Rounds."""
    delta: float = 1e-5
    """δ of the statement, over all rounds."""

    def __post_init__(self) -> None:
        require_number("clip", self.clip, low=1e-12, high=1e12)
        require_number("sensitivity", self.sensitivity, low=0, high=1e12)
        require_number("epsilon", self.epsilon, low=1e-6, high=1e6)
        require_number("mod_delta", self.mod_delta, low=1e-30, high=0.99)
        require_delta(self.delta)
        for name in ("clients", "per_round"):
            require_count(name, getattr(self, name))
        require_count("rounds", self.rounds, most=100_000)
        if self.per_round > self.clients:
            raise PlanError(f"per_round: {self.per_round} is not allowed; there are {self.clients} clients")
        if self.z:
            require_number("noise over the clip bound", self.z, low=1e-6, high=1e6)

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise on every entry of an update."""
        return self.sensitivity * math.sqrt(2 * math.log(1.25 / self.mod_delta)) / self.epsilon

    @property
    def z(self) -> float:
        """The noise over what one client moves its update by: the clip bound, whatever `sensitivity` says."""
        return self.deviation / self.clip

    @property
    def title(self) -> str:
        """The settings in words."""
        return f"Flower, LocalDpMod, ε = {self.epsilon:g} a message, {self.rounds:,} rounds"

    def privacy(self) -> Privacy:
        """ε against every adversary."""
        plan = _summed(self.z, self.clip, self.per_round, self.rounds, self.delta, noise_at="client")
        stated = state(plan, Population(self.clients, 1, 1, 1))
        return replace(stated, notes=_without_records(stated.notes))

    def message_epsilon(self) -> float:
        """ε of one message at the mod's own δ, by the exact curve of the Gaussian."""
        from fedcdp.accounting.pld import gaussian_epsilon

        return gaussian_epsilon(self.z, self.mod_delta)

    def findings(self) -> list[Finding]:
        """What these settings do not protect."""
        real = self.message_epsilon()
        found = [
            Finding("note", "metrics that clients send, such as a loss, leave without noise, and no ε covers them"),
            Finding("note", "no ε holds against a reader of gradients during local training, which is not private"),
        ]
        if real > self.epsilon:
            found.append(
                Finding("leak", f"one message has ε = {format_epsilon(real)} at δ = {self.mod_delta:g}, more than the "
                        f"{self.epsilon:g} that the mod was given")
            )  # fmt: skip
        if self.sensitivity < self.clip:
            found.append(
                Finding("warning", f"the noise is scaled for a sensitivity of {self.sensitivity:g}, but a client moves its "
                        f"update by up to the clip bound, {self.clip:g}")
            )  # fmt: skip
        if self.rounds > 1:
            found.append(
                Finding("warning", "the mod's ε is that of one message; ε adds up over the rounds, as in the table")
            )
        return found

    def facts(self) -> list[tuple[str, str]]:
        """Settings and figures, by name."""
        return [
            ("mechanism", f"each client clips its update at C = {self.clip:g} and adds Gaussian noise"),
            ("noise on an update", f"standard deviation {self.deviation:.4g}"),
            ("noise over sensitivity", f"z = {self.z:.4g}"),
            ("one message", f"ε = {format_epsilon(self.message_epsilon())} at δ = {self.mod_delta:g}; the mod was given "
             f"{self.epsilon:g}"),
            ("federation", f"{self.per_round:,} of {self.clients:,} clients, {self.rounds:,} rounds"),
        ]  # fmt: skip

    def scopes(self, privacy: Privacy) -> list[AttackScope]:
        """What each adversary reads, and the attacks that apply."""

        def limit(adversary: str) -> float:
            return membership_accuracy(privacy.row(adversary, "record").epsilon, self.delta)

        return [
            AttackScope("server", "every client's noised update", ("matched-filter", "averaging", "frozen-weights"),
                        limit("server")),
            AttackScope("update", "a client's noised update", ("matched-filter", "averaging"), limit("update")),
            AttackScope("model", "the averaged model after every round", ("membership", "lira"), limit("model")),
            AttackScope("example", "each record's raw gradient", ("cpl", "analytic", "inverting-gradients", "labels"), 1.0),
        ]  # fmt: skip


_CLASSES = {
    "server-fixed": "DifferentialPrivacyServerSideFixedClipping",
    "client-fixed": "DifferentialPrivacyClientSideFixedClipping",
    "server-adaptive": "DifferentialPrivacyServerSideAdaptiveClipping",
    "client-adaptive": "DifferentialPrivacyClientSideAdaptiveClipping",
}
_EVEN = "the wrapped strategy is FedAvg, all clients weigh the same, and all reply"
_LOCAL = "local training is not private: every gradient in it is raw"
_OTHER = "no ε is known for this strategy: it computes with the aggregate before the wrapper adds the noise; wrap FedAvg"


def _summed(z: float, clip: float, per_round: int, rounds: int, delta: float, *, noise_at: str) -> Plan:
    """The plan of fedcdp that is the same mechanism: updates clipped as a whole, noise z·C on their sum, or on each."""
    return Plan(
        method="fed-sdp",
        noise_at=noise_at,  # type: ignore[arg-type]
        client_sampling="fixed",
        clip_mode="flat",
        clip=clip,
        noise_multiplier=z,
        per_round=per_round,
        rounds=rounds,
        delta=delta,
    )


def _no_row(adversary: str, unit: str, reason: str) -> Row:
    return Row(adversary, unit, "zero-out", math.inf, None, math.inf, reason)


def _without_records(notes: tuple[str, ...]) -> tuple[str, ...]:
    """The notes of a statement without those about the number of records, which the settings do not tell."""
    return tuple(note for note in notes if "number of records" not in note)
