"""A user's own file in a deployment: each node gets exactly the records of the simulator's client, and their options.

| file | a node gets |
| --- | --- |
| a table (`.csv`, `.parquet`, `.npz` with an array for each column) | its rows in the same format, with the same options |
| `.npz` with an array of inputs; any file with `scaling = training` | `records.npz` with inputs and targets as numbers |
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from fedcdp.config.experiment import Experiment
from fedcdp.data.dataset import Splits
from fedcdp.data.federation import Federation
from fedcdp.data.file_parts import file_part
from fedcdp.data.table_rules import DELIMITERS
from fedcdp.deploy.site.directory import NodePlace
from fedcdp.errors import DeploymentError
from fedcdp.training.prepared import deal_out, load_splits

_SECRET, _PLAIN = 0o600, 0o644
# Settings of `[data]` that a node's configuration repeats, with hyphens.
_OPTIONS = ("client_column", "label_column", "drop_columns", "categories", "classes", "delimiter")


@dataclass(frozen=True, eq=False)
class OwnFile:
    """The records of a user's own file, dealt out to nodes."""

    experiment: Experiment
    splits: Splits
    federation: Federation

    @staticmethod
    def of(experiment: Experiment) -> OwnFile | None:
        """The file of an experiment; None if its data are a benchmark."""
        if experiment.data.file is None:
            return None
        splits = load_splits(experiment, quiet=True)
        federation = deal_out(experiment, splits)
        if federation.copies > 1:  # a server does not know about copies among clients' records, and would count too little
            raise DeploymentError(
                f"partition: {experiment.data.partition} gives a record to several nodes; use disjoint parts"
            )
        return OwnFile(experiment, splits, federation)

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names; empty if they have none."""
        return self.federation.names or ()

    def records(self, client: int) -> int:
        """How many records a client has."""
        return int(self.federation.sizes([client])[0])

    def options(self, client: int) -> dict[str, str | int]:
        """The part of a node's configuration that says how its client reads its file."""
        data, found = self.experiment.data, dict[str, str | int]()
        found["data"] = f"records{self._suffix}"
        if data.task != "classification":
            found["task"] = data.task
        if self.names:
            found["client"] = self.names[client]
        if self.splits.table is not None:
            given = {name.replace("_", "-"): getattr(data, name) for name in _OPTIONS}
            found |= {name: value for name, value in given.items() if value is not None}
            if data.missing != "refuse":
                found["missing"] = data.missing
            if data.columns is not None:
                found["columns"] = "columns.toml"
        if not self.experiment.plan.secure_noise:  # a reproducible run repeats what the simulator's client does
            found["partition-id"] = client
        return found

    def files(self, node: NodePlace) -> list[tuple[Path, bytes, int]]:
        """The files of a node: path, content and mode."""
        data, indices = self.experiment.data, self.federation.indices(node.number - 1)
        records = node.records(self._suffix)
        if self.splits.table is None or self.splits.rows is None:
            part, content = self.federation.train.take(torch.from_numpy(indices)), BytesIO()
            np.savez(content, x=part.tensor.numpy(), y=part.targets.numpy())
            return [(records, content.getvalue(), _SECRET)]
        delimiter = DELIMITERS.get(data.delimiter or "", data.delimiter)
        files = [(records, file_part(Path(str(data.file)), self.splits.rows[indices], delimiter), _SECRET)]
        if data.columns is not None:
            files.append((node.columns, Path(data.columns).read_bytes(), _PLAIN))
        return files

    @property
    def _suffix(self) -> str:
        """The ending of a node's file."""
        return ".npz" if self.splits.table is None else Path(str(self.experiment.data.file)).suffix.lower()
