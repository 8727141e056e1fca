"""The plan: one frozen object that says how a federation is trained, and the only source of truth for it.

The clip bound that clips, the one that scales the noise and the one that is accounted are read from here and nowhere
else. A plan checks itself when it is made and says in a sentence what is wrong.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from fedcdp.errors import PlanError
from fedcdp.schedules import Schedule, as_schedule
from fedcdp.settings import check_types, option

MethodName = Literal["nonprivate", "fed-sdp", "fed-cdp", "fed-cdp-decay", "dssgd"]
ClipMode = Literal["layer", "flat"]
NoiseConvention = Literal["example", "batch", "cohort"]
NoisePlacement = Literal["server", "client"]
ClientSampling = Literal["fixed", "poisson"]
RecordSampling = Literal["poisson", "fixed", "partition"]
Aggregation = Literal["fedsgd", "fedaveraging"]

_PAPER_CLIP = "4"
_PAPER_DECAY = "linear(6, 2)"
_SLOTS_PER_EXAMPLE = 3  # fewer cost privacy: a full step drops records, and the accountant pays for that


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a federation is trained. The fields are also the command line's plan options and the keys of `[plan]`."""

    method: MethodName = option("fed-cdp", "Training method.")
    rounds: int = option(100, "Global rounds, T.")
    per_round: int = option(100, "Clients in a round, K_t (with Poisson sampling: expected).")
    local_steps: int = option(100, "Local iterations of a client in a round, L.")
    batch_size: int = option(5, "Examples in a local batch, B (with Poisson sampling: expected).")
    clip: Schedule = option(
        None,
        "Clip bound C: a number, linear(6, 2), exponential(6, 2), cosine(6, 2), or proportional(4) to the learning rate. "
        "Default: 4; fed-cdp-decay: linear(6, 2).",
    )
    clip_mode: ClipMode = option("layer", "Clip each layer at C (the paper), or the whole gradient at once.")
    noise_multiplier: float = option(6.0, "Noise multiplier σ.")
    noise: NoiseConvention = option(
        "example",
        "Fed-CDP: what the noise N(0, (σC)²) is added to: every example (the paper's algorithm), the batch's sum, "
        "or cohort: the batch's sum, 1/K_t of it.",
    )
    noise_at: NoisePlacement = option("server", "Fed-SDP: who adds the noise.")
    noise_follows_clip: bool = option(True, "Noise shrinks with a decaying clip bound; otherwise it stays at σ·C_0.")
    client_sampling: ClientSampling = option("fixed", "How clients are chosen: exactly K_t, or each independently.")
    record_sampling: RecordSampling = option(
        "poisson", "How a step's records are chosen: each independently, exactly B at random, or in a fixed order."
    )
    slots: int = option(None, "Noise slots of a Poisson step, S. Default: 3 B.")
    learning_rate: Schedule = option(0.05, "Local learning rate η: a number or a schedule.")
    server_learning_rate: float = option(1.0, "Server learning rate s: W + s·mean(ΔW).")
    momentum: float = option(0.0, "Momentum of the local steps, within a round.")
    ema: float = option(0.0, "Moving average of the global model: share kept each round (0: off).")
    aggregation: Aggregation = option("fedsgd", "Clients send updates (fedsgd) or whole models (fedaveraging).")
    compression: float = option(0.0, "Share of an update's smallest entries that is pruned before it is sent.")
    share_fraction: float = option(0.1, "DSSGD: share of an update's largest entries that is sent.")
    seed: int = option(0, "Fixes all randomness of a simulation.")

    def __post_init__(self) -> None:
        check_types(self)
        default_clip = _PAPER_DECAY if self.method == "fed-cdp-decay" else _PAPER_CLIP
        self._set("clip", as_schedule(default_clip if self.clip is None else self.clip, "clip"))
        self._set("learning_rate", as_schedule(self.learning_rate, "learning_rate"))
        self._set("slots", self._default_slots() if self.slots is None else self.slots)
        self._check_values()

    # What the methods read -------------------------------------------------------------------------------------------

    @property
    def private(self) -> bool:
        """Whether the method clips and noises what it releases."""
        return self.method in ("fed-sdp", "fed-cdp", "fed-cdp-decay")

    def clip_at(self, round_: int) -> float:
        """The clip bound C of a round."""
        return self.clip.value(round_, self.rounds, leader=self.learning_rate)

    def noise_scale_at(self, round_: int) -> float:
        """σC, the standard deviation of one noise draw in a round."""
        return self.noise_multiplier * self.clip_at(round_ if self.noise_follows_clip else 0)

    def learning_rate_at(self, round_: int) -> float:
        """The local learning rate η of a round."""
        return self.learning_rate.value(round_, self.rounds)

    def but(self, **changes: Any) -> Plan:
        """The same plan with some fields changed; what was derived from a changed field is derived anew."""
        for name in changes.keys() - {each.name for each in fields(self)}:
            raise PlanError(f"{name}: a plan has no such field")
        if self.slots == self._default_slots():
            changes.setdefault("slots", None)
        if "clip" not in changes and changes.get("method", self.method) != self.method:
            paper = (as_schedule(_PAPER_CLIP, "clip"), as_schedule(_PAPER_DECAY, "clip"))
            if self.clip in paper:
                changes["clip"] = None
        return replace(self, **changes)

    def written(self) -> dict[str, str | int | float | bool]:
        """The plan as plain values, for a configuration file; `Plan(**written)` gives it back."""
        return {name: str(value) if isinstance(value, Schedule) else value for name, value in vars(self).items()}

    def digest(self) -> str:
        """A short name of the plan that differs for different plans."""
        return hashlib.sha256(json.dumps(self.written(), sort_keys=True).encode()).hexdigest()[:16]

    def check_clients(self, clients: int) -> None:
        """Refuse a plan that a federation of this many clients cannot carry out."""
        if self.per_round > clients:
            raise PlanError(
                f"per_round: {self.per_round} clients a round cannot be chosen out of {clients}; at most {clients}"
            )

    # Checks ----------------------------------------------------------------------------------------------------------

    def _default_slots(self) -> int:
        return _SLOTS_PER_EXAMPLE * self.batch_size if self.record_sampling == "poisson" else self.batch_size

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_values(self) -> None:
        for name in ("rounds", "per_round", "local_steps", "batch_size", "slots"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("noise_multiplier", self.noise_multiplier >= 0, "0 or more")
        self._require("server_learning_rate", self.server_learning_rate > 0, "positive")
        for name in ("momentum", "ema", "compression"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        self._require("share_fraction", 0 < self.share_fraction <= 1, "above 0 and at most 1")
        self._require("seed", 0 <= self.seed < 2**63, "at least 0 and below 2^63")
        if self.record_sampling == "poisson":
            self._require("slots", self.slots >= self.batch_size, f"at least the batch size, {self.batch_size}")
        else:
            fixed = f"the batch size, {self.batch_size}, under {self.record_sampling} record sampling"
            self._require("slots", self.slots == self.batch_size, fixed)
        if self.learning_rate.kind == "proportional":
            raise PlanError("learning_rate: only a clip bound can be proportional, to the learning rate")
        leader = self.learning_rate if self.clip.kind == "proportional" else self.clip
        if self.method == "fed-cdp-decay" and leader.end >= leader.start:
            raise PlanError(f"clip: fed-cdp-decay needs a bound that decays, such as linear(6, 2), not {self.clip}")

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise PlanError(f"{name}: {getattr(self, name)} is not allowed; it must be {allowed}")
