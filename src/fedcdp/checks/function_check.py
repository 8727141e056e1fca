"""The check of a function: noise, clipping, the audit and the attacks, in this order, and what they add up to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedcdp.accounting.statement import Privacy, format_epsilon
from fedcdp.checks import call_attacks, probes
from fedcdp.checks.black_box import BlackBox
from fedcdp.checks.call_audit import FEWEST_TRIALS, Trials, run_trials
from fedcdp.checks.findings import AttackScope, CallAudit, Check, Finding, TensorProbe, sorted_findings
from fedcdp.checks.opacus_settings import OpacusSettings
from fedcdp.checks.probes import SCALES, Movement, Worlds
from fedcdp.engine import Loss
from fedcdp.errors import ModelError, PlanError

_REPEATS = 32  # calls for each probe
_FEWEST, _MOST, _SECONDS = 300, 5000, 15.0  # trials by default, and the time that they may take
_ATTACK_STEPS = 200  # of the progress, for the reconstruction
_ABOUT = 0.9  # of the largest movement; the noise of a measurement is 1
_PRESENCE = 0.2  # share of the trials with the record as it is


@dataclass
class FunctionCheck:
    """A function, a batch of records, and what is claimed about it."""

    box: BlackBox
    inputs: Tensor
    labels: Tensor
    relation: str
    delta: float
    loss: Loss
    trials: int | None
    claimed: float | None
    settings: OpacusSettings | None
    progress: Callable[[int, int], None] | None
    found: list[Finding] = field(default_factory=list)
    exceeded: bool = False
    """Whether something leaves for which no finite ε holds, or an ε above the claim was shown."""
    done: int = 0
    total: int = 0

    def run(self) -> Check:
        """Measure, attack, and say what was found."""
        if self.trials is not None and self.trials < FEWEST_TRIALS:
            raise PlanError(f"trials: {self.trials} is not allowed; it must be at least {FEWEST_TRIALS}")
        trials = self._affordable() if self.trials is None else self.trials
        presence = max(FEWEST_TRIALS, int(_PRESENCE * trials))
        self.total = _REPEATS * (1 + len(self._scales)) + 2 * trials + 2 * presence
        tensors, movements, counts = self._probe()
        audit = self._audit(self._canary(movements), counts, trials)
        attacks = [self._presence(counts, presence)]
        if not any(tensor.noise for tensor in tensors):
            self.total += _ATTACK_STEPS
            summary, reason = call_attacks.reconstruct(self.box, self.inputs, self.labels, self.loss, self._attacked)
            attacks += [] if summary is None else [summary]
            self._report_reconstruction(summary, reason)
        self._report(self.total)
        self._report_audit(audit)
        self.exceeded |= self.claimed is not None and audit.strongest > self.claimed
        leaks = any(finding.level == "leak" for finding in self.found)
        if self.claimed is not None and not leaks:
            self.found.append(
                Finding("note", f"no attack showed more than the claimed ε = {format_epsilon(self.claimed)}; this proves no "
                        "more than that")
            )  # fmt: skip
        privacy = None if self.settings is None else self._promised(self.settings.privacy(), leaks)
        scopes = [] if privacy is None or self.settings is None or leaks else self.settings.scopes(privacy)
        return Check(
            target=f"what {self.box.name} returns",
            facts=tuple(self._facts(audit)),
            findings=sorted_findings(self.found),
            scopes=(self._scope(tensors), *scopes),
            privacy=privacy,
            delta=self.delta,
            claimed=self.claimed,
            tensors=tuple(tensors),
            audit=audit,
            attacks=tuple(attacks),
            contradicted=self.exceeded and self.claimed is not None,
        )

    # Measurements ------------------------------------------------------------------------------------------------------

    @property
    def _scales(self) -> tuple[float, ...]:
        """Factors on the record; inputs that are whole numbers, such as token ids, cannot be made larger."""
        return SCALES if self.inputs.is_floating_point() else SCALES[:1]

    def _affordable(self) -> int:
        """The number of trials that fit the time, from the time of some calls."""
        self.box.finite(self.inputs, self.labels)
        started = time.perf_counter()
        for _ in range(3):
            self.box.finite(self.inputs, self.labels)
        a_call = (time.perf_counter() - started) / 3
        return int(min(_MOST, max(_FEWEST, _SECONDS / (2 * (1 + _PRESENCE) * a_call))))

    def _worlds(self, scale: float) -> Worlds:
        record, label = self.inputs[0] if scale == 1 else self.inputs[0] * scale, self.labels[0]
        if scale > 1 or self.relation == "replace" or not self.inputs.is_floating_point():
            label = call_attacks.hostile_label(self.box.model, record, label, scale)
        return probes.worlds(self.inputs, self.labels, (record, label), self.relation)

    def _count(self) -> None:
        self._report(self.done + 1)

    def _attacked(self, done: int, total: int) -> None:
        self._report(self.total - _ATTACK_STEPS + _ATTACK_STEPS * done // max(1, total))

    def _report(self, done: int) -> None:
        """Tell the progress; several attacks in turn may each begin anew."""
        self.done = min(max(self.done, done), self.total)
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _probe(self) -> tuple[list[TensorProbe], dict[float, Movement], set[str]]:
        """The noise and the movement of each tensor, and the tensors that only tell the number of records."""
        box = self.box
        self.box.finite(*self._worlds(1.0).present)
        absent = probes.repeat(box, self._worlds(1.0).absent, _REPEATS, self._count)
        if not bool(absent.isfinite().all()):
            raise ModelError(f"{box.name} returned values that are not finite")
        noise = probes.noise_of(box, absent)
        movements, firsts, not_finite = {}, [absent[0]], []
        for scale in self._scales:
            sides = self._worlds(scale)
            present = probes.repeat(box, sides.present, _REPEATS, self._count)
            moved = probes.measure_movement(box, present, absent, self._expected(sides))
            if moved is None and scale == 1:
                raise ModelError(f"{box.name} returned values that are not finite")
            if moved is None:
                not_finite.append(scale)
                continue
            movements[scale] = moved
            firsts.append(present[0])
            if scale == 1:
                self._compare_noise(noise, probes.noise_of(box, present))
        if not_finite:
            self.found.append(
                Finding("warning", f"a record {not_finite[0]:g} times as large makes values leave that are not finite")
            )  # fmt: skip
        counts = self._counts(noise)
        stacked = torch.stack(firsts)
        spread = stacked.amax(0) - stacked.amin(0)
        differs = box.split(spread > probes.NO_NOISE * stacked.abs().amax(0))
        differs |= {name: torch.zeros_like(differs[name]) for name in counts}
        tensors = probes.describe_tensors(box, noise, movements, differs)
        self._report_tensors(tensors, counts)
        return tensors, movements, counts

    def _counts(self, noise: dict[str, Tensor]) -> set[str]:
        """Numbers without noise that are the number of records, whatever the records are; of interest if it differs."""
        if self.relation != "remove":
            return set()
        first, second = (
            self.box.split(self.box.finite(self.inputs[:number], self.labels[:number]))
            for number in (len(self.inputs), len(self.inputs) - 1)
        )
        return {
            name
            for name, values in first.items()
            if values.numel() == 1
            and not bool(noise[name].any())
            and float(values) == len(self.inputs)
            and float(second[name]) == len(self.inputs) - 1
        }

    def _canary(self, movements: dict[float, Movement]) -> float:
        """The factor with which the record moves the outputs furthest; of about equal ones, the largest."""
        furthest = max(each.strength for each in movements.values())
        return max(scale for scale, each in movements.items() if each.strength >= _ABOUT * furthest - 1)

    def _trials(self, sides: Worlds, counts: set[str], trials: int) -> Trials:
        return run_trials(self.box, sides, self._expected(sides), counts, trials, self.delta, self._count)

    def _expected(self, sides: Worlds) -> Tensor | None:
        """The gradient of the record that the worlds differ in."""
        return call_attacks.expected_gradient(self.box, sides.present[0][:1], sides.present[1][:1], self.loss)

    def _audit(self, scale: float, counts: set[str], trials: int) -> CallAudit:
        return self._trials(self._worlds(scale), counts, trials).audit(self.relation, self.delta, trials)

    def _presence(self, counts: set[str], trials: int) -> dict[str, Any]:
        """How well one call tells whether a record of the batch, as it is, was there."""
        area = self._trials(self._worlds(1.0), counts, trials).auc()
        return {"attack": "matched-filter", "trials": trials, "auc": area.value, "auc_interval_99": [area.low, area.high]}

    # What it adds up to --------------------------------------------------------------------------------------------------

    def _compare_noise(self, absent: dict[str, Tensor], present: dict[str, Tensor]) -> None:
        """Whether the noise shows the number of records."""
        for name in absent:
            without, with_it = (float(each[name].square().sum()) for each in (absent, present))
            entries = int((absent[name] > 0).sum())
            if not without or not with_it or not entries:
                continue
            sure = 8 * (2 / (_REPEATS - 1) / entries * 2) ** 0.5  # of the difference of two logarithms of variances
            if abs(torch.tensor(without / with_it).log().item()) > sure + 0.01:
                what = "the number of records" if self.relation == "remove" else "the records"
                public = "; if that number is public, check with relation replace" if self.relation == "remove" else ""
                self.found.append(
                    Finding("leak", f"the amount of noise in {name} depends on {what}. Scale it by a fixed number{public}")
                )  # fmt: skip
                return

    def _report_tensors(self, tensors: list[TensorProbe], counts: set[str]) -> None:
        silent = [tensor for tensor in tensors if tensor.silent]
        unbounded = [tensor for tensor in tensors if tensor.bounded is False and tensor.name not in counts]
        self.exceeded = bool(silent or unbounded)
        if silent:
            names = _listed([tensor.name for tensor in silent])
            self.found.append(
                Finding("leak", f"without noise: {names}. Calls on the same records return the same values there, and other "
                        "records other values. If noise is added, it comes from a fixed seed")
            )  # fmt: skip
        if unbounded:
            names = _listed([tensor.name for tensor in unbounded])
            self.found.append(
                Finding("leak", f"not clipped: {names}. A record ten times as large moves it several times further")
            )
        if any(tensor.bounded is None for tensor in tensors):
            self.found.append(Finding("warning", "clipping was not tested, because no larger record could be tried"))
        for name in sorted(counts):
            self.found.append(
                Finding("warning", f"the number of records leaves without noise ({name}); ε must treat it as public")
            )

    def _report_reconstruction(self, summary: dict[str, Any] | None, reason: str) -> None:
        if summary is None:
            self.found.append(Finding("note", f"no reconstruction was tried: {reason}"))
            return
        rate = summary.get("success_rate")
        if rate:
            self.found.append(
                Finding("leak", f"the attack {summary['attack']} reconstructs {100 * rate:.3g} % of single records exactly")
            )  # fmt: skip

    def _report_audit(self, audit: CallAudit) -> None:
        if audit.epsilon_gaussian is None:
            self.found.append(
                Finding("note", "the noise is not Gaussian, so only the bound without assumptions counts; it cannot exceed "
                        "the logarithm of the number of trials")
            )  # fmt: skip
        if self.claimed is None or audit.strongest <= self.claimed:
            return
        proven = audit.epsilon_lower > self.claimed
        if not proven and audit.strongest == math.inf:
            return  # something without noise, which is reported as such
        how = "without any assumption on the noise" if proven else "if the noise is Gaussian, as it looks"
        shown = audit.epsilon_lower if proven else audit.strongest
        self.found.append(
            Finding("leak", f"one call has ε ≥ {format_epsilon(shown)} at δ = {self.delta:g} (99.9 % sure, {how}), more "
                    f"than the claimed {format_epsilon(self.claimed)}")
        )  # fmt: skip

    def _promised(self, privacy: Privacy, leaks: bool) -> Privacy:
        """The statement of the settings, with what the check says about it."""
        note = "these ε are those of the settings, and the function does not keep to them: none of them holds"
        if not leaks:
            note = "these ε are those of the settings; they hold if the function keeps to them, which no check can prove"
        return replace(privacy, notes=(note, *privacy.notes))

    def _facts(self, audit: CallAudit) -> list[tuple[str, str]]:
        shapes = self.box.shapes
        numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
        relation = {"remove": "with a record and without it", "replace": "with a record and with another in its place"}
        facts = [
            ("function", self.box.name),
            ("leaves the client", f"{len(shapes)} tensors, {numbers:,} numbers"),
            ("records", f"{len(self.inputs)}; calls {relation[self.relation]}"),
            ("calls", f"{self.box.calls:,}, of which {audit.trials:,} in each world of the audit"),
            ("ε of one call, at least", f"{format_epsilon(audit.epsilon_lower)} at δ = {self.delta:g} (99.9 % sure)"),
        ]
        if audit.epsilon_gaussian is not None:
            facts.append(("if the noise is Gaussian", f"{format_epsilon(audit.epsilon_gaussian)}, by {audit.statistic}"))
        if self.claimed is not None:
            facts.append(("claimed", format_epsilon(self.claimed)))
        return facts

    def _scope(self, tensors: list[TensorProbe]) -> AttackScope:
        if any(tensor.noise for tensor in tensors):
            attacks: tuple[str, ...] = ("matched-filter", "averaging", "per-layer")
        else:
            attacks = ("analytic", "batch", "unrolled", "labels", "matched-filter")
        return AttackScope("this call", "what the function returns", attacks, None)


def _listed(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
