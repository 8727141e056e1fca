"""Threat models: who attacks, by what means, and which attacks found most, as a table of attack × observation.

The names are those of recent surveys of gradient inversion: an eavesdropper on the client, an honest-but-curious server, a
malicious server that modifies the architecture or manipulates the parameters, and an adversary with the released model;
reconstruction by optimisation, in closed form (analytics-based) or with a prior, and inference of labels, presence and
membership.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fedcdp.report.facts import LONGEST_NAME, LeakFacts, is_number

THREATS = {
    "type2": "eavesdropper on the client",
    "type1": "eavesdropper on the client",
    "type0": "honest-but-curious server",
    "model": "anyone with the released model",
}
"""Who reads an observation and follows the protocol."""
OBSERVATIONS = {"type2": "Type-2", "type1": "Type-1", "type0": "Type-0", "model": "Model"}

_MODIFIES = "malicious server: architecture modification, or a crafted first layer"
_MANIPULATES = "malicious server: parameter manipulation"
MALICIOUS = {
    "imprint": _MODIFIES,
    "trap-weights": _MANIPULATES,
    "fishing": _MANIPULATES,
    "frozen-weights": _MANIPULATES,
    "inconsistent-models": _MANIPULATES,
}
"""Attacks by a server that does not follow the protocol."""
_OPTIMISES, _SOLVES, _PRIOR = "optimisation-based", "analytics-based", "prior-based"
MEANS = dict.fromkeys(("cpl", "dlg", "idlg", "inverting-gradients", "batch", "clip-aware", "unrolled", "per-layer",
                       "tableak-search"), f"{_OPTIMISES} reconstruction")  # fmt: skip
MEANS |= dict.fromkeys(("analytic", "linear-head", "tableak", "tokens", *MALICIOUS), f"{_SOLVES} reconstruction")
MEANS |= dict.fromkeys(("averaging", "class-prior", "accumulated"), f"{_PRIOR} reconstruction")
MEANS |= {"labels": "label inference", "matched-filter": "presence inference", "membership": "membership inference",
          "lira": "membership inference"}  # fmt: skip
_SHARES = (
    ("success_rate", "exact"), ("recognisable_rate", "recognisable"), ("identified_rate", "identified"),
    ("token_recall", "of the tokens"), ("label_accuracy", "of the labels"),
)  # fmt: skip
_GUESS = 0.5  # the AUC of a coin


@dataclass(frozen=True)
class AttackRow:
    """One attack, and what it found for each observation."""

    attack: str
    threat: str
    means: str
    found: dict[str, str]
    """By observation."""
    strength: tuple[float, ...]


@dataclass(frozen=True)
class AttackTable:
    """All attacks on one subject, the strongest first."""

    observations: tuple[str, ...]
    rows: list[AttackRow]
    refused: list[tuple[str, str, str]]
    """Attack, observation and reason."""


def attack_table(leaks: Iterable[LeakFacts]) -> AttackTable | None:
    """What each attack found; None for fewer than two attacks, whose figures are elsewhere on the page."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    refused: dict[tuple[str, str, str], None] = {}
    for leak in leaks:
        for told in _told(leak):
            name, reason = str(told.get("attack") or "")[:LONGEST_NAME], told.get("refused")
            if isinstance(reason, str) and reason:
                refused[name, leak.leak, reason] = None
            elif figures := {key: value for key, value in told.items() if is_number(value)}:
                before = found.setdefault(name, {}).get(leak.leak)
                if before is None or _strength(figures) > _strength(before):
                    found[name][leak.leak] = figures
    if len(found) + len(refused) < 2:
        return None
    rows = [_row(name, by_leak) for name, by_leak in found.items()]
    observations = tuple(leak for leak in OBSERVATIONS if any(leak in row.found for row in rows))
    return AttackTable(observations, sorted(rows, key=lambda row: row.strength, reverse=True), list(refused))


def _told(leak: LeakFacts) -> list[dict[str, Any]]:
    """The attacks that a result lists; else the result itself."""
    tried = leak.summary.get("tried")
    several = [each for each in tried if isinstance(each, dict)] if isinstance(tried, list) else []
    own = {"attack": leak.attack} | leak.summary
    if len(several) < 2:
        return [own]
    # The result has more figures than its line in the list.
    return [own | {"tried": None} if each.get("attack") == leak.attack else each for each in several]


def _row(name: str, by_leak: dict[str, dict[str, Any]]) -> AttackRow:
    passive = dict.fromkeys(THREATS[leak] for leak in OBSERVATIONS if leak in by_leak)
    threat = MALICIOUS.get(name) or " or ".join(passive) or "unknown"
    words = {leak: _words(figures) for leak, figures in by_leak.items()}
    return AttackRow(name, threat, MEANS.get(name, "reconstruction"), words, max(map(_strength, by_leak.values())))


def _words(figures: dict[str, Any]) -> str:
    """What an attack found, in a few words: the share that says most, and the AUC."""
    shares = [(name, word) for name, word in _SHARES if name in figures]
    reconstructs = [each for each in shares if each[0] in ("success_rate", "recognisable_rate")]
    told = [f"{100 * figures[name]:.3g} % {word}" for name, word in reconstructs or shares[:1]]
    if "auc" in figures:
        told.append(f"AUC {figures['auc']:.3f}")
    return ", ".join(told) or "–"


def _strength(figures: dict[str, Any]) -> tuple[float, ...]:
    """Exact examples count most, then recognisable and identified ones; then what inference tells beyond a guess."""
    shares = [float(figures.get(name, 0.0)) for name in ("success_rate", "recognisable_rate", "identified_rate")]
    labels = float(figures.get("label_accuracy", 0.0)) - float(figures.get("label_baseline", 0.0))
    presence = 2 * float(figures.get("auc", _GUESS)) - 1
    return *shares, max(float(figures.get("token_recall", 0.0)), labels, presence)
