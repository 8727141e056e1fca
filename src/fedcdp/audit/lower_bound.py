"""The audit: a lower bound on ε, by attacking what the methods really release.

A canary is the worst possible record: its gradient is at the clip bound in every layer, in a direction that the adversary
knows, while no other record has any gradient. In each trial the real methods make a release with the canary, or with the
canary zeroed out, and the adversary must tell which. ε limits how well any adversary can do that, so the error rates bound ε
from below (Clopper–Pearson limits, held-out trials, 99.9 %). A bound above a stated ε proves the method or the statement
wrong.

The canary takes part in a known number of rounds: compare the bound with the ε for that many participations, not with an ε
that relies on the sampling of clients. Records within a client are sampled as the plan says, and only the `example`
adversary knows which were drawn.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedcdp.audit.canary import Laboratory
from fedcdp.audit.intervals import Numbers, choose_attack, epsilon_of_errors, gaussian_epsilon, mean_shift
from fedcdp.config.plan import Plan
from fedcdp.errors import PlanError
from fedcdp.mechanism.randomness import stream_key
from fedcdp.methods import METHODS, Method

ADVERSARIES = ("example", "update", "server", "model")
UNITS = ("record", "client")
RELATIONS = ("zero-out", "replace-one")

_LEARNING = 0.1  # share of the trials used to fit the discriminant; an equal share is used to choose the attack

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Audit:
    """An attack's proof: with 99.9 % confidence, the release is not (ε, δ)-private for any ε below `epsilon_lower`."""

    adversary: str
    unit: str
    relation: str
    trials: int
    """Trials in each of the two worlds: with the canary, and with the canary zeroed out."""
    delta: float
    epsilon_lower: float
    epsilon_gaussian: float | None
    """For information: the ε of a Gaussian release with the measured mean shift (99.9 % lower limit). None if the
    release is a mixture, because the canary is included at random."""
    exposures: int
    """The largest number of releases that contained the canary: examples for `example`, updates or models for the others."""
    statistic: str
    """The statistic that best separated the worlds: the projection on the canary of `all` tensors or of one, or a `fitted`
    direction."""
    seconds: float


