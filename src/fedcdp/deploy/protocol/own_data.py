"""A client's own data: by a function of the user's, from a file, or one partition of a benchmark (tests and demonstrations).

In its node configuration a client names one of

- `data-function = "package.module:function"`, called with Flower's context, which returns inputs and labels;
- `data = "records.npz"` (or .csv), whose labels are whole numbers that mean the same at every client;
- `dataset = "mnist5k"`, `partition-id`, `num-partitions`, and how it is dealt: `partition`, `records`,
  `classes-per-client`, `alpha`, `split-seed`, `scaling`, `partition-seed`. Client k then holds exactly the records, in
  the same order, that the simulator gives to its client k.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedcdp.data import load
from fedcdp.data.dataset import Dataset
from fedcdp.data.own_files import as_inputs, integers_if_all, read_arrays
from fedcdp.data.partition import partition
from fedcdp.errors import DataError

Inputs = Tensor | ArrayLike
DataFunction = Callable[[Any], tuple[Inputs, Inputs]]
NodeConfig = Mapping[str, Any]

_SOURCES = ("data-function", "data", "dataset")


def records_of(data: DataFunction | None, context: Any) -> Dataset:
    """The records of this client: what the function gives, or what its node configuration names."""
    config: NodeConfig = context.node_config
    given = [name for name in _SOURCES if name in config]
    if data is None and len(given) != 1:
        raise DataError(f"node configuration: give one of {', '.join(_SOURCES)}, not {' and '.join(given) or 'none'}")
    if data is not None:
        return _checked(*data(context))
    if given == ["dataset"]:
        return _part(config)
    if given == ["data"]:
        return _file(Path(str(config["data"])))
    return _checked(*imported(str(config["data-function"]))(context))


def imported(path: str) -> Any:
    """What `package.module:name` stands for."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a module of the user's may raise anything
        raise DataError(f"{path} cannot be imported: {error}") from error


def _part(config: NodeConfig) -> Dataset:
    for name in ("partition-id", "num-partitions"):
        if type(config.get(name)) is not int:
            raise DataError(f"node configuration: {name} must be a whole number beside dataset")
    chosen = {"split_seed": int(config.get("split-seed", 0)), "scaling": config.get("scaling", "training")}
    splits = load(str(config["dataset"]), quiet=True, **chosen)
    federation = partition(
        splits,
        clients=config["num-partitions"],
        scheme=str(config.get("partition", "iid")),
        records=config.get("records"),
        classes_per_client=int(config.get("classes-per-client", 2)),
        alpha=float(config.get("alpha", 0.5)),
        seed=int(config.get("partition-seed", 0)),
    )
    return federation.train.take(torch.from_numpy(federation.indices(config["partition-id"])))


def _file(path: Path) -> Dataset:
    inputs, labels = read_arrays(path)
    values, _ = as_inputs(inputs, path)
    return _checked(values, labels)


def _checked(inputs: Inputs, labels: Inputs) -> Dataset:
    """Records as every client must give them. Labels are not numbered anew: they must mean the same everywhere."""
    values = torch.as_tensor(inputs if isinstance(inputs, Tensor) else np.asarray(inputs), dtype=torch.float32)
    given = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    if given.dtype.kind == "U" and given.ndim == 1:  # of a .csv
        given = integers_if_all(given)
    if given.ndim != 1 or given.dtype.kind not in "iuf" or not np.array_equal(given, given.astype(np.int64)):
        raise DataError(f"labels are {given.dtype} of shape {given.shape}: one whole number a record is needed")
    if not bool(torch.isfinite(values).all()):
        raise DataError("inputs hold a value that is not finite")
    return Dataset(values, torch.from_numpy(given.astype(np.int64)), int(given.max(initial=0)) + 1)
