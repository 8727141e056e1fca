"""The commands `check`: settings of Opacus and Flower, and functions that return what leaves a client."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcdp.cli import terminal, usage
from fedcdp.cli.check_output import show_check
from fedcdp.errors import PlanError

if TYPE_CHECKING:
    from fedcdp.checks import OpacusSettings


class _CheckGroup(usage.PlainGroup):
    """The group of checks: `fedcdp check package.module:function` is short for `fedcdp check loop …`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that a first argument means."""
        named = ":" in args[0] and not args[0].startswith("-")
        return super().resolve_command(ctx, ["loop", *args] if named else args)


app = typer.Typer(
    cls=_CheckGroup,
    help="Check somebody else's training: ε for each adversary, the attacks that apply, a one-page report.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=usage.epilog(
        "fedcdp check opacus --noise-multiplier 1.1 --sample-rate 0.004 --steps 15000",
        "fedcdp check flower --wrapper server-fixed --noise-multiplier 1 --clients 50",
        "fedcdp check loop mymodule:leaves --data records.csv --claimed-epsilon 4",
    ),
)

_FEDERATION = "Federation"
_LOCAL = "LocalDpMod"
_ADAPTIVE = "Adaptive clipping (--clipping adaptive)"
Noise = Annotated[float | None, typer.Option("--noise-multiplier", help="Noise multiplier σ.", show_default=False)]
Delta = Annotated[float, typer.Option("--delta", help="δ of the statement.")]
Claimed = Annotated[
    float | None,
    typer.Option("--claimed-epsilon", help="ε that is claimed. The command fails if it does not hold.", show_default=False),
]
Out = Annotated[Path | None, typer.Option("--out", help="Write a one-page HTML report to this file.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Rate = Annotated[
    float | None, typer.Option("--sample-rate", help="Sampling rate q: 1 / len(data_loader).", show_default=False)
]
Steps = Annotated[
    int | None, typer.Option("--steps", help="Optimiser steps; with --clients, of a client in a round.", show_default=False)
]
Clients = Annotated[
    int | None, typer.Option("--clients", help="Number of clients.", rich_help_panel=_FEDERATION, show_default=False)
]
PerRound = Annotated[
    int | None,
    typer.Option("--per-round", help="Clients in a round. Default: all.", rich_help_panel=_FEDERATION, show_default=False),
]
Rounds = Annotated[int, typer.Option("--rounds", help="Number of rounds.", rich_help_panel=_FEDERATION)]


@usage.add_to(
    app,
    "fedcdp check opacus --noise-multiplier 1.1 --sample-rate 0.004 --steps 15000",
    "fedcdp check opacus --noise-multiplier 1 --sample-rate 0.1 --steps 10 --json",
)
def opacus(
    noise_multiplier: Noise = None,
    sample_rate: Rate = None,
    steps: Steps = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            help="Batch size of the DataLoader, with --records. With drop_last, give --sample-rate.",
            show_default=False,
        ),
    ] = None,
    records: Annotated[
        int | None, typer.Option("--records", help="Records, at each client if there are several.", show_default=False)
    ] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Epochs instead of --steps.", show_default=False)] = None,
    clip: Annotated[
        list[float] | None,
        typer.Option(
            "--clip",
            help="Clip bound C: max_grad_norm. With --clipping per_layer, repeat it for every parameter tensor. Default: 1.",
            show_default=False,
        ),
    ] = None,
    clipping: Annotated[
        str, typer.Option("--clipping", metavar="flat|per_layer|adaptive", help="clipping of make_private.")
    ] = "flat",
    unclipped_num_std: Annotated[
        float | None,
        typer.Option(
            "--unclipped-num-std",
            help="Standard deviation of the noise on the number of unclipped gradients.",
            rich_help_panel=_ADAPTIVE,
            show_default=False,
        ),
    ] = None,
    target_unclipped_quantile: Annotated[
        float | None,
        typer.Option(
            "--target-unclipped-quantile",
            help="Share of gradients that the bound should leave unclipped.",
            rich_help_panel=_ADAPTIVE,
            show_default=False,
        ),
    ] = None,
    clipbound_learning_rate: Annotated[
        float | None,
        typer.Option(
            "--clipbound-learning-rate",
            help="Learning rate of the bound.",
            rich_help_panel=_ADAPTIVE,
            show_default=False,
        ),
    ] = None,
    min_clipbound: Annotated[
        float | None,
        typer.Option("--min-clipbound", help="Least bound.", rich_help_panel=_ADAPTIVE, show_default=False),
    ] = None,
    max_clipbound: Annotated[
        float | None,
        typer.Option("--max-clipbound", help="Largest bound.", rich_help_panel=_ADAPTIVE, show_default=False),
    ] = None,
    delta: Delta = 1e-5,
    poisson_sampling: Annotated[
        bool, typer.Option(help="Whether batches are Poisson samples, or those of a shuffled DataLoader.")
    ] = True,
    clients: Clients = None,
    per_round: PerRound = None,
    rounds: Rounds = 1,
    claimed_epsilon: Claimed = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Check the settings of a training with Opacus, in one place or at clients.

    Prints ε for each adversary, what the settings do not protect, and the attacks that apply.
    """
    from fedcdp.checks import OpacusSettings, check

    rate = _rate(sample_rate, batch_size, records)
    settings = OpacusSettings(
        noise_multiplier=_required("--noise-multiplier", noise_multiplier),
        sample_rate=rate,
        steps=_steps(steps, epochs, rate),
        delta=delta,
        clip=_clip(clip, clipping),
        poisson=poisson_sampling,
        clients=1 if clients is None else clients,
        per_round=per_round,
        rounds=rounds,
        records=records,
        clipping=clipping,  # type: ignore[arg-type]
        unclipped_num_std=unclipped_num_std,
        target_unclipped_quantile=target_unclipped_quantile,
        clipbound_learning_rate=clipbound_learning_rate,
        min_clipbound=min_clipbound,
        max_clipbound=max_clipbound,
    )
    show_check(check(settings, epsilon=claimed_epsilon), out, as_json)


