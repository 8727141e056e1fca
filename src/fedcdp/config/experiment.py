"""An experiment: the data, the network, the plan and the machine, as one value that a configuration file describes fully.

Settings come from several layers; later layers override earlier ones: the dataset's defaults, a preset, a configuration
file, single settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from fedcdp._version import __version__
from fedcdp.config import presets
from fedcdp.config.fields import check_types, option
from fedcdp.config.plan import Plan
from fedcdp.errors import PlanError, RunError
from fedcdp.files.untrusted import MOST_SETTINGS, parse_toml, read_bounded

EngineName = Literal["auto", "kernel", "compiled", "batched", "recorded", "functional"]
Scaling = Literal["training", "public", "private"]
TableTask = Literal["classification", "binary", "multilabel", "regression"]
Missing = Literal["refuse", "indicator"]

DEFAULT_DATASET = "mnist5k"
SCALING_NOISE = 10.0
"""The noise of private scaling, over its sensitivity, where neither a user nor the recommended recipe chooses it."""


class _Checked:
    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class DataSettings(_Checked):
    """`[data]`: the examples, and how they are distributed to clients."""

    dataset: str | None = option(None, "mnist, cifar10, lfw, adult, cancer, or mnist5k (included; default).")
    file: str | None = option(None, "Your own FILE.csv, FILE.parquet or FILE.npz (x, y).")
    client_column: str | None = option(None, "Column of your file that names the client of each record.")
    label_column: str | None = option(None, "Label column, or several: a,b. Default: label, or the last one.")
    task: TableTask = option("classification", "What the label of your file is.")
    drop_columns: str | None = option(None, "Columns of your file that are not used, such as ids: a,b.")
    categories: str | None = option(None, 'Public categories of text columns: "sex=f|m,smoker=yes|no".')
    columns: str | None = option(None, "TOML file with the public categories or the public range of each column.")
    classes: str | None = option(None, 'Public classes of the label, in order: "no|yes". Default: those in the file.')
    missing: Missing = option("refuse", "Missing values: refuse them, or mark them in an extra input for each column.")
    delimiter: str | None = option(
        None, "Delimiter of a .csv file: comma, semicolon or tab. Default: as its header line shows."
    )
    partition: str = option(
        "iid",
        "How records are split: shards, iid, dirichlet, full; with unequal sizes: linear, square, exponential, "
        "dirichlet-sizes, dirichlet-classes; natural with a client column.",
    )
    clients: int = option(100, "Number of clients, K.")
    records: int | None = option(None, "Records per client, N_i. Default: the dataset's, or a disjoint split.")
    classes_per_client: int = option(2, "Classes per client, for shards.")
    alpha: float = option(0.5, "Concentration parameter, for dirichlet, dirichlet-sizes and dirichlet-classes.")
    smallest: int = option(1, "Fewest records of a client, for unequal sizes.")
    size_ratio: float | None = option(None, "Records of the largest client over the smallest, for dirichlet-sizes.")
    split_seed: int = option(0, "Fixes which examples are held out for validation.")
    scaling: Scaling | None = option(
        None,
        "How numbers are scaled: by training statistics, which no ε covers (training); by public constants or ranges "
        "(public); or, on top of these, by means and variances from a noised release that every ε includes (private).",
    )
    validation_fraction: float = option(0.2, "Share of your own examples held out for validation.")
    standardise: bool = option(False, "An older name for --scaling training, for your own examples.")


@dataclass(frozen=True, kw_only=True)
class ModelSettings(_Checked):
    """`[model]`: the network."""

    network: str = option(
        "auto",
        "best-features, random-process, scattering, oriented-gradients, a+b, linear, cnn, mlp, auto, or module:factory.",
    )
    activation: str | None = option(None, "relu, tanh or sigmoid. Default: the network's own.")


@dataclass(frozen=True, kw_only=True)
class MachineSettings(_Checked):
    """`[run]`: the device, and how many clients are trained at once. Does not change results beyond rounding."""

    device: str = option("cpu", "cpu, cuda, or one of several GPUs, such as cuda:1.")
    engine: EngineName = option(
        "auto",
        "How gradients are computed: kernel, compiled (GPU), batched, recorded, functional (any network), or auto.",
    )
    chunk: int | None = option(None, "Clients trained at once. Default: the fastest number within a memory limit.")
    tf32: bool = option(
        False, "Let a GPU round the factors of products to 10 bits, which is faster. Norms and noise stay exact."
    )
    evaluate_every: int = option(1, "Rounds between evaluations on the validation split.")
    max_epsilon: float | None = option(None, "Stop training before the release that would exceed this ε.")
    adversary: str = option("server", "Adversary that ε is for: server, update, example or model.")
    unit: str = option("record", "Unit that ε protects: record, client or unique.")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that `fedcdp train` needs to know except the location of the data files."""

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    plan: Plan = field(default_factory=Plan)
    run: MachineSettings = field(default_factory=MachineSettings)

    def to_toml(self) -> str:
        """The configuration file that describes this experiment; reading it back gives an equal one."""
        import tomli_w

        sections = {}
        for section in fields(self):
            settings = getattr(self, section.name)
            values = settings.written() if isinstance(settings, Plan) else vars(settings)
            sections[section.name] = {name: value for name, value in values.items() if value is not None}
        return f"# fedcdp {__version__}\n\n{tomli_w.dumps(sections)}"


