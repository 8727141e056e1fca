"""The command `attack`: what an adversary reconstructs from a plan or a run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from fedcdp.cli import terminal
from fedcdp.cli.options import DATA, takes_settings
from fedcdp.cli.remarks import describe_setting, remarks
from fedcdp.config.experiment import Experiment, assemble
from fedcdp.config.plan import Plan
from fedcdp.config.presets import Settings
from fedcdp.data.dataset import Splits
from fedcdp.data.partition import Federation
from fedcdp.errors import PlanError, RunError
from fedcdp.models.networks import resolve
from fedcdp.training.prepared import deal_out, load_splits, network_of, with_clients_of_file
from fedcdp.training.python_origin import require_task_loss
from fedcdp.training.ranks import Ranks, ranks_of_job
from fedcdp.training.run import Run
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.saved_run import open_experiment
from fedcdp.training.shared_work import PATIENCE, agree_on_command, help_out, helped

if TYPE_CHECKING:
    from fedcdp.attacks.api import Found
    from fedcdp.attacks.recipe import Recipe
    from fedcdp.attacks.tableak import TabLeak


_OF_MACHINE = ("out", "data_dir", "as_json", "quiet")  # options that ranks need not have in common
_OBSERVED = "Observation"
_HOW = "Attack"
_CONTRACT = (
    "method", "leak", "attack", "victims", "success_rate", "distance_mean", "distance_median", "psnr_mean",
    "iterations_mean",
)  # fmt: skip


@takes_settings
def attack(
    *,
    given: list[Settings],
    leak: Annotated[
        str,
        typer.Option(
            "--leak",
            metavar="type0|type1|type2",
            help="Adversary: the server (type0), or one on the client after (type1) or during (type2) local training.",
            rich_help_panel=_OBSERVED,
        ),
    ] = "type2",
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            help="Attack this run: its trained weights; all its rounds by linear-head and accumulated.",
            rich_help_panel=_OBSERVED,
        ),
    ] = None,
    victims: Annotated[
        int | None,
        typer.Option("--victims", help="Number of victims. Default: up to 100.", rich_help_panel=_OBSERVED),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            help="Network to attack: cpl, which the paper's authors attack (default for images), paper, which they train "
            "(default for tables), or as in --model.",
            rich_help_panel=_OBSERVED,
            hidden=True,
        ),
    ] = None,
    at_round: Annotated[
        int | None,
        typer.Option(
            "--round", help="Train up to this round before the attack. Default: 0.", rich_help_panel=_OBSERVED, hidden=True
        ),
    ] = None,
    step: Annotated[
        int, typer.Option("--step", help="Local step that type2 observes.", rich_help_panel=_OBSERVED, hidden=True)
    ] = 0,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", help="Local steps in the update that type0 and type1 observe.", rich_help_panel=_OBSERVED, hidden=True
        ),
    ] = 1,
    releases: Annotated[
        int,
        typer.Option(
            "--releases",
            help="Times that the same data are observed, each time with fresh noise.",
            rich_help_panel=_OBSERVED,
            hidden=True,
        ),
    ] = 1,
    name: Annotated[
        str,
        typer.Option(
            "--attack",
            help="best tries those that suit the plan until one recovers all. Or cpl, dlg, idlg, "
            "inverting-gradients, clip-aware, batch, unrolled, averaging, class-prior, accumulated (all rounds), "
            "matched-filter (presence), analytic, linear-head, tableak, tableak-search, per-layer, labels, tokens, "
            "membership, lira; active servers: imprint, trap-weights, fishing, frozen-weights, inconsistent-models.",
            rich_help_panel=_HOW,
        ),
    ] = "best",
    shadows: Annotated[
        int | None,
        typer.Option(
            "--shadows",
            help="Shadow federations of --attack lira. Default: 64.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            "--iterations",
            help="Maximum number of iterations, each of up to 20 evaluations; of tableak, of one.",
            rich_help_panel=_HOW,
            hidden=True,
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            "--restarts", help="Starting points per victim; for tableak, its ensemble.", rich_help_panel=_HOW, hidden=True
        ),
    ] = None,
    total_variation: Annotated[
        float | None,
        typer.Option(
            "--total-variation", help="Weight of the smoothness term of the objective.", rich_help_panel=_HOW, hidden=True
        ),
    ] = None,
    seed_image: Annotated[
        str | None,
        typer.Option(
            "--seed-image",
            help="Starting point: pattern, uniform, normal, zeros or posterior.",
            rich_help_panel=_HOW,
            hidden=True,
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            "--labels",
            help="How labels are inferred: gradient, agnostic, negative-sum, counts, posterior, known or joint.",
            rich_help_panel=_HOW,
            hidden=True,
        ),
    ] = None,
    exact_mse: Annotated[
        float,
        typer.Option(
            "--exact-mse",
            help="An MSE below this is a success; for values that span less than 1, relative to their range.",
            rich_help_panel=_HOW,
            hidden=True,
        ),
    ] = 1e-3,
    recognisable_psnr: Annotated[
        float,
        typer.Option(
            "--recognisable-psnr", help="A PSNR of at least this is recognisable.", rich_help_panel=_HOW, hidden=True
        ),
    ] = 15.0,
    candidates: Annotated[
        int,
        typer.Option(
            "--candidates",
            help="A victim is identified if it is the nearest of this many candidates.",
            rich_help_panel=_HOW,
            hidden=True,
        ),
    ] = 1000,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Output directory for figures, arrays and pictures. Default: with --run, RUN/attacks."),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", envvar="FEDCDP_DATA", help="Directory of dataset files.", rich_help_panel=DATA),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress and no table.")] = False,
) -> None:
    """Reconstruct or detect real examples from gradients or updates.

    The attack is on a plan before any training, or on a run (--run). If only the last layer of a network is trained, the
    attack observes all rounds of the training. All observations come from the method's own code.
    """
    options = {name: value for name, value in locals().items() if name not in _OF_MACHINE}
    from fedcdp.attacks import Criteria

    recipe = _recipe(name, iterations, restarts, total_variation, seed_image, labels)
    if shadows is not None and name != "lira":
        raise PlanError("--shadows: only for --attack lira")
    criteria = Criteria(exact_mse=exact_mse, recognisable_psnr=recognisable_psnr, candidates=candidates)
    common: dict[str, Any] = {
        "leak": leak, "attack": recipe or name, "victims": victims, "step": step, "steps": steps, "releases": releases,
        "shadows": shadows, "criteria": criteria, "chunk": _chunk(given),
    }  # fmt: skip
    with ranks_of_job(PATIENCE) as ranks:
        agree_on_command(ranks, options)
        if not ranks.leads:
            help_out(ranks)
            return
        with helped(ranks):
            _require_writable(out if run is None else out or run)
            _attack(
                given, common, name, ranks, run=run, network=network, at_round=at_round, out=out, data_dir=data_dir,
                as_json=as_json, quiet=quiet,
            )  # fmt: skip


def _attack(
    given: list[Settings],
    common: dict[str, Any],
    name: str,
    ranks: Ranks,
    *,
    run: Path | None,
    network: str | None,
    at_round: int | None,
    out: Path | None,
    data_dir: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Attack with the help of the other ranks, show what was found, and write it."""
    from fedcdp.attacks import attack as attack_it

    extra: dict[str, Any] = {}
    if run is not None:
        if network is not None or at_round is not None:
            raise PlanError("--run: the run has its own network and rounds; leave out --network and --round")
        require_task_loss(RunDirectory(run))
        experiment, opened = open_experiment(run, given, data_dir=data_dir, quiet=quiet)
        target: Run | Plan = opened
        data: Splits | Federation = opened.federation
        # These observe or repeat the training, from the untrained network on.
        if name in ("best", "linear-head", "accumulated", "frozen-weights", "lira"):
            extra = {"model": network_of(experiment, data)}
    else:
        experiment = assemble(*with_clients_of_file(given))
        if name != "lira" or network is not None:  # lira trains: by default the network that the plan trains
            experiment = _with_network(experiment, network, given)
        data = splits = load_splits(experiment, data_dir, quiet)
        extra = {"model": network_of(experiment, data), "federation": deal_out(experiment, splits), "at_round": at_round}
        target = experiment.plan

    def announce() -> None:
        if run is None:
            terminal.notes(remarks(experiment, given))
            if not as_json:
                terminal.setting(describe_setting(experiment))

    with terminal.steps("attack", quiet, announce) as progress:
        found = attack_it(target, **common, **extra, device=ranks.device(experiment.run.device), progress=progress)
    summary = _summary(found, name, experiment, data.train.shape)
    if run is not None and out is None:
        out = run / "attacks" / f"{summary['leak']}-{name}"
    if out is not None:
        _save(found, summary, out)
    if as_json:
        typer.echo(json.dumps(summary))
    elif not quiet:
        terminal.leak_table(summary)
        if experiment.plan.private:
            terminal.note(
                "these results come from training data, and no privacy guarantee covers them: store them with those data"
            )
        if out is not None:
            terminal.console.print(f"Figures, arrays and pictures are in {out}", soft_wrap=True)


