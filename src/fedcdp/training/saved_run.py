"""Read back a run directory: the trained model, its metrics and exports, and the privacy budget spent.

`spent` computes ε from the ledger alone, also on a machine other than the one that trained. With another run's ledger the
statement would be false, so `check_ledger` compares first:

| in the directory | must agree with the ledger |
| --- | --- |
| the plan in `config.toml` | every setting but the seed, which a ledger does not hold; also whether the noise is secret |
| the number of clients in `config.toml`, or the clients in `clients.json` | the population |
| the checkpoint, the model | their plan is that of `config.toml`; each of their rounds is charged |

A ledger with more rounds than the checkpoint at worst counts too much, and is accepted. A missing file is not compared:
config and ledger are enough on another machine.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcdp.accounting.budget import Releases
from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.population import Population
from fedcdp.config.experiment import Experiment
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import Federation
from fedcdp.engine import Loss
from fedcdp.engine.functional import on_targets
from fedcdp.errors import FedcdpError, RunError
from fedcdp.files.disk import write_atomically
from fedcdp.files.installation import install_command
from fedcdp.files.tensors import check_tensors, load_tensors, read_about, save_tensors, size_of
from fedcdp.files.tree import Inputs, Layout, each_tensor
from fedcdp.files.untrusted import MOST_JSON, MOST_SETTINGS, parse_json, parse_toml, read_bounded
from fedcdp.models.networks import outputs_of, prepare
from fedcdp.training.evaluation import figures, figures_of_clients, is_binary, predictions, threshold_for
from fedcdp.training.loss_contract import loss_for
from fedcdp.training.metrics import main_figure
from fedcdp.training.prepared import deal_out, load_splits, network_of, stored
from fedcdp.training.run import Run
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.scaling import restore_scaling

if TYPE_CHECKING:
    from fedcdp.accounting.statement import Mode, Privacy, Usage

ExportFormat = Literal["safetensors", "torchscript", "onnx", "csv", "tensorboard"]
_BATCH = 1000
_QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


@dataclass(frozen=True)
class Trained:
    """The model of a run directory, with the data it was trained on."""

    directory: RunDirectory
    experiment: Experiment
    splits: Splits
    model: nn.Module

    @staticmethod
    def load(path: Path | str, data_dir: Path | str | None = None, quiet: bool = True) -> Trained:
        """Read a run directory; for an unfinished run, the latest checkpoint."""
        experiment, directory = stored(path), RunDirectory(path)
        splits = load_splits(experiment, data_dir, quiet)
        model = prepare(network_of(experiment, splits), experiment.plan, "cpu").eval()
        if directory.model.exists():
            expected = dict(model.state_dict())
            weights, source = load_tensors(directory.model, "model-1", size_of(expected))[0], directory.model
        elif (state := directory.load_state(most=size_of(model.state_dict()))) is not None:
            weights, source = state.average or state.weights, directory.checkpoint
            if experiment.plan.scaling_noise is not None:
                restore_scaling(model, directory)
            expected = {name: p for name, p in model.named_parameters() if p.requires_grad}
        else:
            raise RunError(f"{directory.path} has no model yet: not one round is done")
        check_tensors(source, weights, expected)
        model.load_state_dict(weights, strict=False)
        return Trained(directory, experiment, splits, model)

    def as_run(self) -> Run:
        """The run as training would have returned it, except for the time it took."""
        federation = self.federation
        ledger = Ledger.open(self.directory.ledger)
        if ledger.population["clients"] != federation.clients:
            raise RunError(f"{self.directory.ledger} has {ledger.population['clients']} clients, not {federation.clients}")
        metrics, released = self.directory.read_metrics(), Releases(federation.clients, ledger)
        scores, client_scores = self.directory.read_scores(metrics[-1]["round"] if metrics else 0)
        plan = self.experiment.plan
        return Run(
            plan=plan,
            federation=federation,
            model=self.model,
            population=Population.of(federation, Layout.of(self.model), plan),
            metrics=metrics,
            seconds=0.0,
            client_steps=0,
            charges=tuple(released.charges),
            participations=released.participations,
            directory=self.directory.path,
            scores=scores,
            client_scores=client_scores,
        )

    def split(self, name: str) -> Dataset:
        """One of the splits; raises an error that lists them if the name is unknown."""
        found = {"train": self.splits.train, "validation": self.splits.validation, "test": self.splits.test}.get(name)
        if found is None:
            names = ["train", "validation"] + (["test"] if self.splits.test is not None else [])
            raise RunError(f"split: {self.splits.name} has {', '.join(names)}, not {name!r}")
        return found

    @cached_property
    def federation(self) -> Federation:
        """The clients among whom the data are partitioned."""
        return deal_out(self.experiment, self.splits)

    def outputs(self, data: Dataset) -> Tensor:
        """The model's outputs for all examples."""
        with torch.no_grad():
            return torch.cat([outputs_of(self.model, inputs) for inputs, _ in data.batches(_BATCH)])

    def evaluate(self, split: str = "validation", per_client: bool = False) -> dict[str, Any]:
        """The metrics of the data's task on a split; with `per_client` also those of the clients.

        `accuracy` is None where the task has none; `metrics` holds the others. `per_client` has the distribution of the main
        metric over clients, and `clients`, where they have names, the figures of each. A client is judged on its own records
        in the split: in `train`, and in `validation` if its records came from clients. On any other split its accuracy is
        the accuracy per class, weighted by how often the client holds that class.
        """
        data = self.split(split)
        outputs = self.outputs(data)
        loss = _loss_on(data, outputs)
        found = figures(loss, outputs, data)
        result: dict[str, Any] = {"split": split, "examples": len(data), "accuracy": found.pop("accuracy", None)}
        result["metrics"] = found
        if per_client:
            rows = self._clients(split, data, outputs, loss)
            result["per_client"] = _spread([value for _, value in filter(None, map(main_figure, rows))])
            if self.federation.names is not None:
                result["clients"] = rows
        return result

    def reads_training_records(self, split: str, per_client: bool) -> bool:
        """Whether `evaluate` computes figures from training records, which no ε covers."""
        return split == "train" or (per_client and not self._has_own(split))

    def _has_own(self, split: str) -> bool:
        """Whether it is known which records of a split are a client's own."""
        return split == "train" or (split == "validation" and self.federation.validation_clients is not None)

    def _clients(self, split: str, data: Dataset, outputs: Tensor, loss: Loss) -> list[dict[str, Any]]:
        """The figures of each client, with its name."""
        federation, own = self.federation, self._has_own(split)
        if own and (federation.names is not None or not data.classes):
            return figures_of_clients(loss, outputs, data, federation, split)
        if not data.classes:
            raise RunError(f"per_client: the records of split {split} are nobody's; split train shows each client's own")
        right = predictions(outputs, threshold_for(loss, outputs, data)) == data.targets
        shares = zip(range(federation.clients), _accuracies(right, data, federation, own), strict=True)
        return [{"client": federation.name(client), "accuracy": share} for client, share in shares if not math.isnan(share)]

    def export(self, form: str, to: Path) -> Path:
        """Write the model, or its training metrics, in another format."""
        if form not in get_args(ExportFormat):
            raise RunError(f"format: {form!r} is not one of {', '.join(get_args(ExportFormat))}")
        try:
            if to.exists():
                raise RunError(f"{to} already exists; nothing was overwritten")
            if not to.parent.is_dir():
                raise RunError(f"{to} cannot be written: there is no directory {to.parent}")
            getattr(self, f"_export_{form}")(to)
        except ImportError as error:
            raise RunError(f"format: {form} needs {error.name}; install it with {install_command('report')}") from error
        except OSError as error:
            raise RunError(f"{to} cannot be written: {error.strerror}") from error
        return to

    def _no_records(self, count: int) -> Inputs:
        """Inputs of the right shape and type for formats that trace a model: such a format may also keep the inputs."""
        inputs = self.splits.validation.inputs
        return each_tensor(inputs, lambda value: torch.zeros_like(value[:1]).repeat(count, *(1 for _ in value.shape[1:])))

    def _traceable(self, count: int) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model as a function of tensors that returns a tensor, with inputs by name; several are in the data's order."""
        inputs = self._no_records(count)
        with torch.no_grad():
            plain = isinstance(inputs, Tensor) and isinstance(self.model(inputs), Tensor)
        if isinstance(inputs, dict):
            return _Positional(self.model, tuple(inputs)), inputs
        return self.model if plain else _Positional(self.model, ()), {"inputs": inputs}

    def _export_safetensors(self, to: Path) -> None:
        save_tensors(to, self.model.state_dict(), {"format": "model-1"})

    def _export_torchscript(self, to: Path) -> None:
        model, inputs = self._traceable(1)
        write_atomically(to, torch.jit.trace(model, tuple(inputs.values())).save_to_buffer())

    def _export_onnx(self, to: Path) -> None:
        import onnx  # noqa: F401  (named in the error if it is missing)
        import onnxscript  # noqa: F401

        model, inputs = self._traceable(2)
        batch = torch.export.Dim("batch")
        axes = tuple({0: batch} for _ in inputs)
        program = torch.onnx.export(
            model, tuple(inputs.values()), dynamo=True, verbose=False,
            dynamic_shapes=axes if model is self.model else (axes,),
            input_names=list(inputs) if len(inputs) > 1 else None,
        )  # fmt: skip
        write_atomically(to, program.model_proto.SerializeToString())  # type: ignore[union-attr]

    def _export_csv(self, to: Path) -> None:
        rows = self.directory.read_metrics()
        written = StringIO()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(written, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(to, written.getvalue().encode())

    def _export_tensorboard(self, to: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(to)) as writer:
            writer.add_text("config", f"```toml\n{read_bounded(self.directory.config, MOST_SETTINGS).decode()}\n```")
            for row in self.directory.read_metrics():
                for name, value in row.items():
                    if name != "round" and value is not None:
                        writer.add_scalar(name, value, row["round"])


class _Positional(nn.Module):
    """A model as a function of tensors, one for each of its named inputs, that returns a tensor."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        return outputs_of(self.model, dict(zip(self.names, inputs, strict=True)) if self.names else inputs[0])


def _loss_on(data: Dataset, outputs: Tensor) -> Loss:
    """The loss of the data's task; that of a logit where a network has a single output for two classes."""
    if data.classes == 2 and is_binary(outputs):
        return on_targets(F.binary_cross_entropy_with_logits)
    return on_targets(loss_for(data, None))


def _spread(values: list[float]) -> dict[str, float]:
    """The mean and some quantiles; empty if there are no values."""
    if not values:
        return {}
    return {"mean": float(np.mean(values))} | {name: float(np.quantile(values, q)) for name, q in _QUANTILES.items()}


def _accuracies(right: Tensor, data: Dataset, federation: Federation, own_records: bool) -> NDArray[np.float64]:
    """The accuracy of each client, on its own records or weighted by its classes; NaN where it has none."""
    accuracies = []
    classes = data.classes
    by_class = torch.bincount(data.targets[right], minlength=classes) / torch.bincount(data.targets, minlength=classes)
    scores = (right.double() if own_records else by_class.double()[federation.train.targets]).numpy()
    for clients in np.array_split(np.arange(federation.clients), -(-federation.clients // _BATCH)):
        table, sizes = federation.table(clients)
        held = np.arange(table.shape[1]) < sizes[:, None]
        # A class without examples in the split has no accuracy; it counts neither for nor against a client.
        counted = held & np.isfinite(scores[table])
        scored, judged = np.where(counted, scores[table], 0.0).sum(1), counted.sum(1)
        accuracies.append(np.where(judged > 0, scored / np.maximum(judged, 1), np.nan))
    return np.concatenate(accuracies)


def check_ledger(run: RunDirectory, ledger: Ledger) -> None:
    """Raise `RunError` if a ledger belongs to another run or lacks rounds."""
    config = _read(run.config, MOST_SETTINGS, parse_toml)
    try:
        ours, theirs = (Plan(**plan | {"seed": 0}) for plan in (config["plan"], ledger.plan))
        digest = Plan(**config["plan"]).digest()
    except (KeyError, TypeError, FedcdpError) as error:
        raise RunError(f"{run.config} or {run.ledger} holds a plan that this program does not know: {error}") from error
    for name, value in vars(ours).items():
        if (other := getattr(theirs, name)) != value:
            raise RunError(f"{run.ledger} belongs to another run: its plan has {name} = {other}, but {run.config} {value}")
    if ledger.noise != ("secure" if ours.secure_noise else "seeded"):
        raise RunError(f"{run.ledger} belongs to another run: its noise is {ledger.noise}, but {run.config} says otherwise")
    _check_clients(run, ledger, config)
    charged = ledger.charges[-1].round + 1 if ledger.charges else 0
    for path, form in ((run.checkpoint, "checkpoint-1"), (run.model, "model-1")):
        if not path.exists():
            continue
        about = read_about(path, form)
        if about.get("plan", digest) != digest:
            raise RunError(f"{path} belongs to another plan than {run.config}")
        if type(about.get("round")) is not int or about["round"] > charged:
            done = about.get("round")
            raise RunError(f"{run.ledger} has {charged} rounds and {path.name} {done}: it lacks some, or is another run's")


def _check_clients(run: RunDirectory, ledger: Ledger, config: Mapping[str, Any]) -> None:
    counted, roster = ledger.population["clients"], run.path / "clients.json"
    if roster.exists():
        members = _read(roster, MOST_JSON, parse_json)
        try:
            clients, fewest = len(members["clients"]), min(each["records"] for each in members["clients"])
        except (KeyError, TypeError, ValueError):
            raise RunError(f"{roster} is damaged") from None
        if (clients, True) != (counted, ledger.population.get("records", 1) <= fewest):
            raise RunError(f"{run.ledger} belongs to another run: it is not for the {clients} clients in {roster.name}")
    elif isinstance(data := config.get("data"), dict) and (dealt := data.get("clients")) != counted:
        raise RunError(f"{run.ledger} belongs to another run: it is for {counted} clients, but {run.config} has {dealt}")


def _read(path: Path, most: int, parse: Any) -> Any:
    try:
        return parse(read_bounded(path, most))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from None


def spent(directory: Path | str, mode: Mode = "tight") -> tuple[Plan, Privacy]:
    """The plan of a run, and its privacy statement for the rounds released so far. Refuses the ledger of another run."""
    from fedcdp.accounting.statement import state

    run = RunDirectory(directory)
    run.require()
    ledger = Ledger.open(run.ledger)
    check_ledger(run, ledger)
    try:
        plan, population = Plan(**ledger.plan), Population.read(ledger.population)
    except (TypeError, FedcdpError) as error:
        raise RunError(f"{run.ledger} holds a plan or population that this program does not know: {error}") from error
    return plan, state(plan, population, mode=mode, rounds=ledger.rounds, usage=usage_of(ledger, population))


def usage_of(ledger: Ledger, population: Population) -> Usage:
    """Participation counts of the most-used clients: one, or as many clients as may hold copies of a record."""
    from fedcdp.accounting.statement import Usage

    counts = ledger.busiest(population.copies)
    by_client = tuple(ledger.participations().tolist()) if population.held else ()
    return Usage(ledger.rounds, tuple(int(count) for count in counts), by_client)
