"""Where cells are measured: the device, the data, and what is said of the machine."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fedcdp.config.experiment import Experiment
from fedcdp.data.dataset import Splits
from fedcdp.studies.reproduce.catalogue import Cell
from fedcdp.training.autotune import machine
from fedcdp.training.prepared import load_splits


@dataclass(frozen=True)
class Place:
    """Where to measure; goes to worker processes as it is."""

    out: Path
    """The folder of result files."""
    data_dir: Path | None = None
    run: dict[str, Any] = field(default_factory=dict)
    """Settings of the section `run`: the device, the engine, ..."""

    @property
    def device(self) -> str:
        """Where tensors live."""
        return str(self.run.get("device", "cpu"))

    def scratch(self, table: str, cell: Cell) -> Path:
        """A folder of a cell's own while it runs: what a killed one had done is there for the next try."""
        return self.out / "running" / table / cell.slug

    def forget(self, table: str, cell: Cell) -> None:
        """Clear a cell's folder away, and what is empty above it."""
        folder = self.scratch(table, cell)
        shutil.rmtree(folder, ignore_errors=True)
        for parent in (folder.parent, folder.parent.parent):
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()

    def arrays(self, table: str, cell: Cell) -> Path:
        """The file for a cell's pictures."""
        return self.out / "arrays" / f"{table}-{cell.slug}.npz"

    def splits(self, experiment: Experiment) -> Splits:
        """The data of an experiment, loaded once a process."""
        settings = experiment.data
        if settings.dataset is None:
            return load_splits(experiment, self.data_dir, quiet=True)
        return _loaded(settings.dataset, settings.split_seed, self.data_dir)

    def machine(self) -> str:
        """The machine, in words."""
        device = torch.device(self.device)
        name = str(machine(device)["device"])
        if device.type == "cuda":
            name += ", tf32" if self.run.get("tf32") else ""
        else:
            name += f", {os.cpu_count()} cores, one thread a cell"
        return f"{name}, torch {torch.__version__}"


@lru_cache(maxsize=2)  # pictures are large
def _loaded(dataset: str, split_seed: int, data_dir: Path | None) -> Splits:
    from fedcdp.data import load

    return load(dataset, data_dir, split_seed=split_seed, quiet=True)
