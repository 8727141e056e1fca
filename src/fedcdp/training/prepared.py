"""A prepared experiment: data loaded and partitioned, the network built, each once per command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedcdp.accounting.population import Population
from fedcdp.config import consent
from fedcdp.config.default_recipe import on_fixed_features
from fedcdp.config.experiment import DEFAULT_DATASET, DataSettings, Experiment, Scaling, assemble, read_toml
from fedcdp.config.plan import Plan
from fedcdp.config.presets import BENCHMARKS, UNEQUAL, Settings
from fedcdp.data import load, load_file
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import Federation, partition
from fedcdp.data.unequal import unequal_sizes
from fedcdp.errors import ModelError, PlanError, RunError
from fedcdp.files.tree import Layout
from fedcdp.mechanism.secure_sum import check_capacity
from fedcdp.models.batch_norm import mixing_layers
from fedcdp.models.networks import build, prepare, with_scaling
from fedcdp.training.python_origin import check_origin, read_origin
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.scaling import check_inputs

# The arguments of `load_file`, and the settings they come from.
_FILE_OPTIONS = {
    "client": "client_column", "label": "label_column", "task": "task", "drop": "drop_columns",
    "categories": "categories", "columns": "columns", "classes": "classes", "missing": "missing",
    "delimiter": "delimiter", "scaling": "scaling", "split_seed": "split_seed",
    "validation_fraction": "validation_fraction",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All inputs of a training: the plan, its clients, a network in training mode, and the facts the accountant needs."""

    plan: Plan
    federation: Federation
    network: nn.Module
    """A copy of the given network, in training mode."""
    population: Population

    @staticmethod
    def of(model: nn.Module, federation: Federation, plan: Plan) -> Prepared:
        """Check that the plan can train this network over this federation, and prepare it. The model is not changed."""
        plan.check_clients(federation.clients)
        if plan.scaling_noise is not None:
            check_inputs(federation)
            model = with_scaling(model, federation.train.shape)
        network = prepare(model, plan, "cpu")
        if (mixing := mixing_layers(model)) and federation.smallest < plan.batch_size:
            raise ModelError(
                f"layer {mixing[0][0]} mixes examples, and a client with {federation.smallest} records leaves "
                f"empty slots in a batch of {plan.batch_size}, which would be mixed in; use GroupNorm or a smaller batch"
            )
        layout = Layout.of(network)
        population = Population.of(federation, layout, plan)
        most = max(population.sizes or (), default=population.records)
        check_capacity(plan, groups=population.layers, size=layout.size, most_records=most)
        return Prepared(plan=plan, federation=federation, network=network, population=population)

    def check_origin(self, directory: RunDirectory) -> None:
        """Raise `RunError` if the directory is that of a run from Python which cannot have had this network and data."""
        if (origin := read_origin(directory)) is not None:
            check_origin(
                directory,
                origin[0],
                network=self.network,
                federation=self.federation,
                plan=self.plan,
                population=self.population,
            )


def load_splits(experiment: Experiment, data_dir: Path | str | None = None, quiet: bool = False) -> Splits:
    """Load the data of an experiment."""
    settings = experiment.data
    if settings.file is not None:
        return _own_splits(settings)
    name = settings.dataset or DEFAULT_DATASET
    return load(
        name, data_dir, split_seed=settings.split_seed, scaling=_when_loaded(settings.scaling) or "training", quiet=quiet
    )


def _when_loaded(scaling: Scaling | None) -> Scaling | None:
    """Private scaling begins with public ranges; training then standardises by what clients release under noise."""
    return "public" if scaling == "private" else scaling


def _own_splits(settings: DataSettings) -> Splits:
    """A user's own file. The splits that were read last are kept, as long as neither file nor settings change."""
    options = {name: getattr(settings, setting) for name, setting in _FILE_OPTIONS.items()}
    options["scaling"] = _when_loaded(settings.scaling)
    stamps = []
    for path in filter(None, (settings.file, settings.columns)):
        with suppress(OSError, ValueError):  # a missing file is refused when it is read
            found = Path(path).stat()
            stamps.append((found.st_mtime_ns, found.st_size))
    return _read_own(str(settings.file), tuple(options.items()), tuple(stamps))


@lru_cache(maxsize=1)
def _read_own(path: str, options: tuple[tuple[str, Any], ...], stamps: tuple[tuple[int, int], ...]) -> Splits:  # noqa: ARG001
    return load_file(path, **dict(options))


def with_clients_of_file(given: Sequence[Settings]) -> list[Settings]:
    """The settings over one more layer, if they name a client column: as many clients as it names, all in every round."""
    data = assemble(*({"data": layer["data"]} for layer in given if "data" in layer)).data
    if data.file is None or data.client_column is None:
        return list(given)
    names = _own_splits(data).owner_names or ()
    return [{"data": {"clients": len(names)}, "plan": {"per_round": len(names)}}, *given]


def deal_out(experiment: Experiment, splits: Splits) -> Federation:
    """Partition the data among clients."""
    settings = experiment.data
    if splits.owners is not None:
        named = len(splits.owner_names or ())
        if settings.partition != "natural":
            raise PlanError(
                f"partition: {settings.partition} is not allowed with a client column, which says who holds what"
            )
        if settings.clients != named:
            raise PlanError(f"clients: {settings.clients} is not allowed; {settings.client_column} names {named}")
        return partition(splits, scheme="natural", seed=experiment.plan.seed)
    return partition(
        splits,
        clients=settings.clients,
        scheme=settings.partition,
        records=settings.records,
        classes_per_client=settings.classes_per_client,
        alpha=settings.alpha,
        smallest=settings.smallest,
        size_ratio=settings.size_ratio,
        seed=experiment.plan.seed,
    )


