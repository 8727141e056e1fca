"""`fedcdp.attack`: attack a run, a plan or raw gradients, and report what leaked."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor, nn

from fedcdp.attacks.active_servers import ACTIVE
from fedcdp.attacks.inferred import Inferred
from fedcdp.attacks.leaks import Leaks
from fedcdp.attacks.lira import Lira, lira
from fedcdp.attacks.membership import Membership, infer_membership
from fedcdp.attacks.observe import LEAKS, Leak, Look
from fedcdp.attacks.per_layer import LayerLeaks
from fedcdp.attacks.portfolio import Attempts, infer_all, strongest
from fedcdp.attacks.presence import Presence
from fedcdp.attacks.raw_gradients import RawGradients, given_gradients
from fedcdp.attacks.recipe import RECIPES, Recipe
from fedcdp.attacks.reconstruct import Progress
from fedcdp.attacks.scene import simulated
from fedcdp.attacks.scores import Criteria
from fedcdp.attacks.tableak import TabLeak
from fedcdp.config.arguments import checked
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset
from fedcdp.data.partition import Federation
from fedcdp.engine import Loss
from fedcdp.engine.runtime import products, usable_device
from fedcdp.errors import DataError, PlanError
from fedcdp.training.run import Run

ATTACKS = (
    "best", *RECIPES, "analytic", "linear-head", "tableak", "tableak-search", "matched-filter", "presence", "per-layer",
    "labels", "tokens", "membership", "lira", *ACTIVE,
)  # fmt: skip
Found = Leaks | Presence | LayerLeaks | Membership | Inferred | Lira


@checked
def attack(
    target: Run | Plan | RawGradients,
    *,
    leak: Leak = "type2",
    attack: str | Recipe | TabLeak | None = None,
    victims: int | None = None,
    model: nn.Module | None = None,
    federation: Federation | None = None,
    truth: tuple[Tensor, Tensor] | None = None,
    input_shape: tuple[int, ...] | None = None,
    examples: int = 1,
    public: Dataset | None = None,
    at_round: int | None = None,
    step: int = 0,
    steps: int = 1,
    releases: int = 1,
    shadows: int | None = None,
    chunk: int | None = None,
    criteria: Criteria = Criteria(),  # noqa: B008
    device: str | torch.device = "cpu",
    loss: Loss | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Found:
    """Attack what an adversary observes, and measure how much it recovers.

    | target | what is attacked | needs |
    | --- | --- | --- |
    | a `Run` | one more round at its trained weights, or round `at_round` | for `at_round`: the untrained `model` |
    | a `Plan` | round 0, or round `at_round`, up to which the training is simulated | `model`, `federation` |
    | raw gradients | the gradients of your own training loop | `model`, and `truth` or `input_shape` |

    The adversary's observations come from the method's own code. The attack `accumulated` reads all rounds of the plan or
    run; so does `linear-head`, if the network trains only its last layer. For a run both replay the rounds from the seed,
    which needs the untrained `model`. With `at_round`, `linear-head` reads a single round.

    Args:
        target: The run, plan or raw gradients. Raw gradients are given by parameter name, or in the order of
            `model.parameters()`. Each has the shape of its parameter, or [victims, ...] for several victims. None stands for
            the gradient of a frozen parameter.
        leak: What the adversary observes. `type2`: the gradient of one example on the client during local training. `type1`:
            the client's update after local training. `type0`: the client's update as the server receives it; under secure
            aggregation, the sum over the clients of a round, which are then one victim.
        attack: The name of an attack (`fedcdp.attacks.ATTACKS`), a `Recipe` of your own, or `TabLeak` settings. Default:
            `best`, which tries the attacks that suit the target, returns the strongest, and lists all that it tried. Token
            ids and dictionaries of inputs cannot be reconstructed: `best` infers labels, presence and membership. It does
            not try the attacks of active servers, which choose the weights: `imprint`, `trap-weights`, `fishing`,
            `frozen-weights` and `inconsistent-models`.
        victims: How many clients or examples are attacked. Default: up to 100; for `lira`, all records.
        model: The network. For a run, the untrained one; `lira` needs it, because it trains the plan anew.
        federation: The clients and their data, for a plan.
        truth: Inputs and targets [(victims,) examples, ...] of which raw gradients are the mean gradient. With it the result
            is scored. Gradients that do not match it are refused.
        input_shape: The shape of one input, for raw gradients without `truth`.
        examples: How many examples each raw gradient is the mean of, without `truth`.
        public: Examples that anyone has. Baselines, candidates and priors come from them. Default: the federation's
            validation split, or its training data where it has none. For raw gradients: only the range of the inputs.
        at_round: The round to attack, counted from 0.
        step: The local step that `type2` observes, counted from 0.
        steps: How many local steps the update has that `type1` and `type0` observe. The paper attacks the first: 1.
        releases: How often the same release is observed, each time with fresh noise. The adversary averages.
        shadows: For `lira`: how many federations are trained, each without a random half of the records. Default: 64.
        chunk: How many victims are searched for at once; for `lira`, how many clients are trained at once. Default: as many
            as memory allows, up to a limit. Another number changes results by rounding.
        criteria: When a reconstruction counts as exact, recognisable or identified.
        device: `cpu`, `cuda`, `cuda:1`, and so on.
        loss: The loss that the network is trained with. Default: that of the run, or of the data's task; for raw gradients,
            the cross-entropy.
        seed: Fixes the randomness of the attack. Default: the plan's seed.
        progress: Called with the work done so far and in all.

    Returns:
        `Leaks` for a reconstruction, `Presence` for `matched-filter` (also called `presence`), `LayerLeaks` for
        `per-layer`, `Membership` for `membership`, and `Lira` for `lira`. `Inferred` for `labels` and `tokens`, and where
        inputs cannot be reconstructed. `summary()` has all figures of each.

    Raises:
        PlanError: An argument is not allowed, or does not belong to this target.
        ModelError: The attack does not apply to this network, or the network cannot be attacked.
        DataError: The given examples or gradients do not fit the network, or each other.

    Examples:
        Attack the gradient of a batch of two, as it would leave your own training loop:

        >>> import fedcdp, torch
        >>> from torch import nn
        >>> data = fedcdp.load("cancer").train
        >>> inputs, labels = data.inputs[:2], data.targets[:2]
        >>> model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))
        >>> nn.functional.cross_entropy(model(inputs), labels).backward()
        >>> gradients = [parameter.grad for parameter in model.parameters()]
        >>> leaks = fedcdp.attack(gradients, model=model, truth=(inputs, labels))
        >>> leaks.success_rate
        1.0

        Attack a plan before anything is trained:

        >>> federation = fedcdp.partition(fedcdp.load("cancer"), clients=10, scheme="iid")
        >>> for method in ("nonprivate", "fed-cdp"):
        ...     plan = fedcdp.Plan(method=method, per_round=10)
        ...     leaks = fedcdp.attack(plan, model=model, federation=federation, leak="type2", victims=10)
        ...     print(method, leaks.success_rate)
        nonprivate 1.0
        fed-cdp 0.0
    """
    name, recipe = _named(attack)
    if leak not in LEAKS:
        raise PlanError(f"leak: {leak!r} is not one of {', '.join(LEAKS)}")
    _whole_numbers(victims=1 if victims is None else victims, chunk=1 if chunk is None else chunk)
    _whole_numbers(examples=examples, step=step, steps=steps, releases=releases)
    if victims is not None and victims < 1:
        raise PlanError(f"victims: {victims} is not allowed; it must be at least 1")
    if chunk is not None and chunk < 1:
        raise PlanError(f"chunk: {chunk} is not allowed; it must be at least 1")
    device = usable_device(device)
    loss = target.loss if loss is None and isinstance(target, Run) else loss
    if name == "lira":
        _leave_out("gradients or updates", at_round=at_round is not None)
        return _lira(
            target, model, federation, 64 if shadows is None else shadows, victims, device, loss, seed, chunk, progress
        )
    _leave_out("membership by lira", shadows=shadows is not None)
    if name == "membership":
        return _membership(target, public, at_round, seed, device, loss)
    with products(tf32=isinstance(target, Run) and target.tf32):
        if isinstance(target, Run | Plan):
            _leave_out("raw gradients", truth=truth is not None, input_shape=input_shape is not None, examples=examples != 1)
            scene = simulated(target, model, federation, leak, at_round, step, steps, device, loss, public)
        else:
            _leave_out(
                "a run or a plan", federation=federation is not None, at_round=at_round is not None, step=step != 0,
                steps=steps != 1, releases=releases != 1,
            )  # fmt: skip
            scene = given_gradients(target, model, truth, input_shape, examples, device, loss, public)
        attempts = Attempts(
            scene, Look(leak, step, releases), victims, criteria.within(*scene.value_range),
            scene.plan.seed if seed is None else seed, chunk, throughout=step == 0 and steps == 1 and releases == 1,
        )  # fmt: skip
        if name == "best" and scene.not_real:
            return infer_all(attempts, lambda: _membership(target, public, None, seed, device, loss), progress)
        return strongest(attempts, progress) if name == "best" else attempts.run(name, recipe, progress)


def _named(attack: str | Recipe | TabLeak | None) -> tuple[str, Recipe | TabLeak | None]:
    if attack is None:
        return "best", None
    if isinstance(attack, Recipe):
        return "recipe", attack
    if isinstance(attack, TabLeak):
        return "tableak" if attack.exact else "tableak-search", attack
    if attack not in ATTACKS:
        raise PlanError(f"attack: {attack!r} is not one of {', '.join(ATTACKS)}")
    return "matched-filter" if attack == "presence" else attack, None


def _whole_numbers(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, Integral):
            raise PlanError(f"{name}: {value!r} is not a whole number")


def _leave_out(where: str, **given: bool) -> None:
    if names := [name for name, is_given in given.items() if is_given]:
        raise PlanError(f"{', '.join(names)}: only for an attack on {where}; leave it out")


def _membership(
    target: object,
    public: Dataset | None,
    at_round: int | None,
    seed: int | None,
    device: torch.device,
    loss: Loss | None,
) -> Membership:
    if not isinstance(target, Run):
        raise PlanError("attack: membership needs a trained model; give a run")
    _leave_out("gradients or updates", at_round=at_round is not None)
    others = public or target.federation.validation
    if others is None:
        raise DataError("public: the federation has no validation split to compare members with; give public examples")
    seed = target.plan.seed if seed is None else seed
    return infer_membership(target.model, target.federation.train, others, seed=seed, device=device, loss=loss)


def _lira(
    target: object,
    model: nn.Module | None,
    federation: Federation | None,
    shadows: int,
    victims: int | None,
    device: torch.device,
    loss: Loss | None,
    seed: int | None,
    chunk: int | None,
    progress: Progress | None,
) -> Lira:
    _whole_numbers(shadows=shadows)
    if isinstance(target, Run):
        if federation is not None:
            raise PlanError("federation: a run has its own federation; leave it out")
        federation = target.federation
    elif not isinstance(target, Plan):
        raise PlanError("attack: lira trains federations of its own; give a plan or a run")
    if model is None or federation is None:
        raise PlanError("model, federation: lira trains the plan anew; it needs the untrained network and the federation")
    plan = target.plan if isinstance(target, Run) else target
    return lira(
        plan,
        model,
        federation,
        shadows=shadows,
        candidates=victims,
        device=device,
        loss=loss,
        seed=seed,
        chunk=chunk,
        progress=progress,
    )
