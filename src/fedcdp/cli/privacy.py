"""The commands about privacy: the ε of a plan, the noise for a target ε, and a lower bound on ε from an attack."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedcdp.accounting.population import Population
from fedcdp.accounting.statement import format_epsilon
from fedcdp.cli import terminal
from fedcdp.cli.options import takes_settings
from fedcdp.cli.remarks import describe_setting, remarks
from fedcdp.config.experiment import Experiment
from fedcdp.config.presets import Settings
from fedcdp.errors import DefectError, PlanError

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Privacy
    from fedcdp.audit import Audit, OneRunAudit
    from fedcdp.training.prepared import Prepared


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Mode = Annotated[
    str, typer.Option("--mode", help="How ε is computed: tight, rdp, or paper (not a guarantee).", show_default=True)
]
Layers = Annotated[
    int | None, typer.Option("--layers", help="Layers that are clipped separately, M. Default: the network's.", hidden=True)
]
TargetEpsilon = Annotated[
    float | None,
    typer.Option("--target-epsilon", help="Choose the noise for this ε (against --adversary). Without a plan: 8."),
]
Copies = Annotated[
    int | None,
    typer.Option("--copies", help="Clients that hold a copy of a record, R. Default: from the partition.", hidden=True),
]


@takes_settings
def account(
    *,
    given: list[Settings],
    run: Annotated[
        Path | None, typer.Option("--run", help="Run directory: compute the ε spent so far, from its ledger.")
    ] = None,
    target_epsilon: TargetEpsilon = None,
    mode: Mode = "tight",
    layers: Layers = None,
    copies: Copies = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also show the composition methods of the paper's scripts.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compute ε against every adversary, for a plan or for a run.

    A plan is accounted before any training, from its settings. A run (--run) is accounted from its ledger.
    """
    from fedcdp.accounting import paper
    from fedcdp.accounting.statement import state
    from fedcdp.training.ledger_check import spent
    from fedcdp.training.planning import plan_experiment
    from fedcdp.training.prepared import population_of

    if run is not None:
        if any(given) or target_epsilon is not None:
            raise PlanError("--run: the run has its own settings; leave out all others")
        plan, privacy = spent(run, mode)  # type: ignore[arg-type]
    else:

        def described(experiment: Experiment) -> Population:
            return population_of(experiment, copies=copies, layers=layers)

        planned = plan_experiment(given, described, target_epsilon=target_epsilon, mode=mode)
        experiment, plan = planned.experiment, planned.experiment.plan
        privacy = state(plan, described(experiment), mode=mode)  # type: ignore[arg-type]
    classical = paper.classical_epsilons(plan) | {"tight, the same steps": paper.tight_epsilon(plan)} if compare else {}
    if run is None:
        terminal.say_recipe(planned)
        terminal.notes(remarks(experiment, given, calibrated=planned.epsilon is not None))
    if as_json:
        typer.echo(json.dumps(privacy.as_json() | ({"compare": classical} if compare else {})))
        return
    if run is None:
        terminal.setting(describe_setting(experiment))
    terminal.privacy_table(privacy, to_stdout=True)
    if compare:
        table = Table(title=f"The paper's rate of 0.01 over {plan.rounds * plan.local_steps} steps, by")
        table.add_column("method")
        table.add_column("ε", justify="right")
        for name, epsilon in classical.items():
            table.add_row(name, format_epsilon(epsilon))
        terminal.stdout.print(table)
        terminal.stdout.print(
            "None of these is a guarantee for the mechanism. The first three hide a total δ of 1e-3 or more."
        )


