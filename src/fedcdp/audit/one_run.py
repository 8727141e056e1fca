"""The one-run audit: a lower bound on ε from a single training with many canaries (Steinke, Nasr and Jagielski, NeurIPS
2023; `guesses` states the theorem).

Each canary is a record of some client. Before the training, a fair coin decides for each of them whether it is included or
zeroed out: then it is drawn like any other record, and contributes nothing (the relation `zero-out`). The plan is trained
once, by the simulator's own code. The adversaries guess the coins from what each of them sees.

Who knows what. The coins come from a stream of their own, and nothing in the training or in the scores depends on them but
through the mechanism. The noise, the records that a step draws, and the other records' coins stay secret, except where the
table says otherwise. All adversaries know the plan, the network, all records including the canaries, and who holds them.

| adversary | reads | scores a canary by |
| --- | --- | --- |
| `example` | each released per-example gradient, its record, the local weights | Σ ⟨release, g⟩ − ‖g‖²/2 over exposures |
| `update` | each client's update before it leaves, and who takes part | Σ ⟨update, g⟩ over the rounds of its client |
| `server` | what the server receives: updates, or their sum under secure aggregation | Σ ⟨update or sum, g⟩, likewise |
| `model` | the released model, and nothing else of the training | how far its loss is below the untrained network's |

g is the canary's clipped gradient at the weights of the round (`example`: of the step). The first three are white-box;
`model` is black-box. Each of the first three is also scored on every layer alone, which finds a layer without noise; all
these rules share the confidence level.

A bound holds for the mechanism with all its randomness, including who takes part: compare it with the row's ε before it is
known who takes part (`Row.epsilon`), for a record under zero-out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcdp.audit.canary_records import mislabelled, worst_case
from fedcdp.audit.canary_watch import CanaryWatch, learned
from fedcdp.audit.guesses import prove
from fedcdp.audit.lower_bound import ADVERSARIES
from fedcdp.config.plan import Plan
from fedcdp.data.partition import Federation
from fedcdp.engine import Loss
from fedcdp.engine.runtime import deferred_interrupts, products, stop_if_asked, usable_device
from fedcdp.errors import PlanError
from fedcdp.mechanism.randomness import numpy_generator
from fedcdp.mechanism.sampling import choose_clients
from fedcdp.methods import Method
from fedcdp.training.loss_contract import loss_for
from fedcdp.training.prepared import Prepared
from fedcdp.training.rounds import Simulator
from fedcdp.training.trainer import ready


@dataclass(frozen=True)
class OneRunAudit:
    """What one adversary's guesses prove: the training is not (ε, δ)-private for any ε below `epsilon_lower`."""

    adversary: str
    """Who guesses."""
    unit: str
    """`record`."""
    relation: str
    """`zero-out`."""
    kind: str
    """The canaries: `mislabelled` records of the data, or `worst-case` gradients in a network made for them."""
    canaries: int
    """How many there were."""
    guesses: int
    """For how many of them the proof guesses."""
    correct: int
    """How many of these guesses are right."""
    delta: float
    """δ."""
    confidence: float
    """How sure the bound is. All rules for guessing that were tried share it."""
    epsilon_lower: float
    """The lower bound on ε."""
    statistic: str
    """The statistic that the guesses were made on: `all` tensors, a layer alone, or the `loss`."""


