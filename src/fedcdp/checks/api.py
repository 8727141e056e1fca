"""`fedcdp.check`: somebody else's training, by its settings or as a function that returns what leaves the client."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcdp.accounting.statement import format_epsilon
from fedcdp.audit.intervals import gaussian_epsilon
from fedcdp.checks.black_box import BlackBox, Function, checked_examples
from fedcdp.checks.bounds import require_delta, require_number
from fedcdp.checks.findings import Check, Finding, sorted_findings
from fedcdp.checks.flower_settings import FlowerSettings, LocalDpSettings
from fedcdp.checks.function_check import FunctionCheck
from fedcdp.checks.opacus_settings import OpacusSettings
from fedcdp.config.arguments import checked
from fedcdp.engine import Loss
from fedcdp.errors import PlanError
from fedcdp.files.tree import Inputs

Settings = OpacusSettings | FlowerSettings | LocalDpSettings
RELATIONS = ("remove", "replace")
_SAME = 0.95  # accountants round differently: a claim within five per cent is the same ε


@checked
def check(
    target: OpacusSettings | FlowerSettings | LocalDpSettings | Callable[..., Any],
    *,
    model: nn.Module | None = None,
    examples: tuple[Inputs, Tensor] | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    settings: OpacusSettings | None = None,
    relation: str = "remove",
    trials: int | None = None,
    loss: Loss | None = None,
    seed: int | None = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Check:
    """Check a training loop that is not fedcdp's: ε for each adversary, and the attacks that apply.

    | target | what is checked | needs |
    | --- | --- | --- |
    | `OpacusSettings`, `FlowerSettings`, `LocalDpSettings` | ε that these settings give, and what they leave open | |
    | a function | what the function really returns | `model`, `examples` |

    The function is called as `function(model, inputs, labels)`. It trains on these records from these weights, and returns
    everything that would leave the client: tensors by name, a list of tensors, or one tensor. Every call gets a fresh copy
    of the model. The check calls it many times: on the same records, for the noise of each tensor; with a record and without
    it, for the clipping; and with a worst-case record, for a lower bound on ε. Then it runs the attacks that apply. A larger
    record has its inputs multiplied; where all inputs are whole numbers, such as token ids, the network's weights are.

    A check finds faults. That it finds none is no proof of privacy.

    Args:
        target: Settings, or a function.
        model: The network that the function starts from.
        examples: Inputs and labels of a batch of one client, at least two records. Inputs are one tensor, or a dictionary
            of tensors by name, which the function then gets.
        epsilon: The ε that is claimed. For a function, that of one call; for settings, that of the training, which is
            compared with the `model` row for a record (with noise at the server, for a client).
        delta: δ of the claim. Default: 1e-5, or that of the settings.
        settings: The settings that a function is meant to implement. The check then compares one call with their noise, and
            the result has their ε table. One call is one noised step.
        relation: How the two worlds of the function differ in one record. `remove`: it is there or left out, as in the ε of
            DP-SGD. `replace`: another record takes its place, where the number of records is public.
        trials: Calls with, and without, the worst-case record. Default: some 15 seconds' worth, from 300 to 5,000.
        loss: The loss that the function trains with. Default: the cross-entropy.
        seed: Fixes PyTorch's randomness, from which most functions draw their noise. None: as it is.
        progress: Called with the work done so far and in all.

    Returns:
        The findings, ε for each adversary, the measurements and the verdict. `fedcdp.report` writes them as a page.

    Raises:
        PlanError: An argument is not allowed, or does not belong to this target.
        ModelError: The function fails, or does not return what it should.
        DataError: The examples are not records with labels.

    Examples:
        A loop that clips and adds noise, but forgets the noise of its last layer:

        >>> import fedcdp, torch
        >>> from torch import nn
        >>> def leaves(model, inputs, labels):
        ...     sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        ...     for x, y in zip(inputs, labels):
        ...         loss = nn.functional.cross_entropy(model(x[None]), y[None])
        ...         grads = torch.autograd.grad(loss, list(model.parameters()))
        ...         norm = torch.cat([g.flatten() for g in grads]).norm()
        ...         for name, g in zip(sums, grads):
        ...             sums[name] += g / max(1.0, float(norm))
        ...     return {name: s if name == "bias" else s + torch.randn_like(s) for name, s in sums.items()}
        >>> data = fedcdp.load("cancer").train
        >>> found = fedcdp.check(
        ...     leaves, model=nn.Linear(30, 2), examples=(data.inputs[:4], data.targets[:4]), epsilon=5, trials=200
        ... )
        >>> found.verdict
        'exceeds the claim'
        >>> [tensor.name for tensor in found.tensors if tensor.noise == 0]
        ['bias']
    """
    if epsilon is not None:
        require_number("epsilon", epsilon, low=0)
    if isinstance(target, Settings):
        _leave_out(
            model=model is not None, examples=examples is not None, settings=settings is not None,
            relation=relation != "remove", trials=trials is not None, loss=loss is not None, delta=delta is not None,
        )  # fmt: skip
        return _check_settings(target, epsilon)
    if model is None or examples is None:
        raise PlanError("model, examples: a function needs both: the network that it starts from, and a batch of records")
    if relation not in RELATIONS:
        raise PlanError(f"relation: {relation!r} is not one of {', '.join(RELATIONS)}")
    if settings is not None and (epsilon is not None or delta is not None):
        raise PlanError("epsilon, delta: leave them out, because the settings tell them")
    delta = settings.delta if settings is not None else 1e-5 if delta is None else delta
    require_delta(delta)
    inputs, labels = checked_examples(examples)
    box = BlackBox(target, model, _name_of(target))
    work = FunctionCheck(
        box=box,
        inputs=inputs,
        labels=labels,
        relation=relation,
        delta=delta,
        loss=F.cross_entropy if loss is None else loss,
        trials=trials,
        claimed=_claim(epsilon, settings, relation),
        settings=settings,
        progress=progress,
    )
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed % 2**63)
        return work.run()


def _check_settings(target: Settings, claimed: float | None) -> Check:
    privacy = target.privacy()
    found = target.findings()
    unit = "record" if isinstance(target, OpacusSettings) or target.z == 0 else "client"
    real = privacy.row("model", unit).epsilon
    too_small = claimed is not None and claimed < _SAME * real
    if claimed is not None and too_small:
        found.append(
            Finding("leak", f"the claimed ε = {format_epsilon(claimed)} is smaller than what these settings give, "
                    f"{format_epsilon(real)} for a {unit} against a reader of the model")
        )  # fmt: skip
    return Check(
        target=target.title,
        facts=tuple(target.facts()),
        findings=sorted_findings(found),
        scopes=tuple(target.scopes(privacy)),
        privacy=privacy,
        delta=target.delta,
        claimed=claimed,
        contradicted=too_small,
    )


def _claim(epsilon: float | None, settings: OpacusSettings | None, relation: str) -> float | None:
    """The ε that one call is compared with: the claimed one, or that of one noised step of the settings."""
    if settings is None or settings.z == 0:
        return epsilon
    distance = 1.0 if relation == "remove" else 2.0
    found = gaussian_epsilon(distance / settings.z, settings.delta)
    return found if math.isfinite(found) else None


def _name_of(function: Function) -> str:
    return getattr(function, "__qualname__", type(function).__name__)[:80]


def _leave_out(**given: bool) -> None:
    if names := [name for name, is_given in given.items() if is_given]:
        raise PlanError(f"{', '.join(names)}: only for a function; leave it out")
