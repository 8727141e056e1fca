"""The recommended recipe: what a command trains with when nobody chose a plan.

The paper's defaults (σ = 6, 100 local steps on 5 records) teach a model nothing on a small federation. So where no preset,
configuration file, noise, local steps or batch size is given, Fed-CDP takes the mechanism of the recommended presets:

- every client in every round, with one local step on all its records, each gradient clipped and noised (`example`), and
  clients weighted by their records where these differ;
- one linear layer on fixed features, unless another network is given (`models.networks.resolve`);
- a small flat clip bound, and a moving average of the model.

It serves both trust models. By default the server reads each update. With `secure_aggregation` it reads only the sum of a
round: the noise is then on the sum (`sum`), one client may collude, the server has momentum, and there are more rounds.

The ordinary accountant calibrates the noise to a target ε (`training.planning`); no ε is computed here. The learning rate
follows from the noise, so one rule serves 150 records and 50,000: the noise of all rounds together moves a weight by at most
`Pace.drift`, and no round moves the weights further than `Pace.step`, noise aside.

What is given wins over every setting here. `docs/recommended.md` says what the recipe reaches.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedcdp.config.experiment import DEFAULT_DATASET
from fedcdp.config.plan import Plan
from fedcdp.config.presets import FEDERATIONS, Settings, WholeSettings, population

TARGET_EPSILON = 8.0
"""The ε that the noise is calibrated to where none is given."""
FIXED_FEATURES = (
    "best-features",
    "fixed-features",
    "linear",
    "mirrored-gradients",
    "oriented-gradients",
    "periodic",
    "random-process",
    "scattering",
)
"""Networks that train one linear layer on fixed features of norm 1."""

_CHOOSES_A_PLAN = {"noise", "noise_multiplier", "local_steps", "batch_size", "slots"}
_ROUNDS, _ROUNDS_OF_SUMS = 40, 100
_CLIP = 0.1
_EMA, _EMA_OF_SUMS, _EMA_OF_FEW = 0.8, 0.9, 0.5
_MOMENTUM = 0.9
SCALING_SHARE = 0.1
"""The share of the budget that private scaling takes where nobody chose its noise: of the sum of 1/z² over all releases."""
_UNEQUAL = {"weighting": "records", "noise_slots": "held"}
_FEW = 20  # rounds: over fewer, a long moving average would still hold much of the untrained model


@dataclass(frozen=True)
class Pace:
    """How far training may move."""

    drift: float
    """How far the noise of all rounds together moves a weight: its standard deviation."""
    step: float
    """How far a round moves all weights at most, noise aside: the learning rate times the clip bound, and times 1/(1 − β)
    with momentum. Where there are fewer rounds than usual, less: the first steps of a training are too long, and the last
    ones must make up for it. With momentum the first steps are short anyway."""


# Found on the embedded digits and on tables of 150 to 36,000 records. Accuracy hardly changes within a factor of two.
_ON_FEATURES = Pace(drift=2.0, step=80.0)  # the noise of a logit has the deviation of a weight's: features have norm 1
_ON_OTHERS = Pace(drift=0.2, step=4.0)
_ON_VALUES = Pace(drift=0.2, step=0.5)  # regression: outputs must settle at targets between −1 and 1, not grow like logits


def recipe_applies(layers: Iterable[Settings]) -> bool:
    """Whether the settings leave the plan open.

    They do unless one of them is a preset or a configuration file, names another method than fed-cdp, or gives noise, noise
    multiplier, local steps, batch size or slots.
    """
    layers = list(layers)
    plan = _given(layers, "plan")
    chosen = any(isinstance(layer, WholeSettings) for layer in layers) or bool(plan.keys() & _CHOOSES_A_PLAN)
    return not chosen and plan.get("method", "fed-cdp") == "fed-cdp"


def recipe_settings(layers: Iterable[Settings]) -> Settings:
    """The layer to put below the given ones. Batch size, noise and learning rate are still missing: they need the data.

    A dataset is dealt out disjointly: a record that lies at several clients would cost its person more than the target.
    """
    layers = list(layers)
    data, model, plan = (_given(layers, section) for section in ("data", "model", "plan"))
    dataset = None if data.get("file") is not None else data.get("dataset", DEFAULT_DATASET)
    name = dataset if isinstance(dataset, str) else None
    below: dict[str, Any] = {"records": None}
    if (federated := FEDERATIONS.get(name or "")) is not None:
        below |= {"scaling": "public", "partition": federated.partition, "clients": federated.clients}
    clients: int = (population(name).get("data", {}) | below | data).get("clients", 1)
    # An activation is for a network that has one: the paper's.
    network = {} if "activation" in model else {"network": "best-features"}
    sums = plan.get("secure_aggregation") is True
    settings = plan_settings(plan.get("per_round", clients), plan.get("rounds"), sums=sums)
    return {"data": below, "model": network, "plan": settings}


def on_fixed_features(network: str) -> bool:
    """Whether a network trains one linear layer on fixed features of norm 1, perhaps on several kinds of them (`a+b`)."""
    return set(network.split("+")) <= set(FIXED_FEATURES)


def plan_settings(per_round: int, rounds: int | None = None, *, sums: bool = False) -> dict[str, Any]:
    """The recipe's settings of a plan for so many clients in a round, without batch size, noise and learning rate.

    With `sums`, the server reads only the sum of a round. One client may then collude, for example one who reads the model
    and knows its own noise. Of two clients neither may: a single honest client gains nothing from a sum.
    """
    if rounds is None:
        rounds = _ROUNDS_OF_SUMS if sums else _ROUNDS
    few = isinstance(rounds, int) and rounds < _FEW
    settings = {
        "method": "fed-cdp",
        "rounds": rounds,
        "per_round": per_round,
        "local_steps": 1,
        "record_sampling": "partition",
        "noise": "example",
        "clip": _CLIP,
        "clip_mode": "flat",
        "ema": _EMA_OF_FEW if few else _EMA_OF_SUMS if sums else _EMA,
    }
    if sums:
        settings |= {
            "noise": "sum",
            "secure_aggregation": True,
            "colluders": int(isinstance(per_round, int) and per_round > 2),
            "server_optimizer": "momentum",
            "server_momentum": _MOMENTUM,
        }
    return settings


def for_sizes(plan: Plan, sizes: Sequence[int], given: Container[str] = ()) -> Plan:
    """The plan for clients that hold `sizes` records: a step takes all records of the largest.

    Where sizes differ, clients weigh by their records, and the noise of a small client lies on the slots that it can fill.
    Noise of equal size at every client and weights by records add up to one step of the whole federation, and no client's
    size enters its ε. With noise on the sum, that holds as it is. Fields in `given` were chosen by the user and stay.
    """
    chosen: dict[str, Any] = {"batch_size": max(sizes)}
    if min(sizes) < max(sizes) and not plan.sums:
        chosen |= {name: value for name, value in _UNEQUAL.items() if name not in given}
    return plan.but(**chosen)


def learning_rate(plan: Plan, sizes: Sequence[int], on_fixed_features: bool, task: str = "classification") -> float:
    """The learning rate for a plan whose noise is calibrated, over clients that hold `sizes` records; three digits."""
    pace = _ON_VALUES if task == "regression" else _ON_FEATURES if on_fixed_features else _ON_OTHERS
    used = [min(size, plan.batch_size) for size in sizes]
    if plan.sums:  # the server divides the sum by the number of records
        per_record = 1 / (plan.mean_records or sum(used) / len(used))
    else:  # a client divides the noise on its sum by its number of records, and weights the result
        mean = plan.mean_records or sum(sizes) / len(sizes)
        weights = [size / mean if plan.weighting == "records" else 1.0 for size in sizes]
        shares = [weight / held for weight, held in zip(weights, used, strict=True)]
        per_record = math.sqrt(sum(share**2 for share in shares) / len(sizes))
    # The server divides by the number of clients.
    noise = plan.noise_multiplier * plan.noise_on_sum * per_record / math.sqrt(plan.per_round) * _accumulated(plan)
    kept = plan.server_momentum if plan.server_optimizer == "momentum" else 0.0
    step = min(pace.drift / noise, pace.step * (1 - kept) * (1.0 if kept else min(1.0, plan.rounds / _ROUNDS)))
    return float(f"{step / plan.clip.start:.3g}")


def _accumulated(plan: Plan) -> float:
    """√Σ a_t², where a_t is how far a mean update of 1 in round t has moved the model at the end.

    Without momentum a_t = 1. With momentum β, a_t = 1 + β + … + β^(T−t).
    """
    if plan.server_optimizer != "momentum":
        return math.sqrt(plan.rounds)
    kept, rounds = plan.server_momentum, plan.rounds
    first, second = (kept**power * (1 - kept ** (power * rounds)) / (1 - kept**power) for power in (1, 2))
    return math.sqrt(rounds - 2 * first + second) / (1 - kept)


def describe_recipe(plan: Plan, sizes: Sequence[int], epsilon: float, adversary: str, unit: str) -> str:
    """One line that says what is used."""
    against = "the server" if (adversary, unit) == ("server", "record") else f"{adversary} ({unit})"
    records = f"all {max(sizes)} records"
    if min(sizes) < max(sizes):
        weights = ", clients weighted by records" if plan.weighting == "records" else ""
        records = f"all {min(sizes)} to {max(sizes)} records of a client{weights}"
    noise, rate = f"noise multiplier {plan.noise_multiplier:.4g}", f"learning rate {plan.learning_rate}"
    if plan.sums:
        colluders = f"at most {plan.colluders} colluder{'s' * (plan.colluders > 1)}" if plan.colluders else "no colluders"
        noise += f" on the sum of all clients, {colluders}"
        rate += f", server momentum {plan.server_momentum:g}" if plan.server_optimizer == "momentum" else ""
    return (
        f"No plan given: using the recommended recipe for ε = {epsilon:g} against {against} (1 local step on {records}, "
        f"{plan.clip_mode} clip {plan.clip}, {noise}, {rate}, {plan.rounds} rounds)"
    )


def _given(layers: list[Settings], section: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for layer in layers:
        given |= layer.get(section, {})
    return given