@deferred_interrupts()
def audit_one_run(
    plan: Plan,
    adversaries: Sequence[str] = ADVERSARIES,
    *,
    model: nn.Module | None = None,
    federation: Federation | None = None,
    canaries: int = 500,
    clients: int = 100,
    layers: int = 3,
    confidence: float = 0.95,
    delta: float | None = None,
    guesses: int | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    loss: Loss | None = None,
    method: Method | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[OneRunAudit]:
    """Train a plan once with canaries, and return the ε that each adversary's guesses prove.

    With `model` and `federation`, the training is that of the plan on its own data, and the canaries are records of it with
    wrong labels. Without them, the canaries are worst cases: in a network made for them, each has a gradient at the clip
    bound in every layer, orthogonal to all others.

    Args:
        plan: The plan to audit. For `seed` see below; all other randomness comes from the plan's seed.
        adversaries: Who guesses: any of `example`, `update`, `server` and `model`. They all watch the same training.
        model: The untrained network.
        federation: The clients and their data. Only records that a single client holds become canaries.
        canaries: How many canaries there are.
        clients: Worst-case canaries: the clients that hold them, as many each.
        layers: Worst-case canaries: layers of their network.
        confidence: How sure each bound is.
        delta: δ; by default the plan's.
        guesses: For how many canaries an adversary guesses. Default: the best of several numbers, at the cost of a
            correction of the confidence level.
        seed: Fixes the canaries, their coins and their labels.
        device: Where the plan is trained.
        loss: The loss. Default: that of the data's task.
        method: The method to audit; by default the plan's.
        progress: Called with the rounds done so far and in all.

    Returns:
        One result for each adversary.

    Raises:
        PlanError: An argument is not allowed, or the plan cannot be audited this way.
        DataError: The data have no classes, or too few records that only one client holds.

    Examples:
        >>> import fedcdp
        >>> from fedcdp.audit import audit_one_run
        >>> plan = fedcdp.Plan(
        ...     rounds=2, per_round=20, local_steps=1, batch_size=5, record_sampling="partition", noise_multiplier=0.2
        ... )
        >>> for found in audit_one_run(plan, ["server"], canaries=100, clients=20):
        ...     print(found.adversary, found.canaries, found.epsilon_lower > 0.5)
        server 100 True
    """
    kind = _kind(plan, adversaries, model, federation, canaries, confidence)
    if model is None or federation is None:
        model, federation, placed = worst_case(plan, canaries, clients, layers)
        loss = _output
    else:
        federation, placed = mislabelled(federation, canaries, seed)
    included = numpy_generator(seed, "audit-inclusion").random(canaries) < 0.5
    kept = torch.ones(len(federation.train), dtype=torch.bool)
    kept[placed.records] = torch.from_numpy(included)
    prepared, device = Prepared.of(model, federation, plan), usable_device(device)
    network = copy.deepcopy(prepared.network).to(device)
    with products(tf32=False):
        data, engines, state = ready(
            prepared, network, device=device, loss=loss_for(federation.train, loss), kept=kept, per_example=True
        )
        engine = next(iter(engines.values()))
        watch = CanaryWatch(data, engine, placed, set(adversaries))
        simulator = Simulator.stepwise(data, engine, method=method, tap=watch)
        untrained = state.weights
        for round_ in range(plan.rounds):
            stop_if_asked()
            chosen = torch.from_numpy(choose_clients(data.draws, federation.clients, round_))
            watch.begin(state, chosen)
            state = simulator.round(state, chosen)
            watch.end()
            if progress is not None:
                progress(round_ + 1, plan.rounds)
        scores = watch.scores() | {"model": learned(data, engine, placed, untrained, state.average or state.weights)}
    delta = plan.delta if delta is None else delta
    proofs = {each: prove(scores[each], included, delta, confidence, guesses=guesses, seed=seed) for each in adversaries}
    return [
        OneRunAudit(
            adversary=adversary,
            unit="record",
            relation="zero-out",
            kind=kind,
            canaries=canaries,
            guesses=proof.guesses,
            correct=proof.correct,
            delta=delta,
            confidence=confidence,
            epsilon_lower=proof.epsilon,
            statistic="loss" if adversary == "model" else watch.names[proof.statistic],
        )
        for adversary, proof in proofs.items()
    ]


def _output(outputs: Tensor, _: Tensor) -> Tensor:
    """The loss of worst-case canaries: their gradients are their inputs."""
    return outputs.mean()


def _kind(
    plan: Plan,
    adversaries: Sequence[str],
    model: nn.Module | None,
    federation: Federation | None,
    canaries: int,
    confidence: float,
) -> str:
    """The kind of the canaries; an error for arguments that are not allowed."""
    for each in adversaries:
        if each not in ADVERSARIES:
            raise PlanError(f"adversaries: {each} is not one of {', '.join(ADVERSARIES)}")
    if canaries < 2:
        raise PlanError(f"canaries: {canaries} is not allowed; it must be at least 2")
    if not 0 < confidence < 1:
        raise PlanError(f"confidence: {confidence} is not allowed; it must be above 0 and below 1")
    if (model is None) != (federation is None):
        raise PlanError("model, federation: give both, or neither for worst-case canaries")
    if plan.quantile is not None:
        raise PlanError(f"clip: {plan.clip} cannot be audited; use a bound that is fixed before the run")
    if plan.scaling_noise is not None:
        raise PlanError("scaling_noise: private scaling cannot be audited in one run; use public scaling")
    return "worst-case" if model is None else "mislabelled"
