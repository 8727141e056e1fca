"""What a node's folder says of its client: which data it has, and what it grants to whom.

Both files are the node owner's to change. As written here they let the deployment's own plan run to its end, and no more.
"""

from __future__ import annotations

import json
import math

from fedcdp.config.experiment import Experiment
from fedcdp.errors import PlanError
from fedcdp.training.prepared import population_of


def node_text(experiment: Experiment, number: int) -> str:
    """`node.toml`: the node's configuration for Flower. Client k of the simulator is node k + 1 here."""
    data, plan = experiment.data, experiment.plan
    lines = [
        "# This node's own configuration; paths are relative to this folder. It is never sent to the server.",
        'policy = "policy.toml"',
        'state-dir = "state"',
        "",
        "# The records: your own,",
        '#   data = "records.npz"                          (x, y; or a .csv), or',
        '#   data-function = "package.module:function"     (called with the context, returns inputs and labels),',
    ]
    if data.file is not None:
        return "\n".join([*lines, 'data = "records.npz"', ""])
    settings: dict[str, str | int | float | None] = {
        "dataset": data.dataset,
        "partition-id": number - 1,
        "num-partitions": data.clients,
        "partition": data.partition,
        "records": data.records,
        "classes-per-client": data.classes_per_client,
        "alpha": data.alpha,
        "split-seed": data.split_seed,
        "scaling": None if data.scaling == "training" else data.scaling,
        "partition-seed": plan.seed,
    }
    lines += ["# or, for tests and demonstrations, one part of a benchmark:"]
    return "\n".join([*lines, *(f"{key} = {_quoted(value)}" for key, value in settings.items() if value is not None), ""])


def policy_text(experiment: Experiment, epsilon: float | None) -> str:
    """`policy.toml`: what the client grants; without an `epsilon`, what the plan costs it in all its rounds."""
    from fedcdp.deploy.protocol.policy import effective_noise

    plan, run = experiment.plan, experiment.run
    granted = needed_epsilon(experiment) if epsilon is None else epsilon
    limit = "inf" if granted == math.inf else f"{granted:g}"
    lines = [
        "# What this client grants to any server, whatever that asks for. Its owner decides; the server cannot change it.",
        f"epsilon = {limit}",
        f"delta = {plan.delta:g}",
        f'adversary = "{run.adversary}"',
        f'unit = "{run.unit}"',
        f'methods = ["{plan.method}"]',
        f"smallest_noise_multiplier = {_every_digit(effective_noise(plan) if plan.private else 0.0)}",
        "smallest_cohort = 1",
        f"allow_reproducible = {str(not plan.secure_noise).lower()}",
        f"allow_custom_network = {str(':' in experiment.model.network).lower()}",
    ]
    if granted == math.inf:
        lines.insert(1, "# inf: no limit, and nothing is promised. This plan has no finite ε against this adversary.")
    return "\n".join(lines) + "\n"


def needed_epsilon(experiment: Experiment) -> float:
    """The ε by a client's own account for every round of the plan and some repeated ones, rounded up; ∞ if there is none."""
    from fedcdp.deploy.protocol.grant import wanted_participations

    cost = epsilon_of(experiment, wanted_participations(experiment.plan))
    return cost if cost in (0.0, math.inf) else _rounded_up(cost)


def epsilon_of(experiment: Experiment, releases: int) -> float:
    """The ε by a client's own account (`flower.budget`) for so many releases of its first task."""
    from fedcdp.deploy.protocol.grant import Grant, Reservation
    from fedcdp.deploy.protocol.task import Task

    plan, run = experiment.plan, experiment.run
    if not plan.private:
        return math.inf
    population = population_of(experiment)
    task = Task(
        run="0" * 32,
        shape=(1,),
        classes=2,
        network="mlp",
        activation=None,
        tensors={f"{layer}.weight": (1,) for layer in range(population.layers)},  # only how many are clipped apart counts
        constants="",
        plan=plan,
        smallest_cohort=1,
        reproducible=not plan.secure_noise,
    )
    try:
        return Grant(1.0, plan.delta, run.adversary, run.unit).cost(Reservation(task, population.records, 1, releases))
    except PlanError as error:
        raise PlanError(f"{error}; choose another --adversary or --unit for the nodes' policies") from None


def _rounded_up(value: float) -> float:
    """To two digits, so that a reader sees a number that was chosen, not one that was computed."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")


def _every_digit(value: float) -> str:
    """A number that is compared with another one: rounded up, it would refuse the plan that it was made for."""
    return repr(value).removesuffix(".0")


def _quoted(value: str | int | float) -> str:
    return json.dumps(value, ensure_ascii=False)