def _chunk(given: list[Settings]) -> int | None:
    """`--chunk`, if it was given. That of an attacked run is for its training."""
    found = [layer["run"]["chunk"] for layer in given if "chunk" in layer.get("run", {})]
    return found[-1] if found else None


def _recipe(
    name: str,
    iterations: int | None,
    restarts: int | None,
    total_variation: float | None,
    seed_image: str | None,
    labels: str | None,
) -> Recipe | TabLeak | None:
    """The named recipe with the given changes; None if there are none."""
    from fedcdp.attacks import RECIPES, Seed, TabLeak
    from fedcdp.attacks.labels import LabelRule
    from fedcdp.attacks.recipe import SeedKind

    given = {"--iterations": iterations, "--restarts": restarts, "--total-variation": total_variation,
             "--seed-image": seed_image, "--labels": labels}  # fmt: skip
    used = [option for option, value in given.items() if value is not None]
    if not used:
        return None
    if name in ("tableak", "tableak-search") and set(used) <= {"--iterations", "--restarts"}:
        usual = TabLeak(exact=name == "tableak")
        members, steps = usual.members if restarts is None else restarts, usual.steps if iterations is None else iterations
        return replace(usual, members=members, steps=steps)
    if name not in RECIPES:
        raise PlanError(f"{', '.join(used)}: only for --attack {', '.join(RECIPES)}")
    for option, known in (("--seed-image", get_args(SeedKind)), ("--labels", get_args(LabelRule))):
        if given[option] is not None and given[option] not in known:
            raise PlanError(f"{option}: {given[option]!r} is not one of {', '.join(known)}")
    changes: dict[str, Any] = {"iterations": iterations, "restarts": restarts, "labels": labels}
    changes["seed"] = None if seed_image is None else Seed(seed_image)  # type: ignore[arg-type]
    if total_variation is not None:
        changes["objective"] = replace(RECIPES[name].objective, total_variation=total_variation)
    return RECIPES[name].but(**{key: value for key, value in changes.items() if value is not None})