SECTIONS: dict[str, type] = {"data": DataSettings, "model": ModelSettings, "plan": Plan, "run": MachineSettings}


def assemble(*layers: presets.Settings) -> Experiment:
    """Build an experiment from layers of settings over the defaults of the dataset that they name; later layers win."""
    merged: presets.Settings = {name: {} for name in SECTIONS}
    for layer in layers:
        for section, settings in layer.items():
            for key, value in settings.items():
                if section not in SECTIONS or key not in _names(SECTIONS[section]):
                    raise PlanError(f"{section}.{key}: there is no such setting")
                merged[section][key] = value
    for section, name in (("data", "dataset"), ("data", "file"), ("plan", "method"), ("plan", "noise")):
        if not isinstance(given := merged[section].get(name), str | None):  # looked up below, before a section checks them
            raise PlanError(f"{name}: {str(given)[:100]} is not a string")
    if merged["data"].get("file") is None:
        merged["data"].setdefault("dataset", DEFAULT_DATASET)
    elif "dataset" in merged["data"]:
        raise PlanError("data: give either a dataset or a file of your own, not both")
    _settle_scaling(merged["data"])
    if merged["data"].get("scaling") == "private":
        merged["plan"].setdefault("scaling_noise", SCALING_NOISE)
    if merged["data"].get("file") is not None and merged["data"].get("client_column") is not None:
        merged["data"].setdefault("partition", "natural")
    dataset = merged["data"].get("dataset")
    defaults = presets.population(dataset)
    if merged["data"].get("partition") in presets.UNEQUAL:
        defaults.get("data", {}).pop("records", None)
    clients = merged["data"].get("clients")
    if isinstance(clients, int):  # so a small federation need not set per_round as well
        defaults["plan"]["per_round"] = max(1, min(defaults["plan"]["per_round"], clients))
    for section, settings in defaults.items():
        merged[section] = settings | merged[section]
    rate = presets.learning_rate(dataset, merged["plan"])
    if rate is not None:
        merged["plan"].setdefault("learning_rate", rate)
    return Experiment(**{name: kind(**merged[name]) for name, kind in SECTIONS.items()})


def _settle_scaling(data: dict[str, Any]) -> None:
    """Make `scaling` say how numbers are scaled: None for a user's own data that are not, `training` with `standardise`.

    The first release wrote `scaling = "training"` for every file, although only `standardise` scaled a file.
    """
    if data.get("file") is None:
        if data.get("scaling") is None:
            data["scaling"] = "training"
    elif data.get("standardise") is True:
        if data.setdefault("scaling", "training") != "training":
            raise PlanError(f"scaling: {str(data['scaling'])[:100]} contradicts standardise, which means training")
    elif data.get("scaling") == "training":
        if "standardise" in data:
            data["scaling"] = None
        else:
            data["standardise"] = True


def read_toml(path: Path | str, *, stream: bool = False) -> presets.Settings:
    """Read the settings in a configuration file; with `stream`, it may be a pipe."""
    try:
        settings = parse_toml(read_bounded(path, MOST_SETTINGS, stream=stream))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} is not a TOML file: {error}") from error
    if "python" in settings:
        raise RunError(f"{path} belongs to a run whose network and data came from Python; open the run from Python")
    for section, values in settings.items():
        if section not in SECTIONS or not isinstance(values, dict):
            raise PlanError(f"{path}: {section} is not one of the sections {', '.join(SECTIONS)}")
    return presets.WholeSettings(settings)


def read_assignment(written: str) -> presets.Settings:
    """Parse `key=value` or `section.key=value`; the value is written as in TOML, but a string needs no quotes."""
    name, equals, value = written.partition("=")
    section, _, key = name.strip().rpartition(".")
    sections = [section] if section else [each for each, kind in SECTIONS.items() if key in _names(kind)]
    if not equals:
        raise PlanError(f"--set {written}: write it as key=value")
    if not sections or key not in _names(SECTIONS.get(sections[0], type(None))):
        raise PlanError(f"--set {written}: there is no setting called {name.strip()!r}; fedcdp train --help-all lists them")
    try:
        return {sections[0]: {key: parse_toml(f"value = {value}")["value"]}}
    except ValueError:
        return {sections[0]: {key: value.strip()}}


def _names(kind: type) -> set[str]:
    return {each.name for each in fields(kind)} if is_dataclass(kind) else set()
