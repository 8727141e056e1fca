"""Remarks on settings: which setting a figure is about, and which options are overridden or have no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fedcdp.cli.options import flag_of
from fedcdp.config.experiment import Experiment
from fedcdp.config.presets import BENCHMARKS, UNEQUAL, Settings

Applies = Callable[[Experiment], bool]

_OWN_DATA = "your own data (--data)"
_QUANTILE = "a quantile clip, such as --clip 'quantile(0.5, 4)'"
# Each setting that only some experiments read: whether this one does, and which do.
_ONLY_FOR: dict[str, tuple[Applies, str]] = {
    "alpha": (lambda e: e.data.partition.startswith("dirichlet"), "--partition dirichlet, dirichlet-sizes or -classes"),
    "size_ratio": (lambda e: e.data.partition in UNEQUAL, "--partition dirichlet-sizes"),  # others of these refuse it
    "smallest": (lambda e: e.data.partition in UNEQUAL, "a --partition of unequal sizes"),
    "classes_per_client": (lambda e: e.data.partition == "shards", "--partition shards"),
    "validation_fraction": (lambda e: e.data.file is not None, _OWN_DATA),
    "standardise": (lambda e: e.data.file is not None, _OWN_DATA),
    "scaling": (
        lambda e: e.data.file is not None or e.data.dataset in ("adult", "cancer") or e.data.scaling == "private",
        "the datasets adult and cancer, and your own data (--data)",
    ),
    **dict.fromkeys(
        (
            "client_column",
            "label_column",
            "task",
            "drop_columns",
            "categories",
            "columns",
            "classes",
            "missing",
            "delimiter",
        ),
        (lambda e: e.data.file is not None, _OWN_DATA),
    ),
    "records": (lambda e: e.data.client_column is None, "data without a client column"),
    "clip": (lambda e: e.plan.private, "a private method"),
    "noise_multiplier": (lambda e: e.plan.private, "a private method"),
    "noise": (lambda e: e.plan.per_example or e.plan.sums, "fed-cdp and fed-cdp-decay"),
    "noise_at": (lambda e: e.plan.method == "fed-sdp", "fed-sdp"),
    "quantile_noise": (lambda e: e.plan.quantile is not None, _QUANTILE),
    "quantile_rate": (lambda e: e.plan.quantile is not None, _QUANTILE),
    "slots": (lambda e: e.plan.record_sampling == "poisson", "--record-sampling poisson"),
    "share_fraction": (lambda e: e.plan.method == "dssgd", "dssgd"),
    "server_momentum": (lambda e: e.plan.server_optimizer != "sgd", "--server-optimizer momentum, adam or yogi"),
    **dict.fromkeys(
        ("server_beta2", "server_epsilon"),
        (lambda e: e.plan.server_optimizer in ("adam", "yogi"), "--server-optimizer adam or yogi"),
    ),
    "proximal": (lambda e: e.plan.local_steps > 1, "several local steps (the first one starts at the global model)"),
    "noise_generator": (lambda e: e.plan.secure_noise, "--secure-noise"),
}


def describe_setting(experiment: Experiment) -> str:
    """The data, the clients and the plan in one line."""
    data, plan = experiment.data, experiment.plan
    records = _records(experiment)
    parts = [
        data.file or str(data.dataset),
        f"{data.clients} clients"
        + ("" if data.client_column is None else f" (by {data.client_column})")
        + ("" if records is None else f" × {records} records"),
        plan.method,
        f"{plan.rounds} rounds",
        f"K_t = {plan.per_round}",
        f"L = {plan.local_steps}",
        f"B = {plan.batch_size}",
    ]
    if plan.private:
        parts += [f"σ = {plan.noise_multiplier:.6g}", f"C = {plan.clip}"]
    return ", ".join(parts)


def remarks(
    experiment: Experiment, given: list[Settings], *, records: int | None = None, calibrated: bool = False
) -> Iterator[str]:
    """A sentence for each option given one by one (the last layer) that is overridden or has no effect.

    Args:
        experiment: What the options are part of.
        given: The layers of settings that the command received.
        records: Records of the largest client, where the data are loaded.
        calibrated: Whether the noise was chosen for a target ε.
    """
    options = {name for section in given[-1].values() for name in section} if given else set()
    held = records or _records(experiment)
    if "batch_size" in options and held is not None and experiment.plan.batch_size > held:
        yield (
            f"--batch-size {experiment.plan.batch_size} is more than the {held} records of a client: each step uses all "
            "of them, and the rest of the batch stays empty"
        )
    for name, (applies, which) in _ONLY_FOR.items():
        if name in options and not applies(experiment):
            yield f"{flag_of(name)} has no effect here: it is for {which}"
    optimizer, rate = experiment.plan.server_optimizer, experiment.plan.server_learning_rate
    chosen = "server_optimizer" in options and "server_learning_rate" not in options
    if chosen and optimizer in ("adam", "yogi") and rate.start >= 1:
        yield f"--server-optimizer {optimizer} moves weights by about --server-lr a round, {rate} here: try 0.1 or less"
    if experiment.data.file is not None and experiment.data.scaling == "training":
        yield "numbers without a public range are scaled by statistics of the training records, which no ε covers"
    if "noise_generator" in options and experiment.plan.secure_noise and experiment.plan.sums:
        yield "--noise-generator has no effect here: noise on the sum is discrete, and drawn by OpenDP"
    if "weighting" in options and experiment.plan.sums and experiment.plan.per_example:
        yield "--weighting has no effect here: with noise on the sum, every record weighs the same"
    if calibrated and "noise_multiplier" in options and experiment.plan.private:
        yield "--noise-multiplier is overridden: the noise is chosen for the target ε"


def _records(experiment: Experiment) -> int | None:
    """Records of a client, as far as the settings say; None for unequal sizes and for a user's own data."""
    data = experiment.data
    if data.records is not None:
        return data.records
    benchmark = BENCHMARKS.get(data.dataset or "")
    if benchmark is None:
        return None
    if data.partition in UNEQUAL:
        return None
    return benchmark.train if data.partition == "full" else benchmark.train // max(data.clients, 1)