def audit(
    plan: Plan,
    adversary: str = "example",
    *,
    unit: str | None = None,
    layers: int = 3,
    records: int | None = None,
    participations: int = 1,
    relation: str = "zero-out",
    clients: int | None = None,
    copies: int = 1,
    others: int | None = None,
    width: int = 3,
    trials: int | None = None,
    delta: float | None = None,
    seed: int | None = 0,
    method: Method | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Attack a plan's method and return the ε that the attack proves.

    Time grows with trials · participations · local steps.

    Args:
        plan: The plan to audit.
        adversary: `example` reads each example's gradient as released, with its index; `update` and `server` read a client's
            update, and `model` the global model, in each of `participations` rounds. Under secure aggregation, `server`
            reads the sum over the round's honest clients.
        unit: What is zeroed out: a `record`, or all records of a `client` (the default for Fed-SDP).
        layers: Layers of the network.
        records: Records of a client; by default as many as its local steps use.
        participations: Rounds that the canary takes part in.
        relation: `zero-out`; or `replace-one`, under which the canary's gradient is reversed instead.
        clients: If given, a round draws the canary's client from this many, as the plan does: compare with the ε that holds
            before it is known who takes part.
        copies: Clients of the cohort that each hold a copy of the canary.
        others: Records at each other client of the cohort; by default `records`.
        width: Inputs of each layer.
        trials: Trials in each world; by default as many as take some 20 seconds, between 5,000 and 4,000,000.
        delta: δ; by default the plan's.
        seed: Fixes all randomness; with None, no two audits are alike.
        method: The method to attack; by default the plan's.
        progress: Called with the number of finished trials and their total.

    Returns:
        The lower bound on ε, with the attack that proved it.
    """
    unit = unit or ("client" if plan.method == "fed-sdp" else "record")
    records = plan.local_steps * plan.batch_size if records is None else records
    delta = plan.delta if delta is None else delta
    counts = {"layers": layers, "records": records, "participations": participations, "copies": copies, "width": width}
    counts |= {} if others is None else {"others": others}
    _check(plan, adversary, unit, relation, delta, counts)
    if clients is not None:
        plan.check_clients(clients)
    laboratory = Laboratory(
        plan=plan,
        method=method or METHODS[plan.method],
        adversary=adversary,
        unit=unit,
        layers=layers,
        records=records,
        participations=participations,
        relation=relation,
        clients=clients,
        copies=copies,
        others=others,
        width=width,
    )
    trials = laboratory.affordable_trials() if trials is None else trials
    if trials < 100:
        raise PlanError(f"trials: {trials} is not allowed; it must be at least 100")
    seed = secrets.randbits(62) if seed is None else seed
    started, done = time.perf_counter(), 0

    def worlds(part: str, count: int, attacks: Tensor | None = None) -> tuple[Numbers, Numbers]:
        """Observations without and with the canary, projected on the attacks. No two parts share any randomness."""
        nonlocal done
        both: list[list[Tensor]] = [[], []]
        for world, seen in enumerate(both):
            for chunk in laboratory.observations(world == 1, count, stream_key(seed, f"audit-{part}", world) >> 1):
                seen.append(chunk if attacks is None else chunk @ attacks)
                done += len(chunk)
                if progress is not None:
                    progress(done, 2 * trials)
        return torch.cat(both[0]).numpy(), torch.cat(both[1]).numpy()

    learning = int(_LEARNING * trials)
    held_out = trials - 2 * learning
    names, attacks = laboratory.attacks(*worlds("fit", learning))
    tried = worlds("choose", learning, attacks)
    chosen, threshold = choose_attack(*tried, held_out, delta)
    widest = int(np.argmax([mean_shift(*scores) for scores in zip(*(world.T for world in tried), strict=True)]))
    absent, present = (world.T for world in worlds("held-out", held_out, attacks[:, [chosen, widest]]))
    bound = epsilon_of_errors((absent[0] > threshold).sum(), (present[0] <= threshold).sum(), held_out, delta)
    gaussian = None if laboratory.is_mixture else gaussian_epsilon(mean_shift(absent[1], present[1]), delta)
    seconds, exposures = time.perf_counter() - started, laboratory.exposures
    return Audit(adversary, unit, relation, trials, delta, float(bound), gaussian, exposures, names[chosen], seconds)


def _check(plan: Plan, adversary: str, unit: str, relation: str, delta: float, counts: dict[str, int]) -> None:
    given = (("adversary", adversary, ADVERSARIES), ("unit", unit, UNITS), ("relation", relation, RELATIONS))
    for name, value, known in given:
        if value not in known:
            raise PlanError(f"{name}: {value} is not allowed; it must be one of {', '.join(known)}")
    for name, count in counts.items():
        if count < 1:
            raise PlanError(f"{name}: {count} is not allowed; it must be at least 1")
    if counts["participations"] > plan.rounds:
        raise PlanError(f"participations: {counts['participations']} is not allowed; the plan has {plan.rounds} rounds")
    if relation == "replace-one" and plan.method == "fed-sdp":
        raise PlanError("relation: replace-one is audited only for Fed-CDP; for Fed-SDP, zero-out separates records as well")
    if counts["copies"] > 1 and (adversary == "example" or counts["copies"] > plan.per_round):
        raise PlanError(
            f"copies: {counts['copies']} is not allowed; each needs a client of its own in a cohort of {plan.per_round}, "
            "and adversary example allows only 1"
        )
    if not 0 < delta < 1:
        raise PlanError(f"delta: {delta} is not allowed; it must be above 0 and below 1")
    if plan.quantile is not None:
        raise PlanError(f"clip: {plan.clip} cannot be audited; use a bound that is fixed before the run")
