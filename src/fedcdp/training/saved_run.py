"""Read back a run directory: the trained model, its accuracy and exports, and the privacy budget spent.

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
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcdp.accounting.budget import Releases
from fedcdp.accounting.ledger import Ledger
from fedcdp.accounting.population import Population
from fedcdp.config.experiment import Experiment
from fedcdp.config.plan import Plan
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import Federation
from fedcdp.errors import FedcdpError, RunError
from fedcdp.files.disk import write_atomically
from fedcdp.files.installation import install_command
from fedcdp.files.tensors import check_tensors, load_tensors, read_about, save_tensors, size_of
from fedcdp.files.tree import Layout
from fedcdp.files.untrusted import MOST_JSON, MOST_SETTINGS, parse_json, parse_toml, read_bounded
from fedcdp.models.networks import outputs_of, prepare
from fedcdp.training.evaluation import predictions
from fedcdp.training.prepared import deal_out, load_splits, network_of, stored
from fedcdp.training.rundir import RunDirectory
from fedcdp.training.scaling import restore_scaling
from fedcdp.training.simulate import Run

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
        federation = deal_out(self.experiment, self.splits)
        ledger = Ledger.open(self.directory.ledger)
        if ledger.population["clients"] != federation.clients:
            raise RunError(f"{self.directory.ledger} has {ledger.population['clients']} clients, not {federation.clients}")
        metrics, released = self.directory.read_metrics(), Releases(federation.clients, ledger)
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
        )

    def split(self, name: str) -> Dataset:
        """One of the splits; raises an error that lists them if the name is unknown."""
        found = {"train": self.splits.train, "validation": self.splits.validation, "test": self.splits.test}.get(name)
        if found is None:
            names = ["train", "validation"] + (["test"] if self.splits.test is not None else [])
            raise RunError(f"split: {self.splits.name} has {', '.join(names)}, not {name!r}")
        return found

    def correct(self, data: Dataset) -> Tensor:
        """Which examples the model classifies correctly."""
        with torch.no_grad():
            answers = [predictions(outputs_of(self.model, inputs)) for inputs, _ in data.batches(_BATCH)]
        return torch.cat(answers) == data.targets

    def evaluate(self, split: str = "validation", per_client: bool = False) -> dict[str, Any]:
        """Accuracy on a split; with `per_client` also its distribution over clients.

        A client's accuracy on the training split is that on its own records. On a split that is not partitioned among
        clients, it is the accuracy per class, weighted by how often the client holds that class.
        """
        data = self.split(split)
        correct = self.correct(data)
        result: dict[str, Any] = {"split": split, "examples": len(data), "accuracy": correct.double().mean().item()}
        if per_client:
            clients = _per_client(correct, data, deal_out(self.experiment, self.splits), split == "train")
            result["per_client"] = {"mean": float(clients.mean())} | {
                name: float(np.quantile(clients, q)) for name, q in _QUANTILES.items()
            }
        return result

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

    def _no_records(self, count: int) -> Tensor:
        """Inputs of the right shape for formats that trace a model: such a format may also keep the inputs."""
        return torch.zeros_like(self.splits.validation.tensor[:1]).repeat(count, *(1 for _ in self.splits.validation.shape))

    def _export_safetensors(self, to: Path) -> None:
        save_tensors(to, self.model.state_dict(), {"format": "model-1"})

    def _export_torchscript(self, to: Path) -> None:
        buffer = torch.jit.trace(self.model, self._no_records(1)).save_to_buffer()
        write_atomically(to, buffer)

    def _export_onnx(self, to: Path) -> None:
        import onnx  # noqa: F401  (named in the error if it is missing)
        import onnxscript  # noqa: F401

        batch = {0: torch.export.Dim("batch")}
        program = torch.onnx.export(self.model, (self._no_records(2),), dynamo=True, dynamic_shapes=(batch,), verbose=False)
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


def _per_client(correct: Tensor, data: Dataset, federation: Federation, own_records: bool) -> NDArray[np.float64]:
    accuracies = []
    classes = data.classes
    by_class = torch.bincount(data.targets[correct], minlength=classes) / torch.bincount(data.targets, minlength=classes)
    scores = (correct.double() if own_records else by_class.double()[federation.train.targets]).numpy()
    for clients in np.array_split(np.arange(federation.clients), -(-federation.clients // _BATCH)):
        table, sizes = federation.table(clients)
        held = np.arange(table.shape[1]) < sizes[:, None]
        # A class without examples in the split has no accuracy; it counts neither for nor against a client.
        counted = held & np.isfinite(scores[table])
        scored = np.where(counted, scores[table], 0.0).sum(1)
        judged = counted.any(1)
        accuracies.append(scored[judged] / counted[judged].sum(1))
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
