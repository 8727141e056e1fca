"""The population of an experiment that is only described: no data are loaded, and no network is trained."""

from __future__ import annotations

from fedcdp.accounting.population import Population
from fedcdp.errors import PlanError
from fedcdp.experiment import Experiment
from fedcdp.presets import BENCHMARKS

_LAYERS = {"auto": 3, "cnn": 3, "mlp": 3, "cpl": 5, "small": 3, "linear": 1, "oriented-gradients": 1}


def population_of(
    experiment: Experiment, records: int | None = None, copies: int | None = None, layers: int | None = None
) -> Population:
    """K, N_i, copies and layers as the settings say; what is given here wins, and what nothing says is asked for."""
    data, plan = experiment.data, experiment.plan
    if data.file is not None:
        found = experiment.population(experiment.splits())
        sizes = () if records else found.sizes
        return Population(found.clients, records or found.records, copies or found.copies, layers or found.layers, sizes)
    benchmark = BENCHMARKS.get(data.dataset or "")
    if benchmark is None:
        raise PlanError(f"dataset: {data.dataset!r} is not one of {', '.join(BENCHMARKS)}")
    if layers is None:
        layers = 1 if plan.clip_mode == "flat" else _LAYERS.get(experiment.model.network)
    if layers is None:
        raise PlanError(f"layers: say with --layers how many layers {experiment.model.network} has")
    held = records or data.records
    if data.partition == "full" and held in (None, benchmark.train):
        return Population(data.clients, benchmark.train, copies or data.clients, layers)
    if held is None:
        held = benchmark.train // data.clients
    if not 1 <= held <= benchmark.train:
        raise PlanError(f"records: {held} is not allowed; {data.dataset} has {benchmark.train} to deal out")
    return Population(data.clients, held, copies or -(-data.clients // (benchmark.train // held)), layers)
