"""The recommended recipe: what a command trains with when nobody chose a plan.

The paper's defaults (σ = 6, 100 local steps on 5 records) teach a model nothing on a small federation. So where no preset,
configuration file, noise, local steps or batch size is given, Fed-CDP takes the mechanism of the recommended presets:

- every client in every round, with one local step on all its records, each gradient clipped and noised (`example`), and
  clients weighted by their records where these differ;
- one linear layer on fixed features, unless another network is given (`models.networks.resolve`);
- a small flat clip bound, and a moving average of the model.

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
_ROUNDS = 40
_CLIP = 0.1
_EMA, _EMA_OF_FEW = 0.8, 0.5
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
    """How far a round moves all weights at most, noise aside: the learning rate times the clip bound. Where there are fewer
    rounds than usual, less: the first steps of a training are too long, and the last ones must make up for it."""


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
    clients = (population(name).get("data", {}) | below | data).get("clients", 1)
    # An activation is for a network that has one: the paper's.
    network = {} if "activation" in model else {"network": "fixed-features"}
    return {"data": below, "model": network, "plan": plan_settings(clients, plan.get("rounds", _ROUNDS))}


def on_fixed_features(network: str) -> bool:
    """Whether a network trains one linear layer on fixed features of norm 1, perhaps on several kinds of them (`a+b`)."""
    return set(network.split("+")) <= set(FIXED_FEATURES)


def plan_settings(clients: int, rounds: int | None = None) -> dict[str, Any]:
    """The recipe's settings of a plan for so many clients, without batch size, noise and learning rate."""
    rounds = _ROUNDS if rounds is None else rounds
    few = isinstance(rounds, int) and rounds < _FEW
    return {
        "method": "fed-cdp",
        "rounds": rounds,
        "per_round": clients,
        "local_steps": 1,
        "record_sampling": "partition",
        "noise": "example",
        "clip": _CLIP,
        "clip_mode": "flat",
        "ema": _EMA_OF_FEW if few else _EMA,
    }


def for_sizes(plan: Plan, sizes: Sequence[int], given: Container[str] = ()) -> Plan:
    """The plan for clients that hold `sizes` records: a step takes all records of the largest.

    Where sizes differ, clients weigh by their records, and the noise of a small client lies on the slots that it can fill.
    Noise of equal size at every client and weights by records add up to one step of the whole federation, and no client's
    size enters its ε. Fields in `given` were chosen by the user and stay.
    """
    chosen: dict[str, Any] = {"batch_size": max(sizes)}
    if min(sizes) < max(sizes):
        chosen |= {name: value for name, value in _UNEQUAL.items() if name not in given}
    return plan.but(**chosen)


def learning_rate(plan: Plan, sizes: Sequence[int], on_fixed_features: bool, task: str = "classification") -> float:
    """The learning rate for a plan whose noise is calibrated, over clients that hold `sizes` records; three digits."""
    pace = _ON_VALUES if task == "regression" else _ON_FEATURES if on_fixed_features else _ON_OTHERS
    # A client divides the noise on its sum by its number of records, and weights the result. The server divides by the
    # number of clients.
    mean = plan.mean_records or sum(sizes) / len(sizes)
    shares = [(size / mean if plan.weighting == "records" else 1.0) / min(size, plan.batch_size) for size in sizes]
    per_record = math.sqrt(sum(share**2 for share in shares) / len(sizes))
    noise = plan.noise_multiplier * plan.noise_on_sum * per_record * math.sqrt(plan.rounds / plan.per_round)
    step = min(pace.drift / noise, pace.step * min(1.0, plan.rounds / _ROUNDS))
    return float(f"{step / plan.clip.start:.3g}")


def describe_recipe(plan: Plan, sizes: Sequence[int], epsilon: float, adversary: str, unit: str) -> str:
    """One line that says what is used."""
    against = "the server" if (adversary, unit) == ("server", "record") else f"{adversary} ({unit})"
    records = f"all {max(sizes)} records"
    if min(sizes) < max(sizes):
        weights = ", clients weighted by records" if plan.weighting == "records" else ""
        records = f"all {min(sizes)} to {max(sizes)} records of a client{weights}"
    return (
        f"No plan given: using the recommended recipe for ε = {epsilon:g} against {against} (1 local step on {records}, "
        f"{plan.clip_mode} clip {plan.clip}, noise multiplier {plan.noise_multiplier:.4g}, "
        f"learning rate {plan.learning_rate}, {plan.rounds} rounds)"
    )


def _given(layers: list[Settings], section: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for layer in layers:
        given |= layer.get(section, {})
    return given