def build_network(experiment: Experiment, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the network for inputs of this shape, initialised from the plan's seed."""
    return build(experiment.model.network, shape, classes, experiment.model.activation, experiment.plan.seed)


def outputs_needed(data: Dataset) -> int:
    """How many outputs a network needs for a dataset."""
    if data.outputs is None:
        raise PlanError(f"task: a network cannot be built for task {data.task}, which leaves its outputs open")
    return data.outputs


def network_of(experiment: Experiment, data: Splits | Federation) -> nn.Module:
    """Build the network for the data of an experiment."""
    network = build_network(experiment, data.train.shape, outputs_needed(data.train))
    return network if experiment.plan.scaling_noise is None else with_scaling(network, data.train.shape)


def prepare_experiment(
    experiment: Experiment, data_dir: Path | str | None = None, *, quiet: bool = False, splits: Splits | None = None
) -> Prepared:
    """Load the data, unless `splits` are given, partition them and build the network."""
    splits = splits or load_splits(experiment, data_dir, quiet)
    return Prepared.of(network_of(experiment, splits), deal_out(experiment, splits), experiment.plan)


def stored(directory: Path | str, given: Iterable[Settings] = ()) -> Experiment:
    """The experiment of a run directory. Settings in `given` must agree with it, except where it runs.

    A run from Python stores its plan alone: `given` must name the network and the data.
    """
    run, given = RunDirectory(directory), list(given)
    if (origin := read_origin(run)) is not None:
        written = {"plan": origin[1].written()}
        _require_named(run, given)
        wanted = assemble(*with_clients_of_file(given)[: -len(given)], written, *given)
        experiment = replace(wanted, plan=origin[1])
    else:
        written = read_toml(run.config)
        experiment = assemble(written)
        consent.require(experiment.model.network, run.config)
        wanted = assemble(written, *given)
    for section in ("data", "model", "plan"):
        for name, value in vars(getattr(experiment, section)).items():
            if (other := getattr(getattr(wanted, section), name)) != value:
                raise RunError(f"{name}: the run in {run.path} was started with {value}, not {other}")
    return wanted


def _require_named(run: RunDirectory, given: Sequence[Settings]) -> None:
    """Refuse a run from Python unless the settings name its network and its data."""
    named = {key for layer in given for section in ("data", "model") for key in layer.get(section, {})}
    if "network" not in named or not named & {"file", "dataset"}:
        raise RunError(
            f"{run.config} belongs to a run whose network and data came from Python; name them with --model and --data, or "
            "open the run from Python with fedcdp.open_run"
        )


_LAYERS = {"auto": 3, "cnn": 3, "mlp": 3, "cpl": 5, "small": 3}


def population_of(
    experiment: Experiment, records: int | None = None, copies: int | None = None, layers: int | None = None
) -> Population:
    """K, N_i, copies and layers from the settings; arguments take precedence, and missing values raise an error."""
    data, plan = experiment.data, experiment.plan
    if data.file is not None:
        found = prepare_experiment(experiment).population
        sizes = () if records else found.sizes
        return Population(found.clients, records or found.records, copies or found.copies, layers or found.layers, sizes)
    benchmark = BENCHMARKS.get(data.dataset or "")
    if benchmark is None:
        raise PlanError(f"dataset: {data.dataset!r} is not one of {', '.join(BENCHMARKS)}")
    if layers is None:
        network = experiment.model.network
        layers = 1 if plan.clip_mode == "flat" or on_fixed_features(network) else _LAYERS.get(network)
    if layers is None:
        raise PlanError(f"layers: give the number of layers of {experiment.model.network} with --layers")
    held = records or data.records
    if data.partition in UNEQUAL and records is None:
        return _unequal_population(experiment, benchmark.train, copies or 1, layers)
    if data.partition == "full" and held in (None, benchmark.train):
        return Population(data.clients, benchmark.train, copies or data.clients, layers)
    if held is None:
        held = benchmark.train // data.clients
    if not 1 <= held <= benchmark.train:
        raise PlanError(f"records: {held} is not allowed; {data.dataset} has {benchmark.train} records to distribute")
    return Population(data.clients, held, copies or -(-data.clients // (benchmark.train // held)), layers)


def _unequal_population(experiment: Experiment, total: int, copies: int, layers: int) -> Population:
    """The population of clients of unequal size. Where their sizes depend on the labels, the data are loaded."""
    data, plan = experiment.data, experiment.plan
    if data.partition == "dirichlet-classes" or data.records is not None:  # records: refused as in training
        return replace(prepare_experiment(experiment).population, copies=copies, layers=layers)
    sizes = np.unique(
        unequal_sizes(
            data.partition,
            total,
            data.clients,
            alpha=data.alpha,
            smallest=data.smallest,
            size_ratio=data.size_ratio,
            seed=plan.seed,
        )
    ).tolist()
    return Population(data.clients, sizes[0], copies, layers, tuple(sizes) if len(sizes) > 1 else ())
