"""A trained model and what is done with it: accuracy on any split and for each client, export to other formats."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcdp.accounting.charged import Releases
from fedcdp.accounting.ledger import Ledger
from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.partition import Federation
from fedcdp.errors import RunError
from fedcdp.evaluation import predictions
from fedcdp.experiment import Experiment, stored
from fedcdp.files import check_tensors, load_tensors, save_tensors, size_of, write_atomically
from fedcdp.models import prepare
from fedcdp.rundir import RunDirectory
from fedcdp.simulation import Run
from fedcdp.untrusted import MOST_SETTINGS, read_bounded

ExportFormat = Literal["safetensors", "torchscript", "onnx", "csv", "tensorboard"]
_BATCH = 1000
_QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


@dataclass(frozen=True)
class Trained:
    """The model of a run directory, with the data that it was trained on."""

    directory: RunDirectory
    experiment: Experiment
    splits: Splits
    model: nn.Module

    @staticmethod
    def load(path: Path | str, data_dir: Path | str | None = None, quiet: bool = True) -> Trained:
        """Read a run directory; of a run that is not done, the latest checkpoint."""
        experiment, directory = stored(path), RunDirectory(path)
        splits = experiment.splits(data_dir, quiet)
        model = prepare(experiment.network(splits), experiment.plan, "cpu").eval()
        if directory.model.exists():
            expected = dict(model.state_dict())
            weights, source = load_tensors(directory.model, "model-1", size_of(expected))[0], directory.model
        elif (state := directory.load_state(most=size_of(model.state_dict()))) is not None:
            weights, source = state.average or state.weights, directory.checkpoint
            expected = {name: p for name, p in model.named_parameters() if p.requires_grad}
        else:
            raise RunError(f"{directory.path} has no model yet: not one round is done")
        check_tensors(source, weights, expected)
        model.load_state_dict(weights, strict=False)
        return Trained(directory, experiment, splits, model)

    def as_run(self) -> Run:
        """The run as training would have returned it, but for the time that it took."""
        federation = self.experiment.federation(self.splits)
        ledger = Ledger.open(self.directory.ledger)
        if ledger.population["clients"] != federation.clients:
            raise RunError(f"{self.directory.ledger} is of {ledger.population['clients']} clients, not {federation.clients}")
        metrics, released = self.directory.read_metrics(), Releases(federation.clients, ledger)
        return Run(
            self.experiment.plan, federation, self.model, metrics, 0.0, 0, tuple(released.charges), released.participations,
            self.directory.path,
        )  # fmt: skip

    def split(self, name: str) -> Dataset:
        """One of the splits, or a sentence that says which there are."""
        found = {"train": self.splits.train, "validation": self.splits.validation, "test": self.splits.test}.get(name)
        if found is None:
            names = ["train", "validation"] + (["test"] if self.splits.test is not None else [])
            raise RunError(f"split: {self.splits.name} has {', '.join(names)}, not {name!r}")
        return found

    def correct(self, data: Dataset) -> Tensor:
        """Which examples the model classifies correctly."""
        with torch.no_grad():
            answers = [predictions(self.model(inputs)) for inputs in data.inputs.split(_BATCH)]
        return torch.cat(answers) == data.targets

    def evaluate(self, split: str = "validation", per_client: bool = False) -> dict[str, Any]:
        """Accuracy on a split; with `per_client` also how it spreads over clients.

        A client's accuracy on the training split is that on its own records; on a split that is not dealt out to clients,
        it is the accuracy in each class, weighted by how often the client holds that class.
        """
        data = self.split(split)
        correct = self.correct(data)
        result: dict[str, Any] = {"split": split, "examples": len(data), "accuracy": correct.double().mean().item()}
        if per_client:
            clients = _per_client(correct, data, self.experiment.federation(self.splits), split == "train")
            result["per_client"] = {"mean": float(clients.mean())} | {
                name: float(np.quantile(clients, q)) for name, q in _QUANTILES.items()
            }
        return result

    def export(self, form: str, to: Path) -> Path:
        """Write the model, or the metrics of its training, in another format."""
        if form not in get_args(ExportFormat):
            raise RunError(f"format: {form!r} is not one of {', '.join(get_args(ExportFormat))}")
        try:
            if to.exists():
                raise RunError(f"{to} already exists; nothing was overwritten")
            if not to.parent.is_dir():
                raise RunError(f"{to} cannot be written: there is no directory {to.parent}")
            getattr(self, f"_export_{form}")(to)
        except ImportError as error:
            raise RunError(f"format: {form} needs {error.name}; install it with pip install 'fedcdp[report]'") from error
        except OSError as error:
            raise RunError(f"{to} cannot be written: {error.strerror}") from error
        return to

    def _no_records(self, count: int) -> Tensor:
        """Inputs of the right shape, for a format that records what a model does: it may keep the inputs, too."""
        return torch.zeros_like(self.splits.validation.inputs[:1]).repeat(count, *(1 for _ in self.splits.validation.shape))

    def _export_safetensors(self, to: Path) -> None:
        save_tensors(to, self.model.state_dict(), {"format": "model-1"})

    def _export_torchscript(self, to: Path) -> None:
        buffer = torch.jit.trace(self.model, self._no_records(1)).save_to_buffer()
        write_atomically(to, buffer)

    def _export_onnx(self, to: Path) -> None:
        import onnx  # noqa: F401  (named in the error where it is missing)
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
        # A class that the split does not hold has no accuracy; it counts neither for nor against a client.
        counted = held & np.isfinite(scores[table])
        scored = np.where(counted, scores[table], 0.0).sum(1)
        judged = counted.any(1)
        accuracies.append(scored[judged] / counted[judged].sum(1))
    return np.concatenate(accuracies)