@takes_settings
def calibrate(
    *,
    given: list[Settings],
    target_epsilon: Annotated[float, typer.Option("--target-epsilon", help="Upper limit for ε.")],
    mode: Mode = "tight",
    layers: Layers = None,
    copies: Copies = None,
    as_json: AsJson = False,
) -> None:
    """Find the noise multiplier for a target ε.

    The target is the ε against one adversary (--adversary), for one unit (--unit).
    """
    from fedcdp.training.planning import plan_experiment
    from fedcdp.training.prepared import population_of

    planned = plan_experiment(
        given,
        lambda described: population_of(described, copies=copies, layers=layers),
        target_epsilon=target_epsilon,
        mode=mode,
    )
    terminal.say_recipe(planned)
    experiment, reached = planned.experiment, planned.epsilon
    assert reached is not None
    plan, adversary, unit = experiment.plan, experiment.run.adversary, experiment.run.unit
    terminal.notes(remarks(experiment, given, calibrated=True))
    if as_json:
        answer = {"noise_multiplier": plan.noise_multiplier, "slots": plan.slots, "epsilon": reached, "delta": plan.delta,
                  "adversary": adversary, "unit": unit, "mode": mode}  # fmt: skip
        typer.echo(json.dumps(answer))
        return
    terminal.stdout.print(
        f"--noise-multiplier {plan.noise_multiplier:.6g} (with {plan.slots} slots) gives ε = {format_epsilon(reached)} "
        f"at δ = {plan.delta:g} against {adversary}, per {unit}, before it is known who takes part"
    )
    if planned.recipe is not None:  # the option would replace the recipe, and with it the plan that ε is for
        terminal.stdout.print(f"To use the recipe, give --target-epsilon {target_epsilon:g} instead of --noise-multiplier")


@takes_settings
def audit(
    *,
    given: list[Settings],
    target_epsilon: TargetEpsilon = None,
    one_run: Annotated[
        bool, typer.Option("--one-run", help="Train the plan once with many canaries, and guess which were included.")
    ] = False,
    canaries: Annotated[
        int, typer.Option("--canaries", help="With --one-run: canaries, each included with probability 1/2.")
    ] = 500,
    worst_case: Annotated[
        bool,
        typer.Option(
            "--worst-case",
            help="With --one-run: canaries with worst-case gradients in a network made for them. Default: records of the "
            "plan's own data with wrong labels.",
            hidden=True,
        ),
    ] = False,
    confidence: Annotated[
        float, typer.Option("--confidence", help="With --one-run: how sure each lower bound is.", hidden=True)
    ] = 0.95,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", envvar="FEDCDP_DATA", help="With --one-run: directory of dataset files.", hidden=True),
    ] = None,
    participations: Annotated[int, typer.Option("--participations", help="Number of rounds the client takes part in.")] = 1,
    trials: Annotated[
        int | None, typer.Option("--trials", help="Trials with and without the canary. Default: about 20 seconds' worth.")
    ] = None,
    layers: Annotated[int, typer.Option("--layers", help="Layers of the canary network, M.", hidden=True)] = 3,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
) -> None:
    """Measure a lower bound on ε by attacking the mechanism.

    The attack runs the mechanism's own code on a worst-case canary, many times. The guaranteed ε for the same number of
    participations is printed below it. With --one-run, the plan is trained once on its own data with many canaries, and each
    adversary gets a lower bound. A lower bound above the guarantee is a defect.
    """
    from fedcdp.accounting.statement import state
    from fedcdp.audit import audit as attack
    from fedcdp.training.planning import plan_experiment
    from fedcdp.training.prepared import population_of

    planned = plan_experiment(
        given,
        lambda described: population_of(described, layers=layers if described.plan.clip_mode == "layer" else None),
        target_epsilon=target_epsilon,
    )
    experiment, plan = planned.experiment, planned.experiment.plan
    unit = "client" if plan.method == "fed-sdp" and experiment.run.adversary != "example" else experiment.run.unit
    records = experiment.data.records or plan.local_steps * plan.batch_size

    def announce() -> None:
        terminal.say_recipe(planned)
        terminal.notes(remarks(experiment, given, calibrated=planned.epsilon is not None))

    if one_run:
        if trials is not None or participations != 1:
            raise PlanError("--one-run: it trains the plan's own rounds once; leave out --trials and --participations")
        from fedcdp.training.prepared import prepare_experiment

        prepared = None if worst_case else prepare_experiment(experiment, data_dir, quiet=quiet)
        with terminal.steps("audit", quiet, announce) as progress:
            _one_run(
                experiment, prepared, given, canaries=canaries, confidence=confidence, layers=layers, as_json=as_json,
                progress=progress,
            )  # fmt: skip
        return
    with terminal.steps("audit", quiet, announce) as progress:
        found = attack(
            plan, experiment.run.adversary, unit=unit, layers=layers, records=records,
            participations=participations, trials=trials, seed=plan.seed, progress=progress,
        )  # fmt: skip
    groups = layers if plan.clip_mode == "layer" else 1
    population = Population(max(experiment.data.clients, plan.per_round), records, 1, groups)
    privacy = state(plan, population, rounds=participations)
    guaranteed = privacy.row(found.adversary, found.unit).epsilon_worst if _has_row(privacy, found) else None
    if as_json:
        answer = {name: _for_json(value) for name, value in vars(found).items()} | {
            "epsilon_guaranteed": _for_json(guaranteed)
        }
        typer.echo(json.dumps(answer))
        return
    seen = (
        "" if found.epsilon_gaussian is None else f"; if the trade-off is Gaussian, {format_epsilon(found.epsilon_gaussian)}"
    )
    terminal.stdout.print(
        f"{plan.method}, {found.adversary}, {found.unit}, {found.exposures} exposures, {found.trials} trials in each world: "
        f"at δ = {found.delta:g} ε is at least {format_epsilon(found.epsilon_lower)} (99.9 % sure{seen})"
    )
    if guaranteed is not None:
        terminal.stdout.print(f"guaranteed: at most {format_epsilon(guaranteed)}")
        if found.epsilon_lower > guaranteed:
            shown, promised = format_epsilon(found.epsilon_lower), format_epsilon(guaranteed)
            raise DefectError(f"the audit shows ε ≥ {shown}, above the guarantee of {promised}: this is a defect")


