"""The command `attack`: what a curious reader gets out of a plan or a run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from fedcdp.cli import terminal
from fedcdp.cli.options import takes_settings
from fedcdp.config.experiment import Experiment, assemble
from fedcdp.config.plan import Plan
from fedcdp.config.presets import Settings
from fedcdp.data.dataset import Splits
from fedcdp.errors import PlanError, RunError
from fedcdp.training.prepared import deal_out, load_splits, network_of, stored
from fedcdp.training.saved_run import Trained
from fedcdp.training.simulate import Run

if TYPE_CHECKING:
    from fedcdp.attacks.api import Found
    from fedcdp.attacks.recipe import Recipe


_LOOK = "What is read"
_HOW = "How it is attacked"
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
            help="Who reads: the server (type0), someone on the client after (type1) or during (type2) local training.",
            rich_help_panel=_LOOK,
        ),
    ] = "type2",
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", help="Attack this run, at its trained weights; a linear head, in all its rounds.", rich_help_panel=_LOOK
        ),
    ] = None,
    victims: Annotated[
        int | None, typer.Option("--victims", help="How many are attacked. Default: up to 100.", rich_help_panel=_LOOK)
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            help="cpl: the network that the paper's authors attack (default for images); paper: the one they train (default "
            "for tables); or as in --model.",
            rich_help_panel=_LOOK,
        ),
    ] = None,
    at_round: Annotated[
        int | None, typer.Option("--round", help="Train up to this round first. Default: 0.", rich_help_panel=_LOOK)
    ] = None,
    step: Annotated[int, typer.Option("--step", help="The local step that type2 reads.", rich_help_panel=_LOOK)] = 0,
    steps: Annotated[
        int, typer.Option("--steps", help="Local steps of the update that type0 and type1 read.", rich_help_panel=_LOOK)
    ] = 1,
    releases: Annotated[
        int, typer.Option("--releases", help="How often the same is seen with fresh noise.", rich_help_panel=_LOOK)
    ] = 1,
    name: Annotated[
        str,
        typer.Option(
            "--attack",
            help="best: those that suit the plan, until one recovers everything; or one of cpl, dlg, idlg, "
            "inverting-gradients, clip-aware, batch, unrolled, averaging, matched-filter, analytic, linear-head, per-layer, "
            "and membership (of a run).",
            rich_help_panel=_HOW,
        ),
    ] = "best",
    iterations: Annotated[
        int | None, typer.Option("--iterations", help="At most; one is up to 20 evaluations.", rich_help_panel=_HOW)
    ] = None,
    restarts: Annotated[int | None, typer.Option("--restarts", help="Seeds for each victim.", rich_help_panel=_HOW)] = None,
    total_variation: Annotated[
        float | None,
        typer.Option("--total-variation", help="Weight of smoothness in the objective.", rich_help_panel=_HOW),
    ] = None,
    seed_image: Annotated[
        str | None,
        typer.Option("--seed-image", help="pattern, uniform, normal or zeros.", rich_help_panel=_HOW),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option("--labels", help="gradient, agnostic, negative-sum, counts, known or joint.", rich_help_panel=_HOW),
    ] = None,
    exact_mse: Annotated[
        float, typer.Option("--exact-mse", help="Success: an MSE below this.", rich_help_panel=_HOW)
    ] = 1e-3,
    recognisable_psnr: Annotated[
        float, typer.Option("--recognisable-psnr", help="Recognisable: a PSNR of at least this.", rich_help_panel=_HOW)
    ] = 15.0,
    candidates: Annotated[
        int, typer.Option("--candidates", help="Identified: the nearest of so many.", rich_help_panel=_HOW)
    ] = 1000,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where figures, arrays and pictures go. Default: nowhere; of a run, RUN/attacks."),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", envvar="FEDCDP_DATA", help="Where dataset files lie.", rich_help_panel="Data"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table.")] = False,
) -> None:
    """A leakage attack on real examples: what a reader of gradients or updates can reconstruct, or tell.

    It attacks a plan before any training, or a run (--run). A network whose last layer alone is trained is read in all
    rounds of its training. Everything that is read comes from the method's own code.
    """
    from fedcdp.attacks import Criteria
    from fedcdp.attacks import attack as attack_it

    recipe = _recipe(name, iterations, restarts, total_variation, seed_image, labels)
    _require_writable(out if run is None else out or run)
    criteria = Criteria(exact_mse=exact_mse, recognisable_psnr=recognisable_psnr, candidates=candidates)
    common: dict[str, Any] = {
        "leak": leak, "attack": recipe or name, "victims": victims, "step": step, "steps": steps, "releases": releases,
        "criteria": criteria,
    }  # fmt: skip
    extra: dict[str, Any] = {}
    if run is not None:
        if network is not None or at_round is not None:
            raise PlanError("--run: it is attacked as it is; leave out --network and --round")
        experiment, trained = stored(run, given), Trained.load(run, data_dir, quiet)
        splits = trained.splits
        target: Run | Plan = trained.as_run()
        if name in ("best", "linear-head"):  # a linear head is read in all rounds, from the untrained network on
            extra = {"model": network_of(experiment, splits)}
    else:
        experiment = _with_network(assemble(*given), network, given)
        splits = load_splits(experiment, data_dir, quiet)
        extra = {"model": network_of(experiment, splits), "federation": deal_out(experiment, splits), "at_round": at_round}
        target = experiment.plan
    with terminal.steps("attack", quiet) as progress:
        found = attack_it(target, **common, **extra, device=experiment.run.device, progress=progress)
    summary = _summary(found, name, experiment, splits)
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
                "computed from training data, which no privacy guarantee covers: keep it where those data are kept"
            )
        if out is not None:
            terminal.console.print(f"Figures, arrays and pictures are in {out}")


def _recipe(
    name: str,
    iterations: int | None,
    restarts: int | None,
    total_variation: float | None,
    seed_image: str | None,
    labels: str | None,
) -> Recipe | None:
    """The preset with the ingredients that were given; None where none was."""
    from fedcdp.attacks import RECIPES, Seed
    from fedcdp.attacks.labels import LabelRule
    from fedcdp.attacks.recipe import SeedKind

    given = {"--iterations": iterations, "--restarts": restarts, "--total-variation": total_variation,
             "--seed-image": seed_image, "--labels": labels}  # fmt: skip
    used = [option for option, value in given.items() if value is not None]
    if not used:
        return None
    if name not in RECIPES:
        raise PlanError(f"{', '.join(used)}: for --attack {', '.join(RECIPES)}; choose one of them")
    for option, known in (("--seed-image", get_args(SeedKind)), ("--labels", get_args(LabelRule))):
        if given[option] is not None and given[option] not in known:
            raise PlanError(f"{option}: {given[option]!r} is not one of {', '.join(known)}")
    changes: dict[str, Any] = {"iterations": iterations, "restarts": restarts, "labels": labels}
    changes["seed"] = None if seed_image is None else Seed(seed_image)  # type: ignore[arg-type]
    if total_variation is not None:
        changes["objective"] = replace(RECIPES[name].objective, total_variation=total_variation)
    return RECIPES[name].but(**{key: value for key, value in changes.items() if value is not None})


def _with_network(experiment: Experiment, network: str | None, given: list[Settings]) -> Experiment:
    """The network that is attacked: --network or --model, or else, for images, the one that the authors attack."""
    model = experiment.model
    if network == "paper":
        return replace(experiment, model=replace(model, network="auto"))
    if network is not None:
        return replace(experiment, model=replace(model, network=network))
    if any("network" in layer.get("model", {}) for layer in given) or experiment.data.file is not None:
        return experiment
    tables = experiment.data.dataset in ("adult", "cancer")
    return experiment if tables else replace(experiment, model=replace(model, network="cpl"))


def _summary(found: Found, name: str, experiment: Experiment, splits: Splits) -> dict[str, Any]:
    """What was found, as JSON has it: what the contract names first, None for what this attack does not measure."""
    from fedcdp.attacks.leaks import finite
    from fedcdp.attacks.portfolio import trial

    network = experiment.model.network
    if network == "auto":
        network = "cnn" if len(splits.train.shape) == 3 else "mlp"
    data = experiment.data.file or experiment.data.dataset
    figures = {"method": experiment.plan.method} | found.summary() | {"dataset": data, "network": network}
    if figures["attack"] == "recipe":
        figures["attack"] = name
    if not figures.get("tried"):
        figures["tried"] = [trial(figures)]
    summary: dict[str, Any] = finite(dict.fromkeys(_CONTRACT) | figures)
    return summary


def _require_writable(out: Path | None) -> None:
    """Say that results cannot be written before they are computed."""
    if out is None:
        return
    try:
        nearest = next(each for each in (out, *out.absolute().parents) if each.exists())
    except OSError as error:
        raise RunError(f"--out: {out} cannot be written: {error.strerror}") from error
    if not nearest.is_dir():
        raise RunError(f"--out: {out} cannot be written: {nearest} is not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RunError(f"--out: {out} cannot be written: {nearest} may not be changed")


def _save(found: Found, summary: dict[str, Any], out: Path) -> None:
    from fedcdp.attacks import Leaks
    from fedcdp.files.disk import write_atomically

    try:
        out.mkdir(parents=True, exist_ok=True)
        for leftover in ("grid.png", "reconstructions.npz"):  # of another attack
            (out / leftover).unlink(missing_ok=True)
        if isinstance(found, Leaks):
            found.save(out)
        write_atomically(out / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
    except OSError as error:
        raise RunError(f"--out: {out} cannot be written: {error.strerror}") from error