def _with_network(experiment: Experiment, network: str | None, given: list[Settings]) -> Experiment:
    """The network to attack: --network or --model; otherwise, for images, the one that the paper's authors attack."""
    model = experiment.model
    if network == "paper":
        return replace(experiment, model=replace(model, network="auto"))
    if network is not None:
        return replace(experiment, model=replace(model, network=network))
    if any("network" in layer.get("model", {}) for layer in given) or experiment.data.file is not None:
        return experiment
    tables = experiment.data.dataset in ("adult", "cancer")
    return experiment if tables else replace(experiment, model=replace(model, network="cpl"))


def _summary(found: Found, name: str, experiment: Experiment, shape: tuple[int, ...]) -> dict[str, Any]:
    """The result for JSON: the keys of the contract first, None for figures that this attack does not measure."""
    from fedcdp.attacks.leaks import finite
    from fedcdp.attacks.portfolio import trial

    network = resolve(experiment.model.network, shape)
    data = experiment.data.file or experiment.data.dataset
    figures = {"method": experiment.plan.method} | found.summary() | {"dataset": data, "network": network}
    if figures["attack"] == "recipe":
        figures["attack"] = name
    if not figures.get("tried"):
        figures["tried"] = [trial(figures)]
    summary: dict[str, Any] = finite(dict.fromkeys(_CONTRACT) | figures)
    return summary


def _require_writable(out: Path | None) -> None:
    """Refuse an output directory that cannot be written, before the attack."""
    if out is None:
        return
    try:
        nearest = next(each for each in (out, *out.absolute().parents) if each.exists())
    except OSError as error:
        raise RunError(f"--out: {out} cannot be written: {error.strerror}") from error
    if not nearest.is_dir():
        raise RunError(f"--out: {out} cannot be written: {nearest} is not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RunError(f"--out: {out} cannot be written: no permission to write to {nearest}")


def _save(found: Found, summary: dict[str, Any], out: Path) -> None:
    from fedcdp.attacks import Leaks
    from fedcdp.files.disk import write_atomically

    try:
        out.mkdir(parents=True, exist_ok=True)
        for leftover in ("grid.png", "reconstructions.npz", "rows.csv"):  # of another attack
            (out / leftover).unlink(missing_ok=True)
        if isinstance(found, Leaks):
            found.save(out)
        write_atomically(out / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
    except OSError as error:
        raise RunError(f"--out: {out} cannot be written: {error.strerror}") from error
