"""The result of a check: what was found, ε for each adversary, and the attacks that apply."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fedcdp.accounting.statement import Privacy, format_epsilon

Level = Literal["leak", "warning", "note"]
Verdict = Literal["exceeds the claim", "leaks", "consistent with the claim", "no claim to compare with"]


@dataclass(frozen=True)
class Finding:
    """One sentence about the checked training, and how serious it is."""

    level: Level
    """`leak`: something leaves without protection, or a claim is wrong. `warning`: an ε rests on it. `note`: the rest."""
    text: str
    """The sentence."""


@dataclass(frozen=True)
class AttackScope:
    """What one adversary reads, and fedcdp's attacks that apply to it."""

    adversary: str
    reads: str
    """What the adversary reads."""
    attacks: tuple[str, ...]
    """Names of attacks, as in `fedcdp.attack`."""
    accuracy: float | None
    """The largest share of right guesses whether a record was there that the adversary's ε allows; 1 without an ε."""


@dataclass(frozen=True)
class TensorProbe:
    """What was measured about one tensor that leaves the client."""

    name: str
    shape: tuple[int, ...]
    noise: float
    """Standard deviation of an entry over calls on the same records."""
    silent: int
    """Entries that depend on the records but carry no noise."""
    moved: Mapping[float, float]
    """How far a record moves the tensor (L2 norm), by the factor on what `Check.multiplied` names."""
    bounded: bool | None
    """Whether a tenfold larger record moves it no further; None where that was not measured."""


@dataclass(frozen=True)
class CallAudit:
    """Lower bounds on the ε of one call, from calls with and without a canary; each holds with 99.9 % confidence."""

    relation: str
    """`remove`: the canary is there or is left out. `replace`: the canary is there, or another record."""
    trials: int
    """Calls in each of the two worlds."""
    delta: float
    epsilon_lower: float
    """Proven by the error rates of a test, without any assumption on the noise."""
    epsilon_gaussian: float | None
    """Proven if the noise is Gaussian. None: the measured noise is not."""
    statistic: str
    """The statistic that separated the worlds best."""
    sampled: int | None = None
    """How many of the returned numbers the fitted statistics use, if not all."""

    @property
    def strongest(self) -> float:
        """The larger of the two bounds."""
        return max(self.epsilon_lower, self.epsilon_gaussian or 0.0)


@dataclass(frozen=True)
class Check:
    """The result of `fedcdp.check`. `fedcdp.report(check, "check.html")` writes it as a page.

    Examples:
        >>> import fedcdp
        >>> from fedcdp.checks import OpacusSettings
        >>> found = fedcdp.check(OpacusSettings(noise_multiplier=1.1, sample_rate=0.004, steps=15000))
        >>> found.verdict
        'no claim to compare with'
        >>> round(found.privacy.row("model").epsilon, 2)
        2.3
    """

    target: str
    """What was checked, in words."""
    facts: tuple[tuple[str, str], ...]
    """Settings and figures, by name."""
    findings: tuple[Finding, ...]
    """What a reader must know, the most serious first."""
    scopes: tuple[AttackScope, ...]
    """Each adversary, and the attacks that apply."""
    privacy: Privacy | None = None
    """ε for each adversary; None for a function without settings."""
    delta: float = 1e-5
    claimed: float | None = None
    """The ε that was claimed."""
    tensors: tuple[TensorProbe, ...] = ()
    """What leaves the client, tensor by tensor (functions only)."""
    audit: CallAudit | None = None
    """Lower bounds on the ε of one call (functions only)."""
    attacks: tuple[dict[str, Any], ...] = ()
    """Summaries of the attacks that were run (functions only)."""
    contradicted: bool = False
    """Whether the claim is wrong."""
    multiplied: Literal["inputs", "weights"] = "inputs"
    """What was multiplied to make a record move the tensors further: its inputs, or the network's weights."""

    @property
    def verdict(self) -> Verdict:
        """The answer in words. A consistent claim is not a proven one."""
        if self.contradicted:
            return "exceeds the claim"
        if self.tensors and any(finding.level == "leak" for finding in self.findings):
            return "leaks"
        return "no claim to compare with" if self.claimed is None else "consistent with the claim"

    @property
    def fails(self) -> bool:
        """Whether an ε was claimed that does not hold, or something leaves although an ε was claimed."""
        return self.claimed is not None and self.verdict in ("exceeds the claim", "leaks")

    def summary(self) -> dict[str, Any]:
        """All figures, for programs. An infinite ε is written as "inf"."""
        return {
            "target": self.target,
            "verdict": self.verdict,
            "claimed_epsilon": self.claimed,
            "delta": self.delta,
            "facts": dict(self.facts),
            "findings": [asdict(finding) for finding in self.findings],
            "privacy": None if self.privacy is None else self.privacy.as_json(),
            "adversaries": [asdict(scope) | {"attacks": list(scope.attacks)} for scope in self.scopes],
            "tensors": [_tensor_json(tensor) for tensor in self.tensors],
            "multiplied": self.multiplied,
            "audit": None if self.audit is None else {k: _for_json(v) for k, v in vars(self.audit).items()},
            "attacks": list(self.attacks),
        }

    def __str__(self) -> str:
        lines = [f"{self.target}: {self.verdict}"]
        lines += [f"{finding.level}: {finding.text}" for finding in self.findings]
        if self.audit is not None:
            lines.append(f"one call: ε is at least {format_epsilon(self.audit.strongest)} at δ = {self.delta:g}")
        return "\n".join([*lines, *([] if self.privacy is None else [str(self.privacy)])])

    __repr__ = __str__


def sorted_findings(found: list[Finding]) -> tuple[Finding, ...]:
    """The findings, the most serious first."""
    order = {"leak": 0, "warning": 1, "note": 2}
    return tuple(sorted(found, key=lambda each: order[each.level]))


def membership_accuracy(epsilon: float, delta: float) -> float:
    """The largest share of right guesses, in or out with even odds, that (ε, δ)-privacy allows (Kairouz et al. 2015)."""
    if epsilon > 500:  # e^ε is not a float; the limit is 1
        return 1.0
    return (math.exp(epsilon) + delta) / (math.exp(epsilon) + 1)


def _tensor_json(tensor: TensorProbe) -> dict[str, Any]:
    return asdict(tensor) | {"shape": list(tensor.shape), "moved": {f"{k:g}": v for k, v in tensor.moved.items()}}


def _for_json(value: object) -> object:
    return "inf" if value == math.inf else value