def _one_run(
    experiment: Experiment,
    prepared: Prepared | None,
    given: list[Settings],
    *,
    canaries: int,
    confidence: float,
    layers: int,
    as_json: bool,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Audit one training of the plan, and print every adversary's bound beside the guarantee."""
    from fedcdp.accounting.statement import state
    from fedcdp.audit import ADVERSARIES, audit_one_run

    plan, clients = experiment.plan, experiment.data.clients
    if prepared is None:
        population = Population(clients, max(1, canaries // clients), 1, layers if plan.clip_mode == "layer" else 1)
    else:
        population = prepared.population
    named = any("adversary" in layer.get("run", {}) for layer in given)
    found = audit_one_run(
        plan, [experiment.run.adversary] if named else ADVERSARIES,
        model=None if prepared is None else prepared.network, federation=None if prepared is None else prepared.federation,
        canaries=canaries, clients=clients, layers=layers, confidence=confidence, seed=plan.seed,
        device=experiment.run.device, progress=progress,
    )  # fmt: skip
    privacy = state(plan, population)
    guaranteed = [privacy.row(each.adversary).epsilon if _has_row(privacy, each) else None for each in found]
    if as_json:
        rows = [vars(each) | {"epsilon_guaranteed": most} for each, most in zip(found, guaranteed, strict=True)]
        typer.echo(json.dumps({"one_run": True, "rows": [{k: _for_json(v) for k, v in row.items()} for row in rows]}))
    else:
        terminal.figures_table(
            f"{plan.method}, one training, {canaries} {found[0].kind} canaries: ε of a record at δ = {found[0].delta:g}",
            ["adversary", "at least", "guaranteed", "right guesses", "statistic"],
            [
                [
                    each.adversary, format_epsilon(each.epsilon_lower), "none" if most is None else format_epsilon(most),
                    f"{each.correct} of {each.guesses}", each.statistic,
                ]
                for each, most in zip(found, guaranteed, strict=True)
            ],
        )  # fmt: skip
        terminal.stdout.print(f"Each lower bound is {100 * confidence:g} % sure.")
    for each, most in zip(found, guaranteed, strict=True):
        if most is not None and each.epsilon_lower > most:
            shown, promised = format_epsilon(each.epsilon_lower), format_epsilon(most)
            raise DefectError(
                f"the audit shows ε ≥ {shown} against {each.adversary}, above the guarantee of {promised}: this is a "
                f"defect, unless it is the chance of {100 * (1 - confidence):.3g} % that is left"
            )


def _has_row(privacy: Privacy, found: Audit | OneRunAudit) -> bool:
    return any((row.adversary, row.unit, row.relation) == (found.adversary, found.unit, "zero-out") for row in privacy.rows)


def _for_json(value: object) -> object:
    return "inf" if value == math.inf else value
