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
from fedcdp.checks.call_audit import FEWEST_TRIALS, CallReader, Trials, run_trials
from fedcdp.checks.findings import AttackScope, CallAudit, Check, Finding, TensorProbe, sorted_findings
from fedcdp.checks.opacus_settings import OpacusSettings
from fedcdp.checks.probes import SCALES, MeasuredNoise, Movement
from fedcdp.checks.worlds import (
    Batch,
    Worlds,
    hostile_batch,
    real_inputs,
    record_at,
    repeated_values,
    scaled_record,
    worlds,
)
from fedcdp.engine import Loss
from fedcdp.errors import ModelError, PlanError
from fedcdp.files.tree import Inputs, Tree, each_tensor

_REPEATS = 32  # calls for each probe
_FEWEST, _MOST, _SECONDS = 300, 5000, 15.0  # trials by default, and the time that they may take
_ATTACK_STEPS = 200  # of the progress, for the reconstruction
_ABOUT = 0.9  # of the largest movement; the noise of a measurement is 1
_PRESENCE = 0.2  # share of the trials with the record as it is


@dataclass
class FunctionCheck:
    """A function, a batch of records, and what is claimed about it."""

    box: BlackBox
    inputs: Inputs
    labels: Tensor
    relation: str
    delta: float
    loss: Loss
    trials: int | None
    claimed: float | None
    settings: OpacusSettings | None
    progress: Callable[[int, int], None] | None
    found: list[Finding] = field(default_factory=list)
    stages: dict[float, BlackBox] = field(default_factory=dict)
    """The function by the factor on the network's weights, where inputs are whole numbers."""
    variance: Tree = field(default_factory=dict)
    """The variance of every number over calls on the same records."""
    worst: Batch | None = None
    """The record of whole numbers with the largest gradient."""
    sampled: int | None = None
    """How many numbers the fitted statistics of the audit use, if not all."""
    blind: bool = False
    """Whether the audit does not know the record's gradient."""
    exceeded: bool = False
    """Whether something leaves for which no finite ε holds, or an ε above the claim was shown."""
    done: int = 0
    total: int = 0

    def run(self) -> Check:
        """Measure, attack, and say what was found."""
        if self.trials is not None and self.trials < FEWEST_TRIALS:
            raise PlanError(f"trials: {self.trials} is not allowed; it must be at least {FEWEST_TRIALS}")
        self.box.finite(self.inputs, self.labels)
        trials = self._affordable() if self.trials is None else self.trials
        presence = max(FEWEST_TRIALS, int(_PRESENCE * trials))
        self.total = _REPEATS * self._probes + 2 * trials + 2 * presence
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
            multiplied="inputs" if self._real else "weights",
        )

    # Measurements ------------------------------------------------------------------------------------------------------

    @property
    def _real(self) -> bool:
        """Whether the record's inputs can be multiplied; otherwise the network's weights are."""
        return bool(real_inputs(self.inputs))

    @property
    def _scales(self) -> tuple[float, ...]:
        """Factors on the record's inputs or the network's weights; without a gradient, larger weights tell nothing."""
        known = self._real or self._expected(self.box, record_at(self._batch, 0)) is not None
        return SCALES if known else SCALES[:1]

    @property
    def _probes(self) -> int:
        """How often a batch is called `_REPEATS` times."""
        return 1 + len(self._scales) if self._real else 2 * len(self._scales)

    @property
    def _batch(self) -> Batch:
        return self.inputs, self.labels

    def _affordable(self) -> int:
        """The number of trials that fit the time, from the time of some calls."""
        started = time.perf_counter()
        for _ in range(3):
            self.box.finite(self.inputs, self.labels)
        a_call = (time.perf_counter() - started) / 3
        return int(min(_MOST, max(_FEWEST, _SECONDS / (2 * (1 + _PRESENCE) * a_call))))

    def _stage(self, scale: float) -> tuple[BlackBox, Worlds]:
        """The function, and two batches that differ in a record, for a factor on its inputs or on the network's weights."""
        if self._real:
            record = scaled_record(self.box, self._batch, scale, hostile=scale > 1 or self._replaces)
            return self.box, worlds(self._batch, record, self.relation)
        if self.worst is None:
            self.worst = repeated_values(self.box, self._batch, self.loss, place=int(self._replaces))
        if scale not in self.stages:
            self.stages[scale] = self.box if scale == 1 else self.box.with_weights(scale)
        box = self.stages[scale]
        return box, worlds(hostile_batch(box, self._batch), hostile_batch(box, self.worst), self.relation)

    @property
    def _replaces(self) -> bool:
        return self.relation == "replace"

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
        box, sides = self._stage(1.0)
        box.finite(*sides.present)
        base = absent = probes.repeat(box, sides.absent, _REPEATS, self._count)
        if not base.is_finite():
            raise ModelError(f"{box.name} returned values that are not finite")
        noise = probes.noise_of(base)
        movements, not_finite = {}, []
        differs = {name: torch.zeros_like(each.still) for name, each in noise.items()}
        for scale in self._scales:
            staged, sides = self._stage(scale)
            try:
                if staged is not box:
                    absent = probes.repeat(staged, sides.absent, _REPEATS, self._count)
                present = probes.repeat(staged, sides.present, _REPEATS, self._count)
            except ModelError:
                if staged is box:
                    raise
                not_finite.append(scale)
                continue
            moved = probes.measure_movement(present, absent, self._expected(staged, record_at(sides.present, 0)))
            if moved is None and scale == 1:
                raise ModelError(f"{box.name} returned values that are not finite")
            if moved is None:
                not_finite.append(scale)
                continue
            movements[scale] = moved
            for name, other in probes.differing(present, absent).items():
                differs[name] |= other
            if scale == 1:
                self._compare_noise(noise, probes.noise_of(present))
        if not_finite:
            self._report_not_finite(not_finite[0])
        self.variance = {name: base.variance(name) for name in base.mean}
        counts = self._counts(noise)
        silent = {name: 0 if name in counts else int((each.still & differs[name]).sum()) for name, each in noise.items()}
        tensors = probes.describe_tensors(box, noise, movements, silent)
        self._report_tensors(tensors, counts)
        return tensors, movements, counts

    def _report_not_finite(self, scale: float) -> None:
        said = f"a record {scale:g} times as large makes values leave that are not finite"
        if not self._real:
            said = f"with weights {scale:g} times as large, the function fails or returns values that are not finite"
        self.found.append(Finding("warning", said))

    def _counts(self, noise: dict[str, MeasuredNoise]) -> set[str]:
        """Numbers without noise that are the number of records, whatever the records are; of interest if it differs."""
        if self.relation != "remove":
            return set()
        most = len(self.labels)
        first, second = (
            self.box.finite(each_tensor(self.inputs, lambda value: value[:number]), self.labels[:number])  # noqa: B023
            for number in (most, most - 1)
        )
        return {
            name
            for name, values in first.items()
            if values.numel() == 1 and not noise[name].noised and float(values) == most and float(second[name]) == most - 1
        }

    def _canary(self, movements: dict[float, Movement]) -> float:
        """The factor with which the record moves the outputs furthest; of about equal ones, the largest."""
        furthest = max(each.strength for each in movements.values())
        return max(scale for scale, each in movements.items() if each.strength >= _ABOUT * furthest - 1)

    def _trials(self, box: BlackBox, sides: Worlds, counts: set[str], trials: int) -> Trials:
        gradient = self._expected(box, record_at(sides.present, 0))
        reader = CallReader(box, gradient, self.variance, counts)
        self.sampled, self.blind = (reader.kept if reader.sampled else None), gradient is None
        return run_trials(box, sides, reader, counts, trials, self.delta, self._count)

    def _expected(self, box: BlackBox, record: Batch) -> Tree | None:
        """The gradient of one record."""
        return call_attacks.expected_gradient(box, *record, self.loss)

    def _audit(self, scale: float, counts: set[str], trials: int) -> CallAudit:
        audit = self._trials(*self._stage(scale), counts, trials).audit(self.relation, self.delta, trials)
        self._report_sampling()
        return replace(audit, sampled=self.sampled)

    def _presence(self, counts: set[str], trials: int) -> dict[str, Any]:
        """How well one call tells whether a record of the batch, as it is, was there."""
        record = scaled_record(self.box, self._batch, 1.0, hostile=self._replaces)
        area = self._trials(self.box, worlds(self._batch, record, self.relation), counts, trials).auc()
        return {"attack": "matched-filter", "trials": trials, "auc": area.value, "auc_interval_99": [area.low, area.high]}

    # What it adds up to --------------------------------------------------------------------------------------------------

    def _compare_noise(self, absent: dict[str, MeasuredNoise], present: dict[str, MeasuredNoise]) -> None:
        """Whether the noise shows the number of records."""
        for name in absent:
            without, with_it = (each[name].squares for each in (absent, present))
            entries = absent[name].noised
            if not without or not with_it or not entries:
                continue
            sure = 8 * (2 / (_REPEATS - 1) / entries * 2) ** 0.5  # of the difference of two logarithms of variances
            if abs(math.log(without / with_it)) > sure + 0.01:
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
            self.found.append(Finding("leak", f"not clipped: {names}. {self._larger()} several times further"))
        if any(tensor.bounded is None for tensor in tensors):
            self.found.append(
                Finding("warning", "clipping was not tested, because no record with a larger gradient could be tried")
            )
        for name in sorted(counts):
            self.found.append(
                Finding("warning", f"the number of records leaves without noise ({name}); ε must treat it as public")
            )

    def _larger(self) -> str:
        return "A record ten times as large moves it" if self._real else "With weights ten times as large, a record moves it"

    def _report_sampling(self) -> None:
        """Say which statistics of the audit see only a part of the numbers."""
        if self.sampled is None:
            return
        part, whole = f"{self.sampled:,}", f"{self.box.values:,}"
        if self.blind:
            self.found.append(
                Finding("warning", f"the record's gradient could not be computed, so the audit sees only {part} of {whole} "
                        "numbers and may miss that noise is too weak; pass the loss that the function trains with")
            )  # fmt: skip
            return
        self.found.append(
            Finding("note", f"noise and clipping were measured on all {whole} numbers. In the audit, the record's gradient "
                    f"is compared with all of them, but fitted statistics use {part}, drawn at random from every tensor")
        )  # fmt: skip

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
        calls = sum(box.calls for box in {id(box): box for box in (self.box, *self.stages.values())}.values())
        relation = {"remove": "with a record and without it", "replace": "with a record and with another in its place"}
        facts = [
            ("function", self.box.name),
            ("leaves the client", f"{len(shapes)} tensors, {self.box.values:,} numbers"),
            ("records", f"{len(self.labels)}; calls {relation[self.relation]}"),
            ("calls", f"{calls:,}, of which {audit.trials:,} in each world of the audit"),
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