@usage.add_to(
    app,
    "fedcdp check flower --wrapper server-fixed --noise-multiplier 1 --clients 50",
    "fedcdp check flower --wrapper client-fixed --noise-multiplier 2 --clients 9",
)
def flower(
    wrapper: Annotated[
        str,
        typer.Option(
            "--wrapper",
            metavar="server-fixed|client-fixed|server-adaptive|client-adaptive|local",
            help="Wrapper of the strategy: who clips, and whether the bound adapts; or local, for LocalDpMod.",
            show_default=False,
        ),
    ],
    noise_multiplier: Noise = None,
    clip: Annotated[float, typer.Option("--clip", help="clipping_norm, or initial_clipping_norm.")] = 0.1,
    delta: Delta = 1e-5,
    clients: Clients = None,
    per_round: PerRound = None,
    rounds: Rounds = 1,
    largest_share: Annotated[
        float | None,
        typer.Option(
            "--largest-share",
            help="Largest share of one client in a round's weighted mean. Default: all weigh the same, and all reply.",
            show_default=False,
        ),
    ] = None,
    strategy: Annotated[
        str, typer.Option("--strategy", metavar="fedavg|other", help="Wrapped strategy. Only FedAvg has an ε.")
    ] = "fedavg",
    clip_norm_lr: Annotated[
        float, typer.Option("--clip-norm-lr", help="Adaptive clipping: learning rate of the bound.", hidden=True)
    ] = 0.2,
    quantile: Annotated[
        float, typer.Option("--quantile", help="Adaptive clipping: target_clipped_quantile.", hidden=True)
    ] = 0.5,
    count_stddev: Annotated[
        float | None,
        typer.Option("--count-stddev", help="Adaptive clipping: clipped_count_stddev. Default: K/20.", hidden=True),
    ] = None,
    sensitivity: Annotated[
        float | None,
        typer.Option("--sensitivity", help="sensitivity of the mod.", rich_help_panel=_LOCAL, show_default=False),
    ] = None,
    mod_epsilon: Annotated[
        float | None,
        typer.Option(
            "--mod-epsilon", help="epsilon of the mod, for one message.", rich_help_panel=_LOCAL, show_default=False
        ),
    ] = None,
    mod_delta: Annotated[
        float | None,
        typer.Option("--mod-delta", help="delta of the mod. Default: --delta.", rich_help_panel=_LOCAL, show_default=False),
    ] = None,
    claimed_epsilon: Claimed = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Check the settings of Flower's differential privacy.

    Prints ε for each adversary, what the settings do not protect, and the attacks that apply.
    """
    from fedcdp.checks import FlowerSettings, LocalDpSettings, check

    all_clients = _required("--clients", clients)
    chosen = all_clients if per_round is None else per_round
    local = {"--sensitivity": sensitivity, "--mod-epsilon": mod_epsilon, "--mod-delta": mod_delta}
    settings: FlowerSettings | LocalDpSettings
    if wrapper == "local":
        if noise_multiplier is not None or largest_share is not None or count_stddev is not None:
            raise PlanError("--noise-multiplier, --largest-share, --count-stddev: not for --wrapper local; leave them out")
        settings = LocalDpSettings(
            clip=clip,
            sensitivity=_required("--sensitivity", sensitivity),
            epsilon=_required("--mod-epsilon", mod_epsilon),
            mod_delta=delta if mod_delta is None else mod_delta,
            clients=all_clients,
            per_round=chosen,
            rounds=rounds,
            delta=delta,
        )
    else:
        if given := [name for name, value in local.items() if value is not None]:
            raise PlanError(f"{', '.join(given)}: only for --wrapper local; leave it out")
        settings = FlowerSettings(
            wrapper=wrapper,  # type: ignore[arg-type]
            noise_multiplier=_required("--noise-multiplier", noise_multiplier),
            clients=all_clients,
            per_round=chosen,
            rounds=rounds,
            delta=delta,
            clip=clip,
            largest_share=largest_share,
            strategy=strategy,  # type: ignore[arg-type]
            clip_norm_lr=clip_norm_lr,
            quantile=quantile,
            count_stddev=count_stddev,
        )
    show_check(check(settings, epsilon=claimed_epsilon), out, as_json)


@usage.add_to(
    app,
    "fedcdp check loop mymodule:leaves --dataset cancer --out check.html",
    "fedcdp check loop mymodule:leaves --data records.csv --claimed-epsilon 4",
    "fedcdp check loop mymodule:leaves --dataset cancer --noise-multiplier 1.1",
)
def loop(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Function of (model, inputs, labels) that returns everything that leaves the client.",
            show_default=False,
        ),
    ],
    data: Annotated[
        Path | None, typer.Option("--data", help="File with records: .csv, .parquet or .npz.", show_default=False)
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="Benchmark instead of --data, such as cancer.", show_default=False)
    ] = None,
    label_column: Annotated[
        str | None, typer.Option("--label-column", help="Column with the label.", show_default=False)
    ] = None,
    columns: Annotated[
        Path | None, typer.Option("--columns", help="TOML file with categories and ranges of columns.", show_default=False)
    ] = None,
    network: Annotated[
        str, typer.Option("--model", help="Network, such as auto, mlp or cnn, or package.module:factory.")
    ] = "auto",
    records: Annotated[int, typer.Option("--records", help="Records in the batch that the function gets.")] = 8,
    noise_multiplier: Noise = None,
    sample_rate: Rate = None,
    steps: Steps = None,
    claimed_epsilon: Annotated[
        float | None,
        typer.Option(
            "--claimed-epsilon",
            help="ε that is claimed for one call. The command fails if it does not hold.",
            show_default=False,
        ),
    ] = None,
    delta: Delta = 1e-5,
    relation: Annotated[
        str,
        typer.Option(
            "--relation", metavar="remove|replace", help="Whether a record is left out, or another takes its place."
        ),
    ] = "remove",
    trials: Annotated[
        int | None,
        typer.Option("--trials", help="Calls with and without the worst-case record. Default: 15 seconds' worth."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Fixes PyTorch's randomness.", hidden=True)] = 0,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", envvar="FEDCDP_DATA", help="Directory of dataset files.", hidden=True),
    ] = None,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no progress.")] = False,
) -> None:
    """Check a function that returns what leaves the client: noise, clipping, attacks and a lower bound on ε.

    The function is imported and called many times. With --noise-multiplier, one call is compared with its noise, and ε is
    printed for --sample-rate and --steps. The command fails if a claim does not hold.
    """
    from fedcdp.checks import check
    from fedcdp.data.load import load
    from fedcdp.data.own_files import load_file
    from fedcdp.models.networks import build, import_function
    from fedcdp.report.api import require_replaceable
    from fedcdp.training.loss_contract import loss_for
    from fedcdp.training.prepared import outputs_needed

    if (data is None) == (dataset is None):
        raise PlanError("--data, --dataset: give exactly one of them")
    if dataset is not None and (label_column is not None or columns is not None):
        raise PlanError("--label-column, --columns: only with --data")
    if not -(2**63) <= seed < 2**64:
        raise PlanError(f"--seed: {str(seed)[:40]} is not allowed; it must fit 64 bits")
    settings = _settings(noise_multiplier, sample_rate, steps, delta)
    if settings is not None and claimed_epsilon is not None:
        raise PlanError("--claimed-epsilon: leave it out with --noise-multiplier, which tells the ε of one call")
    if out is not None:
        require_replaceable(out)
    leaves = import_function("function", function)
    train = (
        load(dataset, data_dir, quiet=quiet)
        if dataset is not None
        else load_file(data or Path(), label=label_column, columns=columns)
    ).train
    if records < 2 or records > len(train):
        raise PlanError(f"--records: {records} is not allowed; it must be from 2 to the number of records, {len(train)}")
    model = build(network, train.shape, outputs_needed(train), seed=seed)
    # What the function prints is not the answer of this command.
    with terminal.steps("check", quiet) as progress, contextlib.redirect_stdout(sys.stderr):
        found = check(
            leaves,
            model=model,
            examples=(train.tensor[:records], train.targets[:records]),
            epsilon=claimed_epsilon,
            delta=None if settings is not None else delta,
            settings=settings,
            relation=relation,
            trials=trials,
            loss=loss_for(train, None),
            seed=seed,
            progress=progress,
        )
    show_check(found, out, as_json)


def _settings(
    noise_multiplier: float | None, sample_rate: float | None, steps: int | None, delta: float
) -> OpacusSettings | None:
    """The settings that a function is meant to implement; None without a noise multiplier."""
    from fedcdp.checks import OpacusSettings

    if noise_multiplier is None:
        if sample_rate is not None or steps is not None:
            raise PlanError("--sample-rate, --steps: only with --noise-multiplier")
        return None
    rate = 1.0 if sample_rate is None else sample_rate
    return OpacusSettings(noise_multiplier, sample_rate=rate, steps=1 if steps is None else steps, delta=delta)


def _rate(sample_rate: float | None, batch_size: int | None, records: int | None) -> float:
    """q, or that of a DataLoader: 1 / ⌈N/B⌉."""
    if sample_rate is not None and batch_size is None:
        return sample_rate
    if sample_rate is not None or batch_size is None or records is None:
        raise PlanError("--sample-rate: give it, or --batch-size and --records")
    if not 1 <= batch_size <= records:
        raise PlanError(f"--batch-size: {batch_size} is not allowed; it must be from 1 to the number of records, {records}")
    return 1 / -(-records // batch_size)


def _clip(bounds: list[float] | None, clipping: str) -> float | list[float]:
    """The bound, or, for `per_layer`, a list of them."""
    given = [1.0] if bounds is None else bounds
    return given[0] if len(given) == 1 and clipping != "per_layer" else given


def _steps(steps: int | None, epochs: int | None, rate: float) -> int:
    if (steps is None) == (epochs is None):
        raise PlanError("--steps, --epochs: give exactly one of them")
    if epochs is None:
        assert steps is not None
        return steps
    if not 1e-12 <= rate <= 1 or epochs < 1:
        raise PlanError("--epochs: it must be at least 1, with a sampling rate above 0 and at most 1")
    return epochs * round(1 / rate)


def _required(option: str, value: Any) -> Any:
    if value is None:
        raise PlanError(f"{option}: give it")
    return value
