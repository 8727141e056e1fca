"""The plan: one frozen object that says how a federation is trained, and the only source of truth for it.

Clipping, noise and accounting all read the clip bound from here and nowhere else. A plan checks itself when it is
created; an invalid one raises an error that says in one sentence what is wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fedcdp.config.fields import check_types, option
from fedcdp.config.schedules import Quantile, Schedule, as_bound, as_schedule
from fedcdp.errors import PlanError

MethodName = Literal["nonprivate", "fed-sdp", "fed-cdp", "fed-cdp-decay", "dssgd"]
ClipMode = Literal["layer", "flat"]
NoiseConvention = Literal["example", "batch", "cohort", "sum"]
NoisePlacement = Literal["server", "client"]
NoiseSlots = Literal["all", "held"]
Weighting = Literal["equal", "records"]
ClientSampling = Literal["fixed", "poisson"]
RecordSampling = Literal["poisson", "fixed", "partition"]
Aggregation = Literal["fedsgd", "fedaveraging"]
Aggregator = Literal["mean", "trimmed-mean", "median-of-means"]
NoiseGenerator = Literal["philox", "chacha20"]
ServerOptimizer = Literal["sgd", "momentum", "adam", "yogi"]

_PAPER_CLIP = "4"
_ADDED: dict[str, object] = {
    "weighting": "equal",
    "mean_records": None,
    "noise_slots": "all",
    "scaling_noise": None,
    "server_optimizer": "sgd",
    "server_momentum": 0.9,
    "server_beta2": 0.99,
    "server_epsilon": 1e-3,
    "proximal": 0.0,
    "colluders": 0,
    "attempts": 1,
    "aggregator": "mean",
    "trim": 0.2,
    "median_groups": 5,
}
"""Fields that the first release lacked, with their defaults."""
_ALWAYS = object()
SCALING = -1
"""The number, among the rounds of a ledger, of the release before the first round: noised means and variances."""
_MOST = 10_000_000  # rounds, steps, clients, records: more than any training needs, and small enough to count exactly
_MOST_STEPS = 1_000_000_000
_PAPER_DECAY = "linear(6, 2)"
# Norms and noise are float32. Squares of values far below the smallest bound underflow, which makes the norm too short;
# squares of values far above the largest bound overflow. Noise beyond these multipliers is rounded away or overflows.
_BOUNDS = (1e-10, 1e10)
_MULTIPLIERS = (1e-6, 1e6)
_RATES = (1e-30, 1e30)
_MOST_ATTEMPTS = 100
_LEAST_DELTA = 1e-300  # below this, not even its logarithm is exact
_SLOTS_PER_EXAMPLE = 3  # fewer cost privacy: a full step drops records, and the accountant charges for that


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All choices of a federated training: method, clip bound, noise, sampling, schedules.

    A plan is frozen and checks itself when it is made. The clip bound that clips, the one that scales the noise and the one
    that is accounted are read from it and from nowhere else. The fields are also the plan options of the command line and
    the keys of `[plan]` in a configuration file. All arguments are keywords.

    Raises:
        PlanError: A field has the wrong type or is out of range, or fields contradict each other.

    Examples:
        >>> import fedcdp
        >>> plan = fedcdp.Plan(method="fed-cdp", rounds=20, per_round=10, noise_multiplier=1.5, clip="linear(6, 2)")
        >>> plan.clip_at(0), plan.clip_at(19)
        (6.0, 2.0)
        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> round(plan.privacy(federation).row("server").epsilon, 1)
        7.8
    """

    method: MethodName = option("fed-cdp", "Training method.")
    rounds: int = option(100, "Number of rounds, T.")
    per_round: int = option(100, "Clients per round, K_t (Poisson: expected).")
    local_steps: int = option(100, "Local steps of a client per round, L.")
    batch_size: int = option(5, "Examples per step, B (Poisson: expected).")
    clip: Schedule | Quantile = option(
        None,
        "Clip bound C: a number, linear(6, 2), exponential(6, 2), cosine(6, 2), proportional(4) to the learning rate, or "
        "quantile(0.5, 4): from 4 to the private median. "
        "Default: 4; fed-cdp-decay: linear(6, 2).",
    )
    clip_mode: ClipMode = option("layer", "Clip each layer to C (as in the paper), or the whole gradient at once (flat).")
    noise_multiplier: float = option(6.0, "Noise multiplier σ.")
    noise: NoiseConvention = option(
        "example",
        "Fed-CDP: where the noise N(0, (σC)²) is added: to the gradient of every example (the paper's algorithm), to the "
        "sum of the batch, or, with cohort, to the sum of the batch scaled by 1/K_t. With sum (also under Fed-SDP): to the "
        "sum of all clients, each of whom adds a share; needs secure aggregation.",
    )
    noise_slots: NoiseSlots = option(
        "all",
        "Example noise at a client with fewer records than slots: on all S slots (all), or only on as many slots as it has "
        "records, with σ·√(S/N_i) each (held). The noise on the sum is the same.",
    )
    noise_at: NoisePlacement = option("server", "Fed-SDP: who adds the noise.")
    noise_follows_clip: bool = option(True, "Scale the noise with a decaying clip bound; otherwise it stays at σ·C_0.")
    quantile_noise: float = option(5.0, "Quantile clip: standard deviation σ_b of the noise on one yes-or-no answer.")
    quantile_rate: float = option(0.2, "Quantile clip: how fast the bound follows the quantile.")
    client_sampling: ClientSampling = option(
        "fixed", "How clients are selected: exactly K_t (fixed), or each independently (poisson)."
    )
    record_sampling: RecordSampling = option(
        "poisson",
        "How the records of a step are selected: each independently (poisson), exactly B at random (fixed), or in a fixed "
        "order (partition).",
    )
    slots: int = option(None, "Noise slots of a Poisson step, S. Default: 3 B.")
    learning_rate: Schedule = option(0.05, "Local learning rate η: a number or a schedule.")
    server_learning_rate: Schedule = option(1.0, "Server learning rate s, in W + s·mean(ΔW): a number or a schedule.")
    server_optimizer: ServerOptimizer = option(
        "sgd",
        "How the server moves the model by the mean update: as it is (sgd), or by FedAvgM (momentum), FedAdam (adam) or "
        "FedYogi (yogi). Costs no privacy.",
    )
    server_momentum: float = option(0.9, "Server optimiser: share β1 of the earlier mean updates (momentum, adam, yogi).")
    server_beta2: float = option(0.99, "Server optimiser: share β2 of the earlier squared mean updates (adam, yogi).")
    server_epsilon: float = option(1e-3, "Server optimiser: τ, added to the root of the mean square (adam, yogi).")
    momentum: float = option(0.0, "Momentum of the local steps within a round.")
    proximal: float = option(
        0.0, "FedProx: μ, which adds μ·(W_local − W) to the gradient of every local step. Costs no privacy."
    )
    ema: float = option(0.0, "Moving average of the global model: share kept each round (0: off).")
    weighting: Weighting = option(
        "equal", "Weight of a client's update: the same for all (equal), or by its number of records (records)."
    )
    mean_records: float | None = option(
        None,
        "Weighting by records: the public mean number of records at a client; a client with N_i records weighs N_i over it. "
        "Default in a simulation: the federation's.",
    )
    scaling_noise: float | None = option(
        None,
        "Standardise inputs by means and variances from one noised release before the first round; this is the noise on "
        "their sums over the sensitivity. Inputs must lie in [-1, 1]. The ledger counts the release.",
    )
    aggregation: Aggregation = option("fedsgd", "Clients send updates (fedsgd) or whole models (fedaveraging).")
    aggregator: Aggregator = option(
        "mean",
        "How the server combines the updates of a round: by their mean, or by a mean that a few poisoned updates cannot "
        "move far (trimmed-mean, median-of-means). Costs no privacy.",
    )
    trim: float = option(0.2, "Trimmed mean: share of the clients left out at each end, for each weight.")
    median_groups: int = option(5, "Median of means: number of groups, more than twice the clients to tolerate.")
    compression: float = option(0.0, "Share of an update's entries, the smallest, that is pruned before sending.")
    share_fraction: float = option(0.1, "DSSGD: share of an update's entries, the largest, that is sent.")
    secure_aggregation: bool = option(
        False, "The server reads only the sum of a round's updates. In a simulation: assume so."
    )
    colluders: int = option(
        0, "Secure aggregation: how many of all clients may collude with the server, t. Their noise does not count."
    )
    attempts: int = option(
        1, "Noise on the sum: how often a deployment may try a round, each time with fresh noise and charged anew."
    )
    delta: float = option(1e-5, "δ of the privacy guarantee.")
    secure_noise: bool = option(False, "Draw noise from the operating system. Nothing stored can reproduce it.")
    noise_generator: NoiseGenerator = option(
        "philox",
        "With secure noise: philox, which takes a fresh key from the operating system for every draw and is faster on a "
        "GPU, or the cipher chacha20, which is stronger, and faster on a CPU.",
    )
    seed: int = option(
        0, "Fixes all randomness of a simulation. With secure noise: only the partition and the initial weights."
    )

    privacy: ClassVar[Callable[..., Any]]
    """`plan.privacy(federation)`: the privacy statement; the package attaches `accounting.budget.privacy_of_plan` here."""

    if TYPE_CHECKING:  # the accepted argument types; the fields above have the types that a plan then holds

        def __init__(
            self,
            *,
            method: MethodName = ...,
            rounds: int = ...,
            per_round: int = ...,
            local_steps: int = ...,
            batch_size: int = ...,
            clip: Schedule | Quantile | str | float | None = ...,
            clip_mode: ClipMode = ...,
            noise_multiplier: float = ...,
            noise: NoiseConvention = ...,
            noise_slots: NoiseSlots = ...,
            noise_at: NoisePlacement = ...,
            noise_follows_clip: bool = ...,
            quantile_noise: float = ...,
            quantile_rate: float = ...,
            client_sampling: ClientSampling = ...,
            record_sampling: RecordSampling = ...,
            slots: int | None = ...,
            learning_rate: Schedule | str | float = ...,
            server_learning_rate: Schedule | str | float = ...,
            server_optimizer: ServerOptimizer = ...,
            server_momentum: float = ...,
            server_beta2: float = ...,
            server_epsilon: float = ...,
            momentum: float = ...,
            proximal: float = ...,
            ema: float = ...,
            weighting: Weighting = ...,
            mean_records: float | None = ...,
            scaling_noise: float | None = ...,
            aggregation: Aggregation = ...,
            aggregator: Aggregator = ...,
            trim: float = ...,
            median_groups: int = ...,
            compression: float = ...,
            share_fraction: float = ...,
            secure_aggregation: bool = ...,
            colluders: int = ...,
            attempts: int = ...,
            delta: float = ...,
            secure_noise: bool = ...,
            noise_generator: NoiseGenerator = ...,
            seed: int = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        check_types(self)
        default_clip = _PAPER_DECAY if self.method == "fed-cdp-decay" else _PAPER_CLIP
        self._set("clip", as_bound(default_clip if self.clip is None else self.clip, "clip"))
        for name in ("learning_rate", "server_learning_rate"):
            self._set(name, as_schedule(getattr(self, name), name))
        self._set("slots", self._default_slots() if self.slots is None else self.slots)
        self._check_values()

    # Values that the methods use -------------------------------------------------------------------------------------

    @property
    def private(self) -> bool:
        """Whether the method clips and noises what it releases."""
        return self.method in ("fed-sdp", "fed-cdp", "fed-cdp-decay")

    @property
    def per_example(self) -> bool:
        """Whether the method clips and noises every example's gradient rather than a client's update."""
        return self.method in ("fed-cdp", "fed-cdp-decay")

    @property
    def hides_cohort(self) -> bool:
        """Whether an ε assumes that nobody knows how many took part in a round: Poisson clients, noise at the server."""
        return self.method == "fed-sdp" and self.noise_at == "server" and self.client_sampling == "poisson"

    @property
    def hides_members(self) -> bool:
        """Whether an ε assumes that nobody knows who took part in a round: noise at the server, or secure aggregation."""
        return self.private and (self.secure_aggregation or (self.method == "fed-sdp" and self.noise_at == "server"))

    @property
    def sums(self) -> bool:
        """Whether the noise is on the sum of all clients, which each of them brings a share of (`mechanism.secure_sum`)."""
        return self.private and self.noise == "sum"

    @property
    def honest(self) -> int:
        """The clients of a round, at least, whose noise nobody else knows: K_t − t."""
        return self.per_round - self.colluders

    @property
    def noise_on_sum(self) -> float:
        """The noise on the sum of a Fed-CDP step, in units of one draw, under the plan's convention."""
        if self.noise == "sum":
            return 1 / math.sqrt(self.honest)
        return {"example": math.sqrt(self.slots), "batch": 1.0, "cohort": 1 / self.per_round}[self.noise]

    @property
    def quantile(self) -> Quantile | None:
        """The quantile that the clip bound follows; None where the bound is scheduled, or where nothing is clipped."""
        return self.clip if self.private and isinstance(self.clip, Quantile) else None

    def clip_at(self, round_: int, current: float | None = None) -> float:
        """The clip bound C of a round.

        Args:
            round_: The round, counted from 0.
            current: The bound that the rounds so far led to, where it follows a quantile.

        Returns:
            The bound.

        Raises:
            PlanError: The bound follows a quantile, and `current` is missing after the first round.
        """
        if isinstance(self.clip, Schedule):
            return self.clip.value(round_, self.rounds, leader=self.learning_rate)
        if current is not None:
            return current
        if round_ == 0:
            return self.clip.start
        raise PlanError(f"clip: the bound of {self.clip} in round {round_ + 1} is known only after the rounds before it")

    def noise_scale_at(self, round_: int, current: float | None = None) -> float:
        """σC, the standard deviation of one noise draw in a round. The arguments are those of `clip_at`."""
        return self.noise_multiplier * self.clip_at(round_ if self.noise_follows_clip else 0, current)

    def learning_rate_at(self, round_: int) -> float:
        """The local learning rate η of a round."""
        return self.learning_rate.value(round_, self.rounds)

    def server_learning_rate_at(self, round_: int) -> float:
        """The server's learning rate s of a round."""
        return self.server_learning_rate.value(round_, self.rounds)

    def but(self, **changes: Any) -> Plan:
        """The same plan with some fields changed. Defaults that depend on a changed field are computed again.

        Args:
            **changes: New values, by field.

        Returns:
            The changed plan.

        Raises:
            PlanError: There is no such field, or the changed plan contradicts itself.

        Examples:
            >>> import fedcdp
            >>> plan = fedcdp.Plan(batch_size=5)
            >>> plan.slots, plan.but(batch_size=10).slots
            (15, 30)
        """
        for name in changes.keys() - {each.name for each in fields(self)}:
            raise PlanError(f"{name}: a plan has no field of this name")
        if self.slots == self._default_slots():
            changes.setdefault("slots", None)
        if "clip" not in changes and changes.get("method", self.method) != self.method:
            paper = (as_schedule(_PAPER_CLIP, "clip"), as_schedule(_PAPER_DECAY, "clip"))
            if self.clip in paper:
                changes["clip"] = None
        return replace(self, **changes)

    def written(self) -> dict[str, str | int | float | bool]:
        """The plan as plain values, for a configuration file; `Plan(**written)` restores it.

        A field that the first release lacked is left out while it has its default, so ledgers, checkpoints and tasks of that
        release keep their digests.
        """
        written = {
            name: str(value) if isinstance(value, Schedule | Quantile) else value
            for name, value in vars(self).items()
            if _ADDED.get(name, _ALWAYS) != value
        }
        if self.server_learning_rate.kind == "constant":  # in the first release it was always a number
            written["server_learning_rate"] = float(self.server_learning_rate.start)
        return written

    def digest(self) -> str:
        """A short hash of the plan, different for different plans."""
        return hashlib.sha256(json.dumps(self.written(), sort_keys=True).encode()).hexdigest()[:16]

    def check_clients(self, clients: int) -> None:
        """Raise `PlanError` if a federation of this many clients cannot carry out the plan."""
        if self.per_round > clients:
            raise PlanError(
                f"per_round: {self.per_round} clients a round cannot be chosen from {clients}; it must be at most {clients}"
            )

    # Checks ----------------------------------------------------------------------------------------------------------

    def _default_slots(self) -> int:
        return _SLOTS_PER_EXAMPLE * self.batch_size if self.record_sampling == "poisson" else self.batch_size

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_values(self) -> None:
        for name in ("rounds", "per_round", "local_steps", "batch_size", "slots"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
            self._require(name, getattr(self, name) <= _MOST, f"at most {_MOST:,}")
        if self.rounds * self.local_steps > _MOST_STEPS:
            raise PlanError(
                f"rounds: {self.rounds} rounds of {self.local_steps} local steps exceed {_MOST_STEPS:,} steps in all"
            )
        self._require("noise_multiplier", self.noise_multiplier >= 0, "0 or more")
        least, most = _RATES
        self._require("server_epsilon", least <= self.server_epsilon <= most, f"from {least:g} to {most:g}")
        for name in ("momentum", "server_momentum", "server_beta2", "ema", "compression"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        self._require("delta", _LEAST_DELTA <= self.delta < 1, f"at least {_LEAST_DELTA:g} and below 1")
        self._require("share_fraction", 0 < self.share_fraction <= 1, "above 0 and at most 1")
        self._require("seed", 0 <= self.seed < 2**63, "at least 0 and below 2^63")
        if self.record_sampling == "poisson":
            self._require("slots", self.slots >= self.batch_size, f"at least the batch size, {self.batch_size}")
        else:
            fixed = f"the batch size, {self.batch_size}, under {self.record_sampling} record sampling"
            self._require("slots", self.slots == self.batch_size, fixed)
        for name in ("learning_rate", "server_learning_rate"):
            if getattr(self, name).kind == "proportional":
                raise PlanError(f"{name}: only a clip bound can be proportional (to the learning rate)")
        self._require("proximal", self.proximal >= 0, "0 or more")
        fastest = max(self.learning_rate.start, self.learning_rate.end)
        if self.proximal * fastest >= 1:
            raise PlanError(
                f"proximal: {self.proximal} is not allowed; times the learning rate, {fastest:g}, it must be below 1, or a "
                "local step overshoots the global model"
            )
        for name in ("quantile_noise", "quantile_rate"):
            self._require(name, getattr(self, name) > 0, "positive")
        if self.noise_generator != "philox" and not self.secure_noise:
            raise PlanError(f"noise_generator: {self.noise_generator} applies to secure noise only; also set secure_noise")
        if self.mean_records is not None:
            self._require("mean_records", 1 <= self.mean_records <= _MOST, f"from 1 to {_MOST:,}")
            if self.weighting == "equal" and not (self.sums and self.per_example):
                raise PlanError("mean_records: it applies to weighting by records only; also set weighting")
        self._check_sum()
        self._check_aggregator()
        if self.scaling_noise is not None:
            weakest, strongest = _MULTIPLIERS
            self._require("scaling_noise", weakest <= self.scaling_noise <= strongest, f"from {weakest:g} to {strongest:g}")
            if not self.private:
                raise PlanError(f"scaling_noise: it makes no sense with {self.method}, which protects nothing else")
        if self.noise_slots == "held" and self.private and not (self.per_example and self.noise == "example"):
            raise PlanError("noise_slots: held applies to example noise of fed-cdp only")
        if isinstance(self.clip, Quantile) and not self.noise_follows_clip:
            raise PlanError(f"noise_follows_clip: false is not allowed with {self.clip}; noise must follow a quantile bound")
        if self.private:
            self._check_scales()
        if self.method == "fed-cdp-decay" and not self._decays():
            raise PlanError(f"clip: fed-cdp-decay needs a bound that decays, such as linear(6, 2), not {self.clip}")

    def _check_sum(self) -> None:
        """Refuse what contradicts secure aggregation, and noise on the sum where its ε would not hold."""
        self._require("colluders", self.colluders >= 0, "0 or more")
        self._require("attempts", 1 <= self.attempts <= _MOST_ATTEMPTS, f"from 1 to {_MOST_ATTEMPTS}")
        if self.colluders and not self.secure_aggregation:
            raise PlanError("colluders: without secure aggregation the server reads every update anyway")
        if self.secure_aggregation and self.colluders >= self.per_round:
            raise PlanError(f"colluders: {self.colluders} is not allowed; one of {self.per_round} clients must be honest")
        if self.attempts > 1 and self.noise != "sum":
            raise PlanError("attempts: only rounds with noise on the sum are tried again; also set noise sum")
        if self.noise != "sum":
            return
        if not self.private:
            raise PlanError(f"noise: sum makes no sense with {self.method}, which adds none")
        if not self.secure_aggregation:
            raise PlanError("noise: sum needs secure_aggregation; one client's share of the noise protects nobody")
        if self.per_round < 2:
            raise PlanError("noise: sum needs at least two clients in a round")
        if self.per_example and self.local_steps > 1:
            raise PlanError(
                "noise: sum needs one local step; later steps depend on a client's own earlier noise, so other clients' "
                "noise cannot be credited"
            )
        if not self.per_example and self.noise_at == "server":
            raise PlanError("noise: sum is added by the clients; set noise_at client")
        for name, usual, why in (
            ("compression", 0, "a client would prune its share of the noise"),
            ("aggregation", "fedsgd", "clients send sums of clipped gradients, not models"),
            ("client_sampling", "fixed", "the energy of the noise would reveal the size of the cohort"),
        ):
            if (value := getattr(self, name)) != usual:
                raise PlanError(f"{name}: {value} is not allowed with noise sum; {why}")
        if isinstance(self.clip, Quantile):
            raise PlanError(f"clip: {self.clip} is not allowed with noise sum; the indicators that it needs are not masked")

    def _check_aggregator(self) -> None:
        """Refuse robust aggregation where the server has no single updates, or where their values do not compare."""
        self._require("trim", 0 < self.trim < 0.5, "above 0 and below 0.5")
        self._require("median_groups", 1 <= self.median_groups <= _MOST, f"from 1 to {_MOST:,}")
        if self.aggregator == "mean":
            return
        at_server = self.method == "fed-sdp" and self.noise_at == "server"
        for holds, why in (
            (self.secure_aggregation, "with secure aggregation, where the server reads no single update"),
            (at_server, "with noise at the server, which is made for the sum of all updates; set noise_at client"),
            (self.weighting == "records", "with weighting by records; updates of other weights do not compare"),
            (self.method == "dssgd" or self.compression > 0, "with pruned updates, most of whose entries are 0"),
        ):
            if holds:
                raise PlanError(f"aggregator: {self.aggregator} is not allowed {why}")
        if self.aggregator == "median-of-means":
            fits = self.median_groups <= self.per_round
            self._require("median_groups", fits, f"at most the clients per round, {self.per_round}")

    def _check_scales(self) -> None:
        """Refuse bounds and noise that float32 arithmetic cannot represent."""
        if isinstance(self.clip, Quantile):
            least, most = self.clip.start * 1e-6, self.clip.start * 1e6
        else:
            last = self.clip.value(self.rounds - 1, self.rounds, leader=self.learning_rate)
            least, most = sorted((self.clip.start, last))
        if least < _BOUNDS[0] * (1 - 1e-9) or most > _BOUNDS[1] * (1 + 1e-9):
            within = ", wherever it may move" if isinstance(self.clip, Quantile) else ""
            raise PlanError(f"clip: {self.clip} is not allowed; it must be from {_BOUNDS[0]:g} to {_BOUNDS[1]:g}{within}")
        weakest, strongest = _MULTIPLIERS
        for name in ("noise_multiplier", "quantile_noise"):
            value = getattr(self, name)
            self._require(name, value == 0 or weakest <= value <= strongest, f"0, or from {weakest:g} to {strongest:g}")

    def _decays(self) -> bool:
        if isinstance(self.clip, Quantile):
            return False
        leader = self.learning_rate if self.clip.kind == "proportional" else self.clip
        return leader.end < leader.start

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise PlanError(f"{name}: {getattr(self, name)} is not allowed; it must be {allowed}")
