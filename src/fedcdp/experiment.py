"""An experiment: the data, the network, the plan and the machine, as one value that a configuration file holds whole.

Where a setting is given several times, the later wins: the dataset's defaults, a preset, a configuration file, single
settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path

from torch import nn

import fedcdp
from fedcdp import consent, presets
from fedcdp.accounting.charged import Allows
from fedcdp.accounting.population import Population
from fedcdp.data import load, load_file
from fedcdp.data.dataset import Splits
from fedcdp.data.partition import Federation, partition
from fedcdp.data.scaling import Scaling
from fedcdp.engine import EngineName
from fedcdp.errors import PlanError, RunError
from fedcdp.models import build, prepare
from fedcdp.plan import Plan
from fedcdp.rundir import RunDirectory
from fedcdp.settings import check_types, option
from fedcdp.simulation import Progress, Run, simulate
from fedcdp.tree import Layout
from fedcdp.untrusted import MOST_SETTINGS, parse_toml, read_bounded

DEFAULT_DATASET = "mnist5k"


class _Checked:
    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class DataSettings(_Checked):
    """`[data]`: which examples, and how they are dealt out to clients."""

    dataset: str | None = option(None, "A benchmark: mnist, cifar10, lfw, adult, cancer, or mnist5k (embedded).")
    file: str | None = option(None, "Your own examples: FILE.npz (x, y) or FILE.csv (last column, or `label`).")
    partition: str = option("iid", "How records are dealt out: shards, iid, dirichlet, full.")
    clients: int = option(100, "Clients in all, K.")
    records: int | None = option(None, "Records at a client, N_i. Default: the data, dealt out disjointly.")
    classes_per_client: int = option(2, "Classes at a client, for shards.")
    alpha: float = option(0.5, "Concentration, for dirichlet.")
    split_seed: int = option(0, "Fixes which examples are held out for validation.")
    scaling: Scaling = option(
        "training", "Adult and cancer: scaled by training statistics (which no ε covers), or by public constants."
    )
    validation_fraction: float = option(0.2, "Share of your own examples held out for validation.")
    standardise: bool = option(False, "Standardise your own examples by training statistics (which no ε covers).")


@dataclass(frozen=True, kw_only=True)
class ModelSettings(_Checked):
    """`[model]`: which network."""

    network: str = option(
        "auto", "cnn, mlp, cpl, small, linear, oriented-gradients, auto, or your own as package.module:factory."
    )
    activation: str | None = option(None, "relu, tanh or sigmoid. Default: the network's own.")


@dataclass(frozen=True, kw_only=True)
class MachineSettings(_Checked):
    """`[run]`: where, and how much at once. Does not change results beyond rounding."""

    device: str = option("cpu", "cpu, cuda, cuda:1, …")
    engine: EngineName = option(
        "auto",
        "How gradients are computed: kernel, compiled (GPU), batched, functional (any network); auto: the fastest.",
    )
    chunk: int | None = option(None, "Clients trained at once. Default: what is fastest within a bounded memory.")
    tf32: bool = option(False, "Let a GPU round the factors of products to 10 bits: faster. Norms and noise stay exact.")
    evaluate_every: int = option(1, "Rounds between evaluations on the validation split.")
    max_epsilon: float | None = option(None, "End training before the release that would exceed this ε.")
    adversary: str = option("server", "Whose ε that is, and the progress shows: server, update, example or model.")
    unit: str = option("record", "Of which unit: record, client or unique.")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that `fedcdp train` needs to know, besides where the data files lie."""

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    plan: Plan = field(default_factory=Plan)
    run: MachineSettings = field(default_factory=MachineSettings)

    def splits(self, data_dir: Path | str | None = None, quiet: bool = False) -> Splits:
        """Load the data."""
        settings = self.data
        if settings.file is not None:
            return load_file(
                settings.file,
                split_seed=settings.split_seed,
                validation_fraction=settings.validation_fraction,
                standardise=settings.standardise,
            )
        name = settings.dataset or DEFAULT_DATASET
        return load(name, data_dir, split_seed=settings.split_seed, scaling=settings.scaling, quiet=quiet)

    def federation(self, splits: Splits) -> Federation:
        """Deal the data out to clients."""
        settings = self.data
        return partition(
            splits,
            clients=settings.clients,
            scheme=settings.partition,
            records=settings.records,
            classes_per_client=settings.classes_per_client,
            alpha=settings.alpha,
            seed=self.plan.seed,
        )

    def network(self, splits: Splits) -> nn.Module:
        """Build the network, initialised from the plan's seed."""
        return self.network_for(splits.train.shape, splits.train.classes)

    def network_for(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for inputs of some shape, initialised from the plan's seed."""
        return build(self.model.network, shape, classes, self.model.activation, self.plan.seed)

    def population(self, splits: Splits) -> Population:
        """What the accountant must know of the federation and the network."""
        network = prepare(self.network(splits), self.plan, "cpu")
        return Population.of(self.federation(splits), Layout.of(network), self.plan)

    def train(
        self,
        out: Path | str | None,
        *,
        resume: bool = False,
        data_dir: Path | str | None = None,
        quiet: bool = False,
        most_releases: int | None = None,
        budget: Allows | None = None,
        progress: Progress | None = None,
        splits: Splits | None = None,
    ) -> Run:
        """Run the experiment into a directory (None: in memory only), on `splits` where they are loaded already."""
        splits = splits or self.splits(data_dir, quiet)
        consent.remember(self.model.network)
        return simulate(
            self.network(splits),
            self.federation(splits),
            self.plan,
            device=self.run.device,
            engine=self.run.engine,
            chunk=self.run.chunk,
            tf32=self.run.tf32,
            evaluate_every=self.run.evaluate_every,
            out=out,
            config=self.to_toml(),
            resume=resume,
            most_releases=most_releases,
            budget=budget,
            progress=progress,
        )

    def to_toml(self) -> str:
        """The configuration file that gives this experiment back."""
        lines = [f"# fedcdp {fedcdp.__version__}"]
        for section in fields(self):
            settings = getattr(self, section.name)
            values = settings.written() if isinstance(settings, Plan) else vars(settings)
            lines += ["", f"[{section.name}]"]
            lines += [f"{key} = {_toml_value(value)}" for key, value in values.items() if value is not None]
        return "\n".join(lines) + "\n"


SECTIONS: dict[str, type] = {"data": DataSettings, "model": ModelSettings, "plan": Plan, "run": MachineSettings}


def assemble(*layers: presets.Settings) -> Experiment:
    """An experiment from layers of settings, the later winning, over the defaults of the dataset that they name."""
    merged: presets.Settings = {name: {} for name in SECTIONS}
    for layer in layers:
        for section, settings in layer.items():
            for key, value in settings.items():
                if section not in SECTIONS or key not in _names(SECTIONS[section]):
                    raise PlanError(f"{section}.{key}: there is no such setting")
                merged[section][key] = value
    for section, name in (("data", "dataset"), ("data", "file"), ("plan", "method"), ("plan", "noise")):
        if not isinstance(given := merged[section].get(name), str | None):  # they are looked up before a section checks them
            raise PlanError(f"{name}: {str(given)[:100]} is not a text")
    if merged["data"].get("file") is None:
        merged["data"].setdefault("dataset", DEFAULT_DATASET)
    elif "dataset" in merged["data"]:
        raise PlanError("data: give a dataset or a file of your own, not both")
    dataset = merged["data"].get("dataset")
    defaults = presets.population(dataset)
    clients = merged["data"].get("clients")
    if isinstance(clients, int):  # a smaller federation should not need to say that a round is smaller, too
        defaults["plan"]["per_round"] = max(1, min(defaults["plan"]["per_round"], clients))
    for section, settings in defaults.items():
        merged[section] = settings | merged[section]
    rate = presets.learning_rate(dataset, merged["plan"])
    if rate is not None:
        merged["plan"].setdefault("learning_rate", rate)
    return Experiment(**{name: kind(**merged[name]) for name, kind in SECTIONS.items()})


def stored(directory: Path | str, given: Iterable[presets.Settings] = ()) -> Experiment:
    """The experiment of a run directory. Settings that are `given` again must agree, but for where it runs."""
    run = RunDirectory(directory)
    run.require()
    written = read_toml(run.config)
    experiment = assemble(written)
    consent.require(experiment.model.network, run.config)
    wanted = assemble(written, *given)
    for section in ("data", "model", "plan"):
        for name, value in vars(getattr(experiment, section)).items():
            if (other := getattr(getattr(wanted, section), name)) != value:
                raise RunError(f"{name}: the run in {run.path} was started with {value}, not {other}")
    return wanted


def read_toml(path: Path | str, *, stream: bool = False) -> presets.Settings:
    """The settings in a configuration file; with `stream`, one that is written to while it is read."""
    try:
        settings = parse_toml(read_bounded(path, MOST_SETTINGS, stream=stream))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} is not a TOML file: {error}") from error
    if "python" in settings:
        raise RunError(f"{path} is of a run whose network and data came from Python; use it from there")
    for section, values in settings.items():
        if section not in SECTIONS or not isinstance(values, dict):
            raise PlanError(f"{path}: {section} is not one of the sections {', '.join(SECTIONS)}")
    return settings


def read_assignment(written: str) -> presets.Settings:
    """The setting in `key=value` or `section.key=value`; the value is written as in TOML, quotes around a text optional."""
    name, equals, value = written.partition("=")
    section, _, key = name.strip().rpartition(".")
    sections = [section] if section else [each for each, kind in SECTIONS.items() if key in _names(kind)]
    if not equals:
        raise PlanError(f"--set {written}: write it as key=value")
    if not sections or key not in _names(SECTIONS.get(sections[0], type(None))):
        raise PlanError(f"--set {written}: there is no setting called {name.strip()!r}; train --help lists them")
    try:
        return {sections[0]: {key: parse_toml(f"value = {value}")["value"]}}
    except ValueError:
        return {sections[0]: {key: value.strip()}}


def _names(kind: type) -> set[str]:
    return {each.name for each in fields(kind)} if is_dataclass(kind) else set()


def _toml_value(value: str | int | float | bool) -> str:
    # A JSON text without escaped slashes or surrogates is a TOML text, and so are JSON's numbers and booleans.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
