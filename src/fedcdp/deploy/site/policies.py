"""What a node's folder says of its client: which data it has, and what it grants to whom.

Both files are the node owner's to change. As written here they let the deployment's own plan run to its end, and no more.
"""

from __future__ import annotations

import math

from fedcdp.config.experiment import Experiment
from fedcdp.deploy.site.site_templates import render
from fedcdp.errors import PlanError
from fedcdp.training.prepared import population_of


def node_text(experiment: Experiment, number: int) -> str:
    """`node.toml`: the node's configuration for Flower. Client k of the simulator is node k + 1 here."""
    data, plan = experiment.data, experiment.plan
    part: dict[str, str | int | float | None] = {
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
    given = {name: value for name, value in part.items() if value is not None}
    return render("node.toml", own_records=data.file is not None, part=given)


def policy_text(experiment: Experiment, epsilon: float | None) -> str:
    """`policy.toml`: what the client grants; without an `epsilon`, what the plan costs it in all its rounds."""
    from fedcdp.deploy.protocol.policy import effective_noise

    plan, run = experiment.plan, experiment.run
    granted = needed_epsilon(experiment) if epsilon is None else epsilon
    return render(
        "policy.toml",
        no_limit=granted == math.inf,
        epsilon=_shortest(granted),
        delta=_shortest(plan.delta),
        adversary=run.adversary,
        unit=run.unit,
        method=plan.method,
        smallest_noise_multiplier=_shortest(effective_noise(plan) if plan.private else 0.0),
        allow_reproducible=not plan.secure_noise,
        allow_custom_network=":" in experiment.model.network,
    )


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


def _shortest(value: float) -> int | float:
    """The same number without a needless `.0`. Rounded, it might grant more, or refuse the plan that it was made for."""
    return int(value) if float(value).is_integer() else value
